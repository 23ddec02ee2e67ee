//! Which claimed event may be sent now, and what its outcome means for the events of its key behind it.
//! Pure: no clock, no I/O, no async. Between `Source::claim` and `Sink::send`, and back.
//!
//! A lane is the run of one key's events in hand. It goes on after success only; anything else ends it.

use crate::planted::{self, Bug};
use crate::{Claimed, Settlement, Verdict};
use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};

/// The events in hand, by key.
#[derive(Debug)]
pub struct Lanes {
    slots: Vec<Slot>,
    free: Vec<u32>,
    lanes: Vec<Lane>,
    free_lanes: Vec<u32>,
    by_key: HashMap<u64, u32, KeyIsHash>,
    /// Slots that could be sent, oldest first, each with the round it was put here for; outdated ones are skipped.
    ready: VecDeque<(u32, u32)>,
    settled: Vec<Settlement>,
    /// Lanes touched by the running call, resolved at its end.
    touched: Vec<u32>,
    events: usize,
    bytes: usize,
    in_flight: usize,
    pipelined: bool,
    draining: bool,
}

/// Events to send together; comes back in [`Lanes::complete`].
#[derive(Debug)]
pub struct Batch {
    slots: Vec<u32>,
    /// In the order in which they are to be sent; an outcome is told for each.
    pub events: Vec<Claimed>,
}

impl Batch {
    /// Takes the events at `indices` (ascending) out, into a batch of their own.
    pub fn split_off(&mut self, indices: &[usize]) -> Batch {
        let mut taken = Batch { slots: Vec::new(), events: Vec::new() };
        for &index in indices.iter().rev() {
            taken.slots.push(self.slots.remove(index));
            taken.events.push(self.events.remove(index));
        }
        taken.slots.reverse();
        taken.events.reverse();
        taken
    }
}

/// What became of one event of a batch.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Acknowledged.
    Published,
    /// `Retry` or `Dead`: an answer about this event.
    Verdict(Verdict),
    /// No answer about this event (outage, unknown): to be sent again.
    Again,
}

#[derive(Debug)]
struct Slot {
    claimed: Option<Claimed>,
    state: State,
    lane: u32,
    next: u32,
    round: u32,
}

#[derive(Debug, PartialEq)]
enum State {
    Queued,
    Sent,
    Done,
    Failed(Verdict),
    Again,
}

#[derive(Debug)]
struct Lane {
    key: u64,
    /// `NONE`: the lane is free.
    head: u32,
    tail: u32,
    in_flight: u32,
    /// Something came back that was not a success: nothing more is sent until the lane is resolved.
    stuck: bool,
}

const NONE: u32 = u32::MAX;

impl Lanes {
    /// `pipelined`: the sink keeps the order of a key across calls, so a key may have several events in flight.
    pub fn new(pipelined: bool) -> Lanes {
        Lanes {
            slots: Vec::new(),
            free: Vec::new(),
            lanes: Vec::new(),
            free_lanes: Vec::new(),
            by_key: HashMap::default(),
            ready: VecDeque::new(),
            settled: Vec::new(),
            touched: Vec::new(),
            events: 0,
            bytes: 0,
            in_flight: 0,
            pipelined,
            draining: false,
        }
    }

    /// Events in hand.
    pub fn events(&self) -> usize {
        self.events
    }
    /// Bytes in hand.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
    /// Events in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Takes claimed events in, each behind those of its key.
    pub fn admit(&mut self, events: Vec<Claimed>) {
        for claimed in events {
            self.events += 1;
            self.bytes += claimed.event.bytes();
            let lane = self.lane(claimed.event.key());
            let slot = self.slot(claimed, lane);
            let l = &mut self.lanes[lane as usize];
            let (first, stuck) = (l.head == NONE, l.stuck);
            if first {
                l.head = slot;
            } else {
                self.slots[l.tail as usize].next = slot;
            }
            l.tail = slot;
            if self.draining {
                self.touched.push(lane);
            } else if !stuck && (first || self.pipelined) {
                self.ready.push_back((slot, self.slots[slot as usize].round));
            }
        }
        self.resolve_touched();
    }

    /// The lane of a key; one without a head where the key has none yet.
    fn lane(&mut self, key: u64) -> u32 {
        let entry = match self.by_key.entry(key) {
            Entry::Occupied(lane) => return *lane.get(),
            Entry::Vacant(entry) => entry,
        };
        let new = Lane { key, head: NONE, tail: NONE, in_flight: 0, stuck: false };
        *entry.insert(place(&mut self.lanes, &mut self.free_lanes, new))
    }

    fn slot(&mut self, claimed: Claimed, lane: u32) -> u32 {
        let round = self.free.last().map_or(0, |slot| self.slots[*slot as usize].round);
        let new = Slot { claimed: Some(claimed), state: State::Queued, lane, next: NONE, round };
        place(&mut self.slots, &mut self.free, new)
    }

    /// The next batch: at most `events_max` events and, unless it is a single one, `bytes_max` bytes.
    pub fn next_batch(&mut self, events_max: usize, bytes_max: usize) -> Option<Batch> {
        let mut batch = Batch { slots: Vec::new(), events: Vec::new() };
        let mut bytes = 0;
        while let Some(&(slot, round)) = self.ready.front() {
            let s = &mut self.slots[slot as usize];
            let current = s.round == round && s.state == State::Queued;
            let Some(claimed) = s.claimed.as_ref().filter(|_| current) else {
                self.ready.pop_front();
                continue;
            };
            let lane = &mut self.lanes[s.lane as usize];
            if lane.stuck {
                self.ready.pop_front();
                continue;
            }
            bytes += claimed.event.bytes();
            if batch.slots.len() == events_max || (bytes > bytes_max && !batch.slots.is_empty()) {
                break;
            }
            s.state = State::Sent;
            lane.in_flight += 1;
            batch.slots.push(slot);
            batch.events.push(claimed.clone());
            self.ready.pop_front();
        }
        self.in_flight += batch.slots.len();
        (!batch.slots.is_empty()).then_some(batch)
    }

    /// Takes a batch back with one outcome per event, in its order.
    pub fn complete(&mut self, batch: &Batch, outcomes: Vec<Outcome>) {
        assert_eq!(batch.slots.len(), outcomes.len(), "one outcome per message");
        self.in_flight -= batch.slots.len();
        for (&slot, outcome) in batch.slots.iter().zip(outcomes) {
            let s = &mut self.slots[slot as usize];
            debug_assert_eq!(s.state, State::Sent);
            let lane = &mut self.lanes[s.lane as usize];
            lane.in_flight -= 1;
            lane.stuck |= outcome != Outcome::Published;
            s.state = match outcome {
                Outcome::Published => State::Done,
                Outcome::Verdict(verdict) => State::Failed(verdict),
                Outcome::Again => State::Again,
            };
            self.touched.push(s.lane);
        }
        self.resolve_touched();
    }

    /// Sends nothing more: what is not in flight is released now, the rest as it comes back.
    pub fn drain(&mut self) {
        self.draining = true;
        self.ready.clear();
        self.touched.extend(self.slots.iter().filter(|s| s.claimed.is_some()).map(|s| s.lane));
        self.resolve_touched();
    }

    /// The verdicts since the last call. Those of one lane that belong together are never split over two calls.
    pub fn settled(&mut self) -> Vec<Settlement> {
        std::mem::take(&mut self.settled)
    }

    fn resolve_touched(&mut self) {
        let mut touched = std::mem::take(&mut self.touched);
        for lane in touched.drain(..) {
            self.resolve(lane);
        }
        self.touched = touched; // keeps its memory
    }

    /// Settles the lane's head as far as it is decided.
    fn resolve(&mut self, lane: u32) {
        while let Some((head, idle)) = self.head(lane) {
            match self.slots[head as usize].state {
                State::Done => self.pop(lane, Verdict::Published),
                State::Failed(_) if idle => {
                    let state = std::mem::replace(&mut self.slots[head as usize].state, State::Queued);
                    let State::Failed(verdict) = state else { unreachable!("matched above") };
                    return self.end(lane, verdict);
                }
                State::Again | State::Queued if idle && self.draining => {
                    let published = planted::is(Bug::DrainPublishes);
                    return self.end(lane, if published { Verdict::Published } else { Verdict::Release });
                }
                State::Again if idle => return self.restart(lane),
                State::Queued if !self.pipelined && idle => {
                    self.ready.push_back((head, self.slots[head as usize].round));
                    return;
                }
                _ => return,
            }
        }
    }

    /// The head gets `verdict`. Right behind a dead event, what was acknowledged stays so and what is dead too stays
    /// dead, since nothing will be sent before them any more; from the first that is neither, all are released, to be
    /// sent after it.
    fn end(&mut self, lane: u32, verdict: Verdict) {
        let mut decided = matches!(verdict, Verdict::Dead { .. });
        self.pop(lane, verdict);
        if planted::is(Bug::LaneGoesOn) && self.head(lane).is_some() {
            return self.restart(lane);
        }
        while let Some((head, _)) = self.head(lane) {
            let verdict = match &self.slots[head as usize].state {
                State::Done if decided => Verdict::Published,
                State::Failed(dead @ Verdict::Dead { .. }) if decided => dead.clone(),
                _ => Verdict::Release,
            };
            decided &= verdict != Verdict::Release;
            self.pop(lane, verdict);
        }
    }

    /// Everything in the lane is sent again, in order: also what was acknowledged behind the head, since the head
    /// goes again too and the consumer shall not see it last.
    fn restart(&mut self, lane: u32) {
        let lane = &mut self.lanes[lane as usize];
        lane.stuck = false;
        let mut slot = lane.head;
        while slot != NONE {
            let s = &mut self.slots[slot as usize];
            s.state = State::Queued;
            s.round = s.round.wrapping_add(1);
            if self.pipelined || slot == lane.head {
                self.ready.push_back((slot, s.round));
            }
            slot = s.next;
        }
    }

    /// The head of a lane, and whether nothing of the lane is in flight; none where the lane is free by now.
    fn head(&self, lane: u32) -> Option<(u32, bool)> {
        let lane = &self.lanes[lane as usize];
        (lane.head != NONE).then_some((lane.head, lane.in_flight == 0))
    }

    fn pop(&mut self, lane: u32, verdict: Verdict) {
        let l = &mut self.lanes[lane as usize];
        let slot = l.head;
        let s = &mut self.slots[slot as usize];
        let claimed = s.claimed.take().expect("a slot in a lane is in use");
        s.round = s.round.wrapping_add(1);
        l.head = s.next;
        if l.head == NONE {
            self.by_key.remove(&l.key);
            self.free_lanes.push(lane);
        }
        self.free.push(slot);
        self.events -= 1;
        self.bytes -= claimed.event.bytes();
        self.settled.push(Settlement { ticket: claimed.ticket, verdict });
    }
}

/// Puts it where something was before, or at the end.
fn place<T>(all: &mut Vec<T>, free: &mut Vec<u32>, new: T) -> u32 {
    if let Some(index) = free.pop() {
        all[index as usize] = new;
        return index;
    }
    all.push(new);
    u32::try_from(all.len() - 1).expect("fewer than 2^32 events in hand")
}

/// Keys are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KeyIsHash;

/// See [`KeyIsHash`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SameHash(u64);

impl std::hash::BuildHasher for KeyIsHash {
    type Hasher = SameHash;
    fn build_hasher(&self) -> SameHash {
        SameHash::default()
    }
}
impl std::hash::Hasher for SameHash {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = n;
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64")
    }
}

//! What must hold, checked where it happens: at every send, delivery and record, and at the end. The first
//! violation ends the run.

use crate::Kind;
use crate::plan::SinkKind;
use crate::process::Process;
use crate::world::{Info, Mark, Nature, World, millis};
use postbox_engine::{Changes, DeadPolicy, HeldChange, HeldState, Message, SendError};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

/// What went wrong, in one sentence.
#[derive(Clone, Debug)]
pub(crate) struct Violation(pub(crate) String);

/// What happened: a hash of all, and the last steps.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    pub(crate) hash: u64,
    pub(crate) steps: u64,
    last: VecDeque<(u64, Kind, u64, u64, u64)>,
}

const TRACE_MAX: usize = 60;

impl Trace {
    pub(crate) fn lines(&self) -> Vec<String> {
        let line = |&(at, kind, who, a, b): &(u64, Kind, u64, u64, u64)| format!("{at:>7} ms  p{who} {kind:?} {a} {b}");
        self.last.iter().map(line).collect()
    }
}

impl World {
    /// A step of the trace.
    pub(crate) fn note(&mut self, kind: Kind, who: u64, a: u64, b: u64) {
        let at = self.now();
        let trace = &mut self.trace;
        trace.steps += 1;
        for x in [at, kind as u64, who, a, b] {
            trace.hash = (trace.hash ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        }
        if trace.last.len() == TRACE_MAX {
            trace.last.pop_front();
        }
        trace.last.push_back((at, kind, who, a, b));
    }

    pub(crate) fn violated(&mut self, what: impl Into<String>) {
        if self.violation.is_none() {
            self.violation = Some(Violation(what.into()));
        }
    }

    fn require(&mut self, holds: bool, what: impl FnOnce(&World) -> String) {
        if !holds && self.violation.is_none() {
            self.violation = Some(Violation(what(self)));
        }
    }

    /// A relay starts a send.
    pub(crate) fn check_send(&mut self, process: &Process, ids: &[usize], batch: &[Message]) {
        let (now, db_now, instance, epoch) = (self.now(), self.db_now(), process.instance, process.epoch.load(Relaxed));
        // The epoch may be newer: an acquire that it gave up took effect late. The lease is its own all the same.
        let holds = self.lease.owner == Some(instance) && db_now < self.lease.until;
        self.require(holds, |w| format!("p{instance} sends without the lease: {:?}, its time is {db_now}", w.lease));
        let plan = &self.plan;
        let fits = ids.len() <= plan.batch_max;
        self.require(fits && !ids.is_empty(), |_| format!("p{instance} sends a batch of {} messages", ids.len()));
        self.stats.sends += 1;
        for (&i, message) in ids.iter().zip(batch) {
            let info = &self.events[i];
            let (id, key) = (info.event.id(), info.key);
            let row = info.held;
            self.note(Kind::Send, instance, id.cast_unsigned(), epoch);
            let info = &self.events[i];
            let same = message.body() == info.event.payload() && message.event.event_id() == info.event.event_id();
            let available = info.available_at <= db_now;
            let due = !row.is_some_and(|row| row.state == HeldState::Retry && row.due > db_now);
            let rested = !info.not_before.is_some_and(|(e, until)| e == epoch && now < until);
            let open = !info.published() && !info.dead();
            let trouble = self.keys[key].trouble;
            let needed = !info.acknowledged.is_some_and(|(e, step)| {
                e == epoch && !(self.plan.sink == SinkKind::Pipelined && trouble.0 == epoch && trouble.1 >= step)
            });
            let free = self.plan.sink == SinkKind::Pipelined || self.keys[key].in_flight != Some(instance);
            let blocker = info.place.filter(|_| self.plan.policy == DeadPolicy::Block).and_then(|place| {
                self.keys[key].order[..place].iter().copied().find(|&earlier| self.events[earlier].dead())
            });
            self.require(same, |_| format!("event {id} is not sent as it was written"));
            self.require(available, |_| format!("event {id} is sent before it is available"));
            self.require(due && rested, |_| format!("event {id} is sent again before its time"));
            self.require(open, |_| format!("event {id} is sent although it is recorded as published or dead"));
            self.require(needed, |_| format!("event {id} is sent again by the relay that saw it acknowledged"));
            self.require(free, |_| format!("event {id} is sent while another of key {key} is in flight"));
            self.require(blocker.is_none(), |_| format!("event {id} is sent behind a dead event of its key"));
            self.keys[key].in_flight = Some(instance);
            self.events[i].sent_at = self.trace.steps;
        }
    }

    /// The broker takes a message.
    pub(crate) fn accept(&mut self, i: usize) {
        self.deliveries += 1;
        self.stats.deliveries += 1;
        let at = self.deliveries;
        let info = &mut self.events[i];
        let (id, key, place) = (info.event.id(), info.key, info.place);
        info.deliveries += 1;
        info.last_at = at;
        let first = info.deliveries == 1;
        if first {
            info.first_at = at;
        } else {
            self.stats.duplicates += 1;
        }
        self.note(Kind::Accept, 0, id.cast_unsigned(), key as u64);
        let Some(place) = place.filter(|_| first) else { return };
        let mut expected = self.keys[key].expected;
        while expected < place && self.excused(&self.events[self.keys[key].order[expected]]) {
            expected += 1;
        }
        if expected < place {
            let earlier = self.events[self.keys[key].order[expected]].event.id();
            self.violated(format!("event {id} reached the broker before event {earlier} of its key {key}"));
        }
        self.keys[key].expected = expected.max(place + 1);
    }

    /// Events behind it may be delivered before it, or without it: it is there already, or (to be) dead, or it
    /// failed alone while they were in flight behind it.
    fn excused(&self, info: &Info) -> bool {
        info.deliveries > 0 || info.lone || self.may_be_dead(info)
    }
    fn may_be_dead(&self, info: &Info) -> bool {
        info.rejected || info.failures >= self.plan.attempts_max || info.nature == Nature::Unroutable
    }

    /// The relay sees the outcomes of a send.
    pub(crate) fn returned(&mut self, process: &Process, ids: &[usize], results: &[Result<(), SendError>]) {
        let (epoch, now, clock) = (process.epoch.load(Relaxed), self.now(), self.plan.clock);
        self.landed(ids);
        for (&i, result) in ids.iter().zip(results) {
            let id = self.events[i].event.id().cast_unsigned();
            self.note(Kind::Answer, process.instance, id, u64::from(result.is_ok()));
            let step = self.trace.steps;
            // Behind another failed event of its key its own answer does not count: it goes again as if never tried.
            let trouble = self.keys[self.events[i].key].trouble;
            let head = (trouble.0 != epoch || trouble.1 < self.events[i].sent_at) && !self.has_unroutable(i);
            if result.is_err() {
                self.forget_pauses(self.events[i].key);
            }
            let info = &mut self.events[i];
            match result {
                // What is acknowledged behind a failed event of its key, in flight with it, goes again after it.
                Ok(()) => info.acknowledged = Some((epoch, info.sent_at)),
                Err(error) => {
                    self.keys[info.key].trouble = (epoch, step);
                    // The database waits by its own clock, which may be the faster one.
                    let pause =
                        error.retry_after.filter(|_| head).map(|pause| millis(pause) * 1_000 / clock.max(1_000));
                    info.not_before = pause.map(|pause| (epoch, now + pause));
                }
            }
        }
    }

    /// An event of its key fails without being sent.
    fn has_unroutable(&self, i: usize) -> bool {
        let key = self.events[i].key;
        self.events.iter().any(|info| info.key == key && info.nature == Nature::Unroutable)
    }

    /// Another event of the key failed: what failed in flight with it may be released.
    fn forget_pauses(&mut self, key: usize) {
        for info in self.events.iter_mut().filter(|info| info.key == key) {
            if !info.held.is_some_and(|row| row.state == HeldState::Retry) {
                info.not_before = None;
            }
        }
    }

    fn landed(&mut self, ids: &[usize]) {
        for &i in ids {
            let key = self.events[i].key;
            self.keys[key].in_flight = None;
        }
    }

    /// A send was given up without its outcomes.
    pub(crate) fn given_up(&mut self, ids: &[usize]) {
        self.landed(ids);
        for &i in ids {
            let key = self.events[i].key;
            self.keys[key].trouble = (self.lease.epoch, self.trace.steps);
        }
    }

    pub(crate) fn check_fence(&mut self, epoch: u64) {
        let current = self.lease.epoch;
        self.require(epoch == current, |_| format!("a record of epoch {epoch} was taken in epoch {current}"));
    }

    pub(crate) fn check_forward(&mut self, old: Mark, new: Mark) {
        self.require(new >= old, |_| format!("the cursor goes back from {old:?} to {new:?}"));
    }

    /// The cursor passes an event.
    pub(crate) fn check_passed(&mut self, i: usize) {
        let info = &self.events[i];
        let id = info.event.id();
        let known = info.deliveries > 0 || info.held.is_some();
        self.require(known, |_| format!("the cursor passes event {id}, which is neither delivered nor held: lost"));
    }

    pub(crate) fn check_counts(&mut self, changes: &Changes<Mark>, passed: u32, id_max: i64) {
        let right = changes.events == passed && (passed == 0 || changes.max_id == id_max);
        let (events, max_id) = (changes.events, changes.max_id);
        self.require(right, |_| {
            format!("the cursor counts {events} up to {max_id}, it passes {passed} up to {id_max}")
        });
    }

    /// A held row is written.
    pub(crate) fn check_held(&mut self, i: usize, change: &HeldChange) {
        let info = &self.events[i];
        let (id, state, attempts) = (info.event.id(), change.state, change.attempts);
        let answers = info.failures + u32::from(info.rejected);
        let delivered = info.deliveries > 0;
        let (may_be_dead, reopened) = (self.may_be_dead(info), info.published() || info.dead());
        let failed = info.failures > 0;
        let reason = match state {
            HeldState::Done => delivered,
            HeldState::Dead => may_be_dead,
            HeldState::Retry => failed,
            HeldState::Waiting | HeldState::Delayed | HeldState::Replay => true,
        };
        self.require(reason, |_| format!("event {id} is held as {state:?} without a reason"));
        let spent = attempts <= answers;
        self.require(spent, |_| {
            format!("event {id} has spent {attempts} attempts, the broker answered {answers} times")
        });
        // The same change again is a repetition, which is harmless.
        let open = !reopened || matches!(state, HeldState::Done | HeldState::Dead);
        self.require(open, |_| format!("event {id} was published or dead, and is held again as {state:?}"));
    }

    /// Everything is published or visibly dead, or waits behind a dead event by policy.
    pub(crate) fn unsettled(&self) -> Vec<i64> {
        let blocked = |info: &Info| {
            self.plan.policy == DeadPolicy::Block
                && self.events.iter().any(|other| other.key == info.key && other.dead())
        };
        let settled = |info: &Info| match info.held.map(|row| row.state) {
            None | Some(HeldState::Done | HeldState::Dead) => info.passed,
            Some(HeldState::Waiting) => info.passed && blocked(info),
            Some(_) => false,
        };
        self.events.iter().filter(|info| info.committed && !settled(info)).map(|info| info.event.id()).collect()
    }

    /// At the end: nothing lost, and what overtook a failed event came again behind it.
    pub(crate) fn check_end(&mut self) {
        for i in 0..self.events.len() {
            let info = &self.events[i];
            let (id, key, first) = (info.event.id(), info.key, info.first_at);
            let fine = !info.committed || info.deliveries > 0 || info.held.is_some();
            self.require(fine, |_| format!("event {id} is lost"));
            let info = &self.events[i];
            let Some(place) = info.place.filter(|_| info.lone && info.deliveries > 0 && !self.may_be_dead(info)) else {
                continue;
            };
            let overtook = |&&later: &&usize| {
                let later = &self.events[later];
                later.deliveries > 0 && later.last_at < first && !self.may_be_dead(later)
            };
            let last = self.keys[key].order[place..].iter().find(overtook).copied();
            if let Some(later) = last {
                let later = self.events[later].event.id();
                self.violated(format!("event {later} overtook event {id}, which failed, and did not come again"));
            }
        }
    }
}

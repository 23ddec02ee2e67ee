//! The outbox in memory, pure: the buffer of the log sources, the reference model of the tests, and the fake
//! database of the simulator. It alone decides which event may go next and when the cursor may pass.

use crate::lanes::KeyIsHash;
use crate::log::{HeldEvent, HeldQuery, Loaded, LogPage};
use crate::planted::{self, Bug};
use crate::{ClaimLimit, Claimed, Event, Settlement, SourceError, SourceErrorKind, Verdict};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// What a dead event does to the events of its key behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeadPolicy {
    /// They go on.
    #[default]
    Skip,
    /// They wait for an operator.
    Block,
}

/// The state of an event that the cursor has passed but that was not published then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeldState {
    /// Failed; tried again when due.
    Retry,
    /// Behind a failed event of its key.
    Waiting,
    /// Not available before it is due.
    Delayed,
    /// Never again without an operator.
    Dead,
    /// Asked for again by an operator.
    Replay,
    /// Published after all.
    Done,
}

impl HeldState {
    /// As it stands in held rows, whatever the database.
    pub fn name(self) -> &'static str {
        match self {
            HeldState::Retry => "retry",
            HeldState::Waiting => "waiting",
            HeldState::Delayed => "delayed",
            HeldState::Dead => "dead",
            HeldState::Replay => "replay",
            HeldState::Done => "done",
        }
    }
}

/// From its [`name`](HeldState::name) in a held row. A word that is none of ours is refused, whatever the database: taken
/// for another state, the event could go out of turn or never.
impl std::str::FromStr for HeldState {
    type Err = SourceError;
    fn from_str(name: &str) -> Result<HeldState, SourceError> {
        use HeldState::{Dead, Delayed, Done, Replay, Retry, Waiting};
        [Retry, Waiting, Delayed, Dead, Replay, Done].into_iter().find(|state| state.name() == name).ok_or_else(|| {
            let message = format!(
                "a held event has the state {name:?}, which this postbox does not know: use the newer one that wrote it"
            );
            SourceError::new(SourceErrorKind::Refused, message)
        })
    }
}

/// A held row to write: inserted, or updated when the event is held already.
#[derive(Clone, Debug)]
pub struct HeldChange {
    /// The event that the row is about.
    pub event: Event,
    /// What the row says from now on.
    pub state: HeldState,
    /// Answers about the event so far; what is never tried or got no answer is not counted.
    pub attempts: u32,
    /// From the database's now; zero where it does not matter.
    pub due: Duration,
    /// What the destination said last, for people.
    pub error: Option<Arc<str>>,
    /// By when the relay had handed the event to the sink; `None` when that is not known, or has not changed.
    pub sent: Option<Instant>,
}

impl HeldChange {
    /// An event in a state, of which nothing else is to be said.
    pub fn new(event: Event, state: HeldState) -> HeldChange {
        HeldChange { event, state, attempts: 0, due: Duration::ZERO, error: None, sent: None }
    }
}

/// What settling changes in the database, all or none.
#[derive(Clone, Debug)]
pub struct Changes<M> {
    /// The cursor's new position, if it moves.
    pub mark: Option<M>,
    /// Events that the cursor passes by this move.
    pub events: u32,
    /// The greatest event id among them; zero without any.
    pub max_id: i64,
    /// By when the relay had handed all of them to the sink that it has handed over; grows from move to move. `None` as
    /// long as nothing was sent.
    pub sent: Option<Instant>,
    /// Held rows to insert or to update.
    pub held: Vec<HeldChange>,
}

/// Events between the log and the relay. `M` is a position in the log.
#[derive(Debug)]
pub struct Backlog<M> {
    policy: DeadPolicy,
    /// Read and not passed yet, oldest first.
    pages: VecDeque<Page<M>>,
    /// Ticket of the next event read.
    next: u64,
    /// Ticket of the first event that no claim has looked at.
    fresh: u64,
    /// Claimed once and released: they go before fresh ones.
    again: BTreeSet<u64>,
    /// Keys in trouble.
    keys: HashMap<u64, Key, KeyIsHash>,
    /// Keys whose waiting rows may go.
    open: BTreeSet<u64>,
    /// Held events in the relay's hands, by ticket.
    held: BTreeMap<u64, HeldEvent>,
    next_held: u64,
    /// Keys with verdicts on held events since held events were asked for.
    judged: BTreeSet<u64>,
    /// Changes of rows that are held already.
    changes: Vec<HeldChange>,
    /// Of the pages here, and of those that the last changes passed.
    here: Size,
    leaving: Size,
    /// By when all that was sent of the pages passed had been handed over.
    sent: Option<Instant>,
}

/// Events and their bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Size {
    events: usize,
    bytes: usize,
}

#[derive(Debug)]
struct Page<M> {
    first: u64,
    entries: Vec<Entry>,
    /// Entries whose fate is not decided.
    undecided: usize,
    bytes: usize,
    /// By when the entries that were sent had been handed over; with any, reading the page again would send it again.
    sent: Option<Instant>,
    mark: M,
    /// Rows to insert when the cursor passes this page.
    held: Vec<HeldChange>,
    max_id: i64,
}

/// An event of a page: waiting to be claimed, in the relay's hand, or decided.
#[derive(Debug)]
struct Entry {
    /// `None`: decided.
    event: Option<Event>,
    in_hand: bool,
}

#[derive(Debug, Default)]
struct Key {
    /// Held rows of this key that hold later events up and are not in hand.
    rows: u32,
    /// The first of them waits for its time or for an operator.
    blocked: bool,
}

/// Tickets of held events have this bit.
const HELD: u64 = 1 << 63;

impl<M: Clone> Backlog<M> {
    /// Nothing read yet, nothing held.
    pub fn new(policy: DeadPolicy) -> Backlog<M> {
        Backlog {
            policy,
            pages: VecDeque::new(),
            next: 0,
            fresh: 0,
            again: BTreeSet::new(),
            keys: HashMap::default(),
            open: BTreeSet::new(),
            held: BTreeMap::new(),
            next_held: 0,
            judged: BTreeSet::new(),
            changes: Vec::new(),
            here: Size::default(),
            leaving: Size::default(),
            sent: None,
        }
    }

    /// Starts from what the held rows say; see [`Loaded`].
    pub fn load(&mut self, loaded: &Loaded) {
        for &(key, rows, blocked) in &loaded.keys {
            self.keys.insert(key, Key { rows, blocked });
            self.open_or_close(key);
        }
    }

    /// Events read and not passed by the cursor.
    pub fn events(&self) -> usize {
        self.here.events
    }

    /// Events read and not known to be recorded, and their bytes: those that the last `changes` passed count until the
    /// next call, since they are being written.
    pub fn unrecorded(&self) -> (usize, usize) {
        (self.here.events + self.leaving.events, self.here.bytes + self.leaving.bytes)
    }

    /// A page of the log, after all earlier ones.
    pub fn push(&mut self, page: LogPage<M>) {
        let LogPage { events, delays, mark } = page;
        let (first, undecided) = (self.next, events.len());
        let max_id = events.iter().map(Event::id).max().unwrap_or_default();
        self.next += events.len() as u64;
        let bytes = events.iter().map(Event::bytes).sum();
        self.here.events += undecided;
        self.here.bytes += bytes;
        let entries = events.into_iter().map(|event| Entry { event: Some(event), in_hand: false }).collect();
        self.pages.push_back(Page { first, entries, undecided, bytes, sent: None, mark, held: Vec::new(), max_id });
        for (index, delay) in delays.into_iter().filter(|_| !planted::is(Bug::DelayIgnored)) {
            let ticket = first + u64::from(index);
            let event = self.decide(ticket).expect("it was read just now");
            self.hold(ticket, HeldChange { due: delay, ..HeldChange::new(event, HeldState::Delayed) });
        }
    }

    /// Takes ready events: a prefix of each key's. Those of a key in trouble are put behind it instead.
    pub fn claim(&mut self, limit: ClaimLimit) -> Vec<Claimed> {
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while taken.len() < limit.events_max {
            let fresh_first = planted::is(Bug::FreshBeforeAgain) && self.fresh < self.next;
            let ticket = match self.again.first() {
                Some(&ticket) if !fresh_first => ticket,
                Some(_) => self.fresh,
                None if self.fresh < self.next => self.fresh,
                None => break,
            };
            let entry = entry(&mut self.pages, ticket).filter(|entry| !entry.in_hand);
            let Some((event, in_hand)) = entry.and_then(|e| Some((e.event.as_ref()?, &mut e.in_hand))) else {
                self.looked_at(ticket);
                continue;
            };
            if !self.keys.is_empty() && self.keys.contains_key(&event.key()) {
                self.looked_at(ticket);
                self.wait(ticket);
                continue;
            }
            bytes += event.bytes();
            if bytes > limit.bytes_max && !taken.is_empty() {
                break;
            }
            *in_hand = true;
            taken.push(Claimed { ticket, event: event.clone(), attempts: 0, replay: false });
            self.looked_at(ticket);
        }
        taken
    }

    fn looked_at(&mut self, ticket: u64) {
        if !self.again.remove(&ticket) {
            self.fresh = ticket + 1;
        }
    }

    /// What to ask the log's held rows for now.
    pub fn held_query(&mut self, limit: ClaimLimit) -> HeldQuery {
        self.judged = self.changes.iter().map(|change| change.event.key()).collect();
        HeldQuery {
            limit,
            open: self.open.iter().copied().collect(),
            skip: self.held.values().map(|h| h.event.id()).collect(),
        }
    }

    /// Keys have waiting rows that may go.
    pub fn has_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Takes held events that may go now, in id order. A key with verdicts since the question was asked is left out,
    /// since the answer does not know them: its rows would go again, too early, or before those released meanwhile.
    pub fn claim_held(&mut self, events: Vec<HeldEvent>) -> Vec<Claimed> {
        events.into_iter().filter_map(|held| self.claim_one_held(held)).collect()
    }

    fn claim_one_held(&mut self, held: HeldEvent) -> Option<Claimed> {
        let key = held.event.key();
        if self.judged.contains(&key) && !planted::is(Bug::HeldRowsStale) {
            return None;
        }
        match held.state {
            HeldState::Retry => self.row_taken(key),
            HeldState::Waiting if self.open.contains(&key) => self.row_taken(key),
            // Its time came while its key is in trouble: it queues up there.
            HeldState::Delayed if self.keys.contains_key(&key) => {
                self.keys.entry(key).or_default().rows += 1;
                let waits = HeldChange::new(held.event, HeldState::Waiting);
                self.change(HeldChange { attempts: held.attempts, ..waits });
                return None;
            }
            HeldState::Delayed | HeldState::Replay => {}
            HeldState::Waiting | HeldState::Dead | HeldState::Done => return None,
        }
        let ticket = HELD | self.next_held;
        self.next_held += 1;
        let replay = held.state == HeldState::Replay;
        let claimed = Claimed { ticket, event: held.event.clone(), attempts: held.attempts, replay };
        self.held.insert(ticket, held);
        Some(claimed)
    }

    /// Takes verdicts on events that had been handed to the sink by `sent`, if they ever were. Unknown tickets are
    /// ignored: a repetition changes nothing.
    pub fn settle(&mut self, settlements: &[Settlement], sent: Instant) {
        // What is released waits behind a failed event of its key, wherever that stands in the list.
        let decided = settlements.iter().filter(|s| s.verdict != Verdict::Release);
        let released = settlements.iter().filter(|s| s.verdict == Verdict::Release);
        for s in decided.chain(released) {
            if s.ticket & HELD == 0 {
                self.settle_fresh(s.ticket, &s.verdict, sent);
            } else if let Some(held) = self.held.remove(&s.ticket) {
                self.settle_held(held, &s.verdict, sent);
            }
        }
    }

    fn settle_fresh(&mut self, ticket: u64, verdict: &Verdict, sent: Instant) {
        let Some(entry) = entry(&mut self.pages, ticket).filter(|entry| entry.in_hand) else { return };
        if *verdict == Verdict::Release && !planted::is(Bug::ReleaseIsPublished) {
            entry.in_hand = false;
            if entry.event.as_ref().is_some_and(|event| self.keys.contains_key(&event.key())) {
                self.wait(ticket);
            } else {
                self.again.insert(ticket);
            }
            return;
        }
        let Some(event) = self.decide(ticket) else { return };
        if let Some(page) = page(&mut self.pages, ticket) {
            page.sent = page.sent.max(Some(sent));
        }
        if let Some(failed) = failed(event, verdict, sent) {
            self.hold(ticket, failed);
        }
    }

    fn settle_held(&mut self, held: HeldEvent, verdict: &Verdict, sent: Instant) {
        let HeldEvent { event, attempts, state } = held;
        let key = event.key();
        self.judged.insert(key);
        // Only the event that blocked its key frees it.
        let frees = state == HeldState::Retry;
        match verdict {
            Verdict::Published => {
                self.change(HeldChange { attempts, sent: Some(sent), ..HeldChange::new(event, HeldState::Done) });
                self.free(key, frees);
            }
            Verdict::Retry { .. } | Verdict::Dead { .. } => {
                match (verdict, self.policy) {
                    (Verdict::Dead { .. }, DeadPolicy::Skip) => self.free(key, frees),
                    _ => self.block(key),
                }
                failed(event, verdict, sent).into_iter().for_each(|failed| self.change(failed));
            }
            // Its row stands as it was, and will be found again.
            Verdict::Release if matches!(state, HeldState::Retry | HeldState::Waiting) => {
                self.keys.entry(key).or_default().rows += 1;
                self.open_or_close(key);
            }
            Verdict::Release => {}
        }
    }

    /// Before the lease is given away: what is undecided beside or before a sent event waits as a held row, so that the
    /// cursor passes what was sent, and the next relay does not send it again.
    pub fn hand_over(&mut self) {
        let Some(last) = self.pages.iter().rposition(|p| p.sent.is_some()) else { return };
        let end = self.pages[last].first + self.pages[last].entries.len() as u64;
        for ticket in self.pages[0].first..end {
            self.wait(ticket);
        }
    }

    /// What is to be written now, if anything: call `settle` or `push` first, then write it, all or none. What the call
    /// before returned is written by now.
    pub fn changes(&mut self) -> Option<Changes<M>> {
        let held = std::mem::take(&mut self.changes);
        let mut changes = Changes { mark: None, events: 0, max_id: 0, sent: None, held };
        self.leaving = Size::default();
        let decided = |page: &Page<M>| page.undecided == 0 || planted::is(Bug::CursorPassesUndecided);
        while self.pages.front().is_some_and(decided) {
            let page = self.pages.pop_front().expect("it was there just now");
            let passed = page.entries.len();
            self.here.events -= passed;
            self.here.bytes -= page.bytes;
            self.leaving.events += passed;
            self.leaving.bytes += page.bytes;
            changes.events += u32::try_from(passed).expect("a page has fewer than 2^32 events");
            changes.max_id = changes.max_id.max(page.max_id);
            self.sent = self.sent.max(page.sent);
            changes.held.extend(page.held);
            changes.mark = Some(page.mark);
        }
        changes.sent = self.sent;
        (changes.mark.is_some() || !changes.held.is_empty()).then_some(changes)
    }

    /// Marks an event as decided and hands it out; `None` when it was before.
    fn decide(&mut self, ticket: u64) -> Option<Event> {
        let page = page(&mut self.pages, ticket)?;
        let entry = page.entry(ticket)?;
        let event = entry.event.take()?;
        entry.in_hand = false;
        page.undecided -= 1;
        Some(event)
    }

    /// Puts an unclaimed event behind its key, which is in trouble.
    fn wait(&mut self, ticket: u64) {
        if let Some(event) = self.decide(ticket) {
            self.hold(ticket, HeldChange::new(event, HeldState::Waiting));
        }
    }

    /// A new held row, written when the cursor passes the event's page.
    fn hold(&mut self, ticket: u64, change: HeldChange) {
        let key = change.event.key();
        match change.state {
            HeldState::Retry => self.block(key),
            HeldState::Dead if self.policy == DeadPolicy::Block => self.block(key),
            HeldState::Waiting => self.keys.entry(key).or_default().rows += 1,
            _ => {}
        }
        let page = page(&mut self.pages, ticket).expect("an undecided event keeps its page");
        page.held.push(change);
    }

    fn change(&mut self, change: HeldChange) {
        let due = if planted::is(Bug::RetryBeforeDue) { Duration::ZERO } else { change.due };
        self.changes.push(HeldChange { due, ..change });
    }

    /// A row of this key holds it up until its time comes.
    fn block(&mut self, key: u64) {
        let k = self.keys.entry(key).or_default();
        k.rows += 1;
        k.blocked = true;
        self.open_or_close(key);
    }

    /// One of the key's held rows is in hand now. A retry goes on blocking its key until it is published.
    fn row_taken(&mut self, key: u64) {
        let k = self.keys.entry(key).or_default();
        k.rows = k.rows.saturating_sub(1);
        self.open_or_close(key);
    }

    fn free(&mut self, key: u64, frees: bool) {
        if let Some(k) = self.keys.get_mut(&key) {
            k.blocked &= !frees;
            self.open_or_close(key);
        }
    }

    fn open_or_close(&mut self, key: u64) {
        let Some(k) = self.keys.get(&key) else { return };
        if k.rows > 0 && !k.blocked && !planted::is(Bug::WaitingForgotten) {
            self.open.insert(key);
        } else {
            self.open.remove(&key);
        }
        if k.rows == 0 && !k.blocked {
            self.keys.remove(&key);
        }
    }
}

/// The row of an event whose verdict is that it failed.
fn failed(event: Event, verdict: &Verdict, sent: Instant) -> Option<HeldChange> {
    let (state, due, attempts, error) = match verdict {
        Verdict::Retry { after, attempts, error } => (HeldState::Retry, *after, *attempts, error),
        Verdict::Dead { attempts, error } => (HeldState::Dead, Duration::ZERO, *attempts, error),
        Verdict::Published | Verdict::Release => return None,
    };
    // One that has no route was never handed over.
    let sent = (attempts > 0).then_some(sent);
    Some(HeldChange { event, state, attempts, due, error: Some(error.clone()), sent })
}

fn page<M>(pages: &mut VecDeque<Page<M>>, ticket: u64) -> Option<&mut Page<M>> {
    let index = pages.partition_point(|p| p.first <= ticket).checked_sub(1)?;
    pages.get_mut(index)
}

fn entry<M>(pages: &mut VecDeque<Page<M>>, ticket: u64) -> Option<&mut Entry> {
    page(pages, ticket)?.entry(ticket)
}

impl<M> Page<M> {
    fn entry(&mut self, ticket: u64) -> Option<&mut Entry> {
        self.entries.get_mut(usize::try_from(ticket - self.first).ok()?)
    }
}

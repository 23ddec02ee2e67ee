//! The log source, whatever the database: a [`Backlog`] in memory, kept in step with a [`Log`] in a database.
//! It decides nothing about order or held events (the backlog does) and nothing about SQL (the log does).

use crate::backlog::{Backlog, Changes, DeadPolicy, HeldChange, HeldState};
use crate::planted::{self, Bug};
use crate::{
    Claim, ClaimLimit, Claimed, Event, RelayOptions, Settlement, Source, SourceError, SourceErrorKind, Verdict,
};
use std::fmt::Debug;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// An insert-only log of events in a database, with its cursor, its lease and its held rows.
pub trait Log: Send + Sync + 'static {
    /// A position in the log: all before it is published or held. Opaque to the engine.
    type Mark: Clone + Debug + Send + Sync + 'static;

    /// Tries once to take the lease, or to prolong our own under a new epoch; checks that the cursor may be trusted;
    /// and begins reading anew from the stored cursor. `Err(remaining)` inside: another relay holds it that long.
    fn acquire(&self) -> impl Future<Output = Result<Result<Duration, Duration>, SourceError>> + Send;
    /// See [`Source::renew`].
    fn renew(&self) -> impl Future<Output = Result<Duration, SourceError>> + Send;
    /// See [`Source::trouble`].
    fn trouble(&self, _: Option<&str>) {}
    /// See [`Source::release`].
    fn release(&self) -> impl Future<Output = Result<(), SourceError>> + Send;
    /// The keys in trouble, as the held rows tell it; called once after `acquire`.
    fn load(&self) -> impl Future<Output = Result<Loaded, SourceError>> + Send;
    /// The page after the one returned last, waiting until there is one (adaptive polling, a wake-up, ..). May
    /// return an empty page that only moves the mark. Safe to drop: what was read is returned by the next call.
    fn read(&self, limit: ClaimLimit) -> impl Future<Output = Result<LogPage<Self::Mark>, SourceError>> + Send;
    /// Held events that may be sent now: those whose time has come by the database's clock, and those waiting under
    /// an open key; in id order.
    fn held(&self, query: &HeldQuery) -> impl Future<Output = Result<HeldPage, SourceError>> + Send;
    /// Writes the changes in one statement or transaction, fenced by the lease's epoch. Calls that did not fail take
    /// effect in their order, those whose future was dropped too.
    fn record(&self, changes: &Changes<Self::Mark>) -> impl Future<Output = Result<(), SourceError>> + Send;
}

/// Consecutive events of the log, in its order.
#[derive(Clone, Debug)]
pub struct LogPage<M> {
    /// Oldest first; none when only the mark moves.
    pub events: Vec<Event>,
    /// Those that are not available yet: index in `events`, ascending, and for how long.
    pub delays: Vec<(u32, Duration)>,
    /// Where the log stands once all of them are passed.
    pub mark: M,
}

/// What the held rows say when a tenure begins.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// Per key with rows that hold later events of the key up (retry, waiting, and dead under policy block): how
    /// many such rows, and whether any of them must wait for its time or for an operator (retry, dead). Not the first
    /// alone: an event whose time came late waits with a smaller id behind one that failed.
    pub keys: Vec<(u64, u32, bool)>,
    /// Until the first of retry, delayed and replay is due; zero when one is.
    pub next_due: Option<Duration>,
}

/// Which held events to fetch.
#[derive(Clone, Debug)]
pub struct HeldQuery {
    /// How many at most.
    pub limit: ClaimLimit,
    /// Keys whose waiting events may go.
    pub open: Vec<u64>,
    /// Event ids in the relay's hands already.
    pub skip: Vec<i64>,
}

/// Held events that may go now.
#[derive(Clone, Debug, Default)]
pub struct HeldPage {
    /// In the order of their ids.
    pub events: Vec<HeldEvent>,
    /// Until the next of retry, delayed and replay is due, these here left out; zero when more are due now.
    pub next_due: Option<Duration>,
}

/// A held event with what its row says.
#[derive(Clone, Debug)]
pub struct HeldEvent {
    /// The event itself, as it stands in the outbox.
    pub event: Event,
    /// Answers about the event before now.
    pub attempts: u32,
    /// Why it is held.
    pub state: HeldState,
}

/// A [`Source`] over a [`Log`].
pub struct LogSource<L: Log> {
    log: L,
    policy: DeadPolicy,
    /// What its relay has in hand at most.
    hand: ClaimLimit,
    /// Locked for moments only, never across an await.
    inner: Mutex<Inner<L::Mark>>,
    /// One write at a time.
    writing: tokio::sync::Mutex<Writing<L::Mark>>,
    /// Something changed that a waiting claim should look at.
    changed: Notify,
    /// The log has answered once: what it refuses from then on is an outage, see `judged`.
    worked: AtomicBool,
}

/// What is being written, kept so that a dropped caller loses nothing.
struct Writing<M> {
    changes: Option<Changes<M>>,
    /// A write failed. It may still take effect, over a newer one of the same epoch: no other until the next epoch.
    failed: bool,
}

type Written<'a, M> = tokio::sync::MutexGuard<'a, Writing<M>>;

struct Inner<M> {
    backlog: Backlog<M>,
    /// When to ask for held events next.
    held_at: Option<Instant>,
}

/// How many events can go out once more after a crash, by what a relay has in hand at most: the promise of SEMANTICS.
pub const fn repeated_max(events_max: usize) -> usize {
    REPEATED_HANDS.saturating_mul(events_max)
}

/// One is of held events. The others are of new ones, where the cursor cannot pass what is undecided: all that is read
/// behind that may be published and yet unrecorded.
const REPEATED_HANDS: usize = 4;
/// With so many unrecorded nothing more is read. A page is one hand at most. In the ordinary case there is one in hand,
/// and a part of a page published before it.
const UNRECORDED_HANDS: usize = REPEATED_HANDS - 2;

impl<L: Log> LogSource<L> {
    /// A source that has read nothing yet, for a relay with the default options (see [`LogSource::for_hand`]); `policy`
    /// says what a dead event does to those behind it.
    pub fn new(log: L, policy: DeadPolicy) -> LogSource<L> {
        let inner = Mutex::new(Inner { backlog: Backlog::new(policy), held_at: None });
        LogSource {
            log,
            policy,
            hand: RelayOptions::default().hand(),
            inner,
            writing: tokio::sync::Mutex::new(Writing { changes: None, failed: false }),
            changed: Notify::new(),
            worked: AtomicBool::new(false),
        }
    }
    /// For a relay that has at most this in hand; a page of the log should not be larger. Memory and what a crash can
    /// repeat are bounded by it: see [`repeated_max`].
    pub fn for_hand(self, hand: ClaimLimit) -> LogSource<L> {
        LogSource { hand, ..self }
    }

    /// The log beneath.
    pub fn log(&self) -> &L {
        &self.log
    }

    fn inner(&self) -> MutexGuard<'_, Inner<L::Mark>> {
        self.inner.lock().expect("no panic while it was locked")
    }

    /// What an operator must mend at the start may be a passing state later: a standby being promoted, a password being
    /// changed, a migration under way, a file that is being put back.
    fn judged<T>(&self, result: Result<T, SourceError>) -> Result<T, SourceError> {
        result.map_err(|mut error| {
            if error.kind == SourceErrorKind::Refused && self.worked.load(Relaxed) {
                error.kind = SourceErrorKind::Unavailable;
            }
            error
        })
    }

    /// Writes what is to be written; nothing else is written while the caller keeps what it gets. Safe to drop: the
    /// next call writes it again, which is harmless.
    async fn write(&self) -> Result<Written<'_, L::Mark>, SourceError> {
        let mut writing = self.writing.lock().await;
        loop {
            if writing.failed && !planted::is(Bug::WritesAfterFailure) {
                return Err(SourceError::new(SourceErrorKind::Unavailable, "an earlier write of this tenure failed"));
            }
            if writing.changes.is_none() {
                writing.changes = self.inner().backlog.changes();
            }
            let Some(changes) = &writing.changes else { return Ok(writing) };
            if let Err(error) = self.judged(self.log.record(changes).await) {
                writing.failed = true;
                return Err(error);
            }
            let due = |c: &HeldChange| matches!(c.state, HeldState::Retry | HeldState::Delayed).then_some(c.due);
            let now = Instant::now();
            let mut inner = self.inner();
            if let Some(due) = changes.held.iter().filter_map(due).min() {
                inner.held_by(now + due);
            }
            if inner.backlog.has_open() {
                inner.held_by(now);
            }
            drop(inner);
            writing.changes = None;
            self.changed.notify_waiters();
        }
    }

    async fn claim_held(&self, limit: ClaimLimit) -> Result<Vec<Claimed>, SourceError> {
        // A row with an unwritten verdict would be read as it stood before: tried again too early, or once more.
        let written = if planted::is(Bug::HeldRowsStale) { None } else { Some(self.write().await?) };
        let query = {
            let mut inner = self.inner();
            inner.held_at = None;
            inner.backlog.held_query(limit)
        };
        let mut unasked = AskAgain { source: self, armed: true };
        let page = self.judged(self.log.held(&query).await)?;
        unasked.armed = false;
        drop(written);
        let mut inner = self.inner();
        if let Some(due) = page.next_due {
            inner.held_by(Instant::now() + due);
        }
        let answered = page.events.len();
        let claimed = inner.backlog.claim_held(page.events);
        if claimed.len() < answered {
            inner.held_by(Instant::now());
        }
        Ok(claimed)
    }
}

/// A question for held events that got no answer, by an error or because the claim was dropped, is asked again.
struct AskAgain<'a, L: Log> {
    source: &'a LogSource<L>,
    armed: bool,
}

impl<L: Log> Drop for AskAgain<'_, L> {
    fn drop(&mut self) {
        if self.armed {
            self.source.inner().held_by(Instant::now());
        }
    }
}

impl<M> Inner<M> {
    fn held_by(&mut self, at: Instant) {
        self.held_at = Some(self.held_at.map_or(at, |old| old.min(at)));
    }
}

impl<L: Log> Source for LogSource<L> {
    async fn acquire(&self) -> Result<Duration, SourceError> {
        // What an earlier tenure left must not be written under a new epoch, also if this call is dropped halfway.
        *self.writing.lock().await = Writing { changes: None, failed: false };
        *self.inner() = Inner { backlog: Backlog::new(self.policy), held_at: None };
        let (asked, ttl) = loop {
            let asked = Instant::now();
            let acquired = self.judged(self.log.acquire().await)?;
            self.worked.store(true, Relaxed);
            match acquired {
                Ok(ttl) => break (asked, ttl),
                Err(remaining) => tokio::time::sleep(remaining.min(STAND_BY_POLL)).await,
            }
        };
        let mut writing = self.writing.lock().await;
        *writing = Writing { changes: None, failed: false };
        let loaded = self.judged(self.log.load().await)?;
        let mut backlog = Backlog::new(self.policy);
        backlog.load(&loaded);
        let now = Instant::now();
        let mut held_at = loaded.next_due.map(|due| now + due);
        if backlog.has_open() {
            held_at = Some(now);
        }
        *self.inner() = Inner { backlog, held_at };
        Ok(ttl.saturating_sub(asked.elapsed()))
    }

    async fn renew(&self) -> Result<Duration, SourceError> {
        let asked = Instant::now();
        let ttl = self.judged(self.log.renew().await)?;
        Ok(ttl.saturating_sub(asked.elapsed()))
    }

    fn trouble(&self, what: Option<&str>) {
        self.log.trouble(what);
    }

    async fn claim(&self, limit: ClaimLimit) -> Result<Claim, SourceError> {
        loop {
            let changed = self.changed.notified();
            let held_at = self.inner().held_at;
            if held_at.is_some_and(|at| at <= Instant::now()) {
                let events = self.claim_held(limit).await?;
                if !events.is_empty() {
                    return Ok(Claim { events });
                }
            }
            let (events, full) = {
                let mut inner = self.inner();
                let events = inner.backlog.claim(limit);
                let (unrecorded, bytes) = inner.backlog.unrecorded();
                let full = unrecorded >= UNRECORDED_HANDS.saturating_mul(self.hand.events_max)
                    || bytes >= UNRECORDED_HANDS.saturating_mul(self.hand.bytes_max);
                (events, full)
            };
            if !events.is_empty() {
                return Ok(Claim { events });
            }
            // Pages that need no relay (all delayed, or waiting behind a key) are passed here.
            drop(self.write().await?);
            let held_at = self.inner().held_at;
            let held_due = async {
                match held_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased; // held events are older than what is still to be read
                () = held_due => {}
                () = changed => {}
                page = self.log.read(limit), if !full => self.inner().backlog.push(self.judged(page)?),
            }
        }
    }

    async fn settle(&self, settlements: &[Settlement], sent: Instant) -> Result<(), SourceError> {
        {
            let mut inner = self.inner();
            inner.backlog.settle(settlements, sent);
            let released = settlements.iter().any(|s| s.verdict == Verdict::Release);
            if inner.backlog.has_open() || (released && !planted::is(Bug::ReleasedHeldForgotten)) {
                inner.held_by(Instant::now());
            }
        }
        self.changed.notify_waiters();
        self.write().await.map(drop)
    }

    async fn release(&self) -> Result<(), SourceError> {
        self.inner().backlog.hand_over();
        // Without it (the lease is lost, the database is away) some events are sent twice: no reason to keep the lease.
        let _ = self.write().await;
        self.log.release().await
    }
}

/// How often a relay that stands by looks whether the lease was handed over.
const STAND_BY_POLL: Duration = Duration::from_millis(250);

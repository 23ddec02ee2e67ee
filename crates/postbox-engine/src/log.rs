//! The log source, whatever the database: a [`Backlog`] in memory, kept in step with a [`Log`] in a database.
//! It decides nothing about order or held events (the backlog does) and nothing about SQL (the log does).

use crate::backlog::{Changes, DeadPolicy};
use crate::{Claim, ClaimLimit, Event, Settlement, Source, SourceError};
use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

/// An insert-only log of events in a database, with its cursor, its lease and its held rows.
pub trait Log: Send + Sync + 'static {
    /// A position in the log: all before it is published or held. Opaque to the engine.
    type Mark: Clone + Debug + Send + Sync + 'static;

    /// Tries once to take the lease, or to prolong our own under a new epoch; checks that the cursor may be trusted;
    /// and begins reading anew from the stored cursor. `Err(remaining)` inside: another relay holds it that long.
    fn acquire(&self) -> impl Future<Output = Result<Result<Duration, Duration>, SourceError>> + Send;
    /// See [`Source::renew`].
    fn renew(&self) -> impl Future<Output = Result<Duration, SourceError>> + Send;
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
    /// Writes the changes in one statement or transaction, fenced by the lease's epoch.
    fn record(&self, changes: &Changes<Self::Mark>) -> impl Future<Output = Result<(), SourceError>> + Send;
}

/// Consecutive events of the log, in its order.
#[derive(Clone, Debug)]
pub struct LogPage<M> {
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
    /// many such rows, and whether the first of them must wait for its time or for an operator (retry, dead).
    pub keys: Vec<(u64, u32, bool)>,
    /// Until the first of retry, delayed and replay is due; zero when one is.
    pub next_due: Option<Duration>,
}

/// Which held events to fetch.
#[derive(Clone, Debug)]
pub struct HeldQuery {
    pub limit: ClaimLimit,
    /// Keys whose waiting events may go.
    pub open: Vec<u64>,
    /// Event ids in the relay's hands already.
    pub skip: Vec<i64>,
}

/// Held events that may go now.
#[derive(Clone, Debug, Default)]
pub struct HeldPage {
    pub events: Vec<HeldEvent>,
    /// Until the next of retry, delayed and replay is due, these here left out; zero when more are due now.
    pub next_due: Option<Duration>,
}

/// A held event with what its row says.
#[derive(Clone, Debug)]
pub struct HeldEvent {
    pub event: Event,
    pub attempts: u32,
    pub state: crate::HeldState,
}

/// A [`Source`] over a [`Log`].
pub struct LogSource<L: Log> {
    log: L,
    policy: DeadPolicy,
}

impl<L: Log> LogSource<L> {
    pub fn new(log: L, policy: DeadPolicy) -> LogSource<L> {
        LogSource { log, policy }
    }
    pub fn log(&self) -> &L {
        let _ = self.policy;
        &self.log
    }
}

impl<L: Log> Source for LogSource<L> {
    async fn acquire(&self) -> Result<Duration, SourceError> {
        std::future::pending().await
    }
    async fn renew(&self) -> Result<Duration, SourceError> {
        self.log.renew().await
    }
    async fn claim(&self, _: ClaimLimit) -> Result<Claim, SourceError> {
        std::future::pending().await
    }
    async fn settle(&self, _: &[Settlement]) -> Result<(), SourceError> {
        Ok(())
    }
    async fn release(&self) -> Result<(), SourceError> {
        self.log.release().await
    }
}

//! Where events come from, and where their fate is recorded. A source owns one stream's shard by a fenced lease.

use crate::Event;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Where events come from. One value serves one shard of one stream for one relay; the relay calls `acquire`
/// first, and again after every error. See the suite in `postbox-testkit` for the rules that each source must pass.
pub trait Source: Send + Sync + 'static {
    /// Waits until the lease is ours, as long as another relay holds it; then reads all state anew. Returns for how
    /// long from now the lease is proven (what the request itself took is left out). Safe to drop.
    fn acquire(&self) -> impl Future<Output = Result<Duration, SourceError>> + Send;

    /// Proves the lease again and prolongs it; returns as `acquire` does.
    ///
    /// # Errors
    /// `LeaseLost` when another relay has it; `Unavailable` when another try may succeed.
    fn renew(&self) -> impl Future<Output = Result<Duration, SourceError>> + Send;

    /// Waits for ready events and takes them: a prefix of each key's unsettled events. Never empty. Safe to drop: a
    /// dropped claim has taken nothing.
    fn claim(&self, limit: ClaimLimit) -> impl Future<Output = Result<Claim, SourceError>> + Send;

    /// Records verdicts, all or none, fenced by the lease's epoch. Repeating is harmless. They bind every claim that
    /// is answered after the first poll, long before they are written: nothing overtakes a failed event meanwhile.
    /// By `sent` the events had been handed to the sink, if they ever were: for people who ask what became of one.
    ///
    /// # Errors
    /// `LeaseLost`: nothing was recorded.
    fn settle(&self, settlements: &[Settlement], sent: Instant)
    -> impl Future<Output = Result<(), SourceError>> + Send;

    /// What keeps this relay from sending, `None` when nothing does: for people who look at the source. The next `renew`
    /// writes it down.
    fn trouble(&self, _: Option<&str>) {}

    /// Gives the lease back, so that another relay takes over at once. Harmless without a lease.
    fn release(&self) -> impl Future<Output = Result<(), SourceError>> + Send;
}

/// How much a relay is ready to take.
#[derive(Clone, Copy, Debug)]
pub struct ClaimLimit {
    /// Events at most.
    pub events_max: usize,
    /// Bytes of these events at most; a single greater event comes alone.
    pub bytes_max: usize,
}

/// Events taken from a source, oldest first within each key.
#[derive(Clone, Debug, Default)]
pub struct Claim {
    /// At least one.
    pub events: Vec<Claimed>,
}

/// One event in a relay's hands.
#[derive(Clone, Debug)]
pub struct Claimed {
    /// The source's handle, unique within one tenure of the lease; comes back in its [`Settlement`].
    pub ticket: u64,
    /// What was written.
    pub event: Event,
    /// Sends that ended with an answer about this event, before this claim.
    pub attempts: u32,
    /// Published before and asked for again by an operator: marked in its headers.
    pub replay: bool,
}

/// A verdict on one claimed event.
#[derive(Clone, Debug, PartialEq)]
pub struct Settlement {
    /// Of the claimed event.
    pub ticket: u64,
    /// What became of it.
    pub verdict: Verdict,
}

/// What became of a claimed event.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The sink acknowledged it.
    Published,
    /// The sink's answer was about this event: try again, not before `after`.
    Retry {
        /// From now, by the database's clock.
        after: Duration,
        /// Answers about the event, this one included.
        attempts: u32,
        /// What the sink said.
        error: Arc<str>,
    },
    /// Never again without an operator.
    Dead {
        /// Answers about the event; one that cannot be routed had none.
        attempts: u32,
        /// What the sink said, or why the event has no route.
        error: Arc<str>,
    },
    /// Not tried, or tried with no answer about it: the next claim takes it again. Costs no attempt.
    Release,
}

/// Why a source could not do it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
#[non_exhaustive]
pub struct SourceError {
    /// What the relay does about it.
    pub kind: SourceErrorKind,
    /// What happened, what it happened to, and what mends it.
    pub message: String,
    /// The error of the driver, if it was one.
    #[source]
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// What the relay does about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SourceErrorKind {
    /// Another relay owns the shard now. Stop sending, then stand by.
    LeaseLost,
    /// The database cannot be reached, or the outcome is unknown. Back off and acquire anew; a renewal is tried again
    /// first, while the lease lasts.
    Unavailable,
    /// What the tenure was recorded over is gone, so that no renewal would help it. Back off and acquire anew.
    Disconnected,
    /// An operator must act (schema missing, rights, wrong cluster). The relay ends with this message.
    Refused,
}

impl SourceError {
    /// An error without a cause of its own.
    pub fn new(kind: SourceErrorKind, message: impl Into<String>) -> SourceError {
        SourceError { kind, message: message.into(), source: None }
    }
    /// The same, with the error that led to it.
    pub fn caused_by(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> SourceError {
        self.source = Some(source.into());
        self
    }
    /// Of the kind `LeaseLost`.
    pub fn lease_lost() -> SourceError {
        SourceError::new(SourceErrorKind::LeaseLost, "another relay owns the lease")
    }
}

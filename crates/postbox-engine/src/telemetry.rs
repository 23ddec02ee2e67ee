//! What the relay counts. Read by the command line, metrics and tests; never by the engine's decisions.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Counters of one relay loop. All of them only grow, but `in_hand`, `leading` and `paused`.
#[derive(Debug, Default)]
pub struct Counters {
    /// Events taken from the source.
    pub claimed: AtomicU64,
    /// Events that the sink acknowledged.
    pub published: AtomicU64,
    /// Answers after which an event is to be tried again.
    pub retried: AtomicU64,
    /// Events given up: refused for good, or after the last attempt.
    pub dead: AtomicU64,
    /// Events that went back without a try or without an answer.
    pub released: AtomicU64,
    /// Batches handed to the sink.
    pub sends: AtomicU64,
    /// Times that verdicts were recorded.
    pub settles: AtomicU64,
    /// Pauses because the destination was out.
    pub outages: AtomicU64,
    /// Times that this relay got the lease.
    pub tenures: AtomicU64,
    /// Claimed and not settled.
    pub in_hand: AtomicU64,
    /// This relay owns the lease.
    pub leading: AtomicBool,
    /// The destination is out, or the source is: nothing is sent now.
    pub paused: AtomicBool,
    /// What went wrong last, for people.
    pub last_error: Mutex<Option<String>>,
}

/// The counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Snapshot {
    /// See [`Counters::claimed`].
    pub claimed: u64,
    /// See [`Counters::published`].
    pub published: u64,
    /// See [`Counters::retried`].
    pub retried: u64,
    /// See [`Counters::dead`].
    pub dead: u64,
    /// See [`Counters::released`].
    pub released: u64,
    /// See [`Counters::sends`].
    pub sends: u64,
    /// See [`Counters::settles`].
    pub settles: u64,
    /// See [`Counters::outages`].
    pub outages: u64,
    /// See [`Counters::tenures`].
    pub tenures: u64,
    /// See [`Counters::in_hand`].
    pub in_hand: u64,
    /// See [`Counters::leading`].
    pub leading: bool,
    /// See [`Counters::paused`].
    pub paused: bool,
    /// See [`Counters::last_error`].
    pub last_error: Option<String>,
}

impl Counters {
    /// All of them now; each is read for itself.
    pub fn snapshot(&self) -> Snapshot {
        let get = |c: &AtomicU64| c.load(Relaxed);
        Snapshot {
            claimed: get(&self.claimed),
            published: get(&self.published),
            retried: get(&self.retried),
            dead: get(&self.dead),
            released: get(&self.released),
            sends: get(&self.sends),
            settles: get(&self.settles),
            outages: get(&self.outages),
            tenures: get(&self.tenures),
            in_hand: get(&self.in_hand),
            leading: self.leading.load(Relaxed),
            paused: self.paused.load(Relaxed),
            last_error: self.last_error.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone(),
        }
    }

    pub(crate) fn add(counter: &AtomicU64, n: usize) {
        counter.fetch_add(n as u64, Relaxed);
    }

    pub(crate) fn failed(&self, error: &dyn std::fmt::Display) {
        *self.last_error.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error.to_string());
    }
}

//! What the relay counts. Read by the command line, metrics and tests; never by the engine's decisions.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Counters of one relay loop. All of them only grow, but `in_hand`, `leading` and `paused`.
#[derive(Debug, Default)]
pub struct Counters {
    pub claimed: AtomicU64,
    pub published: AtomicU64,
    pub retried: AtomicU64,
    pub dead: AtomicU64,
    pub released: AtomicU64,
    pub sends: AtomicU64,
    pub settles: AtomicU64,
    pub outages: AtomicU64,
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
    pub claimed: u64,
    pub published: u64,
    pub retried: u64,
    pub dead: u64,
    pub released: u64,
    pub sends: u64,
    pub settles: u64,
    pub outages: u64,
    pub tenures: u64,
    pub in_hand: u64,
    pub leading: bool,
    pub paused: bool,
    pub last_error: Option<String>,
}

impl Counters {
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

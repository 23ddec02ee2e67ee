//! The simulator: the real [`postbox_engine::Relay`] over the real [`postbox_engine::LogSource`], against a database
//! and a broker made of nothing, in virtual time. One seed is one run: a storm of crashes, pauses, half-done calls,
//! outages and poison in which nothing may go wrong, then a calm in which everything must be settled.
//!
//! Everything comes from the seed: the same seed gives the same trace, to the last step.

#![allow(missing_docs, reason = "for our own tests alone: what needs words has them")]

mod check;
mod log;
mod plan;
mod process;
mod run;
mod sink;
mod watch;
mod world;

pub use postbox_engine::planted::Bug;

use serde::Serialize;
use std::fmt;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What a step of the trace is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Commit,
    Acquire,
    Renew,
    Release,
    Record,
    Hold,
    Fenced,
    Send,
    Accept,
    Reject,
    Fail,
    Answer,
    Start,
    Crash,
    Pause,
    Resume,
    Stop,
    Calm,
}

/// What the runs of some seeds did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    pub seeds: u64,
    #[serde(flatten)]
    pub stats: Stats,
    /// Combines the traces of all seeds: equal for equal seeds and equal code.
    pub trace: u64,
}

/// What was counted in the runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    pub events: u64,
    pub sends: u64,
    pub deliveries: u64,
    pub duplicates: u64,
    pub dead: u64,
    pub crashes: u64,
    pub pauses: u64,
    pub stops: u64,
    pub tenures: u64,
    /// Renewals that succeeded after one of the same tenure had failed.
    pub renewed_late: u64,
    pub virtual_seconds: u64,
}

impl Stats {
    fn add(&mut self, other: &Stats) {
        self.events += other.events;
        self.sends += other.sends;
        self.deliveries += other.deliveries;
        self.duplicates += other.duplicates;
        self.dead += other.dead;
        self.crashes += other.crashes;
        self.pauses += other.pauses;
        self.stops += other.stops;
        self.tenures += other.tenures;
        self.renewed_late += other.renewed_late;
        self.virtual_seconds += other.virtual_seconds;
    }
}

/// A seed that went wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    pub seed: u64,
    /// Planted on purpose, if any.
    pub bug: Option<Bug>,
    /// Which rule was broken, by which event.
    pub violation: String,
    /// The last steps before it.
    pub trace: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.trace {
            writeln!(f, "  {line}")?;
        }
        let Failure { seed, violation, .. } = self;
        write!(f, "seed {seed}: {violation}\nto run it again: cargo x sim --seed {seed}")
    }
}

impl std::error::Error for Failure {}

/// Runs the seeds, on as many threads as there are cores, with a bug planted or without.
///
/// # Errors
/// The failure with the lowest seed of those that were found.
pub fn run(seeds: Range<u64>, bug: Option<Bug>) -> Result<Summary, Failure> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (next, end) = (AtomicU64::new(seeds.start), AtomicU64::new(seeds.end));
    let total = Mutex::new((Summary::default(), None::<Failure>));
    let work = || {
        loop {
            let seed = next.fetch_add(1, Relaxed);
            if seed >= end.load(Relaxed) {
                return;
            }
            let outcome = run::run_seed(seed, bug);
            let mut total = total.lock().expect("no panic while it was locked");
            match outcome {
                Ok((stats, trace)) => {
                    total.0.seeds += 1;
                    total.0.stats.add(&stats);
                    total.0.trace = total.0.trace.wrapping_add(trace);
                }
                Err(failure) => {
                    end.fetch_min(seed, Relaxed);
                    if total.1.as_ref().is_none_or(|known| failure.seed < known.seed) {
                        total.1 = Some(failure);
                    }
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    let (summary, failure) = total.into_inner().expect("no panic while it was locked");
    failure.map_or(Ok(summary), Err)
}

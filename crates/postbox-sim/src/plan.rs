//! What one run is made of, all of it from its seed: relays, writers, sizes, timings and faults. Each seed leaves
//! whole kinds of fault out, so that the rest is also seen alone.

use postbox_engine::{DeadPolicy, Rng};
use std::time::Duration;

/// How the sink treats the order of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SinkKind {
    /// Like an idempotent Kafka producer: several messages of a key in flight, in order, failing as a suffix.
    Pipelined,
    /// Like webhooks: every message for itself.
    Single,
}

/// How often something happens, of a thousand times.
pub(crate) type PerMille = u64;

/// Faults of the safety phase; none of them happens after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Faults {
    pub(crate) database: PerMille,
    pub(crate) database_slow: PerMille,
    pub(crate) failed: PerMille,
    pub(crate) rejected: PerMille,
    pub(crate) unavailable: PerMille,
    pub(crate) unknown: PerMille,
    pub(crate) hang: PerMille,
    /// Of a process's looks at its fate: crashed, paused, stopped.
    pub(crate) crash: PerMille,
    pub(crate) pause: PerMille,
    pub(crate) stop: PerMille,
}

/// One run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) relays: u64,
    pub(crate) keys: u64,
    pub(crate) writers: u64,
    pub(crate) transactions: u64,
    pub(crate) writer_pause: u64,
    pub(crate) sink: SinkKind,
    pub(crate) policy: DeadPolicy,
    pub(crate) batch_max: usize,
    pub(crate) bytes_max: usize,
    pub(crate) in_flight_max: usize,
    /// In the relay's hand: events, and their bytes.
    pub(crate) events_max: usize,
    pub(crate) hand_bytes_max: usize,
    pub(crate) page_max: usize,
    pub(crate) lease: Duration,
    pub(crate) retry_base: Duration,
    pub(crate) retry_pause_max: Duration,
    pub(crate) attempts_max: u32,
    pub(crate) send_timeout: Duration,
    pub(crate) drain_timeout: Duration,
    /// The database's clock runs so many thousandths of the relays' clocks.
    pub(crate) clock: u64,
    pub(crate) faults: Faults,
    /// Events: refused for good, failing a few times, without usable headers, available later.
    pub(crate) poison: PerMille,
    pub(crate) flaky: PerMille,
    pub(crate) unroutable: PerMille,
    pub(crate) delayed: PerMille,
    pub(crate) delay_max: u64,
    /// The safety phase, in milliseconds.
    pub(crate) storm: u64,
    /// When the broker is down, and when the database is: from and to, in milliseconds.
    pub(crate) broker_down: Vec<(u64, u64)>,
    pub(crate) database_down: Vec<(u64, u64)>,
}

impl Plan {
    pub(crate) fn new(rng: &mut Rng) -> Plan {
        let storm_max = pick(rng, &[4_000, 12_000, 30_000]);
        let storm = between(rng, 2_000, storm_max);
        Plan {
            relays: between(rng, 1, 3),
            keys: pick(rng, &[1, 2, 4, 12, 40]),
            writers: between(rng, 1, 4),
            transactions: pick(rng, &[1, 4, 12, 40, 80]),
            writer_pause: pick(rng, &[0, 5, 60, 900]),
            sink: pick(rng, &[SinkKind::Pipelined, SinkKind::Single]),
            policy: pick(rng, &[DeadPolicy::Skip, DeadPolicy::Skip, DeadPolicy::Block]),
            batch_max: pick(rng, &[1, 2, 5, 16]),
            bytes_max: pick(rng, &[1, 700, 1 << 20, 1 << 20]),
            in_flight_max: pick(rng, &[1, 2, 5]),
            events_max: pick(rng, &[1, 4, 16, 64]),
            hand_bytes_max: pick(rng, &[1, 1_000, 1 << 20, 1 << 20]),
            page_max: pick(rng, &[1, 3, 10, 50]),
            lease: millis(rng, 1_500, 10_000),
            retry_base: millis(rng, 5, 300),
            retry_pause_max: millis(rng, 100, 5_000),
            attempts_max: u32::try_from(between(rng, 1, 5)).expect("at most five"),
            send_timeout: millis(rng, 500, 5_000),
            drain_timeout: millis(rng, 300, 3_000),
            clock: pick(rng, &[960, 1_000, 1_000, 1_040]),
            faults: Faults::new(rng),
            poison: pick(rng, &[0, 0, 20, 60, 200]),
            flaky: sometimes(rng, 200),
            unroutable: sometimes(rng, 40),
            delayed: pick(rng, &[0, 0, 100, 400]),
            delay_max: pick(rng, &[30, 300, 8_000]),
            storm,
            broker_down: windows(rng, storm),
            database_down: windows(rng, storm),
        }
    }
}

impl Faults {
    fn new(rng: &mut Rng) -> Faults {
        Faults {
            database: pick(rng, &[0, 0, 5, 40, 150]),
            database_slow: sometimes(rng, 60),
            failed: sometimes(rng, 80),
            rejected: sometimes(rng, 30),
            unavailable: sometimes(rng, 60),
            unknown: sometimes(rng, 60),
            hang: sometimes(rng, 30),
            crash: sometimes(rng, 300),
            pause: sometimes(rng, 300),
            stop: sometimes(rng, 200),
        }
    }
}

/// From `low` to `high`, both included.
pub(crate) fn between(rng: &mut Rng, low: u64, high: u64) -> u64 {
    low + rng.below(high - low + 1)
}
pub(crate) fn millis(rng: &mut Rng, low: u64, high: u64) -> Duration {
    Duration::from_millis(between(rng, low, high))
}
pub(crate) fn chance(rng: &mut Rng, per_mille: PerMille) -> bool {
    rng.below(1_000) < per_mille
}
pub(crate) fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[usize::try_from(rng.below(from.len() as u64)).expect("an index")]
}

/// Half of the seeds go without it.
fn sometimes(rng: &mut Rng, per_mille_max: PerMille) -> PerMille {
    if chance(rng, 500) { 0 } else { between(rng, 1, per_mille_max) }
}

fn windows(rng: &mut Rng, storm: u64) -> Vec<(u64, u64)> {
    let count = pick(rng, &[0, 0, 1, 2]);
    let window = |rng: &mut Rng| {
        let from = rng.below(storm);
        (from, (from + between(rng, 100, 8_000)).min(storm))
    };
    (0..count).map(|_| window(rng)).collect()
}

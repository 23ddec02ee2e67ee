//! When to try again: exponential, with full jitter, capped, and not for ever.

use crate::{SendError, SendErrorKind, Verdict};
use std::time::Duration;

/// The retry policy of a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Retry {
    /// The ceiling of the first pause.
    pub base: Duration,
    /// The ceiling of every pause.
    pub pause_max: Duration,
    /// Answers about the event, the first included, before it is dead; at least one.
    pub attempts_max: u32,
}

impl Default for Retry {
    /// Seventeen attempts in a quarter of an hour on average: most outages of a consumer end, or are noticed, by then.
    fn default() -> Retry {
        Retry { base: Duration::from_millis(200), pause_max: Duration::from_secs(300), attempts_max: 17 }
    }
}

impl Retry {
    /// The longest pause during an outage of the database or the destination: both are back for us within seconds.
    pub(crate) const OUTAGE_PAUSE_MAX: Duration = Duration::from_secs(5);

    /// A pause of an outage that has failed so often: as [`Retry::pause`], under a ceiling of seconds.
    pub(crate) fn outage_pause(&self, failures: u32, rng: &mut Rng) -> Duration {
        let pause_max = self.pause_max.min(Retry::OUTAGE_PAUSE_MAX);
        Retry { pause_max, ..self.clone() }.pause(failures, rng)
    }

    /// A pause after `failures` failures in a row (one or more): uniform in zero to min(pause_max, base * 2^(n-1)).
    /// "Full jitter" of Marc Brooker, Exponential Backoff And Jitter, 2015.
    pub fn pause(&self, failures: u32, rng: &mut Rng) -> Duration {
        let ceiling = self.base.saturating_mul(1 << failures.saturating_sub(1).min(24)).min(self.pause_max);
        ceiling.mul_f64(rng.unit())
    }

    /// The verdict on an event after an answer about it, `attempts` answers with this one.
    pub fn verdict(&self, attempts: u32, error: &SendError, rng: &mut Rng) -> Verdict {
        let text = error.message.as_str().into();
        if error.kind == SendErrorKind::Rejected || attempts >= self.attempts_max {
            return Verdict::Dead { attempts, error: text };
        }
        let after = self.pause(attempts, rng).max(error.retry_after.unwrap_or_default());
        Verdict::Retry { after, attempts, error: text }
    }
}

/// A small seeded generator (SplitMix64, Steele et al. 2014): the engine has no randomness but what is passed in.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }
    /// The next number: all 64 bits are random.
    #[expect(clippy::should_implement_trait, reason = "it never ends and is not iterated over")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Uniform in 0 (inclusive) to 1 (exclusive).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
    /// Uniform in 0 to `below` (exclusive); zero for zero.
    pub fn below(&mut self, below: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(below)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Relays that lost their destination together must not come back together.
    #[test]
    fn pauses_are_jittered_up_to_the_ceiling_also_in_a_long_outage() {
        let (retry, mut rng) = (Retry::default(), Rng::new(7));
        for failures in [10, 100, u32::MAX] {
            let mut pauses: Vec<Duration> = (0..1_000).map(|_| retry.outage_pause(failures, &mut rng)).collect();
            pauses.sort();
            pauses.dedup();
            assert_eq!(pauses.len(), 1_000, "no two are the same");
            assert!(pauses[999] <= Retry::OUTAGE_PAUSE_MAX && pauses[999] > Retry::OUTAGE_PAUSE_MAX.mul_f64(0.99));
            assert!(
                pauses[250] > Retry::OUTAGE_PAUSE_MAX.mul_f64(0.2)
                    && pauses[250] < Retry::OUTAGE_PAUSE_MAX.mul_f64(0.3)
            );
        }
    }

    #[test]
    fn the_default_gives_up_after_a_quarter_of_an_hour_on_average() {
        let (retry, mut rng, runs) = (Retry::default(), Rng::new(1), 2_000);
        let life = |rng: &mut Rng| (1..retry.attempts_max).map(|n| retry.pause(n, rng)).sum::<Duration>();
        let mean = (0..runs).map(|_| life(&mut rng)).sum::<Duration>() / runs;
        assert!((840..1_020).contains(&mean.as_secs()), "{mean:?}");
    }
}

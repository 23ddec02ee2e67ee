//! How long a send may take before its outcome counts as unknown.

use std::time::Duration;
use tokio::time::Instant;

/// How often the time may double.
const DOUBLINGS_MAX: u32 = 4;

/// A destination that is slower than `send_timeout` would be sent the same for ever: each time-out doubles what the next
/// send is given. It is all one time for what is quick beside what is slow, so it falls back only when nothing was slow
/// for as long as the longest send may take.
#[derive(Debug)]
pub(super) struct Patience {
    send_timeout: Duration,
    doublings: u32,
    slow_at: Option<Instant>,
}

impl Patience {
    pub(super) fn new(send_timeout: Duration) -> Self {
        Patience { send_timeout, doublings: 0, slow_at: None }
    }

    /// What a send is given that begins now.
    pub(super) fn timeout(&self) -> Duration {
        self.send_timeout * (1 << self.doublings)
    }

    /// A send that was given so long had no outcome. Those that went before the last doubling say nothing new.
    pub(super) fn timed_out(&mut self, given: Duration) {
        if given == self.timeout() {
            self.doublings = (self.doublings + 1).min(DOUBLINGS_MAX);
        }
        self.slow_at = Some(Instant::now());
    }

    /// A send took so long and has its outcome.
    pub(super) fn answered(&mut self, took: Duration) {
        if took >= self.send_timeout / 2 {
            self.slow_at = Some(Instant::now());
        } else if self.slow_at.is_some_and(|at| at.elapsed() > self.send_timeout * (1 << DOUBLINGS_MAX)) {
            *self = Patience::new(self.send_timeout);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::sleep;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn what_was_in_flight_together_doubles_it_once_and_it_never_passes_sixteen_times() {
        let mut patience = Patience::new(30 * SECOND);
        for _ in 0..4 {
            patience.timed_out(30 * SECOND);
            sleep(SECOND).await;
        }
        assert_eq!(patience.timeout(), 60 * SECOND);
        for _ in 0..10 {
            patience.timed_out(patience.timeout());
        }
        assert_eq!(patience.timeout(), 480 * SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn it_falls_back_when_nothing_was_slow_for_as_long_as_the_longest_send() {
        let mut patience = Patience::new(30 * SECOND);
        patience.timed_out(30 * SECOND);
        for _ in 0..100 {
            sleep(10 * SECOND).await;
            patience.answered(15 * SECOND);
        }
        patience.answered(SECOND);
        assert_eq!(patience.timeout(), 60 * SECOND, "one is slow, others are quick");
        sleep(480 * SECOND).await;
        patience.answered(SECOND);
        assert_eq!(patience.timeout(), 60 * SECOND);
        sleep(SECOND).await;
        patience.answered(SECOND);
        assert_eq!(patience.timeout(), 30 * SECOND);
    }
}

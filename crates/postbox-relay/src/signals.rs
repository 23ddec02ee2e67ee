//! SIGTERM and Ctrl-C: the first asks the relay to stop, a later second one ends the process at once.

use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

/// Signals this close together are one request: `timeout` signals its child and then the child's group, a terminal
/// signals a wrapper that passes it on. A person who wants it to end now is not that quick.
const TOGETHER: Duration = Duration::from_secs(1);

/// The two signals, caught from now on.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub(crate) fn new() -> std::io::Result<Signals> {
        let (interrupt, terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        Ok(Signals { interrupt, terminate })
    }

    /// The number of the next one.
    pub(crate) async fn next(&mut self) -> i32 {
        tokio::select! {
            biased; // either will do; an order makes it the same each time
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
        }
    }

    /// Resolves at the first signal. From then on a second one ends the process with 128 + its number.
    pub(crate) async fn stop(mut self) {
        let first = self.next().await;
        let asked = Instant::now();
        tracing::info!(signal = first, "stopping; a second signal, after a second, ends at once");
        tokio::spawn(async move {
            let mut second = self.next().await;
            while asked.elapsed() < TOGETHER {
                tracing::info!(signal = second, "taken for the same request");
                second = self.next().await;
            }
            tracing::warn!(signal = second, "ended at once; what was in flight is sent again by the next relay");
            std::process::exit(128 + second);
        });
    }
}

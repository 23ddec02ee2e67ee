//! The one loop: claim, lanes, send, settle. It holds the lease as long as it sends, and not a moment shorter.
//! [`Relay::run`] is the outer loop, one [`Tenure`] per lease the inner one.

mod patience;
mod tenure;

use crate::planted::{self, Bug};
use crate::telemetry::Counters;
use crate::{ClaimLimit, Retry, Rng, Route, Sink, Source, SourceError, SourceErrorKind};
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tenure::{End, Tenure};
use tokio::time::Instant;

/// How a relay runs.
#[derive(Clone, Debug)]
pub struct RelayOptions {
    /// The stream's name, for logs.
    pub stream: Arc<str>,
    /// Events in hand at once.
    pub events_max: usize,
    /// Bytes in hand at once.
    pub bytes_max: usize,
    /// When a failed event is tried again; its pauses are also those of an outage, up to 5 seconds.
    pub retry: Retry,
    /// After this long without an outcome a send is given up as unknown. Each time doubles it for the sends after that, up to
    /// 16 times as long, until nothing was slow for that while.
    pub send_timeout: Duration,
    /// After a stop signal, how long sends in flight may take before they are given up.
    pub drain_timeout: Duration,
    /// Seed of the jitter.
    pub seed: u64,
}

impl Default for RelayOptions {
    fn default() -> RelayOptions {
        RelayOptions {
            stream: "main".into(),
            events_max: 8_192, // four batches of 2,000: more add memory and no speed, fewer leave cores idle when draining
            bytes_max: 8 << 20, // in hand; the sink's own queue comes on top
            retry: Retry::default(),
            send_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(10),
            seed: 0,
        }
    }
}

impl RelayOptions {
    /// What is in hand at most.
    pub fn hand(&self) -> ClaimLimit {
        ClaimLimit { events_max: self.events_max, bytes_max: self.bytes_max }
    }
}

/// A relay of one stream's shard: joins one source to one sink.
pub struct Relay<S, K> {
    source: Arc<S>,
    sink: Arc<K>,
    route: Route,
    options: RelayOptions,
    counters: Arc<Counters>,
}

/// How a relay ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// All that was in hand is settled and the lease is handed over.
    Clean,
    /// All that was in hand is settled, but the source did not take the lease back: another relay waits for its end.
    LeaseKept,
    /// The drain deadline passed; what was in flight will be sent again, with the same ids.
    Abandoned {
        /// Events without an outcome, or whose outcome the source did not record in time.
        in_flight: usize,
    },
}

/// How long a source that does not answer may keep a relay from ending: once for what is to be settled, once for the lease.
const TELL_MAX: Duration = Duration::from_secs(3);

impl<S: Source, K: Sink> Relay<S, K> {
    /// Joins them; nothing happens before [`Relay::run`].
    pub fn new(source: Arc<S>, sink: Arc<K>, route: Route, options: RelayOptions) -> Relay<S, K> {
        Relay { source, sink, route, options, counters: Arc::default() }
    }

    /// The counters; they live on after the relay.
    pub fn counters(&self) -> Arc<Counters> {
        self.counters.clone()
    }

    /// Runs until `stop` resolves, then drains and hands the lease over. Outages of database and destination are
    /// waited out.
    ///
    /// # Errors
    /// A source error of kind `Refused`: an operator must act.
    pub async fn run(self, stop: impl Future<Output = ()> + Send) -> Result<Stopped, SourceError> {
        let mut stop: Pin<&mut (dyn Future<Output = ()> + Send)> = pin!(stop);
        let mut rng = Rng::new(self.options.seed);
        let (mut failures, stream) = (0, self.options.stream.clone());
        loop {
            self.sink.prepare();
            let acquired = tokio::select! {
                biased; // a stop signal wins over a lease that comes at the same moment
                () = &mut stop => return Ok(self.hand_over(Stopped::Clean).await),
                acquired = self.source.acquire() => acquired,
            };
            let began = Instant::now();
            let end = match acquired {
                Ok(proven) => Tenure::new(&self, proven, &mut rng).run(&mut stop).await,
                Err(error) => End::Lost(error),
            };
            self.counters.leading.store(false, Relaxed);
            self.counters.in_hand.store(0, Relaxed);
            let error = match end {
                End::Stopped(stopped) => return Ok(self.hand_over(stopped).await),
                End::Lost(error) => error,
            };
            self.counters.failed(&error);
            match error.kind {
                SourceErrorKind::Refused => return Err(error),
                SourceErrorKind::LeaseLost => tracing::warn!(%stream, "the lease is lost: standing by"),
                SourceErrorKind::Unavailable | SourceErrorKind::Disconnected => {
                    tracing::warn!(%stream, %error, "the source is out")
                }
            }
            failures = if began.elapsed() > Retry::OUTAGE_PAUSE_MAX { 1 } else { failures + 1 };
            let pause = self.options.retry.outage_pause(failures, &mut rng);
            tokio::select! {
                biased; // stop first, as above
                () = &mut stop => {
                    // The source was out, so the lease may still be ours.
                    if planted::is(Bug::StopKeepsLease) {
                        return Ok(Stopped::Clean);
                    }
                    return Ok(self.hand_over(Stopped::Clean).await);
                }
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Failing to hand over costs the next relay a wait for the lease's end, nothing else.
    async fn hand_over(&self, stopped: Stopped) -> Stopped {
        let error = match tokio::time::timeout(TELL_MAX, self.source.release()).await {
            Ok(Ok(())) => return stopped,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("the source did not answer within {TELL_MAX:?}"),
        };
        tracing::warn!(stream = %self.options.stream, %error, "the lease was not handed over; it ends by itself");
        if stopped == Stopped::Clean { Stopped::LeaseKept } else { stopped }
    }
}

//! A destination that is away or slow, with writers at work: what is in memory and what is published in vain stays
//! bounded. Time is paused, and what is bounded is counted.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use postbox_engine::{
    Changes, ClaimLimit, Counters, DeadPolicy, Event, EventParts, HeldPage, HeldQuery, Limits, Loaded, Log, LogPage,
    LogSource, Message, Relay, RelayOptions, Route, Rule, SendError, SendErrorKind, Sink, SourceError, Stopped,
    repeated_max,
};
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

const OUTAGE: Duration = Duration::from_secs(30 * 60);
/// What the writers commit, each second.
const RATE: u64 = 100;
const PAGE: u64 = 100;
const BATCH: usize = 100;
/// What the destination takes for a batch; it takes four at a time.
const ROUND: Duration = Duration::from_millis(10);
const IN_FLIGHT: usize = 4;
const EVENTS_MAX: usize = 1_000;
const LEASE: Duration = Duration::from_secs(10);

/// A log that grows with time, whatever the relay does.
struct Growing {
    began: Instant,
    /// Events a second, over so many keys.
    rate: u64,
    keys: u64,
    read: AtomicU64,
    passed: AtomicU64,
    held: AtomicU64,
}

impl Growing {
    fn written(&self) -> u64 {
        let millis = u64::try_from(self.began.elapsed().as_millis()).unwrap();
        (millis * self.rate / 1_000).min(self.rate * OUTAGE.as_secs())
    }
    fn event(&self, n: u64) -> Event {
        let (id, key) = (i64::try_from(n).unwrap() + 1, (n % self.keys).to_string());
        Event::new(&EventParts { id, aggregate_type: "k", aggregate_id: &key, headers: "{}", ..Default::default() })
    }
}

impl Log for Growing {
    type Mark = u64;

    async fn acquire(&self) -> Result<Result<Duration, Duration>, SourceError> {
        Ok(Ok(LEASE))
    }
    async fn renew(&self) -> Result<Duration, SourceError> {
        Ok(LEASE)
    }
    async fn release(&self) -> Result<(), SourceError> {
        Ok(())
    }
    async fn load(&self) -> Result<Loaded, SourceError> {
        Ok(Loaded::default())
    }
    async fn read(&self, _: ClaimLimit) -> Result<LogPage<u64>, SourceError> {
        let from = self.read.load(Relaxed);
        while self.written() <= from {
            if self.began.elapsed() > OUTAGE {
                pending::<()>().await;
            }
            sleep(Duration::from_millis(50)).await;
        }
        let mark = self.written().min(from + PAGE);
        self.read.store(mark, Relaxed);
        Ok(LogPage { events: (from..mark).map(|n| self.event(n)).collect(), delays: Vec::new(), mark })
    }
    async fn held(&self, _: &HeldQuery) -> Result<HeldPage, SourceError> {
        Ok(HeldPage::default())
    }
    async fn record(&self, changes: &Changes<u64>) -> Result<(), SourceError> {
        sleep(Duration::from_millis(1)).await;
        self.held.fetch_add(changes.held.len() as u64, Relaxed);
        self.passed.fetch_max(changes.mark.unwrap_or_default(), Relaxed);
        Ok(())
    }
}

/// A destination that does not always do what it should.
struct Broker {
    began: Instant,
    trouble: Trouble,
    sends: AtomicU64,
}

enum Trouble {
    /// From the first second on, until the outage is over.
    Away,
    /// The first batch takes so long.
    Slow(Duration),
    /// Each send takes so long.
    Sluggish(Duration),
    /// A send with an event that is a multiple of this takes so long.
    Mixed(u64, Duration),
}

impl Sink for Broker {
    fn limits(&self) -> Limits {
        Limits { batch_max: BATCH, bytes_max: usize::MAX, in_flight_max: IN_FLIGHT, keeps_key_order: true }
    }
    async fn send(&self, batch: &[Message]) -> Vec<Result<(), SendError>> {
        let away = match self.trouble {
            Trouble::Slow(time) if self.sends.fetch_add(1, Relaxed) == 0 => {
                sleep(time).await;
                false
            }
            Trouble::Slow(_) => false,
            Trouble::Sluggish(time) => {
                self.sends.fetch_add(1, Relaxed);
                sleep(time).await;
                false
            }
            Trouble::Mixed(each, time) => {
                let id = |message: &Message| u64::try_from(message.event.id()).unwrap();
                if batch.iter().any(|message| id(message).is_multiple_of(each)) {
                    self.sends.fetch_add(1, Relaxed);
                    sleep(time).await;
                }
                false
            }
            Trouble::Away => {
                self.sends.fetch_add(1, Relaxed);
                (Duration::from_secs(1)..OUTAGE).contains(&self.began.elapsed())
            }
        };
        sleep(ROUND).await;
        let answer = || if away { Err(SendError::new(SendErrorKind::Unavailable, "away")) } else { Ok(()) };
        batch.iter().map(|_| answer()).collect()
    }
    async fn check(&self) -> Result<(), SendError> {
        Ok(())
    }
}

struct Running {
    source: Arc<LogSource<Growing>>,
    sink: Arc<Broker>,
    counters: Arc<Counters>,
    stop: oneshot::Sender<()>,
    relay: JoinHandle<Result<Stopped, SourceError>>,
}

impl Running {
    fn start(rate: u64, keys: u64, trouble: Trouble) -> Running {
        let began = Instant::now();
        let log = Growing { began, rate, keys, read: 0.into(), passed: 0.into(), held: 0.into() };
        let options = RelayOptions { events_max: EVENTS_MAX, ..RelayOptions::default() };
        let source = Arc::new(LogSource::new(log, DeadPolicy::Skip).for_hand(options.hand()));
        let sink = Arc::new(Broker { began, trouble, sends: 0.into() });
        let rule = Rule { topic: "t".into(), ..Rule::default() };
        let relay = Relay::new(source.clone(), sink.clone(), Route::new(vec![rule]).unwrap(), options);
        let counters = relay.counters();
        let (stop, stopped) = oneshot::channel::<()>();
        let relay = tokio::spawn(relay.run(async { stopped.await.unwrap() }));
        Running { source, sink, counters, stop, relay }
    }
    fn read(&self) -> u64 {
        self.source.log().read.load(Relaxed)
    }
    fn passed(&self) -> u64 {
        self.source.log().passed.load(Relaxed)
    }
    /// Stops it; no event was at fault.
    async fn stop(self) {
        self.stop.send(()).unwrap();
        assert_eq!(self.relay.await.unwrap().unwrap(), Stopped::Clean);
        let counted = self.counters.snapshot();
        assert_eq!((counted.retried, counted.dead, counted.tenures), (0, 0, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn case_k1_half_an_hour_without_a_broker_costs_no_memory_and_no_attempt_and_then_it_drains_at_full_speed() {
    let relay = Running::start(RATE, 50, Trouble::Away);
    let began = relay.sink.began;
    sleep(Duration::from_secs(60)).await; // the relay knows
    let (read, passed, sends) = (relay.read(), relay.passed(), relay.sink.sends.load(Relaxed));
    assert!(passed > 0 && read - passed <= EVENTS_MAX as u64 + PAGE, "{read} events are read, {passed} passed");
    sleep(OUTAGE - began.elapsed() - Duration::from_millis(1)).await;
    assert_eq!((relay.read(), relay.passed()), (read, passed), "nothing is read that cannot be sent");
    let probes = relay.sink.sends.load(Relaxed) - sends;
    assert!((OUTAGE.as_secs() / 6..OUTAGE.as_secs() * 2).contains(&probes), "{probes} probes");

    // The last pause, then as fast as the destination takes it.
    let all = RATE * OUTAGE.as_secs();
    let rounds = (all - passed).div_ceil((BATCH * IN_FLIGHT) as u64);
    let bound = Duration::from_secs(6) + ROUND * u32::try_from(rounds).unwrap() * 5 / 4;
    sleep(bound).await;
    assert_eq!(relay.passed(), all, "not drained in {bound:?}");
    assert_eq!(relay.source.log().held.load(Relaxed), 0);
    relay.stop().await;
}

/// The default send_timeout is 30 s.
#[tokio::test(start_paused = true)]
async fn case_k2_a_destination_slower_than_the_send_timeout_is_given_more_time() {
    for takes in [20, 31, 100, 479] {
        let relay = Running::start(RATE, 50, Trouble::Sluggish(Duration::from_secs(takes)));
        sleep(Duration::from_secs(1_000)).await;
        let (passed, sends) = (relay.passed(), relay.sink.sends.load(Relaxed));
        sleep(Duration::from_secs(4_000)).await;
        let (passed, sends) = (relay.passed() - passed, relay.sink.sends.load(Relaxed) - sends);
        // Once it is known how slow it is, nothing is sent twice; what is in flight at both ends makes the difference.
        let once = passed.div_ceil(BATCH as u64) + IN_FLIGHT as u64;
        assert!(passed > 1_000 && sends <= once, "{passed} passed by {sends} sends that take {takes} s each");
        let counted = relay.counters.snapshot();
        assert_eq!((counted.retried, counted.dead, counted.tenures), (0, 0, 1));
        relay.relay.abort();
    }
}

/// Sixteen times as long, not longer: it may never come.
#[tokio::test(start_paused = true)]
async fn a_destination_that_takes_longer_than_the_longest_send_is_an_outage() {
    let relay = Running::start(RATE, 50, Trouble::Sluggish(Duration::from_secs(481)));
    sleep(Duration::from_secs(5_000)).await;
    assert_eq!(relay.passed(), 0);
    assert!(relay.counters.snapshot().outages >= 9);
    relay.relay.abort();
}

/// A slow batch every five minutes, among quick ones.
#[tokio::test(start_paused = true)]
async fn case_k2_what_is_slow_among_what_is_quick_gets_its_time() {
    let relay = Running::start(RATE, u64::MAX, Trouble::Mixed(30_000, Duration::from_secs(100)));
    sleep(OUTAGE).await;
    let (passed, slow) = (relay.passed(), relay.sink.sends.load(Relaxed));
    assert!(passed > 120_000, "{passed} passed");
    // The first is given 30 and 60 s in vain; from then on each needs one send.
    assert_eq!(slow - passed / 30_000, 2, "{slow} slow sends");
    relay.stop().await;
}

/// Each event has a key of its own: nothing but the cursor waits for the slow batch.
#[tokio::test(start_paused = true)]
async fn behind_one_slow_batch_no_more_is_published_than_a_crash_may_repeat() {
    let relay = Running::start(20_000, u64::MAX, Trouble::Slow(Duration::from_secs(20)));
    sleep(Duration::from_secs(19)).await;
    let (sent, may_repeat) = (relay.sink.sends.load(Relaxed) * BATCH as u64, repeated_max(EVENTS_MAX) as u64);
    assert_eq!(relay.passed(), 0, "the cursor waits for it");
    assert!((may_repeat / 2..=may_repeat).contains(&sent), "{sent} events went out");
    sleep(Duration::from_secs(20)).await;
    assert!(relay.passed() > 20 * may_repeat, "it goes on");
    relay.stop().await;
}

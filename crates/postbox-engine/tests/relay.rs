//! The relay's loop in paused time, where the simulator is too blunt: how it stops, and what it ends with.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use postbox_engine::{
    Claim, ClaimLimit, Claimed, Event, EventParts, Limits, Message, Relay, RelayOptions, Route, Rule, SendError,
    SendErrorKind, Settlement, Sink, Source, SourceError, SourceErrorKind, Stopped, Verdict,
};
use std::collections::VecDeque;
use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

const HOUR: Duration = Duration::from_secs(3600);

/// A source that does as it is told and remembers what it was told.
#[derive(Default)]
struct Told {
    acquires: Mutex<VecDeque<SourceError>>,
    /// When the lease was taken, and for how long: an hour, if nothing else is said.
    acquired: Mutex<Vec<Instant>>,
    lease: Option<Duration>,
    /// What renewals fail with, before they succeed.
    renews: Mutex<VecDeque<SourceErrorKind>>,
    /// Another relay has the lease.
    taken: bool,
    events: Mutex<Vec<Claimed>>,
    settled: Mutex<Vec<Settlement>>,
    /// What each settle said of the time of sending.
    sent: Mutex<Vec<Instant>>,
    releases: Mutex<u32>,
    /// From the first settle on it answers nothing any more.
    silent: bool,
}

impl Told {
    fn with(keys: &[&str]) -> Told {
        let event = |(ticket, key): (u64, &&str)| {
            let parts = EventParts { aggregate_type: "k", aggregate_id: key, headers: "{}", ..Default::default() };
            Claimed { ticket, event: Event::new(&parts), attempts: 0, replay: false }
        };
        Told { events: Mutex::new((0..).zip(keys).map(event).collect()), ..Told::default() }
    }
    fn verdicts(&self) -> Vec<(u64, Verdict)> {
        let mut verdicts: Vec<_> = self.settled.lock().unwrap().iter().map(|s| (s.ticket, s.verdict.clone())).collect();
        verdicts.sort_by_key(|v| v.0);
        verdicts
    }
    fn releases(&self) -> u32 {
        *self.releases.lock().unwrap()
    }
}

impl Source for Told {
    async fn acquire(&self) -> Result<Duration, SourceError> {
        if self.taken {
            pending::<()>().await;
        }
        if let Some(error) = self.acquires.lock().unwrap().pop_front() {
            return Err(error);
        }
        self.acquired.lock().unwrap().push(Instant::now());
        Ok(self.lease.unwrap_or(HOUR))
    }
    async fn renew(&self) -> Result<Duration, SourceError> {
        let fails = self.renews.lock().unwrap().pop_front();
        fails.map_or(Ok(self.lease.unwrap_or(HOUR)), |kind| Err(SourceError::new(kind, "not renewed")))
    }
    async fn claim(&self, _: ClaimLimit) -> Result<Claim, SourceError> {
        let events = std::mem::take(&mut *self.events.lock().unwrap());
        if events.is_empty() {
            pending::<()>().await;
        }
        Ok(Claim { events })
    }
    async fn settle(&self, settlements: &[Settlement], sent: Instant) -> Result<(), SourceError> {
        self.sent.lock().unwrap().push(sent);
        if self.silent {
            pending::<()>().await;
        }
        sleep(Duration::from_millis(5)).await;
        self.settled.lock().unwrap().extend_from_slice(settlements);
        Ok(())
    }
    async fn release(&self) -> Result<(), SourceError> {
        *self.releases.lock().unwrap() += 1;
        if self.silent {
            pending::<()>().await;
        }
        Ok(())
    }
}

/// A sink that answers by a script: for each send in turn, after how long and what; never, when the script is over.
struct Script {
    answers: Mutex<VecDeque<(Duration, Result<(), SendErrorKind>)>>,
    /// When each send began, and with how many messages.
    sends: Mutex<Vec<(Instant, usize)>>,
    sent: Notify,
    prepared: AtomicUsize,
    limits: Limits,
    /// What failures ask for.
    retry_after: Option<Duration>,
}

impl Script {
    fn new(answers: &[(u64, Result<(), SendErrorKind>)], batch_max: usize) -> Script {
        Script {
            answers: Mutex::new(answers.iter().map(|&(ms, result)| (Duration::from_millis(ms), result)).collect()),
            sends: Mutex::default(),
            sent: Notify::new(),
            prepared: AtomicUsize::new(0),
            limits: Limits { batch_max, bytes_max: usize::MAX, in_flight_max: 4, keeps_key_order: true },
            retry_after: None,
        }
    }
    fn sends(&self) -> usize {
        self.sends.lock().unwrap().len()
    }
    async fn wait_for(&self, sends: usize) {
        let reached = async {
            loop {
                let sent = self.sent.notified();
                if self.sends() >= sends {
                    return;
                }
                sent.await;
            }
        };
        timeout(HOUR, reached).await.expect("the relay sends");
    }
}

impl Sink for Script {
    fn limits(&self) -> Limits {
        self.limits
    }
    fn prepare(&self) {
        self.prepared.fetch_add(1, SeqCst);
    }
    async fn send(&self, batch: &[Message]) -> Vec<Result<(), SendError>> {
        self.sends.lock().unwrap().push((Instant::now(), batch.len()));
        self.sent.notify_waiters();
        let answer = self.answers.lock().unwrap().pop_front();
        let Some((after, result)) = answer else { return pending().await };
        sleep(after).await;
        let failed = |kind| SendError { retry_after: self.retry_after, ..SendError::new(kind, "as the script says") };
        batch.iter().map(|_| result.map_err(failed)).collect()
    }
    async fn check(&self) -> Result<(), SendError> {
        Ok(())
    }
}

struct Running {
    source: Arc<Told>,
    sink: Arc<Script>,
    stop: oneshot::Sender<()>,
    relay: JoinHandle<Result<Stopped, SourceError>>,
}

impl Running {
    fn start(source: Told, sink: Script) -> Running {
        let (source, sink) = (Arc::new(source), Arc::new(sink));
        let rule = Rule { topic: "t".into(), ..Rule::default() };
        let options = RelayOptions {
            drain_timeout: Duration::from_secs(10),
            send_timeout: Duration::from_secs(30),
            ..RelayOptions::default()
        };
        let relay = Relay::new(source.clone(), sink.clone(), Route::new(vec![rule]).unwrap(), options);
        let (stop, stopped) = oneshot::channel();
        let relay = tokio::spawn(relay.run(async move {
            if stopped.await.is_err() {
                pending::<()>().await;
            }
        }));
        Running { source, sink, stop, relay }
    }

    /// Stops it; how it ended, and how long that took.
    async fn stop(self) -> (Arc<Told>, Result<Stopped, SourceError>, Duration) {
        let began = Instant::now();
        self.stop.send(()).expect("the relay runs");
        let ended = timeout(HOUR, self.relay).await.expect("the relay ends").expect("it does not panic");
        (self.source, ended, began.elapsed())
    }
}

const OK: Result<(), SendErrorKind> = Ok(());

#[tokio::test(start_paused = true)]
async fn case_l4_a_stop_finishes_what_is_in_flight_and_gives_back_the_rest() {
    // Two of the three are in flight; the lane of the third is not started, since a batch holds one.
    let mut sink = Script::new(&[(2_000, OK), (3_000, OK)], 1);
    sink.limits.in_flight_max = 2;
    let relay = Running::start(Told::with(&["a", "b", "c"]), sink);
    relay.sink.wait_for(2).await;
    let sink = relay.sink.clone();
    let (source, ended, took) = relay.stop().await;
    assert_eq!(ended.unwrap(), Stopped::Clean);
    assert_eq!(sink.sends(), 2, "nothing is sent after the stop");
    assert_eq!(source.verdicts(), [(0, Verdict::Published), (1, Verdict::Published), (2, Verdict::Release)]);
    assert_eq!(source.releases(), 1);
    assert!(took >= Duration::from_secs(3) && took < Duration::from_secs(4), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_settle_says_by_when_its_events_were_handed_over() {
    let mut sink = Script::new(&[(2_000, OK), (3_000, OK), (1_000, OK)], 1);
    sink.limits.in_flight_max = 2; // the third goes when the first is back, and is back with the second
    let relay = Running::start(Told::with(&["a", "b", "c"]), sink);
    relay.sink.wait_for(3).await;
    let sink = relay.sink.clone();
    let (source, ended, _) = relay.stop().await;
    assert_eq!(ended.unwrap(), Stopped::Clean);
    let sends: Vec<Instant> = sink.sends.lock().unwrap().iter().map(|(at, _)| *at).collect();
    let said = source.sent.lock().unwrap().clone();
    assert_eq!((said.first(), said.last()), (Some(&sends[0]), Some(&sends[2])));
    assert!(sends[2] >= sends[0] + Duration::from_secs(2) && said.is_sorted(), "{said:?}");
}

#[tokio::test(start_paused = true)]
async fn at_the_drain_deadline_what_is_in_flight_is_abandoned_and_the_rest_is_settled() {
    let relay = Running::start(Told::with(&["a", "b"]), Script::new(&[(9_000, OK)], 1));
    relay.sink.wait_for(2).await;
    let (source, ended, took) = relay.stop().await;
    assert_eq!(ended.unwrap(), Stopped::Abandoned { in_flight: 1 });
    assert_eq!(source.verdicts(), [(0, Verdict::Published)], "no verdict on what has no outcome");
    assert_eq!(source.releases(), 1);
    assert!(took >= Duration::from_secs(10) && took < Duration::from_secs(11), "{took:?}");
}

/// It ends within seconds of its deadline, and claims neither what was not recorded nor a lease that was not taken back.
#[tokio::test(start_paused = true)]
async fn case_l4_a_source_that_is_silent_keeps_no_relay_from_ending() {
    let source = Told { silent: true, ..Told::with(&["a", "b", "c"]) };
    let relay = Running::start(source, Script::new(&[(1_000, OK), (1_000, OK)], 1));
    relay.sink.wait_for(3).await;
    sleep(Duration::from_secs(2)).await;
    let (source, ended, took) = relay.stop().await;
    assert_eq!(ended.unwrap(), Stopped::Abandoned { in_flight: 3 }, "two are not recorded, one has no answer");
    assert_eq!((source.verdicts(), source.releases()), (vec![], 1));
    assert!(took >= Duration::from_secs(10) && took < Duration::from_secs(17), "{took:?}");

    let idle = Running::start(Told { silent: true, ..Told::with(&[]) }, Script::new(&[], 1));
    sleep(Duration::from_secs(2)).await;
    let (_, ended, took) = idle.stop().await;
    assert_eq!(ended.unwrap(), Stopped::LeaseKept);
    assert!(took < Duration::from_secs(4), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_stands_by_has_its_sink_prepared_and_stops_at_once() {
    let relay = Running::start(Told { taken: true, ..Told::default() }, Script::new(&[], 1));
    sleep(Duration::from_secs(60)).await;
    assert_eq!(relay.sink.prepared.load(SeqCst), 1);
    let (source, ended, took) = relay.stop().await;
    assert_eq!((ended.unwrap(), source.releases(), took), (Stopped::Clean, 1, Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_waits_out_an_outage_of_the_source_stops_at_once_and_hands_over() {
    let out = || SourceError::new(SourceErrorKind::Unavailable, "out");
    let source = Told { acquires: Mutex::new((0..1_000).map(|_| out()).collect()), ..Told::default() };
    let relay = Running::start(source, Script::new(&[], 1));
    sleep(Duration::from_secs(60)).await;
    let tries = 1_000 - relay.source.acquires.lock().unwrap().len();
    assert!((12..200).contains(&tries), "{tries} tries in a minute: pauses grow to five seconds");
    let (source, ended, took) = relay.stop().await;
    assert_eq!((ended.unwrap(), source.releases(), took), (Stopped::Clean, 1, Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_by_the_source_ends_the_relay_with_its_error() {
    let refused = SourceError::new(SourceErrorKind::Refused, "schema missing: run `postbox migrate`");
    let source = Told { acquires: Mutex::new([refused].into()), ..Told::default() };
    let relay = Running::start(source, Script::new(&[], 1));
    let ended = timeout(HOUR, relay.relay).await.expect("it ends by itself").unwrap();
    assert_eq!(ended.unwrap_err().to_string(), "schema missing: run `postbox migrate`");
}

#[tokio::test(start_paused = true)]
async fn case_k3_a_send_without_an_outcome_is_sent_again_and_costs_no_attempt() {
    // The first answer comes after the send timeout of 30 s.
    let relay = Running::start(Told::with(&["a"]), Script::new(&[(40_000, OK), (1, OK)], 1));
    relay.sink.wait_for(2).await;
    let began: Vec<_> = relay.sink.sends.lock().unwrap().iter().map(|s| s.0).collect();
    assert!(began[1] - began[0] >= Duration::from_secs(30));
    let (source, ended, _) = relay.stop().await;
    assert_eq!(ended.unwrap(), Stopped::Clean);
    assert_eq!(source.verdicts(), [(0, Verdict::Published)]);
}

#[tokio::test(start_paused = true)]
async fn case_k1_during_an_outage_one_batch_probes_and_no_attempt_is_spent() {
    let out = (1, Err(SendErrorKind::Unavailable));
    let script: Vec<_> = std::iter::repeat_n(out, 40).chain(std::iter::repeat_n((1, OK), 4)).collect();
    let relay = Running::start(Told::with(&["a", "b", "c", "d"]), Script::new(&script, 1));
    relay.sink.wait_for(44).await;
    let sends = relay.sink.sends.lock().unwrap().clone();
    let (first, probes) = sends.split_at(4);
    assert!(first.iter().all(|s| s.0 == first[0].0), "four in flight before the outage is known");
    // Then one at a time: no two probes begin together.
    assert!(probes[..36].windows(2).all(|w| w[1].0 > w[0].0), "{probes:?}");
    let (source, _, _) = relay.stop().await;
    let published = |ticket| (ticket, Verdict::Published);
    assert_eq!(source.verdicts(), [published(0), published(1), published(2), published(3)]);
}

#[tokio::test(start_paused = true)]
async fn case_k9_a_receiver_that_asks_for_a_pause_gets_it() {
    const ASKED: Duration = Duration::from_secs(120);
    let out = [(1, Err(SendErrorKind::Unavailable)), (1, OK)];
    let relay = Running::start(Told::with(&["a"]), Script { retry_after: Some(ASKED), ..Script::new(&out, 1) });
    relay.sink.wait_for(2).await;
    let sends = relay.sink.sends.lock().unwrap().clone();
    let pause = sends[1].0 - sends[0].0;
    assert!(pause >= ASKED && pause < ASKED + Duration::from_secs(1), "no pause of our own is as long: {pause:?}");
    relay.stop().await.1.unwrap();
}

#[tokio::test(start_paused = true)]
async fn case_o6_an_event_without_a_route_is_dead_with_the_reason_and_the_others_flow() {
    let source = Told::with(&["a", "b"]);
    let bad = EventParts { aggregate_type: "k", aggregate_id: "x", headers: "[]", ..Default::default() };
    source.events.lock().unwrap().insert(1, Claimed { ticket: 9, event: Event::new(&bad), attempts: 0, replay: false });
    let relay = Running::start(source, Script::new(&[(1, OK)], 10));
    relay.sink.wait_for(1).await;
    let (source, ended, _) = relay.stop().await;
    assert_eq!(ended.unwrap(), Stopped::Clean);
    let verdicts = source.verdicts();
    assert_eq!(verdicts[..2], [(0, Verdict::Published), (1, Verdict::Published)]);
    assert!(
        matches!(&verdicts[2], (9, Verdict::Dead { attempts: 0, error }) if error.contains("headers")),
        "{verdicts:?}"
    );
}

const LEASE: Duration = Duration::from_secs(10);

/// A source with a lease of ten seconds, whose renewals fail so often.
fn failing(times: usize, kind: SourceErrorKind) -> Told {
    Told { lease: Some(LEASE), renews: Mutex::new(vec![kind; times].into()), ..Told::with(&["a"]) }
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_fails_is_tried_again_and_the_tenure_goes_on() {
    let relay = Running::start(failing(10, SourceErrorKind::Unavailable), Script::new(&[(25_000, OK)], 1));
    relay.sink.wait_for(1).await;
    sleep(Duration::from_secs(30)).await;
    assert_eq!(relay.source.renews.lock().unwrap().len(), 0);
    let (source, ended, _) = relay.stop().await;
    assert_eq!(ended.unwrap(), Stopped::Clean);
    assert_eq!(source.acquired.lock().unwrap().len(), 1, "a send longer than the lease keeps its tenure");
    assert_eq!(source.verdicts(), [(0, Verdict::Published)]);
}

#[tokio::test(start_paused = true)]
async fn when_no_renewal_succeeds_the_tenure_ends_before_its_lease() {
    let relay = Running::start(failing(1_000, SourceErrorKind::Unavailable), Script::new(&[(9_500, OK)], 1));
    relay.sink.wait_for(1).await;
    sleep(Duration::from_millis(8_900)).await;
    let tries = 1_000 - relay.source.renews.lock().unwrap().len();
    assert!((10..40).contains(&tries), "{tries} tries");
    sleep(Duration::from_secs(6)).await;
    let acquired = relay.source.acquired.lock().unwrap().clone();
    assert!(acquired[1] - acquired[0] >= LEASE * 9 / 10, "{acquired:?}");
    assert_eq!(relay.source.verdicts(), [], "what came back after the tenure's end is not settled");
}

#[tokio::test(start_paused = true)]
async fn a_tenure_that_no_renewal_can_help_ends_at_once() {
    for kind in [SourceErrorKind::LeaseLost, SourceErrorKind::Disconnected] {
        let relay = Running::start(failing(1, kind), Script::new(&[], 1));
        sleep(LEASE).await;
        let acquired = relay.source.acquired.lock().unwrap().clone();
        assert!(acquired.len() == 2 && acquired[1] - acquired[0] < LEASE / 2, "{acquired:?}");
    }
}

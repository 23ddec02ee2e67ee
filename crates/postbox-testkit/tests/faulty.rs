//! The wrappers fail as scripted, and only then.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod memory;

use memory::Memory;
use postbox_engine::{
    ClaimLimit, DeadPolicy, Event, EventParts, Limits, Message, SendError, SendErrorKind, Settlement, Sink, Source,
    SourceErrorKind, Verdict,
};
use postbox_testkit::faulty::{Call, Fault, FaultySink, FaultySource};
use postbox_testkit::source_suite::{Draft, End, Harness, Outbox, Setup};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

const LIMIT: ClaimLimit = ClaimLimit { events_max: 10, bytes_max: 1 << 20 };

/// A source with one event waiting, and the lease.
async fn source() -> FaultySource<impl Source> {
    let outbox = Memory(None).outbox().await;
    outbox.write(&[Draft::default()], End::Commit).await;
    let setup = Setup { relay: "one", stream: "main", lease: Duration::from_secs(300), policy: DeadPolicy::Skip };
    let source = FaultySource::new(outbox.source(setup).await);
    source.acquire().await.unwrap();
    source
}

#[tokio::test]
async fn a_refused_call_does_nothing_and_the_next_one_passes() {
    let source = source().await;
    source.script(Call::Claim, &[Fault::Pass, Fault::Refuse]);
    source.script(Call::Renew, &[Fault::Refuse]);
    assert_eq!(source.renew().await.unwrap_err().kind, SourceErrorKind::Unavailable);
    source.renew().await.unwrap();
    let claimed = source.claim(LIMIT).await.unwrap().events;
    assert_eq!(source.claim(LIMIT).await.unwrap_err().kind, SourceErrorKind::Unavailable);
    let release = [Settlement { ticket: claimed[0].ticket, verdict: Verdict::Release }];
    source.script(Call::Settle, &[Fault::Refuse]);
    source.settle(&release, tokio::time::Instant::now()).await.unwrap_err();
    source.settle(&release, tokio::time::Instant::now()).await.unwrap();
    assert_eq!(source.claim(LIMIT).await.unwrap().events.len(), 1);
}

#[tokio::test]
async fn what_is_done_then_fails_is_done() {
    let source = source().await;
    let claimed = source.claim(LIMIT).await.unwrap().events;
    source.script(Call::Settle, &[Fault::DoThenFail]);
    let release = [Settlement { ticket: claimed[0].ticket, verdict: Verdict::Release }];
    assert_eq!(
        source.settle(&release, tokio::time::Instant::now()).await.unwrap_err().kind,
        SourceErrorKind::Unavailable
    );
    assert_eq!(source.claim(LIMIT).await.unwrap().events.len(), 1, "it was released");
}

/// Counts what it was given.
#[derive(Default)]
struct Counting(AtomicUsize);

impl Sink for Counting {
    fn limits(&self) -> Limits {
        Limits { batch_max: 10, bytes_max: 1 << 20, in_flight_max: 2, keeps_key_order: true }
    }
    async fn send(&self, batch: &[Message]) -> Vec<Result<(), SendError>> {
        self.0.fetch_add(batch.len(), SeqCst);
        vec![Ok(()); batch.len()]
    }
    async fn check(&self) -> Result<(), SendError> {
        Ok(())
    }
}

fn batch() -> Vec<Message> {
    let event = Event::new(&EventParts::default());
    vec![Message { event, destination: "here".into(), headers: Default::default(), body: None }; 2]
}

fn sent(sink: &FaultySink<Counting>) -> usize {
    sink.inner().0.load(SeqCst)
}

#[tokio::test]
async fn a_sink_refuses_or_leaves_the_outcome_unknown() {
    let sink = FaultySink::new(Counting::default());
    sink.script(&[Fault::Refuse, Fault::DoThenFail]);
    let kinds =
        |outcomes: Vec<Result<(), SendError>>| outcomes.into_iter().map(|o| o.unwrap_err().kind).collect::<Vec<_>>();
    assert_eq!(kinds(sink.send(&batch()).await), [SendErrorKind::Unavailable; 2]);
    assert_eq!(sent(&sink), 0);
    assert_eq!(kinds(sink.send(&batch()).await), [SendErrorKind::Unknown; 2]);
    assert_eq!(sent(&sink), 2);
    assert_eq!(sink.send(&batch()).await, [Ok(()), Ok(())]);
}

#[tokio::test]
async fn a_held_send_waits_until_it_is_let_go() {
    let sink = FaultySink::new(Counting::default());
    sink.script(&[Fault::Hold, Fault::DoThenHold]);
    let batch = batch();
    let mut both = Box::pin(async { tokio::join!(sink.send(&batch), sink.send(&batch)) });
    tokio::select! {
        biased;
        _ = &mut both => panic!("they are held"),
        () = sink.until_held(2) => {}
    }
    assert_eq!(sent(&sink), 2, "one waits before, one behind it");
    sink.let_go();
    assert_eq!(both.await, (vec![Ok(()); 2], vec![Ok(()); 2]));
    assert_eq!(sent(&sink), 4);
}

#[tokio::test]
async fn a_held_call_can_be_dropped() {
    let sink = FaultySink::new(Counting::default());
    sink.script(&[Fault::Hold]);
    let batch = batch();
    let mut held = Box::pin(sink.send(&batch));
    tokio::select! {
        biased;
        _ = &mut held => panic!("it is held"),
        () = sink.until_held(1) => {}
    }
    drop(held);
    sink.let_go();
    assert_eq!(sent(&sink), 0);
    assert_eq!(sink.send(&batch).await.len(), 2);
}

#[tokio::test]
async fn a_slow_send_takes_its_time() {
    let sink = FaultySink::new(Counting::default());
    sink.script(&[Fault::Slow(Duration::from_millis(100))]);
    let start = Instant::now();
    assert_eq!(sink.send(&batch()).await, [Ok(()), Ok(())]);
    assert!(start.elapsed() >= Duration::from_millis(100));
}

//! What a log refuses: at the start it ends the relay, once the log has worked it is an outage.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use postbox_engine::SourceErrorKind::{self, Refused, Unavailable};
use postbox_engine::{
    Changes, ClaimLimit, DeadPolicy, Event, EventParts, HeldPage, HeldQuery, Loaded, Log, LogPage, LogSource,
    Settlement, Source, SourceError, Verdict,
};
use std::fmt::Debug;
use std::sync::Mutex;
use std::time::Duration;
use tokio::time::Instant;

const LIMIT: ClaimLimit = ClaimLimit { events_max: 10, bytes_max: 1_000 };
const LEASE: Duration = Duration::from_secs(10);

/// A log of one event without end, which refuses the calls of one name.
#[derive(Default)]
struct Refusing(Mutex<&'static str>);

impl Refusing {
    fn answer<T>(&self, call: &str, value: T) -> Result<T, SourceError> {
        if *self.0.lock().unwrap() == call {
            return Err(SourceError::new(Refused, "no right"));
        }
        Ok(value)
    }
}

impl Log for Refusing {
    type Mark = ();

    async fn acquire(&self) -> Result<Result<Duration, Duration>, SourceError> {
        self.answer("acquire", Ok(LEASE))
    }
    async fn renew(&self) -> Result<Duration, SourceError> {
        self.answer("renew", LEASE)
    }
    async fn release(&self) -> Result<(), SourceError> {
        Ok(())
    }
    async fn load(&self) -> Result<Loaded, SourceError> {
        self.answer("load", Loaded { keys: Vec::new(), next_due: Some(Duration::ZERO) })
    }
    async fn read(&self, _: ClaimLimit) -> Result<LogPage<()>, SourceError> {
        let event = EventParts { id: 1, aggregate_type: "a", aggregate_id: "1", headers: "{}", ..Default::default() };
        self.answer("read", LogPage { events: vec![Event::new(&event)], delays: Vec::new(), mark: () })
    }
    async fn held(&self, _: &HeldQuery) -> Result<HeldPage, SourceError> {
        self.answer("held", HeldPage::default())
    }
    async fn record(&self, _: &Changes<()>) -> Result<(), SourceError> {
        self.answer("record", ())
    }
}

fn source() -> LogSource<Refusing> {
    LogSource::new(Refusing::default(), DeadPolicy::Skip)
}

fn refuse(source: &LogSource<Refusing>, call: &'static str) {
    *source.log().0.lock().unwrap() = call;
}

fn kind<T: Debug>(result: Result<T, SourceError>) -> SourceErrorKind {
    result.unwrap_err().kind
}

#[tokio::test]
async fn a_log_that_never_worked_refuses() {
    let source = source();
    refuse(&source, "acquire");
    assert_eq!(kind(source.acquire().await), Refused);
    assert_eq!(kind(source.acquire().await), Refused, "its refusals are no work");
}

#[tokio::test]
async fn what_a_log_that_has_worked_refuses_is_an_outage() {
    let source = source();
    source.acquire().await.unwrap();
    for call in ["acquire", "load"] {
        refuse(&source, call);
        assert_eq!(kind(source.acquire().await), Unavailable, "{call}");
    }
    for call in ["held", "read"] {
        refuse(&source, "");
        source.acquire().await.unwrap(); // and held events are to be asked for
        refuse(&source, call);
        assert_eq!(kind(source.claim(LIMIT).await), Unavailable, "{call}");
    }
    refuse(&source, "renew");
    assert_eq!(kind(source.renew().await), Unavailable);
    refuse(&source, "");
    source.acquire().await.unwrap();
    let claim = source.claim(LIMIT).await.unwrap();
    let settlements = [Settlement { ticket: claim.events[0].ticket, verdict: Verdict::Published }];
    refuse(&source, "record");
    assert_eq!(kind(source.settle(&settlements, Instant::now()).await), Unavailable);
    assert_eq!(kind(source.settle(&[], Instant::now()).await), Unavailable, "the tenure is over");
}

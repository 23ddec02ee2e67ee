//! The sinks against a real Kafka and a hostile HTTP server.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod consumer;
mod kafka;
#[cfg(feature = "kafka-tls")]
mod kafka_tls;
mod kafka_wire;
mod suite;
mod webhook;

use postbox_engine::{Envelope, Event, EventParts, Message, Route, Rule, SendError, SendErrorKind};
use std::time::Duration;

/// Every wait for a fact ends here.
const DEADLINE: Duration = Duration::from_secs(60);

/// An event's usual fields; its number is in its id.
fn parts<'a>(number: u32, key: &'a str, payload: Option<&'a [u8]>) -> EventParts<'a> {
    let mut event_id = [0; 16];
    event_id[12..].copy_from_slice(&number.to_be_bytes());
    EventParts {
        id: i64::from(number),
        event_id,
        aggregate_type: "order",
        aggregate_id: key,
        event_type: "order.placed",
        schema_version: 1,
        content_type: "application/json",
        headers: "{}",
        payload,
        created_at: 1_709_251_199_999_999,
        ..Default::default()
    }
}

fn routed(topic: &str, envelope: Envelope, parts: &EventParts<'_>) -> Message {
    let rule = Rule { topic: topic.into(), envelope, ..Rule::default() };
    Route::new(vec![rule]).unwrap().message(&Event::new(parts), false).unwrap()
}

fn message(topic: &str, number: u32, key: &str, payload: &[u8]) -> Message {
    routed(topic, Envelope::Plain, &parts(number, key, Some(payload)))
}

fn kinds(outcomes: &[Result<(), SendError>]) -> Vec<Option<SendErrorKind>> {
    outcomes.iter().map(|outcome| outcome.as_ref().err().map(|error| error.kind)).collect()
}

/// The future's outcome, or the test fails.
async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.expect("the deadline of the test")
}

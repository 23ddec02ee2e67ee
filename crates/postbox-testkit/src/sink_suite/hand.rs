//! Sends as the engine would, with a deadline on each wait, and looks at what arrived. Messages are named by key and
//! number ("a1", "a2", "b1"), which is their body.

pub(super) use crate::soon;

use super::{Destination, Received};
use postbox_engine::{Event, EventParts, Headers, Limits, Message, SendError, SendErrorKind, Sink};
use std::collections::HashSet;
use std::time::Duration;
use tokio::time::timeout;

/// A relay that gives a send up after this.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// A destination that was down is used again within this.
pub(super) const LATE: Duration = Duration::from_secs(90);

pub(super) type Outcomes = Vec<Result<(), SendError>>;

/// A message for a destination; the rest is the rule's.
pub(super) fn message(to: &str, key: &str, body: Option<&[u8]>) -> Message {
    let event = Event::new(&EventParts {
        event_id: *uuid::Uuid::now_v7().as_bytes(),
        aggregate_type: "order",
        aggregate_id: key,
        event_type: "order.placed",
        schema_version: 1,
        payload: body,
        content_type: "application/json",
        headers: "{}",
        ..EventParts::default()
    });
    Message { event, destination: to.into(), headers: Headers::default(), body: None }
}

/// Messages by name: "a1 a2 b1".
pub(super) fn messages(to: &str, names: &str) -> Vec<Message> {
    names.split(' ').map(|name| message(to, &name[..1], Some(format!("\"{name}\"").as_bytes()))).collect()
}

/// Cuts messages into batches as the engine may send them.
pub(super) fn batches(limits: Limits, messages: &[Message]) -> Vec<Vec<Message>> {
    let mut batches: Vec<Vec<Message>> = Vec::new();
    for message in messages {
        let fits = batches.last().is_some_and(|batch| {
            let bytes: usize = batch.iter().map(Message::bytes).sum();
            let alone = limits.keeps_key_order || batch.iter().all(|m| m.event.key() != message.event.key());
            batch.len() < limits.batch_max && bytes + message.bytes() <= limits.bytes_max && alone
        });
        match batches.last_mut() {
            Some(batch) if fits => batch.push(message.clone()),
            _ => batches.push(vec![message.clone()]),
        }
    }
    batches
}

/// Sends messages batch after batch; all outcomes, in order.
pub(super) async fn send(sink: &impl Sink, messages: &[Message]) -> Outcomes {
    let mut outcomes = Vec::new();
    for batch in batches(sink.limits(), messages) {
        let answered = timeout(soon(), sink.send(&batch)).await.expect("a batch has its outcomes in time");
        assert_eq!(answered.len(), batch.len(), "one outcome per message");
        outcomes.extend(answered);
    }
    outcomes
}

pub(super) async fn send_well(sink: &impl Sink, messages: &[Message]) {
    for (outcome, message) in send(sink, messages).await.into_iter().zip(messages) {
        outcome.unwrap_or_else(|e| panic!("{:?}: {e}", message.event));
    }
}

/// Sends until all is acknowledged: what failed, and what was behind it, again.
pub(super) async fn send_until_done(sink: &impl Sink, messages: &[Message]) {
    let again = async {
        let mut left = messages.to_vec();
        while !left.is_empty() {
            let outcomes = match timeout(PATIENCE, send_once(sink, &left)).await {
                Ok(outcomes) => outcomes,
                Err(_) => continue, // given up: nothing counts as acknowledged
            };
            let mut outcomes = outcomes.into_iter();
            left.retain(|_| !matches!(outcomes.next(), Some(Ok(()))));
        }
    };
    timeout(LATE, again).await.expect("all is acknowledged in time, once the destination is back");
}

/// One round; it ends with the first batch that does not go through.
async fn send_once(sink: &impl Sink, messages: &[Message]) -> Outcomes {
    let mut outcomes = Vec::new();
    for batch in batches(sink.limits(), messages) {
        let answered = sink.send(&batch).await;
        assert_none_passed(&batch, &answered);
        outcomes.extend(answered);
        if outcomes.iter().any(Result::is_err) {
            tokio::time::sleep(Duration::from_millis(100)).await; // the step of a wait with a deadline
            break;
        }
    }
    outcomes
}

/// Behind a message that the destination did not take, none of its key was taken.
fn assert_none_passed(batch: &[Message], outcomes: &Outcomes) {
    let mut stopped = HashSet::new();
    for (message, outcome) in batch.iter().zip(outcomes) {
        match outcome {
            Ok(()) => assert!(!stopped.contains(&message.event.key()), "{:?} overtook one of its key", message.event),
            Err(e) if e.kind == SendErrorKind::Unavailable => _ = stopped.insert(message.event.key()),
            Err(_) => {} // rejected, or nobody knows
        }
    }
}

/// All that arrived, once so many have.
pub(super) async fn received(destination: &impl Destination, at_least: usize) -> Vec<Received> {
    timeout(soon(), destination.received(at_least)).await.expect("what was acknowledged is there")
}

/// All that arrived, once each of the messages has, however often.
pub(super) async fn received_each(destination: &impl Destination, messages: &[Message]) -> Vec<Received> {
    let mut at_least = messages.len();
    loop {
        let all = received(destination, at_least).await;
        if messages.iter().all(|m| all.iter().any(|r| r.event_id == m.event.event_id())) {
            return all;
        }
        at_least = all.len() + 1;
    }
}

/// The one delivery of a message.
pub(super) fn only<'a>(all: &'a [Received], message: &Message) -> &'a Received {
    let found: Vec<_> = all.iter().filter(|r| r.event_id == message.event.event_id()).collect();
    assert_eq!(found.len(), 1, "{:?} arrived {} times", message.event, found.len());
    found[0]
}

/// First deliveries of each key are in the order of the messages, and nothing else arrived.
pub(super) fn assert_order(all: &[Received], messages: &[Message]) {
    let mut seen = HashSet::new();
    let first: Vec<_> = all.iter().map(|r| r.event_id).filter(|id| seen.insert(*id)).collect();
    let keys: HashSet<_> = messages.iter().map(|m| m.event.key()).collect();
    for key in keys {
        let sent: Vec<_> = messages.iter().filter(|m| m.event.key() == key).map(|m| m.event.event_id()).collect();
        let came: Vec<_> = first.iter().copied().filter(|id| sent.contains(id)).collect();
        let place = |id: &[u8; 16]| sent.iter().position(|s| s == id);
        assert_eq!(came, sent, "order of first deliveries: {:?}", came.iter().map(place).collect::<Vec<_>>());
    }
    let sent: HashSet<_> = messages.iter().map(|m| m.event.event_id()).collect();
    assert!(first.iter().all(|id| sent.contains(id)), "something arrived that was not sent");
}

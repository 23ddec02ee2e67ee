//! Outcomes and order.

use super::hand::*;
use super::{Destination, Harness};
use futures_util::future::join_all;
use postbox_engine::Sink;
use tokio::time::timeout;

/// One outcome per message; each arrives once, with its id, its key and its body, in the order of its key.
pub async fn each_message_has_its_outcome_and_arrives_once_in_order<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let sink = destination.sink().await;
    let names: Vec<_> = (1..=12).flat_map(|i| ["a", "b", "c"].map(|key| format!("{key}{i}"))).collect();
    let sent = messages(&destination.name(), &names.join(" "));
    send_well(&sink, &sent).await;
    let all = received(&destination, sent.len()).await;
    assert_order(&all, &sent);
    for message in &sent {
        let arrived = only(&all, message);
        assert_eq!(arrived.body.as_deref(), message.body());
        if destination.nature().keyed {
            assert_eq!(arrived.key, message.event.aggregate_id());
        }
    }
}

/// Several batches at once, up to the sink's limit: a key's messages arrive in the order of the calls.
pub async fn calls_keep_the_order_of_a_key<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let sink = destination.sink().await;
    let limits = sink.limits();
    let keys: Vec<String> = ('a'..='z').map(String::from).take(limits.in_flight_max.min(26)).collect();
    let mut sent = Vec::new();
    for round in 1..=10 {
        let named = |key: &String| messages(&destination.name(), &format!("{key}{round}"));
        // Where the sink keeps the order, all batches hold all keys; elsewhere each has a key of its own.
        let whole = || keys.iter().flat_map(named).collect::<Vec<_>>();
        let batches: Vec<Vec<_>> = match limits.keeps_key_order {
            true => (0..limits.in_flight_max).map(|_| whole()).collect(),
            false => keys.iter().map(named).collect(),
        };
        let calls: Vec<_> = batches.iter().map(|batch| sink.send(batch)).collect();
        let outcomes = timeout(soon(), join_all(calls)).await.expect("batches have their outcomes in time");
        for (outcomes, batch) in outcomes.into_iter().zip(&batches) {
            assert_eq!(outcomes.len(), batch.len());
            assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        }
        sent.extend(batches.into_iter().flatten());
    }
    let all = received(&destination, sent.len()).await;
    assert_eq!(all.len(), sent.len());
    assert_order(&all, &sent);
}

/// As many messages as the sink says it takes in one call.
pub async fn a_full_batch_arrives<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let sink = destination.sink().await;
    let n = sink.limits().batch_max.min(5000);
    let sent: Vec<_> = (0..n).map(|i| message(&destination.name(), &format!("key-{i}"), Some(b"{}"))).collect();
    send_well(&sink, &sent).await;
    let all = received(&destination, n).await;
    assert_eq!(all.len(), n);
    assert_order(&all, &sent);
}

/// Two relays' sinks to one destination, one of them dropped in between.
pub async fn two_sinks_do_not_disturb_each_other<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let (first, second) = (destination.sink().await, destination.sink().await);
    let sent = messages(&destination.name(), "a1 b1 a2 b2 a3 b3");
    send_well(&first, &sent[..2]).await;
    send_well(&second, &sent[2..4]).await;
    drop(first);
    send_well(&second, &sent[4..]).await;
    assert_order(&received(&destination, sent.len()).await, &sent);
}

/// Nothing in, nothing out.
pub async fn an_empty_batch_has_no_outcomes<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let sink = destination.sink().await;
    let outcomes = timeout(soon(), sink.send(&[])).await.expect("an empty batch has its outcomes in time");
    assert!(outcomes.is_empty(), "{outcomes:?}");
    let sent = messages(&destination.name(), "a1");
    send_well(&sink, &sent).await;
    assert_order(&received(&destination, 1).await, &sent);
}

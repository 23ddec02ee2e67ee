//! Destinations that are away, sends that are given up, checks.

use super::hand::*;
use super::{Destination, Harness};
use crate::cut_short;
use postbox_engine::{SendErrorKind, Sink};
use std::time::Duration;
use tokio::time::timeout;

/// A check connects, sends no message, and finds what is missing where it can.
pub async fn a_check_sends_no_message<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let sink = destination.sink().await;
    for _ in 0..3 {
        timeout(soon(), sink.check()).await.expect("a check answers in time").expect("all is well");
    }
    if let Some(complaints) = destination.complaints(&sink, &destination.name()).await {
        assert_eq!(complaints, Vec::<String>::new());
    }
    if let Some(missing) = destination.nature().missing
        && let Some(complaints) = destination.complaints(&sink, &missing).await
    {
        assert!(complaints.iter().any(|c| c.contains(&missing)), "{missing} is missing: {complaints:?}");
    }
    let sent = messages(&destination.name(), "a1");
    send_well(&sink, &sent).await;
    let all = received(&destination, 1).await;
    assert_eq!(all.len(), 1, "a check sent a message");
}

/// Rules 3 and 8; K1. While the destination is away nothing counts as sent, no message is blamed, and a check says
/// so; once it is back the same sink goes on, with nothing lost and the order kept.
pub async fn an_outage_is_never_success_and_loses_nothing<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    if !destination.nature().outage {
        return a_check_sends_no_message(harness).await; // there is nothing that could be away
    }
    let sink = destination.sink().await;
    let sent = messages(&destination.name(), "a1 b1 c1 a2 b2 a3 a4 b3");
    send_well(&sink, &sent[..3]).await;
    destination.down().await;
    for _ in 0..2 {
        for batch in batches(sink.limits(), &sent[3..]) {
            // No outcome within the relay's patience is given up, and is as good as unknown.
            let Ok(outcomes) = timeout(PATIENCE, sink.send(&batch)).await else { continue };
            assert_eq!(outcomes.len(), batch.len());
            for outcome in outcomes {
                let error = outcome.expect_err("nobody is there to accept it");
                let blameless = matches!(error.kind, SendErrorKind::Unavailable | SendErrorKind::Unknown);
                assert!(blameless, "an outage is not the event's fault: {:?} {error}", error.kind);
            }
        }
    }
    if let Ok(checked) = timeout(soon(), sink.check()).await {
        let error = checked.expect_err("nobody is there to answer");
        assert!(matches!(error.kind, SendErrorKind::Unavailable | SendErrorKind::Unknown), "{:?} {error}", error.kind);
    }
    destination.up().await;
    send_until_done(&sink, &sent[3..]).await;
    assert_order(&received_each(&destination, &sent).await, &sent);
    timeout(soon(), sink.check()).await.expect("a check answers in time").expect("all is well again");
}

/// Rule 3. A send dropped at whatever moment: the same messages sent again arrive, and no first delivery is out of
/// order, whatever became of the dropped ones.
pub async fn a_dropped_send_acknowledges_nothing<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let sink = destination.sink().await;
    let mut sent = Vec::new();
    for round in 0..12 {
        let names: Vec<_> = (1..=5).flat_map(|i| ["a", "b"].map(|key| format!("{key}{round}_{i}"))).collect();
        let round_messages = messages(&destination.name(), &names.join(" "));
        for batch in batches(sink.limits(), &round_messages) {
            let _ = cut_short(sink.send(&batch), round, Duration::from_micros(100)).await;
            send_until_done(&sink, &batch).await;
        }
        sent.extend(round_messages);
    }
    assert_order(&received_each(&destination, &sent).await, &sent);
}

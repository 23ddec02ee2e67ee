//! What is claimed, and in which order.

use super::hand::*;
use super::{End, Harness, Outbox, Setup};
use crate::cut_short;
use postbox_engine::{ClaimLimit, Claimed, Source, Verdict};
use std::time::Duration;
use tokio::time::timeout;

/// Rule 1; Q10. Events of a key come in commit order; a transaction that rolled back leaves no trace.
pub async fn committed_events_come_in_order_and_rolled_back_ones_never<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 b1 a2").await;
    outbox.write(&drafts("a9 c9"), End::Rollback).await;
    write(&outbox, "a3").await;
    let source = open(&outbox, ONE).await;
    let mut came = publish_until(&source, "a3").await;
    outbox.write(&drafts("a9"), End::Rollback).await;
    write(&outbox, "b2 a4").await;
    came.extend(publish_until(&source, "a4").await);
    assert_eq!(of_key(&came, "a"), row("a", 4));
    assert_eq!(of_key(&came, "b"), row("b", 2));
    assert_eq!(came.len(), 6, "{came:?}");
    nothing_left_but(&outbox, &source, &[]).await;
}

/// Rule 1, rule 10. Whatever the limits, claims without a settle between them hand each key out from its start, each
/// event once; no claim is greater than its limits, and one event goes however large it is.
pub async fn a_claim_is_a_prefix_of_each_key_within_its_limits<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    for i in 1..=20 {
        write(&outbox, &format!("a{i} b{i} c{i}")).await;
    }
    let source = open(&outbox, ONE).await;
    let mut came = Vec::new();
    let mut largest = 0;
    for limit in [
        ClaimLimit { events_max: 7, bytes_max: 16 << 20 },
        ClaimLimit { events_max: 1000, bytes_max: 1000 },
        ClaimLimit { events_max: 1000, bytes_max: 1 },
        ClaimLimit { events_max: 1, bytes_max: 16 << 20 },
    ]
    .into_iter()
    .cycle()
    {
        let claimed = timeout(soon(), source.claim(limit)).await.expect("there is more").expect("a claim").events;
        let bytes: usize = claimed.iter().map(|c| c.event.bytes()).sum();
        assert!(!claimed.is_empty() && claimed.len() <= limit.events_max, "{} for {limit:?}", claimed.len());
        assert!(bytes <= limit.bytes_max || claimed.len() == 1, "{bytes} bytes in {} for {limit:?}", claimed.len());
        largest = largest.max(claimed.len());
        came.extend(claimed);
        if came.len() >= 60 {
            break;
        }
    }
    assert!(largest > 1, "claims take more than one event");
    for key in ["a", "b", "c"] {
        assert_eq!(of_key(&names(&came), key), row(key, 20));
    }
    publish(&source, &came).await;
    nothing_left_but(&outbox, &source, &[]).await;
}

/// Q14. A claim that waits ends with the next event, without being asked again.
pub async fn a_waiting_claim_wakes_for_a_new_event<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    let source = open(&outbox, ONE).await;
    let writes = async {
        tokio::task::yield_now().await; // the claim is polled first, see the order of join!
        write(&outbox, "a1").await;
    };
    let (claimed, ()) = tokio::join!(biased; claim(&source), writes);
    assert_eq!(names(&claimed), ["a1"]);
}

/// Rule 3. A claim dropped at whatever moment has taken nothing: each event comes exactly once, in order.
pub async fn a_dropped_claim_loses_nothing<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    let source = open(&outbox, ONE).await;
    let mut came = Vec::new();
    let mut written = 0;
    for step in 0..60 {
        written += 1;
        write(&outbox, &format!("a{written} b{written}")).await;
        let limit = ClaimLimit { events_max: 3, ..LIMIT };
        if let Some(claimed) = cut_short(source.claim(limit), step, Duration::from_micros(5)).await {
            let claimed = claimed.expect("a claim").events;
            if step % 3 == 0 {
                publish(&source, &claimed).await;
            }
            came.extend(names(&claimed));
        }
    }
    while came.len() < 2 * written {
        came.extend(names(&claim(&source).await));
    }
    for key in ["a", "b"] {
        assert_eq!(of_key(&came, key), row(key, written));
    }
}

/// Verdict release. What was not tried comes again at once, in order, with the attempts it had.
pub async fn a_release_costs_no_attempt<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 a2 b1").await;
    let source = open(&outbox, ONE).await;
    for _ in 0..3 {
        let taken = take(&source, 3).await;
        assert_eq!(of_key(&names(&taken), "a"), row("a", 2));
        assert!(taken.iter().all(|c| c.attempts == 0 && !c.replay));
        let all: Vec<_> = taken.iter().map(|c| verdict(c, Verdict::Release)).collect();
        settle(&source, &all).await;
    }
    let taken = take(&source, 3).await;
    let failed =
        |b1| [verdict(find(&taken, "a1"), Verdict::Published), verdict(find(&taken, "a2"), Verdict::Published), b1];
    settle(&source, &failed(verdict(find(&taken, "b1"), retry(Duration::ZERO, 4)))).await;
    for _ in 0..2 {
        let again = take(&source, 1).await;
        assert_eq!((name(&again[0]), again[0].attempts), ("b1".into(), 4));
        settle(&source, &[verdict(&again[0], Verdict::Release)]).await;
    }
    nothing_left_but(&outbox, &source, &["b1"]).await;
}

/// Settles a claim of a1 to a10 and so on to e10 with verdicts of every kind, and leaves the rest as `rest` says.
async fn settle_mixed(source: &impl Source, taken: &[Claimed], rest: Option<&Verdict>) {
    let fate = |c: &Claimed| {
        let name = name(c);
        match (name.split_at(1), name.as_str()) {
            (("a", n), _) if n.parse::<u32>().expect("a number") <= 5 => Some(Verdict::Published),
            (("b", _), _) => Some(Verdict::Release),
            (_, "c1") => Some(retry(Duration::ZERO, 1)),
            (("c", _), _) => Some(Verdict::Release),
            (_, "d1") => Some(dead(1)),
            _ => rest.cloned(),
        }
    };
    let settled: Vec<_> = taken.iter().filter_map(|c| fate(c).map(|f| verdict(c, f))).collect();
    settle(source, &settled).await;
}

/// Rule 3; Q12, L1. A relay dies with events in every state: each one not settled comes again, in order.
pub async fn a_crash_loses_nothing<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    for i in 1..=10 {
        write(&outbox, &format!("a{i} b{i} c{i} d{i} e{i}")).await;
    }
    let source = open(&outbox, Setup { lease: LEASE_SHORT, ..ONE }).await;
    settle_mixed(&source, &take(&source, 50).await, None).await;
    drop(source);

    let source = open(&outbox, TWO).await;
    write(&outbox, "a11 b11 c11 d11 e11").await;
    let mut came = Vec::new();
    for key in ["a", "b", "c", "d", "e"] {
        while !came.contains(&format!("{key}11")) {
            let taken = claim(&source).await;
            publish(&source, &taken).await;
            came.extend(names(&taken));
        }
        let came = of_key(&came, key);
        assert!(row(key, 11).ends_with(&came), "of {key} came {came:?}"); // in order, without a gap
        let at_least = if key == "a" { 6 } else { 10 }; // a1 to a5 were published, d1 is dead
        assert!(came.len() >= at_least, "of {key} came only {came:?}");
    }
    nothing_left_but(&outbox, &source, &[]).await;
}

/// L4. A clean stop in the middle: the next relay gets what is left, and nothing that was published or is dead.
pub async fn a_clean_stop_repeats_nothing<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    for i in 1..=10 {
        write(&outbox, &format!("a{i} b{i} c{i} d{i} e{i}")).await;
    }
    let source = open(&outbox, ONE).await;
    settle_mixed(&source, &take(&source, 50).await, Some(&Verdict::Release)).await;
    source.release().await.expect("released");
    drop(source);

    let source = open(&outbox, TWO).await;
    let came = names(&publish_next(&source, 44).await);
    assert_eq!(of_key(&came, "a"), row("a", 10)[5..]);
    assert_eq!(of_key(&came, "b"), row("b", 10));
    assert_eq!(of_key(&came, "c"), row("c", 10));
    assert_eq!(of_key(&came, "d"), row("d", 10)[1..]);
    assert_eq!(of_key(&came, "e"), row("e", 10));
    nothing_left_but(&outbox, &source, &[]).await;
}

/// Fan-out: two streams over one outbox have each its own lease, progress and held events.
pub async fn streams_are_independent<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 b1").await;
    let main = open(&outbox, ONE).await;
    let audit = open(&outbox, Setup { stream: "audit", ..ONE }).await;
    let taken = take(&main, 2).await;
    settle(&main, &[verdict(find(&taken, "a1"), dead(1)), verdict(find(&taken, "b1"), Verdict::Published)]).await;
    write(&outbox, "a2").await;
    assert_eq!(of_key(&names(&publish_next(&audit, 3).await), "a"), row("a", 2));
    assert_eq!(publish_until(&main, "a2").await, ["a2"]);
}

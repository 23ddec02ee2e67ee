//! One relay owns the shard; what another one says is not recorded.

use super::hand::*;
use super::{Harness, Outbox, Setup};
use crate::cut_short;
use postbox_engine::{Source, SourceErrorKind, Verdict};
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Rule 1; Q12. As long as the owner renews, another relay stands by, for longer than a lease; a clean stop hands
/// over at once.
pub async fn a_lease_keeps_others_out_and_is_handed_over_at_once<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 a2").await;
    let first = outbox.source(Setup { lease: LEASE_SHORT, ..ONE }).await;
    let proven = timeout(soon(), first.acquire()).await.expect("the lease comes in time").expect("the lease is free");
    assert!(proven <= LEASE_SHORT && proven > Duration::ZERO, "{proven:?} of {LEASE_SHORT:?}");
    let second = outbox.source(TWO).await;
    {
        let stands_by = second.acquire();
        tokio::pin!(stands_by);
        let until = Instant::now() + LEASE_SHORT * 2;
        while Instant::now() < until {
            // Waits for the renewal's time, and in it for the wrong fact.
            let early = timeout(LEASE_SHORT / 8, &mut stands_by).await;
            assert!(early.is_err(), "the second relay got the lease that the first one renews");
            let proven = first.renew().await.expect("the owner renews");
            assert!(proven <= LEASE_SHORT, "{proven:?}");
        }
    }
    assert_eq!(publish_until(&first, "a2").await, row("a", 2));
    drop(first);

    timeout(soon(), second.acquire()).await.expect("taken over in time").expect("taken over");
    timeout(soon(), second.release()).await.expect("released in time").expect("released");
    second.release().await.expect("releasing again is harmless");
    let start = Instant::now();
    let third = open(&outbox, Setup { relay: "three", ..ONE }).await;
    assert!(start.elapsed() < LEASE / 4, "a lease of {LEASE:?} was handed over after {:?} only", start.elapsed());
    let late = second.renew().await.expect_err("the second relay gave its lease away");
    assert_eq!(late.kind, SourceErrorKind::LeaseLost);
    nothing_left_but(&outbox, &third, &[]).await;
}

/// Q12; L1. A relay that dies is replaced: not before the time that its lease was proven for, and soon after it.
pub async fn a_lease_that_runs_out_is_taken_over<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 a2 b1").await;
    let first = outbox.source(Setup { lease: LEASE_SHORT, ..ONE }).await;
    let proven = timeout(soon(), first.acquire()).await.expect("the lease comes in time").expect("the lease is free");
    let lost_at = Instant::now() + proven; // a little late, which only makes the rule stricter by microseconds
    let taken = take(&first, 3).await;
    assert_eq!(taken.len(), 3);
    drop(first);
    let second = open(&outbox, TWO).await;
    let slack = Duration::from_millis(5); // between the owner's answer and our look at the clock
    assert!(Instant::now() + slack >= lost_at, "taken over while the lease was proven");
    let came = names(&take(&second, 3).await);
    assert_eq!((of_key(&came, "a"), of_key(&came, "b")), (row("a", 2), row("b", 1)));
}

/// Rule 5; L2. A relay that lost its lease, and does not know it, changes nothing.
pub async fn a_lost_lease_settles_nothing<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 a2 b1 c1").await;
    let first = open(&outbox, Setup { lease: LEASE_SHORT, ..ONE }).await;
    let taken = take(&first, 4).await;
    let second = open(&outbox, TWO).await; // waits for the end of the first lease
    let late = [
        verdict(find(&taken, "a1"), Verdict::Published),
        verdict(find(&taken, "a2"), dead(7)),
        verdict(find(&taken, "b1"), retry(Duration::ZERO, 7)),
        verdict(find(&taken, "c1"), Verdict::Published),
    ];
    let refused = try_settle(&first, &late).await.expect_err("the lease is lost");
    assert_eq!(refused.kind, SourceErrorKind::LeaseLost, "{refused}");
    let taken = take(&second, 4).await;
    assert!(taken.iter().all(|c| c.attempts == 0));
    assert_eq!(of_key(&names(&taken), "a"), row("a", 2));
    try_settle(&first, &late).await.expect_err("the lease is lost for good");
    let renewed = first.renew().await.expect_err("the lease is lost");
    assert_eq!(renewed.kind, SourceErrorKind::LeaseLost, "{renewed}");
    publish(&second, &taken).await;
    // The release of one who lost the lease does not take it from its owner.
    first.release().await.expect("harmless without a lease");
    second.renew().await.expect("the owner still owns it");
    nothing_left_but(&outbox, &second, &[]).await;
}

/// A relay that lost its lease with a batch half settled, and is stopped while it acquires anew, at whatever moment of
/// that: what it still knows of its old tenure is not recorded under the new lease.
pub async fn a_stop_while_acquiring_records_nothing_old<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 a2 b1 c1").await;
    let first = open(&outbox, Setup { lease: LEASE_SHORT, ..ONE }).await;
    let taken = take(&first, 4).await;
    settle(&first, &[verdict(find(&taken, "a1"), Verdict::Published), verdict(find(&taken, "b1"), dead(1))]).await;
    let second = open(&outbox, TWO).await; // waits for the end of the first lease
    write(&outbox, "a3").await;
    publish_until(&second, "a3").await;
    second.release().await.expect("released");
    for step in 0..24 {
        let _ = cut_short(first.acquire(), step, Duration::from_micros(100)).await;
        timeout(soon(), first.release()).await.expect("released in time").expect("harmless without a lease");
    }
    drop(first);
    let third = open(&outbox, Setup { relay: "three", ..ONE }).await;
    nothing_left_but(&outbox, &third, &[]).await;
}

/// Settling again what was settled: after an unknown outcome the relay may do so.
pub async fn a_repeated_settle_changes_nothing<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 b1 c1").await;
    let source = open(&outbox, ONE).await;
    let taken = take(&source, 3).await;
    let verdicts = [
        verdict(find(&taken, "a1"), Verdict::Published),
        verdict(find(&taken, "b1"), retry(Duration::ZERO, 1)),
        verdict(find(&taken, "c1"), dead(1)),
    ];
    settle(&source, &verdicts).await;
    settle(&source, &verdicts).await;
    let again = take(&source, 1).await;
    assert_eq!((name(&again[0]), again[0].attempts), ("b1".into(), 1));
    settle(&source, &verdicts).await; // b1's old ticket, while it is in hand under a new one
    publish(&source, &again).await;
    publish(&source, &again).await;
    settle(&source, &verdicts).await;
    nothing_left_but(&outbox, &source, &[]).await;
}

//! Events in trouble, those behind them, and those that are not due yet.

use super::hand::*;
use super::{Draft, End, Harness, Outbox, Payload, Setup};
use postbox_engine::{ClaimLimit, Claimed, DeadPolicy, Settlement, Source, Verdict};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tokio::time::timeout;

const PAUSE: Duration = Duration::from_millis(700);

/// Q15. A retry comes when it is due, with what it has cost so far; other keys flow meanwhile.
pub async fn a_retry_comes_back_with_its_attempts_and_not_before_its_time<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 b1").await;
    let source = open(&outbox, ONE).await;
    let taken = take(&source, 2).await;
    let start = Instant::now();
    let first = [verdict(find(&taken, "a1"), retry(PAUSE, 3)), verdict(find(&taken, "b1"), Verdict::Published)];
    settle(&source, &first).await;
    let back = take(&source, 1).await;
    assert!(start.elapsed() >= PAUSE, "due after {PAUSE:?}, came after {:?}", start.elapsed());
    assert_eq!((name(&back[0]), back[0].attempts, back[0].replay), ("a1".into(), 3, false));
    assert_eq!(back[0].event.event_id(), find(&taken, "a1").event.event_id(), "rule 9: the id never changes");
    publish(&source, &back).await;
    nothing_left_but(&outbox, &source, &[]).await;
}

/// Settles a claim as a relay does whose sink fails the named events so many times more.
async fn settle_failing(
    source: &impl Source,
    taken: &[Claimed],
    fails: &mut HashMap<&str, u32>,
    done: &mut Vec<String>,
) {
    let mut ended: Vec<u64> = Vec::new(); // lanes
    let mut settled: Vec<Settlement> = Vec::new();
    for claimed in taken {
        let (key, name) = (claimed.event.key(), name(claimed));
        let outcome = if ended.contains(&key) {
            Verdict::Release
        } else if let Some(left) = fails.get_mut(name.as_str()).filter(|left| **left > 0) {
            *left -= 1;
            ended.push(key);
            retry(Duration::from_millis(150), claimed.attempts + 1)
        } else {
            done.push(name);
            Verdict::Published
        };
        settled.push(verdict(claimed, outcome));
    }
    settle(source, &settled).await;
}

/// Rule 2; O1, O2. What is behind a failed event of its key, claimed already or written later, comes after it, however
/// often it and others behind it fail; other keys flow before its time has come.
pub async fn events_behind_a_retry_wait_for_it<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 b1 a2 b2 a3").await;
    let source = open(&outbox, ONE).await;
    let mut fails = HashMap::from([("a1", 3), ("a3", 2), ("b2", 1), ("a6", 1)]);
    let mut done = Vec::new();
    for later in ["a4 b3", "c1", "a5 a6", "b4 c2", "a7"] {
        let taken = claim(&source).await;
        settle_failing(&source, &taken, &mut fails, &mut done).await;
        write(&outbox, later).await;
    }
    while done.len() < 13 {
        let taken = claim(&source).await;
        settle_failing(&source, &taken, &mut fails, &mut done).await;
    }
    assert_eq!(of_key(&done, "a"), row("a", 7));
    assert_eq!(of_key(&done, "b"), row("b", 4));
    assert_eq!(of_key(&done, "c"), row("c", 2));
    let place = |wanted: &str| done.iter().position(|n| n == wanted).expect("it was published");
    assert!(place("b1") < place("a1"), "a failing key holds up its neighbours: {done:?}");
    assert!(fails.values().all(|left| *left == 0));
    nothing_left_but(&outbox, &source, &[]).await;
}

/// The same over a restart: a relay that knows only what is stored keeps pause, attempts and order.
pub async fn a_retry_survives_a_restart<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 a2 b1").await;
    let source = open(&outbox, ONE).await;
    let taken = take(&source, 3).await;
    let start = Instant::now();
    let failed = [
        verdict(find(&taken, "a1"), retry(PAUSE, 2)),
        verdict(find(&taken, "a2"), Verdict::Release),
        verdict(find(&taken, "b1"), Verdict::Published),
    ];
    settle(&source, &failed).await;
    source.release().await.expect("released");
    drop(source);
    write(&outbox, "a3").await;
    let source = open(&outbox, TWO).await;
    let taken = claim(&source).await;
    assert!(start.elapsed() >= PAUSE, "due after {PAUSE:?}, came after {:?}", start.elapsed());
    assert_eq!((name(&taken[0]), taken[0].attempts), ("a1".into(), 2));
    publish(&source, &taken).await;
    let mut came = names(&taken);
    came.extend(names(&publish_next(&source, 3 - came.len()).await));
    assert_eq!(came, row("a", 3));
}

/// O2 over a restart: a retry blocks its key also where an older event, delayed and due meanwhile, waits behind it.
pub async fn a_retry_blocks_its_key_after_a_restart<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    let delay = Duration::from_secs(2); // a2 is taken before, on a busy machine too
    outbox.write(&[Draft { delay: Some(delay), ..draft("a1") }, draft("a2")], End::Commit).await;
    let source = open(&outbox, ONE).await;
    let taken = take(&source, 1).await;
    settle(&source, &[verdict(find(&taken, "a2"), retry(LEASE, 1))]).await;
    // a1 is due within this claim, and queues up behind a2.
    let nothing = tokio::time::timeout(delay + PAUSE, source.claim(LIMIT)).await;
    assert!(nothing.is_err(), "a1 overtook a2: {nothing:?}");
    source.release().await.expect("released");
    drop(source);
    let source = open(&outbox, TWO).await;
    write(&outbox, "a3 b1").await;
    assert_eq!(names(&take(&source, 1).await), ["b1"]);
    let nothing = tokio::time::timeout(PAUSE, source.claim(LIMIT)).await;
    assert!(nothing.is_err(), "the key of a2 is blocked: {nothing:?}");
}

/// Q16; O3. Under `skip` the key goes on behind its dead event, which never comes by itself again.
pub async fn a_dead_event_frees_its_key_under_skip<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 a2 b1").await;
    let source = open(&outbox, ONE).await;
    let taken = take(&source, 3).await;
    let died = [
        verdict(find(&taken, "a1"), dead(12)),
        verdict(find(&taken, "a2"), Verdict::Release),
        verdict(find(&taken, "b1"), retry(Duration::ZERO, 1)),
    ];
    settle(&source, &died).await;
    write(&outbox, "a3").await;
    let mut came = Vec::new();
    while came.len() < 2 {
        let taken = claim(&source).await;
        let (b1, rest): (Vec<_>, Vec<_>) = taken.into_iter().partition(|c| name(c) == "b1");
        // One that had failed before dies too.
        settle(&source, &b1.iter().map(|c| verdict(c, dead(2))).collect::<Vec<_>>()).await;
        publish(&source, &rest).await;
        came.extend(names(&rest));
    }
    assert_eq!(came, ["a2", "a3"]);
    write(&outbox, "b2").await;
    nothing_left_but(&outbox, &source, &["b2"]).await;
    source.release().await.expect("released");
    let source = open(&outbox, TWO).await;
    nothing_left_but(&outbox, &source, &[]).await;
}

/// Q16; O3. Under `block` the key stands behind its dead event, also for the next relay; the others flow.
pub async fn a_dead_event_holds_its_key_under_block<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    write(&outbox, "a1 a2 b1").await;
    let source = open(&outbox, Setup { policy: DeadPolicy::Block, ..ONE }).await;
    let taken = take(&source, 3).await;
    let died = [
        verdict(find(&taken, "a1"), dead(1)),
        verdict(find(&taken, "a2"), Verdict::Release),
        verdict(find(&taken, "b1"), retry(Duration::ZERO, 1)),
    ];
    settle(&source, &died).await;
    write(&outbox, "a3 c1").await;
    let mut came = names(&publish_next(&source, 2).await);
    came.sort();
    assert_eq!(came, ["b1", "c1"]);
    nothing_left_but(&outbox, &source, &[]).await;
    source.release().await.expect("released");
    let source = open(&outbox, Setup { policy: DeadPolicy::Block, ..TWO }).await;
    write(&outbox, "a4").await;
    nothing_left_but(&outbox, &source, &[]).await;
}

/// Q17. An event with a later `available_at` comes when it is due; neither its key nor the cursor waits for it, and
/// a restart does not forget it.
pub async fn a_delayed_event_waits_alone<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    let delay = Duration::from_secs(2);
    let start = Instant::now();
    let drafts = [Draft { delay: Some(delay), ..draft("a1") }, draft("a2"), draft("b1"), draft("a3")];
    outbox.write(&drafts, End::Commit).await;
    outbox.write(&[Draft { delay: Some(delay), ..draft("d1") }], End::Commit).await;
    let source = open(&outbox, ONE).await;
    let taken = take(&source, 3).await;
    assert_eq!(of_key(&names(&taken), "a"), ["a2", "a3"]);
    assert_eq!(of_key(&names(&taken), "b"), ["b1"]);
    publish(&source, &taken).await;
    source.release().await.expect("released");
    drop(source);
    let source = open(&outbox, TWO).await;
    let mut taken = claim(&source).await;
    assert!(start.elapsed() >= delay, "due after {delay:?}, came after {:?}", start.elapsed());
    while taken.len() < 2 {
        taken.extend(claim(&source).await);
    }
    publish(&source, &taken).await;
    let mut came = names(&taken);
    came.sort();
    assert_eq!(came, ["a1", "d1"]);
    assert!(taken.iter().all(|c| c.attempts == 0));
    nothing_left_but(&outbox, &source, &[]).await;
}

/// O9. A key that waits for its retry with thousands behind it neither fills the claims nor hides other keys; when
/// its time has come all of it goes, in order.
pub async fn a_blocked_key_with_many_waiting_slows_no_other<H: Harness>(harness: &H) {
    const MANY: usize = 3000;
    let outbox = harness.outbox().await;
    write(&outbox, "a1").await;
    let source = open(&outbox, ONE).await;
    let taken = take(&source, 1).await;
    for chunk in (2..=MANY).collect::<Vec<_>>().chunks(500) {
        let names: Vec<String> = chunk.iter().map(|i| format!("a{i}")).collect();
        write(&outbox, &names.join(" ")).await;
        write(&outbox, &format!("b{}", chunk[0])).await;
    }
    // Not before all is written, however long that took.
    settle(&source, &[verdict(&taken[0], retry(Duration::from_secs(8), 1))]).await;
    let mut came = Vec::new();
    while of_key(&came, "b").len() < 6 {
        let taken = claim(&source).await;
        publish(&source, &taken).await;
        came.extend(names(&taken));
    }
    let last = format!("a{MANY}");
    if !came.contains(&last) {
        came.extend(publish_until(&source, &last).await);
    }
    assert_eq!(of_key(&came, "a"), row("a", MANY));
    assert!(came[0].starts_with('b'), "another key goes first: {}", came[0]);
    nothing_left_but(&outbox, &source, &[]).await;
}

/// Rule 10. What is held comes in claims of `bytes_max`, one event more at most, and the rest with the claims after.
pub async fn held_events_come_within_the_bytes_and_in_order<H: Harness>(harness: &H) {
    const MANY: usize = 90;
    let outbox = harness.outbox().await;
    write(&outbox, "a1").await;
    let source = open(&outbox, ONE).await;
    settle(&source, &[verdict(&take(&source, 1).await[0], retry(PAUSE, 1))]).await;
    let sizes = [10, 200_000, 20, 90_000];
    let large = |n: usize| Draft { payload: Payload::Binary(vec![n as u8; sizes[n % 4]]), ..draft("a0") };
    outbox.write(&(2..=MANY).map(large).collect::<Vec<_>>(), End::Commit).await;
    let (limit, mut came) = (ClaimLimit { bytes_max: 100_000, ..LIMIT }, Vec::new());
    while came.len() < MANY {
        let taken = timeout(soon(), source.claim(limit)).await.expect("the rest comes").expect("a claim").events;
        let bytes: usize = taken.iter().map(|c| c.event.bytes()).sum();
        assert!(bytes < 100_000 + 201_000, "{bytes} bytes in one claim");
        publish(&source, &taken).await;
        came.extend(taken.iter().map(|c| c.event.payload().map(|p| p[0])));
    }
    let wanted = (1..=MANY).map(|n| Some(if n == 1 { b'1' } else { n as u8 }));
    assert!(came.iter().copied().eq(wanted), "{came:?}");
    nothing_left_but(&outbox, &source, &[]).await;
}

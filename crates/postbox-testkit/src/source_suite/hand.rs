//! A relay by hand: claims and settles for the rules, with a deadline on each wait, and names events by key and
//! number ("a1", "a2", "b1").

pub(super) use crate::soon;

use super::{Draft, End, Outbox, Payload, Setup};
use postbox_engine::{Claim, ClaimLimit, Claimed, DeadPolicy, Settlement, Source, SourceError, Verdict};
use std::time::Duration;
use tokio::time::Instant;
use tokio::time::timeout;

/// Longer than any rule takes.
pub(super) const LEASE: Duration = Duration::from_secs(600);
/// Short enough to wait for its end.
pub(super) const LEASE_SHORT: Duration = Duration::from_secs(2);

pub(super) const LIMIT: ClaimLimit = ClaimLimit { events_max: 1000, bytes_max: 16 << 20 };

pub(super) const ONE: Setup = Setup { relay: "one", stream: "main", lease: LEASE, policy: DeadPolicy::Skip };
pub(super) const TWO: Setup = Setup { relay: "two", ..ONE };

/// Drafts by name: "a1 a2 b1".
pub(super) fn drafts(names: &str) -> Vec<Draft> {
    names.split(' ').map(draft).collect()
}

pub(super) fn draft(name: &str) -> Draft {
    let (key, number) = name.split_at(1);
    Draft { aggregate_id: key.into(), payload: Payload::Json(number.into()), ..Draft::default() }
}

pub(super) fn name(claimed: &Claimed) -> String {
    let number = String::from_utf8_lossy(claimed.event.payload().unwrap_or_default()).into_owned();
    format!("{}{number}", claimed.event.aggregate_id())
}

pub(super) fn names(claimed: &[Claimed]) -> Vec<String> {
    claimed.iter().map(name).collect()
}

/// Those of one key, in the order they came.
pub(super) fn of_key(names: &[String], key: &str) -> Vec<String> {
    names.iter().filter(|n| n.starts_with(key)).cloned().collect()
}

/// "a1", "a2", .. up to `n`.
pub(super) fn row(key: &str, n: usize) -> Vec<String> {
    (1..=n).map(|i| format!("{key}{i}")).collect()
}

/// The source over the outbox, with the lease in its hands.
pub(super) async fn open<O: Outbox>(outbox: &O, setup: Setup) -> O::Source {
    let source = outbox.source(setup).await;
    let acquired = timeout(soon(), source.acquire()).await.expect("the lease comes in time");
    acquired.expect("the lease is free");
    source
}

pub(super) async fn write<O: Outbox>(outbox: &O, names: &str) {
    outbox.write(&drafts(names), End::Commit).await;
}

pub(super) async fn claim(source: &impl Source) -> Vec<Claimed> {
    let Claim { events } =
        timeout(soon(), source.claim(LIMIT)).await.expect("there is something to claim").expect("a claim");
    assert!(!events.is_empty(), "a claim is never empty");
    events
}

/// Claims until `n` events are in hand.
pub(super) async fn take(source: &impl Source, n: usize) -> Vec<Claimed> {
    let mut taken = Vec::new();
    while taken.len() < n {
        taken.extend(claim(source).await);
    }
    assert_eq!(taken.len(), n, "more than expected: {:?}", names(&taken));
    taken
}

/// The one event of that name in hand.
pub(super) fn find<'a>(taken: &'a [Claimed], wanted: &str) -> &'a Claimed {
    taken.iter().find(|c| name(c) == wanted).unwrap_or_else(|| panic!("{wanted} is not among {:?}", names(taken)))
}

pub(super) fn verdict(claimed: &Claimed, verdict: Verdict) -> Settlement {
    Settlement { ticket: claimed.ticket, verdict }
}

pub(super) fn retry(after: Duration, attempts: u32) -> Verdict {
    Verdict::Retry { after, attempts, error: "refused by the suite".into() }
}

pub(super) fn dead(attempts: u32) -> Verdict {
    Verdict::Dead { attempts, error: "poison of the suite".into() }
}

pub(super) async fn try_settle(source: &impl Source, settlements: &[Settlement]) -> Result<(), SourceError> {
    timeout(soon(), source.settle(settlements, Instant::now())).await.expect("a settle answers in time")
}

pub(super) async fn settle(source: &impl Source, settlements: &[Settlement]) {
    try_settle(source, settlements).await.expect("a settle under a lease");
}

pub(super) async fn publish(source: &impl Source, taken: &[Claimed]) {
    let all: Vec<_> = taken.iter().map(|c| verdict(c, Verdict::Published)).collect();
    settle(source, &all).await;
}

/// Claims and publishes until `n` events were published, as they came.
pub(super) async fn publish_next(source: &impl Source, n: usize) -> Vec<Claimed> {
    let mut published = Vec::new();
    while published.len() < n {
        let taken = claim(source).await;
        publish(source, &taken).await;
        published.extend(taken);
    }
    assert_eq!(published.len(), n, "more than expected: {:?}", names(&published));
    published
}

/// Claims and publishes until the event of that name was published; the names as they came.
pub(super) async fn publish_until(source: &impl Source, last: &str) -> Vec<String> {
    let mut published = Vec::new();
    while !published.iter().any(|n| n == last) {
        let taken = claim(source).await;
        publish(source, &taken).await;
        published.extend(names(&taken));
    }
    published
}

/// Shows that nothing but what is named is left: an event written now comes, and with it (in any order) only those.
pub(super) async fn nothing_left_but<O: Outbox>(outbox: &O, source: &O::Source, left: &[&str]) {
    write(outbox, "z1").await;
    let mut came = publish_until(source, "z1").await;
    while came.len() <= left.len() {
        let taken = claim(source).await;
        publish(source, &taken).await;
        came.extend(names(&taken));
    }
    came.sort();
    let mut wanted: Vec<String> = left.iter().map(ToString::to_string).collect();
    wanted.push("z1".into());
    wanted.sort();
    assert_eq!(came, wanted);
}

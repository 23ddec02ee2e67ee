//! The lease, the cursor, held rows, retention.

use super::{File, LIMIT, insert, publish, settle, soon, texts, until};
use postbox_engine::{
    Changes, ClaimLimit, DeadPolicy, HeldQuery, Log, LogSource, Settlement, Source, SourceErrorKind, Verdict,
};
use postbox_sources::admin::Trace;
use postbox_sources::sqlite::{Options, SqliteLog, admin};
use rusqlite::Connection;
use std::time::Duration;
use tokio::time::Instant;

const ALL: &str = "SELECT count(*) FROM postbox_outbox";

#[tokio::test]
async fn pages_keep_their_limits_and_come_in_order() {
    let file = File::new();
    let db = file.connect();
    (1..=10).for_each(|n| insert(&db, "a", n));
    let log = file.log("r");
    log.acquire().await.unwrap().unwrap();
    let four = ClaimLimit { events_max: 4, bytes_max: 1 << 20 };
    let page = soon(log.read(four)).await.unwrap();
    assert_eq!((page.events.len(), page.mark), (4, 4));
    let page = soon(log.read(ClaimLimit { events_max: 100, bytes_max: 1 })).await.unwrap();
    assert_eq!((page.events.len(), page.mark), (1, 5), "one event goes, however large");
    let page = soon(log.read(LIMIT)).await.unwrap();
    assert_eq!((page.events.len(), page.mark), (5, 10));
}

/// The relay drops a read whenever something else is ready first.
#[tokio::test]
async fn a_dropped_read_loses_nothing_and_a_commit_wakes_it() {
    let file = File::new();
    let log = file.log("r");
    log.acquire().await.unwrap().unwrap();
    for n in 1..=20 {
        assert!(tokio::time::timeout(Duration::from_millis(n % 3), log.read(LIMIT)).await.is_err());
        insert(&file.connect(), "a", n as i64);
        // Asked and dropped at once: the page is read while nobody listens.
        let early =
            tokio::select! { biased; page = log.read(LIMIT) => Some(page), () = std::future::ready(()) => None };
        log.renew().await.unwrap(); // comes after it on the log's thread
        let page = match early {
            Some(page) => page.unwrap(),
            None => soon(log.read(LIMIT)).await.unwrap(),
        };
        assert_eq!(page.mark, n as i64);
    }
}

#[tokio::test]
async fn a_relay_goes_on_where_the_last_one_stopped() {
    let file = File::new();
    let db = file.connect();
    (1..=6).for_each(|n| insert(&db, "a", n));
    let first = file.source("first").await;
    let three = ClaimLimit { events_max: 3, ..LIMIT };
    let claim = soon(first.claim(three)).await.unwrap();
    settle(&first, &claim, Verdict::Published).await;
    let unsettled = soon(first.claim(LIMIT)).await.unwrap();
    assert_eq!(texts(&unsettled), ["a 4", "a 5", "a 6"]);
    first.release().await.unwrap();
    let second = file.source("second").await;
    assert_eq!(publish(&second, 3).await, ["a 4", "a 5", "a 6"]);
    assert_eq!(file.count("SELECT count(DISTINCT relay) FROM postbox_cursor"), 2);
}

/// L2: a relay that lost its lease changes nothing any more.
#[tokio::test]
async fn case_l2_takeover_when_the_lease_ends_and_the_fence_holds() {
    let file = File::new();
    insert(&file.connect(), "a", 1);
    let short = |relay: &str| Options { lease: Duration::from_secs(2), ..file.options(relay) };
    let (old, new) = (SqliteLog::new(short("old")), SqliteLog::new(short("new")));
    assert_eq!(old.acquire().await.unwrap().unwrap(), Duration::from_secs(2));
    let page = soon(old.read(LIMIT)).await.unwrap();
    let held_for = new.acquire().await.unwrap().unwrap_err();
    assert!(held_for <= Duration::from_secs(2));
    // The same relay, its process started anew: it must wait as well.
    assert!(SqliteLog::new(short("old")).acquire().await.unwrap().is_err());
    soon(async { while new.acquire().await.unwrap().is_err() {} }).await;

    let changes = Changes { mark: Some(page.mark), events: 1, max_id: 1, sent: None, held: Vec::new() };
    assert_eq!(old.record(&changes).await.unwrap_err().kind, SourceErrorKind::LeaseLost);
    assert_eq!(old.renew().await.unwrap_err().kind, SourceErrorKind::LeaseLost);
    assert_eq!(old.read(LIMIT).await.unwrap_err().kind, SourceErrorKind::LeaseLost);
    old.release().await.unwrap();
    assert_eq!(file.count("SELECT count(*) FROM postbox_cursor"), 0);
    assert_eq!(file.count("SELECT epoch FROM postbox_lease WHERE owner = 'new'"), 2);
    new.record(&changes).await.unwrap();
    new.record(&changes).await.unwrap();
    assert_eq!(file.count("SELECT sum(last_id) FROM postbox_cursor"), 1, "repeating is harmless");
}

#[tokio::test]
async fn a_clean_stop_hands_over_at_once_and_our_own_lease_is_prolonged() {
    let file = File::new();
    let (a, b) = (file.log("a"), file.log("b"));
    a.acquire().await.unwrap().unwrap();
    a.acquire().await.unwrap().unwrap(); // after an error, say
    assert_eq!(file.count("SELECT epoch FROM postbox_lease"), 2);
    let held_for = b.acquire().await.unwrap().unwrap_err();
    assert!(held_for > Duration::from_secs(5) && held_for <= Duration::from_secs(10), "{held_for:?}");
    a.release().await.unwrap();
    b.acquire().await.unwrap().unwrap();
    a.release().await.unwrap();
    assert_eq!(file.count("SELECT count(*) FROM postbox_lease WHERE owner = 'b'"), 1, "releasing twice is harmless");
}

#[tokio::test]
async fn two_streams_over_one_outbox_are_independent() {
    let file = File::new();
    insert(&file.connect(), "a", 1);
    let one = file.source("r").await;
    assert_eq!(publish(&one, 1).await, ["a 1"]);
    let two = LogSource::new(SqliteLog::new(Options { stream: "two".into(), ..file.options("r") }), DeadPolicy::Skip);
    soon(two.acquire()).await.unwrap();
    assert_eq!(publish(&two, 1).await, ["a 1"]);
}

fn retry(after_ms: u64, attempts: u32) -> Verdict {
    Verdict::Retry { after: Duration::from_millis(after_ms), attempts, error: "refused".into() }
}

/// O2, O3: a failed event holds up its key alone, also over a restart.
#[tokio::test]
async fn case_o2_held_events_wait_behind_the_one_that_failed() {
    let file = File::new();
    let db = file.connect();
    (1..=3).for_each(|n| insert(&db, "bad", n));
    insert(&db, "good", 4);
    let source = file.source("r").await;
    let claim = soon(source.claim(LIMIT)).await.unwrap();
    assert_eq!(claim.events.len(), 4);
    let verdicts = [retry(300, 1), Verdict::Release, Verdict::Release, Verdict::Published];
    let settlements = claim.events.iter().zip(verdicts);
    let settlements: Vec<_> = settlements.map(|(c, verdict)| Settlement { ticket: c.ticket, verdict }).collect();
    source.settle(&settlements, Instant::now()).await.unwrap();
    let counts = "SELECT 100 * sum(state = 'retry') + sum(state = 'waiting') FROM postbox_held";
    assert_eq!(file.count(counts), 102);
    insert(&db, "bad", 5);
    insert(&db, "good", 6);
    assert_eq!(publish(&source, 1).await, ["good 6"]);
    source.release().await.unwrap();

    let source = file.source("next").await;
    let claim = soon(source.claim(LIMIT)).await.unwrap();
    assert_eq!((texts(&claim), claim.events[0].attempts), (vec!["bad 1".into()], 1));
    assert_eq!(file.count("SELECT {now} < due_at FROM postbox_held WHERE id = 1".replace("{now}", NOW).as_str()), 0);
    let dead = Verdict::Dead { attempts: 2, error: "never".into() };
    settle(&source, &claim, dead).await;
    assert_eq!(publish(&source, 3).await, ["bad 2", "bad 3", "bad 5"], "a dead letter frees its key");

    let status = admin::status(&file.path, "postbox").await.unwrap();
    assert_eq!((status[0].dead, status[0].retry, status[0].waiting, status[0].pending), (1, 0, 0, 0));
    assert!(status[0].oldest_dead.is_some() && status[0].owner.as_deref() == Some("next"));
    let id: String = db.query_row("SELECT event_id FROM postbox_outbox WHERE id = 1", [], |r| r.get(0)).unwrap();
    let trace = admin::trace(&file.path, "postbox", &id.to_uppercase()).await.unwrap();
    assert_eq!((trace[0].state.as_str(), trace[0].attempts, trace[0].error.as_deref()), ("dead", 2, Some("never")));
    assert_eq!(trace[0].published_at, None);
}

const NOW: &str = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)";

/// A newer postbox may have states that this one would take for something else.
#[tokio::test]
async fn a_held_state_that_is_not_known_is_named_and_taken_for_no_other() {
    let file = File::new();
    insert(&file.connect(), "a", 1);
    let source = file.source("r").await;
    let claim = soon(source.claim(LIMIT)).await.unwrap();
    settle(&source, &claim, retry(0, 1)).await;
    source.release().await.unwrap();
    let sql = "PRAGMA ignore_check_constraints = on; UPDATE postbox_held SET state = 'parked'";
    file.connect().execute_batch(sql).unwrap();
    let error = soon(file.source("r").await.claim(LIMIT)).await.unwrap_err();
    assert!(error.kind == SourceErrorKind::Unavailable && error.message.contains("\"parked\""), "{error}");
}

#[tokio::test]
async fn case_o3_under_policy_block_a_dead_letter_holds_its_key() {
    let file = File::new();
    let db = file.connect();
    insert(&db, "bad", 1);
    insert(&db, "bad", 2);
    insert(&db, "good", 3);
    let block = Options { policy: DeadPolicy::Block, ..file.options("r") };
    let source = LogSource::new(SqliteLog::new(block.clone()), DeadPolicy::Block);
    soon(source.acquire()).await.unwrap();
    let claim = soon(source.claim(LIMIT)).await.unwrap();
    let verdicts = [Verdict::Dead { attempts: 1, error: "no".into() }, Verdict::Release, Verdict::Published];
    let settlements: Vec<_> = claim.events.iter().zip(verdicts).collect();
    let settlements: Vec<_> =
        settlements.into_iter().map(|(c, verdict)| Settlement { ticket: c.ticket, verdict }).collect();
    source.settle(&settlements, Instant::now()).await.unwrap();
    source.release().await.unwrap();

    let log = SqliteLog::new(Options { relay: "next".into(), ..block });
    log.acquire().await.unwrap().unwrap();
    let key = claim.events[0].event.key();
    assert_eq!(log.load().await.unwrap().keys, [(key, 2, true)]);
    // An operator discards it: the key is free.
    db.execute("UPDATE postbox_held SET state = 'done' WHERE id = 1", []).unwrap();
    assert_eq!(log.load().await.unwrap().keys, [(key, 1, false)]);
    let query = HeldQuery { limit: LIMIT, open: vec![key], skip: vec![] };
    let ids = |page: postbox_engine::HeldPage| page.events.iter().map(|h| h.event.id()).collect::<Vec<_>>();
    assert_eq!(ids(log.held(&query).await.unwrap()), [2]);
    assert_eq!(ids(log.held(&HeldQuery { skip: vec![2], ..query.clone() }).await.unwrap()), [0; 0]);
    assert_eq!(ids(log.held(&HeldQuery { open: vec![], ..query }).await.unwrap()), [0; 0]);
}

/// Writers give times of their own: one in the future hides no old event, and is not negative.
#[tokio::test]
async fn lag_is_that_of_the_oldest_event_whatever_the_first_one_says() {
    let file = File::new();
    let db = file.connect();
    let written = |hours: i64| {
        let sql = "INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type, payload, created_at)
                   VALUES ('order', ?1, 'placed', '{}', CAST((julianday('now', ?2) - 2440587.5) * 86400000 AS INTEGER))";
        db.execute(sql, (hours.to_string(), format!("{hours} hours"))).unwrap();
    };
    drop(file.source("relay").await);
    let lag = async || admin::status(&file.path, "postbox").await.unwrap()[0].oldest_unpublished.unwrap().as_secs();
    written(2);
    assert_eq!(lag().await, 0);
    written(-3);
    written(-1);
    assert!((3 * 3600..3 * 3600 + 60).contains(&lag().await), "{}", lag().await);
}

#[tokio::test]
async fn traces_tell_when_by_whom_and_how_often() {
    let file = File::new();
    let db = file.connect();
    insert(&db, "a", 1);
    let id: String = db.query_row("SELECT event_id FROM postbox_outbox", [], |r| r.get(0)).unwrap();
    let trace = admin::trace(&file.path, "postbox", &id).await.unwrap();
    assert_eq!((trace[0].state.as_str(), trace[0].attempts), ("pending", 0), "also before any relay has run");
    let source = file.source("relay-7").await;
    let status = admin::status(&file.path, "postbox").await.unwrap();
    assert_eq!((status[0].pending, status[0].pending_is_estimate), (1, false));
    assert!(status[0].oldest_unpublished.is_some() && status[0].last_settled.is_none());
    publish(&source, 1).await;
    let trace = admin::trace(&file.path, "postbox", &id).await.unwrap();
    assert_eq!(
        (trace[0].state.as_str(), trace[0].relay.as_deref(), trace[0].attempts),
        ("published", Some("relay-7"), 1)
    );
    let Trace { written_at, sent_at, published_at, .. } = &trace[0];
    assert!(sent_at.as_ref() >= Some(written_at) && sent_at <= published_at, "{trace:?}");
    let status = admin::status(&file.path, "postbox").await.unwrap();
    assert_eq!((status[0].pending, status[0].oldest_unpublished), (0, None));
    assert!(admin::trace(&file.path, "postbox", "unknown").await.unwrap().is_empty());

    let event = postbox::Event::new("order", "9", "order.placed").json_text("9");
    admin::publish(&file.path, "postbox", &event).await.unwrap();
    let twice = admin::publish(&file.path, "postbox", &event).await.unwrap_err();
    assert!(twice.to_string().contains("UNIQUE"), "{twice}");
    let claim = soon(source.claim(LIMIT)).await.unwrap();
    assert_eq!(texts(&claim), ["9 9"]);
    let sent = Instant::now().checked_sub(Duration::from_secs(90)).unwrap();
    let ticket = claim.events[0].ticket;
    source.settle(&[Settlement { ticket, verdict: retry(0, 1) }], sent).await.unwrap();
    let traced = async || admin::trace(&file.path, "postbox", &event.id().to_string()).await.unwrap().remove(0);
    let held = traced().await;
    assert_eq!((held.state.as_str(), held.attempts, held.published_at), ("retry", 1, None));
    assert!(held.sent_at.is_some_and(|sent_at| sent_at < held.written_at), "90 s ago, by the caller");
    publish(&source, 1).await;
    let done = traced().await;
    assert!(done.sent_at.as_ref() >= Some(&done.written_at) && done.sent_at <= done.published_at, "{done:?}");

    // The cursor's row says so, too.
    let event = postbox::Event::new("order", "10", "order.placed").json_text("10");
    admin::publish(&file.path, "postbox", &event).await.unwrap();
    let ticket = soon(source.claim(LIMIT)).await.unwrap().events[0].ticket;
    source.settle(&[Settlement { ticket, verdict: Verdict::Published }], sent).await.unwrap();
    let told = admin::trace(&file.path, "postbox", &event.id().to_string()).await.unwrap().remove(0);
    assert_eq!(told.state, "published");
    assert!(told.sent_at < told.published_at, "{told:?}");
}

/// D1: what is held stays, what a stream has not passed stays; all else goes, in pieces.
#[tokio::test]
async fn case_d1_retention_deletes_what_every_stream_has_passed() {
    let file = File::new();
    let db = file.connect();
    let tx = Connection::unchecked_transaction(&db).unwrap();
    (1..=1300).for_each(|n| insert(&tx, &format!("k{}", n % 100), n));
    tx.commit().unwrap();
    let keep = |stream: &str, retention| Options { stream: stream.into(), retention, ..file.options("r") };
    let open = async |options: Options| {
        let source = LogSource::new(SqliteLog::new(options), DeadPolicy::Skip);
        soon(source.acquire()).await.unwrap();
        source
    };
    let slow = open(keep("slow", None)).await;
    let fast = open(keep("fast", None)).await;
    let claim = soon(fast.claim(ClaimLimit { events_max: 1, ..LIMIT })).await.unwrap();
    settle(&fast, &claim, Verdict::Dead { attempts: 1, error: "no".into() }).await;
    publish(&fast, 1299).await;
    publish(&slow, 1200).await;
    fast.release().await.unwrap();
    assert_eq!(file.count(ALL), 1300, "for ever, when nothing else was asked for");

    let fast = open(keep("fast", Some(Duration::from_secs(3600)))).await;
    drop(fast); // its first piece came before its thread ended, and everything is too young
    let _fast = open(Options { relay: "other".into(), ..keep("third", Some(Duration::ZERO)) }).await;
    // A stream that has only begun has passed nothing.
    assert_eq!(file.count(ALL), 1300);
    db.execute("DELETE FROM postbox_lease WHERE stream = 'third'", []).unwrap();
    db.execute("UPDATE postbox_lease SET owner = NULL, until = NULL WHERE stream = 'fast'", []).unwrap();
    let _fast = open(keep("fast", Some(Duration::ZERO))).await;
    until("all goes but the dead event and what the slow stream has not passed", || file.count(ALL) == 101);
    assert_eq!(file.count("SELECT min(id) FROM postbox_outbox"), 1, "the dead event stays");
    let cursors =
        "SELECT 10 * sum(last_id < 1200) + count(DISTINCT stream) FROM postbox_cursor WHERE stream <> 'third'";
    assert_eq!(file.count(cursors), 2, "what tells of deleted events goes with them, the cursors stay");
    assert_eq!(publish(&slow, 100).await.len(), 100);
}

#[tokio::test]
async fn cursor_rows_are_thinned_to_one_a_second_after_five_minutes() {
    let file = File::new();
    let db = file.connect();
    let sql = "WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < 2000)
        INSERT INTO postbox_cursor SELECT 'main', n, 1, 'r', NULL, (unixepoch() - 600) * 1000 + n * 10 FROM n";
    db.execute(sql, []).unwrap();
    db.execute("INSERT INTO sqlite_sequence VALUES ('postbox_outbox', 2000)", []).unwrap();
    let log = file.log("r");
    log.acquire().await.unwrap().unwrap();
    until("twenty seconds are left", || file.count("SELECT count(*) FROM postbox_cursor") == 21);
    let last_of_each = "SELECT count(*) FROM postbox_cursor WHERE at % 1000 = 990 OR last_id = 2000";
    assert_eq!(file.count(last_of_each), 21);
}

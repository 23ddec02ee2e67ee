//! Reading, settling and the lease, statement by statement.

use super::{Db, LIMIT, acquire, client, drain, in_time, on_15_and_18, published};
use postbox_engine::{Changes, HeldChange, HeldQuery, HeldState, Log, SourceErrorKind};
use postbox_sources::postgres::PostgresLog;
use postbox_testkit::services::PgVersion;
use std::time::Duration;
use tokio::time::Instant;

on_15_and_18! {
    case_r1_the_lower_id_commits_last
    case_r2_an_open_transaction_delays_only_its_own_events
    case_r3_gaps_of_rolled_back_ids_are_not_waited_for
    case_r4_an_older_transaction_that_writes_later_comes_later
    events_are_read_in_order_and_as_they_were_written
    a_large_window_is_paged_and_resumed
    an_old_lease_changes_nothing
    a_settle_is_all_or_none
    a_trace_tells_by_when_an_event_was_handed_over
    held_events_come_when_they_are_due
    case_d5_four_connections_and_settling_waits_behind_no_claim
}

const INSERT: &str = "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) VALUES ('order', '1', ";

/// The types of the next `n` events, in the order in which they are read.
async fn next_types(log: &PostgresLog, n: usize) -> Vec<String> {
    let mut types = Vec::new();
    in_time(&format!("{n} events are read"), async {
        while types.len() < n {
            let page = log.read(LIMIT).await.unwrap();
            log.record(&published(&page)).await.unwrap();
            types.extend(page.events.iter().map(|e| e.event_type().to_owned()));
        }
    })
    .await;
    types
}

async fn case_r1_the_lower_id_commits_last(version: PgVersion) {
    let db = Db::new(version).await;
    let log = db.log();
    acquire(&log).await;
    let late = client(&db.url).await;
    late.batch_execute(&format!("BEGIN; {INSERT} 'lower')")).await.unwrap();
    db.sql(&format!("{INSERT} 'higher')")).await;
    assert_eq!(next_types(&log, 1).await, ["higher"]);
    late.batch_execute("COMMIT").await.unwrap();
    assert_eq!(next_types(&log, 1).await, ["lower"]);
}

async fn case_r2_an_open_transaction_delays_only_its_own_events(version: PgVersion) {
    let db = Db::new(version).await;
    let log = db.log();
    acquire(&log).await;
    let open = client(&db.url).await;
    open.batch_execute(&format!("BEGIN; {INSERT} 'own')")).await.unwrap();
    for n in 0..50 {
        db.sql(&format!("{INSERT} 'other {n}')")).await; // a snapshot of its own each, all with the open one in it
        assert_eq!(next_types(&log, 1).await, [format!("other {n}")]);
    }
    open.batch_execute(&format!("{INSERT} 'own, too'); COMMIT")).await.unwrap();
    assert_eq!(next_types(&log, 2).await, ["own", "own, too"]);
}

async fn case_r3_gaps_of_rolled_back_ids_are_not_waited_for(version: PgVersion) {
    let db = Db::new(version).await;
    let log = db.log();
    acquire(&log).await;
    for n in 0..3 {
        db.sql("BEGIN").await;
        db.insert(1_000, 3).await;
        db.sql("ROLLBACK").await;
        db.sql(&format!("{INSERT} 'after {n}')")).await;
        assert_eq!(next_types(&log, 1).await, [format!("after {n}")]);
    }
    assert!(db.one::<i64>("SELECT max(id) FROM postbox.outbox").await >= 3_003, "there are gaps");
}

async fn case_r4_an_older_transaction_that_writes_later_comes_later(version: PgVersion) {
    let db = Db::new(version).await;
    db.sql("CREATE TABLE app (id int PRIMARY KEY); INSERT INTO app VALUES (1)").await;
    let turn = "UPDATE app SET id = id WHERE id = 1"; // writers of one aggregate take turns
    let older = client(&db.url).await;
    older.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.unwrap();
    db.sql(&format!("BEGIN; {turn}; {INSERT} 'first'); COMMIT")).await;
    older.batch_execute(&format!("{turn}; {INSERT} 'second'); COMMIT")).await.unwrap();
    let ids = "SELECT (SELECT txid FROM postbox.outbox WHERE event_type = 'second') < (SELECT txid FROM postbox.outbox WHERE event_type = 'first')";
    assert!(db.one::<bool>(ids).await, "the older transaction wrote later");
    let log = db.log(); // not before, so that both are in one window
    acquire(&log).await;
    assert_eq!(next_types(&log, 2).await, ["first", "second"]);
}

async fn events_are_read_in_order_and_as_they_were_written(version: PgVersion) {
    let db = Db::new(version).await;
    db.sql(
        r#"INSERT INTO postbox.outbox (event_id, aggregate_type, aggregate_id, aggregate_seq, event_type, schema_version, payload, headers, destination, available_at, created_at)
           VALUES ('00112233-4455-7677-8899-aabbccddeeff', 'order', '42', 7, 'placed', 3, '{"a" : 9007199254740993, "a":1e400}', '{"tenant_id":"t"}', 'there',
                   now() + interval '1 hour', '2020-01-02 03:04:05.000006+00');
           INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload_binary, content_type, available_at) VALUES ('o', '', 't', '\x00ff', 'x/y', now() - interval '1 s');
           INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload, available_at) VALUES ('o', 'tombstone', 't', NULL, 'infinity')"#,
    )
    .await;
    let log = db.log();
    acquire(&log).await;
    let page = in_time("a page", log.read(LIMIT)).await.unwrap();
    let [first, second, third] = &page.events[..] else { panic!("{page:?}") };
    assert_eq!(uuid::Uuid::from_bytes(first.event_id()).to_string(), "00112233-4455-7677-8899-aabbccddeeff");
    assert_eq!((first.aggregate_type(), first.aggregate_id(), first.aggregate_seq()), ("order", "42", Some(7)));
    assert_eq!((first.event_type(), first.schema_version(), first.destination()), ("placed", 3, Some("there")));
    assert_eq!(first.payload(), Some(&br#"{"a" : 9007199254740993, "a":1e400}"#[..]));
    assert_eq!((first.headers(), first.content_type()), (r#"{"tenant_id": "t"}"#, "application/json"));
    assert_eq!(first.created_at(), 1_577_934_245_000_006);
    assert_eq!((second.payload(), second.aggregate_id(), second.content_type()), (Some(&[0, 0xff][..]), "", "x/y"));
    assert_eq!((third.payload(), third.destination(), third.aggregate_seq()), (None, None, None));
    let [(0, hour), (2, never)] = page.delays[..] else { panic!("{:?}", page.delays) };
    assert!(hour > Duration::from_secs(3500) && hour < Duration::from_secs(3601), "{hour:?}");
    assert!(never > Duration::from_secs(99 * 365 * 86_400));
    log.record(&published(&page)).await.unwrap();
}

async fn a_large_window_is_paged_and_resumed(version: PgVersion) {
    let db = Db::new(version).await;
    db.insert(5_000, 100).await;
    let options = || {
        let mut options = db.options();
        (options.page_events_max, options.poll_events_max) = (300, 100);
        options
    };
    let first = PostgresLog::new(options());
    acquire(&first).await;
    let mut ids = drain(&first, 1_500).await;
    in_time("released", first.release()).await.unwrap();
    let second = PostgresLog::new(options());
    acquire(&second).await;
    ids.extend(drain(&second, 3_500).await);
    assert!(ids.is_sorted_by(|a, b| a < b), "in order, none twice");
    assert_eq!(ids.len(), 5_000);
    db.insert(3, 3).await;
    assert_eq!(drain(&second, 3).await.len(), 3);
}

async fn an_old_lease_changes_nothing(version: PgVersion) {
    let db = Db::new(version).await;
    db.insert(10, 10).await;
    let old = db.log();
    acquire(&old).await;
    let page = in_time("a page", old.read(LIMIT)).await.unwrap();
    let new = db.log();
    let remaining = new.acquire().await.unwrap().expect_err("the lease is taken");
    assert!(remaining > Duration::from_secs(5) && remaining <= Duration::from_secs(10), "{remaining:?}");
    db.sql("UPDATE postbox.lease SET until = clock_timestamp() - interval '1 s'").await;
    assert_eq!(old.renew().await.unwrap_err().kind, SourceErrorKind::LeaseLost, "an ended lease is not renewed");
    acquire(&new).await;
    assert_eq!(old.record(&published(&page)).await.unwrap_err().kind, SourceErrorKind::LeaseLost);
    assert_eq!(old.renew().await.unwrap_err().kind, SourceErrorKind::LeaseLost);
    old.release().await.unwrap();
    assert_eq!(new.renew().await.unwrap(), Duration::from_secs(10), "the old one's release changed nothing");
    assert_eq!(drain(&new, 10).await.len(), 10);
    new.release().await.unwrap();
    assert!(db.log().acquire().await.unwrap().is_ok(), "given back, the lease is free at once");
}

async fn a_settle_is_all_or_none(version: PgVersion) {
    let db = Db::new(version).await;
    db.insert(3, 3).await;
    let log = db.log();
    acquire(&log).await;
    let page = in_time("a page", log.read(LIMIT)).await.unwrap();
    let held = |state, due| HeldChange {
        event: page.events[1].clone(),
        state,
        attempts: 2,
        due,
        error: Some("no".into()),
        sent: None,
    };
    let mut changes = Changes { held: vec![held(HeldState::Retry, Duration::from_secs(60))], ..published(&page) };
    db.sql("UPDATE postbox.lease SET epoch = epoch + 1").await;
    assert_eq!(log.record(&changes).await.unwrap_err().kind, SourceErrorKind::LeaseLost);
    let counts = "SELECT (SELECT count(*) FROM postbox.cursor) * 10 + (SELECT count(*) FROM postbox.held)";
    assert_eq!(db.one::<i64>(counts).await, 10, "the first cursor row, no other, none held");
    db.sql("UPDATE postbox.lease SET epoch = epoch - 1").await;
    log.record(&changes).await.unwrap();
    log.record(&changes).await.unwrap(); // repeating is harmless
    assert_eq!(db.one::<i64>("SELECT count(*) FROM postbox.held WHERE state = 'retry' AND attempts = 2 AND error = 'no' AND due_at > now()").await, 1);
    changes =
        Changes { mark: None, events: 0, max_id: 0, sent: None, held: vec![held(HeldState::Done, Duration::ZERO)] };
    log.record(&changes).await.unwrap();
    assert_eq!(
        db.one::<String>("SELECT string_agg(state || coalesce(due_at::text, ''), ',') FROM postbox.held").await,
        "done"
    );
    assert_eq!(db.one::<i64>("SELECT max_id FROM postbox.cursor ORDER BY seq DESC LIMIT 1").await, page.events[2].id());
}

async fn a_trace_tells_by_when_an_event_was_handed_over(version: PgVersion) {
    let db = Db::new(version).await;
    db.insert(3, 3).await;
    let log = db.log();
    acquire(&log).await;
    let page = in_time("a page", log.read(LIMIT)).await.unwrap();
    let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds));
    let held = |n: usize, state, sent| HeldChange { sent, ..HeldChange::new(page.events[n].clone(), state) };
    let held = [held(1, HeldState::Retry, ago(7_200)), held(2, HeldState::Waiting, None)];
    log.record(&Changes { sent: ago(90), held: held.to_vec(), ..published(&page) }).await.unwrap();
    // What a statement takes makes it later, and never earlier.
    let told = "SELECT string_agg(concat_ws(' ', t.state, CASE WHEN ago BETWEEN '90 s' AND '1 h' THEN 'short' \
        WHEN ago BETWEEN '2 h' AND '3 h' THEN 'long' ELSE ago::text END), ', ' ORDER BY o.id) FROM postbox.outbox o, \
        postbox.trace(o.event_id) t, LATERAL (SELECT coalesce(published_at, clock_timestamp()) - sent_at AS ago) a";
    assert_eq!(db.one::<String>(told).await, "published short, retry long, waiting");
    // A change that says nothing of it leaves it as it was.
    let done = HeldChange::new(page.events[1].clone(), HeldState::Done);
    log.record(&Changes { mark: None, events: 0, max_id: 0, sent: None, held: vec![done] }).await.unwrap();
    assert_eq!(db.one::<String>(told).await, "published short, published long, waiting");
}

async fn held_events_come_when_they_are_due(version: PgVersion) {
    let db = Db::new(version).await;
    db.insert(6, 2).await;
    let log = db.log();
    acquire(&log).await;
    let page = in_time("a page", log.read(LIMIT)).await.unwrap();
    let states = [
        (HeldState::Retry, 0),
        (HeldState::Dead, 0),
        (HeldState::Waiting, 0),
        (HeldState::Waiting, 0),
        (HeldState::Delayed, 3600),
        (HeldState::Replay, 0),
    ];
    let held = page.events.iter().zip(states);
    let held = held.map(|(event, (state, due))| HeldChange {
        event: event.clone(),
        state,
        attempts: 1,
        due: Duration::from_secs(due),
        error: None,
        sent: None,
    });
    log.record(&Changes { held: held.collect(), ..published(&page) }).await.unwrap();
    let mut loaded = log.load().await.unwrap();
    loaded.keys.sort_by_key(|k| k.2);
    let key = |n: usize| page.events[n].key();
    assert_eq!(loaded.keys, [(key(1), 1, false), (key(0), 2, true)], "a dead event holds nothing up under policy skip");
    assert_eq!(loaded.next_due, Some(Duration::ZERO));
    let mut query = HeldQuery { limit: LIMIT, open: vec![], skip: vec![] };
    let ids = |p: &postbox_engine::HeldPage| p.events.iter().map(|e| e.event.id()).collect::<Vec<_>>();
    let due = log.held(&query).await.unwrap();
    assert_eq!(ids(&due), [page.events[0].id(), page.events[5].id()]);
    assert_eq!(due.events[1].state, HeldState::Replay);
    assert!(due.next_due.is_some_and(|d| d > Duration::from_secs(3500)), "{:?}", due.next_due);
    query.open = vec![key(1)];
    query.skip = vec![page.events[0].id()];
    let open = log.held(&query).await.unwrap();
    assert_eq!(ids(&open), [page.events[3].id(), page.events[5].id()]);
}

/// A claim that takes long, here since a bin is locked, holds up reading alone: settling has a connection of its own.
async fn case_d5_four_connections_and_settling_waits_behind_no_claim(version: PgVersion) {
    let db = Db::new(version).await;
    db.sql("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET postbox.wake = on', current_database()); END $$").await;
    let mut options = db.options();
    options.ttl = Duration::from_secs(60);
    let log = PostgresLog::new(options);
    let open = "SELECT coalesce(string_agg(application_name, ', ' ORDER BY application_name), '') FROM pg_stat_activity \
                WHERE datname = current_database() AND application_name LIKE 'postbox%'";
    const FOUR: &str = "postbox keeper, postbox listener, postbox reader, postbox settler";
    // Then it is set up: while it is, a second one beside it shows that it has a session of its own.
    let listens =
        "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'";
    acquire(&log).await;
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'postbox reader' AND wait_event_type = 'Lock'";
    let other = client(&db.url).await;
    in_time("renewed and settled while the claim waits", async {
        loop {
            while !db.one::<bool>(listens).await || db.one::<String>(open).await != FOUR {}
            db.insert(10, 3).await;
            let page = log.read(LIMIT).await.unwrap();
            other.batch_execute("BEGIN; LOCK TABLE postbox.outbox_0 IN ACCESS EXCLUSIVE MODE").await.unwrap();
            while db.one::<i64>(waiting).await == 0 {}
            log.renew().await.unwrap();
            log.record(&published(&page)).await.unwrap();
            let waits = db.one::<i64>(waiting).await == 1;
            let connections: String = db.one(open).await;
            other.batch_execute("ROLLBACK").await.unwrap();
            if waits {
                break assert_eq!(connections, FOUR);
            }
            acquire(&log).await; // on a busy machine the claim may have given up first, which proves nothing
        }
    })
    .await;
}

//! Case R5: the cursor is trusted only where it was written. Each refusal says why, and what mends it.

use super::{Db, LIMIT, SECOND, acquire, client, drain, in_time, on_15_and_18, published};
use postbox_engine::{Changes, HeldChange, HeldQuery, HeldState, Log, SourceErrorKind};
use postbox_sources::postgres::{PostgresLog, PostgresOptions, admin};
use postbox_testkit::services::{PgVersion, Postgres};
use std::process::Command;
use std::time::Duration;

on_15_and_18! {
    case_r5_a_copy_of_the_database_is_refused_and_mended
    case_r5_a_standby_is_refused_until_it_is_promoted
    case_r5_a_lost_tail_is_refused_and_mended
    case_r5_rows_of_another_cluster_are_refused_and_mended
    case_r5_an_upgraded_cluster_is_refused_and_mended_for_each_stream
    ids_must_be_drawn_one_by_one
    case_l6_another_number_of_shards_is_refused
}

/// The refusal's text; it must hold all of `words`.
async fn refused(url: &str, words: &[&str]) {
    let log = PostgresLog::new(PostgresOptions::new(url));
    let error = in_time("an answer", log.acquire()).await.expect_err("the cursor is not to be trusted");
    assert_eq!(error.kind, SourceErrorKind::Refused, "{error}");
    for word in words {
        assert!(error.message.contains(word), "{word}: {error}");
    }
}

/// What the refusals name, and the SQL that is there.
const GUIDE: &str = "docs/guide/mending.md";
const MENDING: &str = include_str!("../../../../../docs/guide/mending.md");

async fn mend(url: &str) {
    let section = MENDING.split("## After a restore or a copy").nth(1).unwrap();
    let sql = section.split("```sql").nth(1).unwrap().split("```").next().unwrap();
    client(url).await.batch_execute(sql).await.unwrap_or_else(|e| panic!("{e:?}"));
}

/// A database in which ten events were published and five are waiting, one of these from a transaction that was running
/// when the cursor moved last.
async fn used(version: PgVersion) -> Db {
    let db = Db::new(version).await;
    let late = client(&db.url).await;
    late.batch_execute(
        "BEGIN; INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 'waiting')",
    )
    .await
    .unwrap();
    db.insert(10, 3).await;
    let log = db.log();
    acquire(&log).await;
    drain(&log, 10).await;
    log.release().await.unwrap();
    late.batch_execute("COMMIT").await.unwrap();
    db.sql("UPDATE postbox.outbox SET event_type = 'passed' WHERE event_type = 'placed'").await;
    db.insert(4, 3).await;
    db
}

/// After mending: exactly what was waiting is sent, in order, then what is written now, also by who began before.
async fn goes_on(url: &str) {
    let db = client(url).await;
    let waiting = "SELECT array_agg(id ORDER BY id) FROM postbox.outbox WHERE event_type <> 'passed'";
    let waiting: Vec<i64> = db.query_one(waiting, &[]).await.unwrap().get(0);
    assert!(waiting.len() >= 5);
    let log = PostgresLog::new(PostgresOptions::new(url));
    acquire(&log).await;
    assert_eq!(drain(&log, waiting.len()).await, waiting);
    let sql =
        "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 't') RETURNING id";
    let id: i64 = db.query_one(sql, &[]).await.unwrap().get(0);
    assert_eq!(drain(&log, 1).await, [id], "and none twice");
    log.release().await.unwrap();
}

fn database(url: &str) -> &str {
    url.rsplit('/').next().unwrap()
}

async fn case_r5_a_copy_of_the_database_is_refused_and_mended(version: PgVersion) {
    let db = used(version).await;
    let original = database(&db.url).to_owned();
    drop(db);
    let server = Postgres::shared(version);
    let copy = format!("{original}_copy");
    in_time("nobody is connected to the original", async {
        while server.execute("postgres", &format!("CREATE DATABASE {copy} TEMPLATE {original}")).is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    refused(&server.url(&copy), &["copy", GUIDE]).await;
    mend(&server.url(&copy)).await;
    goes_on(&server.url(&copy)).await;
}

async fn case_r5_a_standby_is_refused_until_it_is_promoted(version: PgVersion) {
    let mut server = Postgres::start(version).unwrap();
    let db = Db::on(&server, "postbox").await;
    db.insert(3, 3).await;
    let url = db.url.clone();
    drop(db);
    std::fs::write(server.folder().join("data/standby.signal"), "").unwrap();
    server.restart().unwrap();
    refused(&url, &["standby", "primary"]).await;
    server.execute("postgres", "SELECT pg_promote()").unwrap();
    let log = PostgresLog::new(PostgresOptions::new(&url));
    acquire(&log).await;
    drain(&log, 3).await;
}

async fn case_r5_a_lost_tail_is_refused_and_mended(version: PgVersion) {
    let db = used(version).await;
    db.sql(
        r"UPDATE postbox.cursor SET since = regexp_replace(since::text, ':\d+:', ':900000000:')::pg_snapshot WHERE seq = (SELECT max(seq) FROM postbox.cursor)",
    )
    .await;
    refused(&db.url, &["ahead", GUIDE]).await;
    mend(&db.url).await;
    goes_on(&db.url).await;
}

async fn case_r5_rows_of_another_cluster_are_refused_and_mended(version: PgVersion) {
    let db = used(version).await;
    db.sql("INSERT INTO postbox.outbox (txid, aggregate_type, aggregate_id, event_type) VALUES ('900000000', 'a', '1', 't')").await;
    refused(&db.url, &["900000000", GUIDE]).await;
    mend(&db.url).await;
    goes_on(&db.url).await;
}

/// As pg_upgrade leaves it: the same transaction ids in a cluster of another name. Of two streams one is ahead, and had
/// put an event into held that the other one lacks.
async fn case_r5_an_upgraded_cluster_is_refused_and_mended_for_each_stream(version: PgVersion) {
    let db = used(version).await;
    let mut options = db.options();
    options.stream = "audit".into();
    let audit = PostgresLog::new(options.clone());
    acquire(&audit).await;
    let page = in_time("all is read", audit.read(LIMIT)).await.unwrap();
    assert_eq!(page.events.len(), 15);
    let retry = |n: usize| HeldChange {
        event: page.events[n].clone(),
        state: HeldState::Retry,
        attempts: 1,
        due: Duration::ZERO,
        error: None,
        sent: None,
    };
    audit.record(&Changes { held: vec![retry(1), retry(14)], ..published(&page) }).await.unwrap();
    audit.release().await.unwrap();
    db.sql("UPDATE postbox.cursor SET system_id = 1").await;
    refused(&db.url, &["cluster 1", "pg_upgrade", GUIDE]).await;
    mend(&db.url).await;
    goes_on(&db.url).await;
    let lacked: Vec<i64> =
        db.one("SELECT array_agg(id ORDER BY id) FROM postbox.outbox WHERE event_type <> 'passed'").await;
    let audit = PostgresLog::new(options);
    acquire(&audit).await;
    assert_eq!(drain(&audit, 6).await, lacked, "what the other one lacked, and what came since");
    let held = audit.held(&HeldQuery { limit: LIMIT, open: vec![], skip: vec![] }).await.unwrap();
    assert_eq!(
        held.events.iter().map(|e| e.event.id()).collect::<Vec<_>>(),
        [page.events[1].id()],
        "what both had passed"
    );
}

/// From the oldest version into the newest, as a dump and restore does; where transaction ids are small, so that the
/// cursor seems to have passed what is written now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r5_r9_a_restored_dump_is_refused_and_mended_under_writers() {
    let db = used(PgVersion::V15).await;
    let ids = "DO $$ BEGIN FOR i IN 1..5000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$";
    db.sql(ids).await;
    let log = db.log();
    acquire(&log).await; // the cursor moves to the greater ids, and past the waiting events
    drain(&log, 5).await;
    log.release().await.unwrap();
    db.sql("UPDATE postbox.outbox SET event_type = 'passed'").await;
    db.insert(5, 3).await;
    let young = Postgres::start(PgVersion::V18).unwrap();
    let target = young.create_database();
    let script = format!(
        "/usr/lib/postgresql/15/bin/pg_dump '{}' | /usr/lib/postgresql/15/bin/psql -q -o /dev/null '{target}'",
        db.url
    );
    let restored = Command::new("sh").arg("-c").arg(script).status().unwrap();
    assert!(restored.success());
    let copied = client(&target).await.query_one("SELECT count(*) FROM postbox.cursor", &[]).await.unwrap();
    assert!(copied.get::<_, i64>(0) > 0, "the dump holds the cursor");
    refused(&target, &["cluster", "dump", GUIDE]).await;

    let writer = client(&target).await;
    let behind = "SELECT pg_snapshot_xmax(since) > pg_current_xact_id() FROM postbox.cursor ORDER BY seq DESC LIMIT 1";
    assert!(writer.query_one(behind, &[]).await.unwrap().get::<_, bool>(0), "ids are small here");
    let insert = "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 'new')";
    writer.batch_execute(&format!("SET statement_timeout = '5s'; {insert}")).await.unwrap();
    // The alarm rings, where people look.
    let status = admin::status(&target, "postbox").await.unwrap();
    assert!(status[0].last_error.as_ref().is_some_and(|e| e.contains(GUIDE)), "{status:?}");
    assert!(admin::check(&target, "postbox", SECOND).await.iter().any(|f| !f.ok && f.what.contains(GUIDE)));
    assert_eq!(writer.query_one("SELECT count(*) FROM postbox.outbox", &[]).await.unwrap().get::<_, i64>(0), 21);

    // A transaction that began before the mending and writes after it is found, too.
    let older = client(&target).await;
    older.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.unwrap();
    writer.batch_execute("SELECT pg_current_xact_id()").await.unwrap();
    mend(&target).await;
    older.batch_execute(&format!("{insert}; COMMIT")).await.unwrap();
    goes_on(&target).await;
    let left =
        "SELECT count(*) FROM postbox.outbox o, LATERAL postbox.trace(o.event_id) t WHERE t.state <> 'published'";
    assert_eq!(writer.query_one(left, &[]).await.unwrap().get::<_, i64>(0), 0);
}

async fn ids_must_be_drawn_one_by_one(version: PgVersion) {
    let db = used(version).await;
    db.sql("ALTER SEQUENCE postbox.outbox_id_seq CACHE 50").await;
    refused(&db.url, &["CACHE 50", "ALTER SEQUENCE"]).await;
    db.sql("ALTER SEQUENCE postbox.outbox_id_seq CACHE 1 RESTART 3").await;
    refused(&db.url, &["beyond its sequence", "setval"]).await;
    let remedy = r#"SELECT setval('postbox.outbox_id_seq', (SELECT max(id) FROM "postbox".outbox))"#;
    db.sql(remedy).await;
    assert!(db.log().acquire().await.unwrap().is_ok());
}

async fn case_l6_another_number_of_shards_is_refused(version: PgVersion) {
    let db = used(version).await;
    let mut options = db.options();
    (options.shards, options.shard) = (2, 1);
    let error = PostgresLog::new(options).acquire().await.unwrap_err();
    assert_eq!(error.kind, SourceErrorKind::Refused);
    assert!(error.message.contains("divided into 1 shards"), "{error}");
}

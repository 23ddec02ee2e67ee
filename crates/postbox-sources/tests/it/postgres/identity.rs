//! Case R5: the cursor is trusted only where it was written. Each refusal says why, and what mends it.

use super::{Db, acquire, client, drain, in_time, on_all_versions};
use postbox_engine::{Log, SourceErrorKind};
use postbox_sources::postgres::{PostgresLog, PostgresOptions};
use postbox_testkit::services::{PgVersion, Postgres};
use std::process::Command;

on_all_versions! {
    case_r5_a_copy_of_the_database_is_refused
    case_r5_a_standby_is_refused_until_it_is_promoted
    case_r5_a_lost_tail_is_refused
    case_r5_rows_of_another_cluster_are_refused
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

/// A database in which ten events were published.
async fn used(version: PgVersion) -> Db {
    let db = Db::new(version).await;
    db.insert(10, 3).await;
    let log = db.log();
    acquire(&log).await;
    drain(&log, 10).await;
    log.release().await.unwrap();
    db
}

fn database(url: &str) -> &str {
    url.rsplit('/').next().unwrap()
}

async fn case_r5_a_copy_of_the_database_is_refused(version: PgVersion) {
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
    refused(&server.url(&copy), &["copy", "postbox rebase"]).await;
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

async fn case_r5_a_lost_tail_is_refused(version: PgVersion) {
    let db = used(version).await;
    db.sql(
        "UPDATE postbox.cursor SET since = '900000000:900000000:' WHERE seq = (SELECT max(seq) FROM postbox.cursor)",
    )
    .await;
    refused(&db.url, &["ahead", "postbox rebase"]).await;
}

async fn case_r5_rows_of_another_cluster_are_refused(version: PgVersion) {
    let db = used(version).await;
    db.sql("INSERT INTO postbox.outbox (txid, aggregate_type, aggregate_id, event_type) VALUES ('900000000', 'a', '1', 't')").await;
    refused(&db.url, &["900000000", "postbox rebase"]).await;
}

/// From the oldest version into the newest, as a dump and restore does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r5_a_restored_dump_is_refused() {
    let db = used(PgVersion::V15).await;
    let target = Postgres::shared(PgVersion::V18).create_database();
    let script = format!(
        "/usr/lib/postgresql/15/bin/pg_dump '{}' | /usr/lib/postgresql/15/bin/psql -q -o /dev/null '{target}'",
        db.url
    );
    let restored = Command::new("sh").arg("-c").arg(script).status().unwrap();
    assert!(restored.success());
    let copied = client(&target).await.query_one("SELECT count(*) FROM postbox.cursor", &[]).await.unwrap();
    assert!(copied.get::<_, i64>(0) > 0, "the dump holds the cursor");
    refused(&target, &["cluster", "dump", "postbox rebase"]).await;
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
    assert!(error.message.contains("has 1 shards"), "{error}");
}

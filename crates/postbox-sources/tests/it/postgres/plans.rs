//! What reading costs the database, in index entries read, not in time: the plans hold whatever the statistics say, and
//! the cost of a poll depends neither on retained rows nor on what others leave open.

use super::{Db, acquire, client, drain, in_time, on_15_and_18};
use postbox_engine::Log;
use postbox_sources::postgres::PostgresLog;
use postbox_testkit::services::PgVersion;

on_15_and_18! {
    case_r6_statistics_of_an_empty_table_do_not_spoil_the_plans
    case_r7_retained_rows_and_old_snapshots_cost_a_poll_nothing
    a_bulk_writer_is_not_walked_at_every_poll
    a_late_commit_is_found_without_reading_all_between
}

/// A database whose bins autovacuum leaves alone: it scans them for the index by time.
async fn unvacuumed(version: PgVersion) -> Db {
    let db = Db::new(version).await;
    for bin in 0..6 {
        db.sql(&format!("ALTER TABLE postbox.outbox_{bin} SET (autovacuum_enabled = off)")).await;
    }
    db
}

/// Sequential scans of the bins, and entries read from their indexes, by all whose connections have ended.
async fn reads(db: &Db) -> (i64, i64) {
    in_time("the relay's connections have ended", async {
        while db.one::<i64>("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'postbox %' AND datname = current_database()").await > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    db.sql("SELECT pg_stat_force_next_flush()").await; // what this connection did, too
    let scans = "SELECT coalesce(sum(seq_scan), 0)::bigint FROM pg_stat_user_tables WHERE relname LIKE 'outbox_%'";
    let entries =
        "SELECT coalesce(sum(idx_tup_read), 0)::bigint FROM pg_stat_user_indexes WHERE relname LIKE 'outbox_%'";
    (db.one(scans).await, db.one(entries).await)
}

async fn end(log: PostgresLog) {
    log.release().await.unwrap();
}

/// `n` events, each read before the next is written.
async fn one_by_one(db: &Db, log: &PostgresLog, n: u32) {
    for _ in 0..n {
        db.insert(1, 1).await;
        drain(log, 1).await;
    }
}

async fn case_r6_statistics_of_an_empty_table_do_not_spoil_the_plans(version: PgVersion) {
    let db = unvacuumed(version).await;
    db.sql("ANALYZE").await;
    let before = reads(&db).await; // building indexes scans the bins
    let log = db.log();
    acquire(&log).await; // plans are made now
    for _ in 0..4 {
        db.insert(15_000, 100).await;
        drain(&log, 15_000).await;
    }
    db.sql("ANALYZE").await; // and again, for other statistics
    db.insert(15_000, 100).await;
    drain(&log, 15_000).await;
    end(log).await;
    let after = reads(&db).await;
    let (scans, entries) = (after.0 - before.0, after.1 - before.1);
    println!("75,000 events: {scans} scans, {entries} index entries");
    assert_eq!(scans, 0);
    assert!(entries < 75_000 * 3 / 2, "{entries} index entries for 75,000 events");
}

async fn case_r7_retained_rows_and_old_snapshots_cost_a_poll_nothing(version: PgVersion) {
    let db = unvacuumed(version).await;
    db.insert(30_000, 100).await;
    let log = db.log();
    acquire(&log).await;
    drain(&log, 30_000).await;
    end(log).await;
    let before = reads(&db).await;
    let old = client(&db.url).await;
    old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_xact_id()").await.unwrap();
    let log = db.log();
    acquire(&log).await;
    one_by_one(&db, &log, 100).await;
    end(log).await;
    let after = reads(&db).await;
    println!("100 events one by one: {} index entries", after.1 - before.1);
    assert_eq!(after.0, before.0, "no scan");
    assert!(after.1 - before.1 < 2_000, "{} index entries for 100 events", after.1 - before.1);
}

async fn a_bulk_writer_is_not_walked_at_every_poll(version: PgVersion) {
    let db = unvacuumed(version).await;
    let before = reads(&db).await;
    let log = db.log();
    acquire(&log).await;
    let bulk = client(&db.url).await;
    let rows = "BEGIN; INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) SELECT 'bulk', '1', 't' FROM generate_series(1, 20000)";
    bulk.batch_execute(rows).await.unwrap();
    one_by_one(&db, &log, 100).await;
    end(log).await;
    let after = reads(&db).await;
    let (scans, entries) = (after.0 - before.0, after.1 - before.1);
    println!("100 events beside 20,000 uncommitted rows: {entries} index entries");
    assert_eq!(scans, 0);
    assert!(entries < 60_000, "{entries} index entries");
    bulk.batch_execute("COMMIT").await.unwrap();
    let log = db.log();
    acquire(&log).await;
    drain(&log, 20_000).await;
}

/// A transaction that began before 40,000 events were published commits with 1,500 of its own, all with low ids.
async fn a_late_commit_is_found_without_reading_all_between(version: PgVersion) {
    let db = unvacuumed(version).await;
    let log = db.log();
    acquire(&log).await;
    let late = client(&db.url).await;
    late.batch_execute("BEGIN; INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) SELECT 'late', '1', 't' FROM generate_series(1, 1500)")
        .await
        .unwrap();
    db.insert(40_000, 100).await;
    drain(&log, 40_000).await;
    end(log).await;
    let before = reads(&db).await;
    late.batch_execute("COMMIT").await.unwrap();
    let log = db.log();
    acquire(&log).await;
    let ids = drain(&log, 1_500).await;
    assert!(ids.is_sorted() && ids.last() <= Some(&1_500));
    end(log).await;
    let after = reads(&db).await;
    println!("1,500 late events: {} index entries", after.1 - before.1);
    assert!(after.1 - before.1 < 10_000, "{} index entries for 1,500 events", after.1 - before.1);
}

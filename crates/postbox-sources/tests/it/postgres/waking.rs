//! Sleep and what ends it. Counted in statements and facts of the database, not in time.

use super::{Db, LIMIT, acquire, client, drain, in_time, on_15_and_18};
use postbox_engine::Log;
use postbox_testkit::services::PgVersion;
use std::time::{Duration, Instant};

on_15_and_18! {
    asleep_the_log_is_quiet_and_writers_wake_it
    sleep_waits_for_writers_that_may_stay_silent
    case_d4_a_lost_listener_is_survived
    where_writers_do_not_notify_the_log_polls
}

/// A database whose writers notify, although the server allows prepared transactions.
async fn notifying(version: PgVersion) -> Db {
    let db = Db::new(version).await;
    db.sql("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET postbox.wake = on', current_database()); END $$").await;
    let client = client(&db.url).await; // a session with the setting
    Db { client, ..db }
}

/// The wake lease has ended and the reader rests for longer than any pause of one that is awake.
async fn rests(db: &Db) {
    let sql = "SELECT (SELECT last_value = 1 FROM postbox.wake) AND EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'postbox reader' \
               AND datname = current_database() AND state = 'idle' AND state_change < clock_timestamp() - interval '0.6 s')";
    in_time("the log is asleep", async { while !db.one::<bool>(sql).await {} }).await;
}

async fn asleep_the_log_is_quiet_and_writers_wake_it(version: PgVersion) {
    let db = notifying(version).await;
    let log = db.log();
    acquire(&log).await;
    rests(&db).await;
    let transactions = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()";
    let rows = "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint FROM pg_stat_user_tables";
    db.sql("SELECT pg_stat_force_next_flush()").await;
    let before = (db.one::<i64>(transactions).await, db.one::<i64>(rows).await);
    let quiet = tokio::time::timeout(Duration::from_secs(5), log.read(LIMIT)).await;
    assert!(quiet.is_err(), "nothing to read: {quiet:?}");
    db.sql("SELECT pg_stat_force_next_flush()").await;
    let after = (db.one::<i64>(transactions).await, db.one::<i64>(rows).await);
    let statements = after.0 - before.0 - 4; // ours
    println!("asleep for five seconds: {statements} statements");
    assert!(statements <= 25, "{statements} statements in five seconds");
    assert_eq!(after.1, before.1, "an idle relay writes nothing");

    let mut waits = Vec::new();
    for _ in 0..5 {
        rests(&db).await;
        db.insert(1, 1).await;
        let committed = Instant::now();
        drain(&log, 1).await;
        waits.push(committed.elapsed());
    }
    waits.sort();
    println!("woken after {waits:?}");
    // By polling alone the median would be half a second, whatever the machine does beside.
    assert!(waits[2] < Duration::from_millis(250), "{waits:?}");
}

/// A transaction that looked at the wake lease while it held will not notify; sleep has to wait for it.
async fn sleep_waits_for_writers_that_may_stay_silent(version: PgVersion) {
    let db = notifying(version).await;
    let log = db.log();
    acquire(&log).await;
    db.sql("SELECT setval('postbox.wake', 9999999999999)").await;
    let silent = client(&db.url).await;
    silent
        .batch_execute(
            "BEGIN; INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 't')",
        )
        .await
        .unwrap();
    in_time("the wake lease is ended", async {
        while db.one::<i64>("SELECT last_value FROM postbox.wake").await != 1 {}
    })
    .await;
    // Awake it polls four times a second, asleep once: eight polls of the next three seconds tell.
    let sql = "SELECT state_change::text FROM pg_stat_activity WHERE application_name = 'postbox reader' AND datname = current_database()";
    let (mut polls, mut last, begun) =
        (0, String::new(), db.one::<f64>("SELECT extract(epoch FROM clock_timestamp())::float8").await);
    in_time("eight polls", async {
        while polls < 8 {
            let now: String = db.one(sql).await;
            polls += u32::from(now != last);
            last = now;
        }
    })
    .await;
    let took = db.one::<f64>("SELECT extract(epoch FROM clock_timestamp())::float8").await - begun;
    println!("eight polls in {took} s");
    assert!(took < 6.0, "it sleeps, although a silent writer is open: eight polls took {took} s");
    silent.batch_execute("COMMIT").await.unwrap();
    drain(&log, 1).await;
    rests(&db).await;
}

async fn case_d4_a_lost_listener_is_survived(version: PgVersion) {
    let db = notifying(version).await;
    let log = db.log();
    acquire(&log).await;
    rests(&db).await;
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'postbox listener' AND datname = current_database()";
    assert_eq!(db.one::<i64>(kill).await, 1);
    db.insert(1, 1).await;
    drain(&log, 1).await;
    let listening = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'postbox listener' AND datname = current_database() AND query LIKE 'LISTEN%'";
    in_time("it listens again", async { while db.one::<i64>(listening).await != 1 {} }).await;
    rests(&db).await;
    db.insert(1, 1).await;
    drain(&log, 1).await;
}

/// NOTIFY bars PREPARE TRANSACTION, so on a server that allows those writers do not notify unless they are told to.
async fn where_writers_do_not_notify_the_log_polls(version: PgVersion) {
    let db = Db::new(version).await;
    let log = db.log();
    acquire(&log).await;
    let gone = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'postbox listener' AND datname = current_database()";
    in_time("it does not listen", async { while db.one::<i64>(gone).await != 0 {} }).await;
    let quiet = tokio::time::timeout(Duration::from_secs(3), log.read(LIMIT)).await;
    assert!(quiet.is_err(), "nothing to read: {quiet:?}");
    assert_ne!(db.one::<i64>("SELECT last_value FROM postbox.wake").await, 0);
    db.sql("BEGIN; INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 't'); PREPARE TRANSACTION 'quiet'").await;
    db.sql("COMMIT PREPARED 'quiet'").await;
    drain(&log, 1).await;
}

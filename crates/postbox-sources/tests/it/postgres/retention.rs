//! Bins are emptied when every stream has passed them and nothing in them is held; never sooner, and nobody waits.
//! Each test has a server of its own: transactions of other databases hold a snapshot's xmin back, too.

use super::{Db, LIMIT, acquire, client, drain, in_time, on_all_versions, published};
use postbox_engine::{Changes, HeldChange, HeldState, Log};
use postbox_sources::postgres::PostgresLog;
use postbox_testkit::services::{PgVersion, Postgres};
use std::time::Duration;

on_all_versions! {
    case_d1_a_bin_goes_when_all_have_passed_it_and_nothing_in_it_is_held
    case_r9_a_relay_away_for_rounds_of_the_ring_finds_everything
    the_cursor_is_thinned_out_and_still_tells_when
}

impl Db {
    async fn bin(&self, bin: i16) {
        let sql = format!(
            "CREATE OR REPLACE FUNCTION postbox.bin() RETURNS smallint LANGUAGE sql STABLE AS 'SELECT {bin}::smallint'"
        );
        self.sql(&sql).await;
    }

    async fn rows(&self, bin: i16) -> i64 {
        self.one(&format!("SELECT count(*) FROM postbox.outbox WHERE bin = {bin}")).await
    }

    fn stream(&self, name: &str) -> PostgresLog {
        let mut options = self.options();
        (options.stream, options.retention) = (name.into(), Duration::from_secs(1));
        PostgresLog::new(options)
    }
}

async fn case_d1_a_bin_goes_when_all_have_passed_it_and_nothing_in_it_is_held(version: PgVersion) {
    let server = Postgres::start(version).unwrap();
    let db = Db::on(&server, "postbox").await;
    let (main, audit) = (db.stream("main"), db.stream("audit"));
    acquire(&main).await;
    acquire(&audit).await;
    db.bin(0).await;
    db.insert(10, 3).await;
    drain(&main, 10).await;
    drain(&audit, 10).await;
    audit.release().await.unwrap();
    db.bin(1).await;
    db.insert(10, 3).await;
    let page = in_time("a page", main.read(LIMIT)).await.unwrap();
    let held = |state| HeldChange {
        event: page.events[0].clone(),
        state,
        attempts: 1,
        due: Duration::from_secs(3600),
        error: None,
    };
    main.record(&Changes { held: vec![held(HeldState::Retry)], ..published(&page) }).await.unwrap();
    db.bin(2).await;
    db.insert(10, 3).await;
    drain(&main, 10).await;
    db.bin(5).await;

    let dump = client(&db.url).await; // what pg_dump holds: a lock that TRUNCATE must not queue behind
    dump.batch_execute("BEGIN; SELECT count(*) FROM postbox.outbox_0").await.unwrap();
    let refused = "SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()";
    let before: i64 = db.one(refused).await;
    in_time("the bin was tried twice", async { while db.one::<i64>(refused).await < before + 2 {} }).await;
    let waiting: i64 = db.one("SELECT count(*) FROM pg_locks WHERE NOT granted").await;
    assert_eq!((db.rows(0).await, waiting), (10, 0), "in use, and nobody waits");
    dump.batch_execute("COMMIT").await.unwrap();
    in_time("bin 0 is emptied", async { while db.rows(0).await > 0 {} }).await;
    assert_eq!((db.rows(1).await, db.rows(2).await), (10, 10), "audit has not passed these");

    acquire(&audit).await;
    drain(&audit, 20).await;
    in_time("bin 2 is emptied", async { while db.rows(2).await > 0 {} }).await;
    assert_eq!(db.rows(1).await, 10, "an event in it is held");
    main.record(&Changes { mark: None, events: 0, max_id: 0, held: vec![held(HeldState::Done)] }).await.unwrap();
    in_time("bin 1 is emptied", async { while db.rows(1).await > 0 {} }).await;
    db.insert(1, 1).await;
    drain(&main, 1).await;
}

async fn case_r9_a_relay_away_for_rounds_of_the_ring_finds_everything(version: PgVersion) {
    let server = Postgres::start(version).unwrap();
    let db = Db::on(&server, "postbox").await;
    let (main, audit) = (db.stream("main"), db.stream("audit"));
    acquire(&main).await;
    main.release().await.unwrap();
    acquire(&audit).await;
    for n in 0..20 {
        db.bin(n % 6).await; // more than three rounds
        db.insert(10, 3).await;
        drain(&audit, 10).await;
    }
    let quiet = tokio::time::timeout(Duration::from_secs(3), audit.read(LIMIT)).await;
    assert!(quiet.is_err(), "longer than the retention, nothing comes: {quiet:?}");
    acquire(&main).await;
    let ids = drain(&main, 200).await;
    assert!(ids.is_sorted_by(|a, b| a < b));
    assert_eq!(ids.len(), 200);
    in_time("then the ring is emptied", async {
        while db.one::<i64>("SELECT count(*) FROM postbox.outbox WHERE bin < 5").await > 50 {}
    })
    .await;
}

/// One row a second tells well enough, after a while, when an event was published.
async fn the_cursor_is_thinned_out_and_still_tells_when(version: PgVersion) {
    let server = Postgres::start(version).unwrap();
    let db = Db::on(&server, "postbox").await;
    let log = db.log();
    acquire(&log).await;
    for _ in 0..50 {
        db.insert(1, 1).await;
        drain(&log, 1).await;
    }
    log.release().await.unwrap();
    db.sql("UPDATE postbox.cursor SET at = date_trunc('second', at) - interval '10 minutes'").await;
    let newest: i64 = db.one("SELECT max(seq) FROM postbox.cursor").await;
    acquire(&log).await;
    let rows = "SELECT count(*) FROM postbox.cursor";
    let seconds = "SELECT count(DISTINCT at) FROM postbox.cursor";
    let expected: i64 = db.one(seconds).await;
    in_time("one row a second is left", async { while db.one::<i64>(rows).await > expected {} }).await;
    assert_eq!(
        db.one::<i64>("SELECT max(seq) FROM postbox.cursor").await,
        newest,
        "the newest says where reading goes on"
    );
    let lost =
        "SELECT count(*) FROM postbox.outbox o, LATERAL postbox.trace(o.event_id) t WHERE t.state <> 'published'";
    assert_eq!(db.one::<i64>(lost).await, 0);
}

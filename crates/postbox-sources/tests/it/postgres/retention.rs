//! Bins are emptied when every stream has passed them and nothing in them is held; never sooner, and nobody waits.
//! Each test has a server of its own: transactions of other databases hold a snapshot's xmin back, too.

use super::{Db, LIMIT, SECOND, acquire, client, drain, in_time, on_15_and_18, published};
use postbox_engine::{Changes, HeldChange, HeldState, Log, LogPage};
use postbox_sources::postgres::{Mark, PostgresLog, admin, migrate};
use postbox_testkit::services::{PgVersion, Postgres};
use std::collections::BTreeMap;
use std::time::Duration;

on_15_and_18! {
    case_d1_a_bin_goes_when_all_have_passed_it_and_nothing_in_it_is_held
    case_r9_a_relay_away_for_rounds_of_the_ring_finds_everything
    case_d1_the_ring_turns_by_the_configured_retention_and_a_change_empties_nothing_too_early
    case_d1_a_bins_age_is_not_what_its_writer_says
    the_cursor_is_thinned_out_and_still_tells_when
}

impl Db {
    /// Ten events in a bin of the test's choice, whatever the time: a clock of its own.
    async fn insert_into(&self, bin: i16) {
        self.sql(&format!(
            "INSERT INTO postbox.outbox (bin, aggregate_type, aggregate_id, event_type) SELECT {bin}, 'order', (g % 3)::text, 't' FROM generate_series(1, 10) g"
        ))
        .await;
    }

    async fn rows(&self, bin: i16) -> i64 {
        self.one(&format!("SELECT count(*) FROM postbox.outbox WHERE bin = {bin}")).await
    }

    fn stream(&self, name: &str) -> PostgresLog {
        let mut options = self.options();
        (options.stream, options.retention) = (name.into(), SECOND);
        PostgresLog::new(options)
    }
}

async fn case_d1_a_bin_goes_when_all_have_passed_it_and_nothing_in_it_is_held(version: PgVersion) {
    let server = Postgres::start(version).unwrap();
    let db = Db::keeping(&server, "postbox", SECOND).await;
    let (main, audit) = (db.stream("main"), db.stream("audit"));
    acquire(&main).await;
    acquire(&audit).await;
    db.insert_into(0).await;
    drain(&main, 10).await;
    drain(&audit, 10).await;
    audit.release().await.unwrap();
    db.insert_into(1).await;
    let page = in_time("a page", main.read(LIMIT)).await.unwrap();
    let held = |state| HeldChange {
        event: page.events[0].clone(),
        state,
        attempts: 1,
        due: Duration::from_secs(3600),
        error: None,
        sent: None,
    };
    main.record(&Changes { held: vec![held(HeldState::Retry)], ..published(&page) }).await.unwrap();
    db.insert_into(2).await;
    drain(&main, 10).await;

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
    main.record(&Changes { mark: None, events: 0, max_id: 0, sent: None, held: vec![held(HeldState::Done)] })
        .await
        .unwrap();
    in_time("bin 1 is emptied", async { while db.rows(1).await > 0 {} }).await;
    db.insert(1, 1).await;
    drain(&main, 1).await;
}

async fn case_r9_a_relay_away_for_rounds_of_the_ring_finds_everything(version: PgVersion) {
    let server = Postgres::start(version).unwrap();
    let db = Db::keeping(&server, "postbox", SECOND).await;
    let (main, audit) = (db.stream("main"), db.stream("audit"));
    acquire(&main).await;
    main.release().await.unwrap();
    acquire(&audit).await;
    for n in 0..20 {
        db.insert_into(n % 6).await; // more than three rounds
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

/// `created_at` is the writer's to choose: what is imported is old, and clocks go wrong. Neither keeps a bin, nor the
/// cursor's rows, nor takes one away that still tells something.
async fn case_d1_a_bins_age_is_not_what_its_writer_says(version: PgVersion) {
    let server = Postgres::start(version).unwrap();
    let db = Db::keeping(&server, "postbox", SECOND).await;
    let log = db.stream("main");
    acquire(&log).await;
    let write = async |bin: i16, at: &str| {
        db.sql(&format!(
            "INSERT INTO postbox.outbox (bin, created_at, aggregate_type, aggregate_id, event_type) VALUES ({bin}, '{at}', 'order', '1', 't')"
        ))
        .await;
        in_time("a page", log.read(LIMIT)).await.unwrap()
    };
    let hold = async |page: &LogPage<Mark>, state| {
        let due = Duration::from_secs(3600);
        let held = vec![HeldChange { event: page.events[0].clone(), state, attempts: 1, due, error: None, sent: None }];
        log.record(&Changes { held, ..published(page) }).await.unwrap();
    };
    let oldest = write(1, "9999-12-31").await;
    hold(&oldest, HeldState::Retry).await;
    for bin in [0, 2] {
        let page = write(bin, "9999-12-31").await;
        log.record(&published(&page)).await.unwrap();
    }
    let columns = "stream, shard, epoch, since, max_id, id_floor, events, relay, system_id, database, generation";
    db.sql(&format!("INSERT INTO postbox.cursor ({columns}) SELECT {columns} FROM (SELECT * FROM postbox.cursor ORDER BY seq DESC LIMIT 1) c, generate_series(1, 150)")).await;
    in_time("the bin of the future is emptied", async { while db.rows(0).await > 0 {} }).await;
    // A row that goes with those of the cursor, when all of them are old enough.
    db.sql("INSERT INTO postbox.held SELECT stream, 0, shard, key, aggregate_type, aggregate_id, event_id, event_type, event_created_at, 'done', 1, NULL, NULL, relay, held_at, \
            clock_timestamp() + interval '2 s' FROM postbox.held").await;
    in_time("the cursor was looked at", async {
        while db.one::<i64>("SELECT count(*) FROM postbox.held").await > 1 {}
    })
    .await;
    let rows = "SELECT count(*) FROM postbox.cursor";
    assert!(db.one::<i64>(rows).await > 150, "they tell when the oldest event was passed, and all after it");

    let page = write(3, "0001-01-01").await;
    hold(&page, HeldState::Retry).await;
    hold(&oldest, HeldState::Done).await;
    in_time("the cursor's rows that are older than all events go", async { while db.one::<i64>(rows).await > 101 {} })
        .await;
    assert_eq!((db.rows(1).await, db.rows(3).await), (0, 1));
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

/// Writes and publishes without pause, and sees to it that no event goes sooner than it may.
struct Ring {
    db: Db,
    log: PostgresLog,
    /// When each event that is still there was passed, by the server's clock.
    passed: BTreeMap<i64, f64>,
    newest: i64,
    /// Seconds that events must stay now.
    kept: f64,
}

impl Ring {
    /// One event more.
    async fn turn(&mut self) {
        self.db.insert(1, 1).await;
        self.pass(1).await;
    }

    async fn pass(&mut self, events: usize) {
        for id in drain(&self.log, events).await {
            let sql = "SELECT extract(epoch FROM at)::float8 FROM postbox.cursor ORDER BY seq DESC LIMIT 1";
            self.passed.insert(id, self.db.one(sql).await);
            self.newest = id;
        }
        let left: Vec<i64> = self.db.one("SELECT array_agg(id ORDER BY id) FROM postbox.outbox").await;
        let now: f64 = self.db.one("SELECT extract(epoch FROM clock_timestamp())::float8").await;
        let kept = self.kept;
        self.passed.retain(|id, at| {
            let stays = left.binary_search(id).is_ok();
            assert!(stays || now - *at >= kept, "event {id} went {} s after it was passed, not {kept} s", now - *at);
            stays
        });
    }

    /// Goes on until all events up to now are gone.
    async fn round(&mut self) {
        let last = self.newest;
        in_time("a round of the ring", async {
            while self.passed.range(..=last).next().is_some() {
                self.turn().await;
            }
        })
        .await;
    }

    async fn migrate(&mut self, seconds: u32) {
        assert!(migrate::migrate(&mut self.db.client, "postbox", SECOND * seconds).await.unwrap().retention_changed);
        // What the relay had begun by the old retention.
        let active =
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'postbox keeper' AND state = 'active'";
        in_time("the keeper rests", async { while self.db.one::<i64>(active).await > 0 {} }).await;
    }

    /// What `check` says about a relay that is configured so.
    async fn wrong(&self, seconds: u32) -> Vec<String> {
        let findings = admin::check(&self.db.url, "postbox", SECOND * seconds).await;
        findings.into_iter().filter(|f| !f.ok).map(|f| format!("{} {}", f.what, f.remedy.unwrap_or_default())).collect()
    }
}

/// The function that users have, bins of one second and of two, events in all of them.
async fn case_d1_the_ring_turns_by_the_configured_retention_and_a_change_empties_nothing_too_early(version: PgVersion) {
    let server = Postgres::start(version).unwrap();
    let db = Db::keeping(&server, "postbox", SECOND * 2).await;
    let mut options = db.options();
    options.retention = SECOND * 2;
    let log = PostgresLog::new(options);
    acquire(&log).await;
    let old = client(&db.url).await; // a transaction from before the change: its id, and the bin that it writes to
    let mut ring = Ring { db, log, passed: BTreeMap::new(), newest: 0, kept: 2.0 };
    ring.turn().await;
    ring.round().await;
    let bins: i64 = ring.db.one("SELECT count(DISTINCT bin) FROM postbox.outbox").await;
    assert!(bins > 1, "the bins take a second each, not 42 hours");
    assert_eq!(ring.wrong(2).await, [""; 0]);

    old.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.unwrap();
    ring.turn().await;
    ring.migrate(5).await;
    let [wrong] = &ring.wrong(2).await[..] else { panic!("one thing is wrong") };
    assert!(
        wrong.contains("asks for 2 s") && wrong.contains("with 5 s") && wrong.contains("postbox migrate"),
        "{wrong}"
    );
    assert_eq!(ring.wrong(5).await, [""; 0]);
    ring.turn().await;
    ring.kept = 5.0; // although the relay was started with two
    old.batch_execute(
        "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 't'); COMMIT",
    )
    .await
    .unwrap();
    ring.pass(1).await;
    ring.round().await;

    ring.kept = 2.0;
    ring.migrate(2).await;
    ring.round().await;
}

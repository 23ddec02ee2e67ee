//! What a relay costs the database, counted: bytes of WAL, dead rows, statements. Never timed.

use crate::harness::{DEADLINE, Folder, until};
use postbox_testkit::services::{PgOptions, PgVersion, Postgres};
use std::time::Instant;

/// A server where nothing but the clients' work is written: no vacuum, no checkpoint by itself. It logs each statement with
/// its time in milliseconds, its client and its database.
fn quiet_server(version: PgVersion) -> Postgres {
    let settings = [
        ("autovacuum", "off"),
        ("checkpoint_timeout", "1d"),
        ("max_wal_size", "16GB"),
        ("log_statement", "all"),
        ("log_line_prefix", "%n|%a|%d|"),
        ("log_checkpoints", "off"),
    ];
    let extra = settings.map(|(name, value)| (name.into(), value.into())).to_vec();
    Postgres::start_with(version, &PgOptions { extra, ..PgOptions::default() }).unwrap()
}

/// A migrated database there, and a folder whose configuration names it.
fn migrated(server: &Postgres) -> (Folder, String) {
    let url = server.create_database();
    let folder = Folder::new().env("DATABASE_URL", &url);
    folder.ok(&["migrate"]);
    (folder, url.rsplit('/').next().unwrap().to_owned())
}

fn number(server: &Postgres, database: &str, sql: &str) -> i64 {
    server.execute(database, sql).unwrap()[0][0].as_deref().unwrap().parse().unwrap()
}

const EVENTS: usize = 50_000;
/// Ten events a transaction.
const WRITE: &str = "DO $$ BEGIN FOR i IN 1..5000 LOOP
  INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload)
  SELECT 'order', (g % 300)::text, 'order.placed', json_build_object('n', g, 'pad', repeat('x', 300)) FROM generate_series(i * 10, i * 10 + 9) g;
  COMMIT; END LOOP; END $$";
const WAL: &str = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint";

/// The difference of the WAL's position over a relay's life, nobody writing, autovacuum off. The checkpoint comes before
/// the pages are touched (by a first relay, by the writers), so that no image of a full page falls into the drain, nor one
/// for a hint bit where the server has checksums: those are the checkpoint's price, whoever touches the page first.
fn case_d3_draining_writes_little_wal_and_leaves_no_dead_row_in_the_log(version: PgVersion) {
    let server = quiet_server(version);
    let (folder, database) = migrated(&server);
    server.execute(&database, "CHECKPOINT").unwrap();
    let first = folder.leading_relay();
    let id = folder.ok(&["publish", "order", "1", "order.placed", "{}"]).stdout;
    first.stdout.wait_for(id.trim());
    first.stop();
    server.execute(&database, WRITE).unwrap();

    let before = number(&server, &database, WAL);
    let relay = folder.leading_relay();
    relay.stdout.wait_until(|lines| lines.len() >= EVENTS);
    relay.stop();
    let bytes = number(&server, &database, WAL) - before;
    let status = folder.json(&["status", "--json"]);
    assert_eq!((&status[0]["pending"], &status[0]["dead"]), (&0.into(), &0.into()), "{status}");
    println!("{bytes} bytes of WAL for {EVENTS} events");
    assert!(bytes < 5 * EVENTS as i64, "{bytes} bytes of WAL for {EVENTS} events");

    // A connection that has ended has told its counts.
    let open = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'postbox%'";
    until("the relay's connections have ended", || number(&server, &database, open) == 0);
    let count = |what: &str, tables: &str| {
        let sql = format!(
            "SELECT sum({what})::bigint FROM pg_stat_user_tables WHERE schemaname = 'postbox' AND relname {tables}"
        );
        number(&server, &database, &sql)
    };
    assert!(count("n_tup_ins", "= 'cursor'") > 2 && count("n_tup_upd", "= 'lease'") > 2, "the counts are there");
    for log in ["= 'cursor'", "LIKE 'outbox%'"] {
        assert_eq!(count("n_tup_upd + n_tup_del + n_dead_tup", log), 0, "dead rows in tables {log}");
    }
    assert_eq!(count("n_tup_ins", "LIKE 'outbox%'"), EVENTS as i64 + 1);
}

const BULK_EVENTS: usize = 20_000;
/// A hundred events a transaction.
const BULK: &str = "DO $$ BEGIN FOR i IN 1..200 LOOP
  INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload)
  SELECT 'order', (g % 300)::text, 'order.placed', json_build_object('n', g, 'pad', repeat('x', 300)) FROM generate_series(1, 100) g;
  COMMIT; END LOOP; END $$";

/// Pages that were looked at in postbox's tables and their indexes, when nobody is connected who could still count.
fn pages(server: &Postgres, database: &str) -> i64 {
    let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    until("all connections have ended", || number(server, database, others) == 0);
    let sql = "SELECT sum(heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit)::bigint \
               FROM pg_statio_user_tables WHERE schemaname = 'postbox'";
    number(server, database, sql)
}

/// What speed depends on, counted: a drain looks at as many pages for each event, whether few or many wait, and
/// whatever is kept of what was published before.
fn draining_costs_no_more_behind_a_large_backlog_or_many_retained_rows(version: PgVersion) {
    let server = quiet_server(version);
    let (folder, database) = migrated(&server);
    let drain = |writes: usize| {
        (0..writes).for_each(|_| drop(server.execute(&database, BULK).unwrap()));
        server.execute(&database, "VACUUM ANALYZE").unwrap();
        let before = pages(&server, &database);
        let relay = folder.leading_relay();
        relay.stdout.wait_until(|lines| lines.len() >= writes * BULK_EVENTS);
        relay.stop();
        (pages(&server, &database) - before) as f64 / (writes * BULK_EVENTS) as f64
    };
    let few = drain(1);
    let (many, retained) = (drain(4), drain(1));
    println!(
        "pages for each event: {few:.3}, of four times as many {many:.3}, behind five times as many {retained:.3}"
    );
    // A page has sixteen events, so 0.06 is the least, and twice that where a window is read in two parts; with the indexes'
    // pages 0.16 at most. To look at all that is retained would be 0.3 more.
    for pages in [few, many, retained] {
        assert!((0.06..0.25).contains(&pages), "{pages} pages for each event");
    }
}

/// The window in which an idle relay's statements are counted, by the server's clock, from this long after it began.
const AFTER_MS: u64 = 4_000;
const WINDOW_MS: u64 = 20_000;

/// When the relay's statements came, as the server's log has them: one line for each that was executed.
fn statements(server: &Postgres, database: &str) -> Vec<u64> {
    let log = std::fs::read(server.folder().join("log")).unwrap();
    let log = String::from_utf8_lossy(&log);
    let time = |line: &str| {
        let [time, name, of, text] = line.splitn(4, '|').collect::<Vec<_>>()[..] else { return None };
        let statement = text.starts_with("LOG:  statement:") || text.starts_with("LOG:  execute ");
        let ours = name.starts_with("postbox ") && of == database && statement;
        ours.then(|| time.replace('.', "").parse().unwrap())
    };
    log.lines().filter_map(time).collect()
}

/// Where writers may notify it sleeps, elsewhere it polls: both at once, on one server.
fn case_d3_an_idle_relay_makes_at_most_five_statements_a_second(version: PgVersion) {
    let server = quiet_server(version);
    let [polls, sleeps] = [(); 2].map(|()| migrated(&server));
    server.execute("postgres", &format!("ALTER DATABASE {} SET postbox.wake = on", sleeps.1)).unwrap();
    let relays = [&polls, &sleeps].map(|(folder, _)| folder.leading_relay());
    let began = [&polls, &sleeps].map(|(_, database)| *statements(&server, database).last().unwrap());
    let began = began[0].max(began[1]) + AFTER_MS;
    let deadline = Instant::now() + DEADLINE;
    let counts = [&polls, &sleeps].map(|(_, database)| {
        loop {
            let times = statements(&server, database);
            if times.iter().any(|at| *at >= began + WINDOW_MS) {
                break times.iter().filter(|at| (began..began + WINDOW_MS).contains(at)).count();
            }
            assert!(Instant::now() < deadline, "it has fallen silent: {} statements", times.len());
            std::thread::park_timeout(std::time::Duration::from_millis(100));
        }
    });
    println!("{WINDOW_MS} ms: {} statements polling, {} asleep", counts[0], counts[1]);
    let most = 5 * WINDOW_MS as usize / 1000;
    assert!(counts[0] <= most && counts[1] <= most / 2, "{counts:?} statements in {WINDOW_MS} ms");
    relays.into_iter().for_each(|relay| relay.stop());
}

macro_rules! on_all_versions {
    ($($name:ident)*) => { $( mod $name {
        #[test]
        fn on_15() { super::$name(super::PgVersion::V15) }
        #[test]
        fn on_18() { super::$name(super::PgVersion::V18) }
    } )* };
}
on_all_versions! {
    case_d3_draining_writes_little_wal_and_leaves_no_dead_row_in_the_log
    draining_costs_no_more_behind_a_large_backlog_or_many_retained_rows
    case_d3_an_idle_relay_makes_at_most_five_statements_a_second
}

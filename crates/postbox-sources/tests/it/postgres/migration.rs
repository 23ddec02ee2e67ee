//! Migrations: safe together, safe again, the same as a script, never over another's schema.

use super::{Db, SECOND, WEEK, client};
use postbox_engine::{SourceError, SourceErrorKind};
use postbox_sources::admin::Migrated;
use postbox_sources::postgres::migrate::{NEWEST, migrate, require, script, version};
use postbox_testkit::services::{PgVersion, Postgres};
use std::process::{Command, Stdio};
use tokio_postgres::Client;

super::on_all_versions! {
    case_d6_five_start_at_once
    case_d6_again_changes_nothing_and_keeps_waiting_events
    case_d6_the_script_does_the_same
    case_r8_hostile_names_and_no_search_path
    case_d6_odd_settings_of_the_database
    case_d6_a_newer_or_foreign_schema_is_refused
    case_d6_missing_rights_are_named
}

const DONE: Migrated = Migrated { from: 0, to: NEWEST, retention_changed: false };
const NOTHING: Migrated = Migrated { from: NEWEST, to: NEWEST, retention_changed: false };
/// Debian's client, which comes with the server of the same package.
const PSQL: &str = "/usr/lib/postgresql/15/bin/psql";

async fn empty(pg: PgVersion) -> (String, Client) {
    let url = Postgres::shared(pg).create_database();
    let client = client(&url).await;
    (url, client)
}

async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(client: &Client, sql: &str) -> T {
    client.query_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e:?}")).get(0)
}

fn refused(error: &SourceError, words: &str) {
    assert_eq!(error.kind, SourceErrorKind::Refused, "{error}");
    assert!(error.message.contains(words), "{error}");
}

/// All that the schema consists of, but for object ids.
async fn shape(client: &Client, schema: &str) -> Vec<String> {
    let sql = "SELECT format('%s %s %s', c.relkind, c.relname, string_agg(format('%s %s %s %s', a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid)), ',' ORDER BY a.attnum))
        FROM pg_class c LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
        WHERE c.relnamespace = $1::text::regnamespace GROUP BY c.oid
        UNION ALL SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = $1::text::regnamespace
        UNION ALL SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
        UNION ALL SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = $1::text::regnamespace
        UNION ALL SELECT format('%s %s', version, checksum) FROM postbox.migration ORDER BY 1";
    client.query(sql, &[&schema]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

async fn case_d6_five_start_at_once(pg: PgVersion) {
    let (url, look) = empty(pg).await;
    let start = |_| {
        let url = url.clone();
        tokio::spawn(async move { migrate(&mut client(&url).await, "postbox", WEEK).await.unwrap() })
    };
    let running: Vec<_> = (0..5).map(start).collect();
    let mut results = Vec::new();
    for task in running {
        results.push(task.await.unwrap());
    }
    results.sort_by_key(|m| m.from);
    assert_eq!(results, [DONE, NOTHING, NOTHING, NOTHING, NOTHING]);
    assert_eq!(one::<i64>(&look, "SELECT count(*) FROM postbox.migration").await, i64::from(NEWEST));
}

async fn case_d6_again_changes_nothing_and_keeps_waiting_events(pg: PgVersion) {
    let mut db = Db::new(pg).await;
    db.insert(100, 10).await;
    let before = shape(&db.client, "postbox").await;
    assert_eq!(migrate(&mut db.client, "postbox", WEEK).await.unwrap(), NOTHING);
    assert_eq!(shape(&db.client, "postbox").await, before);
    assert_eq!(db.one::<i64>("SELECT count(*) FROM postbox.outbox").await, 100);
    require(&db.client, "postbox").await.unwrap();
}

async fn case_d6_the_script_does_the_same(pg: PgVersion) {
    let mut migrated = Db::new(pg).await;
    let (url, mut client) = empty(pg).await;
    for retention in [WEEK, WEEK, SECOND * 7, SECOND * 7] {
        psql(&url, &script("postbox", retention).unwrap(), &format!("{retention:?}"));
        migrate(&mut migrated.client, "postbox", retention).await.unwrap();
        assert_eq!(migrate(&mut client, "postbox", retention).await.unwrap(), NOTHING);
        assert_eq!(shape(&client, "postbox").await, shape(&migrated.client, "postbox").await);
    }
}

fn psql(url: &str, sql: &str, round: &str) {
    let mut child = Command::new(PSQL)
        .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", url, "-f", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("psql of postgresql-client-15");
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), sql.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{round}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Several outboxes in one database, under names that need quoting, with nothing on the search path.
async fn case_r8_hostile_names_and_no_search_path(pg: PgVersion) {
    let (url, mut client) = empty(pg).await;
    client.batch_execute("SET search_path = ''").await.unwrap();
    let names = [r#"My-App"x"#, "it's", "ünï $1 %s %I", "a.b", "SELECT", "$$", r"back\slash", &"x".repeat(63), ":v"];
    for name in names {
        let schema = postbox::schema::quote(name);
        assert_eq!(version(&client, name).await.unwrap(), 0);
        assert_eq!(migrate(&mut client, name, WEEK).await.unwrap(), DONE, "{name}");
        assert_eq!(migrate(&mut client, name, WEEK).await.unwrap(), NOTHING, "{name}");
        psql(&url, &script(name, SECOND).unwrap(), name);
        let sql = format!(
            "LISTEN {schema}; SET postbox.wake = on; INSERT INTO {schema}.outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 'plain');
             SELECT {schema}.publish('a', '1', 'published', '{{}}', ordered => true);
             INSERT INTO {schema}.lease (stream, shard) VALUES ('main', 0)"
        );
        client.batch_execute(&sql).await.unwrap_or_else(|e| panic!("{name}: {e:?}"));
        let seen = format!(
            "SELECT count(*) FROM {schema}.outbox o, {schema}.trace(o.event_id) t, {schema}.lag l WHERE t.state = 'pending' AND l.pending = 2"
        );
        assert_eq!(one::<i64>(&client, &seen).await, 2, "{name}");
        let awake = format!("SELECT last_value > 1 FROM {schema}.wake");
        assert!(one::<bool>(&client, &awake).await, "{name}: the trigger has notified");
    }
    let cut = "y".repeat(64);
    refused(&migrate(&mut client, &cut, WEEK).await.unwrap_err(), "longer than 63 bytes");
    refused(&migrate(&mut client, "a$body$b", WEEK).await.unwrap_err(), "dollar quote");
}

async fn case_d6_odd_settings_of_the_database(pg: PgVersion) {
    let (url, mut client) = empty(pg).await;
    let settings = [
        "default_transaction_isolation = 'serializable'",
        "default_transaction_read_only = on",
        "standard_conforming_strings = off",
        "check_function_bodies = off",
        "DateStyle = 'German'",
    ];
    for setting in settings {
        let sql =
            format!("DO $$ BEGIN EXECUTE format($x$ALTER DATABASE %I SET {setting}$x$, current_database()); END $$");
        client.batch_execute(&sql).await.unwrap();
    }
    client = super::client(&url).await;
    assert_eq!(migrate(&mut client, "postbox", WEEK).await.unwrap(), DONE);
    client
        .batch_execute("BEGIN READ WRITE; SELECT postbox.publish('a', '1', 'x', headers => '{\"a\": \"b\"}'); COMMIT")
        .await
        .unwrap();
    assert!(!one::<bool>(&client, r#"SELECT postbox.headers_valid('{"a": "b\\nc"}')"#).await, "its line break is one");
}

async fn case_d6_a_newer_or_foreign_schema_is_refused(pg: PgVersion) {
    let mut db = Db::new(pg).await;
    refused(&require(&db.client, "nowhere").await.unwrap_err(), "run `postbox migrate`");
    db.sql("INSERT INTO postbox.migration (version, name, checksum) VALUES (1000, 'later', 'x')").await;
    refused(&migrate(&mut db.client, "postbox", WEEK).await.unwrap_err(), "version 1000");
    refused(&require(&db.client, "postbox").await.unwrap_err(), "use a newer postbox");
    db.sql("DELETE FROM postbox.migration WHERE version = 1000; UPDATE postbox.migration SET checksum = 'x' WHERE version = 1").await;
    refused(&migrate(&mut db.client, "postbox", WEEK).await.unwrap_err(), "another build");
    // Somebody else's schema with a table of ours in it: nothing of it is touched.
    db.sql("CREATE SCHEMA shop; CREATE TABLE shop.outbox (id int); INSERT INTO shop.outbox VALUES (7)").await;
    refused(&migrate(&mut db.client, "shop", WEEK).await.unwrap_err(), "already exists");
    assert_eq!(db.one::<i32>("SELECT id FROM shop.outbox").await, 7);
    assert_eq!(version(&db.client, "shop").await.unwrap(), 0, "all or nothing");
}

async fn case_d6_missing_rights_are_named(pg: PgVersion) {
    let (_, mut client) = empty(pg).await;
    let role = "CREATE ROLE nobody_special"; // shared by the databases of the server
    let _ = client.batch_execute(role).await;
    client.batch_execute("SET ROLE nobody_special").await.unwrap();
    let error = migrate(&mut client, "postbox", WEEK).await.unwrap_err();
    refused(&error, "permission denied");
    refused(&error, "`postbox migrate --print`");
}

/// It waits for nobody longer than it says; what it found locked, it leaves as it was.
#[tokio::test]
async fn case_d6_a_lock_is_not_waited_for_for_ever() {
    let mut db = Db::new(PgVersion::V18).await;
    let other = client(&db.url).await;
    other.batch_execute("BEGIN; LOCK TABLE postbox.migration").await.unwrap();
    let error = migrate(&mut db.client, "postbox", WEEK).await.unwrap_err();
    assert_eq!(error.kind, SourceErrorKind::Unavailable, "{error}");
    assert!(error.message.contains("try again"), "{error}");
    other.batch_execute("COMMIT").await.unwrap();
    assert_eq!(migrate(&mut db.client, "postbox", WEEK).await.unwrap(), NOTHING);
}

//! Migration, and what the tables take.

use super::{File, insert, publish, soon};
use postbox_engine::{DeadPolicy, LogSource, Source, SourceErrorKind};
use postbox_sources::sqlite::{Options, SqliteLog, VERSION, migrate, script, version};
use std::sync::Barrier;

#[test]
fn case_d6_five_migrate_at_once_and_again() {
    let file = File::unmigrated();
    let start = Barrier::new(5);
    let found: Vec<i64> = std::thread::scope(|s| {
        let one = || {
            start.wait();
            migrate(&file.path, "postbox").unwrap()
        };
        let all: Vec<_> = (0..5).map(|_| s.spawn(one)).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(found.iter().filter(|found| **found == 0).count(), 1, "one of them makes the tables: {found:?}");
    assert_eq!(migrate(&file.path, "postbox").unwrap(), VERSION);
    assert_eq!(version(&file.path, "postbox").unwrap(), VERSION);
    assert_eq!(file.connect().query_row("PRAGMA journal_mode", [], |r| r.get::<_, String>(0)).unwrap(), "wal");
}

#[test]
fn the_script_makes_what_migrate_makes() {
    let (printed, migrated) = (File::unmigrated(), File::new());
    printed.connect().execute_batch(&script("postbox")).unwrap();
    let tables = |file: &File| {
        let sql = "SELECT group_concat(sql, ';') FROM (SELECT sql FROM sqlite_schema ORDER BY name)";
        file.connect().query_row(sql, [], |r| r.get::<_, String>(0)).unwrap()
    };
    assert_eq!(tables(&printed), tables(&migrated));
    assert_eq!(migrate(&printed.path, "postbox").unwrap(), VERSION, "nothing is left to do");
}

#[tokio::test]
async fn case_r8_two_outboxes_in_one_file_and_an_odd_name() {
    let file = File::new();
    let odd = "My-App\"x'; --";
    assert_eq!(migrate(&file.path, odd).unwrap(), 0);
    let table = "\"My-App\"\"x'; --_outbox\"";
    let sql = format!(
        "INSERT INTO {table} (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 'odd', 'x', '1')"
    );
    file.connect().execute(&sql, []).unwrap();
    insert(&file.connect(), "usual", 2);
    assert_eq!(publish(&file.source("r").await, 1).await, ["usual 2"]);
    let options = Options { schema: odd.into(), ..file.options("r") };
    let source = LogSource::new(SqliteLog::new(options), DeadPolicy::Skip);
    soon(source.acquire()).await.unwrap();
    assert_eq!(publish(&source, 1).await, ["odd 1"]);
    assert_eq!(postbox_sources::sqlite::admin::status(&file.path, odd).await.unwrap()[0].pending, 0);
    assert!(postbox_sources::sqlite::admin::check(&file.path, odd).await.iter().all(|finding| finding.ok));
}

#[test]
fn newer_and_foreign_tables_are_refused() {
    let file = File::new();
    file.connect().execute("UPDATE postbox_migration SET checksum = 'other'", []).unwrap();
    let error = migrate(&file.path, "postbox").unwrap_err();
    assert_eq!(error.kind, SourceErrorKind::Refused);
    assert!(error.to_string().contains("shop.db") && error.to_string().contains("another script"), "{error}");
    file.connect().execute("INSERT INTO postbox_migration VALUES (99, '', 0)", []).unwrap();
    let error = migrate(&file.path, "postbox").unwrap_err();
    assert!(error.to_string().contains("version 99") && error.to_string().contains("Upgrade postbox"), "{error}");
}

#[test]
fn a_plain_insert_gets_a_uuid_of_version_7() {
    let file = File::new();
    let db = file.connect();
    (0..500).for_each(|n| insert(&db, "a", n));
    let mut rows = db.prepare("SELECT event_id, created_at FROM postbox_outbox ORDER BY id").unwrap();
    let rows = rows.query_map([], |r| Ok((r.get::<_, String>(0)?, r.get::<_, i64>(1)?))).unwrap();
    let mut ids = std::collections::BTreeSet::new();
    for row in rows {
        let (text, created_at) = row.unwrap();
        let id = uuid::Uuid::parse_str(&text).unwrap();
        assert_eq!((id.get_version_num(), id.get_variant()), (7, uuid::Variant::RFC4122));
        let (seconds, nanos) = id.get_timestamp().unwrap().to_unix();
        assert_eq!(seconds * 1000 + u64::from(nanos) / 1_000_000, created_at as u64);
        assert_eq!(text, id.hyphenated().to_string(), "as other tools spell it");
        ids.insert(id);
    }
    assert_eq!(ids.len(), 500);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as i64;
    let newest = file.count("SELECT max(created_at) FROM postbox_outbox");
    assert!((now - newest).abs() < 60_000, "{now} {newest}");
}

/// What is wrong is refused where it is written, with a word on what.
#[test]
fn case_w5_bad_rows_are_refused_at_the_insert() {
    let file = File::new();
    let db = file.connect();
    let refused = |columns: &str, values: &str| {
        let names = if columns.contains("aggregate_type") { "event_type" } else { "aggregate_type, event_type" };
        let those = if columns.contains("aggregate_type") { "'e'" } else { "'a', 'e'" };
        let sql =
            format!("INSERT INTO postbox_outbox ({names}, aggregate_id, {columns}) VALUES ({those}, '1', {values})");
        db.execute(&sql, []).unwrap_err().to_string()
    };
    for (columns, values, word) in [
        ("payload", "'{'", "payload is JSON"),
        ("payload", "'{}' || char(0)", "payload is JSON"),
        ("payload", "'{}' || char(0) || 'more'", "payload is JSON"),
        ("payload", "x'7b7d'", "BLOB value in TEXT column"),
        ("payload, payload_binary", "'1', x'00'", "one of payload and payload_binary"),
        ("headers", "'[]'", "headers are a JSON object"),
        ("headers", "'{'", "headers are a JSON object"),
        ("headers", "'{}' || char(0)", "headers are a JSON object"),
        ("event_id", "'42'", "event_id is a UUID"),
        ("event_id", "'01980000-0000-7000-8000-00000000000g'", "event_id is a UUID"),
        ("event_id", "'01980000-0000-7000-8000-000000000000' || char(0)", "event_id is a UUID"),
        ("available_at", "1796000000", "available_at is in milliseconds"),
        ("available_at", "1796000000000000", "available_at is in milliseconds"),
        ("created_at", "1796000000", "created_at is in milliseconds"),
        ("aggregate_type", "''", "aggregate_type is not empty"),
        ("destination", "''", "destination is not empty"),
        ("aggregate_type", "NULL", "NOT NULL"),
    ] {
        let error = refused(columns, values);
        assert!(error.contains(word), "{columns} {values}: {error}");
    }
    for cut in 0..5 {
        let text = |n: usize| if n == cut { "a\0b" } else { "a" };
        let sql = "INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type, content_type, destination) VALUES (?1, ?2, ?3, ?4, ?5)";
        let error = db.execute(sql, [text(0), text(1), text(2), text(3), text(4)]).unwrap_err().to_string();
        assert!(error.contains("texts have no zero byte"), "{cut}: {error}");
    }
    let sql =
        "INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type, event_id) VALUES ('a', '1', 'e', ?1)";
    db.execute(sql, ["01980000-0000-7000-8000-00000000000A"]).unwrap();
    let twice = db.execute(sql, ["01980000-0000-7000-8000-00000000000a"]).unwrap_err().to_string();
    assert!(twice.contains("UNIQUE"), "{twice}");
    assert_eq!(file.count("SELECT count(*) FROM postbox_outbox"), 1);
}

/// An event under a number that the relay has passed would never be sent, and behind the greatest there is no next one.
#[tokio::test]
async fn an_id_of_the_writers_own_is_refused() {
    let file = File::new();
    let db = file.connect();
    let own = "INSERT INTO postbox_outbox (id, aggregate_type, aggregate_id, event_type) VALUES (?1, 'a', '1', 'e')";
    for id in [i64::MIN, -1, 0, 1 << 62, i64::MAX] {
        let error = db.execute(own, [id]).unwrap_err().to_string();
        assert!(error.contains("leave the column id out"), "{id}: {error}");
    }
    insert(&db, "a", 1);
    insert(&db, "a", 2);
    let error = db.execute(own, [1]).unwrap_err().to_string();
    assert!(error.contains("UNIQUE"), "{error}");
    publish(&file.source("r").await, 2).await;
    db.execute("DELETE FROM postbox_outbox", []).unwrap();
    let error = db.execute(own, [2]).unwrap_err().to_string();
    assert!(error.contains("leave the column id out"), "{error}");
    insert(&db, "a", 3);
    assert_eq!(file.count("SELECT max(id) FROM postbox_outbox"), 3);
}

/// What the guide tells people to run.
#[tokio::test]
async fn the_guides_statements_run() {
    let guide = include_str!("../../../../../docs/guide/sqlite.md");
    let file = File::new();
    let blocks: Vec<&str> = guide.split("```sql").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(blocks.len() >= 2);
    blocks.iter().for_each(|sql| file.connect().execute_batch(sql).unwrap());
    assert_eq!(publish(&file.source("r").await, 1).await, [r#"42 {"total": 10}"#]);
}

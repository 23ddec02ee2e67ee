//! Odd names, encodings and settings.

use super::{Db, LIMIT, SECOND, WEEK, acquire, client, in_time, on_15_and_18, published};
use postbox_engine::{HeldChange, HeldQuery, HeldState, Log};
use postbox_sources::postgres::{PostgresLog, admin, migrate};
use postbox_testkit::services::{PgVersion, Postgres};
use std::time::Duration;
use tokio_postgres::error::SqlState;

on_15_and_18! {
    case_r8_a_hostile_schema_name_beside_another_outbox
    case_r8_a_column_added_under_the_relay
    case_p3_another_encoding_and_odd_settings
    case_p3_text_that_is_no_utf8_spoils_its_row_alone
    case_p3_text_without_utf8_is_refused_at_the_write_and_nothing_stands_still
    streams_are_independent
    shards_share_the_keys
}

async fn case_r8_a_hostile_schema_name_beside_another_outbox(version: PgVersion) {
    const SCHEMA: &str = r#"My-App"x 'y\"#;
    let db = Db::on(Postgres::shared(version), "postbox").await;
    let mut other = client(&db.url).await;
    migrate::migrate(&mut other, SCHEMA, SECOND).await.unwrap();
    db.sql("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = ''''', current_database()); EXECUTE format('ALTER DATABASE %I SET postbox.wake = on', current_database()); END $$").await;
    db.insert(5, 5).await;
    let sql = format!(
        "INSERT INTO {}.outbox (aggregate_type, aggregate_id, event_type) SELECT 'it''s', g::text, 't' FROM generate_series(1, 1500) g",
        postbox::schema::quote(SCHEMA)
    );
    client(&db.url).await.batch_execute(&sql).await.unwrap();
    let mut options = db.options();
    (options.schema, options.retention) = (SCHEMA.into(), SECOND);
    let log = PostgresLog::new(options);
    acquire(&log).await;
    let mut seen = 0;
    while seen < 1500 {
        let page = in_time("a page", log.read(LIMIT)).await.unwrap();
        seen += page.events.len();
        assert!(page.events.iter().all(|e| e.aggregate_type() == "it's"), "the other outbox's events are not ours");
        let held = page.events.iter().take(1).map(|event| HeldChange {
            event: event.clone(),
            state: HeldState::Retry,
            attempts: 1,
            due: Duration::ZERO,
            error: Some("it's".into()),
            sent: None,
        });
        let mut changes = published(&page);
        changes.held = held.collect();
        log.record(&changes).await.unwrap();
    }
    assert!(!log.load().await.unwrap().keys.is_empty());
    let due = log.held(&HeldQuery { limit: LIMIT, open: vec![1], skip: vec![] }).await.unwrap();
    assert!(!due.events.is_empty());
    let asleep = format!("SELECT last_value FROM {}.wake", postbox::schema::quote(SCHEMA));
    in_time("the log sleeps", async { while db.one::<i64>(&asleep).await != 1 {} }).await;
    let status = admin::status(&db.url, SCHEMA).await.unwrap();
    assert_eq!((status[0].stream.as_str(), status[0].pending), ("main", 0));
    assert!(status[0].retry > 0);
    let findings = admin::check(&db.url, SCHEMA, SECOND).await;
    assert!(findings.iter().all(|f| f.ok), "{findings:?}");
}

async fn case_r8_a_column_added_under_the_relay(version: PgVersion) {
    let db = Db::new(version).await;
    let log = db.log();
    acquire(&log).await;
    db.insert(10, 3).await;
    super::drain(&log, 10).await; // its statements are prepared
    db.sql("ALTER TABLE postbox.outbox ADD COLUMN tenant text NOT NULL DEFAULT 'mine'").await;
    db.insert(1_500, 3).await; // by every way of reading: a poll, and a large window
    super::drain(&log, 1_500).await;
    db.insert(1, 1).await;
    super::drain(&log, 1).await;
    log.release().await.unwrap();
}

async fn case_p3_another_encoding_and_odd_settings(version: PgVersion) {
    let server = Postgres::shared(version);
    let url = server.create_database_with("TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'");
    let mut first = client(&url).await;
    migrate::migrate(&mut first, "postbox", WEEK).await.unwrap();
    first
        .batch_execute(
            "DO $$ DECLARE d text := current_database(); BEGIN EXECUTE format('ALTER DATABASE %I SET bytea_output = escape', d);
             EXECUTE format('ALTER DATABASE %I SET DateStyle = ''SQL, DMY''', d); EXECUTE format('ALTER DATABASE %I SET IntervalStyle = iso_8601', d);
             EXECUTE format('ALTER DATABASE %I SET TimeZone = ''Asia/Kathmandu''', d); EXECUTE format('ALTER DATABASE %I SET extra_float_digits = -10', d);
             EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = serializable', d); END $$",
        )
        .await
        .unwrap();
    let db = Db { client: client(&url).await, url };
    db.sql(
        "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload, created_at, available_at) \
         VALUES ('caf\u{e9}', '\u{df}', 't', '{\"n\": \"\u{e9}\"}', '2020-01-02 03:04:05.000006+00', now() + interval '1 hour')",
    )
    .await;
    let log = db.log();
    acquire(&log).await;
    let page = in_time("a page", log.read(LIMIT)).await.unwrap();
    let event = &page.events[0];
    assert_eq!((event.aggregate_type(), event.aggregate_id()), ("caf\u{e9}", "\u{df}"));
    assert_eq!(event.payload(), Some("{\"n\": \"\u{e9}\"}".as_bytes()));
    assert_eq!(event.created_at(), 1_577_934_245_000_006);
    assert!(page.delays[0].1 > Duration::from_secs(3500));
    log.record(&published(&page)).await.unwrap();
    let id = uuid::Uuid::from_bytes(event.event_id()).to_string();
    let trace = admin::trace(&db.url, "postbox", &id).await.unwrap();
    assert_eq!((trace[0].state.as_str(), trace[0].written_at.as_str()), ("published", "2020-01-02T03:04:05.000006Z"));
}

/// A database of encoding SQL_ASCII takes any bytes, and converts none.
async fn case_p3_text_that_is_no_utf8_spoils_its_row_alone(version: PgVersion) {
    let url = Postgres::shared(version).create_database_with("TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'");
    migrate::migrate(&mut client(&url).await, "postbox", WEEK).await.unwrap();
    let db = Db { client: client(&url).await, url };
    db.sql(
        r#"INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, headers, destination, payload)
           SELECT 'order', convert_from(id, 'SQL_ASCII'), 't', convert_from(headers, 'SQL_ASCII')::jsonb, convert_from(destination, 'SQL_ASCII'),
             convert_from(payload, 'SQL_ASCII')::json
           FROM (VALUES (bytea 'caf\303\251', bytea '{}', bytea 'there', bytea '1'), ('caf\351', '{}', NULL, '2'), ('3', '{"a": "\351"}', NULL, '3'),
             ('4', '{}', '\351', '4'), ('5', '{}', NULL, '"\351"')) v (id, headers, destination, payload)"#,
    )
    .await;
    let log = db.log();
    acquire(&log).await;
    let page = in_time("a page", log.read(LIMIT)).await.unwrap();
    let wrong = |column: &str, id: i64| Some(format!("the column {column} of event {id} is not valid UTF-8"));
    let unreadable: Vec<_> = page.events.iter().map(|e| e.unreadable().map(str::to_owned)).collect();
    assert_eq!(unreadable, [None, wrong("aggregate_id", 2), wrong("headers", 3), wrong("destination", 4), None]);
    assert_eq!((page.events[0].aggregate_id(), page.events[0].destination()), ("caf\u{e9}", Some("there")));
    assert_eq!(page.events[4].payload(), Some(&b"\"\xe9\""[..]), "a payload is bytes");
    // It is held under what can be read of it, and read again as it is.
    let mut changes = published(&page);
    let error = Some("caf\u{e9}".into());
    changes.held.push(HeldChange { attempts: 1, error, ..HeldChange::new(page.events[1].clone(), HeldState::Retry) });
    log.record(&changes).await.unwrap();
    let due = log.held(&HeldQuery { limit: LIMIT, open: vec![], skip: vec![] }).await.unwrap();
    assert_eq!(due.events[0].event.unreadable(), wrong("aggregate_id", 2).as_deref());
}

/// WIN1252 takes byte 0x81, which is no character: the server could not send it in UTF-8, nor the rest of the page with it.
/// The other way round, an error's text may hold what the database has no byte for.
async fn case_p3_text_without_utf8_is_refused_at_the_write_and_nothing_stands_still(version: PgVersion) {
    let url = Postgres::shared(version).create_database_with("TEMPLATE template0 ENCODING 'WIN1252' LOCALE 'C'");
    migrate::migrate(&mut client(&url).await, "postbox", WEEK).await.unwrap();
    let db = Db { client: client(&url).await, url };
    let columns = ["aggregate_type", "aggregate_id", "event_type", "content_type", "destination", "headers", "payload"];
    let write = |column: &str, byte: &str| {
        let values = columns.map(|c| {
            let text = format!("convert_from('\\x{}', 'WIN1252')", if c == column { byte } else { "80" });
            match c {
                "headers" => format!("json_build_object('a', {text})::jsonb"),
                "payload" => format!("to_json({text})"),
                _ => text,
            }
        });
        format!("INSERT INTO postbox.outbox ({}) VALUES ({})", columns.join(", "), values.join(", "))
    };
    for column in columns {
        db.sql(&write(column, "80")).await; // the euro sign
        let bad = db.client.batch_execute(&write(column, "81")).await;
        assert_eq!(bad.unwrap_err().code(), Some(&SqlState::UNTRANSLATABLE_CHARACTER), "{column}");
    }
    let publish = "SELECT postbox.publish('order', convert_from('\\x81', 'WIN1252'), 't')";
    let bad = db.client.batch_execute(publish).await.unwrap_err();
    assert!(bad.as_db_error().unwrap().message().contains("0x81"), "{bad:?}");

    let log = db.log();
    acquire(&log).await;
    let page = in_time("a page", log.read(LIMIT)).await.unwrap();
    assert_eq!(page.events.len(), columns.len());
    assert!(page.events.iter().all(|e| e.aggregate_id() == "\u{20ac}" && e.unreadable().is_none()));
    let mut changes = published(&page);
    let error = Some("\u{20ac} is no \u{2192}".into());
    changes.held.push(HeldChange { attempts: 1, error, ..HeldChange::new(page.events[0].clone(), HeldState::Dead) });
    log.record(&changes).await.unwrap();
    let error: String = db.one("SELECT error FROM postbox.held").await;
    assert_eq!(error, r"\u{20ac} is no \u{2192}");
    log.trouble(Some("\u{2192}"));
    log.renew().await.unwrap();
    let trouble = "SELECT error FROM postbox.lease";
    assert_eq!(db.one::<String>(trouble).await, r"\u{2192}");
    log.trouble(Some("a\0"));
    log.release().await.unwrap();
    assert_eq!(db.one::<String>(trouble).await, r"a\u{0}");
}

async fn streams_are_independent(version: PgVersion) {
    let db = Db::new(version).await;
    db.insert(50, 5).await;
    let log = db.log();
    acquire(&log).await;
    super::drain(&log, 50).await;
    db.insert(50, 5).await;
    let mut options = db.options();
    options.stream = "audit".into();
    let audit = PostgresLog::new(options);
    acquire(&audit).await;
    assert_eq!(super::drain(&audit, 100).await.len(), 100, "a new stream begins with the oldest event there is");
    assert_eq!(super::drain(&log, 50).await.len(), 50);
}

async fn shards_share_the_keys(version: PgVersion) {
    let db = Db::new(version).await;
    db.insert(2_000, 200).await;
    let mut ids = Vec::new();
    for shard in 0..3 {
        let mut options = db.options();
        (options.shard, options.shards, options.page_events_max, options.poll_events_max) = (shard, 3, 100, 50);
        let log = PostgresLog::new(options);
        acquire(&log).await;
        let own: i64 = db
            .one(&format!(
                "SELECT count(*) FROM postbox.outbox WHERE postbox.slot(aggregate_type, aggregate_id) % 3 = {shard}"
            ))
            .await;
        ids.extend(super::drain(&log, usize::try_from(own).unwrap()).await);
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 2_000);
}

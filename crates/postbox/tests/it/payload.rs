//! Bytes in are bytes in the table, and stay what they are under any setting of the database.

use crate::db::Db;
use postbox::{Event, Outbox};
use postbox_testkit::services::PgVersion;
use std::time::{Duration, SystemTime};

const TEXTS: &[&str] = &[
    "9007199254740993",
    "1e400",
    "-0.0",
    r#""\u0000""#,
    r#""\ud800""#,
    r#" { "b" : 1,  "a":2, "b" : 3 } "#,
    "[1,\t2,\n3]",
    r#""🦀 ünï""#,
    "null",
    r#""""#,
];

#[tokio::test]
async fn case_p1_json_stays_byte_for_byte() {
    for version in PgVersion::ALL {
        let (db, outbox) = (Db::fresh(version).await, Outbox::default());
        let pool = db.pool().await;
        let mut client = db.client().await;
        let mut texts: Vec<String> = TEXTS.iter().map(ToString::to_string).collect();
        texts.push(format!("\"{}\"", "x".repeat(980_000)));
        texts.push("[".repeat(1_000) + &"]".repeat(1_000));
        for (n, text) in texts.iter().enumerate() {
            let event = Event::new("a", n.to_string(), "json").json_text(text.as_str());
            let mut tx = pool.begin().await.unwrap();
            outbox.publish(&mut tx, &event).await.unwrap();
            tx.commit().await.unwrap();
            let tx = client.transaction().await.unwrap();
            outbox.publish(&tx, &event).await.unwrap();
            tx.commit().await.unwrap();
        }
        let rows = client
            .query("SELECT aggregate_id::int, payload::text, event_id::text FROM postbox.outbox ORDER BY id", &[]);
        let rows = rows.await.unwrap();
        assert_eq!(rows.len(), 2 * texts.len());
        for row in rows {
            let n = row.get::<_, i32>(0) as usize;
            assert!(row.get::<_, &str>(1) == texts[n], "payload {n} changed");
        }
    }
}

#[tokio::test]
async fn case_p1_null_and_nothing_and_empty_are_three_things() {
    for version in PgVersion::ALL {
        let (db, outbox) = (Db::fresh(version).await, Outbox::default());
        let mut client = db.client().await;
        let tx = client.transaction().await.unwrap();
        let event = |id: &str| Event::new("a", id, "x");
        outbox.publish(&tx, &event("null").json_text("null")).await.unwrap();
        outbox.publish(&tx, &event("tombstone")).await.unwrap();
        outbox.publish(&tx, &event("empty text").json("").unwrap()).await.unwrap();
        outbox.publish(&tx, &event("empty bytes").binary([])).await.unwrap();
        tx.commit().await.unwrap();
        let found =
            client.query("SELECT payload::text, payload_binary, content_type FROM postbox.outbox ORDER BY id", &[]);
        let found: Vec<(Option<String>, Option<Vec<u8>>, String)> =
            found.await.unwrap().iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
        let (json, bytes) = ("application/json".to_owned(), "application/octet-stream".to_owned());
        assert_eq!(
            found,
            [
                (Some("null".into()), None, json.clone()),
                (None, None, json.clone()),
                (Some("\"\"".into()), None, json),
                (None, Some(vec![]), bytes)
            ]
        );
    }
}

/// All bytes, in a database whose settings are odd; and every other field of the event.
#[tokio::test]
async fn case_p2_p3_bytes_and_fields_under_odd_settings() {
    for version in PgVersion::ALL {
        let (db, outbox) = (Db::fresh(version).await, Outbox::default());
        let odd = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET bytea_output = ''escape''', current_database());
            EXECUTE format('ALTER DATABASE %I SET DateStyle = ''German''', current_database());
            EXECUTE format('ALTER DATABASE %I SET IntervalStyle = ''sql_standard''', current_database());
            EXECUTE format('ALTER DATABASE %I SET search_path = ''''', current_database());
            EXECUTE format('ALTER DATABASE %I SET TimeZone = ''Asia/Kathmandu''', current_database()); END $$";
        db.client().await.batch_execute(odd).await.unwrap();
        let bytes: Vec<u8> = (0..=255).collect();
        let at = SystemTime::UNIX_EPOCH + Duration::from_micros(2_000_000_000_123_456);
        let event =
            Event::new("a", "1", "x").binary(bytes.clone()).available_at(at).aggregate_seq(-7).schema_version(3);
        let event = event.destination("elsewhere").content_type("avro/binary").header("b", "\"2\\").header("a", "1");
        let pool = db.pool().await;
        let mut client = db.client().await;
        let mut tx = pool.begin().await.unwrap();
        outbox.publish(&mut tx, &event).await.unwrap();
        tx.commit().await.unwrap();
        let tx = client.transaction().await.unwrap();
        outbox.publish(&tx, &event).await.unwrap();
        tx.commit().await.unwrap();
        let sql = "SELECT payload_binary, (extract(epoch FROM available_at) * 1000000)::bigint, aggregate_seq, schema_version, destination,
            content_type, headers::text, event_id::text FROM postbox.outbox ORDER BY id";
        let rows = client.query(sql, &[]).await.unwrap();
        assert_eq!(rows.len(), 2);
        for row in rows {
            assert_eq!(row.get::<_, Vec<u8>>(0), bytes);
            assert_eq!(
                (row.get::<_, i64>(1), row.get::<_, i64>(2), row.get::<_, i32>(3)),
                (2_000_000_000_123_456, -7, 3)
            );
            assert_eq!((row.get::<_, &str>(4), row.get::<_, &str>(5)), ("elsewhere", "avro/binary"));
            assert_eq!(
                (row.get::<_, &str>(6), row.get::<_, String>(7)),
                (r#"{"a": "1", "b": "\"2\\"}"#, event.id().to_string())
            );
        }
    }
}

#[tokio::test]
async fn a_delay_counts_from_the_databases_now() {
    for version in PgVersion::ALL {
        let (db, outbox) = (Db::fresh(version).await, Outbox::default());
        let mut client = db.client().await;
        let tx = client.transaction().await.unwrap();
        let early = tx.query_one("SELECT clock_timestamp()::text", &[]).await.unwrap().get::<_, String>(0);
        outbox.publish(&tx, &Event::new("a", "1", "x").available_after(Duration::from_secs(90))).await.unwrap();
        let sql = "SELECT available_at - interval '90 s' BETWEEN $1::text::timestamptz AND clock_timestamp() FROM postbox.outbox";
        assert!(tx.query_one(sql, &[&early]).await.unwrap().get::<_, bool>(0));
    }
}

/// What a database in LATIN1 can hold, it holds; what it cannot, it says at the write.
#[tokio::test]
async fn case_p3_a_database_in_another_encoding() {
    for version in PgVersion::ALL {
        let db = Db::fresh_with(version, "TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'").await;
        let outbox = Outbox::default();
        let mut client = db.client().await;
        let tx = client.transaction().await.unwrap();
        let event = Event::new("commande", "é", "passée").json_text(r#"{"où": "ça"}"#);
        outbox.publish(&tx, &event).await.unwrap();
        tx.commit().await.unwrap();
        let row = client.query_one("SELECT aggregate_id, payload::text FROM postbox.outbox", &[]).await.unwrap();
        assert_eq!((row.get::<_, &str>(0), row.get::<_, &str>(1)), ("é", r#"{"où": "ça"}"#));
        let tx = client.transaction().await.unwrap();
        let error = outbox.publish(&tx, &Event::new("a", "🦀", "x")).await.expect_err("not in LATIN1");
        assert_eq!(error.sqlstate(), Some("22P05"));
    }
}

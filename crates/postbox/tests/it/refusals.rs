//! What is wrong with an event is said at the write, in words and by a code.

use crate::db::Db;
use postbox::{Event, EventError, HEADERS_RESERVED, Outbox, PAYLOAD_BYTES_MAX, PublishError};
use postbox_testkit::services::PgVersion;

#[tokio::test]
async fn case_w5_publish_refuses_with_codes_of_its_own() {
    let big = format!("postbox.publish('a', '1', 'x', to_json(repeat('x', {PAYLOAD_BYTES_MAX})))");
    let big_binary =
        format!("postbox.publish('a', '1', 'x', payload_binary => repeat('x', {PAYLOAD_BYTES_MAX} + 1)::bytea)");
    let refused = [
        (big.as_str(), "PB001"),
        (big_binary.as_str(), "PB001"),
        ("postbox.publish('a', '1', 'x', '{}', 'x')", "PB002"),
        (r#"postbox.publish('a', '1', 'x', headers => '{"naïve": "v"}')"#, "PB003"),
        (r#"postbox.publish('a', '1', 'x', headers => '{"a b": "v"}')"#, "PB003"),
        (r#"postbox.publish('a', '1', 'x', headers => '{"": "v"}')"#, "PB003"),
        (r#"postbox.publish('a', '1', 'x', headers => '{"a\n": "v"}')"#, "PB003"),
        (r#"postbox.publish('a', '1', 'x', headers => '{"a": "v\r\nb: c"}')"#, "PB003"),
        (r#"postbox.publish('a', '1', 'x', headers => '{"a": "v\n"}')"#, "PB003"),
        (r#"postbox.publish('a', '1', 'x', headers => '{"ok": "v", "a": 1}')"#, "PB003"),
        (r#"postbox.publish('a', '1', 'x', headers => '{"a": null}')"#, "PB003"),
        (r#"postbox.publish('a', '1', 'x', headers => '{"a": {"b": "c"}}')"#, "PB003"),
        (r#"postbox.publish('a', '1', 'x', headers => '["a"]')"#, "PB003"),
        (r#"postbox.publish('a', '1', 'x', headers => '"a"')"#, "PB003"),
        (r#"postbox.publish('a', '1', 'x', content_type => E'a\nb: c')"#, "PB003"),
        ("postbox.publish('', '1', 'x')", "PB004"),
        ("postbox.publish(NULL, '1', 'x')", "PB004"),
        ("postbox.publish('a', NULL, 'x')", "PB004"),
        ("postbox.publish('a', '1', '')", "PB004"),
        ("postbox.publish('a', '1', 'x', destination => '')", "PB004"),
    ];
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let client = db.client().await;
        for (call, code) in refused {
            let error = client.batch_execute(&format!("SELECT {call}")).await.expect_err(call);
            assert_eq!(error.code().map(|c| c.code()), Some(code), "{call}");
        }
        let fits = format!(
            "SELECT postbox.publish('a', repeat('i', 300), 'x', to_json(repeat('x', {PAYLOAD_BYTES_MAX} - 2)))"
        );
        client.batch_execute(&fits).await.unwrap();
        for name in HEADERS_RESERVED.into_iter().chain(["Event_ID", "event-id", "Content-Type", "CE-Id"]) {
            let call = format!(r#"SELECT postbox.publish('a', '1', 'x', headers => '{{"{name}": "v"}}')"#);
            let error = client.batch_execute(&call).await.expect_err(name);
            assert_eq!(error.code().map(|c| c.code()), Some("PB003"), "{name}");
        }
        let headers = r#"SELECT postbox.publish('a', '1', 'y', headers => '{"traceparent": "00-0a-0b-01", "X_y.z": "ünïcode", "my_event_id": "1", "replayed": "1", "empty": ""}')"#;
        client.batch_execute(headers).await.unwrap();
        client.batch_execute("SELECT postbox.publish('a', '1', 'z', headers => NULL)").await.unwrap();
        assert_eq!(db.event_types().await, ["x", "y", "z"]);
    }
}

#[tokio::test]
async fn case_w5_a_plain_insert_is_refused_by_constraints() {
    let refused = [
        ("'', '1', 'x', NULL, NULL, '{}', NULL, now()", "outbox_names_not_empty"),
        ("'a', '1', '', NULL, NULL, '{}', NULL, now()", "outbox_names_not_empty"),
        ("'a', '1', 'x', NULL, NULL, '{}', '', now()", "outbox_names_not_empty"),
        ("'a', '1', 'x', '{}', 'x', '{}', NULL, now()", "outbox_one_payload"),
        ("'a', '1', 'x', NULL, NULL, '[]', NULL, now()", "outbox_headers_object"),
        ("'a', '1', 'x', NULL, NULL, '{}', NULL, 'infinity'", "outbox_created_at_finite"),
        ("'a', '1', 'x', NULL, NULL, '{}', NULL, '-infinity'", "outbox_created_at_finite"),
    ];
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let client = db.client().await;
        for (values, constraint) in refused {
            let sql = format!(
                "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload, payload_binary, headers, destination, created_at) VALUES ({values})"
            );
            let error = client.batch_execute(&sql).await.expect_err(values);
            assert_eq!(error.as_db_error().and_then(|e| e.constraint()), Some(constraint), "{values}");
        }
        assert!(db.event_types().await.is_empty());
    }
}

#[tokio::test]
async fn case_w5_what_the_library_refuses_leaves_the_transaction_usable() {
    for version in PgVersion::ALL {
        let (db, outbox) = (Db::fresh(version).await, Outbox::default().payload_bytes_max(10));
        let mut client = db.client().await;
        let tx = client.transaction().await.unwrap();
        let bad = Event::new("a", "1", "bad").header("a\nb", "v");
        let error = outbox.publish(&tx, &bad).await.expect_err("a bad header");
        assert!(matches!(error, PublishError::Event(EventError::Header { .. })), "{error}");
        let error = outbox.publish(&tx, &Event::new("a", "1", "big").binary([0; 11])).await.expect_err("too large");
        assert!(
            matches!(error, PublishError::Event(EventError::PayloadTooLarge { bytes: 11, bytes_max: 10 })),
            "{error}"
        );
        outbox.publish(&tx, &Event::new("a", "1", "good").binary([0; 10])).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(db.event_types().await, ["good"]);
    }
}

/// The database's limit counts even if the application allows more; it is replaced without a lock.
#[tokio::test]
async fn case_w5_the_databases_own_limit() {
    for version in PgVersion::ALL {
        let (db, outbox) = (Db::fresh(version).await, Outbox::default());
        let pool = db.pool().await;
        let limit = "CREATE OR REPLACE FUNCTION postbox.payload_max() RETURNS integer LANGUAGE sql IMMUTABLE RETURN 10";
        let mut open = pool.begin().await.unwrap();
        outbox.publish(&mut open, &Event::new("a", "1", "before").binary([0; 11])).await.unwrap();
        db.client().await.batch_execute(limit).await.unwrap();
        open.commit().await.unwrap();
        let mut tx = pool.begin().await.unwrap();
        let error =
            outbox.publish(&mut tx, &Event::new("a", "1", "after").binary([0; 11])).await.expect_err("too large");
        assert_eq!(error.sqlstate(), Some("PB001"));
        assert!(error.to_string().contains("11 bytes, at most 10"), "{error}");
    }
}

#[tokio::test]
async fn a_missing_outbox_names_the_command_that_makes_it() {
    let db = Db::fresh(PgVersion::V18).await;
    let mut client = db.client().await;
    client.batch_execute("CREATE SCHEMA empty").await.unwrap();
    for schema in ["nowhere", "empty"] {
        let tx = client.transaction().await.unwrap();
        let error = Outbox::new(schema).publish(&tx, &Event::new("a", "1", "x")).await.expect_err("no outbox");
        assert!(error.to_string().contains("run `postbox migrate`"), "{error}");
        assert!(std::error::Error::source(&error).is_some_and(|e| e.is::<tokio_postgres::Error>()));
    }
}

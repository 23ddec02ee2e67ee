//! What is written is what is read: transactions, bytes, times.

use super::{File, LIMIT, insert, publish, settle, soon, texts};
use postbox_engine::{Source, Verdict};
use rusqlite::params;
use std::time::Duration;

#[tokio::test]
async fn case_w1_w3_only_what_commits_is_read_all_of_it_once() {
    let file = File::new();
    let mut db = file.connect();
    let source = file.source("r").await;
    let tx = db.transaction().unwrap();
    insert(&tx, "rolled back", 1);
    tx.rollback().unwrap();
    let mut tx = db.transaction().unwrap();
    insert(&tx, "a", 2);
    let mut outer = tx.savepoint().unwrap();
    insert(&outer, "a", 3);
    let mut inner = outer.savepoint().unwrap();
    insert(&inner, "undone", 4);
    inner.rollback().unwrap();
    insert(&inner, "a", 5);
    inner.commit().unwrap();
    outer.commit().unwrap();
    assert_eq!(file.count("SELECT count(*) FROM postbox_outbox"), 0, "nobody sees it before the commit");
    tx.commit().unwrap();
    insert(&db, "a", 6);
    assert_eq!(publish(&source, 4).await, ["a 2", "a 3", "a 5", "a 6"]);
}

/// A failed statement of the application takes its event with it, and nothing of ours swallows the error.
#[tokio::test]
async fn case_w1_a_failed_business_statement_leaves_no_event() {
    let file = File::new();
    let mut db = file.connect();
    db.execute_batch("CREATE TABLE orders (n INTEGER PRIMARY KEY); INSERT INTO orders VALUES (7)").unwrap();
    let tx = db.transaction().unwrap();
    insert(&tx, "a", 7);
    tx.execute("INSERT INTO orders VALUES (7)", []).unwrap_err();
    drop(tx);
    assert_eq!(file.count("SELECT count(*) FROM postbox_outbox"), 0);
}

#[tokio::test]
async fn case_p1_p2_bytes_in_are_bytes_out() {
    let file = File::new();
    let db = file.connect();
    let long = format!("[\"{}\"]", "é🦀".repeat(200_000));
    let deep = format!("{}1{}", "[".repeat(900), "]".repeat(900));
    let json: Vec<&str> = vec![
        "9007199254740993",
        "1e400",
        "-0.0",
        r#""\u0000""#,
        r#""\ud800 \udc00""#,
        r#"{"a":1,"a":2,"b":0, "A" : [ ] }"#,
        " \n\t{ }\r\n ",
        "\"🦀\"",
        "null",
        r#""""#,
        &long,
        &deep,
    ];
    let sql = "INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type, payload, payload_binary, headers, destination)
        VALUES ('t', ?1, 'e', ?2, ?3, ?4, ?5)";
    let id = "ß".repeat(300) + " \n";
    let headers = r#"{"b":"2" , "a":"\u00e9"}"#;
    for payload in &json {
        db.execute(sql, params![id, payload, None::<&[u8]>, headers, "topic"]).unwrap();
    }
    let binary: Vec<&[u8]> = vec![b"", b"\0", b"\xff\xfe\0\x80", b"\0\0\0\0\x05"];
    for payload in &binary {
        db.execute(sql, params!["", None::<&str>, payload, "{}", None::<&str>]).unwrap();
    }
    db.execute(sql, params!["", None::<&str>, None::<&[u8]>, "{}", None::<&str>]).unwrap();

    let source = file.source("r").await;
    let mut events = Vec::new();
    while events.len() < json.len() + binary.len() + 1 {
        events.extend(soon(source.claim(LIMIT)).await.unwrap().events.into_iter().map(|c| c.event));
    }
    for (event, payload) in events.iter().zip(&json) {
        assert_eq!(event.payload(), Some(payload.as_bytes()));
        assert_eq!((event.aggregate_id(), event.headers(), event.destination()), (&*id, headers, Some("topic")));
    }
    for (event, payload) in events[json.len()..].iter().zip(&binary) {
        assert_eq!((event.payload(), event.destination(), event.aggregate_id()), (Some(*payload), None, ""));
    }
    assert_eq!(events.last().unwrap().payload(), None, "a tombstone is no empty payload");
}

/// A file whose texts are stored as UTF-16 gives the same bytes.
#[tokio::test]
async fn case_p3_a_file_in_utf16() {
    let file = File::unmigrated();
    file.connect().execute_batch("PRAGMA encoding = 'UTF-16'; CREATE TABLE orders (n INTEGER)").unwrap();
    postbox_sources::sqlite::migrate(&file.path, "postbox").unwrap();
    let payload = r#"{"é🦀" : "\ud800"}"#;
    let sql =
        "INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('t', '漢🐘', 'e', ?1)";
    file.connect().execute(sql, [payload]).unwrap();
    let claim = soon(file.source("r").await.claim(LIMIT)).await.unwrap();
    assert_eq!(texts(&claim), [format!("漢🐘 {payload}")]);
}

#[tokio::test]
async fn all_columns_arrive() {
    let file = File::new();
    let sql = "INSERT INTO postbox_outbox (event_id, aggregate_type, aggregate_id, aggregate_seq, event_type, schema_version,
        payload_binary, content_type, created_at)
        VALUES ('01980000-0000-7000-8000-00000000000A', 't', 'i', -3, 'e', 2, x'01', 'application/avro', 1796000000123)";
    file.connect().execute(sql, []).unwrap();
    let claim = soon(file.source("r").await.claim(LIMIT)).await.unwrap();
    let e = &claim.events[0].event;
    assert_eq!(uuid::Uuid::from_bytes(e.event_id()).to_string(), "01980000-0000-7000-8000-00000000000a");
    assert_eq!(
        (e.id(), e.aggregate_seq(), e.schema_version(), e.created_at()),
        (1, Some(-3), 2, 1_796_000_000_123_000)
    );
    assert_eq!((e.aggregate_type(), e.event_type(), e.content_type()), ("t", "e", "application/avro"));
}

/// SQLite takes text that is no UTF-8. Its row is unreadable; its neighbours never notice.
#[tokio::test]
async fn a_row_that_is_no_utf8_spoils_itself_alone() {
    let file = File::new();
    let db = file.connect();
    insert(&db, "a", 1);
    db.execute(
        "INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type) VALUES ('t', CAST(x'61ff' AS TEXT), 'e')",
        [],
    )
    .unwrap();
    insert(&db, "a", 3);
    let claim = soon(file.source("r").await.claim(LIMIT)).await.unwrap();
    let unreadable: Vec<_> = claim.events.iter().map(|c| c.event.unreadable()).collect();
    assert_eq!(unreadable, [None, Some("the column aggregate_id of event 2 is not valid UTF-8"), None]);
}

#[tokio::test]
async fn a_delayed_event_waits_for_its_time_and_holds_up_nobody() {
    let file = File::new();
    let db = file.connect();
    let sql = "INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type, payload, available_at)
        VALUES ('order', 'late', 'placed', ?1, (unixepoch() + ?2) * 1000)";
    db.execute(sql, params!["1", 3600]).unwrap();
    db.execute(sql, params!["2", 2]).unwrap();
    db.execute(sql, params!["3", -3600]).unwrap();
    insert(&db, "now", 4);
    let source = file.source("r").await;
    assert_eq!(publish(&source, 2).await, ["late 3", "now 4"]);
    assert_eq!(file.count("SELECT count(*) FROM postbox_held WHERE state = 'delayed'"), 2);
    let claim = soon(source.claim(LIMIT)).await.unwrap();
    assert_eq!(texts(&claim), ["late 2"]);
    let early = "SELECT (julianday('now') - 2440587.5) * 86400000 < available_at FROM postbox_outbox WHERE id = 2";
    assert_eq!(file.count(early), 0, "not before its time by the database's clock");
    settle(&source, &claim, Verdict::Published).await;
    assert_eq!(file.count("SELECT count(*) FROM postbox_held WHERE state = 'done'"), 1);
    // The one in an hour waits on; it takes another relay's turn to come.
    source.release().await.unwrap();
    let next = file.source("next").await;
    let nothing = tokio::time::timeout(Duration::from_millis(50), next.claim(LIMIT)).await;
    assert!(nothing.is_err(), "{nothing:?}");
}

//! What breaks: connections, servers that are none, a relay that does not take its pages.

use super::{Db, LIMIT, SECOND, acquire, client, drain, in_time, on_15_and_18, published};
use postbox_engine::{Log, SourceErrorKind};
use postbox_sources::postgres::{PostgresLog, PostgresOptions};
use postbox_testkit::services::{Mode, PgVersion, Postgres, TcpProxy};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

on_15_and_18! {
    a_killed_connection_ends_the_tenure_and_loses_nothing
    a_renewal_tells_whether_to_try_again
    case_l5_a_crashed_server_loses_nothing
    case_l5_a_half_open_connection_hangs_nothing
    a_relay_that_takes_no_pages_holds_no_statement_open
    pages_are_closed_by_bytes
    case_t3_a_missing_right_is_named
}

async fn kill(db: &Db, role: &str) {
    let sql = format!(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'postbox {role}' AND datname = current_database()"
    );
    assert_eq!(db.one::<i64>(&sql).await, 1, "{role}");
}

async fn a_killed_connection_ends_the_tenure_and_loses_nothing(version: PgVersion) {
    let db = Db::new(version).await;
    let log = db.log();
    acquire(&log).await;
    for role in ["reader", "settler"] {
        kill(&db, role).await;
        db.insert(5, 5).await;
        let error = match in_time("an answer", log.read(LIMIT)).await {
            Err(error) => error,
            Ok(page) => log.record(&published(&page)).await.expect_err("the settler is gone"),
        };
        assert_eq!(error.kind, SourceErrorKind::Unavailable, "{error}");
        acquire(&log).await;
        drain(&log, 5).await;
    }
}

/// No renewal helps a tenure whose connection is gone; any other failure of one may pass.
async fn a_renewal_tells_whether_to_try_again(version: PgVersion) {
    let db = Db::new(version).await;
    let log = db.log();
    acquire(&log).await;
    db.sql("ALTER TABLE postbox.lease RENAME COLUMN until TO later").await;
    let error = log.renew().await.unwrap_err();
    assert_eq!(error.kind, SourceErrorKind::Refused, "{error}");
    db.sql("ALTER TABLE postbox.lease RENAME COLUMN later TO until").await;
    log.renew().await.unwrap();
    kill(&db, "settler").await;
    let error = in_time("the connection ends", async {
        loop {
            match log.renew().await {
                Err(error) if error.kind == SourceErrorKind::Disconnected => break error,
                _ => tokio::task::yield_now().await, // the server's word is on its way
            }
        }
    });
    assert!(error.await.to_string().contains("renew the lease"));
}

/// Killed in the middle of a large window, with a transaction open; settles of the last moment may be lost, events not.
async fn case_l5_a_crashed_server_loses_nothing(version: PgVersion) {
    let mut server = Postgres::start(version).unwrap();
    let db = Db::on(&server, "postbox").await;
    db.insert(20_000, 50).await;
    let open = client(&db.url).await;
    open.batch_execute(
        "BEGIN; INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 't')",
    )
    .await
    .unwrap();
    let log = db.log();
    acquire(&log).await;
    let before = drain(&log, 8_000).await;
    server.crash().unwrap();
    let error = in_time("an error", async {
        loop {
            if let Err(error) = log.read(LIMIT).await {
                break error;
            }
        }
    })
    .await;
    assert_eq!(error.kind, SourceErrorKind::Unavailable, "{error}");
    assert_eq!(log.acquire().await.unwrap_err().kind, SourceErrorKind::Unavailable, "not refused: it may come back");
    server.restart().unwrap();
    acquire(&log).await;
    let mut after = drain(&log, 20_000 - before.len()).await;
    while after.last() != Some(&20_000) {
        after.extend(drain(&log, 1).await);
    }
    assert!(after.is_sorted_by(|a, b| a < b), "in order, none twice within a tenure");
    let seen: std::collections::HashSet<i64> = before.iter().chain(&after).copied().collect();
    assert_eq!(seen.len(), 20_000);
    let again = before.len() + after.len() - seen.len();
    println!("read again after the crash: {again}");
}

async fn case_l5_a_half_open_connection_hangs_nothing(version: PgVersion) {
    let db = Db::new(version).await;
    let proxy = TcpProxy::start(Postgres::shared(version).port()).unwrap();
    let mut options = db.options();
    options.url = db.url.replace(&Postgres::shared(version).port().to_string(), &proxy.port().to_string());
    options.ttl = Duration::from_secs(2);
    let log = PostgresLog::new(options);
    acquire(&log).await;
    db.insert(5, 5).await;
    let page = in_time("a page", log.read(LIMIT)).await.unwrap();
    proxy.set(Mode::Silent);
    for result in [log.record(&published(&page)).await, log.renew().await.map(|_| ()), log.acquire().await.map(|_| ())]
    {
        let error = result.expect_err("nobody answers");
        assert_eq!(error.kind, SourceErrorKind::Unavailable, "{error}");
    }
    proxy.cut();
    proxy.set(Mode::Pass);
    in_time("it is back", async { while !matches!(log.acquire().await, Ok(Ok(_))) {} }).await;
    // The settle that got no answer may have been done or not; a duplicate is the most it costs.
    db.insert(2, 2).await;
    let ids = drain(&log, 2).await;
    assert!(ids.len() == 2 || ids.len() == 5 || ids.len() == 7, "{ids:?}");
}

async fn a_relay_that_takes_no_pages_holds_no_statement_open(version: PgVersion) {
    let db = Db::new(version).await;
    db.sql(
        "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload_binary) \
         SELECT 'a', g::text, 't', decode(repeat('00', 20000), 'hex') FROM generate_series(1, 3000) g",
    )
    .await;
    let log = db.log();
    acquire(&log).await;
    let first = in_time("a page", log.read(LIMIT)).await.unwrap();
    log.record(&published(&first)).await.unwrap();
    let closed = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'postbox reader' AND datname = current_database()";
    in_time("the reader lets go of its answer", async { while db.one::<i64>(closed).await > 0 {} }).await;
    let ids = drain(&log, 3000 - first.events.len()).await;
    assert!(ids.is_sorted_by(|a, b| a < b), "goes on where it was, none twice");
    assert_eq!(ids.len() + first.events.len(), 3000);
}

async fn pages_are_closed_by_bytes(version: PgVersion) {
    let db = Db::new(version).await;
    let log = db.log();
    acquire(&log).await;
    for n in [50, 1_500] {
        // Less than a poll returns, then a large window.
        db.sql(&format!(
            "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload_binary) \
             SELECT 'a', g::text, 't', decode(repeat('00', 100000), 'hex') FROM generate_series(1, {n}) g"
        ))
        .await;
        let mut ids = Vec::new();
        while ids.len() < n {
            let page = in_time("a page", log.read(LIMIT)).await.unwrap();
            let bytes: usize = page.events.iter().map(|e| e.bytes()).sum();
            assert!(bytes <= (1 << 20) + 110_000, "a page of {bytes} bytes");
            log.record(&published(&page)).await.unwrap();
            ids.extend(page.events.iter().map(|e| e.id()));
        }
        assert!(ids.is_sorted_by(|a, b| a < b) && ids.len() == n);
    }
}

async fn case_t3_a_missing_right_is_named(version: PgVersion) {
    let db = Db::new(version).await;
    let port = Postgres::shared(version).port();
    let database = db.url.rsplit('/').next().unwrap();
    db.sql(&format!("CREATE ROLE weak_{database} LOGIN; GRANT USAGE ON SCHEMA postbox TO weak_{database}")).await;
    let options = PostgresOptions::new(format!("postgres://weak_{database}@127.0.0.1:{port}/{database}"));
    let error = PostgresLog::new(options).acquire().await.unwrap_err();
    assert_eq!(error.kind, SourceErrorKind::Refused);
    assert!(
        error.message.contains("permission denied") && error.message.contains("postbox migrate --print"),
        "{error}"
    );
}

/// The relay as `postbox migrate --print` grants it, no superuser: reads, settles, empties bins, sleeps.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_relays_role_is_enough() {
    let db = Db::keeping(Postgres::shared(PgVersion::V18), "postbox", SECOND).await;
    let database = db.url.rsplit('/').next().unwrap();
    let roles =
        postbox_sources::postgres::roles::roles_script("postbox", &format!("w_{database}"), &format!("r_{database}"))
            .unwrap();
    db.sql(&roles).await;
    db.sql(&format!("ALTER ROLE r_{database} LOGIN; ALTER DATABASE {database} SET postbox.wake = on")).await;
    let port = Postgres::shared(PgVersion::V18).port();
    let mut options = PostgresOptions::new(format!("postgres://r_{database}@127.0.0.1:{port}/{database}"));
    options.retention = SECOND;
    let log = PostgresLog::new(options);
    acquire(&log).await;
    db.insert(1500, 10).await;
    drain(&log, 1500).await;
    in_time("the log sleeps", async { while db.one::<i64>("SELECT last_value FROM postbox.wake").await != 1 {} }).await;
    db.insert(10, 10).await;
    drain(&log, 10).await;
    in_time("a bin is emptied", async {
        while db.one::<i64>("SELECT count(*) FROM postbox.outbox").await > 1_000 {
            db.insert(1, 1).await; // a later settle shows that the earlier ones are a retention old
            drain(&log, 1).await;
        }
    })
    .await;
}

/// A server that speaks PostgreSQL's protocol and is another product.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_only_speaks_the_protocol_is_refused_by_name() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("postgres://u:hunter2@127.0.0.1:{}/d", listener.local_addr().unwrap().port());
    let serve = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut buffer = [0; 4096];
        let _startup = socket.read(&mut buffer).await.unwrap();
        socket.write_all(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I").await.unwrap();
        let _query = socket.read(&mut buffer).await.unwrap();
        let version = b"CockroachDB CCL v25.1.0 (x86_64-pc-linux-gnu)";
        let mut answer = b"T\0\0\0\x20\0\x01version\0\0\0\0\0\0\0\0\0\0\x19\xff\xff\xff\xff\xff\xff\0\0D".to_vec();
        answer.extend((10 + version.len() as u32).to_be_bytes());
        answer.extend([0, 1]);
        answer.extend((version.len() as u32).to_be_bytes());
        answer.extend(version);
        answer.extend(b"C\0\0\0\x0dSELECT 1\0Z\0\0\0\x05I");
        socket.write_all(&answer).await.unwrap();
        let _end = socket.read(&mut buffer).await;
    });
    let error = in_time("an answer", PostgresLog::new(PostgresOptions::new(url)).acquire()).await.unwrap_err();
    assert_eq!(error.kind, SourceErrorKind::Refused, "{error}");
    assert!(error.message.contains("CockroachDB CCL v25.1.0") && !error.message.contains("hunter2"), "{error}");
    serve.await.unwrap();
}

#[tokio::test]
async fn case_t2_no_error_shows_the_password() {
    let port = postbox_testkit::services::free_port().unwrap();
    let missing = Db::new(PgVersion::V15).await;
    let schema = {
        let mut options = missing.options();
        options.schema = "elsewhere".into();
        options
    };
    let begun = Instant::now();
    let nowhere = PostgresOptions::new(format!("postgres://u:hunter2@127.0.0.1:{port}/d"));
    let unknown = PostgresOptions::new(format!(
        "postgres://postgres:hunter2@127.0.0.1:{}/nowhere",
        Postgres::shared(PgVersion::V15).port()
    ));
    for (options, kind, words) in [
        (nowhere, SourceErrorKind::Unavailable, "could not connect"),
        (unknown, SourceErrorKind::Refused, "nowhere"),
        (schema, SourceErrorKind::Refused, "postbox migrate"),
    ] {
        assert!(!format!("{options:?}").contains("hunter2"));
        let error = PostgresLog::new(options).acquire().await.unwrap_err();
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.message.contains(words), "{words}: {error}");
        let mut whole = format!("{error:?}");
        let mut cause: &dyn std::error::Error = &error;
        while let Some(inner) = cause.source() {
            whole += &format!("{inner} {inner:?}");
            cause = inner;
        }
        assert!(!whole.contains("hunter2"), "{whole}");
    }
    assert!(begun.elapsed() < super::DEADLINE);
    drop(client(&missing.url).await);
}

//! Least privilege: the printed roles can do their work, and nothing else.

use super::{Db, LIMIT, SECOND, acquire, client, drain, in_time, published};
use postbox::{Event, Outbox};
use postbox_engine::{HeldChange, HeldState, Log};
use postbox_sources::postgres::roles::roles_script;
use postbox_sources::postgres::{PostgresLog, PostgresOptions};
use postbox_testkit::services::{PgVersion, Postgres};
use std::time::Duration;
use tokio_postgres::Client;

super::on_15_and_18! {
    case_t3_a_writer_writes_and_nothing_else
    case_t3_a_relay_relays_without_being_a_superuser
}

/// A database with both roles, named after it since roles are the server's; and a way in as each of them.
async fn with_roles(pg: PgVersion) -> (Db, String, String) {
    let db = Db::keeping(Postgres::shared(pg), "postbox", SECOND).await;
    let name: String = db.one("SELECT current_database()::text").await;
    let (writer, relay) = (format!("Shop \"{name}\""), format!("{name}'s relay"));
    let script = roles_script("postbox", &writer, &relay).unwrap();
    db.sql(&script).await;
    db.sql(&script).await; // safe to run again
    let logins = [format!("{name}_writer"), format!("{name}_relay")];
    for (login, role) in logins.iter().zip([&writer, &relay]) {
        db.sql(&format!("CREATE ROLE {login} LOGIN IN ROLE {}", postbox::schema::quote(role))).await;
    }
    let url = |login: &str| db.url.replace("postgres@", &format!("{login}@"));
    let [writer, relay] = logins.map(|login| url(&login));
    (db, writer, relay)
}

async fn allowed(client: &Client, statements: &[&str]) {
    for sql in statements {
        let done = async {
            while let Err(error) = client.batch_execute(sql).await {
                // With NOWAIT: autovacuum has come between.
                assert_eq!(error.code().map(|c| c.code()), Some("55P03"), "{sql}: {error:?}");
                client.batch_execute("ROLLBACK").await.unwrap();
            }
        };
        in_time(sql, done).await;
    }
}

async fn denied(client: &Client, statements: &[&str]) {
    for sql in statements {
        let error = client.batch_execute(sql).await.expect_err(sql);
        assert_eq!(error.code().map(|c| c.code()), Some("42501"), "{sql}: {error:?}");
    }
}

async fn case_t3_a_writer_writes_and_nothing_else(pg: PgVersion) {
    let (db, writer, _) = with_roles(pg).await;
    let mut client = client(&writer).await;
    let tx = client.transaction().await.unwrap();
    Outbox::default().publish(&tx, &Event::new("order", "42", "from rust").ordered()).await.unwrap();
    tx.commit().await.unwrap();
    allowed(
        &client,
        &[
            "SELECT postbox.publish('order', '42', 'from sql', '{}')",
            "INSERT INTO postbox.outbox (event_id, aggregate_type, aggregate_id, aggregate_seq, event_type, schema_version, payload, payload_binary,
               content_type, headers, destination, available_at, created_at)
             VALUES (gen_random_uuid(), 'order', '42', 1, 'plain', 1, '{}', NULL, 'a/b', '{}', 'x', now(), now())",
            "SET postbox.wake = on; SELECT postbox.publish('order', '42', 'wakes')",
        ],
    )
    .await;
    denied(
        &client,
        &[
            "SELECT * FROM postbox.outbox",
            "SELECT * FROM postbox.outbox_0",
            "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 'x') RETURNING id",
            "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, txid) VALUES ('a', '1', 'x', '3')",
            "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, bin) VALUES ('a', '1', 'x', 3)",
            "INSERT INTO postbox.outbox (id, aggregate_type, aggregate_id, event_type) OVERRIDING SYSTEM VALUE VALUES (7, 'a', '1', 'x')",
            "INSERT INTO postbox.outbox_0 (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 'x')",
            "UPDATE postbox.outbox SET event_type = 'x'",
            "DELETE FROM postbox.outbox",
            "TRUNCATE postbox.outbox",
            "DO $$ BEGIN LOCK TABLE postbox.outbox IN ACCESS EXCLUSIVE MODE; END $$",
            "SELECT * FROM postbox.cursor",
            "SELECT * FROM postbox.lease",
            "SELECT * FROM postbox.held",
            "SELECT * FROM postbox.migration",
            "SELECT * FROM postbox.lag",
            "SELECT * FROM postbox.trace(gen_random_uuid())",
            "SELECT last_value FROM postbox.wake",
            "SELECT setval('postbox.wake', 1)",
            "SELECT nextval('postbox.outbox_id_seq')",
            "CREATE TABLE postbox.mine (id int)",
            "CREATE OR REPLACE FUNCTION postbox.bin() RETURNS smallint LANGUAGE sql STABLE AS 'SELECT 0::smallint'",
        ],
    )
    .await;
    assert_eq!(db.one::<i64>("SELECT count(*) FROM postbox.outbox").await, 4);
}

async fn case_t3_a_relay_relays_without_being_a_superuser(pg: PgVersion) {
    let (db, _, relay) = with_roles(pg).await;
    db.insert(50, 5).await;
    let log = PostgresLog::new(PostgresOptions { retention: SECOND, ..PostgresOptions::new(&relay) });
    acquire(&log).await;
    log.renew().await.unwrap();
    log.load().await.unwrap();
    drain(&log, 50).await;
    // One event fails, is tried again, is published at last.
    db.insert(1, 1).await;
    let page = in_time("the event is read", log.read(LIMIT)).await.unwrap();
    let change = |state, attempts| HeldChange {
        event: page.events[0].clone(),
        state,
        attempts,
        due: Duration::ZERO,
        error: Some("refused".into()),
        sent: None,
    };
    let mut changes = published(&page);
    changes.held = vec![change(HeldState::Retry, 1)];
    log.record(&changes).await.unwrap();
    (changes.mark, changes.events, changes.held) = (None, 0, vec![change(HeldState::Done, 1)]);
    log.record(&changes).await.unwrap();
    let sql = "SELECT count(*) FILTER (WHERE t.state = 'published' AND t.relay = 'postbox') FROM postbox.outbox o, postbox.trace(o.event_id) t";
    assert_eq!(db.one::<i64>(sql).await, 51);
    a_bin_is_emptied(&db, &log).await;
    log.release().await.unwrap();
    and_nothing_else(&client(&relay).await).await;
}

/// By the relay's own hand, once all of it was passed a retention ago.
async fn a_bin_is_emptied(db: &Db, log: &PostgresLog) {
    let first: i64 = db.one("SELECT min(id) FROM postbox.outbox").await;
    in_time("the bin is emptied", async {
        while db.one::<i64>("SELECT min(id) FROM postbox.outbox").await == first {
            db.insert(1, 1).await; // the cursor has to have moved since
            let page = log.read(LIMIT).await.unwrap();
            log.record(&published(&page)).await.unwrap();
            log.renew().await.unwrap();
        }
    })
    .await;
}

async fn and_nothing_else(client: &Client) {
    allowed(
        client,
        &[
            "SELECT system_identifier FROM pg_control_system()",
            "BEGIN; LOCK TABLE postbox.outbox_3 IN ACCESS EXCLUSIVE MODE NOWAIT; TRUNCATE postbox.outbox_3; COMMIT",
            "SELECT setval('postbox.wake', 1); SELECT last_value FROM postbox.outbox_id_seq; SELECT * FROM postbox.migration",
            "SELECT * FROM postbox.lag; DELETE FROM postbox.cursor WHERE seq = 1; DELETE FROM postbox.held WHERE state = 'done'",
        ],
    )
    .await;
    denied(
        client,
        &[
            "SELECT postbox.publish('a', '1', 'x')",
            "UPDATE postbox.outbox SET event_type = 'x'",
            "DELETE FROM postbox.outbox",
            "TRUNCATE postbox.outbox",
            "UPDATE postbox.cursor SET events = 0",
            "TRUNCATE postbox.cursor",
            "DELETE FROM postbox.lease",
            "UPDATE postbox.migration SET version = 2",
            "SELECT nextval('postbox.outbox_id_seq')",
            "CREATE TABLE postbox.mine (id int)",
            "DROP TABLE postbox.held",
        ],
    )
    .await;
}

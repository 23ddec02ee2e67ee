//! Writers wake a sleeping relay, at no cost while it is awake, and never at the cost of their own transaction.

use crate::db::Db;
use postbox::schema::POSTGRES;
use postbox_testkit::services::{PgOptions, PgVersion, Postgres};

const PUBLISH: &str = "SELECT postbox.publish('a', '1', 'x')";

/// Notifications arrive in the order of commits, so a marker shows that none came before it.
#[tokio::test]
async fn case_d4_a_writer_notifies_once_and_only_when_the_wake_lease_has_passed() {
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let (client, mut heard) = db.listener().await;
        client.batch_execute("LISTEN postbox; SET postbox.wake = on").await.unwrap();
        client.batch_execute(PUBLISH).await.unwrap();
        assert_eq!(heard.recv().await.unwrap().channel(), "postbox");
        let ahead =
            "SELECT last_value > extract(epoch FROM clock_timestamp() - interval '1 h') * 1000 FROM postbox.wake";
        assert!(client.query_one(ahead, &[]).await.unwrap().get::<_, bool>(0), "the lease moved on");

        client.batch_execute("SELECT setval('postbox.wake', 99999999999999)").await.unwrap();
        for sql in [PUBLISH, "NOTIFY postbox, 'the relay is awake'", "SELECT setval('postbox.wake', 1)", PUBLISH] {
            client.batch_execute(sql).await.unwrap();
        }
        assert_eq!(heard.recv().await.unwrap().payload(), "the relay is awake");
        assert_eq!(heard.recv().await.unwrap().payload(), "");

        // One statement, one notification; COPY and INSERT .. SELECT are statements.
        let many =
            "SELECT setval('postbox.wake', 1); INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type)
            SELECT 'a', g::text, 'x' FROM generate_series(1, 1000) g; NOTIFY postbox, 'end'";
        client.batch_execute(many).await.unwrap();
        assert_eq!(heard.recv().await.unwrap().payload(), "");
        assert_eq!(heard.recv().await.unwrap().payload(), "end");
    }
}

/// A commit with a notification takes a lock that all such commits of the server share. What is to notify cannot be
/// prepared, so a prepared transaction shows that its commit takes none.
#[tokio::test]
async fn case_d4_while_the_relay_is_awake_commits_do_not_queue_for_the_lock_of_notify() {
    for version in PgVersion::ALL {
        let client = Db::fresh(version).await.client().await;
        let prepare = format!("BEGIN; {PUBLISH}; PREPARE TRANSACTION 'silent'");
        client.batch_execute("SET postbox.wake = on; SELECT setval('postbox.wake', 1)").await.unwrap();
        let notifies = client.batch_execute(&prepare).await.unwrap_err();
        assert!(notifies.as_db_error().unwrap().message().contains("NOTIFY"), "{notifies:?}");
        client.batch_execute("SELECT setval('postbox.wake', 99999999999999)").await.unwrap();
        client.batch_execute(&prepare).await.unwrap();
        client.batch_execute("COMMIT PREPARED 'silent'").await.unwrap();
        let queue = client.query_one("SELECT pg_notification_queue_usage()", &[]).await.unwrap();
        assert_eq!(queue.get::<_, f64>(0), 0.0, "nobody keeps the queue from being emptied");
    }
}

/// Where transactions cannot be prepared, nothing has to be switched on.
#[tokio::test]
async fn case_d4_without_prepared_transactions_waking_is_on_by_itself() {
    let options = PgOptions { extra: vec![("max_prepared_transactions".into(), "0".into())], ..PgOptions::default() };
    let server = Postgres::start_with(PgVersion::V18, &options).unwrap();
    let db = Db { url: server.create_database() };
    db.install().await;
    let (client, mut heard) = db.listener().await;
    client.batch_execute("LISTEN postbox").await.unwrap();
    client.batch_execute(PUBLISH).await.unwrap();
    assert_eq!(heard.recv().await.unwrap().payload(), "");
    let off = format!("SET postbox.wake = off; SELECT setval('postbox.wake', 1); {PUBLISH}; NOTIFY postbox, 'off'");
    client.batch_execute(&off).await.unwrap();
    assert_eq!(heard.recv().await.unwrap().payload(), "off");
}

/// The writer has no right on the sequence, nor even on the schema: it writes through a view. And the channel is named
/// as the schema is, however that is spelled.
#[tokio::test]
async fn a_writer_without_rights_wakes_the_relay_of_any_schema() {
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let (client, mut heard) = db.listener().await;
        let name = "My \"own\" schema";
        let s = postbox::schema::quote(name);
        client.batch_execute(&format!("CREATE SCHEMA {s}")).await.unwrap();
        for step in POSTGRES {
            client.batch_execute(&step.sql(name)).await.unwrap();
        }
        let role = format!("waker_{}", std::process::id());
        let write = "INSERT INTO app.events VALUES ('a', '1', 'x')";
        let setup = format!(
            "CREATE ROLE {role}; CREATE SCHEMA app; GRANT USAGE ON SCHEMA app TO {role};
             CREATE VIEW app.events AS SELECT aggregate_type, aggregate_id, event_type FROM {s}.outbox;
             GRANT INSERT ON app.events TO {role};
             LISTEN {s}; SET postbox.wake = on; SET ROLE {role}; {write}"
        );
        client.batch_execute(&setup).await.unwrap();
        assert_eq!(heard.recv().await.unwrap().channel(), name);
        let tidy = format!("RESET ROLE; DROP VIEW app.events; DROP OWNED BY {role}; DROP ROLE {role}");
        client.batch_execute(&tidy).await.unwrap();
    }
}

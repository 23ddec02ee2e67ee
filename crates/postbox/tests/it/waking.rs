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

/// Without a right on the sequence a writer cannot see the wake lease, and without a plain name of the schema the channel
/// is named as it is all the same.
#[tokio::test]
async fn a_writer_without_rights_wakes_the_relay_of_any_schema() {
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let (owner, mut heard) = db.listener().await;
        let name = "My \"own\" schema";
        let s = postbox::schema::quote(name);
        owner.batch_execute(&format!("CREATE SCHEMA {s}")).await.unwrap();
        for step in POSTGRES {
            owner.batch_execute(&step.sql(name)).await.unwrap();
        }
        let role = format!("waker_{}", std::process::id());
        let setup = format!(
            "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}') THEN CREATE ROLE {role}; END IF; END $$;
             GRANT USAGE ON SCHEMA {s} TO {role}; GRANT INSERT ON {s}.outbox TO {role};
             LISTEN {s}; SET postbox.wake = on; SET ROLE {role}"
        );
        owner.batch_execute(&setup).await.unwrap();
        let write = format!("INSERT INTO {s}.outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 'x')");
        owner.batch_execute(&write).await.unwrap();
        assert_eq!(heard.recv().await.unwrap().channel(), name);

        // A lease that lies ahead is seen by the function that runs with the owner's rights.
        let held = format!(
            "RESET ROLE; SELECT setval('{s}.wake', 99999999999999); SET ROLE {role}; {write}; NOTIFY {s}, 'end'"
        );
        owner.batch_execute(&held).await.unwrap();
        assert_eq!(heard.recv().await.unwrap().payload(), "end");
    }
}

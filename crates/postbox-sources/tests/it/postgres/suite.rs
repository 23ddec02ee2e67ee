//! The rules that every source must pass, on every version; where a rule needs to wait, the log sleeps and is woken.

use super::{Db, client};
use postbox_engine::LogSource;
use postbox_sources::postgres::{PostgresLog, PostgresOptions};
use postbox_testkit::services::PgVersion;
use postbox_testkit::source_suite::{Draft, End, Harness, Outbox, Payload, Setup};
use tokio_postgres::Transaction;

struct Postgres(PgVersion);

impl Harness for Postgres {
    type Outbox = Db;
    async fn outbox(&self) -> Db {
        let db = Db::new(self.0).await;
        db.sql("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET postbox.wake = on', current_database()); END $$")
            .await;
        db
    }
}

impl Outbox for Db {
    type Source = LogSource<PostgresLog>;

    async fn source(&self, setup: Setup) -> LogSource<PostgresLog> {
        let options = PostgresOptions {
            relay: setup.relay.into(),
            stream: setup.stream.into(),
            ttl: setup.lease,
            dead: setup.policy,
            ..self.options()
        };
        LogSource::new(PostgresLog::new(options), setup.policy)
    }

    async fn write(&self, drafts: &[Draft], end: End) {
        let mut client = client(&self.url).await;
        let tx = client.transaction().await.unwrap();
        for draft in drafts {
            write(&tx, draft).await;
        }
        match end {
            End::Commit => tx.commit().await.unwrap(),
            End::Rollback => tx.rollback().await.unwrap(),
        }
    }
}

async fn write(tx: &Transaction<'_>, d: &Draft) {
    let (json, binary) = match &d.payload {
        Payload::Null => (None, None),
        Payload::Json(text) => (Some(text), None),
        Payload::Binary(bytes) => (None, Some(bytes)),
    };
    let id = d.event_id.map(|id| uuid::Uuid::from_bytes(id).to_string());
    let delay = d.delay.map(|delay| delay.as_secs_f64());
    tx.execute(
        "INSERT INTO postbox.outbox (event_id, aggregate_type, aggregate_id, aggregate_seq, event_type, schema_version, payload, \
           payload_binary, content_type, headers, destination, available_at) \
         VALUES (coalesce($1::text::uuid, postbox.uuid7()), $2, $3, $4, $5, $6, $7::text::json, $8, $9, $10::text::jsonb, $11, \
           clock_timestamp() + make_interval(secs => $12))",
        &[
            &id,
            &d.aggregate_type,
            &d.aggregate_id,
            &d.aggregate_seq,
            &d.event_type,
            &d.schema_version,
            &json,
            &binary,
            &d.content_type,
            &d.headers,
            &d.destination,
            &delay,
        ],
    )
    .await
    .unwrap();
}

mod on_14 {
    postbox_testkit::source_suite!(super::Postgres(super::PgVersion::V14));
}

mod on_15 {
    postbox_testkit::source_suite!(super::Postgres(super::PgVersion::V15));
}

mod on_18 {
    postbox_testkit::source_suite!(super::Postgres(super::PgVersion::V18));
}

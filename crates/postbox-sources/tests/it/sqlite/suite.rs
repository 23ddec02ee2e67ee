//! The rules that every source must pass, on SQLite.

use super::File;
use postbox_engine::LogSource;
use postbox_sources::sqlite::{Options, SqliteLog};
use postbox_testkit::source_suite::{Draft, End, Harness, Outbox, Payload, Setup};
use rusqlite::{TransactionBehavior, params};

struct Sqlite;

impl Harness for Sqlite {
    type Outbox = File;
    async fn outbox(&self) -> File {
        File::new()
    }
}

impl Outbox for File {
    type Source = LogSource<SqliteLog>;

    async fn source(&self, setup: Setup) -> LogSource<SqliteLog> {
        let (lease, policy) = (setup.lease, setup.policy);
        let options = Options { stream: setup.stream.into(), lease, policy, ..self.options(setup.relay) };
        LogSource::new(SqliteLog::new(options), policy)
    }

    async fn write(&self, drafts: &[Draft], end: End) {
        let mut db = self.connect();
        let tx = db.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        for draft in drafts {
            write(&tx, draft);
        }
        match end {
            End::Commit => tx.commit().unwrap(),
            End::Rollback => tx.rollback().unwrap(),
        }
    }
}

fn write(tx: &rusqlite::Transaction<'_>, d: &Draft) {
    let (json, binary) = match &d.payload {
        Payload::Null => (None, None),
        Payload::Json(text) => (Some(text), None),
        Payload::Binary(bytes) => (None, Some(bytes)),
    };
    tx.execute(
        "INSERT INTO postbox_outbox (aggregate_type, aggregate_id, aggregate_seq, event_type, schema_version, payload,
           payload_binary, content_type, headers, destination, available_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) + ?11)",
        params![
            d.aggregate_type,
            d.aggregate_id,
            d.aggregate_seq,
            d.event_type,
            d.schema_version,
            json,
            binary,
            d.content_type,
            d.headers,
            d.destination,
            d.delay.map(|delay| delay.as_millis() as i64),
        ],
    )
    .unwrap();
    if let Some(id) = d.event_id {
        let sql = "UPDATE postbox_outbox SET event_id = ?1 WHERE id = last_insert_rowid()";
        tx.execute(sql, [uuid::Uuid::from_bytes(id).to_string()]).unwrap();
    }
}

postbox_testkit::source_suite!(Sqlite);

//! The application's side on SQLite: an event written in the application's own transaction, by a plain INSERT. It opens
//! no connection, begins and commits nothing, and repeats nothing: errors of the transaction are the caller's.

use crate::outbox::sealed::Sealed;
use crate::{Event, EventId, PAYLOAD_BYTES_MAX, PublishError};
use ::rusqlite::{Connection, Savepoint, Transaction, params};
use std::ops::Deref;

/// The tables, one script per version; each runs as it stands in the sqlite3 shell. `postbox migrate` applies them.
pub const MIGRATIONS: &[&str] = &[include_str!("../schema/sqlite/0001_log.sql")];

/// Milliseconds that the table takes as a time: from 2001 to 5138.
const MS_MIN: i64 = 1_000_000_000_000;
const MS_MAX: i64 = 99_999_999_999_999;

/// Writes the event in the caller's transaction, into the tables `postbox_*`: it exists when that commits, and never
/// if it does not. Begin the transaction IMMEDIATE, so that it waits for its turn to write rather than fails.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let mut db = rusqlite::Connection::open_in_memory()?;
/// # db.execute_batch(postbox::rusqlite::MIGRATIONS[0])?;
/// # db.execute_batch("CREATE TABLE orders (id INTEGER, placed INTEGER)")?;
/// let tx = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
/// tx.execute("INSERT INTO orders VALUES (42, true)", [])?;
/// let event = postbox::Event::new("order", "42", "order.placed").json_text(r#"{"total": 10}"#);
/// postbox::rusqlite::publish(&tx, &event)?;
/// tx.commit()?;
/// # Ok(())
/// # }
/// ```
/// A connection is not a transaction, so this does not compile:
/// ```compile_fail,E0277
/// fn place(db: &rusqlite::Connection, event: &postbox::Event) {
///     let _ = postbox::rusqlite::publish(db, event);
/// }
/// ```
///
/// # Errors
/// [`PublishError::Event`] before the database was asked; the transaction is as it was. Else what SQLite said.
pub fn publish(tx: &impl InTransaction, event: &Event) -> Result<EventId, PublishError> {
    Outbox::default().publish(tx, event)
}

/// An outbox in a SQLite file, known by the prefix of its tables. Cheap; make it once.
#[derive(Clone, Debug)]
pub struct Outbox {
    sql: String,
    payload_bytes_max: usize,
}

impl Default for Outbox {
    /// The tables `postbox_*`.
    fn default() -> Outbox {
        Outbox::new("postbox")
    }
}

impl Outbox {
    /// The outbox whose tables have this prefix, whatever characters it has.
    pub fn new(schema: &str) -> Outbox {
        let table = crate::schema::quote(&format!("{schema}_outbox"));
        let sql = format!(
            "INSERT INTO {table} (event_id, aggregate_type, aggregate_id, aggregate_seq, event_type, schema_version,
               payload, payload_binary, content_type, headers, destination, available_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, CASE WHEN ?13
               THEN min(?12 + CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER), {MS_MAX}) ELSE ?12 END)"
        );
        Outbox { sql, payload_bytes_max: PAYLOAD_BYTES_MAX }
    }

    /// Takes larger or smaller payloads than [`PAYLOAD_BYTES_MAX`], for a broker that does.
    pub fn payload_bytes_max(mut self, bytes: usize) -> Outbox {
        self.payload_bytes_max = bytes;
        self
    }

    /// See [`publish`]. `Event::ordered` needs nothing here: SQLite has one writer at a time.
    ///
    /// # Errors
    /// As [`publish`].
    pub fn publish(&self, tx: &impl InTransaction, event: &Event) -> Result<EventId, PublishError> {
        event.check(self.payload_bytes_max)?;
        let (micros, relative) = event.available_micros()?;
        let ms = micros.map(|micros| (micros + 999) / 1000);
        // What was available before 2001 is available.
        let available = ms.filter(|ms| relative || *ms >= MS_MIN).map(|ms| ms.min(MS_MAX));
        let binary = event.payload_binary.is_some();
        let content_type = if binary { "application/octet-stream" } else { "application/json" };
        let values = params![
            event.id.hyphenated().to_string(),
            event.aggregate_type,
            event.aggregate_id,
            event.aggregate_seq,
            event.event_type,
            event.schema_version,
            event.payload,
            event.payload_binary,
            event.content_type.as_deref().unwrap_or(content_type),
            event.headers_json(),
            event.destination,
            available,
            relative,
        ];
        tx.execute(&self.sql, values).map_err(|e| self.failed(e))?;
        Ok(event.id)
    }

    fn failed(&self, e: ::rusqlite::Error) -> PublishError {
        let text = e.to_string();
        let remedy = if text.contains("no such table") {
            ": there is no outbox of this version, run `postbox migrate`"
        } else {
            ""
        };
        // SQLite's text, without the statement that the driver adds.
        let text = text.split(" in INSERT INTO").next().unwrap_or_default();
        PublishError::Database {
            message: format!("the event was not written: {text}{remedy}"),
            sqlstate: None,
            source: e.into(),
        }
    }
}

/// A transaction of the caller's, or a savepoint in one. Implemented here only.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transaction that an event can be written in",
    note = "begin a transaction, write your data in it, and pass `&tx`"
)]
pub trait InTransaction: Sealed + Deref<Target = Connection> {}

impl Sealed for Transaction<'_> {}
impl InTransaction for Transaction<'_> {}
impl Sealed for Savepoint<'_> {}
impl InTransaction for Savepoint<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EventError;
    use std::time::{Duration, SystemTime};

    fn shop() -> Connection {
        let db = Connection::open_in_memory().expect("memory");
        db.execute_batch(MIGRATIONS[0]).expect("the schema");
        db
    }
    fn event() -> Event {
        Event::new("order", "42", "order.placed")
    }
    fn count(db: &Connection) -> i64 {
        db.query_row("SELECT count(*) FROM postbox_outbox", [], |r| r.get(0)).expect("a count")
    }

    #[test]
    fn case_w1_w3_the_event_lives_and_dies_with_its_transaction_and_savepoint() {
        let mut db = shop();
        let tx = db.transaction().expect("begin");
        publish(&tx, &event()).expect("published");
        tx.rollback().expect("rollback");
        assert_eq!(count(&db), 0);
        let mut tx = db.transaction().expect("begin");
        let kept = publish(&tx, &event()).expect("published");
        let mut undone = tx.savepoint().expect("savepoint");
        publish(&undone, &event()).expect("published");
        undone.rollback().expect("rollback to");
        drop(undone);
        tx.commit().expect("commit");
        let id: String = db.query_row("SELECT event_id FROM postbox_outbox", [], |r| r.get(0)).expect("one");
        assert_eq!(id, kept.to_string());
    }

    #[test]
    fn all_fields_are_written() {
        let mut db = shop();
        let tx = db.transaction().expect("begin");
        let full = event()
            .binary([0, 255])
            .content_type("application/avro")
            .header("tenant_id", "é")
            .destination("orders")
            .aggregate_seq(7)
            .schema_version(2);
        publish(&tx, &full).expect("published");
        publish(&tx, &event().json_text(" {\"a\":1} ")).expect("published");
        publish(&tx, &event().binary([])).expect("published");
        publish(&tx, &event()).expect("published");
        tx.commit().expect("commit");
        let rows: String = db
            .query_row(
                "SELECT group_concat(concat_ws('|', aggregate_type, aggregate_id, aggregate_seq, event_type, schema_version, payload,
                   hex(payload_binary), content_type, headers, destination, available_at), ';') FROM postbox_outbox",
                [],
                |r| r.get(0),
            )
            .expect("the rows");
        let expected = [
            "order|42|7|order.placed|2|00FF|application/avro|{\"tenant_id\":\"é\"}|orders",
            "order|42|order.placed|1| {\"a\":1} ||application/json|{}",
            "order|42|order.placed|1||application/octet-stream|{}",
            "order|42|order.placed|1||application/json|{}",
        ];
        assert_eq!(rows, expected.join(";"));
        let kinds = "SELECT group_concat(typeof(payload) || typeof(payload_binary)) FROM postbox_outbox";
        let kinds: String = db.query_row(kinds, [], |r| r.get(0)).expect("the kinds");
        assert_eq!(kinds, "nullblob,textnull,nullblob,nullnull");
    }

    #[test]
    fn a_delay_counts_from_the_databases_now() {
        let mut db = shop();
        let tx = db.transaction().expect("begin");
        let at = SystemTime::UNIX_EPOCH + Duration::from_micros(1_796_000_000_000_001);
        for event in [
            event().available_after(Duration::from_secs(60)),
            event().available_at(at),
            event().available_at(SystemTime::UNIX_EPOCH),
            event().available_after(Duration::from_secs(7_000 * 365 * 86_400)),
        ] {
            publish(&tx, &event).expect("published");
        }
        let sql = "SELECT group_concat(coalesce(iif(id = 1, available_at - created_at BETWEEN 60000 AND 60100, available_at), '-'))
            FROM postbox_outbox";
        let times: String = tx.query_row(sql, [], |r| r.get(0)).expect("the times");
        assert_eq!(times, "1,1796000000001,-,99999999999999", "never before its time");
    }

    #[test]
    fn case_w5_errors_are_typed_and_name_the_remedy() {
        let mut db = shop();
        let tx = db.transaction().expect("begin");
        let large = publish(&tx, &event().binary(vec![0; PAYLOAD_BYTES_MAX + 1])).expect_err("too large");
        assert!(matches!(large, PublishError::Event(EventError::PayloadTooLarge { .. })), "{large}");
        let bad = Outbox::default().payload_bytes_max(1).publish(&tx, &event().json_text("12")).expect_err("too large");
        assert!(matches!(bad, PublishError::Event(EventError::PayloadTooLarge { bytes: 2, bytes_max: 1 })), "{bad}");
        let behind = publish(&tx, &event().json_text("{}\0")).expect_err("SQLite's own parser would stop there");
        assert!(matches!(behind, PublishError::Event(EventError::Json(_))), "{behind}");
        let twice = event();
        publish(&tx, &twice).expect("once");
        let error = publish(&tx, &twice).expect_err("an id is written once").to_string();
        assert!(error.contains("UNIQUE"), "{error}");
        let error = Outbox::new("my\"x").publish(&tx, &event()).expect_err("no such outbox").to_string();
        assert!(error.contains("my\"x_outbox") && error.ends_with("run `postbox migrate`"), "{error}");
        assert!(!error.contains("VALUES"), "{error}");
        tx.commit().expect("the transaction is still good");
        assert_eq!(count(&db), 1);
    }
}

//! Hands an event to the database inside the transaction that the caller owns, by the SQL function `publish`. It opens
//! no connection, begins and commits nothing, and repeats nothing: errors of the transaction are the caller's.

use crate::event::PAYLOAD_BYTES_MAX;
use crate::schema::quote;
use crate::{Event, EventError, EventId};
use std::future::Future;
use std::sync::LazyLock;

/// [`Outbox::publish`] for the schema `postbox`.
///
/// # Errors
/// As there.
pub async fn publish(tx: impl Transaction, event: &Event) -> Result<EventId, PublishError> {
    static DEFAULT: LazyLock<Outbox> = LazyLock::new(Outbox::default);
    DEFAULT.publish(tx, event).await
}

/// An outbox of a database, known by its schema's name. Cheap; make it once.
#[derive(Clone, Debug)]
pub struct Outbox {
    schema: String,
    sql: String,
    payload_bytes_max: usize,
}

impl Default for Outbox {
    /// The schema `postbox`.
    fn default() -> Outbox {
        Outbox::new("postbox")
    }
}

impl Outbox {
    /// The outbox in the schema of this name, whatever characters it has.
    pub fn new(schema: &str) -> Outbox {
        let schema = quote(schema);
        // Casts from text, so that no driver needs its own features for json and uuid. All parameters have exact types.
        let sql = format!(
            "SELECT {schema}.publish($1, $2, $3, $4::text::json, $5, $6::text::jsonb, $7::text::uuid, $8, $9, $10, $11, \
             CASE WHEN $13 THEN clock_timestamp() ELSE timestamptz 'epoch' END + $12 * interval '1 microsecond', $14)"
        );
        Outbox { schema, sql, payload_bytes_max: PAYLOAD_BYTES_MAX }
    }

    /// Takes larger or smaller payloads than [`PAYLOAD_BYTES_MAX`], for a broker that does. The database has a limit of
    /// its own, its function `payload_max`: the smaller one counts.
    pub fn payload_bytes_max(mut self, bytes: usize) -> Outbox {
        self.payload_bytes_max = bytes;
        self
    }

    /// Writes the event in the caller's transaction: it exists when that commits, and never if it does not.
    ///
    /// It takes `&mut sqlx::Transaction` (feature `sqlx`) or `&tokio_postgres::Transaction` (feature `tokio-postgres`).
    /// ```
    /// # #[cfg(feature = "sqlx")]
    /// async fn place(pool: &sqlx::PgPool, outbox: &postbox::Outbox) -> Result<(), Box<dyn std::error::Error>> {
    ///     let mut tx = pool.begin().await?;
    ///     sqlx::query("UPDATE orders SET placed = true WHERE id = 42").execute(&mut *tx).await?;
    ///     let event = postbox::Event::new("order", "42", "order.placed").json_text(r#"{"total": 10}"#);
    ///     outbox.publish(&mut tx, &event).await?;
    ///     Ok(tx.commit().await?)
    /// }
    /// ```
    /// A pool or a connection is not a transaction, so this does not compile:
    /// ```compile_fail
    /// # #[cfg(feature = "sqlx")]
    /// async fn place(pool: &sqlx::PgPool, outbox: &postbox::Outbox) -> Result<(), Box<dyn std::error::Error>> {
    ///     let event = postbox::Event::new("order", "42", "order.placed").json_text(r#"{"total": 10}"#);
    ///     outbox.publish(pool, &event).await?;
    ///     Ok(())
    /// }
    /// # #[cfg(not(feature = "sqlx"))] compile_error!("as without the driver");
    /// ```
    ///
    /// # Errors
    /// [`PublishError::Event`] before the database was asked; the transaction is as it was. Else what the database said.
    pub async fn publish(&self, tx: impl Transaction, event: &Event) -> Result<EventId, PublishError> {
        event.check(self.payload_bytes_max)?;
        tx.publish(self, event).await?;
        Ok(event.id)
    }

    pub(crate) fn sql(&self) -> &str {
        &self.sql
    }

    /// What the database said, and what mends it.
    pub(crate) fn failed(
        &self,
        sqlstate: Option<String>,
        message: &str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> PublishError {
        let remedy = match sqlstate.as_deref() {
            // No such schema, no such function.
            Some("3F000" | "42883") => ": there is no outbox of this version, run `postbox migrate`",
            Some("42501") => {
                ": this role lacks the rights of a writer, run the SQL of `postbox migrate --print --roles WRITER,RELAY`"
            }
            _ => "",
        };
        let message = format!("the event was not written to {}: {message}{remedy}", self.schema);
        PublishError::Database { message, sqlstate, source: source.into() }
    }
}

/// A transaction of the caller's, of a driver whose feature is on. Implemented here only, and not for what would write
/// the event on its own:
/// ```
/// # #[cfg(feature = "tokio-postgres")]
/// async fn place(client: &mut tokio_postgres::Client, outbox: &postbox::Outbox) -> Result<(), Box<dyn std::error::Error>> {
///     let tx = client.transaction().await?;
///     outbox.publish(&tx, &postbox::Event::new("order", "42", "order.placed")).await?;
///     Ok(tx.commit().await?)
/// }
/// ```
/// ```compile_fail
/// # #[cfg(feature = "tokio-postgres")]
/// async fn place(client: &mut tokio_postgres::Client, outbox: &postbox::Outbox) -> Result<(), Box<dyn std::error::Error>> {
///     outbox.publish(&*client, &postbox::Event::new("order", "42", "order.placed")).await?;
///     Ok(())
/// }
/// # #[cfg(not(feature = "tokio-postgres"))] compile_error!("as without the driver");
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transaction that an event can be written in",
    note = "begin a transaction, write your data in it, and pass `&mut tx`; switch on the feature of your driver"
)]
pub trait Transaction: sealed::Sealed + Send {
    #[doc(hidden)]
    fn publish(self, outbox: &Outbox, event: &Event) -> impl Future<Output = Result<(), PublishError>> + Send;
}

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// Why an event was not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// Known before the database was asked; the transaction is as it was.
    #[error(transparent)]
    Event(#[from] EventError),
    /// The database refused; its transaction is to be rolled back.
    #[error("{message}")]
    Database {
        /// What it said, and what mends it.
        message: String,
        /// PostgreSQL's code, see [`PublishError::sqlstate`].
        sqlstate: Option<String>,
        /// The driver's own error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl PublishError {
    /// PostgreSQL's code: 40001 and 40P01 mean that the transaction is to be tried again, PB001 to PB004 are ours.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            PublishError::Database { sqlstate, .. } => sqlstate.as_deref(),
            PublishError::Event(_) => None,
        }
    }
}

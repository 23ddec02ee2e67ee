//! The transaction of sqlx 0.9.

use crate::Event;
use crate::outbox::{Outbox, PublishError, Transaction, sealed::Sealed};
use ::sqlx::{AssertSqlSafe, Postgres};

impl Sealed for &mut ::sqlx::Transaction<'_, Postgres> {}

impl Transaction for &mut ::sqlx::Transaction<'_, Postgres> {
    async fn publish(self, outbox: &Outbox, event: &Event) -> Result<(), PublishError> {
        let (available, relative) = event.available_micros()?;
        // Safe: the one thing put into the text is the schema's name, quoted.
        let query = ::sqlx::query(AssertSqlSafe(outbox.sql()))
            .bind(&event.aggregate_type)
            .bind(&event.aggregate_id)
            .bind(&event.event_type)
            .bind(&event.payload)
            .bind(&event.payload_binary)
            .bind(event.headers_json())
            .bind(event.id.to_string())
            .bind(event.aggregate_seq)
            .bind(event.schema_version)
            .bind(&event.content_type)
            .bind(&event.destination)
            .bind(available)
            .bind(relative)
            .bind(event.ordered);
        match query.execute(&mut **self).await {
            Ok(_) => Ok(()),
            Err(::sqlx::Error::Database(e)) => {
                let (state, message) = (e.code().map(|c| c.into_owned()), e.message().to_owned());
                Err(outbox.failed(state, &message, ::sqlx::Error::Database(e)))
            }
            Err(e) => Err(outbox.failed(None, &e.to_string(), e)),
        }
    }
}

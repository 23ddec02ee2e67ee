//! The transaction of tokio-postgres, and of the pools whose transactions deref to it.

use crate::Event;
use crate::outbox::{Outbox, PublishError, Transaction, sealed::Sealed};
use ::tokio_postgres::types::{ToSql, Type};

impl Sealed for &::tokio_postgres::Transaction<'_> {}
impl Sealed for &mut ::tokio_postgres::Transaction<'_> {}

impl Transaction for &mut ::tokio_postgres::Transaction<'_> {
    async fn publish(self, outbox: &Outbox, event: &Event) -> Result<(), PublishError> {
        Transaction::publish(&*self, outbox, event).await
    }
}

impl Transaction for &::tokio_postgres::Transaction<'_> {
    async fn publish(self, outbox: &Outbox, event: &Event) -> Result<(), PublishError> {
        let (available, relative) = event.available_micros()?;
        let (headers, id) = (event.headers_json(), event.id.to_string());
        let values: [(&(dyn ToSql + Sync), Type); 14] = [
            (&event.aggregate_type, Type::TEXT),
            (&event.aggregate_id, Type::TEXT),
            (&event.event_type, Type::TEXT),
            (&event.payload, Type::TEXT),
            (&event.payload_binary, Type::BYTEA),
            (&headers, Type::TEXT),
            (&id, Type::TEXT),
            (&event.aggregate_seq, Type::INT8),
            (&event.schema_version, Type::INT4),
            (&event.content_type, Type::TEXT),
            (&event.destination, Type::TEXT),
            (&available, Type::INT8),
            (&relative, Type::BOOL),
            (&event.ordered, Type::BOOL),
        ];
        // Types given: one round trip, no named statement, so it works behind a transaction pooler.
        match self.query_typed(outbox.sql(), &values).await {
            Ok(_) => Ok(()),
            Err(e) => {
                let state = e.code().map(|c| c.code().to_owned());
                let message = e.as_db_error().map_or_else(|| e.to_string(), |db| db.message().to_owned());
                Err(outbox.failed(state, &message, e))
            }
        }
    }
}

//! Write an event in the transaction that saves your data: the application's side of the transactional outbox.
//! The event exists when the transaction commits, and never if it does not; the relay `postbox` delivers it.

// Without a driver there is nothing but the schema to use.
#![cfg_attr(not(any(feature = "sqlx", feature = "tokio-postgres")), allow(dead_code))]

mod event;
mod outbox;
#[cfg(feature = "rusqlite")]
pub mod rusqlite;
pub mod schema;
#[cfg(feature = "sqlx")]
mod sqlx;
#[cfg(feature = "tokio-postgres")]
mod tokio_postgres;

pub use event::{Event, EventError, EventId, HEADERS_RESERVED, PAYLOAD_BYTES_MAX};
pub use outbox::{Outbox, PublishError, Transaction, publish};

//! Write an event in the transaction that saves your data: the application's side of the transactional outbox.

#[cfg(feature = "rusqlite")]
pub mod rusqlite;
pub mod schema;

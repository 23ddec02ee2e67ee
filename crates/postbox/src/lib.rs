//! Write an event in the transaction that saves your data: the application's side of the transactional outbox.

pub mod schema;

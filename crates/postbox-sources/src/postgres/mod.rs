//! The log source on PostgreSQL 14 and later.

pub mod migrate;
pub mod roles;

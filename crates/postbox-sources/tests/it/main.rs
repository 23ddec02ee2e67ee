//! The sources against real databases.

#![allow(clippy::unwrap_used)] // in a test it is the report

#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

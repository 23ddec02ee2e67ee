//! The sources against real databases.

#[cfg(feature = "sqlite")]
mod sqlite;

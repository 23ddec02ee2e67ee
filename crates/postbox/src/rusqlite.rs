//! The application's side on SQLite: events written in the application's own transaction.

/// The tables, one script per version; each runs as it stands in the sqlite3 shell. `postbox migrate` applies them.
pub const MIGRATIONS: &[&str] = &[include_str!("../schema/sqlite/0001_log.sql")];

//! The log source on SQLite, the embedded default.

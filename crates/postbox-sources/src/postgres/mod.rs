//! The log source on PostgreSQL 14 and later.

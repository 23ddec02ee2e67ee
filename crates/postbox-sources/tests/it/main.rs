//! The sources against real servers.

#[cfg(feature = "postgres")]
mod postgres;

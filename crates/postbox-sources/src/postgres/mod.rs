//! The log source on PostgreSQL 14 and later: a snapshot cursor over an insert-only table. Each poll reads exactly what
//! became visible since the last one; no row is ever updated, no transaction is waited for.
//!
//! Follow an event: `reader` asks for it, `wire` receives it, `row` copies it into a page, the engine publishes it, `record`
//! settles it.
//! A relay holds four connections to the database (see `log`), and a fifth only while one is being made (see `connect`).

pub mod admin;
mod connect;
mod dial;
mod error;
mod held;
mod identity;
mod lease;
mod log;
pub mod migrate;
mod reader;
mod record;
mod retention;
pub mod roles;
mod row;
mod sql;
mod tls;
mod wake;
mod wire;

pub use log::{Mark, PostgresLog};

use postbox_engine::{DeadPolicy, SourceError};
use std::sync::Arc;
use std::time::Duration;

/// What can be known to be wrong before anything is connected to.
pub(crate) fn check_options(url: &str, listen_url: Option<&str>, schema: &str) -> Result<(), SourceError> {
    tls::Target::parse(url)?.check()?;
    if let Some(url) = listen_url {
        let check = tls::Target::parse(url).and_then(|target| target.check());
        check.map_err(|e| error::refused(format!("listen_url: {}", e.message)))?;
    }
    migrate::checked(schema).map(drop)
}

/// Where the log is, and as whom to read it.
#[derive(Clone)]
pub struct PostgresOptions {
    /// A URL or key/value string as libpq takes it. Never printed.
    pub url: String,
    /// Where to `LISTEN`, when `url` leads through a pooler: that needs a session of its own.
    pub listen_url: Option<String>,
    /// The schema with the outbox, unquoted.
    pub schema: String,
    /// The stream's name, which is part of its progress.
    pub stream: Arc<str>,
    /// Which share of the keys: 0 to `shards - 1`.
    pub shard: i16,
    /// Into how many shares the keys are divided.
    pub shards: i16,
    /// This relay's name, for people.
    pub relay: Arc<str>,
    /// How long a lease lasts when its holder falls silent.
    pub ttl: Duration,
    /// How long passed events are kept.
    pub retention: Duration,
    /// What a dead event does to those behind it in its key.
    pub dead: DeadPolicy,
    /// Events in a page: fewer cost round trips, more cost memory.
    pub page_events_max: usize,
    /// Bytes in a page, one event more at most.
    pub page_bytes_max: usize,
    /// Events that one poll may return; a window with more is paged.
    pub poll_events_max: usize,
}

impl PostgresOptions {
    /// The defaults: stream `main` in schema `postbox`, one shard.
    pub fn new(url: impl Into<String>) -> PostgresOptions {
        PostgresOptions {
            url: url.into(),
            listen_url: None,
            schema: "postbox".into(),
            stream: "main".into(),
            shard: 0,
            shards: 1,
            relay: "postbox".into(),
            ttl: Duration::from_secs(10),
            retention: Duration::from_secs(7 * 24 * 3600),
            dead: DeadPolicy::Skip,
            page_events_max: 2000,
            page_bytes_max: 1 << 20,
            poll_events_max: 1000,
        }
    }
}

impl std::fmt::Debug for PostgresOptions {
    /// Without the URLs: they hold passwords.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresOptions")
            .field("schema", &self.schema)
            .field("stream", &self.stream)
            .field("shard", &self.shard)
            .field("relay", &self.relay)
            .finish_non_exhaustive()
    }
}

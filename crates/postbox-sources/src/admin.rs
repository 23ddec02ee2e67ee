//! What people ask of a source: is it well, how far is it, what became of an event. For the command line and the
//! dashboard only; the engine never sees it. Each database implements the same functions in its `admin.rs`.

use std::time::Duration;

/// One stream's shard, as its tables tell it; works while no relay runs.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct StreamStatus {
    /// The stream's name.
    pub stream: String,
    /// Which of its shards, from 0 on.
    pub shard: i16,
    /// The relay that holds the lease now.
    pub owner: Option<String>,
    /// Age of the oldest event that is neither published nor held: the figure to alarm on. `None`: nothing pending.
    pub oldest_unpublished: Option<Duration>,
    /// Events neither published nor held; exact up to 10,000, above that estimated.
    pub pending: u64,
    /// `pending` is an estimate.
    pub pending_is_estimate: bool,
    /// Held events that failed and are tried again.
    pub retry: u64,
    /// Held events behind a failed one of their key.
    pub waiting: u64,
    /// Held events whose time has not come.
    pub delayed: u64,
    /// Held events that need an operator.
    pub dead: u64,
    /// Age of the oldest event in retry or waiting.
    pub oldest_held: Option<Duration>,
    /// Age of the oldest dead event.
    pub oldest_dead: Option<Duration>,
    /// Since the cursor moved last.
    pub last_settled: Option<Duration>,
    /// What keeps the relay from sending, as it said when it renewed its lease last; else of the held event that failed last.
    pub last_error: Option<String>,
}

/// One thing that `postbox check` looked at.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Finding {
    /// Nothing is to be mended.
    pub ok: bool,
    /// What was looked at and what was found: "schema postbox: version 1".
    pub what: String,
    /// The command or statement that mends it.
    pub remedy: Option<String>,
}

/// What became of an event in one stream.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Trace {
    /// The stream's name.
    pub stream: String,
    /// pending, published, retry, waiting, delayed, dead, replay.
    pub state: String,
    /// RFC 3339, as the database's clock had it.
    pub written_at: String,
    /// By when the relay had handed it to the sink, the last time if it went more often. SEMANTICS says how exact that is.
    pub sent_at: Option<String>,
    /// When its publication was recorded.
    pub published_at: Option<String>,
    /// The relay that recorded it.
    pub relay: Option<String>,
    /// How often it was tried, as far as the tables tell.
    pub attempts: u32,
    /// What the destination said last, if the event is held; none once it is published.
    pub error: Option<String>,
}

/// What a migration did: from this version (0: nothing was there) to that one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migrated {
    /// The version before; 0: nothing was there.
    pub from: i32,
    /// The version now.
    pub to: i32,
    /// PostgreSQL: the ring of bins turned by another retention before.
    pub retention_changed: bool,
}

/// The roles that get rights: who writes events, and who relays them.
#[derive(Clone, Debug)]
pub struct Roles {
    /// The service's role.
    pub writer: String,
    /// The relay's role.
    pub relay: String,
}

//! The log source on SQLite, on files of its own.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod faults;
mod log;
mod processes;
mod schema;
mod suite;
mod writing;

use postbox_engine::{Claim, ClaimLimit, DeadPolicy, Event, LogSource, Settlement, Source, Verdict};
use postbox_sources::sqlite::{Options, SqliteLog, migrate};
use rusqlite::{Connection, params};
use std::future::Future;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A migrated file in a folder of its own.
pub(crate) struct File {
    pub(crate) path: PathBuf,
    pub(crate) folder: tempfile::TempDir,
}

/// How long a fact may take to come true on a busy machine with a slow disk.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
pub(crate) const LIMIT: ClaimLimit = ClaimLimit { events_max: 100, bytes_max: 1 << 20 };

impl File {
    pub(crate) fn unmigrated() -> File {
        let folder = tempfile::tempdir().unwrap();
        File { path: folder.path().join("shop.db"), folder }
    }
    pub(crate) fn new() -> File {
        let file = File::unmigrated();
        migrate(&file.path, "postbox").unwrap();
        file
    }
    pub(crate) fn connect(&self) -> Connection {
        let connection = Connection::open(&self.path).unwrap();
        connection.busy_timeout(DEADLINE).unwrap();
        connection
    }
    pub(crate) fn options(&self, relay: &str) -> Options {
        Options { relay: relay.into(), ..Options::new(&self.path) }
    }
    pub(crate) fn log(&self, relay: &str) -> SqliteLog {
        SqliteLog::new(self.options(relay))
    }
    /// A source that owns the lease.
    pub(crate) async fn source(&self, relay: &str) -> LogSource<SqliteLog> {
        let source = LogSource::new(self.log(relay), DeadPolicy::Skip);
        soon(source.acquire()).await.unwrap();
        source
    }
    pub(crate) fn count(&self, sql: &str) -> i64 {
        self.connect().query_row(sql, [], |r| r.get(0)).unwrap()
    }
}

/// An event `n` of an aggregate.
pub(crate) fn insert(connection: &Connection, key: &str, n: i64) {
    let sql = "INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', ?1, 'placed', ?2)";
    connection.execute(sql, params![key, n.to_string()]).unwrap();
}

pub(crate) fn text(event: &Event) -> String {
    format!("{} {}", event.aggregate_id(), String::from_utf8_lossy(event.payload().unwrap_or_default()))
}

pub(crate) fn texts(claim: &Claim) -> Vec<String> {
    claim.events.iter().map(|c| text(&c.event)).collect()
}

pub(crate) async fn settle(source: &LogSource<SqliteLog>, claim: &Claim, verdict: Verdict) {
    let all = claim.events.iter().map(|c| Settlement { ticket: c.ticket, verdict: verdict.clone() });
    source.settle(&all.collect::<Vec<_>>(), tokio::time::Instant::now()).await.unwrap();
}

/// Claims and publishes so many events.
pub(crate) async fn publish(source: &LogSource<SqliteLog>, count: usize) -> Vec<String> {
    let mut all = Vec::new();
    while all.len() < count {
        let claim = soon(source.claim(LIMIT)).await.unwrap();
        settle(source, &claim, Verdict::Published).await;
        all.extend(texts(&claim));
    }
    all
}

/// What does not come within the deadline does not come.
pub(crate) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, what).await.expect("it takes less than a minute")
}

/// Waits for a fact.
pub(crate) fn until(what: &str, mut fact: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !fact() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5)); // the step of a wait
    }
}

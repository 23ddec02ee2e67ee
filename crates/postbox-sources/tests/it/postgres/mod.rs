//! The log source on PostgreSQL, on the oldest and the newest version that are promised, and one between.

mod adversarial;
mod faults;
mod held;
mod identity;
mod log;
mod migration;
mod names;
mod plans;
mod retention;
mod roles;
mod suite;
mod tls;
mod waking;

use postbox_engine::{Changes, ClaimLimit, Log, LogPage};
use postbox_sources::postgres::{Mark, PostgresLog, PostgresOptions, migrate};
use postbox_testkit::services::{PgVersion, Postgres};
use std::future::Future;
use std::time::Duration;
use tokio_postgres::{Client, NoTls};

/// How long a fact may take to come true on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
/// The default retention.
pub(crate) const WEEK: Duration = Duration::from_secs(7 * 86_400);
pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const LIMIT: ClaimLimit = ClaimLimit { events_max: 100_000, bytes_max: 64 << 20 };

pub(crate) async fn client(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// A database with a migrated schema.
pub(crate) struct Db {
    pub(crate) url: String,
    pub(crate) client: Client,
}

impl Db {
    pub(crate) async fn new(version: PgVersion) -> Db {
        Db::on(Postgres::shared(version), "postbox").await
    }

    pub(crate) async fn on(server: &Postgres, schema: &str) -> Db {
        Db::keeping(server, schema, WEEK).await
    }

    /// With events kept for so long.
    pub(crate) async fn keeping(server: &Postgres, schema: &str, retention: Duration) -> Db {
        let url = server.create_database();
        let mut client = client(&url).await;
        migrate::migrate(&mut client, schema, retention).await.unwrap();
        Db { url, client }
    }

    pub(crate) fn options(&self) -> PostgresOptions {
        PostgresOptions::new(&self.url)
    }

    pub(crate) fn log(&self) -> PostgresLog {
        PostgresLog::new(self.options())
    }

    pub(crate) async fn sql(&self, sql: &str) {
        self.client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    }

    pub(crate) async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(&self, sql: &str) -> T {
        self.client.query_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e:?}")).get(0)
    }

    /// `n` events of one transaction, over `keys` aggregates, numbered per aggregate.
    pub(crate) async fn insert(&self, n: u32, keys: u32) {
        self.sql(&format!(
            "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload) \
             SELECT 'order', (g % {keys})::text, 'placed', json_build_object('n', g) FROM generate_series(1, {n}) g"
        ))
        .await;
    }
}

pub(crate) async fn in_time<T>(what: &str, fact: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, fact).await.unwrap_or_else(|_| panic!("in {DEADLINE:?} not: {what}"))
}

pub(crate) async fn acquire(log: &PostgresLog) {
    in_time("the lease is ours", async {
        while let Err(remaining) = log.acquire().await.unwrap() {
            tokio::time::sleep(remaining.min(Duration::from_millis(100))).await; // the step of a wait with a deadline
        }
    })
    .await;
}

/// What settles a page whose events are all published.
pub(crate) fn published(page: &LogPage<Mark>) -> Changes<Mark> {
    Changes {
        mark: Some(page.mark.clone()),
        events: u32::try_from(page.events.len()).unwrap(),
        max_id: page.events.iter().map(|e| e.id()).max().unwrap_or_default(),
        sent: None,
        held: Vec::new(),
    }
}

/// Reads and settles until `n` events have come; returns their ids.
pub(crate) async fn drain(log: &PostgresLog, n: usize) -> Vec<i64> {
    let mut ids = Vec::new();
    in_time(&format!("{n} events are read"), async {
        while ids.len() < n {
            let page = log.read(LIMIT).await.unwrap();
            log.record(&published(&page)).await.unwrap();
            ids.extend(page.events.iter().map(|e| e.id()));
        }
    })
    .await;
    ids
}

/// Runs tests on the versions named.
macro_rules! on_versions {
    ([$($on:ident $version:ident),*] $name:ident) => {
        mod $name { $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $on() { super::$name(postbox_testkit::services::PgVersion::$version).await }
        )* }
    };
}
macro_rules! on_all_versions {
    ($($name:ident)*) => { $( crate::postgres::on_versions! { [on_14 V14, on_15 V15, on_18 V18] $name } )* };
}
/// What PostgreSQL 14 does no otherwise than 15, or has no way to be asked about.
macro_rules! on_15_and_18 {
    ($($name:ident)*) => { $( crate::postgres::on_versions! { [on_15 V15, on_18 V18] $name } )* };
}
pub(crate) use {on_15_and_18, on_all_versions, on_versions};

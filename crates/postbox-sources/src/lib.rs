//! Where events come from. [`build`] is the whole registry: an enum and one `match`; [`admin()`] is the same for what
//! people ask. The URL's scheme chooses the database.

pub mod admin;
mod any;
pub mod memory;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

pub use any::{AnyAdmin, AnySource};

use postbox_engine::{ClaimLimit, DeadPolicy, LogSource, SourceError, SourceErrorKind};
use std::path::PathBuf;
use std::time::Duration;

/// Where an outbox is.
#[derive(Clone)]
pub struct Location {
    /// `sqlite:FILE`, `postgres://..`, libpq's `host=.. dbname=..`, or `memory:EVENTS` to measure without a database.
    pub url: String,
    /// PostgreSQL: where to `LISTEN` when `url` leads through a pooler.
    pub listen_url: Option<String>,
    /// PostgreSQL: instead of one in the URL; as it is, not percent-encoded.
    pub password: Option<String>,
    /// PostgreSQL: the schema; SQLite: what the tables' names begin with.
    pub schema: String,
}

/// Which events to carry, and for whom.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// Which database, and how to reach it.
    pub location: Location,
    /// The stream's name, which is part of its progress.
    pub stream: String,
    /// Names this relay in the lease and in traces; unique per process.
    pub relay: String,
    /// How long the lease holds when this relay dies.
    pub lease: Duration,
    /// How long published events are kept.
    pub retention: Duration,
    /// What a dead event does to those behind it in its key.
    pub policy: DeadPolicy,
    /// What the relay has in hand at most.
    pub hand: ClaimLimit,
}

/// What a URL names.
enum Database {
    Memory { events: u64 },
    Sqlite(PathBuf),
    Postgres(String),
}

/// The source for one stream. It connects when the relay acquires it.
///
/// # Errors
/// A URL that names no database of this build or cannot be read, a file that it names and that cannot be read, a name that
/// cannot be a schema's: wrong configuration, all of it, and nothing else.
pub fn build(config: &SourceConfig) -> Result<AnySource, SourceError> {
    match config.location.database()? {
        Database::Memory { events } => {
            let source = LogSource::new(memory::MemoryLog::new(events), config.policy);
            Ok(AnySource::Memory(source.for_hand(config.hand)))
        }
        #[cfg(feature = "postgres")]
        Database::Postgres(url) => {
            let options = postgres::PostgresOptions {
                listen_url: config.location.listen_url.as_deref().map(|url| config.location.with_password(url)),
                schema: config.location.schema.clone(),
                stream: config.stream.as_str().into(),
                relay: config.relay.as_str().into(),
                ttl: config.lease,
                retention: config.retention,
                dead: config.policy,
                ..postgres::PostgresOptions::new(url)
            };
            let page_events_max = options.page_events_max.min(config.hand.events_max);
            let log = postgres::PostgresLog::new(postgres::PostgresOptions { page_events_max, ..options });
            Ok(AnySource::Postgres(Box::new(LogSource::new(log, config.policy).for_hand(config.hand))))
        }
        #[cfg(feature = "sqlite")]
        Database::Sqlite(path) => {
            let options = sqlite::Options {
                path,
                schema: config.location.schema.clone(),
                stream: config.stream.clone(),
                relay: config.relay.clone(),
                lease: config.lease,
                retention: Some(config.retention),
                policy: config.policy,
            };
            let source = LogSource::new(sqlite::SqliteLog::new(options), config.policy);
            Ok(AnySource::Sqlite(source.for_hand(config.hand)))
        }
        #[allow(unreachable_patterns)] // all are reachable without the features
        database => Err(database.missing()),
    }
}

/// What people ask of the database, and what they have it do. `retention`: how long published events are to be kept.
///
/// # Errors
/// As [`build`].
pub fn admin(location: &Location, retention: Duration) -> Result<AnyAdmin, SourceError> {
    match location.database()? {
        Database::Memory { .. } => Err(refused("events made in memory leave nothing to look at")),
        #[cfg(feature = "postgres")]
        Database::Postgres(url) => {
            Ok(AnyAdmin::Postgres { url: Hidden(url), schema: location.schema.clone(), retention })
        }
        #[cfg(feature = "sqlite")]
        Database::Sqlite(path) => Ok(AnyAdmin::Sqlite { path, schema: location.schema.clone() }),
        #[allow(unreachable_patterns)] // all are reachable without the features
        database => Err(database.missing()),
    }
}

impl Location {
    /// The file of a SQLite database.
    pub fn sqlite_path(&self) -> Option<PathBuf> {
        match self.database() {
            Ok(Database::Sqlite(path)) => Some(path),
            _ => None,
        }
    }

    fn database(&self) -> Result<Database, SourceError> {
        let url = self.url.trim();
        if let Some(rest) = url.strip_prefix("sqlite:") {
            return match rest.strip_prefix("//").unwrap_or(rest) {
                "" => Err(refused("the database URL names no file; write sqlite:postbox.db")),
                ":memory:" => Err(refused(
                    "a database in memory is gone with its connection; name a file, as in sqlite:postbox.db",
                )),
                path if path.contains('?') => Err(refused(
                    "the database URL has options after ?, of which SQLite's takes none; write sqlite:postbox.db",
                )),
                path => Ok(Database::Sqlite(path.into())),
            };
        }
        if let Some(events) = url.strip_prefix("memory:") {
            let events =
                events.parse().map_err(|_| refused("write memory: with a number of events, as in memory:2000000"))?;
            return Ok(Database::Memory { events });
        }
        let keywords =
            !url.contains("://") && ["host=", "dbname=", "user=", "service="].iter().any(|k| url.contains(k));
        if url.starts_with("postgres://") || url.starts_with("postgresql://") || keywords {
            return self.postgres(self.with_password(url));
        }
        let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
        let what = if scheme.is_empty() {
            "the database URL has no scheme".into()
        } else {
            format!("no source for {scheme}://")
        };
        Err(refused(format!("{what}; write postgres://USER@HOST:PORT/DATABASE or sqlite:FILE")))
    }

    #[cfg(feature = "postgres")]
    fn postgres(&self, url: String) -> Result<Database, SourceError> {
        postgres::check_options(&url, self.listen_url.as_deref(), &self.schema)?;
        Ok(Database::Postgres(url))
    }

    #[cfg(not(feature = "postgres"))]
    fn postgres(&self, url: String) -> Result<Database, SourceError> {
        Ok(Database::Postgres(url))
    }

    /// The URL with the separate password in it.
    fn with_password(&self, url: &str) -> String {
        let Some(password) = &self.password else { return url.to_owned() };
        if !url.contains("://") {
            return format!("{url} password='{}'", password.replace('\\', "\\\\").replace('\'', "\\'"));
        }
        let encoded: String = password.bytes().map(|byte| format!("%{byte:02X}")).collect();
        format!("{url}{}password={encoded}", if url.contains('?') { '&' } else { '?' })
    }
}

impl std::fmt::Debug for Location {
    /// Never the URL: there may be a password in it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Location").field("schema", &self.schema).finish_non_exhaustive()
    }
}

/// A URL that Debug does not show.
#[derive(Clone)]
pub struct Hidden(String);

impl std::fmt::Debug for Hidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl Database {
    fn missing(&self) -> SourceError {
        let (name, feature) = match self {
            Database::Memory { .. } => ("memory", "default"),
            Database::Sqlite(_) => ("SQLite", "sqlite"),
            Database::Postgres(_) => ("PostgreSQL", "postgres"),
        };
        refused(format!("this build has no {name}; build it with: cargo build --features {feature}"))
    }
}

fn refused(message: impl Into<String>) -> SourceError {
    SourceError::new(SourceErrorKind::Refused, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location(url: &str, password: Option<&str>) -> Location {
        Location { url: url.into(), listen_url: None, password: password.map(Into::into), schema: "postbox".into() }
    }

    #[test]
    fn the_url_chooses_the_database() {
        for (url, path) in [("sqlite:a.db", "a.db"), ("sqlite://a/b.db", "a/b.db"), ("sqlite:///a/b.db", "/a/b.db")] {
            assert_eq!(location(url, None).sqlite_path(), Some(path.into()));
        }
        for url in ["mysql://u:p@h/d", "", "nonsense", "sqlite:", "sqlite::memory:", "sqlite:a.db?mode=ro"] {
            let error = location(url, None).database().err().unwrap();
            assert!(error.kind == SourceErrorKind::Refused && error.message.contains("sqlite:"), "{error}");
            assert!(!error.message.contains("u:p"), "{error}");
        }
    }

    #[test]
    fn case_t2_a_separate_password_needs_no_encoding_and_is_not_shown() {
        let odd = "p@ss:/%wörd' \\";
        for url in ["postgres://u@h/d", "postgresql://u@h/d?sslmode=require", "host=h user=u"] {
            let location = location(url, Some(odd));
            let Ok(Database::Postgres(url)) = location.database() else { panic!("{url}") };
            let config: tokio_postgres::Config = url.parse().unwrap();
            assert_eq!(config.get_password(), Some(odd.as_bytes()));
            assert!(!format!("{location:?}").contains("rd'"));
        }
    }
}

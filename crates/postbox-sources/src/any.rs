//! One type for all sources, and one for what is asked of their databases. Only forwards.

use crate::admin::{Finding, Migrated, Roles, StreamStatus, Trace};
use postbox_engine::{Claim, ClaimLimit, LogSource, Settlement, Source, SourceError};
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::Instant;

/// Any source of this build; made by [`crate::build`].
pub enum AnySource {
    /// Events made up in memory.
    Memory(LogSource<crate::memory::MemoryLog>),
    /// The log on PostgreSQL.
    #[cfg(feature = "postgres")]
    Postgres(Box<LogSource<crate::postgres::PostgresLog>>),
    /// The log on SQLite.
    #[cfg(feature = "sqlite")]
    Sqlite(LogSource<crate::sqlite::SqliteLog>),
}

/// Evaluates an expression with the inner source.
macro_rules! inner {
    ($any:expr, $source:ident => $call:expr) => {
        match $any {
            AnySource::Memory($source) => $call,
            #[cfg(feature = "postgres")]
            AnySource::Postgres($source) => $call,
            #[cfg(feature = "sqlite")]
            AnySource::Sqlite($source) => $call,
        }
    };
}

impl Source for AnySource {
    async fn acquire(&self) -> Result<Duration, SourceError> {
        // Boxed: it is large on PostgreSQL, and rare.
        inner!(self, source => Box::pin(source.acquire()).await)
    }
    async fn renew(&self) -> Result<Duration, SourceError> {
        inner!(self, source => source.renew().await)
    }
    fn trouble(&self, what: Option<&str>) {
        inner!(self, source => source.trouble(what));
    }
    async fn claim(&self, limit: ClaimLimit) -> Result<Claim, SourceError> {
        inner!(self, source => source.claim(limit).await)
    }
    async fn settle(&self, settlements: &[Settlement], sent: Instant) -> Result<(), SourceError> {
        inner!(self, source => source.settle(settlements, sent).await)
    }
    async fn release(&self) -> Result<(), SourceError> {
        inner!(self, source => source.release().await)
    }
}

/// What people ask of a database, whichever it is; made by [`crate::admin()`]. Connects anew for each question.
#[derive(Debug)]
pub enum AnyAdmin {
    /// A schema of a database on PostgreSQL.
    #[cfg(feature = "postgres")]
    Postgres {
        /// Never printed.
        url: crate::Hidden,
        /// Its name, unquoted.
        schema: String,
        /// What `source.retention` asks for.
        retention: Duration,
    },
    /// A file of SQLite.
    #[cfg(feature = "sqlite")]
    Sqlite {
        /// Where it is.
        path: PathBuf,
        /// What the names of the tables begin with.
        schema: String,
    },
}

impl AnyAdmin {
    /// One row per stream and shard that a relay ever worked for.
    pub async fn status(&self) -> Result<Vec<StreamStatus>, SourceError> {
        match self {
            #[cfg(feature = "postgres")]
            AnyAdmin::Postgres { url, schema, .. } => crate::postgres::admin::status(&url.0, schema).await,
            #[cfg(feature = "sqlite")]
            AnyAdmin::Sqlite { path, schema } => crate::sqlite::admin::status(path, schema).await,
        }
    }

    /// What became of an event, in each stream; empty when the log does not have it.
    pub async fn trace(&self, event_id: &str) -> Result<Vec<Trace>, SourceError> {
        match self {
            #[cfg(feature = "postgres")]
            AnyAdmin::Postgres { url, schema, .. } => crate::postgres::admin::trace(&url.0, schema, event_id).await,
            #[cfg(feature = "sqlite")]
            AnyAdmin::Sqlite { path, schema } => crate::sqlite::admin::trace(path, schema, event_id).await,
        }
    }

    /// Looks at all that a relay needs of the database; changes nothing.
    pub async fn check(&self) -> Vec<Finding> {
        match self {
            #[cfg(feature = "postgres")]
            AnyAdmin::Postgres { url, schema, retention } => {
                crate::postgres::admin::check(&url.0, schema, *retention).await
            }
            #[cfg(feature = "sqlite")]
            AnyAdmin::Sqlite { path, schema } => crate::sqlite::admin::check(path, schema).await,
        }
    }

    /// Makes the tables, or brings them up to date; safe to repeat, and when several start at once.
    pub async fn migrate(&self) -> Result<Migrated, SourceError> {
        match self {
            #[cfg(feature = "postgres")]
            AnyAdmin::Postgres { url, schema, retention } => {
                crate::postgres::admin::migrate(&url.0, schema, *retention).await
            }
            #[cfg(feature = "sqlite")]
            AnyAdmin::Sqlite { path, schema } => {
                let (path, schema) = (path.clone(), schema.clone());
                let migrating = tokio::task::spawn_blocking(move || crate::sqlite::migrate(&path, &schema));
                let from = migrating.await.expect("the migration does not panic")?;
                Ok(Migrated { from: from as i32, to: crate::sqlite::VERSION as i32, retention_changed: false })
            }
        }
    }

    /// Writes one event in a transaction of its own.
    pub async fn publish(&self, event: &postbox::Event) -> Result<(), SourceError> {
        match self {
            #[cfg(feature = "postgres")]
            AnyAdmin::Postgres { url, schema, .. } => crate::postgres::admin::publish(&url.0, schema, event).await,
            #[cfg(feature = "sqlite")]
            AnyAdmin::Sqlite { path, schema } => crate::sqlite::admin::publish(path, schema, event).await,
        }
    }

    /// What [`AnyAdmin::migrate`] would run on an empty database.
    pub fn migrate_script(&self) -> Result<String, SourceError> {
        match self {
            #[cfg(feature = "postgres")]
            AnyAdmin::Postgres { schema, retention, .. } => crate::postgres::migrate::script(schema, *retention),
            #[cfg(feature = "sqlite")]
            AnyAdmin::Sqlite { schema, .. } => Ok(crate::sqlite::script(schema)),
        }
    }

    /// The grants for a writer and a relay with least privilege.
    pub fn roles_script(&self, roles: &Roles) -> Result<String, SourceError> {
        match self {
            #[cfg(feature = "postgres")]
            AnyAdmin::Postgres { schema, .. } => {
                crate::postgres::roles::roles_script(schema, &roles.writer, &roles.relay)
            }
            #[cfg(feature = "sqlite")]
            AnyAdmin::Sqlite { .. } => {
                Err(crate::refused("SQLite has no roles; the rights on the file and its folder are all there is"))
            }
        }
    }
}

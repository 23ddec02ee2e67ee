//! One type for all sources, and one for what is asked of their databases. Only forwards.

use crate::admin::{Finding, StreamStatus, Trace};
use postbox_engine::{Claim, ClaimLimit, LogSource, Settlement, Source, SourceError};
use std::path::PathBuf;
use std::time::Duration;

/// Any source of this build; made by [`crate::build`].
pub enum AnySource {
    #[cfg(feature = "sqlite")]
    Sqlite(LogSource<crate::sqlite::SqliteLog>),
}

/// Evaluates an expression with the inner source.
macro_rules! inner {
    ($any:expr, $source:ident => $call:expr) => {
        match $any {
            #[cfg(feature = "sqlite")]
            AnySource::Sqlite($source) => $call,
        }
    };
}

impl Source for AnySource {
    async fn acquire(&self) -> Result<Duration, SourceError> {
        inner!(self, source => source.acquire().await)
    }
    async fn renew(&self) -> Result<Duration, SourceError> {
        inner!(self, source => source.renew().await)
    }
    async fn claim(&self, limit: ClaimLimit) -> Result<Claim, SourceError> {
        inner!(self, source => source.claim(limit).await)
    }
    async fn settle(&self, settlements: &[Settlement]) -> Result<(), SourceError> {
        inner!(self, source => source.settle(settlements).await)
    }
    async fn release(&self) -> Result<(), SourceError> {
        inner!(self, source => source.release().await)
    }
}

/// What people ask of a database, whichever it is; made by [`crate::admin()`]. Connects for each question.
#[derive(Debug)]
pub enum AnyAdmin {
    #[cfg(feature = "sqlite")]
    Sqlite { path: PathBuf, schema: String },
}

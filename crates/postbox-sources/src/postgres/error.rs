//! From PostgreSQL's errors to the engine's: what to do about it, and what an operator can do. A message names the
//! statement's purpose, the server's words and the SQLSTATE; never a parameter, a row's content or a password.

use crate::postgres::connect::POOLED;
use postbox_engine::{SourceError, SourceErrorKind};
use std::error::Error as _;
use std::future::Future;
use std::time::Duration;
use tokio_postgres::error::SqlState;

/// How long one statement may take before the connection counts as lost. Longer than the longest that is sound (a
/// walk over a bulk writer's uncommitted rows), since TCP's own time-outs notice a dead peer earlier.
pub(crate) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn refused(message: impl Into<String>) -> SourceError {
    SourceError::new(SourceErrorKind::Refused, message)
}

pub(crate) fn unavailable(message: impl Into<String>) -> SourceError {
    SourceError::new(SourceErrorKind::Unavailable, message)
}

/// `doing` completes "PostgreSQL: could not ..".
pub(crate) fn failed(doing: &str, error: tokio_postgres::Error) -> SourceError {
    let (kind, message) = match error.as_db_error() {
        Some(db) => by_state(doing, db.code(), db.message()),
        None if distrusted(&error) => (
            SourceErrorKind::Refused,
            format!(
                "PostgreSQL: could not {doing}: {}. Name the authority by sslrootcert=FILE and the host as its certificate does; \
                 sslmode=verify-ca leaves the host's name out, sslmode=require checks nothing",
                chain(&error)
            ),
        ),
        None => (SourceErrorKind::Unavailable, format!("PostgreSQL: could not {doing}: {}", chain(&error))),
    };
    SourceError::new(kind, message).caused_by(error)
}

/// The same for what a server answered where tokio-postgres does not read.
pub(crate) fn answered(doing: &str, code: &str, message: &str) -> SourceError {
    let (kind, message) = by_state(doing, &SqlState::from_code(code), message);
    SourceError::new(kind, message)
}

fn causes(error: &tokio_postgres::Error) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(error.source(), |&cause| cause.source())
}

/// The error and its causes, in one line.
fn chain(error: &tokio_postgres::Error) -> String {
    causes(error).fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// The server showed a certificate that is not to be trusted.
fn distrusted(error: &tokio_postgres::Error) -> bool {
    causes(error).any(|cause| {
        let inner = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        inner.is_some_and(|e| matches!(e.downcast_ref(), Some(rustls::Error::InvalidCertificate(_))))
    })
}

fn by_state(doing: &str, code: &SqlState, message: &str) -> (SourceErrorKind, String) {
    let plain = format!("PostgreSQL: could not {doing}: {message} (SQLSTATE {})", code.code());
    let remedy = match code {
        c if *c == SqlState::UNDEFINED_TABLE
            || *c == SqlState::UNDEFINED_COLUMN
            || *c == SqlState::UNDEFINED_FUNCTION
            || *c == SqlState::INVALID_SCHEMA_NAME =>
        {
            "postbox's tables are missing there or are of another version; `postbox migrate` makes them"
        }
        c if *c == SqlState::INSUFFICIENT_PRIVILEGE => {
            "the relay's role lacks a right; `postbox migrate --print --roles WRITER,RELAY` prints the grants that it needs"
        }
        c if *c == SqlState::INVALID_PASSWORD || *c == SqlState::INVALID_AUTHORIZATION_SPECIFICATION => {
            "check user, password and pg_hba.conf"
        }
        c if *c == SqlState::INVALID_SQL_STATEMENT_NAME || *c == SqlState::DUPLICATE_PSTATEMENT => {
            return (SourceErrorKind::Refused, format!("{plain}: another's session answered, as where {POOLED}"));
        }
        c if *c == SqlState::INVALID_CATALOG_NAME => "create the database, or correct the URL",
        c if *c == SqlState::READ_ONLY_SQL_TRANSACTION => "the server takes no writes; connect to the primary",
        _ => return (SourceErrorKind::Unavailable, plain),
    };
    let kind = if *code == SqlState::READ_ONLY_SQL_TRANSACTION {
        SourceErrorKind::Unavailable // a fail-over in progress looks like this
    } else {
        SourceErrorKind::Refused
    };
    (kind, format!("{plain}. {remedy}"))
}

/// Awaits a statement, but not for ever: a connection whose peer is gone gives no answer.
pub(crate) async fn within<T>(
    limit: Duration,
    doing: &str,
    statement: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, SourceError> {
    match tokio::time::timeout(limit, statement).await {
        Ok(result) => result.map_err(|e| failed(doing, e)),
        Err(_) => Err(unavailable(format!("PostgreSQL: could not {doing}: no answer within {limit:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::answered;

    #[test]
    fn a_statement_of_another_session_names_the_pooler() {
        for code in ["26000", "42P05"] {
            let error = answered("read events", code, "prepared statement \"poll\"").message;
            assert!(error.contains(code) && error.contains("pool_mode = transaction"), "{error}");
        }
        assert!(!answered("read events", "57014", "canceled").message.contains("pool_mode"));
    }
}

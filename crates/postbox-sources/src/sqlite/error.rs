//! SQLite's errors as the relay's: the file, what was being done, and what mends it.

use postbox_engine::{SourceError, SourceErrorKind};
use rusqlite::{Error, ErrorCode};
use std::path::Path;

pub(super) fn refused(message: impl Into<String>) -> SourceError {
    SourceError::new(SourceErrorKind::Refused, message)
}

pub(super) fn unavailable(message: impl Into<String>) -> SourceError {
    SourceError::new(SourceErrorKind::Unavailable, message)
}

/// Why work inside a transaction ended: SQLite's own error, which is told with the file's name, or ours.
pub(super) enum Failure {
    Sqlite(Error),
    Source(SourceError),
}

impl From<Error> for Failure {
    fn from(e: Error) -> Failure {
        Failure::Sqlite(e)
    }
}

impl From<SourceError> for Failure {
    fn from(e: SourceError) -> Failure {
        Failure::Source(e)
    }
}

/// `doing` completes "could not ..".
pub(super) fn failed(path: &Path, doing: &str, cause: Error) -> SourceError {
    use SourceErrorKind::{Refused, Unavailable};
    let (kind, remedy) = match cause.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => {
            (Unavailable, "the disk is full, or PRAGMA max_page_count is reached. Free some space; nothing is lost")
        }
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => (
            Unavailable,
            "another connection has held the write lock all the while. Look for a long transaction, and keep transactions short",
        ),
        Some(ErrorCode::ReadOnly) => {
            (Refused, "it is read-only here. Give this user the right to write to the file and its folder")
        }
        Some(ErrorCode::NotADatabase) => (Refused, "this is no SQLite database. Correct the path"),
        Some(ErrorCode::CannotOpen | ErrorCode::PermissionDenied) => (
            Refused,
            "it cannot be opened. Correct the path, or give this user the right to write to the file and its folder \
             (SQLite keeps files ending in -wal and -shm there)",
        ),
        Some(ErrorCode::DatabaseCorrupt) => {
            (Refused, "the file is damaged. Restore a backup, or try the sqlite3 shell's .recover")
        }
        Some(ErrorCode::SystemIoFailure) => (Unavailable, "the disk failed. Look into the system's log"),
        _ => (Unavailable, "an unexpected answer of SQLite"),
    };
    SourceError::new(kind, format!("{}: could not {doing}: {remedy} ({cause})", path.display())).caused_by(cause)
}

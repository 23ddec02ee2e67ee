//! One connection to the file, and the proof that the path still leads to that file.

use super::error::{Failure, failed, refused, unavailable};
use super::schema;
use postbox_engine::SourceError;
use rusqlite::{Connection, OpenFlags, TransactionBehavior};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// How long a statement waits for another process's write lock: half of the default lease, so that a relay that waits
/// can still renew.
const PATIENCE: Duration = Duration::from_secs(5);

/// SQLite's clock, the only one that counts, in milliseconds since 1970-01-01 UTC.
pub(super) const NOW: &str = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)";

/// A connection with what its statements and its errors need to know.
pub(super) struct Database {
    pub(super) connection: Connection,
    pub(super) path: PathBuf,
    schema: String,
    file: FileId,
    /// How many tries, a millisecond apart, to get the write lock.
    patience: Arc<AtomicU32>,
}

impl Database {
    /// Opens a file that is there already, and checks that its tables are of this version.
    pub(super) fn open(path: &Path, schema: &str) -> Result<Database, SourceError> {
        let database = Database::open_unchecked(path, schema, OpenFlags::empty())?;
        match database.attempt("read its version", |c| Ok(schema::version_of(c, schema)?))? {
            schema::VERSION => Ok(database),
            0 => Err(refused(format!(
                "{}: there are no tables of postbox with the prefix {schema:?}. Run `postbox migrate`",
                path.display()
            ))),
            found => Err(refused(schema::version_message(path, found))),
        }
    }

    /// Opens the file; `OpenFlags::SQLITE_OPEN_CREATE` makes it where there is none.
    pub(super) fn open_unchecked(path: &Path, schema: &str, flags: OpenFlags) -> Result<Database, SourceError> {
        if !path.exists() && !flags.contains(OpenFlags::SQLITE_OPEN_CREATE) {
            return Err(refused(format!("{}: no such file. Run `postbox migrate` to make it", path.display())));
        }
        if path.exists() && !path.is_file() {
            return Err(refused(format!("{}: not a regular file; name another one in source.url", path.display())));
        }
        let flags = flags | OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut connection = Connection::open_with_flags(path, flags).map_err(|e| failed(path, "open it", e))?;
        // SQLite's own time-out sleeps up to 100 ms between two tries, and starves beside writers that never pause.
        let patience = Arc::new(AtomicU32::new(PATIENCE.as_millis() as u32));
        let tries_max = Arc::clone(&patience);
        let wait = move |tries: i32| {
            std::thread::sleep(Duration::from_millis(1));
            tries.unsigned_abs() < tries_max.load(Relaxed)
        };
        connection.busy_handler(Some(wait)).map_err(|e| failed(path, "set it up", e))?;
        let file = FileId::of(path).map_err(|e| unavailable(format!("{}: {e}", path.display())))?;
        Ok(Database { connection, path: path.into(), schema: schema.into(), file, patience })
    }

    /// Runs `work` with another patience for the write lock.
    pub(super) fn with_patience<T>(&self, patience: Duration, work: impl FnOnce(&Database) -> T) -> T {
        self.patience.store(patience.as_millis() as u32, Relaxed);
        let done = work(self);
        self.patience.store(PATIENCE.as_millis() as u32, Relaxed);
        done
    }

    /// Runs `work`, its error told with the file and `doing` (which completes "could not ..").
    pub(super) fn attempt<T>(
        &self,
        doing: &str,
        work: impl FnOnce(&Connection) -> Result<T, Failure>,
    ) -> Result<T, SourceError> {
        work(&self.connection).map_err(|e| match e {
            Failure::Sqlite(e) => failed(&self.path, doing, e),
            Failure::Source(e) => e,
        })
    }

    /// As `attempt`, in one transaction; an error of any kind rolls it back.
    pub(super) fn transact<T>(
        &self,
        doing: &str,
        behavior: TransactionBehavior,
        work: impl FnOnce(&Connection) -> Result<T, Failure>,
    ) -> Result<T, SourceError> {
        self.attempt(doing, |c| {
            let tx = rusqlite::Transaction::new_unchecked(c, behavior)?;
            let value = work(&tx)?;
            tx.commit()?;
            Ok(value)
        })
    }

    /// A statement written for the default prefix, for this one; `{now}` is SQLite's clock.
    pub(super) fn sql(&self, statement: &str) -> String {
        prefixed(statement, &self.schema).replace("{now}", NOW)
    }

    /// Begins a stream anew, whose cursor has passed events that the outbox never had.
    pub(super) fn restart_statement(&self, stream: &str) -> String {
        let statement = prefixed("DELETE FROM \"postbox_cursor\" WHERE stream = ", &self.schema);
        format!("{statement}'{}'", stream.replace('\'', "''"))
    }

    /// That the path still leads to the file that was opened.
    ///
    /// # Errors
    /// It was replaced or removed: what is written there now would never be seen.
    pub(super) fn check_file(&self) -> Result<(), SourceError> {
        match FileId::of(&self.path) {
            Ok(file) if file == self.file => Ok(()),
            Ok(_) => Err(unavailable(format!(
                "{}: the file was replaced by another while this relay ran; opening the new one",
                self.path.display()
            ))),
            Err(e) => Err(unavailable(format!(
                "{}: the file is gone ({e}). Put it back, or run `postbox migrate` for a new one",
                self.path.display()
            ))),
        }
    }
}

/// Puts another prefix in the place of `"postbox_`, quoted as an identifier.
pub(super) fn prefixed<'a>(statement: &'a str, schema: &str) -> Cow<'a, str> {
    if schema == "postbox" {
        return Cow::Borrowed(statement);
    }
    Cow::Owned(statement.replace("\"postbox_", &format!("\"{}_", schema.replace('"', "\"\""))))
}

/// Tells files apart that had the same name one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId(u64, u64);

impl FileId {
    #[cfg(unix)]
    fn of(path: &Path) -> std::io::Result<FileId> {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path).map(|m| FileId(m.dev(), m.ino()))
    }
    /// Windows does not let an open file be replaced.
    #[cfg(not(unix))]
    fn of(path: &Path) -> std::io::Result<FileId> {
        std::fs::metadata(path).map(|_| FileId(0, 0))
    }
}

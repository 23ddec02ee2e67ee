//! The tables: made, versioned, printed. Never dropped; safe when several processes start at once, and to repeat.

use super::connection::{Database, NOW, prefixed};
use super::error::{Failure, failed, refused};
use postbox::rusqlite::MIGRATIONS;
use postbox_engine::{SourceError, key_of};
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, TransactionBehavior};
use std::path::Path;
use std::time::{Duration, Instant};

/// The version of the tables that this build works with.
pub const VERSION: i64 = MIGRATIONS.len() as i64;

const LEDGER: &str = "CREATE TABLE IF NOT EXISTS \"postbox_migration\" (\
    version INTEGER PRIMARY KEY, checksum TEXT NOT NULL, at INTEGER NOT NULL) STRICT;";

/// How long a migration waits for the others that start at the same time.
const PATIENCE: Duration = Duration::from_secs(30);

/// Makes the file where there is none, and brings its tables to [`VERSION`], all or none. Returns the version found.
///
/// # Errors
/// Newer tables, tables that another script made, and everything SQLite has to say about the file.
pub fn migrate(path: &Path, schema: &str) -> Result<i64, SourceError> {
    let database = Database::open_unchecked(path, schema, OpenFlags::SQLITE_OPEN_CREATE)?;
    let current = |c: &Connection| {
        let journal: String = c.pragma_query_value(None, "journal_mode", |row| row.get(0))?;
        let found = version_of(c, schema)?;
        if found == VERSION {
            check_ledger(c, path, schema, found)?
        }
        Ok(found == VERSION && journal == "wal")
    };
    if database.attempt("read its version", current)? {
        return Ok(VERSION); // without the lock, which a writer may have for long
    }
    enter_wal(&database)?;
    // An event is as durable as the business data beside it: a commit is on the disk when it returns.
    // What a migration changes is on the disk when it returns.
    database.attempt("set it up", |c| Ok(c.pragma_update(None, "synchronous", "FULL")?))?;
    database.with_patience(PATIENCE, |database| apply(database, schema))
}

fn apply(database: &Database, schema: &str) -> Result<i64, SourceError> {
    database.transact("migrate", TransactionBehavior::Immediate, |c| {
        c.execute_batch(&prefixed(LEDGER, schema))?;
        let found = version_of(c, schema)?;
        check_ledger(c, &database.path, schema, found)?;
        for version in found + 1..=VERSION {
            c.execute_batch(&step(version, schema))?;
        }
        Ok(found)
    })
}

/// All statements that [`migrate`] would run on a new file, for those who run DDL themselves.
pub fn script(schema: &str) -> String {
    let mut script = format!("PRAGMA journal_mode = WAL;\nBEGIN IMMEDIATE;\n{}\n", prefixed(LEDGER, schema));
    (1..=VERSION).for_each(|version| script.push_str(&step(version, schema)));
    script.push_str("COMMIT;\n");
    script
}

/// The version of the tables in the file; zero without any.
///
/// # Errors
/// No such file, and everything SQLite has to say about it.
pub fn version(path: &Path, schema: &str) -> Result<i64, SourceError> {
    let database = Database::open_unchecked(path, schema, OpenFlags::empty())?;
    database.attempt("read its version", |c| Ok(version_of(c, schema)?))
}

pub(super) fn version_of(c: &Connection, schema: &str) -> rusqlite::Result<i64> {
    let there = c
        .query_row("SELECT 1 FROM sqlite_schema WHERE name = ?1", [format!("{schema}_migration")], |_| Ok(()))
        .optional()?;
    if there.is_none() {
        return Ok(0);
    }
    c.query_row(&prefixed("SELECT coalesce(max(version), 0) FROM \"postbox_migration\"", schema), [], |r| r.get(0))
}

pub(super) fn version_message(path: &Path, found: i64) -> String {
    let remedy = if found > VERSION { "Upgrade postbox" } else { "Run `postbox migrate`" };
    format!("{}: its tables have version {found}, this build needs {VERSION}. {remedy}", path.display())
}

/// That the scripts applied before are the ones of this build.
fn check_ledger(c: &Connection, path: &Path, schema: &str, found: i64) -> Result<(), Failure> {
    if found > VERSION {
        return Err(refused(version_message(path, found)).into());
    }
    let sql = prefixed("SELECT version, checksum FROM \"postbox_migration\" ORDER BY version", schema);
    let mut ledger = c.prepare(&sql)?;
    let mut rows = ledger.query([])?;
    while let Some(row) = rows.next()? {
        let (version, stored): (i64, String) = (row.get(0)?, row.get(1)?);
        if stored != checksum(version) {
            return Err(refused(format!(
                "{}: its tables were made by another script of version {version} (checksum {stored}, here {}). \
                 Use the build of postbox that made them, or choose another schema name",
                path.display(),
                checksum(version)
            ))
            .into());
        }
    }
    Ok(())
}

/// One version's script and its line in the ledger.
fn step(version: i64, schema: &str) -> String {
    let script = MIGRATIONS[version as usize - 1];
    let line = format!("\nINSERT INTO \"postbox_migration\" VALUES ({version}, '{}', {NOW});\n", checksum(version));
    prefixed(&(script.to_owned() + &line), schema).into_owned()
}

fn checksum(version: i64) -> String {
    format!("{:016x}", key_of("sqlite", MIGRATIONS[version as usize - 1]))
}

/// WAL lets readers and the one writer work side by side, and a commit costs one fsync. The mode stays with the file.
/// SQLite does not wait for its lock here, so this does.
fn enter_wal(database: &Database) -> Result<(), SourceError> {
    let (deadline, mut told) = (Instant::now() + PATIENCE, false);
    loop {
        let mode = database.connection.pragma_update_and_check(None, "journal_mode", "WAL", |r| r.get::<_, String>(0));
        match mode {
            Ok(mode) if mode == "wal" => return Ok(()),
            Ok(mode) => {
                return Err(refused(format!(
                    "{}: SQLite keeps journal_mode {mode} here instead of WAL. Move the file to a local disk",
                    database.path.display()
                )));
            }
            Err(e) if e.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) && Instant::now() < deadline => {
                if !std::mem::replace(&mut told, true) {
                    let file = database.path.display();
                    tracing::warn!("{file}: waiting for the write lock, which another connection holds");
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(e) => return Err(failed(&database.path, "switch it to journal_mode WAL", e)),
        }
    }
}

//! Brings a schema to the version that this program knows: one transaction, one lock, each step recorded with its
//! checksum. Run by `postbox migrate`, or by a DBA from the text of [`script`]; both leave the same record.
//! It never drops anything, and never touches a schema that it does not know. It also writes the configured retention
//! there, by which the ring of bins turns.

use super::retention;
use crate::admin::Migrated;
use postbox::schema::{Migration, POSTGRES, quote};
use postbox_engine::{SourceError, SourceErrorKind};
use std::time::Duration;
use tokio_postgres::{Client, IsolationLevel, Transaction, error::SqlState, types::Type};
use xxhash_rust::xxh3::xxh3_64;

/// The version that this program needs.
pub const NEWEST: i32 = POSTGRES.len() as i32;

/// Waiting behind a long transaction would hold up everyone who comes after; failing does not.
const LOCK_TIMEOUT: &str = "10s";

/// 'pbmi' in ASCII: the namespace of the advisory lock that lets one migration run at a time.
const LOCK_CLASS: i32 = 0x7062_6d69;

/// Applies what is missing, and has events kept for `retention`. Safe to repeat, and safe when several start at once.
///
/// # Errors
/// `Refused`: the schema is newer than this program, a recorded step has another text, the role lacks rights, the
/// server is no PostgreSQL 14 or later. `Unavailable`: the connection broke or a lock was not to be had; try again.
pub async fn migrate(client: &mut Client, schema: &str, retention: Duration) -> Result<Migrated, SourceError> {
    let schema = checked(schema)?;
    check_server(client).await?;
    let failed = |e| failed(e, schema);
    let tx = client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).read_only(false);
    let tx = tx.start().await.map_err(failed)?;
    tx.batch_execute(&prelude(schema)).await.map_err(failed)?;
    let from = recorded(&tx, schema).await?;
    for step in &POSTGRES[from as usize..] {
        tx.batch_execute(&step.sql(schema)).await.map_err(failed)?;
        tx.batch_execute(&record(step, schema)).await.map_err(failed)?;
    }
    let installed: i64 = tx.query_typed_one(&retention::installed(schema), &[]).await.map_err(failed)?.get(0);
    let differs = installed != retention::seconds(retention);
    if differs {
        tx.batch_execute(&retention::install(schema, retention)).await.map_err(failed)?;
    }
    tx.commit().await.map_err(failed)?;
    Ok(Migrated { from, to: NEWEST, retention_changed: differs && from > 0 })
}

/// All of it as SQL, for those who run DDL themselves: `psql -v ON_ERROR_STOP=1`. Safe to run again.
///
/// # Errors
/// `Refused`: no such name can be a schema's.
pub fn script(schema: &str, retention: Duration) -> Result<String, SourceError> {
    let mut text = format!(
        "-- postbox, schema {}, version {NEWEST}. One transaction, safe to run again. Run as the schema's owner-to-be:\n\
         --   psql -v ON_ERROR_STOP=1 -f FILE\nBEGIN;\n{}",
        quote(schema),
        prelude(checked(schema)?),
    );
    for step in POSTGRES {
        text += &format!(
            "DO $postbox$ BEGIN\nIF NOT EXISTS (SELECT FROM {}.migration WHERE version = {}) THEN\nEXECUTE $step$\n{}$step$;\n{}END IF;\nEND $postbox$;\n",
            quote(schema),
            step.version,
            step.sql(schema),
            record(step, schema),
        );
    }
    Ok(text + &retention::install(schema, retention) + "COMMIT;\n")
}

/// The schema's version; 0 when it is not there.
///
/// # Errors
/// As [`migrate`].
pub async fn version(client: &Client, schema: &str) -> Result<i32, SourceError> {
    let failed = |e| failed(e, schema);
    let table = format!("{}.migration", quote(checked(schema)?));
    let found = client.query_typed("SELECT to_regclass($1) IS NOT NULL", &[(&table, Type::TEXT)]).await;
    if !found.map_err(failed)?[0].get::<_, bool>(0) {
        return Ok(0);
    }
    let newest = format!("SELECT coalesce(max(version), 0) FROM {table}");
    Ok(client.query_typed(&newest, &[]).await.map_err(failed)?[0].get(0))
}

/// Whether this program can work with the schema as it is; for a relay, which migrates nothing.
///
/// # Errors
/// `Refused` when the schema is missing, older or newer, with the command that mends it.
pub async fn require(client: &Client, schema: &str) -> Result<(), SourceError> {
    match version(client, schema).await? {
        NEWEST => Ok(()),
        0 => Err(refused(format!("schema {} has no outbox: run `postbox migrate`", quote(schema)))),
        older if older < NEWEST => Err(refused(format!(
            "schema {} has version {older}, this program needs {NEWEST}: run `postbox migrate`",
            quote(schema)
        ))),
        newer => Err(too_new(schema, newer)),
    }
}

/// Everything before the steps. The session's settings must not change what the text means.
fn prelude(schema: &str) -> String {
    let (name, literal) = (quote(schema), literal(schema));
    format!(
        "SET LOCAL standard_conforming_strings = on;\n\
         SET LOCAL client_min_messages = warning;\n\
         SET LOCAL lock_timeout = '{LOCK_TIMEOUT}';\n\
         DO $postbox$ BEGIN\n\
         PERFORM pg_advisory_xact_lock({LOCK_CLASS}, hashtext({literal}));\n\
         IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = {literal}) THEN\n  CREATE SCHEMA {name};\nEND IF;\n\
         IF NOT EXISTS (SELECT FROM pg_tables WHERE schemaname = {literal} AND tablename = 'migration') THEN\n  \
         CREATE TABLE {name}.migration (version integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL,\n    \
         applied_at timestamptz NOT NULL DEFAULT now(), applied_by text NOT NULL DEFAULT current_user);\nEND IF;\n\
         END $postbox$;\n"
    )
}

fn record(step: &Migration, schema: &str) -> String {
    format!(
        "INSERT INTO {}.migration (version, name, checksum) VALUES ({}, {}, '{}');\n",
        quote(schema),
        step.version,
        literal(step.name),
        checksum(step),
    )
}

/// Of the template, so that it is the same for every schema name.
fn checksum(step: &Migration) -> String {
    format!("{:016x}", xxh3_64(step.template.as_bytes()))
}

/// The version as the record tells it, if the record is one that this program could have written.
async fn recorded(tx: &Transaction<'_>, schema: &str) -> Result<i32, SourceError> {
    let rows = format!("SELECT version, checksum FROM {}.migration ORDER BY version", quote(schema));
    let rows = tx.query_typed(&rows, &[]).await.map_err(|e| failed(e, schema))?;
    let applied: Vec<(i32, String)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    compare(&applied, schema)
}

fn compare(applied: &[(i32, String)], schema: &str) -> Result<i32, SourceError> {
    if let Some((newest, _)) = applied.last().filter(|(newest, _)| *newest > NEWEST) {
        return Err(too_new(schema, *newest));
    }
    for (step, (version, sum)) in POSTGRES.iter().zip(applied) {
        if (step.version, &checksum(step)) != (*version, sum) {
            return Err(refused(format!(
                "schema {}: the record in its table migration says version {version}, checksum {sum}; this program has \
                 version {}, checksum {}. The schema was made by another build of postbox: migrate with that build, or \
                 into a new schema",
                quote(schema),
                step.version,
                checksum(step),
            )));
        }
    }
    Ok(applied.len() as i32)
}

/// Refuses what cannot be a schema's name, or would end the quoted bodies of our functions.
pub(super) fn checked(schema: &str) -> Result<&str, SourceError> {
    let reason = match schema {
        "" => "it is empty",
        s if s.len() > 63 => "it is longer than 63 bytes, and PostgreSQL would cut it",
        s if s.contains('\0') => "it holds a zero byte",
        s if ["$postbox$", "$step$", "$body$", "$name$"].iter().any(|tag| s.contains(tag)) => "it holds a dollar quote",
        s => return Ok(s),
    };
    Err(refused(format!("{} cannot be the name of a schema: {reason}. Choose another name", quote(schema))))
}

/// Reading rests on `pg_snapshot` and `xid8`; a server that only speaks the protocol does not have them.
async fn check_server(client: &Client) -> Result<(), SourceError> {
    let sql = "SELECT version(), pg_catalog.to_regtype('pg_catalog.xid8') IS NOT NULL
        AND pg_catalog.to_regtype('pg_catalog.pg_snapshot') IS NOT NULL
        AND pg_catalog.current_setting('server_version_num')::pg_catalog.int4 >= 140000, pg_catalog.pg_is_in_recovery()";
    let rows = client.simple_query(sql).await.map_err(|e| {
        let refused =
            refused("this server is not PostgreSQL 14 or later: postbox needs its types xid8 and pg_snapshot");
        if e.as_db_error().is_some() { refused.caused_by(e) } else { failed(e, "") }
    })?;
    let row = rows.iter().find_map(|m| match m {
        tokio_postgres::SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    let row = row.expect("a SELECT without FROM has one row");
    if row.get(1) != Some("t") {
        let name = row.get(0).unwrap_or("this server");
        return Err(refused(format!(
            "{name} is not PostgreSQL 14 or later: postbox needs its types xid8 and pg_snapshot"
        )));
    }
    if row.get(2) == Some("t") {
        return Err(refused("this server is a standby: connect to the primary"));
    }
    Ok(())
}

fn too_new(schema: &str, version: i32) -> SourceError {
    refused(format!(
        "schema {} has version {version}, this program knows {NEWEST} at most: use a newer postbox",
        quote(schema)
    ))
}

fn refused(message: impl Into<String>) -> SourceError {
    SourceError::new(SourceErrorKind::Refused, message)
}

fn failed(e: tokio_postgres::Error, schema: &str) -> SourceError {
    let name = quote(schema);
    let (kind, message) = match e.as_db_error() {
        None => (SourceErrorKind::Unavailable, "the connection to PostgreSQL broke: try again".to_owned()),
        Some(db) if *db.code() == SqlState::LOCK_NOT_AVAILABLE => (
            SourceErrorKind::Unavailable,
            format!(
                "schema {name}: another transaction held a lock for {LOCK_TIMEOUT}, nothing was changed: try again"
            ),
        ),
        Some(db) if *db.code() == SqlState::INSUFFICIENT_PRIVILEGE => (
            SourceErrorKind::Refused,
            format!(
                "schema {name}: {}. Let its owner run the SQL of `postbox migrate --print`, and grant this role its \
                 rights with that of `postbox migrate --print --roles WRITER,RELAY`",
                db.message()
            ),
        ),
        Some(db) => (SourceErrorKind::Refused, format!("schema {name}: {} ({})", db.message(), db.code().code())),
    };
    SourceError::new(kind, message).caused_by(e)
}

pub(super) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn names_that_would_be_cut_or_would_break_out_are_refused() {
        for name in ["", &"x".repeat(64), "a$body$; DROP TABLE x", "a\0b"] {
            let error = script(name, DAY).expect_err("a bad name");
            assert_eq!(error.kind, SourceErrorKind::Refused, "{name}");
        }
        for name in ["postbox", r#"My-App"x"#, "it's", "$1", "ünï"] {
            assert!(script(name, DAY).expect("a good name").contains(&quote(name)));
        }
    }

    #[test]
    fn a_record_of_another_build_is_refused() {
        let ours: Vec<_> = POSTGRES.iter().map(|m| (m.version, checksum(m))).collect();
        assert_eq!(compare(&[], "s").expect("nothing there"), 0);
        assert_eq!(compare(&ours, "s").expect("our own"), NEWEST);
        let error = compare(&[(1, "0".into())], "s").expect_err("another text");
        assert!(error.message.contains("another build"), "{error}");
        let mut newer = ours;
        newer.push((NEWEST + 1, "0".into()));
        let error = compare(&newer, "s").expect_err("newer");
        assert!(error.message.contains("use a newer postbox"), "{error}");
    }

    #[test]
    fn steps_are_numbered_without_gaps_and_drop_nothing() {
        for (n, step) in POSTGRES.iter().enumerate() {
            assert_eq!(step.version, n as i32 + 1);
            let statements = step.template.lines().filter(|line| !line.trim_start().starts_with("--"));
            assert!(!statements.flat_map(str::split_whitespace).any(|word| word.eq_ignore_ascii_case("drop")));
        }
    }
}

//! What people ask of a SQLite outbox: see [`crate::admin`](mod@crate::admin). Works while no relay runs, and disturbs none that does.

use super::connection::Database;
use super::error::{Failure, refused};
use super::schema;
use crate::admin::{Finding, StreamStatus, Trace};
use postbox_engine::SourceError;
use rusqlite::{Connection, OpenFlags, Row, Transaction, TransactionBehavior, params};
use std::path::Path;
use std::time::Duration;

/// Pending events are counted one by one up to here.
const EXACT_MAX: i64 = 10_000;

/// One row per stream that a relay ever worked for.
pub async fn status(path: &Path, schema: &str) -> Result<Vec<StreamStatus>, SourceError> {
    ask(path, schema, "read the status", |database, c| {
        let sql = "SELECT stream, owner, oldest_unpublished, pending, retry, waiting, delayed, dead, oldest_held, oldest_dead,
            last_settled, last_error FROM \"postbox_lag\" ORDER BY stream";
        let mut statement = c.prepare(&database.sql(sql))?;
        let streams = statement.query_map([], stream_status)?.collect::<rusqlite::Result<Vec<_>>>()?;
        let count = |stream| count_pending(database, c, stream);
        streams.into_iter().map(count).collect()
    })
    .await
}

/// What became of an event, in each stream; empty when the log does not have it. Any spelling of the UUID will do.
pub async fn trace(path: &Path, schema: &str, event_id: &str) -> Result<Vec<Trace>, SourceError> {
    let event_id = uuid::Uuid::try_parse(event_id).map_or(event_id.to_owned(), |id| id.hyphenated().to_string());
    ask(path, schema, "trace the event", move |database, c| {
        let sql =
            "SELECT stream, state, written_at, sent_at, published_at, relay, attempts, error FROM \"postbox_trace\"
            WHERE event_id = ?1 ORDER BY stream";
        let mut statement = c.prepare(&database.sql(sql))?;
        let trace = |r: &Row<'_>| {
            Ok(Trace {
                stream: r.get::<_, Option<String>>(0)?.unwrap_or_default(),
                state: r.get(1)?,
                written_at: r.get(2)?,
                sent_at: r.get(3)?,
                published_at: r.get(4)?,
                relay: r.get(5)?,
                attempts: r.get(6)?,
                error: r.get(7)?,
            })
        };
        Ok(statement.query_map([event_id], trace)?.collect::<rusqlite::Result<_>>()?)
    })
    .await
}

/// Writes one event in a transaction of its own; when it returns, the event is on the disk.
pub async fn publish(path: &Path, schema: &str, event: &postbox::Event) -> Result<(), SourceError> {
    let (outbox, event) = (postbox::rusqlite::Outbox::new(schema), event.clone());
    ask(path, schema, "write the event", move |_, c| {
        c.pragma_update(None, "synchronous", "FULL")?;
        let tx = Transaction::new_unchecked(c, TransactionBehavior::Immediate)?;
        outbox.publish(&tx, &event).map_err(|e| refused(e.to_string()).caused_by(e))?;
        Ok(tx.commit()?)
    })
    .await
}

/// Looks at all that a relay needs of the file; changes nothing.
pub async fn check(path: &Path, schema: &str) -> Vec<Finding> {
    let (file, prefix) = (path.to_owned(), schema.to_owned());
    let checked = tokio::task::spawn_blocking(move || check_file(&file, &prefix)).await;
    checked.unwrap_or_else(|e| vec![bad(format!("{}: {e}", path.display()), None)])
}

fn check_file(path: &Path, schema: &str) -> Vec<Finding> {
    let database = match Database::open_unchecked(path, schema, OpenFlags::empty()) {
        Ok(database) => database,
        Err(e) => return vec![bad(e.to_string(), Some("postbox migrate"))],
    };
    let shown = path.display();
    let mut findings = vec![good(format!("{shown}: opened, SQLite {}", rusqlite::version()))];
    let looked = database.attempt("check it", |c| {
        let found = schema::version_of(c, schema)?;
        if found != schema::VERSION {
            let remedy = if found > schema::VERSION { None } else { Some("postbox migrate") };
            findings.push(bad(schema::version_message(path, found), remedy));
            return Ok(());
        }
        findings.push(good(format!("tables {schema}_*: version {found}")));
        let mode: String = c.query_row("PRAGMA journal_mode", [], |r| r.get(0))?;
        findings.push(if mode == "wal" {
            good("journal_mode: wal")
        } else {
            bad(format!("journal_mode: {mode}; readers and writers block each other"), Some("postbox migrate"))
        });
        c.execute_batch("BEGIN IMMEDIATE; ROLLBACK")?;
        findings.push(good(format!("{shown}: may be written")));
        for (stream, wrong) in streams_ahead(&database, c, schema)? {
            findings.push(match wrong {
                None => good(format!("stream {stream}: its cursor lies within the outbox")),
                Some(remedy) => bad(
                    format!("stream {stream}: its cursor is beyond the newest event; the outbox was made anew"),
                    Some(&remedy),
                ),
            });
        }
        Ok(())
    });
    if let Err(e) = looked {
        findings.push(bad(e.to_string(), None));
    }
    findings
}

/// Each stream, and the statement that mends its cursor where that has passed events never written.
fn streams_ahead(database: &Database, c: &Connection, schema: &str) -> Result<Vec<(String, Option<String>)>, Failure> {
    let sql = "SELECT stream, max(last_id) > (SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = ?1)
        FROM \"postbox_cursor\" GROUP BY stream";
    let mut statement = c.prepare(&database.sql(sql))?;
    let rows = statement.query_map([format!("{schema}_outbox")], |r| Ok((r.get(0)?, r.get(1)?)))?;
    let mut streams = Vec::new();
    for row in rows {
        let (stream, ahead): (String, bool) = row?;
        let remedy = database.restart_statement(&stream);
        streams.push((stream, ahead.then_some(remedy)));
    }
    Ok(streams)
}

fn stream_status(r: &Row<'_>) -> rusqlite::Result<StreamStatus> {
    let age = |column: usize| -> rusqlite::Result<Option<Duration>> {
        Ok(r.get::<_, Option<f64>>(column)?.map(|seconds| Duration::from_secs_f64(seconds.max(0.0))))
    };
    Ok(StreamStatus {
        stream: r.get(0)?,
        shard: 0, // one writer at a time needs no more
        owner: r.get(1)?,
        oldest_unpublished: age(2)?,
        pending: r.get::<_, i64>(3)?.max(0) as u64,
        pending_is_estimate: true,
        retry: r.get::<_, i64>(4)? as u64,
        waiting: r.get::<_, i64>(5)? as u64,
        delayed: r.get::<_, i64>(6)? as u64,
        dead: r.get::<_, i64>(7)? as u64,
        oldest_held: age(8)?,
        oldest_dead: age(9)?,
        last_settled: age(10)?,
        last_error: r.get(11)?,
    })
}

/// The view estimates by ids; few events are counted.
fn count_pending(database: &Database, c: &Connection, stream: StreamStatus) -> Result<StreamStatus, Failure> {
    let sql = "SELECT count(*) FROM (SELECT 1 FROM \"postbox_outbox\" o WHERE o.id > coalesce(
        (SELECT max(c.last_id) FROM \"postbox_cursor\" c WHERE c.stream = ?1), 0) LIMIT ?2 + 1)";
    let counted: i64 = c.query_row(&database.sql(sql), params![stream.stream, EXACT_MAX], |r| r.get(0))?;
    Ok(if counted > EXACT_MAX {
        stream
    } else {
        StreamStatus { pending: counted as u64, pending_is_estimate: false, ..stream }
    })
}

/// One question, on a connection of its own, off the async threads.
async fn ask<T: Send + 'static>(
    path: &Path,
    schema: &str,
    doing: &'static str,
    question: impl FnOnce(&Database, &Connection) -> Result<T, Failure> + Send + 'static,
) -> Result<T, SourceError> {
    let (path, schema) = (path.to_owned(), schema.to_owned());
    let answered = tokio::task::spawn_blocking(move || {
        let database = Database::open(&path, &schema)?;
        database.attempt(doing, |c| question(&database, c))
    });
    answered.await.expect("the question does not panic")
}

fn good(what: impl Into<String>) -> Finding {
    Finding { ok: true, what: what.into(), remedy: None }
}

fn bad(what: impl Into<String>, remedy: Option<&str>) -> Finding {
    Finding { ok: false, what: what.into(), remedy: remedy.map(Into::into) }
}

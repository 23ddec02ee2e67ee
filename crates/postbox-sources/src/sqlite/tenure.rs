//! One tenure of a stream's lease: taking and proving it, recording progress under it. Every record is one IMMEDIATE
//! transaction, fenced by the lease row as this tenure wrote it last; a lost lease changes nothing.

use super::connection::Database;
use super::error::{Failure, refused, unavailable};
use super::retention::Retention;
use super::{Options, page};
use postbox_engine::{Changes, ClaimLimit, HeldPage, HeldQuery, HeldState, Loaded, LogPage, SourceError};
use rusqlite::{Connection, OptionalExtension, TransactionBehavior::Immediate, params};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

pub(super) struct Tenure {
    pub(super) database: Database,
    pub(super) options: Arc<Options>,
    pub(super) lease: Lease,
    /// The greatest id returned by `read`.
    pub(super) position: i64,
    /// `PRAGMA data_version` when nothing was left to read; while it stays the same nobody else has committed.
    pub(super) drained_at: Option<i64>,
    pub(super) retention: Retention,
}

/// The lease row as we wrote it last. A row that differs in any column is not ours any more, or comes from an older
/// copy of the database.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Lease {
    epoch: i64,
    owner: Option<String>,
    until: Option<i64>,
}

impl Tenure {
    /// `mine`: the epoch of our last tenure, which we may prolong before its lease ends. `Err` inside: how long
    /// another relay holds it.
    pub(super) fn begin(options: &Arc<Options>, mine: Option<i64>) -> Result<Result<Tenure, Duration>, SourceError> {
        let database = Database::open(&options.path, &options.schema)?;
        // A settle that a power cut takes back is a duplicate, never a loss: the log is cut at one point, and what
        // the cursor has passed was written before it. So the relay holds the write lock over no fsync.
        database.attempt("set it up", |c| Ok(c.pragma_update(None, "synchronous", "NORMAL")?))?;
        // A relay that stands by needs no write lock to see that it must.
        let held = |c: &Connection| others_lease(&database, c, options, mine);
        if let Some(remaining) = database.attempt("look at the lease", held)? {
            return Ok(Err(remaining));
        }
        let taken = database.transact("take the lease", Immediate, |c| {
            if let Some(remaining) = held(c)? {
                return Ok(Err(remaining));
            }
            let now = clock(&database, c)?;
            let found = stored_lease(&database, c, &options.stream)?;
            let position = trusted_cursor(&database, c, options)?;
            let lease = Lease {
                epoch: found.map_or(0, |lease| lease.epoch) + 1,
                owner: Some(options.relay.clone()),
                until: Some(now + options.lease.as_millis() as i64),
            };
            write_lease(&database, c, &options.stream, &lease)?;
            Ok(Ok((lease, position)))
        })?;
        Ok(taken.map(|(lease, position)| Tenure {
            database,
            options: Arc::clone(options),
            lease,
            position,
            drained_at: None,
            retention: Retention::default(),
        }))
    }

    pub(super) fn epoch(&self) -> i64 {
        self.lease.epoch
    }

    pub(super) fn renew(&mut self, trouble: Option<&str>) -> Result<Duration, SourceError> {
        self.database.check_file()?;
        let renewed = self.database.transact("renew the lease", Immediate, |c| {
            self.fence(c)?;
            let now = clock(&self.database, c)?;
            let lease = Lease { until: Some(now + self.options.lease.as_millis() as i64), ..self.lease.clone() };
            write_lease(&self.database, c, &self.options.stream, &lease)?;
            self.write_trouble(c, trouble)?;
            Ok(lease)
        })?;
        self.lease = renewed;
        Ok(self.options.lease)
    }

    /// Gives the lease back; harmless when another relay has it already.
    pub(super) fn end(self, trouble: Option<&str>) -> Result<(), SourceError> {
        self.database.transact("give the lease back", Immediate, |c| {
            if stored_lease(&self.database, c, &self.options.stream)?.as_ref() == Some(&self.lease) {
                let free = Lease { owner: None, until: None, ..self.lease.clone() };
                write_lease(&self.database, c, &self.options.stream, &free)?;
                self.write_trouble(c, trouble)?;
            }
            Ok(())
        })
    }

    fn write_trouble(&self, c: &Connection, trouble: Option<&str>) -> Result<(), Failure> {
        let sql = "UPDATE \"postbox_lease\" SET error = ?2 WHERE stream = ?1 AND error IS NOT ?2";
        c.prepare(&self.database.sql(sql))?.execute(params![self.options.stream, trouble])?;
        Ok(())
    }

    pub(super) fn record(&mut self, changes: &Changes<i64>) -> Result<(), SourceError> {
        self.database.transact("record what was sent", Immediate, |c| {
            self.fence(c)?;
            if let Some(mark) = changes.mark {
                let sql =
                    "INSERT INTO \"postbox_cursor\" (stream, last_id, epoch, relay, sent_at, at) VALUES (?1, ?2, ?3, ?4, {now} - ?5, {now})
                    ON CONFLICT DO NOTHING";
                let options = &self.options;
                c.prepare(&self.database.sql(sql))?.execute(params![
                    options.stream,
                    mark,
                    self.lease.epoch,
                    options.relay,
                    age(changes.sent),
                ])?;
            }
            self.record_held(c, changes)
        })
    }

    fn record_held(&self, c: &Connection, changes: &Changes<i64>) -> Result<(), Failure> {
        if changes.held.is_empty() {
            return Ok(());
        }
        let sql = "INSERT INTO \"postbox_held\" (stream, id, key, state, attempts, due_at, error, relay, sent_at, at)
            VALUES (?1, ?2, ?3, ?4, ?5, {now} + ?6, ?7, ?8, {now} - ?9, {now})
            ON CONFLICT (stream, id) DO UPDATE SET state = excluded.state, attempts = excluded.attempts,
              due_at = excluded.due_at, error = coalesce(excluded.error, error), relay = excluded.relay,
              sent_at = coalesce(excluded.sent_at, sent_at), at = excluded.at";
        let mut insert = c.prepare(&self.database.sql(sql))?;
        for held in &changes.held {
            let timed = matches!(held.state, HeldState::Retry | HeldState::Delayed | HeldState::Replay);
            insert.execute(params![
                self.options.stream,
                held.event.id(),
                held.event.key() as i64,
                held.state.name(),
                held.attempts,
                timed.then(|| held.due.as_micros().div_ceil(1000) as i64),
                held.error.as_deref(),
                self.options.relay,
                age(held.sent),
            ])?;
        }
        Ok(())
    }

    pub(super) fn load(&self) -> Result<Loaded, SourceError> {
        self.database.attempt("read the held events", |c| page::load(&self.database, c, &self.options))
    }

    pub(super) fn held(&self, query: &HeldQuery) -> Result<HeldPage, SourceError> {
        self.database.attempt("read the held events", |c| page::held(&self.database, c, &self.options.stream, query))
    }

    /// The next page; `None` when there is none yet.
    pub(super) fn read(&mut self, limit: ClaimLimit) -> Result<Option<LogPage<i64>>, SourceError> {
        let read = "read new events";
        let version = self
            .database
            .attempt(read, |c| Ok(c.prepare("PRAGMA data_version")?.query_row([], |r| r.get::<_, i64>(0))?))?;
        if self.drained_at == Some(version) {
            self.database.check_file()?;
            return Ok(None);
        }
        let page = self.database.transact(read, rusqlite::TransactionBehavior::Deferred, |c| {
            self.fence(c)?;
            page::read(&self.database, c, self.position, limit)
        })?;
        self.position = page.mark;
        if page.events.is_empty() {
            self.drained_at = Some(version);
            return Ok(None);
        }
        self.drained_at = None;
        Ok(Some(page))
    }

    /// That the stored lease is the one we wrote last.
    pub(super) fn fence(&self, c: &Connection) -> Result<(), Failure> {
        let found = stored_lease(&self.database, c, &self.options.stream)?;
        let Some(found) = found.filter(|found| *found != self.lease) else {
            return Ok(());
        };
        if (found.epoch, &found.owner) != (self.lease.epoch, &self.lease.owner) {
            return Err(SourceError::lease_lost().into());
        }
        Err(unavailable(format!(
            "{}: the database was put back to an earlier state while this relay ran; reading anew from its cursor",
            self.options.path.display()
        ))
        .into())
    }
}

/// How long another relay holds the lease, if one does.
fn others_lease(
    database: &Database,
    c: &Connection,
    options: &Options,
    mine: Option<i64>,
) -> Result<Option<Duration>, Failure> {
    let Some(Lease { epoch, owner: Some(owner), until: Some(until) }) = stored_lease(database, c, &options.stream)?
    else {
        return Ok(None);
    };
    let now = clock(database, c)?;
    let ours = owner == options.relay && Some(epoch) == mine;
    Ok((until > now && !ours).then(|| millis(until - now)))
}

fn clock(database: &Database, c: &Connection) -> Result<i64, Failure> {
    Ok(c.query_row(&database.sql("SELECT {now}"), [], |r| r.get(0))?)
}

fn stored_lease(database: &Database, c: &Connection, stream: &str) -> Result<Option<Lease>, Failure> {
    let sql = database.sql("SELECT epoch, owner, until FROM \"postbox_lease\" WHERE stream = ?1");
    let lease = |r: &rusqlite::Row<'_>| Ok(Lease { epoch: r.get(0)?, owner: r.get(1)?, until: r.get(2)? });
    Ok(c.prepare(&sql)?.query_row([stream], lease).optional()?)
}

fn write_lease(database: &Database, c: &Connection, stream: &str, lease: &Lease) -> Result<(), Failure> {
    let sql = "INSERT INTO \"postbox_lease\" (stream, epoch, owner, until) VALUES (?1, ?2, ?3, ?4)
        ON CONFLICT (stream) DO UPDATE SET epoch = excluded.epoch, owner = excluded.owner, until = excluded.until";
    c.prepare(&database.sql(sql))?.execute(params![stream, lease.epoch, lease.owner, lease.until])?;
    Ok(())
}

/// The stored cursor, unless the outbox was emptied of its numbers (dropped and made anew): its new events would have
/// ids that the cursor has passed, and would never be sent.
fn trusted_cursor(database: &Database, c: &Connection, options: &Options) -> Result<i64, Failure> {
    let sql = database.sql("SELECT coalesce(max(last_id), 0) FROM \"postbox_cursor\" WHERE stream = ?1");
    let cursor: i64 = c.query_row(&sql, [&options.stream], |r| r.get(0))?;
    let sql = "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = ?1";
    let newest: i64 = c.query_row(sql, [format!("{}_outbox", options.schema)], |r| r.get(0))?;
    if cursor <= newest {
        return Ok(cursor);
    }
    Err(refused(format!(
        "{}: stream {:?} has passed event {cursor}, but the newest event ever written is {newest}: the outbox was made \
         anew. To send what is in it from its beginning, run {}",
        database.path.display(),
        options.stream,
        database.restart_statement(&options.stream),
    ))
    .into())
}

/// Milliseconds since the event was handed over, by which it was: rounded down.
fn age(sent: Option<Instant>) -> Option<i64> {
    sent.map(|sent| i64::try_from(sent.elapsed().as_millis()).unwrap_or(i64::MAX))
}

pub(super) fn millis(ms: i64) -> Duration {
    Duration::from_millis(ms.max(0) as u64)
}

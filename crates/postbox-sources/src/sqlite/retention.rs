//! What is old goes, in small pieces: published events a retention after every stream has passed them, and cursor rows
//! that tell nothing any more. Never an event that is held, and never one that a stream has not passed.

use super::connection::Database;
use super::error::Failure;
use postbox_engine::SourceError;
use rusqlite::{Connection, TransactionBehavior, params};
use std::time::{Duration, Instant};

/// Rows looked at in one piece: a few milliseconds of the write lock, between two commits of the application.
const PIECE: i64 = 500;
/// Between two pieces while there is more to do.
const BUSY: Duration = Duration::from_millis(20);
/// Between two rounds.
const IDLE: Duration = Duration::from_secs(60);
/// After a piece that failed.
const FAILED: Duration = Duration::from_secs(10);
/// How long a piece waits for the write lock: new events, and the lease, wait behind it.
const PATIENCE: Duration = Duration::from_millis(50);
/// How long each settled move keeps its own cursor row, in milliseconds; then one a second is enough to tell when an
/// event was sent.
const EXACT: i64 = 5 * 60 * 1000;

/// Where the round stands.
#[derive(Default)]
pub(super) struct Retention {
    next: Option<Instant>,
    /// Events up to here were looked at in this round.
    swept: i64,
    /// Cursor rows up to here were thinned.
    thinned: i64,
}

impl Retention {
    /// When `piece` wants to be called again.
    pub(super) fn due(&self) -> Option<Instant> {
        self.next
    }

    /// One piece. A failure costs nothing: the rows stay, and the next piece tries again.
    pub(super) fn piece(&mut self, database: &Database, stream: &str, keep: Option<Duration>) {
        let done = database.with_patience(PATIENCE, |database| self.delete(database, stream, keep));
        let pause = match done {
            Ok((swept, thinned)) => {
                self.swept = swept.unwrap_or_default();
                self.thinned = thinned.unwrap_or(self.thinned);
                if swept.is_some() || thinned.is_some() { BUSY } else { IDLE }
            }
            Err(error) => {
                tracing::warn!(%error, "retention");
                FAILED
            }
        };
        self.next = Some(Instant::now() + pause);
    }

    fn delete(
        &self,
        database: &Database,
        stream: &str,
        keep: Option<Duration>,
    ) -> Result<(Option<i64>, Option<i64>), SourceError> {
        database.transact("delete old events", TransactionBehavior::Immediate, |c| {
            let swept = keep.map_or(Ok(None), |keep| sweep(database, c, self.swept, keep))?;
            Ok((swept, thin(database, c, stream, self.thinned)?))
        })
    }
}

/// Looks at the next events behind `from` and deletes what may go. Returns how far it came; `None` at the end.
fn sweep(database: &Database, c: &Connection, from: i64, keep: Duration) -> Result<Option<i64>, Failure> {
    // What the slowest stream had passed a retention ago.
    let sql = "SELECT coalesce(min(passed), 0) FROM (SELECT coalesce((
        SELECT c.last_id FROM \"postbox_cursor\" c WHERE c.stream = l.stream AND c.at <= {now} - ?1
        ORDER BY c.at DESC, c.last_id DESC LIMIT 1), 0) AS passed FROM \"postbox_lease\" l)";
    let keep = i64::try_from(keep.as_millis()).unwrap_or(i64::MAX / 2);
    let bound: i64 = c.prepare(&database.sql(sql))?.query_row([keep], |r| r.get(0))?;
    let sql = "SELECT max(id), count(*) FROM (SELECT id FROM \"postbox_outbox\" WHERE id > ?1 AND id <= ?2 ORDER BY id LIMIT ?3)";
    let (last, count): (Option<i64>, i64) =
        c.prepare(&database.sql(sql))?.query_row(params![from, bound, PIECE], |r| Ok((r.get(0)?, r.get(1)?)))?;
    let Some(last) = last else { return Ok(None) };
    let sql = "DELETE FROM \"postbox_outbox\" WHERE id > ?1 AND id <= ?2 AND NOT EXISTS (
        SELECT 1 FROM \"postbox_lease\" l JOIN \"postbox_held\" h ON h.stream = l.stream AND h.id = \"postbox_outbox\".id
        WHERE h.state <> 'done')";
    c.prepare(&database.sql(sql))?.execute(params![from, last])?;
    let sql = "DELETE FROM \"postbox_held\" WHERE state = 'done' AND stream IN (SELECT stream FROM \"postbox_lease\")
        AND id > ?1 AND id <= ?2 AND NOT EXISTS (SELECT 1 FROM \"postbox_outbox\" o WHERE o.id = \"postbox_held\".id)";
    c.prepare(&database.sql(sql))?.execute(params![from, last])?;
    // What tells when they were passed; those that are held tell it themselves. A stream's newest row is its cursor, and
    // stays: it is not below the bound.
    let sql = "DELETE FROM \"postbox_cursor\" WHERE (stream, last_id) IN (
        SELECT c.stream, c.last_id FROM \"postbox_lease\" l JOIN \"postbox_cursor\" c ON c.stream = l.stream
        WHERE c.last_id < ?1 LIMIT ?2)";
    c.prepare(&database.sql(sql))?.execute(params![last, PIECE])?;
    Ok((count == PIECE).then_some(last))
}

/// Of the cursor rows that are older than [`EXACT`], leaves the last of each second. Returns how far it came; `None`
/// at the end.
fn thin(database: &Database, c: &Connection, stream: &str, from: i64) -> Result<Option<i64>, Failure> {
    let sql = "SELECT max(last_id), count(*) FROM (SELECT last_id FROM \"postbox_cursor\"
        WHERE stream = ?1 AND last_id > ?2 AND at < {now} - ?3 ORDER BY last_id LIMIT ?4)";
    let (last, count): (Option<i64>, i64) = c
        .prepare(&database.sql(sql))?
        .query_row(params![stream, from, EXACT, PIECE], |r| Ok((r.get(0)?, r.get(1)?)))?;
    let Some(last) = last else { return Ok(None) };
    let sql = "DELETE FROM \"postbox_cursor\" WHERE stream = ?1 AND last_id IN (
        SELECT c.last_id FROM \"postbox_cursor\" c JOIN \"postbox_cursor\" n ON n.stream = ?1 AND n.last_id = (
          SELECT min(m.last_id) FROM \"postbox_cursor\" m WHERE m.stream = ?1 AND m.last_id > c.last_id)
        WHERE c.stream = ?1 AND c.last_id > ?2 AND c.last_id <= ?3 AND c.at / 1000 = n.at / 1000 AND c.epoch = n.epoch)";
    c.prepare(&database.sql(sql))?.execute(params![stream, from, last])?;
    Ok((count == PIECE).then_some(last))
}

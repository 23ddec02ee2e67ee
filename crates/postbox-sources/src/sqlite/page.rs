//! Events read from the outbox: new ones behind the cursor, held ones whose turn has come. One row that cannot be
//! decoded never fails its page.

use super::Options;
use super::connection::Database;
use super::error::Failure;
use super::tenure::millis;
use postbox_engine::{
    ClaimLimit, DeadPolicy, EventParts, HeldEvent, HeldPage, HeldQuery, Loaded, LogPage, PageBuilder,
};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension, Row, params};
use std::borrow::Cow;
use std::time::Duration;

/// The columns of `push`, of the table alias `o`.
const COLUMNS: &str =
    "o.id, o.event_id, o.aggregate_type, o.aggregate_id, o.aggregate_seq, o.event_type, o.schema_version,
    o.payload, o.payload_binary, o.content_type, o.headers, o.destination, o.created_at";
/// The first column behind them.
const NEXT: usize = 13;
/// The event of the held row `h` is still there.
const EXISTS: &str = "EXISTS (SELECT 1 FROM \"postbox_outbox\" e WHERE e.id = h.id)";

/// The events behind `position`, at most `limit`, at least one where there is one.
pub(super) fn read(
    database: &Database,
    c: &Connection,
    position: i64,
    limit: ClaimLimit,
) -> Result<LogPage<i64>, Failure> {
    let sql = format!(
        "SELECT {COLUMNS}, o.available_at - {{now}} FROM \"postbox_outbox\" o WHERE o.id > ?1 ORDER BY o.id LIMIT ?2"
    );
    let mut statement = c.prepare(&database.sql(&sql))?;
    let mut rows = statement.query(params![position, limit.events_max as i64])?;
    let (mut page, mut delays, mut mark) = (PageBuilder::default(), Vec::new(), position);
    while let Some(row) = rows.next()? {
        if let Some(delay) = row.get::<_, Option<i64>>(NEXT)?.filter(|ms| *ms > 0) {
            delays.push((page.len() as u32, millis(delay)));
        }
        mark = push(&mut page, row)?;
        if page.bytes() >= limit.bytes_max {
            break;
        }
    }
    Ok(LogPage { events: page.finish(), delays, mark })
}

/// The ids of the held events that may be sent now. The waiting ones are cut per key, so that a key with many of them costs
/// no more than one with a few; of the others those that are due are walked, by an index that SQLite does not always
/// choose by itself. A row whose event somebody deleted holds up nobody.
fn ready() -> String {
    format!(
        "WITH skip AS MATERIALIZED (SELECT value AS id FROM json_each(?3)),
         ready AS (
           SELECT h.id FROM \"postbox_held\" h INDEXED BY \"postbox_held_due\"
           WHERE h.stream = ?1 AND h.due_at <= {{now}} AND h.id NOT IN (SELECT id FROM skip) AND {EXISTS}
           UNION ALL
           SELECT r.id FROM json_each(?4) k CROSS JOIN \"postbox_held\" r ON r.stream = ?1 AND r.id IN (
             SELECT h.id FROM \"postbox_held\" h WHERE h.stream = ?1 AND h.state = 'waiting' AND h.key = k.value
               AND h.id NOT IN (SELECT id FROM skip) AND {EXISTS} ORDER BY h.id LIMIT ?2))
         SELECT h.id, h.attempts, h.state FROM (SELECT id FROM ready ORDER BY id LIMIT ?2) r
         CROSS JOIN \"postbox_held\" h ON h.stream = ?1 AND h.id = r.id ORDER BY r.id"
    )
}

/// When the next held event is due.
fn due() -> String {
    format!(
        "SELECT h.due_at - {{now}} FROM \"postbox_held\" h WHERE h.stream = ?1 AND h.due_at IS NOT NULL
         AND h.id NOT IN (SELECT value FROM json_each(?2)) AND {EXISTS} ORDER BY h.due_at LIMIT 1"
    )
}

/// Held events that may be sent now, in id order, at most `query.limit`. Their ids first: to sort whole events, SQLite
/// would keep all of them in memory.
pub(super) fn held(database: &Database, c: &Connection, stream: &str, query: &HeldQuery) -> Result<HeldPage, Failure> {
    let event = format!("SELECT {COLUMNS} FROM \"postbox_outbox\" o WHERE o.id = ?1");
    let mut event = c.prepare(&database.sql(&event))?;
    let mut statement = c.prepare(&database.sql(&ready()))?;
    let limit = query.limit.events_max as i64;
    let mut rows = statement.query(params![stream, limit, json(&query.skip), json_keys(&query.open)])?;
    let (mut one, mut events, mut bytes) = (PageBuilder::default(), Vec::new(), 0);
    while let Some(row) = rows.next()? {
        event.query_row([row.get::<_, i64>(0)?], |o| Ok(push(&mut one, o)))??;
        let (attempts, state) = (row.get(1)?, row.get_ref(2)?.as_str().unwrap_or_default().parse()?);
        bytes += one.bytes();
        // Each in a page of its own: one may stay long in memory, and must keep no others there.
        events.extend(one.finish().into_iter().map(|event| HeldEvent { event, attempts, state }));
        if bytes >= query.limit.bytes_max {
            break;
        }
    }
    let skip: Vec<i64> = query.skip.iter().copied().chain(events.iter().map(|h| h.event.id())).collect();
    let next_due = next_due(database, c, stream, &skip)?;
    Ok(HeldPage { events, next_due })
}

/// The keys in trouble, and when the first held event is due.
pub(super) fn load(database: &Database, c: &Connection, options: &Options) -> Result<Loaded, Failure> {
    let dead = if options.policy == DeadPolicy::Block { ", 'dead'" } else { "" };
    let sql = format!(
        "SELECT h.key, count(*), max(h.state <> 'waiting') FROM \"postbox_held\" h
         WHERE h.stream = ?1 AND h.state IN ('retry', 'waiting'{dead})
           AND {EXISTS} GROUP BY h.key"
    );
    let mut statement = c.prepare(&database.sql(&sql))?;
    let mut rows = statement.query([&options.stream])?;
    let mut keys = Vec::new();
    while let Some(row) = rows.next()? {
        keys.push((row.get::<_, i64>(0)? as u64, row.get(1)?, row.get(2)?));
    }
    Ok(Loaded { keys, next_due: next_due(database, c, &options.stream, &[])? })
}

fn next_due(database: &Database, c: &Connection, stream: &str, skip: &[i64]) -> Result<Option<Duration>, Failure> {
    let mut statement = c.prepare(&database.sql(&due()))?;
    let due: Option<i64> = statement.query_row(params![stream, json(skip)], |r| r.get(0)).optional()?;
    Ok(due.map(millis))
}

/// Copies one row into the page; returns its id.
fn push(page: &mut PageBuilder, row: &Row<'_>) -> Result<i64, Failure> {
    let id: i64 = row.get(0)?;
    let mut wrong = None;
    let mut text = |column: usize, name: &'static str| -> Result<Cow<'_, str>, Failure> {
        let ValueRef::Text(bytes) = row.get_ref(column)? else { return Ok(Cow::Borrowed("")) };
        let text = String::from_utf8_lossy(bytes);
        if matches!(text, Cow::Owned(_)) {
            wrong = Some(name);
        }
        Ok(text)
    };
    let event_id = text(1, "event_id")?;
    let aggregate_type = text(2, "aggregate_type")?;
    let aggregate_id = text(3, "aggregate_id")?;
    let event_type = text(5, "event_type")?;
    let content_type = text(9, "content_type")?;
    let headers = text(10, "headers")?;
    let destination = text(11, "destination")?;
    let unreadable = wrong.map(|name| format!("the column {name} of event {id} is not valid UTF-8"));
    let payload = match (row.get_ref(7)?, row.get_ref(8)?) {
        (ValueRef::Text(bytes), _) | (_, ValueRef::Blob(bytes)) => Some(bytes),
        _ => None,
    };
    page.push(&EventParts {
        id,
        event_id: uuid::Uuid::try_parse(&event_id).unwrap_or_default().into_bytes(), // a CHECK of the table
        aggregate_type: &aggregate_type,
        aggregate_id: &aggregate_id,
        aggregate_seq: row.get(4)?,
        event_type: &event_type,
        schema_version: row.get(6)?,
        payload,
        content_type: &content_type,
        headers: &headers,
        destination: matches!(row.get_ref(11)?, ValueRef::Text(_)).then_some(&*destination),
        created_at: row.get::<_, i64>(12)?.saturating_mul(1000),
        unreadable: unreadable.as_deref(),
    });
    Ok(id)
}

fn json(ids: &[i64]) -> String {
    let ids: Vec<String> = ids.iter().map(i64::to_string).collect();
    format!("[{}]", ids.join(","))
}

/// Keys as the table stores them: the same bits, signed.
fn json_keys(keys: &[u64]) -> String {
    json(&keys.iter().map(|key| *key as i64).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Held rows may be many, and most of them wait: none that is not asked for is looked at, whatever the statistics say.
    #[test]
    fn only_what_is_due_or_may_go_is_walked() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("shop.db");
        crate::sqlite::migrate(&path, "odd").expect("migrated");
        let misled = "ANALYZE; INSERT INTO sqlite_stat1 VALUES ('odd_held', 'odd_held_due', '9000000 9000000 9000000'),
            ('odd_held', 'odd_held_state', '9000000 9000000 9000000 9000000 1'), ('odd_held', 'odd_held', '9000000 1 1')";
        for statistics in ["", misled] {
            let database = Database::open(&path, "odd").expect("opened");
            database.connection.execute_batch(statistics).expect("analysed");
            let database = Database::open(&path, "odd").expect("opened");
            let plan = |sql: &str| {
                let mut explained = database
                    .connection
                    .prepare(&database.sql(&format!("EXPLAIN QUERY PLAN {sql}")))
                    .expect("a statement");
                let steps =
                    explained.raw_query().mapped(|row| row.get::<_, String>(3)).map(|step| step.expect("a text"));
                steps.filter(|step| step.contains(" h ")).collect::<Vec<_>>()
            };
            let due = "SEARCH h USING COVERING INDEX odd_held_due (stream=? AND due_at";
            let state = "SEARCH h USING COVERING INDEX odd_held_state (stream=? AND state=? AND key=?)";
            let taken = "SEARCH h USING PRIMARY KEY (stream=? AND id=?)";
            assert_eq!(plan(&ready()), [&format!("{due}<?)"), state, taken], "{statistics}");
            assert_eq!(plan(&super::due()), [format!("{due}>?)")], "{statistics}");
        }
    }
}

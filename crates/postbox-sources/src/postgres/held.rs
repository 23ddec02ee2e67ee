//! Held events: those that the cursor has passed but that were not published then. The rows say why and since when; the
//! event itself is read from the outbox by its id. Which of them may go is the backlog's decision, not made here.

use crate::postgres::connect::Session;
use crate::postgres::error::{STATEMENT_TIMEOUT, within};
use crate::postgres::row;
use crate::postgres::sql::HeldSql;
use postbox_engine::{ClaimLimit, HeldEvent, HeldPage, HeldQuery, Loaded, PageBuilder, SourceError};
use std::time::Duration;
use tokio_postgres::Row;

/// Events in one answer: a page of the log is no larger either, and more come with the next call.
const EVENTS_MAX: usize = 2000;

/// The shard whose rows are meant.
#[derive(Clone, Copy)]
pub(crate) struct Shard<'a> {
    pub(crate) stream: &'a str,
    pub(crate) shard: i16,
}

/// The keys in trouble. `block`: dead events hold their keys up too.
pub(crate) async fn load(session: &Session, sql: &HeldSql, at: Shard<'_>, block: bool) -> Result<Loaded, SourceError> {
    let rows =
        within(STATEMENT_TIMEOUT, "read the held events", session.query(&sql.load, &[&at.stream, &at.shard, &block]))
            .await?;
    let key = |r: &Row| {
        let count = u32::try_from(r.get::<_, i64>(1)).unwrap_or(u32::MAX);
        (r.get::<_, i64>(0).cast_unsigned(), count, r.get(2))
    };
    Ok(Loaded { keys: rows.iter().map(key).collect(), next_due: next_due(session, sql, at, &[]).await? })
}

/// Until the next one is due, those of `skip` left out.
async fn next_due(
    session: &Session,
    sql: &HeldSql,
    at: Shard<'_>,
    skip: &[i64],
) -> Result<Option<Duration>, SourceError> {
    let row = within(
        STATEMENT_TIMEOUT,
        "read when held events are due",
        session.query_opt(&sql.next_due, &[&at.stream, &at.shard, &skip]),
    )
    .await?;
    let micros = row.and_then(|r| r.get::<_, Option<i64>>(0));
    Ok(micros.map(|m| Duration::from_micros(m.max(0).unsigned_abs())))
}

/// Held events that may go now, oldest first.
pub(crate) async fn fetch(
    session: &Session,
    sql: &HeldSql,
    at: Shard<'_>,
    query: &HeldQuery,
) -> Result<HeldPage, SourceError> {
    let limit = i64::try_from(query.limit.events_max.min(EVENTS_MAX)).expect("the limit is small");
    let mut rows = within(
        STATEMENT_TIMEOUT,
        "read the held events that are due",
        session.query(&sql.due, &[&at.stream, &at.shard, &query.skip, &limit]),
    )
    .await?;
    if !query.open.is_empty() {
        let keys: Vec<i64> = query.open.iter().map(|k| k.cast_signed()).collect();
        rows.extend(
            within(
                STATEMENT_TIMEOUT,
                "read the waiting events",
                session.query(&sql.open, &[&at.stream, &at.shard, &keys, &query.skip, &limit]),
            )
            .await?,
        );
        rows.sort_by_key(|r| row::id(r, 2));
    }
    let events = decode(&rows, query.limit)?;
    let mut skip = query.skip.clone();
    skip.extend(events.iter().map(|e| e.event.id()));
    Ok(HeldPage { events, next_due: next_due(session, sql, at, &skip).await? })
}

fn decode(rows: &[Row], limit: ClaimLimit) -> Result<Vec<HeldEvent>, SourceError> {
    let mut page = PageBuilder::default();
    for row in rows.iter().take(limit.events_max.max(1)) {
        if !page.is_empty() && page.bytes() >= limit.bytes_max {
            break;
        }
        row::push(row, 2, &mut page);
    }
    let events = page.finish();
    let held = |(event, row): (_, &Row)| {
        let attempts = u32::try_from(row.get::<_, i32>(0)).unwrap_or_default();
        Ok(HeldEvent { event, attempts, state: row.get::<_, &str>(1).parse()? })
    };
    events.into_iter().zip(rows).map(held).collect()
}

//! Held events: those that the cursor has passed but that were not published then. The rows say why and since when; the
//! event itself is read from the outbox by its id. Which of them may go is the backlog's decision, not made here.

use crate::postgres::connect::Session;
use crate::postgres::error::{STATEMENT_TIMEOUT, within};
use crate::postgres::row;
use crate::postgres::sql::HeldSql;
use futures_util::TryStreamExt;
use postbox_engine::{HeldEvent, HeldPage, HeldQuery, Loaded, PageBuilder, SourceError};
use std::time::Duration;
use tokio_postgres::Row;

/// Events in one answer: a page of the log is no larger either, and more come with the next call.
const EVENTS_MAX: usize = 2000;
/// Payloads asked for before any size is known: what is not taken was sent in vain, at most so many large ones.
const PIECE_FIRST: usize = 8;
/// How much larger than the last a piece may be: 2,000 small events come in four.
const PIECE_GROWTH: usize = 8;

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

/// Held events that may go now, oldest first. Their ids come first and their payloads after, piece by piece: the hand may
/// have room for a few only, and the server does not stop halfway through an answer.
pub(crate) async fn fetch(
    session: &Session,
    sql: &HeldSql,
    at: Shard<'_>,
    query: &HeldQuery,
) -> Result<HeldPage, SourceError> {
    let limit = i64::try_from(query.limit.events_max.clamp(1, EVENTS_MAX)).expect("the limit is small");
    let keys: Vec<i64> = query.open.iter().map(|k| k.cast_signed()).collect();
    let ready = within(
        STATEMENT_TIMEOUT,
        "read which held events may go",
        session.query(&sql.ready, &[&at.stream, &at.shard, &query.skip, &keys, &limit]),
    )
    .await?;
    let events = if ready.is_empty() { Vec::new() } else { take(session, sql, &ready, query.limit.bytes_max).await? };
    let mut skip = query.skip.clone();
    skip.extend(events.iter().map(|e| e.event.id()));
    Ok(HeldPage { events, next_due: next_due(session, sql, at, &skip).await? })
}

/// The events of the rows `ready`, from the first on, until `bytes_max` is reached: one event more at most.
async fn take(
    session: &Session,
    sql: &HeldSql,
    mut ready: &[Row],
    bytes_max: usize,
) -> Result<Vec<HeldEvent>, SourceError> {
    let doing = "prepare to read held events";
    let statement = within(STATEMENT_TIMEOUT, doing, session.prepare(&sql.events)).await?;
    let (mut one, mut held, mut bytes, mut piece) = (PageBuilder::default(), Vec::new(), 0, PIECE_FIRST);
    while !ready.is_empty() && (held.is_empty() || bytes < bytes_max) {
        let (asked, rest) = ready.split_at(piece.min(ready.len()));
        let ids: Vec<i64> = asked.iter().map(|r| r.get(0)).collect();
        let sent = session.query_raw(&statement, [&ids]);
        let mut rows = Box::pin(within(STATEMENT_TIMEOUT, "read held events", sent).await?);
        let mut asked = asked.iter();
        while let Some(row) = within(STATEMENT_TIMEOUT, "read held events", rows.try_next()).await?
            && (held.is_empty() || bytes < bytes_max)
        {
            let (id, _) = row::push(row::columns(&row), &mut one);
            bytes += one.bytes();
            // Each in a page of its own: one may stay long in memory, and must keep no others there.
            held.extend(one.finish().into_iter().zip(asked.find(|r| r.get::<_, i64>(0) == id)));
        }
        ready = rest;
        // As many as fit, if they are as large as those before.
        let fit = bytes_max.saturating_sub(bytes).saturating_mul(held.len()) / bytes.max(1);
        piece = fit.clamp(1, piece * PIECE_GROWTH);
    }
    let held_event = |(event, row): (_, &Row)| {
        let attempts = u32::try_from(row.get::<_, i32>(1)).unwrap_or_default();
        Ok(HeldEvent { event, attempts, state: row.get::<_, &str>(2).parse()? })
    };
    held.into_iter().map(held_event).collect()
}

//! Settling: held rows and the cursor's new row in one fenced statement, all or none. No row back: the lease is lost,
//! and nothing was written.

use crate::postgres::connect::Session;
use crate::postgres::identity::Identity;
use crate::postgres::log::{Mark, Tenure};
use crate::postgres::row::SnapshotText;
use crate::postgres::{PostgresOptions, error::within};
use postbox_engine::{Changes, HeldChange, SourceError};
use std::borrow::Cow;
use std::sync::atomic::Ordering::Relaxed;
use tokio::time::Instant;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

/// # Errors
/// `LeaseLost`: nothing was recorded. `Unavailable`: it may have been.
pub(crate) async fn record(
    tenure: &Tenure,
    options: &PostgresOptions,
    changes: &Changes<Mark>,
) -> Result<(), SourceError> {
    if changes.mark.is_none() && changes.held.is_empty() {
        return Ok(());
    }
    let max_id = tenure.max_id.fetch_max(changes.max_id, Relaxed).max(changes.max_id);
    let events = i32::try_from(changes.events).unwrap_or(i32::MAX);
    let Identity { system_id, database, generation } = tenure.identity;
    let mark = changes.mark.as_ref();
    let since = mark.map(|m| SnapshotText(&m.since));
    let until = mark.and_then(|m| m.until.as_deref()).map(SnapshotText);
    let (last_id, drawn) = mark.map_or((0, 0), |m| (m.last_id, m.drawn));
    let (stream, relay) = (&*options.stream, &*options.relay);
    let sent = age(changes.sent);
    let cursor: [&(dyn ToSql + Sync); 14] = [
        &stream,
        &options.shard,
        &tenure.epoch,
        &since,
        &until,
        &last_id,
        &max_id,
        &drawn,
        &events,
        &relay,
        &system_id,
        &database,
        &generation,
        &sent,
    ];
    let row = if changes.held.is_empty() {
        within(options.ttl, "settle", tenure.settler.query_opt(&tenure.statements.record, &cursor)).await?
    } else {
        let held = Held::of(&changes.held, &tenure.settler);
        let moves = mark.is_some();
        let mut all = cursor.to_vec();
        all.extend(held.parameters());
        all.push(&moves);
        within(options.ttl, "settle", tenure.settler.query_opt(&tenure.statements.record_held, &all)).await?
    };
    row.map(|_| ()).ok_or_else(SourceError::lease_lost)
}

/// Microseconds since the event was handed over; the database subtracts them from its own now.
fn age(sent: Option<Instant>) -> Option<i64> {
    sent.map(|sent| i64::try_from(sent.elapsed().as_micros()).unwrap_or(DUE_MAX).min(DUE_MAX))
}

/// A hundred years in microseconds: the database's times have an end.
const DUE_MAX: i64 = 3_155_760_000_000_000;

/// The years 1 and 9999 in microseconds since 1970: a writer may set any time, and the sum with it must have a meaning.
const CREATED_MIN: i64 = -62_135_596_800_000_000;
const CREATED_MAX: i64 = 253_402_300_799_000_000;

/// The held rows column by column, as `unnest` takes them.
#[derive(Default)]
struct Held<'a> {
    ids: Vec<i64>,
    keys: Vec<i64>,
    aggregate_types: Vec<&'a str>,
    aggregate_ids: Vec<&'a str>,
    event_ids: Vec<String>,
    event_types: Vec<&'a str>,
    created: Vec<i64>,
    states: Vec<&'static str>,
    attempts: Vec<i32>,
    due: Vec<Option<i64>>,
    errors: Vec<Option<Cow<'a, str>>>,
    sent: Vec<Option<i64>>,
}

impl<'a> Held<'a> {
    fn of(changes: &'a [HeldChange], session: &Session) -> Held<'a> {
        let mut rows = Held::default();
        for change in changes {
            let event = &change.event;
            rows.ids.push(event.id());
            rows.keys.push(event.key().cast_signed());
            rows.aggregate_types.push(event.aggregate_type());
            rows.aggregate_ids.push(event.aggregate_id());
            rows.event_ids.push(Uuid::from_bytes(event.event_id()).to_string());
            rows.event_types.push(event.event_type());
            rows.created.push(event.created_at().clamp(CREATED_MIN, CREATED_MAX));
            rows.states.push(change.state.name());
            rows.attempts.push(i32::try_from(change.attempts).unwrap_or(i32::MAX));
            rows.due.push(due(change));
            rows.errors.push(change.error.as_deref().map(|text| session.storable(text)));
            rows.sent.push(age(change.sent));
        }
        rows
    }

    fn parameters(&self) -> [&(dyn ToSql + Sync); 12] {
        [
            &self.ids,
            &self.keys,
            &self.aggregate_types,
            &self.aggregate_ids,
            &self.event_ids,
            &self.event_types,
            &self.created,
            &self.states,
            &self.attempts,
            &self.due,
            &self.errors,
            &self.sent,
        ]
    }
}

/// Microseconds from the database's now; none where no time matters.
fn due(change: &HeldChange) -> Option<i64> {
    use postbox_engine::HeldState::{Delayed, Replay, Retry};
    matches!(change.state, Retry | Delayed | Replay)
        .then(|| i64::try_from(change.due.as_micros()).unwrap_or(i64::MAX).min(DUE_MAX))
}

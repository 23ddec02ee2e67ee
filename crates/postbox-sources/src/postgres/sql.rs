//! Every statement of the log, built once per tenure with the quoted schema. Each was chosen by measurement: the plan
//! that it must get is said beside it, and the plan tests hold it.

pub(crate) use postbox::schema::quote as quoted;

/// What an event is read by, in the order that `row.rs` expects. `delay` is told by the database's clock.
const EVENT: &str = "id, event_id, aggregate_type, aggregate_id, aggregate_seq, event_type, schema_version, payload, payload_binary, \
    content_type, headers, destination, created_at, CASE WHEN available_at > now() \
    THEN (extract(epoch FROM least(available_at, now() + interval '100 years') - now()) * 1000000)::bigint END AS delay";

/// The id sequence's last value; every id that any statement has drawn is at most that.
fn drawn(schema: &str) -> String {
    format!("(SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM {schema}.outbox_id_seq)")
}

/// The reading statements.
pub(crate) struct ReadSql {
    pub(crate) poll: String,
    pub(crate) open: String,
    pub(crate) floor: String,
    pub(crate) late: String,
    pub(crate) page: String,
    pub(crate) barrier: String,
    pub(crate) hold: String,
    pub(crate) lie_down: String,
    pub(crate) transaction_id: String,
}

impl ReadSql {
    /// `poll_max` events at most are returned by a poll; above, the window is large.
    pub(crate) fn new(
        schema: &str,
        generation: i16,
        shard: i16,
        shards: i16,
        poll_max: usize,
        page_max: usize,
    ) -> ReadSql {
        let schema = quoted(schema);
        let drawn = drawn(&schema);
        // After a rebase, older generations hold transaction ids of another cluster.
        let live = if generation > 0 { format!("bin >= {} AND ", 6 * generation) } else { String::new() };
        let mine = match shards {
            1 => String::new(),
            _ => format!("{schema}.slot(aggregate_type, aggregate_id) % {shards} = {shard} AND "),
        };
        let from = format!("FROM {schema}.outbox WHERE {live}{mine}");
        let n = poll_max + 1;
        ReadSql {
            // Index ranges on (txid, id) only. A running transaction that s2 does not see either is not walked, nor is one
            // that began after s2: a bulk writer's rows may be millions. OFFSET 0: s2 is computed once.
            poll: format!(
                "SELECT s.s2::text, s.drawn, o.* FROM (SELECT pg_current_snapshot() AS s2, {drawn} AS drawn OFFSET 0) s \
                 LEFT JOIN LATERAL (SELECT * FROM (SELECT count(*) OVER () AS found, row_number() OVER () AS k, u.* FROM (\
                 (SELECT {EVENT} {from} txid >= pg_snapshot_xmax($1::pg_snapshot) AND txid < pg_snapshot_xmax(s.s2) ORDER BY txid, id LIMIT {n}) \
                 UNION ALL \
                 (SELECT r.* FROM (SELECT x FROM pg_snapshot_xip($1::pg_snapshot) x WHERE pg_visible_in_snapshot(x, s.s2) OFFSET 0) t \
                 CROSS JOIN LATERAL (SELECT {EVENT} {from} txid >= t.x AND txid <= t.x ORDER BY txid, id LIMIT {n}) r LIMIT {n})\
                 ) u) w WHERE found < {n} OR k = 1 ORDER BY id) o ON true"
            ),
            // After the snapshot is taken, so that all it sees have their ids drawn.
            open: format!("SELECT s.s2::text, {drawn} FROM (SELECT pg_current_snapshot() AS s2 OFFSET 0) s"),
            // A row with txid >= xmax(since) has txid > xid, so its id was drawn after id_floor was read. Where no cursor
            // row says so (a stream's first window), the least id there is.
            floor: format!(
                "SELECT coalesce((SELECT id_floor FROM {schema}.cursor WHERE stream = $1 AND shard = $2 AND generation = {generation} \
                 AND xid < pg_snapshot_xmax($3::pg_snapshot) ORDER BY xid DESC LIMIT 1), \
                 (SELECT id - 1 FROM {schema}.outbox WHERE {live} true ORDER BY id LIMIT 1), 0)"
            ),
            // The part of a large window below its floor: transactions that were running at `since`.
            late: format!(
                "SELECT r.* FROM (SELECT x FROM pg_snapshot_xip($1::pg_snapshot) x WHERE pg_visible_in_snapshot(x, $2::pg_snapshot) OFFSET 0) t \
                 CROSS JOIN LATERAL (SELECT {EVENT} {from} txid >= t.x AND txid <= t.x AND id > $3 AND id <= $4 ORDER BY txid, id LIMIT {page_max}) r \
                 ORDER BY id LIMIT {page_max}"
            ),
            // The primary key alone: with a range on txid the planner takes (txid, id) and sorts.
            page: format!(
                "SELECT {EVENT} {from} id > $1 AND id <= $2 AND NOT pg_visible_in_snapshot(txid, $3::pg_snapshot) \
                 AND pg_visible_in_snapshot(txid, $4::pg_snapshot) ORDER BY id"
            ),
            // The stored position again with a new floor and a new transaction id, before a large window is opened.
            barrier: format!(
                "WITH fence AS MATERIALIZED (SELECT 1 FROM {schema}.lease WHERE stream = $1 AND shard = $2 AND epoch = $3 FOR SHARE) \
                 INSERT INTO {schema}.cursor (stream, shard, epoch, since, until, last_id, max_id, id_floor, events, relay, system_id, database, generation, sent_at) \
                 SELECT $1, $2, $3, c.since, c.until, c.last_id, c.max_id, $4::bigint, 0, c.relay, c.system_id, c.database, c.generation, c.sent_at FROM fence, \
                 (SELECT * FROM {schema}.cursor WHERE stream = $1 AND shard = $2 ORDER BY seq DESC LIMIT 1) c RETURNING seq"
            ),
            // The wake lease: nobody needs to notify before then.
            hold: "SELECT setval($1::text::regclass, (extract(epoch FROM clock_timestamp()) * 1000)::bigint + $2)"
                .into(),
            lie_down: "SELECT setval($1::text::regclass, 1)".into(),
            transaction_id: "SELECT pg_current_xact_id()::text".into(),
        }
    }
}

/// The statements of the lease and the cursor.
pub(crate) struct SettleSql {
    pub(crate) enrol: String,
    pub(crate) shards: String,
    pub(crate) acquire: String,
    pub(crate) remaining: String,
    pub(crate) renew: String,
    pub(crate) release: String,
    pub(crate) drawn: String,
    pub(crate) begin: String,
    pub(crate) record: String,
    pub(crate) record_held: String,
}

impl SettleSql {
    pub(crate) fn new(schema: &str) -> SettleSql {
        let schema = quoted(schema);
        // Waits for a rival's UPDATE, then looks at the epoch again: no row means that the lease is lost.
        let fence = format!(
            "WITH fence AS MATERIALIZED (SELECT 1 FROM {schema}.lease WHERE stream = $1 AND shard = $2 AND epoch = $3 FOR SHARE)"
        );
        let cursor = format!(
            "INSERT INTO {schema}.cursor (stream, shard, epoch, since, until, last_id, max_id, id_floor, events, relay, system_id, database, generation, sent_at) \
             SELECT $1, $2, $3, $4::pg_snapshot, $5::pg_snapshot, $6::bigint, $7::bigint, $8::bigint, $9::integer, $10::text, $11::bigint, $12::oid, \
             $13::smallint, now() - $14::bigint * interval '1 microsecond' FROM fence"
        );
        SettleSql {
            enrol: format!(
                "INSERT INTO {schema}.lease (stream, shard, shards) SELECT $1, n, $2 FROM generate_series(0, $2::smallint - 1) n \
                 WHERE NOT EXISTS (SELECT FROM {schema}.lease WHERE stream = $1) ON CONFLICT DO NOTHING"
            ),
            shards: format!("SELECT max(shards) FROM {schema}.lease WHERE stream = $1"),
            acquire: format!(
                "UPDATE {schema}.lease SET owner = $3, epoch = epoch + 1, until = clock_timestamp() + make_interval(secs => $4) \
                 WHERE stream = $1 AND shard = $2 AND (until IS NULL OR until <= clock_timestamp() OR owner = $3) RETURNING epoch"
            ),
            remaining: format!(
                "SELECT greatest(0, extract(epoch FROM until - clock_timestamp()))::float8 FROM {schema}.lease WHERE stream = $1 AND shard = $2"
            ),
            renew: format!(
                "UPDATE {schema}.lease SET until = clock_timestamp() + make_interval(secs => $4), error = $5 \
                 WHERE stream = $1 AND shard = $2 AND epoch = $3 AND until > clock_timestamp() RETURNING epoch"
            ),
            release: format!(
                "UPDATE {schema}.lease SET until = NULL, owner = NULL, error = $4 WHERE stream = $1 AND shard = $2 AND epoch = $3"
            ),
            drawn: format!("SELECT {}", drawn(&schema)),
            begin: format!("{fence} {cursor} RETURNING seq"),
            record: format!("{fence} {cursor} RETURNING seq"),
            record_held: record_held(&schema, &fence, &cursor),
        }
    }
}

/// Held rows and, where the mark moves ($27), the cursor's row; both or neither.
fn record_held(schema: &str, fence: &str, cursor: &str) -> String {
    format!(
        "{fence}, held AS (INSERT INTO {schema}.held AS h (stream, shard, relay, id, key, aggregate_type, aggregate_id, event_id, event_type, \
         event_created_at, state, attempts, due_at, error, sent_at) \
         SELECT $1, $2, $10, u.id, u.key, u.at, u.ai, u.eid::uuid, u.et, timestamptz '1970-01-01 00:00:00+00' + u.made * interval '1 microsecond', \
         u.state, u.attempts, CASE WHEN u.due IS NOT NULL THEN clock_timestamp() + u.due * interval '1 microsecond' END, u.error, \
         now() - u.sent * interval '1 microsecond' \
         FROM fence, unnest($15::bigint[], $16::bigint[], $17::text[], $18::text[], $19::text[], $20::text[], $21::bigint[], $22::text[], \
         $23::integer[], $24::bigint[], $25::text[], $26::bigint[]) AS u (id, key, at, ai, eid, et, made, state, attempts, due, error, sent) \
         ON CONFLICT (stream, id) DO UPDATE SET state = excluded.state, attempts = excluded.attempts, due_at = excluded.due_at, \
         error = coalesce(excluded.error, h.error), sent_at = coalesce(excluded.sent_at, h.sent_at), relay = excluded.relay, \
         changed_at = clock_timestamp()), moved AS ({cursor} WHERE $27::boolean) SELECT 1 FROM fence"
    )
}

/// The statements on held events.
pub(crate) struct HeldSql {
    pub(crate) load: String,
    pub(crate) next_due: String,
    pub(crate) ready: String,
    pub(crate) events: String,
}

impl HeldSql {
    pub(crate) fn new(schema: &str) -> HeldSql {
        let schema = quoted(schema);
        const DUE: &str = "state IN ('retry', 'delayed', 'replay')";
        // A row whose event was taken from the outbox by hand would be due for ever: it is left to the operator.
        let exists = format!("EXISTS (SELECT FROM {schema}.outbox o WHERE o.id = h.id)");
        let held = format!("SELECT id, attempts, state FROM {schema}.held h WHERE stream = $1 AND shard = $2");
        HeldSql {
            load: format!(
                "SELECT key, count(*), bool_or(state <> 'waiting') FROM {schema}.held \
                 WHERE stream = $1 AND shard = $2 AND state <> 'done' AND (state IN ('retry', 'waiting') OR state = 'dead' AND $3) GROUP BY key"
            ),
            next_due: format!(
                "SELECT (extract(epoch FROM due_at - clock_timestamp()) * 1000000)::bigint FROM {schema}.held h \
                 WHERE stream = $1 AND shard = $2 AND {DUE} AND id <> ALL ($3) AND {exists} ORDER BY due_at LIMIT 1"
            ),
            // Those that are due, and those waiting under an open key: no payload is touched.
            ready: format!(
                "(SELECT * FROM ({held} AND {DUE} AND due_at <= clock_timestamp() AND id <> ALL ($3) AND {exists} ORDER BY due_at, id LIMIT $5) d) \
                 UNION ALL \
                 (SELECT w.* FROM unnest($4::bigint[]) k CROSS JOIN LATERAL ({held} AND key = k AND state <> 'done' AND state = 'waiting' \
                 AND id <> ALL ($3) AND {exists} ORDER BY id LIMIT $5) w ORDER BY w.id LIMIT $5) \
                 ORDER BY id LIMIT $5"
            ),
            // An id alone finds its event, whatever its bin.
            events: format!(
                "SELECT o.* FROM unnest($1::bigint[]) h CROSS JOIN LATERAL (SELECT {EVENT} FROM {schema}.outbox WHERE id = h ORDER BY id LIMIT 1) o \
                 ORDER BY o.id"
            ),
        }
    }
}

-- The outbox as an insert-only log on PostgreSQL 14 and later. Writers insert rows and nobody ever updates one; relays
-- read what became visible between two snapshots, and record how far they got in `cursor`.
-- {schema} stands for the quoted name of the schema. Nothing here rests on search_path: bodies are parsed when they are
-- created, or name the schema. Nothing is ever dropped.

-- ---------------------------------------------------------------------------------------------------------------------
-- Defaults of the outbox
-- ---------------------------------------------------------------------------------------------------------------------

-- For how long a published event stays at least, in seconds. `postbox migrate` replaces this function and bin() with what
-- the key source.retention says; a relay whose key says more keeps events that long.
CREATE FUNCTION {schema}.retention_seconds() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
RETURN 604800;

-- Which of the six bins a new event goes to: generation * 6 + period % 6. A period is a quarter of the retention: four
-- are kept, one is written, one is emptied. No event is lost when its length changes, whatever the new one and whoever
-- writes meanwhile: whether a bin may go is told by the transaction ids in it. It stands here as a number, since each
-- function called would add a tenth to the planning of an INSERT. The generation is that of the cluster: 0 in the
-- first.
CREATE FUNCTION {schema}.bin() RETURNS smallint LANGUAGE sql STABLE PARALLEL SAFE
RETURN (0 * 6 + date_part('epoch', now())::bigint / 151200 % 6)::smallint;

-- The slot of a key, 0 to 255: a shard has the keys with slot % shards = shard. Asked when events are read: as a generated
-- column it would be a third of what an INSERT costs (14 of 42 us).
CREATE FUNCTION {schema}.slot(aggregate_type text, aggregate_id text) RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (hashtextextended(aggregate_type || '/' || aggregate_id, 0) & 255)::integer;

-- A UUID of version 7 (RFC 9562): 48 bits of milliseconds, the rest random.
CREATE FUNCTION {schema}.uuid7() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN encode(set_bit(set_bit(overlay(
  uuid_send(gen_random_uuid()) PLACING substring(int8send((date_part('epoch', clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6
), 52, 1), 53, 1), 'hex')::uuid;

-- The greatest payload that publish() takes, in bytes. Sinks take 1,000,000 unless they are told to take more, envelope and
-- headers included: 16 KiB are left for these. It is no constraint of the table, since it is the broker's limit, not the log's, and changes
-- with it: by replacing this function, without a lock.
CREATE FUNCTION {schema}.payload_max() RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 1000000 - 16384;

-- True for an object of strings whose names can be header names anywhere (HTTP tokens) and are none that the relay writes
-- itself, and whose values hold no line break. publish() asks it. As a constraint it would add 10 to 20 us to each INSERT
-- of 30; a bad header that came by a plain INSERT parks its event at the relay, with the reason.
CREATE FUNCTION {schema}.headers_valid(headers jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
  WHEN headers = '{}' THEN true
  WHEN jsonb_typeof(headers) <> 'object' THEN false
  ELSE NOT jsonb_path_exists(headers, '$.keyvalue() ? (!(@.key like_regex "^[-!#$%&''*+.^_`|~0-9A-Za-z]+$")
    || @.key like_regex "^(event[-_]id|event[-_]type|aggregate[-_]type|content[-_]type|schema[-_]version|aggregate[-_]seq|replay|tombstone|ce[-_](specversion|id|source|type|subject|time|datacontenttype|schemaversion|sequence|replay))$" flag "i"
    || @.value.type() != "string" || @.value like_regex "[\r\n]")') END;

-- ---------------------------------------------------------------------------------------------------------------------
-- The log
-- ---------------------------------------------------------------------------------------------------------------------

CREATE TABLE {schema}.outbox (
  -- The writer's top-level transaction, also under SAVEPOINT. It stands before id, so that it is known before the id is drawn.
  txid           xid8        NOT NULL DEFAULT pg_current_xact_id(),
  -- CACHE 1: with more, the order of ids is not the order of row locks, and order within a key rests on that.
  id             bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1),
  event_id       uuid        NOT NULL DEFAULT {schema}.uuid7(),   -- made by the domain, or here; never by a relay
  aggregate_type text        NOT NULL,
  aggregate_id   text        NOT NULL,
  aggregate_seq  bigint,                                          -- the aggregate's version, where the service has one
  event_type     text        NOT NULL,
  schema_version integer     NOT NULL DEFAULT 1,
  payload        json,          -- json, not jsonb: validated and queryable, yet byte for byte what was written
  payload_binary bytea,         -- Avro, Protobuf, anything; at most one of the two; both null: a tombstone
  content_type   text        NOT NULL DEFAULT 'application/json',
  headers        jsonb       NOT NULL DEFAULT '{}',               -- correlation_id, traceparent, tenant_id, ..
  destination    text,                                            -- overrides the configured route, unless that maps it
  available_at   timestamptz,                                     -- not before
  created_at     timestamptz NOT NULL DEFAULT now(),
  bin            smallint    NOT NULL DEFAULT {schema}.bin(),
  PRIMARY KEY (id, bin),        -- pages and replays read by id; some publications want a key
  CONSTRAINT outbox_names_not_empty CHECK (aggregate_type <> '' AND event_type <> '' AND destination <> ''),
  CONSTRAINT outbox_one_payload     CHECK (payload IS NULL OR payload_binary IS NULL),
  CONSTRAINT outbox_headers_object  CHECK (jsonb_typeof(headers) = 'object'),
  CONSTRAINT outbox_created_at_finite CHECK (isfinite(created_at))            -- 'infinity' cannot be reckoned with
) PARTITION BY LIST (bin);
CREATE TABLE {schema}.outbox_0 PARTITION OF {schema}.outbox FOR VALUES IN (0);
CREATE TABLE {schema}.outbox_1 PARTITION OF {schema}.outbox FOR VALUES IN (1);
CREATE TABLE {schema}.outbox_2 PARTITION OF {schema}.outbox FOR VALUES IN (2);
CREATE TABLE {schema}.outbox_3 PARTITION OF {schema}.outbox FOR VALUES IN (3);
CREATE TABLE {schema}.outbox_4 PARTITION OF {schema}.outbox FOR VALUES IN (4);
CREATE TABLE {schema}.outbox_5 PARTITION OF {schema}.outbox FOR VALUES IN (5);
-- Relays read in UTF-8, and one text that cannot be told in it would fail the whole page that it is in. Other encodings
-- can hold such (byte 0x81 of WIN1252), so there a write that brings one is refused with SQLSTATE 22P05. In UTF8 nothing
-- is to be asked, and from SQL_ASCII relays read bytes.
DO $body$ BEGIN
  IF current_setting('server_encoding') NOT IN ('UTF8', 'SQL_ASCII') THEN
    EXECUTE format('ALTER TABLE %s ADD CONSTRAINT outbox_is_utf8 CHECK (octet_length(convert_to(
      concat(aggregate_type, aggregate_id, event_type, content_type, destination, headers, payload), ''UTF8'')) > 0)', $name${schema}.outbox$name$);
  END IF;
END $body$;
CREATE INDEX outbox_poll       ON {schema}.outbox (txid, id);
CREATE INDEX outbox_event_id   ON {schema}.outbox (event_id);                 -- "was event X published, and when?"
CREATE INDEX outbox_created_at ON {schema}.outbox USING brin (created_at);    -- lists by time

-- ---------------------------------------------------------------------------------------------------------------------
-- Progress
-- ---------------------------------------------------------------------------------------------------------------------

-- Inserted only: it tells where each stream's shard stands (its newest row) and what was passed when (all rows).
CREATE TABLE {schema}.cursor (
  seq        bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  stream     text        NOT NULL,
  shard      smallint    NOT NULL,
  epoch      bigint      NOT NULL,
  since      pg_snapshot NOT NULL,             -- all that it sees is passed
  until      pg_snapshot,                      -- the end of the open window, while one is paged
  last_id    bigint      NOT NULL DEFAULT 0,   -- passed inside the open window
  max_id     bigint      NOT NULL DEFAULT 0,   -- greatest id ever passed
  id_floor   bigint      NOT NULL DEFAULT 0,   -- outbox_id_seq as an EARLIER statement read it (0 unless is_called): each row with txid > xid has id > id_floor
  xid        xid8        NOT NULL DEFAULT pg_current_xact_id(),   -- of this row's own transaction: greater than the txid of all that it passed
  events     integer     NOT NULL,             -- passed by this move: published, or put into held
  relay      text        NOT NULL,
  system_id  bigint      NOT NULL,             -- of the cluster, 0 where pg_control_system() is refused
  database   oid         NOT NULL,
  generation smallint    NOT NULL,
  sent_at    timestamptz,                      -- by then all that was sent of what is passed had been handed to the sink; null: nothing was
  at         timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX cursor_newest ON {schema}.cursor (stream, shard, seq);
CREATE INDEX cursor_passed ON {schema}.cursor (stream, shard, xid);           -- trace(): the first row that passed a txid

-- Who owns a stream's shard. Few rows, updated each second or so: small pages, vacuumed at once.
CREATE TABLE {schema}.lease (
  stream text        NOT NULL,
  shard  smallint    NOT NULL,
  shards smallint    NOT NULL DEFAULT 1 CHECK (shards BETWEEN 1 AND 256),     -- a shard has the keys with slot() % shards = shard
  owner  text,
  epoch  bigint      NOT NULL DEFAULT 0,
  until  timestamptz,
  error  text,                  -- what kept its holder from sending, when it looked last
  PRIMARY KEY (stream, shard)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

-- Events that a cursor has passed and that were not published then. Its size is that of the trouble.
CREATE TABLE {schema}.held (
  stream           text        NOT NULL,
  id               bigint      NOT NULL,       -- outbox.id
  shard            smallint    NOT NULL,
  key              bigint      NOT NULL,       -- the relay's hash of (aggregate_type, aggregate_id), as two's complement
  aggregate_type   text        NOT NULL,
  aggregate_id     text        NOT NULL,
  event_id         uuid        NOT NULL,
  event_type       text        NOT NULL,
  event_created_at timestamptz NOT NULL,
  state            text        NOT NULL CHECK (state IN ('retry', 'waiting', 'delayed', 'dead', 'replay', 'done')),
  attempts         integer     NOT NULL DEFAULT 0,                            -- that failed
  due_at           timestamptz,
  error            text,
  relay            text,                       -- the last one that changed it
  sent_at          timestamptz,                -- by then it had been handed to the sink; null: never, or without an answer
  held_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
  changed_at       timestamptz NOT NULL DEFAULT clock_timestamp(),            -- for done: published at
  PRIMARY KEY (stream, id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
        autovacuum_analyze_scale_factor = 0.05, autovacuum_analyze_threshold = 1000);
CREATE INDEX held_due ON {schema}.held (stream, shard, due_at, id) WHERE state IN ('retry', 'delayed', 'replay');
CREATE INDEX held_key ON {schema}.held (stream, shard, key, id) WHERE state <> 'done';

-- ---------------------------------------------------------------------------------------------------------------------
-- Waking
-- ---------------------------------------------------------------------------------------------------------------------

-- The wake lease: epoch milliseconds before which nobody needs to notify. Unlogged where the server can (15 and later): a
-- crash sets it back, and the next writer notifies.
DO $body$ BEGIN
  EXECUTE format('CREATE %s SEQUENCE %s', CASE WHEN current_setting('server_version_num')::integer >= 150000 THEN 'UNLOGGED' END,
    $name${schema}.wake$name$);
END $body$;

-- Notifies the channel named as the schema when the wake lease has passed, at most once in 20 ms over all writers. Runs
-- as the owner, so that a writer needs no right for it. What could fail the writer's transaction is left out: NOTIFY
-- bars PREPARE TRANSACTION, so where that is possible at all (max_prepared_transactions) it notifies only with
-- `postbox.wake = on` (ALTER ROLE .. SET, or ALTER DATABASE .. SET); and a queue half full is no place for hints.
CREATE FUNCTION {schema}.wake() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
  at_ms bigint := date_part('epoch', clock_timestamp()) * 1000;
BEGIN
  -- The view pg_sequences reads it so, too. A SELECT from the sequence would double the trigger's cost (9 us against 4.5).
  IF at_ms < coalesce(pg_sequence_last_value($name${schema}.wake$name$::regclass), 0) THEN
    RETURN NULL;
  END IF;
  IF coalesce(nullif(current_setting('postbox.wake', true), '') = 'on', current_setting('max_prepared_transactions') = '0')
    AND pg_notification_queue_usage() < 0.5
  THEN
    PERFORM setval($name${schema}.wake$name$, at_ms + 20), pg_notify(TG_TABLE_SCHEMA, '');
  END IF;
  RETURN NULL;
END $body$;
CREATE TRIGGER wake AFTER INSERT ON {schema}.outbox FOR EACH STATEMENT EXECUTE FUNCTION {schema}.wake();

-- ---------------------------------------------------------------------------------------------------------------------
-- Writing: the same as an INSERT, with typed errors. SQLSTATEs:
--   PB001 the payload is larger than payload_max()         PB003 a header has a bad or reserved name or a bad value; or the
--                                                                content type is bad
--   PB002 both payload and payload_binary are given        PB004 a name is missing: aggregate type, aggregate id, event type
-- ---------------------------------------------------------------------------------------------------------------------

CREATE FUNCTION {schema}.publish(
  aggregate_type text, aggregate_id text, event_type text, payload json DEFAULT NULL, payload_binary bytea DEFAULT NULL,
  headers jsonb DEFAULT '{}', event_id uuid DEFAULT NULL, aggregate_seq bigint DEFAULT NULL, schema_version integer DEFAULT 1,
  content_type text DEFAULT NULL, destination text DEFAULT NULL, available_at timestamptz DEFAULT NULL, ordered boolean DEFAULT false
) RETURNS uuid LANGUAGE plpgsql AS $body$
DECLARE
  size integer := coalesce(octet_length(payload::text), octet_length(payload_binary), 0);
BEGIN
  IF coalesce(aggregate_type, '') = '' OR aggregate_id IS NULL OR coalesce(event_type, '') = '' OR destination = '' THEN
    RAISE EXCEPTION 'an event needs an aggregate type, an aggregate id and an event type; a destination is given or left out, not empty' USING ERRCODE = 'PB004';
  ELSIF payload IS NOT NULL AND payload_binary IS NOT NULL THEN
    RAISE EXCEPTION 'an event has one payload: give payload or payload_binary, not both' USING ERRCODE = 'PB002';
  ELSIF size > {schema}.payload_max() THEN
    RAISE EXCEPTION 'the payload has % bytes, at most % are taken', size, {schema}.payload_max() USING ERRCODE = 'PB001',
      HINT = 'Keep large content elsewhere and publish a reference to it, or replace the function payload_max() if your broker takes more.';
  ELSIF NOT {schema}.headers_valid(coalesce(headers, '{}')) OR content_type ~ '[[:cntrl:]]' THEN
    RAISE EXCEPTION 'headers must be a JSON object of strings, names of ASCII letters, digits and -_. and the like, values without line breaks; so must the content type'
      USING ERRCODE = 'PB003', HINT = 'Postbox itself writes event_id, event_type, aggregate_type, content_type, content-type, schema_version, aggregate_seq and replay: choose other names.';
  END IF;
  IF ordered THEN -- 'post' in ASCII keeps these locks apart from the application's own; before the INSERT draws its id
    PERFORM pg_advisory_xact_lock(1886352244, hashtext(aggregate_type || '/' || aggregate_id));
  END IF;
  event_id := coalesce(event_id, {schema}.uuid7());
  INSERT INTO {schema}.outbox (event_id, aggregate_type, aggregate_id, aggregate_seq, event_type, schema_version, payload, payload_binary,
    content_type, headers, destination, available_at)
  VALUES (event_id, aggregate_type, aggregate_id, aggregate_seq, event_type, coalesce(schema_version, 1), payload, payload_binary,
    coalesce(content_type, CASE WHEN payload_binary IS NULL THEN 'application/json' ELSE 'application/octet-stream' END),
    coalesce(headers, '{}'), destination, available_at);
  RETURN event_id;
END $body$;

-- ---------------------------------------------------------------------------------------------------------------------
-- Looking: works while no relay runs
-- ---------------------------------------------------------------------------------------------------------------------

-- What a stream's shard has not passed, looked at as far as 10,000 events in each part of the log: how many, whether
-- that is all, and since when the oldest of them could have been sent. The plan is pinned: statistics of an empty outbox mislead.
CREATE FUNCTION {schema}.pending(since pg_snapshot, until pg_snapshot, last_id bigint, generation integer, shard integer, shards integer,
  OUT events bigint, OUT all_seen boolean, OUT oldest timestamptz)
LANGUAGE sql STABLE SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
BEGIN ATOMIC
  WITH young AS (
    SELECT o.created_at, o.available_at FROM {schema}.outbox o
    WHERE o.txid >= pg_snapshot_xmax(coalesce(until, since)) AND o.bin >= 6 * generation
      AND {schema}.slot(o.aggregate_type, o.aggregate_id) % shards = shard
    ORDER BY o.txid, o.id LIMIT 10001
  ), late AS (
    SELECT r.* FROM pg_snapshot_xip(coalesce(until, since)) x CROSS JOIN LATERAL (
      SELECT o.created_at, o.available_at FROM {schema}.outbox o
      WHERE o.txid >= x AND o.txid <= x AND o.bin >= 6 * generation
        AND {schema}.slot(o.aggregate_type, o.aggregate_id) % shards = shard ORDER BY o.txid, o.id LIMIT 10001) r
    LIMIT 10001
  ), page AS (
    SELECT o.* FROM {schema}.outbox o WHERE until IS NOT NULL AND o.id > last_id AND o.bin >= 6 * generation ORDER BY o.id LIMIT 10001
  ), pending AS (
    SELECT * FROM young UNION ALL SELECT * FROM late UNION ALL
    SELECT created_at, available_at FROM page
    WHERE NOT pg_visible_in_snapshot(txid, since) AND pg_visible_in_snapshot(txid, until)
      AND {schema}.slot(aggregate_type, aggregate_id) % shards = shard
  )
  SELECT count(*), greatest((SELECT count(*) FROM young), (SELECT count(*) FROM late), (SELECT count(*) FROM page)) <= 10000,
    min(greatest(created_at, available_at)) FROM pending;
END;

-- One row per stream and shard.
CREATE VIEW {schema}.lag AS
SELECT l.stream, l.shard,
  CASE WHEN l.until > clock_timestamp() THEN l.owner END AS owner,
  CASE WHEN p.oldest IS NOT NULL THEN greatest(clock_timestamp() - least(p.oldest, clock_timestamp()), interval '0') END AS oldest_unpublished,   -- the figure to alarm on
  CASE WHEN p.all_seen THEN p.events ELSE greatest(p.events, (
    SELECT (o.id - CASE WHEN c.until IS NULL THEN coalesce(c.max_id, 0) ELSE c.last_id END) / l.shards FROM {schema}.outbox o ORDER BY o.id DESC LIMIT 1)) END AS pending,
  NOT p.all_seen AS pending_is_estimate,
  h.retry, h.waiting, h.delayed, h.dead, h.replay, h.oldest_held, h.oldest_dead,
  clock_timestamp() - c.at AS last_settled,
  coalesce(l.error, h.error) AS last_error      -- of the stream as a whole, or of the event that failed last
FROM {schema}.lease l
LEFT JOIN LATERAL (SELECT * FROM {schema}.cursor c WHERE c.stream = l.stream AND c.shard = l.shard ORDER BY c.seq DESC LIMIT 1) c ON true
CROSS JOIN LATERAL {schema}.pending(coalesce(c.since, '1:1:'), c.until, coalesce(c.last_id, 0), coalesce(c.generation, 0), l.shard, l.shards) p
CROSS JOIN LATERAL (
  SELECT count(*) FILTER (WHERE state = 'retry') AS retry, count(*) FILTER (WHERE state = 'waiting') AS waiting,
    count(*) FILTER (WHERE state = 'delayed') AS delayed, count(*) FILTER (WHERE state = 'dead') AS dead, count(*) FILTER (WHERE state = 'replay') AS replay,
    clock_timestamp() - min(event_created_at) FILTER (WHERE state IN ('retry', 'waiting')) AS oldest_held,
    clock_timestamp() - min(event_created_at) FILTER (WHERE state = 'dead') AS oldest_dead,
    (array_agg(error ORDER BY changed_at DESC) FILTER (WHERE error IS NOT NULL))[1] AS error
  FROM {schema}.held h WHERE h.stream = l.stream AND h.shard = l.shard AND h.state <> 'done') h;

-- What became of an event: one row per stream, one without a stream while no relay has ever run, none when the log does
-- not have it. It was passed by the first cursor row that sees its transaction, or that had paged beyond its id. By
-- sent_at it had been handed to the sink; at published_at its publication was recorded.
CREATE FUNCTION {schema}.trace(event_id uuid) RETURNS TABLE (stream text, shard smallint, state text,
  written_at timestamptz, sent_at timestamptz, published_at timestamptz, relay text, attempts integer, error text)
LANGUAGE sql STABLE
BEGIN ATOMIC
  SELECT l.stream, l.shard,
    CASE WHEN h.state = 'done' THEN 'published' WHEN h.state IS NOT NULL THEN h.state WHEN c.at IS NOT NULL THEN 'published' ELSE 'pending' END,
    o.created_at,
    CASE WHEN h.state IS NULL THEN c.sent_at ELSE h.sent_at END,
    CASE WHEN h.state = 'done' THEN h.changed_at WHEN h.state IS NULL THEN c.at END,
    CASE WHEN h.state IS NULL THEN c.relay ELSE h.relay END,
    CASE WHEN h.state = 'done' THEN h.attempts + 1 WHEN h.state IS NOT NULL THEN h.attempts WHEN c.at IS NOT NULL THEN 1 ELSE 0 END,
    CASE WHEN h.state <> 'done' THEN h.error END
  FROM {schema}.outbox o
  LEFT JOIN {schema}.lease l ON {schema}.slot(o.aggregate_type, o.aggregate_id) % l.shards = l.shard
  LEFT JOIN {schema}.held h ON h.stream = l.stream AND h.id = o.id
  LEFT JOIN LATERAL (
    SELECT c.at, c.sent_at, c.relay FROM {schema}.cursor c
    WHERE c.stream = l.stream AND c.shard = l.shard AND c.generation = o.bin / 6 AND c.xid > o.txid
      AND (pg_visible_in_snapshot(o.txid, c.since) OR pg_visible_in_snapshot(o.txid, c.until) AND o.id <= c.last_id)
    ORDER BY c.xid LIMIT 1) c ON true
  WHERE o.event_id = trace.event_id
  ORDER BY o.id, l.stream;
END;

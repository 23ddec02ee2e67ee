-- postbox on SQLite, version 1. Runs as it stands in the sqlite3 shell (3.38 or later); another table prefix takes the
-- place of "postbox_ everywhere. Times are milliseconds since 1970-01-01 UTC; the views show them as text.

-- The events. Insert only: INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type, payload) VALUES (...);
-- SQLite has one writer at a time, so the order of ids is the order of commits. No text may have a zero byte: GLOB, length
-- and json_valid stop there, so nobody would have looked at the rest. printf('%s', ..) stops there too, and is quicker than
-- instr where texts are long: a payload that differs from its copy has one.
CREATE TABLE "postbox_outbox" (
  id             INTEGER PRIMARY KEY AUTOINCREMENT          -- AUTOINCREMENT: an id is never used twice, also after retention
                 -- Streams begin behind 0, and after the greatest number there is no next one: half of them stay free.
                 CONSTRAINT "leave the column id out, the database gives it" CHECK (id BETWEEN 1 AND 4611686018427387903),
  event_id       TEXT    NOT NULL UNIQUE COLLATE NOCASE     -- made by the domain, or here (UUID version 7); never by the relay
                 DEFAULT (substr(printf('%012x', CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)), 1, 8)
                       || '-' || substr(printf('%012x', CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)), 9)
                       || '-7' || substr(lower(hex(randomblob(2))), 2)
                       || '-' || substr('89ab', 1 + (random() & 3), 1) || substr(lower(hex(randomblob(2))), 2)
                       || '-' || lower(hex(randomblob(6))))
                 CONSTRAINT "event_id is a UUID" CHECK (event_id GLOB '????????-????-????-????-????????????'
                    AND length(replace(event_id, '-', '')) = 32 AND replace(event_id, '-', '') NOT GLOB '*[^0-9a-fA-F]*'
                    AND instr(event_id, char(0)) = 0),
  aggregate_type TEXT    NOT NULL CONSTRAINT "aggregate_type is not empty" CHECK (aggregate_type <> ''),
  aggregate_id   TEXT    NOT NULL,
  aggregate_seq  INTEGER,                                   -- the aggregate's version, where the service has one
  event_type     TEXT    NOT NULL CONSTRAINT "event_type is not empty" CHECK (event_type <> ''),
  schema_version INTEGER NOT NULL DEFAULT 1 CHECK (schema_version BETWEEN 0 AND 2147483647),
  payload        TEXT                                       -- JSON, sent byte for byte as it was written
                 CONSTRAINT "payload is JSON" CHECK (payload IS NULL OR json_valid(payload) AND payload = printf('%s', payload)),
  payload_binary BLOB,                                      -- anything else; both null: a tombstone
  content_type   TEXT    NOT NULL DEFAULT 'application/json',
  headers        TEXT    NOT NULL DEFAULT '{}'
                 CONSTRAINT "headers are a JSON object" CHECK (CASE WHEN json_valid(headers)
                    THEN json_type(headers) = 'object' AND instr(headers, char(0)) = 0 ELSE 0 END),
  destination    TEXT                                       -- overrides the configured route, unless that maps it
                 CONSTRAINT "destination is not empty" CHECK (destination <> ''),
  available_at   INTEGER                                    -- not before
                 CONSTRAINT "available_at is in milliseconds" CHECK (available_at BETWEEN 1000000000000 AND 99999999999999),
  created_at     INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER))
                 CONSTRAINT "created_at is in milliseconds" CHECK (created_at BETWEEN 1000000000000 AND 99999999999999),
  CONSTRAINT "texts have no zero byte" CHECK (instr(aggregate_type || aggregate_id || event_type || content_type || coalesce(destination, ''), char(0)) = 0),
  CONSTRAINT "one of payload and payload_binary" CHECK (payload IS NULL OR payload_binary IS NULL)
) STRICT;

-- How far each stream has got: a row per settled move, thinned to one a second after five minutes. The newest has the
-- greatest last_id; the first that has reached an event's id tells when that event was passed, and by whom.
CREATE TABLE "postbox_cursor" (
  stream  TEXT    NOT NULL,
  last_id INTEGER NOT NULL,                                 -- all events up to here are published or held
  epoch   INTEGER NOT NULL,
  relay   TEXT    NOT NULL,
  sent_at INTEGER,                                          -- by then all that was sent of what is passed had been handed to the sink
  at      INTEGER NOT NULL,
  PRIMARY KEY (stream, last_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX "postbox_cursor_at" ON "postbox_cursor" (stream, at);

-- Which relay works for a stream. Nothing is recorded under an epoch that is not the newest.
CREATE TABLE "postbox_lease" (
  stream TEXT    NOT NULL PRIMARY KEY,
  epoch  INTEGER NOT NULL,
  owner  TEXT,                                              -- null: given back
  until  INTEGER,
  error  TEXT                                               -- what kept its holder from sending, when it looked last
) STRICT, WITHOUT ROWID;

-- Events that the cursor has passed and that were not published then.
CREATE TABLE "postbox_held" (
  stream   TEXT    NOT NULL,
  id       INTEGER NOT NULL,                                -- of the outbox
  key      INTEGER NOT NULL,                                -- hash of the aggregate, in which order is kept
  state    TEXT    NOT NULL CHECK (state IN ('retry', 'waiting', 'delayed', 'dead', 'replay', 'done')),
  attempts INTEGER NOT NULL,
  due_at   INTEGER,
  error    TEXT,
  relay    TEXT    NOT NULL,
  sent_at  INTEGER,                                         -- by then it had been handed to the sink; null: never, or without an answer
  at       INTEGER NOT NULL,                                -- of the last change
  PRIMARY KEY (stream, id),
  CHECK ((due_at IS NOT NULL) = (state IN ('retry', 'delayed', 'replay')))
) STRICT, WITHOUT ROWID;
CREATE INDEX "postbox_held_state" ON "postbox_held" (stream, state, key, id);
CREATE INDEX "postbox_held_due" ON "postbox_held" (stream, due_at) WHERE due_at IS NOT NULL;

-- An event under an id that a relay has passed would never be sent: refused where it is written.
CREATE TRIGGER "postbox_outbox_append" AFTER INSERT ON "postbox_outbox"
WHEN NEW.id < (SELECT max(id) FROM "postbox_outbox")
  OR EXISTS (SELECT 1 FROM "postbox_lease" l
             WHERE NEW.id <= (SELECT max(c.last_id) FROM "postbox_cursor" c WHERE c.stream = l.stream))
BEGIN
  SELECT RAISE(ABORT, 'outbox: leave the column id out of the INSERT; the database gives it, in the order of commits');
END;

-- SELECT * FROM postbox_lag: how each stream is doing; ages in seconds.
CREATE VIEW "postbox_lag" AS
WITH clock AS (SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) AS now),
passed AS (
  SELECT l.stream, l.error, CASE WHEN l.until > now THEN l.owner END AS owner, now,
    coalesce((SELECT max(c.last_id) FROM "postbox_cursor" c WHERE c.stream = l.stream), 0) AS last_id
  FROM "postbox_lease" l, clock)
SELECT stream, owner,
  max(now - (SELECT min(t) FROM (SELECT max(o.created_at, coalesce(o.available_at, 0)) AS t FROM "postbox_outbox" o
    WHERE o.id > p.last_id ORDER BY o.id LIMIT 10000)), 0) / 1000.0 AS oldest_unpublished,   -- of the next 10,000: the figure to alarm on
  max(coalesce((SELECT max(o.id) FROM "postbox_outbox" o), 0) - last_id, 0) AS pending,
  (SELECT count(*) FROM "postbox_held" h WHERE h.stream = p.stream AND h.state = 'retry') AS retry,
  (SELECT count(*) FROM "postbox_held" h WHERE h.stream = p.stream AND h.state = 'waiting') AS waiting,
  (SELECT count(*) FROM "postbox_held" h WHERE h.stream = p.stream AND h.state = 'delayed') AS delayed,
  (SELECT count(*) FROM "postbox_held" h WHERE h.stream = p.stream AND h.state = 'dead') AS dead,
  max(now - (SELECT min(o.created_at) FROM "postbox_held" h JOIN "postbox_outbox" o ON o.id = h.id
    WHERE h.stream = p.stream AND h.state IN ('retry', 'waiting')), 0) / 1000.0 AS oldest_held,
  max(now - (SELECT min(o.created_at) FROM "postbox_held" h JOIN "postbox_outbox" o ON o.id = h.id
    WHERE h.stream = p.stream AND h.state = 'dead'), 0) / 1000.0 AS oldest_dead,
  (now - (SELECT c.at FROM "postbox_cursor" c WHERE c.stream = p.stream AND c.last_id = p.last_id)) / 1000.0 AS last_settled,
  coalesce(p.error, (SELECT h.error FROM "postbox_held" h WHERE h.stream = p.stream AND h.state <> 'done' AND h.error IS NOT NULL
    ORDER BY h.at DESC LIMIT 1)) AS last_error              -- of the stream as a whole, or of the event that failed last
FROM passed p;

-- SELECT * FROM postbox_trace WHERE event_id = '...': what became of an event, per stream.
CREATE VIEW "postbox_trace" AS
SELECT o.event_id, l.stream,
  CASE WHEN h.state = 'done' THEN 'published' WHEN h.state IS NOT NULL THEN h.state
       WHEN c.last_id IS NOT NULL THEN 'published' ELSE 'pending' END AS state,
  strftime('%Y-%m-%dT%H:%M:%fZ', o.created_at / 1000.0, 'unixepoch') AS written_at,
  strftime('%Y-%m-%dT%H:%M:%fZ', CASE WHEN h.state IS NULL THEN c.sent_at ELSE h.sent_at END / 1000.0, 'unixepoch') AS sent_at,
  strftime('%Y-%m-%dT%H:%M:%fZ', CASE WHEN h.state = 'done' THEN h.at WHEN h.state IS NULL THEN c.at END / 1000.0, 'unixepoch') AS published_at,
  coalesce(h.relay, c.relay) AS relay,
  CASE WHEN h.state = 'done' THEN h.attempts + 1 WHEN h.state IS NOT NULL THEN h.attempts WHEN c.last_id IS NOT NULL THEN 1 ELSE 0 END AS attempts,
  CASE WHEN h.state <> 'done' THEN h.error END AS error, o.id, o.aggregate_type, o.aggregate_id, o.event_type
FROM "postbox_outbox" o LEFT JOIN "postbox_lease" l ON true   -- stream is null as long as no relay has ever run
LEFT JOIN "postbox_held" h ON h.stream = l.stream AND h.id = o.id
LEFT JOIN "postbox_cursor" c ON c.stream = l.stream
  AND c.last_id = (SELECT min(n.last_id) FROM "postbox_cursor" n WHERE n.stream = l.stream AND n.last_id >= o.id);

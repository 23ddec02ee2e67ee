//! Retention: a bin of the ring is emptied, whole, once every stream has passed all of it a retention ago and nothing in
//! it is held. Nobody ever waits for it: the lock is asked for with NOWAIT, and refused tries come again.
//! It also thins the cursor's rows out and removes them with the events they tell of.

use crate::postgres::PostgresOptions;
use crate::postgres::connect::Session;
use crate::postgres::error::{STATEMENT_TIMEOUT, within};
use crate::postgres::migrate::literal;
use crate::postgres::sql::quoted;
use postbox_engine::SourceError;
use std::cmp::Ordering;
use std::sync::Arc;
use std::time::Duration;
use tokio_postgres::error::SqlState;

/// Between looks while there is something to do: a ripe bin in use, rows of the cursor to thin out.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Between looks otherwise: an idle relay sends few statements.
const LOOK_IDLE: Duration = Duration::from_secs(10);
/// Rows of the cursor looked at by one statement.
const ROWS_MAX: i64 = 20_000;

/// A hundred years: the server's times have an end.
const SECONDS_MAX: u64 = 100 * 365 * 86_400;

/// A retention as the schema has it: whole seconds, since a bin's period is counted in them.
pub(crate) fn seconds(retention: Duration) -> i64 {
    let seconds = retention.as_secs() + u64::from(retention.subsec_nanos() > 0);
    i64::try_from(seconds.clamp(1, SECONDS_MAX)).expect("a hundred years are few seconds")
}

/// Reads the retention that the schema was migrated with.
pub(crate) fn installed(schema: &str) -> String {
    format!("SELECT {}.retention_seconds()", quoted(schema))
}

/// Has the schema keep events for so long, in its present generation of bins. Takes no lock on any table. Rows stay in the
/// bins where they are; those of the new length fill and empty as before, since `Keeper::ripe` asks nothing of a bin's
/// number or of the clock.
pub(crate) fn install(schema: &str, retention: Duration) -> String {
    let (name, seconds) = (quoted(schema), seconds(retention));
    let period = (seconds + 3) / 4; // rounded up: of six periods, four must hold the retention
    format!(
        "CREATE OR REPLACE FUNCTION {name}.retention_seconds() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE\nRETURN {seconds};\n\
         DO $postbox$ BEGIN\n\
         EXECUTE format($body$CREATE OR REPLACE FUNCTION %s.bin() RETURNS smallint LANGUAGE sql STABLE PARALLEL SAFE\n\
         RETURN (%s * 6 + date_part('epoch', now())::bigint / {period} %% 6)::smallint$body$, $name${name}$name$,\n  \
         (SELECT count(*) / 6 - 1 FROM pg_inherits WHERE inhparent = $name${name}.outbox$name$::regclass));\n\
         END $postbox$;\n"
    )
}

/// What is wrong where the schema was migrated with another retention than the configured one.
pub(crate) fn mismatch(installed: i64, configured: Duration) -> Option<String> {
    let configured = seconds(configured);
    let kept = match installed.cmp(&configured) {
        Ordering::Equal => return None,
        Ordering::Less => {
            "events stay for the configured time or longer: while writing never pauses, no bin may ever be emptied"
        }
        Ordering::Greater => "events stay as long as the schema says",
    };
    Some(format!(
        "retention: source.retention asks for {configured} s, the schema was migrated with {installed} s; until they agree {kept}"
    ))
}

struct Keeper {
    options: Arc<PostgresOptions>,
    session: Arc<Session>,
    schema: String,
    generation: i16,
    /// The cursor is thinned out up to here.
    thinned: i64,
}

/// Runs as long as the tenure. An error is told and costs nothing: retention is tried again.
pub(crate) async fn keep(options: Arc<PostgresOptions>, session: Arc<Session>, generation: i16) {
    let schema = quoted(&options.schema);
    let mut keeper = Keeper { options, session, schema, generation, thinned: 0 };
    let idle = (keeper.options.retention / 8).clamp(LOOK_AGAIN / 10, LOOK_IDLE); // a bin is due each quarter
    match keeper.mismatch().await {
        Ok(None) => {}
        Ok(Some(what)) => tracing::warn!("{what}; mend: postbox migrate"),
        Err(error) => tracing::warn!(%error, "retention"),
    }
    loop {
        let pause = match keeper.round().await {
            Ok(again) => {
                if again {
                    LOOK_AGAIN.min(idle)
                } else {
                    idle
                }
            }
            Err(error) => {
                tracing::warn!(%error, "retention");
                idle
            }
        };
        tokio::time::sleep(pause).await;
    }
}

impl Keeper {
    /// True: look again soon, since a ripe bin was in use, or rows of the cursor are left.
    async fn round(&mut self) -> Result<bool, SourceError> {
        let mut again = false;
        for bin in self.candidates().await? {
            again |= !self.empty(&bin).await?;
        }
        again |= self.thin().await?;
        self.forget().await?;
        Ok(again)
    }

    async fn mismatch(&self) -> Result<Option<String>, SourceError> {
        let sql = installed(&self.options.schema);
        let row = within(STATEMENT_TIMEOUT, "read the retention", self.session.query_one(&sql, &[])).await?;
        Ok(mismatch(row.get(0), self.options.retention))
    }

    /// For how long events stay: of what is configured and what the schema was migrated with, the longer. So a relay that
    /// was started before or after a change never empties a bin too early for it.
    fn kept(&self) -> String {
        format!(
            "make_interval(secs => greatest({}, {}.retention_seconds()))",
            seconds(self.options.retention),
            self.schema
        )
    }

    /// Bins whose newest transaction is followed by a row of the cursor that is older than the retention: a time of the
    /// database's, whatever a writer says in `created_at`. Only a hint that a closer look is worth its cost.
    async fn candidates(&self) -> Result<Vec<String>, SourceError> {
        let sql = "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid \
                   JOIN pg_namespace n ON n.oid = c.relnamespace WHERE i.inhparent = $1::text::regclass ORDER BY c.relname";
        let outbox = format!("{}.outbox", self.schema);
        let rows = within(STATEMENT_TIMEOUT, "list the bins", self.session.query(sql, &[&outbox])).await?;
        let bins: Vec<String> = rows.iter().map(|r| r.get(0)).collect();
        if bins.is_empty() {
            return Ok(bins);
        }
        let (kept, schema, generation) = (self.kept(), &self.schema, self.generation);
        let old = |bin: &String| {
            format!(
                "coalesce((SELECT at < clock_timestamp() - {kept} FROM {schema}.cursor WHERE stream = $1 AND shard = $2 \
                 AND generation = {generation} AND xid > (SELECT txid FROM {bin} ORDER BY txid DESC, id DESC LIMIT 1) ORDER BY xid LIMIT 1), false)"
            )
        };
        let sql = format!("SELECT ARRAY[{}]", bins.iter().map(old).collect::<Vec<_>>().join(", "));
        let (stream, shard) = (&*self.options.stream, self.options.shard);
        let row =
            within(STATEMENT_TIMEOUT, "look at the bins", self.session.query_one(&sql, &[&stream, &shard])).await?;
        let ripe: Vec<bool> = row.get(0);
        Ok(bins.into_iter().zip(ripe).filter_map(|(bin, ripe)| ripe.then_some(bin)).collect())
    }

    /// Whether all of a bin was passed by every stream and shard a retention ago, and nothing in it is held. The first
    /// cursor row that passed its newest transaction tells when: xmin, not xmax, since transactions above xmin may have
    /// been running then. Of this generation only: older rows count in another cluster's ids, and what nobody has read would go.
    fn ripe(&self, bin: &str) -> String {
        let (schema, generation, kept) = (&self.schema, self.generation, self.kept());
        let too_early = format!(
            "coalesce((SELECT c.at >= clock_timestamp() - {kept} FROM {schema}.cursor c \
             WHERE c.stream = l.stream AND c.shard = l.shard AND c.generation = {generation} AND c.xid > t.txid \
             AND pg_snapshot_xmin(c.since) > t.txid ORDER BY c.xid LIMIT 1), true)"
        );
        format!(
            "EXISTS (SELECT FROM (SELECT txid FROM {bin} ORDER BY txid DESC, id DESC LIMIT 1) t WHERE EXISTS (SELECT FROM {schema}.lease) \
             AND NOT EXISTS (SELECT FROM {schema}.lease l WHERE {too_early})) \
             AND NOT EXISTS (SELECT FROM {schema}.held h JOIN {bin} o ON o.id = h.id WHERE h.state <> 'done')"
        )
    }

    /// False: the bin is ripe, but in use.
    async fn empty(&self, bin: &str) -> Result<bool, SourceError> {
        let ripe = self.ripe(bin);
        let sql = format!("SELECT {ripe}");
        let row = within(STATEMENT_TIMEOUT, "look at a bin", self.session.query_one(&sql, &[])).await?;
        if !row.get::<_, bool>(0) {
            return Ok(true); // not ripe, or emptied by another relay
        }
        // One statement, so that nothing else on this connection runs inside its transaction. Looked at again under the lock.
        let body = format!(
            "BEGIN LOCK TABLE {bin} IN ACCESS EXCLUSIVE MODE NOWAIT; IF {ripe} THEN TRUNCATE {bin}; END IF; END"
        );
        let sql = format!("DO {}", literal(&body));
        match tokio::time::timeout(STATEMENT_TIMEOUT, self.session.batch_execute(&sql)).await {
            Ok(Ok(())) => {
                tracing::info!(bin, "emptied a bin: a retention ago every stream had passed all of it");
                Ok(true)
            }
            Ok(Err(e)) if e.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => Ok(false),
            Ok(Err(e)) => Err(crate::postgres::error::failed("empty a bin", e)),
            Err(_) => Err(crate::postgres::error::unavailable("PostgreSQL: could not empty a bin: no answer")),
        }
    }

    /// After five minutes one row a second is enough to say when an event was published. True: there is more to do.
    async fn thin(&mut self) -> Result<bool, SourceError> {
        let sql = format!(
            "WITH old AS (SELECT seq, date_trunc('second', at) AS second, lead(date_trunc('second', at)) OVER (ORDER BY seq) AS following \
             FROM (SELECT seq, at FROM {0}.cursor WHERE stream = $1 AND shard = $2 AND seq >= $3 ORDER BY seq LIMIT {ROWS_MAX}) c \
             WHERE at < now() - interval '5 minutes'), \
             gone AS (DELETE FROM {0}.cursor WHERE seq = ANY (ARRAY(SELECT seq FROM old WHERE second = following))) \
             SELECT coalesce(max(seq), $3), count(*) FROM old",
            self.schema
        );
        let row = within(
            STATEMENT_TIMEOUT,
            "thin the cursor out",
            self.session.query_one(&sql, &[&&*self.options.stream, &self.options.shard, &self.thinned]),
        )
        .await?;
        self.thinned = row.get(0);
        Ok(row.get::<_, i64>(1) == ROWS_MAX)
    }

    /// Removes cursor rows that passed none of the events that are left, and held rows that are done, a retention after
    /// that. The newest hundred stay: they say where reading goes on, and from which id.
    async fn forget(&self) -> Result<(), SourceError> {
        let sql = format!(
            "WITH gone AS (DELETE FROM {0}.held WHERE stream = $1 AND shard = $2 AND state = 'done' AND changed_at < now() - {1}) \
             DELETE FROM {0}.cursor WHERE seq = ANY (ARRAY(SELECT seq FROM (SELECT seq, at, xid FROM {0}.cursor WHERE stream = $1 AND shard = $2 \
             AND seq < (SELECT seq FROM {0}.cursor WHERE stream = $1 AND shard = $2 ORDER BY seq DESC OFFSET 100 LIMIT 1) ORDER BY seq LIMIT {ROWS_MAX}) c \
             WHERE at < now() - 2 * {1} AND coalesce(xid <= (SELECT txid FROM {0}.outbox ORDER BY txid, id LIMIT 1), true)))",
            self.schema,
            self.kept()
        );
        within(
            STATEMENT_TIMEOUT,
            "remove what retention is over for",
            self.session.execute(&sql, &[&&*self.options.stream, &self.options.shard]),
        )
        .await
        .map(|_| ())
    }
}

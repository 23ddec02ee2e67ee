//! The lease on a stream's shard: one row, taken under a new epoch, which fences all that its holder writes. The
//! database's clock alone decides when it ends; the relay counts its own time from before it asked.

use crate::postgres::PostgresOptions;
use crate::postgres::connect::{Session, require_own};
use crate::postgres::error::{STATEMENT_TIMEOUT, refused, unavailable, within};
use crate::postgres::sql::{SettleSql, quoted};
use postbox_engine::SourceError;
use std::time::Duration;

/// Makes the stream's lease rows where there are none, and sees that all relays agree on the number of shards.
pub(crate) async fn enrol(session: &Session, sql: &SettleSql, options: &PostgresOptions) -> Result<(), SourceError> {
    let stream = &*options.stream;
    within(options.ttl, "enrol the stream", session.execute(&sql.enrol, &[&stream, &options.shards])).await?;
    let row = within(options.ttl, "read the stream's shards", session.query_one(&sql.shards, &[&stream])).await?;
    match row.get::<_, Option<i16>>(0) {
        Some(shards) if shards == options.shards && options.shard < shards => Ok(()),
        Some(shards) => Err(refused(format!(
            "stream {stream} is divided into {shards} shards, and this relay was started as shard {} of {}: two counts would send events twice. \
             Serve it by the program that divided it (PostgresOptions {{ shards: {shards}, .. }}), and give this relay a stream of another name",
            options.shard, options.shards
        ))),
        None => Err(unavailable("the stream's lease rows are gone")),
    }
}

/// The new epoch; or for how long the holder still has it.
pub(crate) async fn acquire(
    session: &Session,
    sql: &SettleSql,
    options: &PostgresOptions,
    owner: &str,
) -> Result<Result<i64, Duration>, SourceError> {
    let (stream, ttl) = (&*options.stream, options.ttl.as_secs_f64());
    if let Some(row) =
        within(options.ttl, "take the lease", session.query_opt(&sql.acquire, &[&stream, &options.shard, &owner, &ttl]))
            .await?
    {
        return Ok(Ok(row.get(0)));
    }
    let row =
        within(options.ttl, "read the lease", session.query_opt(&sql.remaining, &[&stream, &options.shard])).await?;
    let remaining = row.and_then(|r| r.get::<_, Option<f64>>(0)).unwrap_or_default();
    Ok(Err(Duration::from_secs_f64(remaining)))
}

/// A proxy in front may have sent this connection to another server, such as the old primary, or may give it none of its
/// own. `settler`: the process id of the session that took the lease.
pub(crate) async fn same_server(
    session: &Session,
    settler: i32,
    options: &PostgresOptions,
    owner: &str,
    epoch: i64,
) -> Result<(), SourceError> {
    let sql = format!(
        "SELECT pg_backend_pid() FROM {}.lease WHERE stream = $1 AND shard = $2 AND epoch = $3 AND owner = $4",
        quoted(&options.schema)
    );
    let found = within(
        STATEMENT_TIMEOUT,
        "find the lease on the reading connection",
        session.query_opt(&sql, &[&&*options.stream, &options.shard, &epoch, &owner]),
    )
    .await?;
    let row = found.ok_or_else(|| {
        unavailable("PostgreSQL: connections to the same URL do not see the same lease: two servers answer there, or another relay was quicker")
    })?;
    require_own(session, row.get(0), settler).await
}

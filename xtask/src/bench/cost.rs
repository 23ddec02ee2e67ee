//! S7: what the relay's work costs the database, per million events: nobody writes while it drains, and autovacuum
//! is off, so what is counted is the relay's alone.

use super::{Scale, drain, report, round};
use crate::audit::Listener;
use crate::load;
use crate::world::{Setup, World};
use anyhow::Result;
use serde_json::{Map, json};
use std::time::Duration;
use tokio_postgres::Client;

pub(super) async fn run(scale: Scale) -> Result<()> {
    let (Scale { size, .. }, events) = (scale, scale.events(1_000_000));
    let world = World::start(Setup { bench: true, statements: true, ..Setup::default() })?;
    let client = world.connect().await?;
    // One by one: statements that go together are one transaction, and ALTER SYSTEM takes none.
    for sql in ["CREATE EXTENSION pg_stat_statements", "ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()"] {
        client.batch_execute(sql).await?;
    }
    drain::prepare(&world, size, 0).await?;
    let begin = lsn(&client).await?;
    load::fill(&world, 1, 1 + events, size).await?;
    client.batch_execute("CHECKPOINT; SELECT pg_stat_statements_reset()").await?;
    let filled = lsn(&client).await?;
    let drained = drain::drain(&world, 1, events)?;
    while client.query_one(OTHERS, &[]).await?.get::<_, i64>(0) > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await; // a connection tells its counts when it has ended
    }
    let wal = lsn(&client).await? - filled;
    let statements = client.query_one(STATEMENTS, &[]).await?;
    let (calls, relay_wal): (i64, i64) = (statements.get(0), statements.get(1));
    let mut tables = Map::new();
    for row in client.query(TABLES, &[]).await? {
        let (dead, table, index): (i64, i64, i64) = (row.get(1), row.get(2), row.get(3));
        tables.insert(row.get(0), json!({ "dead_rows": dead, "table_bytes": table, "index_bytes": index }));
    }
    let audit = Listener::start(&world.kafka.bootstrap(), |_| {})?.finish()?;
    let per_event = |bytes: i64| round(bytes as f64 / events as f64);
    let figures = vec![
        ("events", events.into()),
        ("size", size.into()),
        ("events_per_s", drained.events_per_s.into()),
        ("relay_wal_bytes_per_event", per_event(wal).into()),
        ("relay_statements_wal_bytes_per_event", per_event(relay_wal).into()),
        ("write_wal_bytes_per_event", per_event(filled - begin).into()),
        ("relay_statements_per_million", (calls * 1_000_000 / events as i64).into()),
        ("tables", tables.into()),
        ("relay_rss_mb", drained.rss_mb.into()),
        ("relay_cpu_us_per_event", drained.cpu_us_per_event.into()),
        ("foreign_cores", drained.foreign_cores.into()),
    ];
    report(&world, "s7", figures, &audit, (0..1 + events).map(load::place)).await
}

/// Without what the harness itself asks.
const STATEMENTS: &str = "SELECT sum(calls)::bigint, sum(wal_bytes)::bigint FROM pg_stat_statements
    WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND query !~ 'pg_stat|pg_current_wal_insert_lsn'";

const OTHERS: &str = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'postbox%'";

const TABLES: &str =
    "SELECT CASE WHEN relname LIKE 'outbox%' THEN 'outbox' ELSE relname::text END, sum(n_dead_tup)::bigint,
    sum(pg_table_size(relid))::bigint, sum(pg_indexes_size(relid))::bigint
    FROM pg_stat_user_tables WHERE schemaname = 'postbox' GROUP BY 1 ORDER BY 1";

async fn lsn(client: &Client) -> Result<i64> {
    Ok(client.query_one("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint", &[]).await?.get(0))
}

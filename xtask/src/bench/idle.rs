//! S11: a relay with nothing to do. What it costs for a minute, and how late the first event after a minute's
//! silence arrives; several such minutes, since one event is no percentile.

use super::{Scale, median, ms, report, round};
use crate::audit::Listener;
use crate::load::{self, INSERT, payload, place};
use crate::machine::{self, TICK_US, Watch};
use crate::world::{Setup, World};
use anyhow::{Result, bail};
use hdrhistogram::Histogram;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tokio_postgres::Client;

const SILENCE: Duration = Duration::from_secs(60);
/// From the last event until the relay has gone to sleep.
const SETTLE: Duration = Duration::from_secs(10);

pub(super) async fn run(scale: Scale) -> Result<()> {
    let (rounds, silence) = (scale.rounds(7), scale.pause(SILENCE));
    let world = World::start(Setup { bench: true, statements: true, ..Setup::default() })?;
    let client = world.connect().await?;
    client.batch_execute("CREATE EXTENSION pg_stat_statements").await?;
    let insert = client.prepare(INSERT).await?;
    let (arrivals, arrived) = mpsc::channel();
    let listener = Listener::start(&world.kafka.bootstrap(), move |seen| {
        let _ = arrivals.send((load::number(seen), Instant::now())); // nobody waits any more only at the very end
    })?;
    let (relay, watch) = (world.relay("bench")?, Watch::start()?);
    let (mut relay_cpu, mut database_cpu, mut statements, mut latency) =
        (vec![], vec![], vec![], Histogram::<u64>::new(3)?);
    let cpu_us = || Ok::<_, anyhow::Error>((relay.cpu_us()?, machine::family(world.postgres.pid())? * TICK_US));
    for n in 0..=rounds as u64 {
        let event = place(n);
        client.execute(&insert, &[&event.key.to_string(), &(event.seq as i64), &payload(event.seq, 500)]).await?;
        let committed = Instant::now();
        let Ok((_, at)) = arrived.recv_timeout(Duration::from_secs(30)) else {
            bail!("event {n} did not arrive:\n{}", relay.log_tail())
        };
        if n > 0 {
            let late = at.saturating_duration_since(committed); // 0: faster than the answer to the writer
            eprintln!("after a silence: {:.1} ms", late.as_secs_f64() * 1_000.0);
            latency.record(late.as_micros() as u64)?;
        }
        if n == rounds as u64 {
            break;
        }
        tokio::time::sleep(scale.pause(SETTLE)).await;
        let (calls, (relay_us, database_us), start) = (calls(&client).await?, cpu_us()?, Instant::now());
        tokio::time::sleep(silence).await;
        let seconds = start.elapsed().as_secs_f64();
        let (relay_now, database_now) = cpu_us()?;
        relay_cpu.push((relay_now - relay_us) as f64 / seconds / 10_000.0);
        database_cpu.push((database_now - database_us) as f64 / seconds / 10_000.0);
        statements.push((self::calls(&client).await?.saturating_sub(calls + 1)) as f64 / seconds); // less our own
        eprintln!(
            "silence {}/{rounds}: relay {:.2} % of a core, database {:.2} %, {:.1} statements/s",
            n + 1,
            relay_cpu[n as usize],
            database_cpu[n as usize],
            statements[n as usize]
        );
    }
    let (rss_mb, foreign_cores) = (relay.rss_max_mb()?, watch.foreign_cores()?);
    relay.stop()?;
    let figures = vec![
        ("silences", rounds.into()),
        ("silence_s", silence.as_secs().into()),
        ("relay_cpu_percent", round(median(relay_cpu)).into()),
        ("database_cpu_percent", round(median(database_cpu)).into()),
        ("statements_per_s", round(median(statements)).into()),
        ("p50_ms", ms(&latency, 50.0).into()),
        ("max_ms", ms(&latency, 100.0).into()),
        ("relay_rss_mb", rss_mb.into()),
        ("foreign_cores", foreign_cores.into()),
    ];
    report(&world, "s11", figures, &listener.finish()?, (0..=rounds as u64).map(place)).await
}

/// Statements in this database so far.
async fn calls(client: &Client) -> Result<i64> {
    let sql = "SELECT sum(calls)::bigint FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())";
    Ok(client.query_one(sql, &[]).await?.get(0))
}

//! S2: events at a steady rate, whatever the database answers (an open loop), and for each the time from the
//! return of its COMMIT in the writer to its receipt by a consumer in this process.

use super::{Scale, ms, report};
use crate::audit::Listener;
use crate::load::{self, INSERT, KEYS, payload, place};
use crate::machine::Watch;
use crate::world::{Setup, World, connect};
use anyhow::{Result, bail};
use hdrhistogram::Histogram;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Connections of the writers; divides KEYS.
const WRITERS: u64 = 8;
/// Not measured: connections, plans and the JVM warm up.
const WARM_UP: Duration = Duration::from_secs(15);

/// Nanoseconds from a common start, by number of the event; 0: not yet.
type Times = Arc<Vec<AtomicU64>>;

fn times(events: u64) -> Times {
    Arc::new((0..events).map(|_| AtomicU64::new(0)).collect())
}

pub(super) async fn run(scale: Scale) -> Result<()> {
    const { assert!(KEYS.is_multiple_of(WRITERS)) };
    let world = World::start(Setup { bench: true, ..Setup::default() })?;
    let Scale { rate, size, .. } = scale;
    let in_time = |time: Duration| (rate as f64 * time.as_secs_f64()) as u64;
    let warm_up = in_time(scale.pause(WARM_UP));
    let events = warm_up + in_time(scale.time(Duration::from_secs(60)));
    let (committed, arrived, start) = (times(events), times(events), Instant::now());
    let listener = Listener::start(&world.kafka.bootstrap(), {
        let arrived = arrived.clone();
        move |seen| arrived[load::number(seen) as usize].store(start.elapsed().as_nanos() as u64, Relaxed)
    })?;
    let relay = world.relay("bench")?;
    let begin = start.elapsed() + Duration::from_secs(1);
    let (watch, mut writers) = (Watch::start()?, JoinSet::new());
    for writer in 0..WRITERS {
        let (url, committed) = (world.url().to_owned(), committed.clone());
        writers.spawn(async move {
            let client = connect(&url).await?;
            let insert = client.prepare(INSERT).await?;
            for n in (writer..events).step_by(WRITERS as usize) {
                let due = start + begin + Duration::from_nanos(n * 1_000_000_000 / rate);
                tokio::time::sleep_until(due.into()).await;
                let event = place(n);
                client
                    .execute(&insert, &[&event.key.to_string(), &(event.seq as i64), &payload(event.seq, size)])
                    .await?;
                committed[n as usize].store(start.elapsed().as_nanos() as u64, Relaxed);
            }
            Ok::<(), anyhow::Error>(())
        });
    }
    load::all(writers).await?;
    let foreign_cores = watch.foreign_cores()?;
    let wrote = (start.elapsed() - begin).as_secs_f64();
    if !listener.wait_for(events, Duration::from_secs(30)) {
        bail!("{} of {events} arrived:\n{}", listener.delivered(), relay.log_tail());
    }
    let (cpu, rss_mb) = (relay.cpu_us()?, relay.rss_max_mb()?);
    relay.stop()?;
    let audit = listener.finish()?;

    let mut latency = Histogram::<u64>::new(3)?;
    for n in warm_up as usize..events as usize {
        // The consumer may be faster than the answer to the writer: that is 0.
        let ns = arrived[n].load(Relaxed).saturating_sub(committed[n].load(Relaxed));
        latency.record(ns / 1_000)?;
    }
    let figures = vec![
        ("rate", rate.into()),
        ("size", size.into()),
        ("events_per_s", (events as f64 / wrote).round().into()),
        ("p50_ms", ms(&latency, 50.0).into()),
        ("p95_ms", ms(&latency, 95.0).into()),
        ("p99_ms", ms(&latency, 99.0).into()),
        ("p999_ms", ms(&latency, 99.9).into()),
        ("max_ms", ms(&latency, 100.0).into()),
        ("measured", latency.len().into()),
        ("relay_rss_mb", rss_mb.into()),
        ("relay_cpu_us_per_event", super::round(cpu as f64 / events as f64).into()),
        ("foreign_cores", foreign_cores.into()),
    ];
    report(&world, "s2", figures, &audit, (0..events).map(place)).await
}

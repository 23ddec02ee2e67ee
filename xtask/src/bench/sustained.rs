//! S1: writers without pause, one event per transaction; alone, then with the relay, then alone. Sustained means
//! that the events not yet delivered do not grow in number. What arrived is seen by the topic's end offsets, and read
//! and counted afterwards: a consumer is no part of what the relay costs the writers.

use super::drain::wait;
use super::{Scale, report, round};
use crate::audit::{self, Listener};
use crate::load::{self, KEYS, Written};
use crate::machine::Watch;
use crate::world::{Setup, TOPIC, World};
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};

/// Not measured: plans, files of their later size, and a broker that compiles itself, which takes a quarter of a core for most
/// of a minute.
const WARM_UP: Duration = Duration::from_secs(60);

pub(super) async fn run(scale: Scale) -> Result<()> {
    let Scale { clients, size, .. } = scale;
    let (warm_up, time) = (scale.pause(WARM_UP), scale.time(Duration::from_secs(30)));
    ensure!(KEYS.is_multiple_of(clients as u64), "--clients must divide {KEYS}, so that an aggregate has one writer");
    let world = World::start(Setup { bench: true, ..Setup::default() })?;
    let written = Written::new(clients);
    let client = audit::client(&world.kafka.bootstrap())?;
    let relay = world.relay("warm")?;
    load::write_for(&world, &written, size, warm_up).await?;
    wait(&world, written.events(), relay)?.stop()?;

    let alone_before = load::write_for(&world, &written, size, time).await?;
    let relay = wait(&world, written.events(), world.relay("bench")?)?;
    let (before, cpu, start) = (written.events(), relay.cpu_us()?, Instant::now());
    let watch = Watch::start()?;
    let mut lags = vec![];
    let writing = load::write_for(&world, &written, size, time);
    tokio::pin!(writing);
    let mut beat = tokio::time::interval(Duration::from_millis(500));
    let with_relay = loop {
        tokio::select! {
            biased;
            rate = &mut writing => break rate?, // first: the end of the run counts, not one more look
            _ = beat.tick() => lags.push(written.events().saturating_sub(audit::messages(&client, TOPIC)?)),
        }
    };
    let foreign_cores = watch.foreign_cores()?;
    let (seconds, arrived) = (start.elapsed().as_secs_f64(), audit::messages(&client, TOPIC)? - before);
    let stopped = Instant::now();
    let relay = wait(&world, written.events(), relay)?;
    let catch_up_ms = stopped.elapsed().as_millis() as u64;
    let events = written.events() - before;
    let (cpu, rss_mb) = (relay.cpu_us()? - cpu, relay.rss_max_mb()?);
    relay.stop()?;
    let alone_after = load::write_for(&world, &written, size, time).await?;
    wait(&world, written.events(), world.relay("rest")?)?.stop()?;

    let audit = Listener::start(&world.kafka.bootstrap(), |_| {})?.finish()?;
    let (early, late) = lags.split_at(lags.len() / 2);
    let worst = |lags: &[u64]| lags.iter().max().copied().unwrap_or_default();
    let alone = (alone_before + alone_after) / 2.0;
    let figures = vec![
        ("clients", clients.into()),
        ("size", size.into()),
        ("events_per_s", (arrived as f64 / seconds).round().into()),
        ("written_per_s", with_relay.round().into()),
        ("written_alone_per_s", alone.round().into()),
        ("ratio_to_alone", round(with_relay / alone).into()),
        ("delivered_to_written", round(arrived as f64 / events as f64).into()),
        ("lag_events_max_early", worst(early).into()),
        ("lag_events_max_late", worst(late).into()),
        ("catch_up_ms", catch_up_ms.into()),
        ("relay_rss_mb", rss_mb.into()),
        ("relay_cpu_us_per_event", round(cpu as f64 / events as f64).into()),
        ("foreign_cores", foreign_cores.into()),
    ];
    report(&world, "s1", figures, &audit, written.truth()).await
}

//! S4 and S5: a backlog goes into Kafka. The rate is that of the middle, from 10 % to 90 % of the backlog, by the end
//! offsets of the topic; what arrived is read and counted afterwards, so that the count costs the relay nothing.

use super::{Scale, report, round};
use crate::audit::{self, Listener};
use crate::load;
use crate::machine::Watch;
use crate::relay::Relay;
use crate::world::{MEMORY_TOPIC, Setup, TOPIC, World};
use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// Between two looks at the end offsets: a dozen small requests, of which the broker should feel little.
const SAMPLE: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_secs(60);

/// What one drain showed.
pub(super) struct Drained {
    pub(super) events_per_s: f64,
    pub(super) overall_per_s: f64,
    pub(super) first_event_ms: f64,
    pub(super) rss_mb: f64,
    pub(super) cpu_us_per_event: f64,
    pub(super) foreign_cores: f64,
}

pub(super) async fn s4(scale: Scale) -> Result<()> {
    let (Scale { size, retained, .. }, events) = (scale, scale.events(2_000_000));
    let world = World::start(Setup { bench: true, ..Setup::default() })?;
    prepare(&world, size, retained).await?;
    let before = retained + 1;
    load::fill(&world, before, before + events, size).await?;
    warm(&world, events)?;
    let drained = drain(&world, before, events)?;
    let memory = drain_into(&world, MEMORY_TOPIC, events, events, || world.relay_from_memory(events))?;
    let audit = Listener::start(&world.kafka.bootstrap(), |_| {})?.finish()?;
    let figures = vec![
        ("events", events.into()),
        ("size", size.into()),
        ("retained", retained.into()),
        ("events_per_s", drained.events_per_s.into()),
        ("overall_per_s", drained.overall_per_s.into()),
        ("first_event_ms", drained.first_event_ms.into()),
        ("from_memory_per_s", memory.events_per_s.into()),
        ("from_memory_cpu_us_per_event", memory.cpu_us_per_event.into()),
        ("share_of_memory", round(drained.events_per_s / memory.events_per_s).into()),
        ("relay_rss_mb", drained.rss_mb.into()),
        ("relay_cpu_us_per_event", drained.cpu_us_per_event.into()),
        ("foreign_cores", drained.foreign_cores.into()),
    ];
    report(&world, "s4", figures, &audit, (0..before + events).map(load::place)).await
}

pub(super) async fn s5(scale: Scale) -> Result<()> {
    let (Scale { size, .. }, events) = (scale, scale.events(2_000_000));
    let world = World::start(Setup { bench: true, ..Setup::default() })?;
    prepare(&world, size, 0).await?;
    load::fill(&world, 1, 1 + events, size).await?;
    warm(&world, events)?;
    let without = drain(&world, 1, events)?;
    let holder = world.connect().await?;
    holder.batch_execute("BEGIN; SELECT pg_current_xact_id()").await?;
    load::fill(&world, 1 + events, 1 + 2 * events, size).await?;
    let with = drain(&world, 1 + events, events)?;
    holder.batch_execute("COMMIT").await?;
    let audit = Listener::start(&world.kafka.bootstrap(), |_| {})?.finish()?;
    let figures = vec![
        ("events", events.into()),
        ("size", size.into()),
        ("events_per_s", with.events_per_s.into()),
        ("overall_per_s", with.overall_per_s.into()),
        ("first_event_ms", with.first_event_ms.into()),
        ("s4_events_per_s", without.events_per_s.into()),
        ("ratio_to_s4", round(with.events_per_s / without.events_per_s).into()),
        ("relay_rss_mb", with.rss_mb.into()),
        ("relay_cpu_us_per_event", with.cpu_us_per_event.into()),
        ("foreign_cores", with.foreign_cores.max(without.foreign_cores).into()),
    ];
    report(&world, "s5", figures, &audit, (0..1 + 2 * events).map(load::place)).await
}

/// The state before a backlog: a relay that was at work, and then was stopped; and what it has published by then.
pub(super) async fn prepare(world: &World, size: usize, retained: u64) -> Result<()> {
    let relay = world.relay("before")?;
    load::fill(world, 0, 1 + retained, size).await?;
    wait(world, 1 + retained, relay)?.stop()
}

/// As many events from memory into another topic: a broker that has just started spends a sixth of the machine on
/// compiling itself.
fn warm(world: &World, events: u64) -> Result<()> {
    drain_into(world, MEMORY_TOPIC, 0, events, || world.relay_from_memory(events)).map(drop)
}

/// Starts a relay on `events` waiting events, where `before` are in the topic already.
pub(super) fn drain(world: &World, before: u64, events: u64) -> Result<Drained> {
    drain_into(world, TOPIC, before, events, || world.relay("bench"))
}

fn drain_into(
    world: &World,
    topic: &str,
    before: u64,
    events: u64,
    relay: impl FnOnce() -> Result<Relay>,
) -> Result<Drained> {
    let client = audit::client(&world.kafka.bootstrap())?;
    let (start, watch) = (Instant::now(), Watch::start()?);
    let mut relay = relay()?;
    let (mut samples, mut first) = (vec![(0.0, 0)], None);
    let mut moved = Instant::now();
    while samples.last().is_none_or(|(_, n)| *n < events) {
        std::thread::sleep(if first.is_none() { Duration::from_millis(2) } else { SAMPLE });
        let (now, arrived) = (start.elapsed().as_secs_f64(), audit::messages(&client, topic)?.saturating_sub(before));
        if arrived > 0 && first.is_none() {
            first = Some(now);
        }
        if samples.last().is_some_and(|(_, n)| *n < arrived) {
            moved = Instant::now();
        }
        samples.push((now, arrived));
        if moved.elapsed() > PATIENCE {
            bail!("{arrived} of {events} arrived, then nothing for {PATIENCE:?}:\n{}", relay.log_tail());
        }
        relay.alive()?;
    }
    let (cpu, rss_mb, foreign_cores) = (relay.cpu_us()?, relay.rss_max_mb()?, watch.foreign_cores()?);
    relay.stop()?;
    let (from, to) = (reached(&samples, events / 10), reached(&samples, events - events / 10));
    let all = samples.last().map_or(0.0, |(t, _)| *t);
    let first_event_ms = round(first.unwrap_or_default() * 1_000.0);
    eprintln!("{events} events in {all:.2} s, the first after {first_event_ms} ms");
    Ok(Drained {
        events_per_s: ((events - 2 * (events / 10)) as f64 / (to - from)).round(),
        overall_per_s: (events as f64 / all).round(),
        first_event_ms,
        rss_mb,
        cpu_us_per_event: round(cpu as f64 / events as f64),
        foreign_cores,
    })
}

/// When the count went through `goal`, between two samples on a straight line.
fn reached(samples: &[(f64, u64)], goal: u64) -> f64 {
    let at = samples.iter().position(|(_, n)| *n >= goal).unwrap_or(samples.len() - 1).max(1);
    let ((t0, n0), (t1, n1)) = (samples[at - 1], samples[at]);
    t0 + (t1 - t0) * (goal - n0) as f64 / (n1 - n0).max(1) as f64
}

/// Waits until the topic holds that many messages.
pub(super) fn wait(world: &World, events: u64, mut relay: Relay) -> Result<Relay> {
    let client = audit::client(&world.kafka.bootstrap())?;
    let (mut last, mut moved) = (0, Instant::now());
    while last < events {
        std::thread::sleep(SAMPLE);
        let now = audit::messages(&client, TOPIC)?;
        if now > last {
            (last, moved) = (now, Instant::now());
        }
        relay.alive()?;
        if moved.elapsed() > PATIENCE {
            bail!("{last} of {events} arrived, then nothing for {PATIENCE:?}:\n{}", relay.log_tail());
        }
    }
    Ok(relay)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_between_two_samples_is_interpolated() {
        let samples = [(0.0, 0), (1.0, 100), (2.0, 300)];
        assert_eq!(reached(&samples, 50), 0.5);
        assert_eq!(reached(&samples, 200), 1.5);
        assert_eq!(reached(&samples, 300), 2.0);
    }
}

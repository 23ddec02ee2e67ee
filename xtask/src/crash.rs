//! `cargo x crash`: writers at work, two relays on one stream, and SIGKILL for one of them again and again. The
//! truth is a journal that each transaction writes beside its events; a consumer says what of it arrived, in order.
//! Moments and transactions come from a seed: a run can be repeated as far as the machine's own timing allows.

use crate::audit::{Audit, Listener, Seen, Wrong};
use crate::relay::Relay;
use crate::world::{Setup, World, connect};
use crate::{Told, load, shell};
use anyhow::{Result, bail};
use postbox_engine::{Rng, repeated_max};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio_postgres::{Client, Statement};

const WRITERS: u64 = 4;
/// Few enough that writers meet on the same aggregate all the time.
const AGGREGATES: u64 = 100;
/// Of each writer, from one transaction to the next: the relay's CPU is needed too, and a backlog builds up anyway while a lease runs out.
const PACE: Duration = Duration::from_millis(4);
/// In a relay's hands at most.
const EVENTS_MAX: usize = 250;
/// Events of one statement.
const BURST_MAX: u64 = 3_000;
/// Long enough for a lease to run out and the backlog to drain.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn run(kills: u64, seed: u64) -> Result<()> {
    if shell::in_release()? {
        return Ok(());
    }
    tokio::runtime::Runtime::new()?.block_on(run_all(kills, seed))
}

async fn run_all(kills: u64, seed: u64) -> Result<()> {
    let relay = format!("lease = \"2s\"\nevents_max = {EVENTS_MAX}").leak();
    let world = World::start(Setup { relay, ..Setup::default() })?;
    world.connect().await?.batch_execute(APP).await?;
    eprintln!("seed {seed}");
    let listener = Listener::start(&world.kafka.bootstrap(), |_| {})?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = JoinSet::new();
    for w in 0..WRITERS {
        writers.spawn(write(world.url().to_owned(), Rng::new(seed ^ (w + 1)), stop.clone()));
    }
    let mut relays = [world.relay("relay-0")?, world.relay("relay-1")?];
    let killed = kill_often(&world, &mut relays, &listener, kills, seed).await;
    stop.store(true, Relaxed);
    load::all(writers).await?;
    let of_owner = killed?;

    let journal = journal(&world).await?;
    let written = journal.len() as u64;
    if !listener.wait_for(written, PATIENCE) {
        eprintln!("{} of {written} arrived, then nothing for {PATIENCE:?}", listener.delivered());
    }
    for relay in relays {
        relay.stop()?;
    }
    let audit = listener.finish()?;
    let Wrong { lost, foreign } = audit.against(journal.into_iter());
    let possible = of_owner * repeated_max(EVENTS_MAX) as u64;
    let Audit { delivered, reordered, duplicated, .. } = audit;
    eprintln!(
        "{of_owner} of {kills} kills were of the relay that owned the lease, and explain {possible} duplicates at most"
    );
    println!(
        "{{\"kills\":{kills},\"written\":{written},\"delivered\":{delivered},\"lost\":{lost},\"reordered\":{reordered},\"duplicated\":{duplicated}}}"
    );
    if lost + reordered + foreign > 0 {
        let what = format!("{lost} lost, {reordered} reordered, {foreign} delivered that never committed; seed {seed}");
        bail!(Told(what));
    }
    if audit.duplicated > possible {
        bail!(Told(format!(
            "{duplicated} duplicates, but {of_owner} kills of the lease's owner explain {possible} at most; seed {seed}"
        )));
    }
    Ok(())
}

/// Kills one of the two relays at a drawn moment and starts it again at once, `kills` times. Returns how many of them
/// owned the lease: only those had something in flight.
async fn kill_often(world: &World, relays: &mut [Relay; 2], listener: &Listener, kills: u64, seed: u64) -> Result<u64> {
    let (mut random, begin, client) = (Rng::new(seed), Instant::now(), world.connect().await?);
    let mut of_owner = 0;
    if !listener.wait_for(1, PATIENCE) {
        bail!("no event arrives:\n{}", relays[0].log_tail());
    }
    for kill in 1..=kills {
        // Up to a lease and a half: during the handover, too. Half of them soon, while the last victim starts again.
        let pause_max = if random.below(2) == 0 { 500 } else { 3_000 };
        tokio::time::sleep(Duration::from_millis(random.below(pause_max))).await;
        let mut what = "any";
        let mut victim = random.below(2) as usize;
        if random.below(4) > 0 {
            // The owner, while it is sending: some delivery was just seen.
            listener.wait_for(listener.delivered() + 1, PATIENCE);
            tokio::time::sleep(Duration::from_micros(random.below(3_000))).await;
            let owner = lease_owner(&client).await?;
            if let Some(owner) = relays.iter().position(|relay| owns(&owner, relay.pid())) {
                (what, victim) = ("the owner at work", owner);
            }
        }
        relays[victim].kill()?;
        // Asked when it is dead, so that no lease comes or goes in between. Its row stays until the lease has run out and
        // the other takes it, and a relay whose lease has run out sends nothing any more.
        of_owner += u64::from(owns(&lease_owner(&client).await?, relays[victim].pid()));
        relays[victim] = world.relay(&format!("relay-{victim}"))?;
        relays[1 - victim].alive()?;
        if listener.ended() {
            return Ok(of_owner); // the listener says why when it is finished
        }
        let after = begin.elapsed().as_secs_f64();
        eprintln!(
            "kill {kill}/{kills} after {after:.1} s: relay-{victim} ({what}); {} delivered",
            listener.delivered()
        );
    }
    Ok(of_owner)
}

/// As the lease's row names it: empty when it was given back.
async fn lease_owner(client: &Client) -> Result<String> {
    let owner: Option<String> = client.query_one("SELECT max(owner) FROM postbox.lease", &[]).await?.get(0);
    Ok(owner.unwrap_or_default())
}

/// The owner is a relay's name, which ends with its process id by default, and an id of its tenure.
fn owns(owner: &str, pid: u32) -> bool {
    let name = owner.split(' ').next().unwrap_or_default();
    name.ends_with(&format!("-{pid}"))
}

const APP: &str = "CREATE SCHEMA app;
CREATE TABLE app.aggregate (id bigint PRIMARY KEY, version bigint NOT NULL) WITH (fillfactor = 50);
CREATE TABLE app.journal (aggregate bigint, seq bigint, event_id uuid NOT NULL, PRIMARY KEY (aggregate, seq));
INSERT INTO app.aggregate SELECT n, 0 FROM generate_series(0, 99) n"; // AGGREGATES

const CHANGE: &str = "UPDATE app.aggregate SET version = version + 1 WHERE id = $1 RETURNING version";
const EVENT: &str = "WITH event AS (
    INSERT INTO postbox.outbox (aggregate_type, aggregate_id, aggregate_seq, event_type, payload)
    VALUES ('order', $1::bigint::text, $2, 'order.changed', $3::text::json) RETURNING event_id)
  INSERT INTO app.journal SELECT $1, $2, event_id FROM event";

/// Many events of one aggregate in one statement: what waits then is larger than what a relay takes at a time.
const BURST: &str = "WITH aggregate AS (
    UPDATE app.aggregate SET version = version + $2 WHERE id = $1 RETURNING version - $2 AS before),
  event AS (
    INSERT INTO postbox.outbox (aggregate_type, aggregate_id, aggregate_seq, event_type, payload)
    SELECT 'order', $1::bigint::text, before + n, 'order.imported', json_build_object('seq', before + n)
    FROM aggregate, generate_series(1, $2::bigint) n ORDER BY n RETURNING aggregate_seq, event_id)
  INSERT INTO app.journal SELECT $1, aggregate_seq, event_id FROM event";

/// Transactions of all kinds until `stop`.
async fn write(url: String, mut random: Rng, stop: Arc<AtomicBool>) -> Result<()> {
    let mut client = connect(&url).await?;
    let statements = [client.prepare(CHANGE).await?, client.prepare(EVENT).await?, client.prepare(BURST).await?];
    let mut beat = tokio::time::interval(PACE);
    while !stop.load(Relaxed) {
        beat.tick().await;
        transaction(&mut client, &statements, &mut random).await?;
    }
    Ok(())
}

/// One business transaction. One in four has its transaction id long before it locks its aggregate, so that its
/// events come with an old id; some hold several events, some go back to a savepoint, one in ten rolls back.
async fn transaction(client: &mut Client, [change, event, burst]: &[Statement; 3], random: &mut Rng) -> Result<()> {
    let mut outer = client.transaction().await?;
    if random.below(4) == 0 {
        outer.execute("SELECT pg_current_xact_id()", &[]).await?;
        tokio::time::sleep(Duration::from_millis(random.below(30))).await;
    }
    let aggregate = random.below(AGGREGATES) as i64;
    if random.below(200) == 0 {
        outer.execute(burst, &[&aggregate, &(1 + random.below(BURST_MAX) as i64)]).await?;
    }
    let events = if random.below(10) == 0 { 1 + random.below(20) } else { 1 };
    for _ in 0..events {
        let inner = outer.transaction().await?;
        let version: i64 = inner.query_one(change, &[&aggregate]).await?.get(0);
        inner.execute(event, &[&aggregate, &version, &load::payload(version as u64, 200)]).await?;
        if random.below(20) == 0 { inner.rollback().await? } else { inner.commit().await? }
    }
    if random.below(10) == 0 {
        outer.rollback().await?
    } else {
        outer.commit().await?
    }
    Ok(())
}

/// What committed, as the database tells it.
async fn journal(world: &World) -> Result<Vec<Seen>> {
    let rows = world.connect().await?.query("SELECT aggregate, seq, event_id::text FROM app.journal", &[]).await?;
    let seen = |row: &tokio_postgres::Row| {
        let event_id = u128::from_str_radix(&row.get::<_, String>(2).replace('-', ""), 16)?;
        Ok(Seen { key: row.get::<_, i64>(0) as u64, seq: row.get::<_, i64>(1) as u64, event_id })
    };
    rows.iter().map(seen).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_of_who_stands_by_explains_no_duplicate() {
        assert!(owns("my-host-417 3a5c", 417));
        for (owner, pid) in [("my-host-417 3a5c", 41), ("my-host-417 3a5c", 17), ("host-9 a-417", 417), ("", 417)] {
            assert!(!owns(owner, pid), "{owner:?} {pid}");
        }
    }
}

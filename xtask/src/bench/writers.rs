//! S6: what a service pays for its event, with the relay running. Three kinds of the same business transaction,
//! in turn: without an event, with one in a plain table, with one in the outbox.

use super::drain::wait;
use super::{Scale, median, report, round};
use crate::audit::Listener;
use crate::load::{self, INSERT, KEYS, Written, payload, place};
use crate::machine::Watch;
use crate::world::{Setup, World, connect};
use anyhow::Result;
use serde_json::json;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

const APP: &str = "CREATE SCHEMA app;
CREATE TABLE app.account (id bigint PRIMARY KEY, version bigint NOT NULL, state text NOT NULL) WITH (fillfactor = 50);
INSERT INTO app.account SELECT n, 0, 'new' FROM generate_series(0, 9599) n;
CREATE TABLE app.plain (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, event_id uuid NOT NULL DEFAULT gen_random_uuid(),
  aggregate_type text NOT NULL, aggregate_id text NOT NULL, aggregate_seq bigint, event_type text NOT NULL, payload json, headers jsonb,
  created_at timestamptz NOT NULL DEFAULT now())";
const BUSINESS: &str = "UPDATE app.account SET version = version + 1, state = 'placed' WHERE id = $1";

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Business,
    Plain,
    Outbox,
}
const KINDS: [Kind; 3] = [Kind::Business, Kind::Plain, Kind::Outbox];

/// As in S1.
const WARM_UP: Duration = Duration::from_secs(60);

pub(super) async fn run(scale: Scale) -> Result<()> {
    let (rounds, time, size) = (scale.rounds(5), scale.time(Duration::from_secs(5)), scale.size);
    let world = World::start(Setup { bench: true, ..Setup::default() })?;
    world.connect().await?.batch_execute(APP).await?;
    let relay = world.relay("bench")?;
    // The writers of one number have aggregates of their own, and numbers of their own; 32 is the most.
    let (mut figures, written, watch) = (vec![], Written::new(32), Watch::start()?);
    transactions(&world, Kind::Outbox, &written, 16, size, scale.pause(WARM_UP)).await?;
    for (clients, name) in [(1, "clients_1"), (8, "clients_8"), (32, "clients_32")] {
        let mut rates = [const { Vec::new() }; 3];
        for round in 0..=rounds {
            for (kind, rates) in KINDS.iter().zip(&mut rates) {
                let rate = transactions(&world, *kind, &written, clients, size, time).await?;
                eprintln!("{clients} clients, round {round}: {rate:.0} transactions/s");
                if round > 0 {
                    rates.push(rate)
                } // the first warms up
            }
        }
        let [business, plain, outbox] = rates.map(median);
        figures.push((name, json!({ "business_per_s": business.round(), "plain_insert_per_s": plain.round(),
            "outbox_per_s": outbox.round(), "ratio_to_plain": round(outbox / plain), "ratio_to_business": round(outbox / business) })));
    }
    let relay = wait(&world, written.events(), relay)?;
    figures.extend([("rounds", rounds.into()), ("size", size.into())]);
    figures.extend([("relay_rss_mb", relay.rss_max_mb()?.into()), ("foreign_cores", watch.foreign_cores()?.into())]);
    relay.stop()?;
    let audit = Listener::start(&world.kafka.bootstrap(), |_| {})?.finish()?;
    report(&world, "s6", figures, &audit, written.truth()).await
}

/// Transactions per second of one kind, in a closed loop.
async fn transactions(
    world: &World,
    kind: Kind,
    written: &Written,
    clients: usize,
    size: usize,
    time: Duration,
) -> Result<f64> {
    let (start, mut tasks) = (Instant::now() + Duration::from_millis(200), JoinSet::new());
    let done = Written::new(clients);
    for writer in 0..clients {
        let (url, written, done) = (world.url().to_owned(), written.clone(), done.clone());
        tasks.spawn(async move {
            let mut client = connect(&url).await?;
            let business = client.prepare(BUSINESS).await?;
            let event = match kind {
                Kind::Business => None,
                Kind::Plain => Some(client.prepare(&INSERT.replace("postbox.outbox", "app.plain")).await?),
                Kind::Outbox => Some(client.prepare(INSERT).await?),
            };
            tokio::time::sleep_until(start.into()).await;
            while start.elapsed() < time {
                let n = if kind == Kind::Outbox { written.next(writer) } else { done.next(writer) };
                let place = place(n);
                let transaction = client.transaction().await?;
                transaction.execute(&business, &[&(place.key as i64)]).await?;
                if let Some(event) = &event {
                    transaction
                        .execute(event, &[&place.key.to_string(), &(place.seq as i64), &payload(place.seq, size)])
                        .await?;
                }
                transaction.commit().await?;
                done.committed(writer);
                if kind == Kind::Outbox {
                    written.committed(writer)
                }
            }
            Ok(())
        });
    }
    load::all(tasks).await?;
    const { assert!(KEYS == 9_600) }; // the accounts of APP
    Ok(done.events() as f64 / time.as_secs_f64())
}

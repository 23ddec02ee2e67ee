//! One run: writers and relays in a storm, then the calm.

use crate::check::Violation;
use crate::log::SimLog;
use crate::plan::{Plan, between, chance};
use crate::process::{Process, Running};
use crate::sink::SimSink;
use crate::watch::Watched;
use crate::world::{Nature, Shared, World};
use crate::{Bug, Failure, Kind, Stats};
use postbox_engine::{
    Counters, Event, EventParts, LogSource, Relay, RelayOptions, Retry, Rng, Route, Rule, SourceError, Stopped, planted,
};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{sleep, timeout};

type Outcome = Result<(Stats, u64), Failure>;
type Ended = Result<Result<Stopped, SourceError>, JoinError>;

/// Runs one seed on this thread.
pub(crate) fn run_seed(seed: u64, bug: Option<Bug>) -> Outcome {
    planted::plant(bug);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let outcome = runtime.expect("a runtime without I/O needs nothing").block_on(simulate(seed, bug));
    planted::plant(None);
    outcome
}

async fn simulate(seed: u64, bug: Option<Bug>) -> Outcome {
    let mut rng = Rng::new(seed);
    let plan = Plan::new(&mut rng);
    let shared = Shared::new(World::new(plan.clone(), rng));
    let violated = tokio::select! {
        biased; // the first violation ends the run
        () = violation(&shared) => true,
        () = storm_and_calm(&shared, &plan) => false,
    };
    let mut world = shared.world();
    if !violated {
        world.check_end();
    }
    world.stats.dead = world.events.iter().filter(|info| info.dead()).count() as u64;
    world.stats.virtual_seconds = world.began.elapsed().as_secs();
    match &world.violation {
        None => Ok((world.stats.clone(), world.trace.hash)),
        Some(Violation(violation)) => {
            Err(Failure { seed, bug, violation: violation.clone(), trace: world.trace.lines() })
        }
    }
}

/// A run of a few hundred events that takes more steps than this goes in circles.
const STEPS_MAX: u64 = 2_000_000;

async fn violation(shared: &Shared) {
    loop {
        let progress = shared.progress.notified();
        {
            let mut world = shared.world();
            if world.trace.steps > STEPS_MAX {
                world.violated("the run goes in circles");
            }
            if world.violation.is_some() {
                return;
            }
        }
        progress.await;
    }
}

async fn storm_and_calm(shared: &Arc<Shared>, plan: &Plan) {
    let stop = Arc::new(Notify::new());
    let relays: Vec<_> =
        (0..plan.relays).map(|slot| tokio::spawn(supervise(shared.clone(), slot, stop.clone()))).collect();
    let locks: Vec<_> = (0..plan.keys).map(|_| Arc::new(tokio::sync::Mutex::new(()))).collect();
    let writers: Vec<_> = (0..plan.writers).map(|_| tokio::spawn(write(shared.clone(), locks.clone()))).collect();
    sleep(Duration::from_millis(plan.storm)).await;
    for writer in writers {
        writer.await.expect("a writer does not panic");
    }
    {
        let mut world = shared.world();
        world.storm = false;
        world.note(Kind::Calm, 0, 0, 0);
    }
    shared.calm.notify_waiters();
    if timeout(bound(shared, plan), settled(shared)).await.is_err() {
        let mut world = shared.world();
        let mut stuck = world.unsettled();
        stuck.truncate(5);
        return world.violated(format!("events {stuck:?} are not settled long after the storm"));
    }
    // What was on its way when the storm ended may still fail; a stop after that finds nothing in its way.
    sleep(Duration::from_secs(20)).await;
    stop.notify_waiters();
    for relay in relays {
        relay.await.expect("a supervisor does not panic");
    }
}

/// How long the calm may take: what was on its way, one lease, and every attempt of every event that fails.
fn bound(shared: &Shared, plan: &Plan) -> Duration {
    let failing = shared.world().events.iter().filter(|info| info.nature != Nature::Good).count();
    let tries = u32::try_from(failing).expect("runs are small") * (plan.attempts_max + 1);
    Duration::from_secs(90) + plan.lease + (plan.retry_pause_max + Duration::from_secs(4)) * tries
}

async fn settled(shared: &Shared) {
    loop {
        let progress = shared.progress.notified();
        if shared.world().unsettled().is_empty() {
            return;
        }
        progress.await;
    }
}

/// A service that writes events in transactions, each under its keys' locks.
async fn write(shared: Arc<Shared>, locks: Vec<Arc<tokio::sync::Mutex<()>>>) {
    let (transactions, pause_max) = {
        let world = shared.world();
        (world.plan.transactions, world.plan.writer_pause)
    };
    for _ in 0..transactions {
        let (mut keys, pause, slow, rolled_back) = {
            let mut world = shared.world();
            let rng = &mut world.rng;
            let count = between(rng, 1, 3);
            let keys: Vec<u64> = (0..count).map(|_| rng.below(locks.len() as u64)).collect();
            (keys, rng.below(pause_max + 1), chance(rng, 100), chance(rng, 100))
        };
        keys.sort_unstable();
        keys.dedup();
        sleep(Duration::from_millis(pause)).await;
        let (mut held, mut ids) = (Vec::new(), Vec::new());
        for key in keys {
            let key = usize::try_from(key).expect("an index");
            held.push(locks[key].clone().lock_owned().await);
            let count = between(&mut shared.world().rng, 1, 4);
            for _ in 0..count {
                ids.push(insert(&mut shared.world(), key));
                let pause = shared.world().rng.below(if slow { 400 } else { 2 });
                sleep(Duration::from_millis(pause)).await;
            }
        }
        if !rolled_back {
            shared.world().commit(&ids);
            shared.committed.notify_waiters();
        }
    }
}

fn insert(world: &mut World, key: usize) -> i64 {
    let (poison, flaky, unroutable) = (world.plan.poison, world.plan.flaky, world.plan.unroutable);
    let (delayed, delay_max) = (world.plan.delayed, world.plan.delay_max);
    let db_now = world.db_now();
    let rng = &mut world.rng;
    let nature = if chance(rng, poison) {
        Nature::Poison
    } else if chance(rng, flaky) {
        Nature::Flaky(u32::try_from(between(rng, 1, 6)).expect("at most six"))
    } else if chance(rng, unroutable) {
        Nature::Unroutable
    } else {
        Nature::Good
    };
    let available_at = if chance(rng, delayed) { db_now + between(rng, 1, delay_max) } else { 0 };
    let headers = if nature == Nature::Unroutable { "[]" } else { "{}" };
    let make = |id: i64| {
        Event::new(&EventParts {
            id,
            event_id: u128::from(id.cast_unsigned()).to_be_bytes(),
            aggregate_type: "order",
            aggregate_id: &key.to_string(),
            event_type: "order.changed",
            payload: Some(&id.to_be_bytes()),
            headers,
            ..EventParts::default()
        })
    };
    world.insert(make, key, nature, available_at)
}

/// One running relay.
struct Incarnation {
    process: Arc<Process>,
    relay: JoinHandle<Result<Stopped, SourceError>>,
    stop: Option<oneshot::Sender<()>>,
    counters: Arc<Counters>,
}

fn start(shared: &Arc<Shared>, instance: u64) -> Incarnation {
    let (options, policy, dies_at) = {
        let mut world = shared.world();
        let crash = world.plan.faults.crash;
        let dies_at = world.roll(crash).then(|| (world.rng.below(80), chance(&mut world.rng, 500)));
        world.note(Kind::Start, instance, 0, 0);
        let (plan, seed) = (&world.plan, world.trace.hash);
        let retry = Retry { base: plan.retry_base, pause_max: plan.retry_pause_max, attempts_max: plan.attempts_max };
        let options = RelayOptions {
            stream: "sim".into(),
            events_max: plan.events_max,
            bytes_max: plan.hand_bytes_max,
            retry,
            send_timeout: plan.send_timeout,
            drain_timeout: plan.drain_timeout,
            seed,
        };
        (options, plan.policy, dies_at)
    };
    let process = Arc::new(Process::new(instance, dies_at));
    let log = LogSource::new(SimLog::new(shared.clone(), process.clone()), policy).for_hand(options.hand());
    let source = Arc::new(Watched::new(log, shared.clone(), process.clone()));
    let sink = Arc::new(SimSink::new(shared.clone(), process.clone()));
    let rule = Rule { topic: "events".into(), ..Rule::default() };
    let route = Route::new(vec![rule]).expect("a fixed topic is a topic");
    let relay = Relay::new(source, sink, route, options);
    let counters = relay.counters();
    let (stop, stopped) = oneshot::channel();
    let stopped = async move {
        // A supervisor that is gone stops nothing.
        if stopped.await.is_err() {
            std::future::pending().await
        }
    };
    let running = Running { process: process.clone(), future: Box::pin(relay.run(stopped)) };
    Incarnation { process, relay: tokio::spawn(running), stop: Some(stop), counters }
}

/// What happens to a relay next.
#[derive(Clone, Copy, Debug)]
enum Blow {
    None,
    Crash,
    Pause(u64),
    Stop,
}

/// Starts a relay, again and again, and lets things happen to it.
async fn supervise(shared: Arc<Shared>, slot: u64, stop: Arc<Notify>) {
    let end = stop.notified();
    tokio::pin!(end);
    for incarnation in 0.. {
        let instance = incarnation * 10 + slot + 1;
        let mut running = start(&shared, instance);
        tokio::select! {
            biased; // the end of the run first
            () = &mut end => return stop_relay(&shared, running, true).await,
            () = live(&shared, &mut running) => {}
        }
        if running.process.is_dead() {
            crash(&shared, &running);
        } else {
            stop_relay(&shared, running, false).await;
        }
        let down = { between(&mut shared.world().rng, 1, 4_000) };
        sleep(Duration::from_millis(down)).await;
    }
}

fn crash(shared: &Shared, running: &Incarnation) {
    running.process.die();
    running.relay.abort();
    let mut world = shared.world();
    world.stats.crashes += 1;
    world.stats.tenures += running.counters.snapshot().tenures;
    world.note(Kind::Crash, running.process.instance, 0, 0);
}

/// Returns when the relay has died or is to be stopped.
async fn live(shared: &Arc<Shared>, running: &mut Incarnation) {
    loop {
        let calm = shared.calm.notified();
        let (blow, after) = blow(shared);
        let storm = shared.world().storm;
        tokio::select! {
            biased; // what the relay did itself comes before what is done to it
            ended = &mut running.relay => return ended_early(shared, running, ended).await,
            () = running.process.died.notified() => return,
            () = calm, if storm => continue,
            () = sleep(Duration::from_millis(after)), if storm => {}
        }
        match blow {
            Blow::None => {}
            Blow::Crash => return running.process.die(),
            Blow::Stop => return,
            Blow::Pause(pause) => {
                {
                    let mut world = shared.world();
                    world.stats.pauses += 1;
                    world.note(Kind::Pause, running.process.instance, pause, 0);
                }
                running.process.pause();
                tokio::select! {
                    biased; // no pause lasts into the calm
                    () = shared.calm.notified() => {}
                    () = sleep(Duration::from_millis(pause)) => {}
                }
                shared.world().note(Kind::Resume, running.process.instance, 0, 0);
                running.process.resume();
            }
        }
    }
}

fn blow(shared: &Shared) -> (Blow, u64) {
    let mut world = shared.world();
    let faults = world.plan.faults;
    let lease = crate::world::millis(world.plan.lease);
    let after = between(&mut world.rng, 20, 3_000);
    let blow = if world.roll(faults.crash) {
        Blow::Crash
    } else if world.roll(faults.pause) {
        Blow::Pause(between(&mut world.rng, 10, lease * 2))
    } else if world.roll(faults.stop) {
        Blow::Stop
    } else {
        Blow::None
    };
    (blow, after)
}

/// A relay ends by a stop signal only.
async fn ended_early(shared: &Shared, running: &Incarnation, ended: Ended) {
    let instance = running.process.instance;
    let how = match ended {
        Ok(Ok(stopped)) => format!("{stopped:?}"),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => panic.to_string(),
    };
    shared.world().violated(format!("p{instance} ended by itself: {how}"));
    shared.progress.notify_waiters();
    std::future::pending().await
}

/// A clean stop; in the calm nothing may be left in flight.
async fn stop_relay(shared: &Arc<Shared>, mut running: Incarnation, calm: bool) {
    let instance = running.process.instance;
    shared.world().note(Kind::Stop, instance, u64::from(calm), 0);
    let stop = running.stop.take().expect("a relay is stopped once");
    let _ = stop.send(());
    running.process.resume();
    let patience =
        if calm { shared.world().plan.drain_timeout + Duration::from_secs(30) } else { Duration::from_secs(120) };
    let ended = tokio::select! {
        biased; // it may still crash while it stops
        () = running.process.died.notified() => return crash(shared, &running),
        ended = timeout(patience, &mut running.relay) => ended,
    };
    let mut world = shared.world();
    world.stats.stops += 1;
    let counters = running.counters.snapshot();
    world.stats.tenures += counters.tenures;
    let settled = counters.published + counters.retried + counters.dead + counters.released;
    // A tenure that was lost takes what it had in hand with it.
    let only = counters.tenures == 1 && running.process.epoch.load(Relaxed) == world.lease.epoch;
    if settled > counters.claimed || (calm && only && settled != counters.claimed) {
        world.violated(format!("p{instance} claimed {} events and settled {settled}", counters.claimed));
    }
    let kept = !running.process.handed_over.load(Relaxed) || (calm && world.lease.owner == Some(instance));
    // A database that does not answer keeps no relay from ending; then that says that it kept the lease.
    if matches!(ended, Ok(Ok(Ok(Stopped::Clean)))) && kept {
        world.violated(format!("p{instance} stopped and did not hand the lease over"));
    }
    match ended {
        Ok(Ok(Ok(Stopped::Clean))) => {}
        Ok(Ok(Ok(Stopped::LeaseKept | Stopped::Abandoned { .. }))) if !calm => {}
        Ok(Ok(how)) => world.violated(format!("p{instance} stopped with {how:?}")),
        Ok(Err(panic)) => world.violated(format!("p{instance} panicked: {panic}")),
        Err(_) => world.violated(format!("p{instance} does not stop")),
    }
    drop(world);
    shared.progress.notify_waiters();
}

//! The simulated broker, as one relay process sees it: accepts, refuses, fails, goes away, says nothing, and takes
//! messages in after their sender has given them up, all within what a real broker does.

use crate::Kind;
use crate::plan::{SinkKind, between, chance};
use crate::process::Process;
use crate::world::{Nature, Shared, World, index};
use postbox_engine::{Limits, Message, SendError, SendErrorKind, Sink};
use std::collections::BTreeMap;
use std::future::pending;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until};

type Results = Vec<Result<(), SendError>>;

/// The sink of one process.
pub(crate) struct SimSink {
    shared: Arc<Shared>,
    process: Arc<Process>,
    limits: Limits,
    producer: Arc<Mutex<Producer>>,
}

/// What an idempotent producer keeps: batches land in the order of their making, and behind a message that did not
/// land no later one of its key that was on its way does.
struct Producer {
    batches: u64,
    busy_until: Instant,
    /// By key and failed batch: up to which batch nothing lands; without a bound until the relay has seen why.
    failing: BTreeMap<(usize, u64), u64>,
    /// The bound for what fails now.
    until: u64,
}

impl Producer {
    fn behind(&self, key: usize, batch: u64) -> bool {
        self.failing.range((key, 0)..=(key, batch)).any(|(_, &until)| until >= batch)
    }
}

impl SimSink {
    pub(crate) fn new(shared: Arc<Shared>, process: Arc<Process>) -> SimSink {
        let plan = shared.world().plan.clone();
        let limits = Limits {
            batch_max: plan.batch_max,
            bytes_max: plan.bytes_max,
            in_flight_max: plan.in_flight_max,
            keeps_key_order: plan.sink == SinkKind::Pipelined,
        };
        let producer = Producer { batches: 0, busy_until: Instant::now(), failing: BTreeMap::new(), until: 0 };
        SimSink { shared, process, limits, producer: Arc::new(Mutex::new(producer)) }
    }

    /// Puts messages on the wire; their outcomes come when they land.
    fn put(&self, ids: &[usize], batch: u64, given_up: &Arc<AtomicBool>) -> oneshot::Receiver<Results> {
        let lands_at = {
            let mut world = self.shared.world();
            let hang = world.plan.faults.hang;
            let latency = if world.roll(hang) { between(&mut world.rng, 900, 15_000) } else { world.rng.below(8) };
            let lands_at = Instant::now() + Duration::from_millis(latency);
            let mut producer = lock(&self.producer);
            if self.limits.keeps_key_order {
                producer.busy_until = lands_at.max(producer.busy_until + Duration::from_millis(1));
                producer.busy_until
            } else {
                lands_at
            }
        };
        let (answer, answered) = oneshot::channel();
        let (shared, producer, given_up) = (self.shared.clone(), self.producer.clone(), given_up.clone());
        let ids = ids.to_vec();
        tokio::spawn(async move {
            sleep_until(lands_at).await;
            if !given_up.load(Relaxed) {
                // A relay that has given it up never learns of a failure.
                let mut producer = lock(&producer);
                producer.until = if answer.is_closed() { producer.batches } else { u64::MAX };
                let results = shared.world().land(&mut producer, batch, &ids);
                let _ = answer.send(results);
            }
        });
        answered
    }
}

fn lock(producer: &Mutex<Producer>) -> MutexGuard<'_, Producer> {
    producer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A send whose future may be dropped: then what has not landed never does, or lands all the same.
struct Flight<'a> {
    sink: &'a SimSink,
    batch: u64,
    ids: Vec<usize>,
    given_up: Arc<AtomicBool>,
    /// Nothing lands after the drop.
    recalled: bool,
    over: bool,
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let mut world = self.sink.shared.world();
        let mut producer = lock(&self.sink.producer);
        let batches = producer.batches;
        let recalled = !self.over && self.recalled;
        for &i in &self.ids {
            let failing = (world.events[i].key, self.batch);
            if recalled || producer.failing.contains_key(&failing) {
                producer.failing.insert(failing, batches);
            }
        }
        if recalled {
            self.given_up.store(true, Relaxed);
            producer.busy_until = Instant::now();
        }
        if !self.over {
            world.given_up(&self.ids);
        }
    }
}

impl Sink for SimSink {
    fn limits(&self) -> Limits {
        self.limits
    }

    async fn send(&self, batch: &[Message]) -> Results {
        if self.process.is_dead() {
            pending::<()>().await;
        }
        let ids: Vec<usize> = batch.iter().map(|m| index(m.event.id())).collect();
        let number = {
            let mut producer = lock(&self.producer);
            producer.batches += 1;
            producer.batches
        };
        let recalled = {
            let mut world = self.shared.world();
            world.check_send(&self.process, &ids, batch);
            chance(&mut world.rng, 500)
        };
        let given_up = Arc::new(AtomicBool::new(false));
        let mut flight = Flight { sink: self, batch: number, ids, given_up, recalled, over: false };
        let group = if self.limits.keeps_key_order { flight.ids.len() } else { 1 };
        let answers: Vec<_> = flight.ids.chunks(group).map(|ids| self.put(ids, number, &flight.given_up)).collect();
        let mut results = Vec::with_capacity(batch.len());
        for answer in answers {
            match answer.await {
                Ok(landed) => results.extend(landed),
                Err(_) => pending::<()>().await,
            }
        }
        let back = self.shared.world().rng.below(3);
        sleep(Duration::from_millis(back)).await;
        self.process.gate().await;
        flight.over = true;
        self.shared.world().returned(&self.process, &flight.ids, &results);
        results
    }

    async fn check(&self) -> Result<(), SendError> {
        Ok(())
    }
}

impl World {
    /// Messages reach the broker, which decides on each.
    fn land(&mut self, producer: &mut Producer, batch: u64, ids: &[usize]) -> Results {
        let faults = self.plan.faults;
        let down_from = if self.broker_is_down() {
            0
        } else if self.roll(faults.unavailable) {
            usize::try_from(self.rng.below(ids.len() as u64)).expect("an index")
        } else {
            ids.len()
        };
        let silent = self.roll(faults.unknown);
        let mut results = Vec::with_capacity(ids.len());
        for (n, &i) in ids.iter().enumerate() {
            let key = self.events[i].key;
            let behind = self.plan.sink == SinkKind::Pipelined && producer.behind(key, batch);
            let result = if behind || n >= down_from {
                producer.failing.insert((key, batch), producer.until);
                Err(self.gone())
            } else {
                self.decide(producer, batch, i)
            };
            results.push(match result {
                Ok(()) if silent => Err(SendError::new(SendErrorKind::Unknown, "no answer")),
                result => result,
            });
        }
        results
    }

    fn gone(&mut self) -> SendError {
        let kind = if self.roll(300) { SendErrorKind::Unknown } else { SendErrorKind::Unavailable };
        SendError::new(kind, "the simulated broker is down")
    }

    fn decide(&mut self, producer: &mut Producer, batch: u64, i: usize) -> Result<(), SendError> {
        let faults = self.plan.faults;
        let info = &self.events[i];
        let (key, id, instance) = (info.key, info.event.id().cast_unsigned(), 0);
        let rejects = info.nature == Nature::Poison;
        let fails = matches!(info.nature, Nature::Flaky(times) if info.failures < times);
        if rejects || self.roll(faults.rejected) {
            self.events[i].rejected = true;
            self.note(Kind::Reject, instance, id, key as u64);
            return Err(SendError::new(SendErrorKind::Rejected, "the simulated broker refuses this message"));
        }
        if fails || self.roll(faults.failed) {
            self.events[i].failures += 1;
            self.note(Kind::Fail, instance, id, key as u64);
            if self.plan.sink == SinkKind::Pipelined && self.roll(150) {
                self.events[i].lone = true;
            } else {
                producer.failing.insert((key, batch), producer.until);
            }
            let mut error = SendError::new(SendErrorKind::Failed, "the simulated broker failed on this message");
            if chance(&mut self.rng, 300) {
                error.retry_after = Some(Duration::from_millis(between(&mut self.rng, 100, 3_000)));
            }
            return Err(error);
        }
        self.accept(i);
        Ok(())
    }
}

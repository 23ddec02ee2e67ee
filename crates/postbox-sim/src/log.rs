//! The log of a simulated relay: calls to the world that take time, get lost before or after their effect, and
//! arrive late. A call that is on its way has its effect whatever becomes of who asked, as with a real server.

use crate::plan::{between, chance};
use crate::process::{Death, Process};
use crate::world::{Mark, Shared, World};
use postbox_engine::{Changes, ClaimLimit, HeldPage, HeldQuery, Loaded, Log, LogPage, SourceError, SourceErrorKind};
use std::future::pending;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// A connection to the world.
pub(crate) struct SimLog {
    shared: Arc<Shared>,
    process: Arc<Process>,
    /// Where reading stands.
    at: Mutex<Mark>,
    /// When the call before this one has its effect: a connection keeps the order of its calls.
    busy_until: Mutex<Instant>,
}

/// What becomes of one call.
struct Fate {
    there: Duration,
    back: Duration,
    /// It reaches the database.
    arrives: bool,
    /// After this long the caller gives up.
    patience: Duration,
}

impl SimLog {
    pub(crate) fn new(shared: Arc<Shared>, process: Arc<Process>) -> SimLog {
        SimLog { shared, process, at: Mutex::default(), busy_until: Mutex::new(Instant::now()) }
    }

    fn fate(world: &mut World) -> Fate {
        let ms = Duration::from_millis;
        let faults = world.plan.faults;
        let down = world.database_is_down();
        let failed = world.roll(faults.database) || down;
        let slow = world.roll(faults.database_slow);
        let rng = &mut world.rng;
        let there = ms(if slow { between(rng, 20, 1_500) } else { rng.below(4) });
        let back = ms(rng.below(3));
        if !failed {
            return Fate { there, back, arrives: true, patience: ms(20_000) };
        }
        let arrives = !down && chance(rng, 600);
        // Done and then lost; or done late, when the caller has given up and perhaps somebody else leads.
        let late = chance(rng, 400);
        let patience = if late { between(rng, 50, 3_000) } else { rng.below(5) };
        let behind = if chance(rng, 600) { rng.below(60) } else { rng.below(9_000) };
        let there = if late { ms(patience + behind) } else { there };
        let patience = ms(patience);
        Fate { there, back: ms(30_000), arrives, patience }
    }

    /// One statement.
    async fn call<R: Send + 'static>(
        &self,
        effect: impl FnOnce(&mut World) -> Result<R, SourceError> + Send + 'static,
    ) -> Result<R, SourceError> {
        self.process.gate().await;
        let (fate, death) = {
            let mut world = self.shared.world();
            let death = self.process.call(world.storm);
            (Self::fate(&mut world), death)
        };
        if death == Death::Before {
            self.process.die();
            pending::<()>().await;
        }
        let effect_at = {
            let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
            *busy_until = (Instant::now() + fate.there).max(*busy_until + Duration::from_millis(1));
            *busy_until
        };
        let (answer, answered) = oneshot::channel();
        let shared = self.shared.clone();
        tokio::spawn(async move {
            sleep_until(effect_at).await;
            if fate.arrives {
                let result = effect(&mut shared.world());
                shared.progress.notify_waiters();
                let _ = answer.send(result);
            }
        });
        let answered = async {
            let result = answered.await.ok()?;
            sleep(fate.back).await;
            Some(result)
        };
        let result = timeout(fate.patience, answered).await;
        if death == Death::After {
            self.process.die();
        }
        self.process.gate().await;
        if let Ok(Some(result)) = result {
            return result;
        }
        // A new connection: what the old one still has on its way may come after what the new one says.
        *self.busy_until.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        Err(SourceError::new(SourceErrorKind::Unavailable, "the connection to the simulated database is lost"))
    }

    fn epoch(&self) -> u64 {
        self.process.epoch.load(Relaxed)
    }
    fn at(&self) -> std::sync::MutexGuard<'_, Mark> {
        self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Log for SimLog {
    type Mark = Mark;

    async fn acquire(&self) -> Result<Result<Duration, Duration>, SourceError> {
        let instance = self.process.instance;
        match self.call(move |world| Ok(world.acquire(instance))).await? {
            Ok((ttl, epoch, cursor)) => {
                self.process.epoch.store(epoch, Relaxed);
                *self.at() = cursor;
                Ok(Ok(ttl))
            }
            Err(remaining) => Ok(Err(remaining)),
        }
    }

    async fn renew(&self) -> Result<Duration, SourceError> {
        let (instance, epoch) = (self.process.instance, self.epoch());
        self.call(move |world| world.renew(instance, epoch)).await
    }

    async fn release(&self) -> Result<(), SourceError> {
        self.process.handed_over.store(true, Relaxed);
        let instance = self.process.instance;
        self.call(move |world| {
            world.release(instance);
            Ok(())
        })
        .await
    }

    async fn load(&self) -> Result<Loaded, SourceError> {
        self.call(|world| Ok(world.load())).await
    }

    async fn read(&self, limit: ClaimLimit) -> Result<LogPage<Mark>, SourceError> {
        loop {
            let committed = self.shared.committed.notified();
            let at = *self.at();
            if let Some(page) = self.call(move |world| Ok(world.read(at, limit.events_max))).await? {
                *self.at() = page.mark;
                return Ok(page);
            }
            committed.await;
            self.process.gate().await;
        }
    }

    async fn held(&self, query: &HeldQuery) -> Result<HeldPage, SourceError> {
        let query = query.clone();
        self.call(move |world| Ok(world.held(&query))).await
    }

    async fn record(&self, changes: &Changes<Mark>) -> Result<(), SourceError> {
        let (instance, epoch, changes) = (self.process.instance, self.epoch(), changes.clone());
        self.call(move |world| world.record(instance, epoch, &changes)).await
    }
}

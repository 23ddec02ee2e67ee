//! A source that watches the relay and the log source at their border: claims are prefixes within bounds, and each
//! claimed event gets one verdict, which is true.

use crate::log::SimLog;
use crate::process::Process;
use crate::world::{Shared, World, index};
use postbox_engine::{
    Claim, ClaimLimit, DeadPolicy, LogSource, Settlement, Source, SourceError, Verdict, repeated_max,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

pub(crate) struct Watched {
    inner: LogSource<SimLog>,
    shared: Arc<Shared>,
    process: Arc<Process>,
    hands: Mutex<Hands>,
}

/// What the relay has in hand in this tenure.
#[derive(Default)]
struct Hands {
    tickets: BTreeMap<u64, usize>,
    events: BTreeSet<usize>,
    published: BTreeSet<usize>,
    dead: BTreeSet<usize>,
    renewal_failed: bool,
}

impl Watched {
    pub(crate) fn new(inner: LogSource<SimLog>, shared: Arc<Shared>, process: Arc<Process>) -> Watched {
        Watched { inner, shared, process, hands: Mutex::default() }
    }

    fn hands(&self) -> MutexGuard<'_, Hands> {
        self.hands.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hands {
    fn take(&mut self, world: &mut World, instance: u64, claim: &Claim) {
        if claim.events.is_empty() {
            world.violated(format!("p{instance} got an empty claim"));
        }
        for claimed in &claim.events {
            let i = index(claimed.event.id());
            let id = claimed.event.id();
            let twice = !self.events.insert(i) | self.tickets.insert(claimed.ticket, i).is_some();
            if twice || self.published.contains(&i) || self.dead.contains(&i) {
                world.violated(format!("p{instance} claims event {id} again"));
            }
            if let Some(earlier) = self.left_out(world, i) {
                world.violated(format!("p{instance} claims event {id} and not event {earlier} before it"));
            }
        }
        let bytes = |&i: &usize| world.events[i].event.bytes();
        let (total, greatest) = (self.events.iter().map(bytes).sum::<usize>(), self.events.iter().map(bytes).max());
        // A single event may be greater than what is left.
        if total >= world.plan.hand_bytes_max + greatest.unwrap_or_default() {
            world.violated(format!("p{instance} has {total} bytes in hand"));
        }
        if self.events.len() > world.plan.events_max {
            world.violated(format!("p{instance} has {} events in hand", self.events.len()));
        }
        // Were it to die now, these went out once more.
        let unrecorded = self.published.iter().filter(|&&i| !world.events[i].published()).count() + self.events.len();
        if unrecorded > repeated_max(world.plan.events_max) {
            world.violated(format!("p{instance} has {unrecorded} events in hand or published and not recorded"));
        }
    }

    /// An earlier event of the key that is open and in nobody's hand.
    fn left_out(&self, world: &World, i: usize) -> Option<i64> {
        let place = world.events[i].place?;
        let settled = |earlier: usize| {
            let info = &world.events[earlier];
            let dead = info.dead() || self.dead.contains(&earlier);
            let skipped = dead && world.plan.policy == DeadPolicy::Skip;
            self.events.contains(&earlier) || self.published.contains(&earlier) || info.published() || skipped
        };
        let order = &world.keys[world.events[i].key].order[..place];
        order.iter().find(|&&earlier| !settled(earlier)).map(|&earlier| world.events[earlier].event.id())
    }

    fn give(&mut self, world: &mut World, instance: u64, settlement: &Settlement) {
        let Some(i) = self.tickets.remove(&settlement.ticket) else {
            return world.violated(format!("p{instance} settles a ticket that it does not hold"));
        };
        self.events.remove(&i);
        let info = &world.events[i];
        let id = info.event.id();
        match settlement.verdict {
            Verdict::Published => {
                self.published.insert(i);
                if info.deliveries == 0 {
                    world.violated(format!("p{instance} settles event {id} as published, and the broker has it not"));
                }
            }
            Verdict::Dead { .. } => {
                self.dead.insert(i);
            }
            Verdict::Retry { .. } | Verdict::Release => {}
        }
    }
}

impl Source for Watched {
    async fn acquire(&self) -> Result<Duration, SourceError> {
        *self.hands() = Hands::default();
        self.inner.acquire().await
    }

    async fn renew(&self) -> Result<Duration, SourceError> {
        let renewed = self.inner.renew().await;
        let failed_before = std::mem::replace(&mut self.hands().renewal_failed, renewed.is_err());
        self.shared.world().stats.renewed_late += u64::from(failed_before && renewed.is_ok());
        renewed
    }

    async fn claim(&self, limit: ClaimLimit) -> Result<Claim, SourceError> {
        let claim = self.inner.claim(limit).await?;
        self.hands().take(&mut self.shared.world(), self.process.instance, &claim);
        Ok(claim)
    }

    async fn settle(&self, settlements: &[Settlement], sent: Instant) -> Result<(), SourceError> {
        for settlement in settlements {
            self.hands().give(&mut self.shared.world(), self.process.instance, settlement);
        }
        self.inner.settle(settlements, sent).await
    }

    async fn release(&self) -> Result<(), SourceError> {
        self.inner.release().await
    }
}

//! The fake database: an outbox whose transactions commit out of id order, cursor, held rows, a lease with an epoch
//! and a clock of its own. Every function here is one statement: it happens at one moment, all or none.

use crate::check::{Trace, Violation};
use crate::plan::{Plan, chance};
use crate::{Kind, Stats};
use postbox_engine::planted::{self, Bug};
use postbox_engine::{
    Changes, DeadPolicy, Event, HeldChange, HeldEvent, HeldPage, HeldQuery, HeldState, Loaded, LogPage, Rng,
    SourceError,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The world and what wakes those who wait for it.
pub(crate) struct Shared {
    world: Mutex<World>,
    pub(crate) committed: Notify,
    /// A statement has run.
    pub(crate) progress: Notify,
    /// The storm is over.
    pub(crate) calm: Notify,
}

impl Shared {
    pub(crate) fn new(world: World) -> Arc<Shared> {
        let (committed, progress, calm) = (Notify::new(), Notify::new(), Notify::new());
        Arc::new(Shared { world: Mutex::new(world), committed, progress, calm })
    }
    /// Never held across an await.
    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A position in the log: the commits before `since` are done, and of those before `until` the ids up to `last_id`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mark {
    since: usize,
    until: usize,
    last_id: i64,
}

#[derive(Debug, Default)]
pub(crate) struct Lease {
    pub(crate) owner: Option<u64>,
    pub(crate) epoch: u64,
    /// By the database's clock.
    pub(crate) until: u64,
}

/// What an event is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nature {
    Good,
    /// The broker refuses it, always.
    Poison,
    /// The broker answers with a failure so many times.
    Flaky(u32),
    /// Its headers are no JSON object.
    Unroutable,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldRow {
    pub(crate) state: HeldState,
    pub(crate) attempts: u32,
    pub(crate) due: u64,
}

/// All that is known of one event, by the database and by the broker.
#[derive(Debug)]
pub(crate) struct Info {
    pub(crate) event: Event,
    pub(crate) key: usize,
    /// Its place in the commit order of its key; none when it is delayed, which has no order.
    pub(crate) place: Option<usize>,
    pub(crate) committed: bool,
    pub(crate) available_at: u64,
    pub(crate) nature: Nature,
    /// The cursor has passed it.
    pub(crate) passed: bool,
    pub(crate) held: Option<HeldRow>,
    /// Deliveries: how many, and the numbers of the first and the last.
    pub(crate) deliveries: u64,
    pub(crate) first_at: u64,
    pub(crate) last_at: u64,
    /// Answers about this event that the broker gave.
    pub(crate) failures: u32,
    pub(crate) rejected: bool,
    /// It failed alone although others of its key were in flight behind it.
    pub(crate) lone: bool,
    /// The step of its last send.
    pub(crate) sent_at: u64,
    /// The epoch and the step of the last send that a relay saw acknowledged.
    pub(crate) acknowledged: Option<(u64, u64)>,
    /// The broker asked for a pause: epoch, and until when by the relays' clock.
    pub(crate) not_before: Option<(u64, u64)>,
}

impl Info {
    pub(crate) fn published(&self) -> bool {
        self.held.map_or(self.passed, |row| row.state == HeldState::Done)
    }
    pub(crate) fn dead(&self) -> bool {
        self.held.is_some_and(|row| row.state == HeldState::Dead)
    }
}

/// The order of one key.
#[derive(Debug, Default)]
pub(crate) struct KeyState {
    /// Events in commit order.
    pub(crate) order: Vec<usize>,
    /// The first of them that is neither delivered nor excused.
    pub(crate) expected: usize,
    /// The epoch and the step of the last outcome that was no success.
    pub(crate) trouble: (u64, u64),
    /// The process that has a message of it in flight, for sinks that do not keep order.
    pub(crate) in_flight: Option<u64>,
}

pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) rng: Rng,
    pub(crate) began: Instant,
    pub(crate) storm: bool,
    pub(crate) events: Vec<Info>,
    pub(crate) keys: Vec<KeyState>,
    /// Events in commit order.
    committed: Vec<usize>,
    cursor: Mark,
    pub(crate) lease: Lease,
    held: BTreeSet<usize>,
    pub(crate) deliveries: u64,
    pub(crate) stats: Stats,
    pub(crate) trace: Trace,
    pub(crate) violation: Option<Violation>,
}

impl World {
    pub(crate) fn new(plan: Plan, rng: Rng) -> World {
        let keys = (0..plan.keys).map(|_| KeyState::default()).collect();
        World {
            plan,
            rng,
            began: Instant::now(),
            storm: true,
            events: Vec::new(),
            keys,
            committed: Vec::new(),
            cursor: Mark::default(),
            lease: Lease::default(),
            held: BTreeSet::new(),
            deliveries: 0,
            stats: Stats::default(),
            trace: Trace::default(),
            violation: None,
        }
    }

    /// Milliseconds since the start by the relays' clock.
    pub(crate) fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).expect("runs are short")
    }
    /// Milliseconds since the start by the database's clock.
    pub(crate) fn db_now(&self) -> u64 {
        self.now() * self.plan.clock / 1_000
    }
    pub(crate) fn roll(&mut self, per_mille: u64) -> bool {
        self.storm && chance(&mut self.rng, per_mille)
    }
    pub(crate) fn database_is_down(&self) -> bool {
        let now = self.now();
        self.storm && self.plan.database_down.iter().any(|w| w.0 <= now && now < w.1)
    }
    pub(crate) fn broker_is_down(&self) -> bool {
        let now = self.now();
        self.storm && self.plan.broker_down.iter().any(|w| w.0 <= now && now < w.1)
    }

    /// Inserts an event into an open transaction; returns its id.
    pub(crate) fn insert(
        &mut self,
        make: impl FnOnce(i64) -> Event,
        key: usize,
        nature: Nature,
        available_at: u64,
    ) -> i64 {
        let id = i64::try_from(self.events.len() + 1).expect("runs are small");
        self.events.push(Info {
            event: make(id),
            key,
            place: None,
            committed: false,
            available_at,
            nature,
            passed: false,
            held: None,
            deliveries: 0,
            first_at: 0,
            last_at: 0,
            failures: 0,
            rejected: false,
            lone: false,
            sent_at: 0,
            acknowledged: None,
            not_before: None,
        });
        id
    }

    /// Commits a transaction: its events become visible at once.
    pub(crate) fn commit(&mut self, ids: &[i64]) {
        for &id in ids {
            let index = index(id);
            self.committed.push(index);
            let info = &mut self.events[index];
            info.committed = true;
            if info.available_at == 0 {
                let order = &mut self.keys[info.key].order;
                info.place = Some(order.len());
                order.push(index);
            }
            self.stats.events += 1;
            self.note(Kind::Commit, 0, id.cast_unsigned(), info_key(&self.events[index]));
        }
    }

    /// Takes the lease: its length, the new epoch, and where the cursor stands; or how long another holds it.
    pub(crate) fn acquire(&mut self, instance: u64) -> Result<(Duration, u64, Mark), Duration> {
        let now = self.db_now();
        if self.lease.owner.is_some_and(|owner| owner != instance) && now < self.lease.until {
            return Err(Duration::from_millis(self.lease.until - now));
        }
        let ttl = self.plan.lease;
        self.lease = Lease { owner: Some(instance), epoch: self.lease.epoch + 1, until: now + millis(ttl) };
        self.note(Kind::Acquire, instance, self.lease.epoch, self.lease.until);
        Ok((ttl, self.lease.epoch, self.cursor))
    }

    pub(crate) fn renew(&mut self, instance: u64, epoch: u64) -> Result<Duration, SourceError> {
        if self.lease.epoch != epoch || self.lease.owner != Some(instance) {
            return Err(SourceError::lease_lost());
        }
        self.lease.until = self.db_now() + millis(self.plan.lease);
        self.note(Kind::Renew, instance, epoch, self.lease.until);
        Ok(self.plan.lease)
    }

    pub(crate) fn release(&mut self, instance: u64) {
        if self.lease.owner == Some(instance) {
            self.lease.owner = None;
            self.note(Kind::Release, instance, self.lease.epoch, 0);
        }
    }

    /// The page after `at` and where the log stands behind it, if there is anything new.
    pub(crate) fn read(&self, at: Mark, limit: usize) -> Option<LogPage<Mark>> {
        let Mark { since, mut until, last_id } = at;
        if until <= since {
            until = self.committed.len();
        }
        if until == since {
            return None;
        }
        let mut window: Vec<usize> = self.committed[since..until].to_vec();
        window.sort_unstable();
        window.retain(|&i| self.events[i].event.id() > last_id);
        let page = &window[..window.len().min(limit.min(self.plan.page_max)).max(1).min(window.len())];
        let mark = match page.last() {
            Some(&last) if page.len() < window.len() => Mark { since, until, last_id: self.events[last].event.id() },
            _ => Mark { since: until, until, last_id: 0 },
        };
        let page = if planted::is(Bug::PageSkipsEvent) && last_id > 0 { &page[1..] } else { page };
        let now = self.db_now();
        let delay = |(n, &i): (usize, &usize)| {
            let wait = self.events[i].available_at.checked_sub(now).filter(|&wait| wait > 0)?;
            Some((u32::try_from(n).expect("pages are small"), Duration::from_millis(wait)))
        };
        let delays = page.iter().enumerate().filter_map(delay).collect();
        Some(LogPage { events: page.iter().map(|&i| self.events[i].event.clone()).collect(), delays, mark })
    }

    /// What the held rows say to a relay that begins.
    pub(crate) fn load(&self) -> Loaded {
        let (mut keys, mut next_due): (BTreeMap<u64, (u32, bool)>, Option<u64>) = (BTreeMap::new(), None);
        for &i in &self.held {
            let info = &self.events[i];
            let row = info.held.expect("the index holds held rows only");
            let blocks = match row.state {
                HeldState::Retry => true,
                HeldState::Dead => self.plan.policy == DeadPolicy::Block,
                _ => false,
            };
            if blocks || row.state == HeldState::Waiting {
                let key = keys.entry(info.event.key()).or_default();
                key.0 += 1;
                key.1 |= blocks;
            }
            if matches!(row.state, HeldState::Retry | HeldState::Delayed | HeldState::Replay) {
                next_due = Some(next_due.map_or(row.due, |due| due.min(row.due)));
            }
        }
        if planted::is(Bug::TroubleNotLoaded) {
            keys.clear();
        }
        let keys = keys.into_iter().map(|(key, (rows, blocked))| (key, rows, blocked)).collect();
        Loaded { keys, next_due: next_due.map(|due| Duration::from_millis(due.saturating_sub(self.db_now()))) }
    }

    /// Held events that may go now.
    pub(crate) fn held(&self, query: &HeldQuery) -> HeldPage {
        let (now, mut page, mut next_due) = (self.db_now(), HeldPage::default(), None::<u64>);
        let (limit, mut bytes) = (query.limit, 0);
        for &i in &self.held {
            let info = &self.events[i];
            let row = info.held.expect("the index holds held rows only");
            if query.skip.contains(&info.event.id()) {
                continue;
            }
            let timed = matches!(row.state, HeldState::Retry | HeldState::Delayed | HeldState::Replay);
            let open = row.state == HeldState::Waiting && query.open.contains(&info.event.key());
            let size = info.event.bytes();
            let fits = page.events.is_empty() || bytes + size <= limit.bytes_max;
            if page.events.len() < limit.events_max && fits && (open || (timed && row.due <= now)) {
                let event = info.event.clone();
                bytes += size;
                page.events.push(HeldEvent { event, attempts: row.attempts, state: row.state });
            } else if timed {
                let wait = row.due.saturating_sub(now);
                next_due = Some(next_due.map_or(wait, |due| due.min(wait)));
            }
        }
        page.next_due = next_due.map(Duration::from_millis);
        page
    }

    /// Writes what a settle changes, fenced by the epoch.
    pub(crate) fn record(&mut self, instance: u64, epoch: u64, changes: &Changes<Mark>) -> Result<(), SourceError> {
        if self.lease.epoch != epoch && !planted::is(Bug::SettleNotFenced) {
            self.note(Kind::Fenced, instance, epoch, self.lease.epoch);
            return Err(SourceError::lease_lost());
        }
        self.check_fence(epoch);
        self.note(Kind::Record, instance, changes.events.into(), changes.held.len() as u64);
        for change in &changes.held {
            self.hold(instance, change);
        }
        let Some(mark) = changes.mark else { return Ok(()) };
        self.check_forward(self.cursor, mark);
        let (mut passed, mut id_max) = (0, 0);
        let old = std::mem::replace(&mut self.cursor, mark);
        for at in old.since..mark.until.max(mark.since) {
            let i = self.committed[at];
            let id = self.events[i].event.id();
            if !self.events[i].passed && (at < mark.since || id <= mark.last_id) {
                self.events[i].passed = true;
                (passed, id_max) = (passed + 1, id_max.max(id));
                self.check_passed(i);
            }
        }
        if old != mark {
            self.check_counts(changes, passed, id_max);
        }
        Ok(())
    }

    fn hold(&mut self, instance: u64, change: &HeldChange) {
        let i = index(change.event.id());
        let due = self.db_now() + millis(change.due);
        self.note(Kind::Hold, instance, change.event.id().cast_unsigned(), change.state as u64);
        self.check_held(i, change);
        self.events[i].held = Some(HeldRow { state: change.state, attempts: change.attempts, due });
        if change.state == HeldState::Done {
            self.held.remove(&i);
        } else {
            self.held.insert(i);
        }
    }
}

pub(crate) fn index(id: i64) -> usize {
    usize::try_from(id - 1).expect("ids count from one")
}
pub(crate) fn millis(d: Duration) -> u64 {
    // Rounded up: "not before" must hold for fractions too.
    u64::try_from(d.as_micros().div_ceil(1_000)).expect("runs are short")
}
fn info_key(info: &Info) -> u64 {
    info.key as u64
}

//! An outbox in memory behind the engine's log source: what the suites' own tests run on, whole or with a planted bug.

use postbox_engine::{
    Changes, ClaimLimit, Event, EventParts, HeldChange, HeldEvent, HeldPage, HeldQuery, HeldState, Loaded, Log,
    LogPage, LogSource, SourceError,
};
use postbox_testkit::source_suite::{Draft, End, Harness, Outbox, Setup};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// What a suite must notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    SettleUnfenced,
    LeaseIgnored,
    RetryTooEarly,
    AttemptsForgotten,
    HeldNotLoaded,
    ReadSkipsOne,
    RollbackVisible,
    ReadNotCancelSafe,
    DelayIgnored,
    PayloadTrimmed,
    ReleaseKeepsLease,
}

/// Makes outboxes, each with the bug, if any.
pub(crate) struct Memory(pub(crate) Option<Bug>);

impl Harness for Memory {
    type Outbox = MemoryOutbox;
    async fn outbox(&self) -> MemoryOutbox {
        MemoryOutbox { bug: self.0, db: Arc::default() }
    }
}

pub(crate) struct MemoryOutbox {
    bug: Option<Bug>,
    db: Arc<Db>,
}

#[derive(Default)]
struct Db {
    state: Mutex<State>,
    written: Notify,
}

#[derive(Default)]
struct State {
    events: Vec<(Event, Option<Instant>)>,
    streams: HashMap<&'static str, Stream>,
}

#[derive(Default)]
struct Stream {
    cursor: usize,
    epoch: u64,
    until: Option<Instant>,
    held: BTreeMap<i64, (HeldChange, Instant)>,
}

impl Outbox for MemoryOutbox {
    type Source = LogSource<MemoryLog>;

    async fn source(&self, setup: Setup) -> LogSource<MemoryLog> {
        let log = MemoryLog { bug: self.bug, db: self.db.clone(), setup, tenure: Mutex::default() };
        LogSource::new(log, setup.policy)
    }

    async fn write(&self, drafts: &[Draft], end: End) {
        if end == End::Rollback && self.bug != Some(Bug::RollbackVisible) {
            return;
        }
        let mut state = self.db.state.lock().unwrap();
        for draft in drafts {
            let id = state.events.len() as i64 + 1;
            let due = draft.delay.map(|delay| Instant::now() + delay);
            state.events.push((event(draft, id, self.bug), due));
        }
        drop(state);
        self.db.written.notify_waiters();
    }
}

fn event(draft: &Draft, id: i64, bug: Option<Bug>) -> Event {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let payload = draft.payload.bytes();
    Event::new(&EventParts {
        id,
        event_id: draft.event_id.unwrap_or_else(|| *uuid::Uuid::now_v7().as_bytes()),
        aggregate_type: &draft.aggregate_type,
        aggregate_id: &draft.aggregate_id,
        aggregate_seq: draft.aggregate_seq,
        event_type: &draft.event_type,
        schema_version: draft.schema_version,
        payload: if bug == Some(Bug::PayloadTrimmed) { payload.map(<[u8]>::trim_ascii) } else { payload },
        content_type: &draft.content_type,
        headers: &draft.headers,
        destination: draft.destination.as_deref(),
        created_at: now.as_micros() as i64,
        unreadable: None,
    })
}

pub(crate) struct MemoryLog {
    bug: Option<Bug>,
    db: Arc<Db>,
    setup: Setup,
    /// Epoch, and how far it has read.
    tenure: Mutex<(u64, usize)>,
}

impl MemoryLog {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.db.state.lock().unwrap()
    }

    /// The stream's rows, if the lease is ours.
    fn fenced<T>(&self, then: impl FnOnce(&mut Stream) -> T) -> Result<T, SourceError> {
        let mut state = self.state();
        let stream = state.streams.entry(self.setup.stream).or_default();
        let ours = stream.epoch == self.tenure.lock().unwrap().0;
        if ours || self.has(Bug::SettleUnfenced) { Ok(then(stream)) } else { Err(SourceError::lease_lost()) }
    }

    fn wait(&self, due: Instant, now: Instant) -> Duration {
        if self.has(Bug::RetryTooEarly) { Duration::ZERO } else { due.saturating_duration_since(now) }
    }

    fn page(&self, limit: ClaimLimit) -> Option<LogPage<usize>> {
        let mut tenure = self.tenure.lock().unwrap();
        let state = self.state();
        let rest = &state.events[tenure.1.min(state.events.len())..];
        let mut bytes = 0;
        let fits = |(event, _): &&(Event, Option<Instant>)| {
            bytes += event.bytes();
            bytes <= limit.bytes_max
        };
        let n = rest.iter().take(limit.events_max).take_while(fits).count().max(1).min(rest.len());
        if n == 0 {
            return None;
        }
        let delays = rest[..n].iter().enumerate().filter_map(|(i, (_, due))| {
            let delay = due.map(|due| due.saturating_duration_since(Instant::now()))?;
            (!delay.is_zero() && !self.has(Bug::DelayIgnored)).then_some((i as u32, delay))
        });
        let (delays, events) = (delays.collect(), rest[..n].iter().map(|(e, _)| e.clone()).collect());
        tenure.1 += n + usize::from(self.has(Bug::ReadSkipsOne));
        Some(LogPage { events, delays, mark: tenure.1 })
    }
}

impl Log for MemoryLog {
    type Mark = usize;

    async fn acquire(&self) -> Result<Result<Duration, Duration>, SourceError> {
        let mut state = self.state();
        let stream = state.streams.entry(self.setup.stream).or_default();
        let now = Instant::now();
        let remaining = stream.until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
        if !remaining.is_zero() && !self.has(Bug::LeaseIgnored) {
            return Ok(Err(remaining));
        }
        stream.epoch += 1;
        stream.until = Some(now + self.setup.lease);
        let tenure = (stream.epoch, stream.cursor);
        drop(state);
        *self.tenure.lock().unwrap() = tenure;
        Ok(Ok(self.setup.lease))
    }

    async fn renew(&self) -> Result<Duration, SourceError> {
        self.fenced(|stream| stream.until = Some(Instant::now() + self.setup.lease))?;
        Ok(self.setup.lease)
    }

    async fn release(&self) -> Result<(), SourceError> {
        if !self.has(Bug::ReleaseKeepsLease) {
            let _ = self.fenced(|stream| stream.until = None); // harmless without a lease
        }
        Ok(())
    }

    async fn load(&self) -> Result<Loaded, SourceError> {
        let mut state = self.state();
        let now = Instant::now();
        let mut loaded = Loaded::default();
        if self.has(Bug::HeldNotLoaded) {
            return Ok(loaded);
        }
        for (row, due) in state.streams.entry(self.setup.stream).or_default().held.values() {
            if timed(row.state) {
                let wait = self.wait(*due, now);
                loaded.next_due = Some(loaded.next_due.map_or(wait, |old| old.min(wait)));
            }
            let dead = row.state == HeldState::Dead && self.setup.policy == postbox_engine::DeadPolicy::Block;
            let first = row.state == HeldState::Retry || dead;
            if !first && row.state != HeldState::Waiting {
                continue;
            }
            let key = row.event.key();
            match loaded.keys.iter_mut().find(|(k, ..)| *k == key) {
                Some((_, rows, blocked)) => (*rows, *blocked) = (*rows + 1, *blocked || first),
                None => loaded.keys.push((key, 1, first)),
            }
        }
        Ok(loaded)
    }

    async fn read(&self, limit: ClaimLimit) -> Result<LogPage<usize>, SourceError> {
        loop {
            let written = self.db.written.notified();
            if let Some(page) = self.page(limit) {
                if self.has(Bug::ReadNotCancelSafe) {
                    tokio::task::yield_now().await; // where a dropped claim loses the page
                }
                return Ok(page);
            }
            written.await;
        }
    }

    async fn held(&self, query: &HeldQuery) -> Result<HeldPage, SourceError> {
        let mut state = self.state();
        let now = Instant::now();
        let mut page = HeldPage::default();
        let mut bytes = 0;
        for (id, (row, due)) in &state.streams.entry(self.setup.stream).or_default().held {
            if query.skip.contains(id) {
                continue;
            }
            let wait = self.wait(*due, now);
            let open = row.state == HeldState::Waiting && query.open.contains(&row.event.key());
            let may_go = open || (timed(row.state) && wait.is_zero());
            bytes += if may_go { row.event.bytes() } else { 0 };
            let full = page.events.len() >= query.limit.events_max || bytes > query.limit.bytes_max;
            if may_go && (!full || page.events.is_empty()) {
                let attempts = if self.has(Bug::AttemptsForgotten) { 0 } else { row.attempts };
                page.events.push(HeldEvent { event: row.event.clone(), attempts, state: row.state });
            } else if timed(row.state) {
                page.next_due = Some(page.next_due.map_or(wait, |old| old.min(wait)));
            }
        }
        Ok(page)
    }

    async fn record(&self, changes: &Changes<usize>) -> Result<(), SourceError> {
        self.fenced(|stream| {
            if let Some(mark) = changes.mark {
                stream.cursor = mark;
            }
            for row in &changes.held {
                stream.held.insert(row.event.id(), (row.clone(), Instant::now() + row.due));
            }
        })
    }
}

/// States that wait for their time.
fn timed(state: HeldState) -> bool {
    matches!(state, HeldState::Retry | HeldState::Delayed | HeldState::Replay)
}

//! The reading task: polls, opens windows and pages through them into a bounded channel, ahead of the relay.
//! A window is what became visible between two snapshots, `since` and `until`; within it ids are in lock order.
//! It never holds a statement open for longer than `OPEN_MAX` while nobody takes its pages: that would hold vacuum back.

use crate::postgres::PostgresOptions;
use crate::postgres::connect::{Role, Session, connect};
use crate::postgres::error::{STATEMENT_TIMEOUT, unavailable, within};
use crate::postgres::log::Mark;
use crate::postgres::sql::{ReadSql, quoted};
use crate::postgres::wake::{Chore, HOLD, Pace, Wake};
use crate::postgres::wire::{Columns, Wire};
use crate::postgres::{lease, row};
use postbox_engine::{LogPage, PageBuilder, SourceError};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_postgres::Statement;

/// Pages ready for the relay: its own buffer comes on top.
const PAGES_READY_MAX: usize = 2;
/// Page requests sent ahead of the one being read: a backend answers one at a time, so this only hides the way there.
const REQUESTS_AHEAD: usize = 3;
/// How long a half-read answer may wait for the relay to take a page.
const OPEN_MAX: Duration = Duration::from_secs(1);
/// Ids in one page request at most, where few of them belong to the window.
const WIDTH_MAX: i64 = 1 << 18;

/// What the reading task sends.
pub(crate) type Pages = mpsc::Receiver<Result<LogPage<Mark>, SourceError>>;

/// What a tenure reads, and as whom.
pub(crate) struct Tenant {
    pub(crate) options: Arc<PostgresOptions>,
    pub(crate) owner: String,
    pub(crate) epoch: i64,
    /// See `lease::same_server`.
    pub(crate) settler: i32,
    pub(crate) reads: ReadSql,
}

impl Tenant {
    /// A reading connection with its statements prepared.
    pub(crate) async fn open(&self) -> Result<Wire, SourceError> {
        let session = connect(&self.options.url, Role::Reader, |_| ()).await?;
        lease::same_server(&session, self.settler, &self.options, &self.owner, self.epoch).await?;
        let mut wire = session.into_wire().await?;
        let ReadSql { poll, open, floor, late, page, .. } = &self.reads;
        for (name, sql) in [("poll", poll), ("open", open), ("floor", floor), ("late", late), ("page", page)] {
            wire.prepare(name, sql).await?;
        }
        Ok(wire)
    }
}

pub(crate) struct Reader {
    tenant: Tenant,
    /// Absent after a page was parked, or while it is in use.
    wire: Option<Wire>,
    settler: Arc<Session>,
    barrier: Statement,
    wake: Arc<Wake>,
    pace: Pace,
    out: mpsc::Sender<Result<LogPage<Mark>, SourceError>>,
    /// Up to where pages were given out.
    at: Mark,
    /// A page that nobody took in time; the connection it came from is closed.
    parked: Option<LogPage<Mark>>,
    page: PageBuilder,
    delays: Vec<(u32, Duration)>,
    /// Ids in one page request.
    width: i64,
}

/// Columns of a poll's row before those of the event: snapshot, id sequence, events found, and the row's number.
const HEAD_COLUMNS: usize = 4;

/// What a poll found.
enum Found {
    Nothing,
    Events(usize),
    /// More than a poll returns; the id sequence as it stood.
    Window(i64),
}

impl Reader {
    pub(crate) async fn new(
        tenant: Tenant,
        wire: Wire,
        settler: Arc<Session>,
        wake: Arc<Wake>,
        at: Mark,
    ) -> Result<(Reader, Pages), SourceError> {
        let barrier = within(STATEMENT_TIMEOUT, "prepare to read", settler.prepare(&tenant.reads.barrier)).await?;
        let (out, pages) = mpsc::channel(PAGES_READY_MAX);
        let reader = Reader {
            width: i64::try_from(tenant.options.page_events_max).expect("a page's events are few"),
            tenant,
            wire: Some(wire),
            settler,
            barrier,
            wake,
            pace: Pace::new(Instant::now()),
            out,
            at,
            parked: None,
            page: PageBuilder::default(),
            delays: Vec::new(),
        };
        Ok((reader, pages))
    }

    /// Reads until the tenure ends or the database fails; the error is the last thing sent.
    pub(crate) async fn run(mut self) {
        let Err(error) = self.work().await;
        let _ = self.out.send(Err(error)).await; // nobody left to tell: the tenure has ended
    }

    async fn work(&mut self) -> Result<std::convert::Infallible, SourceError> {
        loop {
            if let Some(page) = self.parked.take() {
                self.send(page).await?;
            }
            if self.at.until.is_some() {
                self.window().await?;
                continue;
            }
            let begun = Instant::now();
            let (found, xmin, took) = self.poll().await?;
            if let Found::Window(drawn) = found {
                self.open(drawn).await?;
                continue;
            }
            let events = if let Found::Events(n) = found { n } else { 0 };
            let chore = self.pace.polled(Instant::now(), took, events, xmin, self.wake.listening());
            self.chore(chore).await?;
            // A notification that came during the poll is still there: `Notify` keeps one.
            let due = tokio::time::Instant::from_std(begun + self.pace.pause());
            let _ = tokio::time::timeout_at(due, self.wake.notified.notified()).await;
        }
    }

    /// Asks for what became visible since the last poll: one statement, whose own snapshot is the new `since`.
    /// Returns the snapshot's xmin and how long the answer took, too.
    async fn poll(&mut self) -> Result<(Found, u64, Duration), SourceError> {
        let (mut wire, asked) = (self.reading().await?, Instant::now());
        wire.ask("poll", &[&self.at.since]).await?;
        let mut first = wire.row().await?.ok_or_else(|| unavailable("PostgreSQL: a poll returned no row"))?;
        let took = asked.elapsed();
        let now: Arc<str> = first.text().expect("a snapshot is not null").into();
        let (drawn, found) = (first.i64().unwrap_or_default(), first.i64().unwrap_or_default());
        let (xmin, nth) = (xmin(&now), first.i64());
        if nth.is_none() || found > i64::try_from(self.tenant.options.poll_events_max).expect("a poll's events are few")
        {
            wire.finish().await?;
            self.wire = Some(wire);
            if nth.is_some() {
                return Ok((Found::Window(drawn), xmin, took));
            }
            self.at = Mark { since: now, until: None, last_id: 0, drawn };
            return Ok((Found::Nothing, xmin, took));
        }
        let events = Found::Events(usize::try_from(found).expect("a poll's events are few"));
        self.at = Mark { until: Some(now.clone()), last_id: 0, drawn, ..self.at.clone() };
        self.take(first);
        while let Some(mut row) = wire.row().await? {
            if self.full() && !self.offer().await? {
                return Ok((events, xmin, took)); // the rest is paged, once the relay takes pages again
            }
            row.nth(HEAD_COLUMNS - 1);
            self.take(row);
        }
        self.wire = Some(wire);
        self.at = Mark { since: now, until: None, last_id: 0, drawn };
        self.offer().await?;
        Ok((events, xmin, took))
    }

    /// Opens a large window. The barrier, a cursor row whose transaction is over before `until` is taken, holds the id
    /// sequence as it stood before: from it the window after this one learns where to begin.
    async fn open(&mut self, drawn: i64) -> Result<(), SourceError> {
        let (stream, shard) = (&*self.tenant.options.stream, self.tenant.options.shard);
        within(
            STATEMENT_TIMEOUT,
            "mark a window's begin",
            self.settler.query_opt(&self.barrier, &[&stream, &shard, &self.tenant.epoch, &drawn]),
        )
        .await?
        .ok_or_else(SourceError::lease_lost)?;
        let mut wire = self.reading().await?;
        let (until, drawn) = wire.one("open", &[], |mut row| (row.text().map(Arc::from), row.i64())).await?;
        self.wire = Some(wire);
        (self.at.until, self.at.last_id, self.at.drawn) = (until, 0, drawn.unwrap_or_default());
        Ok(())
    }

    /// Pages through the open window, from wherever it was left.
    async fn window(&mut self) -> Result<(), SourceError> {
        let mut wire = self.reading().await?;
        let until = self.at.until.clone().expect("a window is open");
        let since = self.at.since.clone();
        // All that `until` sees had its id drawn before it was taken, so before this.
        self.at.drawn = wire.one("open", &[], |mut row| (row.text(), row.i64()).1).await?.unwrap_or_default();
        let shard = self.tenant.options.shard.to_string();
        let floor = [&*self.tenant.options.stream, &shard, &since];
        let floor = wire.one("floor", &floor, |mut row| row.i64()).await?.unwrap_or_default();
        if !self.late(&mut wire, &since, &until, floor).await? || !self.young(&mut wire, &since, &until, floor).await? {
            return Ok(()); // parked
        }
        self.wire = Some(wire);
        self.at = Mark { since: until, until: None, last_id: 0, drawn: self.at.drawn };
        self.offer().await?;
        Ok(())
    }

    /// The window's events below its floor: of transactions that were running at `since`. False: parked.
    async fn late(&mut self, wire: &mut Wire, since: &str, until: &str, floor: i64) -> Result<bool, SourceError> {
        while self.at.last_id < floor && !since.ends_with(':') {
            wire.ask("late", &[since, until, &self.at.last_id.to_string(), &floor.to_string()]).await?;
            let mut events = 0;
            while let Some(row) = wire.row().await? {
                if self.full() && !self.offer().await? {
                    return Ok(false);
                }
                self.take(row);
                events += 1;
            }
            if events < self.tenant.options.page_events_max {
                break;
            }
            self.offer().await?;
        }
        Ok(true)
    }

    /// The window's events above its floor, by ranges of ids: the next request is known before the answer. False: parked.
    async fn young(&mut self, wire: &mut Wire, since: &str, until: &str, floor: i64) -> Result<bool, SourceError> {
        let (mut next, upper) = (floor.max(self.at.last_id), self.at.drawn);
        let mut asked = VecDeque::new();
        loop {
            while asked.len() < REQUESTS_AHEAD && next < upper {
                let (from, to) = (next, upper.min(next + self.width));
                wire.ask("page", &[&from.to_string(), &to.to_string(), since, until]).await?;
                asked.push_back((to - from, to));
                next = to;
            }
            let Some((width, to)) = asked.pop_front() else { return Ok(true) };
            let (mut events, mut bytes) = (0, 0);
            while let Some(row) = wire.row().await? {
                if self.full() {
                    bytes += self.page.bytes();
                    if !self.offer().await? {
                        return Ok(false);
                    }
                }
                self.take(row);
                events += 1;
            }
            self.adapt(width, events, bytes + self.page.bytes());
            self.at.last_id = to;
            if !self.page.is_empty() && !self.offer().await? {
                return Ok(false);
            }
            let chore = self.pace.busy(Instant::now());
            self.chore(chore).await?;
        }
    }

    /// Fits the next page requests to what this one of `width` ids returned.
    fn adapt(&mut self, width: i64, events: usize, bytes: usize) {
        let (events_max, bytes_max) = (self.tenant.options.page_events_max, self.tenant.options.page_bytes_max);
        if width != self.width {
            return; // asked for before the last change, or cut off by the window's end
        }
        if events > events_max || bytes > bytes_max {
            self.width = (self.width / 2).max(1);
        } else if events * 2 <= events_max && bytes * 2 <= bytes_max {
            self.width = (self.width * 2).min(WIDTH_MAX);
        }
    }

    fn full(&self) -> bool {
        let options = &self.tenant.options;
        self.page.len() >= options.page_events_max || self.page.bytes() >= options.page_bytes_max
    }

    fn take(&mut self, event: Columns<'_>) {
        let index = u32::try_from(self.page.len()).expect("a page's events are few");
        let (id, delay) = row::push(event, &mut self.page);
        self.at.last_id = id;
        self.delays.extend(delay.map(|delay| (index, delay)));
    }

    /// Gives the page out. False: nobody took it within `OPEN_MAX`, so the caller must let go of its answer; the page is
    /// sent later, and reading goes on behind it on a new connection.
    async fn offer(&mut self) -> Result<bool, SourceError> {
        let page =
            LogPage { events: self.page.finish(), delays: std::mem::take(&mut self.delays), mark: self.at.clone() };
        match self.out.try_send(Ok(page)) {
            Ok(()) => Ok(true),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(ended()),
            Err(mpsc::error::TrySendError::Full(page)) => {
                match tokio::time::timeout(OPEN_MAX, self.out.reserve()).await {
                    Ok(room) => {
                        room.map_err(|_| ended())?.send(page);
                        Ok(true)
                    }
                    Err(_) => {
                        self.parked = page.ok();
                        Ok(false)
                    }
                }
            }
        }
    }

    async fn send(&self, page: LogPage<Mark>) -> Result<(), SourceError> {
        self.out.send(Ok(page)).await.map_err(|_| ended())
    }

    /// The reading connection; made anew after a page was parked. Who took it puts it back, but after an error or in the
    /// middle of an answer.
    async fn reading(&mut self) -> Result<Wire, SourceError> {
        match self.wire.take() {
            Some(wire) => Ok(wire),
            None => self.tenant.open().await,
        }
    }

    /// The wake lease, on the settling connection: the reading one may have answers under way.
    async fn chore(&mut self, chore: Chore) -> Result<(), SourceError> {
        let wake = format!("{}.wake", quoted(&self.tenant.options.schema));
        match chore {
            Chore::None => {}
            Chore::Hold => {
                let ahead = i64::try_from(HOLD.as_millis()).expect("a few seconds");
                within(
                    STATEMENT_TIMEOUT,
                    "set the wake lease",
                    self.settler.execute(&self.tenant.reads.hold, &[&wake, &ahead]),
                )
                .await?;
            }
            Chore::LieDown => {
                within(
                    STATEMENT_TIMEOUT,
                    "end the wake lease",
                    self.settler.execute(&self.tenant.reads.lie_down, &[&wake]),
                )
                .await?;
                let row = within(
                    STATEMENT_TIMEOUT,
                    "take a transaction id",
                    self.settler.query_one(&self.tenant.reads.transaction_id, &[]),
                )
                .await?;
                self.pace.closing(row.get::<_, &str>(0).parse().unwrap_or(u64::MAX));
            }
        }
        Ok(())
    }
}

fn ended() -> SourceError {
    unavailable("PostgreSQL: the tenure has ended")
}

/// The oldest transaction that a snapshot has running: the text begins with it.
fn xmin(snapshot: &str) -> u64 {
    snapshot.split(':').next().and_then(|x| x.parse().ok()).unwrap_or_default()
}

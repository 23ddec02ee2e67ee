//! The reading task: polls, opens windows and pages through them into a bounded channel, ahead of the relay.
//! A window is what became visible between two snapshots, `since` and `until`; within it ids are in lock order.
//! It never holds a statement open for longer than `OPEN_MAX` while nobody takes its pages: that would hold vacuum back.

use crate::postgres::PostgresOptions;
use crate::postgres::connect::{Role, Session, connect};
use crate::postgres::error::{STATEMENT_TIMEOUT, unavailable, within};
use crate::postgres::log::Mark;
use crate::postgres::row::{self, SnapshotText};
use crate::postgres::sql::{ReadSql, quoted};
use crate::postgres::wake::{Chore, HOLD, Pace, Wake};
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream::FuturesOrdered};
use postbox_engine::{LogPage, PageBuilder, SourceError};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, RowStream, Statement};

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

/// The reading connection with its statements.
pub(crate) struct ReadSession {
    pub(crate) session: Arc<Session>,
    poll: Statement,
    open: Statement,
    floor: Statement,
    late: Statement,
    page: Statement,
}

impl ReadSession {
    pub(crate) async fn open(options: &PostgresOptions, sql: &ReadSql) -> Result<ReadSession, SourceError> {
        let session = connect(&options.url, Role::Reader, |_| ()).await?;
        let all = async {
            tokio::try_join!(
                session.prepare(&sql.poll),
                session.prepare(&sql.open),
                session.prepare(&sql.floor),
                session.prepare(&sql.late),
                session.prepare(&sql.page)
            )
        };
        let (poll, open, floor, late, page) = within(STATEMENT_TIMEOUT, "prepare to read", all).await?;
        Ok(ReadSession { session: Arc::new(session), poll, open, floor, late, page })
    }
}

pub(crate) struct Reader {
    options: Arc<PostgresOptions>,
    sql: ReadSql,
    session: Option<Arc<ReadSession>>,
    settler: Arc<Session>,
    barrier: Statement,
    epoch: i64,
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

/// What a poll found.
enum Found {
    Nothing,
    Events(usize),
    /// More than a poll returns; the id sequence as it stood.
    Window(i64),
}

impl Reader {
    pub(crate) async fn new(
        options: Arc<PostgresOptions>,
        sql: ReadSql,
        session: ReadSession,
        settler: Arc<Session>,
        wake: Arc<Wake>,
        at: Mark,
        epoch: i64,
    ) -> Result<(Reader, Pages), SourceError> {
        let barrier = within(STATEMENT_TIMEOUT, "prepare to read", settler.prepare(&sql.barrier)).await?;
        let (out, pages) = mpsc::channel(PAGES_READY_MAX);
        let reader = Reader {
            width: i64::try_from(options.page_events_max).expect("a page's events are few"),
            options,
            sql,
            session: Some(Arc::new(session)),
            settler,
            barrier,
            epoch,
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
            let (found, xmin) = self.poll().await?;
            if let Found::Window(drawn) = found {
                self.open(drawn).await?;
                continue;
            }
            let events = if let Found::Events(n) = found { n } else { 0 };
            let now = Instant::now();
            let chore = self.pace.polled(now, now - begun, events, xmin, self.wake.listening());
            self.chore(chore).await?;
            // A notification that came during the poll is still there: `Notify` keeps one.
            let due = tokio::time::Instant::from_std(begun + self.pace.pause());
            let _ = tokio::time::timeout_at(due, self.wake.notified.notified()).await;
        }
    }

    /// Asks for what became visible since the last poll: one statement, whose own snapshot is the new `since`.
    async fn poll(&mut self) -> Result<(Found, u64), SourceError> {
        let reading = self.reading().await?;
        let mut rows = request(&reading.session, &reading.poll, &[&SnapshotText(&self.at.since)]).await?;
        let first = next(&mut rows).await?.ok_or_else(|| unavailable("PostgreSQL: a poll returned no row"))?;
        let now: Arc<str> = first.get::<_, &str>(0).into();
        let (xmin, drawn, found) = (xmin(&now), first.get(1), first.get::<_, Option<i64>>(2).unwrap_or_default());
        if found == 0 {
            self.at = Mark { since: now, until: None, last_id: 0, drawn };
            return Ok((Found::Nothing, xmin));
        }
        if found > i64::try_from(self.options.poll_events_max).expect("a poll's events are few") {
            return Ok((Found::Window(drawn), xmin));
        }
        let events = Found::Events(usize::try_from(found).expect("a poll's events are few"));
        self.at = Mark { until: Some(now.clone()), last_id: 0, drawn, ..self.at.clone() };
        self.take(&first, 4);
        while let Some(row) = next(&mut rows).await? {
            if self.full() && !self.offer().await? {
                return Ok((events, xmin)); // the rest is paged, once the relay takes pages again
            }
            self.take(&row, 4);
        }
        self.at = Mark { since: now, until: None, last_id: 0, drawn };
        self.offer().await?;
        Ok((events, xmin))
    }

    /// Opens a large window. The barrier, a cursor row whose transaction is over before `until` is taken, holds the id
    /// sequence as it stood before: from it the window after this one learns where to begin.
    async fn open(&mut self, drawn: i64) -> Result<(), SourceError> {
        let (stream, shard) = (&*self.options.stream, self.options.shard);
        within(
            STATEMENT_TIMEOUT,
            "mark a window's begin",
            self.settler.query_opt(&self.barrier, &[&stream, &shard, &self.epoch, &drawn]),
        )
        .await?
        .ok_or_else(SourceError::lease_lost)?;
        let reading = self.reading().await?;
        let row = within(STATEMENT_TIMEOUT, "open a window", reading.session.query_one(&reading.open, &[])).await?;
        self.at.until = Some(row.get::<_, &str>(0).into());
        (self.at.last_id, self.at.drawn) = (0, row.get(1));
        Ok(())
    }

    /// Pages through the open window, from wherever it was left.
    async fn window(&mut self) -> Result<(), SourceError> {
        let reading = self.reading().await?;
        let until = self.at.until.clone().expect("a window is open");
        let since = self.at.since.clone();
        // All that `until` sees had its id drawn before it was taken, so before this.
        self.at.drawn =
            within(STATEMENT_TIMEOUT, "read the id sequence", reading.session.query_one(&reading.open, &[]))
                .await?
                .get(1);
        let (stream, shard) = (&*self.options.stream, self.options.shard);
        let floor: i64 = within(
            STATEMENT_TIMEOUT,
            "read where the window begins",
            reading.session.query_one(&reading.floor, &[&stream, &shard, &SnapshotText(&since)]),
        )
        .await?
        .get(0);
        if !self.late(&reading, &since, &until, floor).await? || !self.young(reading, &since, &until, floor).await? {
            return Ok(()); // parked
        }
        self.at = Mark { since: until, until: None, last_id: 0, drawn: self.at.drawn };
        self.offer().await?;
        Ok(())
    }

    /// The window's events below its floor: of transactions that were running at `since`. False: parked.
    async fn late(&mut self, reading: &ReadSession, since: &str, until: &str, floor: i64) -> Result<bool, SourceError> {
        while self.at.last_id < floor && !since.ends_with(':') {
            let from = self.at.last_id;
            let (since, until) = (SnapshotText(since), SnapshotText(until));
            let mut rows = request(&reading.session, &reading.late, &[&since, &until, &from, &floor]).await?;
            let mut events = 0;
            while let Some(row) = next(&mut rows).await? {
                if self.full() && !self.offer().await? {
                    return Ok(false);
                }
                self.take(&row, 0);
                events += 1;
            }
            if events < self.options.page_events_max {
                break;
            }
            self.offer().await?;
        }
        Ok(true)
    }

    /// The window's events above its floor, by ranges of ids: the next request is known before the answer. False: parked.
    async fn young(
        &mut self,
        reading: Arc<ReadSession>,
        since: &Arc<str>,
        until: &Arc<str>,
        floor: i64,
    ) -> Result<bool, SourceError> {
        let (mut asked, upper) = (floor.max(self.at.last_id), self.at.drawn);
        let mut requests = FuturesOrdered::new();
        loop {
            while requests.len() < REQUESTS_AHEAD && asked < upper {
                let (from, to) = (asked, upper.min(asked + self.width));
                let (reading, since, until) = (reading.clone(), since.clone(), until.clone());
                requests.push_back(async move {
                    let (since, until) = (SnapshotText(&since), SnapshotText(&until));
                    request(&reading.session, &reading.page, &[&from, &to, &since, &until])
                        .await
                        .map(|rows| (rows, to - from, to))
                });
                asked = to;
            }
            let Some(answer) = requests.next().await else { return Ok(true) };
            let (mut rows, width, to) = answer?;
            let (mut events, mut bytes) = (0, 0);
            while let Some(row) = next(&mut rows).await? {
                if self.full() {
                    bytes += self.page.bytes();
                    if !self.offer().await? {
                        return Ok(false);
                    }
                }
                self.take(&row, 0);
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
        let (events_max, bytes_max) = (self.options.page_events_max, self.options.page_bytes_max);
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
        self.page.len() >= self.options.page_events_max || self.page.bytes() >= self.options.page_bytes_max
    }

    fn take(&mut self, row: &Row, first: usize) {
        let index = u32::try_from(self.page.len()).expect("a page's events are few");
        self.at.last_id = row::id(row, first).expect("id is not null");
        if let Some(delay) = row::push(row, first, &mut self.page) {
            self.delays.push((index, delay));
        }
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
                        self.session = None;
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

    /// The reading connection; made anew after a page was parked.
    async fn reading(&mut self) -> Result<Arc<ReadSession>, SourceError> {
        if let Some(reading) = &self.session {
            return Ok(reading.clone());
        }
        let reading = Arc::new(ReadSession::open(&self.options, &self.sql).await?);
        self.session = Some(reading.clone());
        Ok(reading)
    }

    /// The wake lease, on the settling connection: the reading one may have answers under way.
    async fn chore(&mut self, chore: Chore) -> Result<(), SourceError> {
        let wake = format!("{}.wake", quoted(&self.options.schema));
        match chore {
            Chore::None => {}
            Chore::Hold => {
                let ahead = i64::try_from(HOLD.as_millis()).expect("a few seconds");
                within(STATEMENT_TIMEOUT, "set the wake lease", self.settler.execute(&self.sql.hold, &[&wake, &ahead]))
                    .await?;
            }
            Chore::LieDown => {
                within(STATEMENT_TIMEOUT, "end the wake lease", self.settler.execute(&self.sql.lie_down, &[&wake]))
                    .await?;
                let row = within(
                    STATEMENT_TIMEOUT,
                    "take a transaction id",
                    self.settler.query_one(&self.sql.transaction_id, &[]),
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

/// Sends a statement; its rows come as they are asked for.
pub(crate) async fn request(
    session: &Session,
    statement: &Statement,
    parameters: &[&(dyn ToSql + Sync)],
) -> Result<Pin<Box<RowStream>>, SourceError> {
    let sent = session.query_raw(statement, parameters.iter().copied());
    within(STATEMENT_TIMEOUT, "read events", sent).await.map(Box::pin)
}

/// The next row; a timer only where it is not there yet.
pub(crate) async fn next(rows: &mut Pin<Box<RowStream>>) -> Result<Option<Row>, SourceError> {
    match rows.try_next().now_or_never() {
        Some(row) => row.map_err(|e| crate::postgres::error::failed("read events", e)),
        None => within(STATEMENT_TIMEOUT, "read events", rows.try_next()).await,
    }
}

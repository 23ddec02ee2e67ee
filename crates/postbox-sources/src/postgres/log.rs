//! One shard of one stream on PostgreSQL, as the engine's `Log`. It owns four connections, one per role: reader,
//! settler (lease and cursor), keeper (held events and retention), listener. Settling never waits behind reading.
//! All state of a tenure is in `Tenure`, read anew from the database when the lease is taken, and dropped with it.

use crate::postgres::connect::{Role, Session, connect};
use crate::postgres::error::{STATEMENT_TIMEOUT, unavailable, within};
use crate::postgres::identity::{Identity, examine};
use crate::postgres::reader::{Pages, Reader, Tenant};
use crate::postgres::row::SnapshotText;
use crate::postgres::sql::{HeldSql, ReadSql, SettleSql};
use crate::postgres::wake::{Wake, listener};
use crate::postgres::{PostgresOptions, held, lease, migrate, record, retention};
use postbox_engine::{
    Changes, ClaimLimit, DeadPolicy, HeldPage, HeldQuery, Loaded, Log, LogPage, SourceError, SourceErrorKind,
};
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio_postgres::{Row, Statement};

/// A position in the log: all that `since` sees is passed, and of the window up to `until` all with an id up to `last_id`.
#[derive(Clone, Debug)]
pub struct Mark {
    pub(crate) since: Arc<str>,
    pub(crate) until: Option<Arc<str>>,
    pub(crate) last_id: i64,
    /// The id sequence as a statement before the settle read it: see `ReadSql::floor`.
    pub(crate) drawn: i64,
}

/// A snapshot that sees no transaction at all: everything is to be published.
const NOTHING: &str = "3:3:";

/// The log of one stream's shard.
pub struct PostgresLog {
    options: Arc<PostgresOptions>,
    /// Unlike any other relay's, also where two have the same name.
    owner: String,
    sql: Box<SettleSql>,
    held_sql: Box<HeldSql>,
    tenure: Mutex<Option<Arc<Tenure>>>,
    /// The settling connection while no lease is ours.
    standby: Mutex<Option<Box<(Session, Identity)>>>,
    /// See `Source::trouble`.
    trouble: Mutex<Option<String>>,
}

/// What is ours from taking the lease until it is lost or given back.
pub(crate) struct Tenure {
    pub(crate) epoch: i64,
    pub(crate) identity: Identity,
    /// Greatest id ever passed.
    pub(crate) max_id: AtomicI64,
    pub(crate) settler: Arc<Session>,
    pub(crate) statements: Statements,
    keeper: Arc<Session>,
    pages: tokio::sync::Mutex<Pages>,
    tasks: Vec<JoinHandle<()>>,
}

impl Tenure {
    fn stop(&self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Prepared on the settling connection.
pub(crate) struct Statements {
    pub(crate) record: Statement,
    pub(crate) record_held: Statement,
    pub(crate) renew: Statement,
}

impl PostgresLog {
    /// Connects to nothing yet.
    pub fn new(options: PostgresOptions) -> PostgresLog {
        let random = uuid::Uuid::now_v7().simple().to_string();
        let owner = format!("{} {}", options.relay, &random[20..]);
        PostgresLog {
            sql: Box::new(SettleSql::new(&options.schema)),
            held_sql: Box::new(HeldSql::new(&options.schema)),
            options: Arc::new(options),
            owner,
            tenure: Mutex::default(),
            standby: Mutex::default(),
            trouble: Mutex::default(),
        }
    }

    fn current(&self) -> Result<Arc<Tenure>, SourceError> {
        let tenure = self.tenure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        tenure.ok_or_else(SourceError::lease_lost)
    }

    /// Ends the tenure, if there is one: its tasks stop, and so does who still waits for a page of it.
    fn end(&self) -> Option<Arc<Tenure>> {
        let tenure = self.tenure.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        tenure.stop();
        Some(tenure)
    }

    fn at(&self) -> held::Shard<'_> {
        held::Shard { stream: &self.options.stream, shard: self.options.shard }
    }

    /// The settling connection, examined; kept from one attempt at the lease to the next.
    async fn settler(&self) -> Result<(Session, Identity), SourceError> {
        let kept = self.standby.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(kept) = kept.filter(|kept| !kept.0.is_closed()) {
            return Ok(*kept);
        }
        let session = connect(&self.options.url, Role::Settler, |_| ()).await?;
        migrate::require(&session, &self.options.schema).await?;
        let identity = examine(&session, &self.options.schema).await?;
        lease::enrol(&session, &self.sql, &self.options).await?;
        Ok((session, identity))
    }

    async fn try_acquire(&self) -> Result<Result<Duration, Duration>, SourceError> {
        self.end();
        let (settler, identity) = self.settler().await?;
        match lease::acquire(&settler, &self.sql, &self.options, &self.owner).await? {
            Err(remaining) => {
                *self.standby.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new((settler, identity)));
                Ok(Err(remaining))
            }
            Ok(epoch) => {
                let settler = Arc::new(settler);
                match Box::pin(self.begin(settler.clone(), identity, epoch)).await {
                    Ok(tenure) => {
                        *self.tenure.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(tenure));
                        Ok(Ok(self.options.ttl))
                    }
                    Err(error) => {
                        let _ = self.give_back(&settler, epoch).await; // what could not begin keeps no other from it
                        Err(error)
                    }
                }
            }
        }
    }

    async fn give_back(&self, settler: &Session, epoch: i64) -> Result<(), SourceError> {
        let (stream, shard) = (&*self.options.stream, self.options.shard);
        let trouble = self.told(settler);
        within(
            self.options.ttl,
            "give the lease back",
            settler.execute(&self.sql.release, &[&stream, &shard, &epoch, &trouble]),
        )
        .await
        .map(|_| ())
    }

    /// Reads the cursor and starts the tasks of a tenure.
    async fn begin(&self, settler: Arc<Session>, identity: Identity, epoch: i64) -> Result<Tenure, SourceError> {
        let o = &self.options;
        let statements = self.prepare(&settler).await?;
        let (mark, max_id) = match self.stored(&settler).await? {
            Some(position) => position,
            None => (self.first(&settler, identity, epoch).await?, 0),
        };
        let reads =
            ReadSql::new(&o.schema, identity.generation, o.shard, o.shards, o.poll_events_max, o.page_events_max);
        let tenant = Tenant { options: o.clone(), owner: self.owner.clone(), epoch, settler: settler.backend, reads };
        let (wire, keeper) = tokio::try_join!(tenant.open(), async {
            let keeper = connect(&o.url, Role::Keeper, |_| ()).await?;
            lease::same_server(&keeper, settler.backend, o, &self.owner, epoch).await?;
            Ok(Arc::new(keeper))
        },)?;
        let wake = Arc::new(Wake::default());
        let (reader, pages) = Reader::new(tenant, wire, settler.clone(), wake.clone(), mark).await?;
        let tasks = vec![
            tokio::spawn(reader.run()),
            tokio::spawn(listener(o.clone(), wake)),
            tokio::spawn(retention::keep(o.clone(), keeper.clone(), identity.generation)),
        ];
        let max_id = AtomicI64::new(max_id);
        Ok(Tenure {
            epoch,
            identity,
            max_id,
            settler,
            statements,
            keeper,
            pages: tokio::sync::Mutex::new(pages),
            tasks,
        })
    }

    async fn prepare(&self, settler: &Session) -> Result<Statements, SourceError> {
        let all = async {
            tokio::try_join!(
                settler.prepare(&self.sql.record),
                settler.prepare(&self.sql.record_held),
                settler.prepare(&self.sql.renew)
            )
        };
        let (record, record_held, renew) = within(self.options.ttl, "prepare to settle", all).await?;
        Ok(Statements { record, record_held, renew })
    }

    /// The stream's newest cursor row.
    async fn stored(&self, settler: &Session) -> Result<Option<(Mark, i64)>, SourceError> {
        let sql = format!(
            "SELECT since::text, until::text, last_id, id_floor, max_id FROM {}.cursor WHERE stream = $1 AND shard = $2 ORDER BY seq DESC LIMIT 1",
            crate::postgres::sql::quoted(&self.options.schema)
        );
        let row = within(
            STATEMENT_TIMEOUT,
            "read the cursor",
            settler.query_opt(&sql, &[&&*self.options.stream, &self.options.shard]),
        )
        .await?;
        let text = |r: &Row, n| r.get::<_, Option<&str>>(n).map(Arc::from);
        Ok(row.map(|r| {
            let since = text(&r, 0).expect("since is not null");
            (Mark { since, until: text(&r, 1), last_id: r.get(2), drawn: r.get(3) }, r.get(4))
        }))
    }

    /// The first cursor row of a stream: nothing is passed. The sequence is read before, as its floor.
    async fn first(&self, settler: &Session, identity: Identity, epoch: i64) -> Result<Mark, SourceError> {
        let o = &self.options;
        let drawn: i64 = within(o.ttl, "read the id sequence", settler.query_one(&self.sql.drawn, &[])).await?.get(0);
        let (stream, relay, none, zero, no_events) = (&*o.stream, &*o.relay, None::<SnapshotText<'_>>, 0i64, 0i32);
        let since = SnapshotText(NOTHING);
        within(
            o.ttl,
            "begin the stream",
            settler.query_opt(
                &self.sql.begin,
                &[
                    &stream,
                    &o.shard,
                    &epoch,
                    &since,
                    &none,
                    &zero,
                    &zero,
                    &drawn,
                    &no_events,
                    &relay,
                    &identity.system_id,
                    &identity.database,
                    &identity.generation,
                    &None::<i64>,
                ],
            ),
        )
        .await?
        .ok_or_else(SourceError::lease_lost)?;
        Ok(Mark { since: NOTHING.into(), until: None, last_id: 0, drawn })
    }

    /// What the stream's trouble is, for the lease's row.
    fn told(&self, session: &Session) -> Option<String> {
        let trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        trouble.as_deref().map(|text| session.storable(text).into_owned())
    }

    async fn prolong(&self) -> Result<Duration, SourceError> {
        let (tenure, o) = (self.current()?, &self.options);
        let ttl = o.ttl.as_secs_f64();
        let trouble = self.told(&tenure.settler);
        let renewed = within(
            o.ttl,
            "renew the lease",
            tenure.settler.query_opt(&tenure.statements.renew, &[&&*o.stream, &o.shard, &tenure.epoch, &ttl, &trouble]),
        )
        .await;
        let row = renewed.map_err(|mut error| {
            if tenure.settler.is_closed() {
                error.kind = SourceErrorKind::Disconnected;
            }
            error
        })?;
        row.map(|_| o.ttl).ok_or_else(SourceError::lease_lost)
    }
}

impl Log for PostgresLog {
    type Mark = Mark;

    async fn acquire(&self) -> Result<Result<Duration, Duration>, SourceError> {
        Box::pin(self.try_acquire()).await
    }

    async fn renew(&self) -> Result<Duration, SourceError> {
        self.prolong().await
    }

    fn trouble(&self, what: Option<&str>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = what.map(Into::into);
    }

    async fn release(&self) -> Result<(), SourceError> {
        let Some(tenure) = self.end() else { return Ok(()) };
        self.give_back(&tenure.settler, tenure.epoch).await
    }

    async fn load(&self) -> Result<Loaded, SourceError> {
        let tenure = self.current()?;
        let block = self.options.dead == DeadPolicy::Block;
        held::load(&tenure.keeper, &self.held_sql, self.at(), block).await
    }

    async fn read(&self, _: ClaimLimit) -> Result<LogPage<Mark>, SourceError> {
        let tenure = self.current()?;
        let page = tenure.pages.lock().await.recv().await;
        page.unwrap_or_else(|| Err(unavailable("PostgreSQL: reading has ended with an error before")))
    }

    async fn held(&self, query: &HeldQuery) -> Result<HeldPage, SourceError> {
        let tenure = self.current()?;
        held::fetch(&tenure.keeper, &self.held_sql, self.at(), query).await
    }

    async fn record(&self, changes: &Changes<Mark>) -> Result<(), SourceError> {
        let tenure = self.current()?;
        record::record(&tenure, &self.options, changes).await
    }
}

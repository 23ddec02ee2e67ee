//! The log source on SQLite, the embedded default.
//!
//! SQLite has one writer at a time, so ids grow in commit order and the cursor is a plain id. All statements run on
//! one thread of their own ([`worker`]): async code only waits for its answers, and never blocks on the disk or on
//! another process's lock. [`tenure`] holds the lease and records progress, [`page`] reads events, [`retention`]
//! deletes what is old; none of them holds a transaction longer than its own few statements.

pub mod admin;
mod connection;
mod error;
mod page;
mod retention;
mod schema;
mod tenure;
mod worker;

pub use schema::{VERSION, migrate, script, version};

use postbox_engine::{Changes, ClaimLimit, DeadPolicy, HeldPage, HeldQuery, Loaded, Log, LogPage, SourceError};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::{Mutex, oneshot};
use worker::{Page, Request, Worker};

/// Which events to carry, and for whom.
#[derive(Clone, Debug)]
pub struct Options {
    /// The database file.
    pub path: PathBuf,
    /// What the names of the tables begin with, before the underscore.
    pub schema: String,
    /// The stream's name, which is part of its progress.
    pub stream: String,
    /// Names this relay in the lease and in traces; unique per process.
    pub relay: String,
    /// How long the lease holds when this relay dies.
    pub lease: Duration,
    /// How long published events are kept; `None`: for ever.
    pub retention: Option<Duration>,
    /// What a dead event does to those behind it in its key.
    pub policy: DeadPolicy,
}

impl Options {
    /// The defaults: tables `postbox_*`, stream `main`, a lease of 10 s, published events kept for seven days.
    pub fn new(path: impl Into<PathBuf>) -> Options {
        Options {
            path: path.into(),
            schema: "postbox".into(),
            stream: "main".into(),
            relay: format!("relay-{}", uuid::Uuid::now_v7().simple()),
            lease: Duration::from_secs(10),
            retention: Some(Duration::from_secs(7 * 24 * 3600)),
            policy: DeadPolicy::default(),
        }
    }
}

/// Why the thread answers: it ends after its last handle only.
const ALIVE: &str = "the SQLite thread has not panicked";

/// The log of one SQLite file, for one stream and one relay.
pub struct SqliteLog {
    requests: std::sync::mpsc::Sender<Request>,
    /// The answer to a read whose future was dropped; the next read takes it.
    reading: Mutex<Option<oneshot::Receiver<Page>>>,
    /// See `Source::trouble`.
    trouble: std::sync::Mutex<Option<String>>,
}

impl SqliteLog {
    /// Starts the thread that owns the connection. The file is opened by `acquire`.
    pub fn new(options: Options) -> SqliteLog {
        let (requests, inbox) = std::sync::mpsc::channel();
        let worker = Worker::new(Arc::new(options));
        std::thread::Builder::new()
            .name("postbox-sqlite".into())
            .spawn(move || worker.run(&inbox))
            .expect("the system has a thread left");
        SqliteLog { requests, reading: Mutex::new(None), trouble: std::sync::Mutex::default() }
    }

    /// Runs on the worker's thread, also when the future is dropped.
    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Worker) -> Result<T, SourceError> + Send + 'static,
    ) -> Result<T, SourceError> {
        let (answer, answered) = oneshot::channel();
        let call = Request::Call(Box::new(move |worker| {
            drop(answer.send(work(worker)));
        }));
        self.requests.send(call).expect(ALIVE);
        answered.await.expect(ALIVE)
    }
}

impl Log for SqliteLog {
    type Mark = i64;

    async fn acquire(&self) -> Result<Result<Duration, Duration>, SourceError> {
        *self.reading.lock().await = None; // what an earlier tenure read is read anew from the stored cursor
        self.call(Worker::acquire).await
    }
    async fn renew(&self) -> Result<Duration, SourceError> {
        let trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.call(move |worker| worker.tenure()?.renew(trouble.as_deref())).await
    }
    fn trouble(&self, what: Option<&str>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = what.map(Into::into);
    }
    async fn release(&self) -> Result<(), SourceError> {
        let trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.call(move |worker| worker.release(trouble.as_deref())).await
    }
    async fn load(&self) -> Result<Loaded, SourceError> {
        self.call(|worker| worker.tenure()?.load()).await
    }
    async fn read(&self, limit: ClaimLimit) -> Result<LogPage<i64>, SourceError> {
        let mut reading = self.reading.lock().await;
        if reading.is_none() {
            let (answer, answered) = oneshot::channel();
            self.requests.send(Request::Read(limit, answer)).expect(ALIVE);
            *reading = Some(answered);
        }
        let answered = reading.as_mut().expect("set above");
        let page = answered.await; // dropped here, the answer stays for the next call
        *reading = None;
        page.map_err(|_| SourceError::lease_lost())? // not answered: the tenure that was asked has ended
    }
    async fn held(&self, query: &HeldQuery) -> Result<HeldPage, SourceError> {
        let query = query.clone();
        self.call(move |worker| worker.tenure()?.held(&query)).await
    }
    async fn record(&self, changes: &Changes<i64>) -> Result<(), SourceError> {
        let changes = changes.clone();
        self.call(move |worker| worker.tenure()?.record(&changes)).await
    }
}

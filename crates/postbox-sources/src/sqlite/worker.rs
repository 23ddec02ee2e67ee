//! The thread that owns the connection: it answers requests one after the other, and polls for the one read that waits.
//! It never waits for anything but the next request and SQLite.

use super::Options;
use super::tenure::Tenure;
use postbox_engine::{ClaimLimit, LogPage, SourceError};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// While events come: the latency that polling adds is half of it.
const POLL_MIN: Duration = Duration::from_millis(2);
/// While none come: an event after a long silence waits for half of it, and an idle relay
/// costs less than one per cent of a core.
const POLL_MAX: Duration = Duration::from_millis(16);
/// With nothing to poll for.
const NOTHING: Duration = Duration::from_secs(3600);

pub(super) type Page = Result<LogPage<i64>, SourceError>;

pub(super) enum Request {
    Call(Box<dyn FnOnce(&mut Worker) + Send>),
    /// Answered once there is a page, or an error.
    Read(ClaimLimit, oneshot::Sender<Page>),
}

pub(super) struct Worker {
    options: Arc<Options>,
    tenure: Option<Tenure>,
    /// Of our last tenure: we may prolong it, also after an error.
    epoch: Option<i64>,
    reading: Option<(ClaimLimit, oneshot::Sender<Page>)>,
    pause: Duration,
}

impl Worker {
    pub(super) fn new(options: Arc<Options>) -> Worker {
        Worker { options, tenure: None, epoch: None, reading: None, pause: POLL_MIN }
    }

    /// Until the last handle is dropped.
    pub(super) fn run(mut self, inbox: &Receiver<Request>) {
        loop {
            self.tidy();
            match inbox.recv_timeout(self.until_next()) {
                Ok(Request::Call(call)) => call(&mut self),
                Ok(Request::Read(limit, answer)) => {
                    self.reading = Some((limit, answer));
                    self.poll();
                }
                Err(RecvTimeoutError::Timeout) => self.poll(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn until_next(&self) -> Duration {
        let tidy = self.tenure.as_ref().and_then(|t| t.retention.due());
        let tidy = tidy.map_or(NOTHING, |due| due.saturating_duration_since(Instant::now()));
        if self.reading.is_some() { self.pause.min(tidy) } else { tidy }
    }

    /// Answers the waiting read if there is something to read.
    fn poll(&mut self) {
        let Some((limit, answer)) = self.reading.take().filter(|(_, answer)| !answer.is_closed()) else { return };
        let read = self.tenure().and_then(|tenure| tenure.read(limit));
        match read.transpose() {
            None => {
                self.pause = (self.pause * 9 / 8).min(POLL_MAX);
                self.reading = Some((limit, answer));
            }
            Some(page) => {
                self.pause = POLL_MIN;
                // Nobody listens any more only when a new tenure began, and that one reads anew.
                let _ = answer.send(page);
            }
        }
    }

    fn tidy(&mut self) {
        let Some(tenure) = &mut self.tenure else { return };
        if tenure.retention.due().is_none_or(|due| due <= Instant::now()) {
            tenure.retention.piece(&tenure.database, &self.options.stream, self.options.retention);
        }
    }

    /// See [`postbox_engine::Log::acquire`].
    pub(super) fn acquire(&mut self) -> Result<Result<Duration, Duration>, SourceError> {
        self.reading = None;
        self.tenure = None;
        Ok(Tenure::begin(&self.options, self.epoch)?.map(|tenure| {
            self.epoch = Some(tenure.epoch());
            self.tenure = Some(tenure);
            self.options.lease
        }))
    }

    pub(super) fn release(&mut self, trouble: Option<&str>) -> Result<(), SourceError> {
        self.reading = None;
        self.tenure.take().map_or(Ok(()), |tenure| tenure.end(trouble))
    }

    pub(super) fn tenure(&mut self) -> Result<&mut Tenure, SourceError> {
        self.tenure.as_mut().ok_or_else(SourceError::lease_lost)
    }
}

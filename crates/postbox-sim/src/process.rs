//! One relay process as the operating system sees it: it can be stopped without notice (crash), frozen for a while
//! (pause), and nothing it does between two looks at the world happens while it is either.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use tokio::sync::Notify;

/// A process: one incarnation of one relay.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) instance: u64,
    /// The epoch of its lease, as the process knows it.
    pub(crate) epoch: AtomicU64,
    /// It has tried to give its lease back.
    pub(crate) handed_over: AtomicBool,
    dead: AtomicBool,
    paused: AtomicBool,
    calls: AtomicU64,
    /// It dies at this call to the database; `true`: after the call's effect, before its answer.
    dies_at: Option<(u64, bool)>,
    changed: Notify,
    pub(crate) died: Notify,
    frozen: Mutex<Option<Waker>>,
}

/// Where in a call the process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Death {
    None,
    Before,
    After,
}

impl Process {
    pub(crate) fn new(instance: u64, dies_at: Option<(u64, bool)>) -> Process {
        Process {
            instance,
            epoch: AtomicU64::new(0),
            handed_over: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            dies_at,
            changed: Notify::new(),
            died: Notify::new(),
            frozen: Mutex::new(None),
        }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Relaxed)
    }

    pub(crate) fn die(&self) {
        self.dead.store(true, Relaxed);
        self.changed.notify_waiters();
        self.died.notify_one();
    }

    pub(crate) fn pause(&self) {
        self.paused.store(true, Relaxed);
    }

    pub(crate) fn resume(&self) {
        self.paused.store(false, Relaxed);
        self.changed.notify_waiters();
        if let Some(waker) = self.frozen.lock().unwrap_or_else(PoisonError::into_inner).take() {
            waker.wake();
        }
    }

    /// Counts a call to the database and says whether the process dies in it.
    pub(crate) fn call(&self, storm: bool) -> Death {
        let call = self.calls.fetch_add(1, Relaxed);
        match self.dies_at {
            Some((at, after)) if at == call && storm => {
                if after {
                    Death::After
                } else {
                    Death::Before
                }
            }
            _ => Death::None,
        }
    }

    /// Goes on only while the process runs.
    pub(crate) async fn gate(&self) {
        loop {
            let changed = self.changed.notified();
            if self.is_dead() {
                pending::<()>().await;
            }
            if !self.paused.load(Relaxed) {
                return;
            }
            changed.await;
        }
    }
}

/// A future of a process: not polled while it is paused or dead, whatever wakes it.
pub(crate) struct Running<F> {
    pub(crate) process: std::sync::Arc<Process>,
    pub(crate) future: Pin<Box<F>>,
}

impl<F: Future> Future for Running<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        if self.process.is_dead() {
            return Poll::Pending;
        }
        if self.process.paused.load(Relaxed) {
            *self.process.frozen.lock().unwrap_or_else(PoisonError::into_inner) = Some(cx.waker().clone());
            return Poll::Pending;
        }
        self.future.as_mut().poll(cx)
    }
}

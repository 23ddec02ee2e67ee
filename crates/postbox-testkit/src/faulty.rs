//! A source and a sink that fail on command, around real ones: for what no server does on demand. Each call takes the
//! next fault of its script; without one it passes.

use postbox_engine::{
    Claim, ClaimLimit, Limits, Message, SendError, SendErrorKind, Settlement, Sink, Source, SourceError,
    SourceErrorKind,
};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// What becomes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call goes through: to fail a later one.
    Pass,
    /// Nothing is done, and the answer says so (`Unavailable`).
    Refuse,
    /// It is done, and the answer says that nobody knows (`Unavailable` of a source, `Unknown` of a sink).
    DoThenFail,
    /// Nothing is done before `let_go`; then it goes through.
    Hold,
    /// It is done, and the answer is held until `let_go`.
    DoThenHold,
    /// Waits so long first, then it goes through.
    Slow(Duration),
}

/// The calls of a [`Source`] that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Acquire,
    Renew,
    Claim,
    Settle,
    Release,
}

/// Faults to come, first come first served.
struct Script<T> {
    faults: Mutex<Vec<(T, VecDeque<Fault>)>>,
    /// How often `let_go` was called.
    let_go: watch::Sender<u64>,
    /// How many calls are being held.
    held: watch::Sender<usize>,
}

impl<T: PartialEq> Script<T> {
    fn new() -> Script<T> {
        Script { faults: Mutex::default(), let_go: watch::Sender::new(0), held: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(T, VecDeque<Fault>)>> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, call: T, faults: &[Fault]) {
        let mut script = self.lock();
        match script.iter_mut().find(|(c, _)| *c == call) {
            Some((_, queue)) => queue.extend(faults),
            None => script.push((call, faults.iter().copied().collect())),
        }
    }

    fn next(&self, call: &T) -> Fault {
        let next = self.lock().iter_mut().find(|(c, _)| c == call).and_then(|(_, queue)| queue.pop_front());
        next.unwrap_or(Fault::Pass)
    }

    /// Does `work` as the next fault of that call wants it: `Err(done)` when its answer is to be a failure.
    async fn run<F: Future>(&self, call: T, work: impl FnOnce() -> F) -> Result<F::Output, bool> {
        match self.next(&call) {
            Fault::Pass => Ok(work().await),
            Fault::Refuse => Err(false),
            Fault::DoThenFail => {
                work().await;
                Err(true)
            }
            Fault::Hold => {
                self.hold().await;
                Ok(work().await)
            }
            Fault::DoThenHold => {
                let answer = work().await;
                self.hold().await;
                Ok(answer)
            }
            Fault::Slow(pause) => {
                tokio::time::sleep(pause).await;
                Ok(work().await)
            }
        }
    }

    fn left(&self) -> usize {
        self.lock().iter().map(|(_, queue)| queue.len()).sum()
    }

    async fn hold(&self) {
        struct Held<'a>(&'a watch::Sender<usize>);
        impl Drop for Held<'_> {
            fn drop(&mut self) {
                self.0.send_modify(|n| *n -= 1);
            }
        }
        let mut let_go = self.let_go.subscribe();
        self.held.send_modify(|n| *n += 1);
        let _counted = Held(&self.held); // also when the call is dropped while it is held
        let_go.changed().await.expect("the script outlives its calls");
    }

    async fn until_held(&self, calls: usize) {
        self.held.subscribe().wait_for(|n| *n >= calls).await.expect("we have the sender");
    }
}

/// A source around another one.
pub struct FaultySource<S> {
    inner: S,
    script: Script<Call>,
}

impl<S> FaultySource<S> {
    pub fn new(inner: S) -> FaultySource<S> {
        FaultySource { inner, script: Script::new() }
    }
    pub fn inner(&self) -> &S {
        &self.inner
    }
    /// The next calls of that kind, behind those that are scripted already.
    pub fn script(&self, call: Call, faults: &[Fault]) {
        self.script.add(call, faults);
    }
    /// How many of them no call has met yet.
    pub fn left(&self) -> usize {
        self.script.left()
    }
    /// Lets all calls go that are held now.
    pub fn let_go(&self) {
        self.script.let_go.send_modify(|n| *n += 1);
    }
    /// Waits until so many calls are held.
    pub async fn until_held(&self, calls: usize) {
        self.script.until_held(calls).await;
    }
}

fn source_error(done: bool) -> SourceError {
    let what = if done { "it was done, and the answer was lost" } else { "nothing was done" };
    SourceError::new(SourceErrorKind::Unavailable, format!("injected fault: {what}"))
}

impl<S: Source> Source for FaultySource<S> {
    async fn acquire(&self) -> Result<Duration, SourceError> {
        self.script.run(Call::Acquire, || self.inner.acquire()).await.map_err(source_error)?
    }
    async fn renew(&self) -> Result<Duration, SourceError> {
        self.script.run(Call::Renew, || self.inner.renew()).await.map_err(source_error)?
    }
    async fn claim(&self, limit: ClaimLimit) -> Result<Claim, SourceError> {
        self.script.run(Call::Claim, || self.inner.claim(limit)).await.map_err(source_error)?
    }
    async fn settle(&self, settlements: &[Settlement], sent: Instant) -> Result<(), SourceError> {
        self.script.run(Call::Settle, || self.inner.settle(settlements, sent)).await.map_err(source_error)?
    }
    async fn release(&self) -> Result<(), SourceError> {
        self.script.run(Call::Release, || self.inner.release()).await.map_err(source_error)?
    }
}

/// A sink around another one.
pub struct FaultySink<K> {
    inner: K,
    sends: Script<()>,
}

impl<K> FaultySink<K> {
    pub fn new(inner: K) -> FaultySink<K> {
        FaultySink { inner, sends: Script::new() }
    }
    pub fn inner(&self) -> &K {
        &self.inner
    }
    /// The next sends, behind those that are scripted already.
    pub fn script(&self, faults: &[Fault]) {
        self.sends.add((), faults);
    }
    /// How many of them no send has met yet.
    pub fn left(&self) -> usize {
        self.sends.left()
    }
    /// Lets all sends go that are held now.
    pub fn let_go(&self) {
        self.sends.let_go.send_modify(|n| *n += 1);
    }
    /// Waits until so many sends are held.
    pub async fn until_held(&self, calls: usize) {
        self.sends.until_held(calls).await;
    }
}

impl<K: Sink> Sink for FaultySink<K> {
    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn prepare(&self) {
        self.inner.prepare();
    }

    async fn send(&self, batch: &[Message]) -> Vec<Result<(), SendError>> {
        let failed = |done: bool| {
            let (kind, what) = match done {
                true => (SendErrorKind::Unknown, "it was done, and the answer was lost"),
                false => (SendErrorKind::Unavailable, "nothing was done"),
            };
            batch.iter().map(|_| Err(SendError::new(kind, format!("injected fault: {what}")))).collect()
        };
        self.sends.run((), || self.inner.send(batch)).await.unwrap_or_else(failed)
    }

    async fn check(&self) -> Result<(), SendError> {
        self.inner.check().await
    }
}

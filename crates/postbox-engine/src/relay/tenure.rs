//! One tenure of the lease: everything in hand belongs to it and is forgotten with it.

use super::patience::Patience;
use super::{Relay, Stopped, TELL_MAX};
use crate::message::uuid_text;
use crate::planted::{self, Bug};
use crate::telemetry::Counters;
use crate::{
    Batch, Claim, ClaimLimit, Event, Lanes, Message, Outcome, Rng, SendError, SendErrorKind, Settlement, Sink, Source,
    SourceError, SourceErrorKind, Verdict,
};
use futures_util::stream::{FuturesUnordered, StreamExt};
use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// After a renewal that failed: several tries fit into the shortest lease.
const RENEW_PAUSE: Duration = Duration::from_millis(250);

pub(super) enum End {
    Stopped(Stopped),
    Lost(SourceError),
}

/// A batch that came back: which, when it went, and one result per message that was sent, or the time that it was given.
type Sent = (Batch, Instant, Result<Vec<Result<(), SendError>>, Duration>);
type Waiting<T> = Option<Pin<Box<dyn Future<Output = T> + Send>>>;

pub(super) struct Tenure<'a, S, K> {
    relay: &'a Relay<S, K>,
    rng: &'a mut Rng,
    lanes: Lanes,
    sends: FuturesUnordered<Pin<Box<dyn Future<Output = Sent> + Send>>>,
    claiming: Waiting<Result<Claim, SourceError>>,
    renewing: Waiting<Result<Duration, SourceError>>,
    /// Run to their end whatever happens to this loop: half a settle would be worse than none.
    settling: FuturesUnordered<JoinHandle<Result<usize, SourceError>>>,
    /// Outcomes that are on their way into the source.
    unsettled: usize,
    /// When the newest batch went of those that came back.
    sent: Instant,
    /// The last moment at which a message may be on its way.
    send_until: Instant,
    renew_at: Instant,
    /// Outages of the destination in a row; while there are any, one batch at a time probes it.
    outages: u32,
    patience: Patience,
    paused_until: Option<Instant>,
    draining: Option<Instant>,
}

impl<'a, S: Source, K: Sink> Tenure<'a, S, K> {
    pub(super) fn new(relay: &'a Relay<S, K>, proven: Duration, rng: &'a mut Rng) -> Self {
        relay.counters.leading.store(true, Relaxed);
        Counters::add(&relay.counters.tenures, 1);
        tracing::info!(stream = %relay.options.stream, "the lease is ours");
        relay.source.trouble(None);
        let now = Instant::now();
        let mut tenure = Tenure {
            lanes: Lanes::new(relay.sink.limits().keeps_key_order),
            relay,
            rng,
            sends: FuturesUnordered::new(),
            claiming: None,
            renewing: None,
            settling: FuturesUnordered::new(),
            unsettled: 0,
            sent: now,
            send_until: now,
            renew_at: now,
            outages: 0,
            patience: Patience::new(relay.options.send_timeout),
            paused_until: None,
            draining: None,
        };
        tenure.proven(now, proven);
        tenure
    }

    /// The lease holds for `proven` from `now`: stop sending a tenth before its end, renew after a third.
    fn proven(&mut self, now: Instant, proven: Duration) {
        self.send_until = now + proven * 9 / 10;
        self.renew_at = now + proven / 3;
    }

    pub(super) async fn run(mut self, stop: &mut Pin<&mut (dyn Future<Output = ()> + Send)>) -> End {
        let mut end = loop {
            self.start().await;
            if self.draining.is_some() && self.lanes.events() == 0 && self.settling.is_empty() {
                break End::Stopped(Stopped::Clean);
            }
            match self.step(stop).await {
                Ok(None) => {}
                Ok(Some(stopped)) => break End::Stopped(stopped),
                Err(error) if self.draining.is_some() => {
                    tracing::warn!(stream = %self.relay.options.stream, %error, "lost the source while stopping");
                    break End::Stopped(self.abandoned());
                }
                Err(error) => break End::Lost(error),
            }
        };
        // Sends that are still out are given up before the lease can end; the source must not be acquired again
        // while a settle of this tenure is on its way.
        self.sends.clear();
        self.claiming = None;
        let End::Stopped(Stopped::Abandoned { in_flight }) = &mut end else {
            while self.settling.next().await.is_some() {}
            return end;
        };
        // What came back in time need not be sent again. Failing here costs duplicates, nothing else.
        let (settlements, source) = (self.lanes.settled(), &self.relay.source);
        let (settling, unsettled, last) = (&mut self.settling, &mut self.unsettled, outcomes(&settlements));
        *unsettled += last;
        let told = async {
            while let Some(settled) = settling.next().await {
                *unsettled -= settled.ok().and_then(Result::ok).unwrap_or_default();
            }
            if source.settle(&settlements, self.sent).await.is_ok() {
                *unsettled -= last;
            }
        };
        let _ = tokio::time::timeout(TELL_MAX, told).await;
        *in_flight += self.unsettled;
        end
    }

    fn abandoned(&self) -> Stopped {
        Stopped::Abandoned { in_flight: self.lanes.in_flight() }
    }

    /// Starts whatever may start now.
    async fn start(&mut self) {
        let counters = &self.relay.counters;
        let limits = self.relay.sink.limits();
        let in_flight_max = if self.outages > 0 { 1 } else { limits.in_flight_max };
        while self.may_send() && self.sends.len() < in_flight_max {
            let Some(batch) = self.lanes.next_batch(limits.batch_max, limits.bytes_max) else { break };
            self.send(batch).await;
        }
        self.settle().await;
        let options = &self.relay.options;
        let room = options.events_max.saturating_sub(self.lanes.events());
        // Small claims cost as many round trips as large ones: wait until an eighth is free.
        let enough = room >= (options.events_max / 8).max(1) && self.lanes.bytes() < options.bytes_max;
        if self.claiming.is_none() && self.draining.is_none() && enough {
            let source = self.relay.source.clone();
            let limit = ClaimLimit { events_max: room, bytes_max: options.bytes_max - self.lanes.bytes() };
            self.claiming = Some(Box::pin(async move { source.claim(limit).await }));
        }
        counters.in_hand.store(self.lanes.events() as u64, Relaxed);
        counters.paused.store(self.paused_until.is_some(), Relaxed);
    }

    /// Gives the verdicts to the source at once: a claim that is answered from now on must know which keys are in
    /// trouble. Writing them down takes its time.
    async fn settle(&mut self) {
        let late = planted::is(Bug::VerdictsLate);
        if late && !self.settling.is_empty() {
            return;
        }
        let settlements = self.lanes.settled();
        if settlements.is_empty() {
            return;
        }
        count(&self.relay.counters, &settlements);
        let (source, sent, n) = (self.relay.source.clone(), self.sent, outcomes(&settlements));
        self.unsettled += n;
        let mut settle = Box::pin(async move { source.settle(&settlements, sent).await.map(|()| n) });
        let polled = if late { Poll::Pending } else { poll_fn(|cx| Poll::Ready(settle.as_mut().poll(cx))).await };
        self.settling.push(match polled {
            Poll::Ready(result) => tokio::spawn(std::future::ready(result)),
            Poll::Pending => tokio::spawn(settle),
        });
    }

    /// The clock is looked at here too: the process may have stood still since the last step.
    fn may_send(&self) -> bool {
        let proven = Instant::now() < self.send_until || planted::is(Bug::LeaseDeadlineIgnored);
        proven && self.paused_until.is_none() && self.draining.is_none()
    }

    /// Routes and sends one batch. What cannot be routed is decided at once.
    async fn send(&mut self, mut batch: Batch) {
        let mut messages = Vec::with_capacity(batch.events.len());
        let (mut refused, mut outcomes) = (Vec::new(), Vec::new());
        for (n, claimed) in batch.events.iter().enumerate() {
            match self.relay.route.message(&claimed.event, claimed.replay) {
                Ok(message) => messages.push(message),
                Err(error) => {
                    self.relay.counters.failed(&error);
                    let verdict = Verdict::Dead { attempts: claimed.attempts, error: error.to_string().into() };
                    self.tell_death(&claimed.event, &verdict);
                    refused.push(n);
                    outcomes.push(Outcome::Verdict(verdict));
                }
            }
        }
        if !refused.is_empty() {
            let refused = batch.split_off(&refused);
            self.lanes.complete(&refused, outcomes);
        }
        if messages.is_empty() {
            return;
        }
        Counters::add(&self.relay.counters.sends, 1);
        let timeout = self.patience.timeout();
        let sink = self.relay.sink.clone();
        let sent = Instant::now();
        let mut send: Pin<Box<dyn Future<Output = Sent> + Send>> = Box::pin(async move {
            let results = tokio::time::timeout(timeout, send_all(&*sink, &messages)).await;
            (batch, sent, results.map_err(|_| timeout))
        });
        // Polled here once, so that batches reach the sink in the order of their making.
        match poll_fn(|cx| Poll::Ready(send.as_mut().poll(cx))).await {
            Poll::Ready(sent) => self.complete(sent),
            Poll::Pending => self.sends.push(send),
        }
    }

    fn complete(&mut self, (batch, sent, results): Sent) {
        self.sent = self.sent.max(sent);
        let results = results.unwrap_or_else(|timeout| {
            self.patience.timed_out(timeout);
            let unknown =
                SendError::new(SendErrorKind::Unknown, format!("no outcome within the send timeout, {timeout:?}"));
            batch.events.iter().map(|_| Err(unknown.clone())).collect()
        });
        let results = if planted::is(Bug::OutcomesReversed) { results.into_iter().rev().collect() } else { results };
        let (mut outage, mut answered) = (None, false);
        let mut outcomes = Vec::with_capacity(results.len());
        for (claimed, result) in batch.events.iter().zip(results) {
            outcomes.push(match result {
                Ok(()) => Outcome::Published,
                Err(e) if e.kind == SendErrorKind::Unknown && planted::is(Bug::UnknownIsSuccess) => Outcome::Published,
                Err(error) if error.kind == SendErrorKind::Behind => Outcome::Again,
                Err(error) if is_outage(error.kind) => {
                    outage = Some(error);
                    Outcome::Again
                }
                Err(error) => {
                    self.relay.counters.failed(&error);
                    let verdict = self.relay.options.retry.verdict(claimed.attempts + 1, &error, self.rng);
                    self.tell_death(&claimed.event, &verdict);
                    Outcome::Verdict(verdict)
                }
            });
            answered |= outcomes.last() != Some(&Outcome::Again);
        }
        self.lanes.complete(&batch, outcomes);
        match outage {
            Some(error) => self.pause(&error),
            None if answered => {
                self.patience.answered(sent.elapsed());
                if self.outages > 0 {
                    self.outages = 0;
                    self.relay.source.trouble(None);
                }
            }
            None => {}
        }
    }

    /// Who reads the log alone must learn of it too.
    fn tell_death(&self, event: &Event, verdict: &Verdict) {
        if let Verdict::Dead { attempts, error } = verdict {
            let (id, stream) = (uuid_text(event.event_id()), &self.relay.options.stream);
            let event_id = std::str::from_utf8(&id).unwrap_or_default();
            tracing::warn!(%stream, event_id, attempts, %error, "an event is dead");
        }
    }

    /// The destination is out. Batches that were in flight together count as one outage.
    fn pause(&mut self, error: &SendError) {
        self.relay.counters.failed(error);
        if self.paused_until.is_some() {
            return;
        }
        self.outages += 1;
        self.relay.source.trouble(Some(&error.message));
        Counters::add(&self.relay.counters.outages, 1);
        let jittered = self.relay.options.retry.outage_pause(self.outages, self.rng);
        let pause = jittered.max(error.retry_after.unwrap_or_default());
        tracing::warn!(stream = %self.relay.options.stream, %error, ?pause, "the destination is out: paused");
        self.paused_until = Some(Instant::now() + pause);
    }

    /// Waits for the next thing to happen.
    async fn step(
        &mut self,
        stop: &mut Pin<&mut (dyn Future<Output = ()> + Send)>,
    ) -> Result<Option<Stopped>, SourceError> {
        tokio::select! {
            biased; // by urgency: the lease, then what frees room, then what fills it
            () = sleep_until(self.send_until), if !planted::is(Bug::LeaseDeadlineIgnored) => {
                return Err(SourceError::new(SourceErrorKind::Unavailable, "the lease could not be renewed in time"));
            }
            renewed = ready(&mut self.renewing) => {
                self.renewing = None;
                match renewed {
                    Ok(proven) => self.proven(Instant::now(), proven),
                    // What was proven before still is; `send_until` ends the tenure if no other try succeeds.
                    Err(error) if error.kind == SourceErrorKind::Unavailable => {
                        tracing::warn!(stream = %self.relay.options.stream, %error, "the lease was not renewed: trying again");
                        self.relay.counters.failed(&error);
                        self.renew_at = Instant::now() + RENEW_PAUSE;
                    }
                    Err(error) => return Err(error),
                }
            }
            () = sleep_until(self.renew_at), if self.renewing.is_none() => {
                let source = self.relay.source.clone();
                self.renewing = Some(Box::pin(async move { source.renew().await }));
            }
            Some(settled) = self.settling.next() => {
                self.unsettled -= settled.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
            }
            Some(sent) = self.sends.next() => self.complete(sent),
            () = stop, if self.draining.is_none() => {
                self.draining = Some(Instant::now() + self.relay.options.drain_timeout);
                self.claiming = None;
                self.lanes.drain();
            }
            () = at(self.draining) => return Ok(Some(self.abandoned())),
            () = at(self.paused_until) => self.paused_until = None,
            claim = ready(&mut self.claiming) => {
                self.claiming = None;
                let claim = claim?;
                Counters::add(&self.relay.counters.claimed, claim.events.len());
                self.lanes.admit(claim.events);
            }
        }
        Ok(None)
    }
}

/// How many of them tell what became of an event that was sent.
fn outcomes(settlements: &[Settlement]) -> usize {
    settlements.iter().filter(|s| s.verdict != Verdict::Release).count()
}

/// The error says nothing about the event.
fn is_outage(kind: SendErrorKind) -> bool {
    matches!(kind, SendErrorKind::Unavailable | SendErrorKind::Unknown) && !planted::is(Bug::OutageCostsAttempt)
}

async fn send_all<K: Sink>(sink: &K, messages: &[Message]) -> Vec<Result<(), SendError>> {
    let results = sink.send(messages).await;
    assert_eq!(results.len(), messages.len(), "a sink returns one outcome per message");
    results
}

/// The result of what runs, if it runs; waits for ever otherwise.
async fn ready<T, F: Future<Output = T> + Unpin>(running: &mut Option<F>) -> T {
    match running {
        Some(future) => future.await,
        None => pending().await,
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

fn count(counters: &Counters, settlements: &[Settlement]) {
    let mut sums = [0; 4];
    for s in settlements {
        sums[match s.verdict {
            Verdict::Published => 0,
            Verdict::Retry { .. } => 1,
            Verdict::Dead { .. } => 2,
            Verdict::Release => 3,
        }] += 1;
    }
    Counters::add(&counters.published, sums[0]);
    Counters::add(&counters.retried, sums[1]);
    Counters::add(&counters.dead, sums[2]);
    Counters::add(&counters.released, sums[3]);
    Counters::add(&counters.settles, 1);
}

//! When to poll: each millisecond or so while events come, ever less often while none does, and once a second asleep, when writers
//! notify. Before sleeping, every transaction that may have been told not to notify must have ended: see `Closing`.
//! `Pace` is pure; `Wake` is what the listening connection tells the reader.

use crate::postgres::connect::{Role, connect, listen};
use crate::postgres::error::within;
use crate::postgres::{PostgresOptions, connect::Session};
use postbox_engine::SourceError;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Between polls while events come: the timer rounds up to the next millisecond, so that polls begin 1.0 to 1.5 ms apart.
/// Half of that is the price in latency, and a fifth of a core that in CPU.
const PAUSE_BUSY: Duration = Duration::from_micros(500);
/// Under load it grows, by steps of four, to what the machine leaves: each poll, and the small batches that the broker gets of
/// it, take from the writers what they need to commit. How full the machine is shows in how long answers take of late beyond the
/// shortest one ever (the way there and back, and the work): the square of that tells a full one from one that is at work.
const PAUSE_LOADED: RangeInclusive<Duration> = Duration::from_millis(4)..=Duration::from_millis(64);
const PAUSE_PER_SQUARE_MS: f64 = 16.0;
/// Of how many answers the time is averaged, the newest counting most.
const ANSWERS: u32 = 8;
/// Load is more than `LOAD` events for each millisecond of the pause, and more than a `BURST`; less than half of it is none.
const LOAD: u128 = 3;
const BURST: u128 = 8;
/// Between polls while awake and idle, also for ever where writers cannot notify: four statements a second.
const PAUSE_IDLE: Duration = Duration::from_millis(250);
/// Between polls asleep: for what no notification tells (another relay's wake lease, a lost listener not seen yet).
const PAUSE_ASLEEP: Duration = Duration::from_secs(1);
/// So long after the last event polls stay frequent.
const BUSY_FOR: Duration = Duration::from_millis(200);
/// So long after the last event the reader goes to sleep.
const AWAKE_FOR: Duration = Duration::from_secs(1);
/// How far the wake lease is set ahead: a dead relay's writers stay silent so long.
pub(crate) const HOLD: Duration = Duration::from_secs(5);
const HOLD_AGAIN: Duration = Duration::from_secs(1);

/// What the listening connection tells.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    pub(crate) notified: Notify,
    /// Notifications arrive, so that sleep is safe.
    pub(crate) listening: AtomicBool,
}

impl Wake {
    pub(crate) fn listening(&self) -> bool {
        self.listening.load(Relaxed)
    }
}

/// What to do beside the next poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chore {
    None,
    /// Set the wake lease ahead: nobody needs to notify.
    Hold,
    /// End the wake lease, then take a transaction id and give it to `closing`.
    LieDown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Awake,
    /// Writers notify from now on. Those that looked before had a transaction id below this: sleep once all of them ended.
    Closing(u64),
    Asleep,
}

#[derive(Debug)]
pub(crate) struct Pace {
    mode: Mode,
    pause: Duration,
    /// How long an answer takes of late, and the shortest.
    took: Duration,
    took_least: Duration,
    last_event: Instant,
    held: Option<Instant>,
}

impl Pace {
    pub(crate) fn new(now: Instant) -> Pace {
        Pace {
            mode: Mode::Awake,
            pause: PAUSE_BUSY,
            took: Duration::ZERO,
            took_least: Duration::MAX,
            last_event: now,
            held: None,
        }
    }

    /// How long after the begin of the last poll the next one is due.
    pub(crate) fn pause(&self) -> Duration {
        self.pause
    }

    /// Takes in a poll whose answer `took` so long and that found so many events. `xmin`: the oldest transaction that its snapshot has
    /// running.
    pub(crate) fn polled(&mut self, now: Instant, took: Duration, found: usize, xmin: u64, listening: bool) -> Chore {
        self.took = (self.took * (ANSWERS - 1) + took) / ANSWERS;
        self.took_least = self.took_least.min(took);
        if found > 0 {
            let pause = self.loaded(found);
            let steady = self.mode == Mode::Awake; // a lone event is not worth two writes
            (self.mode, self.pause, self.last_event) = (Mode::Awake, pause, now);
            return if steady { self.busy(now) } else { Chore::None };
        }
        let quiet = now.saturating_duration_since(self.last_event);
        match self.mode {
            Mode::Closing(barrier) if listening && xmin >= barrier => {
                (self.mode, self.pause) = (Mode::Asleep, PAUSE_ASLEEP);
            }
            Mode::Asleep if listening => {}
            Mode::Awake if listening && quiet >= AWAKE_FOR => {
                self.held = None;
                return Chore::LieDown;
            }
            _ => {
                if !listening {
                    self.mode = Mode::Awake;
                }
                self.pause = if quiet < BUSY_FOR { PAUSE_BUSY } else { (self.pause * 2).min(PAUSE_IDLE) };
            }
        }
        Chore::None
    }

    /// The pause after a poll that found so many events: four times as long or as short as before, since one poll may lie.
    fn loaded(&self, found: usize) -> Duration {
        let (least, most) = PAUSE_LOADED.into_inner();
        let waited_ms = self.took.saturating_sub(self.took_least).as_secs_f64() * 1e3;
        let left = Duration::from_secs_f64(waited_ms.powi(2) * PAUSE_PER_SQUARE_MS / 1e3).clamp(least, most);
        if self.pause > most {
            return PAUSE_BUSY;
        }
        let (found, load) = (found as u128, LOAD * self.pause.as_micros() / 1000);
        if found > load.max(BURST) {
            (self.pause * 4).min(left)
        } else if found < load / 2 {
            Some(self.pause / 4).filter(|less| *less >= least / 2).unwrap_or(PAUSE_BUSY)
        } else {
            self.pause.min(left)
        }
    }

    /// While events come: whether the wake lease is due again.
    pub(crate) fn busy(&mut self, now: Instant) -> Chore {
        self.last_event = now;
        if self.held.is_some_and(|at| now.saturating_duration_since(at) < HOLD_AGAIN) {
            return Chore::None;
        }
        self.held = Some(now);
        Chore::Hold
    }

    /// The wake lease is ended; `transaction` was taken after that.
    pub(crate) fn closing(&mut self, transaction: u64) {
        self.mode = Mode::Closing(transaction);
    }
}

/// Between attempts to listen again; polling goes on meanwhile.
const LISTEN_AGAIN: Duration = Duration::from_secs(5);

/// Listens for writers as long as the tenure lasts. A lost connection costs nothing but sleep.
pub(crate) async fn listener(options: Arc<PostgresOptions>, wake: Arc<Wake>) {
    loop {
        let lost = Arc::new(Notify::new());
        match begin(&options, &wake, &lost).await {
            Ok(Some(session)) => {
                wake.listening.store(true, Relaxed);
                lost.notified().await;
                drop(session);
                wake.listening.store(false, Relaxed);
                wake.notified.notify_one(); // the reader may be asleep
            }
            Ok(None) => {
                tracing::debug!("writers may prepare transactions and do not notify; the relay polls");
                return;
            }
            Err(error) => tracing::warn!(%error, "cannot listen; the relay polls"),
        }
        tokio::time::sleep(LISTEN_AGAIN).await;
    }
}

/// `None`: writers do not notify here, since NOTIFY bars PREPARE TRANSACTION and this server allows that.
async fn begin(
    options: &PostgresOptions,
    wake: &Arc<Wake>,
    lost: &Arc<Notify>,
) -> Result<Option<Session>, SourceError> {
    let url = options.listen_url.as_ref().unwrap_or(&options.url);
    let (wake, lost) = (wake.clone(), lost.clone());
    let session = connect(url, Role::Listener, move |notice| match notice {
        Some(()) => wake.notified.notify_one(),
        None => lost.notify_one(),
    })
    .await?;
    if !writers_notify(&session).await? {
        return Ok(None);
    }
    listen(&session, &options.schema).await?;
    Ok(Some(session))
}

/// As the trigger on the outbox decides it, for a session with this one's settings.
pub(crate) async fn writers_notify(session: &Session) -> Result<bool, SourceError> {
    let sql = "SELECT coalesce(nullif(current_setting('postbox.wake', true), '') = 'on', current_setting('max_prepared_transactions') = '0')";
    Ok(within(LISTEN_AGAIN, "ask whether writers notify", session.query_one(sql, &[])).await?.get(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn polls_become_rarer_and_then_writers_must_wake() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        assert_eq!(pace.polled(start, MS, 1, 100, true), Chore::Hold);
        assert_eq!(pace.polled(start + MS, MS, 1, 100, true), Chore::None, "held a moment ago");
        assert_eq!(pace.polled(start + 100 * MS, MS, 0, 100, true), Chore::None);
        assert_eq!(pace.pause(), PAUSE_BUSY);
        for n in 0..20 {
            assert_eq!(pace.polled(start + (400 + n) * MS, MS, 0, 100, true), Chore::None);
        }
        assert_eq!(pace.pause(), PAUSE_IDLE);
        assert_eq!(pace.polled(start + 1150 * MS, MS, 0, 100, true), Chore::LieDown);
        pace.closing(105);
        assert_eq!(pace.polled(start + 1200 * MS, MS, 0, 104, true), Chore::None);
        assert_eq!(pace.pause(), PAUSE_IDLE, "a transaction that may stay silent is still running");
        assert_eq!(pace.polled(start + 1300 * MS, MS, 0, 105, true), Chore::None);
        assert_eq!(pace.pause(), PAUSE_ASLEEP);
        assert_eq!(pace.polled(start + 60_000 * MS, MS, 1, 200, true), Chore::None, "one event is not worth a hold");
        assert_eq!(pace.polled(start + 60_002 * MS, MS, 1, 200, true), Chore::Hold);
        assert_eq!(pace.pause(), PAUSE_BUSY);
    }

    #[test]
    fn polls_are_rarer_under_load_and_as_frequent_as_before_after_it() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let mut pauses = |took: Duration, found: &[usize]| -> Vec<f64> {
            found
                .iter()
                .map(|n| (pace.polled(start, took, *n, 100, true), pace.pause().as_secs_f64() * 1e3).1)
                .collect()
        };
        assert_eq!(pauses(MS / 2, &[1, 8, 3, 1]), [0.5, 0.5, 0.5, 0.5], "a thousand a second and a small burst");
        assert_eq!(pauses(MS / 2, &[40, 4, 1, 1]), [2.0, 2.0, 0.5, 0.5], "a large burst");
        assert_eq!(
            pauses(MS / 2, &[9, 20, 40, 40]),
            [2.0, 4.0, 4.0, 4.0],
            "five thousand a second, where there is room"
        );
        let full = pauses(3 * MS, &[300; 20]);
        assert!(full.is_sorted() && full[0] < 10.0, "one slow answer may lie: {full:?}");
        assert_eq!(full[19], 64.0, "and where the machine is full");
        assert_eq!(pauses(MS / 2, &[100, 60, 10, 2]), [64.0, 16.0, 4.0, 0.5], "there is less to do");
        assert_eq!(pauses(MS / 2, &[300; 20])[19], 4.0, "there is room again");
    }

    #[test]
    fn without_a_listener_nobody_rests() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        for n in 0..40 {
            assert_eq!(pace.polled(start + n * 100 * MS, MS, 0, 100, false), Chore::None);
        }
        assert_eq!(pace.pause(), PAUSE_IDLE);
        pace.polled(start + 5000 * MS, MS, 0, 100, true);
        pace.closing(100);
        pace.polled(start + 5300 * MS, MS, 0, 100, true);
        assert_eq!(pace.pause(), PAUSE_ASLEEP);
        pace.polled(start + 5400 * MS, MS, 0, 100, false);
        assert_eq!(pace.pause(), PAUSE_IDLE, "the listener is lost");
    }
}

//! What a running relay says about itself: one live line on a terminal, a log line now and then otherwise.

use crate::config::show_duration;
use crate::screen::{Screen, is_terminal};
use postbox_engine::{Counters, Snapshot};
use postbox_sources::AnyAdmin;
use postbox_sources::admin::StreamStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the live line is drawn: eyes see no more.
const DRAW_EVERY: Duration = Duration::from_millis(500);
/// How often a stream's line is drawn before the next one's turn.
const TURN: usize = 4;
/// How often the log tells the counters, when they have moved.
const LOG_EVERY: Duration = Duration::from_secs(30);
/// How often the database is asked for lag and held events; an idle relay makes few statements.
const ASK_EVERY: Duration = Duration::from_secs(2);
/// A lease that is free is ours by then.
const LEASE_COMES_WITHIN: Duration = Duration::from_secs(1);
/// The width that every terminal has; a longer line would not be cleared whole.
const WIDTH: usize = 79;

/// One stream, watched.
struct Watched {
    name: Arc<str>,
    counters: Arc<Counters>,
    before: Snapshot,
    at: Instant,
}

/// Tells until the future is dropped.
pub(crate) async fn tell(screen: Screen, streams: Vec<(Arc<str>, Arc<Counters>)>, admin: Option<AnyAdmin>) {
    let now = Instant::now();
    let watch = |(name, counters): (Arc<str>, Arc<Counters>)| {
        let before = counters.snapshot();
        Watched { name, counters, before, at: now }
    };
    let mut streams: Vec<Watched> = streams.into_iter().map(watch).collect();
    tokio::time::sleep(LEASE_COMES_WITHIN).await;
    for watched in &streams {
        explain_waiting(watched, admin.as_ref()).await;
    }
    if !is_terminal() {
        return log_now_and_then(&mut streams).await;
    }
    let (mut asked, mut status) = (None::<Instant>, Vec::new());
    for drawn in 0.. {
        if asked.is_none_or(|at| at.elapsed() >= ASK_EVERY) {
            status = ask(admin.as_ref()).await;
            asked = Some(Instant::now());
        }
        let line = |watched: &mut Watched| {
            let status = status.iter().find(|status| status.stream == *watched.name);
            let (now, rate) = watched.step();
            live_line(&watched.name, &now, rate, status)
        };
        let lines: Vec<String> = streams.iter_mut().map(line).collect();
        // Streams take turns: cut, a line would not say what matters of the last ones.
        screen.draw(&clip(&lines[drawn / TURN % lines.len()]));
        tokio::time::sleep(DRAW_EVERY).await;
    }
}

async fn log_now_and_then(streams: &mut [Watched]) {
    loop {
        tokio::time::sleep(LOG_EVERY).await;
        streams.iter_mut().for_each(log);
    }
}

/// Without an answer the relay's own log line says why, and the counters go on.
async fn ask(admin: Option<&AnyAdmin>) -> Vec<StreamStatus> {
    match admin {
        Some(admin) => admin.status().await.unwrap_or_default(),
        None => Vec::new(),
    }
}

/// A relay that does nothing says whom it waits for.
async fn explain_waiting(watched: &Watched, admin: Option<&AnyAdmin>) {
    let now = watched.counters.snapshot();
    if now.leading || now.last_error.is_some() {
        return; // an error was logged already
    }
    let status = ask(admin).await.into_iter().find(|status| status.stream == *watched.name);
    if let Some(owner) = status.and_then(|status| status.owner) {
        tracing::info!(stream = %watched.name, %owner, "standing by: another relay holds the lease");
    }
}

impl Watched {
    /// The counters now, and events published per second since the last look.
    fn step(&mut self) -> (Snapshot, f64) {
        let (now, elapsed) = (self.counters.snapshot(), self.at.elapsed().as_secs_f64());
        let rate = (now.published - self.before.published) as f64 / elapsed.max(0.001);
        self.before = now.clone();
        self.at = Instant::now();
        (now, rate)
    }
}

fn log(watched: &mut Watched) {
    let before = watched.before.clone();
    let (now, rate) = watched.step();
    if now == before {
        return;
    }
    let Snapshot { published, retried, dead, in_hand, leading, paused, .. } = now;
    let rate = rate.round();
    tracing::info!(stream = %watched.name, published, rate, in_hand, retried, dead, leading, paused, "progress");
}

fn live_line(name: &str, now: &Snapshot, rate: f64, status: Option<&StreamStatus>) -> String {
    let state = match (now.leading, now.paused) {
        (_, true) => " PAUSED",
        (false, false) => " standing by",
        (true, false) => "",
    };
    let mut line = format!("{name}{state}: {} published, {rate:.0}/s, in hand {}", now.published, now.in_hand);
    if let Some(status) = status {
        let lag = status.oldest_unpublished.unwrap_or_default().as_millis() as u64;
        let held = status.retry + status.waiting + status.delayed;
        let lag = show_duration(Duration::from_millis(if lag < 1_000 { lag } else { lag - lag % 1_000 }));
        line.push_str(&format!(", lag {lag}, held {held}, dead {}", status.dead));
    }
    if let (true, Some(error)) = (now.paused, &now.last_error) {
        line.push_str(&format!(": {error}"));
    }
    line
}

fn clip(line: &str) -> String {
    match line.char_indices().nth(WIDTH) {
        Some((end, _)) => line[..end].to_owned(),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    #[tokio::test(start_paused = true)]
    async fn the_log_tells_counters_that_have_moved_every_half_minute() {
        let said = tempfile::NamedTempFile::new().unwrap();
        let writer = Arc::new(said.reopen().unwrap());
        let subscriber = tracing_subscriber::fmt().with_writer(writer).with_ansi(false).finish();
        let _default = tracing::subscriber::set_default(subscriber);
        let before = Snapshot { dead: 1, ..Snapshot::default() }; // other than what the counters say now
        let mut streams = [Watched { name: "main".into(), counters: Arc::default(), before, at: Instant::now() }];
        let mut telling = pin!(log_now_and_then(&mut streams));
        for (after, lines) in [(29, 0), (2, 1), (60, 1)] {
            assert!(tokio::time::timeout(Duration::from_secs(after), &mut telling).await.is_err());
            let said = std::fs::read_to_string(said.path()).unwrap();
            assert_eq!(said.matches("progress stream=main published=0").count(), lines, "{said}");
        }
    }

    #[test]
    fn the_live_line_says_what_matters_and_fits() {
        let mut now = Snapshot { published: 1234, in_hand: 7, leading: true, ..Snapshot::default() };
        let lag = Some(Duration::from_millis(63_250));
        let status = StreamStatus { oldest_unpublished: lag, retry: 1, waiting: 2, dead: 4, ..Default::default() };
        let line = live_line("main", &now, 99.6, Some(&status));
        assert_eq!(line, "main: 1234 published, 100/s, in hand 7, lag 63s, held 3, dead 4");
        (now.paused, now.last_error) = (true, Some("the broker is unreachable, and this is a long text".into()));
        let line = clip(&live_line("main", &now, 0.0, Some(&status)));
        assert!(line.starts_with("main PAUSED: 1234 published") && line.chars().count() == WIDTH, "{line}");
    }
}

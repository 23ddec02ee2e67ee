//! stderr of a running relay: log lines, and on a terminal one live line below them that is drawn again and again.

use crate::failure::Failure;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

const CLEAR: &str = "\r\x1b[2K";

/// The live line drawn now, empty without one. Log lines clear it, write themselves, and draw it again.
#[derive(Clone, Default)]
pub(crate) struct Screen(Arc<Mutex<String>>);

impl Screen {
    /// Sends the log to stderr.
    ///
    /// # Errors
    /// See [`log_filter`].
    pub(crate) fn new() -> Result<Screen, Failure> {
        let screen = Screen::default();
        let writer = screen.clone();
        let lines = tracing_subscriber::fmt::layer().with_target(false).with_ansi(is_terminal());
        let lines = lines.with_writer(move || writer.clone());
        // A second call in one process (tests) keeps the first log.
        let _ = tracing_subscriber::registry().with(lines).with(log_filter()?).try_init();
        Ok(screen)
    }

    fn line(&self) -> MutexGuard<'_, String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Draws the live line. The cursor stays at its begin, so that data on the same terminal overwrites it.
    pub(crate) fn draw(&self, text: &str) {
        let mut line = self.line();
        *line = text.to_owned();
        put(&format!("{CLEAR}{line}\r"));
    }

    /// Takes the live line away.
    pub(crate) fn clear(&self) {
        let mut line = self.line();
        if !line.is_empty() {
            line.clear();
            put(CLEAR);
        }
    }

    /// A line of talk for people.
    pub(crate) fn say(&self, text: &str) {
        let _ = writeln!(self.clone(), "{text}");
    }
}

/// What goes into the log: `RUST_LOG` chooses it by level and target, `info` and above by default. Spans and fields are
/// refused: what reads them in full brings an engine of regular expressions into every build.
///
/// # Errors
/// `RUST_LOG` cannot be read.
pub(crate) fn log_filter() -> Result<Targets, Failure> {
    let wrong = |why: String| Failure::usage(format!("environment variable RUST_LOG: {why}")).remedy("RUST_LOG=info");
    let text = std::env::var_os("RUST_LOG").filter(|text| !text.is_empty()).unwrap_or_else(|| "info".into());
    let text = text.into_string().map_err(|_| wrong("its value is not UTF-8".into()))?;
    if text.contains('[') {
        return Err(wrong(format!(
            "{text:?} chooses by spans or fields; choose by level and target, as in postbox_sinks=debug,info"
        )));
    }
    // An empty part would mean "errors only", and a space would be a part of the target.
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join(",").parse::<Targets>().map_err(|error| wrong(error.to_string()))
}

pub(crate) fn is_terminal() -> bool {
    io::stderr().is_terminal()
}

/// A line for people on stderr, where no relay runs.
pub(crate) fn tell(text: &str) {
    put(&format!("{text}\n"));
}

/// A closed or full stderr must not stop a relay or change an exit code, as `eprintln!` would.
fn put(text: &str) {
    let mut stderr = io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

impl Write for Screen {
    /// The log writes each of its lines with one call. Never fails: see `put`.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (line, text) = (self.line(), String::from_utf8_lossy(bytes));
        if line.is_empty() {
            put(&text);
        } else {
            put(&format!("{CLEAR}{text}{line}\r"));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

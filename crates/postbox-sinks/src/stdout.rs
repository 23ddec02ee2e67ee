//! The sink of the embedded default: one JSON object a line on standard output, for people and for pipes.
//! A closed pipe is an outage like any other; it must never panic and never lose a line silently.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use postbox_engine::{Limits, Message, SendError, SendErrorKind, Sink};
use serde::Deserialize;
use std::io::{self, Write};
use std::sync::mpsc;
use tokio::sync::oneshot;

/// Options of the stdout sink: none.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StdoutConfig {}

/// Writes events as JSON lines.
pub struct StdoutSink {
    writer: mpsc::Sender<Job>,
}

struct Job {
    lines: Vec<u8>,
    done: oneshot::Sender<io::Result<()>>,
}

impl StdoutSink {
    /// Lines on this process's stdout.
    pub fn new() -> StdoutSink {
        StdoutSink::to(io::stdout())
    }

    /// The same lines to another place.
    ///
    /// A full pipe blocks its writer for as long as the reader likes. So a thread of its own writes, and lease,
    /// signals and shutdown never wait for it.
    pub fn to(mut out: impl Write + Send + 'static) -> StdoutSink {
        let (writer, jobs) = mpsc::channel::<Job>();
        std::thread::spawn(move || {
            for Job { lines, done } in jobs {
                if done.is_closed() {
                    continue; // given up before its turn came: not sent any more
                }
                let _ = done.send(out.write_all(&lines).and_then(|()| out.flush())); // nobody may be waiting any more
            }
        });
        StdoutSink { writer }
    }

    async fn write(&self, batch: &[Message]) -> io::Result<()> {
        let mut lines = Vec::with_capacity(batch.iter().map(Message::bytes).sum::<usize>() + 128 * batch.len());
        for message in batch {
            line(message, &mut lines)?;
        }
        let (done, written) = oneshot::channel();
        let gone = |_| io::Error::other("its writer has ended");
        self.writer.send(Job { lines, done }).map_err(|_| io::Error::other("its writer has ended"))?;
        written.await.map_err(gone)?
    }
}

impl Default for StdoutSink {
    fn default() -> StdoutSink {
        StdoutSink::new()
    }
}

impl Sink for StdoutSink {
    fn limits(&self) -> Limits {
        // A line is out when its write returns: more than one batch at a time gains nothing.
        Limits { batch_max: 500, bytes_max: 1 << 20, in_flight_max: 1, keeps_key_order: true }
    }

    async fn send(&self, batch: &[Message]) -> Vec<Result<(), SendError>> {
        let outcome = self.write(batch).await.map_err(|error| match error.kind() {
            // How much of the batch got through is unknown.
            io::ErrorKind::BrokenPipe => unavailable("standard output is closed: whoever read it has ended".into()),
            _ => unavailable(format!("standard output: {error}")),
        });
        batch.iter().map(|_| outcome.clone()).collect()
    }

    async fn check(&self) -> Result<(), SendError> {
        Ok(())
    }
}

fn unavailable(message: String) -> SendError {
    SendError::new(SendErrorKind::Unavailable, message)
}

fn line(message: &Message, out: &mut Vec<u8>) -> io::Result<()> {
    let event = &message.event;
    write!(out, "{{\"id\":\"{}\"", message.id_text())?;
    for (name, value) in [
        ("aggregate_type", event.aggregate_type()),
        ("aggregate_id", event.aggregate_id()),
        ("type", event.event_type()),
        ("destination", &*message.destination),
    ] {
        write!(out, ",\"{name}\":")?;
        serde_json::to_writer(&mut *out, value)?;
    }
    out.extend_from_slice(b",\"headers\":{");
    for (n, (name, value)) in message.headers.iter().enumerate() {
        if n > 0 {
            out.push(b',');
        }
        serde_json::to_writer(&mut *out, name)?;
        out.push(b':');
        serde_json::to_writer(&mut *out, &String::from_utf8_lossy(value))?;
    }
    out.push(b'}');
    match message.body() {
        None => out.extend_from_slice(b",\"payload\":null,\"tombstone\":true"),
        Some(body) => payload(body, out),
    }
    out.extend_from_slice(b"}\n");
    Ok(())
}

/// JSON as it stands, but for line breaks between its tokens; anything else as base64.
fn payload(body: &[u8], out: &mut Vec<u8>) {
    let json = std::str::from_utf8(body).ok();
    if json.is_some_and(|text| serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()) {
        out.extend_from_slice(b",\"payload\":");
        // Valid JSON has raw line breaks only between tokens (inside a string they are escaped), where a space means
        // the same. So no token changes, not even a number's spelling.
        out.extend(body.iter().map(|&b| if b == b'\n' || b == b'\r' { b' ' } else { b }));
    } else {
        out.extend_from_slice(b",\"payload_base64\":\"");
        out.extend_from_slice(STANDARD.encode(body).as_bytes());
        out.push(b'"');
    }
}

#[cfg(test)]
mod tests;

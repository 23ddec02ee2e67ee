//! What writers do: numbered events, one per transaction. Event n belongs to aggregate `n % KEYS` and is its
//! `n / KEYS + 1`-th; a writer has every `writers`-th number, so all events of an aggregate come from one writer,
//! in order, and what must arrive is known without asking the database.

use crate::audit::Seen;
use crate::world::{World, connect};
use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Aggregates; a multiple of every number of writers that is used here.
pub(crate) const KEYS: u64 = 9_600;

pub(crate) const INSERT: &str = "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, aggregate_seq, event_type, payload, headers)
    VALUES ('order', $1, $2, 'order.placed', $3::text::json, '{\"correlation_id\": \"7c9e6679-7425-40de-944b-e07fc1f90ae7\"}')";

/// Where event `n` belongs.
pub(crate) fn place(n: u64) -> Seen {
    Seen { key: n % KEYS, seq: n / KEYS + 1, event_id: 0 }
}

/// The number of an event; `place` the other way round.
pub(crate) fn number(seen: Seen) -> u64 {
    (seen.seq - 1) * KEYS + seen.key
}

/// A JSON payload of `bytes` bytes that says its sequence.
pub(crate) fn payload(seq: u64, bytes: usize) -> String {
    let head = format!("{{\"seq\":{seq},\"fill\":\"");
    let width = bytes.saturating_sub(head.len() + 2);
    format!("{head}{:x<width$}\"}}", "")
}

/// What each writer has committed so far.
#[derive(Clone)]
pub(crate) struct Written(Arc<Vec<AtomicU64>>);

impl Written {
    pub(crate) fn new(writers: usize) -> Written {
        Written(Arc::new((0..writers).map(|_| AtomicU64::new(0)).collect()))
    }
    pub(crate) fn writers(&self) -> usize {
        self.0.len()
    }
    pub(crate) fn events(&self) -> u64 {
        self.0.iter().map(|n| n.load(Relaxed)).sum()
    }
    /// The next number of a writer.
    pub(crate) fn next(&self, writer: usize) -> u64 {
        writer as u64 + self.0[writer].load(Relaxed) * self.writers() as u64
    }
    pub(crate) fn committed(&self, writer: usize) {
        self.0[writer].fetch_add(1, Relaxed);
    }
    /// All that must arrive.
    pub(crate) fn truth(&self) -> impl Iterator<Item = Seen> {
        let writers = self.writers() as u64;
        (0..writers).flat_map(move |w| (0..self.0[w as usize].load(Relaxed)).map(move |i| place(w + i * writers)))
    }
}

/// Writes without pause for `time`, one event per transaction, each writer over its own connection.
pub(crate) async fn write_for(world: &World, written: &Written, size: usize, time: Duration) -> Result<f64> {
    let (before, start, mut tasks) = (written.events(), Instant::now(), JoinSet::new());
    for writer in 0..written.writers() {
        let (url, written) = (world.url().to_owned(), written.clone());
        tasks.spawn(async move {
            let client = connect(&url).await?;
            let insert = client.prepare(INSERT).await?;
            while start.elapsed() < time {
                let event = place(written.next(writer));
                let (id, text) = (event.key.to_string(), payload(event.seq, size));
                client.execute(&insert, &[&id, &(event.seq as i64), &text]).await?;
                written.committed(writer);
            }
            Ok::<(), anyhow::Error>(())
        });
    }
    all(tasks).await?;
    Ok((written.events() - before) as f64 / start.elapsed().as_secs_f64())
}

/// Waits for all; the first error ends the rest.
pub(crate) async fn all(mut tasks: JoinSet<Result<()>>) -> Result<()> {
    while let Some(done) = tasks.join_next().await {
        done.context("a writer panicked")??;
    }
    Ok(())
}

const FILL: &str = "CREATE SCHEMA IF NOT EXISTS app;
CREATE OR REPLACE PROCEDURE app.fill(first bigint, past bigint, step bigint, keys bigint, size integer) LANGUAGE plpgsql AS $$
DECLARE head text;
BEGIN
  FOR n IN first .. past - 1 BY step LOOP
    head := '{\"seq\":' || n / keys + 1 || ',\"fill\":\"';
    INSERT INTO postbox.outbox (aggregate_type, aggregate_id, aggregate_seq, event_type, payload, headers)
      VALUES ('order', (n % keys)::text, n / keys + 1, 'order.placed', (head || repeat('x', size - length(head) - 2) || '\"}')::json,
        '{\"correlation_id\": \"7c9e6679-7425-40de-944b-e07fc1f90ae7\"}');
    COMMIT;
  END LOOP;
END $$";

/// Fills the outbox with the events `first .. past`, one per transaction, by two writers inside the server that do
/// not wait for the disk (`synchronous_commit = off`): the rows are those of two million single transactions, the
/// hour that these would take is not part of what is measured.
pub(crate) async fn fill(world: &World, first: u64, past: u64, size: usize) -> Result<()> {
    world.connect().await?.batch_execute(FILL).await?;
    let (start, mut tasks) = (Instant::now(), JoinSet::new());
    for writer in 0..2 {
        let client = world.connect().await?;
        let call = format!("CALL app.fill({}, {past}, 2, {KEYS}, {size})", first + writer);
        tasks.spawn(async move {
            client.batch_execute("SET synchronous_commit = off").await?;
            Ok(client.batch_execute(&call).await?)
        });
    }
    all(tasks).await?;
    eprintln!(
        "{} events of {size} B written, one per transaction, in {:.0} s",
        past - first,
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_places_agree() {
        for n in [0, 1, KEYS - 1, KEYS, 3 * KEYS + 17] {
            assert_eq!(number(place(n)), n);
        }
    }

    #[test]
    fn a_payload_has_its_size() {
        assert_eq!(payload(17, 500).len(), 500);
        assert!(payload(17, 500).starts_with("{\"seq\":17,"));
    }

    #[test]
    fn the_truth_is_what_was_committed() {
        let written = Written::new(2);
        assert_eq!((written.next(0), written.next(1)), (0, 1));
        written.committed(1);
        assert_eq!((written.next(1), written.events()), (3, 1));
        assert_eq!(written.truth().collect::<Vec<_>>(), [place(1)]);
    }
}

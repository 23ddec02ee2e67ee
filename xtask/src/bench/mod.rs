//! `cargo x bench`: the scenarios of docs/benchmarks.md. Each prints one line of JSON, with what was lost,
//! reordered and duplicated beside what was fast; a fast wrong run is a failure.

mod cost;
mod drain;
mod idle;
mod latency;
mod sustained;
mod writers;

use crate::audit::{Audit, Seen};
use crate::shell;
use crate::world::World;
use anyhow::{Result, bail};
use clap::Subcommand;
use hdrhistogram::Histogram;
use serde_json::Value;
use std::time::Duration;

#[derive(Subcommand)]
pub(crate) enum Scenario {
    /// Sustained: writers without pause, one event per transaction, with the relay and without
    S1 {
        #[arg(long, default_value_t = 16)]
        clients: usize,
        #[arg(long, default_value_t = 30)]
        seconds: u64,
        #[arg(long, default_value_t = 500)]
        size: usize,
    },
    /// Latency: from the return of COMMIT to the consumer, at a steady rate
    S2 {
        #[arg(long, default_value_t = 1_000)]
        rate: u64,
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        #[arg(long, default_value_t = 500)]
        size: usize,
    },
    /// Recovery: a backlog into Kafka
    S4 {
        #[arg(long, default_value_t = 2_000_000)]
        events: u64,
        #[arg(long, default_value_t = 500)]
        size: usize,
        /// Published events that lie in the outbox before the backlog is written
        #[arg(long, default_value_t = 0)]
        retained: u64,
    },
    /// S4, then the same with a transaction open from before the backlog
    S5 {
        #[arg(long, default_value_t = 2_000_000)]
        events: u64,
        #[arg(long, default_value_t = 500)]
        size: usize,
    },
    /// What writers pay: a business transaction without event, with one in a plain table, with one in the outbox
    S6 {
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        #[arg(long, default_value_t = 5)]
        seconds: u64,
        #[arg(long, default_value_t = 500)]
        size: usize,
    },
    /// Cost in the database of the relay's work: WAL, dead rows, statements, sizes
    S7 {
        #[arg(long, default_value_t = 1_000_000)]
        events: u64,
        #[arg(long, default_value_t = 500)]
        size: usize,
    },
    /// Idle: CPU and statements of a relay with nothing to do, and the first event after a silence
    S11 {
        /// Silences of a minute
        #[arg(long, default_value_t = 7)]
        rounds: usize,
    },
}

pub(crate) fn run(scenario: Scenario) -> Result<()> {
    if shell::in_release()? {
        return Ok(());
    }
    tokio::runtime::Runtime::new()?.block_on(async {
        match scenario {
            Scenario::S1 { clients, seconds, size } => {
                sustained::run(clients, Duration::from_secs(seconds), size).await
            }
            Scenario::S2 { rate, seconds, size } => latency::run(rate, seconds, size).await,
            Scenario::S4 { events, size, retained } => drain::s4(events, size, retained).await,
            Scenario::S5 { events, size } => drain::s5(events, size).await,
            Scenario::S6 { rounds, seconds, size } => writers::run(rounds, Duration::from_secs(seconds), size).await,
            Scenario::S7 { events, size } => cost::run(events, size).await,
            Scenario::S11 { rounds } => idle::run(rounds).await,
        }
    })
}

/// Names and values of a line of JSON, in their order.
type Figures = Vec<(&'static str, Value)>;

/// Prints the line: what was measured, under which conditions, and whether the run was right.
///
/// # Errors
/// Something was lost or reordered, or came twice though nothing crashed.
async fn report(
    world: &World,
    scenario: &str,
    mut figures: Figures,
    audit: &Audit,
    truth: impl Iterator<Item = Seen>,
) -> Result<()> {
    let lost = audit.lost(truth);
    let postgres: String = world.connect().await?.query_one("SHOW server_version", &[]).await?.get(0);
    let commit = shell::output(shell::command("git", &["describe", "--always", "--dirty"]))?;
    figures.insert(0, ("scenario", scenario.into()));
    figures.extend([
        ("lost", lost.into()),
        ("reordered", audit.reordered.into()),
        ("duplicated", audit.duplicated.into()),
    ]);
    figures.extend([
        ("cores", std::thread::available_parallelism()?.get().into()),
        ("postgres", postgres.into()),
        ("commit", commit.trim().into()),
    ]);
    println!("{}", line(&figures));
    if lost + audit.reordered + audit.duplicated + audit.foreign > 0 {
        bail!("{scenario} was wrong: {lost} lost, {} reordered, {} duplicated", audit.reordered, audit.duplicated);
    }
    Ok(())
}

/// One JSON object; what matters most stands first, so its order is kept.
fn line(figures: &Figures) -> String {
    let pairs: Vec<String> = figures.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
    format!("{{{}}}", pairs.join(","))
}

/// A percentile of a histogram of microseconds, in milliseconds.
fn ms(histogram: &Histogram<u64>, percentile: f64) -> f64 {
    histogram.value_at_percentile(percentile) as f64 / 1_000.0
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

//! `cargo x bench`: the scenarios of docs/benchmarks.md. Each prints one line of JSON, with what was lost,
//! reordered and duplicated beside what was fast; a fast wrong run is a failure.

mod cost;
mod drain;
mod idle;
mod latency;
mod sustained;
mod writers;

use crate::audit::{Audit, Seen, Wrong};
use crate::world::World;
use crate::{Told, shell};
use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use hdrhistogram::Histogram;
use serde_json::{Value, json};
use std::time::Duration;

/// In the order in which they run, whatever was typed: a line about latency is the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Scenario {
    /// Sustained: writers without pause, one event per transaction, with the relay and without
    S1,
    /// Recovery: a backlog into Kafka
    S4,
    /// S4, then the same with a transaction open from before the backlog
    S5,
    /// What writers pay: a business transaction without event, with one in a plain table, with one in the outbox
    S6,
    /// Cost in the database of the relay's work: WAL, dead rows, statements, sizes
    S7,
    /// Idle: CPU and statements of a relay with nothing to do, and the first event after a silence
    S11,
    /// Latency: from the return of COMMIT to the consumer, at a steady rate
    S2,
}

/// How much of it. What is not given is the scenario's own.
#[derive(Args, Clone, Copy)]
pub(crate) struct Scale {
    /// A thirtieth of everything: shows that a scenario runs and that all arrives; its figures say nothing
    #[arg(long)]
    small: bool,
    /// Bytes of a payload
    #[arg(long, default_value_t = 500)]
    size: usize,
    /// s4, s5, s7: events that wait [default: 2000000; s7: 1000000]
    #[arg(long)]
    events: Option<u64>,
    /// s4: published events that lie in the outbox before the backlog is written
    #[arg(long, default_value_t = 0)]
    retained: u64,
    /// s1: writers
    #[arg(long, default_value_t = 16)]
    clients: usize,
    /// s2: events per second
    #[arg(long, default_value_t = 1_000)]
    rate: u64,
    /// s1, s2, s6: how long a measurement lasts [default: 30, 60, 5]
    #[arg(long)]
    seconds: Option<u64>,
    /// s6: rounds [default: 5]; s11: silences [default: 7]
    #[arg(long)]
    rounds: Option<usize>,
}

/// By what `--small` divides.
const SMALL: u32 = 30;

impl Scale {
    fn events(&self, full: u64) -> u64 {
        self.events.unwrap_or(if self.small { full / u64::from(SMALL) } else { full })
    }
    /// Of a measurement.
    fn time(&self, full: Duration) -> Duration {
        self.seconds.map_or_else(|| self.pause(full), Duration::from_secs)
    }
    /// Of a silence, or of what warms up.
    fn pause(&self, full: Duration) -> Duration {
        if self.small { full / SMALL } else { full }
    }
    fn rounds(&self, full: usize) -> usize {
        self.rounds.unwrap_or(if self.small { 1 } else { full })
    }
}

/// Runs each once, in the enum's order; one that fails does not keep the others from running.
pub(crate) fn run(mut scenarios: Vec<Scenario>, scale: Scale) -> Result<()> {
    if shell::in_release()? {
        return Ok(());
    }
    scenarios.sort();
    scenarios.dedup();
    let mut failed = vec![];
    for scenario in scenarios {
        // A runtime of its own, so that nothing of one scenario runs on in the next.
        if let Err(error) = tokio::runtime::Runtime::new()?.block_on(run_one(scenario, scale)) {
            if !error.is::<Told>() {
                println!(
                    "{}",
                    json!({ "scenario": format!("{scenario:?}").to_lowercase(), "error": format!("{error:#}") })
                );
            }
            eprintln!("{scenario:?}: {error:#}");
            failed.push(scenario);
        }
    }
    ensure!(failed.is_empty(), Told(format!("failed: {failed:?}")));
    Ok(())
}

async fn run_one(scenario: Scenario, scale: Scale) -> Result<()> {
    match scenario {
        Scenario::S1 => sustained::run(scale).await,
        Scenario::S2 => latency::run(scale).await,
        Scenario::S4 => drain::s4(scale).await,
        Scenario::S5 => drain::s5(scale).await,
        Scenario::S6 => writers::run(scale).await,
        Scenario::S7 => cost::run(scale).await,
        Scenario::S11 => idle::run(scale).await,
    }
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
    let Wrong { lost, foreign } = audit.against(truth);
    let postgres: String = world.connect().await?.query_one("SHOW server_version", &[]).await?.get(0);
    let commit = shell::output(shell::command("git", &["describe", "--always", "--dirty"]));
    let commit = commit.unwrap_or_else(|_| "unknown".into()); // of a tree without its history
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
    if lost + audit.reordered + audit.duplicated + foreign > 0 {
        let Audit { reordered, duplicated, .. } = audit;
        bail!(Told(format!(
            "{scenario} was wrong: {lost} lost, {reordered} reordered, {duplicated} duplicated, {foreign} never committed"
        )));
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

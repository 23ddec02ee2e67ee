//! `cargo x`: the project's own commands. Each verb that measures or counts ends with one line of JSON on stdout;
//! progress and talk go to stderr. Nothing here is part of the product.

mod audit;
mod bench;
mod checks;
mod crash;
mod lean;
mod load;
mod machine;
mod relay;
mod shell;
mod tidy;
mod world;

use anyhow::{Context, Result, anyhow};
use clap::{Parser, Subcommand};
use serde_json::json;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "cargo x", about = "The project's own commands", after_help = EXAMPLES)]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

const EXAMPLES: &str = "Examples:
  cargo x test                      all tests, with real servers
  cargo x sim --seeds 20000         the engine under 20,000 seeded schedules of failure
  cargo x sim --seed 4711           one schedule again
  cargo x crash --kills 50          real PostgreSQL and Kafka, two relays, 50 times SIGKILL
  cargo x bench s4                  2 million waiting events into Kafka
  cargo x bench s1 s4 s2 --small    whether these scenarios run, in a minute
  cargo x services                  PostgreSQL and Kafka to play with, until Ctrl-C
  cargo x ci                        all that must be green before a merge";

#[derive(Subcommand)]
enum Verb {
    /// Starts what the tests need, then runs all of them; arguments after `--` go to `cargo test`
    Test {
        #[arg(last = true)]
        cargo: Vec<String>,
    },
    /// Runs the engine under seeded schedules of failure, in virtual time
    Sim {
        /// How many schedules [default: 1000, or the one of --seed]
        #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
        seeds: Option<u64>,
        /// The first seed [default: 0]
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Kills real relays, between real PostgreSQL and Kafka, and counts what a consumer receives
    Crash {
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..))]
        kills: u64,
        /// Of the moments and the transactions; by default another one each time
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Measures; see docs/benchmarks.md. One line of JSON for each scenario; s2 comes last
    Bench {
        #[arg(required = true)]
        scenarios: Vec<bench::Scenario>,
        #[command(flatten)]
        scale: bench::Scale,
    },
    /// PostgreSQL 15 and Kafka on free ports, until Ctrl-C
    Services,
    /// Checks the rules of the house: sizes, words, arrows between crates, documents, requirements
    Tidy,
    /// All that must be green before a merge; the same script that runs on a new machine
    Ci,
}

impl Verb {
    /// It measures or counts, and ends with a line of JSON in any case.
    fn has_a_line(&self) -> bool {
        !matches!(self, Verb::Services | Verb::Ci)
    }
}

/// What went wrong was told by a line of JSON already.
#[derive(Debug)]
struct Told(String);

impl std::fmt::Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Told {}

fn main() -> ExitCode {
    let verb = Args::parse().verb;
    let has_a_line = verb.has_a_line();
    let result = std::panic::catch_unwind(|| run(verb)).unwrap_or_else(|_| Err(anyhow!("it panicked: see above")));
    let Err(error) = result else { return ExitCode::SUCCESS };
    if has_a_line && !error.is::<Told>() {
        println!("{}", json!({ "error": format!("{error:#}") }));
    }
    eprintln!("cargo x: {error:#}");
    ExitCode::FAILURE
}

fn run(verb: Verb) -> Result<()> {
    if matches!(verb, Verb::Test { .. } | Verb::Crash { .. } | Verb::Bench { .. } | Verb::Services) {
        shell::run(shell::command("bash", &[".ci/packages"]))?; // what real servers need
    }
    match verb {
        Verb::Test { cargo } => checks::test(&cargo),
        Verb::Sim { seeds, seed } => {
            let (first, count) = (seed.unwrap_or(0), seeds.unwrap_or(if seed.is_some() { 1 } else { 1_000 }));
            checks::sim(first..first.checked_add(count).context("there are no seeds beyond 2^64")?)
        }
        Verb::Crash { kills, seed } => crash::run(kills, seed.unwrap_or_else(new_seed)),
        Verb::Bench { scenarios, scale } => bench::run(scenarios, scale),
        Verb::Services => checks::services(),
        Verb::Tidy => checks::tidy(),
        Verb::Ci => checks::ci(),
    }
}

/// Another seed each time; it is printed, so that the run can be repeated.
fn new_seed() -> u64 {
    let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    now.as_secs() ^ u64::from(now.subsec_nanos())
}

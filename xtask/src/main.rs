//! `cargo x`: the project's own commands. Each verb that measures or counts ends with one line of JSON on stdout;
//! progress and talk go to stderr. Nothing here is part of the product.

mod checks;
mod shell;
mod tidy;

use anyhow::Result;
use clap::{Parser, Subcommand};
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
  cargo x sim --seeds 1 --seed 4711 one schedule again
  cargo x crash --kills 50          real PostgreSQL and Kafka, two relays, 50 times SIGKILL
  cargo x bench s4                  2 million waiting events into Kafka
  cargo x services                  PostgreSQL and Kafka to play with, until Ctrl-C
  cargo x ci                        all that must be green before a merge";

#[derive(Subcommand)]
enum Verb {
    /// Starts what the tests need, then runs all of them. Arguments after `--` go to `cargo test`.
    Test {
        #[arg(last = true)]
        cargo: Vec<String>,
    },
    /// Checks the rules of the house: sizes, words, arrows between crates, documents, requirements.
    Tidy,
    /// All that must be green before a merge; the same script that runs on a new machine.
    Ci,
}

fn main() -> ExitCode {
    match run(Args::parse().verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo x: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> Result<()> {
    match verb {
        Verb::Test { cargo } => checks::test(&cargo),
        Verb::Tidy => checks::tidy(),
        Verb::Ci => checks::ci(),
    }
}

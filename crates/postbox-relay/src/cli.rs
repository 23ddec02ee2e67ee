//! The command line: what can be said, and who does it. Data goes to stdout, talk to stderr.

use crate::commands;
use crate::config;
use crate::failure::Failure;
use clap::{Args, Parser, Subcommand};
use postbox_sources::admin::Roles;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

const AFTER: &str = "\
Configuration: postbox.toml in the working directory, or the file that --config or POSTBOX_CONFIG names; each key
also as POSTBOX__SECTION__KEY; DATABASE_URL where no key names the database. `postbox config default` lists all keys.

Exit codes:
  0    done; for relay: stopped by a signal, with all in hand settled or given back
  1    it could not be done, or what was done could not be printed; the last lines of stderr say which and why
  2    the command line or the configuration is wrong, as far as that is known without connecting; nothing was changed
  3    check found something that must be mended, and no wrong configuration; trace found no such event
  128+ ended at once by a signal: a later second one (130: Ctrl-C, 143: SIGTERM), or the end of the terminal (129);
       what was in flight is sent again by the next relay

Examples:
  postbox relay --demo                 see events flow: a small shop writes orders, the relay prints them
  postbox check                        is everything there that the relay needs?
  DATABASE_URL=postgres://me@db/shop postbox migrate";

/// Carries committed events from your database to your broker
#[derive(Debug, Parser)]
#[command(name = "postbox", version, after_help = AFTER, disable_help_subcommand = true, max_term_width = 120)]
pub struct Cli {
    /// Configuration file
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the relay until a signal stops it
    #[command(after_help = "\
Ctrl-C or SIGTERM lets sends in flight finish (relay.drain_timeout) and hands over to the next relay at once; a second
signal ends at once. Without a database in the configuration it uses the file postbox.db here, and makes it.
Events and the log go different ways: events where the stream's sink says, the log to stderr (RUST_LOG=debug says more).

Examples:
  postbox relay --demo
  POSTBOX__STREAM__MAIN__SINK=kafka DATABASE_URL=postgres://me@db/shop postbox relay")]
    Relay(RelayArgs),
    /// Create or update the tables; safe to repeat, and when several start at once
    #[command(after_help = "\
`source.schema` in the configuration (POSTBOX__SOURCE__SCHEMA, by default postbox) is the schema of the tables on
PostgreSQL, and what their names begin with on SQLite: with shop the outbox is shop.outbox there, shop_outbox here.

Examples:
  postbox migrate
  postbox migrate --print > postbox.sql                      for those who run DDL themselves
  postbox migrate --print --roles shop,shop_relay | psql     least privilege for a service and its relay")]
    Migrate(MigrateArgs),
    /// Write one event, in a transaction of its own
    #[command(after_help = "\
Services write events in their own transaction instead, with the crate `postbox` or with SQL (postbox.publish).

Examples:
  postbox publish order 42 order.placed '{\"total\": 10}'
  postbox publish order 42 order.placed - --header tenant_id=7 < order.json")]
    Publish(PublishArgs),
    /// Show how far each stream is; works while no relay runs
    #[command(after_help = "\
Examples:
  postbox status
  postbox status --json | jq .[].oldest_unpublished_s")]
    Status(OutputArgs),
    /// Connect to database and broker, and say what is missing and what mends it; changes nothing
    #[command(after_help = "\
Examples:
  postbox check
  postbox check --json || echo 'not ready'")]
    Check(OutputArgs),
    /// Say when an event was written, sent and published, by which relay, after how many attempts
    #[command(after_help = "\
Examples:
  postbox trace 019a2b3c-4d5e-7f60-8a9b-0c1d2e3f4a5b")]
    Trace(TraceArgs),
    /// Show the configuration
    #[command(
        subcommand,
        after_help = "\
Examples:
  postbox config default > postbox.toml
  postbox config print"
    )]
    Config(ConfigCommand),
}

#[derive(Debug, Args)]
pub(crate) struct RelayArgs {
    /// Also run a small shop that writes orders into the database (SQLite only)
    #[arg(long)]
    pub(crate) demo: bool,
}

#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    /// Print the SQL and run nothing
    #[arg(long)]
    pub(crate) print: bool,
    /// Print the grants for these two roles instead: the service's and the relay's (PostgreSQL)
    #[arg(long, requires = "print", value_name = "WRITER,RELAY", value_parser = commands::migrate::roles)]
    pub(crate) roles: Option<Roles>,
}

#[derive(Debug, Args)]
pub(crate) struct PublishArgs {
    pub(crate) aggregate_type: String,
    pub(crate) aggregate_id: String,
    pub(crate) event_type: String,
    /// JSON; `-` reads it from stdin
    pub(crate) payload: String,
    /// A header of the event; may be repeated
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    pub(crate) headers: Vec<(String, String)>,
    /// The event's id instead of a new one
    #[arg(long, value_name = "UUID")]
    pub(crate) event_id: Option<uuid::Uuid>,
    /// Where it goes, instead of where the routes say
    #[arg(long, value_name = "TOPIC")]
    pub(crate) destination: Option<String>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

fn header(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(name, _)| !name.is_empty());
    pair.map(|(name, value)| (name.into(), value.into())).ok_or_else(|| "NAME=VALUE, as in tenant_id=7".into())
}

#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// As the column `event_id` has it, and as the broker's header carries it
    #[arg(value_name = "EVENT_ID")]
    pub(crate) event_id: uuid::Uuid,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct OutputArgs {
    /// JSON on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, Subcommand)]
enum ConfigCommand {
    /// The commented default file, which is the reference of all keys
    Default,
    /// What is in force after file and environment; secrets are masked
    Print,
}

/// Reads the command line and does what it says.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

impl Cli {
    fn run(self) -> Result<(), Failure> {
        if let Command::Config(ConfigCommand::Default) = self.command {
            return commands::config::default();
        }
        let (file, environment) = (self.config.as_deref(), environment()?);
        if let Command::Config(ConfigCommand::Print) = self.command {
            return commands::config::in_force(file, &environment);
        }
        let config = config::load(file, &environment)?;
        match self.command {
            Command::Config(_) => unreachable!("both were answered above"),
            Command::Relay(args) => commands::relay::run(&config, &args),
            Command::Migrate(args) => wait(commands::migrate::run(&config, &args)),
            Command::Publish(args) => wait(commands::publish::run(&config, &args)),
            Command::Status(output) => wait(commands::status::run(&config, output)),
            Command::Check(output) => wait(commands::check::run(&config, output)),
            Command::Trace(args) => wait(commands::trace::run(&config, &args)),
        }
    }
}

/// The variables. Those that are no text and none of ours are left out.
fn environment() -> Result<BTreeMap<String, String>, Failure> {
    let mut environment = BTreeMap::new();
    for (name, value) in std::env::vars_os() {
        match (name.into_string(), value.into_string()) {
            (Ok(name), Ok(value)) => drop(environment.insert(name, value)),
            (Ok(name), Err(_)) if name.starts_with("POSTBOX_") || name == "DATABASE_URL" => {
                return Err(Failure::usage(format!("environment variable {name}: its value is not UTF-8")));
            }
            _ => {}
        }
    }
    Ok(environment)
}

/// Runs a short command to its end.
fn wait<T>(command: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(command)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_an_example() {
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Examples:\n  "), "{}", command.get_name());
            assert!(help.contains(&format!("postbox {}", command.get_name())), "{}", command.get_name());
        }
    }
}

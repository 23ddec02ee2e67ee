//! One small world to measure in: PostgreSQL 15, Kafka, the product's binary, a migrated database and a topic.
//! All on free ports of this machine, gone at the end. The harness reaches the product as a user does: by its
//! binary, its tables and its topic.

use crate::relay::Relay;
use crate::shell;
use anyhow::{Context, Result};
use postbox_testkit::services::{Kafka, KafkaOptions, PgOptions, PgVersion, Postgres};
use std::path::PathBuf;
use std::process::Command;
use tempfile::TempDir;
use tokio_postgres::{Client, NoTls};

/// As many partitions as the figures of others that ours are compared with were taken on.
pub(crate) const PARTITIONS: i32 = 6;
pub(crate) const TOPIC: &str = "events";
/// Where the events of a relay without a database go; they are not among those that are counted.
pub(crate) const MEMORY_TOPIC: &str = "memory";

pub(crate) struct World {
    pub(crate) postgres: Postgres,
    pub(crate) kafka: Kafka,
    binary: PathBuf,
    folder: TempDir,
    url: String,
    relay: &'static str,
}

/// How the servers run.
#[derive(Clone, Copy, Default)]
pub(crate) struct Setup {
    /// Kafka with its full JIT and 1 GB, PostgreSQL without a checkpoint in the middle of a run.
    pub(crate) bench: bool,
    /// Statements are counted, which costs them a little.
    pub(crate) statements: bool,
    /// Lines of `postbox.toml` for `[relay]`.
    pub(crate) relay: &'static str,
}

impl World {
    /// Builds the binary, starts the servers, migrates a fresh database and makes the topic.
    pub(crate) fn start(setup: Setup) -> Result<World> {
        let binary = shell::build_postbox()?;
        eprintln!("starting PostgreSQL 15 (fsync on) and Kafka ..");
        let mut extra = vec![];
        if setup.bench {
            // PostgreSQL's default; the tests' servers have more, and then writers do not wake an idle relay.
            extra.push(("max_prepared_transactions", "0"));
            extra.extend([("shared_buffers", "512MB"), ("max_wal_size", "16GB"), ("checkpoint_timeout", "1h")]);
        }
        if setup.statements {
            extra.push(("shared_preload_libraries", "pg_stat_statements"));
        }
        let extra = extra.into_iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        let postgres = Postgres::start_with(PgVersion::V15, &PgOptions { fsync: true, extra })?;
        let kafka = Kafka::start_with(&KafkaOptions { bench_jit: setup.bench, ..KafkaOptions::default() })?;
        for topic in [TOPIC, MEMORY_TOPIC] {
            kafka.create_topic(topic, PARTITIONS as u32, &[])?;
        }
        let url = format!("{}?sslmode=disable", postgres.create_database());
        let world = World { postgres, kafka, binary, folder: tempfile::tempdir()?, url, relay: setup.relay };
        world.configure("postbox.toml", &world.url, TOPIC)?;
        shell::run(world.postbox(&["migrate"]))?;
        Ok(world)
    }

    fn configure(&self, file: &str, url: &str, topic: &str) -> Result<()> {
        let (relay, brokers) = (self.relay, self.kafka.bootstrap());
        let config = format!(
            "[source]\nurl = \"{url}\"\n[relay]\n{relay}\n[stream.main]\nsink = \"kafka\"\nroutes = [{{ topic = \"{topic}\" }}]\n\
             [stream.main.kafka]\nbrokers = \"{brokers}\"\n"
        );
        Ok(std::fs::write(self.folder.path().join(file), config)?)
    }

    /// The product's binary, with this world's configuration.
    fn postbox(&self, args: &[&str]) -> Command {
        // A relay must not outlive the harness: whatever ends that, the kernel then ends the relay.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(&self.binary).args(args);
        command.current_dir(self.folder.path()).env("RUST_BACKTRACE", "0").env_remove("DATABASE_URL");
        command
    }

    /// A relay process under its default name, so that none is taken for another; its log goes to `log`.
    pub(crate) fn relay(&self, log: &str) -> Result<Relay> {
        let command = self.postbox(&["relay"]);
        Relay::spawn(command, self.folder.path().join(format!("{log}.log")))
    }

    /// A relay that makes up its events itself, into a topic of their own: what engine and sink take without a database.
    pub(crate) fn relay_from_memory(&self, events: u64) -> Result<Relay> {
        self.configure("memory.toml", &format!("memory:{events}"), MEMORY_TOPIC)?;
        Relay::spawn(self.postbox(&["relay", "--config", "memory.toml"]), self.folder.path().join("memory.log"))
    }

    /// A connection to the database; a task drives it.
    pub(crate) async fn connect(&self) -> Result<Client> {
        connect(&self.url).await
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

/// A connection; a task drives it.
pub(crate) async fn connect(url: &str) -> Result<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.context("cannot connect to PostgreSQL")?;
    tokio::spawn(connection);
    Ok(client)
}

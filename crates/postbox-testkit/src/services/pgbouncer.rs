//! A real PgBouncer before a PostgreSQL, on a free port of 127.0.0.1.

use super::postgres::{as_ordinary_user, give_away};
use super::supervisor::{Plan, Supervisor};
use super::{cache, free_port, wire};
use anyhow::{Result, ensure};
use std::fmt::Write;

/// A running pooler. Dropping it kills it and removes its folder.
pub struct PgBouncer {
    _server: Supervisor,
    port: u16,
}

pub(super) fn program() -> Result<&'static str> {
    let program = "/usr/sbin/pgbouncer";
    ensure!(std::path::Path::new(program).exists(), "PgBouncer is missing: apt-get install pgbouncer");
    Ok(program)
}

impl PgBouncer {
    /// A pooler before all databases of the server at `server_port`; `mode` is its `pool_mode`.
    ///
    /// # Errors
    /// It is missing (and the command that installs it), or its own message.
    pub fn start(server_port: u16, mode: &str) -> Result<PgBouncer> {
        let (folder, port) = (cache::server_folder()?, free_port()?);
        let settings = folder.join("pgbouncer.ini");
        let mut text = format!("[databases]\n* = host=127.0.0.1 port={server_port} user=postgres\n[pgbouncer]\n");
        write!(text, "pool_mode = {mode}\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n")?;
        write!(text, "unix_socket_dir =\nauth_type = any\ndefault_pool_size = 10\n")?;
        std::fs::write(&settings, text)?;
        let mut command: Vec<String> = as_ordinary_user().iter().map(ToString::to_string).collect();
        command.extend([program()?.into(), settings.display().to_string()]);
        let mut server = Supervisor::new(Plan { name: "PgBouncer".into(), command, folder, env: Vec::new() })?;
        give_away(server.folder())?;
        server.start(|| wire::postgres(port, "postgres", "SELECT 1").is_ok())?;
        Ok(PgBouncer { _server: server, port })
    }

    /// Runs SQL through it, without a driver; see [`super::Postgres::execute`].
    ///
    /// # Errors
    /// The server's, with SQLSTATE, or the pooler's.
    pub fn execute(&self, database: &str, sql: &str) -> Result<Vec<Vec<Option<String>>>> {
        wire::postgres(self.port, database, sql)
    }

    /// The URL of a database through it.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }
}

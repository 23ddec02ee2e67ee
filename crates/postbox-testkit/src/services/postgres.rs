//! A real PostgreSQL on a free port of 127.0.0.1, with a data folder of its own, user `postgres` without a password.

use super::supervisor::{Plan, Supervisor};
use super::{cache, free_port, wire};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The versions that are promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PgVersion {
    V14,
    V15,
    V16,
    V17,
    V18,
}

const POM: &str = include_str!("../../resources/postgres.pom.xml");

impl PgVersion {
    /// What most tests run against: the oldest, the one at hand as a Debian package, and the newest.
    pub const ALL: [PgVersion; 3] = [PgVersion::V14, PgVersion::V15, PgVersion::V18];
    /// Each of them.
    pub const PROMISED: [PgVersion; 5] =
        [PgVersion::V14, PgVersion::V15, PgVersion::V16, PgVersion::V17, PgVersion::V18];

    fn number(self) -> u32 {
        match self {
            PgVersion::V14 => 14,
            PgVersion::V15 => 15,
            PgVersion::V16 => 16,
            PgVersion::V17 => 17,
            PgVersion::V18 => 18,
        }
    }

    /// The folder of its programs, fetched if need be.
    pub(super) fn programs(self) -> Result<PathBuf> {
        match self {
            PgVersion::V15 => {
                let bin = PathBuf::from("/usr/lib/postgresql/15/bin");
                ensure!(bin.join("postgres").exists(), "PostgreSQL 15 is missing: apt-get install postgresql-15");
                Ok(bin)
            }
            PgVersion::V14 => fetched("14.23.0"),
            PgVersion::V16 => fetched("16.14.0"),
            PgVersion::V17 => fetched("17.10.0"),
            PgVersion::V18 => fetched("18.6.0"),
        }
    }

    /// A data folder fresh from initdb, to copy.
    pub(super) fn template(self) -> Result<PathBuf> {
        let bin = self.programs()?;
        cache::once(&format!("initdb-{}", self.number()), |folder| {
            give_away(folder)?;
            let mut words = as_ordinary_user().to_vec();
            let initdb = bin.join("initdb").display().to_string();
            words.push(&initdb);
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).arg("-D").arg(folder.join("data"));
            command.args(["-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C.UTF-8"]);
            cache::run(
                &mut command,
                "POSTBOX_CACHE names a folder that every user can reach, if permissions are missing",
            )
        })
    }
}

/// The programs of a version that is no package of the system's.
fn fetched(version: &str) -> Result<PathBuf> {
    let folder = cache::once(&format!("postgres-{version}"), |folder| {
        cache::maven(&POM.replace("{version}", version), "unpack-dependencies", folder)?;
        let archive = folder.join("postgres-linux-x86_64.txz");
        cache::run(Command::new("tar").arg("-xJf").arg(&archive).arg("-C").arg(folder), "apt-get install xz-utils")?;
        Ok(std::fs::remove_file(archive)?)
    })?;
    Ok(folder.join("bin"))
}

const NAMESPACE: &[&str] = &["unshare", "--user", "--map-user=65534", "--map-group=65534"];
const NOBODY: &[&str] = &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];

/// PostgreSQL refuses to run as root. In a user namespace it is somebody else, and its files stay root's; where root
/// may make none (most containers), it becomes nobody, and its files are given away.
pub(super) fn as_ordinary_user() -> &'static [&'static str] {
    static PREFIX: OnceLock<&[&str]> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let says = |words: &[&str]| Command::new(words[0]).args(&words[1..]).output();
        if !says(&["id", "-u"]).is_ok_and(|o| o.stdout == b"0\n") {
            return &[];
        }
        let namespace = says(&[NAMESPACE, &["true"]].concat()).is_ok_and(|o| o.status.success());
        if namespace { NAMESPACE } else { NOBODY }
    })
}

/// Makes a folder the property of whom PostgreSQL runs as.
pub(super) fn give_away(folder: &Path) -> Result<()> {
    if as_ordinary_user() != NOBODY {
        return Ok(());
    }
    cache::run(Command::new("chown").args(["-R", "65534:65534"]).arg(folder), "see its message")
}

/// How a PostgreSQL server runs.
#[derive(Clone, Debug, Default)]
pub struct PgOptions {
    /// On for benchmarks and for what only a real flush shows. Off by default: the servers of tests only die by
    /// signals, and the page cache survives those.
    pub fsync: bool,
    /// Further settings, as in postgresql.conf.
    pub extra: Vec<(String, String)>,
}

/// A running server. Dropping it kills it and removes its folder.
pub struct Postgres {
    server: Supervisor,
    port: u16,
}

impl Postgres {
    /// A server of one's own, with the default options.
    ///
    /// # Errors
    /// A program is missing (and the command that installs it), or the server's own message.
    pub fn start(version: PgVersion) -> Result<Postgres> {
        Postgres::start_with(version, &PgOptions::default())
    }

    /// See [`Postgres::start`].
    pub fn start_with(version: PgVersion, options: &PgOptions) -> Result<Postgres> {
        // The free port may be taken by somebody else before the server has it.
        Postgres::try_start(version, options).or_else(|first| match format!("{first:#}") {
            text if text.contains("Address already in use") => Postgres::try_start(version, options),
            _ => Err(first),
        })
    }

    fn try_start(version: PgVersion, options: &PgOptions) -> Result<Postgres> {
        let bin = version.programs()?;
        let template = version.template()?;
        let folder = cache::server_folder()?;
        let port = free_port()?;
        let plan = Plan {
            name: format!("PostgreSQL {}", version.number()),
            command: command(&bin, &folder, port, options),
            folder,
            env: Vec::new(),
        };
        let mut server = Supervisor::new(plan)?;
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(template.join("data")).arg(server.folder().join("data"));
        cache::run(&mut copy, "is the disk full?")?;
        give_away(server.folder())?;
        server.start(|| ready(port))?;
        Ok(Postgres { server, port })
    }

    /// The one server of this version that all tests of this process share; make a database for each test.
    ///
    /// # Panics
    /// When it does not start.
    pub fn shared(version: PgVersion) -> &'static Postgres {
        static SHARED: [OnceLock<Postgres>; PgVersion::PROMISED.len()] =
            [const { OnceLock::new() }; PgVersion::PROMISED.len()];
        SHARED[version as usize].get_or_init(|| Postgres::start(version).expect("PostgreSQL starts"))
    }

    pub fn host(&self) -> &'static str {
        "127.0.0.1"
    }
    pub fn port(&self) -> u16 {
        self.port
    }
    /// The server's process.
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }
    /// Its data and its log; gone when the server is.
    pub fn folder(&self) -> &Path {
        self.server.folder()
    }
    /// The URL of the database `postgres`, as superuser.
    pub fn admin_url(&self) -> String {
        self.url("postgres")
    }
    /// The URL of a database, as superuser.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// A fresh database; returns its URL.
    ///
    /// # Panics
    /// When the server does not make it.
    pub fn create_database(&self) -> String {
        self.create_database_with("")
    }

    /// As `create_database`, with what follows the name in CREATE DATABASE:
    /// `TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'`.
    ///
    /// # Panics
    /// When the server does not make it.
    pub fn create_database_with(&self, clauses: &str) -> String {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let name = format!("test_{}", NEXT.fetch_add(1, Relaxed));
        self.execute("postgres", &format!("CREATE DATABASE {name} {clauses}")).expect("the database is made");
        self.url(&name)
    }

    /// Runs SQL as superuser over a connection of its own; returns the rows as text. For preparing and looking,
    /// without a driver.
    ///
    /// # Errors
    /// The server's, with SQLSTATE.
    pub fn execute(&self, database: &str, sql: &str) -> Result<Vec<Vec<Option<String>>>> {
        wire::postgres(self.port, database, sql)
    }

    /// A clean stop: open transactions are rolled back, everything is written, the folder is removed.
    ///
    /// # Errors
    /// The server did not end cleanly.
    pub fn stop(mut self) -> Result<()> {
        let code = self.server.end("INT")?;
        ensure!(code == 0, "PostgreSQL ended with code {code}:\n{}", self.server.log_tail());
        self.server.finish()
    }

    /// SIGKILL for the server and its children; `restart` brings it back.
    pub fn crash(&mut self) -> Result<()> {
        self.server.kill()
    }

    /// Starts it again on the same port and data; if it still runs, after a clean stop.
    pub fn restart(&mut self) -> Result<()> {
        if self.server.running() {
            self.server.end("INT").context("cannot stop PostgreSQL")?;
        }
        let port = self.port;
        self.server.start(|| ready(port))
    }
}

fn ready(port: u16) -> bool {
    wire::postgres(port, "postgres", "SELECT 1").is_ok()
}

fn command(bin: &Path, folder: &Path, port: u16, options: &PgOptions) -> Vec<String> {
    let mut command: Vec<String> = as_ordinary_user().iter().map(ToString::to_string).collect();
    command.extend([
        bin.join("postgres").display().to_string(),
        "-D".into(),
        folder.join("data").display().to_string(),
    ]);
    let mut settings = vec![
        ("listen_addresses".into(), "127.0.0.1".into()),
        ("port".into(), port.to_string()),
        ("unix_socket_directories".into(), ".".into()), // in the data directory
        ("wal_level".into(), "logical".into()),
        ("max_prepared_transactions".into(), "20".into()),
        ("fsync".into(), if options.fsync { "on" } else { "off" }.into()),
    ];
    settings.extend(options.extra.iter().cloned());
    for (name, value) in settings {
        command.extend(["-c".into(), format!("{name}={value}")]);
    }
    command
}

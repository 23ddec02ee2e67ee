//! One server process with its folder, under a small shell that outlives us: when our end of its pipe closes, however
//! this process ended, it kills the server and removes the folder. See `resources/supervise.sh`.
//! Not PR_SET_PDEATHSIG: that fires when the spawning *thread* ends, and tests run on short-lived threads.

use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const SCRIPT: &str = include_str!("../../resources/supervise.sh");

/// How long a server may take until it answers; JVMs on a busy machine need most of it.
const READY_MAX: Duration = Duration::from_secs(90);

/// What a supervisor runs.
pub(super) struct Plan {
    /// For messages: "PostgreSQL 15".
    pub(super) name: String,
    /// The server's own folder; removed with the supervisor.
    pub(super) folder: PathBuf,
    pub(super) command: Vec<String>,
    pub(super) env: Vec<(&'static str, String)>,
}

/// A supervised server. Dropping it kills the server and waits until its folder is gone.
pub(super) struct Supervisor {
    plan: Plan,
    shell: Child,
    verbs: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    pid: u32,
}

impl Supervisor {
    /// Starts the shell, not yet the server.
    pub(super) fn new(plan: Plan) -> Result<Supervisor> {
        let mut shell = Command::new("sh")
            .args(["-c", SCRIPT, "supervise"])
            .arg(&plan.folder)
            .args(&plan.command)
            .envs(plan.env.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null()) // whoever reads our own stderr to its end must not wait for the clearing up
            .process_group(0) // Ctrl-C in a terminal ends us, not the shell that must clear up
            .spawn()
            .context("cannot start sh")?;
        let verbs = shell.stdin.take();
        let answers = BufReader::new(shell.stdout.take().expect("stdout is piped"));
        Ok(Supervisor { plan, shell, verbs, answers, pid: 0 })
    }

    /// Starts the server and waits until `ready` says so.
    ///
    /// # Errors
    /// The server ended, or is not ready in time; with the end of its log.
    pub(super) fn start(&mut self, ready: impl Fn() -> bool) -> Result<()> {
        self.pid = self.ask("start")?.try_into().context("the supervisor answers a pid")?;
        let deadline = Instant::now() + READY_MAX;
        loop {
            if ready() {
                return Ok(());
            }
            let running = self.running();
            if !running || Instant::now() > deadline {
                let what = if running { "is not ready in time" } else { "ended at its start" };
                bail!("{} {what}; its log ends with:\n{}", self.plan.name, self.log_tail());
            }
            std::thread::sleep(Duration::from_millis(20)); // the step of a wait with a deadline
        }
    }

    /// Ends the server with a signal and waits for it; returns its exit code as the shell counts it (128 + signal).
    pub(super) fn end(&mut self, signal: &str) -> Result<i64> {
        self.ask(&format!("end {signal}"))
    }

    /// SIGKILL for the server and its children.
    pub(super) fn kill(&mut self) -> Result<()> {
        self.ask("kill").map(|_| ())
    }

    /// Lets the shell remove the folder and end.
    ///
    /// # Errors
    /// The folder is still there.
    pub(super) fn finish(mut self) -> Result<()> {
        self.close();
        ensure!(!self.plan.folder.exists(), "{} left {} behind", self.plan.name, self.plan.folder.display());
        Ok(())
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }
    pub(super) fn folder(&self) -> &Path {
        &self.plan.folder
    }

    /// Whether the server runs; one that ended but was not waited for yet (a zombie) does not.
    pub(super) fn running(&self) -> bool {
        is_running(self.pid)
    }

    /// The last lines of the server's log.
    pub(super) fn log_tail(&self) -> String {
        let log = std::fs::read(self.plan.folder.join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    fn ask(&mut self, verb: &str) -> Result<i64> {
        let gone = || format!("the supervisor of {} is gone", self.plan.name);
        let verbs = self.verbs.as_mut().with_context(gone)?;
        writeln!(verbs, "{verb}").with_context(gone)?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        answer.trim().parse().with_context(gone)
    }

    fn close(&mut self) {
        self.verbs = None;
        // It answers no more; if it was killed there is nothing left to wait for either.
        let _ = self.shell.wait();
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.close();
    }
}

/// Whether a process runs; a zombie does not.
pub fn is_running(pid: u32) -> bool {
    // "pid (name) S ..": the name may hold anything, so the state is after its last parenthesis.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

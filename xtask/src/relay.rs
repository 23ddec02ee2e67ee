//! The product's relay as a process: started, killed, stopped, and what the kernel counts about it.

use crate::machine;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) struct Relay {
    child: Child,
    log: PathBuf,
}

/// More than the relay's own drain deadline.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

impl Relay {
    /// Starts it; what it says is appended to `log`.
    pub(crate) fn spawn(mut command: Command, log: PathBuf) -> Result<Relay> {
        let file = File::options().create(true).append(true).open(&log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().context("cannot start the relay; setpriv is in the package util-linux")?;
        Ok(Relay { child, log })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, and the wait until it is gone.
    ///
    /// # Errors
    /// It had ended before, by itself; with the end of its log.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.alive()?;
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// SIGTERM; it must drain and exit with 0.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.alive()?;
        let term = Command::new("kill").args(["-TERM", &self.pid().to_string()]).status()?;
        let deadline = Instant::now() + STOP_TIMEOUT;
        while term.success() && Instant::now() < deadline {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("the relay ended with {status}:\n{}", self.log_tail()),
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        bail!("the relay did not end within {STOP_TIMEOUT:?} of SIGTERM:\n{}", self.log_tail())
    }

    /// # Errors
    /// It has ended by itself; with the end of its log.
    pub(crate) fn alive(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("the relay ended by itself with {status}:\n{}", self.log_tail()),
            None => Ok(()),
        }
    }

    /// CPU time of all its threads, user and system.
    pub(crate) fn cpu_us(&self) -> Result<u64> {
        let times = machine::times(self.pid()).with_context(|| format!("the relay ended:\n{}", self.log_tail()))?;
        Ok(times.own * machine::TICK_US)
    }

    /// The most memory it ever had in RAM.
    pub(crate) fn rss_max_mb(&self) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).context("/proc/PID/status has no VmHWM")?;
        let kb: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
        Ok((kb / 102.4).round() / 10.0)
    }

    pub(crate) fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // Both fail only when it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

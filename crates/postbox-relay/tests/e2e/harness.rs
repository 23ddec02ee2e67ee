//! Runs the program in a folder of its own, with no variable of this machine, and waits for what it says.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Long enough on a busy machine; a fact that comes is seen at once.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A folder with a configuration, in which `postbox` runs.
pub(crate) struct Folder {
    folder: TempDir,
    environment: Vec<(String, OsString)>,
}

impl Folder {
    pub(crate) fn new() -> Folder {
        Folder { folder: tempfile::tempdir().unwrap(), environment: Vec::new() }
    }

    pub(crate) fn with_config(text: &str) -> Folder {
        let folder = Folder::new();
        std::fs::write(folder.path().join("postbox.toml"), text).unwrap();
        folder
    }

    pub(crate) fn env(mut self, name: &str, value: &(impl AsRef<OsStr> + ?Sized)) -> Folder {
        self.environment.push((name.into(), value.as_ref().into()));
        self
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_postbox"));
        command.args(args).current_dir(self.path()).env_clear().envs(self.environment.iter().cloned());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a command to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Ended {
        Ended::new(self.command(args).output().unwrap())
    }

    /// As `run`, with a file of the folder to read.
    pub(crate) fn run_with_stdin(&self, args: &[&str], file: &str) -> Ended {
        let file = std::fs::File::open(self.file(file)).unwrap();
        Ended::new(self.command(args).stdin(file).output().unwrap())
    }

    /// As `run`, and it must end with 0.
    pub(crate) fn ok(&self, args: &[&str]) -> Ended {
        let ended = self.run(args);
        assert_eq!(ended.code, Some(0), "postbox {}: {}{}", args.join(" "), ended.stdout, ended.stderr);
        ended
    }

    /// The JSON that a command prints.
    pub(crate) fn json(&self, args: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.ok(args).stdout).unwrap()
    }

    /// Starts `postbox relay`, and does not wait for it.
    pub(crate) fn relay(&self, args: &[&str]) -> Running {
        let args: Vec<&str> = ["relay"].iter().chain(args).copied().collect();
        Running::new(self.command(&args).spawn().unwrap())
    }

    /// Starts `postbox relay`, which ends by itself.
    pub(crate) fn ended_relay(&self, args: &[&str]) -> Ended {
        let mut relay = self.relay(args);
        let code = Some(relay.wait());
        Ended { code, stdout: relay.stdout.text(), stderr: relay.stderr.text() }
    }

    /// Starts `postbox relay` on a terminal of its own, whose screen is `stdout`.
    pub(crate) fn relay_on_a_terminal(&self, args: &[&str]) -> Running {
        let relay = format!("exec {} relay {}", env!("CARGO_BIN_EXE_postbox"), args.join(" "));
        let mut command = Command::new("script");
        command.args(["--quiet", "--return", "--flush", "--command", &relay, "/dev/null"]).current_dir(self.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::new(command.spawn().unwrap())
    }

    /// Starts `postbox relay` with a full pipe for stdout that nobody reads.
    pub(crate) fn relay_unread(&self) -> Running {
        Running::unread(self.command(&["relay"]).spawn().unwrap())
    }

    /// Runs a command that may go on for ever (a relay that waits for its database): a signal ends it.
    pub(crate) fn run_at_most(&self, args: &[&str]) -> Ended {
        if args != ["relay"] {
            return self.run(args);
        }
        let mut relay = self.relay(&[]);
        relay.stderr.wait_until(relay_has_tried);
        relay.signal("TERM");
        let code = Some(relay.wait());
        Ended { code, stdout: relay.stdout.text(), stderr: relay.stderr.text() }
    }

    /// Runs a script as root of a namespace of its own, here; `$1` is the program. `say` gives it lines to read.
    pub(crate) fn in_a_namespace(&self, script: &str) -> Running {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]);
        command.arg(env!("CARGO_BIN_EXE_postbox")).current_dir(self.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::new(command.spawn().unwrap())
    }

    /// Starts `postbox relay` and waits until it owns its lease.
    pub(crate) fn leading_relay(&self) -> Running {
        let relay = self.relay(&[]);
        relay.stderr.wait_for("the lease is ours");
        relay
    }
}

fn relay_has_tried(lines: &[String]) -> bool {
    lines.iter().any(|line| line.contains("the source is out") || line.contains("mend:") || line.contains("postbox: "))
}

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    fn new(output: Output) -> Ended {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// It ended with this code, and said all of this on stderr.
    pub(crate) fn failed_with(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in: {}", self.stderr);
        }
    }
}

/// The lines that a process wrote so far.
#[derive(Clone, Default)]
pub(crate) struct Lines(Arc<Said>);

#[derive(Default)]
struct Said {
    lines: Mutex<Vec<String>>,
    ended: AtomicBool,
    changed: Condvar,
}

impl Lines {
    fn read(pipe: impl Read + Send + 'static) -> Lines {
        let lines = Lines::default();
        let writer = lines.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                writer.0.lines.lock().unwrap().push(line);
                writer.0.changed.notify_all();
            }
            writer.0.ended.store(true, SeqCst);
            writer.0.changed.notify_all();
        });
        lines
    }

    pub(crate) fn all(&self) -> Vec<String> {
        // Also where a wait for more of them has failed: they are the report.
        self.0.lines.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    pub(crate) fn text(&self) -> String {
        self.all().join("\n")
    }

    /// Waits until the lines so far are as wanted.
    pub(crate) fn wait_until(&self, wanted: impl Fn(&[String]) -> bool) -> Vec<String> {
        let deadline = Instant::now() + DEADLINE;
        let mut lines = self.0.lines.lock().unwrap();
        loop {
            let ended = self.0.ended.load(SeqCst); // before the look: what it wrote last is seen
            if wanted(&lines) {
                return lines.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero() && !ended, "not seen; it said:\n{}", lines.join("\n"));
            // Its end is not announced under the lock, so no wait is long.
            lines = self.0.changed.wait_timeout(lines, left.min(Duration::from_millis(100))).unwrap().0;
        }
    }

    /// Waits for a line with this text in it.
    pub(crate) fn wait_for(&self, text: &str) -> String {
        let lines = self.wait_until(|lines| lines.iter().any(|line| line.contains(text)));
        lines.into_iter().find(|line| line.contains(text)).unwrap()
    }
}

/// A running process; killed when dropped.
pub(crate) struct Running {
    child: Child,
    pub(crate) stdout: Lines,
    pub(crate) stderr: Lines,
}

impl Running {
    fn new(mut child: Child) -> Running {
        let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        Running { child, stdout: Lines::read(stdout), stderr: Lines::read(stderr) }
    }

    fn unread(mut child: Child) -> Running {
        let stderr = child.stderr.take().unwrap();
        Running { child, stdout: Lines::default(), stderr: Lines::read(stderr) }
    }

    /// A line on its stdin.
    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Sends a signal by its name: TERM, INT, KILL, STOP, CONT.
    pub(crate) fn signal(&self, name: &str) {
        self.signals(&[name]);
    }

    /// Of a terminal: SIGTERM to what runs there, which must end cleanly.
    pub(crate) fn stop_child(mut self) {
        let sent = Command::new("pkill").args(["-TERM", "-P", &self.child.id().to_string()]).status();
        assert!(sent.unwrap().success());
        assert_eq!(self.wait(), 0, "{}", self.stdout.text());
    }

    /// Sends several at once.
    pub(crate) fn signals(&self, names: &[&str]) {
        let script: Vec<String> = names.iter().map(|name| format!("kill -{name} {}", self.child.id())).collect();
        let sent = Command::new("sh").args(["-c", &script.join(" && ")]).status();
        assert!(sent.unwrap().success());
    }

    /// Of one that is unread: waits until it sends.
    pub(crate) fn read_a_byte(&mut self) {
        self.child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    }

    /// Of one that is unread: reads so many lines of its stdout, then kills it; also what was in the pipe.
    #[cfg(feature = "webhook")]
    pub(crate) fn read_and_kill(mut self, lines: usize) -> Vec<String> {
        let mut stdout = BufReader::new(self.child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let mut read: Vec<String> = stdout.by_ref().take(lines).collect();
        self.signal("KILL");
        assert_eq!(self.wait(), 128 + 9);
        read.extend(stdout);
        read
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for its end; the exit code, or 128 + the signal that killed it.
    pub(crate) fn wait(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                until("its last words are read", || self.stderr.0.ended.load(SeqCst));
                return status.code().unwrap_or_else(|| 128 + status.signal().unwrap());
            }
            assert!(Instant::now() < deadline, "it does not end; it said:\n{}", self.stderr.text());
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }

    /// SIGTERM, and it must end cleanly.
    pub(crate) fn stop(mut self) {
        self.signal("TERM");
        assert_eq!(self.wait(), 0, "{}", self.stderr.text());
    }

    /// What it has in memory now.
    #[cfg(feature = "kafka")]
    pub(crate) fn resident_bytes(&self) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
    }

    #[cfg(feature = "kafka")]
    pub(crate) fn kill(mut self) {
        self.signal("KILL");
        assert_eq!(self.wait(), 128 + 9);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("a relay of the failed test said:\n{}", self.stderr.text());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until a fact holds.
pub(crate) fn until(what: &str, fact: impl FnMut() -> bool) {
    assert!(comes(fact), "never came: {what}");
}

/// Whether a fact holds in time.
pub(crate) fn comes(mut fact: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + DEADLINE;
    while !fact() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
    true
}

//! Running other programs: the command is shown, its failure is an error that names it.

use crate::Told;
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The repository's top folder.
pub(crate) fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().expect("xtask lies in the repository").to_path_buf()
}

/// A command that runs in the repository's top folder.
pub(crate) fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(root());
    command
}

/// The cargo that started us.
pub(crate) fn cargo(args: &[&str]) -> Command {
    command(&std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()), args)
}

/// Runs it to its end; anything but success is an error.
pub(crate) fn run(mut command: Command) -> Result<()> {
    let shown = show(&command);
    eprintln!("$ {shown}");
    let status = command.status().with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` ended with {status}");
    }
    Ok(())
}

/// Runs it to its end and shows each line of its stdout to `see` as it comes; anything but success is an error.
pub(crate) fn each_line(mut command: Command, mut see: impl FnMut(&str)) -> Result<()> {
    let shown = show(&command);
    eprintln!("$ {shown}");
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot start `{shown}`"))?;
    let mut stdout = BufReader::new(child.stdout.take().context("it was piped")?);
    let mut line = Vec::new();
    while stdout.read_until(b'\n', &mut line)? > 0 {
        see(String::from_utf8_lossy(&line).trim_end_matches('\n'));
        line.clear();
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("`{shown}` ended with {status}");
    }
    Ok(())
}

/// Runs it to its end and returns what it wrote to stdout.
pub(crate) fn output(mut command: Command) -> Result<String> {
    let shown = show(&command);
    let output = command.output().with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{shown}` wrote something else than text"))
}

fn show(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|a| a.to_string_lossy()));
    words.join(" ")
}

/// Builds the product's release binary and returns its path.
pub(crate) fn build_postbox() -> Result<PathBuf> {
    run(cargo(&["build", "--release", "--package", "postbox-relay"]))?;
    Ok(target().join("release/postbox"))
}

/// A debug build without Kafka. Its dependencies are those of the whole workspace with all features, which are there.
pub(crate) fn build_without_kafka() -> Result<PathBuf> {
    let features = "postbox/sqlx,postbox/tokio-postgres,postbox/rusqlite,postbox-relay/webhook";
    run(cargo(&["build", "--workspace", "--bin", "postbox", "--no-default-features", "--features", features]))?;
    Ok(target().join("debug/postbox"))
}

fn target() -> PathBuf {
    let exe = std::env::current_exe().expect("a process has its file");
    exe.ancestors().nth(2).expect("cargo put it into target/debug or target/release").to_path_buf()
}

/// What measures or counts for long runs optimised: a debug build starts the release build of itself with the same
/// arguments and says true once that is done.
pub(crate) fn in_release() -> Result<bool> {
    if !cfg!(debug_assertions) {
        return Ok(false);
    }
    run(cargo(&["build", "--release", "--quiet", "--package", "xtask"]))?;
    let mut again = Command::new(target().join("release/xtask"));
    again.args(std::env::args_os().skip(1)).current_dir(root());
    let status = again.status().context("cannot start what was built")?;
    match status.code() {
        Some(0) => Ok(true),
        Some(_) => bail!(Told(format!("the release build of it ended with {status}"))), // by its own line
        None => bail!("the release build of it was killed: {status}"),
    }
}

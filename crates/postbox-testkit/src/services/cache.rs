//! What servers are made of, fetched or built once and shared by all test processes: `$POSTBOX_CACHE`, or
//! `services` in cargo's target folder. A file lock lets one process fetch while the others wait.

use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder `name` of the cache, made by `fill` if it is not there. `fill` gets an empty folder; what it fails to
/// finish is not kept.
pub(super) fn once(name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let root = root()?;
    let folder = root.join(name);
    if folder.exists() {
        return Ok(folder);
    }
    let lock = File::create(root.join(format!("{name}.lock")))?;
    lock.lock().with_context(|| format!("cannot lock {name}.lock in {}", root.display()))?;
    if folder.exists() {
        return Ok(folder); // another process made it while we waited
    }
    let partial = root.join(format!("{name}.partial"));
    if partial.exists() {
        fs::remove_dir_all(&partial)?;
    }
    fs::create_dir(&partial)?;
    fill(&partial)?;
    fs::rename(&partial, &folder)?;
    Ok(folder)
}

fn root() -> Result<PathBuf> {
    let root = match std::env::var_os("POSTBOX_CACHE") {
        Some(set) => PathBuf::from(set),
        None => target()?.join("services"),
    };
    fs::create_dir_all(&root).with_context(|| format!("cannot make the cache folder {}", root.display()))?;
    Ok(root)
}

/// Cargo's target folder, wherever it was put: the one above this executable that carries cargo's tag.
fn target() -> Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let tagged = exe.ancestors().find(|a| a.join("CACHEDIR.TAG").exists());
    Ok(tagged.context("not run by cargo: set POSTBOX_CACHE to a folder for the servers' files")?.to_path_buf())
}

/// A new folder for one server, with a short path; its supervisor removes it.
pub(super) fn server_folder() -> Result<PathBuf> {
    let folder = tempfile::Builder::new().prefix("postbox-").tempdir().context("cannot make a folder for a server")?;
    Ok(folder.keep())
}

/// Runs a command to its end.
///
/// # Errors
/// It is missing or fails; with what it said and `remedy`.
pub(super) fn run(command: &mut Command, remedy: &str) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot run {program}; {remedy}"))?;
    let said = [output.stdout, output.stderr].concat();
    ensure!(
        output.status.success(),
        "{program} failed ({}); {remedy}\n{}",
        output.status,
        String::from_utf8_lossy(&said)
    );
    Ok(())
}

/// Runs a goal of Maven's dependency plugin on a pom; its jars, or what is in them, come into `folder`.
pub(super) fn maven(pom: &str, goal: &str, folder: &Path) -> Result<()> {
    let file = folder.join("pom.xml");
    fs::write(&file, pom)?;
    let mut command = Command::new("mvn");
    command.args(["-q", "-B", "-DincludeScope=runtime"]).arg("-f").arg(file).arg(format!("dependency:{goal}"));
    command.arg(format!("-DoutputDirectory={}", folder.display()));
    run(&mut command, "if it is missing: apt-get install maven")
}

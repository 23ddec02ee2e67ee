//! The verbs that say whether the tree is in order: tests, house rules, the whole of it.

use crate::{lean, shell, tidy};
use anyhow::{Result, bail};
use postbox_testkit::services::{Kafka, PgVersion, Postgres};
use serde_json::json;

/// `cargo x test`: everything, Kafka over TLS included, after what is missing is installed. Then the builds that lack
/// something.
pub(crate) fn test(extra: &[String]) -> Result<()> {
    postbox_testkit::services::ensure_all()?;
    let mut cargo = shell::cargo(&["test", "--workspace", "--all-features"]);
    cargo.args(extra);
    if std::env::var_os("RUST_TEST_THREADS").is_none() {
        // Most tests wait most of their time: for servers, for leases to end, for what must not come.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        cargo.env("RUST_TEST_THREADS", (2 * cores).to_string());
    }
    shell::run(cargo)?;
    // Some tests were named: the others are not asked for.
    if extra.is_empty() { lean::check() } else { Ok(()) }
}

/// `cargo x tidy`.
pub(crate) fn tidy() -> Result<()> {
    let tree = tidy::Tree::of_repository()?;
    let problems = tidy::check(&tree);
    for problem in &problems {
        eprintln!("{problem}");
    }
    println!("{}", json!({ "files": tree.len(), "problems": problems.len() }));
    if !problems.is_empty() {
        bail!("{} problems", problems.len());
    }
    Ok(())
}

/// `cargo x ci`: the script that a build machine runs.
pub(crate) fn ci() -> Result<()> {
    shell::run(shell::command("bash", &[".ci/run"]))
}

/// `cargo x sim`.
pub(crate) fn sim(seeds: std::ops::Range<u64>) -> Result<()> {
    if shell::in_release()? {
        return Ok(());
    }
    eprintln!("seeds {seeds:?} ..");
    match postbox_sim::run(seeds, None) {
        Ok(summary) => println!("{}", serde_json::to_string(&summary)?),
        Err(failure) => {
            println!("{}", json!({ "failed_seed": failure.seed }));
            return Err(failure.into());
        }
    }
    Ok(())
}

/// `cargo x services`: servers to play with.
pub(crate) fn services() -> Result<()> {
    let postgres = Postgres::start(PgVersion::V15)?;
    let kafka = Kafka::start()?;
    kafka.create_topic("order", 6, &[])?; // where the README's event goes
    println!("{}", json!({ "postgres": postgres.admin_url(), "kafka": kafka.bootstrap() }));
    eprintln!("data and logs: {}, {}", postgres.folder().display(), kafka.folder().display());
    eprintln!("Ctrl-C ends them");
    tokio::runtime::Runtime::new()?.block_on(tokio::signal::ctrl_c())?;
    kafka.stop()?;
    postgres.stop()
}

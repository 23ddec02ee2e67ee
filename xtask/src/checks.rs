//! The verbs that say whether the tree is in order: tests, house rules, the whole of it.

use crate::{Told, lean, shell, tidy};
use anyhow::{Result, bail};
use postbox_testkit::services::{Kafka, PgVersion, Postgres};
use serde_json::json;

/// `cargo x test`: everything, Kafka over TLS included, after what is missing is installed. Then the builds that lack
/// something.
pub(crate) fn test(extra: &[String]) -> Result<()> {
    postbox_testkit::services::ensure_all()?;
    let mut cargo = shell::cargo(&["test", "--workspace", "--all-features", "--no-fail-fast"]); // one run says all that is wrong
    cargo.args(extra);
    if std::env::var_os("RUST_TEST_THREADS").is_none() {
        // Most tests wait most of their time: for servers, for leases to end, for what must not come.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        cargo.env("RUST_TEST_THREADS", (3 * cores).to_string());
    }
    let mut counts = Counts::default();
    let tested = shell::each_line(cargo, |line| {
        println!("{line}");
        counts.add(line);
    });
    // Where some tests are named, the others are not asked for.
    let lean = if extra.is_empty() { lean::check() } else { Ok(()) };
    let error = match (tested, lean) {
        (Ok(()), Ok(())) => None,
        (Err(error), Ok(())) | (Ok(()), Err(error)) => Some(format!("{error:#}")),
        (Err(tests), Err(lean)) => Some(format!("{tests:#}; {lean:#}")),
    };
    counts.print(error.as_deref());
    error.map_or(Ok(()), |error| Err(Told(error).into()))
}

/// Of all test binaries so far.
#[derive(Default)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Counts {
    /// Reads the line that a test binary ends with: "test result: ok. 3 passed; 0 failed; 0 ignored; ..".
    fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else { return };
        let count = |what: &str| {
            let (before, _) = result.split_once(what)?;
            before.trim_end().rsplit(' ').next()?.parse::<u64>().ok()
        };
        self.passed += count(" passed").unwrap_or_default();
        self.failed += count(" failed").unwrap_or_default();
        self.ignored += count(" ignored").unwrap_or_default();
    }

    fn print(&self, error: Option<&str>) {
        let Counts { passed, failed, ignored } = self;
        let mut line = json!({ "passed": passed, "failed": failed, "ignored": ignored });
        if let Some(error) = error {
            line["error"] = error.into();
        }
        println!("{line}");
    }
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
        bail!(Told(format!("{} problems", problems.len())));
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
            bail!(Told(format!("{failure}")));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_results_of_all_test_binaries_are_added_up() {
        let mut counts = Counts::default();
        for line in [
            "running 13 tests",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 4 filtered out; finished in 0.10s",
            "test what_is_said ... ok",
            "test result: FAILED. 100 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 12.00s",
        ] {
            counts.add(line);
        }
        assert_eq!((counts.passed, counts.failed, counts.ignored), (112, 2, 1));
    }
}

//! A writer or a relay on a SQLite file in a process of its own: for tests that kill it, and to read.
//!
//!     sqlite_process write FILE KEYS COUNT     orders with their events, one transaction each; resumes where it stopped
//!     sqlite_process relay FILE NAME           prints each event as `key n`, then settles it; a lease of two seconds
//!     sqlite_process full FILE FILLER          fills the disk with FILLER, and tells what a relay says of it

use postbox_engine::{ClaimLimit, DeadPolicy, LogSource, Settlement, Source, SourceErrorKind, Verdict};
use postbox_sources::sqlite::{Options, SqliteLog};
use rusqlite::{Connection, TransactionBehavior, params};
use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::time::Duration;
use tokio::time::Instant;

const LIMIT: ClaimLimit = ClaimLimit { events_max: 50, bytes_max: 1 << 20 };

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["write", file, keys, count] => write(Path::new(file), keys, count.parse()?),
        ["relay", file, name] => relay(Path::new(file), name).await,
        ["full", file, filler] => full(Path::new(file), Path::new(filler)).await,
        _ => Err("write FILE KEYS COUNT | relay FILE NAME | full FILE FILLER".into()),
    }
}

fn write(file: &Path, keys: &str, count: i64) -> Result<(), Box<dyn Error>> {
    let mut db = Connection::open(file)?;
    db.busy_timeout(Duration::from_secs(60))?;
    db.execute_batch("CREATE TABLE IF NOT EXISTS orders (key TEXT, n INTEGER, PRIMARY KEY (key, n))")?;
    let done: i64 =
        db.query_row("SELECT coalesce(max(n), 0) FROM orders WHERE key LIKE ?1 || '%'", [keys], |r| r.get(0))?;
    for n in done + 1..=count {
        let key = format!("{keys}{}", n % 5);
        let began = Instant::now();
        let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        tx.execute("INSERT INTO orders VALUES (?1, ?2)", params![key, n])?;
        tx.execute(
            "INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', ?1, 'placed', ?2)",
            params![key, n.to_string()],
        )?;
        tx.commit()?;
        say(format_args!("{n}"));
        // As a service does that has other things to do. Without it, writers take the lock from each other's hands: whoever
        // sleeps until it is free hardly ever finds it so, and on a slow disk one may wait for minutes.
        std::thread::sleep(began.elapsed());
    }
    Ok(())
}

async fn relay(file: &Path, name: &str) -> Result<(), Box<dyn Error>> {
    let options = Options { lease: Duration::from_secs(2), relay: name.into(), ..Options::new(file) };
    let source = LogSource::new(SqliteLog::new(options), DeadPolicy::Skip);
    source.acquire().await?;
    let mut renewal = tokio::time::interval(Duration::from_millis(200));
    loop {
        let claim = tokio::select! {
            biased; // the lease first: without it nothing may be sent
            _ = renewal.tick() => {
                source.renew().await?;
                continue;
            }
            claim = source.claim(LIMIT) => claim?,
        };
        for claimed in &claim.events {
            let n = String::from_utf8_lossy(claimed.event.payload().unwrap_or_default()).into_owned();
            say(format_args!("{} {n}", claimed.event.aggregate_id()));
        }
        let published = |c: &postbox_engine::Claimed| Settlement { ticket: c.ticket, verdict: Verdict::Published };
        source.settle(&claim.events.iter().map(published).collect::<Vec<_>>(), Instant::now()).await?;
    }
}

async fn full(file: &Path, filler: &Path) -> Result<(), Box<dyn Error>> {
    postbox_sources::sqlite::migrate(file, "postbox")?;
    write(file, "a", 20)?;
    let source = LogSource::new(SqliteLog::new(Options::new(file)), DeadPolicy::Skip);
    source.acquire().await?;
    let mut block = std::fs::File::create(filler)?;
    while block.write_all(&[0; 512]).is_ok() {}
    drop(block);
    let mut failures = 0;
    loop {
        let step = async {
            let claim = source.claim(ClaimLimit { events_max: 1, ..LIMIT }).await?;
            let settlement = Settlement { ticket: claim.events[0].ticket, verdict: Verdict::Published };
            source.settle(&[settlement], Instant::now()).await
        };
        match step.await {
            Ok(()) => {}
            Err(error) if error.kind == SourceErrorKind::Unavailable && failures == 0 => {
                say(format_args!("{error}"));
                failures += 1;
                std::fs::remove_file(filler)?;
                source.acquire().await?;
            }
            Err(error) => return Err(error.into()),
        }
        let status = postbox_sources::sqlite::admin::status(file, "postbox").await?;
        if status.iter().any(|stream| stream.pending == 0) {
            say(format_args!("all sent after {failures} failure"));
            return Ok(());
        }
    }
}

/// One line at once: the process may be killed any moment.
fn say(line: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).expect("the reader of stdout outlives this process");
}

//! Under the writers of the testkit's adversary, a reader that stops and starts anywhere, bins emptied and resized under it:
//! every committed event is read once, in the order of its aggregate, and nothing else is.

use super::{Db, LIMIT, acquire, client, in_time, on_15_and_18, published};
use postbox_engine::{Log, Rng};
use postbox_sources::postgres::{PostgresLog, PostgresOptions};
use postbox_testkit::adversary::{Adversary, Judgement, Seen, transactions};
use postbox_testkit::services::PgVersion;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio_postgres::Client;

on_15_and_18! { nothing_is_lost_doubled_or_misordered }

/// Events in a page: few, so that windows are large.
const PAGE_MAX: usize = 40;

/// Reads and settles until it is told that all is written and has them all; starts anew at random, with pages unsettled.
async fn read(options: PostgresOptions, written: Arc<AtomicBool>, client: Client) -> Vec<Seen> {
    let (mut rng, mut seen) = (Rng::new(7), Vec::new());
    let mut log = PostgresLog::new(options.clone());
    acquire(&log).await;
    let (mut total, mut quiet, mut full) = (None, 0, 0);
    loop {
        if total.is_none() && written.load(Relaxed) {
            let sql = "SELECT count(*) FROM app.journal";
            total = Some(client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0));
        }
        match rng.below(100) {
            0..2 => acquire(&log).await,
            2 => {
                log.release().await.unwrap();
                log = PostgresLog::new(options.clone());
                acquire(&log).await;
            }
            3..5 => tokio::time::sleep(Duration::from_millis(rng.below(700))).await, // the schedule: a large window forms
            _ => {}
        }
        match tokio::time::timeout(Duration::from_millis(500), log.read(LIMIT)).await {
            Ok(page) if rng.below(100) < 97 => {
                let page = page.unwrap();
                log.record(&published(&page)).await.unwrap();
                full += u32::from(page.events.len() == PAGE_MAX);
                seen.extend(page.events.iter().map(|e| Seen {
                    id: e.id().to_string(),
                    aggregate_id: e.aggregate_id().into(),
                    version: e.aggregate_seq().expect("all writers give one"),
                }));
            }
            Ok(_) => acquire(&log).await, // the page was read and never settled: it comes again
            Err(_) if total.is_some_and(|n| i64::try_from(seen.len()).unwrap() >= n) || quiet > 20 => break,
            Err(_) => quiet += u32::from(total.is_some()), // what is missing now is lost
        }
    }
    assert!(full > 20, "large windows were paged: {full} full pages");
    // All is passed; a bin or more must go, if none went yet.
    let emptied = "SELECT (SELECT count(*) FROM postbox.outbox) < (SELECT count(*) FROM app.journal)";
    in_time("a bin is emptied", async { while !client.query_one(emptied, &[]).await.unwrap().get::<_, bool>(0) {} })
        .await;
    log.release().await.unwrap();
    seen
}

async fn nothing_is_lost_doubled_or_misordered(version: PgVersion) {
    let db = Db::new(version).await;
    let adversary = Adversary::new(&db.url).await;
    let mut options = db.options();
    (options.page_events_max, options.poll_events_max, options.page_bytes_max) = (PAGE_MAX, PAGE_MAX, 3000);
    (options.retention, options.ttl) = (Duration::from_secs(2), Duration::from_secs(30));
    let written = Arc::new(AtomicBool::new(false));
    let reader = tokio::spawn(read(options, written.clone(), client(&db.url).await));
    adversary.write(transactions(), written).await;
    let seen = in_time("all is read", reader).await.unwrap();
    println!("written {}, read {}", adversary.committed().await, seen.len());
    assert_eq!(adversary.judge(&seen).await, Judgement::default());
}

//! Taking held events: in which order, and what it costs. Memory and traffic follow the bytes that the hand has room for,
//! entries read follow what is taken, not the rows there are.

use super::{Db, LIMIT, acquire, in_time, on_15_and_18, published};
use postbox_engine::{
    Changes, ClaimLimit, DeadPolicy, HeldChange, HeldQuery, HeldState, Log, LogSource, Settlement, Source, Verdict,
};
use postbox_sources::postgres::{PostgresLog, PostgresOptions};
use postbox_testkit::services::{PgVersion, Postgres, TcpProxy};
use std::time::Duration;
use tokio::time::Instant;

const MIB: usize = 1 << 20;
const ROWS: usize = 4_000;
const ROOM: usize = 8 * MIB;

/// The most memory that this process had since `forget_peak`.
fn peak_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

fn forget_peak() {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
}

/// So many events of one key, all waiting, as a relay leaves them behind one that failed and was discarded.
async fn waiting(db: &Db, rows: usize) {
    db.insert(u32::try_from(rows).unwrap(), 1).await;
    let (log, mut left) = (db.log(), rows);
    acquire(&log).await;
    while left > 0 {
        let page = in_time("a page", log.read(LIMIT)).await.unwrap();
        left -= page.events.len();
        let held = page.events.iter().map(|event| HeldChange {
            event: event.clone(),
            state: HeldState::Waiting,
            attempts: 0,
            due: Duration::ZERO,
            error: None,
            sent: None,
        });
        log.record(&Changes { held: held.collect(), ..published(&page) }).await.unwrap();
    }
    log.release().await.unwrap();
}

on_15_and_18! { replays_asked_for_all_at_once_come_in_order_at_the_cost_of_what_is_taken }

/// One UPDATE gives them one `due_at`, and leaves their rows where there was room.
async fn replays_asked_for_all_at_once_come_in_order_at_the_cost_of_what_is_taken(version: PgVersion) {
    const REPLAYS: usize = 1_000;
    const PIECE: usize = 100;
    let db = Db::new(version).await;
    waiting(&db, REPLAYS).await;
    db.sql("UPDATE postbox.held SET state = 'replay', due_at = now()").await;
    let log = db.log();
    acquire(&log).await;
    let limit = ClaimLimit { events_max: PIECE, ..LIMIT };
    let mut query = HeldQuery { limit, open: vec![], skip: vec![] };
    while query.skip.len() < REPLAYS {
        let page = in_time("the next claim", log.held(&query)).await.unwrap();
        query.skip.extend(page.events.iter().map(|held| held.event.id()));
    }
    assert!(query.skip.is_sorted() && query.skip.len() == REPLAYS, "{:?}", query.skip);
    log.release().await.unwrap();
    let open = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'postbox %' AND datname = current_database()";
    in_time("the relay's connections have ended", async { while db.one::<i64>(open).await > 0 {} }).await;
    let read: i64 = db.one("SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'held_due'").await;
    // What is in hand is walked over, twice: for what is ready, and for when the next one is due.
    let most = i64::try_from((1..=REPLAYS / PIECE).map(|n| 2 * n * PIECE + 1).sum::<usize>()).unwrap();
    println!("{REPLAYS} replays, {PIECE} at once: {read} index entries");
    assert!((most / 2..=most).contains(&read), "{read} index entries, not {most} at most");
}

/// 4 GB, of which one claim after the other takes what fits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_thousand_held_events_of_a_megabyte_are_taken_within_the_bytes() {
    let db = Db::new(PgVersion::V18).await;
    waiting(&db, ROWS).await;
    db.sql(&format!("UPDATE postbox.outbox SET payload = to_json(repeat('x', {})) WHERE id = 1", MIB - 2)).await;
    // As it is stored: to compress it once is enough.
    db.sql("UPDATE postbox.outbox o SET payload = f.payload FROM postbox.outbox f WHERE f.id = 1 AND o.id > 1").await;
    let server = Postgres::shared(PgVersion::V18).port();
    let proxy = TcpProxy::start(server).unwrap();
    let url = db.url.replace(&server.to_string(), &proxy.port().to_string());
    let source = LogSource::new(PostgresLog::new(PostgresOptions { url, ..db.options() }), DeadPolicy::Skip);
    in_time("the lease is ours", source.acquire()).await.unwrap();
    forget_peak();
    let (before, mut last, mut taken) = (peak_bytes(), 0, 0);
    while taken < ROWS {
        let limit = ClaimLimit { events_max: 8_192, bytes_max: ROOM };
        let events = in_time("the next claim", source.claim(limit)).await.unwrap().events;
        let bytes: usize = events.iter().map(|c| c.event.bytes()).sum();
        assert!(bytes <= ROOM + 2 * MIB, "{bytes} bytes in one claim");
        for claimed in &events {
            assert!(claimed.event.id() == last + 1 && claimed.event.payload().map(<[u8]>::len) == Some(MIB));
            last = claimed.event.id();
        }
        taken += events.len();
        let verdicts: Vec<_> =
            events.iter().map(|c| Settlement { ticket: c.ticket, verdict: Verdict::Published }).collect();
        source.settle(&verdicts, Instant::now()).await.unwrap();
        let (answered, sent) = (proxy.answered(), taken * MIB);
        assert!(answered < sent * 3 / 2 + 2 * ROOM, "{answered} bytes came for {sent} that were taken");
    }
    let grown = peak_bytes().saturating_sub(before);
    // Other tests of this process have their share in it.
    println!("{} MiB came, {} MiB more memory at the peak", proxy.answered() / MIB, grown / MIB);
    assert!(grown < 32 * ROOM, "{} MiB of memory for a hand of {} MiB", grown / MIB, ROOM / MIB);
}

//! Writers as nasty as applications can be, a reader that stops and starts anywhere, bins emptied and resized under it:
//! every committed event is read once, in the order of its aggregate, and nothing else is.

use super::{Db, LIMIT, SECOND, acquire, client, in_time, on_all_versions, published};
use postbox_engine::{Log, Rng};
use postbox_sources::postgres::{PostgresLog, PostgresOptions, migrate};
use postbox_testkit::services::PgVersion;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio_postgres::Client;

on_all_versions! { nothing_is_lost_doubled_or_misordered }

/// Events in a page: few, so that windows are large.
const PAGE_MAX: usize = 40;

/// Transactions of each of the seven quick writers; more by the environment, for a long look.
fn transactions() -> u32 {
    std::env::var("POSTBOX_ADVERSARIAL_TRANSACTIONS").map_or(100, |n| n.parse().unwrap())
}

const APP: &str = r"
CREATE SCHEMA app;
CREATE TABLE app.agg (id int PRIMARY KEY, v bigint NOT NULL DEFAULT 0);
CREATE TABLE app.journal (a text, v bigint);
INSERT INTO app.agg SELECT generate_series(0, 29) UNION ALL SELECT generate_series(1000, 1040);
CREATE FUNCTION app.step(k int) RETURNS void LANGUAGE plpgsql AS $$ DECLARE n bigint; BEGIN
  UPDATE app.agg SET v = v + 1 WHERE id = k RETURNING v INTO n;
  INSERT INTO app.journal VALUES (k::text, n);
  INSERT INTO postbox.outbox (aggregate_type, aggregate_id, aggregate_seq, event_type) VALUES ('a', k::text, n, 't'); END $$;
CREATE FUNCTION app.nested(k int) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
  BEGIN PERFORM app.step(k); BEGIN PERFORM app.step(k); RAISE EXCEPTION 'inner'; EXCEPTION WHEN raise_exception THEN PERFORM app.step(k); END;
  EXCEPTION WHEN raise_exception THEN NULL; END;
  BEGIN PERFORM app.step(k); PERFORM 1 / 0; EXCEPTION WHEN division_by_zero THEN NULL; END; END $$;
CREATE FUNCTION app.bulk(k int, n int) RETURNS void LANGUAGE plpgsql AS $$ DECLARE last bigint; BEGIN
  UPDATE app.agg SET v = v + n WHERE id = k RETURNING v INTO last;
  INSERT INTO app.journal SELECT k::text, g FROM generate_series(last - n + 1, last) g;
  INSERT INTO postbox.outbox (aggregate_type, aggregate_id, aggregate_seq, event_type) SELECT 'a', k::text, g, 'b' FROM generate_series(last - n + 1, last) g; END $$;
CREATE FUNCTION app.late(k int) RETURNS void LANGUAGE plpgsql AS $$ DECLARE n bigint; BEGIN SELECT v + 1 INTO n FROM app.agg WHERE id = k;
  INSERT INTO postbox.outbox (aggregate_type, aggregate_id, aggregate_seq, event_type) SELECT 'a', k::text, n, 'l' FROM pg_sleep(0.3);
  UPDATE app.agg SET v = n WHERE id = k; INSERT INTO app.journal VALUES (k::text, n); END $$;
";

/// One writer's transactions. Writer 0 keeps each open for seconds, so that its transaction id is old again and again.
struct Writer {
    number: u32,
    client: Client,
    rng: Rng,
}

impl Writer {
    async fn sql(&self, sql: &str) {
        self.client.batch_execute(sql).await.unwrap_or_else(|e| panic!("writer {}: {sql}: {e:?}", self.number));
    }

    async fn pause(&mut self, ms_max: u64) {
        let ms = self.rng.below(ms_max);
        self.sql(&format!("SELECT pg_sleep({ms} / 1000.0)")).await;
    }

    async fn long(&mut self, n: u32) {
        self.sql(&format!("BEGIN; SELECT app.step({})", 1000 + n % 3)).await;
        for _ in 0..3 {
            self.sql("SELECT app.step(1003); SELECT app.bulk(1004, 30); SELECT pg_sleep(0.6)").await;
        }
        self.sql("COMMIT").await;
    }

    async fn transaction(&mut self, n: u32) {
        let mode = self.rng.below(100);
        self.sql("BEGIN").await;
        if self.rng.below(100) < 30 {
            self.sql("SELECT pg_current_xact_id()").await; // the transaction id before the row lock
            self.pause(10).await;
        }
        let mut keys: Vec<u64> = (0..=self.rng.below(3)).map(|_| self.rng.below(30)).collect();
        keys.sort_unstable();
        for key in keys {
            self.writes(key).await;
        }
        if self.rng.below(100) < 20 {
            self.pause(50).await;
        }
        let name = format!("w{}_{n}", self.number);
        match mode {
            0..10 => self.sql("ROLLBACK").await,
            10..20 => {
                self.sql(&format!("PREPARE TRANSACTION '{name}'")).await;
                self.pause(if mode < 12 { 1500 } else { 50 }).await;
                let end = if self.rng.below(100) < 80 { "COMMIT" } else { "ROLLBACK" };
                self.sql(&format!("{end} PREPARED '{name}'")).await;
            }
            _ => self.sql("COMMIT").await,
        }
    }

    async fn writes(&mut self, key: u64) {
        let step = format!("SELECT app.step({key})");
        match self.rng.below(100) {
            0..10 => self.sql(&format!("SAVEPOINT s; {step}; ROLLBACK TO SAVEPOINT s; {step}")).await,
            10..20 => self.sql(&format!("SAVEPOINT s; {step}; RELEASE SAVEPOINT s")).await,
            20..30 => self.sql(&format!("SAVEPOINT s; {step}")).await,
            30..40 => self.sql(&format!("SELECT app.nested({key})")).await,
            40..42 => self.sql(&format!("SAVEPOINT o; {step}; ").repeat(70)).await, // more than a snapshot holds
            42..45 => self.sql(&format!("SELECT app.bulk({key}, 200)")).await,
            45..47 => self.copy(key, 100).await,
            47..48 => self.sql(&format!("SELECT app.late({})", 1010 + self.number)).await,
            _ => self.sql(&step).await,
        }
    }

    async fn copy(&self, key: u64, n: i64) {
        let sql = format!("UPDATE app.agg SET v = v + {n} WHERE id = {key} RETURNING v");
        let last: i64 = self.client.query_one(&sql, &[]).await.unwrap().get(0);
        let rows: String = (last - n + 1..=last).map(|v| format!("a\t{key}\t{v}\tc\n")).collect();
        let copy = "COPY postbox.outbox (aggregate_type, aggregate_id, aggregate_seq, event_type) FROM STDIN";
        let sink = self.client.copy_in::<_, bytes::Bytes>(copy).await.unwrap();
        let mut sink = std::pin::pin!(sink);
        futures_util::SinkExt::send(&mut sink, bytes::Bytes::from(rows)).await.unwrap();
        sink.finish().await.unwrap();
        self.sql(&format!(
            "INSERT INTO app.journal SELECT '{key}', g FROM generate_series({last} - {n} + 1, {last}) g"
        ))
        .await;
    }
}

/// Reads and settles until it is told that all is written and has them all; starts anew at random, with pages unsettled.
async fn read(options: PostgresOptions, written: Arc<AtomicBool>, client: Client) -> Vec<(i64, String, Option<i64>)> {
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
                seen.extend(page.events.iter().map(|e| (e.id(), e.aggregate_id().to_string(), e.aggregate_seq())));
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

/// Changes the retention again and again, and with it the length of the bins; at times bins are taken at random.
async fn resize(mut client: Client, written: Arc<AtomicBool>) {
    let random = "CREATE OR REPLACE FUNCTION postbox.bin() RETURNS smallint LANGUAGE sql VOLATILE AS 'SELECT floor(random() * 6)::smallint'";
    for n in 0.. {
        if written.load(Relaxed) {
            break;
        }
        migrate::migrate(&mut client, "postbox", SECOND * [2, 5, 1][n % 3]).await.unwrap();
        client.batch_execute(if n % 3 == 2 { random } else { "" }).await.unwrap();
        client.batch_execute("SELECT pg_sleep(3)").await.unwrap();
    }
}

async fn nothing_is_lost_doubled_or_misordered(version: PgVersion) {
    let db = Db::new(version).await;
    db.sql(APP).await;
    let mut options = db.options();
    (options.page_events_max, options.poll_events_max, options.page_bytes_max) = (PAGE_MAX, PAGE_MAX, 3000);
    (options.retention, options.ttl) = (SECOND, SECOND * 30);
    let (quick_done, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let reader = tokio::spawn(read(options, written.clone(), client(&db.url).await));
    let resizer = tokio::spawn(resize(client(&db.url).await, written.clone()));
    let mut writers = Vec::new();
    for number in 0..8 {
        let mut writer = Writer { number, client: client(&db.url).await, rng: Rng::new(u64::from(number)) };
        let done = quick_done.clone();
        writers.push(tokio::spawn(async move {
            if number == 0 {
                for n in 0.. {
                    writer.long(n).await;
                    if done.load(Relaxed) {
                        break;
                    }
                }
                return;
            }
            for n in 0..transactions() {
                writer.transaction(n).await;
            }
        }));
    }
    let long = writers.remove(0);
    for writer in writers {
        writer.await.unwrap();
    }
    quick_done.store(true, Relaxed);
    long.await.unwrap();
    written.store(true, Relaxed);
    resizer.await.unwrap();
    let seen = in_time("all is read", reader).await.unwrap();
    judge(&db, &seen).await;
}

async fn judge(db: &Db, seen: &[(i64, String, Option<i64>)]) {
    let rows = db.client.query("SELECT a, v FROM app.journal", &[]).await.unwrap();
    let journal: HashSet<(String, i64)> = rows.iter().map(|r| (r.get(0), r.get(1))).collect();
    let ids: HashSet<i64> = seen.iter().map(|e| e.0).collect();
    let read: HashSet<(String, i64)> = seen.iter().filter_map(|(_, a, v)| Some((a.clone(), (*v)?))).collect();
    let (mut misordered, mut last) = (0, HashMap::new());
    for (_, aggregate, version) in seen.iter().filter(|e| e.2.is_some()) {
        misordered += u32::from(last.insert(aggregate, version).is_some_and(|before| before >= version));
    }
    let lost = journal.difference(&read).count();
    let phantom = read.difference(&journal).count();
    let left: i64 = db.one("SELECT count(*) FROM postbox.outbox").await;
    println!("written {}, read {}, left {left}", journal.len(), seen.len());
    assert_eq!((lost, phantom, seen.len() - ids.len(), misordered), (0, 0, 0, 0), "lost, phantom, doubled, misordered");
}

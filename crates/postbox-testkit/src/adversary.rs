//! Writers as nasty as applications can be: transaction ids taken before the row lock, savepoints, exceptions, prepared
//! and long transactions, rollbacks, COPY, and bins resized under all of it. A journal says what committed; the judge
//! compares it with what a reader saw.

use postbox_engine::Rng;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio_postgres::{Client, NoTls};

/// Quick writers beside the long one.
const QUICK: u32 = 7;

/// Transactions of each quick writer; more by the environment, for a long look.
pub fn transactions() -> u32 {
    std::env::var("POSTBOX_ADVERSARIAL_TRANSACTIONS").map_or(100, |n| n.parse().expect("a number"))
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

/// An event as a reader saw it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub id: String,
    pub aggregate_id: String,
    /// The aggregate's version.
    pub version: i64,
}

/// What was wrong with what a reader saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Judgement {
    /// Committed and not seen.
    pub lost: usize,
    /// Seen and not committed.
    pub phantom: usize,
    /// Seen again, and not for the first time.
    pub duplicated: usize,
    /// First seen after a later one of its aggregate.
    pub reordered: usize,
}

/// An application of its own schema `app` beside an outbox in schema `postbox`.
pub struct Adversary {
    url: String,
    client: Client,
}

impl Adversary {
    /// Makes the application's tables in a migrated database.
    ///
    /// # Panics
    /// As all here, when the database refuses what it must take.
    pub async fn new(url: &str) -> Adversary {
        let client = client(url).await;
        client.batch_execute(APP).await.expect("the application's schema is made");
        Adversary { url: url.into(), client }
    }

    /// Runs all writers to their end, and says so in `written`.
    pub async fn write(&self, transactions: u32, written: Arc<AtomicBool>) {
        let resizer = tokio::spawn(resize(client(&self.url).await, written.clone()));
        let (quick_done, mut quick) = (Arc::new(AtomicBool::new(false)), Vec::new());
        let long = tokio::spawn(Writer::new(0, &self.url).await.long_ones(quick_done.clone()));
        for number in 1..=QUICK {
            quick.push(tokio::spawn(Writer::new(number, &self.url).await.quick_ones(transactions)));
        }
        for writer in quick {
            writer.await.expect("a quick writer ends");
        }
        quick_done.store(true, Relaxed);
        long.await.expect("the long writer ends");
        written.store(true, Relaxed);
        resizer.await.expect("the resizer ends");
    }

    /// How many events were committed so far.
    pub async fn committed(&self) -> usize {
        let row = self.client.query_one("SELECT count(*) FROM app.journal", &[]).await.expect("the journal is read");
        usize::try_from(row.get::<_, i64>(0)).expect("a count")
    }

    /// Compares what was seen with what was committed.
    pub async fn judge(&self, seen: &[Seen]) -> Judgement {
        let rows = self.client.query("SELECT a, v FROM app.journal", &[]).await.expect("the journal is read");
        let journal: HashSet<(String, i64)> = rows.iter().map(|r| (r.get(0), r.get(1))).collect();
        let (mut ids, mut last, mut judgement) = (HashSet::new(), HashMap::new(), Judgement::default());
        for event in seen {
            if !ids.insert(&event.id) {
                judgement.duplicated += 1;
                continue;
            }
            let before = last.insert(&event.aggregate_id, event.version);
            judgement.reordered += usize::from(before.is_some_and(|before| before >= event.version));
        }
        let seen: HashSet<_> = seen.iter().map(|event| (event.aggregate_id.clone(), event.version)).collect();
        judgement.lost = journal.difference(&seen).count();
        judgement.phantom = seen.difference(&journal).count();
        judgement
    }
}

async fn client(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("the server takes a connection");
    tokio::spawn(connection);
    client
}

/// One writer's transactions. Writer 0 keeps each open for seconds, so that its transaction id is old again and again.
struct Writer {
    number: u32,
    client: Client,
    rng: Rng,
}

impl Writer {
    async fn new(number: u32, url: &str) -> Writer {
        Writer { number, client: client(url).await, rng: Rng::new(u64::from(number)) }
    }

    async fn long_ones(mut self, quick_done: Arc<AtomicBool>) {
        for n in 0.. {
            self.long(n).await;
            if quick_done.load(Relaxed) {
                break;
            }
        }
    }

    async fn quick_ones(mut self, transactions: u32) {
        for n in 0..transactions {
            self.transaction(n).await;
        }
    }

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
        let last: i64 = self.client.query_one(&sql, &[]).await.expect("the aggregate is there").get(0);
        let rows: String = (last - n + 1..=last).map(|v| format!("a\t{key}\t{v}\tc\n")).collect();
        let copy = "COPY postbox.outbox (aggregate_type, aggregate_id, aggregate_seq, event_type) FROM STDIN";
        let sink = self.client.copy_in::<_, bytes::Bytes>(copy).await.expect("COPY begins");
        let mut sink = std::pin::pin!(sink);
        futures_util::SinkExt::send(&mut sink, bytes::Bytes::from(rows)).await.expect("COPY goes on");
        sink.finish().await.expect("COPY ends");
        self.sql(&format!(
            "INSERT INTO app.journal SELECT '{key}', g FROM generate_series({last} - {n} + 1, {last}) g"
        ))
        .await;
    }
}

/// Replaces `bin()` again and again: other widths, and bins at random; the retention is as short as it can be.
async fn resize(client: Client, written: Arc<AtomicBool>) {
    let retention = "CREATE OR REPLACE FUNCTION postbox.retention_seconds() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE RETURN 1";
    client.batch_execute(retention).await.expect("the retention is replaced");
    let (mut n, mut waits) = (0, 0);
    while !written.load(Relaxed) {
        let (volatility, bin) = match n % 3 {
            0 => ("STABLE", "(date_part('epoch', now()) * 1000)::bigint / 500 % 6"),
            1 => ("STABLE", "(date_part('epoch', now()) * 1000)::bigint / 1500 % 6"),
            _ => ("VOLATILE", "floor(random() * 6)"),
        };
        let sql = format!(
            "CREATE OR REPLACE FUNCTION postbox.bin() RETURNS smallint LANGUAGE sql {volatility} AS $$SELECT ({bin})::smallint$$; SELECT pg_sleep(1)"
        );
        client.batch_execute(&sql).await.expect("bin() is replaced");
        waits += 1;
        n += u32::from(waits % 3 == 0);
    }
}

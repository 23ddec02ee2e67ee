//! `postbox relay --demo`: a small shop that takes orders, so that a newcomer sees events flow. Each step of an order
//! is one business transaction that also writes its event: what a service of yours does.

use crate::failure::Failure;
use postbox::Event;
use postbox::rusqlite::Outbox;
use rusqlite::{Connection, Transaction, TransactionBehavior};
use serde_json::json;
use std::error::Error;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

/// Five steps a second: fast enough to see it live, slow enough to read.
const STEP_EVERY: Duration = Duration::from_millis(200);

/// A running shop; dropping it closes it.
pub(crate) struct Shop {
    open: Option<Sender<()>>,
    clerk: Option<JoinHandle<()>>,
}

/// Makes the shop's own table and opens.
pub(crate) fn open(path: &Path, schema: &str) -> Result<Shop, Failure> {
    let failed = |error: rusqlite::Error| Failure::failed(format!("demo: the shop cannot open: {error}"));
    let mut db = Connection::open(path).map_err(failed)?;
    db.busy_timeout(Duration::from_secs(5)).map_err(failed)?;
    let table =
        "CREATE TABLE IF NOT EXISTS shop_order (id INTEGER PRIMARY KEY, customer TEXT, total INTEGER, status TEXT)";
    db.execute_batch(table).map_err(failed)?;
    let outbox = Outbox::new(schema);
    let (open, closed) = mpsc::channel();
    let clerk = std::thread::spawn(move || {
        for step in 0.. {
            // A failed step is rolled back, order and event together.
            if let Err(error) = work(&mut db, &outbox, step) {
                tracing::warn!(%error, "demo: the shop could not write its order");
            }
            match closed.recv_timeout(STEP_EVERY) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    });
    Ok(Shop { open: Some(open), clerk: Some(clerk) })
}

impl Drop for Shop {
    fn drop(&mut self) {
        drop(self.open.take());
        if let Some(clerk) = self.clerk.take() {
            let _ = clerk.join(); // its panic was printed already
        }
    }
}

type Done = Result<(), Box<dyn Error>>;

/// One business transaction: the order's row and its event, both or neither.
fn work(db: &mut Connection, outbox: &Outbox, step: i64) -> Done {
    let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
    match step % 3 {
        0 => place(&tx, outbox, step)?,
        1 => advance(&tx, outbox, "placed", "paid")?,
        _ => advance(&tx, outbox, "paid", "shipped")?,
    }
    Ok(tx.commit()?)
}

const CUSTOMERS: [&str; 4] = ["Ada", "Grace", "Edsger", "Barbara"];

fn place(tx: &Transaction<'_>, outbox: &Outbox, step: i64) -> Done {
    let (customer, total) = (CUSTOMERS[step as usize / 3 % CUSTOMERS.len()], 5 + step * 7 % 90);
    tx.execute("INSERT INTO shop_order (customer, total, status) VALUES (?1, ?2, 'placed')", (customer, total))?;
    let event = Event::new("order", tx.last_insert_rowid().to_string(), "order.placed");
    outbox.publish(tx, &event.json(&json!({ "customer": customer, "total": total }))?)?;
    Ok(())
}

fn advance(tx: &Transaction<'_>, outbox: &Outbox, from: &str, to: &str) -> Done {
    let sql =
        "UPDATE shop_order SET status = ?2 WHERE id = (SELECT min(id) FROM shop_order WHERE status = ?1) RETURNING id";
    let order: i64 = tx.query_row(sql, (from, to), |row| row.get(0))?;
    let event = Event::new("order", order.to_string(), format!("order.{to}"));
    outbox.publish(tx, &event.json(&json!({ "status": to }))?)?;
    Ok(())
}

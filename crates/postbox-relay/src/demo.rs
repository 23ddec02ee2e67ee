//! `postbox relay --demo`: a small shop that takes orders, so that a newcomer sees events flow. Each step of an order
//! is one business transaction that also writes its event: what a service of yours does.

use crate::failure::Failure;
use rusqlite::{Connection, Transaction, TransactionBehavior};
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
    let mut shop = Connection::open(path).map_err(failed)?;
    shop.busy_timeout(Duration::from_secs(5)).map_err(failed)?;
    let table =
        "CREATE TABLE IF NOT EXISTS shop_order (id INTEGER PRIMARY KEY, customer TEXT, total INTEGER, status TEXT)";
    shop.execute_batch(table).map_err(failed)?;
    let (open, closed) = mpsc::channel();
    let schema = schema.to_owned();
    let clerk = std::thread::spawn(move || {
        for step in 0i64.. {
            // A failed step is rolled back, order and event together.
            if let Err(error) = work(&mut shop, &schema, step) {
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

fn failed(error: rusqlite::Error) -> Failure {
    Failure::failed(format!("demo: the shop cannot open: {error}"))
}

/// One business transaction: the order's row and its event, both or neither.
fn work(shop: &mut Connection, schema: &str, step: i64) -> rusqlite::Result<()> {
    let tx = shop.transaction_with_behavior(TransactionBehavior::Immediate)?;
    match step % 3 {
        0 => place(&tx, schema, step)?,
        1 => advance(&tx, schema, "placed", "paid")?,
        _ => advance(&tx, schema, "paid", "shipped")?,
    }
    tx.commit()
}

const CUSTOMERS: [&str; 4] = ["Ada", "Grace", "Edsger", "Barbara"];

fn place(tx: &Transaction<'_>, schema: &str, step: i64) -> rusqlite::Result<()> {
    let (customer, total) = (CUSTOMERS[step as usize / 3 % CUSTOMERS.len()], 5 + step * 7 % 90);
    tx.execute("INSERT INTO shop_order (customer, total, status) VALUES (?1, ?2, 'placed')", (customer, total))?;
    let order = tx.last_insert_rowid();
    publish(tx, schema, order, "order.placed", &format!(r#"{{"customer": "{customer}", "total": {total}}}"#))
}

fn advance(tx: &Transaction<'_>, schema: &str, from: &str, to: &str) -> rusqlite::Result<()> {
    let sql =
        "UPDATE shop_order SET status = ?2 WHERE id = (SELECT min(id) FROM shop_order WHERE status = ?1) RETURNING id";
    let order: i64 = tx.query_row(sql, (from, to), |row| row.get(0))?;
    publish(tx, schema, order, &format!("order.{to}"), "{}")
}

fn publish(tx: &Transaction<'_>, schema: &str, order: i64, event_type: &str, payload: &str) -> rusqlite::Result<()> {
    let sql = format!(
        "INSERT INTO \"{schema}_outbox\" (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', ?1, ?2, ?3)"
    );
    tx.execute(&sql, (order.to_string(), event_type, payload))?;
    Ok(())
}

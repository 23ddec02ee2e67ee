//! A service with the relay inside: orders go into a SQLite file, their events to stdout. Ctrl-C stops both cleanly.

use postbox_relay::config::Config;
use rusqlite::{Connection, TransactionBehavior};
use serde_json::json;
use std::error::Error;
use tokio::sync::oneshot;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // A service has its own way to its configuration; `postbox_relay::config::load` reads files and environment.
    let mut config = Config::default();
    config.source.url = Some("sqlite:shop.db".into());
    postbox_relay::migrate(&config).await?;

    let (stop, stopped) = oneshot::channel();
    let relay = tokio::spawn(async move {
        let stop = async { stopped.await.unwrap_or_default() };
        postbox_relay::run(&config, stop).await
    });

    let mut db = Connection::open("shop.db")?;
    db.execute_batch("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, total INTEGER NOT NULL)")?;
    for total in [10, 20, 30] {
        place_order(&mut db, total)?;
    }
    eprintln!("three orders are placed; Ctrl-C stops");
    tokio::signal::ctrl_c().await?;

    // The relay settles what it has in hand and gives its lease back.
    let _ = stop.send(());
    let how = relay.await??;
    eprintln!("stopped: {how:?}");
    Ok(())
}

/// The order and its event: both are there, or neither.
fn place_order(db: &mut Connection, total: i64) -> Result<(), Box<dyn Error>> {
    let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
    tx.execute("INSERT INTO orders (total) VALUES (?1)", [total])?;
    let order = tx.last_insert_rowid().to_string();
    let event = postbox::Event::new("order", order, "order.placed").json(&json!({ "total": total }))?;
    postbox::rusqlite::publish(&tx, &event)?;
    Ok(tx.commit()?)
}

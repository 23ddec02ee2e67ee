//! A fresh database with an outbox for each test, and connections to it by both drivers.

use postbox::schema::POSTGRES;
use postbox_testkit::services::{PgVersion, Postgres};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_postgres::{AsyncMessage, Client, NoTls, Notification};

pub(crate) struct Db {
    pub(crate) url: String,
}

impl Db {
    pub(crate) async fn fresh(version: PgVersion) -> Db {
        Db::fresh_with(version, "").await
    }

    /// With what follows the name in CREATE DATABASE.
    pub(crate) async fn fresh_with(version: PgVersion, clauses: &str) -> Db {
        let db = Db { url: Postgres::shared(version).create_database_with(clauses) };
        db.install().await;
        db
    }

    pub(crate) async fn install(&self) {
        let client = self.client().await;
        client.batch_execute("CREATE SCHEMA postbox").await.expect("the schema is made");
        for step in POSTGRES {
            client.batch_execute(&step.sql("postbox")).await.expect("the step is applied");
        }
    }

    pub(crate) async fn client(&self) -> Client {
        self.listener().await.0
    }

    /// A connection, and the notifications that it gets.
    pub(crate) async fn listener(&self) -> (Client, UnboundedReceiver<Notification>) {
        let (client, mut connection) = tokio_postgres::connect(&self.url, NoTls).await.expect("connects");
        let (send, receive) = unbounded_channel();
        tokio::spawn(async move {
            while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
                if let AsyncMessage::Notification(n) = message {
                    let _ = send.send(n);
                }
            }
        });
        (client, receive)
    }

    pub(crate) async fn pool(&self) -> sqlx::PgPool {
        sqlx::PgPool::connect(&self.url).await.expect("connects")
    }

    /// The event types in the outbox, in id order.
    pub(crate) async fn event_types(&self) -> Vec<String> {
        let rows = self.client().await.query("SELECT event_type FROM postbox.outbox ORDER BY id", &[]).await;
        rows.expect("the outbox is read").iter().map(|row| row.get(0)).collect()
    }
}

/// Asks until the answer is true, for at most a minute.
pub(crate) async fn wait_for(client: &Client, question: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let row = client.query_one(question, &[]).await.expect("the question is answered");
        if row.get::<_, bool>(0) {
            return;
        }
        assert!(Instant::now() < deadline, "never true: {question}");
        tokio::task::yield_now().await;
    }
}

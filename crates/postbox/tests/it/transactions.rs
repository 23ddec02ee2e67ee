//! The event shares the fate of its transaction, whatever that is made of.

use crate::db::{Db, wait_for};
use postbox::{Event, Outbox};
use postbox_testkit::services::{PgVersion, Postgres};

fn event(event_type: &str) -> Event {
    Event::new("order", "42", event_type)
}

/// Whether a driver's trait of transactions is implemented, which the compiler decides: the bound picks one of two
/// constants.
macro_rules! is_transaction {
    ($type:ty) => {
        is_transaction!($type, postbox::Transaction)
    };
    ($type:ty, $($transaction:tt)+) => {{
        struct Asked<T>(std::marker::PhantomData<T>);
        #[allow(dead_code)] // one of the two constants is
        trait No {
            const IS: bool = false;
        }
        impl<T> No for Asked<T> {}
        #[allow(dead_code)]
        impl<T: $($transaction)+> Asked<T> {
            const IS: bool = true;
        }
        <Asked<$type>>::IS
    }};
}

#[test]
fn case_w2_a_transaction_is_taken_and_no_pool_connection_or_url() {
    assert!(is_transaction!(&mut sqlx::Transaction<'_, sqlx::Postgres>));
    assert!(is_transaction!(&tokio_postgres::Transaction<'_>));
    assert!(!is_transaction!(&sqlx::PgPool) && !is_transaction!(sqlx::PgPool));
    assert!(!is_transaction!(&mut sqlx::PgConnection));
    assert!(!is_transaction!(&tokio_postgres::Client) && !is_transaction!(&mut tokio_postgres::Client));
    assert!(!is_transaction!(&str) && !is_transaction!(String));
}

#[test]
fn case_w2_sqlite_takes_a_transaction_or_savepoint_and_no_connection() {
    use postbox::rusqlite::InTransaction;
    assert!(is_transaction!(rusqlite::Transaction<'_>, InTransaction));
    assert!(is_transaction!(rusqlite::Savepoint<'_>, InTransaction));
    assert!(!is_transaction!(rusqlite::Connection, InTransaction));
    assert!(!is_transaction!(&rusqlite::Connection, InTransaction));
    assert!(!is_transaction!(&mut rusqlite::Connection, InTransaction));
    assert!(!is_transaction!(std::sync::Arc<rusqlite::Connection>, InTransaction), "as a pool's connections are");
    assert!(!is_transaction!(&str, InTransaction));
}

#[tokio::test]
async fn case_w1_committed_is_there_and_rolled_back_is_not() {
    for version in PgVersion::ALL {
        let (db, outbox) = (Db::fresh(version).await, Outbox::default());
        let pool = db.pool().await;
        let mut client = db.client().await;

        let mut tx = pool.begin().await.unwrap();
        postbox::publish(&mut tx, &event("sqlx committed")).await.unwrap();
        tx.commit().await.unwrap();
        let mut tx = pool.begin().await.unwrap();
        outbox.publish(&mut tx, &event("sqlx rolled back")).await.unwrap();
        tx.rollback().await.unwrap();
        let mut tx = pool.begin().await.unwrap();
        outbox.publish(&mut tx, &event("sqlx dropped")).await.unwrap();
        drop(tx);

        let tx = client.transaction().await.unwrap();
        outbox.publish(&tx, &event("tokio committed")).await.unwrap();
        tx.commit().await.unwrap();
        let mut tx = client.transaction().await.unwrap();
        outbox.publish(&mut tx, &event("tokio rolled back")).await.unwrap();
        tx.rollback().await.unwrap();

        client.execute("SELECT postbox.publish('order', '42', 'sql committed')", &[]).await.unwrap();
        client.batch_execute("BEGIN; SELECT postbox.publish('a', 'b', 'sql rolled back'); ROLLBACK").await.unwrap();
        assert_eq!(db.event_types().await, ["sqlx committed", "tokio committed", "sql committed"]);
    }
}

#[tokio::test]
async fn case_w1_committed_is_there_also_after_a_crash() {
    let mut server = Postgres::start(PgVersion::V18).unwrap();
    let db = Db { url: server.create_database() };
    db.install().await;
    let mut client = db.client().await;
    let tx = client.transaction().await.unwrap();
    Outbox::default().publish(&tx, &event("committed")).await.unwrap();
    tx.commit().await.unwrap();
    let tx = client.transaction().await.unwrap();
    Outbox::default().publish(&tx, &event("open")).await.unwrap();
    server.crash().unwrap();
    server.restart().unwrap();
    assert_eq!(db.event_types().await, ["committed"]);
}

#[tokio::test]
async fn case_w3_savepoints_keep_what_was_released() {
    for version in PgVersion::ALL {
        let (db, outbox) = (Db::fresh(version).await, Outbox::default());
        let pool = db.pool().await;
        let mut tx = pool.begin().await.unwrap();
        outbox.publish(&mut tx, &event("before")).await.unwrap();
        let mut inner = sqlx::Connection::begin(&mut *tx).await.unwrap();
        outbox.publish(&mut inner, &event("undone")).await.unwrap();
        inner.rollback().await.unwrap();
        let mut inner = sqlx::Connection::begin(&mut *tx).await.unwrap();
        outbox.publish(&mut inner, &event("kept")).await.unwrap();
        inner.commit().await.unwrap();
        tx.commit().await.unwrap();

        let client = db.client().await;
        client
            .batch_execute(
                "BEGIN; SAVEPOINT a; INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 'undone');
                 ROLLBACK TO a; SELECT postbox.publish('a', '1', 'plain'); SAVEPOINT b; SELECT postbox.publish('a', '1', 'deep');
                 RELEASE a; COMMIT",
            )
            .await
            .unwrap();
        assert_eq!(db.event_types().await, ["before", "kept", "plain", "deep"]);
        let transactions = client.query_one("SELECT count(DISTINCT txid) FROM postbox.outbox", &[]).await.unwrap();
        assert_eq!(transactions.get::<_, i64>(0), 2, "the top-level transaction's id, also under a savepoint");
    }
}

#[tokio::test]
async fn case_w3_a_function_that_catches_keeps_what_it_did_outside() {
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let sql = "CREATE FUNCTION place() RETURNS void LANGUAGE plpgsql AS $$ BEGIN
               PERFORM postbox.publish('a', '1', 'before');
               BEGIN
                 PERFORM postbox.publish('a', '1', 'undone'), 1 / 0;
               EXCEPTION WHEN division_by_zero THEN PERFORM postbox.publish('a', '1', 'handled');
               END;
             END $$;
             SELECT place()";
        db.client().await.batch_execute(sql).await.unwrap();
        assert_eq!(db.event_types().await, ["before", "handled"]);
    }
}

/// NOTIFY bars PREPARE TRANSACTION, so the wake-up must not come in its way, even when it is due.
#[tokio::test]
async fn case_w3_prepared_transactions() {
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let client = db.client().await;
        let name = |fate: &str| format!("'{fate} {}'", db.url);
        for fate in ["committed", "rolled back"] {
            let sql = format!(
                "SELECT setval('postbox.wake', 1); BEGIN; SELECT postbox.publish('a', '1', '{fate}'); PREPARE TRANSACTION {}",
                name(fate)
            );
            client.batch_execute(&sql).await.unwrap();
        }
        assert!(db.event_types().await.is_empty());
        client.batch_execute(&format!("COMMIT PREPARED {}", name("committed"))).await.unwrap();
        client.batch_execute(&format!("ROLLBACK PREPARED {}", name("rolled back"))).await.unwrap();
        assert_eq!(db.event_types().await, ["committed"]);
    }
}

#[tokio::test]
async fn ordered_takes_the_keys_lock_before_the_id() {
    for version in PgVersion::ALL {
        let (db, outbox) = (Db::fresh(version).await, Outbox::default());
        let (mut first, mut other) = (db.client().await, db.client().await);
        let pool = db.pool().await;
        let tx = first.transaction().await.unwrap();
        outbox.publish(&tx, &event("first").ordered()).await.unwrap();

        let waiting = tokio::spawn(async move {
            let mut tx = pool.begin().await.unwrap();
            Outbox::default().publish(&mut tx, &event("second").ordered()).await.unwrap();
            tx.commit().await.unwrap();
        });
        let look = db.client().await;
        wait_for(&look, "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())").await;

        let free = other.transaction().await.unwrap();
        outbox.publish(&free, &Event::new("order", "43", "neighbour").ordered()).await.unwrap();
        free.commit().await.unwrap();
        outbox.publish(&tx, &event("first again").ordered()).await.unwrap();
        tx.commit().await.unwrap();
        waiting.await.unwrap();
        assert_eq!(db.event_types().await, ["first", "neighbour", "first again", "second"]);
    }
}

/// Reading rests on it (decision 0001): whoever draws an event id has its transaction id by then, however it writes.
#[tokio::test]
async fn the_transaction_id_is_taken_before_the_event_id_is_drawn() {
    let drawn = "(SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM postbox.outbox_id_seq)";
    let witness = format!(
        "CREATE FUNCTION witness() RETURNS xid8 LANGUAGE plpgsql AS $$ BEGIN
           IF {drawn} > (SELECT count(*) FROM postbox.outbox) THEN RAISE 'the id was drawn first'; END IF;
           RETURN pg_current_xact_id();
         END $$;
         ALTER TABLE postbox.outbox ALTER COLUMN txid SET DEFAULT witness()"
    );
    let columns = "(aggregate_type, aggregate_id, event_type)";
    let ways = [
        format!("INSERT INTO postbox.outbox {columns} VALUES ('a', '1', 'values')"),
        format!("INSERT INTO postbox.outbox {columns} SELECT 'a', '1', 'select' ORDER BY 1"),
        format!("COPY postbox.outbox {columns} FROM PROGRAM 'printf \"a\\\\t1\\\\tcopy\\\\n\"'"),
        "SELECT postbox.publish('a', '1', 'publish')".to_owned(),
        "PREPARE p AS INSERT INTO postbox.outbox (event_type, aggregate_id, aggregate_type) VALUES ('prepared', '1', 'a'); EXECUTE p".to_owned(),
    ];
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let client = db.client().await;
        client.batch_execute(&witness).await.unwrap();
        for way in &ways {
            client.batch_execute(way).await.unwrap_or_else(|e| panic!("{way}: {e:?}"));
        }
        assert_eq!(db.event_types().await, ["values", "select", "copy", "publish", "prepared"]);
        let cache = "SELECT seqcache FROM pg_sequence WHERE seqrelid = 'postbox.outbox_id_seq'::regclass";
        assert_eq!(client.query_one(cache, &[]).await.unwrap().get::<_, i64>(0), 1);
    }
}

/// The writer's own errors reach the writer, with their code.
#[tokio::test]
async fn case_w7_a_deadlock_is_the_callers_to_repeat() {
    for version in PgVersion::ALL {
        let (db, outbox) = (Db::fresh(version).await, Outbox::default());
        let (mut one, mut two) = (db.client().await, db.client().await);
        let (one, two) = (one.transaction().await.unwrap(), two.transaction().await.unwrap());
        let key = |id| Event::new("order", id, "x").ordered();
        outbox.publish(&one, &key("1")).await.unwrap();
        outbox.publish(&two, &key("2")).await.unwrap();
        let (event_one, event_two) = (key("2"), key("1"));
        let both = tokio::join!(
            async {
                let result = outbox.publish(&one, &event_one).await;
                one.rollback().await.unwrap();
                result
            },
            async {
                let result = outbox.publish(&two, &event_two).await;
                two.rollback().await.unwrap();
                result
            }
        );
        let errors: Vec<_> = [both.0, both.1].into_iter().filter_map(Result::err).collect();
        assert_eq!(errors.iter().map(|e| e.sqlstate()).collect::<Vec<_>>(), [Some("40P01")]);
    }
}

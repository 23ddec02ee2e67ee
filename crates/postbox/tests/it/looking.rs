//! `trace` and `lag` tell the truth about what a relay recorded, and work without one.

use crate::db::Db;
use postbox_testkit::services::PgVersion;
use tokio_postgres::Client;

async fn publish(client: &Client, event_type: &str) -> String {
    let sql = format!("SELECT postbox.publish('order', '42', '{event_type}')::text");
    client.query_one(&sql, &[]).await.unwrap().get(0)
}

/// (state, relay, attempts, whether it has a time of publication) in the one stream.
async fn trace(client: &Client, event_id: &str) -> (String, Option<String>, i32, bool) {
    let sql = "SELECT state, relay, attempts, published_at IS NOT NULL FROM postbox.trace($1::text::uuid)";
    let row = client.query_one(sql, &[&event_id]).await.unwrap();
    (row.get(0), row.get(1), row.get(2), row.get(3))
}

async fn last_error(client: &Client, event_id: &str) -> Option<String> {
    client.query_one("SELECT error FROM postbox.trace($1::text::uuid)", &[&event_id]).await.unwrap().get(0)
}

fn published(relay: &str) -> (String, Option<String>, i32, bool) {
    ("published".into(), Some(relay.into()), 1, true)
}
fn pending() -> (String, Option<String>, i32, bool) {
    ("pending".into(), None, 0, false)
}

async fn settle(client: &Client, relay: &str, columns: &str, values: &str) {
    let sql = format!(
        "INSERT INTO postbox.cursor (stream, shard, epoch, events, relay, system_id, database, generation, {columns})
         VALUES ('main', 0, 1, 1, '{relay}', 0, 0, 0, {values})"
    );
    client.batch_execute(&sql).await.unwrap();
}

/// (pending, whether that is an estimate, whether there is an oldest)
async fn lag(client: &Client) -> (i64, bool, bool) {
    let sql = "SELECT pending, pending_is_estimate, oldest_unpublished IS NOT NULL FROM postbox.lag";
    let row = client.query_one(sql, &[]).await.unwrap();
    (row.get(0), row.get(1), row.get(2))
}

async fn snapshot(client: &Client) -> String {
    client.query_one("SELECT pg_current_snapshot()::text", &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn trace_and_lag_follow_the_cursor_exactly() {
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let (client, open) = (db.client().await, db.client().await);
        let early = publish(&client, "early").await;
        assert_eq!(trace(&client, &early).await, pending(), "no relay has ever run");
        client.batch_execute("INSERT INTO postbox.lease (stream, shard) VALUES ('main', 0)").await.unwrap();
        assert_eq!((trace(&client, &early).await, lag(&client).await), (pending(), (1, false, true)));

        // A transaction that began before, and commits after, the snapshot that passes its neighbours.
        open.batch_execute("BEGIN").await.unwrap();
        let late = publish(&open, "late").await;
        let beside = publish(&client, "beside").await;
        let since = snapshot(&client).await;
        settle(&client, "one", "since", &format!("'{since}'")).await;
        assert_eq!(lag(&client).await, (0, false, false));
        open.batch_execute("COMMIT").await.unwrap();
        assert_eq!(lag(&client).await, (1, false, true));
        assert_eq!(trace(&client, &late).await, pending());
        for event in [&early, &beside] {
            assert_eq!(trace(&client, event).await, published("one"));
        }

        // An open window, paged as far as the late event.
        let next = publish(&client, "next").await;
        let until = snapshot(&client).await;
        let after = publish(&client, "after").await;
        let paged = "(SELECT id FROM postbox.outbox WHERE event_type = 'late')";
        settle(&client, "two", "since, until, last_id", &format!("'{since}', '{until}', {paged}")).await;
        assert_eq!(trace(&client, &late).await, published("two"));
        assert_eq!((trace(&client, &next).await, trace(&client, &after).await), (pending(), pending()));
        assert_eq!(trace(&client, &beside).await, published("one"), "the first row that passed it");
        assert_eq!(lag(&client).await, (2, false, true));

        settle(&client, "three", "since", &format!("'{until}'")).await;
        assert_eq!((trace(&client, &next).await, trace(&client, &after).await), (published("three"), pending()));
        assert_eq!(lag(&client).await, (1, false, true));
    }
}

#[tokio::test]
async fn held_events_are_told_by_their_rows() {
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let client = db.client().await;
        let event = publish(&client, "x").await;
        client.batch_execute("INSERT INTO postbox.lease (stream, shard, owner, until) VALUES ('main', 0, 'gone', now() - interval '1 s')").await.unwrap();
        settle(&client, "one", "since", "pg_current_snapshot()").await;
        let hold = "INSERT INTO postbox.held (stream, id, shard, key, aggregate_type, aggregate_id, event_id, event_type, event_created_at, state, attempts, error, relay)
            SELECT 'main', id, 0, -1, aggregate_type, aggregate_id, event_id, event_type, created_at, 'retry', 2, 'refused', 'one' FROM postbox.outbox";
        client.batch_execute(hold).await.unwrap();
        let held = |state: &str, attempts| (state.to_owned(), Some("one".to_owned()), attempts, false);
        assert_eq!(trace(&client, &event).await, held("retry", 2));
        for state in ["waiting", "delayed", "replay", "dead"] {
            client.execute("UPDATE postbox.held SET state = $1", &[&state]).await.unwrap();
            assert_eq!(trace(&client, &event).await, held(state, 2));
        }
        assert_eq!(last_error(&client, &event).await.as_deref(), Some("refused"));
        let sql = "SELECT owner IS NULL, dead, retry, oldest_dead > interval '0', oldest_held IS NULL, last_settled > interval '0', pending FROM postbox.lag";
        let row = client.query_one(sql, &[]).await.unwrap();
        assert!(row.get::<_, bool>(0), "an owner whose lease has ended is none");
        assert_eq!((row.get::<_, i64>(1), row.get::<_, i64>(2), row.get::<_, i64>(6)), (1, 0, 0));
        assert!(row.get::<_, bool>(3) && row.get::<_, bool>(4) && row.get::<_, bool>(5));
        client.batch_execute("UPDATE postbox.held SET state = 'done'").await.unwrap();
        assert_eq!(trace(&client, &event).await, ("published".into(), Some("one".into()), 3, true));
        assert_eq!(last_error(&client, &event).await, None, "that of an attempt before");
        let error = client.batch_execute("UPDATE postbox.held SET state = 'lost'").await.expect_err("no such state");
        assert_eq!(error.code().map(|c| c.code()), Some("23514"));
    }
}

/// 'infinity' is a time to wait for, and none to reckon with.
#[tokio::test]
async fn an_event_that_is_never_available_is_pending_and_has_no_age() {
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let client = db.client().await;
        let never = "INSERT INTO postbox.lease (stream, shard) VALUES ('main', 0); SELECT postbox.publish('a', '1', 'x', available_at => 'infinity')";
        client.batch_execute(never).await.unwrap();
        let sql = "SELECT pending, oldest_unpublished = interval '0' FROM postbox.lag";
        let row = client.query_one(sql, &[]).await.unwrap();
        assert_eq!((row.get::<_, i64>(0), row.get::<_, bool>(1)), (1, true));
    }
}

#[tokio::test]
async fn lag_stops_counting_and_estimates() {
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let client = db.client().await;
        let fill = "INSERT INTO postbox.lease (stream, shard) VALUES ('main', 0);
            INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) SELECT 'a', g::text, 'x' FROM generate_series(1, 10000) g";
        client.batch_execute(fill).await.unwrap();
        assert_eq!(lag(&client).await, (10_000, false, true));
        let fill = "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type) SELECT 'a', g::text, 'x' FROM generate_series(1, 5000) g";
        client.batch_execute(fill).await.unwrap();
        assert_eq!(lag(&client).await, (15_000, true, true));
        // Two shards share them by slot, and each tells its own.
        client.batch_execute("UPDATE postbox.lease SET shards = 2; INSERT INTO postbox.lease (stream, shard, shards) VALUES ('main', 1, 2)").await.unwrap();
        let sql = "SELECT count(*), sum(pending)::bigint, bool_or(pending_is_estimate) FROM postbox.lag";
        let row = client.query_one(sql, &[]).await.unwrap();
        assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1), row.get::<_, bool>(2)), (2, 15_000, false));
    }
}

#[tokio::test]
async fn uuid7_is_a_uuid_of_version_7_with_the_time_in_front() {
    for version in PgVersion::ALL {
        let db = Db::fresh(version).await;
        let sql = "SELECT bool_and(substr(u, 15, 1) = '7' AND substr(u, 20, 1) IN ('8', '9', 'a', 'b')), count(DISTINCT u),
              bool_and(('x' || translate(left(u, 13), '-', ''))::bit(48)::bigint BETWEEN floor(extract(epoch FROM now()) * 1000)
                AND ceil(extract(epoch FROM clock_timestamp()) * 1000))
            FROM (SELECT postbox.uuid7()::text AS u FROM generate_series(1, 10000)) t";
        let row = db.client().await.query_one(sql, &[]).await.unwrap();
        assert!(row.get::<_, bool>(0) && row.get::<_, bool>(2));
        assert_eq!(row.get::<_, i64>(1), 10_000);
    }
}

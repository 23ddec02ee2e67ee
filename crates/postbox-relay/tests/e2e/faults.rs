//! The relay between a real database and a real broker while single calls fail in ways that no server fails in on
//! demand: refused, done and not told, told late. All arrives, in order, and is recorded.

use crate::harness::{Folder, until};
use crate::kafka::{Reader, main_status, topic_name, write};
use crate::postgres::migrated;
use postbox_engine::{DeadPolicy, Relay, RelayOptions, Retry, Route, Rule, Stopped, repeated_max};
use postbox_sinks::SinkConfig;
use postbox_sources::{Location, SourceConfig};
use postbox_testkit::faulty::{Call, Fault, FaultySink, FaultySource};
use postbox_testkit::services::{Kafka, PgVersion, Postgres};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::time::timeout;

const EVENTS: u32 = 5_000;
const EVENTS_MAX: usize = 50;

/// Carries what `write(from, to)` writes into the database at this URL, which `folder` is configured for.
fn carried(folder: &Folder, url: &str, write: impl Fn(u32, u32)) {
    use Fault::{DoThenFail, DoThenHold, Hold, Pass, Refuse, Slow};
    let (topic, broker) = (topic_name(), Kafka::shared());
    broker.create_topic(&topic, 3, &[]).unwrap();
    let retry = Retry { base: Duration::from_millis(10), ..Retry::default() };
    let options = RelayOptions { events_max: EVENTS_MAX, retry, ..RelayOptions::default() };
    let source = SourceConfig {
        location: Location { url: url.into(), listen_url: None, password: None, schema: "postbox".into() },
        stream: "main".into(),
        relay: "faulty".into(),
        lease: Duration::from_secs(2),
        retention: Duration::from_secs(3_600),
        policy: DeadPolicy::Skip,
        hand: options.hand(),
    };
    let source = Arc::new(FaultySource::new(postbox_sources::build(&source).unwrap()));
    source.script(Call::Acquire, &[Refuse, DoThenFail]);
    source.script(Call::Claim, &[Pass, DoThenFail, Pass, Refuse, Slow(Duration::from_millis(300))]);
    source.script(Call::Settle, &[Pass, Refuse, Pass, DoThenFail, Refuse, DoThenFail, DoThenHold]);
    source.script(Call::Renew, &[Refuse, DoThenFail]);
    let sink: SinkConfig =
        serde_json::from_value(serde_json::json!({"type": "kafka", "brokers": broker.bootstrap()})).unwrap();
    let sink = Arc::new(FaultySink::new(postbox_sinks::build(&sink).unwrap()));
    sink.script(&[Pass, DoThenFail, Pass, Refuse, DoThenFail, DoThenFail, Hold]);

    let rule = Rule { topic: topic.clone(), ..Rule::default() };
    let relay = Relay::new(source.clone(), sink.clone(), Route::new(vec![rule]).unwrap(), options);
    let counters = relay.counters();
    let (stop, stopped) = oneshot::channel::<()>();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    write(1, EVENTS);
    let running = runtime.spawn(relay.run(async { drop(stopped.await) }));
    held(&runtime, sink.until_held(1));
    sink.let_go();
    held(&runtime, source.until_held(1));
    source.let_go();
    let mut reader = Reader::new(&broker.bootstrap(), &topic);
    reader.until_in_order(EVENTS as usize);
    until("every fault was met", || source.left() + sink.left() == 0);
    write(EVENTS + 1, EVENTS + 100);
    let twice = reader.until_in_order(EVENTS as usize + 100);
    // Sent and not told: what was in hand goes out again. Told and not recorded: as much as after a crash.
    let counted = counters.snapshot();
    let (outages, losses) = (counted.outages as usize, counted.tenures as usize - 1);
    let bound = outages * EVENTS_MAX + losses * repeated_max(EVENTS_MAX);
    assert!((1..=bound).contains(&twice), "{twice} came twice, by {outages} outages and {losses} losses of the lease");
    assert!(bound < EVENTS as usize, "{bound} says nothing");

    until("all is recorded", || main_status(folder)["oldest_unpublished_s"].is_null());
    drop(stop);
    assert_eq!(runtime.block_on(running).unwrap().unwrap(), Stopped::Clean);
}

fn held(runtime: &Runtime, until_held: impl Future<Output = ()>) {
    let in_time = async { timeout(Duration::from_secs(60), until_held).await };
    runtime.block_on(in_time).expect("a call that is held");
}

#[test]
fn faults_of_single_calls_between_postgresql_and_kafka() {
    let (folder, database) = migrated();
    let url = Postgres::shared(PgVersion::V15).url(&database);
    carried(&folder, &url, |from, to| write(&database, 20, from, to));
}

#[test]
fn faults_of_single_calls_between_sqlite_and_kafka() {
    let folder = Folder::new();
    folder.ok(&["migrate"]);
    let file = folder.file("postbox.db");
    carried(&folder, &format!("sqlite:{}", file.display()), |from, to| {
        let mut file = rusqlite::Connection::open(&file).unwrap();
        file.busy_timeout(Duration::from_secs(60)).unwrap();
        let transaction = file.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).unwrap();
        for n in from..=to {
            let sql = "INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', ?1, 'order.moved', ?2)";
            transaction.execute(sql, (format!("a{}", n % 20), n.to_string())).unwrap();
        }
        transaction.commit().unwrap();
    });
}

//! PostgreSQL to a real Kafka broker, with a real consumer at the end.

use crate::harness::{DEADLINE, Folder, until};
use crate::postgres::{execute, migrated};
use postbox_testkit::services::{Kafka, free_port};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, Message};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A topic name of this test's own.
pub(crate) fn topic_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("e2e-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed))
}

/// A migrated database, a stream to one topic of a broker, with more keys for [stream.main.kafka] and [stream.main].
pub(crate) fn to_topic(bootstrap: &str, topic: &str, stream: &str, kafka: &str) -> (Folder, String) {
    let (folder, database) = migrated();
    let config = format!(
        "[stream.main]\nsink = \"kafka\"\nroutes = [{{ topic = \"{topic}\" }}]\n{stream}\n\
         [stream.main.kafka]\nbrokers = \"{bootstrap}\"\n{kafka}\n"
    );
    std::fs::write(folder.file("postbox.toml"), config).unwrap();
    (folder, database)
}

/// As `to_topic`, on the shared broker, with a topic that is there.
fn ready(stream: &str, kafka: &str) -> (Folder, String, String) {
    let topic = topic_name();
    let broker = Kafka::shared();
    broker.create_topic(&topic, 3, &[]).unwrap();
    let (folder, database) = to_topic(&broker.bootstrap(), &topic, stream, kafka);
    (folder, database, topic)
}

/// One message as it arrived.
#[derive(Debug)]
pub(crate) struct Arrived {
    key: String,
    event_id: String,
    pub(crate) payload: String,
}

/// Reads a topic from its begin.
pub(crate) struct Reader {
    consumer: BaseConsumer,
    topic: String,
    seen: Vec<Arrived>,
    distinct: BTreeSet<String>,
}

impl Reader {
    pub(crate) fn new(bootstrap: &str, topic: &str) -> Reader {
        let consumer: BaseConsumer =
            ClientConfig::new().set("bootstrap.servers", bootstrap).set("group.id", "none").create().unwrap();
        let mut partitions = TopicPartitionList::new();
        for partition in 0..3 {
            partitions.add_partition_offset(topic, partition, Offset::Beginning).unwrap();
        }
        consumer.assign(&partitions).unwrap();
        Reader { consumer, topic: topic.into(), seen: Vec::new(), distinct: BTreeSet::new() }
    }

    /// Reads on until what has come is as wanted.
    pub(crate) fn until(&mut self, wanted: impl Fn(&Reader) -> bool) -> &[Arrived] {
        let deadline = Instant::now() + DEADLINE;
        while !wanted(self) {
            assert!(Instant::now() < deadline, "not seen; {} messages came, of {}", self.seen.len(), self.there());
            let Some(Ok(message)) = self.consumer.poll(Duration::from_millis(100)) else { continue };
            let text = |bytes: Option<&[u8]>| String::from_utf8(bytes.unwrap_or_default().to_vec()).unwrap();
            let headers = message.headers().unwrap();
            let event_id = headers.iter().find(|header| header.key == "event_id").unwrap().value;
            self.distinct.insert(text(event_id));
            self.seen.push(Arrived {
                key: text(message.key()),
                event_id: text(event_id),
                payload: text(message.payload()),
            });
        }
        &self.seen
    }

    /// How many messages the topic holds.
    pub(crate) fn there(&self) -> i64 {
        let end = |partition| self.consumer.fetch_watermarks(&self.topic, partition, DEADLINE).unwrap().1;
        (0..3).map(end).sum()
    }

    /// Reads until so many different events have come, and checks that the first arrivals of each key are in order
    /// (payloads are the numbers in commit order). Returns how many came twice.
    pub(crate) fn until_in_order(&mut self, events: usize) -> usize {
        self.until(|reader| reader.distinct.len() >= events);
        let mut last: BTreeMap<&str, u64> = BTreeMap::new();
        let mut first = BTreeSet::new();
        for arrived in &self.seen {
            if first.insert(&arrived.event_id) {
                let number = arrived.payload.parse().unwrap();
                let before = last.insert(&arrived.key, number);
                assert!(before < Some(number), "key {}: {number} after {before:?}", arrived.key);
            }
        }
        self.seen.len() - first.len()
    }
}

/// Writes events 1 to n over so many keys, in one transaction; the payload is the number.
pub(crate) fn write(database: &str, keys: u32, from: u32, to: u32) {
    let sql = format!(
        "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload) \
         SELECT 'order', 'a' || (n % {keys}), 'order.moved', n::text::json FROM generate_series({from}, {to}) n"
    );
    execute(database, &sql);
}

pub(crate) fn main_status(folder: &Folder) -> serde_json::Value {
    folder.json(&["status", "--json"])[0].clone()
}

#[test]
fn a_committed_event_arrives_with_key_and_id() {
    let (folder, _, topic) = ready("", "");
    folder.ok(&["check"]);
    let relay = folder.leading_relay();
    let id = folder.ok(&["publish", "order", "42", "order.placed", "{\"total\": 10}"]).stdout;
    let mut reader = Reader::new(&Kafka::shared().bootstrap(), &topic);
    let seen = reader.until(|reader| !reader.seen.is_empty());
    assert_eq!((seen[0].key.as_str(), seen[0].event_id.as_str()), ("42", id.trim()));
    assert_eq!(seen[0].payload, "{\"total\": 10}");
    assert!(relay.stdout.all().is_empty(), "stdout is for data");
    relay.stop();
}

#[test]
fn case_o6_a_missing_topic_is_named_and_the_events_wait_for_it() {
    let topic = topic_name();
    let broker = Kafka::shared();
    let (folder, _) = to_topic(
        &broker.bootstrap(),
        &topic,
        "retry = { base = \"50ms\", pause_max = \"500ms\", attempts_max = 1000 }",
        "",
    );
    let check = folder.run(&["check"]);
    assert!(check.code == Some(3) && check.stdout.contains(&topic), "{check:?}");
    let relay = folder.leading_relay();
    let id = folder.ok(&["publish", "order", "42", "order.placed", "1"]).stdout;
    let trace = || folder.json(&["trace", id.trim(), "--json"])[0].clone();
    until("the event is held", || trace()["state"] == "retry");
    assert!(trace()["error"].as_str().unwrap().contains(&topic), "{}", trace());
    broker.create_topic(&topic, 3, &[]).unwrap();
    Reader::new(&broker.bootstrap(), &topic).until_in_order(1);
    until("the event is settled", || trace()["state"] == "published");
    relay.stop();
}

#[test]
fn case_w5_and_o1_a_payload_too_large_is_dead_with_its_size_and_holds_only_its_key() {
    let (folder, database, topic) = ready("dead = \"block\"", "message_bytes_max = 3000");
    write(&database, 2, 1, 2);
    let big = format!("\"{}\"", "x".repeat(5_000));
    let id = folder.ok(&["publish", "order", "a1", "order.moved", &big]).stdout;
    write(&database, 2, 3, 40); // in one batch with the event that is too large
    let relay = folder.leading_relay();
    let trace = || folder.json(&["trace", id.trim(), "--json"])[0].clone();
    until("the event is dead", || trace()["state"] == "dead");
    let error = trace()["error"].as_str().unwrap().to_owned();
    let sizes = error.split(' ').filter_map(|word| word.parse::<usize>().ok());
    assert!(sizes.max().is_some_and(|bytes| bytes > 5_000) && error.contains("message_bytes_max"), "{error}");
    // Key a0 goes on to its end; of a1 only what was before the dead event came.
    let mut reader = Reader::new(&Kafka::shared().bootstrap(), &topic);
    reader.until_in_order(21);
    let of_a1 = reader.seen.iter().filter(|arrived| arrived.key == "a1").count();
    assert_eq!(of_a1, 1);
    until("the rest of the key waits", || main_status(&folder)["waiting"] == 19);
    assert_eq!(main_status(&folder)["dead"], 1);
    relay.stop();
}

#[test]
fn case_o5_what_the_brokers_topic_refuses_for_size_is_dead_with_the_reason() {
    let topic = topic_name();
    let broker = Kafka::shared();
    broker.create_topic(&topic, 3, &[("max.message.bytes", "2000")]).unwrap();
    let (folder, database) = to_topic(&broker.bootstrap(), &topic, "", "");
    write(&database, 4, 1, 20);
    let big: String = (0..2_000).map(|n: u32| format!("{:x}", n.wrapping_mul(2_654_435_761))).collect();
    let id = folder.ok(&["publish", "order", "a1", "order.moved", &format!("\"{big}\"")]).stdout;
    write(&database, 4, 21, 40);
    let relay = folder.leading_relay();
    let trace = || folder.json(&["trace", id.trim(), "--json"])[0].clone();
    until("the event is dead", || trace()["state"] == "dead");
    let error = trace()["error"].as_str().unwrap().to_owned();
    let size = format!("its body has {} bytes", big.len() + 2);
    assert!(error.contains(&topic) && error.contains(&size), "{error}");
    Reader::new(&broker.bootstrap(), &topic).until_in_order(40);
    relay.stop();
}

#[test]
fn case_k1_a_broker_that_is_away_pauses_the_stream_and_costs_nothing() {
    let mut broker = Kafka::start().unwrap();
    let topic = topic_name();
    broker.create_topic(&topic, 3, &[]).unwrap();
    let (folder, database) = to_topic(&broker.bootstrap(), &topic, "", "");
    let folder = folder.env("POSTBOX__RELAY__SEND_TIMEOUT", "3s");
    broker.crash().unwrap();
    write(&database, 10, 1, 5_000);
    let relay = folder.leading_relay();
    relay.stderr.wait_for("paus");
    let check = folder.run(&["check"]);
    assert!(check.code == Some(3) && check.stdout.contains(&broker.bootstrap()), "{check:?}");
    let status = main_status(&folder);
    assert_eq!((&status["pending"], &status["dead"], &status["retry"]), (&5_000.into(), &0.into(), &0.into()));
    broker.restart().unwrap();
    Reader::new(&broker.bootstrap(), &topic).until_in_order(5_000);
    until("all is settled", || main_status(&folder)["pending"] == 0);
    assert_eq!(execute(&database, "SELECT count(*) FROM postbox.held WHERE attempts > 0")[0][0].as_deref(), Some("0"));
    relay.stop();
}

#[test]
fn a_broker_address_where_nobody_listens_is_named() {
    let place = format!("127.0.0.1:{}", free_port().unwrap());
    let (folder, _) = to_topic(&place, "orders", "", "");
    let check = folder.run(&["check"]);
    assert!(check.code == Some(3) && check.stdout.contains(&place), "{check:?}");
    assert!(check.stdout.contains("are address and credentials right?"), "{check:?}");
    let relay = folder.leading_relay();
    folder.ok(&["publish", "order", "1", "order.placed", "{}"]);
    let line = relay.stderr.wait_for("the destination is out");
    assert!(line.contains(&place) && line.contains("are address and credentials right?"), "{line}");
    until("status tells it, too", || {
        main_status(&folder)["last_error"].as_str().is_some_and(|error| error.contains(&place))
    });
    relay.stop();
}

#[test]
fn case_l1_a_relay_killed_in_mid_batch_loses_nothing() {
    let (folder, database, topic) = ready("", "");
    // So few in hand that the backlog lasts, however late the test looks.
    let folder = folder.env("POSTBOX__RELAY__LEASE", "2s").env("POSTBOX__RELAY__EVENTS_MAX", "100");
    write(&database, 50, 1, 60_000);
    let mut reader = Reader::new(&Kafka::shared().bootstrap(), &topic);
    for round in 1..=3 {
        let relay = folder.leading_relay();
        let so_far = reader.seen.len();
        reader.until(|reader| reader.seen.len() > so_far);
        relay.kill();
        assert!(round > 1 || main_status(&folder)["pending"] != 0, "it was killed too late to show anything");
        write(&database, 50, 60_000 + round * 100 - 99, 60_000 + round * 100);
    }
    let relay = folder.leading_relay();
    reader.until_in_order(60_300);
    until("all is settled", || main_status(&folder)["pending"] == 0);
    relay.stop();
}

#[test]
fn case_l2_a_relay_paused_beyond_its_lease_changes_nothing_afterwards() {
    let (folder, database, topic) = ready("", "");
    let folder = folder.env("POSTBOX__RELAY__LEASE", "2s");
    let first = folder.leading_relay();
    let second = folder.relay(&[]);
    write(&database, 20, 1, 100);
    let mut reader = Reader::new(&Kafka::shared().bootstrap(), &topic);
    reader.until_in_order(100);
    first.signal("STOP");
    second.stderr.wait_for("the lease is ours");
    write(&database, 20, 101, 5_000);
    reader.until_in_order(5_000);
    first.signal("CONT");
    first.stderr.wait_for("could not be renewed in time");
    write(&database, 20, 5_001, 6_000);
    reader.until_in_order(6_000);
    until("all is settled", || main_status(&folder)["pending"] == 0);
    second.stop();
    first.stop();
}

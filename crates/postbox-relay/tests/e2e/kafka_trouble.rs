//! A relay and a Kafka broker that is away, slow or silent, and events that the broker refuses: nothing is lost, nothing
//! overtakes in its key, and no attempt is spent on what is no event's fault.

use crate::harness::{Folder, Running, until};
use crate::kafka::{Reader, main_status, to_topic, topic_name, write};
use crate::postgres::execute;
use postbox_testkit::services::{Api, Kafka, KafkaOptions, Mode, Side, TcpProxy};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// A broker behind a proxy. One test has it at a time: what the proxy does, it does to all. There are two, in turn.
fn proxied() -> MutexGuard<'static, Kafka> {
    static BROKERS: [OnceLock<Mutex<Kafka>>; 2] = [OnceLock::new(), OnceLock::new()];
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let start = || Mutex::new(Kafka::start_with(&KafkaOptions { proxied: true, ..Default::default() }).unwrap());
    let turn = NEXT.fetch_add(1, Relaxed);
    let in_turn = |n: usize| BROKERS[(turn + n) % BROKERS.len()].get_or_init(start);
    let free = (0..BROKERS.len()).find_map(|n| in_turn(n).try_lock().ok());
    let broker = free.unwrap_or_else(|| in_turn(0).lock().unwrap_or_else(PoisonError::into_inner));
    broker.proxy().unwrap().set(Mode::Pass);
    broker
}

/// Lets everything pass again, also when a test fails: no consumer ends without its broker.
struct Passing<'a>(&'a Kafka);

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        proxy(self.0).set(Mode::Pass);
    }
}

/// A relay at work: one event of key a0 has arrived.
struct Scene<'a> {
    _passing: Passing<'a>, // dropped before the reader
    folder: Folder,
    database: String,
    relay: Running,
    reader: Reader,
}

impl<'a> Scene<'a> {
    fn set(broker: &'a Kafka, lease: &str, send_timeout: &str) -> Scene<'a> {
        Scene::with(broker, &[("LEASE", lease), ("SEND_TIMEOUT", send_timeout), ("DRAIN_TIMEOUT", "1s")])
    }

    /// With keys of [relay].
    fn with(broker: &'a Kafka, keys: &[(&str, &str)]) -> Scene<'a> {
        let topic = topic_name();
        broker.create_topic(&topic, 3, &[]).unwrap();
        let (folder, database) = to_topic(&broker.bootstrap(), &topic, "", "");
        let folder =
            keys.iter().fold(folder, |folder, (key, value)| folder.env(&format!("POSTBOX__RELAY__{key}"), value));
        let relay = folder.leading_relay();
        write(&database, 10, 1, 1);
        let mut reader = Reader::new(&broker.bootstrap(), &topic);
        reader.until_in_order(1);
        let scene = Scene { _passing: Passing(broker), folder, database, relay, reader };
        scene.until_settled();
        scene
    }

    fn until_settled(&self) {
        until("all is settled", || main_status(&self.folder)["pending"] == 0);
    }

    /// So many lines of the relay's log hold this text.
    fn said(&self, text: &str) -> usize {
        self.relay.stderr.all().iter().filter(|line| line.contains(text)).count()
    }

    fn until_said(&self, text: &str, times: usize) {
        until(text, || self.said(text) >= times);
    }

    /// All have arrived in order and are settled, and none was ever held.
    fn end_with(mut self, events: usize) {
        self.reader.until_in_order(events);
        self.until_settled();
        assert_eq!(execute(&self.database, "SELECT count(*) FROM postbox.held")[0][0].as_deref(), Some("0"));
        assert_eq!(self.said("the lease is ours"), 1);
        self.relay.stop();
    }
}

fn proxy(broker: &Kafka) -> &TcpProxy {
    broker.proxy().unwrap()
}

#[test]
fn case_k1_while_the_broker_is_away_writers_go_on_and_memory_stays_flat() {
    let broker = proxied();
    let scene = Scene::set(&broker, "10s", "3s");
    proxy(&broker).set(Mode::Refuse);
    write(&scene.database, 100, 2, 20_000);
    scene.until_said("paused", 1);
    let before = scene.relay.resident_bytes();
    for n in 1..5 {
        write(&scene.database, 100, n * 20_000 + 1, (n + 1) * 20_000);
    }
    let so_far = scene.said("paused");
    scene.until_said("paused", so_far + 2);
    let grown = scene.relay.resident_bytes().saturating_sub(before);
    assert!(grown < 8 << 20, "{grown} bytes more in memory for 80,000 events more");
    let status = main_status(&scene.folder);
    assert_eq!((&status["pending"], &status["dead"], &status["retry"]), (&99_999.into(), &0.into(), &0.into()));
    proxy(&broker).set(Mode::Pass);
    scene.end_with(100_000);
}

#[test]
fn case_k2_a_broker_slower_than_the_lease_is_waited_for() {
    let broker = proxied();
    let scene = Scene::with(&broker, &[("LEASE", "3s"), ("SEND_TIMEOUT", "60s"), ("EVENTS_MAX", "25")]);
    proxy(&broker).set(Mode::Delay(Duration::from_secs(2)));
    write(&scene.database, 10, 2, 50);
    scene.until_settled();
    proxy(&broker).set(Mode::Pass);
    assert_eq!((scene.said("paused"), scene.reader.there()), (0, 50), "nothing is sent twice");
    scene.end_with(50);
}

/// To connect and to learn of the topic takes longer than a session waits at first.
#[test]
fn case_k2_a_broker_that_takes_three_seconds_for_each_answer_gets_its_events() {
    let (broker, topic) = (proxied(), topic_name());
    broker.create_topic(&topic, 3, &[]).unwrap();
    let mut reader = Reader::new(&broker.bootstrap(), &topic);
    let _passing = Passing(&broker); // dropped before the reader
    proxy(&broker).set(Mode::Delay(Duration::from_millis(1_500))); // there and back
    let (folder, database) = to_topic(&broker.bootstrap(), &topic, "", "");
    write(&database, 10, 1, 20);
    let relay = folder.leading_relay();
    until("all is settled", || main_status(&folder)["pending"] == 0);
    proxy(&broker).set(Mode::Pass);
    reader.until_in_order(20);
    assert_eq!(reader.there(), 20, "nothing is sent twice");
    relay.stop();
}

/// A relay that has up to a hundred events in hand, some of them sent and none answered, of 300 that wait.
fn with_a_batch_out<'a>(broker: &'a Kafka, drain_timeout: &str) -> Scene<'a> {
    let keys = [("EVENTS_MAX", "100"), ("SEND_TIMEOUT", "10m"), ("DRAIN_TIMEOUT", drain_timeout)];
    let scene = Scene::with(broker, &keys);
    let sent = proxy(broker).asked(Api::Produce);
    proxy(broker).set(Mode::Silent); // it takes what is sent, and never answers
    write(&scene.database, 10, 2, 301);
    until("the relay sends", || proxy(broker).asked(Api::Produce) > sent);
    scene
}

/// The numbers of the events that cursor and held rows tell as published. All else that is held was given back unsent.
fn recorded(database: &str) -> BTreeSet<u32> {
    let tried = "SELECT count(*) FROM postbox.held WHERE state NOT IN ('waiting', 'done') OR attempts > 0";
    assert_eq!(execute(database, tried)[0][0].as_deref(), Some("0"));
    let published =
        "SELECT o.payload::text FROM postbox.outbox o, postbox.trace(o.event_id) t WHERE t.state = 'published'";
    execute(database, published).iter().map(|row| row[0].as_ref().unwrap().parse().unwrap()).collect()
}

#[test]
fn case_l4_a_drain_without_answers_ends_at_its_deadline_with_0() {
    let broker = proxied();
    let Scene { folder, database, relay, mut reader, _passing } = with_a_batch_out(&broker, "1s");
    let stderr = relay.stderr.clone();
    relay.stop();
    proxy(&broker).set(Mode::Pass); // the broker gets what was out, and nobody waits for its answer; no consumer ends without it
    stderr.wait_for("stopped at relay.drain_timeout: ");
    assert_eq!(recorded(&database), BTreeSet::from([1]), "the others had no answer");
    until("what was out is there", || reader.there() > 1);
    let next = folder.leading_relay();
    reader.until_in_order(301);
    until("all is recorded", || recorded(&database).len() == 301);
    let again = reader.there() - 301;
    assert!((1..=100).contains(&again), "{again} came twice, 100 were in hand");
    next.stop();
}

#[test]
fn case_l4_answers_that_come_while_draining_are_recorded_and_nothing_else() {
    let broker = proxied();
    let Scene { folder, database, mut relay, mut reader, _passing } = with_a_batch_out(&broker, "1h");
    let stderr = relay.stderr.clone();
    relay.signal("TERM");
    stderr.wait_for("stopping; ");
    proxy(&broker).set(Mode::Pass);
    assert_eq!(relay.wait(), 0);
    stderr.wait_for("stopped: all in hand is settled");
    let there = usize::try_from(reader.there()).unwrap();
    assert!((2..=101).contains(&there), "{there} are there, 100 were in hand");
    assert_eq!(reader.until_in_order(there), 0, "nothing came twice");
    let arrived = reader.until(|_| true).iter().map(|arrived| arrived.payload.parse().unwrap());
    assert_eq!(arrived.collect::<BTreeSet<_>>(), recorded(&database));
    let next = folder.leading_relay();
    reader.until_in_order(301);
    until("all is recorded", || recorded(&database).len() == 301);
    assert_eq!(reader.there(), 301, "nothing came twice");
    next.stop();
}

/// It is connected and has its producer id, also when connections were cut meanwhile, so the first event finds both.
#[test]
fn case_l1_a_relay_that_stands_by_is_ready_to_send() {
    let broker = proxied();
    let mut scene = Scene::set(&broker, "3s", "30s");
    let ids = proxy(&broker).asked(Api::InitProducerId);
    let standby = scene.folder.relay(&[]);
    until("it has a producer id", || proxy(&broker).asked(Api::InitProducerId) > ids);
    let connections = proxy(&broker).accepted();
    proxy(&broker).cut();
    until("both are connected again", || proxy(&broker).accepted() >= connections + 2);
    assert!(!standby.stderr.text().contains("the lease is ours"));
    scene.relay.kill();
    standby.stderr.wait_for("the lease is ours");
    let ids = proxy(&broker).asked(Api::InitProducerId);
    write(&scene.database, 10, 2, 50);
    scene.reader.until_in_order(50);
    assert_eq!(proxy(&broker).asked(Api::InitProducerId), ids, "it sends with what it has");
    standby.stop();
}

#[test]
fn case_k2_a_frozen_broker_pauses_the_stream_and_nothing_overtakes() {
    let broker = proxied();
    let scene = Scene::set(&broker, "10s", "3s");
    proxy(&broker).set(Mode::Silent);
    write(&scene.database, 10, 2, 2_000);
    scene.until_said("paused", 1);
    write(&scene.database, 10, 2_001, 4_000);
    scene.until_said("paused", 2);
    proxy(&broker).set(Mode::Pass);
    scene.end_with(4_000);
}

#[test]
fn case_k3_connections_that_end_before_the_acknowledgement() {
    let broker = proxied();
    let scene = Scene::set(&broker, "10s", "30s");
    for n in 1..=10 {
        proxy(&broker).set(Mode::CutAfter { bytes: 0, of: Side::Server });
        write(&scene.database, 10, n * 100 - 98, n * 100 + 1);
        until("a connection was cut", || proxy(&broker).mode() == Mode::Pass);
    }
    scene.end_with(1_001);
}

/// The broker accepts what the relay has given up already.
#[test]
fn case_k3_what_is_accepted_after_the_timeout_comes_again_with_the_same_id() {
    let broker = proxied();
    let scene = Scene::set(&broker, "10s", "1s");
    proxy(&broker).set(Mode::Delay(Duration::from_millis(1_500)));
    let paused = scene.said("paused"); // 1 s may be too little for a busy machine
    write(&scene.database, 10, 2, 20);
    scene.until_said("paused", paused + 1);
    until("the late request is accepted", || scene.reader.there() >= 20);
    proxy(&broker).set(Mode::Pass);
    scene.until_settled();
    assert!(scene.reader.there() > 20, "it was sent again");
    scene.end_with(20);
}

/// Event 0 of a key, with a destination of its own; its id.
fn write_to(database: &str, key: &str, topic: &str) -> String {
    let sql = format!(
        "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload, destination) \
         VALUES ('order', '{key}', 'order.moved', '0', '{topic}') RETURNING event_id"
    );
    execute(database, &sql)[0][0].clone().unwrap()
}

#[test]
fn case_o6_events_flow_while_four_hundred_topics_are_missing() {
    let (topic, broker) = (topic_name(), Kafka::shared());
    broker.create_topic(&topic, 3, &[]).unwrap();
    let patient = "retry = { base = \"50ms\", pause_max = \"500ms\", attempts_max = 1000 }";
    let (folder, database) = to_topic(&broker.bootstrap(), &topic, patient, "");
    let missing = format!(
        "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload, destination) \
         SELECT 'order', 'm' || n, 'order.moved', '0', '{topic}-missing-' || n FROM generate_series(1, 400) n"
    );
    execute(&database, &missing);
    write(&database, 100, 1, 10_000);
    let relay = folder.leading_relay();
    let mut reader = Reader::new(&broker.bootstrap(), &topic);
    reader.until_in_order(10_000);
    execute(&database, &missing); // of keys that are in trouble
    write(&database, 100, 10_001, 20_000);
    reader.until_in_order(20_000);
    until("what cannot be sent is held", || {
        let status = main_status(&folder);
        (&status["pending"], &status["retry"], &status["waiting"]) == (&0.into(), &400.into(), &400.into())
    });
    let named = "SELECT count(*) FROM postbox.held h JOIN postbox.outbox o ON o.id = h.id \
                 WHERE h.state = 'retry' AND h.attempts > 0 AND h.error LIKE '%--topic ' || o.destination || ' %'";
    assert_eq!(execute(&database, named)[0][0].as_deref(), Some("400"), "each error names its topic");
    assert_eq!(reader.there(), 20_000);
    relay.stop();
}

#[test]
fn case_o1_a_poisoned_key_waits_alone_among_a_thousand() {
    let (topic, missing, broker) = (topic_name(), topic_name(), Kafka::shared());
    broker.create_topic(&topic, 3, &[]).unwrap();
    let patient = "retry = { base = \"50ms\", pause_max = \"500ms\", attempts_max = 1000 }";
    let (folder, database) = to_topic(&broker.bootstrap(), &topic, patient, "");
    let id = write_to(&database, "a0", &missing);
    write(&database, 1_000, 1, 20_000);
    let relay = folder.leading_relay();
    let mut reader = Reader::new(&broker.bootstrap(), &topic);
    reader.until_in_order(999 * 20);
    write(&database, 1_000, 20_001, 22_000); // written when the key is known to be in trouble
    reader.until_in_order(999 * 22);
    until("the key's events wait", || main_status(&folder)["waiting"] == 22);
    assert_eq!(main_status(&folder)["retry"], 1);
    assert_eq!(reader.there(), 999 * 22, "none of the key has gone");
    broker.create_topic(&missing, 3, &[]).unwrap();
    reader.until_in_order(22_000);
    Reader::new(&broker.bootstrap(), &missing).until_in_order(1);
    until("all is settled", || main_status(&folder)["pending"] == 0);
    assert_eq!(folder.json(&["trace", &id, "--json"])[0]["state"], "published");
    relay.stop();
}

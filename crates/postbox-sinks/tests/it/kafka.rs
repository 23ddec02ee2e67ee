use crate::consumer::{check_order, plaintext, read_all};
use crate::{DEADLINE, kinds, message, parts, routed, within};
use futures_util::stream::{FuturesUnordered, StreamExt};
use postbox_engine::{Envelope, Message, SendErrorKind, Sink};
use postbox_sinks::kafka::{KafkaConfig, KafkaSink};
use postbox_testkit::services::{Kafka, KafkaOptions, free_port};
use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

fn sink_with(bootstrap: &str, more: &str) -> KafkaSink {
    let config: KafkaConfig = serde_json::from_str(&format!(r#"{{"brokers": "{bootstrap}"{more}}}"#)).unwrap();
    KafkaSink::new(&config).unwrap()
}

pub(crate) fn sink(bootstrap: &str) -> KafkaSink {
    sink_with(bootstrap, "")
}

/// A fresh topic on the shared broker.
pub(crate) fn topic(partitions: u32, settings: &[(&str, &str)]) -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("t{}", NEXT.fetch_add(1, SeqCst));
    Kafka::shared().create_topic(&name, partitions, settings).unwrap();
    name
}

fn seen(topic: &str, partitions: i32) -> Vec<crate::consumer::Seen> {
    read_all(&plaintext(&Kafka::shared().bootstrap()), topic, partitions)
}

/// What the relay does with a sink that keeps the order, in small: batches in flight side by side; on anything but
/// success a key's later messages go again after the one that was not accepted. Returns the numbers of those that
/// were refused for good. `after` is told how many are done.
async fn pump(
    sink: &KafkaSink,
    mut waiting: VecDeque<Message>,
    batch: usize,
    mut after: impl FnMut(usize),
) -> BTreeSet<i64> {
    let deadline = Instant::now() + DEADLINE * 2;
    let (mut refused, mut done) = (BTreeSet::new(), 0);
    let mut flying = FuturesUnordered::new();
    let mut again: Vec<Message> = Vec::new();
    loop {
        assert!(Instant::now() < deadline, "{} left", waiting.len() + again.len());
        if flying.is_empty() && !again.is_empty() {
            again.sort_by_key(|m| m.event.id());
            again.drain(..).rev().for_each(|m| waiting.push_front(m));
        }
        while again.is_empty() && flying.len() < sink.limits().in_flight_max && !waiting.is_empty() {
            let messages: Vec<Message> = waiting.drain(..batch.min(waiting.len())).collect();
            let mut send = Box::pin(async move {
                let outcomes = sink.send(&messages).await;
                (messages, outcomes)
            });
            // The first poll is the call, and calls are made in order.
            match futures_util::poll!(&mut send) {
                std::task::Poll::Ready(result) => {
                    flying.push(futures_util::future::Either::Left(std::future::ready(result)))
                }
                std::task::Poll::Pending => flying.push(futures_util::future::Either::Right(send)),
            }
        }
        let Some((messages, outcomes)) = within(flying.next()).await else { return refused };
        for (message, outcome) in messages.into_iter().zip(outcomes) {
            match outcome.map_err(|e| e.kind) {
                Ok(()) => done += 1,
                Err(SendErrorKind::Rejected) => drop(refused.insert(message.event.id())),
                Err(_) => again.push(message),
            }
        }
        after(done);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_partition_is_that_of_java_clients() {
    // Apache Kafka, UtilsTest.testMurmur2.
    const JAVA: [(&str, i32); 7] = [
        ("", 275_646_681), // empty is a key, too: its events stay together
        ("21", -973_932_308),
        ("foobar", -790_332_482),
        ("a-little-bit-long-string", -985_981_536),
        ("a-little-bit-longer-string", -1_486_304_829),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
        ("abc", 479_470_107),
    ];
    let topic = topic(7, &[]);
    let batch: Vec<_> = JAVA.iter().zip(0..).map(|((key, _), n)| message(&topic, n, key, b"{}")).collect();
    assert!(within(sink(&Kafka::shared().bootstrap()).send(&batch)).await.iter().all(Result::is_ok));
    let seen = seen(&topic, 7);
    assert_eq!(seen.len(), JAVA.len());
    for message in seen {
        let (_, hash) = JAVA[message.number() as usize];
        assert_eq!(message.partition, (hash & 0x7fff_ffff) % 7);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_k10_keys_payloads_and_headers_arrive_as_they_are() {
    let topic = topic(1, &[]);
    let headers =
        r#"{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01","x":"1","x":"","u":"zürich\n"}"#;
    let batch = [
        routed(
            &topic,
            Envelope::Plain,
            &postbox_engine::EventParts { headers, ..parts(0, "k", Some(b"{\"n\": 9007199254740993}")) },
        ),
        message(&topic, 1, "", b""),
        routed(&topic, Envelope::Plain, &parts(2, "k", None)),
        message(&topic, 3, "ключ\u{0}", &[0, 255, 254]),
        routed(&topic, Envelope::CloudEventsBinary, &parts(4, "k", Some(b"1"))),
        routed(&topic, Envelope::CloudEventsStructured, &parts(5, "k", Some(b"1"))),
        routed(&topic, Envelope::CloudEventsBinary, &parts(6, "k", None)),
        routed(&topic, Envelope::CloudEventsStructured, &parts(7, "k", None)),
    ];
    assert!(within(sink(&Kafka::shared().bootstrap()).send(&batch)).await.iter().all(Result::is_ok));
    let seen = seen(&topic, 1);
    let payloads: Vec<_> = seen.iter().map(|m| m.payload.as_deref()).collect();
    assert_eq!(
        payloads[..4],
        [Some(&b"{\"n\": 9007199254740993}"[..]), Some(&b""[..]), None, Some(&[0, 255, 254][..])]
    );
    assert_eq!(payloads[6], None);
    let document = std::str::from_utf8(payloads[7].unwrap()).unwrap();
    assert!(document.starts_with("{\"specversion\"") && !document.contains("\"data\""), "{document}");
    let keys: Vec<_> = seen.iter().map(|m| m.key.as_deref().unwrap()).collect();
    assert_eq!(keys[..4], [&b"k"[..], b"", b"k", "ключ\u{0}".as_bytes()]);
    let names: Vec<_> = seen[0].headers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["event_id", "event_type", "aggregate_type", "traceparent", "x", "x", "u"]);
    assert_eq!(seen[0].headers[5].1, b"");
    assert_eq!(seen[0].headers[6].1, "zürich\n".as_bytes());
    assert_eq!(seen[4].header("ce_id"), Some(&b"00000000-0000-0000-0000-000000000004"[..]));
    assert_eq!(seen[4].header("content-type"), Some(&b"application/json"[..]));
    assert_eq!(seen[5].header("content-type"), Some(&b"application/cloudevents+json"[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn case_k10_a_message_over_the_limit_is_refused_before_it_is_sent_and_its_neighbours_go() {
    let topic = topic(1, &[]);
    let sink = sink_with(&Kafka::shared().bootstrap(), r#", "message_bytes_max": 10000"#);
    // Search the greatest payload that goes: one byte more is refused, and nothing in between is lost.
    let (mut fits, mut too_large) = (9_000, 10_000);
    let mut number = 0;
    while too_large - fits > 1 {
        let middle = (fits + too_large) / 2;
        let batch = [
            message(&topic, number, "k", b"before"),
            message(&topic, number + 1, "k", &vec![b'x'; middle]),
            message(&topic, number + 2, "j", b"after"),
        ];
        number += 3;
        let outcomes = within(sink.send(&batch)).await;
        match kinds(&outcomes)[..] {
            [None, None, None] => fits = middle,
            [None, Some(SendErrorKind::Rejected), None] => {
                let text = outcomes[1].clone().unwrap_err().message;
                assert!(text.contains("message_bytes_max") && text.contains(&topic), "{text}");
                too_large = middle;
            }
            ref other => panic!("{other:?}"),
        }
    }
    let lengths: Vec<_> = seen(&topic, 1).iter().map(|m| m.payload.as_ref().unwrap().len()).collect();
    assert!(lengths.contains(&fits) && !lengths.contains(&too_large));
    assert!(lengths.iter().all(|length| *length < too_large));
}

/// Also not from a batch that was called before the first one's answer.
#[tokio::test(flavor = "multi_thread")]
async fn case_o5_nothing_behind_a_message_refused_here_is_sent_before_the_relay_knows() {
    use SendErrorKind::{Behind, Rejected};
    let topic = topic(1, &[]);
    let sink = sink_with(&Kafka::shared().bootstrap(), r#", "message_bytes_max": 10000"#);
    let small = |n, key| message(&topic, n, key, b"1");
    let first = [small(0, "k"), message(&topic, 1, "k", &[b'x'; 20_000]), small(2, "k"), small(3, "j")];
    let second = [small(4, "k"), small(5, "j")];
    let (first, second) = within(async { tokio::join!(sink.send(&first), sink.send(&second)) }).await;
    assert_eq!(kinds(&first), [None, Some(Rejected), Some(Behind), None]);
    assert_eq!(kinds(&second), [Some(Behind), None]);
    assert_eq!(kinds(&within(sink.send(&[small(6, "k")])).await), [None], "the relay knows by now");
    assert_eq!(seen(&topic, 1).iter().map(super::consumer::Seen::number).collect::<Vec<_>>(), [0, 3, 5, 6]);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o6_a_missing_topic_is_its_events_fault_only() {
    let there = topic(1, &[]);
    let missing = format!("{there}-missing");
    let sink = sink(&Kafka::shared().bootstrap());
    let batch = [
        message(&there, 0, "a", b"1"),
        message(&missing, 1, "b", b"2"),
        message("not a name", 2, "c", b"3"),
        message(&there, 3, "b", b"4"),
    ];
    let outcomes = within(sink.send(&batch)).await;
    use SendErrorKind::{Behind, Failed, Rejected};
    assert_eq!(kinds(&outcomes), [None, Some(Failed), Some(Rejected), Some(Behind)]);
    let text = outcomes[1].clone().unwrap_err().message;
    assert!(
        text.contains(&format!(
            "kafka-topics --bootstrap-server {} --create --topic {missing}",
            Kafka::shared().bootstrap()
        )),
        "{text}"
    );
    let wrong = within(sink.check_topics(&[&there, &missing, ".."])).await.unwrap();
    assert_eq!(wrong.len(), 2);
    assert!(wrong[0].contains("kafka-topics") && wrong[1].contains("correct the stream's routes"), "{wrong:?}");

    Kafka::shared().create_topic(&missing, 1, &[]).unwrap();
    let deadline = Instant::now() + DEADLINE;
    while within(sink.send(&batch[1..2])).await[0].is_err() {
        assert!(Instant::now() < deadline, "the topic is there now");
        tokio::task::yield_now().await;
    }
    assert_eq!(seen(&missing, 1).len(), 1);
}

/// They are asked for together: one after another, each with its pauses, they would take three minutes and more.
#[tokio::test(flavor = "multi_thread")]
async fn case_o6_hundreds_of_missing_topics_do_not_hold_the_others_up() {
    use SendErrorKind::Failed;
    let there = topic(1, &[]);
    let sink = sink(&Kafka::shared().bootstrap());
    let missing = |n: u32| message(&format!("{there}-missing-{n}"), n, &format!("k{n}"), b"1");
    let batch: Vec<_> = (1..=400).map(missing).chain([message(&there, 0, "good", b"1")]).collect();
    let outcomes = within(sink.send(&batch)).await;
    let (good, refused) = outcomes.split_last().unwrap();
    assert_eq!(kinds(std::slice::from_ref(good)), [None]);
    for (outcome, n) in refused.iter().zip(1..) {
        let error = outcome.clone().unwrap_err();
        assert_eq!(error.kind, Failed);
        assert!(error.message.contains(&format!("--create --topic {there}-missing-{n} ")), "{}", error.message);
    }
    assert_eq!(seen(&there, 1).len(), 1);
}

/// Where brokers make topics by themselves, the first event costs no attempt.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_may_make_the_topic_when_it_is_named_first() {
    let extra = vec![("auto.create.topics.enable".into(), "true".into())];
    let kafka = Kafka::start_with(&KafkaOptions { extra, ..KafkaOptions::default() }).unwrap();
    let sink = sink(&kafka.bootstrap());
    let batch = [message("made", 0, "k", b"1"), message("made-too", 1, "k", b"1")];
    assert_eq!(kinds(&within(sink.send(&batch)).await), [None, None]);
    assert_eq!(read_all(&plaintext(&kafka.bootstrap()), "made", 3).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_batch_does_not_linger() {
    let topic = topic(1, &[]);
    // Lingering would take 200 s in all. (A batch lingers after all when its flush ended before there was a connection.)
    let sink = sink_with(&Kafka::shared().bootstrap(), r#", "options": {"linger.ms": "10000"}"#);
    let one_after_another = async {
        for n in 0..20 {
            assert_eq!(kinds(&sink.send(&[message(&topic, n, "k", b"1")]).await), [None]);
        }
    };
    within(one_after_another).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_than_librdkafka_queues_waits_and_keeps_its_order() {
    let topic = topic(2, &[]);
    let sink = sink(&Kafka::shared().bootstrap());
    let payload = vec![b'x'; 500_000];
    // 60 MB in flight through a queue of 16.
    let messages: VecDeque<_> = (0..120).map(|n| message(&topic, n, &format!("k{}", n % 3), &payload)).collect();
    assert!(pump(&sink, messages, 15, |_| ()).await.is_empty());
    let seen = seen(&topic, 2);
    assert_eq!((seen.len(), check_order(&seen)), (120, 0));
}

/// The topic takes 2 kB at most and brokers refuse a whole batch, so its neighbours share an offender's refusal.
/// What a consumer sees: everything but the offender, each key's first deliveries in order.
#[tokio::test(flavor = "multi_thread")]
async fn case_o5_the_head_is_refused_while_the_rest_of_its_key_is_in_flight() {
    let topic = topic(2, &[("max.message.bytes", "2000")]);
    let sink = sink(&Kafka::shared().bootstrap());
    let small = [b'x'; 20];
    let size = |n: u32| if n == 0 || n == 777 { vec![b'x'; 5_000] } else { small.to_vec() };
    let messages: VecDeque<_> = (0..1_500).map(|n| message(&topic, n, &format!("k{}", n % 3), &size(n))).collect();
    let refused = pump(&sink, messages, 4, |_| ()).await;
    assert_eq!(refused, BTreeSet::from([0, 777]));
    let seen = seen(&topic, 2);
    check_order(&seen);
    let numbers: BTreeSet<u32> = seen.iter().map(super::consumer::Seen::number).collect();
    assert_eq!(numbers, (1..1_500).filter(|n| *n != 777).collect());
}

/// No event is too large here, only batches are: none may die for it, and in the end batches fit.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_takes_less_than_a_batch_costs_no_event() {
    let topic = topic(4, &[("max.message.bytes", "300000")]);
    let sink = sink(&Kafka::shared().bootstrap());
    let payload = [b'x'; 400];
    let messages: VecDeque<_> = (0..40_000).map(|n| message(&topic, n, &format!("k{}", n % 40), &payload)).collect();
    assert!(pump(&sink, messages, 2_000, |_| ()).await.is_empty());
    let seen = seen(&topic, 4);
    let again = check_order(&seen);
    assert_eq!(seen.len() - again, 40_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_k1_an_outage_is_nobodys_fault_and_says_what_to_do() {
    let bootstrap = format!("127.0.0.1:{}", free_port().unwrap());
    let sink = sink(&bootstrap);
    let outcomes = within(sink.send(&[message("t", 0, "a", b"1"), message("t", 1, "b", b"2")])).await;
    assert_eq!(kinds(&outcomes), [Some(SendErrorKind::Unavailable); 2]);
    for error in [outcomes[0].clone().unwrap_err(), within(sink.check()).await.unwrap_err()] {
        let text = error.to_string();
        assert!(
            text.contains(&bootstrap) && text.contains("Connection refused") && text.contains("is it running"),
            "{text}"
        );
    }
    assert!(within(super::kafka::sink(&Kafka::shared().bootstrap()).check()).await.is_ok());
}

/// Nothing is lost, nothing overtakes, through a crash and a restart in the middle of a stream.
#[tokio::test(flavor = "multi_thread")]
async fn case_k4_a_broker_that_crashes_and_comes_back() {
    let mut kafka = Kafka::start().unwrap();
    kafka.create_topic("t", 3, &[]).unwrap();
    let bootstrap = kafka.bootstrap();
    let sink = sink(&bootstrap);
    let messages: VecDeque<_> = (0..60_000).map(|n| message("t", n, &format!("k{}", n % 50), b"0123456789")).collect();
    let mut crashed = None;
    let refused = pump(&sink, messages, 500, |done| {
        if done > 10_000 && crashed.is_none() {
            kafka.crash().unwrap();
            kafka.restart().unwrap();
            crashed = Some(done);
        }
    });
    assert!(refused.await.is_empty());
    assert!(crashed.is_some());
    let seen = read_all(&plaintext(&bootstrap), "t", 3);
    let again = check_order(&seen);
    assert_eq!(seen.len() - again, 60_000);
}

fn signal(kafka: &Kafka, name: &str) {
    let status = std::process::Command::new("kill").args([name, &kafka.pid().to_string()]).status().unwrap();
    assert!(status.success());
}

/// Stops the broker's threads, and returns when all of them stand still: a request sent before that may be answered.
fn halt(kafka: &Kafka) {
    signal(kafka, "-STOP");
    let deadline = Instant::now() + DEADLINE;
    let still = |stat: String| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'));
    let threads = || std::fs::read_dir(format!("/proc/{}/task", kafka.pid())).unwrap();
    while !threads().all(|task| std::fs::read_to_string(task.unwrap().path().join("stat")).is_ok_and(still)) {
        assert!(Instant::now() < deadline, "the broker does not stop");
        std::thread::yield_now();
    }
}

/// A broker that hangs, and a relay that gives a batch up: what was not on the wire is not sent any more, and what was
/// called behind it does not overtake it.
#[tokio::test(flavor = "multi_thread")]
async fn case_k2_a_batch_given_up_is_not_sent_later_and_nothing_overtakes_it() {
    let kafka = Kafka::start().unwrap();
    kafka.create_topic("t", 1, &[]).unwrap();
    let sink = sink(&kafka.bootstrap());
    assert_eq!(kinds(&within(sink.send(&[message("t", 0, "k", b"1")])).await), [None]);
    halt(&kafka);
    // Each as large as a request; five requests of a partition are on the wire at most.
    let large = vec![b'x'; 900_000];
    let batches: Vec<_> = (1..=14).map(|n| [message("t", n, "k", &large)]).collect();
    let mut sends: Vec<_> = batches.iter().map(|batch| Box::pin(sink.send(batch))).collect();
    for send in &mut sends {
        assert!(futures_util::poll!(send).is_pending());
    }
    let behind = sends.split_off(1);
    drop(sends);
    // Called before anybody knows what became of those behind the one that was given up.
    let later = [message("t", 15, "k", b"1")];
    let std::task::Poll::Ready(outcome) = futures_util::poll!(Box::pin(sink.send(&later))) else {
        panic!("it is on its way, past those")
    };
    assert_eq!(kinds(&outcome), [Some(SendErrorKind::Unavailable)]);
    signal(&kafka, "-CONT");
    for send in behind {
        let kind = kinds(&within(send).await)[0];
        assert!(matches!(kind, Some(SendErrorKind::Unavailable | SendErrorKind::Unknown)), "{kind:?}");
    }
    // Time enough for the abandoned ones to arrive, if they were still on their way.
    let other = super::kafka::sink(&kafka.bootstrap());
    for n in 100..120 {
        assert_eq!(kinds(&within(other.send(&[message("t", n, "other", &large)])).await), [None]);
    }
    assert_eq!(kinds(&within(sink.send(&[message("t", 16, "k", b"1")])).await), [None]);
    let seen = read_all(&plaintext(&kafka.bootstrap()), "t", 1);
    check_order(&seen);
    let numbers: Vec<u32> = seen.iter().map(super::consumer::Seen::number).filter(|n| *n < 100).collect();
    let on_the_wire = numbers.len() as u32 - 2;
    assert!(on_the_wire <= 6, "{numbers:?}");
    assert_eq!(numbers, (0..=on_the_wire).chain([16]).collect::<Vec<_>>());
}

/// A broker that takes long is no broker that is gone.
#[tokio::test(flavor = "multi_thread")]
async fn case_k2_a_slow_broker_is_waited_for() {
    let kafka = Kafka::start().unwrap();
    kafka.create_topic("t", 1, &[]).unwrap();
    let sink = sink(&kafka.bootstrap());
    assert_eq!(kinds(&within(sink.send(&[message("t", 0, "k", b"1")])).await), [None]);
    halt(&kafka);
    let batch = [message("t", 1, "k", b"1")];
    let mut send = Box::pin(sink.send(&batch));
    let early = tokio::time::timeout(Duration::from_secs(8), &mut send).await;
    signal(&kafka, "-CONT");
    assert!(early.is_err(), "{early:?}");
    assert_eq!(kinds(&within(send).await), [None]);
}

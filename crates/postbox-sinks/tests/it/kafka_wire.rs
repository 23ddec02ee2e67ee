//! What the Kafka sink asks brokers for, counted between the two, and when.

use crate::kafka::sink;
use crate::{kinds, message, within};
use postbox_engine::Sink;
use postbox_sinks::kafka::KafkaSink;
use postbox_testkit::services::{Api, Kafka, KafkaOptions, TcpProxy};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A broker behind a proxy. One test has it at a time: all that is sent is counted.
struct Counted(MutexGuard<'static, Kafka>);

impl Counted {
    fn broker() -> Counted {
        static BROKER: OnceLock<Mutex<Kafka>> = OnceLock::new();
        let start = || {
            let kafka = Kafka::start_with(&KafkaOptions { proxied: true, ..KafkaOptions::default() }).unwrap();
            kafka.create_topic("t", 1, &[]).unwrap();
            Mutex::new(kafka)
        };
        Counted(BROKER.get_or_init(start).lock().unwrap_or_else(PoisonError::into_inner))
    }
    fn proxy(&self) -> &TcpProxy {
        self.0.proxy().unwrap()
    }
    fn asked(&self, api: Api) -> usize {
        self.proxy().asked(api)
    }
    fn sink(&self) -> KafkaSink {
        sink(&self.0.bootstrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prepared_sink_has_its_producer_id_and_uses_it() {
    let counted = Counted::broker();
    // A new broker has no ids to give yet.
    assert_eq!(kinds(&within(counted.sink().send(&[message("t", 0, "k", b"1")])).await), [None]);
    let (sink, ids) = (counted.sink(), counted.asked(Api::InitProducerId));
    sink.prepare();
    let asked = async {
        while counted.asked(Api::InitProducerId) == ids {
            tokio::task::yield_now().await;
        }
    };
    within(asked).await;
    assert_eq!(kinds(&within(sink.send(&[message("t", 1, "k", b"1")])).await), [None]);
    assert_eq!(counted.asked(Api::InitProducerId), ids + 1);
}

/// Left to itself, librdkafka lets about every tenth wait for half a second before it asks for its producer id.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_send_of_a_sink_does_not_wait_for_librdkafkas_timer() {
    let topic = crate::kafka::topic(1, &[]);
    let mut slow = Vec::new();
    // A busy machine may be slow now and then, but not each time.
    while slow.len() < 5 && slow.last() != Some(&0) {
        let mut took = Vec::new();
        for n in 0..60 {
            let (sink, began) = (sink(&Kafka::shared().bootstrap()), Instant::now());
            assert_eq!(kinds(&within(sink.send(&[message(&topic, n, "k", b"1")])).await), [None]);
            took.push(began.elapsed());
        }
        let timer = *took.iter().min().unwrap() + Duration::from_millis(450);
        slow.push(took.iter().filter(|took| **took > timer).count());
    }
    println!("slow ones of sixty: {slow:?}");
    assert_eq!(slow.last(), Some(&0));
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o6_the_topics_of_a_batch_are_looked_up_together() {
    let counted = Counted::broker();
    let sink = counted.sink();
    assert_eq!(kinds(&within(sink.send(&[message("t", 0, "k", b"1")])).await), [None]);
    let before = counted.asked(Api::Metadata);
    let batch: Vec<_> = (1..=400).map(|n| message(&format!("missing-{n}"), n, &format!("k{n}"), b"1")).collect();
    assert!(within(sink.send(&batch)).await.iter().all(Result::is_err));
    let asked = counted.asked(Api::Metadata) - before;
    println!("{asked} requests for 400 missing topics");
    assert!((1..=100).contains(&asked), "{asked} requests");
}

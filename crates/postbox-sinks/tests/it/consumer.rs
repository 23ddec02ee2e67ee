//! What a consumer of Kafka sees.

use crate::DEADLINE;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, Message};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

pub(crate) struct Seen {
    pub(crate) partition: i32,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) payload: Option<Vec<u8>>,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
}

impl Seen {
    pub(crate) fn header(&self, name: &str) -> Option<&[u8]> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_slice())
    }
    /// The event's number, from its id.
    pub(crate) fn number(&self) -> u32 {
        let id = std::str::from_utf8(self.header("event_id").expect("an event id")).unwrap();
        u32::from_str_radix(&id[id.len() - 8..], 16).unwrap()
    }
}

/// Reads a topic from its beginning to its end, as it is now.
pub(crate) fn read_all(client: &ClientConfig, topic: &str, partitions: i32) -> Vec<Seen> {
    let consumer: BaseConsumer =
        client.clone().set("group.id", "reader").set("enable.auto.commit", "false").create().unwrap();
    let deadline = Instant::now() + DEADLINE;
    let mut list = TopicPartitionList::new();
    let mut left: HashMap<i32, i64> = HashMap::new();
    for partition in 0..partitions {
        let (low, high) = consumer.fetch_watermarks(topic, partition, DEADLINE).unwrap();
        list.add_partition_offset(topic, partition, Offset::Beginning).unwrap();
        if high > low {
            left.insert(partition, high);
        }
    }
    consumer.assign(&list).unwrap();
    let mut seen = Vec::new();
    while !left.is_empty() {
        assert!(Instant::now() < deadline, "the end of the topic is not reached: {left:?}");
        let Some(message) = consumer.poll(Duration::from_millis(100)) else { continue };
        let message = message.unwrap();
        if left.get(&message.partition()).is_some_and(|high| message.offset() + 1 >= *high) {
            left.remove(&message.partition());
        }
        let headers = message.headers().into_iter().flat_map(|headers| headers.iter());
        seen.push(Seen {
            partition: message.partition(),
            key: message.key().map(<[u8]>::to_vec),
            payload: message.payload().map(<[u8]>::to_vec),
            headers: headers.map(|h| (h.key.to_owned(), h.value.unwrap_or_default().to_vec())).collect(),
        });
    }
    seen
}

pub(crate) fn plaintext(bootstrap: &str) -> ClientConfig {
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", bootstrap);
    client
}

/// How often a message came again, after checking that the first deliveries of each key came in order.
pub(crate) fn check_order(seen: &[Seen]) -> usize {
    let mut last: HashMap<&[u8], u32> = HashMap::new();
    let mut known = HashSet::new();
    for message in seen {
        let number = message.number();
        if known.insert(number) {
            let last = last.insert(message.key.as_deref().expect("a key"), number);
            assert!(last.is_none_or(|last| last < number), "{number} came first after {last:?} of the same key");
        }
    }
    seen.len() - known.len()
}

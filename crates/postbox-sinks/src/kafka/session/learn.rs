//! Asks brokers about the topics of a batch before any of it is sent: all of them in one request, however many are
//! missing, since the calls behind wait for their turn meanwhile.

use super::{Client, OUTAGE, Session};
use crate::kafka::produce;
use crate::kafka::topics::{self, Known};
use postbox_engine::{Message, SendError};
use rdkafka::bindings as native;
use rdkafka::error::{IsError, KafkaError, KafkaResult};
use rdkafka::producer::Producer;
use rdkafka::types::RDKafkaErrorCode as Code;
use std::collections::HashMap;
use std::ffi::CStr;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::Duration;

/// A broker that makes topics by itself makes one when it is asked for the first time, within moments.
const REQUESTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(100);

impl Session {
    /// Asks brokers about topics that nothing is known of, or that were refused a while ago.
    ///
    /// # Errors
    /// No broker answers; the session has ended then.
    pub(in crate::kafka) async fn learn_topics(&self, batch: &[Message]) -> Result<(), SendError> {
        if self.has_ended() {
            return Ok(()); // `hand_over` answers
        }
        let shared = &self.shared;
        let mut open = self.to_ask_for(batch);
        let mut requests = 0;
        while !open.is_empty() {
            let names: Vec<Arc<str>> = open.keys().cloned().collect();
            let answers = self.ask(move |producer| look_up(producer, &names)).await?;
            requests += 1;
            open.retain(|topic, new| {
                match answers.get(&**topic).copied().unwrap_or(Some(Code::UnknownTopicOrPartition)) {
                    None | Some(Code::LeaderNotAvailable) => shared.topics.open(topic),
                    Some(Code::UnknownTopicOrPartition) if *new && requests < REQUESTS => return true,
                    Some(Code::UnknownTopicOrPartition) => shared.topics.refuse(topic, &shared.place.missing(topic)),
                    Some(code) => shared.topics.refuse(topic, &shared.place.answer(code, topic, true, None).0.message),
                }
                false
            });
            if !open.is_empty() {
                tokio::time::sleep(PAUSE).await;
            }
        }
        Ok(())
    }

    /// The topics of a batch that brokers must be asked for, and whether it is for the first time.
    fn to_ask_for(&self, batch: &[Message]) -> HashMap<Arc<str>, bool> {
        let mut open = HashMap::new();
        let mut last: Option<&Arc<str>> = None;
        for topic in batch.iter().map(|message| &message.destination) {
            // Messages of one topic come in runs.
            if last.replace(topic).is_some_and(|last| Arc::ptr_eq(last, topic)) || topics::check_name(topic).is_err() {
                continue;
            }
            match self.shared.topics.look(topic) {
                Known::Open | Known::Refused { old: false, .. } => {}
                Known::Refused { old: true, .. } => drop(open.insert(topic.clone(), false)),
                Known::Unknown => drop(open.insert(topic.clone(), true)),
            }
        }
        open
    }
}

/// What brokers say of these topics, and of others that the producer knows. The crate rdkafka asks for one or for all.
/// That all are listed would not do: brokers make no topic then, and are silent about one that we may not write to.
#[allow(unsafe_code)] // see above
fn look_up(producer: &Client, names: &[Arc<str>]) -> KafkaResult<HashMap<String, Option<Code>>> {
    // The request is for every topic that the producer knows; it knows these for as long as they live.
    let known: Vec<_> = names.iter().filter_map(|name| produce::Topic::new(producer, name).ok()).collect();
    let timeout = i32::try_from(OUTAGE.as_millis()).unwrap_or(i32::MAX);
    let mut answer = null();
    // SAFETY: the producer lives as long as its borrow. An answer without error is a list of so many topics with names
    // that end in zero; it is ours until it is given back, after everything was copied.
    let topics = unsafe {
        let error = native::rd_kafka_metadata(producer.client().native_ptr(), 0, null_mut(), &raw mut answer, timeout);
        if error.is_error() {
            return Err(KafkaError::MetadataFetch(error.into()));
        }
        let count = usize::try_from((*answer).topic_cnt).unwrap_or_default();
        let topics = (0..count).map(|n| {
            let topic = &*(*answer).topics.add(n);
            let name = CStr::from_ptr(topic.topic).to_string_lossy().into_owned();
            (name, topic.err.is_error().then(|| topic.err.into()))
        });
        let topics = topics.collect();
        native::rd_kafka_metadata_destroy(answer);
        topics
    };
    drop(known);
    Ok(topics)
}

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
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A broker that makes topics by itself makes one when it is asked for the first time, within moments.
const REQUESTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(100);
const MOMENTS: Duration = Duration::from_secs(2);
/// Longer than any request of librdkafka's may take (a minute).
const DOUBLINGS_MAX: u32 = 4;

/// Whether to ask once more for a topic that is said to be missing. Not where answers take seconds: a call that looks up
/// for longer than the relay's `send_timeout` is given up, and the next one would begin all over.
fn may_ask_again(requests: u32, since_the_first: Duration) -> bool {
    requests < REQUESTS && since_the_first < MOMENTS
}

/// How long an answer is waited for: a thread waits as long, whatever happens meanwhile, so it is five seconds at first. A
/// broker that is connected and slower gets twice the time with the next session, or there would never be one.
#[derive(Default)]
pub(in crate::kafka) struct Patience(AtomicU32);

impl Patience {
    pub(super) fn timeout(&self) -> Duration {
        OUTAGE * (1 << self.0.load(Relaxed))
    }
    pub(super) fn timed_out(&self, given: Duration) {
        let doublings = self.0.load(Relaxed);
        if given == OUTAGE * (1 << doublings) {
            // Whoever comes second finds another value: one generation doubles it once.
            let _ = self.0.compare_exchange(doublings, (doublings + 1).min(DOUBLINGS_MAX), Relaxed, Relaxed);
        }
    }
    pub(super) fn answered(&self, took: Duration) {
        if took < OUTAGE / 2 {
            self.0.store(0, Relaxed);
        }
    }
}

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
        let (began, mut requests) = (Instant::now(), 0);
        while !open.is_empty() {
            let names: Vec<Arc<str>> = open.keys().cloned().collect();
            let answers = self.ask(move |producer, timeout| look_up(producer, &names, timeout)).await?;
            requests += 1;
            let again = may_ask_again(requests, began.elapsed());
            open.retain(|topic, new| {
                match answers.get(&**topic).copied().unwrap_or(Some(Code::UnknownTopicOrPartition)) {
                    None | Some(Code::LeaderNotAvailable) => shared.topics.open(topic),
                    Some(Code::UnknownTopicOrPartition) if *new && again => return true,
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

/// Asks who the brokers are, twice, which gets the producer its id. librdkafka asks for one when it hears of the brokers,
/// if it is connected to one of them then, or else half a second later. The first answer comes from the address in the
/// configuration, and that connection ends with it; the second comes from a broker.
pub(super) fn greet(producer: &Client) {
    let ask = || look_up(producer, &[], OUTAGE);
    let _ = ask().and_then(|_| ask()); // `send` will say what is wrong
}

/// What brokers say of these topics, and of others that the producer knows. The crate rdkafka asks for one or for all.
/// That all are listed would not do: brokers make no topic then, and are silent about one that we may not write to.
#[allow(unsafe_code)] // see above
fn look_up(producer: &Client, names: &[Arc<str>], timeout: Duration) -> KafkaResult<HashMap<String, Option<Code>>> {
    // The request is for every topic that the producer knows; it knows these for as long as they live.
    let known: Vec<_> = names.iter().filter_map(|name| produce::Topic::new(producer, name).ok()).collect();
    let timeout = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// How long topics are looked up that stay missing, where each answer takes so long.
    fn takes(answer: Duration) -> Duration {
        let (mut requests, mut elapsed) = (1, answer);
        while may_ask_again(requests, elapsed) {
            (requests, elapsed) = (requests + 1, elapsed + PAUSE + answer);
        }
        elapsed
    }

    #[test]
    fn answers_are_waited_for_twice_as_long_after_each_that_did_not_come() {
        let patience = Patience::default();
        let mut given = [Duration::ZERO; 6];
        for given in &mut given {
            *given = patience.timeout();
            patience.timed_out(*given);
            patience.timed_out(*given); // another one that was asked meanwhile
            patience.answered(OUTAGE); // slow, but in time
        }
        assert_eq!(given.map(|given| given.as_secs()), [5, 10, 20, 40, 80, 80]);
        patience.answered(Duration::from_secs(1));
        assert_eq!(patience.timeout(), OUTAGE);
    }

    #[test]
    fn case_k2_a_slow_broker_is_not_asked_until_the_call_is_given_up() {
        assert_eq!(takes(Duration::from_millis(1)), 5 * Duration::from_millis(1) + 4 * PAUSE);
        for millis in 1..5_000 {
            let (answer, takes) = (Duration::from_millis(millis), takes(Duration::from_millis(millis)));
            assert!(takes < answer + MOMENTS + PAUSE + answer.min(MOMENTS), "{takes:?} with answers of {answer:?}");
        }
        assert_eq!(takes(Duration::from_secs(4)), Duration::from_secs(4));
    }
}

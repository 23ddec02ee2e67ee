//! One producer's life. It keeps the promise of order: once it left any message unaccepted for another reason than
//! that message, it takes nothing more, and the next session begins only after everybody has learnt of that.

mod learn;

pub(super) use learn::Patience;

use super::answer::{Also, Place};
use super::batch::{Batches, Ticket};
use super::config::{Batching, LINGER_MS};
use super::produce;
use super::topics::{self, Known, Topics};
use postbox_engine::{Message, SendError, SendErrorKind};
use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::Message as _;
use rdkafka::metadata::Metadata;
use rdkafka::producer::{DeliveryResult, Producer, ProducerContext, PurgeConfig, ThreadedProducer};
use rdkafka::types::RDKafkaErrorCode as Code;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// No broker for this long: the batches in flight are answered for. Long enough for a restart, which then goes
/// unnoticed; shorter than the usual `send_timeout`, so that people learn why.
const OUTAGE: Duration = Duration::from_secs(5);
/// After the session ended, requests on the wire may still be answered for this long.
const GRACE: Duration = Duration::from_secs(2);
/// Messages sent one by one before the batch's size itself is blamed: as many as librdkafka puts into one batch.
const SINGLES_MAX: usize = 10_000;
/// With so many messages on their way nothing is gained by sending at once.
const BUSY: usize = 1_000;
/// Smaller batches than this help no topic.
const BATCH_BYTES_MIN: usize = 16 << 10;

type Client = ThreadedProducer<Context>;

pub(super) struct Session {
    // Before `flusher`: that thread's reference is the last one, since ending a producer blocks for a while.
    producer: Arc<Client>,
    flusher: SyncSender<()>,
    shared: Arc<Shared>,
    batching: Batching,
    users: AtomicUsize,
    calls: AtomicU64,
    /// Keys of which a message was refused here, and up to which call the relay may not know of it yet: nothing
    /// behind it is sent so long. `None`: the refusal is still to be reported.
    refused: Mutex<HashMap<u64, Option<u64>>>,
    handed_over: AtomicUsize,
}

/// What librdkafka's threads and ours share.
struct Shared {
    batches: Arc<Batches>,
    topics: Arc<Topics>,
    place: Place,
    alone: bool,
    /// Locked while messages are handed over, so that nothing slips in behind the end.
    ended: Mutex<Option<Ended>>,
    /// No broker is connected: since when; and what the last one said.
    down: AtomicBool,
    trouble: Mutex<(Option<Instant>, String)>,
    batch_refused: AtomicBool,
    offender_found: AtomicBool,
}

#[derive(Clone)]
struct Ended {
    why: Arc<str>,
    at: Instant,
    purged: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    pub(super) fn new(
        config: &ClientConfig,
        batching: Batching,
        place: Place,
        topics: Arc<Topics>,
    ) -> KafkaResult<Session> {
        let shared = Arc::new(Shared {
            batches: Batches::new(),
            topics,
            place,
            alone: matches!(batching, Batching::Single { .. }),
            ended: Mutex::default(),
            down: AtomicBool::default(),
            trouble: Mutex::default(),
            batch_refused: AtomicBool::default(),
            offender_found: AtomicBool::default(),
        });
        let mut config = config.clone();
        batching.apply(&mut config);
        let producer: Arc<Client> = Arc::new(config.create_with_context(Context(shared.clone()))?);
        let (flusher, asked) = sync_channel(1);
        let flushed = producer.clone();
        std::thread::spawn(move || {
            learn::greet(&flushed);
            while asked.recv().is_ok() {
                flush(&flushed);
            }
        });
        let (users, calls, refused, handed_over) = Default::default();
        Ok(Session { producer, flusher, shared, batching, users, calls, refused, handed_over })
    }

    /// How the next session batches, given what this one met.
    pub(super) fn next_batching(&self) -> Batching {
        match self.batching {
            Batching::Full { bytes } if self.shared.batch_refused.load(SeqCst) => Batching::Single { bytes },
            Batching::Single { bytes } if self.shared.offender_found.load(SeqCst) => Batching::Full { bytes },
            Batching::Single { bytes } if self.handed_over.load(SeqCst) >= SINGLES_MAX => {
                let bytes = (bytes / 2).max(BATCH_BYTES_MIN);
                tracing::warn!(
                    bytes,
                    "a topic's max.message.bytes is below `batch_bytes_max`; using smaller batches until the next start"
                );
                Batching::Full { bytes }
            }
            same => same,
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        lock(&self.shared.ended).is_some()
    }
    pub(super) fn users(&self) -> &AtomicUsize {
        &self.users
    }
    /// The number of a new call.
    pub(super) fn call(&self) -> u64 {
        self.calls.fetch_add(1, SeqCst)
    }

    /// The relay is told of its call's refusals now: calls from now on know them.
    pub(super) fn told(&self, batch: &[Message]) {
        let mut refused = lock(&self.refused);
        if !refused.is_empty() {
            let last = self.calls.load(SeqCst).saturating_sub(1);
            for message in batch {
                if let Some(until @ None) = refused.get_mut(&message.event.key()) {
                    *until = Some(last);
                }
            }
        }
    }

    /// A place for a batch.
    pub(super) async fn open(&self, messages: usize) -> Ticket {
        self.shared.batches.clone().open(messages).await
    }

    /// Takes nothing more, and drops what is on its way.
    pub(super) fn give_up(&self, why: &str) {
        self.shared.end(why);
        self.purge();
    }

    fn purge(&self) {
        if let Some(ended) = &mut *lock(&self.shared.ended) {
            ended.purged = true;
        }
        self.producer.purge(PurgeConfig::default().queue().inflight().non_blocking());
    }

    /// To be called now and then while batches are in flight: nobody waits for ever for a broker that is gone.
    pub(super) fn watch(&self, since: Instant) {
        let ended = lock(&self.shared.ended).clone();
        match ended {
            Some(ended) if !ended.purged && ended.at.elapsed() > GRACE => self.purge(),
            Some(_) => {}
            None => {
                let trouble = lock(&self.shared.trouble).clone();
                if let (Some(down), last) = trouble
                    && down.max(since).elapsed() > OUTAGE
                {
                    self.give_up(&self.shared.place.unreachable(&last));
                }
            }
        }
    }

    /// Hands messages over, from the given one on, until the queue is full; returns the first one that is left.
    pub(super) fn hand_over(&self, call: u64, batch: &[Message], from: usize, ticket: &mut Ticket) -> usize {
        let shared = &self.shared;
        let mut topic = Topic { name: None, refused: None, native: None };
        let mut refused = lock(&self.refused);
        refused.retain(|_, until| until.is_none_or(|until| until >= call));
        let mut ended = lock(&shared.ended);
        for (n, message) in batch.iter().enumerate().skip(from) {
            if let Some(ended) = &*ended {
                ticket.fail(n, SendError::new(SendErrorKind::Unavailable, format!("not sent: {}", ended.why)));
                continue;
            }
            if !refused.is_empty() && refused.contains_key(&message.event.key()) {
                ticket.fail(n, SendError::new(SendErrorKind::Behind, "behind a refused message of its key"));
                continue;
            }
            let produced = match topic.turn_to(message, shared) {
                Some(error) => Err(error),
                None => match topic.produce(&self.producer, message, ticket.opaque(n)) {
                    Ok(()) => Ok(()),
                    Err(Code::QueueFull) => return n,
                    Err(Code::MessageSizeTooLarge) => Err(too_large(message)),
                    Err(code) => Err(shared.answer(code, &message.destination, None)),
                },
            };
            match produced {
                Ok(()) => ticket.handed_over(),
                Err(error) => {
                    if matches!(error.kind, SendErrorKind::Unavailable | SendErrorKind::Unknown) {
                        *ended = Some(Ended::now(&error.message));
                    } else {
                        refused.insert(message.event.key(), None);
                    }
                    ticket.fail(n, error);
                }
            }
        }
        let handed_over = self.handed_over.fetch_add(batch.len() - from, SeqCst) + batch.len() - from;
        if shared.alone && handed_over >= SINGLES_MAX && ended.is_none() {
            *ended = Some(Ended::now("no single message was at fault; batches again"));
        }
        batch.len()
    }

    /// Sends what lingers, soon and without blocking; but not while so much is on its way that batches fill quickly,
    /// since as long as it lasts, nothing lingers and every batch is small.
    pub(super) fn hurry(&self) {
        if self.shared.batches.open_messages() < BUSY {
            let _ = self.flusher.try_send(()); // one that is asked for already will do
        }
    }

    /// What brokers say of all topics.
    ///
    /// # Errors
    /// No broker answers; the session has ended then.
    pub(super) async fn metadata(&self) -> Result<Metadata, SendError> {
        self.ask(|producer, timeout| producer.client().fetch_metadata(None, timeout)).await
    }

    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Client, Duration) -> KafkaResult<T> + Send + 'static,
    ) -> Result<T, SendError> {
        let (producer, began) = (self.producer.clone(), Instant::now());
        let timeout = self.shared.topics.patience.timeout();
        // A thread of its own: a runtime that ends would wait for a task that blocks.
        let (tell, told) = oneshot::channel();
        std::thread::spawn(move || drop(tell.send(question(&producer, timeout))));
        let answer = told.await.map_err(|e| e.to_string()).and_then(|m| m.map_err(|e| e.to_string()));
        let connected = lock(&self.shared.trouble).0.is_none();
        match &answer {
            Ok(_) => self.shared.topics.patience.answered(began.elapsed()),
            Err(_) if connected => self.shared.topics.patience.timed_out(timeout),
            Err(_) => {}
        }
        answer.map_err(|error| {
            let last = lock(&self.shared.trouble).1.clone();
            let why = self.shared.place.unreachable(if last.is_empty() { &error } else { &last });
            self.give_up(&why);
            SendError::new(SendErrorKind::Unavailable, why)
        })
    }
}

/// The topic of the message in hand: messages of one topic come in runs.
struct Topic<'a> {
    name: Option<&'a Arc<str>>,
    refused: Option<SendError>,
    native: Option<produce::Topic<'a>>,
}

impl<'a> Topic<'a> {
    fn turn_to(&mut self, message: &'a Message, shared: &Shared) -> Option<SendError> {
        if !self.name.is_some_and(|name| Arc::ptr_eq(name, &message.destination)) {
            (self.name, self.native) = (Some(&message.destination), None);
            self.refused = match (topics::check_name(&message.destination), shared.topics.look(&message.destination)) {
                (Err(why), _) => Some(SendError::new(SendErrorKind::Rejected, why)),
                (Ok(()), Known::Refused { why, .. }) => Some(SendError::new(SendErrorKind::Failed, &*why)),
                (Ok(()), Known::Open | Known::Unknown) => None,
            };
        }
        self.refused.clone()
    }

    fn produce(&mut self, producer: &'a Client, message: &Message, opaque: usize) -> Result<(), Code> {
        let topic = match &mut self.native {
            Some(topic) => topic,
            none => none.insert(produce::Topic::new(producer, &message.destination)?),
        };
        topic.produce(message, opaque)
    }
}

fn too_large(message: &Message) -> SendError {
    let text = format!(
        "the message of about {} bytes is over the sink's `message_bytes_max`; raise it and topic {}'s max.message.bytes, \
         and send the event again as docs/guide/mending.md says",
        message.bytes(),
        message.destination
    );
    SendError::new(SendErrorKind::Rejected, text)
}

/// librdkafka sends without lingering while a flush waits. Waits as long as lingering would have taken.
#[allow(unsafe_code)] // rdkafka's own flush polls for reports, which another thread does here, and ends at once
fn flush(producer: &Client) {
    let millis = LINGER_MS.parse::<i32>().expect("a number of milliseconds") + 1;
    // SAFETY: the producer, and so its handle, lives as long as this borrow; flush may be called from any thread.
    unsafe { rdkafka::bindings::rd_kafka_flush(producer.client().native_ptr(), millis) };
}

impl Ended {
    fn now(why: &str) -> Ended {
        Ended { why: why.into(), at: Instant::now(), purged: false }
    }
}

impl Shared {
    fn end(&self, why: &str) {
        let mut ended = lock(&self.ended);
        if ended.is_none() {
            tracing::debug!(why, "the Kafka session ends");
            *ended = Some(Ended::now(why));
        }
    }

    fn answer(&self, code: Code, topic: &str, ended: Option<&str>) -> SendError {
        let (error, also) = self.place.answer(code, topic, self.alone, ended);
        match also {
            Also::Nothing if error.kind == SendErrorKind::Rejected => self.offender_found.store(true, SeqCst),
            Also::Nothing => {}
            Also::TopicRefused => self.topics.refuse(topic, &error.message),
            Also::Isolate => self.batch_refused.store(true, SeqCst),
        }
        error
    }
}

/// Called by librdkafka's threads. Must not block.
pub(super) struct Context(Arc<Shared>);

impl ClientContext for Context {
    fn log(&self, _: RDKafkaLogLevel, facility: &str, message: &str) {
        // Whatever matters comes back as an outcome too.
        tracing::debug!(target: "librdkafka", facility, "{message}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let shared = &self.0;
        match error.rdkafka_error_code() {
            Some(Code::Fatal) => shared.end(reason),
            Some(Code::AllBrokersDown) => {
                lock(&shared.trouble).0.get_or_insert_with(Instant::now);
                shared.down.store(true, SeqCst);
            }
            _ => lock(&shared.trouble).1 = reason.to_owned(),
        }
    }
}

impl ProducerContext for Context {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, opaque: usize) {
        let shared = &self.0;
        let outcome = match result {
            Ok(_) => {
                if shared.down.load(Relaxed) {
                    shared.down.store(false, SeqCst);
                    *lock(&shared.trouble) = (None, String::new());
                }
                Ok(())
            }
            Err((error, message)) => {
                let code = error.rdkafka_error_code().unwrap_or(Code::Fail);
                let why = lock(&shared.ended).as_ref().map(|ended| ended.why.clone());
                let mut error = shared.answer(code, message.topic(), why.as_deref());
                if error.kind == SendErrorKind::Rejected {
                    error.message += &format!("; its body has {} bytes", message.payload_len());
                }
                if matches!(error.kind, SendErrorKind::Unavailable | SendErrorKind::Unknown) {
                    shared.end(&error.message);
                }
                Err(error)
            }
        };
        shared.batches.report(opaque, outcome);
    }
}

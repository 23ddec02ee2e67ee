//! The Kafka sink. Each call of `send` takes its place in the order at once, waits for its turn, hands its messages
//! to librdkafka, and waits for the reports. `session.rs` has the promise of order, `answer.rs` the meaning of errors.

mod answer;
mod batch;
mod config;
mod produce;
mod session;
mod topics;

pub use config::{KafkaConfig, Mechanism, Security};

use crate::BuildError;
use answer::Place;
use config::Batching;
use postbox_engine::{Limits, Message, SendError, SendErrorKind, Sink};
use rdkafka::ClientConfig;
use rdkafka::metadata::Metadata;
use session::Session;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use topics::Topics;

const LIMITS: Limits = Limits { batch_max: 2_000, bytes_max: 1 << 20, in_flight_max: 8, keeps_key_order: true };
/// How often a batch in flight looks whether its broker is gone.
const WATCH: Duration = Duration::from_millis(500);
/// librdkafka's queue is full: at full speed it has room again about this much later.
const QUEUE_PAUSE: Duration = Duration::from_millis(2);

/// How often, and how far apart, brokers are asked before a topic is called missing.
const CHECKS: u32 = 5;
const CHECK_PAUSE: Duration = Duration::from_millis(200);

/// Sends events to Kafka.
pub struct KafkaSink {
    client: ClientConfig,
    warning: Option<String>,
    place: Place,
    topics: Arc<Topics>,
    state: Mutex<State>,
}

struct State {
    session: Option<Arc<Session>>,
    batching: Batching,
    /// Resolves when the call made last has handed all its messages over, or ended.
    last_turn: oneshot::Receiver<()>,
}

impl KafkaSink {
    /// # Errors
    /// An option that cannot be used, or a file that cannot be read.
    pub fn new(config: &KafkaConfig) -> Result<KafkaSink, BuildError> {
        let (_, last_turn) = oneshot::channel();
        let batching = Batching::Full { bytes: config.batch_bytes_max };
        Ok(KafkaSink {
            client: config.client()?,
            warning: config.warning(),
            place: Place { brokers: config.brokers.clone(), principal: config.principal() },
            topics: Arc::default(),
            state: Mutex::new(State { session: None, batching, last_turn }),
        })
    }

    /// Takes a place in the order.
    fn enter(&self) -> Result<Call, SendError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let seat = self.seat(&mut state)?;
        let (turn, last_turn) = oneshot::channel();
        let before = std::mem::replace(&mut state.last_turn, last_turn);
        Ok(Call { number: seat.session.call(), seat, before, turn })
    }

    /// Brokers are asked without a place in the order.
    async fn metadata(&self) -> Result<Metadata, SendError> {
        let seat = self.seat(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))?;
        let metadata = seat.session.metadata().await;
        seat.finish();
        metadata
    }

    fn seat(&self, state: &mut State) -> Result<Seat, SendError> {
        let session = self.session(state)?;
        session.users().fetch_add(1, SeqCst);
        Ok(Seat { session, finished: false })
    }

    fn session(&self, state: &mut State) -> Result<Arc<Session>, SendError> {
        // A session that ended is replaced only when all that used it know: whoever calls before that may hold
        // events that must not overtake those that were left.
        if let Some(session) = state.session.take_if(|s| s.has_ended() && s.users().load(SeqCst) == 0) {
            state.batching = session.next_batching();
        }
        Ok(match &state.session {
            Some(session) => session.clone(),
            None => {
                let made = Session::new(&self.client, state.batching, self.place.clone(), self.topics.clone());
                let made = Arc::new(made.map_err(|e| SendError::new(SendErrorKind::Unavailable, e.to_string()))?);
                state.session.insert(made).clone()
            }
        })
    }

    /// What the configuration states and its operator may regret.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// Why this can be no topic.
    pub fn unusable(topic: &str) -> Option<String> {
        topics::check_name(topic).err()
    }

    /// Why no topic can have this text in its name.
    pub fn unusable_part(text: &str) -> Option<String> {
        topics::check_part(text).err()
    }

    /// What is wrong with topics that are known before any event is.
    ///
    /// # Errors
    /// No broker answers.
    pub async fn check_topics(&self, names: &[&str]) -> Result<Vec<String>, SendError> {
        let mut tries = 0;
        loop {
            let metadata = self.metadata().await?;
            let wrong = |name: &&str| match topics::check_name(name) {
                Err(why) => Some(why),
                Ok(()) if metadata.topics().iter().any(|topic| topic.name() == *name) => None,
                Ok(()) => Some(self.place.missing(name)),
            };
            let found: Vec<String> = names.iter().filter_map(wrong).collect();
            tries += 1;
            // A topic that was made a moment ago is not known to every broker yet.
            if found.is_empty() || tries == CHECKS {
                return Ok(found);
            }
            tokio::time::sleep(CHECK_PAUSE).await;
        }
    }
}

impl Sink for KafkaSink {
    fn limits(&self) -> Limits {
        LIMITS
    }

    fn prepare(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.session(&mut state); // `send` will say why not
    }

    fn send(&self, batch: &[Message]) -> impl Future<Output = Vec<Result<(), SendError>>> + Send {
        let call = self.enter();
        async move {
            match call {
                Ok(call) => call.send(batch).await,
                Err(error) => batch.iter().map(|_| Err(error.clone())).collect(),
            }
        }
    }

    async fn check(&self) -> Result<(), SendError> {
        self.metadata().await.map(drop)
    }
}

/// One call of `send`.
struct Call {
    number: u64,
    seat: Seat,
    /// Errs when that call ended without its turn; it has given the session up then.
    before: oneshot::Receiver<()>,
    turn: oneshot::Sender<()>,
}

impl Call {
    async fn send(self, batch: &[Message]) -> Vec<Result<(), SendError>> {
        // The seat last, to be dropped first: when this call is dropped, whoever gets the turn finds the session ended.
        let Call { number, before, turn, seat } = self;
        let session = &seat.session;
        let _ = before.await;
        if let Err(error) = session.learn_topics(batch).await {
            seat.finish();
            return batch.iter().map(|_| Err(error.clone())).collect();
        }
        let started = Instant::now();
        let mut ticket = session.open(batch.len()).await;
        let mut next = 0;
        loop {
            next = session.hand_over(number, batch, next, &mut ticket);
            if next == batch.len() {
                break;
            }
            session.watch(started);
            tokio::time::sleep(QUEUE_PAUSE).await;
        }
        session.hurry();
        drop(turn);
        while tokio::time::timeout(WATCH, ticket.reports()).await.is_err() {
            session.watch(started);
        }
        session.told(batch);
        seat.finish();
        ticket.outcomes()
    }
}

/// Somebody who uses a session. Dropped before it is finished, it gives the session up, so that nothing is sent any
/// more.
struct Seat {
    session: Arc<Session>,
    finished: bool,
}

impl Seat {
    fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if !self.finished {
            self.session.give_up("the relay gave a batch up");
        }
        self.session.users().fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::Pin;
    use std::sync::atomic::AtomicBool;
    use std::task::{Context, Wake, Waker};

    /// What a successor on another thread would find as soon as it has the turn.
    struct Successor {
        session: Arc<Session>,
        found_the_end: AtomicBool,
    }

    impl Wake for Successor {
        fn wake(self: Arc<Self>) {
            self.found_the_end.store(self.session.has_ended(), SeqCst);
        }
    }

    #[test]
    fn case_k2_the_session_ends_before_a_dropped_call_passes_its_turn_on() {
        let config: KafkaConfig = serde_json::from_str(r#"{"brokers": "127.0.0.1:1"}"#).unwrap();
        let sink = KafkaSink::new(&config).unwrap();
        let (_first, second, mut third) = (sink.enter().unwrap(), sink.enter().unwrap(), sink.enter().unwrap());
        let successor =
            Arc::new(Successor { session: third.seat.session.clone(), found_the_end: AtomicBool::default() });
        let waker = Waker::from(successor.clone());
        assert!(Pin::new(&mut third.before).poll(&mut Context::from_waker(&waker)).is_pending());
        let mut second = Box::pin(second.send(&[]));
        assert!(second.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(second);
        assert!(successor.found_the_end.load(SeqCst));
    }
}

//! The sink suite on a destination in memory: it passes, and a sink with a bug does not.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod planted;

use postbox_engine::{Limits, Message, SendError, SendErrorKind, Sink};
use postbox_testkit::sink_suite::{Destination, Harness, Nature, Received};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    LosesOne,
    ForgetsAnOutcome,
    Reverses,
    SendsTwice,
    TombstoneIsEmpty,
    BodyIsTrimmed,
    HeaderIsLost,
    LargeBlamesAll,
    GoesOnBehind,
    SuccessWhileDown,
    BlamesWhileDown,
    MissingIsOutage,
    CheckSends,
}

struct Memory {
    bug: Option<Bug>,
    keeps_key_order: bool,
}

#[derive(Default)]
struct Place {
    received: Mutex<Vec<Received>>,
    arrived: Notify,
    down: AtomicBool,
}

struct MemoryDestination {
    bug: Option<Bug>,
    keeps_key_order: bool,
    place: Arc<Place>,
}

struct MemorySink {
    bug: Option<Bug>,
    keeps_key_order: bool,
    place: Arc<Place>,
    turn: tokio::sync::Mutex<()>,
}

const BODY_MAX: usize = 3000;

impl Harness for Memory {
    type Destination = MemoryDestination;
    async fn destination(&self) -> MemoryDestination {
        MemoryDestination { bug: self.bug, keeps_key_order: self.keeps_key_order, place: Arc::default() }
    }
}

impl Destination for MemoryDestination {
    type Sink = MemorySink;

    fn nature(&self) -> Nature {
        Nature {
            body_bytes_max: Some(BODY_MAX),
            tombstone: None,
            any_header: true,
            keyed: true,
            outage: true,
            missing: Some("nowhere".into()),
        }
    }
    fn name(&self) -> String {
        "here".into()
    }
    async fn sink(&self) -> MemorySink {
        let (bug, keeps_key_order) = (self.bug, self.keeps_key_order);
        MemorySink { bug, keeps_key_order, place: self.place.clone(), turn: tokio::sync::Mutex::default() }
    }
    async fn received(&self, at_least: usize) -> Vec<Received> {
        loop {
            let arrived = self.place.arrived.notified();
            let received = self.place.received.lock().unwrap().clone();
            if received.len() >= at_least {
                return received;
            }
            arrived.await;
        }
    }
    async fn down(&self) {
        self.place.down.store(true, SeqCst);
    }
    async fn up(&self) {
        self.place.down.store(false, SeqCst);
    }
    async fn complaints(&self, _: &MemorySink, name: &str) -> Option<Vec<String>> {
        Some(if name == "here" { Vec::new() } else { vec![format!("{name} is missing")] })
    }
}

impl MemorySink {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn take(&self, message: &Message) {
        let mut body = message.body().map(<[u8]>::to_vec);
        if self.has(Bug::TombstoneIsEmpty) {
            body.get_or_insert_default();
        }
        if self.has(Bug::BodyIsTrimmed) {
            body = body.map(|b| b.iter().copied().filter(|b| *b != b' ').collect());
        }
        let skipped = usize::from(self.has(Bug::HeaderIsLost));
        let headers = message.headers.iter().skip(skipped).map(|(n, v)| (n.to_owned(), v.to_vec())).collect();
        let key = message.event.aggregate_id().to_owned();
        let received = Received { event_id: message.event.event_id(), key, body, headers };
        let mut all = self.place.received.lock().unwrap();
        match self.bug {
            Some(Bug::LosesOne) if all.len() == 2 => {}
            Some(Bug::Reverses) => all.insert(0, received),
            Some(Bug::SendsTwice) => all.extend([received.clone(), received]),
            _ => all.push(received),
        }
        drop(all);
        self.place.arrived.notify_waiters();
    }

    fn send_one(&self, message: &Message) -> Result<(), SendError> {
        let size = message.body().map_or(0, <[u8]>::len);
        if self.place.down.load(SeqCst) && !self.has(Bug::SuccessWhileDown) {
            let kind = if self.has(Bug::BlamesWhileDown) { SendErrorKind::Failed } else { SendErrorKind::Unavailable };
            return Err(SendError::new(kind, "memory is down"));
        }
        if size > BODY_MAX {
            return Err(SendError::new(SendErrorKind::Rejected, format!("{size} bytes, at most {BODY_MAX}")));
        }
        if &*message.destination != "here" {
            let outage = self.has(Bug::MissingIsOutage);
            let kind = if outage { SendErrorKind::Unavailable } else { SendErrorKind::Failed };
            return Err(SendError::new(kind, format!("there is no {}", message.destination)));
        }
        self.take(message);
        Ok(())
    }
}

impl Sink for MemorySink {
    fn limits(&self) -> Limits {
        Limits { batch_max: 7, bytes_max: 9000, in_flight_max: 3, keeps_key_order: self.keeps_key_order }
    }

    async fn send(&self, batch: &[Message]) -> Vec<Result<(), SendError>> {
        let _turn = self.turn.lock().await; // fair, so that calls keep their order
        let (mut outcomes, mut refused) = (Vec::new(), std::collections::HashSet::new());
        for message in batch {
            let key = message.event.key();
            let outcome = if self.keeps_key_order && refused.contains(&key) && !self.has(Bug::GoesOnBehind) {
                Err(SendError::new(SendErrorKind::Behind, "behind a refused message"))
            } else {
                self.send_one(message)
            };
            if matches!(&outcome, Err(e) if matches!(e.kind, SendErrorKind::Rejected | SendErrorKind::Failed)) {
                refused.insert(key);
            }
            outcomes.push(outcome);
            tokio::task::yield_now().await; // where it can be dropped
        }
        if self.has(Bug::ForgetsAnOutcome) {
            outcomes.pop();
        }
        if self.has(Bug::LargeBlamesAll) && outcomes.iter().any(Result::is_err) {
            outcomes.fill(Err(SendError::new(SendErrorKind::Rejected, "one of 4 is too large")));
        }
        outcomes
    }

    async fn check(&self) -> Result<(), SendError> {
        if self.place.down.load(SeqCst) {
            return Err(SendError::new(SendErrorKind::Unavailable, "memory is down"));
        }
        if self.has(Bug::CheckSends) {
            self.take(&Message {
                event: postbox_engine::Event::new(&Default::default()),
                destination: "here".into(),
                headers: Default::default(),
                body: None,
            });
        }
        Ok(())
    }
}

mod in_key_order {
    postbox_testkit::sink_suite!(super::Memory { bug: None, keeps_key_order: true });
}
mod one_of_a_key_at_a_time {
    postbox_testkit::sink_suite!(super::Memory { bug: None, keeps_key_order: false });
}

planted::planted! {
    sink_suite, |bug| Memory { bug: Some(bug), keeps_key_order: true };
    a_lost_message: LosesOne is caught by each_message_has_its_outcome_and_arrives_once_in_order as "acknowledged is there"
    a_missing_outcome: ForgetsAnOutcome is caught by each_message_has_its_outcome_and_arrives_once_in_order as "one outcome per message"
    a_wrong_order: Reverses is caught by calls_keep_the_order_of_a_key as "order of first deliveries"
    a_double: SendsTwice is caught by each_message_has_its_outcome_and_arrives_once_in_order as "arrived 2 times"
    an_emptied_tombstone: TombstoneIsEmpty is caught by a_tombstone_is_not_an_empty_body as "left"
    a_trimmed_body: BodyIsTrimmed is caught by bodies_arrive_byte_for_byte as "left"
    a_lost_header: HeaderIsLost is caught by headers_arrive_or_are_refused_with_their_message as "tenant_id"
    a_blamed_neighbour: LargeBlamesAll is caught by too_large_a_message_is_rejected_alone as "beside a large one"
    a_message_sent_behind_a_refused_one: GoesOnBehind is caught by too_large_a_message_is_rejected_alone as "nothing overtakes"
    success_while_down: SuccessWhileDown is caught by an_outage_is_never_success_and_loses_nothing as "nobody is there"
    blame_while_down: BlamesWhileDown is caught by an_outage_is_never_success_and_loses_nothing as "not the event's fault"
    a_missing_topic_taken_for_an_outage: MissingIsOutage is caught by a_missing_destination_concerns_its_messages_only as "Unavailable"
    a_check_that_sends: CheckSends is caught by a_check_sends_no_message as "a check sent a message"
}

//! Which topics can be sent to, as far as brokers have told. A topic that cannot is its events' fault, not the
//! stream's: they are answered for here, and the others flow.

use super::session::Patience;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A refusal is believed for this long: soon enough after the topic is made, and no request an event.
const REFUSAL: Duration = Duration::from_secs(5);
/// Bounds memory where every event names a topic of its own. 249 characters a name: below 3 MB.
const TOPICS_MAX: usize = 10_000;

#[derive(Default)]
pub(super) struct Topics {
    known: Mutex<HashMap<Arc<str>, State>>,
    pub(super) patience: Patience,
}

#[derive(Clone)]
enum State {
    Open,
    Refused { since: Instant, why: Arc<str> },
}

/// What is known of a topic.
pub(super) enum Known {
    Open,
    /// `old`: brokers are to be asked again before the next message to it.
    Refused {
        why: Arc<str>,
        old: bool,
    },
    /// Never asked for, or so long ago that it is forgotten.
    Unknown,
}

impl Topics {
    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, State>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn look(&self, topic: &str) -> Known {
        match self.lock().get(topic) {
            None => Known::Unknown,
            Some(State::Open) => Known::Open,
            Some(State::Refused { since, why }) => Known::Refused { why: why.clone(), old: since.elapsed() >= REFUSAL },
        }
    }
    pub(super) fn open(&self, topic: &str) {
        self.set(topic, State::Open);
    }
    pub(super) fn refuse(&self, topic: &str, why: &str) {
        self.set(topic, State::Refused { since: Instant::now(), why: why.into() });
    }
    fn set(&self, topic: &str, state: State) {
        let mut topics = self.lock();
        if topics.len() >= TOPICS_MAX {
            topics.clear(); // correct in any case: brokers are asked again
        }
        topics.insert(topic.into(), state);
    }
}

const RULE: &str = "1 to 249 ASCII letters, digits, `.`, `_`, `-`";

/// Kafka's rule for names of topics.
pub(super) fn check_name(topic: &str) -> Result<(), String> {
    if topic.is_empty() || matches!(topic, "." | "..") || check_part(topic).is_err() {
        return Err(format!("{topic:?} cannot be the name of a topic ({RULE}); correct the stream's routes"));
    }
    Ok(())
}

/// The same for a part of a name.
pub(super) fn check_part(text: &str) -> Result<(), String> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if text.len() > 249 || !text.bytes().all(legal) {
        return Err(format!("{text:?} cannot be in the name of a topic ({RULE}); correct the stream's routes"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_kafkas_rule() {
        for good in ["a", "shop.order_placed-v1", &"x".repeat(249)] {
            check_name(good).unwrap();
        }
        for bad in ["", ".", "..", "a b", "ä", "a/b", "a\0", &"x".repeat(250)] {
            assert!(check_name(bad).unwrap_err().contains("correct the stream's routes"), "{bad}");
        }
        for part in ["", ".", "..", "shop.", &"x".repeat(249)] {
            check_part(part).unwrap();
        }
        for bad in [" ", "ä", "/", &"x".repeat(250)] {
            assert!(check_part(bad).unwrap_err().contains("correct the stream's routes"), "{bad}");
        }
    }

    #[test]
    fn an_old_refusal_is_one_until_brokers_say_otherwise() {
        let topics = Topics::default();
        assert!(matches!(topics.look("t"), Known::Unknown));
        topics.refuse("t", "missing");
        assert!(matches!(topics.look("t"), Known::Refused { old: false, .. }));
        let since = Instant::now().checked_sub(REFUSAL).unwrap();
        topics.set("t", State::Refused { since, why: "missing".into() });
        assert!(matches!(topics.look("t"), Known::Refused { old: true, .. }));
        topics.open("t");
        assert!(matches!(topics.look("t"), Known::Open));
    }

    #[test]
    fn memory_is_bounded() {
        let topics = Topics::default();
        for n in 0..3 * TOPICS_MAX {
            topics.open(&n.to_string());
        }
        assert!(topics.lock().len() <= TOPICS_MAX);
    }
}

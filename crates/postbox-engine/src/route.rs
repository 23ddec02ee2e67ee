//! Where an event goes and in what form: topic, headers, envelope. Pure; a bad event is an error of that event only.
//! Sits between lanes and sink. Runs once per event on the drain's hot path, so everything that can be is decided
//! when the route is made; it must never parse a payload on that path.

mod envelope;

use crate::{Event, Message};
use envelope::Texts;
use serde::Deserialize;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

/// The routes of a stream: the first rule that matches wins. An event's own destination wins over its rule's topic, unless
/// the rule says what becomes of it.
#[derive(Clone, Debug)]
pub struct Route {
    rules: Vec<Compiled>,
    names: Arc<Mutex<Names>>,
}

/// One rule. An absent pattern matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Matches the aggregate type: exact, or with `*` for any run of characters.
    #[serde(default)]
    pub aggregate_type: Option<String>,
    /// Matches the event type, likewise.
    #[serde(default)]
    pub event_type: Option<String>,
    /// Matches the event's own destination, likewise; an event without one is not matched.
    #[serde(default)]
    pub destination: Option<String>,
    /// Topic, with `{aggregate_type}`, `{event_type}` and `{destination}` filled in. An event's own destination
    /// replaces the whole topic, unless the rule matched it or the topic says with `{destination}` where it goes.
    pub topic: String,
    /// The form of the message.
    #[serde(default)]
    pub envelope: Envelope,
}

/// The form of the message. CloudEvents attributes stand in [`crate::Headers`] as `ce_*`, the media type as
/// `content-type`; a sink whose protocol spells them differently (HTTP: `ce-*`) maps them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Envelope {
    /// The payload as it is; the event's other fields as headers.
    #[default]
    #[serde(rename = "plain")]
    Plain,
    /// As `Plain`, and the event's id in the header `id` too: what consumers of Debezium's outbox event router read.
    #[serde(rename = "debezium")]
    Debezium,
    /// CloudEvents 1.0, binary mode: the payload as it is, `ce_*` headers.
    #[serde(rename = "cloudevents-binary")]
    CloudEventsBinary,
    /// CloudEvents 1.0, structured mode: one JSON document around the payload.
    #[serde(rename = "cloudevents-structured")]
    CloudEventsStructured,
}

/// Why an event cannot be routed, or a rule not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// No rule matches.
    #[error(
        "no route for aggregate type {aggregate_type:?}, event type {event_type:?}; add a rule to the stream's routes"
    )]
    NoRule {
        /// Of the event.
        aggregate_type: String,
        /// Of the event.
        event_type: String,
    },
    /// The rule's topic asks for a destination that the event does not have.
    #[error("topic {topic:?} needs the event's destination, and it has none; set `destination` when writing it")]
    NoDestination {
        /// As the rule has it.
        topic: String,
    },
    /// The source could not read the row.
    #[error("{0}")]
    Unreadable(String),
    /// The row's headers are no JSON object of strings, or a name cannot be used.
    #[error("headers are not usable: {0}")]
    BadHeaders(String),
    /// A rule's topic cannot be read. Found when the route is made, never by an event.
    #[error("topic {topic:?}: {reason}; known are {{aggregate_type}}, {{event_type}} and {{destination}}")]
    BadTopic {
        /// As the rule has it.
        topic: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl Route {
    /// # Errors
    /// `BadTopic` names the rule that cannot be used.
    ///
    /// ```
    /// use postbox_engine::{Event, EventParts, Route, Rule};
    /// let rule = Rule { topic: "shop.{aggregate_type}".into(), ..Rule::default() };
    /// let route = Route::new(vec![rule])?;
    /// let event = Event::new(&EventParts { aggregate_type: "order", ..Default::default() });
    /// assert_eq!(&*route.message(&event, false)?.destination, "shop.order");
    /// # Ok::<(), postbox_engine::RouteError>(())
    /// ```
    pub fn new(rules: Vec<Rule>) -> Result<Route, RouteError> {
        let rules = rules.into_iter().map(Compiled::new).collect::<Result<_, _>>()?;
        Ok(Route { rules, names: Arc::default() })
    }

    /// The message for an event.
    ///
    /// # Errors
    /// Each is about this event alone.
    pub fn message(&self, event: &Event, replay: bool) -> Result<Message, RouteError> {
        if let Some(reason) = event.unreadable() {
            return Err(RouteError::Unreadable(reason.to_owned()));
        }
        let texts = Texts::of(event);
        let rule = self.rules.iter().find(|rule| rule.matches(&texts, event.destination()));
        let destination = match (rule, event.destination()) {
            (Some(rule), own) if own.is_none() || rule.maps_destinations => match &rule.topic {
                Topic::Fixed(topic) => topic.clone(),
                Topic::Template { parts } => self.fill(parts, event, &texts)?,
            },
            (_, Some(own)) => self.names().intern(|name| name.push_str(own)),
            (_, None) => {
                let (aggregate_type, event_type) = (texts.aggregate_type.into(), texts.event_type.into());
                return Err(RouteError::NoRule { aggregate_type, event_type });
            }
        };
        let (headers, body) = match rule.map_or(Envelope::Plain, |rule| rule.envelope) {
            Envelope::Plain => (envelope::plain(event, &texts, replay)?, None),
            Envelope::Debezium => (envelope::debezium(event, &texts, replay)?, None),
            Envelope::CloudEventsBinary => (envelope::binary(event, &texts, replay)?, None),
            Envelope::CloudEventsStructured => envelope::structured(event, &texts, replay)?,
        };
        Ok(Message { event: event.clone(), destination, headers, body })
    }

    /// The topics that do not depend on the event, for checks before anything is sent.
    pub fn fixed_topics(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().filter_map(|rule| match &rule.topic {
            Topic::Fixed(topic) => Some(&**topic),
            Topic::Template { .. } => None,
        })
    }

    /// What each topic that depends on the event has in any case: its text without the placeholders. For the same checks.
    pub fn topic_texts(&self) -> impl Iterator<Item = String> {
        self.rules.iter().filter_map(|rule| match &rule.topic {
            Topic::Fixed(_) => None,
            Topic::Template { parts } => Some(parts.iter().filter_map(Part::fixed).collect()),
        })
    }

    /// Some topics do depend on the event.
    pub fn has_templates(&self) -> bool {
        self.rules.iter().any(|rule| matches!(rule.topic, Topic::Template { .. }))
    }

    fn fill(&self, parts: &[Part], event: &Event, texts: &Texts<'_>) -> Result<Arc<str>, RouteError> {
        if event.destination().is_none() && parts.contains(&Part::Destination) {
            return Err(RouteError::NoDestination { topic: parts.iter().map(Part::text).collect() });
        }
        Ok(self.names().intern(|name| {
            for part in parts {
                name.push_str(match part {
                    Part::Text(text) => text,
                    Part::AggregateType => texts.aggregate_type,
                    Part::EventType => texts.event_type,
                    Part::Destination => event.destination().unwrap_or_default(),
                });
            }
        }))
    }

    fn names(&self) -> std::sync::MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A rule, ready for use.
#[derive(Clone, Debug)]
struct Compiled {
    aggregate_type: Pattern,
    event_type: Pattern,
    /// `None`: no matter whether the event has one.
    destination: Option<Pattern>,
    /// The rule says where events go that have a destination of their own.
    maps_destinations: bool,
    topic: Topic,
    envelope: Envelope,
}

impl Compiled {
    fn new(rule: Rule) -> Result<Compiled, RouteError> {
        let topic = Topic::new(rule.topic)?;
        let filled_in = matches!(&topic, Topic::Template { parts } if parts.contains(&Part::Destination));
        Ok(Compiled {
            maps_destinations: rule.destination.is_some() || filled_in,
            aggregate_type: Pattern::new(rule.aggregate_type),
            event_type: Pattern::new(rule.event_type),
            destination: rule.destination.map(|pattern| Pattern::new(Some(pattern))),
            topic,
            envelope: rule.envelope,
        })
    }
    fn matches(&self, texts: &Texts<'_>, own: Option<&str>) -> bool {
        self.aggregate_type.matches(texts.aggregate_type)
            && self.event_type.matches(texts.event_type)
            && self.destination.as_ref().is_none_or(|pattern| own.is_some_and(|own| pattern.matches(own)))
    }
}

#[derive(Clone, Debug)]
enum Pattern {
    Any,
    Exact(String),
    /// The text before the first `*`, those between two, and the text after the last.
    Glob {
        first: String,
        middle: Vec<String>,
        last: String,
    },
}

impl Pattern {
    fn new(pattern: Option<String>) -> Pattern {
        let Some(pattern) = pattern else { return Pattern::Any };
        let mut parts = pattern.split('*').map(str::to_owned);
        let first = parts.next().unwrap_or_default();
        let mut middle: Vec<String> = parts.collect();
        match middle.pop() {
            None => Pattern::Exact(pattern),
            Some(last) if first.is_empty() && last.is_empty() && middle.is_empty() => Pattern::Any,
            Some(last) => Pattern::Glob { first, middle, last },
        }
    }

    fn matches(&self, text: &str) -> bool {
        match self {
            Pattern::Any => true,
            Pattern::Exact(exact) => exact == text,
            Pattern::Glob { first, middle, last } => {
                let rest = text.strip_prefix(first.as_str()).and_then(|rest| rest.strip_suffix(last.as_str()));
                // The leftmost place of each piece leaves the most room for the next.
                let skip = |rest: &'_ str, piece: &String| rest.find(piece.as_str()).map(|at| at + piece.len());
                rest.is_some_and(|mut rest| {
                    middle.iter().all(|piece| skip(rest, piece).map(|end| rest = &rest[end..]).is_some())
                })
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Topic {
    Fixed(Arc<str>),
    Template { parts: Vec<Part> },
}

#[derive(Clone, Debug, PartialEq)]
enum Part {
    Text(String),
    AggregateType,
    EventType,
    Destination,
}

impl Part {
    fn fixed(&self) -> Option<&str> {
        match self {
            Part::Text(text) => Some(text),
            Part::AggregateType | Part::EventType | Part::Destination => None,
        }
    }

    fn text(&self) -> &str {
        match self {
            Part::Text(text) => text,
            Part::AggregateType => "{aggregate_type}",
            Part::EventType => "{event_type}",
            Part::Destination => "{destination}",
        }
    }
}

impl Topic {
    fn new(topic: String) -> Result<Topic, RouteError> {
        let bad = |reason: String| RouteError::BadTopic { topic: topic.clone(), reason };
        if topic.is_empty() {
            return Err(bad("is empty".into()));
        }
        let (mut parts, mut rest) = (Vec::new(), topic.as_str());
        while let Some((text, tail)) = rest.split_once('{') {
            let (name, tail) = tail.split_once('}').ok_or_else(|| bad("a `{` without its `}`".into()))?;
            if !text.is_empty() {
                parts.push(Part::Text(text.to_owned()));
            }
            parts.push(match name {
                "aggregate_type" => Part::AggregateType,
                "event_type" => Part::EventType,
                "destination" => Part::Destination,
                other => return Err(bad(format!("unknown placeholder {{{other}}}"))),
            });
            rest = tail;
        }
        if parts.is_empty() {
            return Ok(Topic::Fixed(topic.into()));
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        Ok(Topic::Template { parts })
    }
}

/// Destinations seen lately, so that events of one destination share one string.
#[derive(Debug, Default)]
struct Names {
    buffer: String,
    known: HashSet<Arc<str>>,
}

/// More destinations than most streams have; at Kafka's 249 characters a name the cache stays below 300 kB.
const NAMES_MAX: usize = 1024;

impl Names {
    fn intern(&mut self, write: impl FnOnce(&mut String)) -> Arc<str> {
        self.buffer.clear();
        write(&mut self.buffer);
        if let Some(name) = self.known.get(self.buffer.as_str()) {
            return name.clone();
        }
        if self.known.len() >= NAMES_MAX {
            self.known.clear(); // correct in any case: it is only a cache
        }
        let name: Arc<str> = self.buffer.as_str().into();
        self.known.insert(name.clone());
        name
    }
}

#[cfg(test)]
mod tests;

//! Where an event goes and in what form: topic, headers, envelope. Pure; a bad event is an error of that event only.

use crate::{Event, Message};

/// The routes of a stream: the first rule that matches wins, an event's own destination wins over its rule's topic.
#[derive(Clone, Debug)]
pub struct Route {
    rules: Vec<Rule>,
}

/// One rule. An absent pattern matches all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Matches the aggregate type: exact, or with `*` for any run of characters.
    pub aggregate_type: Option<String>,
    /// Matches the event type, likewise.
    pub event_type: Option<String>,
    /// Topic, with `{aggregate_type}`, `{event_type}` and `{destination}` filled in.
    pub topic: String,
    pub envelope: Envelope,
}

/// The form of the message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Envelope {
    /// The payload as it is; the event's other fields as headers.
    #[default]
    Plain,
    /// CloudEvents 1.0, binary mode: the payload as it is, `ce_*` headers.
    CloudEventsBinary,
    /// CloudEvents 1.0, structured mode: one JSON document around the payload.
    CloudEventsStructured,
}

/// Why an event cannot be routed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// No rule matches.
    #[error(
        "no route for aggregate type {aggregate_type:?}, event type {event_type:?}; add a rule to the stream's routes"
    )]
    NoRule { aggregate_type: String, event_type: String },
    /// The row's headers are no JSON object of strings.
    #[error("headers are not a JSON object of strings: {0}")]
    BadHeaders(String),
}

impl Route {
    pub fn new(rules: Vec<Rule>) -> Route {
        Route { rules }
    }

    /// The message for an event.
    pub fn message(&self, event: &Event, replay: bool) -> Result<Message, RouteError> {
        let _ = (event, replay, &self.rules);
        Err(RouteError::NoRule { aggregate_type: event.aggregate_type().into(), event_type: event.event_type().into() })
    }
}

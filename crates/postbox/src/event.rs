//! An event as the application hands it over. What can be known to be wrong with it is an [`EventError`] before the
//! database is asked, so that the caller's transaction stays usable. The payload is never parsed for its meaning.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};
use uuid::Uuid;

/// Made when the event is born; travels to the broker and is what consumers deduplicate by.
pub type EventId = Uuid;

/// The greatest payload in bytes that is taken by default. Most brokers take 1 MiB, envelope and headers included: 16
/// KiB are left for these.
pub const PAYLOAD_BYTES_MAX: usize = 1_000_000 - 16 * 1024;

/// Names of headers that the relay writes itself, in any case of letters and with dashes for underscores too: an event that
/// brought its own would say two things about itself.
pub const HEADERS_RESERVED: [&str; 18] = [
    "event_id",
    "event_type",
    "aggregate_type",
    "content_type",
    "schema_version",
    "aggregate_seq",
    "replay",
    "tombstone",
    "ce_specversion",
    "ce_id",
    "ce_source",
    "ce_type",
    "ce_subject",
    "ce_time",
    "ce_datacontenttype",
    "ce_schemaversion",
    "ce_sequence",
    "ce_replay",
];

fn reserved(name: &str) -> bool {
    let own = name.to_ascii_lowercase().replace('-', "_");
    HEADERS_RESERVED.contains(&own.as_str())
}

/// An event to publish. Without a payload it is a tombstone.
///
/// ```
/// use postbox::Event;
/// let event = Event::new("order", "42", "order.placed").json(&[1, 2])?.header("tenant_id", "acme").aggregate_seq(7);
/// assert_eq!(event.id().get_version_num(), 7);
/// # Ok::<(), postbox::EventError>(())
/// ```
#[derive(Clone, PartialEq)]
pub struct Event {
    pub(crate) id: EventId,
    pub(crate) aggregate_type: String,
    pub(crate) aggregate_id: String,
    pub(crate) aggregate_seq: Option<i64>,
    pub(crate) event_type: String,
    pub(crate) schema_version: i32,
    pub(crate) payload: Option<String>,
    pub(crate) payload_binary: Option<Vec<u8>>,
    pub(crate) content_type: Option<String>,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) destination: Option<String>,
    pub(crate) available: Option<Available>,
    pub(crate) ordered: bool,
}

/// Not before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Available {
    At(SystemTime),
    /// From the database's now.
    After(Duration),
}

impl Event {
    /// What happened (`event_type`) to which aggregate. Events of one aggregate are delivered in commit order.
    pub fn new(
        aggregate_type: impl Into<String>,
        aggregate_id: impl Into<String>,
        event_type: impl Into<String>,
    ) -> Event {
        Event {
            id: Uuid::now_v7(),
            aggregate_type: aggregate_type.into(),
            aggregate_id: aggregate_id.into(),
            aggregate_seq: None,
            event_type: event_type.into(),
            schema_version: 1,
            payload: None,
            payload_binary: None,
            content_type: None,
            headers: BTreeMap::new(),
            destination: None,
            available: None,
            ordered: false,
        }
    }

    /// The id, from birth: the same each time this value is published.
    pub fn id(&self) -> EventId {
        self.id
    }
    /// The domain's own id instead of a new UUIDv7.
    pub fn with_id(mut self, id: EventId) -> Event {
        self.id = id;
        self
    }
    /// The payload: a value written as JSON.
    ///
    /// # Errors
    /// `Json`: the value cannot be written as JSON, such as a map whose keys are not strings.
    pub fn json(self, value: &(impl serde::Serialize + ?Sized)) -> Result<Event, EventError> {
        Ok(self.json_text(serde_json::to_string(value).map_err(EventError::Json)?))
    }
    /// The payload: JSON text, kept byte for byte.
    pub fn json_text(mut self, text: impl Into<String>) -> Event {
        self.payload = Some(text.into());
        self
    }
    /// The payload: bytes of any kind. Their content type is `application/octet-stream` unless it is set.
    pub fn binary(mut self, bytes: impl Into<Vec<u8>>) -> Event {
        self.payload_binary = Some(bytes.into());
        self
    }
    /// The media type of the payload.
    pub fn content_type(mut self, content_type: impl Into<String>) -> Event {
        self.content_type = Some(content_type.into());
        self
    }
    /// The aggregate's version after this event.
    pub fn aggregate_seq(mut self, seq: i64) -> Event {
        self.aggregate_seq = Some(seq);
        self
    }
    /// The version of the payload's schema; 1 unless set.
    pub fn schema_version(mut self, version: i32) -> Event {
        self.schema_version = version;
        self
    }
    /// A header: correlation id, traceparent, tenant. The same name again replaces the value. The names in
    /// [`HEADERS_RESERVED`] are refused when the event is published.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Event {
        self.headers.insert(name.into(), value.into());
        self
    }
    /// Overrides the configured route.
    pub fn destination(mut self, destination: impl Into<String>) -> Event {
        self.destination = Some(destination.into());
        self
    }
    /// Not to be delivered before.
    pub fn available_at(mut self, at: SystemTime) -> Event {
        self.available = Some(Available::At(at));
        self
    }
    /// Not to be delivered before this has passed from now, by the database's clock.
    pub fn available_after(mut self, delay: Duration) -> Event {
        self.available = Some(Available::After(delay));
        self
    }
    /// Takes the aggregate's lock before the event is written, and keeps it to the end of the transaction: the order
    /// of the aggregate's events is then that of the commits, without a row lock of the application's own.
    pub fn ordered(mut self) -> Event {
        self.ordered = true;
        self
    }

    /// Whether it can be published, as far as can be known without the database.
    ///
    /// # Errors
    /// The first thing wrong with it.
    pub fn check(&self, payload_bytes_max: usize) -> Result<(), EventError> {
        for (field, text) in [("aggregate type", &self.aggregate_type), ("event type", &self.event_type)] {
            if text.is_empty() {
                return Err(EventError::MissingName { field });
            }
        }
        if self.destination.as_ref().is_some_and(String::is_empty) {
            return Err(EventError::EmptyDestination);
        }
        self.check_text()?;
        let bytes = match (&self.payload, &self.payload_binary) {
            (Some(_), Some(_)) => return Err(EventError::TwoPayloads),
            (Some(text), None) => text.len(),
            (None, Some(bytes)) => bytes.len(),
            (None, None) => 0,
        };
        if bytes > payload_bytes_max {
            return Err(EventError::PayloadTooLarge { bytes, bytes_max: payload_bytes_max });
        }
        if let Some(text) = &self.payload {
            // A raw value is scanned, not built: numbers out of range and lone surrogates are nobody's business here.
            serde_json::from_str::<&serde_json::value::RawValue>(text).map_err(EventError::Json)?;
        }
        for (name, value) in &self.headers {
            check_header(name, value)?;
        }
        self.available_micros().map(drop)
    }

    fn check_text(&self) -> Result<(), EventError> {
        let fields = [
            ("aggregate type", Some(&self.aggregate_type)),
            ("aggregate id", Some(&self.aggregate_id)),
            ("event type", Some(&self.event_type)),
            ("destination", self.destination.as_ref()),
        ];
        for (field, text) in fields {
            if text.is_some_and(|text| text.contains('\0')) {
                return Err(EventError::ZeroByte { field });
            }
        }
        if self.content_type.as_ref().is_some_and(|text| text.is_empty() || text.contains(char::is_control)) {
            return Err(EventError::ContentType);
        }
        Ok(())
    }

    /// The headers as a JSON object.
    pub(crate) fn headers_json(&self) -> String {
        serde_json::to_string(&self.headers).expect("a map of strings is JSON")
    }

    /// Microseconds, and whether they count from the database's now rather than from 1970.
    pub(crate) fn available_micros(&self) -> Result<(Option<i64>, bool), EventError> {
        let (after, relative) = match self.available {
            None => return Ok((None, false)),
            Some(Available::After(delay)) => (delay, true),
            // What was available before 1970 is available.
            Some(Available::At(at)) => (at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(), false),
        };
        match i64::try_from(after.as_micros()) {
            Ok(micros) if after <= AVAILABLE_MAX => Ok((Some(micros), relative)),
            _ => Err(EventError::AvailableTooLate),
        }
    }
}

impl std::fmt::Debug for Event {
    /// Never the payload nor the headers: they may be secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Event({} {}/{} {})", self.id, self.aggregate_type, self.aggregate_id, self.event_type)
    }
}

/// 8,000 years: databases know time until the year 9999 at least.
const AVAILABLE_MAX: Duration = Duration::from_secs(8_000 * 365 * 86_400);

/// Names that can be header names anywhere: tokens of HTTP. Values without what would end a header.
fn check_header(name: &str, value: &str) -> Result<(), EventError> {
    let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    let reason = if name.is_empty() || !name.bytes().all(token) {
        "its name is not one of ASCII letters, digits and -_. and the like"
    } else if reserved(name) {
        "postbox writes a header of this name itself; choose another name"
    } else if value.contains(['\r', '\n', '\0']) {
        "its value holds a line break or a zero byte"
    } else {
        return Ok(());
    };
    Err(EventError::Header { name: name.escape_debug().to_string(), reason })
}

/// What is wrong with an event, known before the database was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// A name is empty that must say something.
    #[error("the event has no {field}")]
    MissingName {
        /// Which, in words.
        field: &'static str,
    },
    /// A destination that leads nowhere.
    #[error("the event's destination is empty; leave it out, and the relay's routes say where it goes")]
    EmptyDestination,
    /// A text holds a zero byte, which PostgreSQL cannot store.
    #[error("the event's {field} holds a zero byte")]
    ZeroByte {
        /// Which, in words.
        field: &'static str,
    },
    /// Both a JSON and a binary payload are set.
    #[error("the event has two payloads: give JSON or bytes, not both")]
    TwoPayloads,
    /// The payload is larger than what is taken, see [`PAYLOAD_BYTES_MAX`].
    #[error(
        "the payload has {bytes} bytes, at most {bytes_max} are taken: keep large content elsewhere and publish a \
         reference to it"
    )]
    PayloadTooLarge {
        /// Of the payload.
        bytes: usize,
        /// That are taken.
        bytes_max: usize,
    },
    /// The payload was given as JSON and is none, or a value could not be written as JSON.
    #[error("the payload is no JSON")]
    Json(#[source] serde_json::Error),
    /// A header that cannot be sent, or that postbox writes itself, see [`HEADERS_RESERVED`]. The value is not told: it
    /// may be secret.
    #[error("header \"{name}\" cannot be sent: {reason}")]
    Header {
        /// With what cannot be printed escaped.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The media type could not stand in a header.
    #[error("the content type is empty or holds a control character")]
    ContentType,
    /// The delay reaches beyond the times that databases know.
    #[error("the event would not be available for thousands of years")]
    AvailableTooLate,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> Event {
        Event::new("order", "42", "order.placed")
    }
    fn wrong(event: &Event) -> EventError {
        event.check(100).expect_err("a bad event")
    }

    #[test]
    fn case_w5_what_can_be_known_is_known_at_the_write() {
        assert!(matches!(wrong(&Event::new("", "42", "x")), EventError::MissingName { field: "aggregate type" }));
        assert!(matches!(wrong(&Event::new("order", "42", "")), EventError::MissingName { field: "event type" }));
        assert!(matches!(wrong(&event().destination("")), EventError::EmptyDestination));
        assert!(matches!(wrong(&Event::new("a", "\0", "x")), EventError::ZeroByte { field: "aggregate id" }));
        assert!(matches!(wrong(&event().json_text("1").binary([1])), EventError::TwoPayloads));
        assert!(matches!(wrong(&event().binary([0; 101])), EventError::PayloadTooLarge { bytes: 101, bytes_max: 100 }));
        event().binary([0; 100]).check(100).expect("exactly the limit");
        assert!(matches!(wrong(&event().content_type("a\r\nb: c")), EventError::ContentType));
        assert!(matches!(wrong(&event().available_after(Duration::MAX)), EventError::AvailableTooLate));
        for name in ["", "naïve", "a b", "a:b", "a\n"] {
            assert!(matches!(wrong(&event().header(name, "v")), EventError::Header { .. }), "{name:?}");
        }
        for value in ["a\r\nb: c", "a\n", "\0"] {
            let error = wrong(&event().header("name", value));
            assert!(matches!(&error, EventError::Header { name, .. } if name == "name"), "{value:?}");
        }
        for name in HEADERS_RESERVED.into_iter().chain(["Event_ID", "event-id", "Content-Type", "CE-Id"]) {
            let error = wrong(&event().header(name, "v"));
            assert!(matches!(&error, EventError::Header { reason, .. } if reason.contains("itself")), "{error}");
        }
        event().header("traceparent", "ünïcode values are fine").check(100).expect("a good event");
    }

    #[test]
    fn case_p1_json_is_scanned_and_not_changed() {
        for text in [
            "9007199254740993",
            "1e400",
            "-0.0",
            r#""\u0000""#,
            r#""\ud800""#,
            r#" {"b":1,"a":2,"b":3} "#,
            "null",
            "\"🦀\"",
        ] {
            event().json_text(text).check(100).expect(text);
        }
        let deep = "[".repeat(5_000) + &"]".repeat(5_000);
        event().json_text(deep).check(10_000).expect("deep nesting");
        for text in ["", "{", "{} {}", "'a'", "NaN", "\"\n\""] {
            assert!(matches!(wrong(&event().json_text(text)), EventError::Json(_)), "{text:?}");
        }
    }

    #[test]
    fn an_event_keeps_its_id_and_tells_no_payload() {
        let event = event().json_text("\"secret\"").header("token", "secret");
        assert_eq!(event.clone().id(), event.id());
        assert!(!format!("{event:?}").contains("secret"));
        assert_eq!(event.with_id(Uuid::nil()).id(), Uuid::nil());
    }
}

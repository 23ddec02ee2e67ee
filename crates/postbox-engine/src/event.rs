//! An event as the application committed it: opaque bytes from the INSERT to the broker.
//!
//! Events of one page share its buffers, so that reading a page costs a few allocations, not eight an event.

use std::sync::Arc;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// The ordering key of an aggregate: a stable 64-bit hash (XXH3) of its id, with that of its type for a seed. It is stored beside held
/// events, so it never changes. Two aggregates that collide are serialised with each other, which is harmless.
///
/// ```
/// use postbox_engine::key_of;
/// assert_eq!(key_of("order", "42"), key_of("order", "42"));
/// assert_ne!(key_of("order", "42"), key_of("order4", "2"));
/// ```
pub fn key_of(aggregate_type: &str, aggregate_id: &str) -> u64 {
    xxh3_64_with_seed(aggregate_id.as_bytes(), xxh3_64(aggregate_type.as_bytes()))
}

/// What a source knows of one event, borrowed from where it was read. `Event` is the owned form.
#[derive(Clone, Copy, Debug, Default)]
pub struct EventParts<'a> {
    /// The source's own number of the event (`outbox.id`); for people and for held rows, never for order across pages.
    pub id: i64,
    /// Made when the event was written; never changes.
    pub event_id: [u8; 16],
    pub aggregate_type: &'a str,
    pub aggregate_id: &'a str,
    pub aggregate_seq: Option<i64>,
    pub event_type: &'a str,
    pub schema_version: i32,
    /// `None` is a tombstone; an empty payload is not.
    pub payload: Option<&'a [u8]>,
    pub content_type: &'a str,
    /// A JSON object of strings, as it stands in the row. Parsed when the event is routed, so that a bad one parks
    /// that event only.
    pub headers: &'a str,
    /// Overrides the configured route.
    pub destination: Option<&'a str>,
    /// Microseconds since 1970-01-01 UTC.
    pub created_at: i64,
    /// What of the row cannot be read, for people: a column that is no UTF-8. Such an event is parked when it is routed,
    /// with this for an error, and its headers are lost.
    pub unreadable: Option<&'a str>,
}

/// An event, owned: a place in a page. A clone costs one reference count, wherever it is moved sixteen bytes.
#[derive(Clone)]
pub struct Event {
    page: Arc<Page>,
    index: u32,
}

/// The events of a page: their texts and their payloads, one after another.
#[derive(Default)]
struct Page {
    texts: String,
    payloads: Vec<u8>,
    events: Vec<Own>,
}

/// What is an event's own: where its parts lie in the page, and what is no text.
struct Own {
    texts: usize,
    /// Where each text ends, from `texts` on.
    ends: [u32; TEXTS],
    payload: usize,
    payload_len: u32,
    flags: u8,
    schema_version: i32,
    id: i64,
    key: u64,
    created_at: i64,
    aggregate_seq: i64,
    event_id: [u8; 16],
}

const TEXTS: usize = 6;
const HAS_PAYLOAD: u8 = 1;
const HAS_DESTINATION: u8 = 2;
const HAS_SEQ: u8 = 4;
/// The reason stands in the place of the headers.
const UNREADABLE: u8 = 8;

impl Event {
    /// One event with a buffer of its own. Sources that read pages use [`PageBuilder`].
    ///
    /// ```
    /// use postbox_engine::{Event, EventParts};
    /// let event = Event::new(&EventParts { aggregate_type: "order", aggregate_id: "42", ..Default::default() });
    /// assert_eq!((event.aggregate_id(), event.payload()), ("42", None));
    /// ```
    pub fn new(parts: &EventParts<'_>) -> Event {
        let mut page = PageBuilder::default();
        page.push(parts);
        page.finish().pop().expect("a page of one event holds one event")
    }

    fn own(&self) -> &Own {
        &self.page.events[self.index as usize]
    }
    fn text(&self, n: usize) -> &str {
        let own = self.own();
        let from = if n == 0 { 0 } else { own.ends[n - 1] as usize };
        &self.page.texts[own.texts + from..own.texts + own.ends[n] as usize]
    }

    pub fn id(&self) -> i64 {
        self.own().id
    }
    /// The ordering key, see [`key_of`].
    pub fn key(&self) -> u64 {
        self.own().key
    }
    pub fn event_id(&self) -> [u8; 16] {
        self.own().event_id
    }
    pub fn aggregate_type(&self) -> &str {
        self.text(0)
    }
    pub fn aggregate_id(&self) -> &str {
        self.text(1)
    }
    pub fn event_type(&self) -> &str {
        self.text(2)
    }
    pub fn content_type(&self) -> &str {
        self.text(3)
    }
    /// The row's headers: a JSON object, unparsed.
    pub fn headers(&self) -> &str {
        if self.unreadable().is_some() { "{}" } else { self.text(4) }
    }
    /// Why the event cannot be published: its row could not be read.
    pub fn unreadable(&self) -> Option<&str> {
        (self.own().flags & UNREADABLE != 0).then(|| self.text(4))
    }
    pub fn destination(&self) -> Option<&str> {
        (self.own().flags & HAS_DESTINATION != 0).then(|| self.text(5))
    }
    /// `None` is a tombstone.
    pub fn payload(&self) -> Option<&[u8]> {
        let own = self.own();
        let payload = || &self.page.payloads[own.payload..own.payload + own.payload_len as usize];
        (own.flags & HAS_PAYLOAD != 0).then(payload)
    }
    pub fn aggregate_seq(&self) -> Option<i64> {
        (self.own().flags & HAS_SEQ != 0).then_some(self.own().aggregate_seq)
    }
    pub fn schema_version(&self) -> i32 {
        self.own().schema_version
    }
    /// Microseconds since 1970-01-01 UTC.
    pub fn created_at(&self) -> i64 {
        self.own().created_at
    }
    /// What the event holds in memory, in bytes: the unit of every `bytes_max`.
    pub fn bytes(&self) -> usize {
        let own = self.own();
        own.ends[TEXTS - 1] as usize + own.payload_len as usize + size_of::<Own>() + size_of::<Event>()
    }
}

impl std::fmt::Debug for Event {
    /// Never the payload: it may be secret, and logs carry ids only.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Event({} {}/{} {})", self.id(), self.aggregate_type(), self.aggregate_id(), self.event_type())
    }
}

/// Collects the events of one page into its buffers.
#[derive(Default)]
pub struct PageBuilder(Page);

impl PageBuilder {
    /// Bytes collected so far, to close a page by size.
    pub fn bytes(&self) -> usize {
        self.0.texts.len() + self.0.payloads.len()
    }
    pub fn len(&self) -> usize {
        self.0.events.len()
    }
    pub fn is_empty(&self) -> bool {
        self.0.events.is_empty()
    }

    /// Copies one event in.
    pub fn push(&mut self, e: &EventParts<'_>) {
        let Page { texts, payloads, events } = &mut self.0;
        let length = |bytes: usize| u32::try_from(bytes).expect("an event is smaller than 4 GiB");
        let (texts_start, payload_start) = (texts.len(), payloads.len());
        let (headers, destination) = (e.unreadable.unwrap_or(e.headers), e.destination.unwrap_or_default());
        let fields = [e.aggregate_type, e.aggregate_id, e.event_type, e.content_type, headers, destination];
        let mut ends = [0; TEXTS];
        for (end, field) in ends.iter_mut().zip(fields) {
            texts.push_str(field);
            *end = length(texts.len() - texts_start);
        }
        payloads.extend_from_slice(e.payload.unwrap_or_default());
        let flag = |on: bool, bit: u8| if on { bit } else { 0 };
        let flags = flag(e.payload.is_some(), HAS_PAYLOAD)
            | flag(e.destination.is_some(), HAS_DESTINATION)
            | flag(e.aggregate_seq.is_some(), HAS_SEQ)
            | flag(e.unreadable.is_some(), UNREADABLE);
        events.push(Own {
            texts: texts_start,
            ends,
            payload: payload_start,
            payload_len: length(payloads.len() - payload_start),
            flags,
            schema_version: e.schema_version,
            id: e.id,
            key: key_of(e.aggregate_type, e.aggregate_id),
            created_at: e.created_at,
            aggregate_seq: e.aggregate_seq.unwrap_or_default(),
            event_id: e.event_id,
        });
    }

    /// The events, in the order of `push`. The builder is empty afterwards, with room for a page of the same size.
    pub fn finish(&mut self) -> Vec<Event> {
        let next = Page {
            texts: String::with_capacity(self.0.texts.len()),
            payloads: Vec::with_capacity(self.0.payloads.len()),
            events: Vec::with_capacity(self.0.events.len()),
        };
        let page = Arc::new(std::mem::replace(&mut self.0, next));
        let count = u32::try_from(page.events.len()).expect("a page has fewer than 2^32 events");
        (0..count).map(|index| Event { page: page.clone(), index }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_never_changes() {
        assert_eq!(key_of("order", "42"), 9230421106384216511, "stored beside held events");
    }
}

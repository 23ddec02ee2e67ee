//! An event as the application committed it: opaque bytes from the INSERT to the broker.
//!
//! Events of one page share one buffer, so that reading a page costs two allocations, not eight an event.

use bytes::Bytes;
use xxhash_rust::xxh3::Xxh3;

/// The ordering key of an aggregate: a stable 64-bit hash (XXH3) of its type and id. It is stored beside held
/// events, so it never changes. Two aggregates that collide are serialised with each other, which is harmless.
///
/// ```
/// use postbox_engine::key_of;
/// assert_eq!(key_of("order", "42"), key_of("order", "42"));
/// assert_ne!(key_of("order", "42"), key_of("order4", "2"));
/// ```
pub fn key_of(aggregate_type: &str, aggregate_id: &str) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(aggregate_type.as_bytes());
    hash.update(&[0xff]); // no UTF-8 text holds this byte
    hash.update(aggregate_id.as_bytes());
    hash.digest()
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

/// An event, owned; a clone costs one reference count.
#[derive(Clone)]
pub struct Event {
    frame: Bytes,
    ends: [u32; FIELDS],
    flags: u8,
    schema_version: i32,
    id: i64,
    key: u64,
    created_at: i64,
    aggregate_seq: i64,
    event_id: [u8; 16],
}

const FIELDS: usize = 7;
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

    fn field(&self, n: usize) -> &[u8] {
        let from = if n == 0 { 0 } else { self.ends[n - 1] as usize };
        &self.frame[from..self.ends[n] as usize]
    }
    fn text(&self, n: usize) -> &str {
        // Fields 0 to 5 were `&str` when they were put in. Checked again rather than trusted: it costs nanoseconds.
        std::str::from_utf8(self.field(n)).expect("text fields are made from str")
    }

    pub fn id(&self) -> i64 {
        self.id
    }
    /// The ordering key, see [`key_of`].
    pub fn key(&self) -> u64 {
        self.key
    }
    pub fn event_id(&self) -> [u8; 16] {
        self.event_id
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
        (self.flags & UNREADABLE != 0).then(|| self.text(4))
    }
    pub fn destination(&self) -> Option<&str> {
        (self.flags & HAS_DESTINATION != 0).then(|| self.text(5))
    }
    /// `None` is a tombstone.
    pub fn payload(&self) -> Option<&[u8]> {
        (self.flags & HAS_PAYLOAD != 0).then(|| self.field(6))
    }
    pub fn aggregate_seq(&self) -> Option<i64> {
        (self.flags & HAS_SEQ != 0).then_some(self.aggregate_seq)
    }
    pub fn schema_version(&self) -> i32 {
        self.schema_version
    }
    /// Microseconds since 1970-01-01 UTC.
    pub fn created_at(&self) -> i64 {
        self.created_at
    }
    /// What the event holds in memory, in bytes: the unit of every `bytes_max`.
    pub fn bytes(&self) -> usize {
        self.frame.len() + size_of::<Event>()
    }
}

impl std::fmt::Debug for Event {
    /// Never the payload: it may be secret, and logs carry ids only.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Event({} {}/{} {})", self.id, self.aggregate_type(), self.aggregate_id(), self.event_type())
    }
}

/// Collects the events of one page into one buffer.
#[derive(Default)]
pub struct PageBuilder {
    buffer: Vec<u8>,
    events: Vec<(usize, Event)>,
}

impl PageBuilder {
    /// Bytes collected so far, to close a page by size.
    pub fn bytes(&self) -> usize {
        self.buffer.len()
    }
    pub fn len(&self) -> usize {
        self.events.len()
    }
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Copies one event in.
    pub fn push(&mut self, e: &EventParts<'_>) {
        let start = self.buffer.len();
        let fields: [&[u8]; FIELDS] = [
            e.aggregate_type.as_bytes(),
            e.aggregate_id.as_bytes(),
            e.event_type.as_bytes(),
            e.content_type.as_bytes(),
            e.unreadable.unwrap_or(e.headers).as_bytes(),
            e.destination.unwrap_or_default().as_bytes(),
            e.payload.unwrap_or_default(),
        ];
        let mut ends = [0; FIELDS];
        for (end, field) in ends.iter_mut().zip(fields) {
            self.buffer.extend_from_slice(field);
            *end = u32::try_from(self.buffer.len() - start).expect("an event is smaller than 4 GiB");
        }
        let flag = |on: bool, bit: u8| if on { bit } else { 0 };
        let flags = flag(e.payload.is_some(), HAS_PAYLOAD)
            | flag(e.destination.is_some(), HAS_DESTINATION)
            | flag(e.aggregate_seq.is_some(), HAS_SEQ)
            | flag(e.unreadable.is_some(), UNREADABLE);
        let event = Event {
            frame: Bytes::new(),
            ends,
            flags,
            schema_version: e.schema_version,
            id: e.id,
            key: key_of(e.aggregate_type, e.aggregate_id),
            created_at: e.created_at,
            aggregate_seq: e.aggregate_seq.unwrap_or_default(),
            event_id: e.event_id,
        };
        self.events.push((start, event));
    }

    /// The events, in the order of `push`. The builder is empty afterwards.
    pub fn finish(&mut self) -> Vec<Event> {
        let page = Bytes::from(std::mem::take(&mut self.buffer));
        let events = std::mem::take(&mut self.events);
        let frame = |(start, mut event): (usize, Event)| {
            event.frame = page.slice(start..start + event.ends[FIELDS - 1] as usize);
            event
        };
        events.into_iter().map(frame).collect()
    }
}

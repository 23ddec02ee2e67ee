//! A message: an event with its destination, headers and body decided, ready for a sink.

use crate::Event;
use bytes::Bytes;
use std::sync::Arc;

/// What a sink sends. The id is `event.event_id()`, the ordering key `event.aggregate_id()`.
#[derive(Clone, Debug)]
pub struct Message {
    /// Where the message comes from: id, key and, unless there is a `body`, the payload.
    pub event: Event,
    /// Topic, exchange, subject or URL.
    pub destination: Arc<str>,
    /// Those of the envelope first, then those of the row.
    pub headers: Headers,
    /// `None`: the event's own payload, byte for byte. `Some`: an envelope built around it.
    pub body: Option<Bytes>,
}

impl Message {
    /// The event id as consumers see it: a UUID in its usual text form.
    pub fn id_text(&self) -> String {
        uuid_text(self.event.event_id()).map(char::from).iter().collect()
    }
    /// The bytes to send; `None` is a tombstone.
    pub fn body(&self) -> Option<&[u8]> {
        self.body.as_deref().or_else(|| self.event.payload())
    }
    /// What the message takes on the way, roughly: the unit of `bytes_max`.
    pub fn bytes(&self) -> usize {
        self.body().map_or(0, <[u8]>::len) + self.headers.bytes() + self.event.aggregate_id().len() + 64
    }
}

/// The text form of a UUID.
pub(crate) fn uuid_text(id: [u8; 16]) -> [u8; 36] {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let mut out = [b'-'; 36];
    let mut at = 0;
    for (n, byte) in id.into_iter().enumerate() {
        if matches!(n, 4 | 6 | 8 | 10) {
            at += 1;
        }
        out[at] = HEX[usize::from(byte >> 4)];
        out[at + 1] = HEX[usize::from(byte & 15)];
        at += 2;
    }
    out
}

/// Header names and values in one buffer, in order; a name may repeat.
///
/// ```
/// let mut headers = postbox_engine::Headers::default();
/// headers.push("event_type", b"order.placed");
/// assert_eq!(headers.iter().collect::<Vec<_>>(), [("event_type", &b"order.placed"[..])]);
/// ```
#[derive(Clone, Default, PartialEq)]
pub struct Headers(Vec<u8>);

impl Headers {
    /// Names that postbox writes itself, over HTTP with dashes. A row that brought its own would say two things about one
    /// event.
    pub const OWN: [&str; 18] = [
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

    /// Whether a name is one of [`Headers::OWN`], in any case of letters and with dashes for underscores too.
    ///
    /// ```
    /// use postbox_engine::Headers;
    /// assert!(Headers::is_own("event_id") && Headers::is_own("CE-Id") && !Headers::is_own("traceparent"));
    /// ```
    pub fn is_own(name: &str) -> bool {
        let plain = |byte: u8| if byte == b'-' { b'_' } else { byte.to_ascii_lowercase() };
        Headers::OWN.iter().any(|own| own.len() == name.len() && name.bytes().map(plain).eq(own.bytes()))
    }

    /// None yet, in a buffer of `bytes` bytes: a header takes its name, its value and 8 bytes.
    pub fn with_capacity(bytes: usize) -> Headers {
        Headers(Vec::with_capacity(bytes))
    }
    /// Adds a header at the end.
    ///
    /// # Panics
    /// Name or value of 4 GiB or more.
    pub fn push(&mut self, name: &str, value: &[u8]) {
        for part in [name.as_bytes(), value] {
            let length = u32::try_from(part.len()).expect("a header is smaller than 4 GiB");
            self.0.extend_from_slice(&length.to_le_bytes());
            self.0.extend_from_slice(part);
        }
    }
    /// Name and value of each, in their order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let text = |name| std::str::from_utf8(name).expect("names are made from str");
        self.raw().map(move |(name, value)| (text(name), value))
    }
    /// As `iter`, for who needs no text.
    pub fn raw(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let mut rest = &self.0[..];
        std::iter::from_fn(move || Some((take(&mut rest)?, take(&mut rest).expect("a value follows each name"))))
    }
    /// The first value of this name, which is compared byte for byte.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.iter().find(|(n, _)| *n == name).map(|(_, v)| v)
    }
    /// What all of them take, in bytes.
    pub fn bytes(&self) -> usize {
        self.0.len()
    }
}

fn take<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, tail) = rest.split_first_chunk::<4>()?;
    let (part, tail) = tail.split_at(u32::from_le_bytes(*length) as usize);
    *rest = tail;
    Some(part)
}

impl std::fmt::Debug for Headers {
    /// Names only: values may be secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter().map(|(n, _)| n)).finish()
    }
}

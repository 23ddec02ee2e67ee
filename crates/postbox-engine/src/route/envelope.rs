//! Headers and body of a message, for each envelope. One buffer for the headers of an event; the payload stays where
//! it is, but in structured mode, where it is copied into the document byte for byte.

use super::RouteError;
use crate::message::uuid_text;
use crate::{Event, Headers};
use bytes::Bytes;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, Visitor};
use std::borrow::Cow;
use std::fmt::{self, Write as _};

const JSON: &str = "application/json";

type Built<T> = Result<T, RouteError>;

/// The texts of an event, each looked up once: a look-up checks the encoding.
pub(super) struct Texts<'a> {
    pub(super) aggregate_type: &'a str,
    pub(super) event_type: &'a str,
    media_type: &'a str,
    headers: &'a str,
}

impl<'a> Texts<'a> {
    pub(super) fn of(event: &'a Event) -> Texts<'a> {
        let media_type = match event.content_type() {
            "" => JSON,
            given => given,
        };
        let (aggregate_type, event_type) = (event.aggregate_type(), event.event_type());
        Texts { aggregate_type, event_type, media_type, headers: event.headers() }
    }

    /// A buffer that takes the row's own headers and so many bytes more, so that it is allocated once.
    fn buffer(&self, more: usize) -> Headers {
        let own = if self.headers.len() > 2 { self.headers.len() * 2 } else { 0 };
        Headers::with_capacity(self.aggregate_type.len() + self.event_type.len() + own + more)
    }
}

/// The event's fields as headers, but only those that say something: each header costs at the broker.
pub(super) fn plain(event: &Event, texts: &Texts<'_>, replay: bool) -> Built<Headers> {
    plain_and(event, texts, replay, 0)
}

/// With room for so many bytes more.
fn plain_and(event: &Event, texts: &Texts<'_>, replay: bool, more: usize) -> Built<Headers> {
    let seq = event.aggregate_seq();
    let odd = texts.media_type != JSON || event.schema_version() != 1 || seq.is_some() || replay;
    let mut headers = texts.buffer(more + if odd { 256 + texts.media_type.len() } else { 128 });
    headers.push("event_id", &uuid_text(event.event_id()));
    headers.push("event_type", texts.event_type.as_bytes());
    headers.push("aggregate_type", texts.aggregate_type.as_bytes());
    if texts.media_type != JSON {
        headers.push("content_type", texts.media_type.as_bytes());
    }
    if event.schema_version() != 1 {
        headers.push("schema_version", Number::new(event.schema_version().into()).bytes());
    }
    if let Some(seq) = seq {
        headers.push("aggregate_seq", Number::new(seq).bytes());
    }
    if replay {
        headers.push("replay", b"true");
    }
    own_headers(texts.headers, &mut headers)?;
    Ok(headers)
}

/// As Debezium's outbox event router sends an event: its id in the header `id`. What `plain` has stays beside it.
pub(super) fn debezium(event: &Event, texts: &Texts<'_>, replay: bool) -> Built<Headers> {
    let mut headers = plain_and(event, texts, replay, 48)?;
    if let Some((own, _)) = headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("id")) {
        return Err(RouteError::BadHeaders(format!("the name {own:?} is postbox's own under envelope = \"debezium\"")));
    }
    headers.push("id", &uuid_text(event.event_id()));
    Ok(headers)
}

/// CloudEvents 1.0, binary content mode.
pub(super) fn binary(event: &Event, texts: &Texts<'_>, replay: bool) -> Built<Headers> {
    let mut headers = texts.buffer(384 + texts.media_type.len() + event.aggregate_id().len());
    headers.push("ce_specversion", b"1.0");
    headers.push("ce_id", &uuid_text(event.event_id()));
    headers.push("ce_source", source(texts.aggregate_type).as_bytes());
    headers.push("ce_type", texts.event_type.as_bytes());
    headers.push("ce_subject", event.aggregate_id().as_bytes());
    headers.push("ce_time", rfc3339(event.created_at()).as_bytes());
    if event.schema_version() != 1 {
        headers.push("ce_schemaversion", Number::new(event.schema_version().into()).bytes());
    }
    if let Some(seq) = event.aggregate_seq() {
        headers.push("ce_sequence", Number::new(seq).bytes());
    }
    if replay {
        headers.push("ce_replay", b"true");
    }
    headers.push("content-type", texts.media_type.as_bytes());
    own_headers(texts.headers, &mut headers)?;
    Ok(headers)
}

/// CloudEvents 1.0, structured content mode, JSON format.
pub(super) fn structured(event: &Event, texts: &Texts<'_>, replay: bool) -> Built<(Headers, Option<Bytes>)> {
    let mut headers = texts.buffer(64);
    headers.push("content-type", b"application/cloudevents+json");
    own_headers(texts.headers, &mut headers)?;

    let payload = event.payload().unwrap_or_default();
    let mut out = String::with_capacity(payload.len() * 4 / 3 + 256 + event.aggregate_id().len());
    let id = uuid_text(event.event_id());
    let id = std::str::from_utf8(&id).expect("hex digits and dashes");
    let _ = write!(out, r#"{{"specversion":"1.0","id":"{id}""#); // writing to a string cannot fail
    for (name, value) in [
        ("source", source(texts.aggregate_type).as_str()),
        ("type", texts.event_type),
        ("subject", event.aggregate_id()),
        ("time", rfc3339(event.created_at()).as_str()),
        ("datacontenttype", texts.media_type),
    ] {
        let value = serde_json::to_string(value).expect("text is JSON");
        let _ = write!(out, r#","{name}":{value}"#);
    }
    if event.schema_version() != 1 {
        let _ = write!(out, r#","schemaversion":{}"#, event.schema_version());
    }
    if let Some(seq) = event.aggregate_seq() {
        let _ = write!(out, r#","sequence":"{seq}""#); // text, as the extension "sequence" wants it
    }
    if replay {
        out.push_str(r#","replay":true"#);
    }
    match event.payload().map(|payload| embeddable(texts.media_type, payload).ok_or(payload)) {
        None => {} // a tombstone has no data
        Some(Ok(json)) => {
            out.push_str(r#","data":"#);
            out.push_str(json);
        }
        Some(Err(bytes)) => {
            out.push_str(r#","data_base64":""#);
            base64(bytes, &mut out);
            out.push('"');
        }
    }
    out.push('}');
    Ok((headers, Some(Bytes::from(out))))
}

/// The payload as JSON text, if that is what it is. A payload that only claims to be JSON would break the document
/// around it, so it is checked here (without recursion: depth is no limit) and goes as base64 otherwise.
fn embeddable<'a>(media_type: &str, payload: &'a [u8]) -> Option<&'a str> {
    let media = media_type.split(';').next().unwrap_or_default().trim();
    let is_json = media.eq_ignore_ascii_case(JSON) || media.to_ascii_lowercase().ends_with("+json");
    let text = is_json.then(|| std::str::from_utf8(payload).ok())??;
    serde_json::from_str::<serde::de::IgnoredAny>(text).ok().map(|_| text)
}

/// The row's own headers, in their order.
fn own_headers(text: &str, into: &mut Headers) -> Built<()> {
    if text.is_empty() || text == "{}" {
        return Ok(());
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let parsed = Pairs(into).deserialize(&mut json).and_then(|()| json.end());
    parsed.map_err(|e| RouteError::BadHeaders(e.to_string()))
}

/// Reads a JSON object of strings straight into the headers.
struct Pairs<'a>(&'a mut Headers);

impl<'de> DeserializeSeed<'de> for Pairs<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        // The default error would quote the value, which may be secret.
        struct Object<'a>(&'a mut Headers);
        impl<'de> Visitor<'de> for Object<'_> {
            type Value = ();
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
                while let Some(name) = map.next_key_seed(Text)? {
                    check_name(&name).map_err(A::Error::custom)?;
                    let value = map.next_value_seed(Text);
                    let value =
                        value.map_err(|_| A::Error::custom(format_args!("the value of {name:?} is no string")))?;
                    self.0.push(&name, value.as_bytes());
                }
                Ok(())
            }
        }
        d.deserialize_map(Object(self.0))
    }
}

/// A string, borrowed where it holds no escapes.
struct Text;

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Cow<'de, str>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Text {
    type Value = Cow<'de, str>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }
    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }
    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_owned()))
    }
}

/// The token of RFC 9110: what every broker and HTTP accept as a name.
fn check_name(name: &str) -> Result<(), String> {
    if Headers::is_own(name) {
        return Err(format!("the name {name:?} is postbox's own"));
    }
    let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if name.is_empty() || !name.bytes().all(token) {
        return Err(format!("{name:?} is no valid name (ASCII letters, digits, and !#$%&'*+-.^_`|~)"));
    }
    Ok(())
}

/// The context of the event, as a relative URI reference: `/order`.
fn source(aggregate_type: &str) -> String {
    let mut out = String::with_capacity(1 + aggregate_type.len());
    out.push('/');
    for byte in aggregate_type.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(byte.into());
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

/// A decimal number without an allocation, and without the machinery of `fmt`, which costs as much as a header.
struct Number {
    digits: [u8; 20],
    from: usize,
}

impl Number {
    fn new(value: i64) -> Number {
        let (mut digits, mut from, mut rest) = ([b'-'; 20], 20, value.unsigned_abs());
        loop {
            from -= 1;
            digits[from] = b'0' + u8::try_from(rest % 10).expect("below ten");
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        Number { digits, from: from - usize::from(value < 0) }
    }
    fn bytes(&self) -> &[u8] {
        &self.digits[self.from..]
    }
}

/// RFC 3339 in UTC, from microseconds since 1970. Howard Hinnant's `civil_from_days`; the engine knows no calendar
/// library, and no clock.
fn rfc3339(micros: i64) -> String {
    let (seconds, micros) = (micros.div_euclid(1_000_000), micros.rem_euclid(1_000_000));
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let shifted = days + 719_468; // days since 0000-03-01: a year that begins in March ends with its leap day
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// Base64 with padding (RFC 4648, 4).
fn base64(bytes: &[u8], out: &mut String) {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0, |word: u32, &byte| word << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let sextet = (word >> (18 - 6 * place)) as usize & 63;
            out.push(if place <= chunk.len() { ALPHABET[sextet].into() } else { '=' });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(rfc3339(951_782_400_000_001), "2000-02-29T00:00:00.000001Z");
        assert_eq!(rfc3339(1_709_251_199_999_999), "2024-02-29T23:59:59.999999Z");
        assert_eq!(rfc3339(-1), "1969-12-31T23:59:59.999999Z");
        assert_eq!(rfc3339(4_107_542_400_000_000), "2100-03-01T00:00:00.000000Z");
    }

    #[test]
    fn base64_is_that_of_the_standard() {
        let vectors =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("fooba", "Zm9vYmE=")];
        for (plain, encoded) in vectors {
            let mut out = String::new();
            base64(plain.as_bytes(), &mut out);
            assert_eq!(out, encoded);
        }
    }

    #[test]
    fn ids_and_numbers_are_text() {
        assert_eq!(
            &uuid_text(*b"\x01\x93\xab\xcd\xef\x00\x70\x01\x80\x02\x10\x20\x30\x40\x50\x6f"),
            b"0193abcd-ef00-7001-8002-10203040506f"
        );
        assert_eq!(Number::new(i64::MIN).bytes(), b"-9223372036854775808");
        assert_eq!(Number::new(i64::MAX).bytes(), b"9223372036854775807");
        assert_eq!(Number::new(0).bytes(), b"0");
        assert_eq!(Number::new(-40).bytes(), b"-40");
    }
}

//! From a row of the outbox to the page's buffer, without a string or an object between: columns are slices of the
//! connection's read buffer in PostgreSQL's binary format, in the order of `sql.rs`'s column list.

use bytes::BytesMut;
use postbox_engine::{EventParts, PageBuilder};
use std::borrow::Cow;
use std::error::Error;
use std::time::Duration;
use tokio_postgres::Row;
use tokio_postgres::types::{Format, FromSql, IsNull, ToSql, Type};

/// Microseconds from 1970 to 2000, where PostgreSQL's time begins.
const EPOCH_MICROS: i64 = 946_684_800_000_000;

/// The columns of an event, as errors name them.
const NAMES: [&str; 14] = [
    "id",
    "event_id",
    "aggregate_type",
    "aggregate_id",
    "aggregate_seq",
    "event_type",
    "schema_version",
    "payload",
    "payload_binary",
    "content_type",
    "headers",
    "destination",
    "created_at",
    "available_at",
];

/// A column as it came over the wire.
struct Raw<'a>(&'a [u8]);

impl<'a> FromSql<'a> for Raw<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Raw<'a>, Box<dyn Error + Sync + Send>> {
        Ok(Raw(raw))
    }
    fn accepts(_: &Type) -> bool {
        true
    }
}

/// The columns of a row that tokio-postgres read.
pub(crate) fn columns(row: &Row) -> impl Iterator<Item = Option<&[u8]>> {
    (0..row.len()).map(|n| row.get::<_, Option<Raw<'_>>>(n).map(|column| column.0))
}

/// A snapshot, sent as text: the server's own form is that too.
#[derive(Debug)]
pub(crate) struct SnapshotText<'a>(pub(crate) &'a str);

impl ToSql for SnapshotText<'_> {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.extend_from_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }
    fn accepts(kind: &Type) -> bool {
        *kind == Type::PG_SNAPSHOT
    }
    fn encode_format(&self, _: &Type) -> Format {
        Format::Text
    }
    fn to_sql_checked(&self, kind: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        self.to_sql(kind, out)
    }
}

/// Reads an event's columns one after another.
struct Fields<I> {
    columns: I,
    next: usize,
    /// The first column whose text is no UTF-8.
    wrong: Option<&'static str>,
}

impl<'a, I: Iterator<Item = Option<&'a [u8]>>> Fields<I> {
    fn raw(&mut self) -> Option<&'a [u8]> {
        self.next += 1;
        self.columns.next().expect("the statement returns an event's columns")
    }
    /// Text arrives in UTF-8 but from a database of encoding SQL_ASCII, which takes and gives any bytes.
    fn text(&mut self) -> Option<Cow<'a, str>> {
        self.raw().map(|bytes| self.utf8(bytes))
    }
    fn utf8(&mut self, bytes: &'a [u8]) -> Cow<'a, str> {
        std::str::from_utf8(bytes).map_or_else(
            |_| {
                self.wrong.get_or_insert(NAMES[self.next - 1]);
                String::from_utf8_lossy(bytes)
            },
            Cow::Borrowed,
        )
    }
    /// jsonb, which begins with its version.
    fn headers(&mut self) -> Cow<'a, str> {
        let bytes = self.raw().unwrap_or_default();
        self.utf8(bytes.get(1..).unwrap_or_default())
    }
    fn i64(&mut self) -> Option<i64> {
        self.raw().map(|b| i64::from_be_bytes(b.try_into().expect("a bigint has eight bytes")))
    }
    fn i32(&mut self) -> Option<i32> {
        self.raw().map(|b| i32::from_be_bytes(b.try_into().expect("an integer has four bytes")))
    }
}

/// Copies an event into the page. Returns its id, and for how long it is not available yet.
pub(crate) fn push<'a>(
    columns: impl Iterator<Item = Option<&'a [u8]>>,
    page: &mut PageBuilder,
) -> (i64, Option<Duration>) {
    let mut fields = Fields { columns, next: 0, wrong: None };
    let id = fields.i64().expect("id is not null");
    let event_id = fields.raw().and_then(|b| b.try_into().ok()).expect("a uuid has sixteen bytes");
    let (aggregate_type, aggregate_id) = (fields.text().unwrap_or_default(), fields.text().unwrap_or_default());
    let aggregate_seq = fields.i64();
    let event_type = fields.text().unwrap_or_default();
    let schema_version = fields.i32().unwrap_or_default();
    let (json, binary) = (fields.raw(), fields.raw());
    let content_type = fields.text().unwrap_or_default();
    let headers = fields.headers();
    let destination = fields.text();
    let created_at = fields.i64().unwrap_or_default().saturating_add(EPOCH_MICROS);
    let delay = fields.i64();
    let unreadable = fields.wrong.map(|name| format!("the column {name} of event {id} is not valid UTF-8"));
    page.push(&EventParts {
        id,
        event_id,
        aggregate_type: &aggregate_type,
        aggregate_id: &aggregate_id,
        aggregate_seq,
        event_type: &event_type,
        schema_version,
        payload: json.or(binary),
        content_type: &content_type,
        headers: &headers,
        destination: destination.as_deref(),
        created_at,
        unreadable: unreadable.as_deref(),
    });
    (id, delay.map(|micros| Duration::from_micros(micros.max(1).unsigned_abs())))
}

//! The reading connection, once it is connected: its answers are looked at row by row in the buffer in which they
//! arrived, without an object or an allocation for each. Connecting, TLS and authentication are tokio-postgres's, which
//! then hands the stream over; here is what remains of PostgreSQL's protocol (version 3) to ask prepared statements.

use crate::postgres::dial::Stream;
use crate::postgres::error::{STATEMENT_TIMEOUT, answered, unavailable};
use bytes::BytesMut;
use postbox_engine::SourceError;
use postgres_protocol::IsNull;
use postgres_protocol::message::{backend, frontend};
use std::future::Future;
use std::io;
use std::ops::Range;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// What one read takes at most: many rows, so that a read costs little of each. A larger row gets a larger buffer while
/// it lasts.
const BUFFER: usize = 128 << 10;
/// What a server can put into one message.
const ROW_MAX: usize = 1 << 30;
/// Tag and length of a message.
const HEAD: usize = 5;
const TEXT: i16 = 0;
const BINARY: i16 = 1;

pub(crate) struct Wire {
    stream: Stream,
    out: BytesMut,
    buffer: Vec<u8>,
    /// What of the buffer is not looked at yet.
    unread: Range<usize>,
}

impl Wire {
    /// Takes over a connection on which nothing is under way.
    pub(crate) fn new(stream: Stream) -> Wire {
        Wire { stream, out: BytesMut::new(), buffer: vec![0; BUFFER], unread: 0..0 }
    }

    /// Prepares a statement under a name.
    pub(crate) async fn prepare(&mut self, name: &str, sql: &str) -> Result<(), SourceError> {
        frontend::parse(name, sql, [], &mut self.out).map_err(unsendable)?;
        frontend::sync(&mut self.out);
        self.send().await?;
        self.finish().await
    }

    /// Asks a prepared statement; its parameters as text. Several may be asked ahead: the answers come in turn.
    pub(crate) async fn ask(&mut self, name: &str, parameters: &[&str]) -> Result<(), SourceError> {
        let write = |text: &&str, out: &mut BytesMut| {
            out.extend_from_slice(text.as_bytes());
            Ok(IsNull::No)
        };
        frontend::bind("", name, [TEXT], parameters, write, [BINARY], &mut self.out).map_err(|e| match e {
            frontend::BindError::Conversion(e) => unsendable(e),
            frontend::BindError::Serialization(e) => unsendable(e),
        })?;
        frontend::execute("", 0, &mut self.out).map_err(unsendable)?;
        frontend::sync(&mut self.out);
        self.send().await
    }

    /// The next row of the answer; none at its end. After an error the connection is of no use any more.
    pub(crate) async fn row(&mut self) -> Result<Option<Columns<'_>>, SourceError> {
        loop {
            let Some((tag, body)) = self.message() else {
                self.fill().await?;
                continue;
            };
            match tag {
                backend::DATA_ROW_TAG => return Ok(Some(Columns { rest: &self.buffer[body.start + 2..body.end] })),
                backend::READY_FOR_QUERY_TAG => return Ok(None),
                backend::ERROR_RESPONSE_TAG => return Err(refusal(&self.buffer[body])),
                backend::PARSE_COMPLETE_TAG
                | backend::BIND_COMPLETE_TAG
                | backend::COMMAND_COMPLETE_TAG
                | backend::NOTICE_RESPONSE_TAG
                | backend::NOTIFICATION_RESPONSE_TAG
                | backend::PARAMETER_STATUS_TAG => {}
                other => return Err(unavailable(format!("PostgreSQL: an answer of kind {other} was not expected"))),
            }
        }
    }

    /// Reads the answer to its end.
    pub(crate) async fn finish(&mut self) -> Result<(), SourceError> {
        while self.row().await?.is_some() {}
        Ok(())
    }

    /// The one row that a statement returns.
    pub(crate) async fn one<T>(
        &mut self,
        name: &str,
        parameters: &[&str],
        read: impl FnOnce(Columns<'_>) -> T,
    ) -> Result<T, SourceError> {
        self.ask(name, parameters).await?;
        let row = self.row().await?.ok_or_else(|| unavailable(format!("PostgreSQL: {name} returned no row")))?;
        let read = read(row);
        self.finish().await?;
        Ok(read)
    }

    /// The next message, if all of it is here.
    fn message(&mut self) -> Option<(u8, Range<usize>)> {
        let length = self.length()?;
        if self.unread.len() < length {
            return None;
        }
        let start = self.unread.start;
        self.unread.start += length;
        Some((self.buffer[start], start + HEAD..start + length))
    }

    /// How long the next message is, its head included.
    fn length(&self) -> Option<usize> {
        let head = self.buffer[self.unread.clone()].first_chunk::<HEAD>()?;
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
        Some(1 + (length as usize).max(HEAD - 1))
    }

    /// Reads more of the answer.
    async fn fill(&mut self) -> Result<(), SourceError> {
        let needed = self.length().unwrap_or(HEAD);
        if needed > ROW_MAX {
            return Err(unavailable(format!("PostgreSQL: an answer of {needed} bytes cannot be one")));
        }
        if self.unread.is_empty() {
            self.unread = 0..0;
            if self.buffer.len() > BUFFER && needed <= BUFFER {
                self.buffer = vec![0; BUFFER]; // a large row is over
            }
        } else if self.unread.start + needed > self.buffer.len() {
            self.buffer.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
        }
        if needed > self.buffer.len() {
            self.buffer.resize(needed, 0);
        }
        let read = self.stream.read(&mut self.buffer[self.unread.end..]);
        match in_time("read events", read).await? {
            0 => Err(unavailable("PostgreSQL: could not read events: the server closed the connection")),
            n => {
                self.unread.end += n;
                Ok(())
            }
        }
    }

    async fn send(&mut self) -> Result<(), SourceError> {
        let (stream, out) = (&mut self.stream, &mut self.out);
        in_time("ask for events", async {
            stream.write_all_buf(out).await?;
            stream.flush().await
        })
        .await
    }
}

async fn in_time<T>(doing: &str, work: impl Future<Output = io::Result<T>>) -> Result<T, SourceError> {
    match tokio::time::timeout(STATEMENT_TIMEOUT, work).await {
        Ok(done) => done.map_err(|e| unavailable(format!("PostgreSQL: could not {doing}: {e}"))),
        Err(_) => Err(unavailable(format!("PostgreSQL: could not {doing}: no answer within {STATEMENT_TIMEOUT:?}"))),
    }
}

fn unsendable(error: impl std::fmt::Display) -> SourceError {
    unavailable(format!("PostgreSQL: a statement cannot be sent: {error}"))
}

/// What the server says is wrong: its fields are each a letter and a text that ends with a zero, as is their list.
fn refusal(body: &[u8]) -> SourceError {
    let field = |kind: u8| {
        let mut fields = body.split(|byte| *byte == 0);
        let text = fields.find(|field| field.first() == Some(&kind)).map(|field| &field[1..]);
        String::from_utf8_lossy(text.unwrap_or_default()).into_owned()
    };
    answered("read events", &field(b'C'), &field(b'M'))
}

/// The columns of a row from left to right, in binary format.
#[derive(Clone, Copy)]
pub(crate) struct Columns<'a> {
    rest: &'a [u8],
}

impl<'a> Columns<'a> {
    /// # Panics
    /// The statement returns fewer columns, or this one is no bigint.
    pub(crate) fn i64(&mut self) -> Option<i64> {
        self.next().expect("a column").map(|b| i64::from_be_bytes(b.try_into().expect("a bigint has eight bytes")))
    }
    /// # Panics
    /// The statement returns fewer columns.
    pub(crate) fn text(&mut self) -> Option<&'a str> {
        self.next().expect("a column").map(|text| std::str::from_utf8(text).expect("a snapshot is of digits"))
    }
}

impl<'a> Iterator for Columns<'a> {
    /// `None`: NULL.
    type Item = Option<&'a [u8]>;

    fn next(&mut self) -> Option<Option<&'a [u8]>> {
        let (length, rest) = self.rest.split_first_chunk::<4>()?;
        let Ok(length) = usize::try_from(i32::from_be_bytes(*length)) else {
            self.rest = rest;
            return Some(None);
        };
        let (column, rest) = rest.split_at_checked(length)?;
        self.rest = rest;
        Some(Some(column))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::dial::Plain;
    use postbox_engine::SourceErrorKind;
    use tokio::io::DuplexStream;

    fn message(tag: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).unwrap();
        [&[tag], &length.to_be_bytes()[..], body].concat()
    }
    fn row(columns: &[Option<&[u8]>]) -> Vec<u8> {
        let mut body = u16::try_from(columns.len()).unwrap().to_be_bytes().to_vec();
        for column in columns {
            body.extend(column.map_or(-1, |c| i32::try_from(c.len()).unwrap()).to_be_bytes());
            body.extend(column.unwrap_or_default());
        }
        message(backend::DATA_ROW_TAG, &body)
    }
    fn wire() -> (Wire, DuplexStream) {
        let (ours, servers) = tokio::io::duplex(1 << 20);
        (Wire::new(Box::new(Plain(ours))), servers)
    }
    /// The answer to a statement, in pieces of so many bytes.
    async fn answer(mut server: DuplexStream, answer: Vec<u8>, piece: usize) {
        for piece in answer.chunks(piece) {
            server.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn rows_of_any_size_arrive_whole_however_they_are_cut() {
        let large = vec![7; 3 * BUFFER];
        for (piece, filler) in [(1, 10), (5, 10), (1000, 5_000), (usize::MAX, 5_000)] {
            let mut all = message(backend::BIND_COMPLETE_TAG, &[]);
            let cells: Vec<Vec<u8>> = (0..40).map(|n| vec![n; n as usize * filler / 10]).collect();
            for cell in &cells {
                all.extend(message(backend::NOTICE_RESPONSE_TAG, b"\0"));
                all.extend(row(&[Some(cell), None, Some(&[])]));
            }
            if piece > 5 {
                all.extend(row(&[Some(&large)]));
                all.extend(row(&[Some(b"after it")]));
            }
            all.extend(message(backend::COMMAND_COMPLETE_TAG, b"SELECT 1\0"));
            all.extend(message(backend::READY_FOR_QUERY_TAG, b"I"));
            let (mut wire, server) = wire();
            tokio::spawn(answer(server, all, piece));
            for cell in &cells {
                let row = wire.row().await.unwrap().unwrap();
                assert_eq!(row.collect::<Vec<_>>(), [Some(&cell[..]), None, Some(&[])]);
            }
            if piece > 5 {
                assert_eq!(wire.row().await.unwrap().unwrap().next(), Some(Some(&large[..])));
                assert_eq!(wire.row().await.unwrap().unwrap().next(), Some(Some(&b"after it"[..])));
            }
            assert!(wire.row().await.unwrap().is_none(), "the answer ends");
            assert_eq!(wire.buffer.len().max(BUFFER), wire.buffer.len());
        }
    }

    #[tokio::test]
    async fn after_a_large_row_the_buffer_is_as_it_was() {
        let (mut wire, server) = wire();
        let large = vec![7; 3 * BUFFER];
        let small = row(&[Some(b"small")]);
        tokio::spawn(answer(server, [row(&[Some(&large)]), small.clone(), small].concat(), 3 * BUFFER + 11));
        for _ in 0..3 {
            wire.row().await.unwrap().unwrap();
        }
        assert_eq!(wire.buffer.len(), BUFFER);
    }

    #[tokio::test]
    async fn what_is_no_answer_is_an_error() {
        let refused = message(backend::ERROR_RESPONSE_TAG, b"SERROR\0C42P01\0Mrelation \"x\" does not exist\0\0");
        let refused_why = "relation \"x\" does not exist (SQLSTATE 42P01). postbox's tables are missing";
        for (said, kind, why) in [
            (refused, SourceErrorKind::Refused, refused_why),
            (Vec::new(), SourceErrorKind::Unavailable, "closed the connection"),
            (row(&[None])[..6].to_vec(), SourceErrorKind::Unavailable, "closed the connection"),
            (b"HTTP/1.1 400 Bad Request".to_vec(), SourceErrorKind::Unavailable, "bytes cannot be one"),
            (message(b'?', b""), SourceErrorKind::Unavailable, "of kind 63 was not expected"),
        ] {
            let (mut wire, server) = wire();
            answer(server, said, usize::MAX).await;
            let error = wire.finish().await.unwrap_err();
            assert!(error.kind == kind && error.message.contains(why), "{why}: {error}");
        }
    }
}

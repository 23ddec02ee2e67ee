//! Just enough of the PostgreSQL and Kafka protocols, blocking and without a driver, to see whether a server is ready
//! and to prepare it for a test (databases, topics). Never used for what is under test.

use anyhow::{Context, Result, bail, ensure};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

/// A server that takes longer for an answer is not ready.
const ANSWER_MAX: Duration = Duration::from_secs(60);

fn connect(port: u16) -> Result<TcpStream> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(ANSWER_MAX))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn read_vec(from: &mut impl Read, n: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; n];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Runs one simple query as `postgres`, without a password; returns its rows as text.
///
/// # Errors
/// The server's own, with SQLSTATE and message.
pub(super) fn postgres(port: u16, database: &str, sql: &str) -> Result<Vec<Vec<Option<String>>>> {
    let mut stream = connect(port)?;
    let startup = format!("user\0postgres\0database\0{database}\0client_encoding\0UTF8\0\0");
    let mut packet = u32::try_from(startup.len() + 8)?.to_be_bytes().to_vec();
    packet.extend_from_slice(&196_608_u32.to_be_bytes()); // protocol 3.0
    packet.extend_from_slice(startup.as_bytes());
    packet.push(b'Q');
    packet.extend_from_slice(&u32::try_from(sql.len() + 5)?.to_be_bytes());
    packet.extend_from_slice(sql.as_bytes());
    packet.push(0);
    stream.write_all(&packet)?;
    let (mut rows, mut error, mut ready) = (Vec::new(), None, 0);
    // ReadyForQuery comes twice: after the start, and after the query.
    while ready < 2 {
        let head = match read_vec(&mut stream, 5) {
            Ok(head) => head,
            Err(_) if error.is_some() => break, // refused at the start: the server hung up
            Err(e) => return Err(e),
        };
        let length = u32::from_be_bytes(head[1..5].try_into()?) as usize;
        let body = read_vec(&mut stream, length - 4)?;
        match head[0] {
            b'D' => rows.push(data_row(&body)?),
            b'E' => error = Some(error_text(&body)),
            b'Z' => ready += 1,
            _ => {}
        }
    }
    match error {
        Some(text) => bail!("{text} (in: {sql})"),
        None => Ok(rows),
    }
}

fn data_row(body: &[u8]) -> Result<Vec<Option<String>>> {
    let (count, mut rest) = body.split_at_checked(2).context("a short row")?;
    let count = u16::from_be_bytes(count.try_into()?);
    let mut row = Vec::new();
    for _ in 0..count {
        let length = i32::from_be_bytes(read_vec(&mut rest, 4)?.try_into().expect("four bytes were asked for"));
        row.push(match usize::try_from(length) {
            Ok(n) => Some(String::from_utf8(read_vec(&mut rest, n)?)?),
            Err(_) => None, // -1: NULL
        });
    }
    Ok(row)
}

/// SQLSTATE and message of an ErrorResponse.
fn error_text(body: &[u8]) -> String {
    let fields = body.split(|b| *b == 0).filter_map(|f| f.split_first());
    let wanted = fields.filter(|(kind, _)| matches!(kind, b'C' | b'M'));
    wanted.map(|(_, text)| String::from_utf8_lossy(text)).collect::<Vec<_>>().join(" ")
}

/// One connection to a Kafka broker.
pub(super) struct KafkaWire(TcpStream);

impl KafkaWire {
    /// `login`: user and password for SASL/PLAIN.
    pub(super) fn connect(port: u16, login: Option<(&str, &str)>) -> Result<KafkaWire> {
        let mut wire = KafkaWire(connect(port)?);
        if let Some((user, password)) = login {
            let mut body = Vec::new();
            string(&mut body, "PLAIN");
            let answer = wire.ask(17, 1, &body)?; // SaslHandshake
            ensure!(answer.starts_with(&[0, 0]), "the broker does not offer SASL/PLAIN");
            let token = format!("\0{user}\0{password}");
            let mut body = u32::try_from(token.len())?.to_be_bytes().to_vec();
            body.extend_from_slice(token.as_bytes());
            let answer = wire.ask(36, 0, &body)?; // SaslAuthenticate
            ensure!(answer.starts_with(&[0, 0]), "the broker refuses the user {user}");
        }
        Ok(wire)
    }

    /// The brokers that the metadata lists, as "host:port", provided that there is a controller.
    pub(super) fn brokers(&mut self) -> Result<Vec<String>> {
        let answer = self.ask(3, 1, &0_u32.to_be_bytes())?; // Metadata of no topics
        let mut rest = &answer[..];
        let mut brokers = Vec::new();
        for _ in 0..int32(&mut rest)? {
            int32(&mut rest)?; // node
            let host = read_string(&mut rest)?;
            brokers.push(format!("{host}:{}", int32(&mut rest)?));
            read_string(&mut rest)?; // rack
        }
        ensure!(int32(&mut rest)? >= 0, "no controller yet");
        Ok(brokers)
    }

    /// Makes a topic and waits until the broker has it.
    pub(super) fn create_topic(&mut self, name: &str, partitions: u32, settings: &[(&str, &str)]) -> Result<()> {
        let mut body = 1_u32.to_be_bytes().to_vec();
        string(&mut body, name);
        body.extend_from_slice(&partitions.to_be_bytes());
        body.extend_from_slice(&1_u16.to_be_bytes()); // replicas
        body.extend_from_slice(&0_u32.to_be_bytes()); // no assignments of our own
        body.extend_from_slice(&u32::try_from(settings.len())?.to_be_bytes());
        for (key, value) in settings {
            string(&mut body, key);
            string(&mut body, value);
        }
        body.extend_from_slice(&30_000_u32.to_be_bytes()); // time-out, ms
        body.push(0); // not only validated
        let answer = self.ask(19, 2, &body)?; // CreateTopics
        let mut rest = answer.get(8..).context("a short answer")?; // throttle time, one topic
        read_string(&mut rest)?;
        let code = i16::from_be_bytes(read_vec(&mut rest, 2)?.try_into().expect("two bytes were asked for"));
        ensure!(code == 0, "the broker does not make the topic {name}: error {code}");
        Ok(())
    }

    fn ask(&mut self, api: u16, version: u16, body: &[u8]) -> Result<Vec<u8>> {
        let mut request = Vec::new();
        request.extend_from_slice(&api.to_be_bytes());
        request.extend_from_slice(&version.to_be_bytes());
        request.extend_from_slice(&7_u32.to_be_bytes()); // correlation id; one request at a time needs no other
        string(&mut request, "postbox-testkit");
        request.extend_from_slice(body);
        self.0.write_all(&u32::try_from(request.len())?.to_be_bytes())?;
        self.0.write_all(&request)?;
        let length = int32(&mut self.0)?;
        let answer = read_vec(&mut self.0, length.try_into()?)?;
        Ok(answer.get(4..).context("a short answer")?.to_vec())
    }
}

fn string(into: &mut Vec<u8>, text: &str) {
    into.extend_from_slice(&u16::try_from(text.len()).expect("a Kafka string is under 64 KiB").to_be_bytes());
    into.extend_from_slice(text.as_bytes());
}
fn int32(from: &mut impl Read) -> Result<i32> {
    Ok(i32::from_be_bytes(read_vec(from, 4)?.try_into().expect("four bytes were asked for")))
}
/// Empty for null, too.
fn read_string(from: &mut impl Read) -> Result<String> {
    let length = i16::from_be_bytes(read_vec(from, 2)?.try_into().expect("two bytes were asked for"));
    Ok(String::from_utf8(read_vec(from, usize::try_from(length).unwrap_or_default())?)?)
}

//! The proxy's faults, in front of an echo server.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use postbox_testkit::services::{Mode, Side, TcpProxy};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Echoes; its port.
fn echo() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || std::io::copy(&mut stream.try_clone().unwrap(), &mut &stream));
        }
    });
    port
}

fn connect(proxy: &TcpProxy) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port()))?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    Ok(stream)
}

fn says(stream: &mut TcpStream, text: &str) -> std::io::Result<String> {
    stream.write_all(text.as_bytes())?;
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer)?;
    Ok(String::from_utf8(answer).unwrap())
}

#[test]
fn it_passes_refuses_and_passes_again() {
    let proxy = TcpProxy::start(echo()).unwrap();
    let mut stream = connect(&proxy).unwrap();
    assert_eq!(says(&mut stream, "hello").unwrap(), "hello");
    proxy.set(Mode::Refuse);
    assert!(says(&mut stream, "hello").is_err(), "open connections are cut");
    assert_eq!(connect(&proxy).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    proxy.set(Mode::Pass);
    assert_eq!(says(&mut connect(&proxy).unwrap(), "again").unwrap(), "again");
}

#[test]
fn silence_is_neither_answer_nor_close_and_ends() {
    let proxy = TcpProxy::start(echo()).unwrap();
    let mut stream = connect(&proxy).unwrap();
    assert_eq!(says(&mut stream, "a").unwrap(), "a");
    proxy.set(Mode::Silent);
    stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let kind = says(&mut stream, "b").unwrap_err().kind();
    assert!(matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{kind}");
    proxy.set(Mode::Pass);
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut held = [0];
    stream.read_exact(&mut held).unwrap();
    assert_eq!(&held, b"b", "what was held goes on");
}

#[test]
fn a_delay_is_paid_in_both_directions() {
    let proxy = TcpProxy::start(echo()).unwrap();
    let mut stream = connect(&proxy).unwrap();
    proxy.set(Mode::Delay(Duration::from_millis(100)));
    let start = Instant::now();
    assert_eq!(says(&mut stream, "slow").unwrap(), "slow");
    assert!(start.elapsed() >= Duration::from_millis(200));
}

#[test]
fn a_cut_comes_after_so_many_bytes_and_once() {
    let proxy = TcpProxy::start(echo()).unwrap();
    let mut stream = connect(&proxy).unwrap();
    proxy.set(Mode::CutAfter { bytes: 3, of: Side::Server });
    stream.write_all(b"hello").unwrap();
    let mut got = Vec::new();
    let _ = stream.read_to_end(&mut got); // a reset is an end too
    assert_eq!(got, b"hel");
    assert_eq!(says(&mut connect(&proxy).unwrap(), "hello").unwrap(), "hello");
    assert_eq!(proxy.accepted(), 2);
}

#[test]
fn a_cut_closes_what_is_open() {
    let proxy = TcpProxy::start(echo()).unwrap();
    let mut stream = connect(&proxy).unwrap();
    assert_eq!(says(&mut stream, "x").unwrap(), "x");
    proxy.cut();
    assert!(says(&mut stream, "x").is_err());
    assert_eq!(says(&mut connect(&proxy).unwrap(), "y").unwrap(), "y");
}

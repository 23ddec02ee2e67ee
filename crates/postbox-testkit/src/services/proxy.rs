//! A TCP proxy in front of a real server, to make its network fail on command: refuse, fall silent, delay, cut.
//! Threads, not tasks: it must go on while the runtime under test is blocked, paused or gone.

use super::requests::{Api, Requests};
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// What the proxy does with connections, those that are open included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Passes everything on.
    Pass,
    /// Cuts what is open and refuses new connections, as a stopped server does.
    Refuse,
    /// Passes nothing on, not even a close, and says nothing: packets dropped by a firewall, a half-open connection.
    /// What was held goes on when the mode changes, as TCP's retransmission would have it.
    Silent,
    /// Each piece (64 KiB at most) waits so long, in both directions.
    Delay(Duration),
    /// Once so many bytes were passed on from that side, cuts the connection that it happened on, and passes again.
    /// Zero bytes of the server: the request arrives, its answer is lost.
    CutAfter { bytes: usize, of: Side },
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Client,
    Server,
}

/// A proxy on a free port of 127.0.0.1. Dropping it cuts everything.
pub struct TcpProxy {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    upstream: u16,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    mode: Mode,
    listening: bool,
    stopped: bool,
    accepted: usize,
    answered: usize,
    asked: HashMap<u16, usize>,
    open: Vec<(usize, TcpStream)>,
}

impl TcpProxy {
    /// A proxy to a port of 127.0.0.1 that passes everything on.
    ///
    /// # Errors
    /// There is no free port.
    pub fn start(upstream: u16) -> Result<TcpProxy> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port on 127.0.0.1")?;
        let port = listener.local_addr()?.port();
        let state = State {
            mode: Mode::Pass,
            listening: true,
            stopped: false,
            accepted: 0,
            answered: 0,
            asked: HashMap::new(),
            open: Vec::new(),
        };
        let shared = Arc::new(Shared { upstream, state: Mutex::new(state), changed: Condvar::new() });
        let theirs = shared.clone();
        thread::spawn(move || theirs.listen(listener, port));
        Ok(TcpProxy { port, shared })
    }

    pub fn port(&self) -> u16 {
        self.port
    }
    /// What it does now: `CutAfter` has become `Pass` once the connection was cut.
    pub fn mode(&self) -> Mode {
        self.shared.lock().mode
    }
    /// Connections accepted so far.
    pub fn accepted(&self) -> usize {
        self.shared.lock().accepted
    }
    /// Bytes of the server passed on so far.
    pub fn answered(&self) -> usize {
        self.shared.lock().answered
    }

    /// In front of a Kafka broker: requests of this kind that clients have sent so far, passed on or not.
    pub fn asked(&self, api: Api) -> usize {
        self.shared.lock().asked.get(&(api as u16)).copied().unwrap_or_default()
    }

    /// Changes the mode; when it returns, it holds.
    pub fn set(&self, mode: Mode) {
        let mut state = self.shared.lock();
        state.mode = mode;
        if mode == Mode::Refuse {
            state.cut();
        }
        self.shared.changed.notify_all();
        drop(state);
        if mode == Mode::Refuse {
            let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)); // wakes the listener, to close itself
        }
        let wanted = mode != Mode::Refuse;
        let state = self.shared.lock();
        drop(self.shared.changed.wait_while(state, |s| s.listening != wanted && !s.stopped));
    }

    /// Cuts the connections that are open now; the mode stays.
    pub fn cut(&self) {
        self.shared.lock().cut();
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stopped = true;
        state.cut();
        self.shared.changed.notify_all();
        drop(state);
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)); // wakes the listener, to end
    }
}

impl State {
    fn cut(&mut self) {
        for (_, stream) in self.open.drain(..) {
            let _ = stream.shutdown(Shutdown::Both); // closed already is as good
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(self: Arc<Self>, mut listener: TcpListener, port: u16) {
        loop {
            let client = listener.accept();
            let mut state = self.lock();
            if state.stopped {
                return;
            }
            if state.mode == Mode::Refuse {
                drop(listener);
                let Some(anew) = self.refuse(state, port) else { return };
                listener = anew;
            } else if let Ok((client, _)) = client {
                state.accepted += 1;
                let number = state.accepted;
                drop(state);
                let shared = self.clone();
                thread::spawn(move || shared.connect(client, number));
            }
        }
    }

    /// Waits without a listener until the mode changes; then listens again. `None`: stopped, or the port is taken.
    fn refuse(&self, mut state: MutexGuard<'_, State>, port: u16) -> Option<TcpListener> {
        state.listening = false;
        self.changed.notify_all();
        let waiting = self.changed.wait_while(state, |s| s.mode == Mode::Refuse && !s.stopped);
        let mut state = waiting.unwrap_or_else(PoisonError::into_inner);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok().filter(|_| !state.stopped);
        state.listening = true;
        state.stopped |= listener.is_none();
        self.changed.notify_all();
        listener
    }

    /// Joins a client to the server; without a server the client is cut.
    fn connect(self: Arc<Self>, client: TcpStream, number: usize) {
        let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, self.upstream)) else { return };
        let (Ok(client2), Ok(server2)) = (client.try_clone(), server.try_clone()) else { return };
        let (Ok(client3), Ok(server3)) = (client.try_clone(), server.try_clone()) else { return };
        let _ = (client.set_nodelay(true), server.set_nodelay(true)); // only speed rests on it
        self.lock().open.extend([(number, client3), (number, server3)]);
        let shared = self.clone();
        thread::spawn(move || shared.pump(server2, client2, number, Side::Server));
        self.pump(client, server, number, Side::Client);
    }

    fn pump(&self, mut from: TcpStream, mut to: TcpStream, number: usize, side: Side) {
        let mut buffer = vec![0; 64 << 10];
        let mut requests = Requests::default();
        loop {
            let n = from.read(&mut buffer).unwrap_or(0);
            if side == Side::Client {
                for kind in requests.kinds(&buffer[..n]) {
                    *self.lock().asked.entry(kind).or_default() += 1;
                }
            }
            let Some((n, cut)) = self.pass(n, side) else { break };
            if to.write_all(&buffer[..n]).is_err() || n == 0 || cut {
                break;
            }
        }
        // A half-closed connection is of no use to the protocols in question: both directions end together.
        let mut state = self.lock();
        for (_, stream) in state.open.extract_if(.., |(of, _)| *of == number) {
            let _ = stream.shutdown(Shutdown::Both); // closed already is as good
        }
    }

    /// Waits as the mode says; how many of `n` bytes to pass on, and whether to cut then. `None`: stopped.
    fn pass(&self, n: usize, side: Side) -> Option<(usize, bool)> {
        let state = self.lock();
        let waiting = self.changed.wait_while(state, |s| s.mode == Mode::Silent && !s.stopped);
        let mut state = waiting.unwrap_or_else(PoisonError::into_inner);
        if state.stopped {
            return None;
        }
        state.answered += if side == Side::Server { n } else { 0 };
        match state.mode {
            Mode::Delay(pause) => {
                drop(state);
                thread::sleep(pause);
            }
            Mode::CutAfter { bytes, of } if of == side && n > 0 => {
                if n >= bytes {
                    state.mode = Mode::Pass;
                    return Some((bytes, true));
                }
                state.mode = Mode::CutAfter { bytes: bytes - n, of };
            }
            _ => {}
        }
        Some((n, false))
    }
}

//! Under a connection: its stream, plain or TLS. tokio-postgres connects, and reads through a handle that shares the
//! stream, so that it can be taken over once the connection is set up (see `wire`). It lets nobody but TLS have a stream;
//! so plain text is, for it, a TLS that is not negotiated and changes nothing.

use std::error::Error;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::Config;
use tokio_postgres::config::{SslMode, SslNegotiation};
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_postgres_rustls::MakeRustlsConnect;

/// A connection's stream.
pub(crate) type Stream = Box<dyn TlsStream + Send + Sync + Unpin>;

/// Makes the stream of a connection, and keeps a handle on the last one that it made.
#[derive(Clone)]
pub(crate) struct Dial {
    tls: Option<MakeRustlsConnect>,
    host: String,
    made: Arc<Mutex<Option<Shared>>>,
}

impl Dial {
    /// `tls`: none for plain text. The configuration is set accordingly.
    pub(crate) fn new(tls: Option<MakeRustlsConnect>, config: &mut Config) -> Dial {
        if tls.is_none() {
            config.ssl_mode(SslMode::Require).ssl_negotiation(SslNegotiation::Direct);
        }
        Dial { tls, host: String::new(), made: Arc::default() }
    }

    /// The stream of the connection that was made.
    pub(crate) fn made(&self) -> Option<Shared> {
        lock(&self.made).take()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static> MakeTlsConnect<S> for Dial {
    type Stream = Shared;
    type TlsConnect = Dial;
    type Error = io::Error;

    fn make_tls_connect(&mut self, host: &str) -> io::Result<Dial> {
        Ok(Dial { host: host.to_owned(), ..self.clone() })
    }
}

impl<S: AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static> TlsConnect<S> for Dial {
    type Stream = Shared;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Shared, Self::Error>> + Send>>;

    fn connect(mut self, stream: S) -> Self::Future {
        Box::pin(async move {
            let stream: Stream = match &mut self.tls {
                None => Box::new(Plain(stream)),
                Some(tls) => {
                    let tls = MakeTlsConnect::<S>::make_tls_connect(tls, &self.host)?;
                    Box::new(tls.connect(stream).await?)
                }
            };
            let shared = Shared(Arc::new(Mutex::new(stream)));
            *lock(&self.made) = Some(shared.clone());
            Ok(shared)
        })
    }
}

/// What tokio-postgres reads from and writes to.
#[derive(Clone)]
pub(crate) struct Shared(Arc<Mutex<Stream>>);

impl Shared {
    /// The stream itself, if this is the last handle on it.
    pub(crate) fn into_stream(self) -> Option<Stream> {
        Arc::into_inner(self.0).map(|stream| stream.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

impl TlsStream for Shared {
    fn channel_binding(&self) -> ChannelBinding {
        lock(&self.0).channel_binding()
    }
}

impl AsyncRead for Shared {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *lock(&self.0)).poll_read(context, into)
    }
}

impl AsyncWrite for Shared {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *lock(&self.0)).poll_write(context, bytes)
    }
    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *lock(&self.0)).poll_flush(context)
    }
    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *lock(&self.0)).poll_shutdown(context)
    }
}

/// A stream as it is.
pub(crate) struct Plain<S>(pub(crate) S);

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Plain<S> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Plain<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Plain<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

//! Where events go. A sink reports one outcome per message, and an outcome it does not know is never success.

use crate::Message;
use std::future::Future;
use std::time::Duration;

/// Where events go. See the suite in `postbox-testkit` for the rules that each sink must pass.
pub trait Sink: Send + Sync + 'static {
    /// What the relay must keep to; the same at every call.
    fn limits(&self) -> Limits;

    /// Connects ahead of the first send, in the background. Returns at once and tells nothing: what goes wrong is for
    /// `send` to say. A relay calls it before it asks for its lease, so that one that stands by is connected too.
    fn prepare(&self) {}

    /// Sends a batch; one outcome per message, in the same order. The relay calls it again while earlier calls
    /// still run, up to `in_flight_max`. Dropping the future gives the batch up: what was not sent yet is not sent
    /// any more, and nothing counts as acknowledged.
    fn send(&self, batch: &[Message]) -> impl Future<Output = Vec<Result<(), SendError>>> + Send;

    /// Connects and checks rights, and sends no event.
    fn check(&self) -> impl Future<Output = Result<(), SendError>> + Send;
}

/// What a sink can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Messages in one batch.
    pub batch_max: usize,
    /// Bytes in one batch, as [`crate::Message::bytes`] counts them; a single greater message goes alone.
    pub bytes_max: usize,
    /// Batches at the same time.
    pub in_flight_max: usize,
    /// Messages of one key reach the broker in the order of the calls, also across batches in flight, and when one
    /// is not accepted for a reason of the destination none behind it in its key is. Otherwise at most one message
    /// of a key is in flight.
    pub keeps_key_order: bool,
}

/// Why a message was not acknowledged.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct SendError {
    /// What the relay does about it.
    pub kind: SendErrorKind,
    /// What the destination said; never the payload, never a secret.
    pub message: String,
    /// What the destination asked for (`Retry-After`).
    pub retry_after: Option<Duration>,
}

/// Whose fault it is, which decides what happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendErrorKind {
    /// This message will never be accepted: dead at once.
    Rejected,
    /// An answer about this message; a later try may succeed. Costs an attempt.
    Failed,
    /// The destination cannot take anything now: the stream pauses, no attempt is spent.
    Unavailable,
    /// No answer. It may have been accepted: sent again with the same id; the stream pauses, no attempt is spent.
    Unknown,
    /// Left out, since an earlier message of its key was refused: it goes where that one's verdict sends it.
    Behind,
}

impl SendError {
    /// An error after which the sink asks for no pause of its own.
    pub fn new(kind: SendErrorKind, message: impl Into<String>) -> SendError {
        SendError { kind, message: message.into(), retry_after: None }
    }
}

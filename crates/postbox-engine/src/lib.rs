//! The relay's engine. It knows where events come from ([`Source`]), where they go ([`Sink`]), in which order
//! they may be sent ([`Lanes`]) and what to do when that fails ([`Retry`]); [`Relay`] is the loop that joins them.
//!
//! No database, no broker and no wall clock: durations come from tokio's timer, which the simulator drives in
//! virtual time, and randomness comes from a seed. The engine that is simulated is the engine that runs.

mod backlog;
#[allow(missing_docs, reason = "a getter says what its field in EventParts says")]
mod event;
mod lanes;
mod log;
mod message;
#[cfg(feature = "planted")]
pub mod planted;
#[cfg(not(feature = "planted"))]
mod planted;
mod relay;
mod retry;
mod route;
mod sink;
mod source;
mod telemetry;

pub use backlog::{Backlog, Changes, DeadPolicy, HeldChange, HeldState};
pub use event::{Event, EventParts, PageBuilder, key_of};
pub use lanes::{Batch, Lanes, Outcome};
pub use log::{HeldEvent, HeldPage, HeldQuery, Loaded, Log, LogPage, LogSource, repeated_max};
pub use message::{Headers, Message};
pub use relay::{Relay, RelayOptions, Stopped};
pub use retry::{Retry, Rng};
pub use route::{Envelope, Route, RouteError, Rule};
pub use sink::{Limits, SendError, SendErrorKind, Sink};
pub use source::{Claim, ClaimLimit, Claimed, Settlement, Source, SourceError, SourceErrorKind, Verdict};
pub use telemetry::{Counters, Snapshot};

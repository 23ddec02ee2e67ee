//! The outbox in memory, pure: the buffer of the log sources, the reference model of the tests, and the fake
//! database of the simulator. It alone decides which event may go next and when the cursor may pass.

use crate::Event;
use std::sync::Arc;
use std::time::Duration;

/// What a dead event does to the events of its key behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeadPolicy {
    /// They go on.
    #[default]
    Skip,
    /// They wait for an operator.
    Block,
}

/// The state of an event that the cursor has passed but that was not published then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeldState {
    /// Failed; tried again when due.
    Retry,
    /// Behind a failed event of its key.
    Waiting,
    /// Not available before it is due.
    Delayed,
    /// Never again without an operator.
    Dead,
    /// Asked for again by an operator.
    Replay,
    /// Published after all.
    Done,
}

/// A held row to write: inserted, or updated when the event is held already.
#[derive(Clone, Debug)]
pub struct HeldChange {
    pub event: Event,
    pub state: HeldState,
    pub attempts: u32,
    /// From the database's now; zero where it does not matter.
    pub due: Duration,
    pub error: Option<Arc<str>>,
}

/// What settling changes in the database, all or none.
#[derive(Clone, Debug)]
pub struct Changes<M> {
    /// The cursor's new position, if it moves.
    pub mark: Option<M>,
    /// Events that the cursor passes by this move.
    pub events: u32,
    /// The greatest event id among them; zero without any.
    pub max_id: i64,
    pub held: Vec<HeldChange>,
}

/// Stub.
#[derive(Debug)]
pub struct Backlog<M>(std::marker::PhantomData<M>);

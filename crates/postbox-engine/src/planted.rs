//! Bugs that are planted on purpose, so that tests show that the simulator would find their like. Only with the
//! feature `planted`, which the simulator alone asks for: without it [`is`] is `false` at compile time, and the
//! binary holds none of this. A bug is planted for one thread, since each simulated run is one thread.

/// What can be planted; each name says what goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "planted"),
    expect(dead_code, unreachable_pub, reason = "public with the feature; some are planted in the simulator")
)]
pub enum Bug {
    /// A send without an outcome counts as success.
    UnknownIsSuccess,
    /// The outcomes of a batch come back in the wrong order.
    OutcomesReversed,
    /// An outage of the destination is taken for an answer about the event.
    OutageCostsAttempt,
    /// A lane goes on with the events behind a failed one.
    LaneGoesOn,
    /// Draining reports what it never sent as published.
    DrainPublishes,
    /// The relay goes on sending when it cannot prove its lease any more.
    LeaseDeadlineIgnored,
    /// Claims are answered while verdicts on their keys are still on their way.
    VerdictsLate,
    /// What is released counts as published.
    ReleaseIsPublished,
    /// The cursor passes a page while events in it are undecided.
    CursorPassesUndecided,
    /// Fresh events go before released ones.
    FreshBeforeAgain,
    /// Events that wait behind a key are forgotten when it opens.
    WaitingForgotten,
    /// A failed event is tried again before its time.
    RetryBeforeDue,
    /// An event goes out before it is available.
    DelayIgnored,
    /// Held rows are claimed as they stand in the database while newer verdicts on them are unwritten.
    HeldRowsStale,
    /// A released held event is not asked for again.
    ReleasedHeldForgotten,
    /// After a failed write, which may take effect late, the next one of the same epoch follows.
    WritesAfterFailure,
    /// A relay that is stopped while the source is out keeps its lease.
    StopKeepsLease,
    /// The keys in trouble are not loaded when a tenure begins.
    TroubleNotLoaded,
    /// The first held row alone says whether a key is blocked.
    FirstRowDecides,
    /// The database records verdicts of a relay that lost its lease.
    SettleNotFenced,
    /// The log leaves out the first event of a page in the middle of a window.
    PageSkipsEvent,
}

#[cfg(feature = "planted")]
mod on {
    use super::Bug;
    use std::cell::Cell;

    thread_local! {
        static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// This bug is planted in this thread.
    pub fn is(bug: Bug) -> bool {
        PLANTED.get() == Some(bug)
    }
    /// Plants a bug in this thread, or none.
    pub fn plant(bug: Option<Bug>) {
        PLANTED.set(bug);
    }
}
#[cfg(feature = "planted")]
pub use on::{is, plant};

/// Never: nothing is planted.
#[cfg(not(feature = "planted"))]
pub(crate) const fn is(_: Bug) -> bool {
    false
}

#[cfg(not(feature = "planted"))]
const _: () = assert!(!is(Bug::LaneGoesOn), "the binary holds no planted bug");

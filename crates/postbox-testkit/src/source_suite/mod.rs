//! The rules that every [`Source`] must pass. A source's tests implement [`Harness`] and say
//! `postbox_testkit::source_suite!(MyHarness)`: one test per rule, each on a fresh outbox.
//!
//! That something does not come is shown by what comes instead: an event written later, of another key. A source may
//! record a verdict only with those of the events read beside it, so the rules settle all that is in hand; and after a
//! crash, not after a clean stop, what was published may come again.

mod hand;
mod held;
mod lease;
mod order;
mod payload;

pub use held::*;
pub use lease::*;
pub use order::*;
pub use payload::*;

use postbox_engine::{DeadPolicy, Source};
use std::future::Future;
use std::time::Duration;

/// Makes outboxes for the rules.
pub trait Harness: Sync {
    type Outbox: Outbox;
    /// A fresh, empty outbox.
    fn outbox(&self) -> impl Future<Output = Self::Outbox> + Send;
}

/// An outbox that a rule writes into and opens sources over.
pub trait Outbox: Sync {
    type Source: Source;
    /// A source of its own, with connections of its own: as another relay would have it. Dropping it is the relay's
    /// crash: its lease is left to expire.
    fn source(&self, setup: Setup) -> impl Future<Output = Self::Source> + Send;
    /// Writes events, in this order, in one transaction that commits or rolls back.
    fn write(&self, drafts: &[Draft], end: End) -> impl Future<Output = ()> + Send;
}

/// How a source is opened.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The name of the relay, and what makes it another one.
    pub relay: &'static str,
    pub stream: &'static str,
    pub lease: Duration,
    pub policy: DeadPolicy,
}

/// How the writer's transaction ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Commit,
    Rollback,
}

/// What an application writes.
#[derive(Clone, Debug)]
pub struct Draft {
    /// `None`: the table makes it.
    pub event_id: Option<[u8; 16]>,
    pub aggregate_type: String,
    pub aggregate_id: String,
    pub aggregate_seq: Option<i64>,
    pub event_type: String,
    pub schema_version: i32,
    pub payload: Payload,
    pub content_type: String,
    /// A JSON object of strings.
    pub headers: String,
    pub destination: Option<String>,
    /// Not available before so long after the write.
    pub delay: Option<Duration>,
}

/// The three things that must stay three.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// SQL NULL: a tombstone.
    Null,
    Json(String),
    Binary(Vec<u8>),
}

impl Payload {
    /// What must arrive.
    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            Payload::Null => None,
            Payload::Json(text) => Some(text.as_bytes()),
            Payload::Binary(bytes) => Some(bytes),
        }
    }
}

impl Default for Draft {
    fn default() -> Draft {
        Draft {
            event_id: None,
            aggregate_type: "order".into(),
            aggregate_id: "1".into(),
            aggregate_seq: None,
            event_type: "order.placed".into(),
            schema_version: 1,
            payload: Payload::Json("{}".into()),
            content_type: "application/json".into(),
            headers: "{}".into(),
            destination: None,
            delay: None,
        }
    }
}

/// One `#[test]` per rule, for a harness: `postbox_testkit::source_suite!(MyHarness)`.
#[macro_export]
macro_rules! source_suite {
    ($harness:expr) => {
        $crate::source_suite!(@rules $harness;
            committed_events_come_in_order_and_rolled_back_ones_never
            a_claim_is_a_prefix_of_each_key_within_its_limits
            a_waiting_claim_wakes_for_a_new_event
            a_dropped_claim_loses_nothing
            a_release_costs_no_attempt
            a_crash_loses_nothing
            a_clean_stop_repeats_nothing
            streams_are_independent
            a_lease_keeps_others_out_and_is_handed_over_at_once
            a_lease_that_runs_out_is_taken_over
            a_lost_lease_settles_nothing
            a_stop_while_acquiring_records_nothing_old
            a_repeated_settle_changes_nothing
            a_retry_comes_back_with_its_attempts_and_not_before_its_time
            events_behind_a_retry_wait_for_it
            a_retry_survives_a_restart
            a_retry_blocks_its_key_after_a_restart
            a_dead_event_frees_its_key_under_skip
            a_dead_event_holds_its_key_under_block
            a_delayed_event_waits_alone
            a_blocked_key_with_many_waiting_slows_no_other
            held_events_come_within_the_bytes_and_in_order
            payload_bytes_in_are_bytes_out
            all_fields_arrive_as_written
            long_names_arrive_whole
        );
    };
    (@rules $harness:expr; $($rule:ident)*) => {
        $(#[test]
        fn $rule() {
            $crate::run_rule($crate::source_suite::$rule(&$harness));
        })*
    };
}

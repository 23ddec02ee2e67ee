//! The rules that every [`Sink`] must pass. A sink's tests implement [`Harness`] and say
//! `postbox_testkit::sink_suite!(MyHarness)`: one test per rule, each on a fresh destination.
//!
//! The rules send as the engine does: within the sink's limits, and no two messages of a key at once where the sink
//! does not keep their order.

mod content;
mod delivery;
mod hand;
mod outage;

pub use content::*;
pub use delivery::*;
pub use outage::*;

use postbox_engine::Sink;
use std::future::Future;

/// Makes destinations for the rules.
pub trait Harness: Sync {
    type Destination: Destination;
    /// A fresh, empty topic, endpoint or file.
    fn destination(&self) -> impl Future<Output = Self::Destination> + Send;
}

/// A place that a rule sends to, and looks at from the other side.
pub trait Destination: Sync {
    type Sink: Sink;
    fn nature(&self) -> Nature;
    /// What the messages' `destination` says.
    fn name(&self) -> String;
    /// A sink of its own to this destination, as another relay would have it.
    fn sink(&self) -> impl Future<Output = Self::Sink> + Send;
    /// All that is there, those of one key in their order; waits until there are so many (the rule has the deadline).
    fn received(&self, at_least: usize) -> impl Future<Output = Vec<Received>> + Send;
    /// Takes the destination down, as a crash or a refused connection does; returns when it is.
    fn down(&self) -> impl Future<Output = ()> + Send;
    /// Brings it back.
    fn up(&self) -> impl Future<Output = ()> + Send;
    /// What the sink finds wrong with a destination before it sends anything; `None` where it cannot know.
    fn complaints(&self, sink: &Self::Sink, name: &str) -> impl Future<Output = Option<Vec<String>>> + Send;
}

/// What is particular to a kind of destination.
#[derive(Clone, Debug)]
pub struct Nature {
    /// A message with a body of more bytes is rejected. `None`: there is no limit.
    pub body_bytes_max: Option<usize>,
    /// What arrives of a tombstone. `None`: no body, other than an empty one.
    pub tombstone: Option<Vec<u8>>,
    /// Headers arrive whatever they hold, also binary, and repeated. Otherwise such a message may be rejected, and the
    /// others must arrive.
    pub any_header: bool,
    /// The key arrives.
    pub keyed: bool,
    /// `down` and `up` do something.
    pub outage: bool,
    /// A destination that does not exist, where there is such a thing; an answer about it concerns one event only.
    pub missing: Option<String>,
}

/// What the destination has of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    pub event_id: [u8; 16],
    /// Empty where keys do not arrive.
    pub key: String,
    /// `None`: no body at all.
    pub body: Option<Vec<u8>>,
    /// In their order; others than those of the message may be among them.
    pub headers: Vec<(String, Vec<u8>)>,
}

/// One `#[test]` per rule, for a harness: `postbox_testkit::sink_suite!(MyHarness)`.
#[macro_export]
macro_rules! sink_suite {
    ($harness:expr) => {
        $crate::sink_suite!(@rules $harness;
            each_message_has_its_outcome_and_arrives_once_in_order
            calls_keep_the_order_of_a_key
            a_full_batch_arrives
            two_sinks_do_not_disturb_each_other
            an_empty_batch_has_no_outcomes
            bodies_arrive_byte_for_byte
            a_tombstone_is_not_an_empty_body
            headers_arrive_or_are_refused_with_their_message
            long_and_odd_keys_arrive
            too_large_a_message_is_rejected_alone
            a_missing_destination_concerns_its_messages_only
            a_check_sends_no_message
            an_outage_is_never_success_and_loses_nothing
            a_dropped_send_acknowledges_nothing
        );
    };
    (@rules $harness:expr; $($rule:ident)*) => {
        $(#[test]
        fn $rule() {
            $crate::run_rule($crate::sink_suite::$rule(&$harness));
        })*
    };
}

//! The source suite on the outbox in memory: it passes, and a source with a bug does not.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod memory;
mod planted;

use memory::{Bug, Memory};
use postbox_testkit::source_suite;

source_suite!(Memory(None));

planted::planted! {
    source_suite, |bug| Memory(Some(bug));
    an_unfenced_settle: SettleUnfenced is caught by a_lost_lease_settles_nothing as "the lease is lost"
    an_ignored_lease: LeaseIgnored is caught by a_lease_keeps_others_out_and_is_handed_over_at_once as "second relay got the lease"
    an_early_takeover: LeaseIgnored is caught by a_lease_that_runs_out_is_taken_over as "while the lease was proven"
    an_early_retry: RetryTooEarly is caught by a_retry_survives_a_restart as "due after"
    forgotten_attempts: AttemptsForgotten is caught by a_retry_survives_a_restart as "left"
    held_rows_not_loaded: HeldNotLoaded is caught by a_dead_event_holds_its_key_under_block as "left"
    a_skipped_event: ReadSkipsOne is caught by a_claim_is_a_prefix_of_each_key_within_its_limits as "there is more"
    a_visible_rollback: RollbackVisible is caught by committed_events_come_in_order_and_rolled_back_ones_never as "left"
    a_read_that_loses_its_page: ReadNotCancelSafe is caught by a_dropped_claim_loses_nothing as "something to claim"
    an_ignored_delay: DelayIgnored is caught by a_delayed_event_waits_alone as "expected"
    a_trimmed_payload: PayloadTrimmed is caught by payload_bytes_in_are_bytes_out as "came otherwise"
    a_release_that_keeps_the_lease: ReleaseKeepsLease is caught by a_lease_keeps_others_out_and_is_handed_over_at_once as "lease"
}

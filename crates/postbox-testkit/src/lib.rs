//! What the tests of postbox stand on: real servers that end with the test (`services`), the rules that every
//! source and every sink must pass (`source_suite`, `sink_suite`), wrappers that fail on command (`faulty`), and writers
//! that leave nothing out (`adversary`).

#![allow(missing_docs, reason = "for our own tests alone: what needs words has them")]

pub mod adversary;
pub mod faulty;
pub mod services;
pub mod sink_suite;
pub mod source_suite;

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

/// A rule that takes longer hangs: no wait in the suites is longer than a third of it.
const RULE_MAX: Duration = Duration::from_secs(300);

thread_local! {
    static SOON: Cell<Duration> = const { Cell::new(Duration::from_secs(60)) };
}

/// Whatever a rule waits for happens within this, also on a busy machine.
fn soon() -> Duration {
    SOON.get()
}

/// From now on, rules on this thread call what has not come within ten seconds missing: for a harness in memory, with a
/// bug for which it never comes.
pub fn be_impatient() {
    SOON.set(Duration::from_secs(10));
}

/// Runs one rule of a suite on a runtime of its own.
///
/// # Panics
/// When the rule is broken, or hangs.
pub fn run_rule(rule: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime starts");
    let limited = async { tokio::time::timeout(RULE_MAX, rule).await };
    assert!(runtime.block_on(limited).is_ok(), "the rule hangs: nothing for {RULE_MAX:?}");
}

/// Runs a call and drops it, unless it is done before: after one to four polls, or after `pause` times the square of
/// the step, so that growing steps cut it at every stage of its work.
async fn cut_short<F: Future>(call: F, step: u32, pause: Duration) -> Option<F::Output> {
    let mut call = pin!(call);
    for _ in 0..=step % 4 {
        if let Poll::Ready(output) = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    if step.is_multiple_of(3) {
        return None;
    }
    tokio::time::timeout(pause * step * step, call).await.ok() // a timer ticks in milliseconds
}

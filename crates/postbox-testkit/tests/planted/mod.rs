//! Rules that must notice a bug, shared by both suites' tests.

use postbox_testkit::run_rule;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a rule says of a harness with a bug; that it says nothing is a failure.
pub(crate) fn caught<H: 'static, F: Future<Output = ()>>(harness: H, rule: impl FnOnce(&'static H) -> F) -> String {
    postbox_testkit::be_impatient();
    let harness: &'static H = Box::leak(Box::new(harness));
    let panic = catch_unwind(AssertUnwindSafe(|| run_rule(rule(harness)))).expect_err("the bug went unnoticed");
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}

/// A test for each bug: the suite's rule catches it, and its message holds the text. `$harness` makes one with the bug.
macro_rules! planted {
    ($suite:ident, $harness:expr; $($test:ident: $bug:ident is caught by $rule:ident as $text:literal)*) => {
        $(#[test]
        fn $test() {
            let said = planted::caught($harness(Bug::$bug), |harness| postbox_testkit::$suite::$rule(harness));
            assert!(said.contains($text), "{said}");
        })*
    };
}
pub(crate) use planted;

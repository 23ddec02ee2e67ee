//! The simulator's own tests.

use postbox_sim::run;

#[test]
fn three_hundred_seeds_pass() {
    let summary = run(0..1_000, None).unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(summary.seeds, 1_000);
    println!("{summary:?}");
}

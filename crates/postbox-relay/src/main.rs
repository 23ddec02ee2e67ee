//! postbox
fn main() {}

//! cargo x
fn main() {}

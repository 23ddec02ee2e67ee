//! What the tests of postbox stand on: real servers that end with the test (`services`), the rules that every
//! source and every sink must pass (`source_suite`, `sink_suite`), and wrappers that fail on command (`faulty`).

pub mod services;

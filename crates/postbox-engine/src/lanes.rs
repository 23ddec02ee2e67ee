//! Which claimed event may be sent now. Pure: no clock, no I/O, no async.

/// Stub.
#[derive(Debug, Default)]
pub struct Lanes;
/// Stub.
#[derive(Debug)]
pub struct Batch;
/// Stub.
#[derive(Debug)]
pub struct Outcome;

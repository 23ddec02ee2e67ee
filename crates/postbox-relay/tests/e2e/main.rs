//! The built program against real servers, as a user runs it: its output, its exit codes, what arrives.

#![allow(clippy::unwrap_used)] // it is a test's report

mod adversarial;
mod bad_input;
mod command_line;
mod costs;
mod embedded_default;
#[cfg(feature = "kafka")]
mod faults;
mod harness;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(feature = "kafka")]
mod kafka_trouble;
mod mending;
mod pooler;
mod postgres;
#[cfg(feature = "webhook")]
mod troubles;
#[cfg(feature = "webhook")]
mod webhook;

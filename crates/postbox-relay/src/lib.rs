//! The relay and its command line.
//!
//! `postbox` the program is [`cli::main`]; a service that wants the relay inside itself calls [`run`] with a
//! [`config::Config`] and a stop signal. Both run the same engine over the same sources and sinks.

pub mod cli;
mod commands;
pub mod config;
mod database;
mod demo;
pub mod failure;
mod live;
mod run;
mod screen;
mod signals;

pub use postbox_engine::{Counters, Stopped};
pub use run::{Runner, migrate, run};

//! The built program against real servers, as a user runs it: its output, its exit codes, what arrives.

mod command_line;
mod embedded_default;
mod harness;
mod kafka;
mod postgres;

//! What the application's side promises, against real servers of the oldest and the newest version that are promised, and one between.

#![allow(clippy::unwrap_used)] // in a test it is the report

mod db;
mod looking;
mod payload;
mod refusals;
mod transactions;
mod waking;

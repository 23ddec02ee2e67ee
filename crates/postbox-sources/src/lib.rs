//! Where events come from. [`build`] is the whole registry: an enum and one `match`.

pub mod admin;
pub mod memory;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

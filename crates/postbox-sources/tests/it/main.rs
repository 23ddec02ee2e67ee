//! The sources against real databases.

#![allow(clippy::unwrap_used)] // in a test it is the report

#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

/// Two crates that do not know each other: what is refused at the write is what the relay cannot send.
#[test]
fn case_w5_the_names_refused_at_the_write_are_those_that_the_relay_writes() {
    assert_eq!(postbox::HEADERS_RESERVED, postbox_engine::Headers::OWN);
}

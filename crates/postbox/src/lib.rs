//! postbox

#[cfg(feature = "rusqlite")]
pub mod rusqlite;

//! postbox

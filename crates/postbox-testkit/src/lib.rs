//! postbox-testkit

//! postbox-sim

//! `postbox config`: the reference of all keys, and what is in force.

use super::print;
use crate::config::{self, DEFAULT_TOML};
use crate::failure::Failure;
use std::collections::BTreeMap;
use std::path::Path;

pub(crate) fn default() -> Result<(), Failure> {
    print(DEFAULT_TOML)
}

/// Only a configuration that can be used is shown.
pub(crate) fn in_force(file: Option<&Path>, environment: &BTreeMap<String, String>) -> Result<(), Failure> {
    config::load(file, environment)?;
    print(&config::shown(file, environment)?)
}

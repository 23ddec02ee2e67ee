//! Variables that look like ours and are none: a slip of the pen would else leave a default in force without a word.

use super::DEFAULT_TOML;
use super::load::{ConfigError, wrong};
use std::collections::BTreeMap;

/// The one of ours that sets no key.
pub(super) const CONFIG: &str = "POSTBOX_CONFIG";
/// Those of the project's tests, which may be set around a relay under test.
const OF_THE_TESTS: [&str; 2] = ["POSTBOX_CACHE", "POSTBOX_ADVERSARIAL_TRANSACTIONS"];

/// Refuses a variable that begins as ours do and that nobody reads. POSTBOX__ is left to the keys themselves.
///
/// # Errors
/// It is named, with the one that it most likely means.
pub(super) fn refuse(environment: &BTreeMap<String, String>) -> Result<(), ConfigError> {
    let is_ours = |name: &str| name.starts_with("POSTBOX__") || name == CONFIG || OF_THE_TESTS.contains(&name);
    let mut named = environment.keys().filter(|name| name.starts_with("POSTBOX_"));
    let Some(name) = named.find(|name| !is_ours(name) && !is_of_a_service(name)) else { return Ok(()) };
    let what = format!("environment variable {name} is none of postbox's");
    Err(wrong(what, format!("did you mean {}? Keys are POSTBOX__SECTION__KEY: postbox config default", nearest(name))))
}

/// Kubernetes sets these in every pod beside a Service that is called postbox or postbox-relay; nobody there could
/// mend it, and no key has such a name.
fn is_of_a_service(name: &str) -> bool {
    name.ends_with("_SERVICE_HOST") || name.ends_with("_PORT") || name.contains("_PORT_")
}

fn nearest(name: &str) -> String {
    let likeness = |known: &String| strsim::jaro_winkler(&plain(known), &plain(name));
    let near = known().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    near.expect("the default file has keys")
}

/// Without what people get wrong: the number of underscores.
fn plain(name: &str) -> String {
    name.split('_').filter(|word| !word.is_empty()).collect()
}

/// Every variable that is read: the default file names all keys.
fn known() -> impl Iterator<Item = String> {
    let mut section = String::new();
    let keys = DEFAULT_TOML.lines().filter_map(move |line| {
        let line = line.strip_prefix("# ").unwrap_or(line);
        if let Some((name, _)) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            section = name.replace('.', "__");
            return None;
        }
        let (key, _) = line.split_once(" = ")?;
        let is_key = !section.is_empty() && key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        is_key.then(|| format!("POSTBOX__{section}__{key}").to_uppercase())
    });
    keys.chain([CONFIG.to_owned()])
}

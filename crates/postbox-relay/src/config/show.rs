//! `postbox config print`: the values in force, defaults included, secrets masked.

use super::load::{ConfigError, overlaid};
use super::units::mask_url;
use super::{DEFAULT_TOML, DEFAULT_URL};
use std::collections::BTreeMap;
use std::path::Path;
use toml::{Table, Value};

/// What a key's name ends with when its value is nobody's business. A test holds it against the types.
const SECRET: [&str; 5] = ["password", "secret", "token", "key", "authorization"];
/// What names a place, though it ends like a secret.
const PLACE: [&str; 2] = ["_file", "_path"];

/// The configuration in force as a file. The tables of sinks that a stream does not use are left out.
///
/// # Errors
/// As [`super::load`].
pub(crate) fn shown(file: Option<&Path>, environment: &BTreeMap<String, String>) -> Result<String, ConfigError> {
    let mut given = overlaid(file, environment)?;
    let mut defaults: Table = DEFAULT_TOML.parse().expect("a test reads the default file");
    if let (Some(Value::Table(streams)), Some(Value::Table(known))) =
        (given.get_mut("stream"), defaults.get_mut("stream"))
    {
        let main = known.remove("main").expect("the default stream is `main`");
        known.extend(streams.keys().map(|name| (name.clone(), main.clone())));
    }
    merge(&mut defaults, given);
    let mut config = defaults;
    if let Some(Value::Table(source)) = config.get_mut("source")
        && !source.contains_key("url_file")
    {
        let url = environment.get("DATABASE_URL").map_or(DEFAULT_URL, String::as_str);
        source.entry("url").or_insert_with(|| url.into());
    }
    if let Some(Value::Table(streams)) = config.get_mut("stream") {
        streams.iter_mut().for_each(|(_, stream)| leave_out_unused(stream));
    }
    mask("", &mut config);
    Ok(toml::to_string_pretty(&config).expect("a table has a form in TOML"))
}

/// Lays `over` on top; lists are replaced whole.
fn merge(under: &mut Table, over: Table) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(Value::Table(under)), Value::Table(over)) => merge(under, over),
            (_, value) => drop(under.insert(key, value)),
        }
    }
}

fn leave_out_unused(stream: &mut Value) {
    let Value::Table(stream) = stream else { return };
    let sink = stream.get("sink").and_then(Value::as_str).unwrap_or_default().to_owned();
    stream.retain(|key, value| !value.is_table() || key == "retry" || *key == sink);
}

fn mask(key: &str, table: &mut Table) {
    for (name, value) in table.iter_mut() {
        mask_value(&format!("{key}.{name}"), value);
    }
}

fn mask_value(key: &str, value: &mut Value) {
    let key = key.to_lowercase();
    let free = key.contains(".options."); // a sink's free options: what they hold is unknown
    let secret = free || SECRET.iter().any(|end| key.ends_with(end)) && !PLACE.iter().any(|end| key.ends_with(end));
    match value {
        Value::Table(table) => mask(&key, table),
        Value::Array(items) => items.iter_mut().for_each(|item| mask_value(&key, item)),
        Value::String(text) if secret => *text = "***".into(),
        Value::String(text) if key.ends_with("url") || text.contains("://") => *text = mask_url(text),
        _ => {}
    }
}

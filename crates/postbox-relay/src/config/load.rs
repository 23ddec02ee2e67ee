//! Reads the configuration: file, then environment, then secrets from their files. Every error names the file and
//! line, or the variable, and never shows a secret.

use super::overlay::{Origin, Variables};
use super::strangers;
use super::units::{show_duration, show_size};
use super::{Config, DatabaseUrl, RelaySection, RetrySection, Secret};
use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::de::DeTable;

/// The file that is read when it is there and none is named.
const FILE: &str = "postbox.toml";

/// What is wrong with the configuration, and what mends it.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct ConfigError {
    /// What is wrong and where: the file and line, or the variable. Never a secret.
    pub what: String,
    /// What mends it.
    pub remedy: String,
}

pub(super) fn wrong(what: impl Into<String>, remedy: impl Into<String>) -> ConfigError {
    ConfigError { what: what.into(), remedy: remedy.into() }
}

/// The configuration in force: `file` (or `POSTBOX_CONFIG`, or `postbox.toml` when it is there, or the defaults),
/// overlaid by `POSTBOX__SECTION__KEY`; `DATABASE_URL` where neither names a database; secrets read from their files.
///
/// # Errors
/// What is wrong, where, and what mends it.
pub fn load(file: Option<&Path>, environment: &BTreeMap<String, String>) -> Result<Config, ConfigError> {
    strangers::refuse(environment)?;
    let (path, text) = find(file, environment)?;
    let mut config: Config = parse(&text, &path, environment)?;
    if config.source.url.is_none() && config.source.url_file.is_none() {
        config.source.url = environment.get("DATABASE_URL").map(|url| DatabaseUrl::from(url.as_str()));
    }
    read_secrets(&mut config)?;
    check(&config)?;
    Ok(config)
}

/// The values that file and environment give, without the defaults.
pub(super) fn overlaid(
    file: Option<&Path>,
    environment: &BTreeMap<String, String>,
) -> Result<toml::Table, ConfigError> {
    let (path, text) = find(file, environment)?;
    parse(&text, &path, environment)
}

/// The file and its text; empty when none is named and none is there.
fn find(file: Option<&Path>, environment: &BTreeMap<String, String>) -> Result<(PathBuf, String), ConfigError> {
    let variable = environment.get(strangers::CONFIG).map(PathBuf::from);
    if file.is_none() && variable.as_deref() == Some(Path::new("")) {
        let what = format!("environment variable {} is empty", strangers::CONFIG);
        return Err(wrong(what, "unset it, or name the configuration file in it"));
    }
    let named = file.map(Path::to_path_buf).or(variable);
    let there = || Path::new(FILE).exists().then(|| FILE.into());
    let Some(path) = named.or_else(there) else { return Ok((FILE.into(), String::new())) };
    let remedy = "name another file with --config, or write one with: postbox config default > postbox.toml";
    let text = read(&path, remedy)?;
    Ok((path, text))
}

/// The file's text with the environment laid over it, as a `T`.
pub(super) fn parse<T: serde::de::DeserializeOwned>(
    text: &str,
    path: &Path,
    environment: &BTreeMap<String, String>,
) -> Result<T, ConfigError> {
    let mut variables = Variables::new(environment);
    loop {
        let table = DeTable::parse(text).map_err(|error| explain(&error, text, path, &variables))?;
        let (span, mut table) = (table.span(), table.into_inner());
        variables.apply(&mut table, text.len());
        let read = toml::de::Deserializer::from(toml::Spanned::new(span, table));
        let error = match T::deserialize(read) {
            Ok(config) => return Ok(config),
            Err(error) => error,
        };
        // A variable is text; where the key wants a number or a list, it is read again as one, once.
        let again = is_type_error(&error) && error.span().is_some_and(|at| variables.clone().retype(&at, text.len()));
        if !again {
            return Err(explain(&error, text, path, &variables));
        }
        variables.retype(&error.span().unwrap_or_default(), text.len());
    }
}

fn is_type_error(error: &toml::de::Error) -> bool {
    error.message().starts_with("invalid type: string")
}

/// Says where it is and what to write instead.
fn explain(error: &toml::de::Error, text: &str, path: &Path, variables: &Variables) -> ConfigError {
    let place = place(&error.span().unwrap_or(0..0), text, path, variables);
    let message = error.message();
    let names: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    if let (true, [unknown, known @ ..]) = (message.starts_with("unknown field"), names.as_slice()) {
        return wrong(format!("{place}: unknown key `{unknown}`"), nearest(unknown, known));
    }
    if let (true, [unknown, known @ ..]) = (message.starts_with("unknown variant"), names.as_slice()) {
        return wrong(format!("{place}: unknown value \"{unknown}\""), nearest(unknown, known));
    }
    // serde shows the value that it did not expect, and that may be a secret.
    let message = match message.split_once("invalid type: string \"") {
        Some((_, rest)) => match rest.rsplit(", expected ").next().unwrap_or(rest) {
            expected if expected.starts_with("struct ") => {
                "a string, but expected a table, with keys of its own".into()
            }
            expected => format!("a string, but expected {expected}"),
        },
        None => message.lines().next().unwrap_or_default().to_owned(),
    };
    wrong(format!("{place}: {message}"), "all keys with their defaults: postbox config default")
}

fn place(span: &Range<usize>, text: &str, path: &Path, variables: &Variables) -> String {
    match variables.origin(span, text.len()) {
        Origin::Variable(name) => format!("environment variable {name}"),
        Origin::File(at) => {
            let line = text.as_bytes()[..at.min(text.len())].iter().filter(|b| **b == b'\n').count() + 1;
            format!("{}:{line}", path.display())
        }
    }
}

/// The known name that the unknown one most likely meant; all of them when none is near.
fn nearest(unknown: &str, known: &[&str]) -> String {
    let unknown = unknown.to_lowercase().replace('-', "_");
    let near = known.iter().map(|name| (strsim::jaro_winkler(&unknown, name), name));
    match near.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((likeness, name)) if likeness > 0.75 => format!("did you mean `{name}`? known here: {}", known.join(", ")),
        Some(_) => format!("known here: {}", known.join(", ")),
        None => "all keys with their defaults: postbox config default".into(),
    }
}

fn read(path: &Path, remedy: &str) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot read {}: {error}", path.display()), remedy))
}

fn read_secrets(config: &mut Config) -> Result<(), ConfigError> {
    let source = &mut config.source;
    if let Some(url) = secret("source.url", source.url.is_some(), source.url_file.as_deref())? {
        source.url = Some(url.into());
    }
    if let Some(password) = secret("source.password", source.password.is_some(), source.password_file.as_deref())? {
        source.password = Some(Secret::from(password));
    }
    Ok(())
}

/// The content of `KEY_file`, without the line's end that editors add.
fn secret(key: &str, is_set: bool, file: Option<&Path>) -> Result<Option<String>, ConfigError> {
    let Some(file) = file else { return Ok(None) };
    if is_set {
        return Err(wrong(format!("{key} and {key}_file are both set"), "keep one of them"));
    }
    let text = read(file, &format!("put the secret there, or change {key}_file"))?;
    Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()))
}

/// What no single key shows.
pub(crate) fn check(config: &Config) -> Result<(), ConfigError> {
    if config.stream.is_empty() {
        return Err(wrong("no stream is configured", "add a table [stream.main]"));
    }
    ranges(config)?;
    if let Some(name) = &config.relay.name {
        named("relay.name", name)?;
    }
    for (name, stream) in &config.stream {
        named("the name of a stream", name)?;
        if stream.routes.is_empty() {
            let remedy = "add one, as in: routes = [{ topic = \"{aggregate_type}\" }]";
            return Err(wrong(format!("stream.{name}.routes is empty, so no event has a place to go"), remedy));
        }
        #[cfg(feature = "webhook")]
        if stream.webhook.as_ref().is_some_and(|webhook| webhook.timeout >= config.relay.send_timeout) {
            // A receiver that hangs would be an outage then, repeated for ever, and no event's fault.
            let wrong_pair = format!("stream.{name}.webhook.timeout is not below relay.send_timeout");
            return Err(wrong(wrong_pair, "raise relay.send_timeout, or lower the webhook's timeout"));
        }
    }
    Ok(())
}

/// Names are keys in the database, and stand in logs.
fn named(what: &str, name: &str) -> Result<(), ConfigError> {
    // What shows nothing, or another order than it has: zero-width and directional marks, the byte order mark.
    let hidden = |c: char| {
        c.is_control()
            || matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    if name.trim().is_empty() || name.contains(hidden) {
        return Err(wrong(format!("{what} is {name:?}"), "give it one that can be seen"));
    }
    Ok(())
}

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Each number must be one that a relay can work with: beyond these, a slip of the pen is likelier than a wish.
fn ranges(config: &Config) -> Result<(), ConfigError> {
    let RelaySection { lease, events_max, bytes_max, send_timeout, drain_timeout, .. } = config.relay;
    within("source.retention", config.source.retention, SECOND..=3650 * DAY, show_duration)?;
    within("relay.lease", lease, SECOND..=HOUR, show_duration)?; // so long may nobody send when a relay dies
    within("relay.events_max", events_max, 1..=1_000_000, |n| n.to_string())?; // a crash repeats four times as many
    within("relay.bytes_max", bytes_max, 1..=1 << 30, show_size)?; // more than three times that may be in memory
    within("relay.send_timeout", send_timeout, SECOND..=HOUR, show_duration)?;
    within("relay.drain_timeout", drain_timeout, Duration::ZERO..=HOUR, show_duration)?;
    for (name, stream) in &config.stream {
        let key = |key: &str| format!("stream.{name}.{key}");
        let RetrySection { base, pause_max, attempts_max } = stream.retry;
        within(&key("retry.base"), base, MS..=DAY, show_duration)?;
        within(&key("retry.pause_max"), pause_max, MS..=30 * DAY, show_duration)?;
        within(&key("retry.attempts_max"), attempts_max, 1..=1_000_000, |n| n.to_string())?;
        #[cfg(feature = "webhook")]
        if let Some(webhook) = &stream.webhook {
            within(&key("webhook.timeout"), webhook.timeout, MS..=HOUR, show_duration)?;
            within(&key("webhook.connect_timeout"), webhook.connect_timeout, MS..=HOUR, show_duration)?;
        }
    }
    Ok(())
}

fn within<T: PartialOrd + Copy>(
    key: &str,
    value: T,
    range: RangeInclusive<T>,
    show: fn(T) -> String,
) -> Result<(), ConfigError> {
    if range.contains(&value) {
        return Ok(());
    }
    let (least, most) = (show(*range.start()), show(*range.end()));
    Err(wrong(
        format!("{key} is {}; it can be {least} to {most}", show(value)),
        "what it means, and its default: postbox config default",
    ))
}

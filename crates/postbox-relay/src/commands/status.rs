//! `postbox status`: how far each stream is, from its tables; works while no relay runs.

use super::{print, print_json, table};
use crate::cli::OutputArgs;
use crate::config::{Config, show_duration};
use crate::failure::Failure;
use crate::screen;
use postbox_sources::admin::StreamStatus;
use serde_json::{Value, json};
use std::time::Duration;

pub(crate) async fn run(config: &Config, output: OutputArgs) -> Result<(), Failure> {
    let status = crate::database::admin(config)?.status().await?;
    if output.json {
        return print_json(&status.iter().map(to_json).collect());
    }
    if status.is_empty() {
        screen::tell("no stream yet: no relay has run on this database; start one with: postbox relay");
        return Ok(());
    }
    let errors = status.iter().filter_map(|s| Some(format!("{}: last error: {}\n", name(s), s.last_error.as_ref()?)));
    print(&(table(&NAMES, &status.iter().map(row).collect::<Vec<_>>()) + &errors.collect::<String>()))
}

const NAMES: [&str; 11] = [
    "STREAM",
    "RELAY",
    "LAG",
    "PENDING",
    "RETRY",
    "WAITING",
    "DELAYED",
    "OLDEST HELD",
    "DEAD",
    "OLDEST DEAD",
    "LAST SETTLED",
];

fn name(status: &StreamStatus) -> String {
    match status.shard {
        0 => status.stream.clone(),
        shard => format!("{}/{shard}", status.stream),
    }
}

fn row(status: &StreamStatus) -> Vec<String> {
    let estimate = if status.pending_is_estimate { "about " } else { "" };
    vec![
        name(status),
        status.owner.clone().unwrap_or_else(|| "none".into()),
        age(status.oldest_unpublished),
        format!("{estimate}{}", status.pending),
        status.retry.to_string(),
        status.waiting.to_string(),
        status.delayed.to_string(),
        age(status.oldest_held),
        status.dead.to_string(),
        age(status.oldest_dead),
        age(status.last_settled),
    ]
}

/// Milliseconds below a second, whole seconds above.
fn age(age: Option<Duration>) -> String {
    let Some(age) = age else { return "-".into() };
    show_duration(if age < Duration::from_secs(1) { age } else { Duration::from_secs(age.as_secs()) })
}

fn to_json(status: &StreamStatus) -> Value {
    let seconds = |age: Option<Duration>| age.map(|age| age.as_millis() as f64 / 1_000.0);
    json!({
        "stream": status.stream,
        "shard": status.shard,
        "owner": status.owner,
        "oldest_unpublished_s": seconds(status.oldest_unpublished),
        "pending": status.pending,
        "pending_is_estimate": status.pending_is_estimate,
        "retry": status.retry,
        "waiting": status.waiting,
        "delayed": status.delayed,
        "dead": status.dead,
        "oldest_held_s": seconds(status.oldest_held),
        "oldest_dead_s": seconds(status.oldest_dead),
        "last_settled_s": seconds(status.last_settled),
        "last_error": status.last_error,
    })
}

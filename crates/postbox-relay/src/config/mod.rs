//! The configuration: what can be set, and its defaults. `default.toml` says the same to people, and a test holds
//! the two together. [`load`] puts file, environment and secrets together.

mod load;
mod overlay;
mod show;
mod sinks;
mod strangers;
#[cfg(test)]
mod tests;
mod units;

pub(crate) use load::check;
pub use load::{ConfigError, load};
pub(crate) use show::shown;
pub(crate) use units::show_duration;
pub use units::{DatabaseUrl, Secret};

use postbox_engine::{DeadPolicy, RelayOptions, Retry, Rule};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// The commented default file, which is also the reference of all keys.
pub const DEFAULT_TOML: &str = include_str!("../default.toml");

/// All that can be configured.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `[source]`
    pub source: SourceSection,
    /// `[relay]`
    pub relay: RelaySection,
    /// By name. The name is part of a stream's progress in the database: renamed, it starts anew.
    pub stream: BTreeMap<String, StreamSection>,
}

impl Default for Config {
    fn default() -> Config {
        let stream = BTreeMap::from([("main".into(), StreamSection::default())]);
        Config { source: SourceSection::default(), relay: RelaySection::default(), stream }
    }
}

/// The database with the outbox.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SourceSection {
    /// `postgres://..` or `sqlite:..`; without it, see [`SourceSection::url`].
    pub url: Option<DatabaseUrl>,
    /// A file with the URL, read by [`load`].
    pub url_file: Option<PathBuf>,
    /// Around a pooler, which does not carry LISTEN; PostgreSQL only.
    pub listen_url: Option<DatabaseUrl>,
    /// Instead of one in the URL; as it is, without percent-encoding.
    pub password: Option<Secret>,
    /// A file with the password, read by [`load`].
    pub password_file: Option<PathBuf>,
    /// PostgreSQL: the schema; SQLite: what the names of the tables begin with.
    pub schema: String,
    /// How long published events are kept at least.
    #[serde(deserialize_with = "units::duration")]
    pub retention: Duration,
}

impl Default for SourceSection {
    fn default() -> SourceSection {
        SourceSection {
            url: None,
            url_file: None,
            listen_url: None,
            password: None,
            password_file: None,
            schema: "postbox".into(),
            retention: Duration::from_secs(7 * 24 * 3600),
        }
    }
}

/// The file that is used when nothing names a database.
pub const DEFAULT_URL: &str = "sqlite:postbox.db";

impl SourceSection {
    /// The database's URL; the embedded default when nothing names one.
    pub fn url(&self) -> DatabaseUrl {
        self.url.clone().unwrap_or_else(|| DEFAULT_URL.into())
    }
}

/// This relay process.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RelaySection {
    /// Unset: host name and process id.
    pub name: Option<String>,
    /// A relay that died is replaced after this long.
    #[serde(deserialize_with = "units::duration")]
    pub lease: Duration,
    /// Events in hand at once, per stream.
    pub events_max: usize,
    /// Bytes in hand at once, per stream; the queue of the sink comes on top.
    #[serde(deserialize_with = "units::size")]
    pub bytes_max: usize,
    /// A send without an answer for so long counts as unknown, and is repeated; see [`RelayOptions::send_timeout`].
    #[serde(deserialize_with = "units::duration")]
    pub send_timeout: Duration,
    /// After the stop signal, how long sends in flight may take.
    #[serde(deserialize_with = "units::duration")]
    pub drain_timeout: Duration,
}

impl Default for RelaySection {
    fn default() -> RelaySection {
        let RelayOptions { events_max, bytes_max, send_timeout, drain_timeout, .. } = RelayOptions::default();
        RelaySection { name: None, lease: Duration::from_secs(10), events_max, bytes_max, send_timeout, drain_timeout }
    }
}

/// One delivery of the outbox to one place.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StreamSection {
    /// Where its events go.
    pub sink: SinkName,
    /// What a dead event does to those behind it in its key.
    pub dead: DeadName,
    /// The first that matches wins.
    pub routes: Vec<Rule>,
    /// When a failed event is tried again.
    pub retry: RetrySection,
    pub(crate) kafka: Option<sinks::KafkaTable>,
    pub(crate) webhook: Option<sinks::WebhookTable>,
}

impl Default for StreamSection {
    fn default() -> StreamSection {
        StreamSection {
            sink: SinkName::Stdout,
            dead: DeadName::Skip,
            routes: vec![everything_by_type()],
            retry: RetrySection::default(),
            kafka: None,
            webhook: None,
        }
    }
}

/// Each aggregate type has a topic of its own.
fn everything_by_type() -> Rule {
    Rule { topic: "{aggregate_type}".into(), ..Rule::default() }
}

/// Which sink a stream uses; its settings are in the table of the same name.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum SinkName {
    /// Lines of JSON on stdout.
    Stdout,
    /// Its settings are in `[stream.NAME.kafka]`.
    Kafka,
    /// Its settings are in `[stream.NAME.webhook]`.
    Webhook,
}

/// See [`DeadPolicy`].
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum DeadName {
    /// See [`DeadPolicy::Skip`].
    Skip,
    /// See [`DeadPolicy::Block`].
    Block,
}

impl From<DeadName> for DeadPolicy {
    fn from(name: DeadName) -> DeadPolicy {
        match name {
            DeadName::Skip => DeadPolicy::Skip,
            DeadName::Block => DeadPolicy::Block,
        }
    }
}

/// See [`Retry`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetrySection {
    /// See [`Retry::base`].
    #[serde(deserialize_with = "units::duration")]
    pub base: Duration,
    /// See [`Retry::pause_max`].
    #[serde(deserialize_with = "units::duration")]
    pub pause_max: Duration,
    /// See [`Retry::attempts_max`].
    pub attempts_max: u32,
}

impl Default for RetrySection {
    fn default() -> RetrySection {
        let Retry { base, pause_max, attempts_max } = Retry::default();
        RetrySection { base, pause_max, attempts_max }
    }
}

impl From<&RetrySection> for Retry {
    fn from(retry: &RetrySection) -> Retry {
        Retry { base: retry.base, pause_max: retry.pause_max, attempts_max: retry.attempts_max }
    }
}

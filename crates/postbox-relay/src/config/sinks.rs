//! The tables of the sinks inside a stream, and the one that the stream uses. A build without a sink reads over its
//! table, and says so when the stream asks for it.

use super::{ConfigError, SinkName, StreamSection};
use postbox_sinks::SinkConfig;

#[cfg(not(feature = "kafka"))]
pub(super) type KafkaTable = serde::de::IgnoredAny;
#[cfg(feature = "kafka")]
pub(super) type KafkaTable = postbox_sinks::kafka::KafkaConfig;

#[cfg(not(feature = "webhook"))]
pub(super) type WebhookTable = serde::de::IgnoredAny;
#[cfg(feature = "webhook")]
pub(super) type WebhookTable = postbox_sinks::webhook::WebhookConfig;

impl SinkName {
    /// As it is written in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            SinkName::Stdout => "stdout",
            SinkName::Kafka => "kafka",
            SinkName::Webhook => "webhook",
        }
    }
}

impl StreamSection {
    /// What the sink of this stream, named for messages, is made of.
    pub(crate) fn sink_config(&self, stream: &str) -> Result<SinkConfig, ConfigError> {
        let found = match self.sink {
            SinkName::Stdout => Some(SinkConfig::Stdout(Default::default())),
            #[cfg(feature = "kafka")]
            SinkName::Kafka => self.kafka.clone().map(SinkConfig::Kafka),
            #[cfg(feature = "webhook")]
            SinkName::Webhook => self.webhook.clone().map(SinkConfig::Webhook),
            #[cfg(not(all(feature = "kafka", feature = "webhook")))]
            name => return Err(not_built(name)),
        };
        let name = self.sink.as_str();
        found.ok_or_else(|| ConfigError {
            what: format!("stream.{stream}.sink is \"{name}\", and there is no table [stream.{stream}.{name}]"),
            remedy: format!("add it; its keys: postbox config default | grep -A 20 stream.main.{name}"),
        })
    }
}

#[cfg(not(all(feature = "kafka", feature = "webhook")))]
fn not_built(name: SinkName) -> ConfigError {
    let name = name.as_str();
    ConfigError {
        what: format!("this build has no {name} sink"),
        remedy: format!("build it with: cargo build --release --features {name}"),
    }
}

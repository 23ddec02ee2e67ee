//! Where events go. [`build`] is the whole registry: an enum and one `match`; one file per sink.
//! A sink reports what the destination answered; it never decides about retries, order or leases.

#[cfg(feature = "kafka")]
#[allow(missing_docs, reason = "default.toml of the relay says what each option is")]
pub mod kafka;
#[cfg(any(feature = "kafka", feature = "webhook"))]
mod settings;
pub mod stdout;
#[cfg(feature = "webhook")]
pub mod webhook;

use postbox_engine::{Limits, Message, SendError, Sink};
use serde::Deserialize;

/// Which sink, and its options: `type = "kafka" | "webhook" | "stdout"`.
///
/// ```
/// let config: postbox_sinks::SinkConfig = serde_json::from_str(r#"{"type": "stdout"}"#)?;
/// let sink = postbox_sinks::build(&config)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
#[non_exhaustive]
#[allow(clippy::large_enum_variant)] // there is one for each stream
pub enum SinkConfig {
    /// Topics of Kafka.
    #[cfg(feature = "kafka")]
    Kafka(kafka::KafkaConfig),
    /// HTTP requests.
    #[cfg(feature = "webhook")]
    Webhook(webhook::WebhookConfig),
    /// Lines of JSON.
    Stdout(stdout::StdoutConfig),
}

/// Why a sink cannot be made of its configuration. Names the option and the remedy; never a secret.
#[derive(Debug, thiserror::Error)]
#[error("{sink}: {message}")]
pub struct BuildError {
    /// The name of the sink.
    pub sink: &'static str,
    /// Which option, and what mends it.
    pub message: String,
    /// The error that led to it, if there was one.
    #[source]
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

#[cfg(any(feature = "kafka", feature = "webhook"))]
impl BuildError {
    fn new(sink: &'static str, message: impl Into<String>) -> BuildError {
        BuildError { sink, message: message.into(), source: None }
    }
}

/// Any of the sinks.
#[non_exhaustive]
#[allow(clippy::large_enum_variant)] // as above
pub enum AnySink {
    /// Topics of Kafka.
    #[cfg(feature = "kafka")]
    Kafka(kafka::KafkaSink),
    /// HTTP requests.
    #[cfg(feature = "webhook")]
    Webhook(webhook::WebhookSink),
    /// Lines of JSON.
    Stdout(stdout::StdoutSink),
}

/// Makes a sink. Connects to nothing; that is for [`Sink::prepare`] and [`Sink::check`].
///
/// # Errors
/// An option that cannot be used, or a file that cannot be read.
pub fn build(config: &SinkConfig) -> Result<AnySink, BuildError> {
    Ok(match config {
        #[cfg(feature = "kafka")]
        SinkConfig::Kafka(config) => AnySink::Kafka(kafka::KafkaSink::new(config)?),
        #[cfg(feature = "webhook")]
        SinkConfig::Webhook(config) => AnySink::Webhook(webhook::WebhookSink::new(config)?),
        SinkConfig::Stdout(_) => AnySink::Stdout(stdout::StdoutSink::new()),
    })
}

impl AnySink {
    /// The sink's name, for labels and logs.
    pub fn name(&self) -> &'static str {
        match self {
            #[cfg(feature = "kafka")]
            AnySink::Kafka(_) => "kafka",
            #[cfg(feature = "webhook")]
            AnySink::Webhook(_) => "webhook",
            AnySink::Stdout(_) => "stdout",
        }
    }

    /// What the configuration states and its operator may regret. Asks nobody.
    pub fn warning(&self) -> Option<&str> {
        match self {
            #[cfg(feature = "kafka")]
            AnySink::Kafka(sink) => sink.warning(),
            #[cfg(feature = "webhook")]
            AnySink::Webhook(sink) => sink.warning(),
            AnySink::Stdout(_) => None,
        }
    }

    /// Why this can be no destination of the sink, whatever is there. Asks nobody.
    pub fn unusable(&self, destination: &str) -> Option<String> {
        match self {
            #[cfg(feature = "kafka")]
            AnySink::Kafka(_) => kafka::KafkaSink::unusable(destination),
            #[cfg(feature = "webhook")]
            AnySink::Webhook(sink) => sink.unusable(destination),
            AnySink::Stdout(_) => {
                let _ = destination; // any name will do
                None
            }
        }
    }

    /// Why no destination of the sink can have this text in it, whatever else is. Asks nobody.
    pub fn unusable_part(&self, text: &str) -> Option<String> {
        match self {
            #[cfg(feature = "kafka")]
            AnySink::Kafka(_) => kafka::KafkaSink::unusable_part(text),
            #[cfg(feature = "webhook")]
            AnySink::Webhook(_) => None, // what is to be a URL is known when it is whole
            AnySink::Stdout(_) => {
                let _ = text; // any name will do
                None
            }
        }
    }

    /// What is missing of destinations that are known before any event is: one text each, with the command that
    /// mends it. Sends no message.
    ///
    /// # Errors
    /// The destination cannot be asked.
    pub async fn check_destinations(&self, destinations: &[&str]) -> Result<Vec<String>, SendError> {
        match self {
            #[cfg(feature = "kafka")]
            AnySink::Kafka(sink) => sink.check_topics(destinations).await,
            #[cfg(feature = "webhook")]
            AnySink::Webhook(sink) => Ok(sink.check_urls(destinations).await),
            AnySink::Stdout(_) => {
                let _ = destinations; // unused where there is no Kafka
                Ok(Vec::new())
            }
        }
    }
}

impl Sink for AnySink {
    fn limits(&self) -> Limits {
        match self {
            #[cfg(feature = "kafka")]
            AnySink::Kafka(sink) => sink.limits(),
            #[cfg(feature = "webhook")]
            AnySink::Webhook(sink) => sink.limits(),
            AnySink::Stdout(sink) => sink.limits(),
        }
    }

    fn prepare(&self) {
        match self {
            #[cfg(feature = "kafka")]
            AnySink::Kafka(sink) => sink.prepare(),
            #[cfg(feature = "webhook")]
            AnySink::Webhook(sink) => sink.prepare(),
            AnySink::Stdout(sink) => sink.prepare(),
        }
    }

    // Not an `async fn`: Kafka's place in the order is taken by the call, not by the first poll.
    fn send(&self, batch: &[Message]) -> impl Future<Output = Vec<Result<(), SendError>>> + Send {
        let sending = match self {
            #[cfg(feature = "kafka")]
            AnySink::Kafka(sink) => Sending::Kafka(sink.send(batch)),
            #[cfg(feature = "webhook")]
            AnySink::Webhook(sink) => Sending::Webhook(sink.send(batch)),
            AnySink::Stdout(sink) => Sending::Stdout(sink.send(batch)),
        };
        async move {
            match sending {
                #[cfg(feature = "kafka")]
                Sending::Kafka(f) => f.await,
                #[cfg(feature = "webhook")]
                Sending::Webhook(f) => f.await,
                Sending::Stdout(f) => f.await,
            }
        }
    }

    async fn check(&self) -> Result<(), SendError> {
        match self {
            #[cfg(feature = "kafka")]
            AnySink::Kafka(sink) => sink.check().await,
            #[cfg(feature = "webhook")]
            AnySink::Webhook(sink) => sink.check().await,
            AnySink::Stdout(sink) => sink.check().await,
        }
    }
}

/// One call's future, whichever sink it is of; the types have no names, so they are parameters.
enum Sending<#[cfg(feature = "kafka")] A, #[cfg(feature = "webhook")] B, C> {
    #[cfg(feature = "kafka")]
    Kafka(A),
    #[cfg(feature = "webhook")]
    Webhook(B),
    Stdout(C),
}

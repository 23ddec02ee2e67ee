//! The webhook sink: one signed POST an event, after the Standard Webhooks specification. A receiver sees the same
//! `webhook-id` on every attempt. It must never follow a redirect, nor reach a private address that nobody allowed.

mod address;
mod answer;
mod sign;

use crate::BuildError;
use crate::settings::{duration, read_secret, secret};
use address::Resolver;
use postbox_engine::{Headers, Limits, Message, SendError, SendErrorKind, Sink};
use reqwest::Method;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use secrecy::SecretString;
use serde::Deserialize;
use sign::Signer;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use url::Url;

/// Options of the webhook sink.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebhookConfig {
    /// Where events go whose destination (the route's topic, or their own) is no URL itself.
    #[serde(default)]
    pub url: Option<String>,
    /// The key of the signature, `whsec_` and base64. Several, separated by spaces, sign side by side while one
    /// replaces the other.
    #[serde(default, deserialize_with = "secret")]
    pub secret: Option<SecretString>,
    /// A file with the key, instead of `secret`.
    #[serde(default)]
    pub secret_file: Option<PathBuf>,
    /// How long a receiver may take to answer.
    #[serde(default = "default_timeout", deserialize_with = "duration")]
    pub timeout: Duration,
    /// How long connecting may take; part of `timeout`.
    #[serde(default = "default_connect_timeout", deserialize_with = "duration")]
    pub connect_timeout: Duration,
    /// Allows addresses of this machine and of private networks. Off, since whoever may write events may name URLs.
    #[serde(default)]
    pub allow_private: bool,
    /// Certificates that the receiver's must lead to, instead of those of the system.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
}

/// Receivers do their work after they answered; the specification advises 15 to 30 s. Below the relay's
/// `send_timeout`, so that the answer is about the event.
fn default_timeout() -> Duration {
    Duration::from_secs(20)
}
fn default_connect_timeout() -> Duration {
    Duration::from_secs(5)
}

/// Posts events.
pub struct WebhookSink {
    client: reqwest::Client,
    url: Option<Url>,
    signer: Signer,
    config: WebhookConfig,
}

impl WebhookSink {
    /// # Errors
    /// An option that cannot be used, or a file that cannot be read.
    pub fn new(config: &WebhookConfig) -> Result<WebhookSink, BuildError> {
        let error = |message: String| BuildError::new("webhook", message);
        let secrets = read_secret("secret", config.secret.as_ref(), config.secret_file.as_deref()).map_err(error)?;
        let signer = Signer::new(secrets.as_ref()).map_err(error)?;
        let url = match &config.url {
            None => None,
            Some(text) => {
                Some(address::check_url(text, config.allow_private).map_err(|e| error(format!("`url`: {e}")))?)
            }
        };
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            return Err(error(
                "no TLS provider; call rustls::crypto::ring::default_provider().install_default() in main".into(),
            ));
        }
        let mut client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            // A proxy would resolve names itself, and so reach what the resolver refuses.
            .no_proxy()
            .dns_resolver(Arc::new(Resolver { allow_private: config.allow_private }))
            .connect_timeout(config.connect_timeout)
            .timeout(config.timeout)
            .user_agent(concat!("postbox/", env!("CARGO_PKG_VERSION")));
        if let Some(file) = &config.ca_file {
            let pem = std::fs::read(file).map_err(|e| error(format!("`ca_file` {}: {e}", file.display())))?;
            let certificates = reqwest::Certificate::from_pem_bundle(&pem);
            let certificates = certificates.map_err(|e| error(format!("`ca_file` {}: {e}", file.display())))?;
            if certificates.is_empty() {
                return Err(error(format!("`ca_file` {}: no certificate in it (PEM is wanted)", file.display())));
            }
            client = client.tls_certs_only(certificates);
        }
        let client =
            client.build().map_err(|e| BuildError { source: Some(e.into()), ..error("no HTTP client".into()) })?;
        Ok(WebhookSink { client, url, signer, config: config.clone() })
    }

    /// What is no error, and is seldom meant.
    pub fn warning(&self) -> Option<&str> {
        let without = "without `url` only events whose destination is itself a URL go out, all others are dead";
        self.url.is_none().then_some(without)
    }

    /// Why this can be no destination.
    pub fn unusable(&self, destination: &str) -> Option<String> {
        self.target(destination).err()
    }

    /// The destination itself where it is a URL, else the configured one.
    fn target(&self, destination: &str) -> Result<Url, String> {
        if destination.starts_with("http://") || destination.starts_with("https://") {
            return address::check_url(destination, self.config.allow_private);
        }
        let none = || format!("destination {destination:?} is no URL, and the sink has no `url`; set one of them");
        self.url.clone().ok_or_else(none)
    }

    /// What is wrong with destinations that are known before any event is, beside the sink's own `url`.
    pub async fn check_urls(&self, destinations: &[&str]) -> Vec<String> {
        let (mut wrong, once) = (Vec::new(), BTreeSet::from_iter(destinations));
        for destination in once {
            match self.target(destination) {
                Ok(url) if Some(&url) == self.url.as_ref() => {} // asked by `check`
                Ok(url) => wrong.extend(self.ask(&url).await.err().map(|error| error.message)),
                Err(why) => wrong.push(why),
            }
        }
        wrong
    }

    /// Asks the receiver for its options, which by HTTP's definition changes nothing there, over the very client that
    /// events take: names, refused addresses, TLS. Any answer will do.
    async fn ask(&self, url: &Url) -> Result<(), SendError> {
        let asked = self.client.request(Method::OPTIONS, url.clone()).send().await;
        asked.map(drop).map_err(|error| answer::Place::of(url).no_answer(&error))
    }

    async fn post(&self, message: &Message) -> Result<(), SendError> {
        let url = self.target(&message.destination).map_err(|why| SendError::new(SendErrorKind::Failed, why))?;
        let place = answer::Place::of(&url);
        let mut headers = headers(message).map_err(|why| SendError::new(SendErrorKind::Rejected, why))?;
        let body = message.body().unwrap_or_default().to_vec();
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let bytes = body.len();
        self.signer.sign(&message.id_text(), seconds, &body, &mut headers);
        match self.client.post(url).headers(headers).body(body).send().await {
            Ok(response) => place.status(response, bytes).await,
            Err(error) => Err(place.no_answer(&error)),
        }
    }
}

impl Sink for WebhookSink {
    fn limits(&self) -> Limits {
        // Sixteen receivers' answers at a time; one event a request, so that each answer is about one event.
        Limits { batch_max: 1, bytes_max: 16 << 20, in_flight_max: 16, keeps_key_order: false }
    }

    async fn send(&self, batch: &[Message]) -> Vec<Result<(), SendError>> {
        let mut outcomes = Vec::with_capacity(batch.len());
        for message in batch {
            outcomes.push(self.post(message).await);
        }
        outcomes
    }

    async fn check(&self) -> Result<(), SendError> {
        match &self.url {
            Some(url) => self.ask(url).await,
            None => Ok(()),
        }
    }
}

/// Names that are the connection's or the specification's: a row that could set them could smuggle requests.
const REFUSED: [&str; 13] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "webhook-id",
];

/// The message's headers as HTTP has them. In postbox's own names underscores become dashes, since many servers drop
/// names with underscores (so CloudEvents' `ce_id` becomes its HTTP form `ce-id`); a row's own headers go as they are.
fn headers(message: &Message) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (name, value) in message.headers.iter() {
        let own = Headers::is_own(name) || name.starts_with("ce_");
        let http = if own { name.replace('_', "-") } else { name.to_ascii_lowercase() };
        let dashes = http.replace('_', "-"); // some servers take one for the other
        if REFUSED.contains(&dashes.as_str()) || dashes.starts_with("webhook-") {
            return Err(format!("header {name:?} may not be set over HTTP"));
        }
        let encoded = http.starts_with("ce-").then(|| percent_encoded(value));
        let value = HeaderValue::from_bytes(encoded.as_deref().unwrap_or(value));
        let value = value.map_err(|_| format!("header {name:?} has a value that HTTP cannot carry (a line break?)"))?;
        let name = HeaderName::try_from(http).map_err(|_| format!("header {name:?} is no HTTP header"))?;
        headers.append(name, value);
    }
    match message.body() {
        // HTTP cannot tell no body from an empty one.
        None => _ = headers.insert("tombstone", HeaderValue::from_static("true")),
        Some(_) => _ = headers.entry(CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json")),
    }
    Ok(headers)
}

/// CloudEvents' HTTP binding, 3.1.3.2: space, quote, percent, and all that is not printable ASCII.
fn percent_encoded(value: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(value.len());
    for &byte in value {
        if byte.is_ascii_graphic() && byte != b'"' && byte != b'%' {
            out.push(byte);
        } else {
            out.extend_from_slice(format!("%{byte:02X}").as_bytes());
        }
    }
    out
}

#[cfg(test)]
mod tests;

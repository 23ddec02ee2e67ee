//! Options of the Kafka sink, and what they mean to librdkafka. What postbox promises is not an option.

use crate::BuildError;
use crate::settings::{read_secret, secret};
use rdkafka::ClientConfig;
use secrecy::SecretString;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Options of the Kafka sink.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KafkaConfig {
    /// `host:port` of one broker or several, separated by commas.
    pub brokers: String,
    /// How brokers name this client in their logs and quotas.
    #[serde(default = "default_client_id")]
    pub client_id: String,
    /// A greater message is refused before it is sent. Raise it together with the topic's `max.message.bytes`.
    #[serde(default = "default_bytes_max")]
    pub message_bytes_max: usize,
    /// Messages of one partition travel together up to this size; it must not exceed the topics' `max.message.bytes`.
    #[serde(default = "default_bytes_max")]
    pub batch_bytes_max: usize,
    /// Unset: plain text where all `brokers` are this machine; needed where one is not.
    #[serde(default)]
    pub security: Option<Security>,
    /// Certificates that the brokers' must lead to; by default those of the system.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// Our own certificate, for brokers that ask for one.
    #[serde(default)]
    pub certificate_file: Option<PathBuf>,
    #[serde(default)]
    pub key_file: Option<PathBuf>,
    #[serde(default)]
    pub mechanism: Mechanism,
    #[serde(default)]
    pub user: Option<String>,
    #[serde(default, deserialize_with = "secret")]
    pub password: Option<SecretString>,
    #[serde(default)]
    pub password_file: Option<PathBuf>,
    /// Any other setting of librdkafka (`compression.type`, `client.rack`, ..), but none that would break a promise.
    #[serde(default)]
    pub options: BTreeMap<String, String>,
}

/// How connections are protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Security {
    Plaintext,
    /// TLS; the broker's certificate and host name are verified.
    Ssl,
    SaslPlaintext,
    SaslSsl,
}

/// How user and password are shown to the broker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Mechanism {
    #[serde(rename = "PLAIN")]
    Plain,
    #[serde(rename = "SCRAM-SHA-256")]
    ScramSha256,
    #[default]
    #[serde(rename = "SCRAM-SHA-512")]
    ScramSha512,
}

fn default_client_id() -> String {
    "postbox".into()
}
/// Below the 1,048,588 bytes that brokers take by default, whatever the framing adds.
fn default_bytes_max() -> usize {
    1_000_000
}

/// What librdkafka takes for `message.max.bytes`.
const BYTES_MAX: RangeInclusive<usize> = 1_000..=1_000_000_000;

/// How many messages share a request: all that fit into so many bytes, or one, to find out which one is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Batching {
    Full { bytes: usize },
    Single { bytes: usize },
}

/// Settings that the sink makes itself, and what to do instead of setting them.
const OWN: &[(&str, &str)] = &[
    ("acks", "every replica acknowledges, or an acknowledged event could be lost"),
    ("request.required.acks", "every replica acknowledges, or an acknowledged event could be lost"),
    ("enable.idempotence", "without it a retry reorders and doubles events"),
    ("enable.gapless.guarantee", "without it events overtake one that was refused"),
    ("max.in.flight", "idempotence sets it"),
    ("max.in.flight.requests.per.connection", "idempotence sets it"),
    ("retries", "idempotence sets it"),
    ("message.send.max.retries", "idempotence sets it"),
    ("message.timeout.ms", "the relay's `send_timeout` decides"),
    ("delivery.timeout.ms", "the relay's `send_timeout` decides"),
    ("transactional.id", "the relay does not use transactions"),
    ("partitioner", "an aggregate's partition must be the one that Java clients compute"),
    ("queue.buffering.max.kbytes", "memory is bounded by the relay"),
    ("queue.buffering.max.messages", "memory is bounded by the relay"),
    ("queue.buffering.max.ms", "set `linger.ms`, its other name"),
    ("queuing.strategy", "order is kept"),
    ("enabled_events", "what becomes of each message must be reported"),
    ("topic.blacklist", "a topic that exists would be called missing"),
    ("api.version.request", "idempotence and headers need what brokers tell of their version"),
    ("broker.version.fallback", "idempotence and headers need what brokers tell of their version"),
    ("bootstrap.servers", "set `brokers`"),
    ("metadata.broker.list", "set `brokers`"),
    ("client.id", "set `client_id`"),
    ("batch.size", "set `batch_bytes_max`"),
    ("batch.num.messages", "set `batch_bytes_max`"),
    ("message.max.bytes", "set `message_bytes_max`"),
    ("security.protocol", "set `security`"),
    ("sasl.mechanism", "set `mechanism`"),
    ("sasl.mechanisms", "set `mechanism`"),
    ("sasl.username", "set `user`"),
    ("sasl.password", "set `password` or `password_file`"),
    ("enable.ssl.certificate.verification", "the broker's certificate is always verified; set `ca_file`"),
    ("ssl.endpoint.identification.algorithm", "the broker's host name is always verified"),
    ("ssl.key.pem", "set `key_file`"),
];

/// Families of settings of which none can be set: librdkafka does not list them all.
const OWN_FAMILIES: &[(&str, &str)] = &[
    ("delivery.report.", "what becomes of each message must be reported"),
    ("plugin.", "a library in between could change or lose events"),
    ("test.", "events would go to brokers that do not exist"),
    ("ut_", "it is for the tests of librdkafka itself"),
];

/// Why an option is refused.
fn instead(option: &str) -> Option<&'static str> {
    let own = OWN.iter().find(|(own, _)| *own == option);
    own.or_else(|| OWN_FAMILIES.iter().find(|(family, _)| option.starts_with(family))).map(|(_, instead)| *instead)
}

/// librdkafka's copy of what is on its way. The relay's own bound comes on top.
const QUEUE_KBYTES: usize = 16 << 10;

/// The host of a broker that is written as one, with or without a port. librdkafka would try another port for one that is
/// not, or wait for a broker for ever.
fn host(broker: &str) -> Option<&str> {
    let place = broker.split_once("://").map_or(broker, |(_, place)| place);
    let (host, port) = match place.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port),
        _ => (place, "9092"),
    };
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let plain = Some(host).filter(|host| !host.is_empty() && !host.contains([':', '/', ' ']));
    bracketed.or(plain).filter(|_| port.parse::<u16>().is_ok_and(|port| port > 0))
}

/// What is sent to it does not leave this machine.
fn is_local(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

impl KafkaConfig {
    fn error(message: impl Into<String>) -> BuildError {
        BuildError::new("kafka", message)
    }

    /// The settings for librdkafka, complete but for how messages are batched.
    pub(super) fn client(&self) -> Result<ClientConfig, BuildError> {
        if self.brokers.trim().is_empty() {
            return Err(KafkaConfig::error("`brokers` is empty; write \"host:9092\""));
        }
        if let Some(wrong) = self.brokers.split(',').find(|broker| host(broker.trim()).is_none()) {
            return Err(KafkaConfig::error(format!("`brokers`: {wrong:?} is no broker; write \"host:9092\"")));
        }
        for (name, bytes) in [("message_bytes_max", self.message_bytes_max), ("batch_bytes_max", self.batch_bytes_max)]
        {
            if !BYTES_MAX.contains(&bytes) {
                let (least, most) = BYTES_MAX.into_inner();
                return Err(KafkaConfig::error(format!("`{name}` is {bytes}; it can be {least} to {most}")));
            }
        }
        let mut client = ClientConfig::new();
        for (name, value) in &self.options {
            if let Some(instead) = instead(name) {
                return Err(KafkaConfig::error(format!("option {name:?} cannot be set: {instead}")));
            }
            client.set(name, value);
        }
        let kbytes = QUEUE_KBYTES.max(self.message_bytes_max / 1024 + 1); // a message that never fits would wait for ever
        for (name, value) in [
            ("bootstrap.servers", self.brokers.as_str()),
            ("client.id", &self.client_id),
            ("acks", "all"),
            ("enable.idempotence", "true"),
            // A refused batch stops the producer, so that nothing behind it overtakes it.
            ("enable.gapless.guarantee", "true"),
            // As Java's default: consumers and other producers agree on an aggregate's partition.
            ("partitioner", "murmur2_random"),
            // Never: the relay gives a send up, and only then.
            ("message.timeout.ms", "0"),
            ("linger.ms", LINGER_MS),
            ("message.max.bytes", &self.message_bytes_max.to_string()),
            ("queue.buffering.max.kbytes", &kbytes.to_string()),
            ("queue.buffering.max.messages", "0"), // by bytes only
            // A topic that was deleted: its events are answered for after this long.
            ("topic.metadata.propagation.max.ms", "5000"),
            // A broker that is back is found within a second.
            ("reconnect.backoff.ms", "50"),
            ("reconnect.backoff.max.ms", "1000"),
            ("socket.nagle.disable", "true"),
            ("log.connection.close", "false"), // brokers close idle connections; that is no news
        ] {
            // What an operator set in `options` wins where it may be set at all.
            if !self.options.contains_key(name) {
                client.set(name, value);
            }
        }
        self.protect(self.security()?, &mut client)?;
        // Found now, not at the first event. The value is not quoted: it may be secret.
        let unknown = |e: rdkafka::error::KafkaError| match e {
            rdkafka::error::KafkaError::ClientConfig(_, why, name, _) => KafkaConfig::error(format!("{name}: {why}")),
            other => KafkaConfig::error(other.to_string()),
        };
        client.create_native_config().map_err(unknown)?;
        Ok(client)
    }

    /// Brokers that are not this machine, for people.
    fn elsewhere(&self) -> Option<String> {
        let brokers = self.brokers.split(',').map(str::trim);
        let far: Vec<&str> = brokers.filter(|broker| !host(broker).is_some_and(is_local)).collect();
        (!far.is_empty()).then(|| far.join(", "))
    }

    /// Plain text leaves this machine only where that is stated.
    fn security(&self) -> Result<Security, BuildError> {
        match (self.security, self.elsewhere()) {
            (Some(stated), _) => Ok(stated),
            (None, None) => Ok(Security::Plaintext),
            (None, Some(brokers)) => Err(KafkaConfig::error(format!(
                "`security` is not stated, and not all brokers are this machine ({brokers}); set security = \"ssl\" or \
                 \"sasl_ssl\", or security = \"plaintext\" if plain text is really meant"
            ))),
        }
    }

    /// Who we are to the brokers, as their ACLs write it, unless they map names in a way of their own.
    pub(super) fn principal(&self) -> String {
        match (&self.user, &self.certificate_file) {
            (Some(user), _) => format!("User:{user}"),
            (None, Some(file)) => format!("User:<subject of {}, such as CN=postbox>", file.display()),
            (None, None) => "User:ANONYMOUS".into(),
        }
    }

    /// What the operator has stated and may regret.
    pub(super) fn warning(&self) -> Option<String> {
        let what = match (self.security?, self.mechanism) {
            (Security::Ssl | Security::SaslSsl, _) => return None,
            (Security::SaslPlaintext, Mechanism::Plain) => "events and the password",
            (Security::Plaintext | Security::SaslPlaintext, _) => "events",
        };
        let brokers = self.elsewhere()?;
        Some(format!(
            "{what} go to {brokers} in plain text, as `security` says: anybody on the way can read and change them"
        ))
    }

    #[cfg(not(feature = "kafka-tls"))]
    fn protect(&self, security: Security, _: &mut ClientConfig) -> Result<(), BuildError> {
        let asked = security != Security::Plaintext
            || self.user.is_some()
            || self.options.keys().any(|name| name.starts_with("ssl.") || name.starts_with("sasl."));
        if asked {
            return Err(KafkaConfig::error(
                "this build has no TLS/SASL; build with --features kafka-tls (needs OpenSSL's headers)",
            ));
        }
        // Checked for their own sake, so that a configuration fails or passes alike in every build.
        self.secret().map(drop)
    }

    #[cfg(feature = "kafka-tls")]
    fn protect(&self, security: Security, client: &mut ClientConfig) -> Result<(), BuildError> {
        let sasl = matches!(security, Security::SaslPlaintext | Security::SaslSsl);
        let protocol = match security {
            Security::Plaintext => "plaintext",
            Security::Ssl => "ssl",
            Security::SaslPlaintext => "sasl_plaintext",
            Security::SaslSsl => "sasl_ssl",
        };
        client.set("security.protocol", protocol);
        let files = [
            ("ssl.ca.location", "ca_file", &self.ca_file),
            ("ssl.certificate.location", "certificate_file", &self.certificate_file),
            ("ssl.key.location", "key_file", &self.key_file),
        ];
        for (setting, name, file) in files {
            let Some(file) = file else { continue };
            if !matches!(security, Security::Ssl | Security::SaslSsl) {
                return Err(KafkaConfig::error(format!(
                    "`{name}` without TLS; set security = \"ssl\" or \"sasl_ssl\""
                )));
            }
            std::fs::metadata(file).map_err(|e| KafkaConfig::error(format!("`{name}` {}: {e}", file.display())))?;
            client.set(setting, file.to_string_lossy());
        }
        match (&self.user, self.secret()?) {
            (Some(user), Some(password)) if sasl => {
                let mechanism = match self.mechanism {
                    Mechanism::Plain => "PLAIN",
                    Mechanism::ScramSha256 => "SCRAM-SHA-256",
                    Mechanism::ScramSha512 => "SCRAM-SHA-512",
                };
                client.set("sasl.mechanism", mechanism);
                client.set("sasl.username", user).set("sasl.password", secrecy::ExposeSecret::expose_secret(&password));
            }
            (None, None) if !sasl => {}
            _ if sasl => return Err(KafkaConfig::error("SASL needs `user`, and `password` or `password_file`")),
            _ => return Err(KafkaConfig::error("`user` without SASL; set security = \"sasl_ssl\"")),
        }
        Ok(())
    }

    fn secret(&self) -> Result<Option<SecretString>, BuildError> {
        read_secret("password", self.password.as_ref(), self.password_file.as_deref()).map_err(KafkaConfig::error)
    }
}

/// Lets batches fill while draining; a small batch does not wait for it, see `Session::hurry`.
pub(super) const LINGER_MS: &str = "5";

impl Batching {
    pub(super) fn apply(self, client: &mut ClientConfig) {
        match self {
            Batching::Full { bytes } => client.set("batch.size", bytes.to_string()),
            Batching::Single { .. } => client.set("batch.num.messages", "1"),
        };
    }
}

impl fmt::Debug for KafkaConfig {
    /// Names of the free options only: a value may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaConfig")
            .field("brokers", &self.brokers)
            .field("client_id", &self.client_id)
            .field("message_bytes_max", &self.message_bytes_max)
            .field("batch_bytes_max", &self.batch_bytes_max)
            .field("security", &self.security)
            .field("ca_file", &self.ca_file)
            .field("certificate_file", &self.certificate_file)
            .field("key_file", &self.key_file)
            .field("mechanism", &self.mechanism)
            .field("user", &self.user)
            .field("password", &self.password.as_ref().map(|_| "***"))
            .field("password_file", &self.password_file)
            .field("options", &self.options.keys().collect::<Vec<_>>())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(more: &str) -> Result<KafkaConfig, serde_json::Error> {
        serde_json::from_str(&format!(r#"{{"brokers": "localhost:9092"{more}}}"#))
    }
    fn at(brokers: &str, security: Option<Security>) -> KafkaConfig {
        KafkaConfig { brokers: brokers.into(), security, ..config("").unwrap() }
    }
    fn refused(more: &str) -> String {
        config(more).unwrap().client().unwrap_err().to_string()
    }

    #[test]
    fn what_postbox_promises_cannot_be_switched_off() {
        let client = config(r#", "options": {"compression.type": "lz4", "linger.ms": "1"}"#).unwrap().client().unwrap();
        let get = |name| client.get(name);
        assert_eq!(
            (get("acks"), get("enable.idempotence"), get("partitioner")),
            (Some("all"), Some("true"), Some("murmur2_random"))
        );
        assert_eq!((get("compression.type"), get("linger.ms")), (Some("lz4"), Some("1")));
        let families = [
            "delivery.report.only.error",
            "plugin.library.paths",
            "test.mock.num.brokers",
            "ut_handle_ProduceResponse",
        ];
        for name in OWN.iter().map(|(name, _)| *name).chain(families) {
            let text = refused(&format!(r#", "options": {{"{name}": "hunter2"}}"#));
            assert!(text.contains(name) && text.contains("cannot be set") && !text.contains("hunter2"), "{text}");
        }
        let text = refused(r#", "options": {"compresion.type": "hunter2"}"#);
        assert!(text.contains("compresion.type") && !text.contains("hunter2"), "{text}");
        assert!(config(r#", "broker": "x""#).unwrap_err().to_string().contains("unknown field `broker`"));
    }

    #[test]
    fn case_t2_no_secret_in_debug_or_errors() {
        let text = format!(
            "{:?}",
            config(r#", "user": "u", "password": "p@ss:/%word", "options": {"ssl.key.password": "hunter2"}"#).unwrap()
        );
        assert!(text.contains("password") && !text.contains("p@ss") && !text.contains("hunter2"), "{text}");
        let text = config(r#", "password": ["hunter2"]"#).unwrap_err().to_string();
        assert!(!text.contains("hunter2"), "{text}");
        assert!(refused(r#", "password": "a", "password_file": "/b""#).contains("not both"));
        assert!(refused(r#", "password_file": "/nonexistent/file""#).contains("`password_file` /nonexistent/file"));
    }

    #[test]
    fn sizes_that_librdkafka_cannot_take_are_refused_with_key_and_range() {
        for name in ["message_bytes_max", "batch_bytes_max"] {
            for bytes in ["0", "999", "1000000001"] {
                let text = refused(&format!(r#", "{name}": {bytes}"#));
                assert!(text.contains(&format!("`{name}` is {bytes}; it can be 1000 to 1000000000")), "{text}");
            }
            for bytes in ["1000", "1000000000"] {
                config(&format!(r#", "{name}": {bytes}"#)).unwrap().client().unwrap();
            }
        }
    }

    #[test]
    fn brokers_are_hosts_with_ports() {
        let client = |brokers: &str| at(brokers, Some(Security::Plaintext)).client();
        for good in ["b", "b:9092, c:9093", "PLAINTEXT://b:1", "[::1]:9092", "10.0.0.1:65535"] {
            client(good).unwrap();
        }
        for bad in ["b:port", "b:0", "b:65536", ":9092", "b:9092,", "b c:9092", "::1:9092", "http://b/x:1"] {
            let text = client(bad).unwrap_err().to_string();
            assert!(text.contains("is no broker; write"), "{bad}: {text}");
        }
    }

    #[test]
    fn case_t1_plain_text_leaves_this_machine_only_where_that_is_stated() {
        for here in ["localhost", "localhost:9092, 127.3.2.1:1", "[::1]:9092", "PLAINTEXT://localhost:1"] {
            at(here, None).client().unwrap();
            assert_eq!(at(here, Some(Security::Plaintext)).warning(), None, "{here}");
        }
        for far in
            ["b", "10.0.0.1:1", "[2001:db8::1]:9092", "PLAINTEXT://b:1", "localhost.b:1", "127.0.0.1.b", "0.0.0.0:1"]
        {
            let brokers = format!("localhost:9092, {far}");
            let text = at(&brokers, None).client().unwrap_err().to_string();
            assert!(text.contains(&format!("({far})")) && text.contains("security = \"plaintext\" if"), "{text}");
            at(&brokers, Some(Security::Plaintext)).client().unwrap();
            let warned = |security| at(&brokers, Some(security)).warning();
            let text = warned(Security::Plaintext).unwrap();
            assert!(text.starts_with(&format!("events go to {far} in plain text")), "{text}");
            assert_eq!(warned(Security::SaslPlaintext), Some(text));
            assert_eq!((warned(Security::Ssl), warned(Security::SaslSsl)), (None, None));
        }
        let login = KafkaConfig { mechanism: Mechanism::Plain, ..at("b", Some(Security::SaslPlaintext)) };
        assert!(login.warning().unwrap().starts_with("events and the password go to b in"));
    }

    #[cfg(not(feature = "kafka-tls"))]
    #[test]
    fn a_build_without_tls_says_so() {
        for more in [r#", "security": "ssl""#, r#", "security": "sasl_ssl", "user": "u", "password": "p""#] {
            assert!(refused(more).contains("build with --features kafka-tls (needs OpenSSL's headers)"));
        }
    }

    #[cfg(feature = "kafka-tls")]
    #[test]
    fn half_a_protection_is_refused() {
        assert!(refused(r#", "security": "sasl_ssl", "user": "u""#).contains("SASL needs `user`"));
        assert!(refused(r#", "user": "u", "password": "p""#).contains("`user` without SASL"));
        assert!(refused(r#", "ca_file": "/x""#).contains("`ca_file` without TLS"));
        assert!(refused(r#", "security": "ssl", "ca_file": "/nonexistent""#).contains("`ca_file` /nonexistent"));
    }
}

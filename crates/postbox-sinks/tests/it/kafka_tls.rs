//! TLS and SASL against a real broker with an own CA, SCRAM and ACLs.

use crate::{message, within};
use postbox_engine::{SendError, SendErrorKind, Sink};
use postbox_sinks::kafka::{KafkaConfig, KafkaSink};
use postbox_testkit::services::{Kafka, KafkaOptions};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use serde_json::json;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

fn broker() -> &'static Kafka {
    static BROKER: OnceLock<Kafka> = OnceLock::new();
    BROKER.get_or_init(|| Kafka::start_with(&KafkaOptions { sasl: true, ..KafkaOptions::default() }).unwrap())
}

fn ca() -> PathBuf {
    broker().certificate("ca.pem")
}

/// As the administrator, whom ACLs do not bind.
fn client() -> ClientConfig {
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", broker().bootstrap()).set("security.protocol", "sasl_ssl");
    client.set("ssl.ca.location", ca().to_string_lossy());
    client.set("sasl.mechanism", "SCRAM-SHA-512").set("sasl.username", "admin").set("sasl.password", "admin-secret");
    client
}

async fn topic(name: &str) {
    let admin: AdminClient<DefaultClientContext> = client().create().unwrap();
    let topic = NewTopic::new(name, 1, TopicReplication::Fixed(1));
    within(admin.create_topics([&topic], &AdminOptions::new())).await.unwrap().remove(0).unwrap();
}

fn sink_of(config: serde_json::Value) -> KafkaSink {
    KafkaSink::new(&serde_json::from_value::<KafkaConfig>(config).unwrap()).unwrap()
}

fn sink(bootstrap: &str, ca: &Path, user: &str, password: &str) -> KafkaSink {
    sink_of(json!({"brokers": bootstrap, "security": "sasl_ssl", "ca_file": ca, "user": user, "password": password}))
}

fn our_sink(user: &str, password: &str) -> KafkaSink {
    sink(&broker().bootstrap(), &ca(), user, password)
}

async fn outcome(sink: &KafkaSink, topic: &str, number: u32) -> Result<(), SendError> {
    within(sink.send(&[message(topic, number, "k", number.to_string().as_bytes())])).await.remove(0)
}

/// A certificate and its key that nobody else has signed.
fn stranger() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key) = (folder.path().join("certificate.pem"), folder.path().join("key.pem"));
    let mut make = std::process::Command::new("openssl");
    make.args("req -x509 -newkey rsa:2048 -nodes -days 3 -subj /CN=relay".split(' '));
    let made = make.arg("-keyout").arg(&key).arg("-out").arg(&certificate).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    (folder, certificate, key)
}

/// Each mechanism has passwords of its own at the broker, so that no other can be taken for it.
#[tokio::test(flavor = "multi_thread")]
async fn case_t1_every_mechanism_with_and_without_tls() {
    topic("ways").await;
    let plaintext = broker().sasl_plaintext_bootstrap().unwrap();
    let ways = [("sasl_ssl", broker().bootstrap()), ("sasl_plaintext", plaintext)].into_iter().flat_map(|way| {
        let mechanisms = [("SCRAM-SHA-512", ""), ("SCRAM-SHA-256", "-256"), ("PLAIN", "-plain")];
        mechanisms.map(|(mechanism, password)| (way.clone(), mechanism, format!("admin-secret{password}")))
    });
    let tried = ways.zip(1..).map(async |(((security, bootstrap), mechanism, password), number)| {
        let sink = |password: &str| {
            let ca = (security == "sasl_ssl").then(ca);
            sink_of(json!({"brokers": bootstrap, "security": security, "ca_file": ca, "mechanism": mechanism,
                "user": "admin", "password": password}))
        };
        outcome(&sink(&password), "ways", number).await.unwrap();
        let error = outcome(&sink("hunter2"), "ways", 100).await.unwrap_err();
        assert_eq!(error.kind, SendErrorKind::Unavailable, "{mechanism}: {error}");
        assert!(error.message.contains("uthentication") && !error.message.contains("hunter2"), "{error}");
    });
    futures_util::future::join_all(tried).await;
    assert_eq!(crate::consumer::read_all(&client(), "ways", 1).len(), 6);
}

/// Without a certificate of ours the broker lets all do all, and with one only what its subject may.
#[tokio::test(flavor = "multi_thread")]
async fn case_t1_tls_alone_with_and_without_a_certificate_of_ours() {
    topic("certified").await;
    let with = |certificate: Option<[PathBuf; 2]>| {
        let ssl = broker().ssl_bootstrap().unwrap();
        let mut config = json!({"brokers": ssl, "security": "ssl", "ca_file": ca()});
        if let Some([certificate, key]) = certificate {
            config["certificate_file"] = certificate.to_string_lossy().into();
            config["key_file"] = key.to_string_lossy().into();
        }
        sink_of(config)
    };
    outcome(&with(None), "certified", 1).await.unwrap();
    assert_eq!(crate::consumer::read_all(&client(), "certified", 1).len(), 1);

    let relay = with(Some([broker().certificate("relay.pem"), broker().certificate("relay.key")]));
    let error = outcome(&relay, "certified", 2).await.unwrap_err();
    assert_eq!(error.kind, SendErrorKind::Failed);
    let grant = format!("'User:<subject of {}, such as", broker().certificate("relay.pem").display());
    assert!(error.message.contains("kafka-acls") && error.message.contains(&grant), "{error}");

    let (_folder, _, another_key) = stranger();
    let error =
        outcome(&with(Some([broker().certificate("relay.pem"), another_key])), "certified", 3).await.unwrap_err();
    assert_eq!(error.kind, SendErrorKind::Unavailable, "{error}");
    assert!(error.message.contains("key"), "{error}");
    assert_eq!(crate::consumer::read_all(&client(), "certified", 1).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_t1_another_ca_is_refused() {
    let (_folder, other, _) = stranger();
    let error = within(sink(&broker().bootstrap(), &other, "admin", "admin-secret").check()).await.unwrap_err();
    assert_eq!(error.kind, SendErrorKind::Unavailable);
    assert!(error.message.contains("certificate verify failed"), "{error}");
}

/// The certificate is for localhost and 127.0.0.1; this is another name of the same broker.
#[tokio::test(flavor = "multi_thread")]
async fn case_t1_another_host_name_is_refused() {
    let listener = TcpListener::bind((Ipv4Addr::new(127, 0, 0, 2), 0)).unwrap();
    let elsewhere = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for theirs in listener.incoming() {
            let (mut theirs, mut ours) = (theirs.unwrap(), TcpStream::connect(broker().bootstrap()).unwrap());
            let (mut back, mut forth) = (ours.try_clone().unwrap(), theirs.try_clone().unwrap());
            std::thread::spawn(move || io::copy(&mut back, &mut forth));
            std::thread::spawn(move || io::copy(&mut theirs, &mut ours));
        }
    });
    let error = within(sink(&elsewhere, &ca(), "admin", "admin-secret").check()).await.unwrap_err();
    assert_eq!(error.kind, SendErrorKind::Unavailable);
    assert!(error.message.contains("certificate verify failed"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o6_a_missing_right_names_the_command_that_grants_it() {
    topic("forbidden").await;
    let sink = our_sink("app", "app-secret");
    let outcomes = within(sink.send(&[message("forbidden", 1, "k", b"1")])).await;
    let error = outcomes[0].clone().unwrap_err();
    assert_eq!(error.kind, SendErrorKind::Failed);
    assert!(
        error.message.contains("kafka-acls")
            && error.message.contains("--allow-principal 'User:app' --producer --topic forbidden"),
        "{error}"
    );
}

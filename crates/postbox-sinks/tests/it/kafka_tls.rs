//! TLS and SASL against a real broker with an own CA, SCRAM and ACLs.

use crate::{kinds, message, within};
use postbox_engine::{SendErrorKind, Sink};
use postbox_sinks::kafka::{KafkaConfig, KafkaSink};
use postbox_testkit::services::{Kafka, KafkaOptions};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::OnceLock;

fn broker() -> &'static Kafka {
    static BROKER: OnceLock<Kafka> = OnceLock::new();
    BROKER.get_or_init(|| Kafka::start_with(&KafkaOptions { sasl: true, ..KafkaOptions::default() }).unwrap())
}

/// As the administrator, whom ACLs do not bind.
fn client() -> ClientConfig {
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", broker().bootstrap()).set("security.protocol", "sasl_ssl");
    client.set("ssl.ca.location", broker().ca_path().unwrap().to_string_lossy());
    client.set("sasl.mechanism", "SCRAM-SHA-512").set("sasl.username", "admin").set("sasl.password", "admin-secret");
    client
}

async fn topic(name: &str) {
    let admin: AdminClient<DefaultClientContext> = client().create().unwrap();
    let topic = NewTopic::new(name, 1, TopicReplication::Fixed(1));
    within(admin.create_topics([&topic], &AdminOptions::new())).await.unwrap().remove(0).unwrap();
}

fn sink(bootstrap: &str, ca: &Path, user: &str, password: &str) -> KafkaSink {
    let config: KafkaConfig = serde_json::from_value(serde_json::json!({
        "brokers": bootstrap, "security": "sasl_ssl", "ca_file": ca, "user": user, "password": password,
    }))
    .unwrap();
    KafkaSink::new(&config).unwrap()
}

fn our_sink(user: &str, password: &str) -> KafkaSink {
    sink(&broker().bootstrap(), &broker().ca_path().unwrap(), user, password)
}

#[tokio::test(flavor = "multi_thread")]
async fn case_t1_scram_over_tls() {
    topic("happy").await;
    let sink = our_sink("admin", "admin-secret");
    within(sink.check()).await.unwrap();
    assert_eq!(kinds(&within(sink.send(&[message("happy", 1, "k", b"1")])).await), [None]);
    assert_eq!(crate::consumer::read_all(&client(), "happy", 1).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_t1_a_wrong_password_is_an_outage_that_says_so() {
    let sink = our_sink("admin", "hunter2");
    let error = within(sink.check()).await.unwrap_err();
    assert_eq!(error.kind, SendErrorKind::Unavailable);
    assert!(error.message.contains("uthentication") && !error.message.contains("hunter2"), "{error}");
    assert_eq!(kinds(&within(sink.send(&[message("t", 1, "k", b"1")])).await), [Some(SendErrorKind::Unavailable)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_t1_another_ca_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("ca.pem");
    let made = std::process::Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "3",
            "-subj",
            "/CN=other-ca",
            "-keyout",
            "/dev/null",
            "-out",
        ])
        .arg(&other)
        .output()
        .unwrap();
    assert!(made.status.success());
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
    let error =
        within(sink(&elsewhere, &broker().ca_path().unwrap(), "admin", "admin-secret").check()).await.unwrap_err();
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
            && error.message.contains("--allow-principal User:app --producer --topic forbidden"),
        "{error}"
    );
}

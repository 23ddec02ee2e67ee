//! The suite that every sink must pass, over each of ours.

use postbox_testkit::sink_suite::{Destination, Harness, Nature, Received};
use std::sync::Mutex;
use std::time::Duration;

/// One step of a wait; the suite has the deadline.
async fn step() {
    tokio::time::sleep(Duration::from_millis(20)).await; // the step of a wait with a deadline
}

fn id_of(text: &[u8]) -> [u8; 16] {
    let digits: String = std::str::from_utf8(text).unwrap().replace('-', "");
    u128::from_str_radix(&digits, 16).unwrap().to_be_bytes()
}

mod kafka {
    use super::*;
    use crate::consumer::{plaintext, read_all};
    use postbox_engine::{Limits, Message, SendError, Sink};
    use postbox_sinks::kafka::KafkaSink;
    use postbox_testkit::services::Kafka;
    use postbox_testkit::sink_suite;

    const PARTITIONS: i32 = 3;

    /// The suite's messages are not routed, so the event id, which a Kafka consumer finds in the headers, is put there.
    struct WithId<S>(S);

    impl<S: Sink> Sink for WithId<S> {
        fn limits(&self) -> Limits {
            self.0.limits()
        }
        fn prepare(&self) {
            self.0.prepare();
        }
        async fn send(&self, batch: &[Message]) -> Vec<Result<(), SendError>> {
            let mut batch = batch.to_vec();
            for message in &mut batch {
                let id = message.id_text();
                message.headers.push("event_id", id.as_bytes());
            }
            self.0.send(&batch).await
        }
        async fn check(&self) -> Result<(), SendError> {
            self.0.check().await
        }
    }

    struct Shared;
    impl Harness for Shared {
        type Destination = Topic;
        async fn destination(&self) -> Topic {
            Topic { name: crate::kafka::topic(PARTITIONS as u32, &[]), own: None }
        }
    }

    /// A broker of its own, that can be taken down.
    struct Own;
    impl Harness for Own {
        type Destination = Topic;
        async fn destination(&self) -> Topic {
            let kafka = Kafka::start().unwrap();
            kafka.create_topic("t", PARTITIONS as u32, &[]).unwrap();
            Topic { name: "t".into(), own: Some(Mutex::new(kafka)) }
        }
    }

    struct Topic {
        name: String,
        own: Option<Mutex<Kafka>>,
    }

    impl Topic {
        fn bootstrap(&self) -> String {
            self.own.as_ref().map_or_else(|| Kafka::shared().bootstrap(), |own| own.lock().unwrap().bootstrap())
        }
        fn with_own(&self, act: impl FnOnce(&mut Kafka)) {
            let own = self.own.as_ref().expect("a broker of its own");
            tokio::task::block_in_place(|| act(&mut own.lock().unwrap()));
        }
    }

    impl Destination for Topic {
        type Sink = WithId<KafkaSink>;
        fn nature(&self) -> Nature {
            Nature {
                body_bytes_max: Some(1_000_000),
                tombstone: None,
                any_header: true,
                keyed: true,
                outage: self.own.is_some(),
                missing: Some(format!("{}-missing", self.name)),
            }
        }
        fn name(&self) -> String {
            self.name.clone()
        }
        async fn sink(&self) -> WithId<KafkaSink> {
            WithId(crate::kafka::sink(&self.bootstrap()))
        }
        async fn received(&self, at_least: usize) -> Vec<Received> {
            loop {
                let (client, name) = (plaintext(&self.bootstrap()), self.name.clone());
                let seen = tokio::task::spawn_blocking(move || read_all(&client, &name, PARTITIONS)).await.unwrap();
                if seen.len() >= at_least {
                    let received = |m: crate::consumer::Seen| Received {
                        event_id: id_of(m.header("event_id").unwrap()),
                        key: String::from_utf8(m.key.unwrap()).unwrap(),
                        body: m.payload,
                        headers: m.headers,
                    };
                    return seen.into_iter().map(received).collect();
                }
                step().await;
            }
        }
        async fn down(&self) {
            self.with_own(|kafka| kafka.crash().unwrap());
        }
        async fn up(&self) {
            self.with_own(|kafka| kafka.restart().unwrap());
        }
        async fn complaints(&self, sink: &WithId<KafkaSink>, name: &str) -> Option<Vec<String>> {
            Some(sink.0.check_topics(&[name]).await.unwrap())
        }
    }

    postbox_testkit::sink_suite!(Shared);

    #[test]
    fn with_an_outage() {
        postbox_testkit::run_rule(sink_suite::an_outage_is_never_success_and_loses_nothing(&Own));
    }
}

mod webhook {
    use super::*;
    use crate::webhook::{OK, Receiver};
    use postbox_sinks::webhook::WebhookSink;

    struct Harnessed;
    impl Harness for Harnessed {
        type Destination = Endpoint;
        async fn destination(&self) -> Endpoint {
            Endpoint(Mutex::new(Receiver::start(&[OK])))
        }
    }

    struct Endpoint(Mutex<Receiver>);

    impl Destination for Endpoint {
        type Sink = WebhookSink;
        fn nature(&self) -> Nature {
            Nature {
                body_bytes_max: None,
                tombstone: Some(Vec::new()),
                any_header: false,
                keyed: false,
                outage: true,
                missing: None,
            }
        }
        fn name(&self) -> String {
            self.0.lock().unwrap().url()
        }
        async fn sink(&self) -> WebhookSink {
            crate::webhook::sink(&self.name())
        }
        async fn received(&self, at_least: usize) -> Vec<Received> {
            loop {
                let received = self.0.lock().unwrap().received();
                if received.len() >= at_least {
                    return received
                        .into_iter()
                        .map(|(headers, body)| {
                            let id = &headers.iter().find(|(name, _)| name == "webhook-id").expect("an id").1;
                            Received { event_id: id_of(id), key: String::new(), body: Some(body), headers }
                        })
                        .collect();
                }
                step().await;
            }
        }
        async fn down(&self) {
            self.0.lock().unwrap().down();
            // What goes out on a connection in the moment of its end has no answer and costs an attempt, as `broken` ones
            // do: the sink's idle connections learn of their end first.
            step().await;
        }
        async fn up(&self) {
            self.0.lock().unwrap().up();
        }
        async fn complaints(&self, sink: &WebhookSink, name: &str) -> Option<Vec<String>> {
            Some(sink.unusable(name).into_iter().collect())
        }
    }

    postbox_testkit::sink_suite!(Harnessed);
}

mod stdout {
    use super::*;
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use postbox_sinks::stdout::StdoutSink;
    use serde_json::value::RawValue;
    use std::collections::BTreeMap;

    struct Harnessed;
    impl Harness for Harnessed {
        type Destination = Lines;
        async fn destination(&self) -> Lines {
            Lines(tempfile::NamedTempFile::new().unwrap())
        }
    }

    struct Lines(tempfile::NamedTempFile);

    #[derive(serde::Deserialize)]
    struct Line<'a> {
        id: &'a str,
        aggregate_id: String,
        headers: BTreeMap<String, String>,
        #[serde(borrow, default, deserialize_with = "present")]
        payload: Option<&'a RawValue>,
        payload_base64: Option<String>,
        #[serde(default)]
        tombstone: bool,
    }

    /// JSON's null is a payload too.
    fn present<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<&'de RawValue>, D::Error> {
        serde::Deserialize::deserialize(d).map(Some)
    }

    impl Destination for Lines {
        type Sink = StdoutSink;
        fn nature(&self) -> Nature {
            Nature {
                body_bytes_max: None,
                tombstone: None,
                any_header: false,
                keyed: true,
                outage: false,
                missing: None,
            }
        }
        fn name(&self) -> String {
            "anywhere".into()
        }
        async fn sink(&self) -> StdoutSink {
            StdoutSink::to(std::fs::File::options().append(true).open(self.0.path()).unwrap())
        }
        async fn received(&self, at_least: usize) -> Vec<Received> {
            loop {
                let text = std::fs::read_to_string(self.0.path()).unwrap();
                let lines: Vec<Line<'_>> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
                if lines.len() >= at_least {
                    return lines.into_iter().map(received).collect();
                }
                step().await;
            }
        }
        async fn down(&self) {}
        async fn up(&self) {}
        async fn complaints(&self, _: &StdoutSink, _: &str) -> Option<Vec<String>> {
            None
        }
    }

    fn received(line: Line<'_>) -> Received {
        let json = line.payload.map(|json| json.get().as_bytes().to_vec());
        let binary = line.payload_base64.map(|text| STANDARD.decode(text).unwrap());
        Received {
            event_id: id_of(line.id.as_bytes()),
            key: line.aggregate_id,
            body: if line.tombstone { None } else { json.or(binary) },
            headers: line.headers.into_iter().map(|(name, value)| (name, value.into_bytes())).collect(),
        }
    }

    postbox_testkit::sink_suite!(Harnessed);
}

use super::*;
use postbox_engine::{Event, EventParts, Route, Rule};
use std::sync::{Arc, Mutex};

fn message(parts: &EventParts<'_>) -> Message {
    let rule = Rule { topic: "t".into(), ..Rule::default() };
    Route::new(vec![rule]).unwrap().message(&Event::new(parts), false).unwrap()
}

fn parts(payload: Option<&[u8]>) -> EventParts<'_> {
    EventParts {
        event_id: [7; 16],
        aggregate_type: "order",
        aggregate_id: "4\"2",
        event_type: "placed",
        schema_version: 1,
        payload,
        ..Default::default()
    }
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);
impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

async fn written(batch: &[Message]) -> String {
    let out = Shared::default();
    let sink = StdoutSink::to(out.clone());
    assert!(sink.send(batch).await.iter().all(Result::is_ok));
    let bytes = out.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

#[tokio::test]
async fn each_event_is_one_line_whatever_its_payload() {
    let pretty = b"{\r\n  \"a\": 9007199254740993,\n  \"b\": \"x\\ny\"\n}";
    let batch = [
        message(&parts(Some(pretty))),
        message(&parts(Some(b"\0\xff"))),
        message(&parts(Some(b""))),
        message(&parts(None)),
    ];
    let text = written(&batch).await;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4);
    let id = "07070707-0707-0707-0707-070707070707";
    assert_eq!(
        lines[0],
        format!(
            "{{\"id\":\"{id}\",\"aggregate_type\":\"order\",\"aggregate_id\":\"4\\\"2\",\"type\":\"placed\",\"destination\":\"t\",\
             \"headers\":{{\"event_id\":\"{id}\",\"event_type\":\"placed\",\"aggregate_type\":\"order\"}},\
             \"payload\":{{    \"a\": 9007199254740993,   \"b\": \"x\\ny\" }}}}"
        )
    );
    assert!(lines[1].ends_with(r#","payload_base64":"AP8="}"#), "{}", lines[1]);
    assert!(lines[2].ends_with(r#","payload_base64":""}"#), "an empty payload is no tombstone: {}", lines[2]);
    assert!(lines[3].ends_with(r#","payload":null,"tombstone":true}"#), "{}", lines[3]);
    for line in lines {
        serde_json::from_str::<serde_json::Value>(line).unwrap();
    }
}

#[tokio::test]
async fn a_closed_pipe_is_an_outage_and_no_panic() {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    let outcomes = StdoutSink::to(writer).send(&[message(&parts(None))]).await;
    let error = outcomes[0].clone().unwrap_err();
    assert_eq!(error.kind, SendErrorKind::Unavailable);
    assert!(error.message.contains("standard output is closed"), "{error}");
}

#[tokio::test]
async fn a_full_pipe_blocks_nobody_else_and_a_batch_given_up_is_not_written() {
    let (mut reader, writer) = io::pipe().unwrap();
    let sink = StdoutSink::to(writer);
    let big = vec![b'x'; 1 << 20]; // more than a pipe holds
    let first = [message(&EventParts { aggregate_id: "first", ..parts(Some(&big)) })];
    let second = [message(&EventParts { aggregate_id: "second", ..parts(None) })];
    let third = [message(&EventParts { aggregate_id: "third", ..parts(None) })];
    // Each is polled once and then waits; this thread is free, or the test would hang here.
    let mut first = Box::pin(sink.send(&first));
    let mut second = Box::pin(sink.send(&second));
    assert!(futures_util::poll!(&mut first).is_pending());
    assert!(futures_util::poll!(&mut second).is_pending());
    drop(second);
    let reading = std::thread::spawn(move || {
        let mut text = String::new();
        io::Read::read_to_string(&mut reader, &mut text).unwrap();
        text
    });
    assert!(first.await.iter().all(Result::is_ok));
    assert!(sink.send(&third).await.iter().all(Result::is_ok));
    drop(sink);
    let text = reading.join().unwrap();
    let order: Vec<bool> = ["\"first\"", "\"second\"", "\"third\""].map(|id| text.contains(id)).into();
    assert_eq!(order, [true, false, true]);
}

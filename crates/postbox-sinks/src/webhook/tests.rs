use super::*;
use postbox_engine::{Envelope, Event, EventParts, Route, Rule};

fn message(envelope: Envelope, headers: &str) -> Message {
    let rule = Rule { topic: "t".into(), envelope, ..Rule::default() };
    let parts = EventParts {
        aggregate_type: "order",
        aggregate_id: "a b\"%ü",
        event_type: "placed",
        schema_version: 1,
        headers,
        ..Default::default()
    };
    Route::new(vec![rule]).unwrap().message(&Event::new(&parts), false).unwrap()
}

fn get(headers: &HeaderMap, name: &str) -> Vec<String> {
    headers.get_all(name).iter().map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned()).collect()
}

#[test]
fn headers_have_their_http_names() {
    let plain = headers(&message(Envelope::Plain, r#"{"x":"1","X":"2","tenant_id":"zürich"}"#)).unwrap();
    assert_eq!(get(&plain, "event-type"), ["placed"]);
    assert_eq!(get(&plain, "x"), ["1", "2"]);
    assert_eq!(get(&plain, "tenant_id"), ["zürich"]);
    assert_eq!(get(&plain, "tombstone"), ["true"]);
    assert_eq!(get(&plain, "content-type"), [""; 0]);

    let binary = headers(&message(Envelope::CloudEventsBinary, "{}")).unwrap();
    assert_eq!(get(&binary, "ce-type"), ["placed"]);
    assert_eq!(get(&binary, "ce-subject"), ["a%20b%22%25%C3%BC"]);
    assert_eq!(get(&binary, "content-type"), ["application/json"]);
    let structured = headers(&message(Envelope::CloudEventsStructured, "{}")).unwrap();
    assert_eq!(get(&structured, "content-type"), ["application/cloudevents+json"]);
}

#[test]
fn a_row_cannot_set_what_is_the_connections() {
    for (name, value) in [
        ("Transfer-Encoding", "chunked"),
        ("content-length", "0"),
        ("host", "evil"),
        ("webhook-signature", "v1,x"),
        ("webhook_id", "x"),
        ("Transfer_Encoding", "chunked"),
        ("x", "a\\r\\nhost: evil"),
    ] {
        let error = headers(&message(Envelope::Plain, &format!("{{\"{name}\":\"{value}\"}}"))).unwrap_err();
        assert!(error.contains(name) && !error.contains("evil"), "{error}");
    }
}

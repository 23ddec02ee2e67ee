use super::*;
use crate::EventParts;
use proptest::prelude::*;

const ID: [u8; 16] = [1; 16];

fn parts() -> EventParts<'static> {
    EventParts {
        event_id: ID,
        aggregate_type: "order",
        aggregate_id: "42",
        event_type: "order.placed",
        schema_version: 1,
        payload: Some(br#"{"total": 10}"#),
        content_type: "application/json",
        headers: "{}",
        created_at: 1_709_251_199_999_999,
        ..Default::default()
    }
}

fn rule(aggregate_type: Option<&str>, event_type: Option<&str>, topic: &str) -> Rule {
    let owned = |text: Option<&str>| text.map(str::to_owned);
    let (aggregate_type, event_type) = (owned(aggregate_type), owned(event_type));
    Rule { aggregate_type, event_type, topic: topic.into(), ..Rule::default() }
}

fn message_in(envelope: Envelope, parts: &EventParts<'_>) -> Message {
    let route = Route::new(vec![Rule { envelope, ..rule(None, None, "t") }]).unwrap();
    route.message(&Event::new(parts), false).unwrap()
}

fn topic(rules: Vec<Rule>, parts: &EventParts<'_>) -> Result<String, RouteError> {
    Route::new(rules)?.message(&Event::new(parts), false).map(|m| m.destination.to_string())
}

fn pairs(message: &Message) -> Vec<(&str, &str)> {
    message.headers.iter().map(|(n, v)| (n, std::str::from_utf8(v).unwrap())).collect()
}

#[test]
fn the_first_rule_that_matches_wins() {
    let rules = || {
        vec![
            rule(Some("invoice"), None, "invoices"),
            rule(None, Some("order.*ed"), "past"),
            rule(Some("order"), None, "orders"),
        ]
    };
    assert_eq!(topic(rules(), &parts()).unwrap(), "past");
    assert_eq!(topic(rules(), &EventParts { event_type: "order.pay", ..parts() }).unwrap(), "orders");
    assert_eq!(topic(rules(), &EventParts { aggregate_type: "invoice", ..parts() }).unwrap(), "invoices");
    let lost = topic(rules(), &EventParts { aggregate_type: "user", event_type: "user.born", ..parts() }).unwrap_err();
    assert_eq!(
        lost.to_string(),
        "no route for aggregate type \"user\", event type \"user.born\"; add a rule to the stream's routes"
    );
}

#[test]
fn topics_are_filled_in_and_an_own_destination_wins() {
    let all = |t: &str| vec![rule(None, None, t)];
    assert_eq!(topic(all("shop.{aggregate_type}-{event_type}"), &parts()).unwrap(), "shop.order-order.placed");
    let own = EventParts { destination: Some("mine"), ..parts() };
    assert_eq!(topic(all("shop.{aggregate_type}"), &own).unwrap(), "mine");
    assert_eq!(topic(all("eu.{destination}.v1"), &own).unwrap(), "eu.mine.v1");
    assert_eq!(topic(vec![], &own).unwrap(), "mine");
    let missing = RouteError::NoDestination { topic: "eu.{destination}".into() };
    assert_eq!(topic(all("eu.{destination}"), &parts()).unwrap_err(), missing);
}

#[test]
fn a_rule_that_matches_a_destination_says_what_becomes_of_it() {
    let maps =
        |destination: &str, topic: &str| Rule { destination: Some(destination.into()), ..rule(None, None, topic) };
    let rules = || {
        vec![
            Rule { event_type: Some("order.paid".into()), ..maps("billing", "paid") },
            maps("billing", "billing-events.v2"),
            maps("eu-*", "eu.{aggregate_type}.{destination}"),
            rule(None, None, "shop.{aggregate_type}"),
        ]
    };
    let to = |destination, event_type| topic(rules(), &EventParts { destination, event_type, ..parts() }).unwrap();
    assert_eq!(to(Some("billing"), "order.placed"), "billing-events.v2");
    assert_eq!(to(Some("billing"), "order.paid"), "paid", "all patterns of a rule must match");
    assert_eq!(to(Some("eu-west"), "order.placed"), "eu.order.eu-west");
    assert_eq!(to(Some("mine"), "order.placed"), "mine", "the last rule does not ask for it");
    assert_eq!(to(None, "order.placed"), "shop.order");
    assert!(topic(vec![maps("*", "t")], &parts()).is_err(), "`*` matches any destination, and not none");
}

#[test]
fn a_rule_that_cannot_be_used_is_refused_at_once() {
    for (bad, reason) in
        [("a.{typo}", "unknown placeholder {typo}"), ("a.{event_type", "a `{` without its `}`"), ("", "is empty")]
    {
        let text = Route::new(vec![rule(None, None, bad)]).unwrap_err().to_string();
        assert!(text.contains(reason) && text.contains("{aggregate_type}"), "{text}");
    }
}

#[test]
fn events_of_one_destination_share_its_string() {
    let route = Route::new(vec![rule(None, None, "{aggregate_type}")]).unwrap();
    let send = |aggregate_type: &str| {
        route.message(&Event::new(&EventParts { aggregate_type, ..parts() }), false).unwrap().destination
    };
    assert!(Arc::ptr_eq(&send("a"), &send("a")));
    for n in 0..3 * NAMES_MAX {
        send(&n.to_string());
    }
    assert!(route.names().known.len() <= NAMES_MAX);
}

#[test]
fn plain_headers_say_only_what_is_not_usual() {
    let message = message_in(Envelope::Plain, &parts());
    let id = "01010101-0101-0101-0101-010101010101";
    assert_eq!(pairs(&message), [("event_id", id), ("event_type", "order.placed"), ("aggregate_type", "order")]);
    assert_eq!(message.body(), Some(&br#"{"total": 10}"#[..]));

    let odd = EventParts { content_type: "image/png", schema_version: 2, aggregate_seq: Some(7), ..parts() };
    let route = Route::new(vec![rule(None, None, "t")]).unwrap();
    let message = route.message(&Event::new(&odd), true).unwrap();
    let rest = [("content_type", "image/png"), ("schema_version", "2"), ("aggregate_seq", "7"), ("replay", "true")];
    assert_eq!(pairs(&message)[3..], rest);
}

#[test]
fn case_w5_no_name_that_is_written_here_may_come_from_a_row() {
    let all = EventParts { content_type: "image/png", schema_version: 2, aggregate_seq: Some(7), ..parts() };
    use Envelope::{CloudEventsBinary, CloudEventsStructured, Debezium, Plain};
    for envelope in [Plain, Debezium, CloudEventsBinary, CloudEventsStructured] {
        let route = Route::new(vec![Rule { envelope, ..rule(None, None, "t") }]).unwrap();
        let message = route.message(&Event::new(&all), true).unwrap();
        assert!(message.headers.iter().count() > 0);
        for (name, _) in message.headers.iter() {
            let headers = format!(r#"{{"{name}":"forged"}}"#);
            let refused = route.message(&Event::new(&EventParts { headers: &headers, ..parts() }), false);
            assert!(refused.unwrap_err().to_string().contains("is postbox's own"), "{name}");
        }
    }
}

#[test]
fn case_k10_own_headers_pass_in_order_and_may_repeat() {
    let headers = r#"{"traceparent":"00-ab-cd-01","x":"1","x":"","tenant":"zürich \"q\"\n"}"#;
    let message = message_in(Envelope::Plain, &EventParts { headers, ..parts() });
    let own = [("traceparent", "00-ab-cd-01"), ("x", "1"), ("x", ""), ("tenant", "zürich \"q\"\n")];
    assert_eq!(pairs(&message)[3..], own);
}

#[test]
fn case_w5_bad_headers_are_that_events_error_and_quote_no_value() {
    for (headers, says) in [
        (r#"{"a":5551234}"#, "the value of \"a\" is no string"),
        (r#"{"a":{"secret":"5551234"}}"#, "the value of \"a\" is no string"),
        (r#"{"a b":"5551234"}"#, "\"a b\" is no valid name"),
        (r#"{"ä":"5551234"}"#, "is no valid name"),
        (r#"{"":"5551234"}"#, "is no valid name"),
        (r#"{"event_id":"5551234"}"#, "is postbox's own"),
        (r#"["5551234"]"#, "a JSON object of strings"),
        (r#"{"a":"5551234""#, "EOF"),
        (r#"{} x"#, "trailing characters"),
        ("null", "a JSON object of strings"),
    ] {
        let route = Route::new(vec![rule(None, None, "t")]).unwrap();
        let error = route.message(&Event::new(&EventParts { headers, ..parts() }), false).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, RouteError::BadHeaders(_)) && text.contains(says), "{headers}: {text}");
        assert!(!text.contains("5551234"), "{text}");
    }
}

#[test]
fn an_unreadable_row_is_that_events_error_whatever_its_rule() {
    for rules in [vec![rule(None, None, "t")], vec![]] {
        let event = Event::new(&EventParts { unreadable: Some("the column x is odd"), ..parts() });
        let error = Route::new(rules).unwrap().message(&event, false).unwrap_err();
        assert_eq!((error.to_string().as_str(), event.headers()), ("the column x is odd", "{}"));
    }
}

#[test]
fn debeziums_form_has_the_id_where_its_consumers_look() {
    let message = message_in(Envelope::Debezium, &EventParts { headers: r#"{"tenant":"t"}"#, ..parts() });
    let [plain @ .., last] = &pairs(&message)[..] else { panic!("no headers") };
    assert_eq!(plain, pairs(&message_in(Envelope::Plain, &EventParts { headers: r#"{"tenant":"t"}"#, ..parts() })));
    assert_eq!(*last, ("id", "01010101-0101-0101-0101-010101010101"));
    assert_eq!(message.body(), Some(&br#"{"total": 10}"#[..]));
}

#[test]
fn a_second_id_is_refused_in_debeziums_form_however_it_is_written() {
    for name in ["id", "ID", "Id"] {
        let headers = format!(r#"{{"{name}":"mine"}}"#);
        let event = Event::new(&EventParts { headers: &headers, ..parts() });
        let route = Route::new(vec![Rule { envelope: Envelope::Debezium, ..rule(None, None, "t") }]).unwrap();
        let error = route.message(&event, false).unwrap_err().to_string();
        assert!(error.contains(&format!("{name:?} is postbox's own under envelope")), "{error}");
    }
}

#[test]
fn what_topics_have_in_any_case() {
    let route =
        Route::new(["t", "shop.{aggregate_type}-{event_type}.v1", "{destination}"].map(|t| rule(None, None, t)).into());
    assert_eq!(route.unwrap().topic_texts().collect::<Vec<_>>(), ["shop.-.v1", ""]);
}

#[test]
fn cloudevents_binary_has_its_attributes_as_headers() {
    let event = EventParts {
        aggregate_seq: Some(3),
        aggregate_type: "Order Item",
        headers: r#"{"tracestate":"a=b"}"#,
        ..parts()
    };
    let message = message_in(Envelope::CloudEventsBinary, &event);
    let expected = [
        ("ce_specversion", "1.0"),
        ("ce_id", "01010101-0101-0101-0101-010101010101"),
        ("ce_source", "/Order%20Item"),
        ("ce_type", "order.placed"),
        ("ce_subject", "42"),
        ("ce_time", "2024-02-29T23:59:59.999999Z"),
        ("ce_sequence", "3"),
        ("content-type", "application/json"),
        ("tracestate", "a=b"),
    ];
    assert_eq!(pairs(&message), expected);
    assert_eq!(message.body, None, "the payload itself, not a copy");
}

#[test]
fn cloudevents_structured_is_one_document() {
    let message = message_in(Envelope::CloudEventsStructured, &EventParts { aggregate_id: "4\"2", ..parts() });
    assert_eq!(pairs(&message), [("content-type", "application/cloudevents+json")]);
    let expected = concat!(
        r#"{"specversion":"1.0","id":"01010101-0101-0101-0101-010101010101","source":"/order","type":"order.placed","#,
        r#""subject":"4\"2","time":"2024-02-29T23:59:59.999999Z","datacontenttype":"application/json","data":{"total": 10}}"#
    );
    assert_eq!(std::str::from_utf8(message.body().unwrap()).unwrap(), expected);
}

#[test]
fn case_p1_json_is_embedded_byte_for_byte() {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    for payload in [
        "9007199254740993",
        "1e400",
        "-0.0",
        r#""\u0000""#,
        r#""\ud800""#,
        r#"{"b":1,"a":2,"b":3}"#,
        " [ 1 ,\n2 ] ",
        "\"🦀\"",
        "null",
        &deep,
    ] {
        let message =
            message_in(Envelope::CloudEventsStructured, &EventParts { payload: Some(payload.as_bytes()), ..parts() });
        let body = std::str::from_utf8(message.body().unwrap()).unwrap();
        assert!(body.ends_with(&format!(r#","data":{payload}}}"#)), "{}", &body[..body.len().min(300)]);
    }
}

#[test]
fn case_p2_what_is_no_json_goes_as_base64() {
    let body = |parts: EventParts<'_>| {
        String::from_utf8(message_in(Envelope::CloudEventsStructured, &parts).body.unwrap().to_vec()).unwrap()
    };
    assert!(
        body(EventParts { payload: Some(b"\0\xff"), content_type: "image/png", ..parts() })
            .ends_with(r#""data_base64":"AP8="}"#)
    );
    assert!(
        body(EventParts { payload: Some(b"{\"a\":"), ..parts() }).ends_with(r#""data_base64":"eyJhIjo="}"#),
        "it only claims to be JSON"
    );
    assert!(body(EventParts { payload: Some(b""), ..parts() }).ends_with(r#""data_base64":""}"#));
    assert!(
        body(EventParts { payload: None, ..parts() }).ends_with(r#""datacontenttype":"application/json"}"#),
        "a tombstone has no data"
    );
}

proptest! {
    /// The matcher agrees with one that is too simple to be wrong.
    #[test]
    fn patterns_match_as_the_textbook_says(pattern in "[ab*]{0,8}", text in "[ab]{0,10}") {
        fn textbook(pattern: &[u8], text: &[u8]) -> bool {
            match (pattern.first(), text.first()) {
                (None, None) => true,
                (Some(b'*'), _) => textbook(&pattern[1..], text) || (!text.is_empty() && textbook(pattern, &text[1..])),
                (Some(p), Some(t)) if p == t => textbook(&pattern[1..], &text[1..]),
                _ => false,
            }
        }
        prop_assert_eq!(Pattern::new(Some(pattern.clone())).matches(&text), textbook(pattern.as_bytes(), text.as_bytes()));
    }
}

//! What was written is what comes, byte for byte.

use super::hand::*;
use super::{Draft, End, Harness, Outbox, Payload};
use postbox_engine::{Claimed, Verdict};

/// P1, P2. The payload is opaque: texts that a parser would change, binary, null and empty all stay themselves.
pub async fn payload_bytes_in_are_bytes_out<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    let payloads = payloads();
    for (i, payload) in payloads.iter().enumerate() {
        let draft = Draft { aggregate_id: i.to_string(), payload: payload.clone(), ..Draft::default() };
        outbox.write(&[draft], End::Commit).await;
    }
    let source = open(&outbox, ONE).await;
    let taken = take(&source, payloads.len()).await;
    for (i, payload) in payloads.iter().enumerate() {
        let claimed = of_aggregate(&taken, &i.to_string());
        let same = claimed.event.payload() == payload.bytes();
        assert!(same, "payload {i} came otherwise: {:.80}", format!("{payload:?}"));
    }
    // Once more by way of the held rows.
    let failed: Vec<_> = taken.iter().map(|c| verdict(c, retry(std::time::Duration::ZERO, 1))).collect();
    settle(&source, &failed).await;
    let again = take(&source, payloads.len()).await;
    for (i, payload) in payloads.iter().enumerate() {
        let same = of_aggregate(&again, &i.to_string()).event.payload() == payload.bytes();
        assert!(same, "payload {i} came otherwise from held: {:.80}", format!("{payload:?}"));
    }
}

fn of_aggregate<'a>(taken: &'a [Claimed], id: &str) -> &'a Claimed {
    taken.iter().find(|c| c.event.aggregate_id() == id).unwrap_or_else(|| panic!("the event of {id} did not come"))
}

fn payloads() -> Vec<Payload> {
    let texts = [
        "9007199254740993",
        "1e400",
        "-0.0",
        r#""\u0000""#,
        r#""\ud800 \udc00\ud800""#,
        r#"{"b": 1, "a": 2, "b": 3}"#,
        " {\t\"white\" :\n \"space\" } ",
        "\"🐘 漢字 é e\u{301}\"",
        "null",
        r#""""#,
        "{}",
    ];
    let mut payloads: Vec<Payload> = texts.iter().map(|t| Payload::Json((*t).into())).collect();
    payloads.push(Payload::Json(format!("{}{}", "[".repeat(500), "]".repeat(500))));
    payloads.push(Payload::Json(format!("\"{}\"", "x".repeat(1 << 20))));
    payloads.push(Payload::Null);
    payloads.push(Payload::Binary(Vec::new()));
    payloads.push(Payload::Binary((0..=255).collect()));
    payloads.push(Payload::Binary(b"\\x00 \\\\ '\"".to_vec()));
    payloads.push(Payload::Binary([0xff, 0x00, 0xfe].repeat(100_000)));
    payloads
}

/// Q3, rule 9. Every field arrives as it was written; the id is the writer's own where there is one.
pub async fn all_fields_arrive_as_written<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    let event_id = *uuid::Uuid::now_v7().as_bytes();
    let full = Draft {
        event_id: Some(event_id),
        aggregate_type: "Invoice \"x\"'; --".into(),
        aggregate_id: "größe/☃\\".into(),
        aggregate_seq: Some(i64::MAX),
        event_type: "invoice.sent".into(),
        schema_version: 7,
        payload: Payload::Binary(vec![1, 2, 3]),
        content_type: "application/avro".into(),
        headers: r#"{"tenant_id": "é", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}"#
            .into(),
        destination: Some("invoices".into()),
        delay: None,
    };
    outbox.write(&[full.clone(), draft("a1"), draft("b1")], End::Commit).await;
    let source = open(&outbox, ONE).await;
    let taken = take(&source, 3).await;
    let event = &of_aggregate(&taken, &full.aggregate_id).event;
    assert_eq!(event.event_id(), event_id);
    assert_eq!(event.aggregate_type(), full.aggregate_type);
    assert_eq!(event.aggregate_seq(), full.aggregate_seq);
    assert_eq!(event.event_type(), full.event_type);
    assert_eq!(event.schema_version(), full.schema_version);
    assert_eq!(event.payload(), Some(&[1, 2, 3][..]));
    assert_eq!(event.content_type(), full.content_type);
    assert_eq!(event.destination(), full.destination.as_deref());
    let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("headers are JSON");
    assert_eq!(parse(event.headers()), parse(&full.headers));

    let (a, b) = (&of_aggregate(&taken, "a").event, &of_aggregate(&taken, "b").event);
    assert_eq!((a.aggregate_seq(), a.destination(), a.content_type()), (None, None, "application/json"));
    assert_ne!(a.event_id(), b.event_id());
    assert_ne!(a.event_id(), [0; 16]);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_micros();
    let age = i128::try_from(now).expect("this side of year 292,000") - i128::from(a.created_at());
    assert!((0..600_000_000).contains(&age), "created_at is microseconds since 1970, {age} µs ago");
}

/// W5. Names of 300 characters, more in bytes, are nobody's limit here.
pub async fn long_names_arrive_whole<H: Harness>(harness: &H) {
    let outbox = harness.outbox().await;
    let long = Draft {
        aggregate_type: "t".repeat(300),
        aggregate_id: "ж".repeat(300),
        event_type: "e".repeat(300),
        ..Draft::default()
    };
    outbox.write(&[long.clone(), long.clone()], End::Commit).await;
    let source = open(&outbox, ONE).await;
    let taken = take(&source, 2).await;
    let failed = [verdict(&taken[0], retry(std::time::Duration::ZERO, 1)), verdict(&taken[1], Verdict::Release)];
    settle(&source, &failed).await;
    let mut again = claim(&source).await;
    assert_eq!(again[0].attempts, 1);
    publish(&source, &again).await;
    if again.len() == 1 {
        again.extend(take(&source, 1).await);
    }
    for claimed in taken.iter().chain(&again) {
        let event = &claimed.event;
        assert_eq!((event.aggregate_type(), event.aggregate_id()), (&*long.aggregate_type, &*long.aggregate_id));
        assert_eq!(event.event_type(), long.event_type);
    }
}

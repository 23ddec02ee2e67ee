//! What is in a message: body, headers, key, size, destination.

use super::hand::*;
use super::{Destination, Harness};
use bytes::Bytes;
use postbox_engine::{Headers, Message, SendErrorKind, Sink};

/// P1, P2. JSON as it was written, binary, and an envelope's body in place of the payload.
pub async fn bodies_arrive_byte_for_byte<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let sink = destination.sink().await;
    let mut bodies: Vec<Vec<u8>> =
        ["9007199254740993", "1e400", "-0.0", r#""\u0000\ud800""#, "null", r#""""#, "\"🐘 é\""]
            .iter()
            .map(|text| text.as_bytes().to_vec())
            .collect();
    bodies.push(br#"{"b":1,"a":  2,"b":3}"#.to_vec());
    bodies.push((0..=255).collect());
    bodies.push(vec![0xff; 1000]);
    let key = |i: usize| format!("key-{i}");
    let to = destination.name();
    let mut sent: Vec<_> = bodies.iter().enumerate().map(|(i, b)| message(&to, &key(i), Some(b))).collect();
    let envelope = Message { body: Some(Bytes::from_static(b"{\"data\":1}")), ..message(&to, "envelope", Some(b"1")) };
    sent.push(envelope);
    bodies.push(b"{\"data\":1}".to_vec());
    send_well(&sink, &sent).await;
    let all = received(&destination, sent.len()).await;
    for (message, body) in sent.iter().zip(&bodies) {
        assert_eq!(only(&all, message).body.as_ref(), Some(body), "{}", String::from_utf8_lossy(body));
    }
}

/// K10. No body and an empty one are two things, as far as the destination can tell them apart.
pub async fn a_tombstone_is_not_an_empty_body<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let sink = destination.sink().await;
    let sent = [message(&destination.name(), "a", None), message(&destination.name(), "b", Some(b""))];
    send_well(&sink, &sent).await;
    let all = received(&destination, 2).await;
    assert_eq!(only(&all, &sent[0]).body, destination.nature().tombstone);
    assert_eq!(only(&all, &sent[1]).body.as_deref(), Some(&b""[..]));
}

/// K10. Headers arrive as they are, or their message is rejected; never changed in silence, never at the cost of others.
pub async fn headers_arrive_or_are_refused_with_their_message<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let sink = destination.sink().await;
    let with = |key: &str, headers: &[(&str, &[u8])]| {
        let mut message = message(&destination.name(), key, Some(b"{}"));
        let mut all = Headers::default();
        headers.iter().for_each(|(name, value)| all.push(name, value));
        message.headers = all;
        message
    };
    let plain = [
        with(
            "a",
            &[("tenant_id", b"t-1"), ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")],
        ),
        with("b", &[]),
        with("c", &[("x-long", "v".repeat(4000).as_bytes())]),
    ];
    let awkward = [
        with("d", &[("x-same", b"one"), ("x-same", b"two"), ("x-same", b"one")]),
        with("e", &[("x-empty", b"")]),
        with("f", &[("x-binary", &[0x00, 0xff, 0xfe, 0x80])]),
        with("g", &[("x-break", b"a\r\nx-injected: b")]),
        with("h", &[("größe ☃", b"1")]),
    ];
    let sent = [&plain[..2], &awkward[..], &plain[2..]].concat();
    let outcomes = send(&sink, &sent).await;
    let accepted = outcomes.iter().filter(|o| o.is_ok()).count();
    let all = received(&destination, accepted).await;
    let any_header = destination.nature().any_header;
    for (message, outcome) in sent.iter().zip(outcomes) {
        let is_plain = plain.iter().any(|p| p.event.event_id() == message.event.event_id());
        match outcome {
            Ok(()) => assert_headers(&only(&all, message).headers, message, is_plain || any_header),
            Err(e) => {
                assert!(!is_plain && !any_header, "{:?} is refused: {e}", message.headers);
                assert_eq!(e.kind, SendErrorKind::Rejected, "{e}");
            }
        }
    }
    assert_eq!(all.len(), accepted, "what is refused does not arrive");
}

fn assert_headers(arrived: &[(String, Vec<u8>)], message: &Message, exactly: bool) {
    assert!(!arrived.iter().any(|(name, _)| name.contains("injected")), "a value became a header");
    for (name, _) in message.headers.iter() {
        let same = |n: &str| n.eq_ignore_ascii_case(name);
        let sent: Vec<_> = message.headers.iter().filter(|(n, _)| same(n)).map(|(_, v)| v.to_vec()).collect();
        let came: Vec<_> = arrived.iter().filter(|(n, _)| same(n)).map(|(_, v)| v.clone()).collect();
        assert!(came == sent || !exactly, "{name}: {came:?} for {sent:?}");
    }
}

/// W5. Keys of 300 characters, with spaces, quotes, other scripts.
pub async fn long_and_odd_keys_arrive<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let sink = destination.sink().await;
    let keys = ["k".repeat(300), "ж".repeat(300), " \"'/\\ %00 ☃".into(), "a\nb".into(), String::new()];
    let sent: Vec<_> = keys.iter().map(|key| message(&destination.name(), key, Some(b"{}"))).collect();
    send_well(&sink, &sent).await;
    let all = received(&destination, sent.len()).await;
    for (message, key) in sent.iter().zip(&keys) {
        let arrived = only(&all, message);
        assert!(!destination.nature().keyed || arrived.key == *key, "{:?} for {key:?}", arrived.key);
    }
}

/// W5, O5. A message that is too large is rejected for good, with a reason. Those beside it arrive; those behind it in its
/// key are left out where several of a key are in flight, until the relay knows, and arrive then.
pub async fn too_large_a_message_is_rejected_alone<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let Some(max) = destination.nature().body_bytes_max else { return assert_large_arrives(&destination).await };
    let sink = destination.sink().await;
    let to = destination.name();
    let (large, small) = (vec![b'x'; max + 1], vec![b'x'; max / 2]);
    for keys in [["a", "b", "c", "d"], ["e", "e", "e", "f"]] {
        let bodies = [&b"1"[..], &large, b"3", &small];
        let sent: Vec<_> = keys.iter().zip(bodies).map(|(key, body)| message(&to, key, Some(body))).collect();
        let outcomes = send(&sink, &sent).await;
        let error = outcomes[1].as_ref().expect_err("too large");
        assert_eq!(error.kind, SendErrorKind::Rejected, "{error}");
        assert!(error.message.chars().any(|c| c.is_ascii_digit()), "the reason names the size: {error}");
        for i in [0, 3] {
            assert_eq!(outcomes[i], Ok(()), "message {i} beside a large one");
        }
        if keys[2] == keys[1] && sink.limits().keeps_key_order {
            let behind = outcomes[2].as_ref().expect_err("nothing overtakes a refused message");
            assert_eq!(behind.kind, SendErrorKind::Behind, "{behind}");
            send_well(&sink, &sent[2..3]).await;
        } else {
            assert_eq!(outcomes[2], Ok(()), "the message after a large one");
        }
        let well = [sent[0].clone(), sent[2].clone(), sent[3].clone()];
        let all = received_each(&destination, &well).await;
        assert!(!all.iter().any(|r| r.event_id == sent[1].event.event_id()), "what is rejected does not arrive");
    }
}

/// Where there is no limit, a large body arrives whole.
async fn assert_large_arrives(destination: &impl Destination) {
    let sink = destination.sink().await;
    let sent = [message(&destination.name(), "a", Some(&vec![b'x'; 3 << 20]))];
    send_well(&sink, &sent).await;
    assert_eq!(only(&received(destination, 1).await, &sent[0]).body.as_deref(), sent[0].body());
}

/// O6. A topic that is not there: an answer about its messages, which names it; the others arrive, the sink lives.
pub async fn a_missing_destination_concerns_its_messages_only<H: Harness>(harness: &H) {
    let destination = harness.destination().await;
    let sink = destination.sink().await;
    let Some(missing) = destination.nature().missing else {
        return send_well(&sink, &messages(&destination.name(), "a1")).await; // any destination is as good
    };
    let mut sent = messages(&destination.name(), "a1 b1 c1");
    sent[1].destination = missing.as_str().into();
    let outcomes = send(&sink, &sent).await;
    let error = outcomes[1].as_ref().expect_err("there is no such destination");
    assert!(matches!(error.kind, SendErrorKind::Rejected | SendErrorKind::Failed), "{:?}: {error}", error.kind);
    assert!(error.message.contains(&missing), "the reason names {missing}: {error}");
    assert_eq!((&outcomes[0], &outcomes[2]), (&Ok(()), &Ok(())));
    let later = messages(&destination.name(), "b2");
    send_well(&sink, &later).await;
    let well = [sent[0].clone(), sent[2].clone(), later[0].clone()];
    assert_order(&received(&destination, 3).await, &well);
}

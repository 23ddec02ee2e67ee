//! SQLite to a webhook: the receiver's first answer is a refusal, and the event comes again with the same id.

use crate::harness::{DEADLINE, Folder, until};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc;

/// Reads one request: its head in lower case, and its body.
fn request(stream: &TcpStream) -> (String, String) {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while reader.read_line(&mut head).unwrap() > 2 {}
    let head = head.to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    reader.read_exact(&mut body).unwrap();
    (head, String::from_utf8(body).unwrap())
}

#[test]
fn case_k9_a_failing_receiver_gets_the_event_again_with_the_same_id_and_signature_key() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let (seen, requests) = mpsc::channel();
    std::thread::spawn(move || {
        for (n, stream) in listener.incoming().map_while(Result::ok).enumerate() {
            let status = if n == 0 { "500 Internal Server Error" } else { "204 No Content" };
            seen.send(request(&stream)).unwrap();
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            (&stream).write_all(answer.as_bytes()).unwrap();
        }
    });
    let folder = Folder::with_config(&format!(
        "[stream.main]\nsink = \"webhook\"\nretry = {{ base = \"10ms\" }}\n[stream.main.webhook]\n\
         url = \"http://127.0.0.1:{port}/hook\"\nallow_private = true\nsecret_file = \"secret\"\n"
    ));
    std::fs::write(folder.file("secret"), "whsec_c2VjcmV0LWtleS1vZi10aGlzLXRlc3Q=\n").unwrap();
    folder.ok(&["migrate"]);
    let id = folder.ok(&["publish", "order", "42", "order.placed", "{\"total\": 10}"]).stdout;
    let relay = folder.leading_relay();
    for _ in 0..2 {
        let (head, body) = requests.recv_timeout(DEADLINE).unwrap();
        assert!(head.starts_with("post /hook ") && head.contains("webhook-signature: v1,"), "{head}");
        assert!(head.contains(&format!("webhook-id: {}", id.trim())), "{head}");
        assert_eq!(body, "{\"total\": 10}");
    }
    let trace = || folder.json(&["trace", id.trim(), "--json"])[0].clone();
    until("it is settled", || trace()["state"] == "published");
    assert!(trace()["attempts"] == 2 && trace()["error"].is_null(), "{}", trace()); // the 500 is over
    assert!(!relay.stderr.text().contains("whsec_") && !folder.ok(&["config", "print"]).stdout.contains("whsec_"));
    relay.stop();
}

#[test]
fn a_webhook_without_an_address_or_with_a_useless_authority_is_told_by_check() {
    let config = "[stream.main]\nsink = \"webhook\"\n[stream.main.webhook]\nsecret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\n";
    let check = Folder::with_config(config).run(&["check"]);
    assert!(check.stdout.contains("warning: without `url`") && !check.stdout.contains("connected"), "{check:?}");
    let folder = Folder::with_config(&format!(
        "{config}url = \"https://127.0.0.1:1/\"\nallow_private = true\nca_file = \"ca.pem\"\n"
    ));
    std::fs::write(folder.file("ca.pem"), "nothing").unwrap();
    folder.ended_relay(&[]).failed_with(2, &["ca.pem", "no certificate in it"]);
}

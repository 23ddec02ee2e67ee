//! Relays that are killed, slow, on a wrong clock, and what `status` says of those that cannot send.

use crate::harness::{DEADLINE, Folder, until};
use crate::postgres::{execute, migrated};
use postbox_testkit::services::{PgVersion, Postgres, free_port};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};

#[test]
fn case_w4_ten_thousand_events_in_one_statement_and_the_relay_killed_among_them() {
    const INSERT: &str = "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, payload) \
        SELECT 'order', 'a' || n % 100, 'order.moved', n::text::json FROM generate_series(1, 10000) n";
    const COPY: &str = r#"COPY postbox.outbox (aggregate_type, aggregate_id, event_type, payload)
        FROM PROGRAM $$seq 1 10000 | awk '{ print "order\ta" $1 % 100 "\torder.moved\t" $1 }'$$"#;
    for (version, write) in [(PgVersion::V15, INSERT), (PgVersion::V15, COPY), (PgVersion::V18, INSERT)] {
        let server = Postgres::shared(version);
        let url = server.create_database();
        let folder = Folder::new().env("DATABASE_URL", &url).env("POSTBOX__RELAY__LEASE", "2s");
        folder.ok(&["migrate"]);
        server.execute(url.rsplit('/').next().unwrap(), write).unwrap();
        // Its pipe is read by nobody else, so it cannot be far beyond what is read here.
        let mut lines = folder.relay_unread().read_and_kill(5_000);
        assert!(lines.len() < 10_000, "it was killed too late to show anything");
        let relay = folder.leading_relay();
        until("nothing is pending", || folder.json(&["status", "--json"])[0]["pending"] == 0);
        let stdout = relay.stdout.clone();
        relay.stop();
        lines.extend(stdout.all());
        assert_all_in_order(&lines, 10_000);
    }
}

/// Each of 1 to `n` arrived, and first arrivals of each key in order.
fn assert_all_in_order(lines: &[String], n: u64) {
    let (mut first, mut last) = (BTreeSet::new(), BTreeMap::new());
    for line in lines {
        let event: Value = serde_json::from_str(line).unwrap();
        let number = event["payload"].as_u64().unwrap();
        if first.insert(number) {
            let before = last.insert(event["aggregate_id"].as_str().unwrap().to_owned(), number);
            assert!(before < Some(number), "{number} after {before:?}");
        }
    }
    assert_eq!(first, (1..=n).collect());
}

/// A receiver that answers when and what the test says.
struct Hook {
    port: u16,
    /// The bodies, as they come.
    requests: Receiver<String>,
    answers: Sender<&'static str>,
}

impl Hook {
    fn on(port: u16) -> Hook {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let ((seen, requests), (answers, to_give)) = (channel(), channel::<&str>());
        std::thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let Ok(()) = seen.send(body(&stream)) else { return };
                let Ok(status) = to_give.recv() else { return };
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                let _ = stream.write_all(answer.as_bytes()); // a sender that gave up is gone
            }
        });
        Hook { port, requests, answers }
    }
}

fn body(stream: &TcpStream) -> String {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let (mut reader, mut head) = (BufReader::new(stream), String::new());
    while reader.read_line(&mut head).unwrap() > 2 {}
    let length = head.to_lowercase().lines().find_map(|line| Some(line.strip_prefix("content-length: ")?.to_owned()));
    let mut body = vec![0; length.unwrap().parse().unwrap()];
    reader.read_exact(&mut body).unwrap();
    String::from_utf8(body).unwrap()
}

/// Gives the folder a stream to a webhook at this port.
fn to_hook(folder: Folder, port: u16) -> Folder {
    let config = format!(
        "[stream.main]\nsink = \"webhook\"\nretry = {{ base = \"10ms\", pause_max = \"1s\" }}\n[stream.main.webhook]\n\
         url = \"http://127.0.0.1:{port}/hook\"\nallow_private = true\ntimeout = \"9m\"\nsecret = \"whsec_c2VjcmV0LWtleS1vZi10aGlzLXRlc3Q=\"\n"
    );
    std::fs::write(folder.file("postbox.toml"), config).unwrap();
    folder.env("POSTBOX__RELAY__LEASE", "2s").env("POSTBOX__RELAY__SEND_TIMEOUT", "10m")
}

#[test]
fn case_l3_a_send_that_outlasts_the_lease_keeps_it_and_is_sent_once() {
    let hook = Hook::on(0);
    let (folder, database) = migrated();
    let folder = to_hook(folder, hook.port);
    let relay = folder.leading_relay();
    let second = folder.relay(&[]);
    second.stderr.wait_for("standing by");
    let id = folder.ok(&["publish", "order", "1", "order.placed", "1"]).stdout;
    assert_eq!(hook.requests.recv_timeout(DEADLINE).unwrap(), "1");
    let one = |sql: &str| execute(&database, sql)[0][0].clone().unwrap();
    let before = one("SELECT until FROM postbox.lease");
    // Three leases later, by the database's clock, it is still the first one's, under the same epoch.
    let later = format!("SELECT until > '{before}'::timestamptz + interval '6 seconds' FROM postbox.lease");
    until("the lease is renewed again and again", || one(&later) == "t");
    assert_eq!(one("SELECT epoch FROM postbox.lease"), "1");
    hook.answers.send("204 No Content").unwrap();
    let trace = || folder.json(&["trace", id.trim(), "--json"])[0].clone();
    until("it is settled", || trace()["state"] == "published");
    assert_eq!(trace()["attempts"], 1);
    assert!(hook.requests.try_recv().is_err(), "it was sent once");
    assert!(!second.stderr.text().contains("the lease is ours"));
    relay.stop();
    second.stop();
}

#[test]
fn case_v3_status_tells_why_nothing_is_sent_and_which_event_failed() {
    status_tells_why(migrated().0);
    let sqlite = Folder::new();
    sqlite.ok(&["migrate"]);
    status_tells_why(sqlite);
}

fn status_tells_why(folder: Folder) {
    let port = free_port().unwrap();
    let folder = to_hook(folder, port);
    let status = || folder.json(&["status", "--json"])[0].clone();
    let says = |word: &str| status()["last_error"].as_str().is_some_and(|error| error.contains(word));
    folder.ok(&["publish", "order", "1", "order.placed", "1"]);
    let mut relay = folder.leading_relay();
    let place = format!("127.0.0.1:{port}");
    until("the receiver that is not there is named", || says(&place));
    // Also after the relay has gone.
    relay.signal("KILL");
    relay.wait();
    let shown = folder.ok(&["status"]).stdout;
    assert!(shown.contains("main: last error: ") && shown.contains(&place), "{shown}");

    let hook = Hook::on(port);
    let relay = folder.leading_relay();
    hook.answers.send("500 Internal Server Error").unwrap();
    until("its error is told, now that the receiver is back", || says("500"));
    let shown = folder.ok(&["status"]).stdout;
    let (names, row) = (shown.lines().next().unwrap(), shown.lines().nth(1).unwrap());
    let column = names.find("OLDEST HELD").unwrap();
    assert!(row[column..].starts_with(|c: char| c.is_ascii_digit()), "{shown}");
    hook.answers.send("204 No Content").unwrap();
    until("it is published", || status()["retry"] == 0);
    relay.stop();
    assert!(status()["last_error"].is_null(), "a clean stop leaves no trouble behind that is over: {}", status());
}

#[test]
fn case_v4_status_trace_and_check_work_while_no_relay_runs() {
    let (folder, database) = migrated();
    let none = folder.ok(&["status"]);
    assert!(none.stderr.contains("no relay has run"), "{none:?}");
    let relay = folder.leading_relay();
    let first = folder.ok(&["publish", "order", "1", "order.placed", "{}"]).stdout;
    relay.stdout.wait_for(first.trim());
    relay.stop();
    let id = folder.ok(&["publish", "order", "1", "order.paid", "{}"]).stdout;
    execute(
        &database,
        "UPDATE postbox.outbox SET created_at = now() - interval '1 hour' WHERE event_type = 'order.paid'",
    );
    let status = folder.json(&["status", "--json"])[0].clone();
    assert!(status["owner"].is_null() && status["pending"] == 1, "{status}");
    assert!(status["oldest_unpublished_s"].as_f64().unwrap() > 3_599.0, "{status}");
    assert_eq!(folder.json(&["trace", first.trim(), "--json"])[0]["state"], "published");
    assert_eq!(folder.json(&["trace", id.trim(), "--json"])[0]["state"], "pending");
    folder.ok(&["check"]);
}

/// Adds to the clock of whoever loads it.
const SHIFT: &str = r#"#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *at) {
  long failed = syscall(SYS_clock_gettime, clock, at);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += atol(getenv("SHIFT"));
  return failed;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"#;

#[test]
fn case_l7_a_relay_whose_clock_is_an_hour_off_does_as_the_others() {
    let (folder, database) = migrated();
    let path = |name: &str| folder.file(name).display().to_string();
    std::fs::write(path("shift.c"), SHIFT).unwrap();
    let mut cc = std::process::Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o", &path("shift.so"), &path("shift.c")]);
    assert!(cc.status().unwrap().success());
    let shifted = |seconds: &str| {
        let url = Postgres::shared(PgVersion::V15).url(&database);
        let folder = Folder::new().env("DATABASE_URL", &url).env("POSTBOX__RELAY__LEASE", "2s");
        folder.env("LD_PRELOAD", &path("shift.so")).env("SHIFT", seconds)
    };
    let (fast, slow) = (shifted("3600"), shifted("-3600"));
    let (first, second) = (fast.leading_relay(), slow.relay(&[]));
    let hour = |line: String| line.split(':').next().unwrap().to_owned(); // 2026-11-30T15
    assert_ne!(hour(first.stderr.wait_for("the lease is ours")), hour(second.stderr.wait_for("standing by")));

    let later = "SELECT postbox.publish('order', '1', 'delayed', '1', available_at => now() + interval '30 minutes')";
    execute(&database, later);
    let now = folder.ok(&["publish", "order", "2", "order.placed", "2"]).stdout;
    first.stdout.wait_for(now.trim());
    let status = || folder.json(&["status", "--json"])[0].clone();
    until("the delay is kept", || status()["delayed"] == 1);
    let left = "SELECT until - clock_timestamp() BETWEEN interval '0' AND interval '2 seconds' FROM postbox.lease";
    until("the lease ends soon by the database's clock", || execute(&database, left)[0][0].as_deref() == Some("t"));
    assert!(!second.stderr.text().contains("the lease is ours"), "the slow one waits for its turn");
    first.signal("KILL");
    second.stderr.wait_for("the lease is ours");
    let next = folder.ok(&["publish", "order", "2", "order.paid", "3"]).stdout;
    second.stdout.wait_for(next.trim());
    assert!(status()["delayed"] == 1 && second.stdout.all().iter().all(|line| !line.contains("delayed")));
    second.stop();
}

//! `postbox relay` without any configuration: a SQLite file, events as lines on stdout.

use crate::harness::{Folder, until};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::Command;

fn events(lines: &[String]) -> Vec<Value> {
    lines.iter().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

#[test]
fn the_demo_shows_orders_in_order() {
    let folder = Folder::new();
    let relay = folder.relay(&["--demo"]);
    relay.stderr.wait_for("a small shop writes orders");
    let lines = relay.stdout.wait_until(|lines| lines.len() >= 7);
    let events = events(&lines); // each line of stdout is an event, nothing else
    let of_one = |event: &&Value| event["aggregate_id"] == "1";
    let types: Vec<&str> = events.iter().filter(of_one).map(|e| e["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["order.placed", "order.paid", "order.shipped"]);
    assert_eq!(events[0]["payload"]["customer"], "Ada");
    let status = folder.json(&["status", "--json"]);
    assert_eq!((status[0]["stream"].as_str(), status[0]["dead"].as_i64()), (Some("main"), Some(0)));
    relay.stop();
}

#[test]
fn a_terminal_shows_live_counters_below_what_is_printed() {
    let folder = Folder::new();
    let relay = folder.relay_on_a_terminal(&["--demo"]);
    let live = |lines: &[String]| -> Vec<u64> {
        let text = lines.join("\n");
        let drawn = text.split("\x1b[2Kmain: ").skip(1).filter(|drawn| {
            let line = drawn.split('\r').next().unwrap_or_default();
            ["/s, in hand ", ", lag ", ", held 0, dead 0"].iter().all(|word| line.contains(word))
        });
        drawn.map(|drawn| drawn.split(" published, ").next().unwrap().parse().unwrap()).collect()
    };
    let lines =
        relay.stdout.wait_until(|lines| live(lines).len() >= 3 && live(lines)[0] < *live(lines).last().unwrap());
    assert!(live(&lines).is_sorted(), "{lines:?}");
    // Events and talk are lines of their own.
    assert!(lines.iter().any(|line| line.trim_end().ends_with('}') && line.contains("{\"")), "{lines:?}");
    relay.stop_child();
}

#[test]
fn a_stderr_that_takes_nothing_stops_no_relay_and_changes_no_exit_code() {
    let folder = Folder::new();
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut relay = folder.command(&["relay", "--demo"]).stderr(full()).spawn().unwrap();
    let mut orders = BufReader::new(relay.stdout.take().unwrap()).lines();
    (0..3).for_each(|_| assert!(orders.next().unwrap().unwrap().contains("order.")));
    let term = Command::new("kill").arg(relay.id().to_string()).status().unwrap();
    assert!(term.success() && relay.wait().unwrap().success());
    let status = folder.json(&["status", "--json"]);
    assert!(status[0]["owner"].is_null(), "the lease was handed over: {status}");
    let wrong = folder.command(&["status", "--no-such-option"]).stderr(full()).status().unwrap();
    let failed = folder.command(&["check", "--config", "nowhere.toml"]).stderr(full()).status().unwrap();
    assert_eq!((wrong.code(), failed.code()), (Some(2), Some(2)));
}

#[test]
fn a_file_that_was_away_is_gone_on_with() {
    let folder = Folder::new();
    let relay = folder.leading_relay();
    let (file, away) = (folder.file("postbox.db"), folder.file("away.db"));
    std::fs::rename(&file, &away).unwrap();
    relay.stderr.wait_for("no such file");
    std::fs::rename(&away, &file).unwrap();
    let id = folder.ok(&["publish", "order", "42", "order.placed", "{}"]).stdout;
    relay.stdout.wait_for(id.trim());
    relay.stop();
}

/// The application makes the file, and is in its first transaction while the relay starts.
#[test]
fn case_d6_a_new_file_behind_a_lock_is_waited_for_and_named() {
    let folder = Folder::new();
    let hog = rusqlite::Connection::open(folder.file("postbox.db")).unwrap();
    hog.execute_batch("BEGIN IMMEDIATE").unwrap();
    let relay = folder.relay(&[]);
    relay.stderr.wait_for("postbox.db: waiting for the write lock, which another connection holds");
    let migrate = folder.run(&["migrate"]); // it gives up after half a minute
    migrate.failed_with(1, &["postbox.db", "write lock", "Look for a long transaction"]);
    relay.stderr.wait_for("the source is out"); // and goes on trying
    hog.execute_batch("COMMIT").unwrap();
    relay.stderr.wait_for("the lease is ours");
    relay.stop();

    let folder = Folder::new();
    let hog = rusqlite::Connection::open(folder.file("postbox.db")).unwrap();
    hog.execute_batch("BEGIN IMMEDIATE").unwrap();
    let relay = folder.relay(&[]);
    relay.stderr.wait_for("waiting for the write lock");
    relay.stop(); // with 0
}

#[test]
fn case_l4_sigterm_drains_and_ends_with_0() {
    let folder = Folder::new();
    let relay = folder.relay(&[]);
    relay.stderr.wait_for("the lease is ours");
    let id = folder.ok(&["publish", "order", "42", "order.placed", "{\"total\": 10}"]).stdout;
    let line = relay.stdout.wait_for(id.trim());
    assert!(line.contains("\"payload\":{\"total\": 10}"), "{line}");
    relay.stderr.wait_for("made postbox.db");
    let stderr = relay.stderr.clone();
    relay.stop();
    stderr.wait_for("stopped: all in hand is settled, and the lease is handed over");
    let status = folder.json(&["status", "--json"]);
    assert!(status[0]["owner"].is_null() && status[0]["pending"] == 0, "{status}");
}

#[test]
fn case_v4_what_was_written_without_a_relay_comes_with_the_next_one() {
    let folder = Folder::new();
    folder.ok(&["migrate"]);
    let args = ["publish", "order", "7", "order.placed", "{}", "--json", "--header", "tenant_id=acme"];
    let id = folder.json(&args)["event_id"].as_str().unwrap().to_owned();
    let trace = folder.json(&["trace", &id, "--json"]);
    assert!(trace[0]["state"] == "pending" && trace[0]["published_at"].is_null(), "{trace}");
    let relay = folder.relay(&[]);
    let line = relay.stdout.wait_for(&id);
    assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["headers"]["tenant_id"], "acme");
    until("the event is settled", || folder.json(&["trace", &id, "--json"])[0]["state"] == "published");
    relay.stop();
    let trace = folder.json(&["trace", &id, "--json"]);
    let times = ["written_at", "sent_at", "published_at"].map(|time| trace[0][time].as_str().unwrap());
    assert!(times.is_sorted(), "{trace}");
    let shown = folder.ok(&["trace", &id]).stdout;
    assert!(shown.starts_with("STREAM") && shown.contains("published") && shown.contains("SENT"), "{shown}");
    folder.run(&["trace", "00000000-0000-0000-0000-000000000000"]).failed_with(3, &["no event 0000"]);
}

#[test]
fn events_from_memory_need_no_database() {
    let folder = Folder::new().env("DATABASE_URL", "memory:3000");
    let relay = folder.relay(&[]);
    relay.stdout.wait_until(|lines| lines.len() == 3_000);
    relay.stop();
    assert!(!folder.file("postbox.db").exists());
}

/// Events for a relay whose stdout nobody reads: its send has no outcome, so its drain lasts.
fn more_than_a_pipe_takes() -> Folder {
    let folder = Folder::new().env("POSTBOX__RELAY__DRAIN_TIMEOUT", "10m");
    folder.ok(&["migrate"]);
    let big = format!("\"{}\"", "x".repeat(100_000));
    for n in 0..5 {
        folder.ok(&["publish", "order", &n.to_string(), "order.placed", &big]);
    }
    folder
}

#[test]
fn case_l4_signals_together_are_one_request_and_a_later_one_ends_at_once() {
    let folder = more_than_a_pipe_takes();
    let mut relay = folder.relay_unread();
    relay.read_a_byte();
    relay.signals(&["INT", "TERM"]); // as from `timeout`; two different ones, since two of a kind may arrive as one
    relay.stderr.wait_for("stopping");
    relay.stderr.wait_for("taken for the same request");
    until("a later one ends it", || {
        relay.signal("TERM");
        relay.has_ended()
    });
    assert_eq!(relay.wait(), 128 + 15);
    relay.stderr.wait_for("ended at once");
}

/// A real disk of two megabytes, in a mount namespace of its own, filled to the last byte.
#[test]
fn a_full_disk_is_named_and_the_event_comes_when_there_is_room() {
    const SCRIPT: &str = r#"set -e
mount -t tmpfs -o size=2m none . && cd "$PWD"
"$1" migrate
"$1" relay & relay=$!
read _; dd if=/dev/zero of=filler bs=1k 2>/dev/null || true # fails when the disk is full, as it shall be
read _; "$1" publish order 1 order.placed "\"$(printf %20000s)\"" && exit 9
read _; rm filler; "$1" publish order 2 order.placed '{}' >&2
read _; kill -TERM $relay; wait $relay"#;
    let folder = Folder::new();
    let mut relay = folder.in_a_namespace(SCRIPT);
    relay.stderr.wait_for("the lease is ours");
    relay.say("fill it");
    relay.stderr.wait_for("the source is out");
    relay.stderr.wait_for("the disk is full");
    relay.say("write");
    relay.stderr.wait_for("postbox: "); // the writer is told
    relay.say("there is room");
    relay.stdout.wait_for("\"aggregate_id\":\"2\"");
    relay.say("enough");
    assert_eq!(relay.wait(), 0, "{}", relay.stderr.text());
    assert_eq!(relay.stdout.all().len(), 1, "what was refused is not there");
}

//! What a message tells the operator to do works, with this version, on what has happened.

use crate::harness::{Folder, until};
use crate::postgres::{execute, migrated};

const GUIDE: &str = include_str!("../../../../docs/guide/mending.md");

/// The n-th statement under a heading of the guide.
fn statement(heading: &str, n: usize) -> String {
    let section = GUIDE.split(&format!("## {heading}\n")).nth(1).unwrap().split("\n## ").next().unwrap();
    section.split("```sql\n").nth(n + 1).unwrap().split("```").next().unwrap().to_owned()
}

/// A stream to stdout that knows a place for orders, and for `more`.
fn configure(folder: &Folder, policy: &str, more: &str) {
    let routes = format!("[{{ event_type = \"order.*\", topic = \"t\" }}{more}]");
    let text = format!("[stream.main]\ndead = \"{policy}\"\nroutes = {routes}\n");
    std::fs::write(folder.file("postbox.toml"), text).unwrap();
}

/// An event dies for want of a route, the next one of its key waits or goes on; then there is a route.
fn dies_and_is_sent_again(folder: &Folder, policy: &str, send_again: impl Fn(&str)) {
    configure(folder, policy, "");
    let relay = folder.leading_relay();
    let dead = folder.ok(&["publish", "order", "1", "invoice.sent", "1"]).stdout;
    let behind = folder.ok(&["publish", "order", "1", "order.paid", "2"]).stdout;
    let state = |id: &str| folder.json(&["trace", id.trim(), "--json"])[0]["state"].as_str().unwrap().to_owned();
    until("it is dead", || state(&dead) == "dead");
    let ends = if policy == "block" { "waiting" } else { "published" };
    until("the one behind it does as the policy says", || state(&behind) == ends);
    let status = folder.ok(&["status"]).stdout;
    assert!(status.contains("main: last error: ") && status.contains("route"), "{status}");
    relay.stop();
    configure(folder, policy, ", { topic = \"t\" }");
    send_again(dead.trim());
    let relay = folder.leading_relay();
    until("both are settled", || state(&dead) == "published" && state(&behind) == "published");
    let stdout = relay.stdout.clone();
    relay.stop();
    let (sent, expected) = (stdout.all(), if policy == "block" { vec![dead, behind] } else { vec![dead] });
    assert_eq!(sent.len(), expected.len());
    assert!(sent.iter().zip(expected).all(|(line, id)| line.contains(id.trim())), "{sent:?}");
}

#[test]
fn case_o3_a_dead_event_is_sent_again_on_postgresql() {
    for policy in ["skip", "block"] {
        let (folder, database) = migrated();
        let sql = statement("Send a dead event again", 0);
        dies_and_is_sent_again(&folder, policy, |id| drop(execute(&database, &sql.replace("EVENT_ID", id))));
    }
}

#[test]
fn case_o3_a_dead_event_is_sent_again_on_sqlite() {
    for policy in ["skip", "block"] {
        let folder = Folder::new();
        let sql = statement("Send a dead event again", 1);
        dies_and_is_sent_again(&folder, policy, |id| {
            let file = rusqlite::Connection::open(folder.file("postbox.db")).unwrap();
            assert_eq!(file.execute(&sql.replace("EVENT_ID", id), []).unwrap(), 1);
        });
    }
}

#[test]
fn case_o3_skip_frees_the_keys_that_dead_events_blocked() {
    let folder = Folder::new();
    configure(&folder, "block", "");
    let relay = folder.leading_relay();
    folder.ok(&["publish", "order", "1", "invoice.sent", "1"]);
    let behind = folder.ok(&["publish", "order", "1", "order.paid", "2"]).stdout;
    until("one waits behind the dead one", || folder.json(&["status", "--json"])[0]["waiting"] == 1);
    relay.stop();
    configure(&folder, "skip", "");
    let relay = folder.leading_relay();
    relay.stdout.wait_for(behind.trim());
    relay.stop();
}

/// One that another program divided.
#[test]
fn case_l6_a_divided_stream_is_refused_and_another_one_is_served() {
    let (folder, database) = migrated();
    execute(&database, "INSERT INTO postbox.lease (stream, shard, shards) VALUES ('main', 0, 2), ('main', 1, 2)");
    let mut relay = folder.relay(&[]);
    assert_eq!(relay.wait(), 1);
    relay.stderr.wait_for("divided into 2 shards");
    relay.stderr.wait_for("a stream of another name");
    std::fs::write(folder.file("postbox.toml"), "[stream.other]\nsink = \"stdout\"\n").unwrap();
    let relay = folder.leading_relay();
    let id = folder.ok(&["publish", "order", "1", "order.placed", "{}"]).stdout;
    relay.stdout.wait_for(id.trim());
    relay.stop();
}

/// A stream under an old name, then under a new one, then the old one retired.
fn a_stream_is_retired(folder: &Folder, retire: impl Fn()) {
    let streams = || -> Vec<String> {
        let status = folder.json(&["status", "--json"]);
        status.as_array().unwrap().iter().map(|s| s["stream"].as_str().unwrap().to_owned()).collect()
    };
    let id = folder.ok(&["publish", "order", "1", "order.placed", "1"]).stdout;
    for stream in ["old", "main"] {
        std::fs::write(folder.file("postbox.toml"), format!("[stream.{stream}]\n")).unwrap();
        let relay = folder.leading_relay();
        relay.stdout.wait_for(id.trim()); // each has its own progress
        relay.stop();
    }
    assert_eq!(streams(), ["main", "old"]);
    retire();
    assert_eq!(streams(), ["main"]);
    let relay = folder.leading_relay();
    let next = folder.ok(&["publish", "order", "1", "order.paid", "2"]).stdout;
    relay.stdout.wait_for(next.trim());
    relay.stop();
}

#[test]
fn a_retired_stream_is_gone_and_the_others_go_on() {
    let (folder, database) = migrated();
    let sql = |n| statement("Retire a stream", n).replace("OLD", "old");
    a_stream_is_retired(&folder, || drop(execute(&database, &sql(0))));
    let folder = Folder::new();
    folder.ok(&["migrate"]);
    a_stream_is_retired(&folder, || {
        rusqlite::Connection::open(folder.file("postbox.db")).unwrap().execute_batch(&sql(1)).unwrap();
    });
}

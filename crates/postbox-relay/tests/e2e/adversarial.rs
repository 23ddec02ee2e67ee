//! The adversary's writers against the built program: relays stop and the next one starts in the midst of it, and on its
//! way through them all each committed event comes out once, in the order of its aggregate.

use crate::harness::{Folder, comes, until};
use postbox_testkit::adversary::{Adversary, Judgement, Seen, transactions};
use postbox_testkit::services::{PgVersion, Postgres};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Lines of a relay before it is stopped.
const LINES: usize = 2_000;

#[test]
fn case_r1_r2_r3_r4_w3_nothing_is_lost_doubled_or_misordered_on_15() {
    against_the_adversary(PgVersion::V15);
}

#[test]
fn case_r1_r2_r3_r4_w3_nothing_is_lost_doubled_or_misordered_on_18() {
    against_the_adversary(PgVersion::V18);
}

fn against_the_adversary(version: PgVersion) {
    let server = Postgres::start(version).unwrap(); // of its own: transactions of other tests hold bins back
    let url = server.create_database();
    let folder = Folder::new().env("DATABASE_URL", &url).env("POSTBOX__SOURCE__RETENTION", "2s");
    folder.ok(&["migrate"]);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let adversary = Arc::new(runtime.block_on(Adversary::new(&url)));
    let written = Arc::new(AtomicBool::new(false));
    let (writers, said) = (adversary.clone(), written.clone());
    let writing = runtime.spawn(async move { writers.write(transactions(), said).await });

    let pending = || folder.json(&["status", "--json"])[0]["pending"].as_u64().unwrap();
    let (mut seen, mut relays) = (Vec::new(), 0);
    while !written.load(Relaxed) {
        let relay = folder.leading_relay();
        let stdout = relay.stdout.clone();
        until("it has sent some, or all is written", || stdout.all().len() > LINES || written.load(Relaxed));
        relay.stop();
        seen.extend(stdout.all().iter().map(|line| event(line)));
        relays += 1;
        until("events wait for the next one", || pending() > 100 || written.load(Relaxed));
    }
    runtime.block_on(writing).unwrap();
    let relay = folder.leading_relay();
    let stdout = relay.stdout.clone();
    let all_settled = comes(|| pending() == 0); // what never is, the judge counts
    let emptied = "SELECT (SELECT count(*) FROM postbox.outbox) < (SELECT count(*) FROM app.journal)";
    let database = url.rsplit('/').next().unwrap();
    until("a bin is emptied", || {
        !all_settled || server.execute(database, emptied).unwrap()[0][0].as_deref() == Some("t")
    });
    relay.stop();
    seen.extend(stdout.all().iter().map(|line| event(line)));

    let committed = runtime.block_on(adversary.committed());
    println!("committed {committed}, seen {}, over {} relays", seen.len(), relays + 1);
    assert!(relays > 1, "relays were stopped in the midst of it");
    assert_eq!(runtime.block_on(adversary.judge(&seen)), Judgement::default());
    assert!(all_settled && seen.len() == committed);
}

fn event(line: &str) -> Seen {
    let event: Value = serde_json::from_str(line).unwrap();
    let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{line}")).to_owned();
    Seen {
        id: text(&event["id"]),
        aggregate_id: text(&event["aggregate_id"]),
        version: text(&event["headers"]["aggregate_seq"]).parse().unwrap(),
    }
}

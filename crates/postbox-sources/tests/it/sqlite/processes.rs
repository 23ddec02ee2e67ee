//! Several processes on one file, some of them killed in the middle of their work.

use super::{DEADLINE, File};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::time::{Duration, Instant};

/// The example `sqlite_process`, which `cargo test` builds beside this test.
pub(crate) fn program() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let program = here.parent().and_then(|deps| deps.parent()).unwrap().join("examples/sqlite_process");
    assert!(program.exists(), "{} is missing: `cargo build --examples` makes it", program.display());
    program
}

/// A process of `sqlite_process` and the lines it prints.
struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    fn start(file: &File, arguments: &[&str]) -> Process {
        let (line, lines) = channel();
        Process::telling(file, arguments, lines, move |text| line.send(text).is_ok())
    }
    /// Nobody reads ahead of the test: its pipe full, the process stands still.
    fn unread(file: &File, arguments: &[&str]) -> Process {
        let (line, lines) = sync_channel(0);
        Process::telling(file, arguments, lines, move |text| line.send(text).is_ok())
    }
    fn telling(
        file: &File,
        arguments: &[&str],
        lines: Receiver<String>,
        tell: impl FnMut(String) -> bool + Send + 'static,
    ) -> Process {
        let mut command = Command::new(program());
        command.arg(arguments[0]).arg(&file.path).args(&arguments[1..]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || out.lines().map_while(Result::ok).all(tell));
        Process { child, lines }
    }
    /// The next line; panics after a minute of silence, `None` when the process has ended.
    fn line(&self) -> Option<String> {
        match self.lines.recv_timeout(DEADLINE) {
            Ok(line) => Some(line),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => None,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("it says nothing for {DEADLINE:?}"),
        }
    }
    /// SIGKILL, then all that it had printed and was not read.
    fn kill(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.lines.iter().collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All orders have exactly their event, all events were sent, and first deliveries are in order per key.
fn assert_complete(file: &File, sent: &[String]) {
    let rows = |sql: &str| -> Vec<String> {
        let db = file.connect();
        let mut rows = db.prepare(sql).unwrap();
        rows.query_map([], |r| r.get(0)).unwrap().collect::<Result<_, _>>().unwrap()
    };
    let orders = rows("SELECT key || ' ' || n FROM orders ORDER BY 1");
    assert_eq!(rows("SELECT aggregate_id || ' ' || payload FROM postbox_outbox ORDER BY 1"), orders);
    let first: BTreeSet<&String> = sent.iter().collect();
    assert_eq!(first.into_iter().cloned().collect::<Vec<_>>(), orders, "each was sent");
    let mut newest: BTreeMap<&str, i64> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for (key, n) in sent.iter().map(|line| line.split_once(' ').unwrap()) {
        if seen.insert((key, n)) {
            let n = n.parse().unwrap();
            assert!(newest.insert(key, n).is_none_or(|before| before < n), "{key}: {n} came too late");
        }
    }
}

/// Reads on until this relay has sent what is left.
fn finish(file: &File, relay: &Process, sent: &mut Vec<String>) {
    let orders = file.count("SELECT count(*) FROM orders") as usize;
    let mut distinct: BTreeSet<String> = sent.iter().cloned().collect();
    while distinct.len() < orders {
        let line = relay.line().expect("the relay runs on");
        distinct.insert(line.clone());
        sent.push(line);
    }
}

#[test]
fn case_l1_relays_are_killed_and_nothing_is_lost_or_overtaken() {
    let file = File::new();
    let writers: Vec<Process> =
        ["a", "b", "c"].into_iter().map(|keys| Process::start(&file, &["write", keys, "100000"])).collect();
    assert!(writers.iter().all(|writer| writer.line().is_some()), "each writes");
    let mut sent = Vec::new();
    for (name, lines) in [("one", 3), ("two", 40), ("three", 77), ("four", 1)] {
        let relay = Process::start(&file, &["relay", name]);
        sent.extend((0..lines).map(|_| relay.line().expect("the relay runs")));
        sent.extend(relay.kill());
    }
    drop(writers); // killed as well
    let relay = Process::start(&file, &["relay", "last"]);
    finish(&file, &relay, &mut sent);
    assert_complete(&file, &sent);
}

#[test]
fn case_w1_a_killed_writer_leaves_orders_with_events_or_nothing() {
    let file = File::new();
    let relay = Process::start(&file, &["relay", "r"]);
    let mut committed = 0;
    for _ in 0..4 {
        let writer = Process::start(&file, &["write", "a", "100000"]);
        (0..25).for_each(|_| committed = writer.line().unwrap().parse().unwrap());
        if let Some(last) = writer.kill().last() {
            committed = last.parse().unwrap();
        }
        let orders = file.count("SELECT count(*) FROM orders");
        assert!((committed..=committed + 1).contains(&orders), "{committed} told, {orders} stored");
    }
    let mut sent = Vec::new();
    finish(&file, &relay, &mut sent);
    assert_complete(&file, &sent);
    assert_eq!(sent.len(), sent.iter().collect::<BTreeSet<_>>().len(), "none twice: no relay was killed");
}

/// A killed relay is replaced within its lease.
#[test]
fn a_standing_by_relay_takes_over_within_the_lease() {
    let file = File::new();
    let mut writer = Process::start(&file, &["write", "a", "1"]);
    writer.child.wait().unwrap();
    let first = Process::start(&file, &["relay", "first"]);
    let mut sent = vec![first.line().unwrap()];
    let second = Process::start(&file, &["relay", "second"]);
    let mut writer = Process::start(&file, &["write", "a", "2"]);
    writer.child.wait().unwrap();
    sent.push(first.line().unwrap());
    let killed = Instant::now();
    assert_eq!(first.kill(), [""; 0]);
    let mut writer = Process::start(&file, &["write", "a", "3"]);
    writer.child.wait().unwrap();
    while sent.last().unwrap() != "a3 3" {
        sent.push(second.line().unwrap());
    }
    assert!(killed.elapsed() < Duration::from_secs(10), "lease of two seconds: {:?}", killed.elapsed());
    assert_complete(&file, &sent);
}

#[test]
fn case_w4_ten_thousand_events_in_one_statement_and_the_relay_killed_among_them() {
    let file = File::new();
    let key = "printf('k%0200d', n % 100)"; // so long that a pipe holds a few hundred only
    let many = "WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < 10000)";
    file.connect()
        .execute_batch(&format!(
            "BEGIN; CREATE TABLE orders (key TEXT, n INTEGER);
             {many} INSERT INTO orders SELECT {key}, n FROM n;
             {many} INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type, payload)
               SELECT 'order', {key}, 'placed', n FROM n;
             COMMIT"
        ))
        .unwrap();
    let relay = Process::unread(&file, &["relay", "one"]);
    let mut sent: Vec<String> = (0..5000).map(|_| relay.line().expect("the relay runs")).collect();
    sent.extend(relay.kill());
    assert!(sent.len() < 10_000, "it was killed too late to show anything");
    let relay = Process::start(&file, &["relay", "two"]);
    finish(&file, &relay, &mut sent);
    assert_complete(&file, &sent);
}

/// A relay that was paused for longer than its lease ends when it wakes, and its record changes nothing.
#[test]
fn case_l2_a_paused_relay_finds_its_lease_lost() {
    let file = File::new();
    let writer = Process::start(&file, &["write", "a", "400"]);
    let mut paused = Process::start(&file, &["relay", "paused"]);
    let mut sent: Vec<String> = (0..20).map(|_| paused.line().expect("the relay runs")).collect();
    let signal = |name: &str, process: &Process| {
        let pid = process.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    };
    signal("-STOP", &paused);
    sent.extend(paused.lines.try_iter());
    while writer.line().is_some() {}
    let relay = Process::start(&file, &["relay", "two"]);
    finish(&file, &relay, &mut sent);
    signal("-CONT", &paused);
    assert!(!paused.child.wait().unwrap().success(), "it ends with an error");
    sent.extend(paused.lines.iter());
    assert_complete(&file, &sent);
    assert_eq!(file.count("SELECT count(*) FROM postbox_lease WHERE owner = 'two' AND epoch = 2"), 1);
}

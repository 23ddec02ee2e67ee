//! The example, run as a user runs it.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

#[test]
fn its_orders_arrive_and_it_stops_cleanly() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_embedded"));
    let mut service = command.current_dir(folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Each event is a line; the pipe ends if the service does.
    let lines: Vec<String> =
        BufReader::new(service.stdout.take().unwrap()).lines().take(3).map(Result::unwrap).collect();
    for (line, total) in lines.iter().zip([10, 20, 30]) {
        assert!(line.contains(&format!("\"payload\":{{\"total\":{total}}}")), "{line}");
    }
    let sent = Command::new("kill").arg("-INT").arg(service.id().to_string()).status().unwrap();
    assert!(sent.success() && service.wait().unwrap().success());
    let mut said = String::new();
    service.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("stopped: Clean"), "{said}");
}

//! The servers start, serve, crash, come back, and go with their owner, however it ends.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use postbox_testkit::services::{self, Kafka, KafkaOptions, PgOptions, PgVersion, Postgres, is_running};
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn wait_for(what: &str, fact: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !fact() {
        assert!(Instant::now() < deadline, "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(10)); // the step of a wait with a deadline
    }
}

fn postgres_lives(version: PgVersion) {
    let mut server = Postgres::start(version).unwrap();
    let database = server.create_database();
    let name = database.rsplit_once('/').unwrap().1;
    server.execute(name, "CREATE TABLE t AS SELECT 'kept' AS a, NULL AS b").unwrap();
    let major = "SELECT (current_setting('server_version_num')::integer / 10000)::text";
    assert_eq!(server.execute(name, major).unwrap(), [[Some(format!("{version:?}").replace('V', ""))]]);
    let settings = "SELECT current_setting('max_prepared_transactions'), current_setting('wal_level')";
    assert_eq!(server.execute(name, settings).unwrap(), [[Some("20".into()), Some("logical".into())]]);
    let pid = server.pid();
    assert!(is_running(pid));

    server.crash().unwrap();
    assert!(!is_running(pid));
    assert!(server.execute(name, "SELECT 1").is_err());
    server.restart().unwrap();
    assert_ne!(server.pid(), pid);
    assert_eq!(server.execute(name, "SELECT * FROM t").unwrap(), [[Some("kept".into()), None]]);

    let error = server.execute(name, "SELECT * FROM missing").unwrap_err().to_string();
    assert!(error.contains("42P01"), "{error}");
    let folder = server.folder().to_path_buf();
    server.stop().unwrap();
    assert!(!folder.exists());
}

#[test]
fn postgres_14_starts_crashes_and_comes_back() {
    postgres_lives(PgVersion::V14);
}

#[test]
fn postgres_15_starts_crashes_and_comes_back() {
    postgres_lives(PgVersion::V15);
}

#[test]
fn postgres_18_starts_crashes_and_comes_back() {
    postgres_lives(PgVersion::V18);
}

#[test]
fn all_that_is_needed_can_be_fetched() {
    services::ensure_all().unwrap();
}

#[test]
fn postgres_takes_settings_and_encodings() {
    let extra = vec![("TimeZone".into(), "Asia/Kathmandu".into())];
    let server = Postgres::start_with(PgVersion::V15, &PgOptions { fsync: true, extra }).unwrap();
    let url = server.create_database_with("TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'");
    let look = "SELECT current_setting('server_encoding'), current_setting('fsync'), current_setting('TimeZone')";
    let row = server.execute(url.rsplit_once('/').unwrap().1, look).unwrap().remove(0);
    assert_eq!(row.into_iter().flatten().collect::<Vec<_>>(), ["LATIN1", "on", "Asia/Kathmandu"]);
}

#[test]
fn kafka_makes_topics_crashes_and_comes_back() {
    let mut kafka = Kafka::start().unwrap();
    kafka.create_topic("orders", 3, &[("max.message.bytes", "2000")]).unwrap();
    let pid = kafka.pid();
    kafka.crash().unwrap();
    assert!(!is_running(pid));
    assert!(TcpStream::connect(kafka.bootstrap()).is_err());
    kafka.restart().unwrap();
    let again = kafka.create_topic("orders", 3, &[]).unwrap_err().to_string();
    assert!(again.contains("error 36"), "the topic outlives the crash: {again}");
    let folder = kafka.folder().to_path_buf();
    kafka.stop().unwrap();
    assert!(!folder.exists());
}

#[test]
fn kafka_behind_a_proxy_sends_its_clients_there() {
    let kafka = Kafka::start_with(&KafkaOptions { proxied: true, ..Default::default() }).unwrap();
    let proxy = kafka.proxy().unwrap();
    assert_eq!(kafka.port(), proxy.port());
    assert_eq!(kafka.advertised().unwrap(), [kafka.bootstrap()]);
    assert!(TcpStream::connect(kafka.bootstrap()).is_ok());
    proxy.set(services::Mode::Refuse);
    assert!(TcpStream::connect(kafka.bootstrap()).is_err());
    assert!(is_running(kafka.pid()));
}

#[test]
fn kafka_with_sasl_shows_a_certificate_of_its_own_ca() {
    let kafka = Kafka::start_with(&KafkaOptions { sasl: true, ..Default::default() }).unwrap();
    let verify = |ca: Option<PathBuf>| {
        let mut command = Command::new("openssl");
        command.args(["s_client", "-connect", &kafka.bootstrap(), "-verify_return_error", "-verify_ip", "127.0.0.1"]);
        if let Some(ca) = ca {
            command.arg("-CAfile").arg(ca);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
    };
    assert!(verify(Some(kafka.certificate("ca.pem"))));
    assert!(!verify(None), "without its CA the broker is not trusted");
}

#[test]
fn servers_vanish_with_an_owner_that_is_killed() {
    let mut owner = Command::new(env!("CARGO_BIN_EXE_postbox-services"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines: Vec<String> = BufReader::new(owner.stdout.take().unwrap()).lines().take(2).map(Result::unwrap).collect();
    let servers = lines.iter().map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        (words[3].parse::<u32>().unwrap(), PathBuf::from(words[5]))
    });
    let servers: Vec<_> = servers.collect();
    assert_eq!(servers.len(), 2, "{lines:?}");
    for (pid, folder) in &servers {
        assert!(is_running(*pid) && folder.exists());
    }
    owner.kill().unwrap(); // SIGKILL
    owner.wait().unwrap();
    wait_for("servers and folders are gone", || {
        servers.iter().all(|(pid, folder)| !is_running(*pid) && !folder.exists())
    });
}

//! What a PostgreSQL server can have against us: each ends with its name and the remedy, or is waited out.

use crate::harness::{DEADLINE, Folder, until};
use postbox_testkit::services::{Mode, PgVersion, Postgres, TcpProxy};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

/// A folder whose configuration names a fresh database; and its name.
pub(crate) fn fresh() -> (Folder, String) {
    let url = Postgres::shared(PgVersion::V15).create_database();
    let database = url.rsplit('/').next().unwrap().to_owned();
    (Folder::new().env("DATABASE_URL", &url), database)
}

/// As `fresh`, with the schema.
pub(crate) fn migrated() -> (Folder, String) {
    let (folder, database) = fresh();
    folder.ok(&["migrate"]);
    (folder, database)
}

pub(crate) fn execute(database: &str, sql: &str) -> Vec<Vec<Option<String>>> {
    Postgres::shared(PgVersion::V15).execute(database, sql).unwrap()
}

/// A relay that must end by itself, with 1 and all of these words.
pub(crate) fn refused(folder: &Folder, words: &[&str]) {
    let mut relay = folder.relay(&[]);
    assert_eq!(relay.wait(), 1, "{}", relay.stderr.text());
    let said = relay.stderr.text();
    for word in words {
        assert!(said.contains(word), "no {word:?} in: {said}");
    }
}

#[test]
fn an_event_written_by_sql_is_on_stdout_and_traced() {
    PgVersion::PROMISED.into_iter().for_each(an_event_is_on_stdout_and_traced);
}

fn an_event_is_on_stdout_and_traced(version: PgVersion) {
    let server = Postgres::shared(version);
    let url = server.create_database();
    let folder = Folder::new().env("DATABASE_URL", &url);
    folder.ok(&["migrate"]);
    let relay = folder.leading_relay();
    let sql = "SELECT postbox.publish('order', '42', 'order.placed', '{\"n\": 9007199254740993}')";
    let id = server.execute(url.rsplit('/').next().unwrap(), sql).unwrap()[0][0].clone().unwrap();
    let line = relay.stdout.wait_for(&id);
    assert!(line.contains("\"payload\":{\"n\": 9007199254740993}"), "{line}");
    until("the event is settled", || folder.json(&["trace", &id, "--json"])[0]["state"] == "published");
    let trace = folder.json(&["trace", &id, "--json"]);
    let times = ["written_at", "sent_at", "published_at"].map(|time| trace[0][time].as_str().unwrap());
    assert!(times.is_sorted(), "{trace}");
    let status = folder.json(&["status", "--json"]);
    assert!(status[0]["owner"].is_string() && status[0]["dead"] == 0, "{status}");
    folder.ok(&["check"]);
    relay.stop();
    let id = folder.ok(&["publish", "order", "43", "order.placed", "{}"]).stdout;
    assert_eq!(folder.json(&["trace", id.trim(), "--json"])[0]["state"], "pending");
}

#[test]
fn case_p3_an_event_that_is_no_utf8_is_dead_with_the_columns_name_and_the_rest_flows() {
    let server = Postgres::shared(PgVersion::V15);
    let url = server.create_database_with("TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'");
    let folder = Folder::new().env("DATABASE_URL", &url);
    folder.ok(&["migrate"]);
    let bad = "SELECT postbox.publish('order', convert_from('\\xe9', 'SQL_ASCII'), 'order.placed', '{}')";
    let bad = execute(url.rsplit('/').next().unwrap(), bad)[0][0].clone().unwrap();
    let good = folder.ok(&["publish", "order", "caf\u{e9}", "order.placed", "{}"]).stdout;
    let relay = folder.leading_relay();
    let line = relay.stdout.wait_for(good.trim());
    assert!(line.contains("caf\u{e9}"), "{line}");
    let trace = || folder.json(&["trace", &bad, "--json"])[0].clone();
    until("the event is dead", || trace()["state"] == "dead");
    assert_eq!(trace()["error"], "the column aggregate_id of event 1 is not valid UTF-8");
    relay.stop();
}

#[test]
fn a_renewal_that_fails_does_not_end_the_tenure() {
    let (folder, database) = migrated();
    let relay = folder.leading_relay();
    let epoch_and_until = || execute(&database, "SELECT epoch, until FROM postbox.lease").remove(0);
    execute(&database, "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''not now''; END'");
    execute(&database, "CREATE TRIGGER no BEFORE UPDATE ON postbox.lease FOR EACH ROW EXECUTE FUNCTION no()");
    let before = epoch_and_until();
    relay.stderr.wait_for("not now");
    execute(&database, "DROP TRIGGER no ON postbox.lease");
    until("the lease is renewed", || epoch_and_until()[1] != before[1]);
    let id = folder.ok(&["publish", "order", "1", "order.placed", "{}"]).stdout;
    relay.stdout.wait_for(id.trim());
    assert_eq!(epoch_and_until()[0], before[0], "it is the same tenure");
    relay.stop();
}

#[test]
fn an_unmigrated_database_names_the_command() {
    let (folder, _) = fresh();
    refused(&folder, &["postbox migrate"]);
    for command in ["status", "check"] {
        let ended = folder.run(&[command]);
        assert!((ended.stdout + &ended.stderr).contains("postbox migrate"));
        assert_eq!(ended.code, Some(if command == "check" { 3 } else { 1 }));
    }
    folder.run(&["publish", "order", "1", "order.placed", "{}"]).failed_with(1, &["postbox migrate"]);
}

#[test]
fn another_retention_than_the_schemas_is_named_and_migrate_mends_it() {
    let (folder, _) = migrated();
    let folder = folder.env("POSTBOX__SOURCE__RETENTION", "30d");
    let check = folder.run(&["check"]);
    let words = ["source.retention asks for 2592000 s", "migrated with 604800 s", "mend: postbox migrate"];
    assert!(check.code == Some(3) && words.iter().all(|word| check.stdout.contains(word)), "{check:?}");
    let relay = folder.leading_relay();
    let warned = relay.stderr.wait_for(words[0]);
    assert!(warned.contains(words[2]), "{warned}");
    relay.stop();
    let script = folder.ok(&["migrate", "--print"]).stdout;
    assert!(script.contains("RETURN 2592000;"), "{script}");
    assert!(folder.ok(&["migrate"]).stderr.contains("stay for 30d from now on"));
    assert!(folder.ok(&["migrate"]).stderr.contains("nothing to do"));
    folder.ok(&["check"]);
}

#[test]
fn a_newer_schema_asks_for_a_newer_program() {
    let (folder, database) = migrated();
    execute(&database, "INSERT INTO postbox.migration (version, name, checksum) VALUES (99, 'later', '0')");
    refused(&folder, &["version 99", "newer postbox"]);
    folder.run(&["migrate"]).failed_with(1, &["version 99", "newer postbox"]);
}

#[test]
fn a_wrong_database_user_or_password_is_named_and_the_password_is_not() {
    let mut server = Postgres::start(PgVersion::V15).unwrap();
    let url = |database: &str| server.url(database);
    refused(&Folder::new().env("DATABASE_URL", &url("nowhere")), &["nowhere", "create the database"]);
    let hba = server.folder().join("data/pg_hba.conf");
    server.execute("postgres", "CREATE ROLE odd LOGIN PASSWORD 'p@ss:/%word'").unwrap();
    std::fs::write(hba, "host all odd 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n").unwrap();
    server.restart().unwrap();
    let place = format!("127.0.0.1:{}/postgres", server.port());
    let wrong = Folder::new().env("DATABASE_URL", &format!("postgres://odd:wr%40ng@{place}"));
    refused(&wrong, &["odd", "password"]);
    let said = wrong.run(&["check"]);
    assert!(said.code == Some(3) && !said.stdout.contains("wr%40ng") && !said.stdout.contains("wr@ng"), "{said:?}");
    // The right one from a file, as it is; and percent-encoded in the URL.
    let right = Folder::new().env("DATABASE_URL", &format!("postgres://odd@{place}"));
    std::fs::write(right.file("pw"), "p@ss:/%word\n").unwrap();
    let right = right.env("POSTBOX__SOURCE__PASSWORD_FILE", "pw");
    refused(&right, &["postbox migrate"]); // it came as far as the schema
    let encoded = Folder::new().env("DATABASE_URL", &format!("postgres://odd:p%40ss%3A%2F%25word@{place}"));
    refused(&encoded, &["postbox migrate"]);
}

#[test]
fn case_t3_a_role_without_rights_is_told_which_and_a_granted_one_is_enough() {
    let (folder, database) = migrated();
    let roles = ["service", "relay"].map(|role| format!("{role}_{database}"));
    let grants = folder.ok(&["migrate", "--print", "--roles", &format!("{0},{1}", roles[0], roles[1])]).stdout;
    execute(&database, &format!("CREATE ROLE login_{database} LOGIN"));
    let server = Postgres::shared(PgVersion::V15);
    let url = format!("postgres://login_{database}@127.0.0.1:{}/{database}", server.port());
    let login = Folder::new().env("DATABASE_URL", &url);
    let check = login.run(&["check"]);
    assert!(check.code == Some(3) && check.stdout.contains("MEND"), "{check:?}");
    refused(&login, &["permission denied", "grant"]);
    execute(&database, &grants);
    execute(&database, &format!("GRANT {} TO login_{database}", roles[1]));
    login.ok(&["check"]);
    let relay = login.leading_relay();
    let id = execute(&database, "SELECT postbox.publish('order', '1', 'order.placed', '{}')")[0][0].clone().unwrap();
    relay.stdout.wait_for(&id);
    relay.stop();
    // Who may only write publishes by the command line, too.
    execute(&database, &format!("REVOKE {1} FROM login_{database}; GRANT {0} TO login_{database}", roles[0], roles[1]));
    let id = login.ok(&["publish", "order", "1", "order.paid", "{}"]).stdout;
    assert_eq!(folder.json(&["trace", id.trim(), "--json"])[0]["state"], "pending");
}

#[test]
fn sessions_that_may_not_write_are_found_by_check() {
    let (folder, database) = migrated();
    execute(&database, &format!("ALTER DATABASE {database} SET default_transaction_read_only = on"));
    let check = folder.run(&["check"]);
    assert!(check.code == Some(3) && check.stdout.contains("default_transaction_read_only"), "{check:?}");
}

/// A writer may set any time. Held, it must not keep others from being settled.
#[test]
fn events_of_any_time_are_dead_alone_and_the_log_tells_of_each() {
    let (folder, database) = migrated();
    let config = "[stream.main]\nsink = \"stdout\"\nroutes = [{ event_type = \"good\", topic = \"t\" }]\n";
    std::fs::write(folder.file("postbox.toml"), config).unwrap();
    let relay = folder.leading_relay();
    for time in ["294276-12-31", "4713-01-01 BC", "2026-01-01"] {
        let bad = format!(
            "INSERT INTO postbox.outbox (aggregate_type, aggregate_id, event_type, created_at) VALUES ('a', '1', 'bad', '{time}') RETURNING event_id"
        );
        let bad = execute(&database, &bad)[0][0].clone().unwrap();
        let line = relay.stderr.wait_for(&bad);
        assert!(line.contains("an event is dead") && line.contains("attempts=0"), "{line}");
        let good = folder.ok(&["publish", "a", "1", "good", "{}"]).stdout;
        relay.stdout.wait_for(good.trim());
        until("both are settled", || folder.json(&["status", "--json"])[0]["pending"] == 0);
        assert_eq!(folder.json(&["trace", &bad, "--json"])[0]["state"], "dead");
    }
    relay.stop();
}

#[test]
fn a_server_that_is_not_there_yet_is_waited_for() {
    let (folder, database) = migrated();
    let proxy = TcpProxy::start(Postgres::shared(PgVersion::V15).port()).unwrap();
    proxy.set(Mode::Refuse);
    let url = format!("postgres://postgres@127.0.0.1:{}/{database}", proxy.port());
    let through = Folder::new().env("DATABASE_URL", &url);
    let relay = through.relay(&[]);
    relay.stderr.wait_for("the source is out");
    through.run(&["status"]).failed_with(1, &["connect"]);
    proxy.set(Mode::Pass);
    relay.stderr.wait_for("the lease is ours");
    let id = folder.ok(&["publish", "order", "1", "order.placed", "{}"]).stdout;
    relay.stdout.wait_for(id.trim());
    relay.stop();
}

#[test]
fn a_clean_stop_hands_over_at_once() {
    let (folder, _) = migrated();
    let folder = folder.env("POSTBOX__RELAY__LEASE", "10m"); // so the second one never gets it by waiting
    let first = folder.leading_relay();
    let second = folder.relay(&[]);
    second.stderr.wait_for("standing by: another relay holds the lease");
    let id = folder.ok(&["publish", "order", "1", "order.placed", "{}"]).stdout;
    first.stdout.wait_for(id.trim());
    first.stop();
    second.stderr.wait_for("the lease is ours");
    let id = folder.ok(&["publish", "order", "1", "order.paid", "{}"]).stdout;
    second.stdout.wait_for(id.trim());
    assert_eq!(second.stdout.all().len(), 1, "the first one's event was settled before the hand-over");
    second.stop();
}

#[test]
fn a_server_that_only_speaks_the_protocol_is_refused_by_name() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || drop(pretend(stream)));
        }
    });
    let folder = Folder::new().env("DATABASE_URL", &format!("postgres://root@127.0.0.1:{port}/defaultdb"));
    refused(&folder, &["CockroachDB CCL v25.1.0", "PostgreSQL 14 or later"]);
    let check = folder.run(&["check"]);
    assert!(check.code == Some(3) && check.stdout.contains("CockroachDB"), "{check:?}");
    folder.run(&["migrate"]).failed_with(1, &["CockroachDB"]);
}

/// Answers a start-up and simple queries as such a server does.
fn pretend(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(DEADLINE))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    std::io::copy(&mut (&stream).take(u64::from(u32::from_be_bytes(length)) - 4), &mut std::io::sink())?;
    stream.write_all(&[&message(b'R', &[0; 4])[..], &message(b'Z', b"I")].concat())?;
    loop {
        let mut head = [0; 5];
        stream.read_exact(&mut head)?;
        let body = u64::from(u32::from_be_bytes(head[1..].try_into().unwrap())) - 4;
        std::io::copy(&mut (&stream).take(body), &mut std::io::sink())?;
        if head[0] == b'Q' {
            let version = b"CockroachDB CCL v25.1.0 (x86_64-pc-linux-gnu, built 2025/01/01)";
            let column = [&[0, 1][..], b"version\0", &[0; 6], &[0, 0, 0, 25], &[255, 255], &[255; 4], &[0, 0]].concat();
            let row = [&[0, 1][..], &(version.len() as u32).to_be_bytes(), version].concat();
            let answer =
                [message(b'T', &column), message(b'D', &row), message(b'C', b"SELECT 1\0"), message(b'Z', b"I")];
            stream.write_all(&answer.concat())?;
        }
    }
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    [&[kind][..], &(body.len() as u32 + 4).to_be_bytes(), body].concat()
}

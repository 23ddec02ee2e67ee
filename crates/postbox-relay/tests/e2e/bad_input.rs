//! What people get wrong: each ends, or waits, with the name of the thing and the remedy. The schema's version, rights,
//! passwords and other servers are in `postgres`, topics and brokers in `kafka`, unknown keys in `command_line`, the full
//! disk in `embedded_default`.

use crate::harness::{Folder, until};
use crate::postgres::{execute, migrated};
use postbox_testkit::services::{PgVersion, Postgres, free_port};

/// What `check` found, and what another command that needs the database said.
fn checked(folder: &Folder, code: i32, words: &[&str]) {
    let check = folder.run(&["check"]);
    assert_eq!(check.code, Some(3), "{check:?}");
    words.iter().for_each(|word| assert!(check.stdout.contains(word), "no {word:?} in: {}", check.stdout));
    folder.run(&["status"]).failed_with(code, words);
}

/// What every command says where the configuration is wrong in itself: nothing is connected to, nothing is made.
fn misconfigured(folder: &Folder, words: &[&str]) {
    let check = folder.run(&["check"]);
    assert_eq!(check.code, Some(2), "{check:?}");
    words.iter().for_each(|word| assert!(check.stdout.contains(word), "no {word:?} in: {}", check.stdout));
    for command in [&["status"][..], &["migrate"], &["migrate", "--print"], &["publish", "order", "1", "x", "{}"]] {
        folder.run(command).failed_with(2, words);
    }
    folder.ended_relay(&[]).failed_with(2, words);
}

#[test]
fn a_wrong_url_names_the_place_and_what_to_look_at() {
    let nobody = format!("127.0.0.1:{}", free_port().unwrap());
    let unreachable = [&nobody[..], "is the server running there", "URL"];
    let folder = Folder::new().env("DATABASE_URL", &format!("postgres://me:s3cret@{nobody}/shop"));
    checked(&folder, 1, &unreachable);
    let relay = folder.relay(&[]);
    let line = relay.stderr.wait_for("the source is out"); // and goes on trying
    assert!(unreachable.iter().all(|word| line.contains(word)) && !line.contains("s3cret"), "{line}");
    relay.stop();

    let no_such_host = Folder::new().env("DATABASE_URL", "postgres://me@no-such-host.invalid/shop");
    checked(&no_such_host, 1, &["no-such-host.invalid:5432", "URL"]);
    let plain = format!("{}?sslmode=require", Postgres::shared(PgVersion::V15).create_database());
    checked(&Folder::new().env("DATABASE_URL", &plain), 1, &["does not support TLS", "sslmode=disable"]);
    let nowhere = Folder::new().env("DATABASE_URL", "sqlite:/no/such/folder/shop.db");
    checked(&nowhere, 1, &["/no/such/folder/shop.db", "postbox migrate"]);
    nowhere.run(&["migrate"]).failed_with(1, &["/no/such/folder/shop.db", "Correct the path"]);
    nowhere.ended_relay(&[]).failed_with(1, &["/no/such/folder/shop.db"]);
    let folder = Folder::new().env("DATABASE_URL", "sqlite:text.db");
    std::fs::write(folder.file("text.db"), "no database. ".repeat(100)).unwrap();
    folder.ended_relay(&[]).failed_with(1, &["text.db", "no SQLite database", "Correct the path"]);
    let folder = Folder::new().env("DATABASE_URL", "sqlite:pipe.db");
    let made = std::process::Command::new("mkfifo").arg(folder.file("pipe.db")).status().unwrap();
    assert!(made.success());
    checked(&folder, 1, &["pipe.db", "not a regular file", "source.url"]);
    folder.ended_relay(&[]).failed_with(1, &["pipe.db", "not a regular file"]);
}

#[test]
fn a_database_url_that_is_wrong_in_form_is_wrong_configuration() {
    let unreadable = ["postgres://USER:PASSWORD@HOST:PORT/DATABASE", "percent-encoded", "source.url"];
    for (url, words) in [
        ("postgres://me:p@ss@h:5432/shop", &unreadable[..]),
        ("postgres://me@h:port/shop", &unreadable),
        ("postgres://me@h/shop?sslmod=disable", &unreadable),
        ("host=h port=x", &unreadable),
        ("postgres://me@h/shop?sslmode=disabled", &["sslmode is one of", "disable"]),
        ("postgres://me@h/shop?sslmode=prefer", &["plain text"]),
        ("postgres://me@h/shop?sslrootcert=/no/such/ca.pem", &["sslrootcert /no/such/ca.pem"]),
        ("mysql://h/d", &["mysql://", "source.url"]),
        ("sqlite:", &["sqlite:postbox.db"]),
        ("", &["has no scheme"]),
    ] {
        misconfigured(&Folder::new().env("DATABASE_URL", url), words);
    }
    let postgres = || Folder::new().env("DATABASE_URL", "postgres://me@h/shop");
    misconfigured(
        &postgres().env("POSTBOX__SOURCE__LISTEN_URL", "postgres://h:x/d"),
        &["listen_url", "percent-encoded"],
    );
    misconfigured(&postgres().env("POSTBOX__SOURCE__SCHEMA", &"x".repeat(64)), &["longer than 63 bytes"]);
}

#[test]
fn a_file_without_tables_or_with_newer_ones_names_the_command() {
    let folder = Folder::new().env("DATABASE_URL", "sqlite:shop.db");
    std::fs::write(folder.file("shop.db"), "").unwrap();
    checked(&folder, 1, &["shop.db", "postbox migrate"]);
    folder.ended_relay(&[]).failed_with(1, &["shop.db", "postbox migrate"]);
    folder.run(&["publish", "order", "1", "order.placed", "{}"]).failed_with(1, &["postbox migrate"]);
    folder.ok(&["migrate"]);
    let file = rusqlite::Connection::open(folder.file("shop.db")).unwrap();
    file.execute("INSERT INTO postbox_migration VALUES (99, '', 0)", []).unwrap();
    checked(&folder, 1, &["version 99", "Upgrade postbox"]);
    folder.ended_relay(&[]).failed_with(1, &["version 99", "Upgrade postbox"]);
}

/// At the write, where it is known; what only the destination knows is in `kafka`.
#[test]
fn case_w5_a_payload_too_large_is_refused_at_the_write_with_size_and_limit() {
    let (postgres, database) = migrated();
    let sqlite = Folder::new();
    sqlite.ok(&["migrate"]);
    for folder in [&postgres, &sqlite] {
        std::fs::write(folder.file("big.json"), format!("\"{}\"", "x".repeat(1_100_000))).unwrap();
        let publish = folder.run_with_stdin(&["publish", "order", "1", "order.placed", "-"], "big.json");
        publish.failed_with(1, &["1100002", "983616"]);
    }
    let written = execute(&database, "SELECT count(*) FROM postbox.outbox");
    assert_eq!(written[0][0].as_deref(), Some("0"), "nothing of it is there");
    let sql = "SELECT postbox.publish('order', '1', 'order.placed', to_json(repeat('x', 1100000)))";
    let error = format!("{:#}", Postgres::shared(PgVersion::V15).execute(&database, sql).unwrap_err());
    assert!(error.contains("PB001") && error.contains("1100002"), "{error}");
}

/// A script must not take it for an event that is not there.
#[test]
fn an_event_whose_id_cannot_be_printed_is_said_to_be_written() {
    let folder = Folder::new();
    folder.ok(&["migrate"]);
    for args in [&["publish", "order", "1", "order.placed", "{}"][..], &["publish", "order", "1", "x", "{}", "--json"]]
    {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = folder.command(args).stdout(full).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        let id = said.split_whitespace().find(|word| word.len() == 36).unwrap_or_else(|| panic!("no id in: {said}"));
        assert!(said.contains("is written") && said.contains("do not publish it again"), "{said}");
        assert_eq!(folder.json(&["trace", id, "--json"])[0]["state"], "pending");
    }
}

/// Schema, stream and relay with names that would be statements.
#[test]
fn case_t5_names_from_the_configuration_are_quoted_or_refused() {
    const SCHEMA: &str = "a\"b'; DROP SCHEMA postbox CASCADE; --";
    const STREAM: &str = "x'); DROP SCHEMA postbox CASCADE; --";
    let configure = |folder: &Folder, schema: &str| {
        let quoted = |text: &str| serde_json::to_string(text).unwrap(); // as TOML's basic strings
        let text = format!(
            "[source]\nschema = {0}\nretention = \"1s\"\n[relay]\nname = {1}\n[stream.{1}]\nsink = \"stdout\"\n",
            quoted(schema),
            quoted(STREAM)
        );
        std::fs::write(folder.file("postbox.toml"), text).unwrap();
    };
    let (postgres, database) = migrated(); // the schema postbox is there and must stay
    let sqlite = Folder::new().env("DATABASE_URL", "sqlite:shop.db");
    for folder in [&postgres, &sqlite] {
        configure(folder, SCHEMA);
        folder.ok(&["migrate"]);
        let relay = folder.leading_relay();
        let id = folder.ok(&["publish", "order", "1", "order.placed", "{}"]).stdout;
        relay.stdout.wait_for(id.trim());
        let streams = || folder.json(&["status", "--json"]).as_array().unwrap().clone();
        until("the stream is known by its name", || {
            streams().iter().any(|status| status["stream"] == STREAM && status["pending"] == 0)
        });
        assert_eq!(folder.json(&["trace", id.trim(), "--json"])[0]["state"], "published");
        folder.ok(&["check"]);
        relay.stop();
    }
    // The keeper's statements, too: a bin of that schema is emptied.
    let relay = postgres.leading_relay();
    let schema = format!("\"{}\"", SCHEMA.replace('"', "\"\""));
    let first = format!("SELECT count(*) FROM {schema}.outbox WHERE event_type = 'order.placed'");
    let elsewhere = format!(
        "CREATE OR REPLACE FUNCTION {schema}.bin() RETURNS smallint LANGUAGE sql AS 'SELECT {}::smallint'",
        execute(&database, &format!("SELECT coalesce((max(bin) + 1) % 6, 0) FROM {schema}.outbox"))[0][0]
            .as_deref()
            .unwrap()
    );
    execute(&database, &elsewhere);
    until("the bin is emptied", || {
        postgres.ok(&["publish", "order", "1", "order.paid", "{}"]); // what is settled later shows that it is old enough
        execute(&database, &first)[0][0].as_deref() == Some("0")
    });
    relay.stop();
    let script =
        postgres.ok(&["migrate", "--print", "--roles", &format!("w'\"; --{database},r'\"; --{database}")]).stdout;
    execute(&database, &script);
    assert_eq!(execute(&database, "SELECT count(*) FROM postbox.outbox")[0][0].as_deref(), Some("0"));

    let (refused, _) = migrated();
    for schema in ["", "a$body$; DROP SCHEMA postbox CASCADE; --", &"x".repeat(64)] {
        configure(&refused, schema);
        refused.run(&["migrate"]).failed_with(2, &["cannot be the name of a schema"]);
    }
}

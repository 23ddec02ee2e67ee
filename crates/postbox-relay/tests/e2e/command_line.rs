//! What can be known to be wrong before anything is tried, and what is never shown.

use crate::harness::Folder;

#[test]
fn help_names_every_command_and_exit_code() {
    let help = Folder::new().ok(&["--help"]).stdout;
    for word in [
        "relay",
        "migrate",
        "publish",
        "status",
        "check",
        "trace",
        "config",
        "Exit codes:",
        "128+",
        "POSTBOX__SECTION__KEY",
    ] {
        assert!(help.contains(word), "no {word} in {help}");
    }
    for command in ["relay", "migrate", "publish", "status", "check", "trace", "config"] {
        let help = Folder::new().ok(&[command, "--help"]).stdout;
        assert!(help.contains("Examples:"), "{help}");
    }
}

#[test]
fn the_schema_is_a_prefix_on_sqlite_as_help_says() {
    let folder = Folder::new().env("POSTBOX__SOURCE__SCHEMA", "shop");
    let help = folder.ok(&["migrate", "--help"]).stdout;
    assert!(help.contains("POSTBOX__SOURCE__SCHEMA") && help.contains("shop_outbox"), "{help}");
    folder.ok(&["migrate"]);
    folder.ok(&["publish", "order", "1", "order.placed", "{}"]);
    let file = rusqlite::Connection::open(folder.file("postbox.db")).unwrap();
    let count = |sql| file.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(count("SELECT count(*) FROM shop_outbox"), 1);
    assert_eq!(count("SELECT count(*) FROM sqlite_schema WHERE name LIKE 'postbox%'"), 0);
}

#[test]
fn an_unknown_key_names_file_line_and_the_nearest() {
    let folder = Folder::with_config("[source]\n\n[relay]\ndrain_timout = \"5s\"\n");
    for command in [&["relay"][..], &["status"], &["check"], &["config", "print"]] {
        let words = ["postbox.toml:4: unknown key `drain_timout`", "did you mean `drain_timeout`?"];
        folder.run(command).failed_with(2, &words);
    }
    let folder = Folder::new().env("POSTBOX__RELAY__LEESE", "1s");
    folder.run(&["relay"]).failed_with(2, &["POSTBOX__RELAY__LEESE", "did you mean `lease`?"]);
    let folder = Folder::new().env("POSTBOX_CONFIG", "");
    folder.run(&["relay"]).failed_with(2, &["POSTBOX_CONFIG is empty", "unset it"]);
}

#[test]
fn a_variable_that_nobody_reads_is_named_with_the_one_that_was_meant() {
    for (name, meant) in [
        ("POSTBOX_SOURCE_URL", "POSTBOX__SOURCE__URL"),
        ("POSTBOX_SOURCE__URL", "POSTBOX__SOURCE__URL"),
        ("POSTBOX_RELAY_LEESE", "POSTBOX__RELAY__LEASE"),
        ("POSTBOX_STREAM_MAIN_KAFKA_BROKERS", "POSTBOX__STREAM__MAIN__KAFKA__BROKERS"),
        ("POSTBOX_CONFIG_FILE", "POSTBOX_CONFIG"),
    ] {
        let folder = Folder::new().env(name, "sqlite:other.db");
        let words = [name, &format!("did you mean {meant}?")];
        for command in [&["migrate"][..], &["status"], &["check"], &["config", "print"]] {
            folder.run(command).failed_with(2, &words);
        }
        folder.ended_relay(&[]).failed_with(2, &words);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is made");
    }
    // What is there without anybody's doing: the tests' own, and what Kubernetes sets beside a Service of this name.
    let folder = Folder::new().env("POSTBOX_CACHE", "/tmp").env("POSTBOX_SERVICE_HOST", "10.0.0.7");
    folder
        .env("POSTBOX_RELAY_PORT_80_TCP", "tcp://10.0.0.7:80")
        .env("POSTBOX_PORT", "tcp://10.0.0.7:80")
        .ok(&["migrate"]);
}

#[test]
fn usage_errors_end_with_2_and_say_what_to_write() {
    let folder = Folder::new();
    folder.run(&["relai"]).failed_with(2, &["relay"]);
    folder.run(&["trace", "42"]).failed_with(2, &["42"]);
    folder.run(&["migrate", "--roles", "a,b"]).failed_with(2, &["--print"]);
    folder.run(&["--config", "nowhere.toml", "status"]).failed_with(2, &["nowhere.toml", "postbox config default"]);
    let folder = Folder::new().env("DATABASE_URL", "mysql://u:s3cret@h/d");
    for command in [&["relay"][..], &["status"], &["migrate"]] {
        let ended = folder.run(command);
        ended.failed_with(2, &["mysql://", "sqlite:"]);
        assert!(!ended.stderr.contains("s3cret"), "{}", ended.stderr);
    }
}

#[cfg(feature = "kafka")]
#[test]
fn a_sink_without_its_table_and_an_option_that_breaks_a_promise_are_refused() {
    let kafka = || Folder::new().env("POSTBOX__STREAM__MAIN__SINK", "kafka");
    kafka().run(&["relay"]).failed_with(2, &["[stream.main.kafka]"]);
    let wrong = kafka().env("POSTBOX__STREAM__MAIN__KAFKA__BROKERS", "127.0.0.1:1");
    let wrong = wrong.env("POSTBOX__STREAM__MAIN__KAFKA__OPTIONS__ACKS", "1");
    wrong.run(&["relay"]).failed_with(2, &["acks", "cannot be set"]);
}

#[cfg(all(feature = "kafka", feature = "webhook"))]
#[test]
fn a_wrong_configuration_is_refused_before_anything_is_made() {
    let webhook = "[stream.main]\nsink = \"webhook\"\n[stream.main.webhook]\n";
    let secret = "secret = \"whsec_c2VjcmV0LWtleS1vZi10aGlzLXRlc3Q=\"\n";
    let kafka = "sink = \"kafka\"\n[stream.main.kafka]\nbrokers = ";
    for (config, words) in [
        (format!("{webhook}{secret}url = \"ftp://h/\"\n"), &["stream.main", "`url`", "ftp"][..]),
        (format!("{webhook}secret = \"no key\"\n"), &["stream.main", "secret"]),
        (format!("{webhook}secret_file = \"nowhere\"\n"), &["`secret_file` nowhere"]),
        (format!("{webhook}{secret}ca_file = \"nowhere\"\n"), &["`ca_file` nowhere"]),
        (format!("[stream.main]\n{kafka}\"h:port\"\n"), &["`brokers`", "host:9092"]),
        (
            format!("[stream.main]\n{kafka}\"h:9092, localhost:9092\"\n"),
            &[
                "stream.main",
                "(h:9092)",
                "set security = \"ssl\"",
                "security = \"plaintext\" if plain text is really meant",
            ],
        ),
        (format!("[stream.main]\n{kafka}\"localhost:9092\"\noptions = {{ no_such = \"1\" }}\n"), &["no_such"]),
        (
            format!("[stream.main]\nroutes = [{{ topic = \"a b\" }}]\n{kafka}\"localhost:9092\"\n"),
            &["stream.main.routes", "\"a b\""],
        ),
        (
            format!("[stream.main]\nroutes = [{{ topic = \"my shop.{{event_type}}\" }}]\n{kafka}\"localhost:9092\"\n"),
            &["stream.main.routes", "\"my shop.\""],
        ),
        ("[stream.main]\nroutes = [{ topic = \"{no_such}\" }]\n".into(), &["stream.main.routes", "{no_such}"]),
        ("[source]\npassword_file = \"nowhere\"\n".into(), &["nowhere", "password_file"]),
    ] {
        let folder = Folder::with_config(&config);
        let made = || std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().file_name()).collect::<Vec<_>>();
        let before = made();
        for args in [&[][..], &["--demo"]] {
            folder.ended_relay(args).failed_with(2, words);
        }
        assert_eq!(folder.run(&["check"]).code, Some(2), "{config}");
        assert_eq!(made(), before, "{config}");
    }
}

#[cfg(feature = "kafka")]
#[test]
fn case_t1_check_warns_once_of_plain_text_that_leaves_this_machine() {
    let warnings = |place: &str| {
        let folder = Folder::new().env("POSTBOX__STREAM__MAIN__SINK", "kafka");
        let folder = folder.env("POSTBOX__STREAM__MAIN__KAFKA__BROKERS", place);
        let check = folder.env("POSTBOX__STREAM__MAIN__KAFKA__SECURITY", "plaintext").run(&["check"]);
        assert_eq!(check.code, Some(3), "{check:?}"); // nobody is there
        check.stdout.lines().filter(|line| line.contains("plain text")).map(str::to_owned).collect::<Vec<_>>()
    };
    let warned = warnings("kafka-1.invalid:9092, kafka-2.invalid:9092");
    assert!(
        matches!(&warned[..], [line] if line.contains("main: sink kafka: warning: events go to kafka-1.invalid:9092, kafka-2.invalid:9092 in")),
        "{warned:?}"
    );
    assert!(warnings("localhost:1").is_empty());
}

#[test]
fn environment_variables_that_cannot_be_read_are_named() {
    use std::os::unix::ffi::OsStrExt;
    let value = std::ffi::OsStr::from_bytes(b"sqlite:\xff.db");
    for wrong in ["postbox=[".as_ref(), "postbox[a]=debug".as_ref(), "info,postbox=loud".as_ref(), value] {
        let folder = Folder::new().env("RUST_LOG", wrong);
        folder.ended_relay(&[]).failed_with(2, &["RUST_LOG"]);
        let check = folder.run(&["check"]);
        assert!(check.code == Some(2) && check.stdout.contains("RUST_LOG"), "{check:?}");
        assert!(!folder.file("postbox.db").exists());
    }
    for name in ["DATABASE_URL", "POSTBOX__SOURCE__URL"] {
        Folder::new().env(name, value).run(&["status"]).failed_with(2, &[name, "UTF-8"]);
    }
}

#[test]
fn the_default_file_is_a_configuration_that_changes_nothing() {
    let folder = Folder::new();
    let default = folder.ok(&["config", "default"]).stdout;
    let printed = folder.ok(&["config", "print"]).stdout;
    let written = Folder::with_config(&default);
    assert_eq!(written.ok(&["config", "print"]).stdout, printed);
    // What is printed can be used again.
    let again = Folder::with_config(&printed);
    assert_eq!(again.ok(&["config", "print"]).stdout, printed);
}

#[test]
fn case_t2_no_secret_is_in_any_output() {
    let folder = Folder::new();
    let secret = "p@ss:/%word";
    std::fs::write(folder.file("pw"), secret).unwrap();
    let config = "[source]\nurl = \"postgres://relay@127.0.0.1:1/shop\"\npassword_file = \"pw\"\n\
                  [stream.main]\nsink = \"kafka\"\n[stream.main.kafka]\nbrokers = \"127.0.0.1:1\"\n\
                  options = { \"ssl.key.password\" = \"p@ss:/%word\" }\n";
    std::fs::write(folder.file("postbox.toml"), config).unwrap();
    let raw = Folder::new().env("DATABASE_URL", "postgres://relay:p@ss:/%word@127.0.0.1:1/shop");
    for (folder, commands) in [(&folder, 6), (&raw, 6)] {
        let all = [&["config", "print"][..], &["status"], &["check"], &["check", "--json"], &["migrate"], &["relay"]];
        for command in &all[..commands] {
            let ended = folder.run_at_most(command);
            let said = ended.stdout + &ended.stderr;
            assert!(!said.contains("%word") && !said.contains("p@ss"), "postbox {}: {said}", command.join(" "));
        }
    }
}

#[test]
fn migrate_prints_what_it_would_run() {
    let sqlite = Folder::new().ok(&["migrate", "--print"]).stdout;
    assert!(sqlite.contains("CREATE TABLE") && sqlite.contains("postbox_outbox"), "{sqlite}");
    let postgres = Folder::new().env("DATABASE_URL", "postgres://h/d");
    let script = postgres.ok(&["migrate", "--print"]).stdout;
    assert!(script.contains("CREATE SCHEMA") && !script.contains("DROP "), "{script}");
    let grants = postgres.ok(&["migrate", "--print", "--roles", "shop,shop_relay"]).stdout;
    assert!(grants.contains("\"shop_relay\"") && !grants.contains("CREATE TABLE"), "{grants}");
    Folder::new().run(&["migrate", "--print", "--roles", "a,b"]).failed_with(2, &["SQLite has no roles"]);
}

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
fn an_unknown_key_names_file_line_and_the_nearest() {
    let folder = Folder::with_config("[source]\n\n[relay]\ndrain_timout = \"5s\"\n");
    for command in [&["relay"][..], &["status"], &["check"], &["config", "print"]] {
        let words = ["postbox.toml:4: unknown key `drain_timout`", "did you mean `drain_timeout`?"];
        folder.run(command).failed_with(2, &words);
    }
    let folder = Folder::new().env("POSTBOX__RELAY__LEESE", "1s");
    folder.run(&["relay"]).failed_with(2, &["POSTBOX__RELAY__LEESE", "did you mean `lease`?"]);
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
    Folder::new().run(&["migrate", "--print", "--roles", "a,b"]).failed_with(1, &["SQLite has no roles"]);
}

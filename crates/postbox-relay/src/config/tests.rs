//! The default file is the reference, so it may not drift from the code; and what is wrong is named with its place.

use super::load::parse;
use super::*;
use std::path::Path;

/// Every key that holds a secret is masked, whichever is added later: a value that Debug hides must not be printed.
#[cfg(all(feature = "kafka", feature = "webhook"))]
#[test]
fn what_a_type_hides_is_not_printed_either() {
    let mut hidden = 0;
    for section in ["source", "relay", "stream.main", "stream.main.kafka", "stream.main.webhook"] {
        let (sink, needed) = match section.rsplit_once('.') {
            Some((_, "kafka")) => ("kafka", "brokers = \"127.0.0.1:9092\"\n"),
            Some((_, "webhook")) => ("webhook", ""),
            _ => ("stdout", ""),
        };
        for key in known_keys(section) {
            let needed = if key == "brokers" { "" } else { needed };
            let text = format!("[{section}]\n{key} = \"canary\"\n{needed}");
            let text = if sink == "stdout" { text } else { format!("[stream.main]\nsink = \"{sink}\"\n{text}") };
            let Ok(config) = read(&text, &[]) else { continue };
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &text).unwrap();
            if !format!("{config:?}").contains("canary") {
                hidden += 1;
                assert!(!shown(Some(file.path()), &BTreeMap::new()).unwrap().contains("canary"), "{section}.{key}");
            }
        }
    }
    assert!(hidden >= 3, "{hidden}"); // passwords of database and Kafka, the secret of webhooks
}

fn read(text: &str, environment: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let environment = environment.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    parse(text, Path::new("postbox.toml"), &environment)
}

fn refused(text: &str, environment: &[(&str, &str)]) -> String {
    let error = read(text, environment).unwrap_err();
    format!("{} | {}", error.what, error.remedy)
}

#[test]
fn the_default_file_equals_the_codes_defaults() {
    let default = format!("{:#?}", Config::default());
    assert_eq!(format!("{:#?}", read(DEFAULT_TOML, &[]).unwrap()), default);
    assert_eq!(format!("{:#?}", read("", &[]).unwrap()), default);
}

#[test]
fn the_default_file_names_every_key() {
    let sections = ["source", "relay", "stream.main", "stream.main.retry"];
    for section in sections {
        let text = DEFAULT_TOML.split_once(&format!("\n[{section}]")).expect(section).1;
        let text = text.split("\n[").next().unwrap();
        for key in known_keys(section) {
            let named = |line: &str| line.trim_start_matches("# ").starts_with(&format!("{key} = "));
            let table = DEFAULT_TOML.contains(&format!("[{section}.{key}]"));
            assert!(table || text.lines().any(named), "{section}.{key} is not in the default file");
        }
    }
}

/// As the error for an unknown key lists them.
fn known_keys(section: &str) -> Vec<String> {
    let error = refused(&format!("[{section}]\nno_such_key_at_all = 1\n"), &[]);
    let known = error.split_once("known here: ").expect(&error).1;
    known.split(", ").map(str::to_owned).collect()
}

#[test]
fn what_is_printed_is_in_force_and_holds_no_secret() {
    let environment: BTreeMap<_, _> = [("POSTBOX__RELAY__LEASE", "20s"), ("POSTBOX__SOURCE__PASSWORD", "p@ss:/%word")]
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .into();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[stream.orders]\ndead = \"block\"\n").unwrap();
    let printed = shown(Some(file.path()), &environment).unwrap();
    assert!(printed.contains("lease = \"20s\"") && printed.contains("password = \"***\""), "{printed}");
    let again = format!("{:?}", read(&printed, &[]).unwrap());
    assert_eq!(again, format!("{:?}", load(Some(file.path()), &environment).map(with_url).unwrap()));
    assert!(printed.contains("[stream.orders]") && !printed.contains("[stream.main"), "{printed}");
    assert!(!printed.contains("word\""), "{printed}");
}

fn with_url(mut config: Config) -> Config {
    config.source.url = Some(config.source.url());
    config
}

/// The lines of a sink's commented table, in force.
#[cfg(all(feature = "kafka", feature = "webhook"))]
fn sink_table(sink: &str) -> Vec<&'static str> {
    let start = format!("# [stream.main.{sink}]");
    let lines = DEFAULT_TOML.lines().skip_while(|line| !line.starts_with(&start)).take_while(|line| !line.is_empty());
    lines.map(|line| line.strip_prefix("# ").unwrap()).collect()
}

#[cfg(all(feature = "kafka", feature = "webhook"))]
#[test]
fn the_sinks_tables_equal_the_codes_defaults() {
    // What has no default stands there as an example.
    let examples = [
        "security",
        "ca_file",
        "certificate_file",
        "key_file",
        "user",
        "password",
        "password_file",
        "url",
        "secret",
        "secret_file",
    ];
    let is_example = |line: &&&str| examples.iter().any(|key| line.starts_with(&format!("{key} = ")));
    for (sink, needed) in [("kafka", "brokers = \"127.0.0.1:9092\""), ("webhook", "")] {
        let table = sink_table(sink);
        let written: Vec<&str> = table.iter().filter(|line| !is_example(line)).copied().collect();
        let shown = |text: &str| {
            let stream = &read(text, &[]).unwrap().stream["main"];
            format!("{:#?} {:#?}", stream.kafka, stream.webhook)
        };
        assert_eq!(shown(&written.join("\n")), shown(&format!("[stream.main.{sink}]\n{needed}\n")));
        for key in known_keys(&format!("stream.main.{sink}")) {
            let named = table.iter().any(|line| line.starts_with(&format!("{key} = ")));
            assert!(named, "stream.main.{sink}.{key} is not in the default file");
        }
    }
}

#[test]
fn what_the_default_file_has_commented_out_is_known_too() {
    // `# key = value` is a key; talk begins with a capital or has no `=`.
    let mut checked = 0;
    let mut section = String::new();
    for line in DEFAULT_TOML.split("\n# [").next().unwrap().lines() {
        if line.starts_with('[') {
            section = line.to_owned();
        }
        let Some(setting) = line.strip_prefix("# ").filter(|s| s.split_once(" = ").is_some_and(|(k, _)| is_key(k)))
        else {
            continue;
        };
        if setting.ends_with('[') {
            continue; // the example of several lines, checked below
        }
        read(&format!("{section}\n{setting}\n"), &[]).unwrap_or_else(|error| panic!("{line}: {error}"));
        checked += 1;
    }
    assert!(checked >= 5, "only {checked} commented keys found");
    let example: Vec<&str> = DEFAULT_TOML.lines().skip_while(|line| *line != "# routes = [").collect();
    let example: Vec<&str> = example.iter().take_while(|l| l.starts_with('#')).map(|l| &l[2..]).collect();
    let config = read(&format!("[stream.main]\n{}", example.join("\n")), &[]).unwrap();
    assert_eq!(config.stream["main"].routes.len(), 3);
}

fn is_key(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
}

#[test]
fn an_unknown_key_is_named_with_its_line_and_the_nearest_known_one() {
    let text = "[source]\nschema = \"postbox\"\n\n[relay]\nlese = \"10s\"\n";
    let error = refused(text, &[]);
    assert!(error.starts_with("postbox.toml:5: unknown key `lese` | did you mean `lease`?"), "{error}");
    let error = refused("[streams.main]\nsink = \"stdout\"\n", &[]);
    assert!(error.starts_with("postbox.toml:1: unknown key `streams` | did you mean `stream`?"), "{error}");
    let error = refused("[stream.main]\nsink = \"kafak\"\n", &[]);
    assert!(error.starts_with("postbox.toml:2: unknown value \"kafak\" | did you mean `kafka`?"), "{error}");
    let error = refused("", &[("POSTBOX__RELAY__LESE", "10s")]);
    assert!(
        error.starts_with("environment variable POSTBOX__RELAY__LESE: unknown key `lese` | did you mean"),
        "{error}"
    );
}

#[test]
fn wrong_values_are_named_with_their_place() {
    let error = refused("[relay]\nlease = \"soon\"\n", &[]);
    assert!(error.contains("postbox.toml:2: \"soon\" is no duration"), "{error}");
    let error = refused("[relay]\nlease = 30\n", &[]);
    assert!(error.contains("postbox.toml:2:") && error.contains("integer `30`"), "{error}");
    let error = refused("[relay\n", &[]);
    assert!(error.contains("postbox.toml:1:"), "{error}");
    let error = refused("", &[("POSTBOX__RELAY__EVENTS_MAX", "many")]);
    assert!(error.starts_with("environment variable POSTBOX__RELAY__EVENTS_MAX: "), "{error}");
    let error = refused("", &[("POSTBOX__RELAY", "x")]);
    assert!(error.starts_with("environment variable POSTBOX__RELAY: a string, but expected a table"), "{error}");
}

#[test]
fn names_can_be_seen() {
    for text in [
        "[relay]\nname = \"\"",
        "[relay]\nname = \" \"",
        "[stream.\"\"]",
        "[stream.\"a\\u0000\"]",
        "[stream.\"\\u200B\"]",
    ] {
        let said = super::load::check(&read(text, &[]).unwrap()).unwrap_err().what;
        assert!(said.starts_with("relay.name is \"") || said.starts_with("the name of a stream is \""), "{said}");
    }
}

#[test]
fn every_kind_of_key_is_set_by_the_environment() {
    let config = read(
        "[relay]\nlease = \"20s\"\n[stream.main]\nsink = \"kafka\"\n",
        &[
            ("POSTBOX__SOURCE__PASSWORD", "123"),
            ("POSTBOX__RELAY__EVENTS_MAX", "99"),
            ("POSTBOX__RELAY__BYTES_MAX", "1MB"),
            ("POSTBOX__STREAM__MAIN__ROUTES", "[{ topic = \"all\" }]"),
            ("POSTBOX__STREAM__MAIN__RETRY__ATTEMPTS_MAX", "3"),
            ("POSTBOX_CONFIG", "not a key"),
        ],
    )
    .unwrap();
    assert_eq!(config.source.password.unwrap().expose_secret(), "123");
    assert_eq!((config.relay.events_max, config.relay.bytes_max), (99, 1 << 20));
    assert_eq!(config.relay.lease, Duration::from_secs(20));
    let main = &config.stream["main"];
    assert_eq!((main.sink, main.routes[0].topic.as_str(), main.retry.attempts_max), (SinkName::Kafka, "all", 3));
}

#[cfg(feature = "webhook")]
#[test]
fn a_webhook_must_time_out_before_its_send() {
    let text = "[relay]\nsend_timeout = \"5s\"\n[stream.main.webhook]\nurl = \"https://example.com\"\n";
    let said = super::load::check(&read(text, &[]).unwrap()).unwrap_err().what;
    assert!(said.contains("webhook.timeout") && said.contains("relay.send_timeout"), "{said}");
}

#[test]
fn absurd_numbers_are_refused_with_key_and_range() {
    let wrong = |text: &str| super::load::check(&read(text, &[]).unwrap()).err().map(|error| error.what);
    for (section, key, bad, range) in [
        ("source", "retention", &["\"0s\"", "\"3651d\""][..], "1s to 3650d"),
        ("relay", "lease", &["\"0s\"", "\"999ms\"", "\"3650d\""], "1s to 1h"),
        ("relay", "events_max", &["0", "1000000000000"], "1 to 1000000"),
        ("relay", "bytes_max", &["\"0B\"", "\"1025MB\""], "1B to 1GB"),
        ("relay", "send_timeout", &["\"0s\"", "\"61m\""], "1s to 1h"),
        ("relay", "drain_timeout", &["\"61m\""], "0ms to 1h"),
        ("stream.main.retry", "base", &["\"0s\"", "\"25h\""], "1ms to 1d"),
        ("stream.main.retry", "pause_max", &["\"0s\"", "\"31d\""], "1ms to 30d"),
        ("stream.main.retry", "attempts_max", &["0", "1000001"], "1 to 1000000"),
        #[cfg(feature = "webhook")]
        ("stream.main.webhook", "timeout", &["\"0s\"", "\"61m\""], "1ms to 1h"),
        #[cfg(feature = "webhook")]
        ("stream.main.webhook", "connect_timeout", &["\"0s\"", "\"61m\""], "1ms to 1h"),
    ] {
        let with = |value: &str| format!("[{section}]\n{key} = {value}\n");
        for value in bad {
            let said = wrong(&with(value)).unwrap_or_else(|| panic!("{section}.{key} = {value} is taken"));
            assert!(said.starts_with(&format!("{section}.{key} is ")) && said.ends_with(range), "{said}");
        }
        let (least, most) = range.split_once(" to ").unwrap();
        for end in [least, most] {
            let quoted =
                if end.ends_with(|c: char| c.is_ascii_digit()) { end.to_owned() } else { format!("\"{end}\"") };
            // The webhook's limit is set further by its neighbour.
            let said = wrong(&with(&quoted)).filter(|said| !said.contains("is not below relay.send_timeout"));
            assert_eq!(said, None, "{section}.{key}");
        }
    }
}

#[test]
fn a_configuration_made_by_a_program_is_checked_too() {
    let mut config = Config::default();
    config.relay.events_max = 1_000_000_000_000;
    let failure = crate::Runner::new(&config).err().expect("it is refused");
    assert_eq!(failure.code, crate::failure::Code::Usage);
    assert!(failure.what.contains("relay.events_max is 1000000000000; it can be 1 to 1000000"), "{failure}");
}

#[test]
fn the_database_is_named_by_the_key_then_by_database_url() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let url = |text: &str, environment: &[(&str, &str)]| {
        std::fs::write(file.path(), text).unwrap();
        let environment = environment.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        load(Some(file.path()), &environment).unwrap().source.url().to_string()
    };
    let set = "[source]\nurl = \"sqlite:a.db\"\n";
    assert_eq!(url("", &[]), DEFAULT_URL);
    assert_eq!(url("", &[("DATABASE_URL", "sqlite:b.db")]), "sqlite:b.db");
    assert_eq!(url(set, &[("DATABASE_URL", "sqlite:b.db")]), "sqlite:a.db");
    assert_eq!(url(set, &[("POSTBOX__SOURCE__URL", "sqlite:c.db")]), "sqlite:c.db");
}

#[test]
fn case_t2_secrets_come_from_files_and_are_not_shown() {
    let folder = tempfile::tempdir().unwrap();
    let (config, secret) = (folder.path().join("c.toml"), folder.path().join("secret"));
    std::fs::write(&secret, "p@ss:/%word\n").unwrap();
    let text = format!("[source]\nurl = \"postgres://u@h/d\"\npassword_file = {secret:?}\n");
    std::fs::write(&config, &text).unwrap();
    let loaded = load(Some(&config), &Default::default()).unwrap();
    assert_eq!(loaded.source.password.as_ref().unwrap().expose_secret(), "p@ss:/%word");
    let debug = format!("{loaded:?}");
    assert!(debug.contains("***") && !debug.contains("%word"), "{debug}");
    std::fs::write(&config, format!("{text}password = \"other\"\n")).unwrap();
    let error = load(Some(&config), &Default::default()).unwrap_err();
    assert_eq!(error.what, "source.password and source.password_file are both set");
    std::fs::write(&config, "[source]\npassword_file = \"/nowhere/pw\"\n").unwrap();
    assert!(load(Some(&config), &Default::default()).unwrap_err().what.contains("/nowhere/pw"));
    // A secret where something else is expected is not shown by the error either.
    let error = refused("[source.password]\na = 1\n", &[("POSTBOX__RELAY", "p@ss:/%word")]);
    assert!(!error.contains("word"), "{error}");
}

//! A build without a feature says so when it is asked for it. The tests are built with all features, so the question
//! goes to the program itself, in the build that the README asks for and in one without Kafka. That one is a debug build
//! and has the webhook, so that it shares all dependencies with the tests and costs three crates.

use crate::shell;
use anyhow::{Result, ensure};
use std::path::Path;
use std::process::Command;

#[derive(Debug)]
enum Build {
    WithoutKafka,
    OfTheReadme,
}

/// A configuration, what this build lacks for it, and the feature that has it.
struct Asked {
    config: &'static str,
    lacks: &'static str,
    feature: &'static str,
}

/// Which build, and what it is then asked for.
const BUILDS: [(Build, &[Asked]); 2] = [
    (
        Build::WithoutKafka,
        &[Asked {
            config: "[stream.main]\nsink = \"kafka\"\n[stream.main.kafka]\nbrokers = \"h:9092\"\n",
            lacks: "this build has no kafka sink",
            feature: "--features kafka",
        }],
    ),
    (
        Build::OfTheReadme,
        &[
            Asked {
                config: "[stream.main]\nsink = \"kafka\"\n[stream.main.kafka]\nbrokers = \"h:9093\"\nsecurity = \"ssl\"\n",
                lacks: "this build has no TLS/SASL",
                feature: "--features kafka-tls",
            },
            Asked {
                config: "[stream.main]\nsink = \"kafka\"\n[stream.main.kafka]\nbrokers = \"h:9093\"\n\
                         security = \"sasl_ssl\"\nuser = \"u\"\npassword = \"p\"\n",
                lacks: "this build has no TLS/SASL",
                feature: "--features kafka-tls",
            },
        ],
    ),
];

/// Asks each build for what it lacks.
///
/// # Errors
/// One does not say so, or does not name the feature.
pub(crate) fn check() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for (build, asked) in BUILDS {
        let binary = match build {
            Build::WithoutKafka => shell::build_without_kafka()?,
            Build::OfTheReadme => shell::build_postbox()?,
        };
        for Asked { config, lacks, feature } in asked {
            std::fs::write(folder.path().join("postbox.toml"), config)?;
            for command in ["relay", "check"] {
                let (ended, said) = ask(&binary, folder.path(), command)?;
                ensure!(
                    ended == Some(2) && said.contains(lacks) && said.contains(feature),
                    "`postbox {command}`, {build:?}, must end with 2 and say {lacks:?} and \
                     {feature:?}; it ended with {ended:?} and said:\n{said}\nasked for:\n{config}"
                );
            }
        }
    }
    Ok(())
}

/// How it ended, and all that it said.
fn ask(binary: &Path, folder: &Path, command: &str) -> Result<(Option<i32>, String)> {
    let output = Command::new(binary).arg(command).current_dir(folder).env_clear().output()?;
    let said = [output.stdout, output.stderr].concat();
    Ok((output.status.code(), String::from_utf8_lossy(&said).into_owned()))
}

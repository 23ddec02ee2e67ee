//! How a command ends when it does not end well: one line that says what, one that says what mends it, an exit code.

use crate::config::ConfigError;
use crate::screen;
use postbox_engine::SourceError;
use std::error::Error;
use std::fmt::Display;
use std::process::ExitCode;

/// The exit codes; `postbox --help` and the guide list them. A second signal ends with 128 + its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Something could not be done.
    Failed = 1,
    /// The command line or the configuration is wrong, as far as that is known without connecting; nothing was changed.
    Usage = 2,
    /// The command worked, and what it looked at is not well.
    Unwell = 3,
}

/// Why a command ended, for people and for scripts.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct Failure {
    /// What the process exits with.
    pub code: Code,
    /// What could not be done, and why.
    pub what: String,
    /// What mends it, if that is not in `what` already.
    pub remedy: Option<String>,
}

impl Failure {
    /// It was tried, and could not be done.
    pub fn failed(what: impl Into<String>) -> Failure {
        Failure { code: Code::Failed, what: what.into(), remedy: None }
    }
    /// It was not tried: command line or configuration are wrong.
    pub fn usage(what: impl Into<String>) -> Failure {
        Failure { code: Code::Usage, what: what.into(), remedy: None }
    }
    /// The findings are printed already; this only sets the exit code.
    pub fn unwell(what: impl Into<String>) -> Failure {
        Failure { code: Code::Unwell, what: what.into(), remedy: None }
    }
    /// The same, with what mends it.
    pub fn remedy(mut self, remedy: impl Into<String>) -> Failure {
        self.remedy = Some(remedy.into());
        self
    }

    /// Says it on stderr and gives the exit code.
    pub fn report(&self) -> ExitCode {
        screen::tell(&format!("postbox: {}", self.what));
        if let Some(remedy) = &self.remedy {
            screen::tell(&format!("  mend: {remedy}"));
        }
        ExitCode::from(self.code as u8)
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Failure {
        Failure::usage(error.what).remedy(error.remedy)
    }
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Failure {
        Failure::failed(with_causes(&error))
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        Failure::failed(format!("the output could not be written: {error}"))
    }
}

/// The error and its causes on one line, without what is said twice.
pub fn with_causes<E: Error + Display>(error: &E) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let line = error.to_string();
        // PostgreSQL's words come again behind "db error" and "ERROR: ", which are the driver's.
        let words = line.rsplit("ERROR: ").next().unwrap_or(&line);
        if words != "db error" && !text.contains(words) {
            text = format!("{text}: {line}");
        }
        cause = error.source();
    }
    text
}

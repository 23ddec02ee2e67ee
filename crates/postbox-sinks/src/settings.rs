//! What the options of several sinks share: durations as text, and secrets that are given directly or as a file.

use secrecy::SecretString;
use serde::{Deserialize, Deserializer, de::Error as _};
use std::path::Path;
#[cfg(feature = "webhook")]
use std::time::Duration;

/// A duration written as "30s", "5ms", "1m 30s".
#[cfg(feature = "webhook")]
pub(crate) fn duration<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(d)?;
    let parsed = text.parse::<jiff::SignedDuration>().ok().and_then(|d| Duration::try_from(d).ok());
    parsed.ok_or_else(|| D::Error::custom(format!("{text:?} is no duration; write \"30s\" or \"5ms\"")))
}

/// A secret that stands in the configuration. The error must not quote it.
pub(crate) fn secret<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SecretString>, D::Error> {
    let text = Option::<String>::deserialize(d).map_err(|_| D::Error::custom("a secret is a string"))?;
    Ok(text.map(SecretString::from))
}

/// The secret, from whichever of both places it was given in. One line break at the end of a file is the editor's.
pub(crate) fn read_secret(
    name: &str,
    direct: Option<&SecretString>,
    file: Option<&Path>,
) -> Result<Option<SecretString>, String> {
    match (direct, file) {
        (Some(_), Some(_)) => Err(format!("set `{name}` or `{name}_file`, not both")),
        (Some(secret), None) => Ok(Some(secret.clone())),
        (None, None) => Ok(None),
        (None, Some(file)) => {
            let text = std::fs::read_to_string(file).map_err(|e| format!("`{name}_file` {}: {e}", file.display()))?;
            let text = text.strip_suffix('\n').map_or(text.as_str(), |t| t.strip_suffix('\r').unwrap_or(t));
            Ok(Some(SecretString::from(text)))
        }
    }
}

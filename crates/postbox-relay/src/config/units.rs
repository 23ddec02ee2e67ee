//! The units of the configuration: durations ("30s"), sizes ("16MB") and secrets, which show themselves to nobody.

use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Deserializer, de};
use std::time::Duration;

/// A duration in a file: one or more numbers with units (`ms`, `s`, `m`, `h`, `d`), as in "30s" or "1h30m".
pub(super) fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    let hint = || format!("\"{text}\" is no duration; write a number with its unit (ms, s, m, h, d), as in \"30s\"");
    parse_units(&text, &DURATIONS).map(Duration::from_millis).ok_or_else(|| de::Error::custom(hint()))
}

/// A size in a file: "64KB", "16MB", "1GB"; powers of 1,024, as PostgreSQL reads them.
pub(super) fn size<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    let text = String::deserialize(from)?;
    let hint = || format!("\"{text}\" is no size; write a number with its unit (B, KB, MB, GB), as in \"16MB\"");
    let bytes = parse_units(&text, &SIZES).and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| de::Error::custom(hint()))
}

type Units = [(&'static str, u64)];
const DURATIONS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];
const SIZES: [(&str, u64); 4] = [("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10), ("B", 1)];

/// The sum of "NUMBER UNIT" pairs; `None` when that is not what the text is, or when it overflows.
fn parse_units(text: &str, units: &Units) -> Option<u64> {
    let mut rest = text.trim();
    let mut sum = None;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, tail) = rest.split_at(digits);
        let tail = tail.trim_start();
        let letters = tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let (_, factor) = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?;
        let part = number.parse::<u64>().ok()?.checked_mul(*factor)?;
        sum = Some(sum.unwrap_or(0u64).checked_add(part)?);
        rest = tail.trim_start();
    }
    sum
}

/// The largest unit that divides the value; durations of several units are shown in the smallest of them.
fn show_units(value: u64, units: &Units) -> String {
    let fits = |(_, factor): &&(&str, u64)| value >= *factor && value.is_multiple_of(*factor);
    let (unit, factor) = units.iter().find(fits).unwrap_or(&units[units.len() - 1]);
    format!("{}{unit}", value / factor)
}

pub(crate) fn show_duration(value: Duration) -> String {
    show_units(u64::try_from(value.as_millis()).unwrap_or(u64::MAX), &DURATIONS)
}

pub(super) fn show_size(bytes: usize) -> String {
    show_units(bytes as u64, &SIZES)
}

/// A value that may be read by the code that needs it and is `***` for everybody else: logs and errors.
#[derive(Clone, Deserialize)]
#[serde(from = "String")]
pub struct Secret(SecretString);

impl Secret {
    /// The value itself; the name is long so that each use stands out.
    pub fn expose_secret(&self) -> &str {
        self.0.expose_secret()
    }
}

impl From<String> for Secret {
    fn from(value: String) -> Secret {
        Secret(value.into())
    }
}

impl From<&str> for Secret {
    fn from(value: &str) -> Secret {
        Secret(value.into())
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

/// A database URL: the password in it is a secret, the rest is shown.
#[derive(Clone, Deserialize)]
#[serde(from = "String")]
pub struct DatabaseUrl(Secret);

impl DatabaseUrl {
    /// The URL with its password.
    pub fn expose_secret(&self) -> &str {
        self.0.expose_secret()
    }
}

impl From<String> for DatabaseUrl {
    fn from(value: String) -> DatabaseUrl {
        DatabaseUrl(value.into())
    }
}

impl From<&str> for DatabaseUrl {
    fn from(value: &str) -> DatabaseUrl {
        DatabaseUrl(value.into())
    }
}

impl std::fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&mask_url(self.expose_secret()))
    }
}

impl std::fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

/// Hides the password of a URL or of a keyword string, also of one too odd to parse: whatever stands between the
/// user's colon and the last `@` goes, and all from a `password=` on, since a quoted value may hold anything.
pub(super) fn mask_url(url: &str) -> String {
    let (shown, cut) = match password_key(url) {
        Some(at) => (&url[..at], "password=***"),
        None => (url, ""),
    };
    let Some((scheme, rest)) = shown.split_once("://") else { return format!("{shown}{cut}") };
    match rest.rsplit_once('@') {
        Some((user, host)) => match user.split_once(':') {
            Some((name, _)) => format!("{scheme}://{name}:***@{host}{cut}"),
            None => format!("{scheme}://{user}@{host}{cut}"),
        },
        // Behind the cut there may be an `@` that makes what is before it a password.
        None if !cut.is_empty() && rest.contains(':') => {
            format!("{scheme}://{}:***{cut}", rest.split(':').next().unwrap_or_default())
        }
        None => format!("{scheme}://{rest}{cut}"),
    }
}

/// Where a `password=` parameter begins.
fn password_key(text: &str) -> Option<usize> {
    let lower = text.to_ascii_lowercase();
    let begins = |at: &usize| *at == 0 || lower[..*at].ends_with(['?', '&', ' ']);
    lower.match_indices("password").map(|(at, _)| at).find(begins)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_sizes_are_read_and_shown() {
        for (text, ms) in [("30s", 30_000), ("200ms", 200), ("5m", 300_000), ("1h30m", 5_400_000), ("7 d", 604_800_000)]
        {
            assert_eq!(parse_units(text, &DURATIONS), Some(ms), "{text}");
        }
        for text in ["", "30", "s", "-5s", "1.5s", "5 parsecs", "99999999999999999999s", "18446744073709551615d"] {
            assert_eq!(parse_units(text, &DURATIONS), None, "{text}");
        }
        assert_eq!(parse_units("16MB", &SIZES), Some(16 << 20));
        assert_eq!(show_duration(Duration::from_secs(300)), "5m");
        assert_eq!(show_duration(Duration::from_millis(90_500)), "90500ms");
        assert_eq!(show_duration(Duration::ZERO), "0ms");
        assert_eq!((show_size(8 << 20), show_size(1_500)), ("8MB".into(), "1500B".into()));
    }

    #[test]
    fn case_t2_no_password_is_shown_however_odd() {
        for (url, shown) in [
            ("postgres://u:p%40ss@h:5432/db", "postgres://u:***@h:5432/db"),
            ("postgres://u:p@ss:/%word@h/db", "postgres://u:***@h/db"),
            ("postgres://u@h/db", "postgres://u@h/db"),
            ("postgres://u:mypassword@h/db", "postgres://u:***@h/db"),
            ("postgres://h/db?user=u&password=p@x", "postgres://h/db?user=u&password=***"),
            ("postgres://h:1/db?password=p@x", "postgres://h:***password=***"),
            ("host=h password='p@ss:/%word' user=u", "host=h password=***"),
            ("sqlite:postbox.db", "sqlite:postbox.db"),
        ] {
            let url = DatabaseUrl::from(url);
            assert_eq!(url.to_string(), shown);
            assert_eq!(format!("{url:?}"), shown);
        }
        assert_eq!(format!("{:?}", Secret::from("p@ss:/%word")), "***");
    }
}

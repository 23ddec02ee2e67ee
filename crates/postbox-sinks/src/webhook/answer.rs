//! What a receiver's answer means, or that there is none.
//!
//! | answer | outcome |
//! |---|---|
//! | 2xx | published |
//! | 410, 413 | rejected: gone for good, or too large for good |
//! | 429, 503 | unavailable: the receiver asks for a pause (`Retry-After` is honoured) |
//! | any other, redirects included | failed: an answer about this event |
//! | no connection, no such name, TLS refused | unavailable: nothing was sent |
//! | no answer in time, or the connection broke | failed: it may be this event that the receiver cannot stand |

use super::address::Private;
use postbox_engine::{SendError, SendErrorKind};
use reqwest::Response;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use std::fmt;
use std::time::Duration;
use url::Url;

/// The receiver, for texts: scheme, host and port. Paths and queries of webhook URLs often are secrets.
pub(super) struct Place(String);

/// A receiver cannot put a stream to sleep for longer than this.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);
/// Of an answer's body this much is read, so that its connection can be used again; its text is not used.
const BODY_MAX: usize = 64 << 10;

impl Place {
    pub(super) fn of(url: &Url) -> Place {
        Place(url.origin().ascii_serialization())
    }

    /// What the answer to a body of so many bytes means.
    pub(super) async fn status(&self, mut response: Response, bytes: usize) -> Result<(), SendError> {
        let status = response.status();
        let retry_after = retry_after(response.headers());
        let mut read = 0;
        while let Ok(Some(chunk)) = response.chunk().await {
            read += chunk.len();
            if read > BODY_MAX {
                break;
            }
        }
        let too_large =
            format!("; the body has {bytes} bytes: raise the receiver's limit, or make the payload smaller");
        let (kind, more) = match status.as_u16() {
            200..=299 => return Ok(()),
            300..=399 => (SendErrorKind::Failed, "; redirects are not followed, set the URL to where it leads"),
            401 | 403 => (SendErrorKind::Failed, "; does the receiver know the secret, and is its clock right?"),
            410 => (SendErrorKind::Rejected, "; the receiver wants no more events"),
            413 => (SendErrorKind::Rejected, &*too_large),
            429 | 503 => (SendErrorKind::Unavailable, ""),
            _ => (SendErrorKind::Failed, ""),
        };
        let mut error = SendError::new(kind, format!("{self} answered {status}{more}"));
        error.retry_after = retry_after;
        Err(error)
    }

    pub(super) fn no_answer(&self, error: &reqwest::Error) -> SendError {
        let cause = root(error);
        if cause.downcast_ref::<Private>().is_some() {
            return SendError::new(SendErrorKind::Failed, format!("{self}: {cause}"));
        }
        if error.is_connect() {
            return SendError::new(SendErrorKind::Unavailable, format!("{self} cannot be reached: {cause}"));
        }
        let what =
            if error.is_timeout() { "did not answer in time".into() } else { format!("broke the connection: {cause}") };
        SendError::new(SendErrorKind::Failed, format!("{self} {what}"))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The innermost cause: the outer ones quote the URL.
fn root<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a (dyn std::error::Error + 'static) {
    let mut root = error;
    while let Some(source) = root.source() {
        root = source;
    }
    root
}

/// Seconds, or a date; a date that cannot be read, or has passed, asks for nothing.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let pause = match text.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let at = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
            Duration::try_from(at.duration_since(jiff::Timestamp::now())).ok()?
        }
    };
    Some(pause.min(RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let asks = |text: &str| retry_after(&HeaderMap::from_iter([(RETRY_AFTER, text.parse().unwrap())]));
        assert_eq!(asks("7"), Some(Duration::from_secs(7)));
        assert_eq!(asks("99999999999"), Some(RETRY_AFTER_MAX));
        assert_eq!(asks("Tue, 31 Dec 2999 23:59:59 GMT"), Some(RETRY_AFTER_MAX));
        assert_eq!(asks("Wed, 21 Oct 2015 07:28:00 GMT"), None);
        assert_eq!(asks("soon"), None);
        assert_eq!(asks("-1"), None);
    }
}

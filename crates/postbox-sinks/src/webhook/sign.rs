//! The signature of Standard Webhooks 1.0: HMAC-SHA256 over id, timestamp and body.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, Mac};
use reqwest::header::{HeaderMap, HeaderValue};
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;

/// Keys, ready for use.
pub(super) struct Signer(Vec<Hmac<Sha256>>);

const REMEDY: &str = "make one: echo whsec_$(head -c 32 /dev/urandom | base64)";

impl Signer {
    pub(super) fn new(secrets: Option<&SecretString>) -> Result<Signer, String> {
        let secrets = secrets.ok_or_else(|| format!("no `secret_file`, and no `secret`; {REMEDY}"))?;
        let key = |text: &str| {
            let bytes = text.strip_prefix("whsec_").and_then(|text| STANDARD.decode(text).ok());
            let bytes = bytes.filter(|bytes| (16..=64).contains(&bytes.len()));
            let bytes =
                bytes.ok_or_else(|| format!("`secret` is not whsec_ and base64 of 16 to 64 bytes; {REMEDY}"))?;
            Ok(Hmac::new_from_slice(&bytes).expect("HMAC takes keys of any length"))
        };
        let keys: Vec<_> = secrets.expose_secret().split_whitespace().map(key).collect::<Result<_, String>>()?;
        if keys.is_empty() {
            return Err(format!("`secret` is empty; {REMEDY}"));
        }
        Ok(Signer(keys))
    }

    pub(super) fn sign(&self, id: &str, seconds: u64, body: &[u8], into: &mut HeaderMap) {
        let mut signatures = String::new();
        for key in &self.0 {
            let mut mac = key.clone();
            mac.update(format!("{id}.{seconds}.").as_bytes());
            mac.update(body);
            if !signatures.is_empty() {
                signatures.push(' ');
            }
            signatures.push_str("v1,");
            STANDARD.encode_string(mac.finalize().into_bytes(), &mut signatures);
        }
        let text = |text: &str| HeaderValue::from_str(text).expect("hex, digits and base64 are header values");
        into.insert("webhook-id", text(id));
        into.insert("webhook-timestamp", text(&seconds.to_string()));
        into.insert("webhook-signature", text(&signatures));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signer(text: &str) -> Result<Signer, String> {
        Signer::new(Some(&SecretString::from(text)))
    }

    #[test]
    fn the_example_of_the_standard() {
        let mut headers = HeaderMap::new();
        let key = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        signer(key).unwrap().sign(
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1_614_265_330,
            br#"{"test": 2432232314}"#,
            &mut headers,
        );
        assert_eq!(headers["webhook-signature"], "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        assert_eq!(headers["webhook-id"], "msg_p5jXN8AQM9LWM0D4loKWxJek");
        assert_eq!(headers["webhook-timestamp"], "1614265330");

        let two = format!("{key} whsec_{}", STANDARD.encode([7; 32]));
        signer(&two).unwrap().sign(
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1_614_265_330,
            br#"{"test": 2432232314}"#,
            &mut headers,
        );
        let both: Vec<&str> = headers["webhook-signature"].to_str().unwrap().split(' ').collect();
        assert_eq!((both.len(), both[0]), (2, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="));
        assert!(both[1].starts_with("v1,"));
    }

    #[test]
    fn case_t2_a_bad_secret_is_refused_and_not_quoted() {
        for bad in ["", "hunter2", "whsec_hunter2!", "whsec_aHVudGVyMg=="] {
            let error = signer(bad).err().unwrap();
            assert!(error.contains("make one:") && !error.contains("hunter2") && !error.contains("aHVu"), "{error}");
        }
        assert!(Signer::new(None).err().unwrap().contains("secret_file"));
    }
}

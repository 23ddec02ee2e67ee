//! The database URL as libpq writes it, and TLS as it asks for it. Verified in full unless the URL says otherwise, and
//! never a quiet step down to plain text: `allow` and `prefer` are refused by name. No error shows more of the URL
//! than host and port.

use crate::postgres::error::refused;
use postbox_engine::SourceError;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};

/// How a connection is protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protection {
    Plain,
    /// Encrypted, to whomever answers.
    Require,
    /// The certificate's chain is checked, its name is not.
    VerifyCa,
    VerifyFull,
}

/// Where to connect to and how, read from a URL or a key/value string.
pub(crate) struct Target {
    pub(crate) config: Config,
    pub(crate) protection: Protection,
    root: Option<String>,
}

impl Target {
    /// # Errors
    /// `Refused` when the URL cannot be read. The message never holds a part of it but the names of options.
    pub(crate) fn parse(url: &str) -> Result<Target, SourceError> {
        let (rest, mode, root) = take_tls_options(url);
        let unreadable = || {
            refused(
                "the database URL cannot be read; it is postgres://USER:PASSWORD@HOST:PORT/DATABASE, and characters such as \
                 @ : / % in the password must be percent-encoded",
            )
        };
        // A password with a bare @ and / would leave its rest to be taken for a host and a database.
        if rest.contains("://") && rest.split('?').next().is_some_and(|base| base.matches('@').count() > 1) {
            return Err(unreadable());
        }
        let mut config = Config::from_str(&rest).map_err(|_| unreadable())?;
        if config.get_hosts().is_empty() {
            config.host("127.0.0.1");
        }
        let local = config.get_hosts().iter().all(is_local);
        let protection = match mode.as_deref() {
            None if local => Protection::Plain,
            None | Some("verify-full") => Protection::VerifyFull,
            Some("disable") => Protection::Plain,
            Some("require") if root.is_none() => Protection::Require,
            Some("require" | "verify-ca") => Protection::VerifyCa, // as libpq does where a root is given
            Some("allow" | "prefer") => {
                return Err(refused(
                    "sslmode=allow and sslmode=prefer may fall back to plain text and are not taken; \
                     use verify-full, verify-ca, require, or disable",
                ));
            }
            Some(_) => return Err(refused("sslmode is one of verify-full, verify-ca, require, disable")),
        };
        config.ssl_mode(if protection == Protection::Plain { SslMode::Disable } else { SslMode::Require });
        Ok(Target { config, protection, root })
    }

    /// # Errors
    /// `Refused` when a file that the URL names cannot be used.
    pub(crate) fn check(&self) -> Result<(), SourceError> {
        if self.root.is_some() && self.protection != Protection::Plain { self.roots().map(drop) } else { Ok(()) }
    }

    /// The socket's file, where the host is a folder with one.
    pub(crate) fn socket(&self) -> Option<PathBuf> {
        let port = self.config.get_ports().first().unwrap_or(&5432);
        match self.config.get_hosts() {
            [Host::Unix(folder)] => Some(folder.join(format!(".s.PGSQL.{port}"))),
            _ => None,
        }
    }

    /// The hosts and ports, for people.
    pub(crate) fn places(&self) -> String {
        let ports = self.config.get_ports();
        let place = |(n, host): (usize, &Host)| {
            let port = ports.get(n).or(ports.first()).unwrap_or(&5432);
            match host {
                Host::Tcp(name) => format!("{name}:{port}"),
                Host::Unix(folder) => format!("{} (port {port})", folder.display()),
            }
        };
        self.config.get_hosts().iter().enumerate().map(place).collect::<Vec<_>>().join(", ")
    }

    /// The TLS settings; the provider is ring, whatever the process has installed.
    pub(crate) fn tls(&self) -> Result<ClientConfig, SourceError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .expect("ring speaks TLS 1.2 and 1.3");
        if self.protection == Protection::Require {
            let verifier = Arc::new(Lenient { provider, chain: None });
            return Ok(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth());
        }
        let roots = Arc::new(self.roots()?);
        if self.protection == Protection::VerifyCa {
            let chain = WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
                .build()
                .map_err(|e| refused(format!("sslrootcert: {e}")))?;
            let verifier = Arc::new(Lenient { provider, chain: Some(chain) });
            return Ok(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth());
        }
        Ok(builder.with_root_certificates(roots).with_no_client_auth())
    }

    fn roots(&self) -> Result<RootCertStore, SourceError> {
        let mut roots = RootCertStore::empty();
        if let Some(path) = self.root.as_deref().filter(|r| *r != "system") {
            let unreadable = |e: &dyn std::fmt::Display| refused(format!("sslrootcert {path}: {e}"));
            for certificate in CertificateDer::pem_file_iter(path).map_err(|e| unreadable(&e))? {
                roots.add(certificate.map_err(|e| unreadable(&e))?).map_err(|e| unreadable(&e))?;
            }
        } else if self.protection != Protection::Plain {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        if roots.is_empty() && self.protection != Protection::Plain {
            return Err(refused(
                "no certificate authority is known to check the database's certificate with; name one by sslrootcert=FILE",
            ));
        }
        Ok(roots)
    }
}

fn is_local(host: &Host) -> bool {
    match host {
        Host::Tcp(name) => {
            name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
        }
        #[cfg(unix)]
        Host::Unix(_) => true,
    }
}

/// The driver knows neither `verify-full` nor `sslrootcert`: they are taken out before it reads the rest.
fn take_tls_options(url: &str) -> (String, Option<String>, Option<String>) {
    let (mut mode, mut root) = (None, None);
    let mut keep = |pair: &str| match pair.split_once('=') {
        Some(("sslmode", value)) => {
            mode = Some(value.trim_matches('\'').to_string());
            false
        }
        Some(("sslrootcert", value)) => {
            root = Some(percent_decoded(value.trim_matches('\'')));
            false
        }
        _ => true,
    };
    let rest = if !url.contains("://") {
        url.split(' ').filter(|pair| keep(pair)).collect::<Vec<_>>().join(" ")
    } else if let Some((base, query)) = url.rsplit_once('?') {
        let query = query.split('&').filter(|pair| keep(pair)).collect::<Vec<_>>().join("&");
        if query.is_empty() { base.to_string() } else { format!("{base}?{query}") }
    } else {
        url.to_string()
    };
    (rest, mode, root)
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let hex = tail.get(..2).and_then(|h| std::str::from_utf8(h).ok()).and_then(|h| u8::from_str_radix(h, 16).ok());
        match (first, hex) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Checks signatures always, the chain where there is one to check against, and the host's name never.
#[derive(Debug)]
struct Lenient {
    provider: Arc<CryptoProvider>,
    chain: Option<Arc<WebPkiServerVerifier>>,
}

impl ServerCertVerifier for Lenient {
    fn verify_server_cert(
        &self,
        end: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(chain) = &self.chain else { return Ok(ServerCertVerified::assertion()) };
        match chain.verify_server_cert(end, between, name, ocsp, now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verdict => verdict,
        }
    }
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn protection(url: &str) -> Protection {
        Target::parse(url).map(|t| t.protection).unwrap()
    }

    #[test]
    fn case_t1_tls_is_verified_in_full_unless_the_url_says_otherwise() {
        assert_eq!(protection("postgres://u@db.example.org/shop"), Protection::VerifyFull);
        assert_eq!(protection("host=db.example.org user=u sslmode=require"), Protection::Require);
        assert_eq!(protection("postgres://u@db/shop?sslmode=require&sslrootcert=%2Fca.pem"), Protection::VerifyCa);
        assert_eq!(protection("postgres://u@db/shop?sslmode=disable"), Protection::Plain);
        assert_eq!(protection("postgres://u@127.0.0.1:5433/shop"), Protection::Plain);
        assert_eq!(protection("postgres://u@127.0.0.1/shop?sslmode=verify-full"), Protection::VerifyFull);
        for mode in ["prefer", "allow"] {
            let error = Target::parse(&format!("postgres://u@127.0.0.1/shop?sslmode={mode}")).err().unwrap();
            assert!(error.message.contains("plain text"), "{error}");
        }
    }

    #[test]
    fn case_t2_a_bad_url_is_explained_without_its_password() {
        for url in ["postgres://u:p@ss:/%word@h/d", "postgres://u:hunter2@h:port/d", "host=h port=x password=hunter2"] {
            let error = Target::parse(url).err().unwrap();
            assert!(!error.message.contains("hunter2") && !error.message.contains("word@"), "{error}");
            assert!(error.message.contains("percent-encoded"), "{error}");
        }
        assert_eq!(
            Target::parse("postgres://u:p%40ss%3A%2F%25word@h/d").unwrap().config.get_password(),
            Some(&b"p@ss:/%word"[..])
        );
    }
}

//! Which addresses may be reached. Names are judged by the addresses that are then connected to, so that no answer
//! of a name server can change in between.

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use url::{Host, Url};

/// Resolves names, and leaves private addresses out.
pub(super) struct Resolver {
    pub(super) allow_private: bool,
}

/// All addresses of a host are private.
#[derive(Debug, thiserror::Error)]
#[error("{0} is a private address (this machine's, or of its own network); allow_private = true allows it")]
pub(super) struct Private(String);

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let allow_private = self.allow_private;
        Box::pin(async move {
            let addresses = resolve(name.as_str(), allow_private).await?;
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

async fn resolve(name: &str, allow_private: bool) -> Result<Vec<SocketAddr>, AnyError> {
    let all: Vec<SocketAddr> = tokio::net::lookup_host((name, 0)).await?.collect();
    let allowed: Vec<SocketAddr> = all.iter().copied().filter(|a| allow_private || !is_private(a.ip())).collect();
    if allowed.is_empty() && !all.is_empty() {
        return Err(Private(name.to_owned()).into());
    }
    Ok(allowed)
}

/// Reads a URL. An address that stands in it is judged here, since no resolver ever sees it.
pub(super) fn check_url(text: &str, allow_private: bool) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|e| format!("no URL: {e}"))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(format!("scheme {:?} is neither https nor http", url.scheme()));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("user and password in a URL end up in logs; the signature tells the receiver who sends".into());
    }
    let address = match url.host() {
        None => return Err("no host".into()),
        Some(Host::Domain(_)) => None,
        Some(Host::Ipv4(ip)) => Some(IpAddr::V4(ip)),
        Some(Host::Ipv6(ip)) => Some(IpAddr::V6(ip)),
    };
    match address {
        Some(ip) if !allow_private && is_private(ip) => Err(Private(ip.to_string()).to_string()),
        _ => Ok(url),
    }
}

/// All that is not plainly a public host: loopback, private, link-local (cloud metadata), shared, benchmarking,
/// documentation, multicast, reserved; and IPv4 that travels inside IPv6.
pub(super) fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_private_v4(ip),
        IpAddr::V6(ip) => is_private_v6(ip),
    }
}

fn is_private_v4(ip: Ipv4Addr) -> bool {
    let [a, b, c, _] = ip.octets();
    matches!(
        (a, b, c),
        (0 | 10 | 127 | 224.., ..)
            | (100, 64..=127, _)
            | (169, 254, _)
            | (172, 16..=31, _)
            | (192, 168, _)
            | (192, 0, 0 | 2)
            | (192, 88, 99)
            | (198, 18 | 19, _)
            | (198, 51, 100)
            | (203, 0, 113)
    )
}

fn is_private_v6(ip: Ipv6Addr) -> bool {
    let s = ip.segments();
    let tail = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        is_private_v4(Ipv4Addr::new(a, b, c, d))
    };
    match s {
        [0, 0, 0, 0, 0, 0xffff | 0, high, low] => tail(high, low), // mapped and compatible; :: and ::1 are in 0.0.0.0/8
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => tail(high, low),  // NAT64
        [0x2002, high, low, ..] => tail(high, low),                // 6to4
        // Public hosts are in 2000::/3, but for documentation and Teredo.
        [first, second, ..] => first >> 13 != 1 || (first == 0x2001 && (second == 0xdb8 || second == 0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_private() {
        for ip in [
            "127.0.0.1",
            "127.255.0.9",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fe80::1",
            "fd00::1",
            "fc00::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::1",
            "2001:db8::1",
            "::7f00:1",
        ] {
            assert!(is_private(ip.parse().unwrap()), "{ip}");
        }
        for ip in
            ["1.1.1.1", "172.15.0.1", "172.32.0.1", "100.63.0.1", "192.167.1.1", "2606:4700::1111", "::ffff:8.8.8.8"]
        {
            assert!(!is_private(ip.parse().unwrap()), "{ip}");
        }
    }

    #[test]
    fn case_k9_private_addresses_are_refused_however_they_are_spelled() {
        for text in [
            "http://127.0.0.1/",
            "http://127.1/",
            "http://0x7f000001/",
            "http://2130706433/",
            "http://0177.0.0.1/",
            "http://[::1]/",
            "http://[::ffff:127.0.0.1]/",
            "https://169.254.169.254/latest/meta-data",
        ] {
            assert!(check_url(text, false).unwrap_err().contains("allow_private = true"), "{text}");
            check_url(text, true).unwrap();
        }
        for text in ["ftp://a/", "file:///etc/passwd", "https://", "nonsense", "https://u:p@example.org/"] {
            let error = check_url(text, true).unwrap_err();
            assert!(!error.contains("u:p"), "{error}");
        }
    }

    #[tokio::test]
    async fn case_k9_names_are_judged_by_their_addresses() {
        let error = resolve("localhost", false).await.unwrap_err();
        assert!(error.downcast_ref::<Private>().is_some(), "{error}");
        assert!(!resolve("localhost", true).await.unwrap().is_empty());
    }
}

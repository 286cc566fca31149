//! Where rank 0 can be reached, as a user writes it.

use std::net::IpAddr;
use std::str::FromStr;

/// `host:port` with a name, an IPv4 address or an IPv6 address in brackets; a port alone is one on loopback.
pub(super) fn parse(text: &str) -> Option<String> {
    let (host, port) = text.rsplit_once(':').unwrap_or(("127.0.0.1", text));
    let host_ok = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(v6) => matches!(IpAddr::from_str(v6), Ok(IpAddr::V6(_))),
        None => !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_')),
    };
    let port_ok = port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0);
    (host_ok && port_ok).then(|| format!("{host}:{port}"))
}

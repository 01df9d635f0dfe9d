//! The URIs of NBD servers, as libnbd and QEMU have them: `nbd://HOST[:PORT]/EXPORT` and
//! `nbd+unix:///EXPORT?socket=PATH`.

use std::net::IpAddr;
use std::path::PathBuf;

use super::params::{Params, block, decoded, duration, named, switch};
use super::{Base, DELAY_MAX_NS};
use crate::error::Error;

/// The port of the protocol.
const PORT: u16 = 10809;
/// The longest name of an export.
const EXPORT_BYTES_MAX: usize = nbdproto::STRING_BYTES_MAX;
/// How long requests wait for a lost server by default.
const RECONNECT_NS: u64 = 30_000_000_000;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NbdServer {
    /// A name or an address, and a port.
    Tcp(String, u16),
    /// The name of a Unix socket.
    Unix(PathBuf),
}

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NbdExport {
    pub server: NbdServer,
    pub export: String,
    pub fua: bool,
    pub read_only: bool,
    /// How long requests wait for a lost server, in nanoseconds.
    pub reconnect_ns: u64,
    pub block: Option<u32>,
}

impl std::fmt::Display for NbdExport {
    /// For messages.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.server {
            NbdServer::Tcp(host, port) if host.contains(':') => {
                write!(f, "nbd://[{host}]:{port}/{}", self.export)
            }
            NbdServer::Tcp(host, port) => write!(f, "nbd://{host}:{port}/{}", self.export),
            NbdServer::Unix(path) => {
                write!(f, "nbd+unix:///{}?socket={}", self.export, path.display())
            }
        }
    }
}

/// Parses what follows the scheme.
pub(super) fn nbd(scheme: &str, body: &str, mut params: Params) -> Result<Base, Error> {
    let expected = match scheme {
        "nbd" => "nbd://HOST[:PORT]/EXPORT",
        _ => "nbd+unix:///EXPORT?socket=PATH",
    };
    let wrong = |why: &str| named(scheme, &format!("{why}: write {expected}"));
    let body = body.strip_prefix("//").ok_or_else(|| wrong("needs two slashes"))?;
    let (authority, export) = body.split_once('/').unwrap_or((body, ""));
    let export = decoded(export)?;
    if export.len() > EXPORT_BYTES_MAX {
        return Err(wrong("the name of an export has at most 4096 bytes"));
    }
    let socket = params.take("socket", |text| match text.starts_with('/') {
        true => Ok(PathBuf::from(text)),
        false => Err("must be an absolute path".to_owned()),
    })?;
    let server = match (scheme, socket) {
        ("nbd", None) => tcp(authority).ok_or_else(|| wrong("needs a host"))?,
        ("nbd", Some(_)) => return Err(named("nbd", "socket=PATH belongs to nbd+unix:")),
        (_, Some(path)) if authority.is_empty() => NbdServer::Unix(path),
        (_, Some(_)) => return Err(wrong("has no host")),
        (_, None) => return Err(wrong("needs socket=PATH")),
    };
    let fua = params.take("write", super::is_through)?;
    let read_only = params.take("readonly", switch)?;
    let reconnect_ns = params.take("reconnect-delay", |text| {
        // A number without a unit is one of seconds, as QEMU has it.
        let seconds = text.parse::<u64>().ok().map(|seconds| seconds.saturating_mul(1_000_000_000));
        match seconds.map_or_else(|| duration(text), Ok)? {
            ns if ns <= DELAY_MAX_NS => Ok(ns),
            _ => Err("must be at most an hour".to_owned()),
        }
    })?;
    let block = params.take("block", block)?;
    params.end(scheme, "socket, write, readonly, reconnect-delay, block")?;
    Ok(Base::Nbd(NbdExport {
        server,
        export,
        fua: fua.unwrap_or(false),
        read_only: read_only.unwrap_or(false),
        reconnect_ns: reconnect_ns.unwrap_or(RECONNECT_NS),
        block,
    }))
}

/// `HOST`, `HOST:PORT`, `[ADDRESS]` or `[ADDRESS]:PORT`.
fn tcp(authority: &str) -> Option<NbdServer> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            host.parse::<std::net::Ipv6Addr>().ok()?;
            (host, port)
        }
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let port = match port.strip_prefix(':') {
        Some(port) => port.parse().ok().filter(|port| *port != 0)?,
        None if port.is_empty() => PORT,
        None => return None,
    };
    let of_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let possible = host.parse::<IpAddr>().is_ok() || host.chars().all(of_name);
    (possible && !host.is_empty()).then(|| NbdServer::Tcp(host.to_owned(), port))
}

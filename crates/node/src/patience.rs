//! Patience with resources that a killed process still holds: a port, a lock, a socket's name, an
//! image.
//!
//! The kernel tears down an io_uring ring in the background after its process has ended, and the
//! ring's operations hold files and sockets until then: 1.5 s after `kill -9` were observed. So a
//! start retries for a while if something is in use, and logs that.
//!
//! A holder that is alive will not go away, so the start is refused soon if the kernel shows one.
//! It still gets a moment, because a process that is being killed looks alive until its files are
//! closed.

use std::cell::Cell;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use reactor::Core;

use crate::machine::pseudo_file;

/// How long the resources of a killed process may outlive it.
pub(crate) const LINGER_NS: u64 = 5_000_000_000;
/// How long a holder must be seen alive.
const ALIVE_NS: u64 = 300_000_000;
/// Time between two attempts.
const RETRY_NS: u64 = 1_000_000;
/// Time between two searches for the holder.
const LOOK_NS: u64 = 50_000_000;

/// A resource that a start needs exclusively.
#[derive(Clone, Debug)]
pub(crate) enum Exclusive {
    Port(SocketAddr),
    /// A locked file.
    File(PathBuf),
    /// A listening Unix socket.
    Socket(PathBuf),
    /// A resource whose holder cannot be found.
    Unknown(String),
}

impl std::fmt::Display for Exclusive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Exclusive::Port(addr) => write!(f, "{addr}"),
            Exclusive::File(path) | Exclusive::Socket(path) => write!(f, "{}", path.display()),
            Exclusive::Unknown(what) => f.write_str(what),
        }
    }
}

impl Exclusive {
    /// A process that has it open, if the kernel tells. Only root sees other users' processes.
    pub fn holder(&self) -> Option<u32> {
        match self {
            Exclusive::Port(addr) => {
                let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(Path::new).map(pseudo_file);
                let inodes =
                    tables.iter().flatten().flat_map(|table| listening(table, addr.port()));
                having_open(&inodes.map(|inode| format!("socket:[{inode}]")).collect::<Vec<_>>())
            }
            Exclusive::File(path) => {
                let path = path.canonicalize().ok()?;
                having_open(&[path.to_str()?.to_owned()])
            }
            Exclusive::Socket(path) => {
                let table = pseudo_file(Path::new("/proc/net/unix"))?;
                let inodes = bound_to(&table, path.to_str()?);
                having_open(&inodes.map(|inode| format!("socket:[{inode}]")).collect::<Vec<_>>())
            }
            Exclusive::Unknown(_) => None,
        }
    }
}

/// The inodes of sockets that listen on a port, from a table such as `/proc/net/tcp`.
fn listening(table: &str, port: u16) -> impl Iterator<Item = &str> {
    table.lines().filter_map(move |line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let local = words.get(1)?.rsplit_once(':')?.1;
        let is_it = u16::from_str_radix(local, 16) == Ok(port) && words.get(3) == Some(&"0A");
        is_it.then(|| words.get(9).copied())?
    })
}

/// The inodes of sockets that are bound to a path, from `/proc/net/unix`.
fn bound_to<'a>(table: &'a str, path: &str) -> impl Iterator<Item = &'a str> {
    table.lines().filter_map(move |line| {
        let mut words = line.split_whitespace();
        let inode = words.nth(6)?;
        (words.next() == Some(path)).then_some(inode)
    })
}

/// A process that has one of these open, by the targets of the links in `/proc/PID/fd`.
#[expect(clippy::disallowed_methods, reason = "searches for the holder after a start has failed")]
fn having_open(names: &[String]) -> Option<u32> {
    if names.is_empty() {
        return None;
    }
    let has = |pid: &u32| {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd"));
        open.into_iter().flatten().flatten().any(|entry| {
            std::fs::read_link(entry.path())
                .is_ok_and(|link| names.iter().any(|name| link == Path::new(name)))
        })
    };
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(has)
}

/// One wait for a resource that is in use.
pub(crate) struct Patience {
    what: Exclusive,
    since_ns: Cell<Option<u64>>,
    looked_ns: Cell<Option<u64>>,
    alive_since_ns: Cell<Option<u64>>,
}

impl Patience {
    pub fn with(what: Exclusive) -> Patience {
        Patience {
            what,
            since_ns: Cell::new(None),
            looked_ns: Cell::new(None),
            alive_since_ns: Cell::new(None),
        }
    }

    /// Whether to retry, now that it was in use again.
    pub fn lasts(&self, core: &Core) -> bool {
        self.lasts_at(core.now_exact_ns(), core.is_simulated())
    }

    /// Like [`Patience::lasts`], for a caller without a core; `blind` does not search for the
    /// holder.
    pub fn lasts_at(&self, now_ns: u64, blind: bool) -> bool {
        let since_ns = self.since_ns.get().unwrap_or_else(|| {
            tracing::info!("{} is in use: trying again for a while", self.what);
            now_ns
        });
        self.since_ns.set(Some(since_ns));
        if !blind && self.looked_ns.get().is_none_or(|looked_ns| now_ns >= looked_ns + LOOK_NS) {
            self.looked_ns.set(Some(now_ns));
            let alive = self.what.holder().is_some();
            let since_ns = self.alive_since_ns.get().unwrap_or(now_ns);
            self.alive_since_ns.set(alive.then_some(since_ns));
        }
        let is_alive = self.alive_since_ns.get().is_some_and(|at_ns| now_ns >= at_ns + ALIVE_NS);
        now_ns < since_ns + LINGER_NS && !is_alive
    }
}

/// Repeats `attempt` until it succeeds or `again` refuses its error. Suspends between the attempts.
/// Polls, because no other process tells when it releases a file or a socket.
pub(crate) async fn patiently<T, E>(
    core: &Core,
    again: impl Fn(&E) -> bool,
    attempt: impl AsyncFn() -> Result<T, E>,
) -> Result<T, E> {
    loop {
        match attempt().await {
            Err(error) if again(&error) => core.sleep_ns(RETRY_NS).await,
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_tables_name_the_listener() {
        let tcp = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            0: 0100007F:18EB 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 777 1 0 100 0 0 10 0\n\
            1: 0100007F:18EB 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 888 1 0 20 4 30 10 -1\n";
        assert_eq!(listening(tcp, 6379).collect::<Vec<_>>(), ["777"]);
        assert_eq!(listening(tcp, 6380).count(), 0);
        let unix = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 12345 /run/admin.sock\n\
            0000000000000000: 00000003 00000000 00000000 0001 03 12346\n";
        assert_eq!(bound_to(unix, "/run/admin.sock").collect::<Vec<_>>(), ["12345"]);
        assert_eq!(bound_to(unix, "/run/other.sock").count(), 0);
    }

    #[test]
    fn a_living_holder_is_found_and_not_waited_for_long() {
        let held = reactor::listen(([127, 0, 0, 1], 0).into(), false).unwrap();
        let held = std::net::TcpListener::from(held);
        let port = Exclusive::Port(held.local_addr().unwrap());
        assert_eq!(port.holder(), Some(std::process::id()));
        let patience = Patience::with(port);
        assert!(patience.lasts_at(0, false), "it may be about to end");
        assert!(patience.lasts_at(ALIVE_NS - 1, false));
        assert!(!patience.lasts_at(ALIVE_NS, false));
        drop(held);
    }

    #[test]
    fn a_resource_without_a_holder_is_tried_for_a_while() {
        let patience = Patience::with(Exclusive::File("/nowhere/LOCK".into()));
        assert!(patience.lasts_at(7, false));
        assert!(patience.lasts_at(7 + LINGER_NS - 1, false));
        assert!(!patience.lasts_at(7 + LINGER_NS, false));
    }
}

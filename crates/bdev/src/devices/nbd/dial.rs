//! Connections to a server, made here or by another process.
//!
//! A confined process cannot connect to anything. It has one end of a line ([`OwnedFd`] of a packet
//! socket); the process that has the other end connects whenever a packet comes, always to the
//! server that the URI names, and sends the connection back. Several processes may have an end of
//! the line and ask at the same time: one connection is as good as the other. So a line is handed
//! over like any descriptor of a device. A process that asks first takes out of the line what it
//! finds there: answers to attempts that were given up. If it takes the answer that another process
//! waits for, that process finds none in time, as if the server were away.
//!
//! A name of a host is looked up by a thread of its own whenever a connection is made, because the
//! system's call blocks.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};

use reactor::reply::reply;
use reactor::{Class, Core, Socket, UnixPackets};

use crate::uri::{NbdServer, nbd_of};

/// The longest packet of a line, in bytes.
const PACKET_BYTES: usize = 256;
/// Pause of the process that connects after each connection, in nanoseconds.
const PAUSE_NS: u64 = 5_000_000;

/// How connections to a server are made.
pub enum Dial {
    /// By this process.
    Here(NbdServer),
    /// By the process at the other end.
    There(UnixPackets),
}

impl Dial {
    /// Begins a connection: what is received first tells whether it was made. A name may have
    /// several addresses; the `nth` attempt uses another one than the attempt before.
    pub async fn connect(&self, core: &Core, nth: u32) -> io::Result<Socket> {
        match self {
            Dial::Here(NbdServer::Unix(path)) => {
                Socket::from_fd(core, reactor::connect_unix(path)?)
            }
            Dial::Here(NbdServer::Tcp(host, port)) => {
                core.connect(address(host, *port, nth).await?)
            }
            Dial::There(line) => {
                // Answers to attempts that were given up.
                while line.try_recv(PACKET_BYTES).is_ok_and(|(said, _)| !said.is_empty()) {}
                line.try_send(&nth.to_le_bytes(), &[])?;
                let (said, fds) = line.recv(PACKET_BYTES).await?;
                match fds.into_iter().next() {
                    Some(fd) => Socket::from_fd(core, fd),
                    None if said.is_empty() => Err(io::ErrorKind::ConnectionAborted.into()),
                    None => Err(io::Error::other(String::from_utf8_lossy(&said).into_owned())),
                }
            }
        }
    }
}

/// Makes connections for the process at the other end of a line, to the server that a URI names,
/// until that process has ended. Does nothing if the URI names none.
///
/// # Errors
/// When this is not the end of a line.
pub fn serve_line(core: &Core, uri: &str, line: OwnedFd) -> io::Result<()> {
    let line = UnixPackets::from_fd(core, line)?;
    let Some(export) = nbd_of(uri) else { return Ok(()) };
    let inner = core.clone();
    core.spawn(Class::Background, async move {
        // Its other side has gone, or breaks the rules.
        while let Ok((asked, fds)) = line.recv(PACKET_BYTES).await
            && fds.is_empty()
            && let Ok(nth) = asked.try_into()
        {
            let begun = begin(&export.server, u32::from_le_bytes(nth)).await;
            let sent = match begun {
                Ok(fd) => line.try_send(b"connected", &[fd.as_fd()]),
                Err(error) => {
                    let mut text = error.to_string();
                    text.truncate(text.floor_char_boundary(PACKET_BYTES));
                    line.try_send(text.as_bytes(), &[])
                }
            };
            // A process that takes no answers gets none.
            drop(sent);
            inner.sleep_ns(PAUSE_NS).await;
        }
    });
    Ok(())
}

/// Begins a connection for another process.
async fn begin(server: &NbdServer, nth: u32) -> io::Result<OwnedFd> {
    match server {
        NbdServer::Unix(path) => reactor::connect_unix(path),
        NbdServer::Tcp(host, port) => reactor::connect(address(host, *port, nth).await?),
    }
}

async fn address(host: &str, port: u16, nth: u32) -> io::Result<SocketAddr> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    let all = look_up(host.to_owned(), port).await?;
    let none = || io::Error::other(format!("the name {host} has no address"));
    let at = nth as usize % all.len().max(1);
    all.get(at).copied().ok_or_else(none)
}

/// The addresses of a name.
#[expect(clippy::disallowed_methods, reason = "the system's call blocks, and no core may wait")]
async fn look_up(host: String, port: u16) -> io::Result<Vec<SocketAddr>> {
    let (sender, found) = reply();
    let look = move || {
        let all = (host.as_str(), port).to_socket_addrs();
        sender.send(all.map(Iterator::collect));
    };
    std::thread::Builder::new().name("millrace-names".to_owned()).spawn(look)?;
    found.await.unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}

#[cfg(test)]
mod tests {
    use reactor::sim::{SimConfig, World};

    use super::*;

    /// An attempt that took too long has left its answer in the line.
    #[test]
    fn an_answer_belongs_to_its_question() {
        let world = World::new(1, 1, SimConfig::default());
        let run = world.run(|core| async move {
            let (ours, theirs) = UnixPackets::pair().unwrap();
            let (ours, theirs) =
                (UnixPackets::from_fd(&core, ours).unwrap(), UnixPackets::from_fd(&core, theirs));
            let (dial, theirs) = (Dial::There(ours), theirs.unwrap());
            for _ in 0..3 {
                theirs.try_send(b"late", &[]).unwrap();
            }
            core.spawn(Class::Background, async move {
                while let Ok((asked, _)) = theirs.recv(PACKET_BYTES).await
                    && let [nth, ..] = asked[..]
                {
                    theirs.try_send(format!("answer {nth}").as_bytes(), &[]).unwrap();
                }
            });
            for nth in 0..2 {
                let error = dial.connect(&core, nth).await.err().unwrap();
                assert_eq!(error.to_string(), format!("answer {nth}"));
            }
        });
        run.unwrap();
    }
}

//! The way to the front end: its socket, or the launcher that has its socket (`protocol/kept`).

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use reactor::{Core, FDS_MAX, UnixPackets, UnixSocket};

use crate::protocol::kept::{FromLauncher, FromNode, PACKET_BYTES_MAX, Snapshot};
use crate::protocol::message::{Framer, Message, Violation};
use crate::protocol::session::Reply;
use crate::target::unsent::Unsent;

/// The way to the front end.
pub(super) enum Link {
    /// This process has the front end's socket.
    Direct(Box<DirectLink>),
    /// The launcher has it.
    Kept(KeptLink),
}

pub(super) struct DirectLink {
    pub socket: UnixSocket,
    pub framer: Framer,
    pub unsent: Unsent,
}

/// A connection whose socket the launcher has.
pub(super) struct KeptLink {
    packets: UnixPackets,
    /// The front end's process; 0 if it is not known.
    pub pid: u32,
    /// The launcher's numbers of descriptors. They are of this connection and of the message that
    /// is being handled, all of which are open, so none has the number of another one.
    numbers: BTreeMap<RawFd, u32>,
    /// Whether a message is to be committed, and the reply that goes with it.
    open: bool,
    reply: Option<Reply>,
}

/// A session that another process had, with its descriptors.
pub(super) struct Earlier {
    pub document: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
}

impl Link {
    pub fn direct(socket: UnixSocket) -> Link {
        let (framer, unsent) = (Framer::new(), Unsent::default());
        Link::Direct(Box::new(DirectLink { socket, framer, unsent }))
    }

    /// The front end's process; 0 if it is not known.
    pub fn pid(&self) -> u32 {
        match self {
            Link::Direct(direct) => direct.socket.peer_pid().unwrap_or(0),
            Link::Kept(kept) => kept.pid,
        }
    }

    /// The message that these bytes complete.
    pub fn message(
        &mut self,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Option<(Message, Vec<OwnedFd>)>, Violation> {
        match self {
            Link::Direct(direct) => direct.framer.push(bytes, fds),
            Link::Kept(_) => Framer::whole(bytes, fds).map(Some),
        }
    }

    /// Sends a reply, as far as the front end's socket has room, or with the commit.
    pub fn reply(&mut self, reply: Reply) -> io::Result<()> {
        match self {
            Link::Direct(direct) => {
                direct.unsent.push(reply.bytes, reply.fd);
                direct.unsent.send(&direct.socket)
            }
            Link::Kept(kept) => {
                kept.reply = Some(reply);
                Ok(())
            }
        }
    }

    /// Bytes and descriptors received so far of a message that is not complete.
    pub fn partial(&self) -> (&[u8], &[OwnedFd]) {
        match self {
            Link::Direct(direct) => direct.framer.parts(),
            Link::Kept(_) => (&[], &[]),
        }
    }

    /// As [`Unsent::parts`].
    pub fn unsent(&self) -> Option<(Vec<u8>, Option<&OwnedFd>)> {
        match self {
            Link::Direct(direct) => direct.unsent.parts(),
            Link::Kept(_) => Some((Vec::new(), None)),
        }
    }

    /// Takes the descriptors of a message that will not be completed.
    pub fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        match self {
            Link::Direct(direct) => direct.framer.take_descriptors(),
            Link::Kept(_) => Vec::new(),
        }
    }

    /// Lets the launcher close the front end's socket, if the launcher has it.
    pub fn close(&self) {
        if let Link::Kept(kept) = self {
            // If there is no room, it is closed when this process has ended.
            let _ = kept.packets.try_send(&FromNode::Close.encode(), &[]);
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Link::Direct(direct) => direct.socket.as_fd(),
            Link::Kept(kept) => kept.packets.as_fd(),
        }
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the launcher sends {what}"))
}

impl KeptLink {
    /// Takes a connection over, from another process that knew these numbers.
    pub fn new(packets: UnixPackets, pid: u32, numbers: BTreeMap<RawFd, u32>) -> KeptLink {
        KeptLink { packets, pid, numbers, open: false, reply: None }
    }

    /// Begins with a connection of the launcher, which has sent its session before it has passed
    /// the connection on: so nothing is waited for. Also returns the session, if it is not new.
    ///
    /// # Errors
    /// When something else was sent.
    pub fn begin(core: &Core, fd: OwnedFd) -> io::Result<(KeptLink, Option<Earlier>)> {
        let packets = UnixPackets::from_fd(core, fd)?;
        let mut all = BTreeMap::new();
        let (pid, Snapshot { document, numbers }) = loop {
            let (bytes, fds) = packets.try_recv(PACKET_BYTES_MAX)?;
            match FromLauncher::decode(&bytes) {
                Some(FromLauncher::Descriptors(numbers)) if numbers.len() == fds.len() => {
                    all.extend(numbers.into_iter().zip(fds));
                }
                Some(FromLauncher::Session { pid, snapshot }) => break (pid, snapshot),
                _ => return Err(invalid("no session")),
            }
        };
        let descriptors: Option<Vec<_>> = numbers.iter().map(|number| all.remove(number)).collect();
        let descriptors = descriptors.ok_or_else(|| invalid("a session without descriptors"))?;
        let raw = descriptors.iter().map(AsRawFd::as_raw_fd).zip(numbers).collect();
        let earlier = (!document.is_empty()).then_some(Earlier { document, descriptors });
        Ok((KeptLink::new(packets, pid, raw), earlier))
    }

    /// The next message, appended to `to`, and its descriptors. No bytes: the front end has gone.
    pub async fn receive(&mut self, to: &mut Vec<u8>) -> io::Result<(usize, Vec<OwnedFd>)> {
        let (bytes, fds) = self.packets.recv(PACKET_BYTES_MAX).await?;
        if bytes.is_empty() {
            return Ok((0, fds));
        }
        let Some(FromLauncher::Message { first, bytes }) = FromLauncher::decode(&bytes) else {
            return Err(invalid("no message"));
        };
        self.numbers.extend(fds.iter().map(AsRawFd::as_raw_fd).zip(first..));
        self.open = true;
        to.extend(&bytes);
        Ok((bytes.len(), fds))
    }

    /// Whether a message is to be committed.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// The number of a descriptor of this connection.
    pub fn number(&self, fd: RawFd) -> Option<u32> {
        self.numbers.get(&fd).copied()
    }

    /// Commits the message that was handled.
    pub fn commit(&mut self, snapshot: Snapshot) -> io::Result<()> {
        self.open = false;
        let (reply, fd) = match self.reply.take() {
            Some(Reply { bytes, fd, .. }) => (bytes, fd),
            None => (Vec::new(), None),
        };
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        debug_assert!(fds.len() <= FDS_MAX, "a reply has at most one");
        self.numbers.retain(|_, number| snapshot.numbers.contains(number));
        self.packets.try_send(&FromNode::Commit { snapshot, reply }.encode(), &fds)
    }

    /// Reports that the session has changed without a message.
    pub fn changed(&self, snapshot: Snapshot) -> io::Result<()> {
        self.packets.try_send(&FromNode::State(snapshot).encode(), &[])
    }
}

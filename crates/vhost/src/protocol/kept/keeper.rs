//! The launcher's side of one connection: what it has received and not passed on, and what it keeps
//! for the next node.
//!
//! ```text
//!          +--------------- push: the message is complete ---------------+
//!          |                                                             v
//!       +------+                      +-------+                      +------+
//!   --->| Idle |<------- sent --------| Reply |<--- Commit, reply ---| Open |
//!       +------+                      +-------+                      +------+
//!          ^                                                             |
//!          +--------------------- Commit without a reply ----------------+
//! ```
//!
//! In any state the node may die. Nothing changes here then: the next node gets
//! [`Keeper::opening`], and in `Open` the message again. A reply needs no node.
//!
//! A front end's bytes are read for their length only. Exactly what a message lacks is read: a read
//! that begins in a part without descriptors would run on into the next message and take its
//! descriptors.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::packet::{FromLauncher, FromNode, Snapshot};
use crate::bytes::Reader;
use crate::protocol::message::{DESCRIPTORS_MAX, HEADER_BYTES, PAYLOAD_BYTES_MAX};

/// Most descriptors that go along with one packet.
const TOGETHER_MAX: usize = 253;

/// What a connection's launcher keeps.
#[derive(Debug, Default)]
pub struct Keeper {
    pid: u32,
    /// The part of a message that has arrived.
    partial: Vec<u8>,
    partial_descriptors: Vec<OwnedFd>,
    /// The number of the next descriptor.
    next: u32,
    /// The descriptors of the session and of the open message.
    kept: BTreeMap<u32, OwnedFd>,
    snapshot: Snapshot,
    stage: Stage,
}

#[derive(Debug, Default)]
enum Stage {
    #[default]
    Idle,
    Open(OpenMessage),
    Reply(Vec<u8>, Option<OwnedFd>),
}

/// A message that is not committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenMessage {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// The numbers of its descriptors.
    pub numbers: Range<u32>,
}

/// What a packet of the node means.
#[derive(Debug)]
pub enum Taken {
    /// The session goes on. These descriptors are not needed any more.
    Released(Vec<OwnedFd>),
    /// The node wants the connection to be closed.
    Close,
}

/// A keeper in numbers, for another program of the launcher. Its descriptors travel beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are the keeper's")]
pub struct KeeperState {
    pub pid: u32,
    pub partial: Vec<u8>,
    pub partial_descriptors: usize,
    pub next: u32,
    pub kept: Vec<u32>,
    pub snapshot: Snapshot,
    pub open: Option<OpenMessage>,
    pub reply: Vec<u8>,
    pub reply_descriptor: bool,
}

impl Keeper {
    /// A new connection of this process; 0 if it is not known.
    pub fn new(pid: u32) -> Keeper {
        Keeper { pid, ..Keeper::default() }
    }

    /// The front end's process; 0 if it is not known.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether a message is open.
    pub fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open(_))
    }

    /// The most bytes to read next; `None` while a message is open or a reply is due.
    pub fn wanted(&self) -> Option<usize> {
        matches!(self.stage, Stage::Idle).then(|| match self.length() {
            None => HEADER_BYTES - self.partial.len(),
            Some(length) => length - self.partial.len(),
        })
    }

    /// The length of the message that is arriving, once its header is there.
    fn length(&self) -> Option<usize> {
        let mut size = Reader::new(self.partial.get(8..HEADER_BYTES)?);
        Some(HEADER_BYTES + size.u32()? as usize)
    }

    /// Takes bytes of the front end, at most [`Keeper::wanted`]. Opens the message that they
    /// complete.
    ///
    /// # Errors
    /// The connection must be closed.
    pub fn push(&mut self, bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), String> {
        if self.wanted().is_none_or(|wanted| bytes.len() > wanted) {
            return Err("more bytes than were asked for".to_owned());
        }
        self.partial.extend(bytes);
        self.partial_descriptors.extend(descriptors);
        if self.partial_descriptors.len() > DESCRIPTORS_MAX {
            return Err("too many descriptors with one message".to_owned());
        }
        let Some(length) = self.length() else { return Ok(()) };
        if length > HEADER_BYTES + PAYLOAD_BYTES_MAX {
            return Err(format!("a message of {length} bytes"));
        }
        if self.partial.len() == length {
            let first = self.next;
            // Never named twice, so that an old number is never taken for a new descriptor.
            self.next = first
                .checked_add(self.partial_descriptors.len() as u32)
                .ok_or("too many descriptors on one connection")?;
            let numbers = first..self.next;
            self.kept.extend(numbers.clone().zip(self.partial_descriptors.drain(..)));
            self.stage =
                Stage::Open(OpenMessage { bytes: std::mem::take(&mut self.partial), numbers });
        }
        Ok(())
    }

    /// The numbers of the open message's descriptors.
    fn open_numbers(&self) -> Range<u32> {
        match &self.stage {
            Stage::Open(message) => message.numbers.clone(),
            _ => 0..0,
        }
    }

    /// The packets for a node that has to go on with the session, with their descriptors.
    pub fn opening(&self) -> Vec<(Vec<u8>, Vec<BorrowedFd<'_>>)> {
        let mut packets = Vec::new();
        for numbers in self.snapshot.numbers.chunks(TOGETHER_MAX) {
            let packet = FromLauncher::Descriptors(numbers.to_vec()).encode();
            packets
                .push((packet, numbers.iter().map(|number| self.kept[number].as_fd()).collect()));
        }
        let session = FromLauncher::Session { pid: self.pid, snapshot: self.snapshot.clone() };
        packets.push((session.encode(), Vec::new()));
        packets
    }

    /// The packet of the open message, with its descriptors.
    pub fn message(&self) -> Option<(Vec<u8>, Vec<BorrowedFd<'_>>)> {
        let Stage::Open(OpenMessage { bytes, numbers }) = &self.stage else { return None };
        let packet = FromLauncher::Message { first: numbers.start, bytes: bytes.clone() };
        let descriptors = numbers.clone().map(|number| self.kept[&number].as_fd());
        Some((packet.encode(), descriptors.collect()))
    }

    /// Takes a packet of the node.
    ///
    /// # Errors
    /// The node is not to be trusted any more. Nothing has changed.
    pub fn take(&mut self, packet: &[u8], descriptors: Vec<OwnedFd>) -> Result<Taken, String> {
        let packet = FromNode::decode(packet).ok_or("a malformed packet")?;
        let most = match &packet {
            FromNode::Commit { reply, .. } if !reply.is_empty() => 1,
            _ => 0,
        };
        if descriptors.len() > most {
            return Err("descriptors that belong to nothing".to_owned());
        }
        match packet {
            FromNode::Commit { snapshot, reply } => {
                if !self.is_open() {
                    return Err("a commit without a message".to_owned());
                }
                self.check(&snapshot)?;
                self.stage = match reply.is_empty() {
                    true => Stage::Idle,
                    false => Stage::Reply(reply, descriptors.into_iter().next()),
                };
                Ok(Taken::Released(self.store(snapshot)))
            }
            FromNode::State(snapshot) => {
                self.check(&snapshot)?;
                Ok(Taken::Released(self.store(snapshot)))
            }
            FromNode::Close => Ok(Taken::Close),
        }
    }

    /// A session has only descriptors of its own, each once.
    fn check(&self, snapshot: &Snapshot) -> Result<(), String> {
        let mut numbers = snapshot.numbers.clone();
        numbers.sort_unstable();
        let twice = numbers.windows(2).any(|pair| pair[0] == pair[1]);
        match twice || numbers.iter().any(|number| !self.kept.contains_key(number)) {
            true => Err("a descriptor that is not the session's".to_owned()),
            false => Ok(()),
        }
    }

    /// Stores a session; returns the descriptors that neither it nor the open message has.
    fn store(&mut self, snapshot: Snapshot) -> Vec<OwnedFd> {
        let mut left = std::mem::take(&mut self.kept);
        for number in snapshot.numbers.iter().copied().chain(self.open_numbers()) {
            if let Some(descriptor) = left.remove(&number) {
                self.kept.insert(number, descriptor);
            }
        }
        self.snapshot = snapshot;
        left.into_values().collect()
    }

    /// The bytes to send to the front end, and the descriptor that goes with the first of them.
    pub fn reply(&self) -> Option<(&[u8], Option<BorrowedFd<'_>>)> {
        let Stage::Reply(bytes, descriptor) = &self.stage else { return None };
        Some((bytes, descriptor.as_ref().map(AsFd::as_fd)))
    }

    /// Records that so many bytes of the reply were sent. Returns the descriptor that went along.
    pub fn sent(&mut self, count: usize) -> Option<OwnedFd> {
        let Stage::Reply(bytes, descriptor) = &mut self.stage else { return None };
        bytes.drain(..count.min(bytes.len()));
        let descriptor = descriptor.take();
        if bytes.is_empty() {
            self.stage = Stage::Idle;
        }
        descriptor
    }

    /// Everything, for another program; the descriptors in the order that [`Keeper::import`] wants.
    pub fn export(&self) -> (KeeperState, Vec<BorrowedFd<'_>>) {
        let (mut open, mut reply, mut last) = (None, Vec::new(), None);
        match &self.stage {
            Stage::Idle => {}
            Stage::Open(message) => open = Some(message.clone()),
            Stage::Reply(bytes, descriptor) => (reply, last) = (bytes.clone(), descriptor.as_ref()),
        }
        let state = KeeperState {
            pid: self.pid,
            partial: self.partial.clone(),
            partial_descriptors: self.partial_descriptors.len(),
            next: self.next,
            kept: self.kept.keys().copied().collect(),
            snapshot: self.snapshot.clone(),
            open,
            reply,
            reply_descriptor: last.is_some(),
        };
        let descriptors = self.partial_descriptors.iter().chain(self.kept.values()).chain(last);
        (state, descriptors.map(AsFd::as_fd).collect())
    }

    /// The inverse of [`Keeper::export`]; `None` if the descriptors do not fit.
    pub fn import(state: KeeperState, descriptors: Vec<OwnedFd>) -> Option<Keeper> {
        let mut descriptors = descriptors.into_iter();
        let partial_descriptors: Vec<_> =
            descriptors.by_ref().take(state.partial_descriptors).collect();
        let count = state.kept.len();
        let kept: BTreeMap<_, _> = state.kept.into_iter().zip(descriptors.by_ref()).collect();
        let last = if state.reply_descriptor { Some(descriptors.next()?) } else { None };
        let stage = match (state.open, state.reply.is_empty()) {
            (Some(message), _) => Stage::Open(message),
            (None, true) => Stage::Idle,
            (None, false) => Stage::Reply(state.reply, last),
        };
        let keeper = Keeper {
            pid: state.pid,
            partial: state.partial,
            partial_descriptors,
            next: state.next,
            kept,
            snapshot: state.snapshot,
            stage,
        };
        let fits = keeper.kept.len() == count
            && keeper.partial_descriptors.len() == state.partial_descriptors
            && descriptors.next().is_none()
            && keeper.check(&keeper.snapshot).is_ok()
            && keeper.open_numbers().all(|number| keeper.kept.contains_key(&number));
        fits.then_some(keeper)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A descriptor, and the other end, which tells whether it is still open.
    fn descriptor() -> (OwnedFd, UnixStream) {
        let (one, other) = UnixStream::pair().unwrap();
        other.set_nonblocking(true).unwrap();
        (one.into(), other)
    }

    fn is_open(mut watch: &UnixStream) -> bool {
        std::io::Read::read(&mut watch, &mut [0]).is_err()
    }

    fn message(payload: &[u8]) -> Vec<u8> {
        let numbers = [9_u32, 1, payload.len() as u32];
        let header: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        [&header[..], payload].concat()
    }

    /// Pushes a message in pieces of `most` bytes; the descriptors come with the first.
    fn push(keeper: &mut Keeper, mut bytes: &[u8], most: usize, descriptors: Vec<OwnedFd>) {
        let mut descriptors = Some(descriptors);
        while let Some(wanted) = keeper.wanted() {
            let (piece, rest) = bytes.split_at(wanted.min(most).min(bytes.len()));
            keeper.push(piece, descriptors.take().unwrap_or_default()).unwrap();
            bytes = rest;
        }
        assert!(bytes.is_empty());
    }

    fn commit(numbers: &[u32], reply: &[u8]) -> Vec<u8> {
        let snapshot = Snapshot { document: b"document".to_vec(), numbers: numbers.to_vec() };
        FromNode::Commit { snapshot, reply: reply.to_vec() }.encode()
    }

    #[test]
    fn a_message_in_any_pieces_is_given_whole_and_again_until_it_is_committed() {
        for most in [1, 5, 12, 100] {
            let mut keeper = Keeper::new(1);
            let (fd, watch) = descriptor();
            push(&mut keeper, &message(b"12345"), most, vec![fd]);
            for _ in 0..2 {
                let (packet, fds) = keeper.message().unwrap();
                let expected = FromLauncher::Message { first: 0, bytes: message(b"12345") };
                assert_eq!((packet, fds.len()), (expected.encode(), 1));
            }
            assert_eq!(keeper.wanted(), None);
            assert!(keeper.reply().is_none());
            keeper.take(&commit(&[0], b"reply"), Vec::new()).unwrap();
            assert!(keeper.message().is_none() && keeper.wanted().is_none());
            // The reply is sent in parts, each once, although nodes begin meanwhile.
            assert_eq!(keeper.reply().unwrap().0, b"reply");
            drop(keeper.sent(2));
            assert_eq!(keeper.opening().len(), 2);
            assert_eq!(keeper.reply().unwrap().0, b"ply");
            drop(keeper.sent(3));
            assert!(keeper.reply().is_none());
            assert_eq!(keeper.wanted(), Some(HEADER_BYTES));
            assert!(is_open(&watch));
        }
    }

    #[test]
    fn descriptors_are_kept_until_no_commit_names_them() {
        let mut keeper = Keeper::new(1);
        let (all, watches): (Vec<_>, Vec<_>) = (0..3).map(|_| descriptor()).unzip();
        push(&mut keeper, &message(b""), 12, all);
        drop(keeper.take(&commit(&[2, 0], b""), Vec::new()).unwrap());
        assert_eq!(watches.iter().map(is_open).collect::<Vec<_>>(), [true, false, true]);
        let opening = keeper.opening();
        assert_eq!(opening[0].0, FromLauncher::Descriptors(vec![2, 0]).encode());
        assert_eq!(opening[0].1.len(), 2);
        drop(opening);
        // Numbers are not given again.
        let (fd, watch) = descriptor();
        push(&mut keeper, &message(b""), 12, vec![fd]);
        assert_eq!(keeper.message().unwrap().0[4..8], 3_u32.to_le_bytes());
        // A state without the open message's descriptor leaves it with the message.
        let state = FromNode::State(Snapshot { document: Vec::new(), numbers: vec![0] }).encode();
        drop(keeper.take(&state, Vec::new()).unwrap());
        assert_eq!(watches.iter().map(is_open).collect::<Vec<_>>(), [true, false, false]);
        assert!(is_open(&watch) && keeper.message().unwrap().1.len() == 1);
        drop(keeper.take(&commit(&[], b""), Vec::new()).unwrap());
        assert!(!is_open(&watch) && !is_open(&watches[0]));
    }

    #[test]
    fn a_node_gets_no_descriptor_that_is_not_the_sessions() {
        let mut keeper = Keeper::new(1);
        assert!(keeper.take(&commit(&[], b""), Vec::new()).is_err(), "no message");
        let (fd, watch) = descriptor();
        push(&mut keeper, &message(b""), 12, vec![fd]);
        for numbers in [&[1][..], &[0, 0], &[0, 1]] {
            assert!(keeper.take(&commit(numbers, b""), Vec::new()).is_err(), "{numbers:?}");
        }
        assert!(keeper.take(b"nonsense", Vec::new()).is_err());
        assert!(keeper.take(&commit(&[0], b""), vec![descriptor().0]).is_err(), "a stray one");
        let two = vec![descriptor().0, descriptor().0];
        assert!(keeper.take(&commit(&[0], b"reply"), two).is_err());
        let long = vec![0; HEADER_BYTES + PAYLOAD_BYTES_MAX + 1];
        assert!(keeper.take(&commit(&[0], &long), Vec::new()).is_err());
        assert!(is_open(&watch) && keeper.is_open());
        keeper.take(&commit(&[0], b"reply"), vec![descriptor().0]).unwrap();
        assert!(keeper.reply().unwrap().1.is_some());
    }

    #[test]
    fn long_messages_and_many_descriptors_are_refused() {
        let mut keeper = Keeper::new(1);
        let mut header = message(b"");
        header[8..12].copy_from_slice(&(PAYLOAD_BYTES_MAX as u32 + 1).to_le_bytes());
        assert!(keeper.push(&header, Vec::new()).is_err());
        let mut keeper = Keeper::new(1);
        let many = (0..=DESCRIPTORS_MAX).map(|_| descriptor().0).collect();
        assert!(keeper.push(&[1], many).is_err());
        assert!(Keeper::new(1).push(&[0; HEADER_BYTES + 1], Vec::new()).is_err());
    }
}

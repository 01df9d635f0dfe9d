//! The packets between launcher and node: see `docs/formats/kept.md`.

use crate::bytes::Reader;
use crate::protocol::message::{
    DESCRIPTORS_MAX, HEADER_BYTES, MEMORY_REGIONS_MAX, PAYLOAD_BYTES_MAX, RINGS_MAX,
};

/// Longest packet, bytes. It fits into a socket's buffer of the usual size.
pub const PACKET_BYTES_MAX: usize = 64 << 10;
/// Most descriptors that a session uses: memory, three for each ring, in-flight region, dirty log
/// and its signal, backend channel.
pub const LIVE_MAX: usize = MEMORY_REGIONS_MAX as usize + 3 * RINGS_MAX as usize + 4;
/// Longest message or reply.
pub(super) const MESSAGE_BYTES_MAX: usize = HEADER_BYTES + PAYLOAD_BYTES_MAX;

const DESCRIPTORS: u32 = 1;
const SESSION: u32 = 2;
const MESSAGE: u32 = 3;
const COMMIT: u32 = 4;
const STATE: u32 = 5;
const CLOSE: u32 = 6;

/// A session at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// A document of `docs/formats/handover.md`; empty for a new connection.
    pub document: Vec<u8>,
    /// The numbers of the descriptors that belong to it, in the document's order.
    pub numbers: Vec<u32>,
}

impl Snapshot {
    fn write(&self, to: &mut Vec<u8>) {
        to.extend((self.numbers.len() as u32).to_le_bytes());
        to.extend(self.numbers.iter().flat_map(|number| number.to_le_bytes()));
        to.extend(&self.document);
    }

    fn read(from: &mut Reader<'_>) -> Option<Snapshot> {
        let count = from.u32()? as usize;
        if count > LIVE_MAX {
            return None;
        }
        let numbers = (0..count).map(|_| from.u32()).collect::<Option<_>>()?;
        Some(Snapshot { numbers, document: from.rest().to_vec() })
    }
}

/// A packet of the launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromLauncher {
    /// Descriptors, with their numbers. Only before [`FromLauncher::Session`].
    Descriptors(Vec<u32>),
    /// The beginning: the front end's process, and the session so far.
    Session {
        /// The process id of the front end, if known, else 0.
        pid: u32,
        /// The session.
        snapshot: Snapshot,
    },
    /// A message, with its descriptors. Their numbers are consecutive.
    Message {
        /// The number of the first descriptor.
        first: u32,
        /// Header and payload.
        bytes: Vec<u8>,
    },
}

impl FromLauncher {
    /// The bytes of the packet.
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Vec::new();
        let kind = match self {
            Self::Descriptors(_) => DESCRIPTORS,
            Self::Session { .. } => SESSION,
            Self::Message { .. } => MESSAGE,
        };
        to.extend(kind.to_le_bytes());
        match self {
            Self::Descriptors(numbers) => {
                to.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
            }
            Self::Session { pid, snapshot } => {
                to.extend(pid.to_le_bytes());
                snapshot.write(&mut to);
            }
            Self::Message { first, bytes } => {
                to.extend(first.to_le_bytes());
                to.extend(bytes);
            }
        }
        to
    }

    /// Reads a packet; `None` if it is malformed.
    pub fn decode(bytes: &[u8]) -> Option<FromLauncher> {
        let mut from = Reader::new(bytes);
        match from.u32()? {
            DESCRIPTORS => {
                let mut numbers = Vec::new();
                while !from.is_empty() {
                    numbers.push(from.u32()?);
                }
                (numbers.len() <= LIVE_MAX).then_some(Self::Descriptors(numbers))
            }
            SESSION => {
                let pid = from.u32()?;
                Some(Self::Session { pid, snapshot: Snapshot::read(&mut from)? })
            }
            MESSAGE => {
                let first = from.u32()?;
                let bytes = from.rest();
                let possible = (HEADER_BYTES..=MESSAGE_BYTES_MAX).contains(&bytes.len());
                possible.then(|| Self::Message { first, bytes: bytes.to_vec() })
            }
            _ => None,
        }
    }
}

/// A packet of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromNode {
    /// The message is done: the session after it, and the reply, which is empty if none is due. A
    /// descriptor may come along, which goes with the reply.
    Commit {
        /// The session.
        snapshot: Snapshot,
        /// Header and payload.
        reply: Vec<u8>,
    },
    /// The session has changed without a message.
    State(Snapshot),
    /// The node closes the connection.
    Close,
}

impl FromNode {
    /// The bytes of the packet.
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Vec::new();
        match self {
            Self::Commit { snapshot, reply } => {
                to.extend(COMMIT.to_le_bytes());
                to.extend((reply.len() as u32).to_le_bytes());
                to.extend(reply);
                snapshot.write(&mut to);
            }
            Self::State(snapshot) => {
                to.extend(STATE.to_le_bytes());
                snapshot.write(&mut to);
            }
            Self::Close => to.extend(CLOSE.to_le_bytes()),
        }
        to
    }

    /// Reads a packet; `None` if it is malformed.
    pub fn decode(bytes: &[u8]) -> Option<FromNode> {
        let mut from = Reader::new(bytes);
        match from.u32()? {
            COMMIT => {
                let length = from.u32()? as usize;
                let reply = from.take(length).filter(|_| length <= MESSAGE_BYTES_MAX)?.to_vec();
                Some(Self::Commit { reply, snapshot: Snapshot::read(&mut from)? })
            }
            STATE => Snapshot::read(&mut from).map(Self::State),
            CLOSE => from.is_empty().then_some(Self::Close),
            _ => None,
        }
    }
}

const _: () = assert!(DESCRIPTORS_MAX <= 253, "a message's descriptors go along with one packet");

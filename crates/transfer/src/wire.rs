//! Frames, without any I/O: `docs/formats/transfer.md`.

use serde::{Deserialize, Serialize};

use crate::shape::Shape;

/// The version of the protocol.
pub const VERSION: u32 = 2;
/// The oldest version of a source that a destination understands: its Own has no payload, and its
/// length says whether the guest has switched its write cache off.
pub(crate) const OLDEST: u32 = 1;
/// The longest piece of data in one request, in bytes.
pub const PIECE_BYTES_MAX: u32 = 1 << 20;
/// The longest text, in bytes.
pub(crate) const TEXT_BYTES_MAX: u32 = 16 << 10;
/// Length of a frame's header in bytes.
pub(crate) const HEADER_BYTES: usize = 40;
/// Length of a checksum of data in bytes.
pub(crate) const HASH_BYTES: u32 = 16;

const MAGIC: u32 = u32::from_le_bytes(*b"MRDT");
/// Where the frame's own checksum is.
const CRC_AT: usize = 36;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Which disk comes: a [`Hello`]. The first request of a connection.
    Hello,
    /// Data at `offset`.
    Write,
    /// `len` bytes from `offset` are to read as zeroes.
    Clear,
    /// The checksum of `len` bytes from `offset`: are they the same there?
    Compare,
    /// All of it is to be durable.
    Flush,
    /// The disk is whole, and the destination's from now on: [`Belongings`].
    Own,
    /// The source wants the disk back.
    Return,
    /// The source gives up.
    Abandon,
    /// Is anybody there?
    Ping,
    /// The answer to a request.
    Reply(Outcome),
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// The data there is another one.
    Differs,
    /// It has failed for good; a text says why.
    Failed,
    /// It cannot be done now; a text says why.
    Later,
    /// The guest has begun to use the disk.
    Begun,
}

const REQUESTS: [Kind; 9] = [
    Kind::Hello,
    Kind::Write,
    Kind::Clear,
    Kind::Compare,
    Kind::Flush,
    Kind::Own,
    Kind::Return,
    Kind::Abandon,
    Kind::Ping,
];
const OUTCOMES: [Outcome; 5] =
    [Outcome::Done, Outcome::Differs, Outcome::Failed, Outcome::Later, Outcome::Begun];
/// Number of the first outcome.
const REPLY: u8 = 128;

impl Kind {
    fn number(self) -> u8 {
        let place = |at: Option<usize>| at.unwrap_or(0) as u8;
        match self {
            Kind::Reply(outcome) => REPLY + place(OUTCOMES.iter().position(|one| *one == outcome)),
            kind => 1 + place(REQUESTS.iter().position(|one| *one == kind)),
        }
    }

    fn from_number(number: u8) -> Option<Kind> {
        match number.checked_sub(REPLY) {
            Some(nth) => OUTCOMES.get(usize::from(nth)).copied().map(Kind::Reply),
            None => REQUESTS.get(usize::from(number.checked_sub(1)?)).copied(),
        }
    }

    /// The least and the most bytes of a payload.
    fn payload_bytes(self) -> (u32, u32) {
        match self {
            Kind::Hello => (1, TEXT_BYTES_MAX),
            Kind::Write => (1, PIECE_BYTES_MAX),
            Kind::Compare => (HASH_BYTES, HASH_BYTES),
            Kind::Own | Kind::Reply(_) => (0, TEXT_BYTES_MAX),
            _ => (0, 0),
        }
    }
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub kind: Kind,
    /// The number of the request, also in its answer.
    pub id: u64,
    pub offset: u64,
    pub len: u64,
    pub payload_bytes: u32,
}

/// How a peer has violated the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    Magic,
    Kind(u8),
    Payload(u32),
    Checksum,
    Text,
    Order,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Violation::Magic => f.write_str("these are not the bytes of a moving disk"),
            Violation::Kind(kind) => write!(f, "message {kind} is unknown"),
            Violation::Payload(bytes) => write!(f, "a message has {bytes} bytes"),
            Violation::Checksum => f.write_str("a message's checksum is wrong"),
            Violation::Text => f.write_str("a message's text is not understood"),
            Violation::Order => f.write_str("a message comes out of order"),
        }
    }
}

impl Frame {
    /// A request or an answer without a payload.
    pub fn new(kind: Kind, id: u64) -> Frame {
        Frame { kind, id, offset: 0, len: 0, payload_bytes: 0 }
    }

    /// The header, for this payload.
    pub fn encode(&self, payload: &[u8]) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = self.kind.number();
        bytes[8..16].copy_from_slice(&self.id.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.len.to_le_bytes());
        bytes[32..36].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        let crc = checksum(&bytes, payload);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads a header. Its checksum is checked with the payload: [`check`].
    ///
    /// # Errors
    /// When it is none, or its payload has an impossible length.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Frame, Violation> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or([0; 4]));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or([0; 8]));
        if u32_at(0) != MAGIC {
            return Err(Violation::Magic);
        }
        let kind = Kind::from_number(bytes[4]).ok_or(Violation::Kind(bytes[4]))?;
        let payload_bytes = u32_at(32);
        let (least, most) = kind.payload_bytes();
        if payload_bytes < least || payload_bytes > most {
            return Err(Violation::Payload(payload_bytes));
        }
        Ok(Frame { kind, id: u64_at(8), offset: u64_at(16), len: u64_at(24), payload_bytes })
    }
}

/// Checks a frame.
///
/// # Errors
/// When its bytes have changed on the way.
pub(crate) fn check(header: &[u8; HEADER_BYTES], payload: &[u8]) -> Result<(), Violation> {
    let found = checksum(header, payload).to_le_bytes();
    (found == header[CRC_AT..]).then_some(()).ok_or(Violation::Checksum)
}

fn checksum(header: &[u8; HEADER_BYTES], payload: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&header[..CRC_AT]), payload)
}

/// The checksum of data, by which both ends tell whether they have the same.
pub(crate) fn hash(data: &[u8]) -> [u8; HASH_BYTES as usize] {
    twox_hash::XxHash3_128::oneshot(data).to_le_bytes()
}

/// The limits of a disk or of a group of disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Requests per second; 0 is no limit.
    #[serde(default)]
    pub iops: u64,
    /// Bytes per second; 0 is no limit.
    #[serde(default)]
    pub bytes_per_second: u64,
    /// What may be saved, in nanoseconds of the rate; 0 is the default.
    #[serde(default)]
    pub burst_ns: u64,
}

/// What goes along with a disk that is given, beside its data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Belongings {
    /// The guest has switched its write cache off.
    #[serde(default)]
    pub writes_through: bool,
    /// Its own limits.
    #[serde(default)]
    pub limits: Limits,
    /// The name of its group, and the limits of that.
    #[serde(default)]
    pub group: Option<(String, Limits)>,
}

/// What the source says first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The version of the protocol.
    pub version: u32,
    /// The disk's name at the destination.
    pub disk: String,
    /// The number of the move, chosen at random.
    pub transfer: u64,
    /// What the guest knows of its disk.
    pub shape: Shape,
    /// The disk was given to the destination: nothing more is sent, and a destination that does
    /// not know the move must not take it.
    #[serde(default)]
    pub given: bool,
}

/// How far the destination is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// It takes data.
    Receiving,
    /// The disk is whole; its guest has not begun.
    Whole,
    /// The guest has begun.
    Begun,
}

/// What the destination answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The version of the protocol.
    pub version: u32,
    /// Another one after each start of the destination: what was not durable may be lost.
    pub incarnation: u64,
    /// How far it is with this move.
    pub stage: Stage,
}

/// Parses what a peer may send, for fuzzers.
#[cfg(feature = "testing")]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) {
    let Some((header, payload)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return };
    if let Ok(frame) = Frame::decode(header) {
        let payload = &payload[..payload.len().min(frame.payload_bytes as usize)];
        let same = frame.encode(payload);
        assert_eq!(same[4], header[4]);
        let _ = check(header, payload);
        let _ = serde_json::from_slice::<Hello>(payload);
        let _ = serde_json::from_slice::<Welcome>(payload);
        let _ = serde_json::from_slice::<Belongings>(payload);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_of_kinds_do_not_change() {
        let numbers = REQUESTS.map(Kind::number);
        assert_eq!(numbers, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let outcomes = OUTCOMES.map(|outcome| Kind::Reply(outcome).number());
        assert_eq!(outcomes, [128, 129, 130, 131, 132]);
        for number in 0..=u8::MAX {
            let kind = Kind::from_number(number);
            assert!(kind.is_none_or(|kind| kind.number() == number));
        }
    }

    proptest! {
        #[test]
        fn a_frame_is_read_as_it_was_written_and_each_changed_bit_is_found(
            nth in 0..REQUESTS.len(),
            id: u64,
            offset: u64,
            len: u64,
            bit in 0..(HEADER_BYTES + 16) * 8,
        ) {
            let kind = REQUESTS[nth];
            let payload = vec![7; kind.payload_bytes().1.min(16) as usize];
            let frame = Frame { kind, id, offset, len, payload_bytes: payload.len() as u32 };
            let header = frame.encode(&payload);
            prop_assert_eq!(Frame::decode(&header), Ok(frame));
            prop_assert_eq!(check(&header, &payload), Ok(()));
            let mut all = [&header[..], &payload].concat();
            let at = bit / 8 % all.len();
            all[at] ^= 1 << (bit % 8);
            let header = all[..HEADER_BYTES].try_into().unwrap();
            let same = Frame::decode(&header).is_ok() && check(&header, &all[HEADER_BYTES..]).is_ok();
            prop_assert!(!same, "bit {} of byte {}", bit % 8, at);
        }
    }
}

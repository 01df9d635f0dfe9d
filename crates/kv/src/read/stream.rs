//! Replies of any size, made in pieces of bounded size: `KEYS`, `MR.RANGE`, and `MGET` of many
//! keys.
//!
//! An array begins with its number of elements. So a walk collects its first piece and, if there is
//! more, only counts the rest. Then it writes the header and the piece, returns to the last key of
//! the piece, and walks again to write the rest. Under its snapshot both walks find the same keys.
//! A reply that fits into one piece is walked once.
//!
//! A piece is made by a task of its own and passed to the connection, which asks for the next one
//! when its client has read enough and there is memory for it. An element that does not fit is left
//! for the next piece, which is admitted with that length. An error before the header is sent is an
//! error reply; after that no true reply is possible, and the connection is closed.

use std::rc::Rc;

use resp::{Protocol, Writer};

use crate::client::gauge::Share;
use crate::command::range::Extent;
use crate::core::state::CoreState;
use crate::expiry::live::Moment;
use crate::read::small::write_error;
use crate::read::walk::Walk;

/// A piece ends with the element that makes it this long, and before an element for which there is
/// no memory.
const PIECE_BYTES: usize = 128 * 1024;

/// Number of keys looked up together.
pub(crate) const KEYS_PER_LOOKUP: usize = 64;

/// Number of keys looked up first, before the size of the values is known.
const LOOKUP_FIRST: usize = 8;

/// A reply in progress.
#[expect(clippy::large_enum_variant, reason = "always boxed while it waits")]
pub(crate) enum Stream {
    /// `KEYS` and `MR.RANGE`.
    Range(RangeStream),
    /// `MGET`.
    Lookup(LookupStream),
}

/// A piece of a reply and the rest after it.
pub(crate) struct Piece {
    pub bytes: Vec<u8>,
    /// Its part of the core's unsent bytes.
    pub room: Share,
    pub rest: Rest,
}

pub(crate) enum Rest {
    /// The reply is complete.
    Done,
    More(Box<Stream>),
    /// The promised elements cannot be delivered.
    Broken,
}

impl Stream {
    /// Makes the next piece.
    pub async fn next(self) -> Piece {
        match self {
            Self::Range(stream) => stream.next().await,
            Self::Lookup(stream) => stream.next().await,
        }
    }

    /// Releases what need not be held while the client is slow.
    pub fn park(&mut self) {
        if let Self::Range(stream) = self {
            stream.park();
        }
    }

    /// Whether memory has been taken for the keys it looks up.
    pub fn holds_room(&self) -> bool {
        matches!(self, Self::Lookup(stream) if stream.keys_room.is_some())
    }

    /// The maximum length of the next piece.
    pub fn wanted(&self) -> usize {
        let element_bytes = match self {
            Self::Range(stream) => stream.element_bytes,
            Self::Lookup(stream) => stream.element_bytes,
        };
        element_bytes.max(PIECE_BYTES)
    }

    /// Assigns its part of the core's unsent bytes for the next piece.
    pub fn take_room(&mut self, room: Share) {
        match self {
            Self::Range(stream) => stream.room = room,
            Self::Lookup(stream) => stream.room = room,
        }
    }
}

/// Whether a piece may have `bytes` bytes: those it was admitted for, or more while all connections
/// of the core are below their limit.
fn fits(state: &CoreState, room: &mut Share, bytes: usize) -> bool {
    if bytes <= room.part() {
        return true;
    }
    let total = state.unsent_bytes.get() - room.part() + bytes;
    let fits = total <= state.node.settings().unsent_total_bytes_max;
    if fits {
        room.set(bytes);
    }
    fits
}

/// Bytes of an element besides its content.
const HEADER_BYTES: usize = 16;

pub(crate) struct RangeStream {
    state: Rc<CoreState>,
    walk: Walk,
    room: Share,
    /// Length of the element that did not fit, or 0.
    element_bytes: usize,
    /// The walk is positioned on that element.
    pending: bool,
    /// The last key written, if any.
    last: Option<Vec<u8>>,
    extent: Extent,
    protocol: Protocol,
    /// Keys still to be written; `None` before the first piece.
    left: Option<u64>,
}

impl RangeStream {
    pub fn new(state: &Rc<CoreState>, walk: Walk, extent: Extent, protocol: Protocol) -> Self {
        Self {
            state: state.clone(),
            walk,
            room: state.unsent_bytes.share(),
            element_bytes: 0,
            pending: false,
            last: None,
            extent,
            protocol,
            left: None,
        }
    }

    fn park(&mut self) {
        match std::mem::take(&mut self.pending) {
            true => self.walk.continue_after(self.last.clone()),
            false => self.walk.park(),
        }
    }

    async fn next(mut self) -> Piece {
        let made = match self.left {
            None => self.first().await,
            Some(left) => self.other(left).await,
        };
        let room = std::mem::replace(&mut self.room, self.state.unsent_bytes.share());
        match (made, self.left) {
            (Ok(bytes), None | Some(0)) => Piece { bytes, room, rest: Rest::Done },
            (Ok(bytes), Some(_)) => {
                Piece { bytes, room, rest: Rest::More(Box::new(Stream::Range(self))) }
            }
            (Err(Some(error)), None) => {
                let mut bytes = Vec::new();
                write_error(&error, &mut Writer::new(&mut bytes, self.protocol));
                Piece { bytes, room, rest: Rest::Done }
            }
            (Err(error), left) => {
                let why =
                    error.map_or_else(|| "a key has disappeared".to_owned(), |why| why.to_string());
                tracing::warn!(
                    "closing a connection in the middle of its reply, with {} keys still to send: {why}",
                    left.unwrap_or(0)
                );
                Piece { bytes: Vec::new(), room, rest: Rest::Broken }
            }
        }
    }

    /// Moves to the next key that matches.
    async fn find(&mut self) -> lsm::Result<bool> {
        while self.walk.step().await? {
            if self.walk.matches() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The bytes of the key, and of the value if it is wanted, at the walk's position.
    fn content_bytes(&self) -> usize {
        let value = if self.extent.values { self.walk.value().len() } else { 0 };
        self.walk.key().len() + value
    }

    /// Writes the element at the walk's position, if there is memory for it.
    fn write_element(&mut self, body: &mut Vec<u8>) -> bool {
        let headers = if self.extent.values { 2 } else { 1 };
        let bytes = self.content_bytes() + headers * HEADER_BYTES;
        if !fits(&self.state, &mut self.room, body.len() + bytes) {
            self.element_bytes = bytes;
            return false;
        }
        self.element_bytes = 0;
        let mut writer = Writer::new(body, self.protocol);
        writer.bulk(self.walk.key());
        if self.extent.values {
            writer.bulk(self.walk.value());
        }
        let last = self.last.get_or_insert_default();
        last.clear();
        last.extend_from_slice(self.walk.key());
        true
    }

    async fn first(&mut self) -> Result<Vec<u8>, Option<lsm::Error>> {
        self.walk.freeze()?;
        let (mut body, mut given, mut found, mut found_bytes) = (Vec::new(), 0, 0, 0);
        let mut full = false;
        while self.extent.goes_on(found, found_bytes) && self.find().await? {
            found += 1;
            found_bytes += self.content_bytes() as u64;
            if !full {
                match self.write_element(&mut body) {
                    true => given = found,
                    false => full = true,
                }
                full |= body.len() >= PIECE_BYTES;
            }
        }
        let elements = found.saturating_mul(if self.extent.values { 2 } else { 1 });
        let mut bytes = Vec::with_capacity(body.len() + 32);
        Writer::new(&mut bytes, self.protocol)
            .array(usize::try_from(elements).unwrap_or(usize::MAX));
        bytes.append(&mut body);
        if found > given {
            self.left = Some(found - given);
            self.walk.continue_after(self.last.clone());
        }
        Ok(bytes)
    }

    async fn other(&mut self, mut left: u64) -> Result<Vec<u8>, Option<lsm::Error>> {
        let mut body = Vec::with_capacity(PIECE_BYTES + PIECE_BYTES / 8);
        while left > 0 && body.len() < PIECE_BYTES {
            if !std::mem::take(&mut self.pending) && !self.find().await? {
                return Err(None);
            }
            if !self.write_element(&mut body) {
                self.pending = true;
                break;
            }
            left -= 1;
        }
        self.left = Some(left);
        Ok(body)
    }
}

pub(crate) struct LookupStream {
    state: Rc<CoreState>,
    keys: Vec<Vec<u8>>,
    /// Memory for the keys, where they are many.
    keys_room: Option<Share>,
    given: usize,
    room: Share,
    /// Length of the value that did not fit, or 0.
    element_bytes: usize,
    /// Number of keys to look up next; fewer where values are large.
    together: usize,
    at: Option<Moment>,
    protocol: Protocol,
}

impl LookupStream {
    /// `keys_room` is the keys' part of the core's unsent bytes.
    pub fn new(
        state: &Rc<CoreState>,
        keys: Vec<Vec<u8>>,
        keys_room: Option<Share>,
        protocol: Protocol,
    ) -> Self {
        Self {
            state: state.clone(),
            keys,
            keys_room,
            given: 0,
            room: state.unsent_bytes.share(),
            element_bytes: 0,
            together: LOOKUP_FIRST,
            at: None,
            protocol,
        }
    }

    /// For keys with large values: they are looked up one by one at first.
    pub fn of_large(
        state: &Rc<CoreState>,
        keys: Vec<Vec<u8>>,
        keys_room: Option<Share>,
        protocol: Protocol,
    ) -> Self {
        Self { together: 1, ..Self::new(state, keys, keys_room, protocol) }
    }

    async fn next(mut self) -> Piece {
        let mut bytes = Vec::new();
        if self.at.is_none() {
            match self.state.reader.moment() {
                Ok(at) => self.at = Some(at),
                Err(error) => {
                    write_error(&error, &mut Writer::new(&mut bytes, self.protocol));
                    return Piece { bytes, room: self.room, rest: Rest::Done };
                }
            }
            Writer::new(&mut bytes, self.protocol).array(self.keys.len());
        }
        self.element_bytes = 0;
        while self.given < self.keys.len() && bytes.len() < PIECE_BYTES && self.element_bytes == 0 {
            let end = (self.given + self.together).min(self.keys.len());
            let keys: Vec<&[u8]> = self.keys[self.given..end].iter().map(Vec::as_slice).collect();
            let (reader, family) = (&self.state.reader, self.state.family);
            let answers = reader.multi_get(family, &keys, self.at.as_ref()).await;
            let looked_up = answers.len();
            let mut found = 0;
            for answer in answers {
                let value = answer.as_ref().ok().and_then(Option::as_ref);
                let value_bytes = value.map_or(0, |value| value.len()) + HEADER_BYTES;
                found += value_bytes;
                if self.element_bytes > 0 {
                    continue;
                }
                if !fits(&self.state, &mut self.room, bytes.len() + value_bytes) {
                    self.element_bytes = value_bytes;
                    continue;
                }
                self.given += 1;
                let mut writer = Writer::new(&mut bytes, self.protocol);
                match answer {
                    Ok(Some(value)) => writer.bulk(&value),
                    Ok(None) => writer.null(),
                    // The array's length is already sent: an error takes its element's place.
                    Err(error) => write_error(&error, &mut writer),
                }
            }
            self.together = (PIECE_BYTES / (found / looked_up).max(1)).clamp(1, KEYS_PER_LOOKUP);
        }
        let room = std::mem::replace(&mut self.room, self.state.unsent_bytes.share());
        let rest = if self.given == self.keys.len() {
            Rest::Done
        } else {
            Rest::More(Box::new(Stream::Lookup(self)))
        };
        Piece { bytes, room, rest }
    }
}

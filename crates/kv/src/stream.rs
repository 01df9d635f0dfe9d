//! Replies of any size in pieces of bounded size: `KEYS`, `MR.RANGE`, and `MGET` of many keys.
//!
//! An array says first how many elements it has. So a walk collects its first piece and, if there is more, only
//! counts the rest; then it gives the header and the piece, goes back to the last key given, and walks again to give
//! the others. Under its snapshot both walks find the same keys. What fits into one piece is walked once.
//!
//! A piece is made by a task of its own and handed to the connection, which asks for the next one when its client has
//! taken enough. What fails before the header has gone is an error reply; afterwards there is no reply left that
//! would be true, and the connection is closed.

use std::rc::Rc;

use resp::{Protocol, Writer};

use crate::reads::write_error;
use crate::state::{CoreState, FAMILY};
use crate::walk::Walk;

/// A piece ends with the element that makes it so long.
const PIECE_BYTES: usize = 128 * 1024;

/// Keys that are looked up together.
pub(crate) const KEYS_PER_LOOKUP: usize = 64;

/// Keys that are looked up first, before it is known how large the values are.
const LOOKUP_FIRST: usize = 8;

/// A reply in the making.
#[expect(clippy::large_enum_variant, reason = "always boxed while it waits")]
pub(crate) enum Stream {
    /// `KEYS` and `MR.RANGE`.
    Range(RangeStream),
    /// `MGET`.
    Lookup(LookupStream),
}

/// A piece of a reply and what comes after it.
pub(crate) struct Piece {
    pub bytes: Vec<u8>,
    pub rest: Rest,
}

pub(crate) enum Rest {
    /// Nothing: the reply is whole.
    Done,
    More(Box<Stream>),
    /// What was promised cannot be given.
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

    /// Lets go of what need not be held while the client is slow.
    pub fn park(&mut self) {
        if let Self::Range(stream) = self {
            stream.walk.park();
        }
    }
}

pub(crate) struct RangeStream {
    walk: Walk,
    values: bool,
    limit: u64,
    protocol: Protocol,
    /// Keys still to be given; `None` before the first piece.
    left: Option<u64>,
}

impl RangeStream {
    pub fn new(walk: Walk, values: bool, limit: Option<u64>, protocol: Protocol) -> Self {
        Self { walk, values, limit: limit.unwrap_or(u64::MAX), protocol, left: None }
    }

    async fn next(mut self) -> Piece {
        let made = match self.left {
            None => self.first().await,
            Some(left) => self.other(left).await,
        };
        match (made, self.left) {
            (Ok(bytes), None | Some(0)) => Piece { bytes, rest: Rest::Done },
            (Ok(bytes), Some(_)) => {
                Piece { bytes, rest: Rest::More(Box::new(Stream::Range(self))) }
            }
            (Err(Some(error)), None) => {
                let mut bytes = Vec::new();
                write_error(&error, &mut Writer::new(&mut bytes, self.protocol));
                Piece { bytes, rest: Rest::Done }
            }
            (Err(_), _) => Piece { bytes: Vec::new(), rest: Rest::Broken },
        }
    }

    /// Goes to the next key that matches.
    async fn find(&mut self) -> lsm::Result<bool> {
        while self.walk.step().await? {
            if self.walk.matches() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn give(&self, body: &mut Vec<u8>) {
        let mut writer = Writer::new(body, self.protocol);
        writer.bulk(self.walk.key());
        if self.values {
            writer.bulk(self.walk.value());
        }
    }

    async fn first(&mut self) -> Result<Vec<u8>, Option<lsm::Error>> {
        self.walk.freeze()?;
        let (mut body, mut given, mut found) = (Vec::new(), 0, 0);
        let mut last = Vec::new();
        while found < self.limit && self.find().await? {
            found += 1;
            if body.len() < PIECE_BYTES {
                self.give(&mut body);
                given = found;
                if body.len() >= PIECE_BYTES {
                    last = self.walk.key().to_vec();
                }
            }
        }
        let elements = found.saturating_mul(if self.values { 2 } else { 1 });
        let mut bytes = Vec::with_capacity(body.len() + 32);
        Writer::new(&mut bytes, self.protocol)
            .array(usize::try_from(elements).unwrap_or(usize::MAX));
        bytes.append(&mut body);
        if found > given {
            self.left = Some(found - given);
            self.walk.go_on_behind(last);
        }
        Ok(bytes)
    }

    async fn other(&mut self, mut left: u64) -> Result<Vec<u8>, Option<lsm::Error>> {
        let mut body = Vec::with_capacity(PIECE_BYTES + PIECE_BYTES / 8);
        while left > 0 && body.len() < PIECE_BYTES {
            if !self.find().await? {
                return Err(None);
            }
            self.give(&mut body);
            left -= 1;
        }
        self.left = Some(left);
        Ok(body)
    }
}

pub(crate) struct LookupStream {
    state: Rc<CoreState>,
    keys: Vec<Vec<u8>>,
    given: usize,
    /// Keys to look up next; fewer where values are large.
    together: usize,
    snapshot: Option<lsm::Snapshot>,
    protocol: Protocol,
}

impl LookupStream {
    pub fn new(state: &Rc<CoreState>, keys: Vec<Vec<u8>>, protocol: Protocol) -> Self {
        Self {
            state: state.clone(),
            keys,
            given: 0,
            together: LOOKUP_FIRST,
            snapshot: None,
            protocol,
        }
    }

    /// For keys whose values are known to be large: they are looked up one by one at first.
    pub fn of_large(state: &Rc<CoreState>, keys: Vec<Vec<u8>>, protocol: Protocol) -> Self {
        Self { together: 1, ..Self::new(state, keys, protocol) }
    }

    async fn next(mut self) -> Piece {
        let mut bytes = Vec::new();
        if self.given == 0 {
            match self.state.reader.snapshot() {
                Ok(snapshot) => self.snapshot = Some(snapshot),
                Err(error) => {
                    write_error(&error, &mut Writer::new(&mut bytes, self.protocol));
                    return Piece { bytes, rest: Rest::Done };
                }
            }
            Writer::new(&mut bytes, self.protocol).array(self.keys.len());
        }
        while self.given < self.keys.len() && bytes.len() < PIECE_BYTES {
            let end = (self.given + self.together).min(self.keys.len());
            let before = bytes.len();
            let keys: Vec<&[u8]> = self.keys[self.given..end].iter().map(Vec::as_slice).collect();
            let answers = self.state.reader.multi_get(FAMILY, &keys, self.snapshot.as_ref()).await;
            let mut writer = Writer::new(&mut bytes, self.protocol);
            for answer in answers {
                match answer {
                    Ok(Some(value)) => writer.bulk(&value),
                    Ok(None) => writer.null(),
                    // The others are already promised: an error takes its element's place.
                    Err(error) => write_error(&error, &mut writer),
                }
            }
            let fitting = PIECE_BYTES / ((bytes.len() - before) / (end - self.given)).max(1);
            self.together = fitting.clamp(1, KEYS_PER_LOOKUP);
            self.given = end;
        }
        let rest = if self.given == self.keys.len() {
            Rest::Done
        } else {
            Rest::More(Box::new(Stream::Lookup(self)))
        };
        Piece { bytes, rest }
    }
}

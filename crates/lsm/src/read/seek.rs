//! A seek key: an internal key built for one lookup, on the stack unless the key is very long.

use rocksfmt::{SEEK_TYPE, pack};

const INLINE: usize = 120;

/// The internal key that sorts before every version of a user key visible at a sequence.
pub(crate) struct SeekKey {
    inline: [u8; INLINE],
    len: usize,
    heap: Vec<u8>,
}

impl SeekKey {
    #[inline]
    pub fn new(user_key: &[u8], sequence: u64) -> SeekKey {
        SeekKey::with_packed(user_key, pack(sequence, SEEK_TYPE))
    }

    /// The internal key of a user key and a packed sequence and type.
    #[inline]
    pub fn with_packed(user_key: &[u8], packed: u64) -> SeekKey {
        let trailer = packed.to_le_bytes();
        let len = user_key.len() + trailer.len();
        let mut key = SeekKey { inline: [0; INLINE], len, heap: Vec::new() };
        if len <= INLINE {
            key.inline[..user_key.len()].copy_from_slice(user_key);
            key.inline[user_key.len()..len].copy_from_slice(&trailer);
        } else {
            key.heap.reserve_exact(len);
            key.heap.extend_from_slice(user_key);
            key.heap.extend_from_slice(&trailer);
        }
        key
    }

    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        if self.len <= INLINE { &self.inline[..self.len] } else { &self.heap }
    }
}

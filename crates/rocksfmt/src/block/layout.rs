//! The layout of a block and of its entries; the foundation of searches and cursors.

use crate::coding::{fixed32_at, varint32_at};
use crate::error::{Error, Result};

const _: () = assert!(usize::BITS >= 64, "offset arithmetic relies on 64-bit usize");

pub(crate) const FLAG_HASH_INDEX: u32 = 1 << 31;
pub(crate) const FLAG_RESERVED: u32 = 1 << 30;
const FLAG_UNIFORM: u32 = 1 << 29;
pub(crate) const FLAG_SEPARATED: u32 = 1 << 28;
pub(crate) const RESTART_COUNT_MASK: u32 = FLAG_SEPARATED - 1;

/// The offsets of a block's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    /// End of the entries (of the key section if values are separate).
    entries_end: u32,
    /// Start of the restart array.
    restarts: u32,
    restart_count: u32,
    /// Start of the value section; `u32::MAX` if each value follows its key.
    values: u32,
}

const NOT_SEPARATED: u32 = u32::MAX;

impl BlockLayout {
    /// Parses the end of an uncompressed block and checks the restart array.
    pub fn parse(data: &[u8]) -> Result<BlockLayout> {
        let Some(mut end) = data.len().checked_sub(4).filter(|_| u32::try_from(data.len()).is_ok())
        else {
            return Err(Error::corruption(format!("block of {} bytes", data.len())));
        };
        let footer = fixed32_at(data, end).unwrap_or(0);
        if footer & FLAG_RESERVED != 0 {
            return Err(Error::unsupported(format!(
                "block footer {footer:08x} uses a reserved bit"
            )));
        }
        let restart_count = footer & RESTART_COUNT_MASK;
        let overrun = || {
            Error::corruption(format!(
                "block footer {footer:08x} does not fit {} bytes",
                data.len()
            ))
        };
        let mut values = None;
        if footer & FLAG_SEPARATED != 0 {
            end = end.checked_sub(4).ok_or_else(overrun)?;
            values = fixed32_at(data, end);
        }
        if footer & FLAG_HASH_INDEX != 0 {
            end = end.checked_sub(2).ok_or_else(overrun)?;
            let buckets = usize::from(u16::from_le_bytes([data[end], data[end + 1]]));
            end = end.checked_sub(buckets).ok_or_else(overrun)?;
        }
        let restarts = end.checked_sub(restart_count as usize * 4).ok_or_else(overrun)?;
        if restart_count == 0 {
            return Err(Error::corruption("block without restart points"));
        }
        let entries_end = values.map_or(restarts, |v| v as usize);
        if entries_end > restarts {
            return Err(Error::corruption(format!(
                "values start at {entries_end}, after the restart points at {restarts}"
            )));
        }
        let layout = BlockLayout {
            entries_end: entries_end as u32,
            restarts: restarts as u32,
            restart_count,
            values: values.unwrap_or(NOT_SEPARATED),
        };
        layout.check_restarts(data)?;
        let _ = footer & FLAG_UNIFORM;
        Ok(layout)
    }

    fn check_restarts(&self, data: &[u8]) -> Result<()> {
        let array =
            &data[self.restarts as usize..self.restarts as usize + self.restart_count as usize * 4];
        let mut previous = None;
        for word in array.as_chunks::<4>().0 {
            let offset = u32::from_le_bytes(*word);
            let ascends = previous.map_or(offset == 0, |p| offset > p);
            let inside = offset < self.entries_end || (offset == 0 && self.restart_count == 1);
            if !ascends || !inside {
                return Err(Error::corruption(format!(
                    "restart offset {offset} after {previous:?} in a block with {} bytes of entries",
                    self.entries_end
                )));
            }
            previous = Some(offset);
        }
        Ok(())
    }

    /// Number of restart points.
    pub fn restart_count(&self) -> u32 {
        self.restart_count
    }

    /// Whether the block has no entries.
    pub fn is_empty(&self) -> bool {
        self.entries_end == 0
    }

    /// Whether keys and values are in separate sections.
    pub(crate) fn is_separated(&self) -> bool {
        self.values != NOT_SEPARATED
    }

    /// Index of the last restart point before offset `at`; 0 if there is none.
    pub(crate) fn restart_before(&self, data: &[u8], at: usize) -> u32 {
        let (mut low, mut high) = (0, self.restart_count);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.restart(data, middle).is_some_and(|offset| offset < at) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low.saturating_sub(1)
    }

    /// The entries (the key section if values are separate); `None` if `data` is not this layout's
    /// block.
    #[inline(always)]
    pub(crate) fn entries<'d>(&self, data: &'d [u8]) -> Option<&'d [u8]> {
        data.get(..self.entries_end as usize)
    }

    /// Where the offset of restart point `index` is.
    #[inline(always)]
    pub(crate) fn restart_place(&self, index: u32) -> usize {
        self.restarts as usize + index as usize * 4
    }

    /// Where the offset of the restart point in the middle is, the first that a search reads.
    #[inline]
    pub fn middle_place(&self) -> usize {
        self.restart_place(self.restart_count / 2)
    }

    /// The offset of the entry whose key a search in a data block reads first.
    #[inline]
    pub fn middle_entry(&self, data: &[u8]) -> Option<usize> {
        self.restart(data, self.restart_count / 2)
    }

    /// The offset of the entry after the one at `at` of a data block.
    #[inline]
    pub fn entry_after(&self, data: &[u8], at: usize) -> Option<usize> {
        let entries = self.entries(data)?;
        let next = self.entry(entries, at, true, &ValueSpan::default())?.next;
        (next < entries.len()).then_some(next)
    }

    /// Offset of restart point `index`.
    #[inline(always)]
    pub(crate) fn restart(&self, data: &[u8], index: u32) -> Option<usize> {
        if index >= self.restart_count {
            return None;
        }
        fixed32_at(data, self.restarts as usize + index as usize * 4).map(|o| o as usize)
    }
}

/// A decoded entry header, as offsets into the block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry<V> {
    /// Bytes taken from the previous key.
    pub shared: usize,
    /// Start of the key suffix.
    pub suffix: usize,
    /// End of the key suffix.
    pub suffix_end: usize,
    /// The decoded value.
    pub value: V,
    /// Start of the next entry.
    pub next: usize,
}

/// How to decode the entries of a kind of block: this is where data blocks and index blocks differ.
pub(crate) trait Entries: Copy {
    /// The decoded value of an entry.
    type Value: Copy + Default;
    /// Bytes at the end of each key that are not part of the user key.
    fn trailer_bytes(self) -> usize;
    /// The block's layout.
    fn layout(&self) -> &BlockLayout;
    /// Decodes the entry at `at`. `entries` is [`BlockLayout::entries`]; `restart` says that `at`
    /// is a restart point; `previous` is the value of the previous entry (the default at a restart
    /// point).
    fn entry(
        self,
        entries: &[u8],
        at: usize,
        restart: bool,
        previous: &Self::Value,
    ) -> Option<Entry<Self::Value>>;
    /// The key at a restart point, without decoding its value.
    fn restart_key(self, entries: &[u8], at: usize) -> Option<&[u8]>;
}

/// The range of a value in its block.
pub(crate) type ValueSpan = (u32, u32);

impl Entries for BlockLayout {
    type Value = ValueSpan;

    #[inline(always)]
    fn trailer_bytes(self) -> usize {
        crate::key::KEY_TRAILER_BYTES
    }

    #[inline(always)]
    fn layout(&self) -> &BlockLayout {
        self
    }

    #[inline(always)]
    fn entry(
        self,
        entries: &[u8],
        at: usize,
        restart: bool,
        previous: &ValueSpan,
    ) -> Option<Entry<ValueSpan>> {
        let (shared, non_shared, value_len, suffix) = header3(entries, at)?;
        if self.values == NOT_SEPARATED {
            let suffix_end = suffix + non_shared as usize;
            let next = suffix_end + value_len as usize;
            if next > entries.len() {
                return None;
            }
            let value = (suffix_end as u32, next as u32);
            return Some(Entry { shared: shared as usize, suffix, suffix_end, value, next });
        }
        let (start, suffix) = if restart {
            let (start, suffix) = varint32_at(entries, suffix)?;
            (self.values.checked_add(start)?, suffix)
        } else {
            (previous.1, suffix)
        };
        let next = suffix + non_shared as usize;
        let value_end = start.checked_add(value_len)?;
        if next > entries.len() || value_end > self.restarts || start < self.values {
            return None;
        }
        Some(Entry {
            shared: shared as usize,
            suffix,
            suffix_end: next,
            value: (start, value_end),
            next,
        })
    }

    #[inline(always)]
    fn restart_key(self, entries: &[u8], at: usize) -> Option<&[u8]> {
        let (shared, non_shared, _, mut suffix) = header3(entries, at)?;
        if self.values != NOT_SEPARATED {
            suffix = varint32_at(entries, suffix)?.1;
        }
        if shared != 0 {
            return None;
        }
        entries.get(suffix..suffix + non_shared as usize)
    }
}

/// Reads three varint32, nearly always of one byte each.
#[inline(always)]
pub(crate) fn header3(data: &[u8], at: usize) -> Option<(u32, u32, u32, usize)> {
    if let Some(&[a, b, c]) = data.get(at..)?.first_chunk::<3>()
        && (a | b | c) < 0x80
    {
        return Some((u32::from(a), u32::from(b), u32::from(c), at + 3));
    }
    let (a, at) = varint32_at(data, at)?;
    let (b, at) = varint32_at(data, at)?;
    let (c, at) = varint32_at(data, at)?;
    Some((a, b, c, at))
}

#[cold]
#[inline(never)]
pub(crate) fn bad_entry() -> Error {
    Error::corruption("block entry does not parse")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::block::{BlockBuilder, Form};

    #[test]
    fn a_reserved_footer_bit_is_refused() {
        let data = [0, 0, 0, 0, 1, 0, 0, 0x40];
        assert_eq!(BlockLayout::parse(&data).unwrap_err().kind(), crate::Kind::Unsupported);
    }

    #[test]
    fn impossible_restart_arrays_are_refused() {
        let mut b = BlockBuilder::new(Form::Plain, 1);
        b.add(b"aaaaaaaaa", b"1");
        b.add(b"bbbbbbbbb", b"2");
        let good = b.finish();
        BlockLayout::parse(&good).unwrap();
        let restarts = good.len() - 12;
        for (at, value) in
            [(0, 1u32), (4, 0), (4, restarts as u32), (4, u32::MAX), (8, 0), (8, 1 << 20)]
        {
            let mut bad = good.clone();
            bad[restarts + at..restarts + at + 4].copy_from_slice(&value.to_le_bytes());
            assert!(BlockLayout::parse(&bad).is_err(), "{value} at {at}");
        }
        for len in 0..8 {
            assert!(BlockLayout::parse(&vec![0xFF; len]).is_err());
        }
    }
}

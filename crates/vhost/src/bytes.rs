//! Reads little-endian numbers and texts from bytes that came from elsewhere.

use std::str;

/// The bytes that are not read yet. Every method returns `None`, and reads nothing that the caller
/// can rely on, if too few bytes are left or if they have no valid form.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Starts at the first of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether everything is read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of bytes left.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The next `count` bytes.
    pub fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }

    /// All bytes that are left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// One byte.
    pub fn u8(&mut self) -> Option<u8> {
        Some(self.take(1)?[0])
    }

    /// Two bytes.
    pub fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.take(2)?.try_into().ok()?))
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    /// One byte that must be 0 or 1.
    pub fn bool(&mut self) -> Option<bool> {
        match self.u8()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    /// The next `count` bytes as UTF-8.
    pub fn str(&mut self, count: usize) -> Option<&'a str> {
        str::from_utf8(self.take(count)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read_once_and_in_order() {
        let bytes: Vec<u8> = (0..16).chain(*b"name").chain([1, 0, 2, 9, 9]).collect();
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.u8(), Some(0));
        assert_eq!(reader.u16(), Some(0x0201));
        assert_eq!(reader.u32(), Some(0x0605_0403));
        assert_eq!(reader.u64(), Some(0x0e0d_0c0b_0a09_0807));
        assert_eq!(reader.take(1), Some(&[15][..]));
        assert_eq!(reader.str(4), Some("name"));
        assert_eq!((reader.bool(), reader.bool(), reader.bool()), (Some(true), Some(false), None));
        assert_eq!((reader.len(), reader.u32()), (2, None));
        assert_eq!(reader.rest(), [9, 9]);
        assert!(reader.is_empty());
        assert_eq!(reader.u8(), None);
    }

    #[test]
    fn text_must_be_utf_8() {
        assert_eq!(Reader::new(b"\xff").str(1), None);
    }
}

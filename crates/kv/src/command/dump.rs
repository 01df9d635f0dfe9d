//! The payloads of `DUMP` and `RESTORE`: a string in the form of Redis's RDB files, version and
//! checksum after it.
//!
//! ```text
//! type 0 | length or encoding | bytes | version, 2 bytes | CRC-64 of all before it, 8 bytes
//! ```
//!
//! Strings are written as they are or, like Redis does, as integers of 8, 16 or 32 bits. What
//! Redis has compressed (LZF) is read. Functions over long payloads take a part at a time, so that
//! their callers can let other tasks run in between.

use resp::parse_i64;

/// Bytes that are summed or unpacked at a time.
pub(crate) const STEP_BYTES: usize = 64 * 1024;

/// The version of RDB that Redis 7.0 writes, and the last one that it reads.
const VERSION: u16 = 10;
const FOOTER_BYTES: usize = 2 + 8;
const TYPE_STRING: u8 = 0;
/// The types of other values that Redis 7.0 knows.
const TYPES_OTHER: std::ops::RangeInclusive<u8> = 1..=20;

pub(crate) const BAD_CHECKSUM: &str = "ERR DUMP payload version or checksum are wrong";
pub(crate) const BAD_FORMAT: &str = "ERR Bad data format";
pub(crate) const OTHER_TYPE: &str =
    "ERR this version of millrace has strings only: the payload is of another type";

/// `CRC64`'s polynomial in Redis, reflected.
const POLYNOMIAL: u64 = 0x95ac_9329_ac4b_c9b5;

/// For byte `b` at distance `d` from the end of an eight-byte word: `TABLES[d][b]`.
static TABLES: [[u64; 256]; 8] = tables();

const fn tables() -> [[u64; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut sum = byte as u64;
        let mut bit = 0;
        while bit < 8 {
            sum = if sum & 1 == 1 { sum >> 1 ^ POLYNOMIAL } else { sum >> 1 };
            bit += 1;
        }
        tables[0][byte] = sum;
        byte += 1;
    }
    let mut distance = 1;
    while distance < 8 {
        let mut byte = 0;
        while byte < 256 {
            let sum = tables[distance - 1][byte];
            tables[distance][byte] = sum >> 8 ^ tables[0][(sum & 0xff) as usize];
            byte += 1;
        }
        distance += 1;
    }
    tables
}

/// Continues a checksum with more bytes.
pub(crate) fn crc64(mut sum: u64, bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(8);
    for word in words.by_ref() {
        let mut eight = [0; 8];
        eight.copy_from_slice(word);
        let mixed = (sum ^ u64::from_le_bytes(eight)).to_le_bytes();
        sum = mixed
            .iter()
            .enumerate()
            .fold(0, |sum, (at, byte)| sum ^ TABLES[7 - at][usize::from(*byte)]);
    }
    for byte in words.remainder() {
        sum = sum >> 8 ^ TABLES[0][usize::from(sum as u8 ^ byte)];
    }
    sum
}

/// The beginning of a value's payload, and whether the value's bytes follow it.
pub(crate) fn header(value: &[u8]) -> (Vec<u8>, bool) {
    let mut header = vec![TYPE_STRING];
    let number = if value.len() <= 11 { parse_i64(value) } else { None };
    if let Some(number) = number.and_then(|number| i32::try_from(number).ok()) {
        let bytes = number.to_le_bytes();
        let (encoding, length) = match () {
            () if i8::try_from(number).is_ok() => (0xc0, 1),
            () if i16::try_from(number).is_ok() => (0xc1, 2),
            () => (0xc2, 4),
        };
        header.push(encoding);
        header.extend_from_slice(&bytes[..length]);
        return (header, false);
    }
    match value.len() as u64 {
        length @ ..64 => header.push(length as u8),
        length @ ..0x4000 => header.extend_from_slice(&(length as u16 | 0x4000).to_be_bytes()),
        length => match u32::try_from(length) {
            Ok(length) => {
                header.push(0x80);
                header.extend_from_slice(&length.to_be_bytes());
            }
            Err(_) => {
                header.push(0x81);
                header.extend_from_slice(&length.to_be_bytes());
            }
        },
    }
    (header, true)
}

/// The end of a payload, after bytes with this checksum.
pub(crate) fn footer(sum: u64) -> [u8; FOOTER_BYTES] {
    let mut footer = [0; FOOTER_BYTES];
    footer[..2].copy_from_slice(&VERSION.to_le_bytes());
    let sum = crc64(sum, &footer[..2]);
    footer[2..].copy_from_slice(&sum.to_le_bytes());
    footer
}

/// A payload in the process of being checked and unpacked.
pub(crate) struct Restore<'a> {
    payload: &'a [u8],
    sum: u64,
    /// Bytes that have been summed.
    summed: usize,
    unpacking: Option<Unpack<'a>>,
    bytes_max: usize,
}

impl<'a> Restore<'a> {
    /// Begins with a payload, whose value may have at most `bytes_max` bytes.
    pub(crate) fn new(payload: &'a [u8], bytes_max: usize) -> Self {
        Self { payload, sum: 0, summed: 0, unpacking: None, bytes_max }
    }

    /// Takes the next step. Returns the value when it is unpacked.
    pub(crate) fn step(&mut self) -> Result<Option<Vec<u8>>, &'static str> {
        let Some((checked, sum)) = self.payload.split_last_chunk::<8>() else {
            return Err(BAD_CHECKSUM);
        };
        let Some((content, version)) = checked.split_last_chunk::<2>() else {
            return Err(BAD_CHECKSUM);
        };
        if u16::from_le_bytes(*version) > VERSION {
            return Err(BAD_CHECKSUM);
        }
        if self.summed < checked.len() {
            let end = checked.len().min(self.summed + STEP_BYTES);
            self.sum = crc64(self.sum, &checked[self.summed..end]);
            self.summed = end;
            if end == checked.len() && self.sum != u64::from_le_bytes(*sum) {
                return Err(BAD_CHECKSUM);
            }
            return Ok(None);
        }
        match &mut self.unpacking {
            Some(unpack) => unpack.step(),
            None => match parse(content)? {
                Content::Plain(value) if value.len() <= self.bytes_max => Ok(Some(value.to_vec())),
                Content::Number(number) => Ok(Some(number.to_string().into_bytes())),
                Content::Packed { packed, length } if length <= self.bytes_max => {
                    self.unpacking = Some(Unpack { packed, length, value: Vec::new() });
                    Ok(None)
                }
                Content::Plain(_) | Content::Packed { .. } => Err(TOO_LONG),
            },
        }
    }

    /// Takes all steps.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>, &'static str> {
        loop {
            if let Some(value) = self.step()? {
                return Ok(value);
            }
        }
    }
}

const TOO_LONG: &str = "ERR string exceeds maximum allowed size (proto-max-bulk-len)";

enum Content<'a> {
    Plain(&'a [u8]),
    Number(i32),
    Packed { packed: &'a [u8], length: usize },
}

fn parse(content: &[u8]) -> Result<Content<'_>, &'static str> {
    let mut rest = match content {
        [TYPE_STRING, rest @ ..] => rest,
        [kind, ..] if TYPES_OTHER.contains(kind) => return Err(OTHER_TYPE),
        _ => return Err(BAD_FORMAT),
    };
    let found = match rest.first() {
        Some(0xc0) => rest.get(1..2).map(|bytes| i32::from(bytes[0] as i8)).map(Content::Number),
        Some(0xc1) => rest
            .get(1..)
            .and_then(<[u8]>::first_chunk)
            .map(|bytes| Content::Number(i16::from_le_bytes(*bytes).into())),
        Some(0xc2) => rest
            .get(1..)
            .and_then(<[u8]>::first_chunk)
            .map(|bytes| Content::Number(i32::from_le_bytes(*bytes))),
        Some(0xc3) => {
            rest = &rest[1..];
            let packed = take_length(&mut rest);
            packed.zip(take_length(&mut rest)).and_then(|(packed, length)| {
                Some(Content::Packed { packed: rest.get(..packed)?, length })
            })
        }
        _ => take_length(&mut rest).and_then(|length| rest.get(..length)).map(Content::Plain),
    };
    found.ok_or(BAD_FORMAT)
}

/// Takes a length from the beginning of `rest`.
fn take_length(rest: &mut &[u8]) -> Option<usize> {
    let (first, after) = rest.split_first()?;
    let (length, after) = match first {
        0..=0x3f => (u64::from(*first), after),
        0x40..=0x7f => {
            let (second, after) = after.split_first()?;
            (u64::from(first & 0x3f) << 8 | u64::from(*second), after)
        }
        0x80 => {
            let (bytes, after) = after.split_first_chunk()?;
            (u32::from_be_bytes(*bytes).into(), after)
        }
        0x81 => {
            let (bytes, after) = after.split_first_chunk()?;
            (u64::from_be_bytes(*bytes), after)
        }
        _ => return None,
    };
    *rest = after;
    usize::try_from(length).ok()
}

/// LZF: literal bytes, and references to bytes before them.
struct Unpack<'a> {
    packed: &'a [u8],
    /// Length of the value.
    length: usize,
    value: Vec<u8>,
}

impl Unpack<'_> {
    /// Unpacks the next bytes. Returns the value at the end.
    fn step(&mut self) -> Result<Option<Vec<u8>>, &'static str> {
        let pause = self.value.len() + STEP_BYTES;
        while self.value.len() < pause {
            if self.packed.is_empty() {
                return match self.value.len() == self.length {
                    true => Ok(Some(std::mem::take(&mut self.value))),
                    false => Err(BAD_FORMAT),
                };
            }
            self.take_run().ok_or(BAD_FORMAT)?;
        }
        Ok(None)
    }

    fn take_run(&mut self) -> Option<()> {
        let (control, mut rest) = self.packed.split_first()?;
        let control = usize::from(*control);
        if control < 32 {
            let (literal, rest) = rest.split_at_checked(control + 1)?;
            self.value.extend_from_slice(literal);
            self.packed = rest;
        } else {
            let mut length = control >> 5;
            if length == 7 {
                let (more, after) = rest.split_first()?;
                length += usize::from(*more);
                rest = after;
            }
            let (low, rest) = rest.split_first()?;
            let back = (control & 31) << 8 | usize::from(*low);
            let from = self.value.len().checked_sub(back + 1)?;
            // The bytes may overlap those that they become.
            for at in from..from + length + 2 {
                self.value.push(self.value[at]);
            }
            self.packed = rest;
        }
        (self.value.len() <= self.length).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dump(value: &[u8]) -> Vec<u8> {
        let (mut payload, follows) = header(value);
        if follows {
            payload.extend_from_slice(value);
        }
        payload.extend_from_slice(&footer(crc64(0, &payload)));
        payload
    }

    fn restore(payload: &[u8]) -> Result<Vec<u8>, &'static str> {
        Restore::new(payload, 1 << 20).finish()
    }

    #[test]
    fn the_checksum_is_that_of_redis() {
        assert_eq!(crc64(0, b"123456789"), 0xe9c6_d914_c4b8_d9ca);
        let text = b"This is a test of the emergency broadcast system.";
        assert_eq!(crc64(crc64(0, &text[..13]), &text[13..]), crc64(0, text));
    }

    /// Payloads of redis-server 7.0.15.
    #[test]
    fn payloads_are_those_of_redis() {
        for (value, payload) in [
            (&b"bar"[..], &b"\x00\x03bar\n\x00\xe6\xbeI`\xeef\xfd\x17"[..]),
            (b"1000", b"\x00\xc1\xe8\x03\n\x00\x89\xd1G\x8e\xba\xc4\xb7d"),
        ] {
            assert_eq!(dump(value), payload);
            assert_eq!(restore(payload), Ok(value.to_vec()));
        }
        assert_eq!(dump(b"-7")[..3], *b"\x00\xc0\xf9");
        assert_eq!(dump(b"-100000")[..6], *b"\x00\xc2\x60\x79\xfe\xff");
        let packed = b"\x00\xc3\n@x\x02aba\xe0j\x01\x01ab\n\x00\xb2\x88p\x8cS\x07\x16\xd2";
        assert_eq!(restore(packed), Ok(b"ab".repeat(60)));
    }

    fn sealed(content: &[u8]) -> Vec<u8> {
        let mut payload = content.to_vec();
        payload.extend_from_slice(&footer(crc64(0, content)));
        payload
    }

    #[test]
    fn compressed_values_are_unpacked() {
        // "ab" and then 98 bytes from two bytes before: lengths 7 + 89 + 2.
        let packed = sealed(b"\x00\xc3\x06\x40\x64\x01ab\xe0\x59\x01");
        assert_eq!(restore(&packed), Ok(b"ab".repeat(50)));
        for broken in [
            &b"\x00\xc3\x06\x40\x65\x01ab\xe0\x59\x01"[..],
            b"\x00\xc3\x06\x40\x63\x01ab\xe0\x59\x01",
            b"\x00\xc3\x06\x40\x64\x01ab\xe0\x59\x02",
            b"\x00\xc3\x05\x40\x64\x01ab\xe0\x59",
            b"\x00\xc3\x07\x40\x64\x01ab\xe0\x59\x01",
            b"\x00\xc4",
            b"\x00\x05abc",
            b"\x00",
            b"",
            b"\xff",
        ] {
            assert_eq!(restore(&sealed(broken)), Err(BAD_FORMAT), "{broken:?}");
        }
        assert_eq!(restore(&sealed(b"\x01\x00")), Err(OTHER_TYPE));
        let huge = sealed(b"\x00\xc3\x06\x81\x00\x00\x7f\xff\xff\xff\xff\xff\x01ab\xe0\x59\x01");
        assert_eq!(restore(&huge), Err(TOO_LONG));
    }

    #[test]
    fn a_changed_payload_is_refused() {
        let payload = dump(b"value");
        for at in 0..payload.len() {
            let mut changed = payload.clone();
            changed[at] ^= 1;
            assert_eq!(restore(&changed), Err(BAD_CHECKSUM), "{at}");
            assert!(restore(&payload[..at]).is_err());
        }
    }

    #[test]
    fn long_values_keep_their_length() {
        for length in [63, 64, 0x3fff, 0x4000, 3 * STEP_BYTES + 1] {
            let value = vec![b'x'; length];
            assert_eq!(restore(&dump(&value)), Ok(value));
        }
    }

    proptest! {
        #[test]
        fn what_is_dumped_is_restored(value in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(restore(&dump(&value)), Ok(value));
        }

        #[test]
        fn numbers_are_restored(number: i64) {
            let value = number.to_string().into_bytes();
            prop_assert_eq!(restore(&dump(&value)), Ok(value));
        }

        #[test]
        fn any_content_is_refused_or_restored(
            content in proptest::collection::vec(any::<u8>(), 0..200),
            packed: bool,
        ) {
            let mut content = content;
            if packed && content.len() > 1 {
                (content[0], content[1]) = (0, 0xc3);
            }
            let restored = Restore::new(&sealed(&content), 1000).finish();
            prop_assert!(restored.is_err() || restored.unwrap().len() <= 1000);
        }
    }
}

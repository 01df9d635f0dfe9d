//! `LCS`: the longest common subsequence of two values, by the usual table of the lengths for all
//! prefixes.
//!
//! Of the table only one row is kept, and one bit of each cell: which neighbour the way back takes.
//! The table is filled in steps, so that the caller can let other tasks run in between.

use resp::{Writer, parse_i64};

use crate::command::args::Args;
use crate::command::refusal::Refusal;

/// Cells that are filled at a time.
const STEP_CELLS: usize = 1 << 15;
/// Bytes of a cell in Redis, which refuses a table that is too large.
const CELL_BYTES: u64 = 4;

/// The refusal of values whose table would be too large.
pub(crate) const TOO_LARGE: &str =
    "ERR Insufficient memory, transient memory for LCS exceeds proto-max-bulk-len";

/// The options of `LCS`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LcsOptions {
    /// Only the length.
    length: bool,
    /// The ranges that match instead of the sequence.
    ranges: bool,
    /// The shortest range to be listed.
    range_min: u64,
    /// Each range with its length.
    range_lengths: bool,
}

impl LcsOptions {
    /// Parses the options, which begin at the fourth argument.
    pub(crate) fn parse(args: Args<'_>) -> Result<Self, Refusal<'_>> {
        let mut options = Self::default();
        let mut at = 3;
        while at < args.len() {
            match () {
                () if args.is(at, "idx") => options.ranges = true,
                () if args.is(at, "len") => options.length = true,
                () if args.is(at, "withmatchlen") => options.range_lengths = true,
                () if args.is(at, "minmatchlen") && at + 1 < args.len() => {
                    at += 1;
                    let length = parse_i64(args.get(at)).ok_or(Refusal::NOT_AN_INTEGER)?;
                    options.range_min = u64::try_from(length).unwrap_or(0);
                }
                () => return Err(Refusal::SYNTAX),
            }
            at += 1;
        }
        match options.length && options.ranges {
            true => Err(Refusal::Text(
                "ERR If you want both the length and indexes, please just use IDX.",
            )),
            false => Ok(options),
        }
    }
}

/// A table in the making.
pub(crate) struct Lcs<'a> {
    a: &'a [u8],
    b: &'a [u8],
    /// The lengths of the last row that is filled: for each prefix of the shorter value.
    row: Vec<u32>,
    /// Bytes of the longer value whose rows are filled.
    filled: usize,
    /// For the cell of two prefixes, whether the way back shortens `a`; in the order of the rows.
    /// Empty if no way back is needed.
    shortens_a: Vec<u64>,
}

impl<'a> Lcs<'a> {
    /// Begins; refuses a table for which Redis would take more than `bytes_max` bytes.
    pub(crate) fn new(
        a: &'a [u8],
        b: &'a [u8],
        options: LcsOptions,
        bytes_max: usize,
    ) -> Result<Self, &'static str> {
        let cells = (a.len() as u64 + 1).saturating_mul(b.len() as u64 + 1);
        if cells.saturating_mul(CELL_BYTES) > bytes_max as u64 {
            return Err(TOO_LARGE);
        }
        let bits = if options.length { 0 } else { a.len() * b.len() };
        Ok(Self {
            a,
            b,
            row: vec![0; a.len().min(b.len()) + 1],
            filled: 0,
            shortens_a: vec![0; bits.div_ceil(64)],
        })
    }

    fn is_a_longer(&self) -> bool {
        self.a.len() >= self.b.len()
    }

    /// Fills the next cells; false when all are filled.
    pub(crate) fn step(&mut self) -> bool {
        let a_is_longer = self.is_a_longer();
        let (long, short) = if a_is_longer { (self.a, self.b) } else { (self.b, self.a) };
        let mut cells = 0;
        while self.filled < long.len() && cells < STEP_CELLS {
            let byte = long[self.filled];
            // The cells of the row before this one: at the same prefix, and at the one before it.
            let mut diagonal = 0;
            for (at, other) in short.iter().enumerate() {
                let (before, beside) = (self.row[at + 1], self.row[at]);
                self.row[at + 1] = if byte == *other {
                    diagonal + 1
                } else {
                    let without_a = if a_is_longer { before > beside } else { beside > before };
                    if without_a && !self.shortens_a.is_empty() {
                        let cell = self.filled * short.len() + at;
                        self.shortens_a[cell / 64] |= 1 << (cell % 64);
                    }
                    before.max(beside)
                };
                diagonal = before;
            }
            self.filled += 1;
            cells += short.len() + 1;
        }
        self.filled < long.len()
    }

    /// The length of the sequence, after all cells have been filled.
    fn length(&self) -> usize {
        self.row.last().map_or(0, |length| *length as usize)
    }

    fn shortens_a(&self, i: usize, j: usize) -> bool {
        let cell = if self.is_a_longer() { i * self.b.len() + j } else { j * self.a.len() + i };
        self.shortens_a[cell / 64] >> (cell % 64) & 1 == 1
    }

    /// The matching positions, from the last to the first.
    fn matches(&self) -> impl Iterator<Item = (usize, usize)> {
        let (mut i, mut j) = (self.a.len(), self.b.len());
        std::iter::from_fn(move || {
            while i > 0 && j > 0 {
                if self.a[i - 1] == self.b[j - 1] {
                    (i, j) = (i - 1, j - 1);
                    return Some((i, j));
                }
                match self.shortens_a(i - 1, j - 1) {
                    true => i -= 1,
                    false => j -= 1,
                }
            }
            None
        })
    }

    /// Writes the reply, after all cells have been filled.
    pub(crate) fn write(&self, options: LcsOptions, writer: &mut Writer<'_>) {
        if options.ranges {
            return self.write_ranges(options, writer);
        }
        if options.length {
            return writer.integer(self.length() as i64);
        }
        let mut common: Vec<u8> = self.matches().map(|(i, _)| self.a[i]).collect();
        common.reverse();
        writer.bulk(&common);
    }

    fn write_ranges(&self, options: LcsOptions, writer: &mut Writer<'_>) {
        // Each as the first positions and the length.
        let mut ranges: Vec<(usize, usize, usize)> = Vec::new();
        for (i, j) in self.matches() {
            match ranges.last_mut() {
                Some((a, b, length)) if *a == i + 1 && *b == j + 1 => {
                    (*a, *b, *length) = (i, j, *length + 1);
                }
                _ => ranges.push((i, j, 1)),
            }
        }
        ranges.retain(|(_, _, length)| *length as u64 >= options.range_min);
        writer.map(2);
        writer.bulk(b"matches");
        writer.array(ranges.len());
        for (a, b, length) in ranges {
            writer.array(2 + usize::from(options.range_lengths));
            for first in [a, b] {
                writer.array(2);
                writer.integer(first as i64);
                writer.integer((first + length - 1) as i64);
            }
            if options.range_lengths {
                writer.integer(length as i64);
            }
        }
        writer.bulk(b"len");
        writer.integer(self.length() as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::args::tests::with;
    use proptest::prelude::*;
    use resp::Protocol;

    fn reply(line: &str, a: &[u8], b: &[u8]) -> String {
        let options = with(line, |args| LcsOptions::parse(args).unwrap());
        let mut lcs = Lcs::new(a, b, options, 1 << 20).unwrap();
        while lcs.step() {}
        let mut out = Vec::new();
        lcs.write(options, &mut Writer::new(&mut out, Protocol::V3));
        String::from_utf8(out).unwrap().replace("\r\n", " ")
    }

    /// The replies of redis-server 7.0.15.
    #[test]
    fn sequences_are_found_as_redis_finds_them() {
        let (a, b) = (&b"ohmytext"[..], &b"mynewtext"[..]);
        assert_eq!(reply("lcs a b", a, b), "$6 mytext ");
        assert_eq!(reply("lcs a b len", a, b), ":6 ");
        assert_eq!(
            reply("lcs a b idx", a, b),
            "%2 $7 matches *2 *2 *2 :4 :7 *2 :5 :8 *2 *2 :2 :3 *2 :0 :1 $3 len :6 "
        );
        assert_eq!(
            reply("lcs a b idx minmatchlen 4 withmatchlen", a, b),
            "%2 $7 matches *1 *3 *2 :4 :7 *2 :5 :8 :4 $3 len :6 "
        );
        assert_eq!(reply("lcs a b", b"", b), "$0  ");
        assert_eq!(reply("lcs a b idx", b"", b""), "%2 $7 matches *0 $3 len :0 ");
    }

    #[test]
    fn wrong_options_and_tables_too_large_are_refused() {
        for line in ["lcs a b x", "lcs a b minmatchlen", "lcs a b minmatchlen x", "lcs a b len idx"]
        {
            with(line, |args| assert!(LcsOptions::parse(args).is_err(), "{line}"));
        }
        let value = [0; 100];
        let new = |bytes_max| Lcs::new(&value, &value, LcsOptions::default(), bytes_max).err();
        assert_eq!((new(101 * 101 * 4), new(101 * 101 * 4 - 1)), (None, Some(TOO_LARGE)));
    }

    proptest! {
        #[test]
        fn both_orders_of_the_table_agree_with_a_plain_one(
            a in proptest::collection::vec(0..4u8, 0..40),
            b in proptest::collection::vec(0..4u8, 0..40),
        ) {
            let mut table = vec![vec![0usize; b.len() + 1]; a.len() + 1];
            for i in 1..=a.len() {
                for j in 1..=b.len() {
                    table[i][j] = match a[i - 1] == b[j - 1] {
                        true => table[i - 1][j - 1] + 1,
                        false => table[i - 1][j].max(table[i][j - 1]),
                    };
                }
            }
            let mut way = Vec::new();
            let (mut i, mut j) = (a.len(), b.len());
            while i > 0 && j > 0 {
                if a[i - 1] == b[j - 1] {
                    (i, j) = (i - 1, j - 1);
                    way.push((i, j));
                } else if table[i - 1][j] > table[i][j - 1] {
                    i -= 1;
                } else {
                    j -= 1;
                }
            }
            let mut lcs = Lcs::new(&a, &b, LcsOptions::default(), 1 << 20).unwrap();
            while lcs.step() {}
            prop_assert_eq!(lcs.length(), table[a.len()][b.len()]);
            prop_assert_eq!(lcs.matches().collect::<Vec<_>>(), way);
        }
    }
}

//! The first record of a write-ahead log whose groups have no ends ([`GroupEnd`](crate::GroupEnd)
//! takes its role in other logs).
//!
//! Its sequence is that of the log's first batch, so that a missing or truncated log before it is
//! detected. To RocksDB it is an empty batch with an annotation, which it replays without effect:
//!
//! ```text
//! fixed64 sequence of the first batch | fixed32 0 | u8 3 (LogData) | u8 3 | "mls"
//! ```

use crate::batch::tag;

const REST: [u8; 9] = [0, 0, 0, 0, tag::LOG_DATA, 3, b'm', b'l', b's'];

/// The contents of a start record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogStart {
    /// The sequence of the log's first batch.
    pub sequence: u64,
}

impl LogStart {
    /// The logical record.
    pub fn encode(&self) -> Vec<u8> {
        [&self.sequence.to_le_bytes()[..], &REST].concat()
    }

    /// Parses a logical record; `None` if it is not a start record.
    pub fn parse(record: &[u8]) -> Option<LogStart> {
        let (sequence, rest) = record.split_first_chunk()?;
        (rest == REST).then(|| LogStart { sequence: u64::from_le_bytes(*sequence) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupEnd;
    use crate::batch::keys_noted;
    use crate::testing::BatchBuilder;

    #[test]
    fn a_start_is_an_empty_batch_and_no_other_record_is_taken_for_one() {
        let start = LogStart { sequence: 0x0012_3456_789A_BCDE };
        let record = start.encode();
        assert_eq!(record, BatchBuilder::new(start.sequence).log_data(b"mls").finish());
        assert_eq!(LogStart::parse(&record), Some(start));
        assert_eq!((GroupEnd::parse(&record), keys_noted(b"mls")), (None, None));
        for cut in 0..record.len() {
            assert_eq!(LogStart::parse(&record[..cut]), None);
        }
        for other in [
            BatchBuilder::new(7).log_data(b"mlt").finish(),
            BatchBuilder::new(7).log_data(b"mls2").finish(),
            BatchBuilder::new(7).put(0, b"mls", b"mls").finish(),
        ] {
            assert_eq!(LogStart::parse(&other), None);
        }
    }
}

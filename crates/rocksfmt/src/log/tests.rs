//! The reference's tables on log records, ends of logs, and crashes.

use proptest::prelude::*;

use crate::log::physical::{LOG_BLOCK_BYTES, kind};
use crate::log::reader::{LogEnd, LogKind, LogReader, PredecessorWal};
use crate::log::scan::{DamageScan, LaterRecord};
use crate::testing::{BatchBuilder, LogBuilder};

const NUMBER: u64 = 7;
const WAL: LogKind = LogKind::Wal { number: NUMBER };

/// Reads a whole log in one piece.
fn read(kind: LogKind, bytes: &[u8]) -> (Vec<Vec<u8>>, LogEnd) {
    let (records, reader) = read_with(LogReader::new(kind), bytes, usize::MAX);
    (records, reader.end().unwrap().clone())
}

fn read_with(mut reader: LogReader, bytes: &[u8], piece: usize) -> (Vec<Vec<u8>>, LogReader) {
    let mut records = Vec::new();
    let mut rest = bytes;
    while reader.end().is_none() {
        let (head, tail) = rest.split_at(rest.len().min(piece));
        rest = tail;
        let fed: Result<(), ()> = reader.feed(head, rest.is_empty(), |record| {
            records.push(record.data.to_vec());
            Ok(())
        });
        fed.unwrap();
    }
    (records, reader)
}

fn batch(sequence: u64) -> Vec<u8> {
    let key = format!("key{sequence:06}");
    BatchBuilder::new(sequence).put(0, key.as_bytes(), &[b'v'; 100]).finish()
}

fn log_of(mut log: LogBuilder, sequences: std::ops::Range<u64>) -> LogBuilder {
    for sequence in sequences {
        log.append(&batch(sequence));
    }
    log
}

fn damage_at(end: &LogEnd) -> u64 {
    match end {
        LogEnd::Damage { offset, .. } => *offset,
        other => panic!("expected damage, got {other:?}"),
    }
}

#[test]
fn the_bytes_of_one_put_are_rocksdbs() {
    let want = "e75a4d0011000101000000000000000100000001016b0176";
    let mut log = LogBuilder::legacy();
    log.append(&BatchBuilder::new(1).put(0, b"k", b"v").finish());
    let hex: String = log.bytes().iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(hex, want);
    let (records, end) = read(WAL, log.bytes());
    assert_eq!(records, [log.bytes()[7..].to_vec()]);
    assert_eq!(end, LogEnd::Clean);
}

#[test]
fn records_of_every_length_around_a_block_come_back() {
    for recyclable in [false, true] {
        for compressed in [false, true] {
            let mut log = match recyclable {
                false => LogBuilder::legacy(),
                true => LogBuilder::recyclable(NUMBER),
            };
            if compressed {
                log = log.compressed();
            }
            let mut want = Vec::new();
            for length in (0..40).chain(32_720..32_800).chain([65_536, 100_000]) {
                let mut random = length as u64 + 1;
                let data: Vec<u8> = (0..length)
                    .map(|_| {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        (random >> 56) as u8
                    })
                    .collect();
                log.append(&data);
                want.push(data);
            }
            for piece in [LOG_BLOCK_BYTES, 3 * LOG_BLOCK_BYTES, usize::MAX] {
                let (records, reader) = read_with(LogReader::new(WAL), log.bytes(), piece);
                assert_eq!(reader.end(), Some(&LogEnd::Clean));
                assert!(records == want, "recyclable {recyclable}, compressed {compressed}");
                assert_eq!(reader.recycled(), Some(recyclable));
                assert_eq!(reader.compressed(), compressed);
                assert_eq!(reader.good_until(), log.bytes().len() as u64);
            }
        }
    }
}

#[test]
fn empty_records_are_records() {
    let mut log = LogBuilder::legacy();
    log.append(b"").append(b"x").append(b"");
    let (records, end) = read(LogKind::Manifest, log.bytes());
    assert_eq!(records, [b"".to_vec(), b"x".to_vec(), b"".to_vec()]);
    assert_eq!(end, LogEnd::Clean);
    assert_eq!(read(WAL, b""), (vec![], LogEnd::Clean));
}

#[test]
fn a_record_without_payload_can_fill_its_block_exactly() {
    let mut log = LogBuilder::legacy();
    let filler = vec![b'x'; LOG_BLOCK_BYTES - 7 - 7];
    log.append(&filler).append(b"").append(b"next");
    let (records, end) = read(WAL, log.bytes());
    assert_eq!(records, [filler, b"".to_vec(), b"next".to_vec()]);
    assert_eq!(end, LogEnd::Clean);
}

/// Old writers began a record with an empty `First` at the end of a block, then began again after
/// it.
#[test]
fn an_empty_first_fragment_can_be_abandoned() {
    let mut log = LogBuilder::legacy();
    log.append(&vec![b'x'; LOG_BLOCK_BYTES - 7 - 7]);
    log.physical(kind::FIRST, None, b"");
    log.append(b"whole");
    let (records, end) = read(WAL, log.bytes());
    assert_eq!(records.len(), 2);
    assert_eq!(records[1], b"whole");
    assert_eq!(end, LogEnd::Clean);
}

#[test]
fn zero_tails_are_a_clean_end() {
    for tail in [1, 6, 7, 10, 11, 4096, LOG_BLOCK_BYTES, 4 << 20] {
        for log in [LogBuilder::legacy(), LogBuilder::recyclable(NUMBER)] {
            let mut log = log_of(log, 1..20);
            let good = log.bytes().len() as u64;
            log.raw(&vec![0; tail]);
            let (records, reader) = read_with(LogReader::new(WAL), log.bytes(), 1 << 20);
            assert_eq!(records.len(), 19);
            assert_eq!(reader.end(), Some(&LogEnd::Clean), "{tail}");
            assert_eq!(reader.good_until(), good);
        }
    }
    let mut manifest = LogBuilder::legacy();
    manifest.append(b"edit").raw(&[0; 5000]);
    assert_eq!(read(LogKind::Manifest, manifest.bytes()), (vec![b"edit".to_vec()], LogEnd::Clean));
}

#[test]
fn every_cut_of_a_log_is_a_truncation_at_the_record_it_cuts() {
    let mut log = LogBuilder::legacy();
    let mut starts = vec![];
    for i in 0..4u64 {
        starts.push(log.bytes().len());
        log.append(&vec![b'r'; [50, 40_000, 3, 900][i as usize]]);
    }
    let bytes = log.finish();
    starts.push(bytes.len());
    for cut in
        (0..bytes.len()).filter(|c| c % 97 == 0 || starts.iter().any(|s| s.abs_diff(*c) < 20))
    {
        let (records, end) = read(WAL, &bytes[..cut]);
        let whole = starts.iter().filter(|&&s| s <= cut).count() - 1;
        assert_eq!(records.len(), whole, "cut at {cut}");
        let on_boundary = starts.contains(&cut);
        if on_boundary {
            assert_eq!(end, LogEnd::Clean, "cut at {cut}");
        } else {
            let offset = starts[whole] as u64;
            assert_eq!(end, LogEnd::Truncated { offset }, "cut at {cut}");
        }
    }
}

#[test]
fn a_flipped_bit_is_damage_and_the_records_after_it_are_found() {
    let bytes = log_of(LogBuilder::legacy(), 1..2000).finish();
    let record = bytes.len() / 1999;
    for bit in 0..8 {
        let mut bad = bytes.clone();
        bad[10 * record + 40] ^= 1 << bit;
        let (records, reader) = read_with(LogReader::new(WAL), &bad, 64 * 1024);
        assert_eq!(records.len(), 10);
        let offset = damage_at(reader.end().unwrap());
        assert_eq!(offset, 10 * record as u64);
        let mut scan = DamageScan::new(&reader, offset, 11);
        let found = scan.push(scan.start(), &bad[scan.start() as usize..]);
        let later = LaterRecord { offset: 11 * record as u64, sequence: Some(12) };
        assert_eq!(found, Some(later));
    }
}

/// The damaged record is the last of its block: only the following blocks show the difference.
#[test]
fn damage_is_told_from_a_tail_over_block_boundaries() {
    let bytes = log_of(LogBuilder::legacy(), 1..2000).finish();
    let mut bad = bytes.clone();
    for byte in &mut bad[5 * LOG_BLOCK_BYTES - 3000..5 * LOG_BLOCK_BYTES] {
        *byte = 0xAA;
    }
    let (records, reader) = read_with(LogReader::new(WAL), &bad, LOG_BLOCK_BYTES);
    let next = records.len() as u64 + 1;
    let offset = damage_at(reader.end().unwrap());
    let mut scan = DamageScan::new(&reader, offset, next);
    let mut found = None;
    let mut at = scan.start();
    while found.is_none() {
        let piece = &bad[at as usize..at as usize + LOG_BLOCK_BYTES];
        found = scan.push(at, piece);
        at += LOG_BLOCK_BYTES as u64;
    }
    let found = found.unwrap();
    assert!(found.offset >= 5 * LOG_BLOCK_BYTES as u64);
    assert!(found.sequence.unwrap() > next);
}

#[test]
fn nothing_is_found_after_a_true_tail() {
    let bytes = log_of(LogBuilder::legacy(), 1..50).finish();
    let cut = &bytes[..bytes.len() - 30];
    let (records, reader) = read_with(LogReader::new(WAL), cut, usize::MAX);
    let Some(&LogEnd::Truncated { offset }) = reader.end() else {
        panic!("{:?}", reader.end());
    };
    let mut scan = DamageScan::new(&reader, offset, records.len() as u64 + 1);
    assert_eq!(scan.push(scan.start(), cut), None);

    // A last record that fails its checksum with nothing after it is a tail too.
    let mut torn = bytes.clone();
    let last = torn.len() - 1;
    torn[last] ^= 1;
    let (_, reader) = read_with(LogReader::new(WAL), &torn, usize::MAX);
    let offset = damage_at(reader.end().unwrap());
    let mut scan = DamageScan::new(&reader, offset, 49);
    assert_eq!(scan.push(scan.start(), &torn), None);
}

/// Stale records after the tail carry older sequences; they prove nothing.
#[test]
fn older_sequences_prove_nothing() {
    let mut log = log_of(LogBuilder::legacy(), 1..5);
    let offset = log.bytes().len() as u64;
    log.physical(kind::FULL, None, &[9; 30]);
    let flip = log.bytes().len() - 1;
    let mut bytes = log_of(log, 2..4).finish();
    bytes[flip] ^= 1;
    let (_, reader) = read_with(LogReader::new(WAL), &bytes, usize::MAX);
    assert_eq!(damage_at(reader.end().unwrap()), offset);
    let mut scan = DamageScan::new(&reader, offset, 5);
    assert_eq!(scan.push(0, &bytes), None);
    let mut scan = DamageScan::new(&reader, offset, 3);
    assert_eq!(scan.push(0, &bytes).unwrap().sequence, Some(3));
}

#[test]
fn damage_in_a_compressed_log_is_told_from_a_tail() {
    let bytes = log_of(LogBuilder::legacy().compressed(), 1..100).finish();
    let mut bad = bytes.clone();
    bad[60] ^= 0x10;
    let (records, reader) = read_with(LogReader::new(WAL), &bad, usize::MAX);
    let offset = damage_at(reader.end().unwrap());
    let next = records.len() as u64 + 1;
    let mut scan = DamageScan::new(&reader, offset, next);
    assert_eq!(scan.push(0, &bad).unwrap().sequence, Some(next + 1));
}

/// Only the first record says that a log is compressed.
#[test]
fn a_compressed_log_without_its_first_record_is_not_empty() {
    let bytes = log_of(LogBuilder::legacy().compressed(), 1..100).finish();
    for range in [0..1, 0..7, 7..11, 0..12, 0..512] {
        let mut bad = bytes.clone();
        bad[range.clone()].fill(0);
        let (records, reader) = read_with(LogReader::new(WAL), &bad, usize::MAX);
        assert!(records.is_empty() && !reader.compressed());
        let mut scan = DamageScan::new(&reader, 0, 1);
        let later = scan.push(0, &bad).expect("the record after the damage is found");
        let sequence = later.sequence.unwrap();
        assert!((1..100).contains(&sequence), "{range:?}: {sequence}");
        assert!(range.end > 11 || sequence == 1);
        // Older ones prove nothing.
        assert_eq!(DamageScan::new(&reader, 0, 100).push(0, &bad), None);
    }
}

#[test]
fn a_manifest_with_a_bad_record_and_more_after_it_is_damaged() {
    let mut log = LogBuilder::legacy();
    log.append(b"edit one").append(b"edit two").append(b"edit three");
    let mut bytes = log.finish();
    bytes[7 + 8 + 9] ^= 1;
    let (records, reader) = read_with(LogReader::new(LogKind::Manifest), &bytes, usize::MAX);
    assert_eq!(records, [b"edit one".to_vec()]);
    let offset = damage_at(reader.end().unwrap());
    let mut scan = DamageScan::new(&reader, offset, 0);
    assert_eq!(scan.push(0, &bytes), Some(LaterRecord { offset: 30, sequence: None }));
}

#[test]
fn a_recycled_log_ends_where_the_old_one_begins() {
    let old = log_of(LogBuilder::recyclable(3), 1..400).finish();
    for records in [0u64, 1, 7, 150] {
        let new = log_of(LogBuilder::recyclable(NUMBER), 1000..1000 + records).finish();
        let mut file = old.clone();
        file[..new.len()].copy_from_slice(&new);
        let (read, reader) = read_with(LogReader::new(WAL), &file, LOG_BLOCK_BYTES);
        assert_eq!(read.len() as u64, records);
        // The new records have the size of the old ones, so the next header is a whole old one.
        let offset = new.len() as u64;
        assert_eq!(reader.end(), Some(&LogEnd::StaleTail { offset }));
        assert_eq!(reader.good_until(), offset);
        let mut scan = DamageScan::new(&reader, offset, 1000 + records);
        assert_eq!(scan.push(scan.start(), &file[scan.start() as usize..]), None);

        // Shifted by some bytes, the middle of an old record follows.
        for shift in [1, 5, 20, 90] {
            let mut new = new.clone();
            let mut log = LogBuilder::recyclable(NUMBER);
            log.append(&vec![1; 20 + shift]);
            if new.len() % LOG_BLOCK_BYTES + 11 + 20 + shift < LOG_BLOCK_BYTES {
                new.extend_from_slice(log.bytes());
                let mut file = old.clone();
                file[..new.len()].copy_from_slice(&new);
                let (_, reader) = read_with(LogReader::new(WAL), &file, LOG_BLOCK_BYTES);
                let offset = new.len() as u64;
                assert_eq!(reader.end(), Some(&LogEnd::StaleTail { offset }));
            }
        }
    }
}

/// A valid record of this log after a bad one proves that the bad one is not a stale tail.
#[test]
fn damage_in_a_recycled_log_is_told_from_its_stale_tail() {
    let mut bytes = log_of(LogBuilder::recyclable(NUMBER), 1..600).finish();
    bytes[400] ^= 4;
    let (records, reader) = read_with(LogReader::new(WAL), &bytes, usize::MAX);
    let Some(&LogEnd::StaleTail { offset }) = reader.end() else {
        panic!("{:?}", reader.end());
    };
    let next = records.len() as u64 + 1;
    let mut scan = DamageScan::new(&reader, offset, next);
    assert_eq!(scan.push(0, &bytes).unwrap().sequence, Some(next + 1));
}

#[test]
fn a_first_fragment_whose_rest_is_stale_is_part_of_the_tail() {
    let mut file = log_of(LogBuilder::recyclable(3), 1..900).finish();
    let mut new = log_of(LogBuilder::recyclable(NUMBER), 1000..1002);
    let offset = new.bytes().len() as u64;
    new.append(&vec![b'x'; 60_000]);
    file[..LOG_BLOCK_BYTES].copy_from_slice(&new.bytes()[..LOG_BLOCK_BYTES]);
    let (records, end) = read(WAL, &file);
    assert_eq!(records.len(), 2);
    assert_eq!(end, LogEnd::StaleTail { offset });
}

#[test]
fn forms_do_not_mix() {
    let mut log = log_of(LogBuilder::legacy(), 1..3);
    let offset = log.bytes().len() as u64;
    log.physical(kind::RECYCLABLE_FULL, Some(NUMBER), &batch(3));
    assert_eq!(damage_at(&read(WAL, log.bytes()).1), offset);

    let mut log = log_of(LogBuilder::legacy(), 1..3);
    log.physical(kind::RECYCLABLE_FULL, Some(NUMBER + 1), &batch(3));
    assert_eq!(damage_at(&read(WAL, log.bytes()).1), offset);

    let mut log = log_of(LogBuilder::recyclable(NUMBER), 1..3);
    let offset = log.bytes().len() as u64;
    log.physical(kind::FULL, None, &batch(3));
    assert_eq!(read(WAL, log.bytes()).1, LogEnd::StaleTail { offset });

    let mut log = LogBuilder::legacy();
    log.physical(kind::RECYCLABLE_FULL, Some(NUMBER), b"edit");
    assert_eq!(damage_at(&read(LogKind::Manifest, log.bytes()).1), 0);
}

#[test]
fn fragments_out_of_order_are_damage() {
    for (kinds, at) in [
        (&[kind::MIDDLE][..], 0),
        (&[kind::LAST], 0),
        (&[kind::FULL, kind::LAST], 17),
        (&[kind::FIRST, kind::FULL], 0),
        (&[kind::FIRST, kind::MIDDLE, kind::FIRST], 0),
    ] {
        let mut log = LogBuilder::legacy();
        for &k in kinds {
            log.physical(k, None, &[1; 10]);
        }
        assert_eq!(damage_at(&read(WAL, log.bytes()).1), at, "{kinds:?}");
    }
}

#[test]
fn unknown_types_are_refused_or_ignored_by_their_high_bit() {
    for k in [12, 50, 127] {
        let mut log = log_of(LogBuilder::legacy(), 1..3);
        let offset = log.bytes().len() as u64;
        log.physical(k, None, b"?").append(b"after it");
        let (records, end) = read(WAL, log.bytes());
        assert_eq!(records.len(), 2);
        let what = format!("unknown record type {k}");
        assert_eq!(end, LogEnd::Damage { offset, what });
    }
    for k in [128, 132, 200, 255] {
        let mut log = log_of(LogBuilder::legacy(), 1..3);
        log.physical(k, None, b"?").append(b"after it");
        let (records, end) = read(WAL, log.bytes());
        assert_eq!((records.len(), end), (3, LogEnd::Clean), "{k}");
    }
    let mut log = LogBuilder::legacy();
    log.physical(kind::ZERO, None, b"not empty");
    assert_eq!(damage_at(&read(WAL, log.bytes()).1), 0);
}

#[test]
fn records_without_data_are_understood() {
    for recyclable in [false, true] {
        let (mut log, sizes, predecessor) = match recyclable {
            false => (LogBuilder::legacy(), kind::TIMESTAMP_SIZE, kind::PREDECESSOR),
            true => (
                LogBuilder::recyclable(NUMBER),
                kind::RECYCLABLE_TIMESTAMP_SIZE,
                kind::RECYCLABLE_PREDECESSOR,
            ),
        };
        let mut payload = Vec::new();
        for number in [6u64, 4711, 99] {
            payload.extend_from_slice(&number.to_le_bytes());
        }
        log.meta(predecessor, &payload);
        log.append(b"one");
        log.meta(sizes, &[3, 0, 0, 0, 8, 0, 4, 0, 0, 0, 16, 0]);
        log.append(b"two");
        let (records, reader) = read_with(LogReader::new(WAL), log.bytes(), usize::MAX);
        assert_eq!(records, [b"one".to_vec(), b"two".to_vec()]);
        assert_eq!(reader.end(), Some(&LogEnd::Clean));
        assert_eq!(reader.timestamp_sizes(), [(3, 8), (4, 16)]);
        let want = PredecessorWal { number: 6, size_bytes: 4711, last_sequence: 99 };
        assert_eq!(reader.predecessor(), Some(want));
    }
    for (k, payload) in [
        (kind::TIMESTAMP_SIZE, &[1u8, 2, 3][..]),
        (kind::PREDECESSOR, &[0; 23]),
        (kind::SET_COMPRESSION, &[7, 0, 0]),
    ] {
        let mut log = LogBuilder::legacy();
        log.physical(k, None, payload);
        assert_eq!(damage_at(&read(WAL, log.bytes()).1), 0, "type {k}");
    }
}

#[test]
fn compression_is_zstd_from_the_start_or_refused() {
    let mut log = LogBuilder::legacy();
    log.physical(kind::SET_COMPRESSION, None, &4u32.to_le_bytes());
    log.append(b"x");
    let (records, end) = read(WAL, log.bytes());
    assert!(records.is_empty());
    let what = "WAL compression type 4".into();
    assert_eq!(end, LogEnd::Unsupported { offset: 0, what });

    let mut log = LogBuilder::legacy();
    log.append(b"x");
    log.physical(kind::SET_COMPRESSION, None, &7u32.to_le_bytes());
    assert_eq!(damage_at(&read(WAL, log.bytes()).1), 8);

    // The frame's checksum is the log's: a record that does not decompress is damage, not a tail.
    let mut log = LogBuilder::legacy();
    log.physical(kind::SET_COMPRESSION, None, &7u32.to_le_bytes());
    log.physical(kind::FULL, None, b"no frame at all");
    assert_eq!(damage_at(&read(WAL, log.bytes()).1), 11);
}

#[test]
fn a_compressed_record_expands_to_its_bound_and_no_further() {
    let mut log = LogBuilder::legacy().compressed();
    log.append(&vec![0; 1 << 20]);
    assert!(log.bytes().len() < 1000);
    let reader = LogReader::new(WAL).with_record_bytes_max(1 << 20);
    let (records, _) = read_with(reader, log.bytes(), usize::MAX);
    assert_eq!(records[0].len(), 1 << 20);
    let reader = LogReader::new(WAL).with_record_bytes_max((1 << 20) - 1);
    let (records, reader) = read_with(reader, log.bytes(), usize::MAX);
    assert!(records.is_empty());
    damage_at(reader.end().unwrap());

    let mut log = LogBuilder::legacy();
    log.append(&vec![1; 100_000]);
    let reader = LogReader::new(WAL).with_record_bytes_max(90_000);
    let (_, reader) = read_with(reader, log.bytes(), usize::MAX);
    assert!(matches!(reader.end(), Some(LogEnd::Unsupported { offset: 0, .. })));
}

#[test]
fn a_length_that_leaves_its_block_is_damage_inside_and_truncation_at_the_end() {
    let mut bytes = log_of(LogBuilder::legacy(), 1..600).finish();
    assert!(bytes.len() > 2 * LOG_BLOCK_BYTES);
    let last_block = bytes.len() - bytes.len() % LOG_BLOCK_BYTES;
    let mut inside = bytes.clone();
    inside[5] = 0xff;
    let (records, end) = read(WAL, &inside);
    assert!(records.is_empty());
    assert_eq!(damage_at(&end), 0);
    // The last block's first record may be the end of a split one; its header begins the block in
    // both cases.
    bytes[last_block + 5] = 0xff;
    assert!(matches!(read(WAL, &bytes).1, LogEnd::Truncated { .. }));
}

/// A gap of whole blocks, as two writes in flight leave it at a power failure.
#[test]
fn a_zeroed_block_is_skipped_but_the_next_record_tells() {
    let mut log = LogBuilder::legacy();
    let filler = vec![b'a'; LOG_BLOCK_BYTES - 7];
    log.append(&filler);
    log.raw(&vec![0; LOG_BLOCK_BYTES]);
    log.append(&filler).append(b"end");
    let mut zeros = Vec::new();
    let mut reader = LogReader::new(WAL);
    let fed: Result<(), ()> = reader.feed(log.bytes(), true, |record| {
        zeros.push((record.offset, record.zeros_before));
        Ok(())
    });
    fed.unwrap();
    let block = LOG_BLOCK_BYTES as u64;
    assert_eq!(zeros, [(0, None), (2 * block, Some(block)), (3 * block, None)]);
    assert_eq!(reader.end(), Some(&LogEnd::Clean));
}

#[test]
fn zeros_inside_a_split_record_are_damage() {
    let mut log = LogBuilder::legacy();
    log.append(&vec![b'a'; 3 * LOG_BLOCK_BYTES]);
    let mut bytes = log.finish();
    bytes[LOG_BLOCK_BYTES..2 * LOG_BLOCK_BYTES].fill(0);
    let (records, end) = read(WAL, &bytes);
    assert!(records.is_empty());
    assert_eq!(damage_at(&end), LOG_BLOCK_BYTES as u64);
}

#[test]
fn a_payload_whose_header_is_still_zero_is_a_torn_tail() {
    let mut log = log_of(LogBuilder::legacy(), 1..4);
    let offset = log.bytes().len() as u64;
    log.raw(&[0; 7]).raw(&batch(4));
    let (records, end) = read(WAL, log.bytes());
    assert_eq!(records.len(), 3);
    assert_eq!(end, LogEnd::Truncated { offset });
}

/// Records after zero padding in one block: RocksDB loses them; Millrace must notice.
#[test]
fn records_after_padding_inside_a_block_are_found_by_the_scan() {
    let mut log = log_of(LogBuilder::legacy(), 1..4);
    let offset = log.bytes().len() as u64;
    log.raw(&[0; 300]);
    let bytes = log_of(log, 4..6).finish();
    let (records, reader) = read_with(LogReader::new(WAL), &bytes, usize::MAX);
    assert_eq!(records.len(), 3);
    assert_eq!(reader.end(), Some(&LogEnd::Truncated { offset }));
    let mut scan = DamageScan::new(&reader, offset, 4);
    assert_eq!(scan.push(0, &bytes).unwrap().sequence, Some(4));
}

#[test]
fn groups_padded_with_log_data_replay_cleanly() {
    let mut log = LogBuilder::legacy();
    for sequence in 1..30 {
        log.append(&batch(sequence));
        let at = log.bytes().len() % 4096;
        let overhead = 7 + 12 + 1 + 3;
        let filler = (2 * 4096 - at - overhead) % 4096;
        let padding = BatchBuilder::new(sequence + 1).log_data(&vec![0; filler]).finish();
        log.append(&padding);
    }
    let (records, end) = read(WAL, log.bytes());
    assert_eq!((records.len(), end), (58, LogEnd::Clean));
}

#[test]
fn an_error_of_the_callback_stops_the_reading() {
    let bytes = log_of(LogBuilder::legacy(), 1..10).finish();
    let mut seen = 0;
    let stopped = LogReader::new(WAL).feed(&bytes, true, |_| {
        seen += 1;
        if seen == 3 { Err("enough") } else { Ok(()) }
    });
    assert_eq!((stopped, seen), (Err("enough"), 3));
}

fn arbitrary_log() -> impl Strategy<Value = Vec<u8>> {
    let lengths = proptest::collection::vec(prop_oneof![0usize..300, 30_000usize..70_000], 1..8);
    (lengths, 0u8..4).prop_map(|(lengths, form)| {
        let mut log = match form & 1 {
            0 => LogBuilder::legacy(),
            _ => LogBuilder::recyclable(NUMBER),
        };
        if form & 2 != 0 {
            log = log.compressed();
        }
        for (i, length) in lengths.into_iter().enumerate() {
            let mut data = batch(i as u64);
            data.resize(12 + length, i as u8);
            log.append(&data);
        }
        log.finish()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// No mutation of a log causes a panic; there is always a verdict, and only records that were
    /// written are read, in order.
    #[test]
    fn mutated_logs_yield_a_prefix_and_a_verdict(
        bytes in arbitrary_log(),
        flips in proptest::collection::vec((any::<proptest::sample::Index>(), 1u8..), 0..4),
        cut in any::<proptest::sample::Index>(),
        piece in 1usize..4,
    ) {
        let (original, _) = read(WAL, &bytes);
        let mut bad = bytes.clone();
        bad.truncate(cut.index(bytes.len()) + 1);
        for (at, mask) in flips {
            let at = at.index(bad.len());
            bad[at] ^= mask;
        }
        let reader = LogReader::new(WAL).with_record_bytes_max(1 << 20);
        let (records, reader) = read_with(reader, &bad, piece * LOG_BLOCK_BYTES);
        prop_assert!(reader.end().is_some());
        prop_assert!(reader.good_until() <= bad.len() as u64);
        // A flipped header may turn a stretch into zeros or an ignorable type, so records may be
        // missing.
        let mut rest = original.iter();
        for record in &records {
            prop_assert!(rest.any(|o| o == record), "a record that was never written");
        }
        let mut scan = DamageScan::new(&reader, reader.good_until(), 0);
        let start = scan.start() as usize;
        scan.push(start as u64, &bad[start..]);
    }

    #[test]
    fn any_bytes_have_a_verdict(bytes in proptest::collection::vec(any::<u8>(), 0..2000), manifest: bool) {
        let kind = if manifest { LogKind::Manifest } else { WAL };
        let reader = LogReader::new(kind).with_record_bytes_max(1 << 20);
        let (_, reader) = read_with(reader, &bytes, usize::MAX);
        prop_assert!(reader.end().is_some());
    }
}

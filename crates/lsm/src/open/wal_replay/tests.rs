//! What replay takes and refuses, log by log.

use super::*;
use rocksfmt::testing::{BatchBuilder, EditBuilder, LogBuilder};
use rocksfmt::{BatchWriter, LOG_BLOCK_BYTES, LogWriter, ManifestReplay};

fn state() -> ManifestState {
    let mut replay = ManifestReplay::new();
    for edit in [
        EditBuilder::new().required(4, 50, 100),
        EditBuilder::new()
            .add_column_family("later", "leveldb.BytewiseComparator")
            .numbers(2, &[6])
            .column_family(1),
        EditBuilder::new()
            .add_column_family("odd", "my.Comparator")
            .numbers(2, &[4])
            .column_family(2),
    ] {
        replay.record(&edit.finish()).unwrap();
    }
    replay.finish().unwrap()
}

fn put(sequence: u64, cf: u32) -> Vec<u8> {
    BatchBuilder::new(sequence).put(cf, &sequence.to_be_bytes(), b"value").finish()
}

fn log(sequences: impl IntoIterator<Item = u64>) -> Vec<u8> {
    let mut log = LogBuilder::legacy();
    for sequence in sequences {
        log.append(&put(sequence, 0));
    }
    log.finish()
}

fn replay_with(memory_max: u64, logs: &[(u64, Vec<u8>)]) -> Result<Replayed> {
    let mut replay = WalReplay::new(&state(), memory_max);
    for (number, bytes) in logs {
        let mut reader = replay.begin(*number);
        reader.feed(bytes, true, |record| replay.record(record))?;
        let mut scan = replay.scan(&reader);
        let later =
            scan.as_mut().and_then(|scan| scan.push(scan.start(), &bytes[scan.start() as usize..]));
        replay.end(&reader, scan.as_ref(), later)?;
    }
    Ok(replay.finish())
}

fn replay(logs: &[(u64, Vec<u8>)]) -> Result<Replayed> {
    replay_with(1 << 30, logs)
}

fn refused(logs: &[(u64, Vec<u8>)], kind: Kind, text: &str) {
    let Err(e) = replay(logs) else { panic!("replayed, expected {text:?}") };
    assert!(e.to_string().contains(text), "{e} does not say {text:?}");
    assert_eq!(e.kind(), kind);
}

fn len(replayed: &Replayed, cf: u32) -> usize {
    replayed.memtables.get(&cf).map_or(0, Sorting::len)
}

#[test]
fn writes_of_all_logs_are_found() {
    let replayed = replay(&[(4, log(101..200)), (7, log(200..300)), (9, vec![])]).unwrap();
    assert_eq!(len(&replayed, 0), 199);
    assert_eq!(replayed.last_sequence, 299);
    assert_eq!(replayed.operations, 199);
    assert!(replayed.tails.is_empty());
    let none = replay(&[]).unwrap();
    assert_eq!((none.last_sequence, none.memtables.len()), (100, 0));
}

/// Trap 40: skipped operations still count in the sequence.
#[test]
fn operations_count_for_families_that_have_not_flushed_the_log() {
    let batch = |sequence| {
        BatchBuilder::new(sequence)
            .put(1, b"skipped in log 4", b"")
            .put(9, b"dropped", b"")
            .put(2, b"unknown order", b"")
            .put(0, b"k", b"v")
            .finish()
    };
    let mut four = LogBuilder::legacy();
    four.append(&batch(101));
    let mut six = LogBuilder::legacy();
    six.append(&batch(105));
    let mut replayed = replay(&[(4, four.finish()), (6, six.finish())]).unwrap();
    assert_eq!((len(&replayed, 0), len(&replayed, 1), len(&replayed, 2)), (2, 1, 0));
    let (packed, _) = replayed.memtables.remove(&0).unwrap().finish().get(b"k", 106).unwrap();
    assert_eq!(packed >> 8, 104);
    assert_eq!(replayed.last_sequence, 108);
}

#[test]
fn a_batch_without_operations_changes_no_sequence() {
    let mut log = LogBuilder::legacy();
    log.append(&put(101, 0));
    log.append(&BatchBuilder::new(102).log_data(b"padding").finish());
    log.append(&put(102, 0));
    let replayed = replay(&[(4, log.finish())]).unwrap();
    assert_eq!((len(&replayed, 0), replayed.last_sequence), (2, 102));
    let mut empty = LogBuilder::legacy();
    empty.append(&BatchBuilder::new(500).log_data(b"padding").finish());
    assert_eq!(replay(&[(4, empty.finish())]).unwrap().last_sequence, 100);
}

#[test]
fn sequences_may_jump_but_not_go_back() {
    let replayed = replay(&[(4, log([101, 105, 106]))]).unwrap();
    assert_eq!(replayed.last_sequence, 106);
    refused(
        &[(4, log([101, 102, 101]))],
        Kind::Corruption,
        "000004.log at 70: sequence 101 goes back, expected 103",
    );
    refused(&[(4, log(101..110)), (5, log([105]))], Kind::Corruption, "000005.log at 0");
}

#[test]
fn a_torn_tail_is_the_end_if_the_next_log_continues_exactly() {
    let mut torn = log(101..110);
    torn.truncate(torn.len() - 5);
    let replayed = replay(&[(4, torn.clone()), (5, log(109..112))]).unwrap();
    assert_eq!((len(&replayed, 0), replayed.last_sequence), (11, 111));
    assert_eq!(replayed.tails.len(), 1);
    let text = "before sequence 109, but 000005.log continues with 110";
    refused(&[(4, torn.clone()), (5, log(110..112))], Kind::Corruption, text);
    let text = "before sequence 109, but 000006.log continues with 110";
    refused(&[(4, torn.clone()), (5, vec![]), (6, log(110..112))], Kind::Corruption, text);
    // The last record of the last log is cut: no log contradicts that.
    assert_eq!(replay(&[(4, torn)]).unwrap().last_sequence, 108);
}

#[test]
fn damage_before_a_valid_record_is_refused_with_both_offsets() {
    let mut bytes = log(101..110);
    bytes[35 * 3 + 20] ^= 1;
    refused(&[(4, bytes)], Kind::Corruption, "before a valid record with sequence 105 at 140");
    let mut last = log(101..110);
    let at = last.len() - 1;
    last[at] ^= 1;
    assert_eq!(replay(&[(4, last)]).unwrap().last_sequence, 108);
}

/// RocksDB opens such a log, and drops all that follows the damage without a word.
#[test]
fn any_bit_that_flips_before_the_last_record_of_a_log_of_rocksdb_is_named() {
    let recyclable = || LogBuilder::recyclable(4);
    let forms: [(&str, LogBuilder, Vec<u8>); 4] = [
        ("legacy", LogBuilder::legacy(), vec![0; 5_000]),
        ("compressed", LogBuilder::legacy().compressed(), Vec::new()),
        ("recyclable", recyclable(), Vec::new()),
        ("recycled", recyclable(), {
            let mut old = LogBuilder::recyclable(2);
            for sequence in 1..2_000 {
                old.append(&put(sequence, 0));
            }
            old.finish()
        }),
    ];
    for (form, mut log, old) in forms {
        let (mut starts, long) = (Vec::new(), 104);
        for sequence in 101..109 {
            starts.push(log.bytes().len());
            match sequence == long {
                // It spans two blocks, and does not compress.
                true => {
                    let noise =
                        (0..9_000_u64).flat_map(|n| (n * n).wrapping_mul(n | 1).to_le_bytes());
                    let noise: Vec<u8> = noise.collect();
                    log.append(&BatchBuilder::new(sequence).put(0, b"long", &noise).finish())
                }
                false => log.append(&put(sequence, 0)),
            };
        }
        let last = starts[starts.len() - 1];
        let mut bytes = log.finish();
        assert!(form == "compressed" || bytes.len() > 2 * LOG_BLOCK_BYTES, "{form}");
        bytes.extend_from_slice(old.get(bytes.len().min(old.len())..).unwrap_or_default());
        assert_eq!(replay(&[(4, bytes.clone())]).unwrap().last_sequence, 108, "{form}");
        let long = 8 * (starts[3] + 20)..8 * (starts[4] - 20);
        let mut at = 0;
        while at < 8 * last {
            bytes[at / 8] ^= 1 << (at % 8);
            let error = replay(&[(4, bytes.clone())]).err();
            let error = error.unwrap_or_else(|| panic!("{form}: bit {at} ends the log"));
            assert_eq!(error.kind(), Kind::Corruption, "{form}: bit {at}: {error}");
            assert!(error.to_string().contains("000004.log at "), "{form}: bit {at}: {error}");
            bytes[at / 8] ^= 1 << (at % 8);
            at += if long.contains(&at) { 4_999 } else { 1 };
        }
    }
}

#[test]
fn a_recycled_logs_stale_tail_is_its_end() {
    let stale = |number, sequences: std::ops::Range<u64>| {
        let mut log = LogBuilder::recyclable(number);
        for sequence in sequences {
            log.append(&put(sequence, 0));
        }
        log.finish()
    };
    let mut file = stale(2, 1..50);
    let new = stale(4, 101..110);
    file[..new.len()].copy_from_slice(&new);
    let replayed = replay(&[(4, file.clone()), (5, log(110..112))]).unwrap();
    assert_eq!(replayed.last_sequence, 111);
    // Stale bytes look like a torn record, so nothing may be missing after them.
    let text = "before sequence 110, but 000005.log continues with 120";
    refused(&[(4, file), (5, log(120..122))], Kind::Corruption, text);
}

#[test]
fn a_zeroed_stretch_must_not_hide_writes() {
    let mut gap = LogBuilder::legacy();
    let long = BatchBuilder::new(101).put(0, b"k", &vec![b'x'; 32_700]).finish();
    gap.append(&long);
    let rest = 32_768 - gap.bytes().len();
    gap.raw(&vec![0; 32_768 + rest]);
    let mut lost = gap.clone();
    gap.append(&put(102, 0));
    assert_eq!(replay(&[(4, gap.finish())]).unwrap().last_sequence, 102);
    lost.append(&put(103, 0));
    refused(&[(4, lost.finish())], Kind::Corruption, "zeros before sequence 103, expected 102");
}

#[test]
fn batches_that_do_not_parse_are_refused_wherever_they_are() {
    for (batch, kind, text) in [
        (put(101, 0)[..20].to_vec(), Kind::Corruption, "000004.log at 0"),
        (vec![1; 11], Kind::Corruption, "shorter than its header"),
        (BatchBuilder::new(101).finish_with_count(1), Kind::Corruption, "announces 1"),
        (
            BatchBuilder::new(101).record(0x77, &[]).finish(),
            Kind::Unsupported,
            "unknown write batch tag 0x77",
        ),
        (BatchBuilder::new(101).record(0x09, &[]).finish(), Kind::Unsupported, "BeginPrepare"),
    ] {
        let mut log = LogBuilder::legacy();
        log.append(&batch);
        refused(&[(4, log.finish())], kind, text);
    }
}

#[test]
fn timestamps_and_unknown_compression_are_refused_by_name() {
    let mut log = LogBuilder::legacy();
    log.meta(10, &[3, 0, 0, 0, 8, 0]).append(&put(101, 0));
    refused(&[(4, log.finish())], Kind::Unsupported, "user-defined timestamps");
    let mut log = LogBuilder::legacy();
    log.meta(9, &[4, 0, 0, 0]).append(&put(101, 0));
    refused(&[(4, log.finish())], Kind::Unsupported, "WAL compression type 4");
}

#[test]
fn a_log_that_names_a_missing_predecessor_is_refused() {
    let after = |number: u64| {
        let mut log = LogBuilder::legacy();
        let fields = [number, 1000, 100].map(u64::to_le_bytes).concat();
        log.meta(130, &fields).append(&put(101, 0));
        log.finish()
    };
    refused(&[(9, after(7))], Kind::Corruption, "000007.log is missing");
    // Older than anything needed.
    assert_eq!(replay(&[(9, after(3))]).unwrap().last_sequence, 101);
    assert_eq!(replay(&[(7, vec![]), (9, after(7))]).unwrap().last_sequence, 101);
}

#[test]
fn a_full_replay_gives_its_pieces_in_order() {
    let bytes = log(101..5000);
    let mut replay = WalReplay::new(&state(), 10_000);
    let mut reader = replay.begin(4);
    let (mut pieces, mut entries) = (0, 0);
    for (at, part) in bytes.chunks(LOG_BLOCK_BYTES).enumerate() {
        let last = (at + 1) * LOG_BLOCK_BYTES >= bytes.len();
        reader.feed(part, last, |record| replay.record(record)).unwrap();
        if replay.memtables.are_full() {
            let piece = replay.memtables.take_piece().remove(&0).unwrap().finish();
            assert!(piece.memory() < 60_000 && !replay.memtables.are_full());
            let first = 101 + entries as u64;
            let (packed, _) = piece.get(&first.to_be_bytes(), 5000).unwrap();
            assert_eq!(packed >> 8, first);
            entries += piece.len();
            pieces += 1;
        }
    }
    replay.end(&reader, None, None).unwrap();
    let replayed = replay.finish();
    assert!(pieces > 3);
    assert_eq!((entries + len(&replayed, 0), replayed.last_sequence), (4899, 4999));
}

/// A log of ours with its mark and with groups padded to 512 bytes. Also returns the start of
/// each group.
fn grouped(number: u64, first: u64, groups: &[&[usize]]) -> (Vec<u8>, Vec<usize>) {
    let (mut bytes, mut starts) = (Vec::new(), Vec::new());
    let mut writer = LogWriter::new(Some(number), 0);
    let mut sequence = first;
    for lengths in [&[][..]].iter().chain(groups) {
        let start = writer.position();
        starts.push(start as usize);
        for &len in *lengths {
            let mut batch = BatchWriter::new();
            batch.put(0, &sequence.to_be_bytes(), &vec![7; len]);
            batch.note_keys(1);
            writer.append(batch.finish(sequence), &mut bytes);
            sequence += 1;
        }
        writer.end_group(GroupEnd { start }, sequence, 512, &mut bytes);
    }
    starts.push(bytes.len());
    (bytes, starts)
}

/// Keeps any subset of the last group's sectors, over zeros or over an old log; all subsets for
/// small groups.
#[test]
fn a_torn_last_group_is_cut_at_its_first_gap_whatever_sectors_are_left() {
    let (old, _) = grouped(3, 1, &[&[3000, 700, 50_000, 100, 100, 900][..]; 4]);
    for lengths in [
        &[20, 30, 500, 600, 40][..],
        &[100, 1200, 5, 900, 2000],
        &[5000],
        &[31_900, 200, 300, 33_000],
    ] {
        let (whole, starts) = grouped(4, 101, &[&[10, 900], &[29_000], lengths]);
        let last = starts[3];
        let sectors = (whole.len() - last).div_ceil(512);
        let whole_group = 104 + lengths.len() as u64 - 1;
        let mut leftovers = 0;
        for n in 0..600u64 {
            let keep = if sectors <= 9 { n } else { n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 3 };
            let mut file = if n % 2 == 0 { vec![0; whole.len() + 4096] } else { old.clone() };
            file[..last].copy_from_slice(&whole[..last]);
            for sector in 0..sectors {
                let kept = keep >> (sector % 61) & 1 == 1 || n == 1;
                let at = last + sector * 512;
                if kept {
                    file[at..at + 512].copy_from_slice(&whole[at..at + 512]);
                }
            }
            let prefix = file.starts_with(&whole);
            let replayed = replay(&[(4, file)]).unwrap();
            assert!((103..=whole_group).contains(&replayed.last_sequence), "{n}");
            assert!(!prefix || replayed.last_sequence == whole_group);
            // Nothing after a gap.
            assert_eq!(len(&replayed, 0) as u64, replayed.last_sequence - 100);
            leftovers += u64::from(replayed.leftovers);
            assert_eq!(replayed.keys, Some(replayed.last_sequence as i64 - 100));
        }
        assert!(leftovers > 10 || lengths.len() == 1, "{leftovers}");
    }
}

/// RocksDB silently skips a zeroed block, and so does our reader.
#[test]
fn a_zeroed_block_in_a_torn_group_is_a_gap() {
    const BLOCK: usize = 32 << 10;
    let lengths: &[usize] = &[20, 40_000, 100, 32_600, 150_000, 10, 32_000, 900, 70_000, 10];
    let (whole, starts) = grouped(4, 101, &[&[10], lengths]);
    let mut leftovers = 0;
    for first in starts[2].div_ceil(BLOCK)..whole.len() / BLOCK {
        for blocks in 1..3 {
            let mut file = whole.clone();
            let (at, end) = (first * BLOCK, ((first + blocks) * BLOCK).min(whole.len()));
            file[at..end].fill(0);
            let replayed = replay(&[(4, file.clone())]).unwrap();
            assert_eq!(len(&replayed, 0) as u64, replayed.last_sequence - 100);
            assert!(replayed.last_sequence < 111);
            leftovers += u64::from(replayed.leftovers);
            // With a later group, the same is damage.
            let mut writer = LogWriter::new(Some(4), whole.len() as u64);
            let end = GroupEnd { start: whole.len() as u64 };
            writer.append(&put(112, 0), &mut file);
            writer.end_group(end, 113, 512, &mut file);
            refused(&[(4, file)], Kind::Corruption, "000004.log at ");
        }
    }
    assert!(leftovers > 5);
}

#[test]
fn damage_in_a_group_that_is_not_the_last_is_refused() {
    let groups: &[&[usize]] = &[&[10, 900], &[600], &[40_000], &[100, 200], &[31_000, 300], &[50]];
    let (whole, starts) = grouped(4, 101, groups);
    for group in 1..groups.len() {
        for at in (starts[group]..starts[group + 1]).step_by(97) {
            for bad in [vec![0xAA; 1], vec![0; 512]] {
                let mut file = whole.clone();
                let at = if bad.len() > 1 { at - at % 512 } else { at };
                if file[at..at + bad.len()] == bad {
                    continue;
                }
                file[at..at + bad.len()].copy_from_slice(&bad);
                let last = replay(&[(4, file)]).map(|replayed| replayed.last_sequence);
                // Only the end record of a group can be missing without a loss.
                match last {
                    Ok(last) => assert_eq!(last, 109, "byte {at}"),
                    Err(e) => assert!(e.to_string().contains("000004.log at "), "{e}"),
                }
            }
        }
    }
    let mut file = whole.clone();
    file[starts[3] + 30_000] ^= 1;
    let text = format!(
        "000004.log at {}: a damaged record before a valid record with sequence 105",
        starts[3]
    );
    refused(&[(4, file)], Kind::Corruption, &text);
}

/// End records alone are not enough: there may be groups without one.
#[test]
fn without_a_mark_at_its_start_a_log_has_no_torn_group() {
    let mut bytes = Vec::new();
    let mut writer = LogWriter::new(Some(4), 0);
    let mut last = 0;
    for sequence in 101..105 {
        let start = writer.position();
        last = bytes.len() + 20;
        writer.append(&put(sequence, 0), &mut bytes);
        writer.end_group(GroupEnd { start }, sequence + 1, 512, &mut bytes);
    }
    bytes[last] ^= 1;
    refused(&[(4, bytes)], Kind::Corruption, "before a valid record with sequence 105");
}

#[test]
fn sequences_of_marks_do_not_go_back() {
    let (torn, starts) = grouped(4, 101, &[&[10], &[10, 10, 10]]);
    let torn = torn[..starts[2]].to_vec();
    // The log before was once longer; the part it lost was never durable.
    let (empty, _) = grouped(5, 105, &[]);
    let replayed = replay(&[(4, torn.clone()), (5, empty.clone())]).unwrap();
    assert_eq!((replayed.last_sequence, len(&replayed, 0)), (104, 1));
    // The number of keys that those changed is unknown, too.
    assert_eq!((replayed.keys, replayed.leftovers), (None, true));
    let (next, _) = grouped(6, 105, &[&[10]]);
    // Nobody writes after that until a table and the MANIFEST have it.
    let text = "000005.log at 0: sequences from 102 on are missing: 000005.log begins with 105";
    refused(&[(4, torn), (5, empty), (6, next)], Kind::Corruption, text);
}

/// As when a log was lost, or its bytes never reached the disk. The MANIFEST knows sequences up
/// to 100.
#[test]
fn a_log_that_lost_its_beginning_hides_no_gap() {
    let old = log(101..110);
    let new = (5, log(110..115));
    let mut preallocated = old.clone();
    preallocated.resize(4096, 0);
    assert_eq!(replay(&[(4, preallocated.clone()), new.clone()]).unwrap().last_sequence, 114);
    for (bytes, text) in [
        (
            vec![],
            "000004.log is empty from offset 0 on, where sequence 101 is missing, but 000005.log",
        ),
        (vec![0; 4096], "000004.log is empty from offset 0 on"),
        (old[..5].to_vec(), "000004.log ends at 0 before sequence 101"),
        (old[..20].to_vec(), "000004.log ends at 0 before sequence 101"),
        (
            [&old[..70], &[0; 500]].concat(),
            "is empty from offset 70 on, where sequence 103 is missing",
        ),
    ] {
        let found = replay(&[(4, bytes.clone()), new.clone()]);
        refused(&[(4, bytes.clone()), new.clone()], Kind::Corruption, text);
        refused(&[(4, bytes.clone()), (4, vec![]), new.clone()], Kind::Corruption, text);
        assert!(found.is_err());
        // Nothing is missing before sequences that the MANIFEST knows.
        let covered = replay(&[(4, bytes.clone()), (5, log(90..99))]);
        assert!(covered.is_ok() || bytes.len() > 70);
        // And nothing after the last batch.
        assert!(replay(&[(4, bytes), (5, vec![])]).is_ok());
    }
    // In the middle.
    let (older, newer) = ((4, log(101..105)), (6, log(110..112)));
    let text = "000005.log is empty from offset 0 on, where sequence 105 is missing";
    refused(&[older.clone(), (5, vec![]), newer.clone()], Kind::Corruption, text);
    let text = "000005.log ends at 0 before sequence 105, but 000006.log continues with 110";
    refused(&[older, (5, log(105..110)[..9].to_vec()), newer], Kind::Corruption, text);
}

/// RocksDB can write without a log, and a flush may leave nothing of the last writes.
#[test]
fn a_gap_that_a_healthy_directory_may_have_is_a_warning() {
    assert_eq!(replay(&[(4, log(101..110)), (5, log(110..112))]).unwrap().warnings.len(), 0);
    let replayed = replay(&[(4, log(104..110)), (5, log(112..115))]).unwrap();
    assert_eq!((replayed.last_sequence, replayed.warnings.len()), (114, 2));
    assert!(replayed.warnings[0].starts_with("000004.log begins with sequence 104, but tables"));
    assert!(replayed.warnings[1].contains("000005.log begins with sequence 112"));
    // Where openings leave empty logs, these prove nothing.
    let mut replay = WalReplay::new(&state(), 1 << 30);
    replay.empty_logs_may_count();
    for (number, bytes) in [(4, log(101..105)), (5, vec![]), (6, log(110..112))] {
        let mut reader = replay.begin(number);
        reader.feed(&bytes, true, |record| replay.record(record)).unwrap();
        replay.end(&reader, None, None).unwrap();
    }
    assert_eq!(replay.finish().warnings.len(), 1);
}

/// A log of ours that states its first sequence.
fn started(number: u64, sequences: std::ops::Range<u64>) -> (u64, Vec<u8>) {
    let (mut bytes, mut writer) = (Vec::new(), LogWriter::new(Some(number), 0));
    writer.append(&LogStart { sequence: sequences.start }.encode(), &mut bytes);
    sequences.for_each(|sequence| writer.append(&put(sequence, 0), &mut bytes));
    (number, bytes)
}

#[test]
fn a_log_of_ours_reveals_every_gap_before_it() {
    let logs = [started(4, 101..110), started(5, 110..120), started(6, 120..130)];
    let replayed = replay(&logs).unwrap();
    assert_eq!((replayed.last_sequence, replayed.leftovers), (129, false));
    for gone in 0..2 {
        let mut rest = logs.to_vec();
        rest.remove(gone);
        let text = format!("00000{}.log begins with {}", gone + 5, 110 + 10 * gone);
        refused(&rest, Kind::Corruption, &text);
        // Cut at the end of a record.
        let mut cut = logs.to_vec();
        let (number, _) = cut[gone];
        cut[gone] = started(number, 101 + 9 * gone as u64..105 + 9 * gone as u64);
        if gone == 0 {
            refused(&cut, Kind::Corruption, &text);
        }
        // Nothing was written after it.
        let (number, _) = rest[gone];
        rest.truncate(gone);
        rest.push(started(number, 120..120));
        assert!(replay(&rest).unwrap().leftovers || gone == 0);
    }
    let (marked, _) = grouped(5, 110, &[&[10]]);
    let text = "000005.log at 0: sequences from 101 on are missing: 000005.log begins with 110";
    refused(&[(5, marked)], Kind::Corruption, text);
}

/// As after a power cut with unflushed logs.
#[test]
fn missing_sequences_before_logs_are_noticed() {
    let mut zeros = vec![0; 32 << 10];
    zeros.extend(log([101]));
    let text = "000004.log at 0: zeros before a valid record with sequence 101 at 32768";
    refused(&[(4, zeros)], Kind::Corruption, text);
    let (counted, _) = grouped(5, 101, &[&[10]]);
    assert_eq!(replay(&[(5, counted.clone())]).unwrap().keys, Some(1));
    assert_eq!(replay(&[(4, vec![]), (5, counted)]).unwrap().keys, None);
    // The only group of the first log is lost, except for the mark before it.
    let (start, _) = grouped(4, 101, &[]);
    let (late, _) = grouped(5, 102, &[]);
    assert_eq!(replay(&[(4, start.clone()), (5, late)]).unwrap().keys, None);
    let (late, _) = grouped(5, 102, &[&[10]]);
    refused(&[(4, start), (5, late)], Kind::Corruption, "000005.log begins with 102");
    // The MANIFEST knows later sequences than the cut log.
    let torn = log(90..95);
    let replayed = replay(&[(4, torn[..torn.len() - 1].to_vec())]).unwrap();
    assert_eq!((replayed.last_sequence, replayed.leftovers), (100, true));
    let replayed = replay(&[(4, torn)]).unwrap();
    assert_eq!((replayed.last_sequence, replayed.leftovers), (100, false));
}

#[test]
fn the_number_of_keys_is_known_until_an_uncounted_batch() {
    let (mut bytes, _) = grouped(4, 101, &[&[10], &[10, 20]]);
    assert_eq!(replay(&[(4, bytes.clone())]).unwrap().keys, Some(3));
    // A log that the default family has flushed changes no count.
    let mut writer = LogWriter::new(Some(4), bytes.len() as u64);
    writer.append(&put(104, 1), &mut bytes);
    assert_eq!(replay(&[(4, bytes.clone())]).unwrap().keys, Some(3));
    writer.append(&put(105, 0), &mut bytes);
    assert_eq!(replay(&[(4, bytes.clone())]).unwrap().keys, None);
}

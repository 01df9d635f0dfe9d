//! The targets for logs, batches, version edits, manifests and names.

use crate::fuzz::Target;
use crate::log::physical::kind;
use crate::testing::{BatchBuilder, EditBuilder, LogBuilder, file_meta};
use crate::*;

/// Every target of this file.
pub const TARGETS: &[Target] = &[
    ("log", log, log_seeds),
    ("batch", batch, batch_seeds),
    ("edit", edit, edit_seeds),
    ("manifest", manifest, manifest_seeds),
    ("names", names, names_seeds),
];

const NUMBER: u64 = 7;
const RECORD_MAX: usize = 1 << 20;

/// A log of either kind: unchanged, and with corrected checksums, so that the code after the check
/// is reached.
pub fn log(data: &[u8]) {
    let mut sealed = data.to_vec();
    seal(&mut sealed);
    for bytes in [data, &sealed] {
        for kind in [LogKind::Wal { number: NUMBER }, LogKind::Manifest] {
            read_log(kind, bytes);
        }
    }
}

fn read_log(kind: LogKind, bytes: &[u8]) {
    let _ = is_torn_group(&bytes[..bytes.len().min(LOG_BLOCK_BYTES)], 1);
    let mut reader = LogReader::new(kind).with_record_bytes_max(RECORD_MAX);
    let mut last = None;
    let mut next_sequence = 0;
    let mut rest = bytes;
    while reader.end().is_none() {
        let (piece, tail) = rest.split_at(rest.len().min(LOG_BLOCK_BYTES));
        rest = tail;
        let fed: std::result::Result<(), ()> = reader.feed(piece, rest.is_empty(), |record| {
            assert!(last.is_none_or(|last| last < record.offset));
            last = Some(record.offset);
            if let Ok(batch) = WriteBatch::parse(record.data) {
                next_sequence = batch.next_sequence();
            }
            Ok(())
        });
        assert!(fed.is_ok());
    }
    assert!(reader.good_until() <= bytes.len() as u64);
    let gap = reader.good_until();
    let scan = || DamageScan::new(&reader, gap, next_sequence);
    let find = |mut scan: DamageScan| {
        scan.push(scan.start(), &bytes[scan.start() as usize..]).map(|later| later.offset)
    };
    let later = find(scan());
    assert!(later.is_none_or(|later| later > gap && later < bytes.len() as u64));
    let outlives = find(scan().of_groups(TornGroup::new(gap)));
    assert!(outlives.is_none_or(|record| later.is_some_and(|later| later <= record)));
}

/// Walks the headers and corrects every checksum.
fn seal(bytes: &mut [u8]) {
    for block in bytes.chunks_mut(LOG_BLOCK_BYTES) {
        let mut at = 0;
        while let Some(header) = block.get(at..at + 7) {
            let length = usize::from(u16::from_le_bytes([header[4], header[5]]));
            let recyclable = matches!(header[6], 5..=8 | 11 | 131);
            let end = at + length + if recyclable { 11 } else { 7 };
            let Some(covered) = block.get(at + 6..end) else { break };
            let crc = mask_crc(crc32c(covered));
            block[at..at + 4].copy_from_slice(&crc.to_le_bytes());
            at = end;
        }
    }
}

fn log_seeds() -> Vec<Vec<u8>> {
    let batch = |sequence| BatchBuilder::new(sequence).put(0, b"key", b"value").finish();
    let fill = |mut log: LogBuilder| {
        log.append(&batch(1));
        log.append(&vec![0xEE; LOG_BLOCK_BYTES]);
        log.append(&batch(2)).append(b"");
        log.finish()
    };
    let mut meta = LogBuilder::recyclable(NUMBER);
    meta.meta(kind::RECYCLABLE_PREDECESSOR, &[6; 24]);
    meta.meta(kind::RECYCLABLE_TIMESTAMP_SIZE, &[1, 0, 0, 0, 8, 0]);
    meta.append(&batch(1)).raw(&[0; 50]);
    let mut stale = LogBuilder::recyclable(NUMBER);
    stale.append(&batch(5));
    let mut old = LogBuilder::recyclable(3);
    old.append(&batch(1));
    stale.raw(old.bytes());
    let mut groups = Vec::new();
    let mut writer = LogWriter::new(Some(NUMBER), 0);
    for (sequence, len) in [(1, 0), (1, 10), (2, 300), (3, 31_400), (4, 50)] {
        let start = writer.position();
        if len > 0 {
            let put = BatchBuilder::new(sequence).put(0, b"k", &vec![1; len]).finish();
            writer.append(&put, &mut groups);
        }
        let end = GroupEnd { start };
        writer.end_group(end, sequence + 1, 512, &mut groups);
    }
    vec![
        groups,
        fill(LogBuilder::legacy()),
        fill(LogBuilder::recyclable(NUMBER)),
        fill(LogBuilder::legacy().compressed()),
        meta.finish(),
        stale.finish(),
    ]
}

/// A write batch.
pub fn batch(data: &[u8]) {
    let Ok(batch) = WriteBatch::parse(data) else { return };
    let mut writes = 0;
    let mut whole = true;
    for op in batch.ops() {
        match op {
            Ok((sequence, op)) => {
                assert!(sequence >= batch.sequence() && sequence <= batch.next_sequence());
                writes += u32::from(op.column_family().is_some());
            }
            Err(_) => whole = false,
        }
    }
    assert!(!whole || writes == batch.count());
    assert_eq!(batch.verify().is_ok(), whole);
}

fn batch_seeds() -> Vec<Vec<u8>> {
    let every = |cf| {
        BatchBuilder::new(100)
            .put(cf, b"a", b"1")
            .delete(cf, b"b")
            .single_delete(cf, b"c")
            .merge(cf, b"d", b"+1")
            .delete_range(cf, b"e", b"f")
            .blob_index(cf, b"g", b"\x01ref")
            .entity(cf, b"h", b"\x01\x00")
            .timed_put(cf, b"i", b"v", 1_700_000_000)
            .log_data(b"note")
    };
    let markers = [0x09, 0x0D, 0x12, 0x13];
    let mut two_phase = BatchBuilder::new(1);
    for tag in markers {
        two_phase = two_phase.record(tag, &[]);
    }
    for tag in [0x0A, 0x0B, 0x0C] {
        two_phase = two_phase.record(tag, &[b"xid"]);
    }
    vec![every(0).finish(), every(300).finish(), two_phase.finish()]
}

/// One version edit.
pub fn edit(data: &[u8]) {
    if let Ok(edit) = VersionEdit::decode(data) {
        assert!(edit.new_files.iter().all(|(level, _)| *level < LEVELS_MAX));
        let _ = edit.kind();
    }
}

fn edit_seeds() -> Vec<Vec<u8>> {
    let mut file = file_meta(12, b"a", b"m", (5, 90));
    file.epoch = 3;
    file.oldest_blob_file = 11;
    file.unique_id = [1, 2];
    file.tail_bytes = 400;
    let edit = EditBuilder::new;
    vec![
        edit().required(8, 14, 90).delete_file(0, 7).add_file(1, &file).column_family(2).finish(),
        edit().add_column_family("x", "leveldb.BytewiseComparator").column_family(1).finish(),
        edit()
            .numbers(400, &[11, 20, 3000, 0, 0, 0])
            .numbers(401, &[11, 2, 300, 0])
            .numbers(8196, &[4, 2, 1000, 1])
            .string(8200, &[5])
            .string(8193, b"id")
            .finish(),
    ]
}

/// A MANIFEST's records, each after a byte with its length, replayed.
pub fn manifest(data: &[u8]) {
    let mut replay = ManifestReplay::new();
    let mut rest = data;
    while let Some((&length, tail)) = rest.split_first() {
        let (record, tail) = tail.split_at(tail.len().min(usize::from(length)));
        rest = tail;
        if replay.record(record).is_err() {
            return;
        }
    }
    let Ok(state) = replay.finish() else { return };
    snapshot(&state);
    for cf in state.column_families.values() {
        let _ = cf.live_blob_files().count();
        let Ok(comparator) = cf.comparator() else { continue };
        for level in cf.levels.iter().skip(1) {
            for pair in level.windows(2) {
                assert!(comparator.cmp_internal(&pair[0].largest, &pair[1].smallest).is_lt());
            }
        }
    }
}

/// A new MANIFEST with the same state replays to the same state.
fn snapshot(state: &ManifestState) {
    let mut replay = ManifestReplay::new();
    for edit in ManifestReplay::resume(state).snapshot(state.next_file_number) {
        replay.record(&edit.encode()).expect("a record that was encoded here");
    }
    let again = replay.finish().expect("a MANIFEST that was written here");
    let numbers = |state: &ManifestState| {
        (state.next_file_number, state.last_sequence, state.min_log_number_to_keep, state.keys)
    };
    assert_eq!(numbers(&again), numbers(state));
    assert_eq!((&again.db_id, again.max_column_family), (&state.db_id, state.max_column_family));
    assert_eq!(again.column_families.len(), state.column_families.len());
    for (a, b) in again.column_families.values().zip(state.column_families.values()) {
        assert_eq!((a.id, &a.name, a.log_number), (b.id, &b.name, b.log_number));
        assert_eq!(a.comparator_name, b.comparator_name);
        assert_eq!(a.timestamps_persisted, b.timestamps_persisted);
        if a.comparator().is_ok() {
            assert_eq!(a.levels, b.levels);
        }
        let live = |cf: &ColumnFamily| -> Vec<(u64, u64, u64)> {
            let live = cf.live_blob_files();
            live.map(|blob| (blob.number, blob.total_count, blob.garbage_count)).collect()
        };
        assert_eq!(live(a), live(b));
    }
}

fn manifest_seeds() -> Vec<Vec<u8>> {
    let edit = EditBuilder::new;
    let file = |number: u64, from, to| file_meta(number, from, to, (number, number + 3));
    let records = [
        edit().required(4, 20, 100),
        edit().add_column_family("x", "rocksdb.ReverseBytewiseComparator").column_family(1),
        edit().add_file(0, &file(7, b"a", b"c")).numbers(300, &[1]),
        edit().add_file(1, &file(9, b"z", b"y")).column_family(1).numbers(300, &[0]),
        edit()
            .delete_file(0, 7)
            .add_file(1, &file(8, b"a", b"c"))
            .add_file(1, &file(3, b"d", b"e")),
        edit().numbers(400, &[11, 20, 3000, 0, 0, 0]).numbers(401, &[11, 2, 300, 0]),
        edit().numbers(202, &[]).column_family(1),
    ];
    let mut seed = Vec::new();
    for record in records {
        let record = record.finish();
        seed.push(record.len() as u8);
        seed.extend_from_slice(&record);
    }
    vec![seed]
}

/// Names of files, CURRENT and OPTIONS.
pub fn names(data: &[u8]) {
    let _ = parse_current(data);
    let options = OptionsFile::parse(data);
    let _ = options.column_family("default", "comparator");
    if let Ok(text) = std::str::from_utf8(data)
        && let Some(name) = FileName::parse(text)
    {
        assert_eq!(FileName::parse(&name.to_string()), Some(name));
    }
}

fn names_seeds() -> Vec<Vec<u8>> {
    let texts: [&[u8]; 5] = [
        b"MANIFEST-000005\n",
        b"000012.sst",
        b"OPTIONS-000012.dbtmp",
        b"LOG.old.1700000000",
        b"[Version]\n  rocksdb_version=7.8.3\n[CFOptions \"default\"]\n  comparator=x\\#y # z\n",
    ];
    texts.map(<[u8]>::to_vec).to_vec()
}

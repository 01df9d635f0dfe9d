//! Every tag and custom field, and refusals.

use proptest::prelude::*;

use super::*;
use crate::coding::{put_lps, put_varint};
use crate::error::Kind;
use crate::key::SEQUENCE_MAX;
use crate::testing::{EditBuilder, file_meta};

fn lps_of(numbers: &[u64]) -> Vec<u8> {
    let mut out = Vec::new();
    for &number in numbers {
        put_varint(&mut out, number);
    }
    out
}

fn decode(edit: EditBuilder) -> Result<VersionEdit> {
    VersionEdit::decode(&edit.finish())
}

fn arbitrary_file() -> impl Strategy<Value = FileMeta> {
    let key = || proptest::collection::vec(any::<u8>(), 0..40);
    let small = (0u32..4, any::<bool>(), 0..SEQUENCE_MAX, 0..SEQUENCE_MAX);
    let numbers: [std::ops::RangeInclusive<u64>; 9] = std::array::from_fn(|_| 0..=u64::MAX);
    (numbers, key(), key(), small).prop_map(|(n, smallest, largest, small)| {
        let mut file = file_meta(n[0], &smallest, &largest, (small.2, small.3));
        file.size_bytes = n[1];
        file.epoch = n[2];
        file.oldest_blob_file = n[3];
        file.oldest_ancestor_time = n[4];
        file.creation_time = n[5];
        file.unique_id = [n[6], n[7]];
        file.tail_bytes = n[8];
        file.path_id = small.0;
        file.timestamps_persisted = small.1;
        file
    })
}

/// All fields of a record, for the tests that truncate and flip.
fn everything() -> EditBuilder {
    let mut file = file_meta(12, b"a", b"m", (5, 90));
    file.epoch = 3;
    file.oldest_blob_file = 11;
    file.oldest_ancestor_time = 1_700_000_000;
    file.creation_time = 1_700_000_001;
    file.unique_id = [u64::MAX, 7];
    file.tail_bytes = 400;
    file.path_id = 2;
    file.timestamps_persisted = false;
    EditBuilder::new()
        .string(tag::COMPARATOR, b"leveldb.BytewiseComparator")
        .required(8, 14, 90)
        .numbers(tag::PREV_LOG_NUMBER, &[0])
        .numbers(tag::MIN_LOG_NUMBER_TO_KEEP, &[8])
        .numbers(tag::COMPACT_CURSOR, &[1])
        .raw(b"\x09k\x01\0\0\0\0\0\0\0")
        .delete_file(0, 7)
        .add_file(1, &file)
        .numbers(tag::MAX_COLUMN_FAMILY, &[3])
        .numbers(tag::BLOB_FILE_ADDITION, &[11, 20, 3000])
        .raw(b"\x03SHA\x02xx\x05\x01y\0")
        .numbers(tag::BLOB_FILE_GARBAGE, &[11, 2, 300])
        .raw(b"\0")
        .string(tag::DB_ID, b"0b5f-id")
        .string(tag::FULL_HISTORY_TS_LOW, b"\x09\0\0\0\0\0\0\0")
        .string(tag::PERSIST_TIMESTAMPS, &[0])
        .string(tag::LAST_COMPACTED_MANIFEST_BYTES, &lps_of(&[4711]))
        .string(tag::IGNORABLE | 500, b"from the future")
        .numbers(tag::IN_ATOMIC_GROUP, &[4])
        .column_family(2)
}

#[test]
fn every_field_comes_back() {
    let edit = decode(everything()).unwrap();
    let mut file = file_meta(12, b"a", b"m", (5, 90));
    file.epoch = 3;
    file.oldest_blob_file = 11;
    file.oldest_ancestor_time = 1_700_000_000;
    file.creation_time = 1_700_000_001;
    file.unique_id = [u64::MAX, 7];
    file.tail_bytes = 400;
    file.path_id = 2;
    file.timestamps_persisted = false;
    assert_eq!(file.smallest_user_key(), b"a");
    assert_eq!(file.largest_user_key(), b"m");
    let want = VersionEdit {
        column_family: 2,
        comparator: Some("leveldb.BytewiseComparator".into()),
        log_number: Some(8),
        next_file_number: Some(14),
        last_sequence: Some(90),
        min_log_number_to_keep: Some(8),
        max_column_family: Some(3),
        atomic_group_remaining: Some(4),
        deleted_files: vec![(0, 7)],
        new_files: vec![(1, file)],
        new_blob_files: vec![BlobFileMeta {
            number: 11,
            total_count: 20,
            total_bytes: 3000,
            garbage_count: 0,
            garbage_bytes: 0,
        }],
        blob_garbage: vec![BlobGarbage { number: 11, count: 2, bytes: 300 }],
        db_id: Some("0b5f-id".into()),
        full_history_ts_low: Some(9u64.to_le_bytes().to_vec()),
        persist_timestamps: Some(false),
        last_compacted_manifest_bytes: Some(4711),
        ..VersionEdit::default()
    };
    assert_eq!(edit, want);
    assert_eq!(edit.kind(), EditKind::Normal);
}

#[test]
fn an_empty_record_is_an_edit_that_does_nothing() {
    assert_eq!(VersionEdit::decode(b"").unwrap(), VersionEdit::default());
}

#[test]
fn files_of_all_four_forms_are_read() {
    let file = file_meta(5, b"a", b"b", (3, 4));
    let mut bounds = Vec::new();
    put_lps(&mut bounds, &file.smallest);
    put_lps(&mut bounds, &file.largest);
    let edit = decode(
        EditBuilder::new()
            .numbers(tag::NEW_FILE, &[2, 5, 1005])
            .raw(&bounds)
            .numbers(tag::NEW_FILE2, &[2, 5, 1005])
            .raw(&bounds)
            .raw(&[3, 4])
            .numbers(tag::NEW_FILE3, &[2, 5, 1, 1005])
            .raw(&bounds)
            .raw(&[3, 4])
            .add_file(2, &file),
    )
    .unwrap();
    let without_sequences = FileMeta { smallest_sequence: 0, largest_sequence: 0, ..file.clone() };
    let with_path = FileMeta { path_id: 1, ..file.clone() };
    let want = [without_sequences, file.clone(), with_path, file].map(|f| (2, f));
    assert_eq!(edit.new_files, want);
}

#[test]
fn the_old_tags_have_no_length() {
    let edit = decode(
        EditBuilder::new()
            .numbers(tag::OLD_WAL_ADDITION, &[4, 2, 1000, 1])
            .numbers(tag::OLD_WAL_ADDITION, &[5, 1])
            .string(tag::WAL_ADDITION, &lps_of(&[6, 2, 7, 1]))
            .numbers(tag::OLD_BLOB_FILE_ADDITION, &[9, 1, 50, 0, 0, 0])
            .numbers(tag::OLD_BLOB_FILE_GARBAGE, &[9, 1, 50, 0])
            .numbers(tag::LAST_SEQUENCE, &[77]),
    )
    .unwrap();
    let wal = |number, synced_bytes| WalAddition { number, synced_bytes };
    assert_eq!(edit.wal_additions, [wal(4, Some(1000)), wal(5, None), wal(6, Some(7))]);
    assert_eq!(edit.new_blob_files[0].number, 9);
    assert_eq!(edit.blob_garbage[0].bytes, 50);
    assert_eq!(edit.last_sequence, Some(77));
    for edit in [
        EditBuilder::new().numbers(tag::OLD_WAL_DELETION, &[12]),
        EditBuilder::new().string(tag::WAL_DELETION, &[12]),
    ] {
        let edit = decode(edit).unwrap();
        assert_eq!(edit.wals_deleted_below, Some(12));
        assert_eq!(edit.kind(), EditKind::WalDeletion);
    }
}

#[test]
fn a_record_is_of_the_first_kind_that_applies() {
    let add = EditBuilder::new().add_column_family("x", "leveldb.BytewiseComparator");
    let drop = EditBuilder::new().numbers(tag::COLUMN_FAMILY_DROP, &[]);
    let wal = EditBuilder::new().string(tag::WAL_ADDITION, &lps_of(&[6, 1]));
    let gone = EditBuilder::new().string(tag::WAL_DELETION, &[12]);
    let parts = [
        (add, EditKind::ColumnFamilyAdd),
        (drop, EditKind::ColumnFamilyDrop),
        (wal, EditKind::WalAddition),
        (gone, EditKind::WalDeletion),
    ];
    for (i, (part, kind)) in parts.iter().enumerate() {
        let mut bytes = Vec::new();
        for (later, _) in parts[i..].iter().rev() {
            bytes.extend_from_slice(&later.clone().finish());
        }
        assert_eq!(VersionEdit::decode(&bytes).unwrap().kind(), *kind);
        assert_eq!(decode(part.clone()).unwrap().kind(), *kind);
    }
}

#[test]
fn unknown_tags_are_skipped_or_refused_by_their_bits() {
    for number in [8, 11, 204, 402, 8191] {
        let e = decode(EditBuilder::new().string(number, b"x")).unwrap_err();
        assert_eq!(e.kind(), Kind::Unsupported);
        assert!(e.to_string().contains(&format!("tag {number} ")), "{e}");
    }
    for number in [8202, 8204, 9000] {
        let edit = EditBuilder::new().string(number, b"x").numbers(tag::LAST_SEQUENCE, &[1]);
        assert_eq!(decode(edit).unwrap().last_sequence, Some(1));
    }
    let file_with = |fields: &[u8]| {
        let mut bytes = EditBuilder::new().add_file(1, &file_meta(5, b"a", b"b", (3, 4))).finish();
        bytes.pop();
        bytes.extend_from_slice(fields);
        bytes.push(1);
        VersionEdit::decode(&bytes)
    };
    for field in [2, 9, 10, 11, 14, 17, 18, 63] {
        file_with(&[field, 1, 1]).unwrap();
    }
    for field in [64, 66, 127] {
        let e = file_with(&[field, 1, 1]).unwrap_err();
        assert_eq!(e.kind(), Kind::Unsupported);
        assert!(e.to_string().contains(&format!("field {field} of file 5")), "{e}");
    }
    for bad in [&[12, 3, 1, 2, 3][..], &[65, 1, 4], &[65, 0], &[13, 0], &[3, 2, 0, 0]] {
        assert_eq!(file_with(bad).unwrap_err().kind(), Kind::Corruption, "{bad:?}");
    }
    let e = file_with(&[3, 8, 9, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    assert_eq!(e.min_log_number_to_keep, Some(9));
}

#[test]
fn bounds_must_be_internal_keys() {
    for (bound, fine) in [
        (&b""[..], false),
        (b"1234567", false),
        (b"\x01\0\0\0\0\0\0\0", true),
        (b"k\x18\0\0\0\0\0\0\0", true),
        (b"k\x1a\0\0\0\0\0\0\0", true),
        (b"k\x80\0\0\0\0\0\0\0", false),
        (b"g\x0F\xFF\xFF\xFF\xFF\xFF\xFF\xFF", true),
    ] {
        let mut file = file_meta(5, b"a", b"b", (3, 4));
        file.largest = bound.to_vec();
        assert_eq!(decode(EditBuilder::new().add_file(1, &file)).is_ok(), fine, "{bound:?}");
    }
}

#[test]
fn impossible_levels_are_refused() {
    let file = file_meta(5, b"a", b"b", (3, 4));
    for (level, fine) in [(0, true), (LEVELS_MAX - 1, true), (LEVELS_MAX, false), (u32::MAX, false)]
    {
        let added = EditBuilder::new().add_file(level, &file);
        for edit in [added, EditBuilder::new().delete_file(level, 5)] {
            let refused = decode(edit).err().map(|e| e.kind());
            assert_eq!(refused, (!fine).then_some(crate::Kind::Unsupported), "{level}");
        }
    }
}

#[test]
fn every_cut_is_a_shorter_edit_or_refused() {
    let bytes = everything().finish();
    let whole = VersionEdit::decode(&bytes).unwrap();
    for cut in 0..bytes.len() {
        if let Ok(edit) = VersionEdit::decode(&bytes[..cut]) {
            assert_ne!(edit, whole);
        }
    }
}

proptest! {
    #[test]
    fn random_edits_come_back(
        numbers in any::<(u64, u64, u64)>(),
        cf in any::<u32>(),
        files in proptest::collection::vec((0..LEVELS_MAX, arbitrary_file()), 0..8),
        deleted in proptest::collection::vec((0..LEVELS_MAX, any::<u64>()), 0..8),
    ) {
        let mut builder =
            EditBuilder::new().required(numbers.0, numbers.1, numbers.2).column_family(cf);
        for &(level, number) in &deleted {
            builder = builder.delete_file(level, number);
        }
        for (level, file) in &files {
            builder = builder.add_file(*level, file);
        }
        let want = VersionEdit {
            column_family: cf,
            log_number: Some(numbers.0),
            next_file_number: Some(numbers.1),
            last_sequence: Some(numbers.2),
            deleted_files: deleted,
            new_files: files,
            ..VersionEdit::default()
        };
        prop_assert_eq!(decode(builder).unwrap(), want);
    }

    #[test]
    fn mutated_edits_never_panic(flips in proptest::collection::vec((any::<proptest::sample::Index>(), 1u8..), 1..5)) {
        let mut bytes = everything().finish();
        for (at, mask) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= mask;
        }
        if let Ok(edit) = VersionEdit::decode(&bytes) {
            prop_assert!(edit.new_files.len() + edit.deleted_files.len() <= bytes.len());
        }
    }

    #[test]
    fn any_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(edit) = VersionEdit::decode(&bytes) {
            prop_assert!(edit.new_files.iter().all(|(level, _)| *level < LEVELS_MAX));
        }
    }
}

#[test]
fn a_padded_record_has_the_requested_length_and_the_same_meaning() {
    for edit in [VersionEdit::default(), VersionEdit::decode(&everything().finish()).unwrap()] {
        let plain = edit.encode();
        for more in (3..400).chain(16_300..16_500).chain([0, 40_000]) {
            let mut record = plain.clone();
            VersionEdit::fill(&mut record, plain.len() + more);
            assert_eq!(record.len(), plain.len() + more);
            let said = VersionEdit::decode(&plain).unwrap();
            let want = VersionEdit { ours: more > 0, ..said };
            assert_eq!(VersionEdit::decode(&record).unwrap(), want);
        }
    }
}

#[test]
fn records_of_millrace_are_recognised() {
    let ours = |record: &[u8]| VersionEdit::decode(record).unwrap().ours;
    assert!(!ours(&everything().finish()), "RocksDB's");
    assert!(!ours(&VersionEdit { log_number: Some(3), ..VersionEdit::default() }.encode()));
    let marked = VersionEdit { ours: true, ..VersionEdit::default() };
    assert_eq!(VersionEdit::decode(&marked.encode()).unwrap(), marked);
    let counted = VersionEdit { keys: Some(7), ..VersionEdit::default() };
    assert!(ours(&counted.encode()));
    let mut filled = Vec::new();
    VersionEdit::fill(&mut filled, 40);
    assert!(ours(&filled));
}

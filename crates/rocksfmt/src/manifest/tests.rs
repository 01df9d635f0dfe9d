//! The rules for edits as a whole, and for the resulting levels.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::error::Kind;
use crate::error::Result;
use crate::key::{Comparator, SENTINEL_PACKED};
use crate::manifest::file_meta::FileMeta;
use crate::manifest::replay::ManifestReplay;
use crate::manifest::state::ManifestState;
use crate::manifest::tag;
use crate::testing::{EditBuilder, file_meta};

const BYTEWISE: &str = "leveldb.BytewiseComparator";
const REVERSE: &str = "rocksdb.ReverseBytewiseComparator";

fn replay(records: &[EditBuilder]) -> Result<ManifestState> {
    let mut replay = ManifestReplay::new();
    replay.record(&required().finish())?;
    for record in records {
        replay.record(&record.clone().finish())?;
    }
    replay.finish()
}

fn required() -> EditBuilder {
    EditBuilder::new().string(tag::COMPARATOR, BYTEWISE.as_bytes()).required(4, 20, 1000)
}

fn edit() -> EditBuilder {
    EditBuilder::new()
}

fn numbers(state: &ManifestState, level: usize) -> Vec<u64> {
    let files = &state.column_families[&0].levels[level];
    files.iter().map(|file| file.number).collect()
}

fn refused(records: &[EditBuilder], text: &str) {
    let e = replay(records).unwrap_err();
    assert!(e.to_string().contains(text), "{e} does not say {text:?}");
    assert_eq!(e.kind(), Kind::Corruption);
}

#[test]
fn a_database_without_files_has_its_default_column_family() {
    let state = replay(&[]).unwrap();
    let cf = state.column_family("default").unwrap();
    assert_eq!((cf.id, cf.log_number, cf.levels.len()), (0, 4, 0));
    assert_eq!(cf.comparator().unwrap(), Comparator::Bytewise);
    assert_eq!(state.next_file_number, 20);
    assert_eq!(state.last_sequence, 1000);
}

#[test]
fn the_three_numbers_are_required() {
    for (left_out, name) in [
        (tag::LOG_NUMBER, "log number"),
        (tag::NEXT_FILE_NUMBER, "next file number"),
        (tag::LAST_SEQUENCE, "last sequence"),
    ] {
        let mut replay = ManifestReplay::new();
        for tag in [tag::LOG_NUMBER, tag::NEXT_FILE_NUMBER, tag::LAST_SEQUENCE] {
            if tag != left_out {
                replay.record(&edit().numbers(tag, &[5]).finish()).unwrap();
            }
        }
        let e = replay.finish().unwrap_err().to_string();
        assert!(e.contains(&format!("no {name} entry")), "{e}");
    }
    // In a record about WALs the log number does not count: it names no column family.
    let mut replay = ManifestReplay::new();
    let record = edit().required(5, 5, 5).string(tag::WAL_DELETION, &[3]);
    replay.record(&record.finish()).unwrap();
    assert!(replay.finish().is_err());
}

#[test]
fn files_move_between_levels_in_one_record() {
    let file = file_meta(7, b"a", b"b", (1, 2));
    let state = replay(&[
        edit().add_file(0, &file),
        edit().delete_file(0, 7).add_file(1, &file),
        edit().delete_file(1, 7).add_file(6, &file),
    ])
    .unwrap();
    assert_eq!(numbers(&state, 6), [7]);
    assert_eq!(state.column_families[&0].files().count(), 1);
}

#[test]
fn files_are_added_once_and_deleted_where_they_are() {
    let file = file_meta(7, b"a", b"b", (1, 2));
    let add = edit().add_file(1, &file);
    refused(&[add.clone(), edit().add_file(2, &file)], "file 7 added to level 2, it is in level 1");
    refused(
        &[add.clone(), edit().delete_file(2, 7)],
        "file 7 deleted from level 2, it is in level 1",
    );
    refused(&[add, edit().delete_file(1, 8)], "file 8 deleted from level 1");
    refused(&[edit().add_file(1, &file).add_file(1, &file)], "file 7 added");
}

#[test]
fn a_file_belongs_to_one_column_family() {
    let file = file_meta(7, b"a", b"b", (1, 2));
    refused(
        &[
            edit().add_column_family("x", BYTEWISE).column_family(3),
            edit().add_file(1, &file),
            edit().add_file(1, &file).column_family(3),
        ],
        "file 7 belongs to column families 0 and 3",
    );
}

#[test]
fn column_families_are_added_and_dropped() {
    let file = file_meta(7, b"b", b"a", (1, 2));
    let add = |id, name| {
        edit().numbers(tag::LOG_NUMBER, &[9]).column_family(id).add_column_family(name, REVERSE)
    };
    let drop = |id| edit().numbers(tag::COLUMN_FAMILY_DROP, &[]).column_family(id);
    let state = replay(&[
        add(1, "one"),
        add(2, "two"),
        edit().add_file(3, &file).column_family(2),
        drop(1),
        // A flush that was in progress when the column family was dropped.
        edit().add_file(0, &file_meta(8, b"x", b"a", (3, 4))).column_family(1),
    ])
    .unwrap();
    assert_eq!(state.column_families.keys().copied().collect::<Vec<_>>(), [0, 2]);
    assert_eq!(state.max_column_family, 2);
    let two = state.column_family("two").unwrap();
    assert_eq!((two.id, two.log_number), (2, 9));
    assert_eq!(two.comparator().unwrap(), Comparator::ReverseBytewise);
    assert_eq!(two.levels[3][0].number, 7);
    assert!(state.column_family("one").is_none());

    refused(&[add(1, "one"), add(1, "again")], "column family 1 added twice");
    refused(&[add(1, "one"), drop(1), add(1, "again")], "column family 1 added twice");
    refused(&[add(0, "zero")], "column family 0 added twice");
    refused(&[drop(5)], "column family 5 dropped");
    refused(&[drop(0)], "default column family");
    refused(&[edit().add_file(0, &file).column_family(5)], "unknown column family 5");
}

#[test]
fn comparators_do_not_change_and_unknown_ones_fail_only_on_use() {
    refused(
        &[edit().string(tag::COMPARATOR, REVERSE.as_bytes())],
        "comparator of column family 0 changes",
    );
    let overlapping = [
        edit().add_column_family("odd", "my.Comparator").column_family(1),
        edit()
            .add_file(1, &file_meta(8, b"z", b"a", (1, 2)))
            .add_file(1, &file_meta(7, b"z", b"a", (1, 2)))
            .column_family(1),
        edit()
            .add_column_family("times", "leveldb.BytewiseComparator.u64ts")
            .string(tag::PERSIST_TIMESTAMPS, &[0])
            .column_family(2),
    ];
    let state = replay(&overlapping).unwrap();
    let odd = state.column_family("odd").unwrap();
    assert_eq!(odd.files().count(), 2);
    let e = odd.comparator().unwrap_err();
    assert_eq!(e.kind(), Kind::Unsupported);
    assert!(e.to_string().contains("my.Comparator") && e.to_string().contains("odd"), "{e}");
    let times = state.column_family("times").unwrap();
    assert!(!times.timestamps_persisted);
    assert_eq!(times.comparator().unwrap_err().kind(), Kind::Unsupported);
}

#[test]
fn numbers_only_grow() {
    refused(&[edit().numbers(tag::LAST_SEQUENCE, &[999])], "goes back from 1000 to 999");
    let state = replay(&[
        edit().numbers(tag::LOG_NUMBER, &[9]).numbers(tag::MIN_LOG_NUMBER_TO_KEEP, &[8]),
        edit().numbers(tag::LOG_NUMBER, &[5]).numbers(tag::MIN_LOG_NUMBER_TO_KEEP, &[3]),
        edit().numbers(tag::MAX_COLUMN_FAMILY, &[7]).string(tag::DB_ID, b"id"),
    ])
    .unwrap();
    assert_eq!(state.column_families[&0].log_number, 9);
    assert_eq!(state.min_log_number_to_keep, 8);
    assert_eq!(state.max_column_family, 7);
    assert_eq!(state.db_id.as_deref(), Some("id"));
}

/// Trap 47: only normal records change files.
#[test]
fn file_changes_in_other_records_are_ignored() {
    let file = file_meta(7, b"a", b"b", (1, 2));
    let state = replay(&[
        edit().add_file(1, &file).add_column_family("x", BYTEWISE).column_family(1),
        edit().add_file(1, &file).string(tag::WAL_DELETION, &[3]),
        edit()
            .add_file(1, &file)
            .numbers(tag::LOG_NUMBER, &[99])
            .numbers(tag::OLD_WAL_ADDITION, &[4, 1]),
        edit().delete_file(1, 99).numbers(tag::COLUMN_FAMILY_DROP, &[]).column_family(1),
    ])
    .unwrap();
    assert!(state.column_families.values().all(|cf| cf.files().count() == 0));
    assert_eq!(state.column_families[&0].log_number, 4);
}

#[test]
fn tracked_logs_are_known_until_they_are_removed() {
    let state = replay(&[
        edit().numbers(tag::OLD_WAL_ADDITION, &[4, 1]),
        edit().numbers(tag::OLD_WAL_ADDITION, &[6, 1]),
        edit().numbers(tag::OLD_WAL_ADDITION, &[6, 2, 4096, 1]),
        edit().numbers(tag::OLD_WAL_ADDITION, &[9, 1]),
        edit().numbers(tag::OLD_WAL_DELETION, &[6]),
    ])
    .unwrap();
    assert_eq!(state.wals, BTreeMap::from([(6, Some(4096)), (9, None)]));
}

#[test]
fn atomic_groups_are_applied_whole_or_not_at_all() {
    let member = |remaining, number: u64| {
        edit()
            .numbers(tag::IN_ATOMIC_GROUP, &[remaining])
            .add_file(0, &file_meta(number, b"a", b"b", (number * 10, number * 10 + 5)))
    };
    let whole = [member(2, 7), member(1, 8), member(0, 9), member(0, 10)];
    assert_eq!(numbers(&replay(&whole).unwrap(), 0), [10, 9, 8, 7]);
    let torn = replay(&whole[..2]).unwrap();
    assert_eq!(torn.column_families[&0].files().count(), 0);

    refused(&[member(2, 7), member(0, 8)], "corrupted atomic group");
    refused(&[member(2, 7), member(2, 8)], "corrupted atomic group");
    refused(&[member(2, 7), edit()], "corrupted atomic group");
    refused(&[member(2, 7), member(u64::from(u32::MAX), 8)], "corrupted atomic group");
}

#[test]
fn level_0_is_sorted_by_epoch_if_every_file_has_one() {
    let file = |number, epoch, sequences| {
        let mut file = file_meta(number, b"a", b"z", sequences);
        file.epoch = epoch;
        file
    };
    let mut other_level = file_meta(30, b"a", b"z", (1, 1));
    other_level.epoch = 1;
    let with_epochs = edit()
        .add_file(0, &file(7, 5, (1, 9)))
        .add_file(0, &file(8, 4, (50, 60)))
        .add_file(0, &file(9, 6, (20, 30)));
    let state = replay(&[with_epochs.clone().add_file(1, &other_level)]).unwrap();
    assert_eq!(numbers(&state, 0), [9, 7, 8]);
    // If one file of any level has no epoch, sequences decide.
    other_level.epoch = 0;
    let state = replay(&[with_epochs.add_file(1, &other_level)]).unwrap();
    assert_eq!(numbers(&state, 0), [8, 9, 7]);
}

#[test]
fn files_of_one_epoch_must_not_overlap() {
    let file = |number, from: &[u8], to: &[u8]| {
        let mut file = file_meta(number, from, to, (number, number));
        file.epoch = 4;
        file
    };
    let pair = |a: &FileMeta, b: &FileMeta| [edit().add_file(0, a).add_file(0, b)];
    let apart = pair(&file(7, b"a", b"c"), &file(8, b"d", b"f"));
    assert_eq!(numbers(&replay(&apart).unwrap(), 0), [8, 7]);
    refused(
        &pair(&file(7, b"a", b"d"), &file(8, b"d", b"f")),
        "files 7 and 8 of level 0 overlap and have the same epoch 4",
    );
    let mut sentinel = file(7, b"a", b"c");
    sentinel.largest = b"d".to_vec();
    sentinel.largest.extend_from_slice(&SENTINEL_PACKED.to_le_bytes());
    replay(&pair(&sentinel, &file(8, b"d", b"f"))).unwrap();
}

#[test]
fn level_0_by_sequence_needs_an_order() {
    let file = |number, sequences| file_meta(number, b"a", b"z", sequences);
    let pair = |a: &FileMeta, b: &FileMeta| [edit().add_file(0, a).add_file(0, b)];
    let fine = replay(&pair(&file(7, (1, 5)), &file(8, (6, 9)))).unwrap();
    assert_eq!(numbers(&fine, 0), [8, 7]);
    // Ingested while a memtable was open: one sequence, inside the range of the flushed file.
    let ingested = replay(&pair(&file(8, (1, 9)), &file(7, (5, 5)))).unwrap();
    assert_eq!(numbers(&ingested, 0), [8, 7]);
    let behind = replay(&pair(&file(7, (0, 0)), &file(8, (0, 0)))).unwrap();
    assert_eq!(numbers(&behind, 0), [8, 7]);
    refused(&pair(&file(7, (3, 5)), &file(8, (1, 9))), "files 8 (sequences 1 to 9) and 7");
    refused(&pair(&file(7, (5, 5)), &file(8, (5, 5))), "of level 0 have no order");
}

#[test]
fn a_bound_may_have_a_type_above_those_of_entries() {
    let file = |kind: u8| {
        let mut file = file_meta(7, b"a", b"c", (1, 2));
        file.smallest.splice(1.., u64::from(kind).to_le_bytes());
        edit().add_file(1, &file)
    };
    let state = replay(&[file(0x1a)]).unwrap();
    assert_eq!(numbers(&state, 1), [7]);
    refused(&[file(0x80)], "entry type 0x80");
}

#[test]
fn other_levels_are_sorted_by_key_and_do_not_overlap() {
    let file = |number, from: &[u8], to: &[u8]| file_meta(number, from, to, (1, 9));
    let state = replay(&[edit()
        .add_file(2, &file(7, b"m", b"p"))
        .add_file(2, &file(8, b"a", b"c"))
        .add_file(2, &file(9, b"x", b"z"))])
    .unwrap();
    assert_eq!(numbers(&state, 2), [8, 7, 9]);
    refused(
        &[edit().add_file(2, &file(7, b"a", b"n")).add_file(2, &file(8, b"m", b"z"))],
        "files 7 and 8 of level 2 overlap",
    );
    refused(&[edit().add_file(2, &file(7, b"z", b"a"))], "file 7 of level 2");

    // One user key may end a file and begin the next, with descending sequences.
    let newer = file_meta(7, b"a", b"k", (5, 9));
    let older = file_meta(8, b"k", b"z", (1, 4));
    replay(&[edit().add_file(1, &newer).add_file(1, &older)]).unwrap();
    let mut older_ends = file_meta(7, b"a", b"k", (1, 1));
    older_ends.largest_sequence = 9;
    refused(
        &[edit().add_file(1, &older_ends).add_file(1, &older)],
        "files 7 and 8 of level 1 overlap",
    );

    let reverse = [
        edit().add_column_family("r", REVERSE).column_family(1),
        edit().add_file(1, &file(7, b"p", b"m")).add_file(1, &file(8, b"z", b"x")).column_family(1),
    ];
    let state = replay(&reverse).unwrap();
    let files = &state.column_families[&1].levels[1];
    assert_eq!([files[0].number, files[1].number], [8, 7]);
}

#[test]
fn blob_files_and_their_garbage_are_counted() {
    let blob = |number, count, bytes| {
        edit().numbers(tag::BLOB_FILE_ADDITION, &[number, count, bytes, 0, 0, 0])
    };
    let garbage =
        |number, count, bytes| edit().numbers(tag::BLOB_FILE_GARBAGE, &[number, count, bytes, 0]);
    let mut linked = file_meta(30, b"a", b"b", (1, 2));
    linked.oldest_blob_file = 11;
    let state = replay(&[
        blob(10, 5, 500),
        blob(11, 5, 500),
        blob(12, 5, 500),
        blob(13, 5, 500),
        garbage(11, 5, 500),
        garbage(12, 2, 200),
        garbage(12, 3, 300),
        garbage(13, 4, 400),
        edit().add_file(1, &linked),
    ])
    .unwrap();
    let cf = &state.column_families[&0];
    assert_eq!(cf.blob_files[&12].garbage_bytes, 500);
    // 10 is older than any link; 12 is dead and no file is linked to it.
    let live: Vec<u64> = cf.live_blob_files().map(|blob| blob.number).collect();
    assert_eq!(live, [11, 13]);

    refused(&[blob(10, 5, 500), blob(10, 5, 500)], "blob file 10 added twice");
    refused(&[garbage(10, 1, 1)], "garbage of unknown blob file 10");
    refused(&[blob(10, 5, 500), garbage(10, 6, 500)], "blob file 10 has 5 values");
    refused(&[blob(10, 5, 500), garbage(10, 5, 501)], "of which 5 (501 bytes) are dead");
    refused(&[blob(10, 5, 500), garbage(10, u64::MAX, 1), garbage(10, 2, 1)], "dead");
}

#[test]
fn without_a_link_every_blob_file_can_be_missing() {
    let state = replay(&[edit().numbers(tag::BLOB_FILE_ADDITION, &[10, 5, 500, 0, 0, 0])]).unwrap();
    assert_eq!(state.column_families[&0].live_blob_files().count(), 0);
}

/// The numbers of the files that are linked to blob files 0 to 2.
fn linked(replay: &ManifestReplay) -> [Vec<u64>; 3] {
    [0, 1, 2].map(|blob| replay.linked_files(0, blob).map(|(_, file)| file.number).collect())
}

/// The same of files that are linked to the blob file of their number modulo 3; 0 is no link.
fn links_of(model: &BTreeMap<u64, u32>) -> [Vec<u64>; 3] {
    let of = |blob| model.keys().copied().filter(|number| number % 3 == blob).collect();
    [Vec::new(), of(1), of(2)]
}

proptest! {
    /// Against the simplest model: a set of (level, number), for any order of additions and
    /// deletions.
    #[test]
    fn files_follow_a_model(steps in proptest::collection::vec((0u32..3, 1u64..8, any::<bool>()), 0..40)) {
        let mut model: BTreeMap<u64, u32> = BTreeMap::new();
        let mut replay = ManifestReplay::new();
        replay.record(&required().finish()).unwrap();
        for (level, number, add) in steps {
            // Keys and sequences derive from the number, so any set of files is consistent.
            let key = [b'a' + number as u8];
            let mut file = file_meta(number, &key, &key, (number, number));
            file.oldest_blob_file = number % 3;
            let record = match add {
                true => edit().add_file(level, &file),
                false => edit().delete_file(level, number),
            };
            let fine = match add {
                true => !model.contains_key(&number),
                false => model.get(&number) == Some(&level),
            };
            if !fine {
                prop_assert!(replay.record(&record.finish()).is_err());
                return Ok(());
            }
            replay.record(&record.finish()).unwrap();
            match add {
                true => model.insert(number, level),
                false => model.remove(&number),
            };
            prop_assert_eq!(linked(&replay), links_of(&model));
        }
        let state = replay.finish().unwrap();
        let found: BTreeMap<u64, u32> = state.column_families[&0]
            .files()
            .map(|(level, file)| (file.number, level as u32))
            .collect();
        prop_assert_eq!(linked(&ManifestReplay::resume(&state)), links_of(&model));
        prop_assert_eq!(found, model);
    }

    #[test]
    fn mutated_manifests_never_panic(
        at in any::<proptest::sample::Index>(),
        mask in 1u8..,
        record in 0usize..4,
    ) {
        let mut records = [
            required().finish(),
            edit().add_column_family("x", BYTEWISE).column_family(1).finish(),
            edit().add_file(0, &file_meta(7, b"a", b"c", (1, 3))).finish(),
            edit().delete_file(0, 7).add_file(1, &file_meta(8, b"a", b"c", (1, 3))).finish(),
        ];
        let at = at.index(records[record].len());
        records[record][at] ^= mask;
        let mut replay = ManifestReplay::new();
        if records.iter().try_for_each(|r| replay.record(r)).is_ok()
            && let Ok(state) = replay.finish()
        {
            prop_assert!(state.column_families.contains_key(&0));
        }
    }
}

/// A reader that took the first records of a new MANIFEST for all would miss its tables.
#[test]
fn no_part_of_the_records_of_a_new_manifest_is_a_whole() {
    let tables = (1..700).map(|n| file_meta(n, b"a", b"b", (n, n)));
    let records: Vec<EditBuilder> = tables.map(|meta| edit().add_file(0, &meta)).collect();
    let state = replay(&records).unwrap();
    let snapshot: Vec<_> = ManifestReplay::resume(&state).snapshot(800).collect();
    assert!(snapshot.len() > 4);
    for len in 0..=snapshot.len() {
        let mut replay = ManifestReplay::new();
        for edit in &snapshot[..len] {
            replay.edit(edit.clone()).unwrap();
        }
        match replay.finish() {
            Ok(all) => {
                assert_eq!(len, snapshot.len());
                assert_eq!(all.column_families[&0].files().count(), 699);
            }
            Err(error) => assert!(len < snapshot.len(), "{error}"),
        }
    }
}

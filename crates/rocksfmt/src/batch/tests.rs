//! Every tag, the sequences, and refusals.

use proptest::prelude::*;

use super::*;
use crate::error::Kind;
use crate::testing::BatchBuilder;

fn ops(data: &[u8]) -> Result<Vec<(u64, Op<'_>)>> {
    WriteBatch::parse(data)?.ops().collect()
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..200)
}

fn everything(cf: u32) -> BatchBuilder {
    BatchBuilder::new(100)
        .put(cf, b"a", b"1")
        .log_data(b"note")
        .delete(cf, b"b")
        .single_delete(cf, b"c")
        .record(tag::NOOP, &[])
        .merge(cf, b"d", b"+1")
        .delete_range(cf, b"e", b"f")
        .blob_index(cf, b"g", b"\x01ref")
        .entity(cf, b"h", b"\x01\x00")
        .timed_put(cf, b"i", b"v", 1_700_000_000)
}

#[test]
fn every_operation_comes_back_with_its_sequence() {
    for cf in [0, 1, 300] {
        let data = everything(cf).finish();
        let want = [
            (100, Op::Put { cf, key: b"a", value: b"1" }),
            (101, Op::LogData(b"note")),
            (101, Op::Delete { cf, key: b"b" }),
            (102, Op::SingleDelete { cf, key: b"c" }),
            (103, Op::Noop),
            (103, Op::Merge { cf, key: b"d", operand: b"+1" }),
            (104, Op::DeleteRange { cf, begin: b"e", end: b"f" }),
            (105, Op::BlobIndex { cf, key: b"g", index: b"\x01ref" }),
            (106, Op::Entity { cf, key: b"h", columns: b"\x01\x00" }),
            (107, Op::TimedPut { cf, key: b"i", value: b"v", write_time: 1_700_000_000 }),
        ];
        assert_eq!(ops(&data).unwrap(), want);
        let batch = WriteBatch::parse(&data).unwrap();
        assert_eq!((batch.sequence(), batch.count(), batch.next_sequence()), (100, 8, 108));
        batch.verify().unwrap();
    }
}

#[test]
fn markers_take_no_sequence_and_are_refused_by_name() {
    let data = BatchBuilder::new(5)
        .record(tag::BEGIN_PREPARE, &[])
        .put(0, b"k", b"v")
        .record(tag::END_PREPARE, &[b"x1"])
        .record(tag::BEGIN_PERSISTED_PREPARE, &[])
        .record(tag::BEGIN_UNPREPARE, &[])
        .record(tag::COMMIT, &[b"x1"])
        .record(tag::ROLLBACK, &[b"x2"])
        .record(tag::COMMIT_WITH_TIMESTAMP, &[b"ts", b"x3"])
        .finish();
    let markers: Vec<_> = ops(&data)
        .unwrap()
        .into_iter()
        .filter_map(|(sequence, op)| match op {
            Op::Marker(marker) => Some((sequence, marker)),
            _ => None,
        })
        .collect();
    assert_eq!(
        markers,
        [
            (5, Marker::BeginPrepare),
            (6, Marker::EndPrepare(b"x1")),
            (6, Marker::BeginPersistedPrepare),
            (6, Marker::BeginUnprepare),
            (6, Marker::Commit(b"x1")),
            (6, Marker::Rollback(b"x2")),
            (6, Marker::CommitWithTimestamp { timestamp: b"ts", name: b"x3" }),
        ]
    );
    for (_, marker) in markers {
        let e = marker.refused();
        assert_eq!(e.kind(), Kind::Unsupported);
        assert!(e.to_string().contains(marker.name()), "{e}");
    }
}

#[test]
fn a_wrong_count_is_corruption() {
    for count in [0, 7, 9, u32::MAX] {
        let data = everything(0).finish_with_count(count);
        let e = ops(&data).unwrap_err();
        assert_eq!(e.kind(), Kind::Corruption);
        assert!(e.to_string().contains("batch at sequence 100"), "{e}");
        assert!(WriteBatch::parse(&data).unwrap().verify().is_err());
    }
    assert_eq!(ops(&BatchBuilder::new(9).finish()).unwrap(), []);
}

#[test]
fn unknown_tags_are_refused_by_number() {
    for tag in (0x1A..=0xFF).chain([0x14]) {
        let data = BatchBuilder::new(1).record(tag, &[b"k"]).finish();
        let e = ops(&data).unwrap_err();
        assert_eq!(e.kind(), Kind::Unsupported);
        assert!(e.to_string().contains(&format!("0x{tag:02x}")), "{e}");
    }
}

#[test]
fn short_and_impossible_headers_are_corruption() {
    for len in 0..BATCH_HEADER_BYTES {
        assert!(WriteBatch::parse(&vec![0; len]).is_err());
    }
    for (sequence, count, fine) in [
        (SEQUENCE_MAX, 1, true),
        (SEQUENCE_MAX, 2, false),
        (SEQUENCE_MAX + 1, 0, true),
        (u64::MAX, 1, false),
    ] {
        let data = BatchBuilder::new(sequence).finish_with_count(count);
        assert_eq!(WriteBatch::parse(&data).is_ok(), fine, "{sequence} {count}");
    }
}

#[test]
fn a_timed_put_without_its_time_is_corruption() {
    let data =
        BatchBuilder::new(1).record(tag::TIMED_PUT, &[b"k", b"1234567"]).finish_with_count(1);
    let e = ops(&data).unwrap_err();
    assert!(e.to_string().contains("no write time"), "{e}");
}

#[test]
fn every_cut_is_refused() {
    let data = everything(3).finish();
    for cut in 0..data.len() {
        assert!(ops(&data[..cut]).is_err(), "{cut}");
    }
}

proptest! {
    #[test]
    fn random_batches_come_back(
        sequence in 0..SEQUENCE_MAX - 100,
        steps in proptest::collection::vec((0u8..9, 0u32..1000, bytes(), bytes()), 0..40),
    ) {
        let mut builder = BatchBuilder::new(sequence);
        let mut want = Vec::new();
        let mut next = sequence;
        for (kind, cf, key, value) in &steps {
            let (cf, key, value) = (*cf, &key[..], &value[..]);
            let (built, op) = match kind {
                0 => (builder.put(cf, key, value), Op::Put { cf, key, value }),
                1 => (builder.delete(cf, key), Op::Delete { cf, key }),
                2 => (builder.single_delete(cf, key), Op::SingleDelete { cf, key }),
                3 => (builder.merge(cf, key, value), Op::Merge { cf, key, operand: value }),
                4 => {
                    let op = Op::DeleteRange { cf, begin: key, end: value };
                    (builder.delete_range(cf, key, value), op)
                }
                5 => (builder.blob_index(cf, key, value), Op::BlobIndex { cf, key, index: value }),
                6 => (builder.entity(cf, key, value), Op::Entity { cf, key, columns: value }),
                7 => {
                    let write_time = sequence;
                    let op = Op::TimedPut { cf, key, value, write_time };
                    (builder.timed_put(cf, key, value, write_time), op)
                }
                _ => (builder.log_data(value), Op::LogData(value)),
            };
            builder = built;
            want.push((next, op));
            next += u64::from(*kind != 8);
        }
        let data = builder.finish();
        prop_assert_eq!(ops(&data).unwrap(), want);
        prop_assert_eq!(WriteBatch::parse(&data).unwrap().next_sequence(), next);
    }

    #[test]
    fn any_bytes_end(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        if let Ok(batch) = WriteBatch::parse(&bytes) {
            let found = batch.ops().filter(|op| op.is_ok()).count();
            prop_assert!(found <= bytes.len());
        }
    }

    #[test]
    fn mutated_batches_end(at in any::<proptest::sample::Index>(), mask in 1u8..) {
        let mut data = everything(1).finish();
        let at = at.index(data.len());
        data[at] ^= mask;
        if let Ok(batch) = WriteBatch::parse(&data) {
            let answer: Result<Vec<_>> = batch.ops().collect();
            if let Ok(ops) = answer {
                let writes = ops.iter().filter(|(_, op)| op.column_family().is_some()).count();
                prop_assert_eq!(writes, batch.count() as usize);
            }
        }
    }
}

#[test]
fn values_that_are_stored_elsewhere_are_replaced_by_references() {
    let mut batch = BatchWriter::new();
    batch.put(0, b"small", b"1");
    batch.put(0, b"large", &[7; 100]);
    batch.delete(3, b"gone");
    batch.put(3, b"larger", &[8; 200]);
    batch.delete_range(0, b"a", b"b");
    batch.note_keys(5);
    let whole = batch.finish(9).to_vec();
    batch.store_values(|_, _, _, _| false).unwrap();
    assert_eq!(batch.finish(9), whole);
    let store = |cf: u32, key: &[u8], value: &[u8], index: &mut Vec<u8>| {
        index.extend_from_slice(format!("{cf} {}", key.len()).as_bytes());
        value.len() >= 100
    };
    batch.store_values(store).unwrap();
    assert_eq!(batch.count(), 5);
    let bytes = batch.finish(9);
    let ops: Vec<Op<'_>> =
        WriteBatch::parse(bytes).unwrap().ops().map(|op| op.unwrap().1).collect();
    let expected = [
        Op::Put { cf: 0, key: b"small", value: b"1" },
        Op::BlobIndex { cf: 0, key: b"large", index: b"0 5" },
        Op::Delete { cf: 3, key: b"gone" },
        Op::BlobIndex { cf: 3, key: b"larger", index: b"3 6" },
        Op::DeleteRange { cf: 0, begin: b"a", end: b"b" },
    ];
    assert_eq!(ops[..5], expected);
    assert!(matches!(ops[5], Op::LogData(note) if keys_noted(note) == Some(5)));
    let values = |cf, index: &[u8]| (index == b"0 5" && cf == 0).then_some(&[7; 100][..]);
    batch.restore_values(values).unwrap();
    let in_part = batch.finish(9).to_vec();
    assert!(in_part.len() > whole.len() - 200 && in_part.len() < whole.len());
    batch.restore_values(|cf, _| (cf == 3).then_some(&[8; 200][..])).unwrap();
    assert_eq!(batch.finish(9), whole);
}

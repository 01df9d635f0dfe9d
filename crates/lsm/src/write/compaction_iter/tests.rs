use proptest::prelude::*;

use super::*;

const PUT: u8 = ValueType::Value as u8;
const DELETE: u8 = ValueType::Deletion as u8;
const SINGLE: u8 = ValueType::SingleDeletion as u8;
const MERGE: u8 = ValueType::Merge as u8;
const BLOB: u8 = ValueType::BlobIndex as u8;
const KEY: &[u8] = b"key";

/// A version of the key: sequence, type, value.
type Entry = (u64, u8, Vec<u8>);

/// A sorted run of the model: versions of one key, the newest first, and range tombstones over it.
#[derive(Clone, Debug, Default, PartialEq)]
struct Run {
    entries: Vec<Entry>,
    tombstones: Vec<u64>,
}

struct Near<'a> {
    tombstones: &'a [u64],
    below: bool,
}

impl Around for Near<'_> {
    fn exists_below(&mut self, _: &[u8]) -> bool {
        self.below
    }

    fn has_tombstones(&self) -> bool {
        !self.tombstones.is_empty()
    }

    fn covered(&mut self, _: &[u8], at: u64) -> u64 {
        self.tombstones.iter().copied().filter(|&sequence| sequence <= at).max().unwrap_or(0)
    }
}

fn rules(snapshots: &[u64], place: Place) -> Rules {
    Rules {
        snapshots: snapshots.to_vec(),
        place,
        merge_operator: Some("stringappend".parse().unwrap()),
        merge_bytes: 1 << 20,
        filter: None,
        keep_sequences: false,
    }
}

#[test]
fn sequences_are_kept_where_they_are_asked_for() {
    let run = entries(&[(5, ValueType::Value as u8, "v")]);
    let zeroed = compacted(&run, &rules(&[9], Place::Bottommost), false);
    let keeping = Rules { keep_sequences: true, ..rules(&[9], Place::Bottommost) };
    let kept = compacted(&run, &keeping, false);
    assert_ne!(zeroed.entries, kept.entries);
    assert_eq!(kept.entries, run.entries);
}

/// What is left of a run.
fn compacted(run: &Run, rules: &Rules, below: bool) -> Run {
    let mut iter = CompactionIter::new(rules.clone());
    let mut near = Near { tombstones: &run.tombstones, below };
    let mut left = Run::default();
    let mut take = |iter: &mut CompactionIter, value: &[u8]| {
        while let Some(output) = iter.next(value) {
            let (user, trailer) = output.key.split_last_chunk::<8>().unwrap();
            assert_eq!(user, KEY);
            assert_eq!(output.begins_key, left.entries.is_empty());
            let (sequence, kind) = unpack(u64::from_le_bytes(*trailer));
            left.entries.push((sequence, kind, output.value.to_vec()));
        }
    };
    for (sequence, kind, value) in &run.entries {
        iter.push(&mut near, KEY, pack(*sequence, *kind), value).unwrap();
        take(&mut iter, value);
    }
    iter.finish(&mut near);
    take(&mut iter, b"");
    let packed: Vec<u64> = left.entries.iter().map(|e| pack(e.0, e.1)).collect();
    assert!(packed.is_sorted_by(|a, b| a > b), "not in order: {left:?}");
    let dropped =
        |sequence: u64| rules.place == Place::Bottommost && sequence <= rules.snapshots[0];
    left.tombstones = run.tombstones.iter().copied().filter(|&s| !dropped(s)).collect();
    left
}

/// What a reader finds in runs, the newest first.
fn read(runs: &[Run], at: u64) -> Option<Vec<u8>> {
    let tombstones = runs.iter().flat_map(|run| &run.tombstones).filter(|&&s| s <= at);
    let covered = tombstones.copied().max().unwrap_or(0);
    let entries = runs.iter().flat_map(|run| &run.entries).filter(|entry| entry.0 <= at);
    let mut operands: Vec<&[u8]> = Vec::new();
    let mut base = None;
    for (sequence, kind, value) in entries {
        if *sequence < covered {
            break;
        }
        match *kind {
            MERGE => operands.push(value),
            DELETE | SINGLE => break,
            _ => {
                base = Some(&value[..]);
                break;
            }
        }
    }
    if operands.is_empty() {
        return base.map(<[u8]>::to_vec);
    }
    let mut out = Vec::new();
    let operator = MergeOperator::StringAppend(",".into());
    operator.full(base, operands.into_iter().rev(), &mut out);
    Some(out)
}

/// The versions that a full compaction by RocksDB leaves without a snapshot.
fn compacted_by_rocksdb(run: &Run) -> std::result::Result<Run, &'static str> {
    let covered = run.tombstones.iter().copied().max().unwrap_or(0);
    let entries = &run.entries;
    let mut left = Run::default();
    let mut operands: Vec<Vec<u8>> = Vec::new();
    let (mut at, mut hidden) = (0, false);
    let append = |base: Option<&[u8]>, operands: &[Vec<u8>]| {
        let newest_last = operands.iter().rev().map(|operand| &operand[..]);
        let mut out = Vec::new();
        MergeOperator::StringAppend(",".into()).full(base, newest_last, &mut out);
        (0, PUT, out)
    };
    while let Some((sequence, kind, value)) = entries.get(at) {
        at += 1;
        if *kind == SINGLE {
            if !operands.is_empty() {
                left.entries.push(append(None, &operands));
                operands.clear();
            }
            match entries.get(at).map(|next| next.1) {
                None | Some(SINGLE) => {}
                Some(DELETE) => return Err("a SingleDelete meets a Delete"),
                Some(_) => at += 1,
            }
            hidden = true;
            continue;
        }
        if hidden {
            continue;
        }
        let gone = *kind == DELETE || *sequence < covered;
        if *kind == MERGE && !gone {
            operands.push(value.clone());
            continue;
        }
        if !operands.is_empty() {
            left.entries.push(append((!gone).then_some(&value[..]), &operands));
            operands.clear();
        } else if !gone {
            left.entries.push((0, *kind, value.clone()));
        }
        hidden = true;
    }
    if !operands.is_empty() {
        left.entries.push(append(None, &operands));
    }
    Ok(left)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Put,
    Delete,
    Single,
    Merge,
    DeleteRange,
    Snapshot,
    Release,
    Flush,
    /// Merges runs: the first, how many, and whether the caller knows that nothing is below.
    Compact(usize, usize),
    /// RocksDB merges all runs.
    RocksDb,
}

/// A database of one key.
#[derive(Default)]
struct Model {
    /// The newest first. The first one is the memtable.
    runs: Vec<Run>,
    snapshots: Vec<(u64, Option<Vec<u8>>)>,
    value: Option<Vec<u8>>,
    sequence: u64,
    /// Puts since the last SingleDelete, and whether anything else was written.
    puts: usize,
    others: bool,
}

impl Model {
    fn new() -> Model {
        Model { runs: vec![Run::default()], ..Model::default() }
    }

    fn write(&mut self, kind: u8) {
        self.sequence += 1;
        let value = self.sequence.to_string().into_bytes();
        match kind {
            MERGE => {
                let base = self.value.take().map(|mut base| {
                    base.push(b',');
                    base
                });
                self.value = Some([base.unwrap_or_default(), value.clone()].concat());
            }
            PUT => self.value = Some(value.clone()),
            _ => self.value = None,
        }
        self.runs[0].entries.insert(0, (self.sequence, kind, value));
    }

    fn readers(&self) -> Vec<u64> {
        let held = self.snapshots.iter().map(|snapshot| snapshot.0);
        let mut all: Vec<u64> = held.chain([self.sequence]).collect();
        all.dedup();
        all
    }

    fn compact(&mut self, from: usize, count: usize, place: Place) {
        let from = from.min(self.runs.len());
        let to = (from + count).min(self.runs.len());
        if from == to {
            return;
        }
        let below = !self.runs[to..].iter().all(|run| *run == Run::default());
        let place = match place {
            Place::Level if !below && count.is_multiple_of(2) => Place::Bottommost,
            place => place,
        };
        let mut all = Run::default();
        for run in self.runs.drain(from..to) {
            all.entries.extend(run.entries);
            all.tombstones.extend(run.tombstones);
        }
        let left = compacted(&all, &rules(&self.readers(), place), below);
        self.runs.insert(from, left);
    }

    /// Does a step, if it is possible and legal.
    fn step(&mut self, step: Step) -> std::result::Result<(), &'static str> {
        match step {
            Step::Put => {
                self.puts += 1;
                self.write(PUT);
            }
            Step::Delete => {
                self.others = true;
                self.write(DELETE);
            }
            Step::Merge => {
                self.others = true;
                self.write(MERGE);
            }
            Step::Single => {
                (self.puts, self.others) = (0, false);
                self.write(SINGLE);
            }
            Step::DeleteRange => {
                self.others = true;
                self.sequence += 1;
                self.value = None;
                self.runs[0].tombstones.push(self.sequence);
            }
            Step::Snapshot => {
                if self.snapshots.last().is_none_or(|last| last.0 < self.sequence) {
                    self.snapshots.push((self.sequence, self.value.clone()));
                }
            }
            Step::Release => {
                if !self.snapshots.is_empty() {
                    self.snapshots.remove(self.sequence as usize % self.snapshots.len());
                }
            }
            Step::Flush => {
                self.compact(0, 1, Place::Flush);
                self.runs.insert(0, Run::default());
            }
            Step::Compact(from, count) => {
                // Without the memtable.
                self.compact(from + 1, count, Place::Level);
            }
            Step::RocksDb => {
                if self.snapshots.is_empty() {
                    let mut all = Run::default();
                    for run in self.runs.drain(..) {
                        all.entries.extend(run.entries);
                        all.tombstones.extend(run.tombstones);
                    }
                    self.runs = vec![Run::default(), compacted_by_rocksdb(&all)?];
                }
            }
        }
        Ok(())
    }

    fn check(&self, word: &[Step]) {
        assert_eq!(read(&self.runs, self.sequence), self.value, "{word:?}: {:?}", self.runs);
        for (at, value) in &self.snapshots {
            assert_eq!(read(&self.runs, *at), *value, "{word:?} at {at}: {:?}", self.runs);
        }
    }
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Put),
        2 => Just(Step::Delete),
        2 => Just(Step::Single),
        3 => Just(Step::Merge),
        1 => Just(Step::DeleteRange),
        2 => Just(Step::Snapshot),
        1 => Just(Step::Release),
        4 => Just(Step::Flush),
        3 => (0..4usize, 1..5usize).prop_map(|(from, count)| Step::Compact(from, count)),
    ]
}

/// Every word of a few letters, with everything flushed and merged in two ways at the end.
#[test]
fn every_reader_finds_the_same_after_every_short_word() {
    const LETTERS: [Step; 9] = [
        Step::Put,
        Step::Delete,
        Step::Single,
        Step::Merge,
        Step::DeleteRange,
        Step::Snapshot,
        Step::Release,
        Step::Flush,
        Step::Compact(0, 2),
    ];
    let length = if cfg!(debug_assertions) { 5 } else { 6 };
    for number in 0..LETTERS.len().pow(length) {
        let letter = |at: u32| LETTERS[number / LETTERS.len().pow(at) % LETTERS.len()];
        let word: Vec<Step> = (0..length).map(letter).collect();
        let mut model = Model::new();
        for &step in &word {
            model.step(step).unwrap();
        }
        for step in [Step::Flush, Step::Compact(0, 1), Step::Compact(0, 9), Step::Compact(0, 8)] {
            model.step(step).unwrap();
            model.check(&word);
        }
    }
}

proptest! {
    #[test]
    fn every_reader_finds_the_same(word in prop::collection::vec(any_step(), 1..30)) {
        let mut model = Model::new();
        for &step in &word {
            model.step(step).unwrap();
            model.check(&word);
        }
    }

    /// A key is written once between two of its SingleDeletes. RocksDB finds the same, whichever
    /// of the two merges when.
    #[test]
    fn rocksdb_finds_the_same_where_single_deletes_are_legal(
        word in prop::collection::vec(any_step(), 1..40),
        rocksdb in prop::collection::vec(any::<bool>(), 40),
    ) {
        let mut model = Model::new();
        for (&step, &rocksdb) in word.iter().zip(&rocksdb) {
            let step = match step {
                Step::Delete | Step::Merge | Step::DeleteRange => Step::Single,
                Step::Put if model.puts == 1 => Step::Single,
                Step::Compact(..) if rocksdb => Step::RocksDb,
                step => step,
            };
            model.step(step).unwrap();
            model.check(&word);
        }
    }

    /// Our Deletes are mixed with Puts and SingleDeletes of a program that uses RocksDB.
    #[test]
    fn our_deletes_mix_with_single_deletes(word in prop::collection::vec(any_step(), 1..40)) {
        let mut model = Model::new();
        for &step in &word {
            let step = match step {
                Step::Single if model.puts != 1 || model.others => Step::Delete,
                Step::Put if model.value.is_some() => Step::Delete,
                Step::Merge | Step::DeleteRange => continue,
                step => step,
            };
            if step == Step::Delete {
                model.step(step).unwrap();
                (model.puts, model.others) = (0, false);
            } else {
                model.step(step).unwrap();
            }
            model.check(&word);
        }
        model.snapshots.clear();
        model.step(Step::RocksDb).unwrap();
        model.check(&word);
    }

    /// Without SingleDeletes, RocksDB may merge at any time.
    #[test]
    fn rocksdb_finds_the_same_without_single_deletes(
        word in prop::collection::vec(any_step(), 1..40),
        rocksdb in prop::collection::vec(any::<bool>(), 40),
    ) {
        let mut model = Model::new();
        for (&step, &rocksdb) in word.iter().zip(&rocksdb) {
            let step = match step {
                Step::Single => Step::Merge,
                Step::Compact(..) if rocksdb => Step::RocksDb,
                step => step,
            };
            model.step(step).unwrap();
            model.check(&word);
        }
    }
}

fn entries(list: &[(u64, u8, &str)]) -> Run {
    let own = |&(sequence, kind, value): &(u64, u8, &str)| (sequence, kind, value.into());
    Run { entries: list.iter().map(own).collect(), tombstones: Vec::new() }
}

fn left(list: &[(u64, u8, &str)], snapshots: &[u64], place: Place, below: bool) -> Vec<Entry> {
    compacted(&entries(list), &rules(snapshots, place), below).entries
}

#[test]
fn a_single_delete_under_a_newer_put_stays_with_an_empty_version() {
    use Place::{Bottommost, Flush, Level};
    let inputs = [(5, PUT, "new"), (4, SINGLE, ""), (3, PUT, "old"), (2, PUT, "older")];
    let stays = entries(&[(5, PUT, "new"), (4, SINGLE, ""), (3, PUT, "")]).entries;
    assert_eq!(left(&inputs[..2], &[9], Level, true), entries(&inputs[..2]).entries);
    assert_eq!(left(&inputs, &[9], Level, true), stays);
    assert_eq!(left(&inputs, &[9], Flush, false), stays);
    assert_eq!(left(&inputs, &[9], Level, false), entries(&inputs[..1]).entries);
    assert_eq!(left(&inputs, &[9], Bottommost, false), entries(&[(0, PUT, "new")]).entries);
    assert_eq!(left(&inputs, &[3, 9], Level, false), entries(&inputs[..3]).entries);
    let blob = [(4, SINGLE, ""), (3, BLOB, "reference")];
    assert_eq!(left(&blob, &[9], Level, true), entries(&[(4, SINGLE, ""), (3, PUT, "")]).entries);
    let twice = [(4, SINGLE, ""), (3, SINGLE, ""), (2, PUT, "a")];
    assert_eq!(left(&twice, &[9], Level, true), entries(&[(4, SINGLE, ""), (2, PUT, "")]).entries);
}

#[test]
fn a_delete_is_dropped_under_a_newer_version_and_if_nothing_is_below() {
    use Place::{Bottommost, Flush, Level};
    let inputs = [(5, PUT, "b"), (4, DELETE, ""), (3, PUT, "a")];
    assert_eq!(left(&inputs, &[9], Level, true), entries(&inputs[..1]).entries);
    assert_eq!(left(&inputs[1..], &[9], Level, true), entries(&inputs[1..2]).entries);
    assert_eq!(left(&inputs[1..], &[9], Flush, false), entries(&inputs[1..2]).entries);
    assert_eq!(left(&inputs[1..], &[9], Level, false), []);
    let seen = entries(&[(4, DELETE, ""), (0, PUT, "a")]).entries;
    assert_eq!(left(&inputs[1..], &[3, 9], Bottommost, false), seen, "a snapshot sees the put");
    let unseen = [(7, DELETE, ""), (6, DELETE, ""), (5, PUT, "a")];
    assert_eq!(left(&unseen, &[1, 9], Bottommost, false), [], "no snapshot sees the put");
    assert_eq!(left(&unseen, &[6, 9], Bottommost, false), [], "nor with one in between");
}

#[test]
fn versions_that_a_range_tombstone_covers_are_dropped() {
    let mut run = entries(&[(5, PUT, "b"), (4, PUT, "a"), (3, SINGLE, ""), (2, PUT, "")]);
    run.tombstones = vec![4];
    let level = rules(&[9], Place::Level);
    assert_eq!(compacted(&run, &level, true).entries, run.entries[..1]);
    run.entries.truncate(1);
    // Without the sequence, the tombstone would cover it.
    assert_eq!(compacted(&run, &rules(&[9], Place::Bottommost), false).entries, run.entries);
    let mut merges = entries(&[(6, MERGE, "c"), (5, MERGE, "b"), (3, PUT, "a")]);
    merges.tombstones = vec![4];
    assert_eq!(compacted(&merges, &level, true).entries, entries(&[(6, PUT, "b,c")]).entries);
}

#[test]
fn operands_are_merged_within_their_stripe() {
    use Place::{Bottommost, Flush, Level};
    let inputs = [(5, MERGE, "d"), (4, MERGE, "c"), (3, MERGE, "b"), (2, MERGE, "a")];
    let both = [(5, MERGE, "c,d"), (3, MERGE, "a,b")];
    assert_eq!(left(&inputs, &[3, 9], Flush, false), entries(&both).entries);
    assert_eq!(left(&inputs, &[3, 9], Level, true), entries(&both).entries);
    let bottom = [(5, MERGE, "c,d"), (0, PUT, "a,b")];
    assert_eq!(left(&inputs, &[3, 9], Bottommost, false), entries(&bottom).entries);
    let deleted = [(5, MERGE, "b"), (4, DELETE, ""), (3, PUT, "a")];
    assert_eq!(left(&deleted, &[9], Flush, false), entries(&[(5, PUT, "b")]).entries);
    let single = [(5, MERGE, "b"), (4, SINGLE, ""), (3, PUT, "a")];
    let kept = [(5, PUT, "b"), (4, SINGLE, ""), (3, PUT, "")];
    assert_eq!(left(&single, &[9], Flush, false), entries(&kept).entries);
    let blob = [(5, MERGE, "c"), (4, MERGE, "b"), (3, BLOB, "x")];
    let above = [(5, MERGE, "b,c"), (3, BLOB, "x")];
    assert_eq!(left(&blob, &[9], Level, true), entries(&above).entries);
}

#[test]
fn operands_stay_without_an_operator_or_beyond_the_limit() {
    let run = entries(&[(5, MERGE, "bbbb"), (4, MERGE, "aaa"), (3, PUT, "0")]);
    let none = Rules { merge_operator: None, ..rules(&[9], Place::Level) };
    assert_eq!(compacted(&run, &none, true).entries, run.entries);
    let small = Rules { merge_bytes: 5, ..rules(&[9], Place::Level) };
    let expected = entries(&[(5, MERGE, "bbbb"), (4, PUT, "0,aaa")]);
    assert_eq!(compacted(&run, &small, true), expected);
    let tiny = Rules { merge_bytes: 3, ..rules(&[9], Place::Level) };
    assert_eq!(compacted(&run, &tiny, true).entries, run.entries);
    let test = "stringappendtest".parse().ok();
    let never = Rules { merge_operator: test, ..rules(&[9], Place::Flush) };
    let operands = entries(&[(5, MERGE, "b"), (4, MERGE, "a")]);
    assert_eq!(compacted(&operands, &never, true), operands);
}

/// Removes "x" and turns "a" into "A".
#[derive(Debug)]
struct TestFilter;

impl CompactionFilter for TestFilter {
    fn name(&self) -> &str {
        "test"
    }

    fn filter(&self, key: &[u8], value: &[u8]) -> FilterDecision {
        assert_eq!(key, KEY);
        match value {
            b"x" => FilterDecision::Remove,
            b"a" => FilterDecision::Change(b"A".to_vec()),
            _ => FilterDecision::Keep,
        }
    }
}

#[test]
fn a_filter_sees_the_newest_version_that_all_readers_see() {
    let filtered = |list: &[(u64, u8, &str)], snapshots: &[u64], place, below| {
        let filter: Option<Arc<dyn CompactionFilter>> = Some(Arc::new(TestFilter));
        let rules = Rules { filter, ..rules(snapshots, place) };
        compacted(&entries(list), &rules, below).entries
    };
    use Place::{Bottommost, Level};
    let removed = [(5, PUT, "x"), (4, PUT, "old")];
    assert_eq!(filtered(&removed, &[9], Level, true), entries(&[(5, DELETE, "")]).entries);
    assert_eq!(filtered(&removed, &[9], Level, false), []);
    assert_eq!(filtered(&removed, &[9], Bottommost, false), []);
    assert_eq!(filtered(&removed, &[4, 9], Level, true), entries(&removed).entries);
    let changed = [(5, PUT, "a"), (4, PUT, "old")];
    assert_eq!(filtered(&changed, &[9], Level, true), entries(&[(5, PUT, "A")]).entries);
    assert_eq!(filtered(&changed, &[9], Bottommost, true), entries(&[(0, PUT, "A")]).entries);
    let hidden = [(5, PUT, "b"), (4, PUT, "x")];
    assert_eq!(filtered(&hidden, &[4, 9], Level, false), entries(&hidden).entries);
}

#[test]
fn keys_are_told_apart() {
    let mut iter = CompactionIter::new(rules(&[9], Place::Level));
    let mut near = Near { tombstones: &[], below: true };
    let mut found = Vec::new();
    let inputs: [(&[u8], u64, u8); 6] = [
        (b"a", 5, PUT),
        (b"a", 5, PUT),
        (b"ab", 4, MERGE),
        (b"ab", 3, MERGE),
        (b"b", 2, PUT),
        (b"b", 1, PUT),
    ];
    for (key, sequence, kind) in inputs {
        iter.push(&mut near, key, pack(sequence, kind), b"v").unwrap();
        assert_eq!(iter.input_key().len(), key.len() + 8);
        while let Some(output) = iter.next(b"v") {
            let key = output.key.split_last_chunk::<8>().unwrap().0;
            found.push((key.to_vec(), output.value.to_vec(), output.begins_key));
        }
    }
    iter.finish(&mut near);
    assert!(iter.next(b"").is_none());
    let all = [("a", "v"), ("ab", "v,v"), ("b", "v")];
    assert_eq!(found, all.map(|(key, value)| (key.into(), value.into(), true)));
}

#[test]
fn damage_is_an_error() {
    let mut near = Near { tombstones: &[], below: true };
    let mut push = |packed: &[u64]| {
        let mut iter = CompactionIter::new(rules(&[9], Place::Level));
        let mut done = Ok(());
        for &packed in packed {
            done = iter.push(&mut near, KEY, packed, b"");
            while iter.next(b"").is_some() {}
        }
        done.unwrap_err().to_string()
    };
    assert!(push(&[pack(5, PUT), pack(6, PUT)]).contains("not in order: 6 after 5"));
    assert!(push(&[pack(5, 0x0F)]).contains("range tombstone"));
    assert!(push(&[pack(5, 0x55)]).contains("0x55"));
}

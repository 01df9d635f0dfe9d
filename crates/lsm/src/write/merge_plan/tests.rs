//! Tests plans for random levels: their merges keep the order of all versions of all keys.

use std::collections::BTreeSet;

use proptest::prelude::*;
use reactor::sim::Rng;
use rocksfmt::{ValueType, pack};

use super::*;
use crate::error::{Error, Kind};
use crate::version::{Level, Slot};

/// A position among the user keys: twice the number of a key, or one more for just after it.
type Position = usize;
/// A range of positions with an exclusive end.
type Span = (Position, Position);

const END: Position = 2 * 26;

/// The contents of a file.
#[derive(Clone, Debug)]
struct File {
    /// Keys and sequences, in the order of internal keys.
    points: Vec<(usize, u64)>,
    /// Range tombstones.
    covers: Vec<(Span, u64)>,
    left_alone: bool,
}

impl File {
    fn new(mut points: Vec<(usize, u64)>, covers: Vec<(Span, u64)>) -> File {
        points.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
        File { points, covers, left_alone: false }
    }

    fn span(&self) -> Span {
        let points = self.points.iter().map(|&(key, _)| (2 * key, 2 * key + 1));
        let spans = points.chain(self.covers.iter().map(|&(span, _)| span));
        spans.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).expect("no file is empty")
    }

    /// The sequences of its versions and tombstones of a key.
    fn about(&self, key: usize) -> impl Iterator<Item = u64> {
        let points = self.points.iter().filter(move |point| point.0 == key);
        let covers = self.covers.iter().filter(move |cover| is_in(2 * key, cover.0));
        points.map(|point| point.1).chain(covers.map(|cover| cover.1))
    }

    fn meta(&self, number: usize, order: Comparator) -> FileMeta {
        let internal = |place: Position, packed: u64| {
            let mut key = bytes(place, order);
            key.extend_from_slice(&packed.to_le_bytes());
            key
        };
        let value = |&(key, sequence): &(usize, u64)| {
            internal(2 * key, pack(sequence, ValueType::Value as u8))
        };
        let starts = self.covers.iter().map(|&((from, _), sequence)| {
            internal(from, pack(sequence, ValueType::RangeDeletion as u8))
        });
        let ends = self.covers.iter().map(|&((_, to), _)| internal(to, SENTINEL_PACKED));
        let cmp = |a: &Vec<u8>, b: &Vec<u8>| order.cmp_internal(a, b);
        FileMeta {
            size_bytes: 100 * (self.points.len() + self.covers.len()) as u64,
            smallest: self.points.iter().map(value).chain(starts).min_by(cmp).unwrap(),
            largest: self.points.iter().map(value).chain(ends).max_by(cmp).unwrap(),
            ..rocksfmt::testing::file_meta(number as u64, b"", b"", (0, 0))
        }
    }
}

fn is_in(place: Position, span: Span) -> bool {
    span.0 <= place && place < span.1
}

fn overlap(a: Span, b: Span) -> bool {
    a.0 < b.1 && b.0 < a.1
}

/// The user key at a position. In reverse order no key is just after another.
fn bytes(place: Position, order: Comparator) -> Vec<u8> {
    let number = (place / 2) as u8;
    let mut key = vec![if order == Comparator::Bytewise { b'a' + number } else { b'z' - number }];
    key.resize(1 + place % 2, 0);
    key
}

/// The position of a zone's bound.
fn place(bound: &[u8]) -> Position {
    2 * usize::from(bound[0] - b'a') + bound.len() - 1
}

fn span_of(zone: &Zone) -> Span {
    (zone.from.as_deref().map_or(0, place), zone.to.as_deref().map_or(END, place))
}

/// Levels 0 (the newest first), 1, and one below.
#[derive(Clone, Debug)]
struct Levels {
    order: Comparator,
    files: [Vec<File>; 3],
}

impl Levels {
    /// A history of puts and range deletions. Its oldest part is in the lowest level; the next one
    /// in level 1, cut anywhere, between the versions of a key, too; the newest in files of
    /// level 0.
    fn random(rng: &mut Rng) -> Levels {
        let order =
            if rng.below(4) == 0 { Comparator::ReverseBytewise } else { Comparator::Bytewise };
        let keys = 2 + rng.below(10);
        let mut sequence = 0;
        let mut some = |rng: &mut Rng, count: u64| -> Vec<(usize, u64)> {
            let mut put = || {
                sequence += 1;
                (rng.below(keys) as usize, sequence)
            };
            (0..count).map(|_| put()).collect()
        };
        let mut lowest = Vec::new();
        if rng.coin() {
            lowest.push(File::new(some(rng, 20), Vec::new()));
        }
        let count = rng.below(40);
        let level1 = File::new(some(rng, count), Vec::new()).points;
        let mut files1: Vec<File> = Vec::new();
        for point in level1 {
            match files1.last_mut() {
                Some(file) if rng.below(3) > 0 => file.points.push(point),
                _ => files1.push(File::new(vec![point], Vec::new())),
            }
        }
        for at in 1..files1.len() {
            // A range tombstone from after a file's last key to the next file's first.
            let (from, sequence) = files1[at - 1].points[files1[at - 1].points.len() - 1];
            let to = files1[at].points[0].0;
            if from + 1 < to && rng.coin() {
                files1[at - 1].covers.push(((2 * from + 2, 2 * to), sequence));
            }
        }
        let mut level0 = Vec::new();
        for _ in 0..rng.below(20) {
            let narrow = rng.coin();
            let count = 1 + rng.below(if narrow { 2 } else { 8 });
            let mut file = File::new(some(rng, count), Vec::new());
            if rng.below(5) == 0 {
                let (from, to) = (rng.below(keys) as usize, rng.below(keys) as usize);
                let sequence = some(rng, 1)[0].1;
                file.covers.push(((2 * from.min(to), 2 * from.max(to) + 2), sequence));
            }
            level0.insert(0, file);
        }
        if rng.coin() {
            for file in level0.iter_mut().chain(&mut files1) {
                file.left_alone = rng.below(6) == 0;
            }
        }
        Levels { order, files: [level0, files1, lowest] }
    }

    fn all(&self) -> impl Iterator<Item = &File> {
        self.files.iter().flatten()
    }

    /// The slots are in the order of the files.
    fn version(&self) -> Version {
        let slot = |(number, file): (usize, &File)| Slot::Broken {
            meta: file.meta(number, self.order),
            error: Error::new(Kind::Io, "a file that is never read"),
        };
        let slots: Vec<Slot> = self.all().enumerate().map(slot).collect();
        let mut numbers = 0..slots.len() as u32;
        let levels = self
            .files
            .iter()
            .map(|files| Level::of(numbers.by_ref().take(files.len()).collect(), &slots));
        let levels = levels.collect();
        let family = Family {
            id: 0,
            name: "default".into(),
            comparator_name: String::new(),
            comparator: self.order,
            refused: None,
            mems: Vec::new(),
            levels,
            blobs: Vec::new(),
            merge: Default::default(),
            filter: None,
            table_options: std::sync::Arc::default(),
        };
        Version { families: vec![family], slots, epoch: 0 }
    }

    /// The invariants of readers: newer versions of a key come first, and level 1 is in order.
    fn check(&self) {
        for key in 0..END / 2 {
            let mut sources: Vec<Vec<u64>> =
                self.files[0].iter().map(|file| file.about(key).collect()).collect();
            for level in &self.files[1..] {
                sources.push(level.iter().flat_map(|file| file.about(key)).collect());
            }
            let mut oldest = u64::MAX;
            for source in sources.iter().filter(|source| !source.is_empty()) {
                let newest = *source.iter().max().unwrap();
                assert!(newest < oldest, "key {key}: {newest} lies below {oldest}: {self:?}");
                oldest = *source.iter().min().unwrap();
            }
        }
        let metas: Vec<FileMeta> =
            self.files[1].iter().map(|file| file.meta(0, self.order)).collect();
        for two in metas.windows(2) {
            let order = self.order.cmp_internal(&two[0].largest, &two[1].smallest);
            assert!(order.is_lt(), "level 1 overlaps: {self:?}");
        }
    }

    /// Executes a plan as `compaction.rs` does.
    fn merge(&mut self, plan: &Plan) {
        let first1 = self.files[0].len() as u32;
        let at1: BTreeSet<usize> =
            plan.level1.iter().map(|slot| (slot - first1) as usize).collect();
        let at0: Vec<usize> = plan.level0.iter().map(|&slot| slot as usize).collect();
        let (newest, oldest) = (at0[0], at0[at0.len() - 1]);
        assert!(at0.iter().copied().eq(newest..=oldest), "not the files between two: {at0:?}");
        let merged: Vec<File> = at0
            .iter()
            .map(|&at| &self.files[0][at])
            .chain(at1.iter().map(|&at| &self.files[1][at]))
            .cloned()
            .collect();
        assert!(merged.iter().all(|file| !file.left_alone), "{plan:?}");
        let zones: Vec<Span> = plan.stays.iter().map(span_of).collect();
        let mut at = 0;
        let mut gaps: Vec<Span> = Vec::new();
        for &(from, to) in &zones {
            gaps.push((at, from));
            at = to;
        }
        gaps.push((at, END));
        assert!(gaps.iter().all(|gap| gap.0 <= gap.1), "zones in disorder: {zones:?}");
        let part = |spans: &[Span]| {
            let points = merged.iter().flat_map(|file| &file.points);
            let covers = merged.iter().flat_map(|file| &file.covers);
            let inside = |place| spans.iter().any(|&span| is_in(place, span));
            let cut = |&((from, to), sequence): &(Span, u64)| {
                let cut = spans.iter().map(move |span| (from.max(span.0), to.min(span.1)));
                cut.filter(|span| span.0 < span.1).map(move |span| (span, sequence))
            };
            let points = points.filter(|point| inside(2 * point.0)).copied().collect();
            let file = File::new(points, covers.flat_map(cut).collect());
            (!file.points.is_empty() || !file.covers.is_empty()).then_some(file)
        };
        let stays = part(&zones);
        let new: Vec<File> = match plan.moves {
            true => merged.clone(),
            false => gaps.iter().filter_map(|&gap| part(&[gap])).collect(),
        };
        let mut left: Vec<File> = Vec::new();
        let level1 = std::mem::take(&mut self.files[1]);
        left.extend(
            level1.into_iter().enumerate().filter(|(at, _)| !at1.contains(at)).map(|(_, f)| f),
        );
        for file in &new {
            let other = left.iter().find(|other| overlap(other.span(), file.span()));
            assert!(other.is_none(), "{file:?} shares keys with {other:?}, which is left");
        }
        if !plan.deeper {
            // Tombstones are dropped: versions that they hide must not be anywhere else.
            for key in
                (0..END / 2).filter(|&key| new.iter().any(|file| file.about(key).count() > 0))
            {
                let older = self.files[0][oldest + 1..].iter().chain(&left).chain(&self.files[2]);
                let older = older.flat_map(|file| file.about(key)).count();
                assert_eq!(older, 0, "versions of key {key} lie below what has nothing below");
            }
        }
        left.extend(new);
        left.sort_by_key(File::span);
        self.files[1] = left;
        self.files[0].splice(newest..=oldest, stays);
    }
}

/// Merges until no plan is left.
fn merged_to_the_end(seed: u64) {
    let mut rng = Rng::new(seed);
    let mut levels = Levels::random(&mut rng);
    levels.check();
    loop {
        let version = levels.version();
        let family = &version.families[0];
        let damaged: Vec<bool> = levels.all().map(|file| file.left_alone).collect();
        let left_alone = |slot: u32| damaged[slot as usize];
        let files = if rng.coin() { usize::MAX } else { 1 + rng.below(5) as usize };
        let memory = Memory { files, bytes: u64::MAX };
        let Some(plan) = plan(&version, family, memory, &left_alone) else {
            let files = level0_files(&version, family, &left_alone);
            assert!(files < LEVEL0_FILES_MANY, "{files} files stay: {levels:?}");
            return;
        };
        assert!(plan.level0.len() <= files.max(plan.least_files()), "{plan:?}");
        let before = levels.files[0].len();
        levels.merge(&plan);
        levels.check();
        assert!(levels.files[0].len() < before, "level 0 does not get shorter: {plan:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8 * ProptestConfig::default().cases, ..ProptestConfig::default() })]

    /// A merge takes all versions of a user key or none, whatever is left alone.
    #[test]
    fn merges_keep_the_order_of_versions_and_end(seed: u64) {
        merged_to_the_end(seed);
    }
}

//! Tests the picker on random levels: whatever jobs it picks and in whatever order they end, the
//! order of all versions of all keys stays, and after some jobs no level is due.

use std::sync::Arc;

use proptest::prelude::*;
use reactor::sim::Rng;
use rocksfmt::{ValueType, pack};

use super::age::DueForAge;
use super::*;
use crate::error::{Error, Kind};
use crate::slots::Slots;
use crate::version::{Level, Slot};
use crate::write::merge::below::Below;

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
    /// It is due for its age.
    due: Option<DueForAge>,
}

impl File {
    fn new(mut points: Vec<(usize, u64)>, covers: Vec<(Span, u64)>) -> File {
        points.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
        File { points, covers, left_alone: false, due: None }
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

fn span_of(zone: &KeyRange) -> Span {
    (zone.from.as_deref().map_or(0, place), zone.to.as_deref().map_or(END, place))
}

/// The number of levels.
const LEVELS: usize = 5;

/// Level 0 (the newest first) and the levels below.
#[derive(Clone, Debug)]
struct Levels {
    order: Comparator,
    options: Arc<FamilyOptions>,
    files: [Vec<Arc<File>>; LEVELS],
}

/// A job under way.
struct Job {
    plan: Plan,
    /// The version that it was picked from, and the file of each of its slots.
    version: Version,
    files: Vec<Arc<File>>,
}

impl Levels {
    /// A history of puts and range deletions. Its oldest part is in the lowest levels, which are
    /// cut anywhere, between the versions of a key, too; the newest in files of level 0.
    fn random(rng: &mut Rng) -> Levels {
        let order =
            if rng.below(4) == 0 { Comparator::ReverseBytewise } else { Comparator::Bytewise };
        let options = FamilyOptions {
            levels: LEVELS,
            dynamic: rng.coin(),
            level_base_bytes: 300 + rng.below(1500),
            level_multiplier: 2.0,
            file_bytes: 200 + rng.below(500),
            compaction_bytes: 500 + rng.below(5000),
            ..FamilyOptions::default()
        };
        let keys = 2 + rng.below(20);
        let mut sequence = 0;
        let mut some = |rng: &mut Rng, count: u64| -> Vec<(usize, u64)> {
            let mut put = || {
                sequence += 1;
                (rng.below(keys) as usize, sequence)
            };
            (0..count).map(|_| put()).collect()
        };
        let mut files: [Vec<Arc<File>>; LEVELS] = Default::default();
        for level in (1..LEVELS).rev().filter(|_| rng.coin()).collect::<Vec<_>>() {
            let count = rng.below(40);
            let points = File::new(some(rng, count), Vec::new()).points;
            files[level] = cut(rng, points).into_iter().map(Arc::new).collect();
        }
        for _ in 0..rng.below(20) {
            let narrow = rng.coin();
            let count = 1 + rng.below(if narrow { 2 } else { 8 });
            let mut file = File::new(some(rng, count), Vec::new());
            if rng.below(5) == 0 {
                let (from, to) = (rng.below(keys) as usize, rng.below(keys) as usize);
                let sequence = some(rng, 1)[0].1;
                file.covers.push(((2 * from.min(to), 2 * from.max(to) + 2), sequence));
            }
            files[0].insert(0, Arc::new(file));
        }
        if rng.coin() {
            for file in files.iter_mut().flatten() {
                Arc::make_mut(file).left_alone = rng.below(8) == 0;
            }
        }
        if rng.coin() {
            for file in files.iter_mut().flatten() {
                Arc::make_mut(file).due = match rng.below(6) {
                    0 => Some(DueForAge::Down),
                    1 => Some(DueForAge::Rewrite),
                    _ => None,
                };
            }
        }
        Levels { order, options: Arc::new(options), files }
    }

    fn all(&self) -> Vec<Arc<File>> {
        self.files.iter().flatten().cloned().collect()
    }

    /// The slots are in the order of the files.
    fn version(&self) -> Version {
        let slot = |(number, file): (usize, Arc<File>)| Slot::Broken {
            meta: Box::new(file.meta(number, self.order)),
            error: Error::new(Kind::Io, "a file that is never read"),
        };
        let slots: Vec<Slot> = self.all().into_iter().enumerate().map(slot).collect();
        let slots = Slots::from(slots);
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
            options: self.options.clone(),
            blobs: Vec::new(),
            merge: Default::default(),
            filter: None,
            table_options: Arc::default(),
        };
        Version { families: [family].into_iter().collect(), slots, epoch: 0 }
    }

    /// The invariants of readers: newer versions of a key come first, and sorted levels are in
    /// order.
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
        for level in &self.files[1..] {
            let metas: Vec<FileMeta> = level.iter().map(|file| file.meta(0, self.order)).collect();
            for two in metas.windows(2) {
                let order = self.order.cmp_internal(&two[0].largest, &two[1].smallest);
                assert!(order.is_lt(), "a level overlaps: {self:?}");
            }
        }
    }

    /// The next job, for files that are not inputs of `running`.
    fn pick(&self, rng: &mut Rng, running: &[Job]) -> Option<Job> {
        let (version, files) = (self.version(), self.all());
        let family = &version.families[0];
        let left_alone = |slot: u32| files[slot as usize].left_alone;
        // The running jobs, by the slots of this version.
        let plans: Vec<Plan> = running.iter().map(|job| job.plan_in(&files)).collect();
        let plans: Vec<&Plan> = plans.iter().collect();
        let few = 1 + rng.below(5) as usize;
        let memory = Memory { files: if rng.coin() { usize::MAX } else { few }, bytes: u64::MAX };
        let turn = rng.below(100) as usize;
        let (left_alone, running) = (&left_alone, &plans[..]);
        let aged = self.aged(&files, family);
        let picker = Picker {
            memory,
            turn,
            aged: &aged,
            ..Picker::new(&version, family, left_alone, running)
        };
        let due = picker.due();
        let plan = picker.pick(&due)?;
        assert!(!due.is_nothing(), "{plan:?}");
        if plan.start == 0 {
            assert!(plan.inputs.len() <= memory.files.max(plan.least_files()), "{plan:?}");
        }
        for (_, slot) in plan.files() {
            assert!(!left_alone(slot) && !plans.iter().any(|p| p.files().any(|f| f.1 == slot)));
        }
        Some(Job { plan, version, files })
    }

    /// The files that are due for their age.
    fn aged(&self, files: &[Arc<File>], family: &Family) -> Vec<Aged> {
        let levels = family.levels.iter().enumerate();
        let all = levels.flat_map(|(level, of)| of.slots.iter().map(move |&slot| (level, slot)));
        let deepest = family.levels.iter().rposition(|level| !level.slots.is_empty());
        let due = |level: usize, slot: u32| match files[slot as usize].due? {
            DueForAge::Down if Some(level) == deepest => None,
            due => Some(due),
        };
        let aged = |(level, slot)| {
            let due = due(level, slot)?;
            Some(Aged { level, slot, number: u64::from(slot), due })
        };
        all.filter_map(aged).collect()
    }

    /// Executes a plan as `compaction.rs` does.
    fn install(&mut self, job: &Job) {
        let Plan { start, output, moves, ref stays, .. } = job.plan;
        let in_place = start > 0 && start == output;
        let is = |slots: &[u32], file: &Arc<File>| {
            slots.iter().any(|&slot| Arc::ptr_eq(&job.files[slot as usize], file))
        };
        let (inputs, overlapped) = (&job.plan.inputs, &job.plan.overlapped);
        let at: Vec<usize> =
            (0..self.files[start].len()).filter(|&at| is(inputs, &self.files[start][at])).collect();
        let (newest, oldest) = (at[0], at[at.len() - 1]);
        assert_eq!(at.len(), inputs.len(), "an input is gone");
        // Other jobs may have put files of deeper levels between them.
        let between = at.iter().copied().eq(newest..=oldest);
        let hull = part(
            &at.iter().map(|&at| self.files[start][at].clone()).collect::<Vec<_>>(),
            &[(0, END)],
        );
        let hull = hull.expect("inputs have entries").span();
        let passed = (newest..=oldest).filter(|other| !at.contains(other));
        let mut passed = passed.map(|other| &self.files[start][other]);
        let apart = passed.all(|file| !overlap(file.span(), hull));
        assert!(start > 0 || between || apart, "not the files between two: {at:?}");
        let merged: Vec<Arc<File>> =
            job.plan.files().map(|(_, slot)| job.files[slot as usize].clone()).collect();
        let zones: Vec<Span> = stays.iter().map(span_of).collect();
        let gaps = gaps(&zones);
        let staying = part(&merged, &zones);
        let new: Vec<Arc<File>> = match moves {
            true => merged.clone(),
            false => gaps.iter().filter_map(|&gap| part(&merged, &[gap])).collect(),
        };
        let mut left = self.files[output].clone();
        left.retain(|file| !is(overlapped, file));
        assert_eq!(left.len() + overlapped.len(), self.files[output].len(), "an input is gone");
        if in_place {
            left.retain(|file| !is(inputs, file));
        }
        for file in &new {
            let other = left.iter().find(|other| overlap(other.span(), file.span()));
            assert!(other.is_none(), "{file:?} shares keys with {other:?}, which is left");
        }
        // Tombstones of keys that nothing lies below are dropped: versions that they hide must not
        // be anywhere else.
        let mut below = Below::new(&job.version, &job.version.families[0], &job.plan);
        let mut keys: Vec<usize> = (0..END / 2).collect();
        keys.sort_by(|&a, &b| {
            self.order.cmp_user(&bytes(2 * a, self.order), &bytes(2 * b, self.order))
        });
        for key in keys.into_iter().filter(|&key| new.iter().any(|f| f.about(key).count() > 0)) {
            if below.may_have(&bytes(2 * key, self.order)) {
                continue;
            }
            // Older files of level 0 are above what comes from the base.
            let above = start == 0 && at.iter().any(|&at| self.files[0][at].about(key).count() > 0);
            let older = self.files[start].iter().skip(if above { oldest + 1 } else { usize::MAX });
            let deeper = self.files[output + 1..].iter().flatten();
            let older = older.chain(&left).chain(deeper).flat_map(|file| file.about(key)).count();
            assert_eq!(older, 0, "versions of key {key} lie below what has nothing below");
        }
        if output > 0 {
            left.extend(new);
            left.sort_by_key(|file| file.span());
            self.files[output] = left;
        }
        if start == 0 {
            let files = std::mem::take(&mut self.files[0]).into_iter();
            let files = files.zip(0..).filter_map(|(file, place)| match place {
                _ if place == oldest => staying.clone(),
                _ if at.contains(&place) => None,
                _ => Some(file),
            });
            self.files[0] = files.collect();
        } else if !in_place {
            self.files[start].retain(|file| !is(inputs, file));
        }
    }
}

impl Job {
    /// The plan with the slots of another version.
    fn plan_in(&self, files: &[Arc<File>]) -> Plan {
        let slot = |slot: &u32| {
            let at = files.iter().position(|f| Arc::ptr_eq(f, &self.files[*slot as usize]));
            at.expect("an input of a running job is gone") as u32
        };
        Plan {
            inputs: self.plan.inputs.iter().map(slot).collect(),
            overlapped: self.plan.overlapped.iter().map(slot).collect(),
            ..self.plan.clone()
        }
    }
}

/// The parts of files within ranges of keys, as one file.
fn part(merged: &[Arc<File>], spans: &[Span]) -> Option<Arc<File>> {
    let points = merged.iter().flat_map(|file| &file.points);
    let covers = merged.iter().flat_map(|file| &file.covers);
    let inside = |place| spans.iter().any(|&span| is_in(place, span));
    let cut = |&((from, to), sequence): &(Span, u64)| {
        let cut = spans.iter().map(move |span| (from.max(span.0), to.min(span.1)));
        cut.filter(|span| span.0 < span.1).map(move |span| (span, sequence))
    };
    let points = points.filter(|point| inside(2 * point.0)).copied().collect();
    let file = File::new(points, covers.flat_map(cut).collect());
    (!file.points.is_empty() || !file.covers.is_empty()).then_some(Arc::new(file))
}

/// What lies between zones.
fn gaps(zones: &[Span]) -> Vec<Span> {
    let mut at = 0;
    let mut gaps: Vec<Span> = Vec::new();
    for &(from, to) in zones {
        gaps.push((at, from));
        at = to;
    }
    gaps.push((at, END));
    assert!(gaps.iter().all(|gap| gap.0 <= gap.1), "zones in disorder: {zones:?}");
    gaps
}

/// Cuts the entries of a level into files, with range tombstones between some.
fn cut(rng: &mut Rng, points: Vec<(usize, u64)>) -> Vec<File> {
    let mut files: Vec<File> = Vec::new();
    for point in points {
        match files.last_mut() {
            Some(file) if rng.below(3) > 0 => file.points.push(point),
            _ => files.push(File::new(vec![point], Vec::new())),
        }
    }
    for at in 1..files.len() {
        // A range tombstone from after a file's last key to the next file's first.
        let (from, sequence) = files[at - 1].points[files[at - 1].points.len() - 1];
        let to = files[at].points[0].0;
        if from + 1 < to && rng.coin() {
            files[at - 1].covers.push(((2 * from + 2, 2 * to), sequence));
        }
    }
    files
}

/// Merges, with several jobs under way, until nothing can be picked.
fn merged_to_the_end(seed: u64) {
    let mut rng = Rng::new(seed);
    let mut levels = Levels::random(&mut rng);
    levels.check();
    let mut running: Vec<Job> = Vec::new();
    for _ in 0..1000 {
        let picked = if running.len() < 3 { levels.pick(&mut rng, &running) } else { None };
        let none = picked.is_none();
        running.extend(picked);
        if running.is_empty() {
            let most = 3 * levels.options.level0_trigger;
            let files = levels.files[0].len();
            let damaged = levels.all().iter().any(|file| file.left_alone);
            assert!(damaged || files < most, "{files} files stay: {levels:?}");
            return;
        }
        if none || rng.coin() {
            let job = running.swap_remove(rng.below(running.len() as u64) as usize);
            levels.install(&job);
            levels.check();
        }
    }
    panic!("it goes on for ever: {levels:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8 * ProptestConfig::default().cases, ..ProptestConfig::default() })]

    /// A merge takes all versions of a user key or none, whatever is left alone.
    #[test]
    fn merges_keep_the_order_of_versions_and_end(seed: u64) {
        merged_to_the_end(seed);
    }
}

/// A table of the base whose range tombstone ends where the first key of level 0 begins has no key
/// of level 0. It was once an input, with a damaged table that shares a key with it.
#[test]
fn a_table_that_ends_just_before_level_0_stays() {
    merged_to_the_end(5508248389527589283);
}

/// Static levels without files, in which level 0 is due with four.
fn no_files() -> Levels {
    let options = FamilyOptions {
        levels: LEVELS,
        dynamic: false,
        level_base_bytes: 10_000,
        ..FamilyOptions::default()
    };
    Levels { order: Comparator::Bytewise, options: Arc::new(options), files: Default::default() }
}

fn file(keys: &[usize], sequence: u64) -> Arc<File> {
    Arc::new(File::new(keys.iter().map(|&key| (key, sequence)).collect(), Vec::new()))
}

impl Levels {
    fn with_picker<R>(&self, running: &[&Plan], f: impl FnOnce(&Picker<'_>) -> R) -> R {
        let version = self.version();
        f(&Picker::new(&version, &version.families[0], &|_| false, running))
    }
}

#[test]
fn new_files_are_merged_in_level_0_while_the_base_is_busy() {
    let mut levels = no_files();
    levels.files[0] = (0..10u64).rev().map(|n| file(&[1, 2], 10 + n)).collect();
    levels.files[1] = vec![file(&[1, 3], 1)];
    let first = levels.with_picker(&[], |picker| picker.pick(&picker.due()).unwrap());
    assert_eq!((first.start, first.output, first.inputs.len()), (0, 1, 10));
    // While it runs, seven more are flushed.
    let mut later = levels.clone();
    later.files[0].splice(0..0, (0..7u64).rev().map(|n| file(&[1, 2], 30 + n)));
    let shifted = |slots: &[u32]| slots.iter().map(|slot| slot + 7).collect::<Vec<_>>();
    let (inputs, overlapped) = (shifted(&first.inputs), shifted(&first.overlapped));
    let first = Plan { inputs, overlapped, ..first };
    let second = later.with_picker(&[&first], |picker| picker.pick(&picker.due()).unwrap());
    assert_eq!((second.start, second.output), (0, 0));
    assert_eq!(second.inputs, [0, 1, 2, 3, 4, 5, 6]);
    let third = later.with_picker(&[&first, &second], |picker| picker.pick(&picker.due()));
    assert_eq!(third, None, "one at a time");
}

#[test]
fn a_range_takes_only_the_files_of_level_0_that_it_overlaps() {
    let mut levels = no_files();
    levels.files[0] = vec![
        file(&[20, 21], 15),
        file(&[3, 5], 14),
        file(&[10, 12], 13),
        file(&[5, 7], 12),
        file(&[1, 2], 11),
    ];
    levels.files[1] = vec![file(&[0, 4], 1), file(&[8, 9], 2), file(&[21, 22], 3)];
    let range = |from: Position, to: Position| KeyRange {
        from: Some(bytes(2 * from, Comparator::Bytewise)),
        to: Some(bytes(2 * to, Comparator::Bytewise)),
    };
    let taken = |range: &KeyRange, until: u64| {
        levels.with_picker(&[], |picker| match picker.pick_in(0, range, None, until) {
            InRange::Plan(plan) => (plan.inputs, plan.overlapped),
            InRange::Nothing | InRange::Blocked => Default::default(),
        })
    };
    assert_eq!(taken(&range(7, 8), u64::MAX), (vec![1, 3], vec![5]), "and what overlaps these");
    assert_eq!(taken(&range(20, 22), u64::MAX), (vec![0], vec![7]));
    assert_eq!(taken(&range(8, 10), u64::MAX), (vec![], vec![]));
    assert_eq!(taken(&range(7, 25), u64::MAX).0, [0], "one group after the other");
}

//! The memtable against the simplest correct model, and named cases.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;

use proptest::prelude::*;
use rocksfmt::{Comparator, SEEK_TYPE, SEQUENCE_MAX, pack, put_internal_key};

use crate::{Cursor, Full, Memtable, ValueRef, Writer};

fn memtable() -> (Writer, Memtable) {
    Memtable::new(Comparator::Bytewise, 1 << 20, 1)
}

fn both_ways(table: &Memtable) -> Vec<(Vec<u8>, u64, Vec<u8>)> {
    let entry = |c: &Cursor| {
        let entry = c.entry(table).unwrap();
        (entry.user_key().to_vec(), entry.packed(), entry.value().to_vec())
    };
    let (mut forward, mut backward, mut c) = (Vec::new(), Vec::new(), Cursor::new());
    let mut more = c.first(table);
    while more {
        forward.push(entry(&c));
        more = c.next(table);
    }
    assert!(!c.valid() && !c.next(table) && !c.prev(table));
    more = c.last(table);
    while more {
        backward.push(entry(&c));
        more = c.prev(table);
    }
    backward.reverse();
    assert_eq!(forward, backward);
    forward
}

#[test]
fn the_newest_visible_version_is_found() {
    let (mut w, t) = memtable();
    for (sequence, value) in [(5, b"five"), (9, b"nine"), (7, b"even")] {
        w.insert(b"key", pack(sequence, 1), value).unwrap();
    }
    let get = |key: &[u8], sequence| Some(t.get(key, sequence)?.value());
    assert_eq!(get(b"key", 4), None);
    assert_eq!(get(b"key", 5), Some(&b"five"[..]));
    assert_eq!(get(b"key", 8), Some(&b"even"[..]));
    assert_eq!(get(b"key", u64::MAX), Some(&b"nine"[..]));
    for absent in [&b"kex"[..], b"ke", b"key0", b""] {
        assert_eq!(get(absent, SEQUENCE_MAX), None);
    }
    assert_eq!(t.get(b"key", 8).unwrap().internal_key(), b"key\x01\x07\0\0\0\0\0\0");
}

#[test]
fn an_empty_memtable_has_nothing() {
    let (_, t) = memtable();
    let mut c = Cursor::new();
    assert!(t.is_empty() && t.get(b"", 9).is_none() && both_ways(&t).is_empty());
    assert!(!c.seek(&t, b"a", 0) && !c.seek_for_prev(&t, b"a", 0) && !c.valid());
    assert_eq!((c.user_key(&t), c.internal_key(&t), c.value(&t)), (&[][..], &[][..], &[][..]));
    assert_eq!((c.packed(&t), c.entry(&t).is_none(), c.value_ref(&t)), (0, true, None));
}

#[test]
fn an_entry_inserted_twice_is_kept_twice_and_the_first_counts() {
    let (mut w, t) = memtable();
    let key = pack(3, 1);
    for (user_key, value) in
        [(b"b", b"1"), (b"a", b"-"), (b"b", b"2"), (b"c", b"-"), (b"b", b"3"), (b"b", b"4")]
    {
        w.insert(user_key, key, value).unwrap();
    }
    let values: Vec<u8> = both_ways(&t).iter().map(|(_, _, value)| value[0]).collect();
    assert_eq!(values, b"-1234-");
    assert_eq!(t.get(b"b", 3).unwrap().value(), b"1");
    let mut c = Cursor::new();
    assert!(c.seek(&t, b"b", key));
    assert_eq!(c.value(&t), b"1");
    assert!(c.seek_for_prev(&t, b"b", key));
    assert_eq!(c.value(&t), b"4");
}

#[test]
fn a_value_can_be_kept_and_found_again_when_the_writer_is_gone() {
    let (mut w, t) = memtable();
    w.insert(b"k", pack(1, 1), b"value").unwrap();
    let kept: ValueRef = t.get(b"k", 1).unwrap().value_ref();
    for i in 0..1000_u64 {
        w.insert(&i.to_be_bytes(), pack(2, 1), b"other").unwrap();
    }
    drop(w);
    let other = t.clone();
    drop(t);
    assert_eq!(other.value(kept), b"value");
    assert_eq!(other.get(b"k", 9).unwrap().value_ref(), kept);
}

#[test]
#[should_panic(expected = "a position in another memtable")]
fn a_value_of_another_memtable_is_refused() {
    let (mut w, t) = memtable();
    w.insert(b"k", pack(1, 1), b"value").unwrap();
    let kept = t.get(b"k", 1).unwrap().value_ref();
    drop((w, t));
    // Possibly at the same address.
    memtable().1.value(kept);
}

#[test]
#[should_panic(expected = "a position in another memtable")]
fn a_cursor_of_another_memtable_is_refused() {
    let (mut w, t) = memtable();
    w.insert(b"k", pack(1, 1), b"value").unwrap();
    let mut c = Cursor::new();
    assert!(c.first(&t));
    c.next(&memtable().1);
}

#[test]
fn a_cursor_meets_what_is_inserted_ahead_of_it() {
    let (mut w, t) = memtable();
    for key in [b"b", b"d"] {
        w.insert(key, pack(1, 1), b"").unwrap();
    }
    let mut c = Cursor::new();
    assert!(c.first(&t));
    w.insert(b"a", pack(2, 1), b"").unwrap();
    w.insert(b"c", pack(3, 1), b"").unwrap();
    assert!(c.next(&t) && c.user_key(&t) == b"c");
    assert!(c.prev(&t) && c.user_key(&t) == b"b");
    assert!(c.prev(&t) && c.user_key(&t) == b"a");
    assert!(!c.prev(&t) && !c.valid());
}

#[test]
fn values_from_nothing_to_sixteen_megabytes() {
    let limit = 40 << 20;
    let (mut w, t) = Memtable::new(Comparator::Bytewise, limit, 1);
    let sizes = [0, 1, 7, 8, 100_000, 300_000, 2 << 20, 16 << 20, 0, 3, 5 << 20];
    for (i, &size) in sizes.iter().enumerate() {
        w.insert(&[i as u8], pack(1, 1), &vec![i as u8; size]).unwrap();
    }
    for (i, &size) in sizes.iter().enumerate() {
        let value = t.get(&[i as u8], 1).unwrap().value();
        assert!(value.len() == size && value.iter().all(|&byte| byte == i as u8));
    }
    assert_eq!(t.bytes(), sizes.iter().sum::<usize>() + 9 * sizes.len());
    assert!(t.memory() >= t.bytes() && t.memory() <= t.bytes() + (3 << 20));
    let before = t.memory();
    assert_eq!(w.insert(b"k", pack(1, 1), &vec![0; 18 << 20]), Err(Full));
    assert!(t.memory() == before && t.len() == sizes.len() && t.get(b"k", 1).is_none());
    w.insert(b"k", pack(1, 1), &vec![0; 1 << 20]).unwrap();
    assert!(t.memory() <= limit);
}

#[test]
fn a_limit_below_the_smallest_node_is_always_full() {
    let (mut w, t) = Memtable::new(Comparator::Bytewise, 0, 1);
    assert!(!w.room_for([1]) && w.room_for([]));
    assert_eq!(w.insert(b"k", pack(1, 1), b""), Err(Full));
    assert!(t.is_empty() && t.memory() < 200);
}

#[test]
fn little_is_lost_to_chunks() {
    let (mut w, t) = Memtable::new(Comparator::Bytewise, 4 << 20, 1);
    let mut count = 0_u64;
    while w.insert(&[&[0; 8], &count.to_be_bytes()[..]].concat(), pack(1, 1), &[7; 1000]).is_ok() {
        count += 1;
    }
    // 16 + 8 + 1000 bytes of data, 16 of header, 10.7 of links on average.
    assert!(t.memory() <= 4 << 20 && count > 3950, "{count} entries");
    assert_eq!((t.len() as u64, t.bytes() as u64), (count, count * 1024));
}

#[test]
fn handles_go_to_other_threads_and_positions_are_small() {
    fn sent_and_shared<T: Send + Sync>() {}
    fn sent<T: Send>() {}
    sent::<Writer>();
    sent_and_shared::<Memtable>();
    sent_and_shared::<Cursor>();
    sent_and_shared::<ValueRef>();
    assert_eq!((size_of::<Cursor>(), size_of::<ValueRef>()), (16, 16));
}

// ---- against the model ----

/// A user key that sorts by its comparator.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key(Comparator, Vec<u8>);

impl Ord for Key {
    fn cmp(&self, other: &Key) -> Ordering {
        match self.0 {
            Comparator::Bytewise => self.1.cmp(&other.1),
            Comparator::ReverseBytewise => other.1.cmp(&self.1),
        }
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Key) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Equal entries are in the order of insertion: the last number.
type Position = (Key, Reverse<u64>, usize);
type Model = BTreeMap<Position, Vec<u8>>;

fn user_key() -> impl Strategy<Value = Vec<u8>> {
    // Few letters, to get equal keys, prefixes of keys and keys with equal first eight bytes; and
    // some keys that are far apart.
    let letter = prop_oneof![Just(0u8), Just(1), Just(0xff)];
    prop_oneof![
        3 => proptest::collection::vec(letter, 0..12),
        1 => proptest::collection::vec(any::<u8>(), 0..20),
    ]
}

#[derive(Clone, Debug)]
struct Insertion {
    user_key: Vec<u8>,
    sequence: u64,
    value: Vec<u8>,
}

fn insertions() -> impl Strategy<Value = Vec<Insertion>> {
    let value = prop_oneof![
        8 => (0..40_usize).boxed(),
        2 => (0..400_usize).boxed(),
        1 => (0..3000_usize).boxed(),
    ];
    let one = (user_key(), 0..20_u64, value).prop_map(|(user_key, sequence, bytes)| Insertion {
        user_key,
        sequence,
        value: (0..bytes).map(|i| (i as u64 ^ sequence) as u8).collect(),
    });
    let sorted: fn((Vec<Insertion>, u8)) -> Vec<Insertion> = |(mut all, how)| {
        // Half of the runs insert in some order, so that the remembered place is of use.
        match how {
            0 => all.sort_by(|a, b| a.user_key.cmp(&b.user_key)),
            1 => all.sort_by(|a, b| b.user_key.cmp(&a.user_key)),
            _ => {}
        }
        all
    };
    (proptest::collection::vec(one, 0..120), 0..4_u8).prop_map(sorted)
}

fn check_seeks(t: &Memtable, model: &Model, key: &Key, packed: u64) {
    let here = (key.clone(), Reverse(packed));
    let is_on = |c: &Cursor, want: Option<(&Position, &Vec<u8>)>| {
        let got = c.entry(t).map(|entry| (entry.user_key(), entry.packed(), entry.value()));
        let want = want.map(|((key, packed, _), value)| (&key.1[..], packed.0, &value[..]));
        assert_eq!(got, want);
        assert_eq!(c.valid(), want.is_some());
        let mut internal = Vec::new();
        if let Some((user_key, packed, value)) = want {
            put_internal_key(&mut internal, user_key, packed);
            assert_eq!(t.value(c.value_ref(t).unwrap()), value);
        }
        assert_eq!(c.internal_key(t), internal);
    };
    let at_or_after = || model.range((here.0.clone(), here.1, 0)..);
    let at_or_before = || model.range(..=(here.0.clone(), here.1, usize::MAX));
    let before = || model.range(..(here.0.clone(), here.1, 0));
    let mut c = Cursor::new();
    c.seek(t, &key.1, packed);
    is_on(&c, at_or_after().next());
    if c.next(t) {
        is_on(&c, at_or_after().nth(1));
        c.prev(t);
        is_on(&c, at_or_after().next());
    }
    c.seek(t, &key.1, packed);
    if c.valid() {
        c.prev(t);
        is_on(&c, before().next_back());
    }
    c.seek_for_prev(t, &key.1, packed);
    is_on(&c, at_or_before().next_back());
    if c.prev(t) {
        is_on(&c, at_or_before().nth_back(1));
    }
}

proptest! {
    #[test]
    fn it_agrees_with_a_map(
        insertions in insertions(),
        probes in proptest::collection::vec((user_key(), 0..22_u64), 1..20),
        reverse: bool,
        limit in prop_oneof![Just(200_usize), 0..20_000_usize, Just(1 << 20)],
        chunk in prop_oneof![Just(1_usize), 1..600_usize, Just(4096)],
        seed: u64,
    ) {
        let comparator = if reverse { Comparator::ReverseBytewise } else { Comparator::Bytewise };
        let mut w = Writer::new(comparator, crate::arena::Space::new(limit, chunk, 0), seed);
        let t = w.memtable().clone();
        let mut model = Model::new();
        let head = t.memory();
        let sizes: Vec<usize> =
            insertions.iter().map(|one| one.user_key.len() + one.value.len()).collect();
        let fit = (0..=sizes.len()).rev().find(|&n| w.room_for(sizes[..n].iter().copied()));
        let (mut bytes, mut refused) = (0, None);
        for (i, one) in insertions.iter().enumerate() {
            let packed = pack(one.sequence, 1);
            let room = w.room_for([sizes[i]]);
            let before = (t.len(), t.bytes(), t.memory());
            let done = w.insert(&one.user_key, packed, &one.value);
            prop_assert_eq!(done.is_ok(), room, "the question before and the deed");
            if done.is_ok() {
                model.insert((Key(comparator, one.user_key.clone()), Reverse(packed), i), one.value.clone());
                bytes += sizes[i] + 8;
            } else {
                refused = refused.or(Some(i));
                prop_assert_eq!(before, (t.len(), t.bytes(), t.memory()));
            }
            prop_assert!(t.memory() <= limit.max(head));
        }
        prop_assert_eq!(fit, Some(refused.unwrap_or(sizes.len())));
        prop_assert_eq!((t.len(), t.bytes()), (model.len(), bytes));

        let want: Vec<_> =
            model.iter().map(|((key, packed, _), value)| (key.1.clone(), packed.0, value.clone())).collect();
        prop_assert_eq!(both_ways(&t), want);

        let own = insertions.iter().map(|one| (one.user_key.clone(), one.sequence));
        for (user_key, sequence) in probes.into_iter().chain(own) {
            let key = Key(comparator, user_key);
            let newest = model.range((key.clone(), Reverse(pack(sequence, SEEK_TYPE)), 0)..).next();
            let newest = newest.filter(|((found, _, _), _)| found.1 == key.1);
            let got = t.get(&key.1, sequence).map(|entry| (entry.packed(), entry.value()));
            prop_assert_eq!(got, newest.map(|((_, packed, _), value)| (packed.0, &value[..])));
            for packed in [pack(sequence, SEEK_TYPE), pack(sequence, 1), pack(sequence, 0)] {
                check_seeks(&t, &model, &key, packed);
            }
        }
    }
}

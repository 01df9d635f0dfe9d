//! One writer and several readers on their own threads: the guarantees during insertion.
//! ThreadSanitizer checks this (`scripts/sanitize.sh`).
#![cfg(not(loom))]

use std::sync::atomic::{AtomicU64, Ordering};

use memtable::{Cursor, Memtable, Writer};
use rocksfmt::{Comparator, SEEK_TYPE, pack, unpack};

const READERS: u64 = 3;

/// SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The key written with a sequence: each about four times, in no order except for short ascending
/// runs.
fn key(sequence: u64, entries: u64) -> [u8; 16] {
    let number = mix(sequence / 8) % (entries / 4) + sequence % 8;
    let mut key = [b'k'; 16];
    key[8..].copy_from_slice(&number.to_be_bytes());
    key
}

/// The value of that entry; it reveals any torn or foreign byte.
fn value(sequence: u64) -> Vec<u8> {
    let len = if sequence.is_multiple_of(500) { 9000 } else { sequence % 90 };
    (0..len).map(|i| (mix(sequence) >> (i % 8 * 8)) as u8).collect()
}

/// Writes all entries and publishes each sequence. Waits for the readers from time to time, so that
/// they see more than the end.
fn write(mut writer: Writer, visible: &AtomicU64, rounds: &AtomicU64, entries: u64) {
    for sequence in 1..=entries {
        let (key, value) = (key(sequence, entries), value(sequence));
        assert!(writer.room_for([key.len() + value.len()]));
        writer.insert(&key, pack(sequence, 1), &value).unwrap();
        visible.store(sequence, Ordering::Release);
        // Relaxed and bounded: this must neither order anything nor wait for failed readers.
        for _ in 0..10_000 {
            if rounds.load(Ordering::Relaxed) >= sequence / 100 {
                break;
            }
            std::thread::yield_now();
        }
    }
}

/// Checks that an entry is complete.
fn check(user_key: &[u8], packed: u64, bytes: &[u8], entries: u64) {
    let (sequence, kind) = unpack(packed);
    assert_eq!((user_key, kind), (&key(sequence, entries)[..], 1));
    assert_eq!(bytes, value(sequence));
}

/// Walks up to `steps` entries from a cursor and checks their order. Returns how many have a
/// sequence of at most `seen`.
fn walk(t: &Memtable, c: &mut Cursor, backward: bool, steps: u64, seen: u64, entries: u64) -> u64 {
    let (mut count, mut last) = (0, None);
    for _ in 0..steps {
        if !c.valid() {
            break;
        }
        let entry = c.entry(t).unwrap();
        check(entry.user_key(), entry.packed(), entry.value(), entries);
        if let Some((user_key, packed)) = last {
            let order = t.comparator().cmp_user(user_key, entry.user_key());
            let order = order.then_with(|| entry.packed().cmp(&packed));
            assert!(if backward { order.is_gt() } else { order.is_lt() }, "out of order");
        }
        last = Some((entry.user_key(), entry.packed()));
        count += u64::from(unpack(entry.packed()).0 <= seen);
        if backward {
            c.prev(t)
        } else {
            c.next(t)
        };
    }
    count
}

fn read(t: &Memtable, visible: &AtomicU64, rounds: &AtomicU64, entries: u64, reader: u64) {
    let (mut random, mut c) = (reader, Cursor::new());
    loop {
        let seen = visible.load(Ordering::Acquire);
        for _ in 0..50 {
            random = mix(random);
            // A version that must exist: found as the newest at its sequence, and by its own key.
            let sequence = 1 + random % seen.max(1);
            if sequence > seen {
                continue;
            }
            let key = key(sequence, entries);
            let entry = t.get(&key, sequence).expect("it was inserted before it was visible");
            assert_eq!(entry.packed(), pack(sequence, 1));
            check(entry.user_key(), entry.packed(), entry.value(), entries);
            let newest = t.get(&key, u64::MAX).expect("there is one").packed();
            assert!(newest >= entry.packed());
            assert_eq!(t.value(entry.value_ref()), value(sequence));

            assert!(c.seek(t, &key, pack(sequence, SEEK_TYPE)) && c.packed(t) == pack(sequence, 1));
            walk(t, &mut c, random & 1 == 0, 20, seen, entries);
            assert!(c.seek_for_prev(t, &key, pack(sequence, 1)));
            assert_eq!((c.user_key(t), c.packed(t)), (&key[..], pack(sequence, 1)));
        }
        // A walk through everything, in either direction, meets all entries that were visible
        // before.
        if random % 16 < 2 {
            let backward = random % 16 == 0;
            if backward {
                c.last(t)
            } else {
                c.first(t)
            };
            assert_eq!(walk(t, &mut c, backward, u64::MAX, seen, entries), seen);
        }
        rounds.fetch_add(1, Ordering::Relaxed);
        if seen == entries {
            return;
        }
    }
}

fn stress(comparator: Comparator, entries: u64) {
    let (writer, table) = Memtable::new(comparator, 64 << 20, 42);
    let (visible, rounds) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|threads| {
        let (table, visible, rounds) = (&table, &visible, &rounds);
        for reader in 0..READERS {
            threads.spawn(move || read(table, visible, rounds, entries, reader));
        }
        threads.spawn(move || write(writer, visible, rounds, entries));
    });
    assert_eq!(table.len() as u64, entries);
}

#[test]
fn readers_see_whole_entries_in_order_while_one_writes() {
    stress(Comparator::Bytewise, 60_000);
}

#[test]
fn readers_see_whole_entries_in_reverse_order_too() {
    stress(Comparator::ReverseBytewise, 20_000);
}

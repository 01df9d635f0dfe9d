//! The race: its keys and values, which follow from their number, and which of them each thread
//! gets.

use std::iter;
use std::ops::Range;

/// Bytes of a key.
pub const KEY_BYTES: usize = 8;
/// Bytes of a value.
pub const VALUE_BYTES: usize = 4096;
/// Bytes that values are cut from. Their bytes are random, so that no compression helps.
const STOCK_BYTES: usize = 1 << 20;
/// Keys of a partition of the hot pass: 10 MB of values.
const PARTITION: u64 = 10 * 1024 * 1024 / VALUE_BYTES as u64;

/// A step of xorshift64.
fn next_random(mut random: u64) -> u64 {
    random ^= random << 13;
    random ^= random >> 7;
    random ^ (random << 17)
}

/// One thread's part of the race: the numbers that it writes, and those that it gets in each pass.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// The thread, from 0.
    pub thread: u64,
    /// All threads.
    pub threads: u64,
    /// Sets of each thread.
    pub sets: u64,
}

impl Share {
    /// What the thread writes, in this order.
    pub fn written(self) -> Range<u64> {
        let first = self.thread * self.sets;
        first..first + self.sets
    }

    /// The hot pass: partitions of the thread's writes, the last one first, and keys of each at
    /// random, a tenth more than it has.
    pub fn hot(self) -> impl Iterator<Item = u64> {
        let first = self.thread * self.sets;
        (0..self.sets.div_ceil(PARTITION))
            .rev()
            .flat_map(move |partition| {
                let from = partition * PARTITION;
                let len = PARTITION.min(self.sets - from);
                iter::repeat_n((first + from, len), (len + len.div_ceil(10)) as usize)
            })
            .zip(self.random_numbers())
            .map(|((from, len), random)| from + random % len)
    }

    /// Keys of all threads at random.
    pub fn random(self, gets: u64) -> impl Iterator<Item = u64> {
        let all = self.sets * self.threads;
        (0..gets).zip(self.random_numbers()).map(move |(_, random)| random % all)
    }

    fn random_numbers(self) -> impl Iterator<Item = u64> {
        let seed = self.thread.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        iter::successors(Some(next_random(seed)), |&random| Some(next_random(random)))
    }
}

/// Makes keys and values, and tells whether a value is the right one.
#[derive(Debug)]
pub struct Entries {
    stock: Vec<u8>,
}

impl Entries {
    /// Always the same ones.
    #[expect(clippy::new_without_default, reason = "it makes a megabyte")]
    pub fn new() -> Entries {
        let (mut stock, mut random) =
            (Vec::with_capacity(STOCK_BYTES + VALUE_BYTES), 88_172_645_463);
        while stock.len() < STOCK_BYTES + VALUE_BYTES {
            random = next_random(random);
            stock.extend_from_slice(&random.to_le_bytes());
        }
        Entries { stock }
    }

    /// The key with a number: neighbours are far from each other, and no two are equal.
    pub fn key(&self, number: u64) -> [u8; KEY_BYTES] {
        // The finalizer of splitmix64: each step can be undone.
        let mut key = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
        key = (key ^ (key >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        key = (key ^ (key >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (key ^ (key >> 31)).to_be_bytes()
    }

    /// What follows the key and the number in the value.
    fn rest(&self, key: [u8; KEY_BYTES]) -> &[u8] {
        let from = u64::from_be_bytes(key) as usize % STOCK_BYTES;
        &self.stock[from..from + VALUE_BYTES - KEY_BYTES - 8]
    }

    /// Makes the value with a number, and returns its key.
    pub fn fill(&self, number: u64, value: &mut [u8]) -> [u8; KEY_BYTES] {
        let key = self.key(number);
        value[..KEY_BYTES].copy_from_slice(&key);
        value[KEY_BYTES..KEY_BYTES + 8].copy_from_slice(&number.to_le_bytes());
        value[KEY_BYTES + 8..].copy_from_slice(self.rest(key));
        key
    }

    /// Whether all bytes of a value are those that [`Entries::fill`] has made.
    pub fn is_value(&self, number: u64, value: &[u8]) -> bool {
        let key = self.key(number);
        value.len() == VALUE_BYTES
            && value[..KEY_BYTES] == key
            && value[KEY_BYTES..KEY_BYTES + 8] == number.to_le_bytes()
            && value[KEY_BYTES + 8..] == *self.rest(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_value_is_verified() {
        let entries = Entries::new();
        let mut value = vec![0; VALUE_BYTES];
        for number in [0, 1, 77_777, u64::MAX] {
            entries.fill(number, &mut value);
            assert!(entries.is_value(number, &value));
            assert!(!entries.is_value(number ^ 1, &value));
            for at in [0, 7, 8, 15, 16, 2000, VALUE_BYTES - 1] {
                value[at] ^= 1;
                assert!(!entries.is_value(number, &value), "byte {at}");
                value[at] ^= 1;
            }
            assert!(!entries.is_value(number, &value[1..]));
        }
    }

    #[test]
    fn keys_are_different_and_in_no_order() {
        let entries = Entries::new();
        let mut keys: Vec<_> = (0..10_000).map(|number| entries.key(number)).collect();
        assert!(keys.windows(2).filter(|pair| pair[0] < pair[1]).count() < 6000);
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 10_000);
    }

    #[test]
    fn the_hot_pass_visits_the_partitions_of_a_thread_from_the_last_to_the_first() {
        let share = Share { thread: 1, threads: 3, sets: 2 * PARTITION + 11 };
        let hot: Vec<u64> = share.hot().collect();
        let (last, rest) = hot.split_at(11 + 2);
        let (middle, first) = rest.split_at((PARTITION + PARTITION / 10) as usize);
        assert_eq!(first.len(), middle.len());
        for (gets, partition, len) in [(last, 2, 11), (middle, 1, PARTITION), (first, 0, PARTITION)]
        {
            let from = share.sets + partition * PARTITION;
            assert!(gets.iter().all(|number| (from..from + len).contains(number)), "{partition}");
            assert!(!gets.is_sorted(), "{partition}");
        }
        assert_eq!(share.written(), share.sets..2 * share.sets);
    }

    #[test]
    fn random_gets_reach_the_keys_of_all_threads() {
        let share = Share { thread: 0, threads: 2, sets: 5 };
        let mut numbers: Vec<u64> = share.random(1000).collect();
        assert_eq!(numbers.len(), 1000);
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers, (0..10).collect::<Vec<u64>>());
    }
}

//! The index of the database's keys in the client: a set of hashes, with which it knows by itself
//! that a key does not exist.
//!
//! 1. The link is told of every write of any key (`CLIENT TRACKING ON BCAST`), before anything
//!    else.
//! 2. [`Index::next_page`] begins to load: from now on [`Index::add`] enters each key that is
//!    written. The pages of hashes (`MR.INDEX`) arrive one after the other.
//! 3. When the last page is there, the index is *whole*: a key whose hash is not in it was in no
//!    page and has not been written since, so there is none.
//! 4. Whatever makes the server's messages incomplete (the end of the link, a message that
//!    everything is invalid) [drops](Index::clear) the index whole. Then it is loaded anew.
//!
//! A hash is never removed but with all others: who writes a key may have removed it or not, and a
//! key with a deadline ends by itself. So a hash in the index says nothing; the server is asked.
//! Two keys with the same hash cost a round trip too many, and never a wrong answer.
//!
//! **Memory**: 40 bits of a hash count, of which eight choose a part and the others are in open
//! addressing: 5 to 8 bytes for a key, without an allocation of its own. A part grows by half when
//! it is four fifths full, by itself, so that no step takes long. Beyond the limit the index is
//! dropped, and there is none for a minute.
//!
//! The server cannot choose where hashes are: they are mixed with a secret of this process.
//!
//! Locks: `loading` for the state; a part's, also within `loading`, for one operation. `state` is
//! changed under `loading` and read under a part's lock: it is `ABSENT` before a part is emptied.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use resp::Reply;
use twox_hash::XxHash3_64;

use crate::mutant::{Mutant, is};

const PARTS: usize = 256;
/// The first length of a part.
const PART_MIN: usize = 16;
/// No hash.
const FREE: u32 = 0;
/// Bytes of a hash on the wire.
const HASH_BYTES: usize = 8;
/// Keys of one page.
const PAGE_KEYS: usize = 32 << 10;
/// The smallest limit, in bytes.
pub(crate) const INDEX_BYTES_MIN: usize = 64 << 10;
/// The pause after the keys did not fit, or the server has refused.
const REFUSED: Duration = Duration::from_secs(60);
/// The pause after the index was dropped, as a multiple of the time that it took to load. So at
/// most a third of the time is spent loading, however often it is dropped.
const PAUSE: u32 = 2;

/// There is none, and none is being loaded.
const ABSENT: u8 = 0;
const LOADING: u8 = 1;
const WHOLE: u8 = 2;

/// Hashes with the same upper bits.
#[derive(Debug, Default)]
struct Part {
    slots: Vec<u32>,
    len: usize,
}

impl Part {
    fn home(&self, hash: u32) -> usize {
        // Below the number of slots.
        ((u64::from(hash) * self.slots.len() as u64) >> 32) as usize
    }

    /// The slot of a hash, or the free one where it would be.
    fn find(&self, hash: u32) -> usize {
        let mut at = self.home(hash);
        while self.slots[at] != hash && self.slots[at] != FREE {
            at = if at + 1 == self.slots.len() { 0 } else { at + 1 };
        }
        at
    }

    fn has(&self, hash: u32) -> bool {
        !self.slots.is_empty() && self.slots[self.find(hash)] == hash
    }

    /// The length that it must grow to before a hash is added, if it must.
    fn grown(&self) -> Option<usize> {
        let is_full = self.len * 5 >= self.slots.len() * 4;
        is_full.then(|| (self.slots.len() + self.slots.len() / 2).max(PART_MIN))
    }

    fn grow(&mut self, length: usize) {
        let old = std::mem::replace(&mut self.slots, vec![FREE; length]);
        for hash in old.into_iter().filter(|hash| *hash != FREE) {
            let at = self.find(hash);
            self.slots[at] = hash;
        }
    }
}

/// Leave to add one page; see [`Index::next_page`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Page {
    generation: u64,
    pub seed: i64,
    /// It has at most so many keys.
    pub keys_max: usize,
    /// The key after which it begins; `None` for the first one.
    pub after: Option<Vec<u8>>,
}

#[derive(Debug, Default)]
struct Loading {
    /// The server of the present link knows the command, and tells of every write.
    is_served: bool,
    /// Counts the loads.
    generation: u64,
    /// When the present one, or the last one, began.
    began: Option<Instant>,
    not_before: Option<Instant>,
    /// The key after which the next page begins.
    after: Option<Vec<u8>>,
    /// A page is on its way.
    is_asked: bool,
    /// Hashes that the pages of this load have had.
    received: usize,
    loads: u64,
    load_time: Duration,
}

/// What the index has, for the statistics of the cache.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IndexStats {
    pub is_whole: bool,
    pub keys: u64,
    pub bytes: u64,
    pub answers: u64,
    pub loads: u64,
    pub load_time: Duration,
}

#[derive(Debug)]
pub(super) struct Index {
    parts: Box<[Mutex<Part>]>,
    state: AtomicU8,
    loading: Mutex<Loading>,
    seed: u64,
    page_keys: usize,
    secret: [u64; 2],
    keys: AtomicUsize,
    bytes: AtomicUsize,
    bytes_max: usize,
    answers: AtomicU64,
}

/// There is no room for a hash.
#[derive(Debug)]
struct Full;

impl Index {
    /// An index of at most `bytes_max` bytes, which is not there yet.
    pub fn new(bytes_max: usize) -> Index {
        let random = RandomState::new();
        Index {
            parts: (0..PARTS).map(|_| Mutex::default()).collect(),
            state: AtomicU8::new(ABSENT),
            loading: Mutex::default(),
            seed: random.hash_one(0),
            page_keys: PAGE_KEYS,
            secret: [random.hash_one(1), random.hash_one(2) | 1],
            keys: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            bytes_max,
            answers: AtomicU64::new(0),
        }
    }

    /// The same with pages of so many keys and, so that a simulation can be repeated, with a known
    /// seed.
    #[cfg(feature = "testing")]
    pub fn simulated(bytes_max: usize, page_keys: usize) -> Index {
        Index { seed: 1, page_keys, ..Index::new(bytes_max) }
    }

    fn loading(&self) -> MutexGuard<'_, Loading> {
        self.loading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The part of a key's hash, and what the part keeps of it.
    fn split(&self, hash: u64) -> (MutexGuard<'_, Part>, u32) {
        let product = u128::from(hash ^ self.secret[0]) * u128::from(self.secret[1]);
        let mixed = product as u64 ^ (product >> 64) as u64;
        let part = &self.parts[(mixed >> 56) as usize];
        // Nothing panics between two changes of a part.
        (part.lock().unwrap_or_else(PoisonError::into_inner), (mixed as u32).max(FREE + 1))
    }

    fn hash(&self, key: &[u8]) -> u64 {
        XxHash3_64::oneshot_with_seed(self.seed, key)
    }

    /// Whether it is certain that there is no such key, as of the last message of the server.
    pub fn lacks(&self, key: &[u8]) -> bool {
        if self.state.load(Ordering::Acquire) != WHOLE && !is(Mutant::AnswersBeforeItIsWhole) {
            return false;
        }
        let (part, hash) = self.split(self.hash(key));
        // Again, under the lock: the parts are emptied after it has changed.
        let is_whole = self.state.load(Ordering::Acquire) == WHOLE;
        let lacks = (is_whole || is(Mutant::AnswersBeforeItIsWhole)) && !part.has(hash);
        if lacks {
            self.answers.fetch_add(1, Ordering::Relaxed);
        }
        lacks
    }

    /// A key was written: nothing is known of it any more.
    pub fn add(&self, key: &[u8]) {
        if is(Mutant::WritesDuringALoadAreNotAdded) && !self.stats().is_whole {
            return;
        }
        // The pages of a load that begins later see the write.
        if self.state.load(Ordering::Acquire) != ABSENT && self.insert(self.hash(key)).is_err() {
            self.drop_for(&mut self.loading(), Some(REFUSED));
        }
    }

    fn insert(&self, hash: u64) -> Result<(), Full> {
        let (mut part, hash) = self.split(hash);
        if part.has(hash) {
            return Ok(());
        }
        if let Some(length) = part.grown() {
            let more = (length - part.slots.len()) * size_of::<u32>();
            let before = self.bytes.fetch_add(more, Ordering::Relaxed);
            if before + more > self.bytes_max {
                self.bytes.fetch_sub(more, Ordering::Relaxed);
                return Err(Full);
            }
            part.grow(length);
        }
        let at = part.find(hash);
        part.slots[at] = hash;
        part.len += 1;
        self.keys.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The server of the link that was opened knows the commands, or not.
    pub fn serve(&self, is_served: bool) {
        self.loading().is_served = is_served;
    }

    /// Drops everything. It is loaded anew when [`Index::next_page`] is called next, after a pause.
    pub fn clear(&self) {
        self.drop_for(&mut self.loading(), None);
    }

    /// Drops everything for some time, or as long as its load costs.
    fn drop_for(&self, loading: &mut Loading, pause: Option<Duration>) {
        let now = Instant::now();
        let took = match self.state.swap(ABSENT, Ordering::AcqRel) {
            WHOLE => loading.load_time,
            LOADING => loading.began.map_or(Duration::ZERO, |began| now - began),
            _ => Duration::ZERO,
        };
        let until = now + pause.unwrap_or(took * PAUSE);
        loading.not_before = loading.not_before.max(Some(until));
        (loading.after, loading.is_asked) = (None, false);
        loading.generation += 1;
        self.empty();
    }

    fn empty(&self) {
        for part in &self.parts {
            let mut part = part.lock().unwrap_or_else(PoisonError::into_inner);
            self.keys.fetch_sub(part.len, Ordering::Relaxed);
            self.bytes.fetch_sub(part.slots.len() * size_of::<u32>(), Ordering::Relaxed);
            *part = Part::default();
        }
    }

    /// The next page that is to be asked for on the link, if any.
    pub fn next_page(&self, now: Instant) -> Option<Page> {
        if self.state.load(Ordering::Acquire) == WHOLE {
            return None;
        }
        let mut loading = self.loading();
        if !loading.is_served {
            return None;
        }
        match self.state.load(Ordering::Acquire) {
            ABSENT if loading.not_before.is_none_or(|time| now >= time) => {
                // What late pages of an earlier load have left.
                self.empty();
                *loading = Loading {
                    is_served: true,
                    generation: loading.generation + 1,
                    began: Some(now),
                    not_before: loading.not_before,
                    loads: loading.loads,
                    load_time: loading.load_time,
                    ..Loading::default()
                };
                // Before the page is asked for: it sees all writes that are not added.
                self.state.store(LOADING, Ordering::Release);
            }
            LOADING if !loading.is_asked => {}
            _ => return None,
        }
        loading.is_asked = true;
        let (generation, after) = (loading.generation, loading.after.take());
        Some(Page { generation, seed: self.seed.cast_signed(), keys_max: self.page_keys, after })
    }

    /// A page has arrived on the link.
    pub fn arrived(&self, page: &Page, reply: &Reply) {
        let is_late = |loading: &Loading| {
            loading.generation != page.generation && !is(Mutant::PagesOfEarlierLoadsCount)
        };
        if is_late(&self.loading()) {
            return;
        }
        let added = parse(page, reply).and_then(|(after, hashes)| {
            for hash in hashes.as_chunks::<HASH_BYTES>().0 {
                self.insert(u64::from_le_bytes(*hash)).ok()?;
            }
            Some((after, hashes.len() / HASH_BYTES))
        });
        let mut loading = self.loading();
        // It may have been dropped meanwhile.
        if is_late(&loading) {
            return;
        }
        let Some((after, count)) = added else {
            return self.drop_for(&mut loading, Some(REFUSED));
        };
        loading.is_asked = false;
        loading.received += count;
        match after {
            // Pages that have more keys than fit, of which many are the same, never end.
            Some(_) if loading.received > self.bytes_max / size_of::<u32>() => {
                self.drop_for(&mut loading, Some(REFUSED));
            }
            Some(after) => loading.after = Some(after),
            None => {
                loading.load_time = loading.began.map_or(Duration::ZERO, |began| began.elapsed());
                loading.loads += 1;
                self.state.store(WHOLE, Ordering::Release);
            }
        }
    }

    pub fn stats(&self) -> IndexStats {
        let loading = self.loading();
        IndexStats {
            is_whole: self.state.load(Ordering::Acquire) == WHOLE,
            keys: self.keys.load(Ordering::Relaxed) as u64,
            bytes: self.bytes.load(Ordering::Relaxed) as u64,
            answers: self.answers.load(Ordering::Relaxed),
            loads: loading.loads,
            load_time: loading.load_time,
        }
    }
}

/// The key after which the next page begins, and the hashes, as bytes. `None`: this is no page.
fn parse<'a>(page: &Page, reply: &'a Reply) -> Option<(Option<Vec<u8>>, &'a [u8])> {
    let Reply::Array(words) = reply else { return None };
    let (after, hashes) = match &words[..] {
        [Reply::Null, Reply::Bulk(hashes)] => (None, hashes),
        [Reply::Bulk(after), Reply::Bulk(hashes)] => (Some(after.clone()), hashes),
        _ => return None,
    };
    let has_length =
        hashes.len().is_multiple_of(HASH_BYTES) && hashes.len() <= page.keys_max * HASH_BYTES;
    // Another page follows only one with keys, and after another key.
    let advances = after.is_none() || !hashes.is_empty() && after != page.after;
    (has_length && advances).then_some((after, hashes))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use proptest::prelude::*;

    fn served() -> Index {
        let index = Index::new(1 << 20);
        index.serve(true);
        index
    }

    fn reply(index: &Index, keys: &[&str], after: Option<&str>) -> Reply {
        let after = after.map_or(Reply::Null, |after| Reply::Bulk(after.as_bytes().to_vec()));
        let hashes = keys.iter().flat_map(|key| index.hash(key.as_bytes()).to_le_bytes()).collect();
        Reply::Array(vec![after, Reply::Bulk(hashes)])
    }

    fn later() -> Instant {
        Instant::now() + REFUSED * 2
    }

    fn load(index: &Index, keys: &[&str]) {
        let page = index.next_page(later()).unwrap();
        index.arrived(&page, &reply(index, keys, None));
        assert!(index.stats().is_whole);
    }

    proptest! {
        /// With few hashes of few homes, so that they collide, also around the end.
        #[test]
        fn a_part_is_a_set(numbers in proptest::collection::vec(0..60_u32, 0..200)) {
            let (mut part, mut model) = (Part::default(), BTreeSet::new());
            let spread = |number: u32| (number % 6).wrapping_mul(0x3000_0000) + number / 6 + 1;
            for number in numbers {
                let hash = spread(number);
                if !part.has(hash) {
                    if let Some(length) = part.grown() {
                        part.grow(length);
                    }
                    let at = part.find(hash);
                    part.slots[at] = hash;
                    part.len += 1;
                }
                model.insert(hash);
                prop_assert_eq!(part.len, model.len());
                prop_assert!((0..60).all(|n| part.has(spread(n)) == model.contains(&spread(n))));
            }
        }
    }

    #[test]
    fn a_key_is_missing_only_if_the_index_is_whole_and_has_not_its_hash() {
        let index = served();
        let page = index.next_page(Instant::now()).unwrap();
        assert_eq!(page.after, None);
        assert!(index.next_page(Instant::now()).is_none(), "one page at a time");
        index.arrived(&page, &reply(&index, &["a", "b"], Some("b")));
        assert!(!index.lacks(b"x"), "it is not whole");
        let page = index.next_page(Instant::now()).unwrap();
        assert_eq!(page.after.as_deref(), Some(&b"b"[..]));
        index.arrived(&page, &reply(&index, &["c"], None));
        for key in ["a", "b", "c"] {
            assert!(!index.lacks(key.as_bytes()));
        }
        assert!(index.lacks(b"x") && index.lacks(b""));
        assert!(index.next_page(later()).is_none());
        assert_eq!((index.stats().keys, index.stats().answers, index.stats().loads), (3, 2, 1));
    }

    #[test]
    fn a_key_that_was_written_is_unknown_whenever_it_was() {
        let index = served();
        index.add(b"before"); // The pages have it.
        let first = index.next_page(Instant::now()).unwrap();
        // Before and after the page that would have it: it may have been made earlier or later.
        index.add(b"bb");
        index.arrived(&first, &reply(&index, &["a", "before"], Some("c")));
        index.add(b"aa");
        let last = index.next_page(Instant::now()).unwrap();
        index.add(b"z");
        index.arrived(&last, &reply(&index, &["d"], None));
        index.add(b"after");
        index.add(b"a"); // It is there, and stays.
        for key in ["a", "before", "bb", "aa", "z", "after", "d"] {
            assert!(!index.lacks(key.as_bytes()), "{key}");
        }
        assert!(index.lacks(b"x"));
    }

    #[test]
    fn what_was_dropped_is_loaded_anew_from_the_beginning() {
        let index = served();
        load(&index, &["a"]);
        index.clear();
        assert!(!index.lacks(b"x") && index.stats().bytes == 0);
        let page = index.next_page(later()).unwrap();
        index.clear();
        // The page is one of a load that has ended.
        index.arrived(&page, &reply(&index, &["old"], None));
        assert!(!index.stats().is_whole && !index.lacks(b"x"));
        let new = index.next_page(later()).unwrap();
        index.arrived(&page, &reply(&index, &["old"], None));
        assert!(!index.stats().is_whole);
        index.arrived(&new, &reply(&index, &["b"], None));
        assert!(index.lacks(b"a") && index.lacks(b"old") && !index.lacks(b"b"));
    }

    #[test]
    fn it_is_not_loaded_all_the_time() {
        let index = served();
        let page = index.next_page(Instant::now()).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        index.arrived(&page, &reply(&index, &["a"], None));
        index.clear();
        assert!(index.next_page(Instant::now()).is_none());
        assert!(index.next_page(later()).is_some());
        index.serve(false);
        index.clear();
        assert!(index.next_page(later()).is_none(), "the server does not know the command");
    }

    #[test]
    fn replies_that_are_no_page_end_the_load() {
        let hashes = |count: usize| Reply::Bulk(vec![1; count]);
        let key = |text: &str| Reply::Bulk(text.into());
        for words in [
            Reply::Null,
            Reply::Error(b"ERR unknown command".to_vec()),
            Reply::Array(vec![]),
            Reply::Array(vec![Reply::Null]),
            Reply::Array(vec![Reply::Null, Reply::Integer(3)]),
            Reply::Array(vec![Reply::Integer(3), hashes(8)]),
            Reply::Array(vec![Reply::Null, hashes(7)]),
            Reply::Array(vec![Reply::Null, hashes(PAGE_KEYS * 8 + 8)]),
            Reply::Array(vec![key("a"), hashes(0)]),
            Reply::Array(vec![Reply::Null, hashes(8), hashes(8)]),
        ] {
            let index = served();
            let page = index.next_page(Instant::now()).unwrap();
            index.arrived(&page, &words);
            assert!(!index.stats().is_whole, "{words:?}");
            assert!(index.next_page(Instant::now()).is_none(), "{words:?}");
            assert_eq!(index.stats().bytes, 0, "{words:?}");
            assert!(index.next_page(later()).is_some(), "{words:?}");
        }
        // A page that begins where it ends.
        let index = served();
        let page = index.next_page(Instant::now()).unwrap();
        index.arrived(&page, &Reply::Array(vec![key("a"), hashes(8)]));
        let page = index.next_page(Instant::now()).unwrap();
        index.arrived(&page, &Reply::Array(vec![key("a"), hashes(8)]));
        assert!(index.next_page(Instant::now()).is_none());
    }

    #[test]
    fn pages_without_end_end_and_memory_is_bounded() {
        // Of the same hashes, and of others.
        for step in [0, 1] {
            let index = served();
            let mut number = 0_u64;
            let mut pages = 0;
            while let Some(page) = index.next_page(Instant::now()) {
                let hashes = (0..1000).flat_map(|_| {
                    number += step;
                    number.to_le_bytes()
                });
                let hashes = Reply::Bulk(hashes.collect());
                let after = Reply::Bulk(format!("{pages}").into_bytes());
                index.arrived(&page, &Reply::Array(vec![after, hashes]));
                assert!(index.stats().bytes <= 1 << 20);
                pages += 1;
                assert!(pages < 1000, "it never ends");
            }
            assert_eq!((index.stats().keys, index.stats().is_whole), (0, false));
        }
    }

    #[test]
    fn too_many_written_keys_drop_it() {
        let index = served();
        load(&index, &["a"]);
        for n in 0..400_000_u32 {
            index.add(&n.to_le_bytes());
        }
        assert!(!index.lacks(b"x") && index.next_page(Instant::now()).is_none());
        assert_eq!((index.stats().keys, index.stats().bytes), (0, 0));
    }

    #[test]
    fn a_key_takes_eight_bytes_at_most() {
        let index = Index::new(64 << 20);
        index.serve(true);
        let page = index.next_page(Instant::now()).unwrap();
        for step in 1..60_u64 {
            for n in (step - 1) * 10_000..step * 10_000 {
                index.insert(index.hash(&n.to_le_bytes())).unwrap();
            }
            let stats = index.stats();
            assert!(stats.bytes <= 8 * stats.keys, "{stats:?}");
        }
        assert!(index.stats().keys > 589_900);
        index.arrived(&page, &reply(&index, &[], None));
        let found = (0..590_000_u64).filter(|n| index.lacks(&n.to_le_bytes())).count();
        let wrong = (1 << 40..(1 << 40) + 100_000_u64).filter(|n| !index.lacks(&n.to_le_bytes()));
        assert_eq!(found, 0);
        assert!(wrong.count() < 10, "hashes collide");
    }
}

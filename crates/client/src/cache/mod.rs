//! The client-side cache: what the server has said of keys, until it says that they changed.
//!
//! Values enter the cache only by replies on a *link*: one connection on which `CLIENT TRACKING` is
//! on. The server remembers which keys it has sent on the link, and sends an invalidation there
//! when one of them is written. One read:
//!
//! 1. [`Cache::get`] finds nothing and returns a [`Ticket`], before the read is sent.
//! 2. The reply arrives on the link. [`Cache::fill`] stores it if the ticket is still good.
//! 3. An invalidation, or a write of this client, [forgets](Cache::forget) the key, and makes the
//!    tickets for it bad: a reply that the server made before the write must not be stored after
//!    it. (A placeholder does the same in other clients. Here it is a number, one for each of
//!    [`GENERATIONS`] groups of keys, that counts what was forgotten; so a read that never ends
//!    leaves nothing.)
//! 4. When the link ends, [`Cache::close`] forgets everything and makes all tickets bad; nothing is
//!    served until [`Cache::open`] says that a new link has tracking on.
//!
//! **Lease.** A link may be dead without anybody knowing. So the cache serves values only for
//! `staleness_max` after the time at which the last request was *sent* on the link that has been
//! answered: the server had then sent all earlier invalidations, and they have arrived. The link
//! sends a `PING` when it has nothing else to send.
//!
//! Keys are spread over shards, each with a lock that is held for one operation.

mod store;

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use resp::Reply;

use self::store::Store;

/// Groups of keys in each shard, whose tickets become bad together.
const GENERATIONS: usize = 256;
const SHARDS_MAX: usize = 16;
/// A shard has at least this size, unless the cache is smaller.
const SHARD_BYTES_MIN: usize = 2 << 20;
/// The smallest cache, in bytes: less cannot hold anything useful.
pub(crate) const BYTES_MIN: usize = 64 << 10;

/// A hash with random keys, the same for all caches of the process: a peer cannot choose keys that
/// collide.
fn hash(key: &[u8]) -> u64 {
    static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    STATE.hash_one(key)
}

/// The part of a hash that the index of a shard uses.
fn tag_of(hash: u64) -> u32 {
    (hash >> 32) as u32
}

#[derive(Debug)]
struct Shard {
    store: Store,
    generations: Box<[u32; GENERATIONS]>,
    /// The number of times that everything was forgotten.
    epoch: u64,
}

/// Leave to store one reply; see [`Cache::get`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    hash: u64,
    generation: u32,
    epoch: u64,
}

/// What [`Cache::get`] finds.
#[derive(Debug)]
pub(crate) enum Lookup {
    /// The value, or that there is none.
    Hit(Option<Vec<u8>>),
    /// Nothing. Take the ticket along with the read.
    Miss(Ticket),
}

/// Counts of a cache since its client was made, and its present size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Reads of a key that the cache answered.
    pub hits: u64,
    /// Reads of a key that the server had to answer.
    pub misses: u64,
    /// Keys that the server has invalidated, whether they were cached or not.
    pub invalidations: u64,
    /// Times that everything was dropped: the connection ended, or the server or this client has
    /// removed all keys or a range of them.
    pub clears: u64,
    /// Entries now.
    pub entries: u64,
    /// Bytes of their keys and values.
    pub bytes_cached: u64,
    /// Bytes of memory that the cache uses for them; at most
    /// [`Options::cache`](crate::Options::cache).
    pub bytes_used: u64,
}

#[derive(Debug)]
pub(crate) struct Cache {
    shards: Box<[Mutex<Shard>]>,
    staleness_max: Duration,
    began: Instant,
    /// Whether there is a link.
    open: AtomicBool,
    /// Nanoseconds after `began` until which values are served.
    lease_until_ns: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    invalidations: AtomicU64,
    clears: AtomicU64,
}

impl Cache {
    /// An empty cache without a link, of at most `bytes`.
    pub fn new(bytes: usize, staleness_max: Duration) -> Cache {
        let shards = (bytes / SHARD_BYTES_MIN).clamp(1, SHARDS_MAX);
        let shard = || Shard {
            store: Store::new(bytes / shards),
            generations: Box::new([0; GENERATIONS]),
            epoch: 0,
        };
        Cache {
            shards: (0..shards).map(|_| Mutex::new(shard())).collect(),
            staleness_max,
            began: Instant::now(),
            open: AtomicBool::new(false),
            lease_until_ns: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            invalidations: AtomicU64::new(0),
            clears: AtomicU64::new(0),
        }
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        let shard = (hash as u32 >> 8) as usize % self.shards.len();
        // A thread can only panic between two operations of the store, not within one.
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long a link may say nothing before it must ask.
    pub fn heartbeat(&self) -> Duration {
        self.staleness_max / 3
    }

    fn since_began_ns(&self, time: Instant) -> u64 {
        time.saturating_duration_since(self.began).as_nanos().min(u128::from(u64::MAX)) as u64
    }

    fn is_serving(&self, now: Instant) -> bool {
        self.since_began_ns(now) < self.lease_until_ns.load(Ordering::Acquire)
    }

    /// Looks up a key.
    pub fn get(&self, key: &[u8], now: Instant) -> Lookup {
        let hash = hash(key);
        let mut shard = self.shard(hash);
        // Under the lock: `close` ends the lease first and then empties the shards.
        if self.is_serving(now)
            && let Some(value) = shard.store.get(tag_of(hash), key)
        {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Lookup::Hit(value);
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        let generation = shard.generations[hash as usize % GENERATIONS];
        Lookup::Miss(Ticket { hash, generation, epoch: shard.epoch })
    }

    /// Stores a reply of the link, if its ticket is still good.
    pub fn fill(&self, ticket: Ticket, key: &[u8], value: Option<&[u8]>) {
        let mut shard = self.shard(ticket.hash);
        let generation = shard.generations[ticket.hash as usize % GENERATIONS];
        if ticket.generation == generation && ticket.epoch == shard.epoch {
            shard.store.insert(tag_of(ticket.hash), key, value);
        }
    }

    /// Forgets a key, which was written.
    pub fn forget(&self, key: &[u8]) {
        let hash = hash(key);
        let mut shard = self.shard(hash);
        let generation = &mut shard.generations[hash as usize % GENERATIONS];
        *generation = generation.wrapping_add(1);
        shard.store.remove(tag_of(hash), key);
    }

    /// Forgets everything.
    pub fn clear(&self) {
        self.clears.fetch_add(1, Ordering::Relaxed);
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.epoch += 1;
            shard.store.clear();
        }
    }

    /// A link has tracking on, by a request that was sent at this time.
    pub fn open(&self, sent: Instant) {
        self.open.store(true, Ordering::Release);
        self.renew(sent);
    }

    /// A request that was sent on the link at this time has been answered.
    pub fn renew(&self, sent: Instant) {
        if self.open.load(Ordering::Acquire) {
            let until = self.since_began_ns(sent + self.staleness_max);
            self.lease_until_ns.fetch_max(until, Ordering::AcqRel);
        }
    }

    /// The link has ended.
    pub fn close(&self) {
        self.open.store(false, Ordering::Release);
        self.lease_until_ns.store(0, Ordering::Release);
        self.clear();
    }

    /// Whether a message of the server is an invalidation; does what it says.
    pub fn pushed(&self, message: &[Reply]) -> bool {
        let [Reply::Bulk(kind) | Reply::Simple(kind), what, ..] = message else { return false };
        if kind != b"invalidate" {
            return false;
        }
        match what {
            Reply::Array(keys) if keys.iter().all(|key| key.as_bytes().is_some()) => {
                self.invalidations.fetch_add(keys.len() as u64, Ordering::Relaxed);
                keys.iter().filter_map(Reply::as_bytes).for_each(|key| self.forget(key));
            }
            // All keys; or something that a later version says and this one does not understand.
            _ => self.clear(),
        }
        true
    }

    pub fn stats(&self) -> CacheStats {
        let mut stats = CacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            invalidations: self.invalidations.load(Ordering::Relaxed),
            clears: self.clears.load(Ordering::Relaxed),
            ..CacheStats::default()
        };
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            stats.entries += shard.store.entries() as u64;
            stats.bytes_cached += shard.store.bytes_cached() as u64;
            stats.bytes_used += shard.store.bytes_used() as u64;
        }
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn open(staleness_max: Duration) -> Cache {
        let cache = Cache::new(1 << 20, staleness_max);
        cache.open(Instant::now());
        cache
    }

    fn miss(cache: &Cache, key: &[u8]) -> Ticket {
        match cache.get(key, Instant::now()) {
            Lookup::Miss(ticket) => ticket,
            Lookup::Hit(value) => panic!("{value:?} is cached"),
        }
    }

    fn hit(cache: &Cache, key: &[u8]) -> Option<Vec<u8>> {
        match cache.get(key, Instant::now()) {
            Lookup::Miss(_) => panic!("not cached"),
            Lookup::Hit(value) => value,
        }
    }

    fn invalidate(keys: &[&str]) -> Vec<Reply> {
        let keys = keys.iter().map(|key| Reply::Bulk(key.as_bytes().to_vec())).collect();
        vec![Reply::Bulk(b"invalidate".to_vec()), Reply::Array(keys)]
    }

    #[test]
    fn values_and_their_absence_are_cached_until_they_are_invalidated() {
        let cache = open(LONG);
        cache.fill(miss(&cache, b"a"), b"a", Some(b"1"));
        cache.fill(miss(&cache, b"b"), b"b", None);
        assert_eq!(hit(&cache, b"a"), Some(b"1".to_vec()));
        assert_eq!(hit(&cache, b"b"), None);
        assert!(cache.pushed(&invalidate(&["a", "x"])));
        miss(&cache, b"a");
        assert_eq!(hit(&cache, b"b"), None);
        assert!(cache.pushed(&[Reply::Bulk(b"invalidate".to_vec()), Reply::Null]));
        miss(&cache, b"b");
        let stats = cache.stats();
        assert_eq!((stats.hits, stats.misses, stats.invalidations, stats.clears), (3, 4, 2, 1));
    }

    /// The server answers, another client writes, and its invalidation is handled before the reply.
    #[test]
    fn a_reply_that_an_invalidation_has_overtaken_is_not_stored() {
        let cache = open(LONG);
        let ticket = miss(&cache, b"a");
        cache.pushed(&invalidate(&["a"]));
        cache.fill(ticket, b"a", Some(b"old"));
        miss(&cache, b"a");
    }

    #[test]
    fn a_reply_of_a_link_that_has_ended_is_not_stored() {
        let cache = open(LONG);
        let ticket = miss(&cache, b"a");
        cache.close();
        cache.open(Instant::now());
        cache.fill(ticket, b"a", Some(b"old"));
        miss(&cache, b"a");
    }

    #[test]
    fn nothing_is_served_without_a_link() {
        let cache = open(LONG);
        cache.fill(miss(&cache, b"a"), b"a", Some(b"1"));
        cache.close();
        miss(&cache, b"a");
        // An answer that a thread handles late does not bring the lease back.
        cache.renew(Instant::now());
        cache.fill(miss(&cache, b"a"), b"a", Some(b"1"));
        miss(&cache, b"a");
    }

    #[test]
    fn nothing_is_served_when_the_lease_is_over() {
        let cache = open(Duration::from_secs(3));
        cache.fill(miss(&cache, b"a"), b"a", Some(b"1"));
        let sent = Instant::now();
        cache.renew(sent);
        let just = sent + Duration::from_millis(2999);
        assert!(matches!(cache.get(b"a", just), Lookup::Hit(_)));
        let late = sent + Duration::from_secs(3);
        assert!(matches!(cache.get(b"a", late), Lookup::Miss(_)));
        // An older answer does not shorten it.
        cache.renew(sent - Duration::from_secs(2));
        assert!(matches!(cache.get(b"a", just), Lookup::Hit(_)));
    }

    #[test]
    fn messages_that_are_not_understood_drop_everything_or_nothing() {
        let cache = open(LONG);
        cache.fill(miss(&cache, b"a"), b"a", Some(b"1"));
        assert!(!cache.pushed(&[]));
        assert!(!cache.pushed(&[Reply::Bulk(b"message".to_vec()), Reply::Null]));
        assert_eq!(hit(&cache, b"a"), Some(b"1".to_vec()));
        let unknown = Reply::Map(vec![]);
        assert!(cache.pushed(&[Reply::Bulk(b"invalidate".to_vec()), unknown]));
        miss(&cache, b"a");
    }

    #[test]
    fn memory_stays_within_the_budget() {
        for bytes in [BYTES_MIN, 300_000, 10 << 20, 100 << 20] {
            let cache = Cache::new(bytes, LONG);
            cache.open(Instant::now());
            for n in 0_u32..20_000 {
                let key = n.to_be_bytes();
                cache.fill(miss(&cache, &key), &key, Some(&[0; 100]));
            }
            let stats = cache.stats();
            assert!(stats.bytes_used <= bytes as u64 && stats.entries > 100, "{bytes}: {stats:?}");
        }
    }
}

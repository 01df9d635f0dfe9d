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
//!    it. (A placeholder does the same in other clients. Here it is a time of the cache's own
//!    clock, which counts what was forgotten; each of [`GENERATIONS`] groups of keys keeps the time
//!    at which one of them was; so a read that never ends leaves nothing.)
//! 4. When the link ends, [`Cache::close`] forgets everything and makes all tickets bad; nothing is
//!    served until [`Cache::open`] says that a new link has tracking on.
//!
//! **Lease.** A link may be dead without anybody knowing. So the cache serves values only for
//! `staleness_max` after the time at which the last request was *sent* on the link that has been
//! answered: the server had then sent all earlier invalidations, and they have arrived. The link
//! sends a `PING` when it has nothing else to send.
//!
//! **Read-ahead** ([`ahead`]): values also come in stretches of the server's blob files, whose keys
//! nobody has asked for. One ticket serves for a whole stretch ([`Cache::stamp`]): what was
//! forgotten after it is not stored.
//!
//! **Index** ([`index`]): the hashes of all keys of the database. With it the link is told of every
//! write, and a get of a key that is not there needs no round trip. The rules of the link and the
//! lease hold for that answer as for a value.
//!
//! Keys are spread over shards, each with a lock that is held for one operation.

mod ahead;
mod index;
mod store;

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use resp::Reply;

use tokio::sync::Notify;

use crate::mutant::{Mutant, is};
use crate::options::Options;

use self::ahead::{After, Arrival, Mood, Recogniser};
pub(crate) use self::ahead::{CHUNK_BYTES, Chunk, Place, Turn, WAITS_MAX};
use self::index::Index;
pub(crate) use self::index::{INDEX_BYTES_MIN, Page};
use self::store::{Found, Store};

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
    /// The times at which one of a group of keys was forgotten last.
    generations: Box<[u64; GENERATIONS]>,
    /// The time at which everything was forgotten last.
    cleared: u64,
}

impl Shard {
    /// Whether what was asked for at a time may be stored.
    fn is_good(&self, hash: u64, asked: u64) -> bool {
        asked >= self.generations[hash as usize % GENERATIONS] && asked >= self.cleared
    }
}

/// Leave to store one reply; see [`Cache::get`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    hash: u64,
    asked: u64,
}

/// Leave to store a chunk of a stretch; see [`Cache::next_chunk`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetch {
    pub chunk: Chunk,
    asked: u64,
}

/// The read-ahead of a cache.
#[derive(Debug)]
struct Ahead {
    recogniser: Mutex<Recogniser>,
    /// The server of the present link knows the commands.
    is_served: AtomicBool,
    changed: Condvar,
    notify: Notify,
    /// How often reads that wait were woken.
    looks: AtomicU64,
    /// First uses of fetched values, and their bytes that are not in the credit yet.
    uses: AtomicU64,
    used_bytes: AtomicU64,
    /// The number of uses at which the next stretch is due; `i64::MAX` for none.
    due_at: AtomicI64,
    /// The number of uses when the last one was due, or its stretch began.
    due_before: AtomicI64,
    /// A chunk may be asked for now.
    is_wanted: AtomicBool,
    /// Answers in a row without a place.
    without_place: AtomicU32,
    values: AtomicU64,
    /// Bytes that the cache has stored.
    stored: AtomicU64,
    /// Hits are noted.
    is_looking: AtomicBool,
    /// So many gets that miss are plain.
    plain_left: AtomicU32,
}

/// After so many answers without a place, only one of [`PLACE_SHARE`] reads asks for places.
const WITHOUT_PLACE: u32 = 64;
const PLACE_SHARE: u32 = 16;

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
    /// Stretches that were fetched by [read-ahead](crate::Options::read_ahead).
    pub stretches: u64,
    /// Values that they have brought, and those of them that were read.
    pub values_ahead: u64,
    /// See `values_ahead`.
    pub values_ahead_used: u64,
    /// Times that a read had to be sent to the server, or a stretch was asked for. The parts of a
    /// stretch are asked for before the ones before them have arrived.
    pub round_trips: u64,
    /// Whether the [index](crate::Options::index) is there: then reads of keys that do not exist
    /// need no round trip. They count as hits.
    pub index_is_whole: bool,
    /// Keys of the index, with those that were written since it was loaded.
    pub index_keys: u64,
    /// Bytes of memory that the index uses; at most [`Options::index`](crate::Options::index).
    pub index_bytes: u64,
    /// Reads that it has answered: there was no such key.
    pub index_answers: u64,
    /// Times that it was loaded, and how long the last time took.
    pub index_loads: u64,
    /// See `index_loads`.
    pub index_load_time: Duration,
}

#[derive(Debug)]
pub(crate) struct Cache {
    shards: Box<[Mutex<Shard>]>,
    /// Counts what was forgotten.
    clock: AtomicU64,
    ahead: Option<Ahead>,
    index: Option<Index>,
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
    /// An empty cache without a link, of at most `bytes`, with stretches of at most
    /// `stretch_bytes`; 0 is no read-ahead. There is no index.
    pub fn new(bytes: usize, staleness_max: Duration, stretch_bytes: usize) -> Cache {
        let shards = (bytes / SHARD_BYTES_MIN).clamp(1, SHARDS_MAX);
        let shard = || Shard {
            store: Store::new(bytes / shards),
            generations: Box::new([0; GENERATIONS]),
            cleared: 0,
        };
        let ahead = (stretch_bytes > 0).then(|| Ahead {
            recogniser: Mutex::new(Recogniser::new(stretch_bytes, bytes)),
            is_served: AtomicBool::new(false),
            changed: Condvar::new(),
            notify: Notify::new(),
            looks: AtomicU64::new(0),
            uses: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            due_at: AtomicI64::new(i64::MAX),
            due_before: AtomicI64::new(0),
            is_wanted: AtomicBool::new(false),
            without_place: AtomicU32::new(0),
            values: AtomicU64::new(0),
            stored: AtomicU64::new(0),
            is_looking: AtomicBool::new(false),
            plain_left: AtomicU32::new(0),
        });
        Cache {
            clock: AtomicU64::new(0),
            ahead,
            index: None,
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

    /// The cache that options describe, without a link; `None`: they want none.
    pub fn of(options: &Options) -> Option<Cache> {
        if options.cache_bytes == 0 {
            return None;
        }
        let mut cache = Cache::new(options.cache_bytes, options.staleness_max, options.read_ahead);
        cache.index = (options.index_bytes > 0).then(|| Index::new(options.index_bytes));
        Some(cache)
    }

    /// The same with an index that a simulation can repeat, whose pages have so many keys.
    #[cfg(feature = "testing")]
    pub fn simulated(options: &Options, page_keys: usize) -> Option<Cache> {
        let mut cache = Cache::of(options)?;
        cache.index =
            (options.index_bytes > 0).then(|| Index::simulated(options.index_bytes, page_keys));
        Some(cache)
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

    /// The present time of the cache's clock: what is forgotten from now on is later.
    fn stamp(&self) -> u64 {
        self.clock.load(Ordering::SeqCst)
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Looks up a key.
    pub fn get(&self, key: &[u8], now: Instant) -> Lookup {
        let found = self.look(key, now);
        let counter = match found {
            Lookup::Hit(_) => &self.hits,
            Lookup::Miss(_) => &self.misses,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        found
    }

    /// Looks up a key again that was missed, after waiting for a stretch.
    fn get_again(&self, key: &[u8], now: Instant) -> Lookup {
        let found = self.look(key, now);
        if let Lookup::Hit(_) = found {
            self.misses.fetch_sub(1, Ordering::Relaxed);
            self.hits.fetch_add(1, Ordering::Relaxed);
        }
        found
    }

    fn look(&self, key: &[u8], now: Instant) -> Lookup {
        let hash = hash(key);
        let mut shard = self.shard(hash);
        // Under the lock: `close` ends the lease first and then empties the shards.
        if self.is_serving(now)
            && let Some(Found { value, is_first, age }) = shard.store.read(tag_of(hash), key)
        {
            drop(shard);
            if let Some(ahead) = &self.ahead {
                if is_first {
                    ahead.used(value.as_ref().map_or(0, Vec::len));
                }
                if ahead.is_looking.load(Ordering::Relaxed) {
                    ahead.change(|recogniser| recogniser.hit(age));
                }
            }
            return Lookup::Hit(value);
        }
        drop(shard);
        if let Some(index) = &self.index
            && (self.is_serving(now) || is(Mutant::TheIndexHasNoLease))
            && index.lacks(key)
        {
            return Lookup::Hit(None);
        }
        Lookup::Miss(Ticket { hash, asked: self.stamp() })
    }

    /// Stores a reply of the link, if its ticket is still good.
    pub fn fill(&self, ticket: Ticket, key: &[u8], value: Option<&[u8]>) {
        let mut shard = self.shard(ticket.hash);
        if shard.is_good(ticket.hash, ticket.asked) {
            let before = shard.store.stored();
            shard.store.insert(tag_of(ticket.hash), key, value);
            if let Some(ahead) = &self.ahead {
                ahead.stored.fetch_add(shard.store.stored() - before, Ordering::Relaxed);
            }
        }
    }

    /// Forgets a key, which was written.
    pub fn forget(&self, key: &[u8]) {
        let hash = hash(key);
        let mut shard = self.shard(hash);
        let now = self.tick();
        shard.generations[hash as usize % GENERATIONS] = now;
        shard.store.remove(tag_of(hash), key);
        drop(shard);
        if let Some(index) = &self.index {
            index.add(key);
        }
    }

    /// Forgets everything.
    pub fn clear(&self) {
        self.clear_values();
        if let Some(index) = &self.index {
            index.clear();
        }
    }

    fn clear_values(&self) {
        self.clears.fetch_add(1, Ordering::Relaxed);
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.cleared = self.tick();
            shard.store.clear();
        }
        if let Some(ahead) = &self.ahead {
            ahead.recogniser().forget_fetched();
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
        self.serve_index(false);
        match is(Mutant::TheIndexOutlivesTheLink) {
            true => self.clear_values(),
            false => self.clear(),
        }
        self.serve_ahead(false);
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
        stats.round_trips = stats.misses;
        if let Some(ahead) = &self.ahead {
            stats.stretches = ahead.recogniser().stretches;
            stats.values_ahead = ahead.values.load(Ordering::Relaxed);
            stats.values_ahead_used = ahead.uses.load(Ordering::Relaxed);
            stats.round_trips += stats.stretches;
        }
        if let Some(index) = self.index.as_ref().map(Index::stats) {
            stats.index_is_whole = index.is_whole;
            stats.index_keys = index.keys;
            stats.index_bytes = index.bytes;
            stats.index_answers = index.answers;
            stats.index_loads = index.loads;
            stats.index_load_time = index.load_time;
        }
        stats
    }
}

/// The index.
impl Cache {
    /// The link that was opened is told of every write, and its server knows the command; or not.
    pub fn serve_index(&self, is_served: bool) {
        if let Some(index) = &self.index {
            index.serve(is_served);
        }
    }

    /// The next page of the index that is to be asked for on the link now.
    pub fn next_page(&self, now: Instant) -> Option<Page> {
        self.index.as_ref()?.next_page(now)
    }

    /// A page of the index has arrived on the link: the reply to `MR.INDEX`.
    pub fn fill_page(&self, page: &Page, reply: &Reply) {
        if let Some(index) = &self.index {
            index.arrived(page, reply);
        }
    }
}

/// A read waits for a stretch as long as something of it arrives within this time. To ask would not
/// be faster: the answer comes after what was asked for before.
const LOOK: Duration = Duration::from_secs(1);
/// All waits of a read take at most this part of the timeout, so that there is time left to ask.
pub(crate) const WAIT_PART: u32 = 4;
/// It waits so long for what another read finds, which may have given up.
const LOOK_ASKING: Duration = Duration::from_millis(100);

/// How long a read waits before it takes itself for stuck.
fn look_time(recogniser: &Recogniser) -> Duration {
    if recogniser.is_fetching() { LOOK } else { LOOK_ASKING }
}

impl Ahead {
    fn recogniser(&self) -> MutexGuard<'_, Recogniser> {
        let mut recogniser = self.recogniser.lock().unwrap_or_else(PoisonError::into_inner);
        match self.used_bytes.swap(0, Ordering::Relaxed) {
            0 => {}
            bytes => recogniser.used(bytes),
        }
        recogniser.stored(self.stored.load(Ordering::Relaxed));
        recogniser
    }

    /// Does something that may change its mood.
    fn change<T>(&self, act: impl FnOnce(&mut Recogniser) -> T) -> T {
        let mut recogniser = self.recogniser();
        let before = recogniser.mood();
        let done = act(&mut recogniser);
        let mood = recogniser.mood();
        if mood != before {
            self.is_looking.store(mood == Mood::Looking, Ordering::Relaxed);
            let plain = if mood == Mood::Scattered { recogniser.pause() } else { 0 };
            self.plain_left.store(plain, Ordering::Relaxed);
        }
        done
    }

    fn used(&self, bytes: usize) {
        self.used_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let uses = self.uses.fetch_add(1, Ordering::Relaxed) as i64 + 1;
        let due = self.due_at.load(Ordering::Relaxed);
        if uses >= due && self.due_at.swap(i64::MAX, Ordering::Relaxed) != i64::MAX {
            self.due_before.store(due, Ordering::Relaxed);
            self.recogniser().due();
            self.is_wanted.store(true, Ordering::Release);
        }
    }

    /// Wakes the reads that wait.
    fn look(&self) {
        // Under the lock: a thread that has not seen it is not asleep yet.
        let recogniser = self.recogniser();
        self.looks.fetch_add(1, Ordering::Release);
        drop(recogniser);
        self.changed.notify_all();
        self.notify.notify_waiters();
    }
}

/// Read-ahead.
impl Cache {
    /// The server of the link that was opened knows the commands, or not.
    pub fn serve_ahead(&self, is_served: bool) {
        let Some(ahead) = &self.ahead else { return };
        ahead.change(|recogniser| {
            ahead.is_served.store(is_served, Ordering::Release);
            ahead.is_wanted.store(false, Ordering::Release);
            ahead.due_at.store(i64::MAX, Ordering::Relaxed);
            recogniser.reset();
        });
        // Its mood may be the same as before.
        ahead.is_looking.store(is_served, Ordering::Relaxed);
        ahead.plain_left.store(0, Ordering::Relaxed);
        ahead.look();
    }

    /// What a read does that was not answered.
    pub fn turn(&self) -> Turn {
        let Some(ahead) = self.ahead.as_ref().filter(|it| it.is_served.load(Ordering::Acquire))
        else {
            return Turn::Ask;
        };
        let without = &ahead.without_place;
        if without.load(Ordering::Relaxed) >= WITHOUT_PLACE
            && !without.fetch_add(1, Ordering::Relaxed).is_multiple_of(PLACE_SHARE)
        {
            return Turn::Ask;
        }
        let one_less = |left: u32| left.checked_sub(1);
        let plain = &ahead.plain_left;
        match plain.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less) {
            Ok(1) => ahead.change(Recogniser::look_again),
            Ok(_) => return Turn::Ask,
            Err(_) => {}
        }
        ahead.recogniser().turn()
    }

    /// Waits, as a thread, as long as a stretch is on its way and has not brought the key.
    pub fn wait_for(&self, stretch: u64, key: &[u8], deadline: Instant) -> Option<Option<Vec<u8>>> {
        let ahead = self.ahead.as_ref()?;
        let mut recogniser = ahead.recogniser();
        let mut is_stuck = false;
        let found = loop {
            let is_coming = recogniser.is_coming(stretch);
            let looks = ahead.looks.load(Ordering::Acquire);
            drop(recogniser);
            let now = Instant::now();
            match self.get_again(key, now) {
                Lookup::Hit(value) => break Some(value),
                Lookup::Miss(_) if !is_coming || is_stuck || now >= deadline => break None,
                Lookup::Miss(_) => {}
            }
            recogniser = ahead.recogniser();
            if looks == ahead.looks.load(Ordering::Acquire) {
                let look = look_time(&recogniser);
                let left = deadline.saturating_duration_since(now);
                let waited = ahead.changed.wait_timeout(recogniser, look.min(left));
                let (again, waited) = waited.unwrap_or_else(PoisonError::into_inner);
                (recogniser, is_stuck) = (again, waited.timed_out() && look <= left);
            }
        };
        ahead.recogniser().waited(found.is_some(), is_stuck);
        found
    }

    /// The same as a task.
    pub async fn wait_for_as_task(
        &self,
        stretch: u64,
        key: &[u8],
        deadline: Instant,
    ) -> Option<Option<Vec<u8>>> {
        let ahead = self.ahead.as_ref()?;
        let mut is_stuck = false;
        let found = loop {
            // It is told of what changes from now on.
            let changed = ahead.notify.notified();
            let (is_coming, look) = {
                let recogniser = ahead.recogniser();
                (recogniser.is_coming(stretch), look_time(&recogniser))
            };
            let now = Instant::now();
            match self.get_again(key, now) {
                Lookup::Hit(value) => break Some(value),
                Lookup::Miss(_) if !is_coming || is_stuck || now >= deadline => break None,
                Lookup::Miss(_) => {}
            }
            let left = deadline.saturating_duration_since(now);
            let has_waited = tokio::time::timeout(look.min(left), changed).await.is_err();
            is_stuck = has_waited && look <= left;
        };
        ahead.recogniser().waited(found.is_some(), is_stuck);
        found
    }

    /// A read of a place was answered, or has failed.
    pub fn answered(&self, found: Option<(Option<Place>, usize)>) {
        let Some(ahead) = &self.ahead else { return };
        match found {
            Some((None, _)) => {
                ahead.without_place.fetch_add(1, Ordering::Relaxed);
            }
            Some((Some(_), _)) => ahead.without_place.store(0, Ordering::Relaxed),
            None => {}
        }
        let found = found.and_then(|(place, bytes)| Some((place?, bytes)));
        let has_begun = ahead.change(|recogniser| {
            let was_fetching = recogniser.is_fetching();
            recogniser.answered(found);
            recogniser.is_fetching() && !was_fetching
        });
        if has_begun {
            ahead.due_before.store(ahead.uses.load(Ordering::Relaxed) as i64, Ordering::Relaxed);
        }
        ahead.is_wanted.store(true, Ordering::Release);
        // Reads that wait whether this one begins a stretch.
        ahead.look();
    }

    /// Whether there may be a chunk to ask for.
    #[inline]
    pub fn wants_chunk(&self) -> bool {
        self.ahead.as_ref().is_some_and(|ahead| ahead.is_wanted.load(Ordering::Acquire))
    }

    /// The next chunk that is to be asked for on the link now.
    pub fn next_chunk(&self) -> Option<Fetch> {
        let ahead = self.ahead.as_ref().filter(|_| self.wants_chunk())?;
        // Before the request is sent: a write that is forgotten later may be newer than the reply.
        let asked = self.stamp();
        let mut recogniser = ahead.recogniser();
        match recogniser.next() {
            Some(chunk) => Some(Fetch { chunk, asked }),
            None => {
                ahead.is_wanted.store(false, Ordering::Release);
                None
            }
        }
    }

    /// A chunk has arrived on the link: the reply to `MR.STRETCH`. Stores what is still good.
    pub fn fill_chunk(&self, fetch: Fetch, reply: &Reply) {
        let Some(ahead) = &self.ahead else { return };
        let Reply::Array(words) = reply else {
            // The server cannot serve it now. Reads go on without.
            ahead.change(Recogniser::refused);
            return ahead.look();
        };
        let (mut records, mut stored) = (0, 0);
        for frame in words.iter().skip(1).filter_map(Reply::as_bytes) {
            let mut rest = frame;
            while let Some((key, value, after)) = record(rest) {
                let hash = hash(key);
                let mut shard = self.shard(hash);
                if shard.is_good(hash, fetch.asked) {
                    let before = shard.store.stored();
                    shard.store.insert_ahead(tag_of(hash), key, value);
                    stored += shard.store.stored() - before;
                }
                records += 1;
                rest = after;
            }
        }
        ahead.values.fetch_add(records as u64, Ordering::Relaxed);
        ahead.stored.fetch_add(stored, Ordering::Relaxed);
        let after = match words.as_slice() {
            [Reply::Integer(1..), ..] => After::More,
            [_, Reply::Integer(file @ 1..), ..] => After::File(*file as u64),
            _ => After::Nothing,
        };
        let mut recogniser = ahead.recogniser();
        let Arrival { look, next_after } = recogniser.arrived(fetch.chunk, records, after);
        drop(recogniser);
        if let Some(after) = next_after {
            let before = ahead.due_before.load(Ordering::Relaxed);
            ahead.due_at.store(before + after, Ordering::Relaxed);
        }
        ahead.is_wanted.store(true, Ordering::Release);
        if look {
            ahead.look();
        }
    }
}

/// The first record of a frame: its key, its value, and what follows.
fn record(frame: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (header, rest) = frame.split_first_chunk::<16>()?;
    let [a, b, c, d, e, f, g, h, ..] = *header;
    let (key_len, value_len) =
        (u32::from_le_bytes([a, b, c, d]) as usize, u32::from_le_bytes([e, f, g, h]) as usize);
    let (key, rest) = rest.split_at_checked(key_len)?;
    let (value, rest) = rest.split_at_checked(value_len)?;
    Some((key, value, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn open(staleness_max: Duration) -> Cache {
        let cache = Cache::new(1 << 20, staleness_max, 0);
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

    fn frame(entries: &[(&[u8], &[u8])]) -> Vec<u8> {
        let mut frame = Vec::new();
        for (key, value) in entries {
            frame.extend((key.len() as u32).to_le_bytes());
            frame.extend((value.len() as u32).to_le_bytes());
            frame.extend(77_u64.to_le_bytes());
            frame.extend_from_slice(key);
            frame.extend_from_slice(value);
        }
        frame
    }

    fn reading_ahead() -> Cache {
        let cache = Cache::new(64 << 20, LONG, 1 << 20);
        cache.open(Instant::now());
        cache.serve_ahead(true);
        for n in 0..2 {
            cache.answered(Some((Some(Place { file: 5, offset: n * 4096 }), 4096)));
        }
        cache
    }

    #[test]
    fn a_stretch_is_stored_but_for_what_was_forgotten_since_it_was_asked_for() {
        let cache = reading_ahead();
        let fetch = cache.next_chunk().unwrap();
        assert_eq!((fetch.chunk.file, fetch.chunk.from), (5, 0));
        cache.fill(miss(&cache, b"cached"), b"cached", Some(b"1"));
        // This client has written one key; of another one an invalidation has come.
        cache.forget(b"written");
        cache.pushed(&invalidate(&["told"]));
        let entries: [(&[u8], &[u8]); 4] =
            [(b"written", b"old"), (b"fresh", b"2"), (b"told", b"old"), (b"cached", b"1")];
        let words = [Reply::Integer(262_144), Reply::Bulk(frame(&entries))];
        cache.fill_chunk(fetch, &Reply::Array(words.to_vec()));
        assert_eq!(hit(&cache, b"fresh"), Some(b"2".to_vec()));
        assert_eq!(hit(&cache, b"cached"), Some(b"1".to_vec()));
        miss(&cache, b"written");
        miss(&cache, b"told");
        let stats = cache.stats();
        assert_eq!((stats.values_ahead, stats.values_ahead_used, stats.stretches), (4, 1, 1));
    }

    #[test]
    fn a_stretch_that_was_asked_for_before_everything_was_dropped_is_not_stored() {
        for close in [false, true] {
            let cache = reading_ahead();
            let fetch = cache.next_chunk().unwrap();
            match close {
                true => cache.close(),
                false => cache.clear(),
            }
            cache.open(Instant::now());
            let words = vec![Reply::Integer(0), Reply::Bulk(frame(&[(b"k", b"old")]))];
            cache.fill_chunk(fetch, &Reply::Array(words));
            miss(&cache, b"k");
        }
    }

    #[test]
    fn replies_that_are_no_stretch_end_the_read_ahead_or_bring_nothing() {
        let cache = reading_ahead();
        let fetch = cache.next_chunk().unwrap();
        let mut torn = frame(&[(b"a", b"1"), (b"b", b"2")]);
        torn.truncate(torn.len() - 1);
        let lying = [u32::MAX.to_le_bytes(), u32::MAX.to_le_bytes(), [0; 4], [0; 4]].concat();
        let words = vec![Reply::Null, Reply::Bulk(torn), Reply::Bulk(lying), Reply::Integer(3)];
        cache.fill_chunk(fetch, &Reply::Array(words));
        assert_eq!(hit(&cache, b"a"), Some(b"1".to_vec()));
        miss(&cache, b"b");
        assert_eq!(cache.turn(), Turn::AskPlace);
        let fetch = Fetch { chunk: fetch.chunk, asked: fetch.asked };
        cache.fill_chunk(fetch, &Reply::Error(b"ERR unknown command".to_vec()));
        assert!(cache.next_chunk().is_none());
        // Only what plain reads earn is spent from now on.
        cache.answered(Some((Some(Place { file: 5, offset: 1 << 20 }), 4096)));
        assert!(cache.next_chunk().is_none());
    }

    #[test]
    fn a_thread_that_waits_for_a_stretch_finds_its_key_or_stops_waiting() {
        let cache = reading_ahead();
        for n in 0..10 {
            cache.answered(Some((Some(Place { file: 5, offset: n * 4096 }), 4096)));
        }
        let fetch = cache.next_chunk().unwrap();
        let Turn::Wait(stretch) = cache.turn() else { panic!("it is on its way") };
        miss(&cache, b"k");
        std::thread::scope(|scope| {
            let far = Instant::now() + LONG;
            let cache = &cache;
            let found = scope.spawn(move || cache.wait_for(stretch, b"k", far));
            let lost = scope.spawn(move || cache.wait_for(stretch, b"other", far));
            let words = vec![Reply::Integer(0), Reply::Bulk(frame(&[(b"k", b"1")]))];
            cache.fill_chunk(fetch, &Reply::Array(words));
            assert_eq!(found.join().unwrap(), Some(Some(b"1".to_vec())));
            assert_eq!(lost.join().unwrap(), None);
        });
        assert_eq!((cache.stats().hits, cache.stats().misses), (1, 0));
    }

    #[test]
    fn memory_stays_within_the_budget() {
        for bytes in [BYTES_MIN, 300_000, 10 << 20, 100 << 20] {
            let cache = Cache::new(bytes, LONG, 0);
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

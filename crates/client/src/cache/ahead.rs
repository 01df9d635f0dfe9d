//! Read-ahead in the order of the writes: decides which parts of the server's blob files to fetch.
//! No I/O, no clock.
//!
//! A node keeps long values in blob files, in the order in which they were written. A read that the
//! cache does not answer asks for the value and its place. If the reads are *local*, a *stretch* of
//! the file is fetched: an aligned region around the place, in chunks of which a [`WINDOW`] is on
//! the way at a time. Since regions are aligned, it makes no difference whether the program reads
//! forward, backward, or in no order within a region. Two regions that follow one another give a
//! direction, and the next one is fetched when half of the last one has been used. Regions that
//! adjoin others grow with the credit, up to [`GROWTH`] times. A region goes on in the file that
//! was written after its own, if that ends.
//!
//! **Mood**: reads are local if they stay within a part of the data that the cache can hold.
//!
//! 1. *Looking*: where each read is, is noted: a miss by its place, a hit by the age of what it
//!    found, since what came together has the same age. Both are counted in parts of a [`PARTS`]th
//!    of the cache. The reads are local if they are in few parts: of up to [`SAMPLES_SOON`] reads,
//!    in at most half as many, or of [`SAMPLES`], in a third. Reads that stay within a third of the
//!    cache are found by this; those at random in a quarter more than the cache holds are in two
//!    fifths as many parts as [`SAMPLES`].
//! 2. *Following*: the reads were local: the places of the misses are fetched, and so is the next
//!    miss after an eighth of a stretch was used. Another miss begins to look again.
//! 3. *Scattered*: the reads were not local. Gets are plain, without places, and what is not asked
//!    for yet is not fetched. After a [pause](Recogniser::pause), it looks again.
//!
//! So it costs about one stretch to begin to read at random, and [`SAMPLES`] reads with their
//! places. Later it costs these again for each [`PAUSE_MAX`] misses.
//!
//! **Credit** bounds what is fetched for reads that are local, but use little of it. Fetching takes
//! its bytes from the credit; the first use of a fetched value returns them [`GAIN`] times, and a
//! plain read returns a small part of its own.
//!
//! **Patience**: while regions are on their way, a read whose place is not known may wait for them
//! instead of asking. It does if that has helped lately: each answer tells whether its value
//! would have come with them. Then only so many reads ask at a time as it takes to know what to
//! fetch, and the others wait for that.

use std::collections::{BTreeMap, HashMap, VecDeque};

/// Bytes of a blob file that are asked for at once.
pub(crate) const CHUNK_BYTES: u64 = 256 << 10;
/// Chunks on their way.
const WINDOW: u32 = 8;
/// Regions that wait to be fetched.
const QUEUE_MAX: usize = 16;
/// Chunks that arrive between two looks of the reads that wait.
const CHUNKS_BETWEEN_LOOKS: u32 = 4;
/// The first use of a byte returns so many to the credit.
const GAIN: u64 = 3;
/// A plain read returns its bytes divided by this, up to the first credit.
const PLAIN_SHARE: u64 = 64;
/// The first credit, as a number of stretches.
const FIRST_STRETCHES: u64 = 4;
/// Regions grow up to so many times; a power of two.
const GROWTH: u64 = 8;
/// A region that has grown is at most this part of the credit.
const CREDIT_REGIONS: u64 = 4;
/// How often a read waits before it asks: for what is coming, and for what another read finds.
pub(crate) const WAITS_MAX: u32 = 8;
/// Reads wait while their patience is above the first; it is at most the second.
const PATIENCE: i32 = 8;
const PATIENCE_MAX: i32 = 64;
/// Reads that are looked at, at most.
const SAMPLES: usize = 96;
/// Fewer are enough if they are in half as many parts.
const SAMPLES_SOON: usize = 40;
/// Reads that are looked at, at least: the first time, and later. After scattered reads it is the
/// most.
const SAMPLES_FIRST: usize = 2;
const SAMPLES_MIN: usize = 8;
/// Parts of the cache in which reads are counted.
pub(super) const PARTS: u64 = 32;
/// Reads that miss, after which scattered reads are looked at again: twice as many each time.
const PAUSE_MIN: u32 = 64;
const PAUSE_MAX: u32 = 4096;
/// Uses of this part of a stretch let the next miss fetch.
const TRUST_SHARE: u64 = 8;
/// What was fetched is in the cache until this part of it has been stored, in sixteenths.
const LIFETIME: u64 = 14;
/// Files whose lengths are known.
const FILES_MAX: usize = 1024;

/// Where a value is in the blob files of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub file: u64,
    pub offset: u64,
}

impl Place {
    /// The number of its chunk.
    fn chunk(self) -> (u64, u64) {
        (self.file, self.offset / CHUNK_BYTES)
    }
}

/// A part of a file to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    stretch: u64,
    pub file: u64,
    pub from: u64,
}

/// What follows a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// More of its file.
    More,
    /// This file.
    File(u64),
    Nothing,
}

/// A part of a file to fetch, or of files that follow one another.
#[derive(Clone, Copy, Debug)]
struct Region {
    number: u64,
    from: Place,
    end: Place,
    /// It was not missed yet.
    early: bool,
}

impl Region {
    fn has(&self, place: Place) -> bool {
        (self.from..self.end).contains(&place)
    }
}

/// The stretch that is being fetched.
#[derive(Debug)]
struct Stretch {
    region: Region,
    /// Where the next chunk begins, in the file in which the region ends.
    next: Place,
    on_the_way: u32,
    arrived: u32,
    records: u64,
}

impl Stretch {
    /// Bytes that are left to ask for.
    fn left(&self) -> u64 {
        self.region.end.offset.saturating_sub(self.next.offset)
    }
}

/// What a read does that the cache does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It asks for the value.
    Ask,
    /// It asks for the value and its place.
    AskPlace,
    /// It looks again when something has arrived, as long as regions up to this number are coming.
    Wait(u64),
}

/// What an arrival means for others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrival {
    /// Reads that wait should look again.
    pub look: bool,
    /// The stretch has ended: so many uses from now on, or ago, the next one is due.
    pub next_after: Option<i64>,
}

/// What is known of the order of the reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mood {
    Looking,
    Following,
    Scattered,
}

/// Where a read was.
#[derive(Clone, Copy, Debug)]
enum Sample {
    Miss(Place),
    /// The number of a part of the cache.
    Hit(u64),
}

/// Recognises the order of reads.
#[derive(Debug)]
pub(super) struct Recogniser {
    /// Bytes of a stretch at first; 0 switches it off.
    stretch_bytes: u64,
    /// Bytes of a stretch at most.
    stretch_bytes_max: u64,
    cache_bytes: u64,
    credit: u64,
    credit_max: u64,
    patience: i32,
    mood: Mood,
    /// Plain gets that miss before the next look.
    pause: u32,
    /// Regions are coming that were found by looking.
    has_looked: bool,
    samples: Vec<Sample>,
    samples_min: usize,
    /// Bytes of fetched values that were used since a miss was trusted.
    run: u64,
    /// Lengths of the files, as far as they were seen.
    files: BTreeMap<u64, u64>,
    queue: VecDeque<Region>,
    stretch: Option<Stretch>,
    /// The last stretch that has ended.
    last: Option<Region>,
    /// The number of the next region.
    number: u64,
    /// Reads that ask, while others wait whether the answers begin a stretch.
    asking: usize,
    /// Chunks that were fetched, the oldest first, and what the cache had stored then.
    fetched: VecDeque<((u64, u64), u64)>,
    is_fetched: HashMap<(u64, u64), u64>,
    /// Bytes that the cache has stored.
    stored: u64,
    /// Where the next stretch is, by the direction of the last two.
    ahead: Option<Place>,
    pub stretches: u64,
}

impl Recogniser {
    /// For stretches of at most `stretch_bytes`, and a cache of `cache_bytes`.
    pub fn new(stretch_bytes: usize, cache_bytes: usize) -> Recogniser {
        let (stretch, cache_bytes) = (stretch_bytes as u64, cache_bytes as u64);
        let stretch_bytes = stretch.min(cache_bytes / 8) / CHUNK_BYTES * CHUNK_BYTES;
        let mut stretch_bytes_max = stretch_bytes;
        while stretch_bytes > 0
            && stretch_bytes_max * 2 <= (stretch_bytes * GROWTH).min(cache_bytes / 8)
        {
            stretch_bytes_max *= 2;
        }
        let mut recogniser = Recogniser {
            stretch_bytes,
            stretch_bytes_max,
            cache_bytes,
            credit: 0,
            credit_max: cache_bytes / 8 * 7,
            patience: 0,
            mood: Mood::Looking,
            pause: PAUSE_MIN / 2,
            has_looked: false,
            samples: Vec::with_capacity(SAMPLES),
            samples_min: SAMPLES_FIRST,
            run: 0,
            files: BTreeMap::new(),
            queue: VecDeque::new(),
            stretch: None,
            last: None,
            number: 0,
            asking: 0,
            fetched: VecDeque::new(),
            is_fetched: HashMap::new(),
            stored: 0,
            ahead: None,
            stretches: 0,
        };
        recogniser.credit = recogniser.first_credit();
        recogniser
    }

    fn first_credit(&self) -> u64 {
        (FIRST_STRETCHES * self.stretch_bytes).min(self.credit_max)
    }

    pub fn mood(&self) -> Mood {
        self.mood
    }

    /// How many reads that miss are plain before the next look.
    pub fn pause(&self) -> u32 {
        self.pause
    }

    /// The cache has stored so many bytes since it was made.
    pub fn stored(&mut self, bytes: u64) {
        self.stored = bytes;
    }

    /// Fetched values of these bytes were used for the first time.
    pub fn used(&mut self, bytes: u64) {
        self.run = self.run.saturating_add(bytes);
        self.add_credit(bytes.saturating_mul(GAIN));
    }

    fn add_credit(&mut self, bytes: u64) {
        self.credit = self.credit.saturating_add(bytes).min(self.credit_max);
    }

    /// What a read does that was not answered.
    pub fn turn(&mut self) -> Turn {
        let askers = match self.mood {
            Mood::Scattered => return Turn::Ask,
            _ if self.patience <= PATIENCE => return Turn::AskPlace,
            Mood::Following if self.stretch.is_some() => return Turn::Wait(self.number - 1),
            Mood::Following => 1,
            Mood::Looking => self.samples_min.saturating_sub(self.samples.len()).max(1),
        };
        if self.asking >= askers {
            return Turn::Wait(self.number);
        }
        self.asking += 1;
        Turn::AskPlace
    }

    /// Whether a read that waits for a region goes on waiting.
    pub fn is_coming(&self, number: u64) -> bool {
        self.regions().any(|region| region.number <= number)
            || self.asking > 0 && self.number == number
    }

    /// Whether something is on its way, rather than that a read asks.
    pub fn is_fetching(&self) -> bool {
        self.stretch.is_some()
    }

    /// A read has waited: whether for its value, and whether nothing has happened for too long.
    pub fn waited(&mut self, found: bool, is_stuck: bool) {
        let change = if found { 2 } else { -1 };
        self.patience = (self.patience + change).clamp(0, PATIENCE_MAX);
        if is_stuck {
            // Perhaps the read that asks has given up.
            self.asking = 0;
        }
    }

    /// A read was answered: with a value of some bytes that is at a place, or without, or not at
    /// all.
    pub fn answered(&mut self, found: Option<(Place, usize)>) {
        self.asking = self.asking.saturating_sub(1);
        let Some((place, bytes)) = found else { return };
        let bytes = bytes as u64;
        self.note_end(place.file, place.offset.saturating_add(bytes));
        let first = self.first_credit();
        if self.credit < first {
            self.credit = (self.credit + bytes / PLAIN_SHARE).min(first);
        }
        let is_coming = self.comes(place);
        let change = if is_coming { 2 } else { -1 };
        self.patience = (self.patience + change).clamp(0, PATIENCE_MAX);
        match self.mood {
            Mood::Scattered => {}
            Mood::Looking => self.note(Sample::Miss(place)),
            Mood::Following if is_coming => {}
            Mood::Following if self.has_looked => self.want(place, true, false),
            Mood::Following if self.run >= self.stretch_bytes / TRUST_SHARE => {
                self.run = 0;
                self.missed(place);
            }
            Mood::Following => {
                self.look_again();
                self.note(Sample::Miss(place));
            }
        }
    }

    /// A read was answered by the cache, from a part of it: of [`PARTS`], counted from what was
    /// stored last.
    pub fn hit(&mut self, part: u64) {
        if self.mood == Mood::Looking {
            self.note(Sample::Hit(part));
        }
    }

    /// Looks at the next reads.
    pub fn look_again(&mut self) {
        self.mood = Mood::Looking;
        self.has_looked = false;
        self.samples.clear();
    }

    fn note(&mut self, sample: Sample) {
        self.samples.push(sample);
        let count = self.samples.len();
        if count < self.samples_min {
            return;
        }
        let parts = self.parts();
        let is_local = match count {
            ..=SAMPLES_SOON => parts * 2 <= count,
            _ => count == SAMPLES && parts * 3 <= count,
        };
        if is_local {
            self.samples_min = SAMPLES_MIN;
            self.mood = Mood::Following;
            self.pause = PAUSE_MIN / 2;
            self.run = 0;
            // The last one is missing for certain.
            let samples = std::mem::take(&mut self.samples);
            for sample in samples.into_iter().rev() {
                if let Sample::Miss(place) = sample
                    && !self.comes(place)
                    && !self.is_cached(place.chunk())
                {
                    self.want(place, true, false);
                }
            }
            self.has_looked = self.stretch.is_some();
        } else if count >= SAMPLES {
            self.scatter();
        }
    }

    /// The number of parts in which the reads were that were noted.
    fn parts(&self) -> usize {
        let part_bytes = (self.cache_bytes / PARTS).max(1);
        // Files adjoin each other in the order of their numbers, about.
        let starts = self.files.iter().scan(0_u64, |at, (file, bytes)| {
            let start = *at;
            *at = at.saturating_add(*bytes);
            Some((*file, start))
        });
        let starts: BTreeMap<u64, u64> = starts.collect();
        let parts = self.samples.iter().map(|sample| match sample {
            Sample::Hit(part) => (true, *part),
            Sample::Miss(place) => {
                let start = starts.get(&place.file).copied().unwrap_or_default();
                (false, start.saturating_add(place.offset) / part_bytes)
            }
        });
        let mut parts: Vec<(bool, u64)> = parts.collect();
        parts.sort_unstable();
        parts.dedup();
        parts.len()
    }

    /// Notes that a file is at least so long.
    fn note_end(&mut self, file: u64, end: u64) {
        let length = self.files.entry(file).or_default();
        *length = end.max(*length);
        if self.files.len() > FILES_MAX {
            self.files.pop_first();
        }
    }

    /// The reads are not local.
    fn scatter(&mut self) {
        self.mood = Mood::Scattered;
        self.samples.clear();
        self.samples_min = SAMPLES;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        self.patience = 0;
        self.ahead = None;
        for Region { from, end, .. } in std::mem::take(&mut self.queue) {
            self.add_credit(end.offset - from.offset);
        }
        if let Some(stretch) = &mut self.stretch {
            let left = stretch.left();
            stretch.next = stretch.region.end;
            self.add_credit(left);
        }
        self.end();
    }

    /// Whether the value at a place is being fetched, or will be.
    fn comes(&self, place: Place) -> bool {
        self.regions().any(|region| region.has(place))
    }

    /// The region that is being fetched, and those that wait.
    fn regions(&self) -> impl Iterator<Item = &Region> {
        self.stretch.iter().map(|stretch| &stretch.region).chain(&self.queue)
    }

    /// Whether a chunk was fetched, and is in the cache still.
    fn is_cached(&self, chunk: (u64, u64)) -> bool {
        let lifetime = self.cache_bytes / 16 * LIFETIME;
        self.is_fetched
            .get(&chunk)
            .is_some_and(|stored| self.stored.saturating_sub(*stored) < lifetime)
    }

    /// A value was not in the cache.
    fn missed(&mut self, place: Place) {
        let chunk = place.chunk();
        if self.is_cached(chunk) {
            // It has come without the value that was asked for. The next miss there fetches it
            // again.
            self.is_fetched.remove(&chunk);
            return;
        }
        self.want(place, false, false);
    }

    /// Queues the region around a place, if there is credit. `grows` allows more than a stretch
    /// also if it does not adjoin others.
    fn want(&mut self, place: Place, grows: bool, early: bool) {
        let size = self.region_bytes(place, grows);
        if size == 0 || self.queue.len() >= QUEUE_MAX {
            return;
        }
        let offset = place.offset / size * size;
        let from = Place { offset, ..place };
        let end = Place { offset: offset.saturating_add(size), ..place };
        self.credit -= size;
        let number = self.number;
        self.number += 1;
        self.queue.push_back(Region { number, from, end, early });
        self.begin();
    }

    /// Bytes of the region around a place.
    fn region_bytes(&self, place: Place, grows: bool) -> u64 {
        let mut bytes = self.stretch_bytes;
        // Smaller ones would cost more requests than they save.
        if bytes == 0 || bytes > self.credit {
            return 0;
        }
        let from = place.offset / bytes * bytes;
        let beside = [from.checked_sub(1), from.checked_add(bytes)];
        let adjoins = || {
            beside.iter().flatten().any(|&offset| {
                let place = Place { file: place.file, offset };
                self.comes(place) || self.is_cached(place.chunk())
            })
        };
        if grows || adjoins() {
            while bytes * 2 <= (self.credit / CREDIT_REGIONS).min(self.stretch_bytes_max) {
                bytes *= 2;
            }
        }
        bytes
    }

    /// Begins the next stretch, without what is cached at its begin.
    fn begin(&mut self) {
        while self.stretch.is_none()
            && let Some(region) = self.queue.pop_front()
        {
            let next = region.from;
            self.stretch = Some(Stretch { region, next, on_the_way: 0, arrived: 0, records: 0 });
            self.skip_cached();
            if let Some(stretch) = &mut self.stretch {
                stretch.region.from = stretch.next;
            }
            self.stretch.take_if(|stretch| stretch.left() == 0);
        }
    }

    /// Leaves out chunks that are in the cache.
    fn skip_cached(&mut self) {
        let Some(stretch) = &self.stretch else { return };
        let (from, end) = (stretch.next, stretch.region.end);
        let mut next = from;
        while next < end && self.is_cached(next.chunk()) {
            next.offset += CHUNK_BYTES;
        }
        self.add_credit(next.offset - from.offset);
        if let Some(stretch) = &mut self.stretch {
            stretch.next = next;
        }
    }

    /// Ends the stretch if all of it has arrived, and begins the next one.
    fn end(&mut self) -> Option<Stretch> {
        self.skip_cached();
        let is_over = |stretch: &mut Stretch| stretch.on_the_way == 0 && stretch.left() == 0;
        let over = self.stretch.take_if(is_over)?;
        self.begin();
        self.has_looked &= self.stretch.is_some();
        Some(over)
    }

    /// The next chunk to ask for, if one may be on its way now.
    pub fn next(&mut self) -> Option<Chunk> {
        self.end();
        let stretch = self.stretch.as_mut()?;
        if stretch.on_the_way >= WINDOW || stretch.left() == 0 {
            return None;
        }
        if stretch.on_the_way + stretch.arrived == 0 {
            self.stretches += 1;
        }
        let place = stretch.next;
        let chunk = Chunk { stretch: stretch.region.number, file: place.file, from: place.offset };
        stretch.next.offset += CHUNK_BYTES;
        stretch.on_the_way += 1;
        // As long as what is stored is new, there are about as many as the cache holds.
        let most = 2 * self.cache_bytes / CHUNK_BYTES;
        while let Some((oldest, stored)) = self.fetched.front().copied()
            && (self.stored.saturating_sub(stored) >= self.cache_bytes
                || self.fetched.len() as u64 > most)
        {
            self.fetched.pop_front();
            // Unless it was fetched again.
            if self.is_fetched.get(&oldest) == Some(&stored) {
                self.is_fetched.remove(&oldest);
            }
        }
        self.fetched.push_back((place.chunk(), self.stored));
        self.is_fetched.insert(place.chunk(), self.stored);
        Some(chunk)
    }

    /// A chunk has arrived with some records.
    pub fn arrived(&mut self, chunk: Chunk, records: usize, after: After) -> Arrival {
        let mut arrival = Arrival::default();
        let Some(stretch) = self.stretch.as_mut().filter(|s| s.region.number == chunk.stretch)
        else {
            return arrival;
        };
        stretch.on_the_way -= 1;
        stretch.arrived += 1;
        stretch.records += records as u64;
        arrival.look = stretch.arrived.is_multiple_of(CHUNKS_BETWEEN_LOOKS);
        // Others beyond the end of the file may be on their way.
        let is_last = chunk.file == stretch.next.file && after != After::More;
        match after {
            After::File(file) if is_last && file > chunk.file && self.mood != Mood::Scattered => {
                let end = chunk.from.saturating_add(CHUNK_BYTES);
                let left = stretch.region.end.offset.saturating_sub(end);
                stretch.next = Place { file, offset: 0 };
                stretch.region.end = Place { file, offset: left };
            }
            _ if is_last => {
                let left = stretch.left();
                stretch.next = stretch.region.end;
                self.add_credit(left);
            }
            _ => {}
        }
        if records == 0 {
            // Perhaps nothing is written there yet.
            self.is_fetched.remove(&(chunk.file, chunk.from / CHUNK_BYTES));
        } else if after == After::More {
            self.note_end(chunk.file, chunk.from.saturating_add(CHUNK_BYTES));
        }
        let Some(Stretch { region, records, .. }) = self.end() else { return arrival };
        arrival.look = true;
        self.ahead = match self.last.replace(region) {
            Some(before) if before.end == region.from && after != After::Nothing => {
                Some(region.end)
            }
            Some(before) if before.from == region.end => self.before(region.from),
            _ => None,
        }
        .filter(|_| self.mood != Mood::Scattered);
        if self.ahead.is_some() {
            // Half of it was used, or of the one before if it came early.
            let records = records as i64;
            arrival.next_after = Some(if region.early { records } else { records / 2 });
        }
        arrival
    }

    /// The place before another, in the file before if that is known.
    fn before(&self, place: Place) -> Option<Place> {
        if let Some(offset) = place.offset.checked_sub(1) {
            return Some(Place { offset, ..place });
        }
        let (&file, end) = self.files.range(..place.file).next_back()?;
        Some(Place { file, offset: end.checked_sub(1)? })
    }

    /// The next stretch in the direction of the last two is due.
    pub fn due(&mut self) {
        let Some(place) = self.ahead.take() else { return };
        if !self.is_cached(place.chunk()) && !self.comes(place) {
            self.want(place, true, true);
        }
    }

    /// The server has refused a chunk: only what plain reads earn is spent from now on.
    pub fn refused(&mut self) {
        self.reset();
        self.credit = 0;
    }

    /// The cache is empty: what was fetched is not there any more.
    pub fn forget_fetched(&mut self) {
        self.fetched.clear();
        self.is_fetched.clear();
    }

    /// The link has ended, and the cache with it.
    pub fn reset(&mut self) {
        self.queue.clear();
        self.forget_fetched();
        self.files.clear();
        (self.stretch, self.last, self.ahead) = (None, None, None);
        self.look_again();
        self.samples_min = SAMPLES_FIRST;
        // Reads that wait stop.
        self.number += 1;
        self.asking = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::collections::{BinaryHeap, HashSet};

    use super::*;

    const MIB: u64 = 1 << 20;
    const VALUE: u64 = 4096;

    /// A program that reads values of one file through a cache of everything, one at a time.
    struct Reader {
        recogniser: Recogniser,
        /// Chunks in the cache, and values of them that were used.
        chunks: HashSet<u64>,
        used: HashSet<u64>,
        uses: i64,
        due: Option<i64>,
        asked: u64,
        plain: u32,
        fetched: u64,
    }

    impl Reader {
        fn new(stretch: u64, cache: u64) -> Reader {
            Reader {
                recogniser: Recogniser::new(stretch as usize, cache as usize),
                chunks: HashSet::new(),
                used: HashSet::new(),
                uses: 0,
                due: None,
                asked: 0,
                plain: 0,
                fetched: 0,
            }
        }

        fn read(&mut self, value: u64) {
            let offset = value * VALUE;
            if self.chunks.contains(&(offset / CHUNK_BYTES)) {
                if self.used.insert(value) {
                    self.recogniser.used(VALUE);
                    self.uses += 1;
                }
                if self.due.is_some_and(|due| self.uses >= due) {
                    self.due = None;
                    self.recogniser.due();
                }
            } else {
                self.asked += 1;
                self.plain += 1;
                if self.recogniser.mood() == Mood::Scattered {
                    if self.plain < self.recogniser.pause() {
                        return;
                    }
                    self.recogniser.look_again();
                }
                self.plain = 0;
                let place = Place { file: 7, offset };
                self.recogniser.answered(Some((place, VALUE as usize)));
            }
            while let Some(chunk) = self.recogniser.next() {
                self.fetched += CHUNK_BYTES;
                self.chunks.insert(chunk.from / CHUNK_BYTES);
                let records = (CHUNK_BYTES / VALUE) as usize;
                if let Some(after) = self.recogniser.arrived(chunk, records, After::More).next_after
                {
                    self.due = Some(self.uses + after);
                }
            }
        }
    }

    fn shuffled(count: u64) -> Vec<u64> {
        // A permutation: the multiplier is odd and the count a power of two.
        (0..count).map(|n| n.wrapping_mul(0x9e37_79b9) % count).collect()
    }

    #[test]
    fn forward_backward_and_shuffled_parts_need_few_requests() {
        let count = 1 << 15;
        let forward: Vec<u64> = (0..count).collect();
        let backward: Vec<u64> = (0..count).rev().collect();
        // Parts of 8 MiB, the last one first, in no order within.
        let part = 8 * MIB / VALUE;
        let parts = (0..count / part).rev();
        let hot: Vec<u64> =
            parts.flat_map(|at| shuffled(part).into_iter().map(move |n| at * part + n)).collect();
        for (name, order) in [("forward", forward), ("backward", backward), ("hot", hot)] {
            let mut reader = Reader::new(10 * MIB, 256 * MIB);
            order.iter().for_each(|value| reader.read(*value));
            let requests = reader.asked + reader.recogniser.stretches;
            assert!(requests * 1000 < count, "{name}: {requests} requests for {count} reads");
            assert!(reader.fetched <= count * VALUE + 64 * MIB, "{name}: {}", reader.fetched);
        }
    }

    /// A race of a program's threads that get what they have written, in time: fetches and answers
    /// share a link, and threads wait.
    struct Race {
        recogniser: Recogniser,
        /// Without read-ahead, all gets are plain.
        reads_ahead: bool,
        cache: Model,
        places: Vec<Place>,
        now_ns: u64,
        link_free_ns: u64,
        events: BinaryHeap<Reverse<(u64, u64, Event)>>,
        /// Threads that wait, for a region, and how often they have.
        waiting: Vec<(usize, u64, u32)>,
        uses: i64,
        due: Option<i64>,
        plain: u32,
        /// Requests, and bytes that were fetched.
        asked: u64,
        fetched: u64,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    enum Event {
        Runs(usize),
        Answered { thread: usize, with_place: bool },
        Arrived { stretch: u64, file: u64, from: u64 },
    }

    /// What the cache holds: the oldest goes first, with a second chance for some that were read
    /// again.
    #[derive(Clone)]
    struct Model {
        bytes: u64,
        /// 0: not cached, 1: fetched, 2: read, 3: read again.
        state: Vec<u8>,
        stamps: Vec<u64>,
        order: VecDeque<usize>,
        stored: u64,
        chances: f64,
    }

    const ENTRY: u64 = VALUE + 30;

    impl Model {
        fn insert(&mut self, value: usize, state: u8) {
            if self.state[value] != 0 {
                return;
            }
            self.append(value, state);
            while self.order.len() as u64 * ENTRY > self.bytes {
                let old = self.order.pop_front().unwrap();
                // As many as a shard keeps of a segment.
                self.chances = (self.chances + 0.25).min(64.0);
                match self.state[old] {
                    // It keeps its stamp.
                    3 if self.chances >= 1.0 => {
                        self.chances -= 1.0;
                        self.order.push_back(old);
                        self.state[old] = 2;
                        self.stored += ENTRY;
                    }
                    _ => self.state[old] = 0,
                }
            }
        }

        fn append(&mut self, value: usize, state: u8) {
            self.order.push_back(value);
            self.state[value] = state;
            self.stamps[value] = self.stored;
            self.stored += ENTRY;
        }
    }

    /// As the node lays them out: files of a 32nd of all, but of 4 to 16 MiB.
    fn places(count: usize) -> Vec<Place> {
        let (mut file, mut offset, mut length, mut all) = (10, 0, 4 * MIB, 0);
        let mut places = Vec::with_capacity(count);
        for _ in 0..count {
            if offset + VALUE + 40 > length {
                (file, offset) = (file + 3, 0);
                length = (all / 32).clamp(4 * MIB, 16 * MIB);
            }
            places.push(Place { file, offset: offset + 40 });
            offset += VALUE + 40;
            all += VALUE + 40;
        }
        places
    }

    fn randoms() -> impl FnMut(usize) -> usize {
        let mut random = 1_u64;
        move |below| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % below
        }
    }

    impl Race {
        fn new(cache_bytes: u64, values: usize) -> Race {
            let cache = Model {
                bytes: cache_bytes,
                state: vec![0; values],
                stamps: vec![0; values],
                order: VecDeque::new(),
                stored: 0,
                chances: 0.0,
            };
            Race {
                recogniser: Recogniser::new(10 << 20, cache_bytes as usize),
                reads_ahead: true,
                cache,
                places: places(values),
                now_ns: 0,
                link_free_ns: 0,
                events: BinaryHeap::new(),
                waiting: Vec::new(),
                uses: 0,
                due: None,
                plain: 0,
                asked: 0,
                fetched: 0,
            }
        }

        fn after(&mut self, ns: u64, event: Event) {
            let seq = self.events.len() as u64 ^ (self.now_ns << 8);
            self.events.push(Reverse((self.now_ns + ns, seq, event)));
        }

        /// A reply comes after those before it; a quarter of a gigabyte a second.
        fn reply(&mut self, bytes: u64, event: Event) {
            let begins = self.link_free_ns.max(self.now_ns + 100_000);
            self.link_free_ns = begins + 10_000 + bytes * 4;
            self.after(self.link_free_ns - self.now_ns, event);
        }

        fn ask(&mut self, thread: usize, with_place: bool) {
            self.asked += 1;
            self.reply(VALUE, Event::Answered { thread, with_place });
        }

        /// Whether a thread found its value, and goes on.
        fn finds(&mut self, thread: usize, value: usize) -> bool {
            let state = &mut self.cache.state[value];
            match *state {
                0 => return false,
                1 => {
                    *state = 2;
                    self.recogniser.used(VALUE);
                    self.uses += 1;
                    if self.due.is_some_and(|due| self.uses >= due) {
                        self.due = None;
                        self.recogniser.due();
                    }
                }
                _ => *state = 3,
            }
            let age = self.cache.stored - self.cache.stamps[value];
            self.recogniser.hit(age * PARTS / self.cache.bytes);
            self.after(2_000, Event::Runs(thread));
            true
        }

        /// A thread misses its value, and has waited some times.
        fn misses(&mut self, thread: usize, waits: u32) {
            match self.turn() {
                Turn::Wait(region) if waits < WAITS_MAX => {
                    self.waiting.push((thread, region, waits + 1));
                }
                Turn::Ask => self.ask(thread, false),
                _ => self.ask(thread, true),
            }
        }

        fn turn(&mut self) -> Turn {
            if !self.reads_ahead {
                return Turn::Ask;
            }
            if self.recogniser.mood() == Mood::Scattered {
                self.plain += 1;
                if self.plain < self.recogniser.pause() {
                    return Turn::Ask;
                }
                self.plain = 0;
                self.recogniser.look_again();
            }
            self.recogniser.turn()
        }

        /// Threads that wait look again.
        fn wake(&mut self, at: &[usize], orders: &[Vec<usize>]) {
            for (thread, region, waits) in std::mem::take(&mut self.waiting) {
                let value = orders[thread][at[thread]];
                if self.finds(thread, value) {
                    self.recogniser.waited(true, false);
                } else if self.recogniser.is_coming(region) {
                    self.waiting.push((thread, region, waits));
                } else {
                    self.recogniser.waited(false, false);
                    self.misses(thread, waits);
                }
            }
        }

        /// Runs a pass, in which each thread gets values in an order. Returns gets for each
        /// request, and seconds.
        fn run(&mut self, orders: &[Vec<usize>]) -> (f64, f64) {
            let began = (self.now_ns, self.asked + self.recogniser.stretches);
            // The next of each thread, of which it does not have the value yet.
            let mut at = vec![0; orders.len()];
            let mut has = vec![true; orders.len()];
            (0..orders.len()).for_each(|thread| self.after(0, Event::Runs(thread)));
            while let Some(Reverse((now, _, event))) = self.events.pop() {
                self.now_ns = now;
                match event {
                    Event::Runs(thread) => {
                        if !std::mem::take(&mut has[thread]) {
                            at[thread] += 1;
                        }
                        if let Some(&value) = orders[thread].get(at[thread])
                            && !self.finds(thread, value)
                        {
                            self.misses(thread, 0);
                        }
                    }
                    Event::Answered { thread, with_place } => {
                        let value = orders[thread][at[thread]];
                        self.cache.insert(value, 2);
                        self.recogniser.stored(self.cache.stored);
                        if with_place {
                            let found = (self.places[value], VALUE as usize);
                            self.recogniser.answered(Some(found));
                            self.wake(&at, orders);
                        }
                        self.after(2_000, Event::Runs(thread));
                    }
                    Event::Arrived { stretch, file, from } => {
                        let begins = |place: &Place| (place.file, place.offset);
                        let first = self.places.partition_point(|p| begins(p) < (file, from));
                        let end = (file, from + CHUNK_BYTES);
                        let end = self.places.partition_point(|p| begins(p) < end);
                        (first..end).for_each(|value| self.cache.insert(value, 1));
                        self.recogniser.stored(self.cache.stored);
                        let after = match self.places.get(end) {
                            Some(next) if next.file == file => After::More,
                            Some(next) => After::File(next.file),
                            None => After::Nothing,
                        };
                        let chunk = Chunk { stretch, file, from };
                        let arrival = self.recogniser.arrived(chunk, end - first, after);
                        if let Some(after) = arrival.next_after {
                            self.due = Some(self.uses + after);
                        }
                        if arrival.look {
                            self.wake(&at, orders);
                        }
                    }
                }
                while let Some(Chunk { stretch, file, from }) = self.recogniser.next() {
                    self.fetched += CHUNK_BYTES;
                    self.reply(CHUNK_BYTES, Event::Arrived { stretch, file, from });
                }
            }
            assert!(self.waiting.is_empty());
            let gets: usize = orders.iter().map(Vec::len).sum();
            let requests = self.asked + self.recogniser.stretches - began.1;
            let seconds = (self.now_ns - began.0) as f64 / 1e9;
            (gets as f64 / requests.max(1) as f64, seconds)
        }
    }

    /// What a race has told.
    struct Outcome {
        /// Gets for each request.
        sequential: f64,
        hot: f64,
        /// Seconds of the pass at random, with and without read-ahead.
        with: f64,
        without: f64,
        /// Bytes that it has fetched.
        fetched: u64,
    }

    /// As in `millrace bench race`.
    fn race(threads: usize, sets: usize, cache_bytes: u64) -> Outcome {
        const PART: usize = 2560;
        let (values, mut next) = (threads * sets, randoms());
        // Threads write at about the same speed.
        let (mut own, mut written) = (vec![Vec::new(); threads], 0);
        while written < values {
            let thread = next(threads);
            if own[thread].len() < sets && next(100) < 97 + thread % 4 {
                own[thread].push(written);
                written += 1;
            }
        }
        let hot = |own: &Vec<usize>, next: &mut dyn FnMut(usize) -> usize| -> Vec<usize> {
            let parts = own.chunks(PART).rev();
            parts.flat_map(|p| vec![p; p.len() * 11 / 10]).map(|p| p[next(p.len())]).collect()
        };
        let mut race = Race::new(cache_bytes, values);
        let (sequential, _) = race.run(&own);
        let hots: Vec<_> = own.iter().map(|own| hot(own, &mut next)).collect();
        let (hot, _) = race.run(&hots);
        let random =
            |next: &mut dyn FnMut(usize) -> usize| (0..sets).map(|_| next(values)).collect();
        let randoms: Vec<Vec<usize>> = (0..threads).map(|_| random(&mut next)).collect();
        let mut plain = Race::new(cache_bytes, values);
        (plain.cache, plain.reads_ahead) = (race.cache.clone(), false);
        plain.recogniser.scatter();
        let fetched = race.fetched;
        let (_, with) = race.run(&randoms);
        let (_, without) = plain.run(&randoms);
        let fetched = race.fetched - fetched;
        Outcome { sequential, hot, with, without, fetched }
    }

    #[test]
    fn a_race_needs_few_requests_and_reads_at_random_plainly() {
        for (threads, sets, cache_bytes, least) in [
            (16, 10_000, 512 * MIB, 1000.0),
            (16, 20_000, 512 * MIB, 1000.0),
            (4, 10_000, 128 * MIB, 400.0),
            (1, 40_000, 128 * MIB, 400.0),
        ] {
            let Outcome { sequential, hot, with, without, fetched } =
                race(threads, sets, cache_bytes);
            let name = format!("{threads} x {sets}");
            assert!(sequential >= least, "{name}: {sequential}");
            assert!(hot >= least, "{name}: {hot}");
            // Two stretches, and the time that they take.
            assert!(fetched <= 20 * MIB, "{name}: {} MiB", fetched / MIB);
            assert!(with < without * 1.005 + 0.09, "{name}: {with} s, {without} s");
        }
    }

    #[test]
    fn reads_at_random_spend_the_first_credit_and_little_more() {
        // 8 GiB, of which the program reads an eighth.
        let mut reader = Reader::new(10 * MIB, 64 * MIB);
        for value in shuffled(1 << 21).into_iter().take(1 << 18) {
            reader.read(value);
            // The cache is too small for it.
            reader.chunks.clear();
        }
        let read = (1 << 18) * VALUE;
        assert!(reader.fetched < 40 * MIB + read / 64, "{} of {read}", reader.fetched);
        assert_eq!(reader.recogniser.turn(), Turn::Ask);
    }

    /// Reads that are in one part of the data, of which they use a hundredth.
    #[test]
    fn reads_that_use_little_of_what_is_near_spend_the_first_credit_and_little_more() {
        let mut reader = Reader::new(MIB, 64 * MIB);
        let mut next = randoms();
        for _ in 0..1 << 16 {
            reader.read(next((16 * MIB / VALUE) as usize) as u64);
            // As if another value had been read, that is not fetched.
            reader.chunks.clear();
        }
        let read = (1 << 16) * VALUE;
        assert!(reader.fetched <= 4 * MIB + read / PLAIN_SHARE, "{} of {read}", reader.fetched);
    }

    #[test]
    fn far_reads_fetch_nothing_and_near_ones_are_found_again_after_them() {
        let mut reader = Reader::new(MIB, 64 * MIB);
        for n in 0..1000 {
            reader.read(n * 1000 * MIB / VALUE);
        }
        assert_eq!((reader.asked, reader.fetched), (1000, 0));
        assert_eq!(reader.recogniser.mood(), Mood::Scattered);
        let near = 999 * 1000 * MIB / VALUE + 1;
        let reads = u64::from(PAUSE_MAX) + 3 * SAMPLES as u64;
        (near..near + reads).for_each(|n| reader.read(n));
        assert!(reader.fetched > 0);
    }

    #[test]
    fn two_reads_near_each_other_are_enough_at_first() {
        let mut reader = Reader::new(MIB, 64 * MIB);
        reader.read(5000);
        assert_eq!(reader.fetched, 0);
        reader.read(5001);
        assert!(reader.fetched > 0);
    }

    #[test]
    fn reads_wait_once_it_helps_and_ask_again_when_it_does_not() {
        let place = |offset| Some((Place { file: 1, offset }, 100));
        let mut recogniser = Recogniser::new(10 << 20, 100 << 20);
        (0..10).for_each(|n| recogniser.answered(place(n * 100)));
        assert!(recogniser.patience > PATIENCE);
        let Turn::Wait(number) = recogniser.turn() else { panic!("a stretch is on its way") };
        let mut chunks = Vec::new();
        while let Some(chunk) = recogniser.next() {
            chunks.push(chunk);
        }
        assert_eq!(chunks.len() as u32, WINDOW);
        // The file ends.
        for chunk in chunks {
            assert!(recogniser.is_coming(number));
            recogniser.arrived(chunk, 5, After::Nothing);
        }
        assert!(!recogniser.is_coming(number));
        // One asks, the others wait whether it begins a stretch.
        assert_eq!(recogniser.turn(), Turn::AskPlace);
        let Turn::Wait(number) = recogniser.turn() else { panic!("one asks") };
        recogniser.answered(None);
        assert!(!recogniser.is_coming(number));
        (0..20).for_each(|_| recogniser.waited(false, false));
        assert_eq!((recogniser.turn(), recogniser.turn()), (Turn::AskPlace, Turn::AskPlace));
    }

    /// What was fetched lately is left out at the end of a stretch, too.
    #[test]
    fn a_stretch_ends_whatever_is_left_out_of_it() {
        let place = |offset| Some((Place { file: 1, offset }, 100));
        let mut recogniser = Recogniser::new(1 << 20, 100 << 20);
        let fetch = |recogniser: &mut Recogniser| {
            let mut from = Vec::new();
            while let Some(chunk) = recogniser.next() {
                from.push(chunk.from / CHUNK_BYTES);
                recogniser.arrived(chunk, 5, After::More);
            }
            from
        };
        (0..2).for_each(|n| recogniser.answered(place(n)));
        assert_eq!(fetch(&mut recogniser), [0, 1, 2, 3]);
        // Chunks 1 and 3 have come without a value that is read.
        let at = |chunk| Place { file: 1, offset: chunk * CHUNK_BYTES };
        for gone in [1, 3] {
            recogniser.missed(at(gone));
            assert!(!recogniser.is_fetched.contains_key(&(1, gone)));
        }
        recogniser.missed(at(1));
        assert_eq!(fetch(&mut recogniser), [1, 3]);
        recogniser.is_fetched.remove(&(1, 0));
        recogniser.missed(at(0));
        assert_eq!(fetch(&mut recogniser), [0]);
        // What has been displaced is fetched whole.
        recogniser.stored(100 << 20);
        recogniser.missed(at(2));
        assert_eq!(fetch(&mut recogniser), [0, 1, 2, 3]);
        assert!(recogniser.stretch.is_none());
    }

    #[test]
    fn a_region_goes_on_in_the_next_file_for_as_many_bytes_as_it_has_left() {
        let mut recogniser = Recogniser::new(1 << 20, 100 << 20);
        let credit = recogniser.credit;
        (0..2).for_each(|n| recogniser.answered(Some((Place { file: 1, offset: n }, 100))));
        let mut asked = Vec::new();
        while let Some(chunk) = recogniser.next() {
            asked.push((chunk.file, chunk.from / CHUNK_BYTES));
            // The first file has two chunks, the second one, and the third ends, too.
            let after = match (chunk.file, chunk.from / CHUNK_BYTES) {
                (1, 0) => After::More,
                (1, 1) => After::File(5),
                (5, 0) => After::File(7),
                _ => After::Nothing,
            };
            recogniser.arrived(chunk, 5, after);
        }
        assert_eq!(asked, [(1, 0), (1, 1), (5, 0), (7, 0)]);
        assert_eq!((recogniser.stretches, credit - recogniser.credit), (1, 1 << 20));
        assert!(recogniser.is_cached((5, 0)) && !recogniser.is_cached((5, 1)));
    }

    /// Whatever a server says, a region ends after as many chunks as it has.
    #[test]
    fn a_server_that_names_files_without_end_is_asked_for_one_region() {
        for next in [|file: u64| file + 1, |file| file, |file| file - 1] {
            let mut recogniser = Recogniser::new(1 << 20, 100 << 20);
            (0..2).for_each(|n| recogniser.answered(Some((Place { file: 9, offset: n }, 100))));
            let mut chunks = VecDeque::new();
            let mut asked = 0;
            loop {
                while let Some(chunk) = recogniser.next() {
                    asked += 1;
                    chunks.push_back(chunk);
                }
                let Some(chunk) = chunks.pop_front() else { break };
                recogniser.arrived(chunk, 0, After::File(next(chunk.file)));
            }
            assert!(asked <= 16, "{asked}");
            assert!(recogniser.stretch.is_none());
        }
    }

    #[test]
    fn a_link_that_ends_leaves_nothing_behind() {
        let place = |offset| Some((Place { file: 1, offset }, 100));
        let mut recogniser = Recogniser::new(10 << 20, 100 << 20);
        (0..10).for_each(|n| recogniser.answered(place(n * 100)));
        let Turn::Wait(number) = recogniser.turn() else { panic!("a stretch is on its way") };
        let chunk = recogniser.next().unwrap();
        recogniser.reset();
        assert!(!recogniser.is_coming(number));
        assert_eq!(recogniser.next(), None);
        assert_eq!(recogniser.arrived(chunk, 1, After::More), Arrival::default());
        recogniser.answered(place(0));
        assert_eq!(recogniser.next(), None);
        recogniser.answered(place(1));
        assert!(recogniser.next().is_some());
    }
}

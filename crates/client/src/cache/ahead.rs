//! Read-ahead in the order of the writes: decides which parts of the server's blob files to fetch.
//! No I/O, no clock.
//!
//! A node keeps long values in blob files, in the order in which they were written. A read that the
//! cache does not answer asks for the value and its place. When two such places are near each
//! other, a *stretch* of the file is fetched: an aligned region around the place, in chunks of
//! which a [`WINDOW`] is on the way at a time. Since regions are aligned, it makes no difference
//! whether the program reads forward, backward, or in no order within a region. Two regions that
//! follow one another give a direction, and the next one is fetched when half of the last one has
//! been used. Regions grow with the credit, up to [`GROWTH`] times: so a program that uses what is
//! fetched needs fewer of them, also if its order is that of many writers' own parts.
//!
//! **Credit** bounds the cost. Fetching takes its bytes from the credit; the first use of a fetched
//! value returns them [`GAIN`] times, and a plain read returns a small part of its own. So a
//! program that reads at random spends the first credit and then a hundredth of what it reads
//! anyway. Each read away from the last regions takes a part of the credit, so a program that
//! begins to read at random spends what it has earned before, and no more.
//!
//! **Patience**: while a stretch is on its way, a read whose place is not known may wait for it
//! instead of asking. It does if that has helped lately: each answer tells whether its value would
//! have come with the stretch. Then one read at a time asks, and the others wait for its stretch.

use std::collections::{HashSet, VecDeque};

/// Bytes of a blob file that are asked for at once.
pub(crate) const CHUNK_BYTES: u64 = 256 << 10;
/// Chunks on their way.
const WINDOW: u32 = 8;
/// Places of reads that are remembered.
const PLACES: usize = 32;
/// Regions that wait to be fetched.
const QUEUE_MAX: usize = 16;
/// Chunks that arrive between two looks of the reads that wait.
const CHUNKS_BETWEEN_LOOKS: u32 = 4;
/// The first use of a byte returns so many to the credit.
const GAIN: u64 = 2;
/// A plain read returns its bytes divided by this.
const PLAIN_SHARE: u64 = 128;
/// A read that is in none of the last regions takes this part of the credit.
const JUMP_SHARE: u64 = 256;
/// The first credit, as a number of stretches.
const FIRST_STRETCHES: u64 = 4;
/// Regions grow up to so many times; a power of two.
const GROWTH: u64 = 8;
/// A region is at most this part of the credit, once it has grown.
const CREDIT_REGIONS: u64 = 4;
/// Stretches that a read waits for before it asks.
pub(crate) const WAITS_MAX: u32 = 8;
/// Reads wait while their patience is above the first; it is at most the second.
const PATIENCE: i32 = 8;
const PATIENCE_MAX: i32 = 64;

/// Where a value is in the blob files of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub file: u64,
    pub offset: u64,
}

/// A part of a file to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    stretch: u64,
    pub file: u64,
    pub from: u64,
}

/// A part of a file to fetch.
#[derive(Clone, Copy, Debug)]
struct Region {
    file: u64,
    from: u64,
    end: u64,
}

impl Region {
    fn has(&self, place: Place) -> bool {
        place.file == self.file && (self.from..self.end).contains(&place.offset)
    }
}

/// The stretch that is being fetched.
#[derive(Debug)]
struct Stretch {
    number: u64,
    region: Region,
    /// Where the next chunk begins.
    next: u64,
    on_the_way: u32,
    arrived: u32,
    records: u64,
    /// It was not missed yet.
    early: bool,
}

/// What a read does that the cache does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It asks for the value.
    Ask,
    /// It asks for the value and its place.
    AskPlace,
    /// It looks again when something has arrived, as long as this stretch is on its way.
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

/// Recognises the order of reads.
#[derive(Debug)]
pub(super) struct Recogniser {
    /// Bytes of a stretch at first; 0 switches it off.
    stretch_bytes: u64,
    /// Bytes of a stretch at most.
    stretch_bytes_max: u64,
    credit: u64,
    credit_max: u64,
    patience: i32,
    places: VecDeque<Place>,
    queue: VecDeque<(Region, bool)>,
    stretch: Option<Stretch>,
    /// The last stretch that has ended.
    last: Option<Region>,
    /// The number of the next stretch.
    number: u64,
    /// A read asks, and others wait whether its answer begins a stretch.
    asking: bool,
    /// Chunks that were fetched, the oldest first; not more than the cache holds.
    fetched: VecDeque<(u64, u64)>,
    is_fetched: HashSet<(u64, u64)>,
    fetched_max: usize,
    /// Where the next stretch is, by the direction of the last two.
    ahead: Option<Place>,
    pub stretches: u64,
}

impl Recogniser {
    /// For stretches of at most `stretch_bytes`, and a cache of `cache_bytes`.
    pub fn new(stretch_bytes: usize, cache_bytes: usize) -> Recogniser {
        let (stretch, cache) = (stretch_bytes as u64, cache_bytes as u64);
        let stretch_bytes = stretch.min(cache / 8) / CHUNK_BYTES * CHUNK_BYTES;
        let credit_max = cache / 2;
        let mut stretch_bytes_max = stretch_bytes;
        while stretch_bytes_max * 2 <= (stretch_bytes * GROWTH).min(cache / 8) {
            stretch_bytes_max *= 2;
        }
        Recogniser {
            stretch_bytes,
            stretch_bytes_max,
            credit: (FIRST_STRETCHES * stretch_bytes).min(credit_max),
            credit_max,
            patience: 0,
            places: VecDeque::with_capacity(PLACES),
            queue: VecDeque::new(),
            stretch: None,
            last: None,
            number: 0,
            asking: false,
            fetched: VecDeque::new(),
            is_fetched: HashSet::new(),
            fetched_max: (credit_max / CHUNK_BYTES) as usize,
            ahead: None,
            stretches: 0,
        }
    }

    /// Fetched values of these bytes were used for the first time.
    pub fn used(&mut self, bytes: u64) {
        self.add_credit(bytes.saturating_mul(GAIN));
    }

    fn add_credit(&mut self, bytes: u64) {
        self.credit = self.credit.saturating_add(bytes).min(self.credit_max);
    }

    /// What a read does that was not answered.
    pub fn turn(&mut self) -> Turn {
        if self.patience <= PATIENCE {
            return Turn::AskPlace;
        }
        match &self.stretch {
            Some(stretch) => Turn::Wait(stretch.number),
            None if std::mem::replace(&mut self.asking, true) => Turn::Wait(self.number),
            None => Turn::AskPlace,
        }
    }

    /// Whether a read that waits for a stretch goes on waiting.
    pub fn is_coming(&self, number: u64) -> bool {
        match &self.stretch {
            Some(stretch) => stretch.number == number,
            None => self.asking && self.number == number,
        }
    }

    /// A read has waited: whether for its value.
    pub fn waited(&mut self, found: bool) {
        let change = if found { 2 } else { -1 };
        self.patience = (self.patience + change).clamp(0, PATIENCE_MAX);
        if !found && self.stretch.is_none() {
            // Perhaps the read that asks has given up.
            self.asking = false;
        }
    }

    /// A read was answered: with a value of some bytes that is at a place, or without, or not at
    /// all.
    pub fn answered(&mut self, found: Option<(Place, usize)>) {
        self.asking = false;
        let Some((place, bytes)) = found else { return };
        self.add_credit(bytes as u64 / PLAIN_SHARE);
        let reach = self.stretch_bytes.max(self.credit / 2);
        let near = |other: &Place| {
            other.file == place.file && other.offset.abs_diff(place.offset) <= reach
        };
        let is_near = self.places.iter().any(near);
        if self.places.len() == PLACES {
            self.places.pop_front();
        }
        self.places.push_back(place);
        let now = self.stretch.as_ref().map(|stretch| &stretch.region);
        if now.or(self.last.as_ref()).is_some_and(|region| region.has(place)) {
            self.patience = (self.patience + 2).min(PATIENCE_MAX);
            if now.is_some_and(|region| region.has(place)) {
                return;
            }
        } else {
            self.patience = (self.patience - 1).max(0);
            // The reads have gone elsewhere, perhaps everywhere.
            self.credit -= self.credit / JUMP_SHARE;
        }
        if is_near && !self.queue.iter().any(|(region, _)| region.has(place)) {
            self.want(place, false);
        }
    }

    /// Queues the region around a place, if it was not fetched lately and there is credit.
    fn want(&mut self, place: Place, early: bool) {
        let size = self.region_bytes();
        if size == 0 || self.queue.len() >= QUEUE_MAX {
            return;
        }
        let chunk = (place.file, place.offset / CHUNK_BYTES);
        if self.is_fetched.remove(&chunk) {
            // It has come without the value that was asked for, or was displaced: the next miss
            // there fetches it again.
            self.fetched.retain(|other| *other != chunk);
            return;
        }
        let from = place.offset / size * size;
        self.credit -= size;
        self.queue.push_back((Region { file: place.file, from, end: from + size }, early));
        self.begin();
    }

    /// Bytes of the next region.
    fn region_bytes(&self) -> u64 {
        let mut bytes = self.stretch_bytes;
        while bytes * 2 <= (self.credit / CREDIT_REGIONS).min(self.stretch_bytes_max) {
            bytes *= 2;
        }
        // Small ones would cost more requests than they save.
        if bytes <= self.credit { bytes } else { 0 }
    }

    fn begin(&mut self) {
        if self.stretch.is_some() {
            return;
        }
        let Some((region, early)) = self.queue.pop_front() else { return };
        let number = self.number;
        (self.number, self.stretches) = (number + 1, self.stretches + 1);
        let next = region.from;
        self.stretch =
            Some(Stretch { number, region, next, on_the_way: 0, arrived: 0, records: 0, early });
        self.skip_fetched();
    }

    /// Leaves out chunks that were fetched lately.
    fn skip_fetched(&mut self) {
        let Some(stretch) = &mut self.stretch else { return };
        let mut skipped = 0;
        while stretch.next < stretch.region.end
            && self.is_fetched.contains(&(stretch.region.file, stretch.next / CHUNK_BYTES))
        {
            stretch.next += CHUNK_BYTES;
            skipped += CHUNK_BYTES;
        }
        self.add_credit(skipped);
    }

    /// Ends the stretch if all of it has arrived, and begins the next one.
    fn end(&mut self) -> Option<Stretch> {
        self.skip_fetched();
        let is_over =
            |stretch: &mut Stretch| stretch.on_the_way == 0 && stretch.next >= stretch.region.end;
        let over = self.stretch.take_if(is_over)?;
        self.begin();
        Some(over)
    }

    /// The next chunk to ask for, if one may be on its way now.
    pub fn next(&mut self) -> Option<Chunk> {
        while self.end().is_some() {}
        let stretch = self.stretch.as_mut()?;
        if stretch.on_the_way >= WINDOW || stretch.next >= stretch.region.end {
            return None;
        }
        let chunk =
            Chunk { stretch: stretch.number, file: stretch.region.file, from: stretch.next };
        stretch.next += CHUNK_BYTES;
        stretch.on_the_way += 1;
        if self.fetched.len() >= self.fetched_max
            && let Some(oldest) = self.fetched.pop_front()
        {
            self.is_fetched.remove(&oldest);
        }
        let place = (chunk.file, chunk.from / CHUNK_BYTES);
        self.fetched.push_back(place);
        self.is_fetched.insert(place);
        Some(chunk)
    }

    /// A chunk has arrived with some records; the file has more after it, or not.
    pub fn arrived(&mut self, chunk: Chunk, records: usize, has_more: bool) -> Arrival {
        let mut arrival = Arrival::default();
        let Some(stretch) = self.stretch.as_mut().filter(|s| s.number == chunk.stretch) else {
            return arrival;
        };
        stretch.on_the_way -= 1;
        stretch.arrived += 1;
        stretch.records += records as u64;
        arrival.look = stretch.arrived.is_multiple_of(CHUNKS_BETWEEN_LOOKS);
        if !has_more {
            let left = stretch.region.end.saturating_sub(stretch.next);
            stretch.next = stretch.region.end;
            self.add_credit(left);
        }
        let place = (chunk.file, chunk.from / CHUNK_BYTES);
        if records == 0 && self.is_fetched.remove(&place) {
            // Perhaps nothing is written there yet.
            self.fetched.retain(|other| *other != place);
        }
        let Some(Stretch { region, records, early, .. }) = self.end() else { return arrival };
        arrival.look = true;
        let before = self.last.replace(region).filter(|before| before.file == region.file);
        self.ahead = match before {
            Some(before) if before.end == region.from && has_more => Some(region.end),
            Some(before) if before.from == region.end => region.from.checked_sub(1),
            _ => None,
        }
        .map(|offset| Place { file: region.file, offset });
        if self.ahead.is_some() {
            // Half of it was used, or of the one before if it came early.
            let records = records as i64;
            arrival.next_after = Some(if early { records } else { records / 2 });
        }
        arrival
    }

    /// The next stretch in the direction of the last two is due.
    pub fn due(&mut self) {
        let Some(place) = self.ahead.take() else { return };
        if !self.is_fetched.contains(&(place.file, place.offset / CHUNK_BYTES)) {
            self.want(place, true);
        }
    }

    /// The server has refused a chunk: only what plain reads earn is spent from now on.
    pub fn refused(&mut self) {
        self.reset();
        self.credit = 0;
    }

    /// The link has ended, and the cache with it.
    pub fn reset(&mut self) {
        self.queue.clear();
        self.places.clear();
        self.fetched.clear();
        self.is_fetched.clear();
        (self.stretch, self.last, self.ahead) = (None, None, None);
        // Reads that wait stop.
        self.number += 1;
        self.asking = false;
    }
}

#[cfg(test)]
mod tests {
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
                let place = Place { file: 7, offset };
                self.recogniser.answered(Some((place, VALUE as usize)));
            }
            while let Some(chunk) = self.recogniser.next() {
                self.fetched += CHUNK_BYTES;
                self.chunks.insert(chunk.from / CHUNK_BYTES);
                let records = (CHUNK_BYTES / VALUE) as usize;
                if let Some(after) = self.recogniser.arrived(chunk, records, true).next_after {
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

    /// Many threads, each with its own part of the values, which were written at the same time; a
    /// cache that is smaller than what was written, and forgets the oldest.
    #[test]
    fn threads_that_visit_parts_of_what_they_have_written_need_few_requests() {
        const THREADS: usize = 16;
        const SETS: usize = 16_384;
        const PART: usize = 2560;
        let cache_bytes = 512 * MIB;
        let mut random = 1_u64;
        let mut next = move |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % below
        };
        // Who has written each value, and where the values of each thread are.
        let (mut owners, mut own) = (Vec::new(), vec![Vec::new(); THREADS]);
        while owners.len() < THREADS * SETS {
            let thread = next(THREADS);
            if own[thread].len() < SETS {
                own[thread].push(owners.len() as u64);
                owners.push(thread);
            }
        }
        let mut recogniser = Recogniser::new(10 << 20, cache_bytes as usize);
        for pass in ["sequential", "hot", "random"] {
            let before = recogniser.stretches;
            recogniser.is_fetched.clear();
            recogniser.fetched.clear();
            let (mut cached, mut order) = (vec![0_u8; owners.len()], VecDeque::new());
            let (mut asked, mut reads, mut fetched) = (0_u64, 0_u64, 0_u64);
            let (mut uses, mut due) = (0_i64, None);
            let orders: Vec<Vec<u64>> = (own.iter())
                .map(|own| match pass {
                    "sequential" => own.clone(),
                    "random" => (0..SETS).map(|_| next(owners.len()) as u64).collect(),
                    _ => {
                        let parts = own.chunks(PART).rev();
                        parts
                            .flat_map(|p| vec![p; p.len() * 11 / 10])
                            .map(|p| p[next(p.len())])
                            .collect()
                    }
                })
                .collect();
            let mut at = [0; THREADS];
            while at.iter().zip(&orders).any(|(at, order)| *at < order.len()) {
                let thread = next(THREADS);
                let Some(&value) = orders[thread].get(at[thread]) else { continue };
                at[thread] += 1;
                reads += 1;
                let insert =
                    |value: u64, state: u8, cached: &mut Vec<u8>, order: &mut VecDeque<u64>| {
                        if cached[value as usize] == 0 {
                            cached[value as usize] = state;
                            order.push_back(value);
                            while order.len() as u64 * (VALUE + 30) > cache_bytes {
                                let old = order.pop_front().unwrap();
                                // Read again since: a second chance.
                                match cached[old as usize] {
                                    3 => {
                                        cached[old as usize] = 2;
                                        order.push_back(old);
                                    }
                                    _ => cached[old as usize] = 0,
                                }
                            }
                        }
                    };
                match &mut cached[value as usize] {
                    0 => {
                        asked += 1;
                        insert(value, 2, &mut cached, &mut order);
                        let place = Place { file: 7, offset: value * VALUE };
                        recogniser.answered(Some((place, VALUE as usize)));
                    }
                    state @ 1 => {
                        *state = 2;
                        recogniser.used(VALUE);
                        uses += 1;
                    }
                    state => *state = 3,
                }
                if due.is_some_and(|due| uses >= due) {
                    due = None;
                    recogniser.due();
                }
                while let Some(chunk) = recogniser.next() {
                    fetched += CHUNK_BYTES;
                    let from = chunk.from / VALUE;
                    let values = from..(from + CHUNK_BYTES / VALUE).min(owners.len() as u64);
                    let records = values.end.saturating_sub(values.start) as usize;
                    values.for_each(|value| insert(value, 1, &mut cached, &mut order));
                    let has_more = from + CHUNK_BYTES / VALUE < owners.len() as u64;
                    if let Some(after) = recogniser.arrived(chunk, records, has_more).next_after {
                        due = Some(uses + after);
                    }
                }
            }
            let requests = asked + recogniser.stretches - before;
            if pass == "random" {
                // What was earned before, and no more.
                assert!(fetched <= cache_bytes / 2, "{} MiB", fetched / MIB);
                continue;
            }
            assert!(requests * 1000 < reads, "{pass}: {requests} requests for {reads} reads");
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
        assert_eq!(reader.recogniser.turn(), Turn::AskPlace);
    }

    #[test]
    fn a_far_read_alone_fetches_nothing() {
        let mut reader = Reader::new(MIB, 64 * MIB);
        for n in 0..100 {
            reader.read(n * 1000 * MIB / VALUE);
        }
        assert_eq!((reader.asked, reader.fetched), (100, 0));
        reader.read(99 * 1000 * MIB / VALUE + 1);
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
            recogniser.arrived(chunk, 5, false);
        }
        assert!(!recogniser.is_coming(number));
        // One asks, the others wait whether it begins a stretch.
        assert_eq!(recogniser.turn(), Turn::AskPlace);
        let Turn::Wait(number) = recogniser.turn() else { panic!("one asks") };
        recogniser.answered(None);
        assert!(!recogniser.is_coming(number));
        (0..20).for_each(|_| recogniser.waited(false));
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
                recogniser.arrived(chunk, 5, true);
            }
            from
        };
        (0..2).for_each(|n| recogniser.answered(place(n)));
        assert_eq!(fetch(&mut recogniser), [0, 1, 2, 3]);
        // Chunks 1 and 3 were displaced.
        for gone in [1, 3] {
            recogniser.answered(place(gone * CHUNK_BYTES));
            assert!(!recogniser.is_fetched.contains(&(1, gone)));
        }
        recogniser.answered(place(CHUNK_BYTES));
        assert_eq!(fetch(&mut recogniser), [1, 3]);
        recogniser.is_fetched.remove(&(1, 0));
        recogniser.answered(place(0));
        assert_eq!(fetch(&mut recogniser), [0]);
        assert!(recogniser.stretch.is_none());
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
        assert_eq!(recogniser.arrived(chunk, 1, true), Arrival::default());
        recogniser.answered(place(0));
        assert_eq!(recogniser.next(), None);
        recogniser.answered(place(1));
        assert!(recogniser.next().is_some());
    }
}

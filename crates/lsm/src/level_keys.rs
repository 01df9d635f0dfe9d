//! The largest keys of a level's tables, in their order, for searching.
//!
//! A level is made anew for every change, and may have a hundred thousand tables. So the keys are
//! in chunks that levels share: a change copies those in which keys come or go, and the list of
//! chunks.

use std::sync::Arc;

use rocksfmt::Comparator;

/// Keys of a chunk, about: at most twice as many.
const CHUNK: usize = 256;
/// A chunk of fewer keys is joined with the next one, if it is the end of a part that was copied.
const CHUNK_MIN: usize = CHUNK / 4;

/// Internal keys by index.
#[derive(Clone, Default)]
pub(crate) struct LevelKeys {
    /// None is empty.
    chunks: Vec<Arc<Chunk>>,
    /// For each chunk, the index after its last key.
    ends: Vec<u32>,
}

/// Keys one after another, and where each ends.
#[derive(Clone, Default)]
struct Chunk {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Chunk {
    fn len(&self) -> usize {
        self.ends.len()
    }

    fn key(&self, at: usize) -> &[u8] {
        let start = if at == 0 { 0 } else { self.ends[at - 1] as usize };
        &self.bytes[start..self.ends[at] as usize]
    }

    fn push(&mut self, key: &[u8]) {
        self.bytes.extend_from_slice(key);
        self.ends.push(self.bytes.len() as u32);
    }

    fn extend(&mut self, other: &Chunk) {
        let moved = self.bytes.len() as u32;
        self.bytes.extend_from_slice(&other.bytes);
        self.ends.extend(other.ends.iter().map(|end| end + moved));
    }
}

impl LevelKeys {
    /// The number of keys.
    pub fn len(&self) -> usize {
        self.ends.last().map_or(0, |&end| end as usize)
    }

    /// The index of the first key of a chunk.
    fn start(&self, chunk: usize) -> usize {
        if chunk == 0 { 0 } else { self.ends[chunk - 1] as usize }
    }

    /// Appends a key.
    pub fn push(&mut self, key: &[u8]) {
        let len = self.len() as u32;
        match (self.chunks.last_mut(), self.ends.last_mut()) {
            (Some(last), Some(end)) if last.len() < CHUNK => {
                Arc::make_mut(last).push(key);
                *end += 1;
            }
            _ => {
                let mut chunk = Chunk::default();
                chunk.push(key);
                self.chunks.push(Arc::new(chunk));
                self.ends.push(len + 1);
            }
        }
    }

    /// Appends the keys of another level from one index to before another.
    pub fn append(&mut self, other: &LevelKeys, from: usize, to: usize) {
        let first = other.ends.partition_point(|&end| end as usize <= from);
        for (at, chunk) in other.chunks.iter().enumerate().skip(first) {
            let start = other.start(at);
            if start >= to {
                return;
            }
            if from <= start && start + chunk.len() <= to {
                self.append_chunk(chunk);
            } else {
                let part = from.saturating_sub(start)..chunk.len().min(to - start);
                part.for_each(|key| self.push(chunk.key(key)));
            }
        }
    }

    fn append_chunk(&mut self, chunk: &Arc<Chunk>) {
        let all = self.len() as u32 + chunk.len() as u32;
        match (self.chunks.last_mut(), self.ends.last_mut()) {
            (Some(last), Some(end))
                if last.len() < CHUNK_MIN && last.len() + chunk.len() <= 2 * CHUNK =>
            {
                Arc::make_mut(last).extend(chunk);
                *end = all;
            }
            _ => {
                self.chunks.push(chunk.clone());
                self.ends.push(all);
            }
        }
    }

    /// The index of the first key that is not before `seek`.
    pub fn find(&self, comparator: Comparator, seek: &[u8]) -> usize {
        let is_before = |key: &[u8]| comparator.cmp_internal(key, seek).is_lt();
        let found = self.chunks.partition_point(|chunk| is_before(chunk.key(chunk.len() - 1)));
        let Some(chunk) = self.chunks.get(found) else { return self.len() };
        // The last key is known.
        let (mut low, mut high) = (0, chunk.len() - 1);
        while low < high {
            let middle = low + (high - low) / 2;
            if is_before(chunk.key(middle)) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        self.start(found) + low
    }

    /// All keys.
    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.chunks.iter().flat_map(|chunk| (0..chunk.len()).map(|at| chunk.key(at)))
    }

    /// The number of chunks, and how many of them another level does not have.
    #[cfg(test)]
    pub fn copied(&self, other: &LevelKeys) -> (usize, usize) {
        let has = |chunk: &&Arc<Chunk>| other.chunks.iter().any(|there| Arc::ptr_eq(there, chunk));
        let shared = self.chunks.iter().filter(has).count();
        (self.chunks.len(), self.chunks.len() - shared)
    }
}

#[cfg(test)]
mod tests {
    use reactor::sim::Rng;

    use super::*;

    fn key(n: u64) -> Vec<u8> {
        // A user key of any length, and a trailer.
        [&vec![b'k'; n as usize % 7][..], &n.to_be_bytes(), &[0; 8]].concat()
    }

    /// Parts are taken out and put in at random, again and again.
    #[test]
    fn keys_are_those_of_a_list_and_chunks_stay_of_a_size() {
        let mut rng = Rng::new(3);
        let (mut keys, mut model) = (LevelKeys::default(), Vec::<Vec<u8>>::new());
        let mut next = 0;
        for round in 0..600 {
            let from = rng.index(model.len() + 1);
            let gone = rng.index((model.len() - from).min(40) + 1);
            let most = if round % 100 == 0 { 3000 } else { 40 };
            let new: Vec<Vec<u8>> = (0..rng.below(most))
                .map(|_| {
                    next += 1;
                    key(next)
                })
                .collect();
            let mut edited = LevelKeys::default();
            edited.append(&keys, 0, from);
            new.iter().for_each(|key| edited.push(key));
            edited.append(&keys, from + gone, model.len());
            model.splice(from..from + gone, new);
            assert!(edited.iter().eq(model.iter().map(Vec::as_slice)), "round {round}");
            assert_eq!(edited.len(), model.len());
            let (chunks, copied) = edited.copied(&keys);
            assert!(copied <= 6 + most as usize / CHUNK, "{copied} of {chunks}");
            assert!(chunks <= 2 + 2 * model.len() / CHUNK_MIN, "{chunks} of {}", model.len());
            keys = edited;
        }
        assert!(model.len() > 5_000, "{}", model.len());
    }

    #[test]
    fn a_key_is_found_in_and_between_chunks() {
        let order = Comparator::Bytewise;
        for count in [0, 1, 2, CHUNK, CHUNK + 1, 5 * CHUNK] {
            let all: Vec<Vec<u8>> =
                (0..count as u32).map(|n| [&(2 * n).to_be_bytes()[..], &[0; 8]].concat()).collect();
            let mut keys = LevelKeys::default();
            all.iter().for_each(|key| keys.push(key));
            for n in 0..2 * count as u32 + 2 {
                let seek = [&n.to_be_bytes()[..], &[0; 8]].concat();
                let expected = all.partition_point(|key| order.cmp_internal(key, &seek).is_lt());
                assert_eq!(keys.find(order, &seek), expected, "{n} of {count}");
            }
        }
    }
}

//! One function per parser that does everything a reader would do with the bytes, for fuzzers and
//! for the mutation test below. Every answer is acceptable; a panic, a hang or a huge allocation is
//! not.
//!
//! A new parser gets a function, an entry in [`TARGETS`] with a few seeds, and a file of one line
//! in `fuzz/fuzz_targets/`. The seeds are the corpus: `fuzz/src/bin/corpus.rs` writes them to
//! files.

mod files;
mod logs;

pub use files::{
    TARGETS, blob, block, compress, entity, filter, footer, index, properties, rangedel,
};
pub use logs::{TARGETS as LOG_TARGETS, batch, edit, log, manifest, names};

/// A fuzz target: its name, the function to run, and its seeds.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

#[cfg(test)]
mod tests {
    use super::*;

    struct Random(u64);

    impl Random {
        fn next(&mut self, below: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((self.0 >> 33) as usize) % below.max(1)
        }
    }

    /// The first steps of a fuzzer: flips, cuts, copies and interesting numbers.
    fn mutate(random: &mut Random, seed: &[u8]) -> Vec<u8> {
        let mut data = seed.to_vec();
        for _ in 0..1 + random.next(4) {
            if data.is_empty() {
                data.push(random.next(256) as u8);
            }
            let at = random.next(data.len());
            match random.next(7) {
                0 => data[at] ^= 1 << random.next(8),
                1 => data[at] = [0, 1, 0x7F, 0x80, 0xFF][random.next(5)],
                2 => data.truncate(at),
                3 => data.insert(at, random.next(256) as u8),
                4 => drop(data.remove(at)),
                5 => {
                    let from = random.next(data.len());
                    let len = random.next(16).min(data.len() - from.max(at));
                    data.copy_within(from..from + len, at);
                }
                _ => {
                    let end = data.len().min(at + 4);
                    let word = [0u32, 1, 0x8000_0001, 0x1000_0001, u32::MAX, data.len() as u32]
                        [random.next(6)];
                    data[at..end].copy_from_slice(&word.to_le_bytes()[..end - at]);
                }
            }
        }
        data
    }

    #[test]
    fn mutated_seeds_do_not_make_a_parser_panic() {
        for (name, run, seeds) in TARGETS.iter().chain(LOG_TARGETS) {
            let mut random = Random(name.len() as u64);
            let seeds = seeds();
            assert!(!seeds.is_empty(), "{name}");
            for seed in &seeds {
                run(seed);
                for len in 0..seed.len().min(300) {
                    run(&seed[..len]);
                }
            }
            for _ in 0..20_000 {
                let seed = &seeds[random.next(seeds.len())];
                run(&mutate(&mut random, seed));
            }
        }
    }
}

//! The random numbers of a simulated world.

use std::ops::Range;

/// A seeded generator (splitmix64): small, fast, and the same on every machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator whose numbers depend on `seed` only.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// Makes another generator, which does not depend on later numbers of this one.
    pub fn fork(&mut self) -> Rng {
        Rng(self.next_u64())
    }

    /// Any number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `limit`; 0 when `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64
    }

    /// An index below `len`; 0 when `len` is 0.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// A number in `range`; its start when it is empty.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end.saturating_sub(range.start))
    }

    /// True with this chance in a million.
    pub fn chance(&mut self, per_million: u32) -> bool {
        self.below(1_000_000) < u64::from(per_million)
    }

    /// True with a chance of one half.
    pub fn coin(&mut self) -> bool {
        self.next_u64() >> 63 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_depend_on_the_seed_only_and_stay_in_their_range() {
        let draw = |seed| {
            let mut rng = Rng::new(seed);
            (0..1000).map(|_| rng.within(10..20)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        let all = draw(3);
        assert!((10..20).all(|n| all.contains(&n)), "every number of the range comes up");
        assert!(all.iter().all(|n| (10..20).contains(n)));
    }

    #[test]
    fn chances_are_what_they_say() {
        let mut rng = Rng::new(7);
        let hits = (0..100_000).filter(|_| rng.chance(100_000)).count();
        assert!((9_000..11_000).contains(&hits), "{hits} of 100000 at 10 %");
        assert!((0..1000).all(|_| rng.chance(1_000_000)));
        assert!((0..1000).all(|_| !rng.chance(0)));
    }
}

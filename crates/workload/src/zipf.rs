//! Random numbers with a Zipfian distribution: a few are frequent, most are rare.
//!
//! The method is that of "Quickly Generating Billion-Record Synthetic Databases" (Gray et al.,
//! SIGMOD 1994, section 3.2), which YCSB also uses.

use crate::random::Random;

/// YCSB's exponent: rank `r` is drawn in proportion to `1 / r^THETA`.
pub const THETA: f64 = 0.99;

/// A Zipfian distribution over the ranks `0..count`; rank 0 is the most frequent.
#[derive(Clone, Debug)]
pub struct Zipf {
    count: u64,
    alpha: f64,
    eta: f64,
    /// The sum of all ranks' weights; that of rank 0 is 1.
    total: f64,
    /// The weight of the first two ranks.
    first_two: f64,
}

impl Zipf {
    /// A distribution over `count` ranks, at least one. Takes time proportional to `count`.
    pub fn new(count: u64) -> Zipf {
        let count = count.max(1);
        let weight = |rank: u64| 1.0 / ((rank + 1) as f64).powf(THETA);
        let total: f64 = (0..count).map(weight).sum();
        let first_two = 1.0 + weight(1);
        let eta = (1.0 - (2.0 / count as f64).powf(1.0 - THETA)) / (1.0 - first_two / total);
        Zipf { count, alpha: 1.0 / (1.0 - THETA), eta, total, first_two }
    }

    /// Draws a rank.
    #[inline]
    pub fn rank(&self, random: &mut Random) -> u64 {
        let unit = random.unit();
        let weight = unit * self.total;
        if weight < 1.0 {
            return 0;
        }
        if weight < self.first_two {
            return 1.min(self.count - 1);
        }
        let rank = self.count as f64 * (self.eta * (unit - 1.0) + 1.0).powf(self.alpha);
        (rank as u64).min(self.count - 1)
    }
}

/// Spreads ranks over the numbers `0..count`, so that frequent keys are not neighbours. Several
/// ranks may map to one number, as in YCSB.
#[inline]
pub fn scrambled(rank: u64, count: u64) -> u64 {
    // FNV-1a over the bytes of the rank.
    let hash = rank.to_le_bytes().iter().fold(0xCBF2_9CE4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    hash % count.max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ranks_follow_the_law_of_zipf() {
        const COUNT: u64 = 1000;
        const DRAWS: u32 = 1_000_000;
        let (zipf, mut random) = (Zipf::new(COUNT), Random::new(1));
        let mut seen = vec![0_u32; COUNT as usize];
        for _ in 0..DRAWS {
            seen[zipf.rank(&mut random) as usize] += 1;
        }
        let total: f64 = (1..=COUNT).map(|rank| (rank as f64).powf(-THETA)).sum();
        let expected = |rank: u64| f64::from(DRAWS) * ((rank + 1) as f64).powf(-THETA) / total;
        for rank in [0, 1] {
            let ratio = f64::from(seen[rank as usize]) / expected(rank);
            assert!((0.98..1.02).contains(&ratio), "rank {rank}: {ratio}");
        }
        // The method is exact for the first two ranks and an approximation for the others.
        for (from, to) in [(2, 10), (10, 100), (100, 1000)] {
            let sum: u32 = seen[from as usize..to as usize].iter().sum();
            let ratio = f64::from(sum) / (from..to).map(expected).sum::<f64>();
            assert!((0.9..1.1).contains(&ratio), "ranks {from} to {to}: {ratio}");
        }
        assert!(seen[999] > 0, "the last rank is drawn, too");
    }

    #[test]
    fn a_single_rank_is_always_drawn() {
        let mut random = Random::new(1);
        assert!((0..1000).all(|_| Zipf::new(1).rank(&mut random) == 0));
    }

    #[test]
    fn frequent_ranks_are_not_neighbours() {
        let first: Vec<u64> = (0..100).map(|rank| scrambled(rank, 1_000_000)).collect();
        assert!(first.windows(2).all(|pair| pair[0].abs_diff(pair[1]) > 1));
        let parts: BTreeSet<u64> = first.iter().map(|number| number / 100_000).collect();
        assert!(parts.len() >= 8, "spread over the numbers: {parts:?}");
    }
}

//! Random numbers.

/// SplitMix64: one addition and three multiplications per number, too few to show in a measurement.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts a sequence; different seeds give unrelated ones.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0xD134_2543_DE82_EF95))
    }

    /// The next number.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number from 0 to 1, without 1.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn random_numbers_stay_below_their_bound_and_reach_every_value() {
        let mut random = Random::new(7);
        let mut seen = [0_u32; 10];
        for _ in 0..1000 {
            seen[random.below(10) as usize] += 1;
        }
        assert!(seen.iter().all(|&count| count > 50), "{seen:?}");
    }

    #[test]
    fn units_are_spread_evenly_between_0_and_1() {
        let mut random = Random::new(1);
        let units: Vec<f64> = (0..10_000).map(|_| random.unit()).collect();
        assert!(units.iter().all(|unit| (0.0..1.0).contains(unit)));
        let mean = units.iter().sum::<f64>() / units.len() as f64;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }
}

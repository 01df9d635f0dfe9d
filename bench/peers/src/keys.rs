//! `db_bench`'s keys, and random numbers to choose among them.

/// Length of a key.
pub const KEY_LEN: usize = 16;

/// The key of number `n`: eight bytes, highest first, then eight times `0`.
pub fn key(n: u64) -> [u8; KEY_LEN] {
    let mut key = [b'0'; KEY_LEN];
    key[..8].copy_from_slice(&n.to_be_bytes());
    key
}

/// SplitMix64: one addition and three multiplications a number, so that it does not show in a measurement.
pub struct Random(u64);

impl Random {
    /// Starts a sequence; different seeds give unrelated ones.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xD134_2543_DE82_EF95))
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        ((u128::from(z) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::{Random, key};

    #[test]
    fn a_key_is_the_number_highest_byte_first_and_then_zeros_as_text() {
        assert_eq!(&key(0x1388), b"\0\0\0\0\0\0\x13\x8800000000");
    }

    #[test]
    fn random_numbers_stay_below_their_bound_and_reach_every_value() {
        let mut random = Random::new(7);
        let mut seen = [0_u32; 10];
        for _ in 0..1000 {
            seen[random.below(10) as usize] += 1;
        }
        assert!(seen.iter().all(|&count| count > 50), "{seen:?}");
    }
}

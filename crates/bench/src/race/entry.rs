//! The race's keys and values, which follow from their number.

/// Bytes of a key.
pub const KEY_BYTES: usize = 8;
/// Bytes of a value.
pub const VALUE_BYTES: usize = 4096;
/// Bytes that values are cut from. Their bytes are random, so that no compression helps.
const STOCK_BYTES: usize = 1 << 20;

/// A step of xorshift64.
pub fn next_random(mut random: u64) -> u64 {
    random ^= random << 13;
    random ^= random >> 7;
    random ^ (random << 17)
}

/// Makes keys and values, and tells whether a value is the right one.
pub struct Entries {
    stock: Vec<u8>,
}

impl Entries {
    /// Always the same ones.
    pub fn new() -> Entries {
        let (mut stock, mut random) =
            (Vec::with_capacity(STOCK_BYTES + VALUE_BYTES), 88_172_645_463);
        while stock.len() < STOCK_BYTES + VALUE_BYTES {
            random = next_random(random);
            stock.extend_from_slice(&random.to_le_bytes());
        }
        Entries { stock }
    }

    /// The key with a number: neighbours are far from each other, and no two are equal.
    pub fn key(&self, number: u64) -> [u8; KEY_BYTES] {
        // The finalizer of splitmix64: each step can be undone.
        let mut key = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
        key = (key ^ (key >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        key = (key ^ (key >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (key ^ (key >> 31)).to_be_bytes()
    }

    /// What follows the key and the number in the value.
    fn rest(&self, key: [u8; KEY_BYTES]) -> &[u8] {
        let from = u64::from_be_bytes(key) as usize % STOCK_BYTES;
        &self.stock[from..from + VALUE_BYTES - KEY_BYTES - 8]
    }

    /// Makes the value with a number, and returns its key.
    pub fn fill(&self, number: u64, value: &mut [u8]) -> [u8; KEY_BYTES] {
        let key = self.key(number);
        value[..KEY_BYTES].copy_from_slice(&key);
        value[KEY_BYTES..KEY_BYTES + 8].copy_from_slice(&number.to_le_bytes());
        value[KEY_BYTES + 8..].copy_from_slice(self.rest(key));
        key
    }

    /// Whether all bytes of a value are those that [`Entries::fill`] has made.
    pub fn is_value(&self, number: u64, value: &[u8]) -> bool {
        let key = self.key(number);
        value.len() == VALUE_BYTES
            && value[..KEY_BYTES] == key
            && value[KEY_BYTES..KEY_BYTES + 8] == number.to_le_bytes()
            && value[KEY_BYTES + 8..] == *self.rest(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_value_is_verified() {
        let entries = Entries::new();
        let mut value = vec![0; VALUE_BYTES];
        for number in [0, 1, 77_777, u64::MAX] {
            entries.fill(number, &mut value);
            assert!(entries.is_value(number, &value));
            assert!(!entries.is_value(number ^ 1, &value));
            for at in [0, 7, 8, 15, 16, 2000, VALUE_BYTES - 1] {
                value[at] ^= 1;
                assert!(!entries.is_value(number, &value), "byte {at}");
                value[at] ^= 1;
            }
            assert!(!entries.is_value(number, &value[1..]));
        }
    }

    #[test]
    fn keys_are_different_and_in_no_order() {
        let entries = Entries::new();
        let mut keys: Vec<_> = (0..10_000).map(|number| entries.key(number)).collect();
        assert!(keys.windows(2).filter(|pair| pair[0] < pair[1]).count() < 6000);
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 10_000);
    }
}

//! `db_bench`'s keys.

/// Length of a key in bytes.
pub const KEY_LEN: usize = 16;

/// The key of number `n`: eight bytes, big-endian, and eight characters `0`.
#[inline]
pub fn key(n: u64) -> [u8; KEY_LEN] {
    let mut key = [b'0'; KEY_LEN];
    key[..8].copy_from_slice(&n.to_be_bytes());
    key
}

/// A key between that of `n` and the next one; absent from every database.
#[inline]
pub fn absent_key(n: u64) -> [u8; KEY_LEN] {
    let mut key = key(n);
    key[KEY_LEN - 1] = b'1';
    key
}

/// Maps a random number evenly to one below `bound`.
#[inline]
pub fn below(random: u64, bound: u64) -> u64 {
    ((u128::from(random) * u128::from(bound)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_the_big_endian_number_followed_by_text_zeros() {
        assert_eq!(&key(0x1388), b"\0\0\0\0\0\0\x13\x8800000000");
        assert!(key(255) < key(256), "keys are in the order of their numbers");
    }

    #[test]
    fn an_absent_key_lies_between_two_keys() {
        assert!(key(7) < absent_key(7) && absent_key(7) < key(8));
    }

    #[test]
    fn random_numbers_reach_both_ends_of_the_range() {
        assert_eq!(below(0, 10), 0);
        assert_eq!(below(u64::MAX, 10), 9);
        assert_eq!(below(u64::MAX / 2, 10), 4);
    }
}

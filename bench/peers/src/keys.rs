//! `db_bench`'s keys.

/// Length of a key.
pub const KEY_LEN: usize = 16;

/// The key of number `n`: eight bytes, big-endian, and eight characters `0`.
pub fn key(n: u64) -> [u8; KEY_LEN] {
    let mut key = [b'0'; KEY_LEN];
    key[..8].copy_from_slice(&n.to_be_bytes());
    key
}

/// A key between that of `n` and the next one; absent from every database.
pub fn absent_key(n: u64) -> [u8; KEY_LEN] {
    let mut key = key(n);
    key[KEY_LEN - 1] = b'1';
    key
}

#[cfg(test)]
mod tests {
    use super::{absent_key, key};

    #[test]
    fn a_key_is_the_big_endian_number_followed_by_text_zeros() {
        assert_eq!(&key(0x1388), b"\0\0\0\0\0\0\x13\x8800000000");
    }

    #[test]
    fn an_absent_key_lies_between_two_keys() {
        assert!(key(7) < absent_key(7) && absent_key(7) < key(8));
    }
}

//! The identity of a file: the text of a session's id, and the unique id that the MANIFEST has.

use crate::sst::builder::options::SstIdentity;

const DIGITS: &[u8; 36] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ";
/// Digits of the upper and of the lower part of a session's id.
const UPPER_DIGITS: u32 = 8;
const LOWER_DIGITS: u32 = 12;

/// The id of a session from random numbers, as RocksDB writes it: twenty digits to the base 36.
pub fn session_id(random: [u64; 2]) -> String {
    let upper = random[0] % 36u64.pow(UPPER_DIGITS);
    // RocksDB keeps 62 bits of it.
    let lower = random[1] >> 2;
    let mut text = vec![0; (UPPER_DIGITS + LOWER_DIGITS) as usize];
    let (upper_text, lower_text) = text.split_at_mut(UPPER_DIGITS as usize);
    for (mut number, digits) in [(upper, upper_text), (lower, lower_text)] {
        for digit in digits.iter_mut().rev() {
            *digit = DIGITS[(number % 36) as usize];
            number /= 36;
        }
    }
    text.into_iter().map(char::from).collect()
}

impl SstIdentity {
    /// The unique id that the MANIFEST has, and that RocksDB compares with the file's properties
    /// when it opens the file. Zeros if the identity is not complete.
    pub fn unique_id(&self) -> [u64; 2] {
        if self.database.is_empty() || self.session.is_empty() || self.number == 0 {
            return [0; 2];
        }
        let (upper, lower) = session_numbers(&self.session);
        let database =
            twox_hash::XxHash3_128::oneshot_with_seed(upper, self.database.as_bytes()) >> 64;
        [lower, database as u64 ^ self.number]
    }
}

/// The two numbers of a session's id.
fn session_numbers(text: &str) -> (u64, u64) {
    let well_formed = || {
        let at = text.len().checked_sub(LOWER_DIGITS as usize).filter(|&at| (1..=12).contains(&at));
        let (upper, lower) = text.as_bytes().split_at_checked(at?)?;
        Some((number(upper)?, number(lower)?))
    };
    match well_formed() {
        Some((upper, lower)) => (upper >> 2, (lower & (u64::MAX >> 2)) | upper << 62),
        None => {
            let hash = twox_hash::XxHash3_128::oneshot(text.as_bytes());
            ((hash >> 64) as u64, (hash as u64).max(1))
        }
    }
}

fn number(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0u64, |number, digit| {
        let value = DIGITS.iter().position(|d| d == digit)?;
        Some(number.wrapping_mul(36).wrapping_add(value as u64))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unique_id_is_that_of_rocksdb() {
        let identity = SstIdentity {
            database: "my-db-id".into(),
            session: "ABCDEFGHIJ0123456789".into(),
            number: 10,
        };
        assert_eq!(identity.unique_id(), [7050346682568527641, 17089169688635599045]);
        let incomplete = SstIdentity { database: String::new(), ..identity };
        assert_eq!(incomplete.unique_id(), [0, 0]);
    }

    #[test]
    fn session_ids_are_twenty_digits_and_differ() {
        assert_eq!(session_id([0, 0]), "0".repeat(20));
        assert_eq!(session_id([35, 35 << 2]), "0000000Z00000000000Z");
        assert_eq!(session_id([u64::MAX, u64::MAX]).len(), 20);
        assert_ne!(session_id([1, 2]), session_id([1, 9]));
    }
}

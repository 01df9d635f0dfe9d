//! The password that clients must give, if one is set.

use std::fmt;
use std::hint::black_box;

/// A password. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(Vec<u8>);

impl Password {
    /// `None` for the empty word, which means no password.
    pub fn new(word: impl Into<Vec<u8>>) -> Option<Self> {
        Some(word.into()).filter(|word| !word.is_empty()).map(Self)
    }

    /// Whether `given` is the password. The time taken depends only on the length of `given`, not
    /// on how much of it is right.
    pub fn is(&self, given: &[u8]) -> bool {
        let expected = self.0.iter().cycle();
        let different = given.iter().zip(expected).fold(0, |all, (a, b)| black_box(all | (a ^ b)));
        (different == 0) & (given.len() == self.0.len())
    }

    pub(crate) fn reveal(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_word_passes() {
        let password = Password::new("secret").unwrap();
        assert!(password.is(b"secret"));
        for wrong in ["", "s", "secrex", "secretsecret", "Secret", "secret\0"] {
            assert!(!password.is(wrong.as_bytes()), "{wrong:?}");
        }
        assert!(Password::new("").is_none());
        assert_eq!(format!("{password:?}"), "Password(..)");
    }
}

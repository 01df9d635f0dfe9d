//! Which keys a range has.

use std::ops::{Bound, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

/// Keys from one bound to another: `a..b`, `a..=b`, `a..`, `..b`, `..=b`, `..`, or a pair of
/// [`Bound`]s.
///
/// An empty range, such as one that ends before it begins, has no keys.
pub trait KeyRange: sealed::Sealed {
    #[doc(hidden)]
    fn into_bounds(self) -> (Bound<Vec<u8>>, Bound<Vec<u8>>);
}

mod sealed {
    pub trait Sealed {}
}

fn owned<K: AsRef<[u8]>>(bound: Bound<K>) -> Bound<Vec<u8>> {
    bound.map(|key| key.as_ref().to_vec())
}

macro_rules! key_range {
    ($([$($parameter:tt)*] $range:ty, $self:ident => $from:expr, $to:expr;)*) => {$(
        impl $($parameter)* sealed::Sealed for $range {}
        impl $($parameter)* KeyRange for $range {
            fn into_bounds($self) -> (Bound<Vec<u8>>, Bound<Vec<u8>>) {
                (owned($from), owned($to))
            }
        }
    )*};
}

key_range! {
    [] RangeFull, self => Bound::<&[u8]>::Unbounded, Bound::<&[u8]>::Unbounded;
    [<K: AsRef<[u8]>>] std::ops::Range<K>, self =>
        Bound::Included(self.start), Bound::Excluded(self.end);
    [<K: AsRef<[u8]>>] RangeFrom<K>, self => Bound::Included(self.start), Bound::<&[u8]>::Unbounded;
    [<K: AsRef<[u8]>>] RangeTo<K>, self => Bound::<&[u8]>::Unbounded, Bound::Excluded(self.end);
    [<K: AsRef<[u8]>>] RangeToInclusive<K>, self =>
        Bound::<&[u8]>::Unbounded, Bound::Included(self.end);
    [<K: AsRef<[u8]>>] RangeInclusive<K>, self =>
        Bound::Included(self.start()), Bound::Included(self.end());
    [<K: AsRef<[u8]>>] (Bound<K>, Bound<K>), self => self.0, self.1;
}

/// A bound as `MR.RANGE` and `MR.DELRANGE` write it; `open` where there is none.
pub(crate) fn word(bound: &Bound<Vec<u8>>, open: u8) -> Vec<u8> {
    let (sign, key) = match bound {
        Bound::Included(key) => (b'[', key),
        Bound::Excluded(key) => (b'(', key),
        Bound::Unbounded => return vec![open],
    };
    let mut word = Vec::with_capacity(key.len() + 1);
    word.push(sign);
    word.extend_from_slice(key);
    word
}

/// All keys with a prefix.
pub(crate) fn prefix(prefix: &[u8]) -> (Bound<Vec<u8>>, Bound<Vec<u8>>) {
    let (lower, mut upper) = (Bound::Included(prefix.to_vec()), prefix.to_vec());
    while let Some(last) = upper.pop() {
        if last < u8::MAX {
            upper.push(last + 1);
            return (lower, Bound::Excluded(upper));
        }
    }
    (lower, Bound::Unbounded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(range: impl KeyRange) -> (Vec<u8>, Vec<u8>) {
        let (lower, upper) = range.into_bounds();
        (word(&lower, b'-'), word(&upper, b'+'))
    }

    #[test]
    fn bounds_are_written_as_the_server_reads_them() {
        assert_eq!(words(..), (b"-".to_vec(), b"+".to_vec()));
        assert_eq!(words("a".."b"), (b"[a".to_vec(), b"(b".to_vec()));
        assert_eq!(words("a"..="b"), (b"[a".to_vec(), b"[b".to_vec()));
        assert_eq!(
            words((Bound::Excluded("a"), Bound::Unbounded)),
            (b"(a".to_vec(), b"+".to_vec())
        );
    }

    #[test]
    fn a_prefix_ends_before_the_next_one() {
        assert_eq!(words(prefix(b"ab")), (b"[ab".to_vec(), b"(ac".to_vec()));
        assert_eq!(words(prefix(b"a\xff")), (b"[a\xff".to_vec(), b"(b".to_vec()));
        assert_eq!(words(prefix(b"\xff")), (b"[\xff".to_vec(), b"+".to_vec()));
        assert_eq!(words(prefix(b"")), (b"[".to_vec(), b"+".to_vec()));
    }
}

//! Which keys a range has.

use std::ops::Bound;

pub(crate) use ::client::KeyRange;

/// The bounds of the engine: the first key, and the first one that is not meant any more.
#[derive(Debug)]
pub(crate) struct Limits {
    pub lower: Option<Vec<u8>>,
    pub upper: Option<Vec<u8>>,
    /// They are right in bytewise order only.
    pub bytewise: bool,
}

/// The key that follows in bytewise order.
fn successor(mut key: Vec<u8>) -> Vec<u8> {
    key.push(0);
    key
}

/// Bounds as limits.
pub(crate) fn limits(keys: impl KeyRange) -> Limits {
    let (lower, upper) = keys.into_bounds();
    Limits {
        bytewise: matches!(lower, Bound::Excluded(_)) || matches!(upper, Bound::Included(_)),
        lower: match lower {
            Bound::Included(key) => Some(key),
            Bound::Excluded(key) => Some(successor(key)),
            Bound::Unbounded => None,
        },
        upper: match upper {
            Bound::Included(key) => Some(successor(key)),
            Bound::Excluded(key) => Some(key),
            Bound::Unbounded => None,
        },
    }
}

/// All keys with a prefix.
pub(crate) fn prefix(prefix: &[u8]) -> Limits {
    let (lower, mut upper) = (Some(prefix.to_vec()), prefix.to_vec());
    while let Some(last) = upper.pop() {
        if last < u8::MAX {
            upper.push(last + 1);
            return Limits { lower, upper: Some(upper), bytewise: true };
        }
    }
    Limits { lower, upper: None, bytewise: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(limits: &Limits) -> (Option<&[u8]>, Option<&[u8]>) {
        (limits.lower.as_deref(), limits.upper.as_deref())
    }

    #[test]
    fn every_kind_of_range_has_its_limits() {
        assert_eq!(pair(&limits(..)), (None, None));
        assert_eq!(pair(&limits("a".."b")), (Some(&b"a"[..]), Some(&b"b"[..])));
        assert_eq!(pair(&limits("a"..="b")), (Some(&b"a"[..]), Some(&b"b\0"[..])));
        assert_eq!(pair(&limits(vec![1]..)), (Some(&[1][..]), None));
        assert_eq!(pair(&limits(.."b")), (None, Some(&b"b"[..])));
        assert_eq!(pair(&limits(..="b")), (None, Some(&b"b\0"[..])));
        let open = (Bound::Excluded("a"), Bound::Unbounded);
        assert_eq!(pair(&limits(open)), (Some(&b"a\0"[..]), None));
    }

    #[test]
    fn a_prefix_ends_before_the_next_one() {
        assert_eq!(pair(&prefix(b"ab")), (Some(&b"ab"[..]), Some(&b"ac"[..])));
        assert_eq!(pair(&prefix(b"a\xff\xff")), (Some(&b"a\xff\xff"[..]), Some(&b"b"[..])));
        assert_eq!(pair(&prefix(b"\xff")), (Some(&b"\xff"[..]), None));
        assert_eq!(pair(&prefix(b"")), (Some(&b""[..]), None));
    }
}

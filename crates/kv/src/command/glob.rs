//! Redis's glob patterns: `*`, `?`, `[a-z]`, `[^a]`, and `\` before a literal byte.
//!
//! Matching backtracks only to the last `*`, so it costs at most the product of both lengths and
//! needs no recursion.

/// Whether all of `text` matches `pattern`.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut from) = (0, 0);
    // Where to continue when the bytes after the last star do not match.
    let mut retry: Option<(usize, usize)> = None;
    loop {
        let step = match pattern.get(at) {
            Some(b'*') => {
                while pattern.get(at) == Some(&b'*') {
                    at += 1;
                }
                if at == pattern.len() {
                    return true;
                }
                retry = Some((at, from));
                continue;
            }
            None if from == text.len() => return true,
            None => None,
            Some(_) => text.get(from).and_then(|&byte| one(&pattern[at..], byte)),
        };
        match (step, retry) {
            (Some(used), _) => {
                at += used;
                from += 1;
            }
            (None, Some((after_star, start))) if start < text.len() => {
                retry = Some((after_star, start + 1));
                (at, from) = (after_star, start + 1);
            }
            (None, _) => return false,
        }
    }
}

/// Matches one byte against the first element of `pattern`, which is not a star; returns the
/// element's length.
fn one(pattern: &[u8], byte: u8) -> Option<usize> {
    match pattern {
        [b'?', ..] => Some(1),
        [b'[', rest @ ..] => {
            let (found, used) = class(rest, byte);
            found.then_some(1 + used)
        }
        [b'\\', escaped, ..] => (*escaped == byte).then_some(2),
        [literal, ..] => (*literal == byte).then_some(1),
        [] => None,
    }
}

/// Whether `byte` is in the class whose content `pattern` begins with, and the length of the class
/// with its closing bracket. A class without a closing bracket ends with the pattern.
fn class(pattern: &[u8], byte: u8) -> (bool, usize) {
    let (negated, mut at) = if pattern.first() == Some(&b'^') { (true, 1) } else { (false, 0) };
    let mut found = false;
    loop {
        match &pattern[at..] {
            [] => return (found != negated, at),
            [b']', ..] => return (found != negated, at + 1),
            [b'\\', escaped, ..] => {
                found |= *escaped == byte;
                at += 2;
            }
            [first, b'-', last, ..] => {
                found |= (*first.min(last)..=*first.max(last)).contains(&byte);
                at += 3;
            }
            [literal, ..] => {
                found |= *literal == byte;
                at += 1;
            }
        }
    }
}

/// The bytes that every text that matches `pattern` begins with.
pub fn literal_prefix(pattern: &[u8]) -> Vec<u8> {
    let mut prefix = Vec::new();
    let mut rest = pattern;
    loop {
        match rest {
            [] | [b'*' | b'?' | b'[', ..] | [b'\\'] => return prefix,
            [b'\\', escaped, tail @ ..] => {
                prefix.push(*escaped);
                rest = tail;
            }
            [literal, tail @ ..] => {
                prefix.push(*literal);
                rest = tail;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The simplest correct matcher: by recursion.
    fn slow(pattern: &[u8], text: &[u8]) -> bool {
        match pattern {
            [] => text.is_empty(),
            [b'*', rest @ ..] => (0..=text.len()).any(|at| slow(rest, &text[at..])),
            _ => text.split_first().is_some_and(|(&byte, tail)| {
                one(pattern, byte).is_some_and(|used| slow(&pattern[used..], tail))
            }),
        }
    }

    #[test]
    fn patterns_match_as_in_redis() {
        for (pattern, text, expected) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("a*", "abc", true),
            ("*c", "abc", true),
            ("a*c", "abbbc", true),
            ("a*b*c", "axbxbxc", true),
            ("a*b*c", "axbxbx", false),
            ("h?llo", "hello", true),
            ("h?llo", "hllo", false),
            ("h[ae]llo", "hallo", true),
            ("h[^e]llo", "hello", false),
            ("h[^e]llo", "hallo", true),
            ("h[a-c]llo", "hbllo", true),
            ("h[c-a]llo", "hbllo", true),
            ("h[a-c]llo", "hdllo", false),
            ("[\\]]", "]", true),
            ("[a", "a", true),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("a\\", "a\\", true),
            ("[]", "a", false),
            ("[]a", "a", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn a_pattern_of_many_stars_takes_no_exponential_time() {
        let pattern = b"a*".repeat(200);
        let mut text = vec![b'a'; 5000];
        text.push(b'b');
        let mut pattern_c = pattern.clone();
        pattern_c.push(b'c');
        assert!(matches(&pattern, &text));
        assert!(!matches(&pattern_c, &text));
    }

    #[test]
    fn prefixes_end_at_the_first_wild_card() {
        for (pattern, prefix) in [
            ("abc", "abc"),
            ("ab*c", "ab"),
            ("a\\*b?", "a*b"),
            ("*", ""),
            ("[a]", ""),
            ("a\\", "a"),
        ] {
            assert_eq!(literal_prefix(pattern.as_bytes()), prefix.as_bytes(), "{pattern}");
        }
    }

    proptest! {
        #[test]
        fn matching_agrees_with_the_definition(pattern in "[ab*?\\[\\]^\\\\-]{0,8}", text in "[ab\\-\\]]{0,8}") {
            let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
            prop_assert_eq!(matches(pattern, text), slow(pattern, text));
            if matches(pattern, text) {
                prop_assert!(text.starts_with(&literal_prefix(pattern)));
            }
        }
    }
}

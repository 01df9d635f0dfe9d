//! Parses decimal integers as strictly as Redis, and formats them as fast as replies need.

/// Room for any `i64` in decimal, sign included.
pub const INTEGER_BYTES_MAX: usize = 20;

const PAIRS: &[u8; 200] = b"0001020304050607080910111213141516171819\
2021222324252627282930313233343536373839\
4041424344454647484950515253545556575859\
6061626364656667686970717273747576777879\
8081828384858687888990919293949596979899";

/// Writes `value` in decimal to the end of `buffer` and returns the digits.
pub fn format_i64(buffer: &mut [u8; INTEGER_BYTES_MAX], value: i64) -> &[u8] {
    let mut rest = value.unsigned_abs();
    let mut at = INTEGER_BYTES_MAX;
    while rest >= 100 {
        let pair = (rest % 100) as usize * 2;
        rest /= 100;
        at -= 2;
        buffer[at..at + 2].copy_from_slice(&PAIRS[pair..pair + 2]);
    }
    if rest >= 10 {
        let pair = rest as usize * 2;
        at -= 2;
        buffer[at..at + 2].copy_from_slice(&PAIRS[pair..pair + 2]);
    } else {
        at -= 1;
        buffer[at] = b'0' + rest as u8;
    }
    if value < 0 {
        at -= 1;
        buffer[at] = b'-';
    }
    &buffer[at..]
}

/// Parses a decimal `i64` in its canonical form: no space, no `+`, no leading zero, no `-0`.
pub fn parse_i64(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    match digits {
        [b'0'] if !negative => return Some(0),
        [b'1'..=b'9', ..] if digits.len() < INTEGER_BYTES_MAX => {}
        _ => return None,
    }
    let mut magnitude = 0u64;
    for &digit in digits {
        let digit = digit.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        magnitude = magnitude.checked_mul(10)?.checked_add(u64::from(digit))?;
    }
    if negative {
        // `i64::MIN` has no positive counterpart.
        (magnitude <= i64::MIN.unsigned_abs()).then(|| (magnitude as i64).wrapping_neg())
    } else {
        i64::try_from(magnitude).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(value: i64) -> String {
        let mut buffer = [0; INTEGER_BYTES_MAX];
        String::from_utf8(format_i64(&mut buffer, value).to_vec()).unwrap()
    }

    #[test]
    fn edges_format_and_parse() {
        for value in [0, 1, 9, 10, 99, 100, 101, 999, 1000, -1, -10, i64::MAX, i64::MIN] {
            assert_eq!(text(value), value.to_string());
            assert_eq!(parse_i64(text(value).as_bytes()), Some(value));
        }
    }

    #[test]
    fn only_the_canonical_form_is_a_number() {
        for bad in [
            "",
            "-",
            "+1",
            "01",
            "00",
            "-0",
            "-01",
            " 1",
            "1 ",
            "1a",
            "a",
            "9223372036854775808",
            "-9223372036854775809",
            "100000000000000000000",
        ] {
            assert_eq!(parse_i64(bad.as_bytes()), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn every_integer_round_trips(value: i64) {
            prop_assert_eq!(text(value), value.to_string());
            prop_assert_eq!(parse_i64(text(value).as_bytes()), Some(value));
        }

        #[test]
        fn parsing_agrees_with_the_standard_library_on_canonical_text(bytes in "[-+0-9 a]{0,22}") {
            let ours = parse_i64(bytes.as_bytes());
            let theirs = bytes.parse::<i64>().ok().filter(|value| value.to_string() == bytes);
            prop_assert_eq!(ours, theirs);
        }
    }
}

//! The time until which a certificate is valid (RFC 5280, 4.1.2.5), for a warning. Anything
//! unexpected is `None`.

/// The second (Unix time) after which a certificate, in DER, is no longer valid.
pub(super) fn not_after_unix_s(certificate: &[u8]) -> Option<i64> {
    const SEQUENCE: u8 = 0x30;
    const VERSION: u8 = 0xa0;

    let (certificate, _) = value_of(SEQUENCE, certificate)?;
    let (mut rest, _) = value_of(SEQUENCE, certificate)?;
    if rest.first() == Some(&VERSION) {
        (_, rest) = value_of(VERSION, rest)?;
    }
    // The serial number, the signature's algorithm, the issuer.
    for _ in 0..3 {
        (_, _, rest) = element(rest)?;
    }
    let (validity, _) = value_of(SEQUENCE, rest)?;
    let (_, _, after) = element(validity)?;
    let (tag, time, _) = element(after)?;
    parse_time(tag, time)
}

/// The tag and the value of the first element, and what follows it.
fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        ..=0x7f => (usize::from(first), rest),
        0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(first - 0x80))?;
            (digits.iter().fold(0, |length, &digit| length << 8 | usize::from(digit)), rest)
        }
        _ => return None,
    };
    let (value, rest) = rest.split_at_checked(length)?;
    Some((tag, value, rest))
}

fn value_of(wanted: u8, bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (tag, value, rest) = element(bytes)?;
    (tag == wanted).then_some((value, rest))
}

/// `UTCTime` (`YYMMDDhhmmssZ`) or `GeneralizedTime` (`YYYYMMDDhhmmssZ`).
fn parse_time(tag: u8, text: &[u8]) -> Option<i64> {
    let digits = text.strip_suffix(b"Z")?;
    let number = |text: &[u8]| std::str::from_utf8(text).ok()?.parse::<u16>().ok().map(i64::from);
    let (year, rest) = match (tag, digits.len()) {
        (0x17, 12) => match number(&digits[..2])? {
            year @ 50.. => (1900 + year, &digits[2..]),
            year => (2000 + year, &digits[2..]),
        },
        (0x18, 14) => (number(&digits[..4])?, &digits[4..]),
        _ => return None,
    };
    let part = |at: usize| number(&rest[at..at + 2]);
    let (month, day) = (part(0)?, part(2)?);
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let seconds = part(4)? * 3600 + part(6)? * 60 + part(8)?;
    Some(days_since_1970(year, month, day) * 86_400 + seconds)
}

/// Days from 1970-01-01 to a date of the Gregorian calendar. Years begin in March here, so that the
/// leap day is the last one.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let of_years = 365 * year + year / 4 - year / 100 + year / 400;
    let of_months = (153 * month + 2) / 5;
    of_years + of_months + day - 1 - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_unix_seconds() {
        assert_eq!(parse_time(0x17, b"700101000000Z"), Some(0));
        assert_eq!(parse_time(0x17, b"241231235959Z"), Some(1_735_689_599));
        assert_eq!(parse_time(0x18, b"20000229120000Z"), Some(951_825_600));
        assert_eq!(parse_time(0x18, b"20991231235959Z"), Some(4_102_444_799));
        for (tag, bad) in [(0x17, &b"7001010000Z"[..]), (0x18, b"2000x229120000Z"), (2, b"1Z")] {
            assert_eq!(parse_time(tag, bad), None);
        }
        assert_eq!(parse_time(0x17, b"701301000000Z"), None, "there is no thirteenth month");
    }

    #[test]
    fn bytes_that_are_no_certificate_have_no_time() {
        for bytes in [&b""[..], b"\x30", b"\x30\x84\xff\xff\xff\xff", b"\x30\x80", b"\x30\x00"] {
            assert_eq!(not_after_unix_s(bytes), None);
        }
    }
}

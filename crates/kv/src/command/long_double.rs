//! The numbers of `INCRBYFLOAT`: x86's 80-bit floating point, whose results Redis stores as text.
//!
//! A number is `mantissa * 2^exponent`; a normal mantissa has its highest bit set, so it has 64
//! significant bits. Texts are read with correct rounding (half to even) like `strtold`, a sum is
//! rounded once, and the output is that of `printf("%.17Lf")` without trailing zeros. So sums of
//! decimal fractions come out as people write them: 0.1 + 0.2 is 0.3.

use std::cmp::Ordering;

/// Maximum length of a number's text, as in Redis.
const TEXT_BYTES_MAX: usize = 5 * 1024;
/// The exponent of the smallest numbers.
const EXPONENT_MIN: i32 = -16445;
/// The exponent of the largest finite numbers.
const EXPONENT_MAX: i32 = 16320;
/// A decimal number whose first digit has a larger exponent is infinite.
const DECIMAL_EXPONENT_MAX: i64 = 4940;
/// One below this is zero.
const DECIMAL_EXPONENT_MIN: i64 = -4960;
/// The same for hexadecimal numbers, in bits.
const BINARY_EXPONENT_MAX: i64 = 20_000;
/// Number of decimals written.
const DECIMALS: usize = 17;

/// An 80-bit number, see the module text. Infinity and NaN may be summands, but are never written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LongDouble {
    Finite { negative: bool, mantissa: u64, exponent: i32 },
    Infinite { negative: bool },
    NotANumber,
}

impl LongDouble {
    pub const ZERO: Self = Self::Finite { negative: false, mantissa: 0, exponent: EXPONENT_MIN };

    /// Parses a number, or infinity, that takes all of `text`. A number too large or too small to
    /// be distinguished from infinity or zero is invalid.
    pub fn parse(text: &[u8]) -> Option<Self> {
        if text.len() >= TEXT_BYTES_MAX {
            return None;
        }
        let (negative, text) = match text {
            [b'-', rest @ ..] => (true, rest),
            [b'+', rest @ ..] => (false, rest),
            rest => (false, rest),
        };
        if text.eq_ignore_ascii_case(b"inf") || text.eq_ignore_ascii_case(b"infinity") {
            return Some(Self::Infinite { negative });
        }
        let (number, is_zero) = match text {
            [b'0', b'x' | b'X', rest @ ..] => hexadecimal(negative, rest)?,
            _ => decimal(negative, text)?,
        };
        match number {
            Self::Finite { mantissa: 0, .. } if !is_zero => None,
            Self::Finite { .. } => Some(number),
            _ => None,
        }
    }

    /// The sum, rounded once.
    pub fn add(self, other: Self) -> Self {
        let (a, b) = match (self, other) {
            (Self::NotANumber, _) | (_, Self::NotANumber) => return Self::NotANumber,
            (Self::Infinite { negative: a }, Self::Infinite { negative: b }) if a != b => {
                return Self::NotANumber;
            }
            (infinite @ Self::Infinite { .. }, _) | (_, infinite @ Self::Infinite { .. }) => {
                return infinite;
            }
            (
                Self::Finite { negative: a, mantissa: m, exponent: e },
                Self::Finite { negative: b, mantissa: n, exponent: f },
            ) => match (e, m).cmp(&(f, n)) {
                Ordering::Less => ((b, n, f), (a, m, e)),
                _ => ((a, m, e), (b, n, f)),
            },
        };
        // `a` is the larger one, shifted up by 60 bits; bits of `b` below that only break ties.
        let large = u128::from(a.1) << 60;
        let distance = (a.2 - b.2).unsigned_abs();
        let (small, lost) = if distance <= 60 {
            (u128::from(b.1) << (60 - distance), false)
        } else {
            let shift = distance - 60;
            let kept = b.1.checked_shr(shift).unwrap_or(0);
            (u128::from(kept), kept.checked_shl(shift).unwrap_or(0) != b.1)
        };
        let sum = if a.0 == b.0 { large + small } else { large - small - u128::from(lost) };
        round(a.0 && sum > 0, sum, a.2 - 60, lost)
    }

    /// Formats it as Redis does; `None` when it is not finite.
    pub fn write(self) -> Option<String> {
        let Self::Finite { negative, mantissa, exponent } = self else { return None };
        let mut text = if exponent >= 0 {
            let mut whole = Big::from(u128::from(mantissa));
            whole.shift_left(exponent as u32);
            whole.to_decimal()
        } else {
            let scaled = u128::from(mantissa) * 10_u128.pow(DECIMALS as u32);
            let shift = exponent.unsigned_abs();
            let units = if shift >= 128 {
                0
            } else {
                let (units, rest) = (scaled >> shift, scaled & ((1 << shift) - 1));
                let half = 1 << (shift - 1);
                units + u128::from(rest > half || (rest == half && units & 1 == 1))
            };
            let one = 10_u128.pow(DECIMALS as u32);
            let text = format!("{}.{:0DECIMALS$}", units / one, units % one);
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        };
        if negative && text != "0" {
            text.insert(0, '-');
        }
        Some(text)
    }
}

/// The number nearest to `(mantissa + something below 1 if there is a rest) * 2^exponent`. With a
/// rest, the mantissa has at least two bits more than are kept.
fn round(negative: bool, mantissa: u128, exponent: i32, rest: bool) -> LongDouble {
    let bits = (128 - mantissa.leading_zeros()) as i32;
    let shift = (bits - 64).max(EXPONENT_MIN - exponent).max(0) as u32;
    let (mut kept, exponent) = if shift == 0 {
        (mantissa, exponent)
    } else if shift >= 128 {
        (0, EXPONENT_MIN)
    } else {
        let (kept, low) = (mantissa >> shift, mantissa & ((1 << shift) - 1));
        let up = match low.cmp(&(1 << (shift - 1))) {
            Ordering::Greater => true,
            Ordering::Equal => rest || kept & 1 == 1,
            Ordering::Less => false,
        };
        (kept + u128::from(up), exponent + shift as i32)
    };
    let mut exponent = exponent;
    if kept >> 64 != 0 {
        kept >>= 1;
        exponent += 1;
    }
    let kept = kept as u64;
    if kept == 0 {
        return LongDouble::Finite { negative, mantissa: 0, exponent: EXPONENT_MIN };
    }
    let up = (kept.leading_zeros() as i32).min(exponent - EXPONENT_MIN);
    let (mantissa, exponent) = (kept << up, exponent - up);
    if exponent > EXPONENT_MAX {
        return LongDouble::Infinite { negative };
    }
    LongDouble::Finite { negative, mantissa, exponent }
}

/// The number nearest to `above / below * 2^exponent`.
fn nearest(negative: bool, mut above: Big, mut below: Big, exponent: i32) -> LongDouble {
    // A quotient of 66 to 68 bits.
    let shift = above.bits() as i32 - below.bits() as i32 - 67;
    match shift {
        0.. => below.shift_left(shift as u32),
        _ => above.shift_left(shift.unsigned_abs()),
    }
    let mut quotient = 0_u128;
    for bit in (0..=68).rev() {
        let mut part = below.clone();
        part.shift_left(bit);
        if above.cmp(&part).is_ge() {
            above.subtract(&part);
            quotient |= 1 << bit;
        }
    }
    round(negative, quotient, exponent + shift, above.bits() > 0)
}

/// The digits before and after a point, the number of those after it, and the remaining text.
fn digits(text: &[u8], is_digit: fn(&u8) -> bool) -> Option<(Vec<u8>, usize, &[u8])> {
    let whole = text.iter().take_while(|byte| is_digit(byte)).count();
    let mut all = text[..whole].to_vec();
    let mut rest = &text[whole..];
    let mut decimals = 0;
    if let [b'.', more @ ..] = rest {
        decimals = more.iter().take_while(|byte| is_digit(byte)).count();
        all.extend_from_slice(&more[..decimals]);
        rest = &more[decimals..];
    }
    (!all.is_empty()).then_some((all, decimals, rest))
}

/// An exponent after its letter, or none; it must take all of `text`.
fn exponent(text: &[u8], letter: u8) -> Option<i64> {
    let number = match text {
        [] => return Some(0),
        [first, rest @ ..] if first.eq_ignore_ascii_case(&letter) => rest,
        _ => return None,
    };
    let (negative, number) = match number {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        rest => (false, rest),
    };
    if number.is_empty() || !number.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let size = number
        .iter()
        .fold(0_i64, |size, digit| (size * 10 + i64::from(digit - b'0')).min(1_000_000_000));
    Some(if negative { -size } else { size })
}

/// Parses a decimal number; also says whether it is written as zero.
fn decimal(negative: bool, text: &[u8]) -> Option<(LongDouble, bool)> {
    let (all, decimals, rest) = digits(text, u8::is_ascii_digit)?;
    let exponent = exponent(rest, b'e')? - decimals as i64;
    let leading = all.iter().take_while(|&&digit| digit == b'0').count();
    let significant = &all[leading..];
    if significant.is_empty() {
        return Some((LongDouble::ZERO, true));
    }
    let first = exponent + significant.len() as i64;
    if first > DECIMAL_EXPONENT_MAX {
        return Some((LongDouble::Infinite { negative }, false));
    }
    if first < DECIMAL_EXPONENT_MIN {
        return Some((LongDouble::ZERO, false));
    }
    let (mut above, mut below) = (Big::default(), Big::from(1));
    for digit in significant {
        above.multiply_add(10, u32::from(digit - b'0'));
    }
    let scaled = if exponent >= 0 { &mut above } else { &mut below };
    for _ in 0..exponent.unsigned_abs() {
        scaled.multiply_add(10, 0);
    }
    Some((nearest(negative, above, below, 0), false))
}

/// Parses a hexadecimal number after its `0x`.
fn hexadecimal(negative: bool, text: &[u8]) -> Option<(LongDouble, bool)> {
    let (all, decimals, rest) = digits(text, u8::is_ascii_hexdigit)?;
    let exponent = exponent(rest, b'p')? - 4 * decimals as i64;
    let mut above = Big::default();
    for &digit in &all {
        above.multiply_add(16, char::from(digit).to_digit(16).unwrap_or(0));
    }
    if above.bits() == 0 {
        return Some((LongDouble::ZERO, true));
    }
    let first = exponent + above.bits() as i64;
    if first > BINARY_EXPONENT_MAX {
        return Some((LongDouble::Infinite { negative }, false));
    }
    if first < -BINARY_EXPONENT_MAX {
        return Some((LongDouble::ZERO, false));
    }
    Some((nearest(negative, above, Big::from(1), exponent as i32), false))
}

/// A natural number of any size, lowest 32 bits first, without leading zero words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Big(Vec<u32>);

impl From<u128> for Big {
    fn from(mut value: u128) -> Self {
        let mut words = Vec::new();
        while value > 0 {
            words.push(value as u32);
            value >>= 32;
        }
        Self(words)
    }
}

impl Big {
    fn bits(&self) -> usize {
        self.0.last().map_or(0, |last| 32 * self.0.len() - last.leading_zeros() as usize)
    }

    fn multiply_add(&mut self, by: u32, and: u32) {
        let mut carry = u64::from(and);
        for word in &mut self.0 {
            carry += u64::from(*word) * u64::from(by);
            *word = carry as u32;
            carry >>= 32;
        }
        if carry > 0 {
            self.0.push(carry as u32);
        }
    }

    fn shift_left(&mut self, by: u32) {
        if self.0.is_empty() {
            return;
        }
        self.multiply_add(1 << (by % 32), 0);
        self.0.splice(0..0, std::iter::repeat_n(0, (by / 32) as usize));
    }

    fn cmp(&self, other: &Self) -> Ordering {
        let by_length = self.0.len().cmp(&other.0.len());
        by_length.then_with(|| self.0.iter().rev().cmp(other.0.iter().rev()))
    }

    /// Subtracts a number that is not larger.
    fn subtract(&mut self, other: &Self) {
        let mut borrow = 0;
        for (at, word) in self.0.iter_mut().enumerate() {
            let difference =
                i64::from(*word) - i64::from(other.0.get(at).copied().unwrap_or(0)) - borrow;
            borrow = i64::from(difference < 0);
            *word = difference as u32;
        }
        while self.0.last() == Some(&0) {
            self.0.pop();
        }
    }

    fn to_decimal(&self) -> String {
        let mut words = self.0.clone();
        let mut parts = Vec::new();
        while !words.is_empty() {
            let mut rest = 0_u64;
            for word in words.iter_mut().rev() {
                rest = rest << 32 | u64::from(*word);
                *word = (rest / 1_000_000_000) as u32;
                rest %= 1_000_000_000;
            }
            parts.push(rest);
            while words.last() == Some(&0) {
                words.pop();
            }
        }
        let mut text = parts.pop().unwrap_or(0).to_string();
        parts.iter().rev().for_each(|part| text.push_str(&format!("{part:09}")));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(a: &str, b: &str) -> String {
        let number = |text: &str| LongDouble::parse(text.as_bytes()).unwrap();
        number(a).add(number(b)).write().unwrap_or_else(|| "none".to_owned())
    }

    /// The results of redis-server 7.0.15 on x86-64.
    #[test]
    fn sums_are_those_of_redis() {
        for (a, b, expected) in [
            ("0.1", "0.2", "0.3"),
            ("10.50", "0.1", "10.6"),
            ("5.0e3", "2.0e2", "5200"),
            ("3", "-3", "0"),
            ("-0", "0", "0"),
            ("1", "1.005", "2.005"),
            ("0x10", "0x1.8p1", "19"),
            ("1e20", "1", "100000000000000000000"),
            ("18446744073709551615", "1", "18446744073709551616"),
            ("1e-30", "0", "0"),
            ("inf", "1", "none"),
            ("inf", "-inf", "none"),
            ("1e4932", "1e4932", "none"),
            ("-1.5", "0.25", "-1.25"),
            ("1e17", "0.1", "100000000000000000.1015625"),
            ("123456789.987654321", "1e-9", "123456789.98765432199434144"),
        ] {
            assert_eq!(sum(a, b), expected, "{a} + {b}");
            assert_eq!(sum(b, a), expected, "{b} + {a}");
        }
    }

    #[test]
    fn texts_that_are_not_numbers_are_refused() {
        for text in [
            "",
            " 1",
            "1 ",
            "x",
            "1.5x",
            ".",
            "-",
            "1e",
            "1e+",
            "0x",
            "nan",
            "infin",
            "1,5",
            "1\0",
            "1e5000",
            "1e-5000",
            "--1",
            "e5",
            "0x1p99999",
        ] {
            assert_eq!(LongDouble::parse(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(LongDouble::parse(&[b'1'; TEXT_BYTES_MAX]), None);
        for text in ["0e99999", "1.", ".5", "+1", "-.5e1", "1e4900", "3e-4950", "INFINITY"] {
            assert!(LongDouble::parse(text.as_bytes()).is_some(), "{text:?}");
        }
    }

    #[test]
    fn a_large_number_has_all_its_digits() {
        let text = sum("1e300", "0");
        assert_eq!(text.len(), 301);
        assert!(text.starts_with("1000000000000000000"));
        let exact = sum("0x1p200", "0");
        assert_eq!(exact, "1606938044258990275541962092341162602522202993782792835301376");
    }
}

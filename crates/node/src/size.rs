//! Sizes of memory as users write them: `512M`, `4G`, `65536`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer};

/// A number of bytes. Units are powers of 1024: `K`, `M`, `G`, `T`, each also as `KB` or `KiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl Size {
    /// The number of bytes, or `usize::MAX` if that is smaller.
    pub fn bytes(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let wrong = || format!("'{text}' is not a size: write bytes, or a number and K, M, G or T");
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let unit = unit.trim_start().to_ascii_lowercase();
        let shift = match unit.strip_suffix("ib").or(unit.strip_suffix('b')).unwrap_or(&unit) {
            "" if unit.ends_with("ib") => return Err(wrong()),
            "" => 0,
            "k" => 10,
            "m" => 20,
            "g" => 30,
            "t" => 40,
            _ => return Err(wrong()),
        };
        number
            .checked_mul(1 << shift)
            .map(Size)
            .ok_or_else(|| format!("'{text}' is above the limit of {} bytes", u64::MAX))
    }
}

impl fmt::Display for Size {
    /// Up to four digits and a unit, rounded to a tenth: `512 B`, `64 MiB`, `1.5 GiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1023.95 && unit + 1 < units.len() {
            value /= 1024.0;
            unit += 1;
        }
        if value.fract() < 0.05 || value.fract() >= 0.95 {
            write!(f, "{value:.0} {}", units[unit])
        } else {
            write!(f, "{value:.1} {}", units[unit])
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Size, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Bytes(u64),
            Text(String),
        }
        match Written::deserialize(from)
            .map_err(|_| serde::de::Error::custom("a size is a number or text such as \"4G\""))?
        {
            Written::Bytes(bytes) => Ok(Size(bytes)),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, bytes) in [
            ("0", 0),
            ("65536", 65536),
            ("100B", 100),
            ("4k", 4096),
            ("512M", 512 << 20),
            ("512 MiB", 512 << 20),
            ("4GB", 4 << 30),
            ("2T", 2 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "M", "4X", "4iB", "-1", "1.5G", "4 G G", "99999999999T", "４G"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_written_short() {
        let written = |bytes| Size(bytes).to_string();
        assert_eq!(written(512), "512 B");
        assert_eq!(written(4096), "4 KiB");
        assert_eq!(written(64 << 20), "64 MiB");
        assert_eq!(written(3 << 29), "1.5 GiB");
        assert_eq!(written((1 << 30) - 1), "1 GiB");
    }
}

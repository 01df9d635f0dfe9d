//! The version of Redis that clients are told.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

/// A version of Redis, such as 7.4.0. The default is the one whose commands there are.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct RedisVersion(String);

impl Default for RedisVersion {
    fn default() -> Self {
        Self(kv::REDIS_VERSION.to_owned())
    }
}

impl fmt::Display for RedisVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for RedisVersion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_number =
            |part: &str| (1..=5).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
        let parts: Vec<&str> = text.split('.').collect();
        match parts.len() == 3 && parts.into_iter().all(is_number) {
            true => Ok(Self(text.to_owned())),
            false => Err(format!("a version of Redis is like 7.4.0, not {text:?}")),
        }
    }
}

impl TryFrom<String> for RedisVersion {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_three_numbers() {
        for text in ["7.4.0", "8.10.123"] {
            assert_eq!(text.parse::<RedisVersion>().unwrap().to_string(), text);
        }
        for text in ["", "7", "7.4", "7.4.0.1", "7.4.x", "7..0", "v7.4.0", "7.4.0\r\n"] {
            assert!(text.parse::<RedisVersion>().is_err(), "{text}");
        }
    }
}

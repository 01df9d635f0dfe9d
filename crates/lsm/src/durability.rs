//! The levels of durability, and their names.

use std::fmt;
use std::str::FromStr;

/// What an acknowledged write survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Durability {
    /// The end of the process.
    Process,
    /// A power cut.
    #[default]
    Power,
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Durability::Process => "process",
            Durability::Power => "power",
        })
    }
}

impl FromStr for Durability {
    type Err = String;

    fn from_str(text: &str) -> Result<Durability, String> {
        match text {
            "process" => Ok(Durability::Process),
            "power" => Ok(Durability::Power),
            _ => Err(format!("durability must be process or power, not '{text}'")),
        }
    }
}

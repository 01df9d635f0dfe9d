//! The names of the levels of durability.

use std::fmt;
use std::str::FromStr;

use crate::write::wal_writer::Durability;

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
            _ => Err(format!("'{text}' is neither process nor power")),
        }
    }
}

//! The formats in which entries are printed and imported: the command line names them, `kv` uses
//! them.

use std::str::FromStr;

/// How bytes are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Escaped text.
    Text,
    /// Hexadecimal.
    Hex,
    /// One JSON object per entry; non-text bytes are hexadecimal.
    Json {
        /// Print all bytes in hexadecimal.
        hex: bool,
    },
    /// The Redis command that sets the entry.
    Resp,
}

impl Style {
    /// The style for these flags.
    pub fn new(json: bool, hex: bool) -> Style {
        match (json, hex) {
            (true, hex) => Style::Json { hex },
            (false, true) => Style::Hex,
            (false, false) => Style::Text,
        }
    }
}

impl FromStr for Style {
    type Err = String;

    fn from_str(text: &str) -> Result<Style, String> {
        match text {
            "text" => Ok(Style::Text),
            "hex" => Ok(Style::Hex),
            "json" => Ok(Style::Json { hex: false }),
            "resp" => Ok(Style::Resp),
            _ => Err(format!("format must be text, hex, json or resp, not '{text}'")),
        }
    }
}

//! How keys, values and entries are printed.

use std::io::Write;

use serde_json::{Map, Value, json};

use crate::output::{Out, Stop, escape_into, hex_into, put_bytes};

/// How bytes are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Escaped text.
    Text,
    /// Hexadecimal.
    Hex,
    /// One JSON object per entry; bytes that are no text, or all of them, in hexadecimal.
    Json {
        /// All bytes in hexadecimal.
        hex: bool,
    },
}

impl Style {
    /// The style that the flags ask for.
    pub fn new(json: bool, hex: bool) -> Style {
        match (json, hex) {
            (true, hex) => Style::Json { hex },
            (false, true) => Style::Hex,
            (false, false) => Style::Text,
        }
    }
}

/// Prints entries of a scan; keeps its line between them.
pub struct Lines {
    style: Style,
    line: String,
}

impl Lines {
    /// A printer.
    pub fn new(style: Style) -> Lines {
        Lines { style, line: String::new() }
    }

    /// Prints one entry.
    pub fn entry(&mut self, out: &mut Out, key: &[u8], value: &[u8]) -> Result<(), Stop> {
        self.line.clear();
        match self.style {
            Style::Text => {
                escape_into(&mut self.line, key);
                self.line.push('\t');
                escape_into(&mut self.line, value);
            }
            Style::Hex => {
                hex_into(&mut self.line, key);
                self.line.push(' ');
                hex_into(&mut self.line, value);
            }
            Style::Json { hex } => {
                let mut object = Map::new();
                put_bytes(&mut object, "key", key, hex);
                put_bytes(&mut object, "value", value, hex);
                return out.json(&Value::Object(object));
            }
        }
        out.line(&self.line)
    }
}

/// Prints what a get found.
pub fn value(out: &mut Out, style: Style, key: &[u8], value: Option<&[u8]>) -> Result<(), Stop> {
    if let Style::Json { hex } = style {
        let mut object = Map::new();
        put_bytes(&mut object, "key", key, hex);
        object.insert("found".to_owned(), json!(value.is_some()));
        if let Some(value) = value {
            put_bytes(&mut object, "value", value, hex);
        }
        return out.json(&Value::Object(object));
    }
    let Some(value) = value else {
        // Standard output stays empty, so that a script sees the difference to an empty value.
        let _ = writeln!(std::io::stderr(), "millrace: there is no such key");
        return Ok(());
    };
    let mut line = String::new();
    match style {
        Style::Hex => hex_into(&mut line, value),
        _ if out.is_terminal() => escape_into(&mut line, value),
        _ => {
            // For another program: the bytes themselves.
            out.bytes(value)?;
        }
    }
    out.line(&line)
}

//! How keys, values and entries are printed.

use std::io::Write;
use std::str::FromStr;

use resp::write_command;
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
    /// The command of Redis's protocol that sets the entry.
    Resp,
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

impl FromStr for Style {
    type Err = String;

    fn from_str(text: &str) -> Result<Style, String> {
        match text {
            "text" => Ok(Style::Text),
            "hex" => Ok(Style::Hex),
            "json" => Ok(Style::Json { hex: false }),
            "resp" => Ok(Style::Resp),
            _ => Err(format!("'{text}' is none of text, hex, json, resp")),
        }
    }
}

/// Renders entries; keeps its buffer between them. [`super::steps`] reads what this writes.
pub struct Lines {
    style: Style,
    text: String,
    command: Vec<u8>,
}

impl Lines {
    /// A printer.
    pub fn new(style: Style) -> Lines {
        Lines { style, text: String::new(), command: Vec::new() }
    }

    /// One entry with its newline, or the command that sets it.
    pub fn render(&mut self, key: &[u8], value: &[u8]) -> &[u8] {
        self.text.clear();
        match self.style {
            Style::Text => {
                escape_into(&mut self.text, key);
                self.text.push('\t');
                escape_into(&mut self.text, value);
            }
            Style::Hex => {
                hex_into(&mut self.text, key);
                self.text.push(' ');
                hex_into(&mut self.text, value);
            }
            Style::Json { hex } => {
                let mut object = Map::new();
                put_bytes(&mut object, "key", key, hex);
                put_bytes(&mut object, "value", value, hex);
                self.text = Value::Object(object).to_string();
            }
            Style::Resp => {
                self.command.clear();
                write_command(&mut self.command, &[b"SET", key, value]);
                return &self.command;
            }
        }
        self.text.push('\n');
        self.text.as_bytes()
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

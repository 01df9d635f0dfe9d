//! Prints keys, values and entries.

use std::io::Write;

use resp::write_command;
use serde_json::{Map, Value, json};

use crate::output::{Out, Stop, escape_into, hex_into, put_bytes};
use crate::style::Style;

/// Renders entries, and reuses its buffer. [`super::steps`] parses the result.
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

    /// Renders one entry with its newline, or the command that sets it.
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

/// Prints the result of a get.
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
        // Standard output stays empty, so that a script can tell this from an empty value.
        let _ = writeln!(std::io::stderr(), "millrace: the key does not exist");
        return Ok(());
    };
    let mut line = String::new();
    match style {
        Style::Hex => hex_into(&mut line, value),
        _ if out.is_terminal() => escape_into(&mut line, value),
        _ => {
            // Another program gets the bytes unchanged.
            out.bytes(value)?;
        }
    }
    out.line(&line)
}

//! The `kv` commands, on a directory or on a running node.
//!
//! Both kinds pass the same entries to the same printer, so the output does not depend on where the
//! data came from.

mod change;
mod directory;
mod import;
mod listing;
mod node;
mod print;
mod report;
mod stat;
mod steps;

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::time::Instant;

use serde_json::{Value, json};

use import::Input;
use listing::{Listed, Listing, Range};

use crate::args::{KvCommand, Source};
use crate::failure::{Failure, Verdict};
use crate::output::{Out, parse_hex};
use crate::style::Style;

/// The longest value of `kv put`, as in Redis (half of that in hexadecimal).
const VALUE_BYTES_MAX: u64 = 512 << 20;

/// Runs a command.
#[expect(clippy::disallowed_methods, reason = "a tool reports how long it took")]
pub fn run(command: KvCommand) -> Result<Verdict, Failure> {
    match command {
        KvCommand::Get { key, source, entries } => {
            let key = key_argument(key, "KEY", entries.hex)?;
            match &source.location.connect {
                Some(address) => node::get(address, &key, &source, &entries),
                None => directory::get(key, source, entries),
            }
        }
        KvCommand::Scan { reverse, from, to, limit, source, entries } => {
            let range = range((from, to), entries.hex, reverse, limit)?;
            let style = Style::new(source.json, entries.hex);
            let column_family = entries.column_family;
            list(Listing { range, column_family, style, out: None, bar: false }, source)?;
            Ok(Verdict::Good)
        }
        KvCommand::Export { format, out, from, to, column_family, source } => {
            if source.json && out.is_none() {
                return Err(Failure::new(
                    "--json without --out has no effect: it prints a summary",
                )
                .hint("for entries as JSON, use --format json"));
            }
            let range = range((from, to), format == Style::Hex, false, None)?;
            let (json, path) = (source.json, out.clone());
            let listing = Listing { range, column_family, style: format, out, bar: true };
            let listed = list(listing, source)?;
            if let Some(path) = path {
                listed.tell(json, &path)?;
            }
            Ok(Verdict::Good)
        }
        KvCommand::Put { key, value, hex, target } => {
            let key = key_argument(key, "KEY", hex)?;
            let value = value_argument(value, hex)?;
            let json = target.json;
            match &target.location.connect {
                Some(address) => node::put(address, &key, &value)?,
                None => change::put(key, value, target)?,
            }
            if json {
                tell(&json!({ "put": 1 }))?;
            }
            Ok(Verdict::Good)
        }
        KvCommand::Del { keys, hex, target } => {
            let keys: Vec<Vec<u8>> = keys
                .into_iter()
                .map(|key| key_argument(key, "KEY", hex))
                .collect::<Result<_, _>>()?;
            let (json, asked) = (target.json, keys.len());
            let deleted = match &target.location.connect {
                Some(address) => node::delete(address, &keys)?,
                None => change::delete(keys, target)?,
            };
            if json {
                tell(&json!({ "keys": asked, "deleted": deleted }))?;
            } else if deleted < asked as u64 {
                // Missing keys are worth a note, but all keys are gone as requested.
                let _ = writeln!(io::stderr(), "millrace: {deleted} of {asked} keys existed");
            }
            Ok(if deleted > 0 { Verdict::Good } else { Verdict::Bad })
        }
        KvCommand::Import { file, format, target } => {
            let file = file.filter(|path| path.as_os_str() != "-");
            let input = Input { file, style: format };
            let (json, begun) = (target.json, Instant::now());
            let (imported, into) = match &target.location.connect {
                Some(address) => (node::import(address, &input)?, address.clone()),
                None => {
                    let path = target.location.data.clone().unwrap_or_default();
                    (change::import(input, target)?, path.display().to_string())
                }
            };
            imported.tell(json, &into, begun.elapsed())?;
            Ok(Verdict::Good)
        }
        KvCommand::Stat { source } => match &source.location.connect {
            Some(address) => node::stat(address, &source),
            None => directory::stat(source),
        },
        KvCommand::Check { source } => match &source.location.connect {
            Some(_) => Err(Failure::new("cannot check a running node through its port").hint(
                "use --data DIR: the check reads the files, and works while a node serves them \
                 read-only",
            )),
            None => directory::check(source),
        },
    }
}

fn list(listing: Listing, source: Source) -> Result<Listed, Failure> {
    match &source.location.connect {
        Some(address) => node::list(address, &listing),
        None => directory::list(listing, source),
    }
}

fn range(
    (from, to): (Option<OsString>, Option<OsString>),
    hex: bool,
    reverse: bool,
    limit: Option<u64>,
) -> Result<Range, Failure> {
    let bound =
        |key: Option<OsString>, name| key.map(|key| key_argument(key, name, hex)).transpose();
    Ok(Range { from: bound(from, "--from")?, to: bound(to, "--to")?, reverse, limit })
}

fn tell(summary: &Value) -> Result<(), Failure> {
    let mut out = Out::new();
    out.json(summary)?;
    Ok(out.flush()?)
}

/// The value of an argument; `-` stands for the contents of standard input.
fn value_argument(value: OsString, hex: bool) -> Result<Vec<u8>, Failure> {
    if value != "-" {
        return key_argument(value, "VALUE", hex);
    }
    let mut bytes = Vec::new();
    let mut input = io::stdin().lock().take(VALUE_BYTES_MAX + 1);
    input
        .read_to_end(&mut bytes)
        .map_err(|error| Failure::new(format!("cannot read the value: {error}")))?;
    if bytes.len() as u64 > VALUE_BYTES_MAX {
        return Err(Failure::new("the value is longer than 512 MiB"));
    }
    match hex {
        true => key_argument(OsString::from_vec(bytes.trim_ascii().to_vec()), "VALUE", true),
        false => Ok(bytes),
    }
}

fn key_argument(key: OsString, name: &str, hex: bool) -> Result<Vec<u8>, Failure> {
    let bytes = key.into_vec();
    if !hex {
        return Ok(bytes);
    }
    parse_hex(&bytes).ok_or_else(|| {
        Failure::new(format!(
            "{name} must be hexadecimal with --hex, not '{}'",
            String::from_utf8_lossy(&bytes)
        ))
    })
}

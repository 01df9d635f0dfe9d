//! The `kv` commands, on a directory or on a running node.
//!
//! Both kinds pass the same entries to the same printer, so the output does not depend on where the
//! data came from.

mod change;
mod compact;
mod compaction;
mod copies;
mod destination;
mod directory;
mod families;
mod import;
mod ingest;
mod listing;
mod node;
mod original;
mod print;
mod repair;
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

use crate::args::{KvCommand, Source, Target};
use crate::failure::{Failure, Verdict};
use crate::output::{Out, parse_hex};
use crate::style::Style;

/// The longest value of `kv put`, as in Redis (half of that in hexadecimal).
const VALUE_BYTES_MAX: u64 = 512 << 20;

/// Runs a command.
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
            let range = range((from, to), format == Style::Hex, false, None)?;
            export(Listing { range, column_family, style: format, out, bar: true }, source)
        }
        KvCommand::Put { key, value, hex, target } => {
            put(key_argument(key, "KEY", hex)?, value_argument(value, hex)?, target)
        }
        KvCommand::Del { keys, hex, target } => {
            let keys = keys.into_iter().map(|key| key_argument(key, "KEY", hex));
            delete(keys.collect::<Result<_, _>>()?, target)
        }
        KvCommand::Import { file, format, resume, target } => {
            let file = file.filter(|path| path.as_os_str() != "-");
            import(Input { file, style: format }, resume, target)
        }
        KvCommand::Checkpoint(args) => copies::checkpoint(args),
        KvCommand::Backup { command } => copies::backup(command),
        KvCommand::Ingest(args) => ingest::run(args),
        KvCommand::Compact(args) => compact::run(args),
        KvCommand::Compaction { command } => compaction::run(command),
        KvCommand::Restore(args) => copies::restore(args),
        KvCommand::ColumnFamilies { command } => families::run(command),
        KvCommand::Stat { source } => match &source.location.connect {
            Some(address) => node::stat(address, &source),
            None => directory::stat(source),
        },
        KvCommand::Check { source, repair: true, dry_run } => repair::run(source, dry_run),
        KvCommand::Check { source, .. } => match &source.location.connect {
            Some(_) => Err(Failure::new("cannot check a running node through its port").hint(
                "use --data DIR: the check reads the files, and works while a node serves them \
                 read-only",
            )),
            None => directory::check(source),
        },
    }
}

fn export(listing: Listing, source: Source) -> Result<Verdict, Failure> {
    if source.json && listing.out.is_none() {
        return Err(Failure::new("--json prints a summary of the export, which needs --out FILE")
            .hint("for entries as JSON, use --format json"));
    }
    let (json, path) = (source.json, listing.out.clone());
    let listed = list(listing, source)?;
    if let Some(path) = path {
        listed.print(json, &path)?;
    }
    Ok(Verdict::Good)
}

fn put(key: Vec<u8>, value: Vec<u8>, target: Target) -> Result<Verdict, Failure> {
    let json = target.json;
    match &target.location.connect {
        Some(address) => node::put(address, target.column_family.as_deref(), &key, &value)?,
        None => change::put(key, value, target)?,
    }
    if json {
        print_summary(&json!({ "put": 1 }))?;
    }
    Ok(Verdict::Good)
}

fn delete(keys: Vec<Vec<u8>>, target: Target) -> Result<Verdict, Failure> {
    let (json, asked) = (target.json, keys.len());
    let deleted = match &target.location.connect {
        Some(address) => node::delete(address, target.column_family.as_deref(), &keys)?,
        None => change::delete(keys, target)?,
    };
    if json {
        print_summary(&json!({ "keys": asked, "deleted": deleted }))?;
    } else if deleted < asked as u64 {
        // Missing keys are worth a note, but all keys are gone as requested.
        let _ = writeln!(io::stderr(), "millrace: {deleted} of {asked} keys existed");
    }
    Ok(if deleted > 0 { Verdict::Good } else { Verdict::Bad })
}

#[expect(clippy::disallowed_methods, reason = "a tool reports how long it took")]
fn import(input: Input, resume: bool, target: Target) -> Result<Verdict, Failure> {
    let (json, begun) = (target.json, Instant::now());
    let (imported, into) = match &target.location.connect {
        Some(address) => {
            let column_family = target.column_family.as_deref();
            (node::import(address, column_family, &input)?, address.clone())
        }
        None => {
            let path = target.location.data.clone().unwrap_or_default();
            (change::import(input, resume, target)?, path.display().to_string())
        }
    };
    imported.print(json, &into, begun.elapsed())?;
    Ok(Verdict::Good)
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

fn print_summary(summary: &Value) -> Result<(), Failure> {
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

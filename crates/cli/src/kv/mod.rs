//! The `kv` commands, on a directory or on a running node.
//!
//! Both kinds give the same [`Entry`] values to the same printer, so the output does not depend
//! on where the data came from.

mod directory;
mod node;
mod print;
mod report;
mod stat;

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use crate::args::KvCommand;
use crate::failure::Failure;
use crate::output::parse_hex;

/// How a command that did not fail ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All is well.
    Good,
    /// The key is not there, or damage was found.
    Bad,
}

/// What `scan` was asked for.
#[derive(Clone, Debug)]
pub struct Range {
    /// The lowest key, if it is there.
    pub from: Option<Vec<u8>>,
    /// The first key beyond.
    pub to: Option<Vec<u8>>,
    /// From the last key to the first.
    pub reverse: bool,
    /// How many keys at most.
    pub limit: Option<u64>,
}

/// Runs a command.
pub fn run(command: KvCommand) -> Result<Verdict, Failure> {
    match command {
        KvCommand::Get { key, source, entries } => {
            let key = key_argument(key, "KEY", entries.hex)?;
            match &source.place.connect {
                Some(address) => node::get(address, &key, &source, &entries),
                None => directory::get(key, source, entries),
            }
        }
        KvCommand::Scan { reverse, from, to, limit, source, entries } => {
            let bound = |key: Option<OsString>, name| {
                key.map(|key| key_argument(key, name, entries.hex)).transpose()
            };
            let (from, to) = (bound(from, "--from")?, bound(to, "--to")?);
            let range = Range { from, to, reverse, limit };
            match &source.place.connect {
                Some(address) => node::scan(address, range, &source, &entries),
                None => directory::scan(range, source, entries),
            }
        }
        KvCommand::Stat { source } => match &source.place.connect {
            Some(address) => node::stat(address, &source),
            None => directory::stat(source),
        },
        KvCommand::Check { source } => match &source.place.connect {
            Some(_) => Err(Failure::new("a running node cannot be checked over its port").hint(
                "use --data DIR: checking reads the files, and works beside a node that serves \
                 them read-only",
            )),
            None => directory::check(source),
        },
    }
}

fn key_argument(key: OsString, name: &str, hex: bool) -> Result<Vec<u8>, Failure> {
    let bytes = key.into_vec();
    if !hex {
        return Ok(bytes);
    }
    parse_hex(&bytes).ok_or_else(|| {
        Failure::new(format!(
            "{name} '{}' is no hexadecimal, which --hex asks for",
            String::from_utf8_lossy(&bytes)
        ))
    })
}

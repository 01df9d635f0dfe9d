//! The common part of `kv scan` and `kv export`: entries in order, to standard output or a file.

use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use node::Size;
use serde_json::json;

use super::print::Lines;
use crate::failure::Failure;
use crate::output::{Out, Stop, thousands};
use crate::style::Style;

/// Entries between two updates of the progress bar.
const UPDATE: u64 = 1024;

/// A range of keys.
#[derive(Clone, Debug)]
pub struct Range {
    /// The lowest key, inclusive.
    pub from: Option<Vec<u8>>,
    /// The upper bound, exclusive.
    pub to: Option<Vec<u8>>,
    /// From the last key to the first.
    pub reverse: bool,
    /// The largest number of keys.
    pub limit: Option<u64>,
}

/// What to list, in which style, and where to.
#[derive(Clone, Debug)]
pub struct Listing {
    /// Which keys.
    pub range: Range,
    /// The name of their column family, if one was asked for.
    pub column_family: Option<String>,
    /// How entries are written.
    pub style: Style,
    /// A file instead of standard output.
    pub out: Option<PathBuf>,
    /// Show a progress bar on a terminal.
    pub bar: bool,
}

impl Listing {
    /// The failure for a write that stopped.
    pub fn stopped(&self, stop: Stop) -> Failure {
        match (&self.out, stop) {
            (Some(path), Stop::Failed(error)) => {
                Failure::new(format!("cannot write {}: {error}", path.display()))
            }
            (_, stop) => stop.into(),
        }
    }
}

/// Counts of a listing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Listed {
    /// Entries written.
    pub entries: u64,
    /// Bytes of their keys and values.
    pub bytes: u64,
}

impl Listed {
    /// Prints the summary of an export.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn print(self, as_json: bool, to: &Path) -> Result<(), Failure> {
        let mut out = Out::new();
        if as_json {
            out.json(&json!({ "entries": self.entries, "bytes": self.bytes }))?;
        } else {
            let (entries, bytes) = (thousands(self.entries), Size(self.bytes));
            out.line(&format!("exported {entries} entries ({bytes}) to {}", to.display()))?;
        }
        Ok(out.flush()?)
    }
}

/// Writes the entries of a listing.
pub struct Printer<'a> {
    listing: &'a Listing,
    out: Out,
    lines: Lines,
    bar: ProgressBar,
    /// The counts so far.
    pub listed: Listed,
}

impl<'a> Printer<'a> {
    /// Opens the output. `keys` is an estimate of the number of entries.
    ///
    /// # Errors
    /// When the file cannot be created.
    pub fn new(listing: &'a Listing, keys: u64) -> Result<Printer<'a>, Failure> {
        let out = match &listing.out {
            None => Out::new(),
            Some(path) => Out::file(path).map_err(|error| {
                Failure::new(format!("cannot create {}: {error}", path.display()))
            })?,
        };
        // Lines and a progress bar would overwrite each other on the same screen.
        let bar = match listing.bar && !out.is_terminal() {
            true => bar("exporting", keys.min(listing.range.limit.unwrap_or(keys))),
            false => ProgressBar::hidden(),
        };
        let lines = Lines::new(listing.style);
        Ok(Printer { listing, out, lines, bar, listed: Listed::default() })
    }

    /// Writes one entry.
    pub fn entry(&mut self, key: &[u8], value: &[u8]) -> Result<(), Stop> {
        self.out.bytes(self.lines.render(key, value))?;
        self.listed.entries += 1;
        self.listed.bytes += (key.len() + value.len()) as u64;
        if self.listed.entries.is_multiple_of(UPDATE) {
            self.bar.set_position(self.listed.entries);
        }
        Ok(())
    }

    /// Writes out the buffer.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn flush(&mut self) -> Result<(), Failure> {
        self.out.flush().map_err(|stop| self.listing.stopped(stop))
    }

    /// Removes the bar and returns the counts.
    pub fn finish(self) -> Listed {
        self.bar.finish_and_clear();
        self.listed
    }
}

/// A progress bar on standard error. Hidden unless that is a terminal.
fn bar(doing: &'static str, entries: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{msg} {bar:40} {human_pos} of about {human_len} entries, {per_sec}, {eta} left",
    )
    .expect("the template is right");
    ProgressBar::with_draw_target(Some(entries), ProgressDrawTarget::stderr_with_hz(5))
        .with_style(style)
        .with_message(doing)
}

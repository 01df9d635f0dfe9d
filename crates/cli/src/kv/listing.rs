//! What `kv scan` and `kv export` have in common: entries in order, to standard output or a file.

use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use node::Size;
use serde_json::json;

use super::print::{Lines, Style};
use crate::failure::Failure;
use crate::output::{Out, Stop, thousands};

/// Entries between two updates of the progress bar.
const UPDATE: u64 = 1024;

/// Which keys.
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

/// What is listed, how, and where to.
#[derive(Clone, Debug)]
pub struct Listing {
    /// Which keys.
    pub range: Range,
    /// Of which column family.
    pub column_family: String,
    /// How entries are written.
    pub style: Style,
    /// A file instead of standard output.
    pub out: Option<PathBuf>,
    /// Show how far it is, on a terminal.
    pub bar: bool,
}

impl Listing {
    /// The failure of writing.
    pub fn stopped(&self, stop: Stop) -> Failure {
        match (&self.out, stop) {
            (Some(path), Stop::Failed(error)) => {
                Failure::new(format!("writing {}: {error}", path.display()))
            }
            (_, stop) => stop.into(),
        }
    }
}

/// What was listed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Listed {
    /// Entries.
    pub entries: u64,
    /// Bytes of their keys and values.
    pub bytes: u64,
}

impl Listed {
    /// Prints what was exported.
    ///
    /// # Errors
    /// When it cannot be printed.
    pub fn tell(self, as_json: bool, to: &Path) -> Result<(), Failure> {
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
    /// What was written so far.
    pub listed: Listed,
}

impl<'a> Printer<'a> {
    /// Opens the output. `keys` is about how many entries there are.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn new(listing: &'a Listing, keys: u64) -> Result<Printer<'a>, Failure> {
        let out = match &listing.out {
            None => Out::new(),
            Some(path) => Out::file(path)
                .map_err(|error| Failure::new(format!("making {}: {error}", path.display())))?,
        };
        // Lines and a bar on the same screen would be in each other's way.
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

    /// Sends off what is buffered.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn flush(&mut self) -> Result<(), Failure> {
        self.out.flush().map_err(|stop| self.listing.stopped(stop))
    }

    /// What was listed.
    pub fn finish(self) -> Listed {
        self.bar.finish_and_clear();
        self.listed
    }
}

/// A bar over entries on standard error, seen only on a terminal.
fn bar(doing: &'static str, entries: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{msg} {bar:40} {human_pos} of about {human_len} entries, {per_sec}, {eta} left",
    )
    .expect("the template is right");
    ProgressBar::with_draw_target(Some(entries), ProgressDrawTarget::stderr_with_hz(5))
        .with_style(style)
        .with_message(doing)
}

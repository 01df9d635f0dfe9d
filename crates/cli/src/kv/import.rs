//! The input of an import, its progress bar, and its summary.

use std::io::{self, BufRead, BufReader, IsTerminal};
use std::path::PathBuf;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use node::Size;
use serde_json::json;

use super::steps::{Step, Steps};
use crate::failure::Failure;
use crate::output::{Out, thousands};
use crate::style::Style;

/// Steps between two updates of the progress bar.
const UPDATE: u64 = 1024;

/// The place and the format of the input.
#[derive(Clone, Debug)]
pub struct Input {
    /// A file; `None` for standard input.
    pub file: Option<PathBuf>,
    /// The format of its entries.
    pub style: Style,
}

impl Input {
    /// Opens the input.
    ///
    /// # Errors
    /// When the file cannot be opened.
    #[expect(clippy::disallowed_methods, reason = "a tool's input, beside the core's work")]
    pub fn open(&self) -> Result<Reading, Failure> {
        let (input, bytes): (Box<dyn BufRead>, _) = match &self.file {
            None => (Box::new(io::stdin().lock()), None),
            Some(path) => {
                let failed =
                    |error| Failure::new(format!("cannot open {}: {error}", path.display()));
                let file = std::fs::File::open(path).map_err(failed)?;
                let bytes = file.metadata().map_err(failed)?.len();
                (Box::new(BufReader::with_capacity(256 << 10, file)), Some(bytes))
            }
        };
        Ok(Reading { steps: Steps::new(input, self.style), bar: bar(bytes), count: 0 })
    }
}

/// An input that is being read.
pub struct Reading {
    steps: Steps<Box<dyn BufRead>>,
    bar: ProgressBar,
    count: u64,
}

impl Reading {
    /// The next step. Blocks where the input does.
    ///
    /// # Errors
    /// When the input cannot be read or parsed.
    pub fn next(&mut self) -> Result<Option<Step>, Failure> {
        self.count += 1;
        if self.count.is_multiple_of(UPDATE) {
            self.bar.set_position(self.steps.bytes_read());
        }
        self.steps.next()
    }

    /// Removes the progress bar.
    pub fn finish(self) {
        self.bar.finish_and_clear();
    }
}

/// A progress bar on standard error. Hidden unless that is a terminal, and hidden while the user
/// types the input there.
fn bar(bytes: Option<u64>) -> ProgressBar {
    let template = match bytes {
        Some(_) => "importing {bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
        None if io::stdin().is_terminal() => return ProgressBar::hidden(),
        None => "importing {spinner} {bytes}, {bytes_per_sec}",
    };
    let style = ProgressStyle::with_template(template).expect("the template is right");
    let bar = ProgressBar::with_draw_target(bytes, ProgressDrawTarget::stderr_with_hz(5));
    bar.with_style(style)
}

/// Counts of an import.
#[derive(Clone, Copy, Debug, Default)]
pub struct Imported {
    /// Keys set.
    pub entries: u64,
    /// Keys removed, whether they existed or not.
    pub deletions: u64,
    /// Bytes of keys and values.
    pub bytes: u64,
    /// Of the entries: those that became tables directly, because they were sorted.
    pub loaded: u64,
    /// Entries that an earlier import had written.
    pub skipped: u64,
}

impl Imported {
    /// Counts a step.
    pub fn count(&mut self, step: &Step) {
        match step {
            Step::Put(..) => self.entries += 1,
            Step::Delete(_) => self.deletions += 1,
        }
        self.bytes += step.bytes() as u64;
    }

    /// Prints the summary.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn print(self, as_json: bool, into: &str, took: Duration) -> Result<(), Failure> {
        let mut out = Out::new();
        if as_json {
            out.json(&json!({
                "entries": self.entries,
                "deletions": self.deletions,
                "bytes": self.bytes,
                "loaded": self.loaded,
                "skipped": self.skipped,
                "seconds": took.as_secs_f64(),
            }))?;
        } else {
            let deletions = match self.deletions {
                0 => String::new(),
                deletions => format!(" and {} deletions", thousands(deletions)),
            };
            out.line(&format!(
                "imported {} entries{deletions} ({}) into {into} in {:.1} s",
                thousands(self.entries),
                Size(self.bytes),
                took.as_secs_f64()
            ))?;
        }
        Ok(out.flush()?)
    }
}

//! A log file that may be moved away while it is written.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often a name is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// Appends to the file of a name. Where the name has come to mean another file or none, because
/// logs are rotated, a file of that name is opened anew within a second.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    file: File,
    looked: Instant,
}

impl LogFile {
    /// Opens or creates it.
    ///
    /// # Errors
    /// As the system gives them.
    #[expect(clippy::disallowed_methods, reason = "the log's own thread, and start-up")]
    pub fn open(path: &Path) -> io::Result<LogFile> {
        Ok(LogFile { path: path.to_owned(), file: open(path)?, looked: Instant::now() })
    }

    #[expect(clippy::disallowed_methods, reason = "the log's own thread, which may block")]
    pub(super) fn look_now(&mut self) -> io::Result<()> {
        self.looked = Instant::now();
        let ours = self.file.metadata()?;
        let named = std::fs::metadata(&self.path);
        if !named.is_ok_and(|named| (named.dev(), named.ino()) == (ours.dev(), ours.ino())) {
            // Where that fails, the old file is better than none.
            if let Ok(file) = open(&self.path) {
                self.file = file;
            }
        }
        Ok(())
    }
}

#[expect(clippy::disallowed_methods, reason = "the log's own thread, and start-up")]
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.looked.elapsed() >= LOOK {
            self.look_now()?;
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

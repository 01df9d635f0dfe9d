//! A log file that may be renamed while it is written (log rotation).

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval between two checks of the name.
const LOOK: Duration = Duration::from_secs(1);

/// Hands the next file to a process that may not open files itself, when logs are rotated.
#[derive(Clone, Debug, Default)]
#[expect(clippy::disallowed_types, reason = "a file goes through it once a day")]
pub struct NextFile(Arc<std::sync::Mutex<Option<File>>>);

impl NextFile {
    /// Makes later lines go to `file`.
    pub fn put(&self, file: OwnedFd) {
        *self.0.lock().unwrap_or_else(|e| e.into_inner()) = Some(file.into());
    }

    fn take(&self) -> Option<File> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).take()
    }
}

/// Appends to the file of a name. When log rotation has renamed the file, a file of that name is
/// opened again within a second.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    file: File,
    looked: Instant,
    /// The source of the next file, if the name is not checked.
    next: Option<NextFile>,
}

impl LogFile {
    /// Opens or creates it.
    ///
    /// # Errors
    /// As the system gives them.
    #[expect(clippy::disallowed_methods, reason = "the log's own thread, and start-up")]
    pub fn open(path: &Path) -> io::Result<LogFile> {
        Ok(LogFile { path: path.to_owned(), file: open(path)?, looked: Instant::now(), next: None })
    }

    /// Opens or creates it; later files come from `next`, and the name is not checked.
    ///
    /// # Errors
    /// As the system gives them.
    pub fn open_once(path: &Path, next: NextFile) -> io::Result<LogFile> {
        Ok(LogFile { next: Some(next), ..LogFile::open(path)? })
    }

    /// The new file, if the name belongs to another file than the open one.
    ///
    /// # Errors
    /// As the system gives them.
    pub fn renewed(&mut self) -> io::Result<Option<&File>> {
        Ok(self.look_now()?.then_some(&self.file))
    }

    #[expect(clippy::disallowed_methods, reason = "the log's own thread, which may block")]
    pub(super) fn look_now(&mut self) -> io::Result<bool> {
        self.looked = Instant::now();
        let ours = self.file.metadata()?;
        let named = std::fs::metadata(&self.path);
        if !named.is_ok_and(|named| (named.dev(), named.ino()) == (ours.dev(), ours.ino())) {
            // If that fails, the old file is better than none.
            if let Ok(file) = open(&self.path) {
                self.file = file;
                return Ok(true);
            }
        }
        Ok(false)
    }
}

#[expect(clippy::disallowed_methods, reason = "the log's own thread, and start-up")]
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &self.next {
            Some(next) => {
                if let Some(file) = next.take() {
                    self.file = file;
                }
            }
            None if self.looked.elapsed() >= LOOK => drop(self.look_now()?),
            None => {}
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

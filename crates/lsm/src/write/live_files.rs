//! The files of a database that is open for writing, for a copy of it.
//!
//! 1. If the logs are long, the memtables are written to tables first.
//! 2. The commit task lists the files, between two groups and during a turn at the MANIFEST: so the
//!    list is the state after one write, in all column families. What belongs to it in the database
//!    within its directory is listed in the same moment.
//! 3. As long as the list is held, no file on it is removed, renamed or written over. Logs and the
//!    MANIFEST only grow.

use std::cell::RefCell;
use std::rc::Rc;

use crate::error::{Error, Kind, Result};
use crate::file_list::FileList;
use crate::write::obsolete::Hold;
use crate::write::state::{Request, WriteState};
use crate::write::writer::Writer;

/// The files that hold a database at one moment. They stay in its directory until this is dropped,
/// or writing ends.
pub struct LiveFiles {
    list: FileList,
    _hold: Hold,
    _within: Option<Box<LiveFiles>>,
}

/// What the commit task lists: the files of both databases, and what keeps those of the second.
pub(crate) type Listed = (FileList, Option<LiveFiles>);

impl LiveFiles {
    /// The files.
    pub fn list(&self) -> &FileList {
        &self.list
    }
}

impl Writer {
    /// Lists the files that hold all that was submitted before, and keeps them. If their logs hold
    /// more than `log_bytes_max`, their writes are written to tables first, as far as the disk has
    /// space. Suspends for that, and for a turn at the MANIFEST.
    ///
    /// # Errors
    /// [`Kind::Full`] if the opening found no space for its MANIFEST; else as for
    /// [`Writer::write`].
    pub async fn live_files(&self, log_bytes_max: u64) -> Result<LiveFiles> {
        let state = &self.0;
        let hold = Hold::new(state);
        let mut listed = self.list_files().await?;
        if log_bytes(state, &listed.0).await > log_bytes_max {
            self.flush().await?;
            listed = self.list_files().await?;
        }
        let (list, within) = listed;
        Ok(LiveFiles { list, _hold: hold, _within: within.map(Box::new) })
    }

    async fn list_files(&self) -> Result<Listed> {
        let answer = Rc::new(RefCell::new(None));
        self.request(Request::ListFiles(answer.clone()))?.await?;
        let gone = || Error::new(Kind::Io, "the database is being closed");
        answer.take().unwrap_or_else(|| Err(gone()))
    }

    /// Writes all that was submitted before to tables. Returns without an error if that cannot make
    /// progress: then it is still in the logs. Suspends for the disk.
    ///
    /// # Errors
    /// As for [`Writer::write`].
    pub async fn flush(&self) -> Result<()> {
        let state = &*self.0;
        self.request(Request::SwitchMemtables)?.await?;
        let flushes = &state.flushes;
        let end = flushes.done.get() + flushes.waiting.borrow().len() as u64;
        let stuck = || state.retries.flush_error().is_some();
        let ends = || state.is_closing() || state.has_failed();
        state.changed.wait_until(|| flushes.done.get() >= end || stuck() || ends()).await;
        Ok(())
    }
}

/// Bytes of the logs of a list.
async fn log_bytes(state: &WriteState, list: &FileList) -> u64 {
    let mut sum = 0;
    for log in &list.logs {
        sum += match log.bytes {
            Some(bytes) => bytes,
            None => {
                let name = rocksfmt::FileName::Wal(log.number).to_string();
                state.dir.open(&name).await.map_or(0, |file| file.size())
            }
        };
    }
    sum
}

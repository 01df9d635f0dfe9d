//! The entries of a range, for threads.

use std::fmt;

use super::Client;
use crate::command::{Cursor, Entry};
use crate::error::Result;

/// The entries of a range of keys, in order; see [`Client::range`]. After an error it ends.
pub struct Range {
    client: Client,
    cursor: Cursor,
    page: std::vec::IntoIter<Entry>,
}

impl Range {
    pub(super) fn new(client: &Client, cursor: Cursor) -> Range {
        Range { client: client.clone(), cursor, page: Vec::new().into_iter() }
    }

    /// From the last entry to the first. Call it before the first entry is read; after that, it
    /// turns around and has the entries of the range that were not returned yet, without those
    /// that have been fetched.
    #[must_use]
    pub fn rev(mut self) -> Range {
        self.cursor.reverse = !self.cursor.reverse;
        self
    }
}

impl Iterator for Range {
    type Item = Result<Entry>;

    fn next(&mut self) -> Option<Result<Entry>> {
        loop {
            if let Some(entry) = self.page.next() {
                return Some(Ok(entry));
            }
            if self.cursor.done {
                return None;
            }
            let fetched = self.client.one(&self.cursor.command());
            match fetched.and_then(|reply| self.cursor.page(reply)) {
                Ok(page) => self.page = page.into_iter(),
                Err(error) => {
                    self.cursor.done = true;
                    return Some(Err(error));
                }
            }
        }
    }
}

impl std::iter::FusedIterator for Range {}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Range").finish_non_exhaustive()
    }
}

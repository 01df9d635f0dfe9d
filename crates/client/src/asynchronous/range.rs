//! The entries of a range, as a stream.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::{FusedStream, Stream};
use resp::Reply;

use super::Client;
use crate::command::{Cursor, Entry};
use crate::error::Result;

type Fetch = Pin<Box<dyn Future<Output = Result<Reply>> + Send>>;

/// The entries of a range of keys, in order; see [`Client::range`]. After an error it ends.
pub struct Range {
    client: Client,
    cursor: Cursor,
    page: std::vec::IntoIter<Entry>,
    fetch: Option<Fetch>,
}

impl Range {
    pub(super) fn new(client: &Client, cursor: Cursor) -> Range {
        Range { client: client.clone(), cursor, page: Vec::new().into_iter(), fetch: None }
    }

    /// From the last entry to the first. Call it before the first entry is read.
    #[must_use]
    pub fn rev(mut self) -> Range {
        self.cursor.reverse = !self.cursor.reverse;
        self
    }

    /// The next entry. Dropping the future loses none.
    pub async fn next(&mut self) -> Option<Result<Entry>> {
        poll_fn(|cx| Pin::new(&mut *self).poll_next(cx)).await
    }
}

impl Stream for Range {
    type Item = Result<Entry>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Entry>>> {
        let this = &mut *self;
        loop {
            if let Some(entry) = this.page.next() {
                return Poll::Ready(Some(Ok(entry)));
            }
            if this.cursor.done {
                return Poll::Ready(None);
            }
            let fetch = this.fetch.get_or_insert_with(|| {
                let (client, command) = (this.client.clone(), this.cursor.command());
                Box::pin(async move { client.one(command).await })
            });
            let fetched = ready!(fetch.as_mut().poll(cx));
            this.fetch = None;
            match fetched.and_then(|reply| this.cursor.page(reply)) {
                Ok(page) => this.page = page.into_iter(),
                Err(error) => {
                    this.cursor.done = true;
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }

    /// At least as many entries as are in memory: these are ready.
    fn size_hint(&self) -> (usize, Option<usize>) {
        let ready = self.page.len();
        (ready, self.cursor.done.then_some(ready))
    }
}

impl FusedStream for Range {
    fn is_terminated(&self) -> bool {
        self.cursor.done && self.page.as_slice().is_empty()
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Range").finish_non_exhaustive()
    }
}

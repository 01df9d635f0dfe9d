//! Ranges: the entries between two keys, in order.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;
use lsm::CfId;

use crate::bounds::Limits;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::request::{Chunk, Handle};
use crate::value::Value;

/// An entry: key and value.
pub type Entry = (Value, Value);

type Fetch = Pin<Box<dyn Future<Output = Result<Chunk>> + Send>>;

/// The entries of a range of keys in order, all of one moment, as a [`Stream`]. See
/// [`Db::range`](crate::Db::range).
///
/// The state that it shows is that of the first time it is polled. It is read in chunks, which
/// grow: the next one is on its way while the caller is at the present one. Dropping it ends the
/// reading. After an error it has no more entries.
#[must_use = "streams do nothing unless polled"]
pub struct Range {
    engine: Arc<Engine>,
    family: CfId,
    start: Option<Start>,
    reverse: bool,
    bytes: Arc<Vec<u8>>,
    ends: Vec<(u32, u32)>,
    /// The next entry of these.
    at: usize,
    /// More may follow.
    cursor: Option<Handle>,
    fetch: Option<Fetch>,
}

enum Start {
    Of { limits: Limits, snapshot: Option<Arc<Handle>> },
    Refused(Error),
}

impl Range {
    pub(crate) fn new(
        engine: &Arc<Engine>,
        family: CfId,
        limits: Limits,
        snapshot: Option<Arc<Handle>>,
    ) -> Range {
        Range::starting(engine, family, Start::Of { limits, snapshot })
    }

    /// A range that has an error and nothing else.
    pub(crate) fn refused(engine: &Arc<Engine>, error: Error) -> Range {
        Range::starting(engine, 0, Start::Refused(error))
    }

    fn starting(engine: &Arc<Engine>, family: CfId, start: Start) -> Range {
        Range {
            engine: engine.clone(),
            family,
            start: Some(start),
            reverse: false,
            bytes: Arc::default(),
            ends: Vec::new(),
            at: 0,
            cursor: None,
            fetch: None,
        }
    }

    /// The same range from its last key to its first.
    ///
    /// # Panics
    /// If it was polled before.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// db.put("a", "1").await?;
    /// db.put("b", "2").await?;
    /// let (key, _) = db.range(.."b").rev().next().await.unwrap()?;
    /// assert_eq!(key, "a");
    /// # Ok(())
    /// # }
    /// ```
    pub fn rev(mut self) -> Range {
        assert!(self.start.is_some(), "a range is reversed before it is read");
        self.reverse = !self.reverse;
        self
    }

    /// The next entry; `None` at the end. The same as `StreamExt::next`, without the import.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// db.put("a", "1").await?;
    /// let mut range = db.range(..);
    /// while let Some(entry) = range.next().await {
    ///     let (key, value) = entry?;
    ///     println!("{} = {}", key.escape_ascii(), value.escape_ascii());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn next(&mut self) -> Option<Result<Entry>> {
        std::future::poll_fn(|cx| Pin::new(&mut *self).poll_next(cx)).await
    }

    /// The next entry, if it has been read.
    pub(crate) fn buffered(&mut self) -> Option<Entry> {
        let &(key, end) = self.ends.get(self.at)?;
        let from = self.at.checked_sub(1).map_or(0, |before| self.ends[before].1);
        self.at += 1;
        Some((Value::part(&self.bytes, from, key), Value::part(&self.bytes, key, end)))
    }

    /// Begins to read the next chunk, if there may be one.
    fn begin(&mut self) {
        let engine = self.engine.clone();
        if let Some(start) = self.start.take() {
            let (family, reverse) = (self.family, self.reverse);
            self.fetch = Some(Box::pin(async move {
                match start {
                    Start::Of { limits, snapshot } => {
                        engine.open_cursor(family, limits, reverse, snapshot).await
                    }
                    Start::Refused(error) => Err(error),
                }
            }));
        } else if let Some(cursor) = self.cursor.take() {
            self.fetch = Some(Box::pin(async move { engine.next_chunk(cursor).await }));
        }
    }
}

impl Stream for Range {
    type Item = Result<Entry>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Entry>>> {
        let this = &mut *self;
        // The second half of a chunk is left: send for the next one. It is polled below.
        if this.fetch.is_none() && 2 * this.at >= this.ends.len() {
            this.begin();
            if let Some(fetch) = &mut this.fetch
                && this.at < this.ends.len()
                && let Poll::Ready(done) = fetch.as_mut().poll(cx)
            {
                this.fetch = Some(Box::pin(std::future::ready(done)));
            }
        }
        loop {
            if let Some(entry) = this.buffered() {
                return Poll::Ready(Some(Ok(entry)));
            }
            if this.fetch.is_none() {
                this.begin();
            }
            let Some(fetch) = &mut this.fetch else { return Poll::Ready(None) };
            if let Err(error) = this.engine.check_here() {
                // The fetch was sent before the fork: nobody answers it here.
                std::mem::forget(this.fetch.take());
                this.cursor = None;
                return Poll::Ready(Some(Err(error)));
            }
            let Poll::Ready(done) = fetch.as_mut().poll(cx) else { return Poll::Pending };
            this.fetch = None;
            match done {
                Ok(Chunk { bytes, ends, cursor }) => {
                    (this.bytes, this.ends, this.at, this.cursor) = (bytes, ends, 0, cursor);
                }
                Err(error) => {
                    this.cursor = None;
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Range").field("reverse", &self.reverse).finish_non_exhaustive()
    }
}

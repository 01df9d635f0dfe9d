//! A walk over the keys in order, in either direction, that can pause: while it waits for a slow
//! client it holds a snapshot and its last key, but no iterator and hence no block.

use std::rc::Rc;

use lsm::IterOptions;

use crate::command::glob;
use crate::command::range::{RangeBound, RangeQuery};
use crate::core::state::CoreState;
use crate::expiry::live::LiveIter;
use crate::expiry::live::Moment;

/// Keys that have expired which one step passes at most.
const EXPIRED_MAX: usize = 16;

/// Steps between two yields to other tasks.
const STEPS_PER_CHECK: u32 = 64;

/// One end of a walk, owned.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Open,
    Inclusive(Vec<u8>),
    Exclusive(Vec<u8>),
}

impl End {
    /// `None` where the bound excludes every key.
    fn of(bound: RangeBound<'_>) -> Option<Self> {
        match bound {
            RangeBound::Open => Some(Self::Open),
            RangeBound::Nothing => None,
            RangeBound::Inclusive(key) => Some(Self::Inclusive(key.to_vec())),
            RangeBound::Exclusive(key) => Some(Self::Exclusive(key.to_vec())),
        }
    }
}

/// A walk over the keys of a range.
pub(crate) struct Walk {
    state: Rc<CoreState>,
    at: Option<Moment>,
    start: End,
    end: End,
    reverse: bool,
    pattern: Option<Vec<u8>>,
    prefix: Option<Vec<u8>>,
    expected: Option<usize>,
    iter: Option<LiveIter>,
    /// The time at which its keys have not expired, once it is frozen.
    now_ms: Option<u64>,
    /// The key after which to continue, where there is no iterator; `None` at the beginning.
    last: Option<Vec<u8>>,
    ended: bool,
    steps: u32,
}

impl Walk {
    /// A walk over the keys that match a pattern, or all keys.
    pub fn matching(state: &Rc<CoreState>, pattern: Option<&[u8]>) -> Self {
        Self {
            state: state.clone(),
            at: None,
            start: End::Open,
            end: End::Open,
            reverse: false,
            pattern: pattern.map(<[u8]>::to_vec),
            prefix: pattern.map(glob::literal_prefix).filter(|prefix| !prefix.is_empty()),
            expected: None,
            iter: None,
            now_ms: None,
            last: None,
            ended: false,
            steps: 0,
        }
    }

    /// A walk over a range.
    pub fn range(state: &Rc<CoreState>, query: &RangeQuery<'_>) -> Self {
        let mut walk = Self::matching(state, None);
        match (End::of(query.start), End::of(query.end)) {
            (Some(start), Some(end)) => (walk.start, walk.end) = (start, end),
            _ => walk.ended = true,
        }
        walk.reverse = query.reverse;
        walk.expected = usize::try_from(query.extent.keys).ok().filter(|keys| *keys < usize::MAX);
        walk
    }

    /// Takes a snapshot: from now on it sees the present state.
    pub fn freeze(&mut self) -> lsm::Result<()> {
        self.now_ms = Some(self.state.core.unix_time_ms());
        self.at = Some(self.state.reader.moment()?);
        Ok(())
    }

    /// Continues after `key`, or begins again.
    pub fn continue_after(&mut self, key: Option<Vec<u8>>) {
        self.iter = None;
        self.ended = false;
        self.last = key;
    }

    /// Releases the iterator while it waits.
    pub fn park(&mut self) {
        if let Some(iter) = self.iter.take()
            && iter.valid()
        {
            self.last = Some(iter.key().to_vec());
        }
    }

    /// The key at its position.
    pub fn key(&self) -> &[u8] {
        self.iter.as_ref().map_or(&[], LiveIter::key)
    }

    /// The value at its position.
    pub fn value(&self) -> &[u8] {
        self.iter.as_ref().map_or(&[], LiveIter::value)
    }

    /// Moves to the next key in the range, whether it matches the pattern or not, past some that
    /// have expired; false after the last. Yields to other tasks periodically.
    pub async fn step(&mut self) -> lsm::Result<bool> {
        if self.ended {
            return Ok(false);
        }
        self.steps += 1;
        if self.steps.is_multiple_of(STEPS_PER_CHECK) {
            self.state.core.checkpoint().await;
        }
        match &mut self.iter {
            Some(iter) if self.reverse => iter.prev().await?,
            Some(iter) => iter.next().await?,
            None => self.seek().await?,
        }
        // The iterator's bounds still include an exclusive lower end.
        let lower =
            |walk: &Self| matches!(&walk.start, End::Exclusive(start) if walk.key() == &start[..]);
        if !self.reverse && self.valid() && lower(self) {
            self.advance().await?;
        }
        if !self.valid() || (self.reverse && lower(self)) || self.is_beyond_end() {
            self.ended = true;
            self.iter = None;
        }
        Ok(!self.ended)
    }

    /// Whether the key at its position matches the pattern, and has not expired.
    pub fn matches(&self) -> bool {
        if self.iter.as_ref().is_some_and(LiveIter::is_expired) {
            return false;
        }
        self.pattern.as_ref().is_none_or(|pattern| glob::matches(pattern, self.key()))
    }

    fn valid(&self) -> bool {
        self.iter.as_ref().is_some_and(LiveIter::valid)
    }

    async fn advance(&mut self) -> lsm::Result<()> {
        match &mut self.iter {
            Some(iter) if self.reverse => iter.prev().await,
            Some(iter) => iter.next().await,
            None => Ok(()),
        }
    }

    async fn seek(&mut self) -> lsm::Result<()> {
        let lower = match &self.start {
            End::Inclusive(key) | End::Exclusive(key) => Some(key.clone()),
            End::Open => None,
        };
        let upper = match &self.end {
            End::Exclusive(key) => Some(key.clone()),
            // The first key after an inclusive end, in byte order.
            End::Inclusive(key) if !self.state.descending => {
                Some(key.iter().copied().chain([0]).collect())
            }
            End::Inclusive(_) | End::Open => None,
        };
        let options = IterOptions {
            lower,
            upper,
            prefix: self.prefix.clone().filter(|_| !self.state.descending),
            snapshot: None,
            fill_cache: false,
            expected: self.expected,
            expected_backward: self.reverse,
            keys_only: false,
        };
        let now_ms = self.now_ms.unwrap_or_else(|| self.state.core.unix_time_ms());
        let reader = &self.state.reader;
        let mut iter = reader.iter_at(self.state.family, options, now_ms, self.at.as_ref())?;
        iter.set_patience(EXPIRED_MAX);
        match (self.last.take(), self.reverse) {
            (Some(last), false) => {
                iter.seek(&last).await?;
                if iter.valid() && iter.key() == &last[..] {
                    iter.next().await?;
                }
            }
            (Some(last), true) => {
                iter.seek_for_prev(&last).await?;
                if iter.valid() && iter.key() == &last[..] {
                    iter.prev().await?;
                }
            }
            (None, false) => iter.seek_to_first().await?,
            (None, true) => match &self.end {
                End::Inclusive(end) if self.state.descending => iter.seek_for_prev(end).await?,
                _ => iter.seek_to_last().await?,
            },
        }
        self.iter = Some(iter);
        Ok(())
    }

    /// In descending order no key is the first after an inclusive end, so the walk checks the end
    /// itself.
    fn is_beyond_end(&self) -> bool {
        self.state.descending
            && !self.reverse
            && matches!(&self.end, End::Inclusive(end) if self.key() < &end[..])
    }
}

//! The inputs of a merge as one sequence of entries.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::rc::Rc;
use std::sync::Arc;

use rocksfmt::{Comparator, SEEK_TYPE, SEQUENCE_MAX, pack};

use crate::error::{Error, Result};
use crate::read::ahead::WINDOW_MAX;
use crate::read::level_iter::{Bounds, LevelIter};
use crate::read::reader::Reader;
use crate::read::walk::{Direction, Position};
use crate::version::Version;
use crate::write::job::Job;
use crate::write::merge::LARGE_BLOCK;
use crate::write::picker::{KeyRange, Plan};

/// The read-ahead of all sources may take this part of a core's memory.
const READ_AHEAD_SHARE: usize = 8;

/// An iterator at the first entry of each input: each file of level 0, and all files of a deeper
/// level together.
///
/// # Errors
/// The slot of an input that cannot be read, and why.
pub(super) async fn open(
    job: &Job,
    version: &Arc<Version>,
    comparator: Comparator,
    plan: &Plan,
    part: &KeyRange,
) -> std::result::Result<Vec<LevelIter>, (u32, Error)> {
    let context = Reader::uncached(&job.db, &job.core).context_at(version);
    let bounds = Rc::new(Bounds { lower: part.from.clone(), upper: part.to.clone() });
    let start: Vec<Vec<u32>> = match plan.start {
        0 => plan.inputs.iter().map(|&slot| vec![slot]).collect(),
        _ => vec![plan.inputs.clone()],
    };
    let runs = start.into_iter().chain([plan.overlapped.clone()]).filter(|run| !run.is_empty());
    let runs: Vec<Vec<u32>> = runs.collect();
    let window = job.core.pool().limit() / READ_AHEAD_SHARE / runs.len().max(1);
    let from = part.from.as_ref().map(|key| {
        let mut seek = key.clone();
        seek.extend_from_slice(&pack(SEQUENCE_MAX, SEEK_TYPE).to_le_bytes());
        seek
    });
    let mut sources = Vec::new();
    for run in runs {
        let mut source =
            LevelIter::new(&context, comparator, run.into(), &bounds, false, WINDOW_MAX, false)
                .with_window_max(window);
        let position = from.as_deref().map_or(Position::First, Position::AtOrAfter);
        if let Err(error) = source.seek(position, Direction::Forward).await {
            return Err((source.slot(), error));
        }
        if source.footprint() >= LARGE_BLOCK {
            source.shed();
        }
        sources.push(source);
    }
    Ok(sources)
}

/// Several sources as one, in the order of internal keys: a heap ordered by their next entries.
pub(super) struct Merging {
    sources: Vec<LevelIter>,
    comparator: Comparator,
    /// Indexes of the sources with an entry left. Each is before its two children.
    heap: Vec<usize>,
    /// Limit of the memory of their blocks, in bytes.
    share: usize,
}

impl Merging {
    pub fn new(sources: Vec<LevelIter>, comparator: Comparator, share: usize) -> Merging {
        let heap: Vec<usize> = (0..sources.len()).filter(|&at| sources[at].valid()).collect();
        let mut merging = Merging { sources, comparator, heap, share };
        for at in (0..merging.heap.len() / 2).rev() {
            merging.sift_down(at);
        }
        merging
    }

    /// The source that has the next entry.
    pub fn first(&self) -> Option<&LevelIter> {
        self.heap.first().map(|&at| &self.sources[at])
    }

    pub async fn step(&mut self) -> Result<()> {
        let Some(&first) = self.heap.first() else { return Ok(()) };
        self.sources[first].step(Direction::Forward).await?;
        if !self.sources[first].valid() {
            self.heap.swap_remove(0);
        }
        self.sift_down(0);
        if self.sources[first].footprint() >= LARGE_BLOCK {
            self.shed();
        }
        self.regain().await
    }

    /// If the blocks of all sources take too much memory, drops large ones of sources that do not
    /// have the next entry.
    fn shed(&mut self) {
        let Some((_, others)) = self.heap.split_first() else { return };
        if self.heap.iter().map(|&at| self.sources[at].footprint()).sum::<usize>() <= self.share {
            return;
        }
        for &at in others {
            if self.sources[at].footprint() >= LARGE_BLOCK {
                self.sources[at].shed();
            }
        }
    }

    /// Reads the block of the source that has the next entry again, if it was dropped.
    pub async fn regain(&mut self) -> Result<()> {
        match self.heap.first() {
            Some(&first) => self.sources[first].regain().await,
            None => Ok(()),
        }
    }

    fn is_before(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.sources[self.heap[a]], &self.sources[self.heap[b]]);
        match self.comparator.cmp_user(a.user_key(), b.user_key()) {
            Less => true,
            Equal => a.packed() > b.packed(),
            Greater => false,
        }
    }

    fn sift_down(&mut self, mut at: usize) {
        loop {
            let mut child = 2 * at + 1;
            if child >= self.heap.len() {
                return;
            }
            if child + 1 < self.heap.len() && self.is_before(child + 1, child) {
                child += 1;
            }
            if !self.is_before(child, at) {
                return;
            }
            self.heap.swap(at, child);
            at = child;
        }
    }
}

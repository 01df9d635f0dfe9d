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
use crate::version::{Version, user_key};
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
    /// Bytes with which all user keys begin.
    common: usize,
    /// The sources with an entry left. Each is before its two children.
    heap: Vec<Head>,
    /// Limit of the memory of their blocks, in bytes.
    share: usize,
    /// A source took another block since the limit was last kept.
    has_grown: bool,
}

/// The next entry of a source.
#[derive(Clone, Copy)]
struct Head {
    /// The eight bytes of its user key behind the common ones, as a number in the keys' order.
    /// Most comparisons need no more, and do not touch the source.
    number: u64,
    source: usize,
}

impl Merging {
    /// All user keys of the sources begin with the same `common` bytes. The blocks that the sources
    /// hold may take `share` bytes.
    pub fn new(
        sources: Vec<LevelIter>,
        comparator: Comparator,
        common: usize,
        share: usize,
    ) -> Merging {
        let mut merging =
            Merging { sources, comparator, common, heap: Vec::new(), share, has_grown: true };
        let valid = (0..merging.sources.len()).filter(|&at| merging.sources[at].valid());
        merging.heap = valid.map(|at| merging.head(at)).collect();
        for at in (0..merging.heap.len() / 2).rev() {
            merging.sift_down(at);
        }
        merging
    }

    /// The source that has the next entry.
    pub fn first(&self) -> Option<&LevelIter> {
        self.heap.first().map(|head| &self.sources[head.source])
    }

    pub async fn step(&mut self) -> Result<()> {
        let Some(&Head { source: first, .. }) = self.heap.first() else { return Ok(()) };
        self.has_grown |= !self.sources[first].step(Direction::Forward).await?;
        if self.sources[first].valid() {
            self.heap[0] = self.head(first);
        } else {
            self.heap.swap_remove(0);
        }
        self.sift_down(0);
        if self.has_grown {
            self.has_grown = self.shed();
        }
        self.regain().await
    }

    /// If the blocks of all sources take too much memory, drops large ones of sources that do not
    /// have the next entry. Whether they did.
    fn shed(&mut self) -> bool {
        let held = self.heap.iter().map(|head| self.sources[head.source].footprint());
        if held.sum::<usize>() <= self.share {
            return false;
        }
        for head in self.heap.iter().skip(1) {
            let source = &mut self.sources[head.source];
            if source.footprint() >= LARGE_BLOCK {
                source.shed();
            }
        }
        true
    }

    /// Reads the block of the source that has the next entry again, if it was dropped.
    pub async fn regain(&mut self) -> Result<()> {
        if let Some(first) = self.heap.first() {
            self.has_grown |= self.sources[first.source].regain().await?;
        }
        Ok(())
    }

    fn head(&self, source: usize) -> Head {
        let key = self.sources[source].user_key();
        let number = number(key.get(self.common..).unwrap_or_default(), self.comparator);
        Head { number, source }
    }

    fn is_before(&self, a: Head, b: Head) -> bool {
        if a.number != b.number {
            return a.number < b.number;
        }
        let (a, b) = (&self.sources[a.source], &self.sources[b.source]);
        match self.comparator.cmp_user(a.user_key(), b.user_key()) {
            Less => true,
            Equal => a.packed() > b.packed(),
            Greater => false,
        }
    }

    /// The child of `at` that is before the other.
    fn child(&self, at: usize) -> Option<usize> {
        let (left, right) = (2 * at + 1, 2 * at + 2);
        let heap = &self.heap;
        match right < heap.len() && self.is_before(heap[right], heap[left]) {
            true => Some(right),
            false => Some(left).filter(|&left| left < heap.len()),
        }
    }

    /// Puts the entry at `top` in its place, below which the heap is in order. The next entry of a
    /// source is mostly either still the first one or far behind, so unless it is the first one it
    /// goes down to a leaf, with one comparison for each level, and a little up again.
    fn sift_down(&mut self, top: usize) {
        let Some(&moving) = self.heap.get(top) else { return };
        let mut at = top;
        while let Some(child) = self.child(at) {
            if at == top && self.is_before(moving, self.heap[child]) {
                return;
            }
            self.heap[at] = self.heap[child];
            at = child;
        }
        while at > top {
            let parent = (at - 1) / 2;
            if !self.is_before(moving, self.heap[parent]) {
                break;
            }
            self.heap[at] = self.heap[parent];
            at = parent;
        }
        self.heap[at] = moving;
    }
}

/// The first eight bytes of a user key as a number: if the numbers of two keys differ, they have
/// the order of the keys.
fn number(key: &[u8], comparator: Comparator) -> u64 {
    let mut bytes = [0; 8];
    let len = key.len().min(8);
    bytes[..len].copy_from_slice(&key[..len]);
    match comparator {
        Comparator::Bytewise => u64::from_be_bytes(bytes),
        Comparator::ReverseBytewise => !u64::from_be_bytes(bytes),
    }
}

/// The number of bytes with which all user keys of the inputs begin.
pub(super) fn common_bytes(version: &Version, plan: &Plan) -> usize {
    let mut bounds = plan.files().flat_map(|(_, slot)| {
        let meta = version.meta(slot);
        [user_key(&meta.smallest), user_key(&meta.largest)]
    });
    let Some(first) = bounds.next() else { return 0 };
    let equal = |key: &[u8]| first.iter().zip(key).take_while(|(a, b)| a == b).count();
    bounds.map(equal).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn different_numbers_have_the_order_of_the_keys(
            a in proptest::collection::vec(0..3u8, 0..11),
            b in proptest::collection::vec(0..3u8, 0..11),
        ) {
            for comparator in [Comparator::Bytewise, Comparator::ReverseBytewise] {
                let order = number(&a, comparator).cmp(&number(&b, comparator));
                prop_assert!(order.is_eq() || order == comparator.cmp_user(&a, &b));
            }
        }
    }
}

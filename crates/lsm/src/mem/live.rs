//! A live memtable: a skip list of points, and range tombstones beside it.

use std::sync::Arc;

use memtable::{Memtable, Reserve};
use rocksfmt::{Comparator, Op, ValueType, pack};

use crate::error::{Error, Kind, Result};
use crate::mem::Mem;
use crate::mem::tombstones::LiveTombstones;

/// Range tombstones in one memtable at which it is full: a reader may have to search many runs.
pub(crate) const TOMBSTONES_MAX: usize = 64 << 10;
/// Fewest tombstones of single keys in a dense memtable. A scan passes them in about 15 ms.
const DELETIONS_DENSE: usize = 64 << 10;

/// The readers' end of a live memtable.
pub(crate) struct Live {
    pub points: Memtable,
    pub tombstones: LiveTombstones,
}

/// The only writer of a live memtable.
pub(crate) struct LiveWriter {
    points: memtable::Writer,
    mem: Arc<Mem>,
    tombstones: TombstoneGauge,
    /// Tombstones of single keys.
    deletions: usize,
}

/// Range tombstones of a memtable.
#[derive(Clone, Copy, Default)]
struct TombstoneGauge {
    count: usize,
    /// Bytes of their keys, with a sequence each.
    bytes: usize,
    memory: usize,
}

impl LiveWriter {
    /// An empty memtable, one of `shares` that use some `share_bytes` together.
    pub fn new(
        comparator: Comparator,
        share_bytes: usize,
        shares: usize,
        seed: u64,
    ) -> (LiveWriter, Arc<Mem>) {
        let (writer, points) = Memtable::share(comparator, share_bytes, shares, seed);
        let mem = Arc::new(Mem::Live(Live { points, tombstones: LiveTombstones::new() }));
        let tombstones = TombstoneGauge::default();
        (LiveWriter { points: writer, mem: mem.clone(), tombstones, deletions: 0 }, mem)
    }

    /// Applies an operation, with its sequence. Those that write no key have no effect.
    pub fn apply(&mut self, reserve: &mut Reserve, sequence: u64, op: &Op<'_>) -> Result<()> {
        let (key, kind, value) = match *op {
            Op::Put { key, value, .. } => (key, ValueType::Value, value),
            Op::Delete { key, .. } => (key, ValueType::Deletion, &b""[..]),
            Op::SingleDelete { key, .. } => (key, ValueType::SingleDeletion, &b""[..]),
            Op::Merge { key, operand, .. } => (key, ValueType::Merge, operand),
            Op::BlobIndex { key, index, .. } => (key, ValueType::BlobIndex, index),
            Op::DeleteRange { begin, end, .. } => return self.delete_range(begin, end, sequence),
            _ => return Ok(()),
        };
        self.points
            .insert_from(reserve, key, pack(sequence, kind as u8), value)
            .map_err(|e| Error::new(Kind::Memory, e.to_string()))?;
        self.deletions += usize::from(kind.is_tombstone());
        Ok(())
    }

    fn delete_range(&mut self, start: &[u8], end: &[u8], sequence: u64) -> Result<()> {
        let Mem::Live(live) = &*self.mem else { unreachable!("made by `new`") };
        live.tombstones.add(live.points.comparator(), start, end, sequence)?;
        if let Some(all) = live.tombstones.all() {
            self.tombstones.count = all.len();
            self.tombstones.memory = all.memory();
        }
        self.tombstones.bytes += start.len() + end.len() + size_of::<u64>();
        Ok(())
    }

    /// Whether nothing was written.
    pub fn is_empty(&self) -> bool {
        self.points.memtable().is_empty() && self.tombstones.count == 0
    }

    /// Bytes of memory held.
    pub fn memory(&self) -> usize {
        self.points.memtable().memory() + self.tombstones.memory
    }

    /// Bytes of keys and values.
    pub fn bytes(&self) -> usize {
        self.points.memtable().bytes() + self.tombstones.bytes
    }

    /// Whether at least half of its many entries are tombstones of single keys: a scan passes all
    /// of them.
    pub fn is_dense(&self) -> bool {
        self.deletions >= DELETIONS_DENSE && self.deletions >= self.points.memtable().len() / 2
    }

    /// Number of range tombstones.
    pub fn range_tombstones(&self) -> usize {
        self.tombstones.count
    }
}

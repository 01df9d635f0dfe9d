//! Mirrored writes: what is written to a device while it is copied, and has been copied already,
//! goes to the target of the copy, too, and need not be copied again.
//!
//! ```text
//!   MirrorChannel::begin   copies the data, which the guest may change, and claims the granules
//!   [the device writes it] the request is reported as completed
//!   MirrorChannel::go_on   [the target writes it], and the claim ends
//! ```
//!
//! 1. Nobody waits for the target: its write is a task of the core.
//! 2. If granules are marked, being copied or claimed, if there is no memory for the data, or if a
//!    write fails at either device, the granules are marked instead, and the copy gets to them.
//! 3. Before the target replaces the device, when nothing is written any more, what is under way
//!    has to end ([`Mirror::is_idle`]).
//!
//! `marks.rs` says why a copy and a mirrored write do not overwrite each other.

use std::any::Any;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use reactor::{Buf, Class, Core};

use crate::buf_channel::BufIo;
use crate::copy::Budget;
use crate::device::Bdev;
use crate::devices::file::copy_segments;
use crate::error::Error;
use crate::io::{Io, Kind, QUEUE_DEPTH, Status};
use crate::layers::dirty::DirtyMap;
use crate::mutant::{self, Mutant};
use crate::task_channel::TaskChannel;
use loomable::{AtomicBool, AtomicU64, Ordering};

/// Bytes of mirrored writes that are under way to one target. The guest waits for them at the
/// switch.
const UNDER_WAY_BYTES_MAX: u64 = 1 << 20;

/// Where the writes to a device are mirrored; see the module text.
pub(crate) struct Mirror {
    target: Bdev,
    /// The granules of writes that are under way to both devices: see `marks.rs`.
    claimed: Box<[AtomicU64]>,
    is_on: AtomicBool,
    /// Bytes of mirrored writes that have not ended at both devices, of all cores.
    under_way_bytes: AtomicU64,
}

impl Mirror {
    pub fn new(target: Bdev, granules: u64) -> Mirror {
        let claimed = (0..granules.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let (is_on, under_way_bytes) = (AtomicBool::new(false), AtomicU64::new(0));
        Mirror { target, claimed, is_on, under_way_bytes }
    }

    #[inline(always)]
    pub fn claimed(&self) -> &[AtomicU64] {
        &self.claimed
    }

    /// Begins to mirror writes, or to do so no more.
    pub fn turn(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Release);
    }

    /// Whether no mirrored write is under way.
    pub fn is_idle(&self) -> bool {
        // Acquire: what they have marked is seen.
        self.under_way_bytes.load(Ordering::Acquire) == 0
    }

    /// Counts the bytes of a write, if so many more may be under way.
    fn admit(&self, len: u64) -> bool {
        let before = self.under_way_bytes.fetch_add(len, Ordering::AcqRel);
        let is_admitted = before.saturating_add(len) <= UNDER_WAY_BYTES_MAX;
        if !is_admitted {
            self.end(len);
        }
        is_admitted
    }

    fn end(&self, len: u64) {
        // Release: who finds nothing under way sees the marks.
        self.under_way_bytes.fetch_sub(len, Ordering::Release);
    }
}

/// One core's way to the target.
pub(crate) struct MirrorChannel {
    core: Core,
    target: Rc<TaskChannel>,
    budget: Rc<Budget>,
    /// Writes that the device has not completed, by their slots there.
    writes: Vec<Option<Mirrored>>,
}

impl MirrorChannel {
    pub fn new(mirror: &Mirror, core: &Core) -> Result<MirrorChannel, Error> {
        Ok(MirrorChannel {
            core: core.clone(),
            target: Rc::new(TaskChannel::new(&mirror.target, core)?),
            budget: core.local(),
            writes: (0..QUEUE_DEPTH).map(|_| None).collect(),
        })
    }

    /// Begins a mirrored write, whose data is then in [`Mirrored::segment`]; `None` if the request
    /// is to be marked.
    ///
    /// # Safety
    /// The segments of the request are valid, and as long as it if it is a write. No Rust reference
    /// to their memory exists. Others may change it meanwhile.
    #[inline(never)]
    pub unsafe fn begin(&self, map: &Arc<DirtyMap>, io: &Io<'_>) -> Option<Mirrored> {
        let mirror = map.mirror()?;
        if io.kind != Kind::Write || !mirror.is_on.load(Ordering::Acquire) || !mirror.admit(io.len)
        {
            return None;
        }
        let Some(mut buf) = self.claim(map, io) else {
            mirror.end(io.len);
            return None;
        };
        let len = io.len as usize;
        // SAFETY: the buffer has `len` bytes, the segments are valid and as long by this function's
        // contract, and nothing else has the buffer.
        unsafe { copy_segments(io.segments, 0, buf.as_mut_ptr(), len, false) };
        self.budget.take(io.len);
        let (map, budget) = (map.clone(), self.budget.clone());
        let segment = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: len };
        let owner = Rc::new(Cell::new(Some(buf)));
        let (offset, len) = (io.offset, io.len);
        Some(Mirrored { map, budget, offset, len, segment, owner, is_same: false })
    }

    /// A buffer for a write, whose granules are claimed then.
    fn claim(&self, map: &DirtyMap, io: &Io<'_>) -> Option<Buf> {
        if !self.budget.has_room(&self.core, io.len) {
            return None;
        }
        let buf = self.core.pool().alloc_reclaiming(io.len as usize)?;
        map.claim(io.offset, io.len).then_some(buf)
    }

    /// Keeps a write until the device has completed it.
    pub fn put(&mut self, slot: u32, write: Mirrored) {
        self.writes[slot as usize] = Some(write);
    }

    pub fn take(&mut self, slot: u32) -> Option<Mirrored> {
        self.writes[slot as usize].take()
    }

    /// Lets the target do what the device has done.
    pub fn go_on(&self, write: Mirrored, status: Status) {
        if status == Status::Ok {
            let target = self.target.clone();
            self.core.spawn(Class::Background, write.reach(target));
        }
    }
}

/// A write that goes to both devices. Its claim ends when it is dropped. Its granules are marked
/// then, unless both have completed it.
pub(crate) struct Mirrored {
    map: Arc<DirtyMap>,
    budget: Rc<Budget>,
    offset: u64,
    len: u64,
    /// The memory of the buffer.
    segment: libc::iovec,
    /// Has the buffer until the device has completed the write.
    owner: Rc<Cell<Option<Buf>>>,
    is_same: bool,
}

impl Mirrored {
    pub fn segment(&self) -> libc::iovec {
        self.segment
    }

    pub fn owner(&self) -> Rc<dyn Any> {
        self.owner.clone()
    }

    async fn reach(mut self, target: Rc<TaskChannel>) {
        let (kind, offset, len) = (Kind::Write, self.offset, self.len);
        let io = BufIo { kind, offset, len, at: 0, fua: false, tag: 0 };
        let (status, _) = target.run(io, self.owner.take()).await;
        self.is_same = status == Status::Ok || mutant::is(Mutant::TrustsTheMirror);
    }
}

impl Drop for Mirrored {
    fn drop(&mut self) {
        if !self.is_same {
            self.map.mark_range(self.offset, self.len);
        }
        self.map.release(self.offset, self.len);
        if let Some(mirror) = self.map.mirror() {
            mirror.end(self.len);
        }
        self.budget.release(self.len);
    }
}

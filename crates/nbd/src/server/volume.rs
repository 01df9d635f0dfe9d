//! A [`Volume`]: a disk while clients use it. Its connections share one channel to the device.
//!
//! 1. [`Volume::transfer`] cuts a request into pieces, and submits one after the other.
//! 2. The channel answers the task that waits ([`TaskChannel`]).
//! 3. [`Volume::close`] refuses what comes later; [`Volume::abandon`] releases the device, whatever
//!    is in flight there. The operations in flight hold their buffers until they are done.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use bdev::{BufDone, BufIo, Kind, Status, TaskChannel};
use reactor::{Buf, Core, Event};

use super::Disk;
use nbdproto::{Errno, ExportInfo, Extent, Rules};

/// Most bytes of a piece of a read or a write. A memory device copies them while the core waits.
const PIECE_BYTES: u64 = 1 << 20;
/// Most extents of a reply.
const EXTENTS_MAX: usize = 1024;
/// Longest reply with extents, in bytes.
pub const EXTENTS_BYTES_MAX: usize = 24 + 8 * EXTENTS_MAX;

/// A disk while clients use it; see the module text.
pub struct Volume {
    core: Core,
    /// `None` after [`Volume::abandon`].
    live: RefCell<Option<Live>>,
    closed: Cell<bool>,
    /// Bytes that its clients' requests hold.
    held: Rc<Cell<usize>>,
    /// Transfers that have not ended.
    transfers: Cell<usize>,
    /// The device is asked for its extents.
    looks: Cell<bool>,
    /// Notified when a piece, a transfer or such a question has ended.
    ended: Rc<Event>,
}

struct Live {
    channel: TaskChannel,
    disk: Rc<dyn Disk>,
}

/// A request for the device. Offset and length are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    pub kind: Kind,
    pub offset: u64,
    pub len: u64,
    /// It is durable when it has ended.
    pub fua: bool,
}

impl Volume {
    /// Bytes that its clients' requests hold.
    pub fn held(&self) -> &Rc<Cell<usize>> {
        &self.held
    }

    /// Opens a channel to the disk.
    ///
    /// # Errors
    /// As for [`TaskChannel::new`].
    pub fn open(core: &Core, disk: Rc<dyn Disk>) -> Result<Rc<Volume>, bdev::Error> {
        let ended = Rc::<Event>::default();
        let channel = TaskChannel::telling(&disk.device(), core, ended.clone())?;
        Ok(Rc::new(Volume {
            core: core.clone(),
            live: RefCell::new(Some(Live { channel, disk })),
            closed: Cell::new(false),
            held: Rc::default(),
            transfers: Cell::new(0),
            looks: Cell::new(false),
            ended,
        }))
    }

    /// What a client may do now, with what it has negotiated.
    ///
    /// # Errors
    /// [`Errno::Shutdown`] when the disk has gone.
    pub fn rules(&self, structured: bool, allocation: bool) -> Result<Rules, Errno> {
        let live = self.live.borrow();
        let disk = live.as_ref().filter(|_| !self.closed.get()).ok_or(Errno::Shutdown)?;
        let info = describe(&*disk.disk, nbdproto::PAYLOAD_BYTES_MAX);
        Ok(Rules {
            size_bytes: info.size_bytes,
            block_bytes: info.block_bytes,
            payload_bytes_max: info.payload_bytes_max,
            read_only: info.read_only,
            trim: info.trim,
            write_zeroes: info.write_zeroes,
            structured,
            allocation,
        })
    }

    /// Transfers the data of a read or a write from the beginning of `buf` on, or executes a
    /// request without data. Suspends until it has ended. Gives the buffer back, unless the volume
    /// was abandoned.
    pub async fn transfer(
        &self,
        transfer: Transfer,
        mut buf: Option<Buf>,
    ) -> (Result<(), Errno>, Option<Buf>) {
        self.transfers.set(self.transfers.get() + 1);
        let _ending = Ending(self);
        let Transfer { kind, offset, len, fua } = transfer;
        if kind == Kind::Flush {
            return (self.flush().await, buf);
        }
        let piece_bytes = match self.piece_bytes(kind) {
            Ok(bytes) => bytes,
            Err(errno) => return (Err(errno), buf),
        };
        let whole = len <= piece_bytes;
        let mut at = 0;
        while at < len {
            let piece = (len - at).min(piece_bytes);
            let io = BufIo {
                kind,
                offset: offset + at,
                len: piece,
                at: usize::try_from(at).unwrap_or(usize::MAX),
                fua: fua && whole,
                tag: 0,
            };
            let (done, back) = self.piece(io, buf).await;
            buf = back;
            if done.is_err() {
                return (done, buf);
            }
            at += piece;
            if at < len {
                // A memory device completes immediately; others shall run, too.
                self.core.yield_now().await;
            }
        }
        if fua && !whole {
            // One flush for all pieces.
            return (self.flush().await, buf);
        }
        (Ok(()), buf)
    }

    async fn flush(&self) -> Result<(), Errno> {
        let flush = BufIo { kind: Kind::Flush, offset: 0, len: 0, at: 0, fua: false, tag: 0 };
        self.piece(flush, None).await.0
    }

    /// The extents of a range, or the first of them: see [`bdev::Bdev::extents`]. They are asked
    /// for one after the other, because helper threads that others need, too, may have to look.
    /// Suspends.
    ///
    /// # Errors
    /// [`Errno::Shutdown`] when the disk has gone.
    pub async fn extents(&self, offset: u64, len: u32, one: bool) -> Result<Vec<Extent>, Errno> {
        self.transfers.set(self.transfers.get() + 1);
        let _ending = Ending(self);
        self.ended.wait_until(|| !self.looks.get() || self.closed.get()).await;
        let device = match &*self.live.borrow() {
            Some(live) if !self.closed.get() => live.channel.device(),
            _ => return Err(Errno::Shutdown),
        };
        self.looks.set(true);
        let max = if one { 1 } else { EXTENTS_MAX };
        let found = device.extents(&self.core, offset, len.into(), max).await;
        self.looks.set(false);
        self.ended.notify_all();
        // Each lies in the range, whose length has 32 bits.
        let extent = |found: &bdev::Extent| Extent { len: found.len as u32, hole: found.is_hole };
        Ok(found.iter().take(max).map(extent).collect())
    }

    /// The longest piece of a request, in bytes.
    fn piece_bytes(&self, kind: Kind) -> Result<u64, Errno> {
        let live = self.live.borrow();
        let geometry = live.as_ref().ok_or(Errno::Shutdown)?.channel.device().geometry();
        Ok(match kind {
            Kind::Read | Kind::Write | Kind::Flush => PIECE_BYTES,
            Kind::Discard => geometry.discard_max.max(PIECE_BYTES),
            Kind::WriteZeroes { .. } => geometry.write_zeroes_max.max(PIECE_BYTES),
        })
    }

    fn is_read_only(&self) -> bool {
        self.live.borrow().as_ref().is_some_and(|live| is_read_only(&*live.disk))
    }

    /// Submits a piece, and waits for its end.
    async fn piece(&self, io: BufIo, mut buf: Option<Buf>) -> (Result<(), Errno>, Option<Buf>) {
        let answer = loop {
            // While the piece has waited, a machine may have connected.
            if writes(io.kind) && self.is_read_only() {
                return (Err(Errno::NotPermitted), buf);
            }
            let submitted = match &*self.live.borrow() {
                Some(live) if !self.closed.get() => live.channel.submit(io, buf),
                _ => return (Err(Errno::Shutdown), buf),
            };
            match submitted {
                Ok(answer) => break answer,
                Err((bdev::Full, back)) => buf = back,
            }
            self.ended.wait().await;
        };
        match answer.await {
            Ok(BufDone { status, buf, .. }) => (outcome(io.kind, status), buf),
            Err(reactor::Closed) => (Err(Errno::Shutdown), None),
        }
    }

    /// Refuses all later requests with [`Errno::Shutdown`].
    pub fn close(&self) {
        self.closed.set(true);
        self.ended.notify_all();
    }

    /// Whether requests are refused because the disk goes.
    pub fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Waits until nothing is in flight.
    pub async fn idle(&self) {
        self.ended.wait_until(|| self.is_idle()).await;
    }

    /// Whether nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.transfers.get() == 0
    }

    /// Releases the device. Requests in flight fail with [`Errno::Shutdown`].
    pub fn abandon(&self) {
        self.close();
        drop(self.live.take());
        self.ended.notify_all();
    }
}

/// Counts a transfer until it has ended, also if its task is dropped.
struct Ending<'a>(&'a Volume);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.transfers.set(self.0.transfers.get() - 1);
        self.0.ended.notify_all();
    }
}

/// Whether a request changes the disk.
fn writes(kind: Kind) -> bool {
    matches!(kind, Kind::Write | Kind::Discard | Kind::WriteZeroes { .. })
}

fn outcome(kind: Kind, status: Status) -> Result<(), Errno> {
    match status {
        Status::Ok => Ok(()),
        // A trim is a hint.
        Status::Unsupported if kind == Kind::Discard => Ok(()),
        Status::Unsupported => Err(Errno::Invalid),
        Status::IoError => Err(Errno::Io),
        Status::NoSpace => Err(Errno::NoSpace),
    }
}

fn is_read_only(disk: &dyn Disk) -> bool {
    disk.device().geometry().read_only || disk.is_taken()
}

/// What a client learns of a disk.
pub fn describe(disk: &dyn Disk, payload_bytes_max: u32) -> ExportInfo {
    let geometry = disk.device().geometry();
    let block_bytes = geometry.block_size;
    // The protocol wants a power of two.
    let preferred = geometry.physical_block_size.max(geometry.min_io).max(4096);
    ExportInfo {
        size_bytes: geometry.size_bytes,
        read_only: is_read_only(disk),
        trim: geometry.discard,
        write_zeroes: geometry.write_zeroes,
        allocation: true,
        block_bytes,
        preferred_bytes: preferred.next_power_of_two().min(payload_bytes_max).max(block_bytes),
        payload_bytes_max,
        description: String::new(),
    }
}

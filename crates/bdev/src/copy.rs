//! A [`Copy`]: copies a device to another one while it is in use.
//!
//! ```text
//!   everybody else --> tracked device --> source   each write marks its granules (`layers::dirty`)
//!   Copy <-- take marks, read ------------ source
//!        --- write, finish marks --> target
//! ```
//!
//! 1. The device gets a layer that tracks writes ([`Bdev::tracked`]), and everybody uses that.
//! 2. [`Copy::begin`] marks what the device has, and clears the target where the device has holes.
//! 3. [`Copy::pass`] copies what is marked. While others write, granules are marked again, and it
//!    is called again. If the target is a device of this process, most writes can go there, too,
//!    instead ([`Copy::mirror`], `layers::mirror`).
//! 4. When nobody writes any more, one more pass makes both the same.
//!
//! Invariants: a granule is read only after its mark was taken, so that a later write is seen or
//! marked again (`layers::marks`); within a pass no granule is copied twice at the same time,
//! because the cursor only moves forward, and a pass ends when all of its copies have.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use reactor::{Buf, Core, Event, timeout};

use crate::buf_channel::BufIo;
use crate::device::Bdev;
use crate::error::{Error, ErrorKind};
use crate::io::{Kind, Status};
use crate::layers::dirty::DirtyMap;
use crate::mutant::{self, Mutant};
use crate::task_channel::TaskChannel;

/// Bytes of one read and one write.
const PIECE_BYTES: u64 = 512 << 10;
/// The same while others use the device: their requests wait for those that are under way.
const GENTLE_PIECE_BYTES: u64 = 64 << 10;
/// Copies at the same time.
const LANES: usize = 8;
/// The same, and their bytes, for a target that takes long to answer.
const FAR_LANES: usize = 32;
const FAR_PIECE_BYTES: u64 = 128 << 10;
/// What the copies of a core may have in buffers together, as a part of its memory.
const BUDGET_PART: usize = 4;
/// Granules at which a lane, or a count of what is marked, looks before others get their turns.
const LOOK_GRANULES: u64 = 128 << 10;
/// How long a lane that is not used does not notice that it is again, in nanoseconds.
const LOOK_NS: u64 = 20_000_000;
/// How often it looks whether mirrored writes have ended, in nanoseconds.
const MIRROR_LOOK_NS: u64 = 50_000;
/// The device is asked for the extents of so many bytes, and so many extents, at once.
const EXTENT_BYTES: u64 = 1 << 30;
const EXTENTS: usize = 1024;

/// A copy of a device; see the module text. Belongs to one core.
pub struct Copy {
    core: Core,
    source: TaskChannel,
    target: Box<dyn CopyTarget>,
    map: Arc<DirtyMap>,
    size_bytes: u64,
    copied_bytes: Cell<u64>,
    /// What was marked at the last count, without what was taken since.
    known_left_bytes: Cell<u64>,
    /// What its pieces have in buffers.
    held_bytes: Cell<u64>,
    budget: Rc<Budget>,
    gentle: Cell<bool>,
    /// Writes are mirrored as long as there is no rate.
    mirrors: Cell<bool>,
    /// When all that was ordered at the present rate is paid for.
    paid_ns: Cell<u64>,
    /// Bytes of pieces that wait for their turn.
    waiting_bytes: Cell<u64>,
    bytes_per_second: Cell<u64>,
    /// The number of changes of the rate.
    changes: Cell<u64>,
    /// Notified then.
    changed: Event,
}

impl Copy {
    /// Prepares to copy `tracked`, a device that [`Bdev::tracked`] has returned, to a target of
    /// the same size.
    ///
    /// # Errors
    /// As for [`Bdev::channel`], and when the device does not track writes.
    pub fn new(core: &Core, tracked: &Bdev, target: Box<dyn CopyTarget>) -> Result<Copy, Error> {
        let untracked = || Error::new(ErrorKind::Unsupported, "the device does not track writes");
        let map = tracked.dirty_map().ok_or_else(untracked)?.clone();
        let source = tracked.below().ok_or_else(untracked)?;
        Ok(Copy {
            core: core.clone(),
            source: TaskChannel::new(source, core)?,
            target,
            map,
            size_bytes: source.size_bytes(),
            copied_bytes: Cell::new(0),
            known_left_bytes: Cell::new(0),
            held_bytes: Cell::new(0),
            budget: core.local(),
            gentle: Cell::new(false),
            mirrors: Cell::new(false),
            paid_ns: Cell::new(0),
            waiting_bytes: Cell::new(0),
            bytes_per_second: Cell::new(0),
            changes: Cell::new(0),
            changed: Event::new(),
        })
    }

    /// The marked bytes that were copied so far, including those that were copied again.
    pub fn copied_bytes(&self) -> u64 {
        self.copied_bytes.get()
    }

    /// The bytes that are marked now. Reads the whole bitmap without a pause.
    pub fn left_bytes(&self) -> u64 {
        let left = self.map.marked(0, self.granules()) * self.map.granule();
        self.known_left_bytes.set(left);
        left
    }

    /// The same, with pauses in which others get their turns: what is marked meanwhile may be
    /// missing. Suspends.
    pub async fn count_left_bytes(&self) -> u64 {
        let (mut at, mut marked, granules) = (0, 0, self.granules());
        loop {
            let end = granules.min(at + LOOK_GRANULES);
            marked += self.map.marked(at, end);
            if end == granules {
                break;
            }
            at = end;
            self.core.yield_now().await;
        }
        let left = marked * self.map.granule();
        self.known_left_bytes.set(left);
        left
    }

    /// The bytes that were marked at the last count, without what was taken since. Costs nothing.
    pub fn known_left_bytes(&self) -> u64 {
        self.known_left_bytes.get()
    }

    fn granules(&self) -> u64 {
        self.size_bytes.div_ceil(self.map.granule())
    }

    /// Copies in short pieces and, unless the target is far, with few at the same time, for the
    /// sake of others; or as fast as possible. Holds at once.
    pub fn be_gentle(&self, gentle: bool) {
        self.gentle.set(gentle);
    }

    /// Whether it was told to be gentle last.
    pub fn is_gentle(&self) -> bool {
        self.gentle.get()
    }

    /// How many of the lanes copy, and how many bytes each at a time.
    fn lanes(&self) -> (usize, u64) {
        match (self.target.is_far(), self.gentle.get()) {
            (true, true) => (FAR_LANES, GENTLE_PIECE_BYTES),
            (true, false) => (FAR_LANES, FAR_PIECE_BYTES),
            (false, true) => (LANES / 4, GENTLE_PIECE_BYTES),
            (false, false) => (LANES, PIECE_BYTES),
        }
    }

    /// The bytes per second that it may copy; 0 is no limit.
    pub fn rate(&self) -> u64 {
        self.bytes_per_second.get()
    }

    /// Copies at most so many bytes per second; 0 is no limit.
    pub fn limit(&self, bytes_per_second: u64) {
        let before = self.bytes_per_second.replace(bytes_per_second);
        if before == bytes_per_second {
            return;
        }
        // What has begun is paid for at the new rate, and pieces that wait line up again.
        let now_ns = self.core.now_ns();
        let left_ns = self.paid_ns.get().saturating_sub(now_ns);
        let left_bytes = u128::from(left_ns) * u128::from(before) / 1_000_000_000;
        let owed_bytes = u64::try_from(left_bytes).unwrap_or(u64::MAX);
        let owed_bytes = owed_bytes.saturating_sub(self.waiting_bytes.take());
        self.paid_ns.set(now_ns.saturating_add(cost_ns(owed_bytes, bytes_per_second)));
        self.changes.set(self.changes.get() + 1);
        self.changed.notify_all();
        self.turn_mirror();
    }

    /// Mirrors writes from now on, where nothing is left to be copied, if the device was made for
    /// that ([`Bdev::mirrored`]) and there is no limit; or does so no more. Not before
    /// [`Copy::begin`] has ended, which would clear what was written.
    pub fn mirror(&self, mirrors: bool) {
        self.mirrors.set(mirrors);
        self.turn_mirror();
    }

    fn turn_mirror(&self) {
        if let Some(mirror) = self.map.mirror() {
            mirror.turn(self.mirrors.get() && self.bytes_per_second.get() == 0);
        }
    }

    /// Waits until no mirrored write is under way. While others write, that may never be.
    pub async fn until_mirrored(&self) {
        while self.is_mirroring() {
            self.core.sleep_ns(MIRROR_LOOK_NS).await;
        }
    }

    /// Whether a mirrored write is under way.
    fn is_mirroring(&self) -> bool {
        self.map.mirror().is_some_and(|mirror| !mirror.is_idle())
    }

    /// Marks everything that is to be copied, and makes the target read as zeroes where the device
    /// has holes. Suspends.
    ///
    /// # Errors
    /// When the target fails.
    pub async fn begin(&self) -> Result<(), Error> {
        let device = self.source.device();
        let mut at = 0;
        while at < self.size_bytes {
            let len = (self.size_bytes - at).min(EXTENT_BYTES);
            let mut clears = Vec::new();
            for extent in device.extents(&self.core, at, len, EXTENTS).await {
                if extent.is_hole {
                    clears.push(self.target.clear(at, extent.len));
                } else {
                    self.map.mark_range(at, extent.len);
                    let known_bytes = self.known_left_bytes.get() + extent.len;
                    self.known_left_bytes.set(known_bytes.min(self.size_bytes));
                }
                at += extent.len;
            }
            let failed = Cell::new(None);
            all(clears, |cleared| failed.set(cleared.err().or(failed.take()))).await;
            failed.take().map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// Copies what is marked, except for granules that a mirrored write is under way to. Returns
    /// the number of its bytes. Suspends.
    ///
    /// # Errors
    /// When one of the devices fails. What was marked may not be marked any more.
    pub async fn pass(&self) -> Result<u64, Error> {
        let _copies = Copies::new(&self.budget);
        let before = self.copied_bytes.get();
        let (cursor, failed) = (Cell::new(0), RefCell::new(None));
        let mut lanes: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
        let lanes_max = if self.target.is_far() { FAR_LANES } else { LANES };
        for nth in 0..lanes_max {
            lanes.push(Box::pin(self.lane(nth, &cursor, &failed)));
        }
        all(lanes, |()| ()).await;
        match failed.take() {
            Some(error) => Err(error),
            None => {
                let copied = self.copied_bytes.get() - before;
                if copied == 0 && self.is_mirroring() {
                    // They get their turns before somebody looks again at what they have claimed.
                    self.core.sleep_ns(MIRROR_LOOK_NS).await;
                }
                Ok(copied)
            }
        }
    }

    async fn lane(&self, nth: usize, cursor: &Cell<u64>, failed: &RefCell<Option<Error>>) {
        while failed.borrow().is_none() {
            if nth >= self.lanes().0 {
                if cursor.get() == u64::MAX {
                    return;
                }
                self.core.sleep_ns(LOOK_NS).await;
                continue;
            }
            // A long row of nothing keeps nobody waiting: each lane looks at its part of it.
            let (from, granules) = (cursor.get(), self.granules());
            let end = granules.min(from.saturating_add(LOOK_GRANULES));
            let Some(taken) = self.map.take_before(from, end) else {
                if end == granules {
                    // The others need not look again.
                    return cursor.set(u64::MAX);
                }
                cursor.set(end);
                self.core.yield_now().await;
                continue;
            };
            cursor.set(taken.first + u64::from(u64::BITS));
            let bytes = u64::from(taken.bits.count_ones()) * self.map.granule();
            self.known_left_bytes.set(self.known_left_bytes.get().saturating_sub(bytes));
            let granule = self.map.granule();
            for (first, count) in runs(taken.bits) {
                let from = (taken.first + u64::from(first)) * granule;
                let end = (from + u64::from(count) * granule).min(self.size_bytes);
                if let Err(error) = self.range(from, end).await {
                    failed.replace(Some(error));
                    return;
                }
            }
            self.copied_bytes.set(self.copied_bytes.get() + bytes);
            self.map.finish(taken);
            if mutant::is(Mutant::TakesMarksAfterCopy)
                && let Some(later) = self.map.take(taken.first)
            {
                self.map.finish(later);
            }
        }
    }

    async fn range(&self, from: u64, end: u64) -> Result<(), Error> {
        let mut at = from;
        while at < end {
            let len = (end - at).min(self.lanes().1);
            self.pay(len).await;
            self.piece(at, len).await?;
            at += len;
        }
        Ok(())
    }

    /// Waits until the rate allows these bytes.
    async fn pay(&self, len: u64) {
        loop {
            let (rate, changes) = (self.bytes_per_second.get(), self.changes.get());
            let from_ns = self.paid_ns.get().max(self.core.now_ns());
            self.paid_ns.set(from_ns.saturating_add(cost_ns(len, rate)));
            let _waiting = Waiting::new(self, len);
            let left_ns = from_ns.saturating_sub(self.core.now_ns());
            let changed = self.changed.wait_until(|| self.changes.get() != changes);
            if left_ns == 0 || timeout(&self.core, left_ns, changed).await.is_err() {
                return;
            }
        }
    }

    async fn piece(&self, offset: u64, len: u64) -> Result<(), Error> {
        let _held = self.hold(len).await;
        let buf = alloc(&self.core, len).await?;
        let (status, buf) = self.source.run(request(Kind::Read, offset, len), Some(buf)).await;
        ended(status, "reading the device", offset)?;
        let Some(buf) = buf else { return Err(gone()) };
        if is_zero(&buf[..len as usize]) {
            self.target.zero(offset, len, buf).await?;
        } else {
            self.target.write(offset, len, buf).await?;
        }
        Ok(())
    }

    /// Waits until these bytes may be in a buffer, and counts them. A copy may always have one
    /// piece, or a quarter of its part of what the copies of this core may have; and its whole part
    /// if that is not held by others, who had more when there were fewer.
    async fn hold(&self, len: u64) -> Held<'_> {
        let (budget, own) = (&self.budget, &self.held_bytes);
        let most = Budget::most(&self.core);
        let fits = || {
            let part = most / budget.copies.get().max(1);
            let then = own.get() + len;
            let is_free = budget.held_bytes.get() + len <= most;
            own.get() == 0 || then <= part / 4 || then <= part && is_free
        };
        budget.changed.wait_until(fits).await;
        own.set(own.get() + len);
        budget.take(len);
        Held { copy: self, len }
    }

    /// Makes the copy durable. Suspends.
    ///
    /// # Errors
    /// When the target fails, or the bitmap is lost: then nothing is marked any more, and something
    /// may not have been copied.
    pub async fn flush(&self) -> Result<(), Error> {
        if self.map.is_lost() {
            let what = "the bitmap of what is written was lost";
            return Err(Error::new(ErrorKind::Io, what));
        }
        self.target.flush().await
    }
}

/// What the copies of a core have in buffers together, also while their targets do not answer.
#[derive(Default)]
pub(crate) struct Budget {
    held_bytes: Cell<u64>,
    /// Passes under way.
    copies: Cell<u64>,
    /// Notified when there may be more room.
    changed: Event,
}

impl Budget {
    /// What copies and mirrored writes may have together.
    fn most(core: &Core) -> u64 {
        (core.pool().limit() / BUDGET_PART) as u64
    }

    /// Whether a mirrored write may have these bytes, too.
    pub fn has_room(&self, core: &Core, len: u64) -> bool {
        self.held_bytes.get() + len <= Budget::most(core)
    }

    /// Counts the bytes of a buffer.
    pub fn take(&self, len: u64) {
        self.held_bytes.set(self.held_bytes.get() + len);
    }

    /// Counts them no more.
    pub fn release(&self, len: u64) {
        self.held_bytes.set(self.held_bytes.get() - len);
        self.changed.notify_all();
    }
}

/// A pass under way.
struct Copies<'a>(&'a Budget);

impl<'a> Copies<'a> {
    fn new(budget: &'a Budget) -> Copies<'a> {
        budget.copies.set(budget.copies.get() + 1);
        Copies(budget)
    }
}

impl Drop for Copies<'_> {
    fn drop(&mut self) {
        self.0.copies.set(self.0.copies.get() - 1);
        self.0.changed.notify_all();
    }
}

/// The bytes of a piece that is under way.
struct Held<'a> {
    copy: &'a Copy,
    len: u64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let Copy { budget, held_bytes, .. } = self.copy;
        held_bytes.set(held_bytes.get() - self.len);
        budget.release(self.len);
    }
}

/// A buffer. Suspends until there is memory for it, however long others hold that.
///
/// # Errors
/// When it is larger than all of the core's memory.
async fn alloc(core: &Core, len: u64) -> Result<Buf, Error> {
    loop {
        match core.alloc_wait(len as usize).await {
            Ok(buf) => return Ok(buf),
            Err(_) if core.pool().could_hold(len as usize) => {
                tracing::debug!(bytes = len, "a copy waits for memory that others hold");
            }
            Err(error) => return Err(Error::io("a buffer for a copy", error)),
        }
    }
}

/// Runs all of them at the same time.
async fn all<T>(mut steps: Vec<Pin<Box<dyn Future<Output = T> + '_>>>, mut then: impl FnMut(T)) {
    poll_fn(|cx| {
        steps.retain_mut(|step| match step.as_mut().poll(cx) {
            Poll::Ready(done) => {
                then(done);
                false
            }
            Poll::Pending => true,
        });
        if steps.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// A step of a copy at its target.
pub type TargetStep<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>>;

/// Where a copy goes.
pub trait CopyTarget {
    /// Whether it takes long to answer, so that only many requests at the same time are fast.
    fn is_far(&self) -> bool {
        false
    }

    /// Writes the first `len` bytes of a buffer at `offset`.
    fn write(&self, offset: u64, len: u64, buf: Buf) -> TargetStep<'_>;

    /// Makes `len` bytes read as zeroes. The buffer has as many zeroes, for a target that cannot do
    /// that otherwise.
    fn zero(&self, offset: u64, len: u64, buf: Buf) -> TargetStep<'_>;

    /// Makes a range of any length read as zeroes, except for what does so already.
    fn clear(&self, offset: u64, len: u64) -> TargetStep<'_>;

    /// Makes all of it durable.
    fn flush(&self) -> TargetStep<'_>;
}

impl<T: CopyTarget> CopyTarget for Rc<T> {
    fn write(&self, offset: u64, len: u64, buf: Buf) -> TargetStep<'_> {
        (**self).write(offset, len, buf)
    }

    fn zero(&self, offset: u64, len: u64, buf: Buf) -> TargetStep<'_> {
        (**self).zero(offset, len, buf)
    }

    fn clear(&self, offset: u64, len: u64) -> TargetStep<'_> {
        (**self).clear(offset, len)
    }

    fn flush(&self) -> TargetStep<'_> {
        (**self).flush()
    }
}

/// A device as the target of a copy.
pub struct DeviceTarget {
    core: Core,
    channel: TaskChannel,
}

impl DeviceTarget {
    /// Opens a channel to the device.
    ///
    /// # Errors
    /// As for [`Bdev::channel`].
    pub fn new(core: &Core, device: &Bdev) -> Result<DeviceTarget, Error> {
        Ok(DeviceTarget { core: core.clone(), channel: TaskChannel::new(device, core)? })
    }

    /// Reads the first `len` bytes of a buffer from `offset`. Suspends.
    ///
    /// # Errors
    /// When the device fails.
    pub async fn read(&self, offset: u64, len: u64, buf: Buf) -> Result<Buf, Error> {
        let (status, buf) = self.channel.run(request(Kind::Read, offset, len), Some(buf)).await;
        ended(status, "reading the target", offset)?;
        buf.ok_or_else(gone)
    }

    async fn write_all(&self, offset: u64, len: u64, buf: Buf) -> Result<Option<Buf>, Error> {
        let (status, buf) = self.channel.run(request(Kind::Write, offset, len), Some(buf)).await;
        ended(status, "writing the target", offset)?;
        Ok(buf)
    }

    async fn deallocate(&self, offset: u64, len: u64) -> Result<(), Error> {
        let kind = Kind::WriteZeroes { unmap: true };
        let (status, _) = self.channel.run(request(kind, offset, len), None).await;
        ended(status, "clearing the target", offset)
    }

    /// Makes a range without holes read as zeroes.
    async fn clear_extent(&self, offset: u64, len: u64) -> Result<(), Error> {
        let geometry = self.channel.device().geometry();
        let most = match geometry.write_zeroes {
            true => geometry.write_zeroes_max.max(PIECE_BYTES),
            false => PIECE_BYTES,
        };
        let (mut at, end) = (offset, offset + len);
        let mut zeroes = None;
        while at < end {
            let piece = (end - at).min(most);
            if geometry.write_zeroes {
                self.deallocate(at, piece).await?;
            } else {
                let buf = match zeroes.take() {
                    Some(buf) => buf,
                    None => {
                        let buf = self.core.alloc_wait(PIECE_BYTES as usize).await;
                        let mut buf = buf.map_err(|error| Error::io("a buffer", error))?;
                        buf.fill(0);
                        buf
                    }
                };
                zeroes = self.write_all(at, piece, buf).await?;
            }
            at += piece;
        }
        Ok(())
    }
}

impl std::fmt::Debug for DeviceTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceTarget({:?})", self.channel)
    }
}

impl CopyTarget for DeviceTarget {
    fn write(&self, offset: u64, len: u64, buf: Buf) -> TargetStep<'_> {
        Box::pin(async move { self.write_all(offset, len, buf).await.map(drop) })
    }

    fn zero(&self, offset: u64, len: u64, buf: Buf) -> TargetStep<'_> {
        match self.channel.device().geometry().write_zeroes {
            true => Box::pin(self.deallocate(offset, len)),
            false => self.write(offset, len, buf),
        }
    }

    fn clear(&self, offset: u64, len: u64) -> TargetStep<'_> {
        Box::pin(async move {
            let device = self.channel.device();
            let (mut at, end) = (offset, offset + len);
            while at < end {
                for extent in device.extents(&self.core, at, end - at, EXTENTS).await {
                    if !extent.is_hole {
                        self.clear_extent(at, extent.len).await?;
                    }
                    at += extent.len;
                }
            }
            Ok(())
        })
    }

    fn flush(&self) -> TargetStep<'_> {
        Box::pin(async move {
            let (status, _) = self.channel.run(request(Kind::Flush, 0, 0), None).await;
            ended(status, "flushing the target", 0)
        })
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        self.mirror(false);
    }
}

impl std::fmt::Debug for Copy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Copy({} bytes copied)", self.copied_bytes.get())
    }
}

/// What so many bytes cost at a rate, in nanoseconds.
fn cost_ns(bytes: u64, bytes_per_second: u64) -> u64 {
    let ns = (u128::from(bytes) * 1_000_000_000).checked_div(u128::from(bytes_per_second));
    u64::try_from(ns.unwrap_or(0)).unwrap_or(u64::MAX)
}

/// A piece that waits for its turn at this rate.
struct Waiting<'a> {
    copy: &'a Copy,
    len: u64,
    changes: u64,
}

impl<'a> Waiting<'a> {
    fn new(copy: &'a Copy, len: u64) -> Waiting<'a> {
        copy.waiting_bytes.set(copy.waiting_bytes.get() + len);
        Waiting { copy, len, changes: copy.changes.get() }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let Waiting { copy, len, changes } = self;
        if copy.changes.get() == *changes {
            copy.waiting_bytes.set(copy.waiting_bytes.get() - *len);
        }
    }
}

fn request(kind: Kind, offset: u64, len: u64) -> BufIo {
    BufIo { kind, offset, len, at: 0, fua: false, tag: 0 }
}

/// The error of a device that was closed under a copy.
fn gone() -> Error {
    Error::new(ErrorKind::Io, "the device was closed")
}

fn ended(status: Status, what: &str, offset: u64) -> Result<(), Error> {
    let why = match status {
        Status::Ok => return Ok(()),
        Status::NoSpace => "no space left",
        Status::Unsupported => "not supported",
        Status::IoError => "an I/O error",
    };
    Err(Error::new(ErrorKind::Io, format!("{what} at byte {offset}: {why}")))
}

fn is_zero(bytes: &[u8]) -> bool {
    let (chunks, rest) = bytes.as_chunks::<64>();
    chunks.iter().all(|chunk| *chunk == [0; 64]) && rest.iter().all(|byte| *byte == 0)
}

/// First bit and number of bits of each run of ones.
fn runs(mut bits: u64) -> impl Iterator<Item = (u32, u32)> {
    std::iter::from_fn(move || {
        let first = bits.trailing_zeros();
        if bits == 0 {
            return None;
        }
        let count = (bits >> first).trailing_ones();
        let mask = if count == 64 { u64::MAX } else { ((1 << count) - 1) << first };
        bits &= !mask;
        Some((first, count))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_in_order() {
        let all = |bits| runs(bits).collect::<Vec<_>>();
        assert_eq!(all(0), []);
        assert_eq!(all(u64::MAX), [(0, 64)]);
        assert_eq!(all(0b1101), [(0, 1), (2, 2)]);
        assert_eq!(all(1 << 63 | 1), [(0, 1), (63, 1)]);
    }

    #[test]
    fn zeroes_are_recognised_wherever_the_other_byte_is() {
        let mut bytes = [0; 200];
        assert!(is_zero(&bytes) && is_zero(&[]));
        for at in 0..bytes.len() {
            bytes[at] = 1;
            assert!(!is_zero(&bytes), "{at}");
            bytes[at] = 0;
        }
    }
}

//! `dirty:` tracks which parts of a device have been written, in a bitmap that other processes can
//! map, for copying the device while it is in use.
//!
//! 1. A write, a discard or a write of zeroes marks its granules, then goes to the device (an
//!    unnamed bitmap, which ends with the process, needs no mark here). When it has completed, with
//!    whatever status, it marks them again before the completion is reported: all that have
//!    completed at once, together.
//! 2. The copier takes marks ([`DirtyMap::take`]), reads their granules, and finishes them.
//!    `marks.rs` says why neither side can miss a write.
//!
//! The bitmap is a file, or a memfd if no file is named, that is mapped as a whole; its layout is
//! in `docs/formats/dirty.md`. It survives the process but not a reboot: a bitmap from before the
//! last boot has no meaning, and then everything is marked.
//!
//! If the bitmap's file is truncated, the bitmap is lost ([`DirtyMap::is_lost`]); the device
//! continues to work.
//!
//! A bitmap for a copy to another device of this process can mirror writes (`mirror.rs`).

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use reactor::{Core, Guard, Mode, Opening};

use crate::channel::Channel;
use crate::device::Bdev;
use crate::error::{Error, ErrorKind};
use crate::io::{Done, Io, Kind, QUEUE_DEPTH, Status};
use crate::layers::marks::Marks;
use crate::layers::mirror::{Mirror, MirrorChannel, Mirrored};
use loomable::{AtomicBool, AtomicU64, Ordering};

const PAGE: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"MRdirty\n");
const VERSION: u64 = 1;
/// Room for growth, as a multiple of the first size; at least [`ROOM_MIN`].
const ROOM: u64 = 2;
const ROOM_MIN: u64 = 64 << 30;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Indexes of the header's fields, each eight bytes.
mod at {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    pub const GRANULE: usize = 2;
    pub const WORDS: usize = 3;
    pub const BOOT: usize = 4;
    pub const COUNT: usize = 6;
}

/// A bitmap of the writes to a device; see the module text.
pub struct DirtyMap {
    /// Declared before `pages`, so that it is dropped first.
    guard: Guard,
    pages: Pages,
    file: OwnedFd,
    granule: u64,
    /// Its logarithm.
    shift: u32,
    /// Length of each row, in words of 64 bits.
    words: u64,
    /// The same with its padding, in bytes.
    row_bytes: u64,
    /// A copier here has a barrier for the processors of all writers.
    has_barrier: bool,
    /// Writers rely on that: no copier of another kind maps an unnamed bitmap, which ends with the
    /// process.
    light: bool,
    /// The barrier has failed, which the kernel excludes.
    broken: AtomicBool,
    mirror: Option<Mirror>,
}

/// Marks taken for up to 64 granules: bit `n` stands for the granule `first + n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// A multiple of 64.
    pub first: u64,
    /// Not 0.
    pub bits: u64,
}

/// The mapping.
struct Pages {
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to the process and is unmapped with this value; all accesses to it
// are atomic.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `Pages::map`, which nobody uses any more.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

impl Pages {
    fn map(file: BorrowedFd<'_>, len: u64) -> io::Result<Pages> {
        let len =
            usize::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        let (any, access) = (std::ptr::null_mut(), libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { libc::mmap(any, len, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Pages { base: base.cast(), len })
    }

    /// The `count` numbers from `offset` on; `None` if they do not lie in the mapping.
    fn numbers(&self, offset: u64, count: u64) -> Option<&[AtomicU64]> {
        let end = count.checked_mul(8)?.checked_add(offset)?;
        if end > self.len as u64 || !offset.is_multiple_of(8) {
            return None;
        }
        let at = self.base.wrapping_add(offset as usize).cast();
        // SAFETY: the check above shows that the numbers lie in the mapping and are aligned.
        // Atomics may be shared with other processes, and become zeroes at any time.
        Some(unsafe { std::slice::from_raw_parts(at, count as usize) })
    }
}

/// Size in bytes of a row of `words`, in whole pages.
fn row(words: u64) -> Option<u64> {
    words.checked_mul(8)?.checked_next_multiple_of(PAGE)
}

/// Size in bytes of a file with two rows of `words`.
fn file_len(words: u64) -> Option<u64> {
    row(words)?.checked_mul(2)?.checked_add(PAGE)
}

fn len_of(file: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: an all-zero `stat` is a valid value, and the call gets a live one.
    let stat = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::fstat(file.as_raw_fd(), &raw mut stat) != 0 {
            return Err(io::Error::last_os_error());
        }
        stat
    };
    Ok(stat.st_size as u64)
}

/// Registers this process for the barrier of copiers. In a process with several threads that
/// takes the kernel some milliseconds; so it is called at the start of a node, too.
pub fn register_barrier() -> bool {
    membarrier(libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED)
}

/// A fence on every processor on which a process runs that has registered itself for it; or this
/// registration. Returns whether the kernel has it.
fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: takes no pointers.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

fn memfd() -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string.
    let file = unsafe { libc::memfd_create(c"millrace-dirty".as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

impl DirtyMap {
    /// Opens the bitmap of a device: the one at `path`, which is created if it does not exist, or
    /// an unnamed one.
    pub(crate) async fn open(
        core: &Core,
        path: Option<&Path>,
        granule: u64,
        size_bytes: u64,
    ) -> Result<DirtyMap, Error> {
        let name = path.map_or("a bitmap".into(), |path| path.display().to_string());
        let failed = |error| Error::io(format!("dirty: cannot open {name}"), error);
        // A simulated world has no files that can be mapped.
        let file = match path.filter(|_| !core.is_simulated()) {
            None => memfd(),
            Some(path) => open_or_make(core, path).await,
        };
        let file = file.map_err(failed)?;
        let boot = boot_id(core).await;
        let bits = size_bytes.max(ROOM_MIN / ROOM).saturating_mul(ROOM).div_ceil(granule);
        let made = len_of(file.as_fd()).map_err(failed)? == 0;
        if made {
            DirtyMap::make(&file, granule, bits.div_ceil(64), boot).map_err(failed)?;
        }
        let map = DirtyMap::take_over(file, granule, size_bytes, path.is_some())?;
        // Without a boot ID, a bitmap that already exists may be from before the boot.
        if !made && (map.boot() != boot || boot == [0; 2]) {
            map.mark_range(0, size_bytes);
            map.set_boot(boot);
        }
        Ok(map)
    }

    /// Takes over the bitmap of a device from another process. If it is named, others may map it.
    pub(crate) fn take_over(
        file: OwnedFd,
        granule: u64,
        size_bytes: u64,
        is_named: bool,
    ) -> Result<DirtyMap, Error> {
        let mut map = DirtyMap::map(file)?;
        map.light = map.has_barrier && !is_named;
        let wrong = |what| Error::new(ErrorKind::Unsupported, format!("dirty: the bitmap {what}"));
        if map.granule != granule {
            return Err(wrong(format!("has a granule of {}, not {granule}", map.granule)));
        }
        if !map.covers(size_bytes) {
            return Err(wrong(format!("has no room for {size_bytes} bytes")));
        }
        Ok(map)
    }

    /// Initializes a new file. The magic number is written last, to make it valid.
    fn make(file: &OwnedFd, granule: u64, words: u64, boot: [u64; 2]) -> io::Result<()> {
        let len = file_len(words).ok_or_else(|| io::Error::from_raw_os_error(libc::EFBIG))?;
        // Allocate all of it, because a mark that met a full file system would raise a signal.
        // SAFETY: takes no pointers.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len as libc::off_t) } {
            0 => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
        let pages = Pages::map(file.as_fd(), PAGE)?;
        // SAFETY: the whole mapping, one page, which is unmapped after the guard is dropped. All
        // accesses to it are atomic, and any word may become zero.
        let _guard = unsafe { Guard::new(pages.base, PAGE as usize) };
        let Some(header) = pages.numbers(0, at::COUNT as u64) else { return Ok(()) };
        let values = [(at::GRANULE, granule), (at::WORDS, words), (at::VERSION, VERSION)];
        let boots = [(at::BOOT, boot[0]), (at::BOOT + 1, boot[1])];
        for (at, value) in values.into_iter().chain(boots).chain([(at::MAGIC, MAGIC)]) {
            header[at].store(value.to_le(), Ordering::Release);
        }
        Ok(())
    }

    /// Maps the bitmap in an open file, for a copier in another process.
    ///
    /// # Errors
    /// When the file is not a bitmap, or has another version.
    pub fn map(file: OwnedFd) -> Result<DirtyMap, Error> {
        let wrong = |what: &str| Error::new(ErrorKind::Unsupported, format!("dirty: {what}"));
        let failed = |error| Error::io("dirty: cannot map the bitmap", error);
        let len = len_of(file.as_fd()).map_err(failed)?;
        if len < PAGE {
            return Err(wrong("the file is not a bitmap"));
        }
        let pages = Pages::map(file.as_fd(), len).map_err(failed)?;
        // SAFETY: the whole mapping, in whole pages, which is unmapped after the guard is dropped.
        // All accesses to it are atomic, and any word may become zero.
        let guard = unsafe { Guard::new(pages.base, len.next_multiple_of(PAGE) as usize) };
        let mut map = DirtyMap {
            guard,
            pages,
            file,
            granule: 0,
            shift: 0,
            words: 0,
            row_bytes: 0,
            has_barrier: register_barrier(),
            light: false,
            broken: AtomicBool::new(false),
            mirror: None,
        };
        let header = |at: usize| map.number(at);
        if header(at::MAGIC) != MAGIC {
            return Err(wrong("the file is not a bitmap or is incomplete: remove it"));
        }
        if header(at::VERSION) != VERSION {
            return Err(wrong("the bitmap has another version"));
        }
        let (granule, words) = (header(at::GRANULE), header(at::WORDS));
        let whole = file_len(words).is_some_and(|needed| needed <= len);
        if !granule.is_power_of_two() || words == 0 || !whole || map.is_lost() {
            return Err(wrong("the bitmap is damaged: remove it"));
        }
        (map.granule, map.words, map.row_bytes) = (granule, words, row(words).unwrap_or(0));
        map.shift = granule.trailing_zeros();
        Ok(map)
    }

    fn number(&self, at: usize) -> u64 {
        let header = self.pages.numbers(0, at::COUNT as u64).expect("a file has a page");
        u64::from_le(header[at].load(Ordering::Acquire))
    }

    fn boot(&self) -> [u64; 2] {
        [self.number(at::BOOT), self.number(at::BOOT + 1)]
    }

    fn set_boot(&self, boot: [u64; 2]) {
        let header = self.pages.numbers(0, at::COUNT as u64).expect("a file has a page");
        for (nth, half) in boot.into_iter().enumerate() {
            header[at::BOOT + nth].store(half.to_le(), Ordering::Release);
        }
    }

    #[inline(always)]
    fn marks(&self) -> Marks<'_> {
        let row = |at: u64| {
            let first = self.pages.base.wrapping_add(at as usize).cast();
            // SAFETY: `map` has found that the file's pages up to the end of the second row lie in
            // the mapping, which lives as long as this value. Each row begins with a page. All
            // accesses to it are atomic.
            unsafe { std::slice::from_raw_parts(first, self.words as usize) }
        };
        Marks {
            dirty: row(PAGE),
            taken: row(PAGE + self.row_bytes),
            claimed: self.mirror.as_ref().map_or(&[], |mirror| mirror.claimed()),
            light: self.light,
        }
    }

    /// Prepares to mirror writes to the target of a copy, of this size.
    pub(crate) fn set_mirror(&mut self, target: Bdev) {
        let granules = target.size_bytes().div_ceil(self.granule);
        self.mirror = Some(Mirror::new(target, granules));
    }

    pub(crate) fn mirror(&self) -> Option<&Mirror> {
        self.mirror.as_ref()
    }

    /// Claims the granules of a range that is not empty for a mirrored write: [`Marks::claim`].
    pub(crate) fn claim(&self, offset: u64, len: u64) -> bool {
        let (first, last) = self.granules(offset, len);
        self.marks().claim(first, last)
    }

    /// Ends that.
    pub(crate) fn release(&self, offset: u64, len: u64) {
        let (first, last) = self.granules(offset, len);
        self.marks().release(first, last);
    }

    /// The granules of a range that lies in the device and is not empty.
    #[inline(always)]
    fn granules(&self, offset: u64, len: u64) -> (u64, u64) {
        (offset >> self.shift, offset.wrapping_add(len).wrapping_sub(1) >> self.shift)
    }

    /// Marks a range that is not empty.
    pub(crate) fn mark_range(&self, offset: u64, len: u64) {
        self.marks().end(&[self.granules(offset, len)]);
    }

    /// Whether there is a bit for each byte of a device of this size.
    pub(crate) fn covers(&self, size_bytes: u64) -> bool {
        size_bytes.div_ceil(self.granule) <= self.words.saturating_mul(64)
    }

    /// Number of granules from `from` up to `end` that are marked now, in whole words: `from` is a
    /// multiple of 64.
    pub(crate) fn marked(&self, from: u64, end: u64) -> u64 {
        let end = end.div_ceil(64).min(self.words) as usize;
        let from = ((from / 64) as usize).min(end);
        self.marks().dirty[from..end].iter().map(|word| u64::from(word_bits(word))).sum()
    }

    /// The file from which another process maps it.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Bytes per bit.
    pub fn granule(&self) -> u64 {
        self.granule
    }

    /// Whether the file was truncated, so that its marks are no longer known.
    pub fn is_lost(&self) -> bool {
        self.guard.is_lost() || self.broken.load(Ordering::Relaxed)
    }

    /// Takes the marks of the next 64 granules, from `from` on, that have any. Later reads of the
    /// device are at least as new as the marks. There may be only one copier.
    pub fn take(&self, from: u64) -> Option<Taken> {
        self.take_before(from, u64::MAX)
    }

    /// The same, and looks only at granules before `end`, in whole words.
    pub(crate) fn take_before(&self, from: u64, end: u64) -> Option<Taken> {
        let marks = self.marks();
        let barrier = || {
            if self.has_barrier && !membarrier(libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED) {
                self.broken.store(true, Ordering::Relaxed);
            }
        };
        self.find(from, end, |word| marks.take(word, barrier))
    }

    /// Finishes taken marks, after their granules were copied.
    pub fn finish(&self, taken: Taken) {
        let word = (taken.first / 64) as usize;
        if (word as u64) < self.words {
            self.marks().finish(word, taken.bits);
        }
    }

    /// Marks from `from` on that were taken and not finished: where to begin after a copier has
    /// died.
    pub fn unfinished(&self, from: u64) -> Option<Taken> {
        let marks = self.marks();
        self.find(from, u64::MAX, |word| marks.unfinished(word))
    }

    fn find(&self, from: u64, end: u64, look: impl Fn(usize) -> u64) -> Option<Taken> {
        (from / 64..end.div_ceil(64).min(self.words)).find_map(|word| {
            let bits = look(word as usize);
            (bits != 0).then_some(Taken { first: word * 64, bits })
        })
    }
}

impl std::fmt::Debug for DirtyMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DirtyMap(granules of {} bytes)", self.granule)
    }
}

fn word_bits(word: &AtomicU64) -> u32 {
    word.load(Ordering::Relaxed).count_ones()
}

async fn open_or_make(core: &Core, path: &Path) -> io::Result<OwnedFd> {
    let open = |opening| core.open_for_writing(path, opening, Mode::Buffered);
    let file = match open(Opening::Existing).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => open(Opening::New).await,
        file => file,
    }?;
    let fd = file.host_fd().ok_or(io::ErrorKind::Unsupported)?;
    fd.try_clone_to_owned()
}

/// The system's boot ID; zeroes if it is not known.
async fn boot_id(core: &Core) -> [u64; 2] {
    if core.is_simulated() {
        return [1; 2];
    }
    let text = core.read_small(Path::new(BOOT_ID), 64).await.unwrap_or_default();
    let mut digits = text.iter().filter_map(|&byte| char::from(byte).to_digit(16));
    let mut half = || digits.by_ref().take(16).fold(0, |half, digit| half << 4 | u64::from(digit));
    [half(), half()]
}

/// One core's channel through the layer.
pub(crate) struct DirtyChannel {
    pub over: Channel,
    mirror: Option<Box<MirrorChannel>>,
    /// The owner of the memory of requests from now on.
    keep: Option<Rc<dyn Any>>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// What was written, first and last granule, by requests that have completed since the last
    /// poll.
    written: Vec<(u64, u64)>,
    /// Empty between calls.
    batch: Vec<Done>,
}

#[derive(Clone, Copy)]
struct Slot {
    tag: u64,
    /// First and last granule that is being written.
    writes: Option<(u64, u64)>,
}

impl DirtyChannel {
    pub fn new(over: Channel, map: &DirtyMap, core: &Core) -> Result<DirtyChannel, Error> {
        let mirror = map.mirror().map(|mirror| MirrorChannel::new(mirror, core)).transpose()?;
        Ok(DirtyChannel {
            over,
            mirror: mirror.map(Box::new),
            keep: None,
            slots: vec![Slot { tag: 0, writes: None }; QUEUE_DEPTH],
            free: (0..QUEUE_DEPTH as u32).rev().collect(),
            written: Vec::with_capacity(QUEUE_DEPTH),
            batch: Vec::with_capacity(QUEUE_DEPTH),
        })
    }

    pub fn hold(&mut self, keep: Rc<dyn Any>) {
        self.keep = Some(keep.clone());
        self.over.hold(keep);
    }

    /// # Safety
    /// As for [`Channel::submit`], and the channel above has found nothing wrong with the request.
    #[inline]
    pub unsafe fn submit(&mut self, map: &Arc<DirtyMap>, io: &Io<'_>, done: &mut Vec<Done>) {
        if let Kind::Read | Kind::Flush = io.kind {
            // SAFETY: by this function's contract. Both channels are as large.
            return match unsafe { self.over.perform(io) } {
                Some(status) => done.push(Done { tag: io.tag, status }),
                // SAFETY: by this function's contract.
                None => drop(unsafe { self.begin(None, io, done) }),
            };
        }
        if let Some(mirror) = &self.mirror
            // SAFETY: by this function's contract.
            && let Some(write) = unsafe { mirror.begin(map, io) }
        {
            return self.submit_mirrored(write, io, done);
        }
        let (first, last) = map.granules(io.offset, io.len);
        map.marks().begin(first, last);
        // SAFETY: as above.
        let Some(status) = (unsafe { self.over.perform(io) }) else {
            // SAFETY: by this function's contract.
            unsafe { self.begin(Some((first, last)), io, done) };
            return;
        };
        // The channel above returns it after its next poll of this one.
        done.push(Done { tag: io.tag, status });
        match map.light {
            true => map.marks().end(&[(first, last)]),
            // One fence is for all of them.
            false => self.written.push((first, last)),
        }
    }

    /// Submits a write that goes to the target, too, after this device.
    #[inline(never)]
    fn submit_mirrored(&mut self, write: Mirrored, io: &Io<'_>, done: &mut Vec<Done>) {
        let Some(mirror) = &mut self.mirror else { return };
        let segments = [write.segment()];
        let copied = Io { segments: &segments, ..*io };
        // SAFETY: the segment is the memory of a buffer that `write` owns, as long as the request,
        // whose range the channel above has checked. Both channels are as large.
        if let Some(status) = unsafe { self.over.perform(&copied) } {
            done.push(Done { tag: io.tag, status });
            return mirror.go_on(write, status);
        }
        self.over.hold(write.owner());
        // SAFETY: as above. The buffer stays with its owner, which the channel below holds, until
        // the request has completed: only `go_on` takes it out.
        let slot = unsafe { self.begin(None, &copied, done) };
        if let (Some(slot), Some(mirror)) = (slot, &mut self.mirror) {
            mirror.put(slot, write);
        }
        self.over.hold(self.keep.clone().unwrap_or_else(|| Rc::new(())));
    }

    /// Submits a request that does not complete at once. Returns its slot, if it was submitted.
    ///
    /// # Safety
    /// As for [`DirtyChannel::submit`].
    #[inline(never)]
    unsafe fn begin(
        &mut self,
        writes: Option<(u64, u64)>,
        io: &Io<'_>,
        done: &mut Vec<Done>,
    ) -> Option<u32> {
        let full = Done { tag: io.tag, status: Status::IoError };
        // Unreachable, here and below: there are as many slots as the channel above takes requests.
        let Some(slot) = self.free.pop() else {
            done.push(full);
            return None;
        };
        self.slots[slot as usize] = Slot { tag: io.tag, writes };
        // SAFETY: by this function's contract.
        if unsafe { self.over.submit(&Io { tag: slot.into(), ..*io }) }.is_err() {
            self.free.push(slot);
            done.push(full);
            return None;
        }
        Some(slot)
    }

    #[inline]
    pub fn poll(&mut self, map: &DirtyMap, done: &mut Vec<Done>) {
        if self.over.in_flight() > 0 {
            self.over.poll(&mut self.batch);
            for Done { tag, status } in self.batch.drain(..) {
                let Slot { tag: own, writes } = self.slots[tag as usize];
                self.written.extend(writes);
                if let Some(mirror) = &mut self.mirror
                    && let Some(write) = mirror.take(tag as u32)
                {
                    mirror.go_on(write, status);
                }
                self.free.push(tag as u32);
                done.push(Done { tag: own, status });
            }
        }
        if !self.written.is_empty() {
            map.marks().end(&self.written);
            self.written.clear();
        }
    }
}

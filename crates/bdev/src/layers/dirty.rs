//! `dirty:` notes which parts of a device have been written, in a bitmap that other processes can
//! have: for whoever copies the device elsewhere while it is in use.
//!
//! 1. A write, a discard or a write of zeroes marks its granules, then goes to the device, and
//!    marks them again when it has completed, whatever came of it, before anybody is told.
//! 2. Who copies takes marks ([`DirtyMap::take`]), reads what they stand for, and finishes them.
//!    `marks.rs` says what neither side can miss, and why.
//!
//! The bitmap is a file, or a memfd if no file is named, that is mapped as a whole; its layout is
//! in `docs/formats/dirty.md`. It survives the process, and is not meant to survive the machine:
//! one that was made before the system was started last says nothing, and then everything is
//! marked.
//!
//! A bitmap whose file is cut off is lost ([`DirtyMap::is_lost`]); the device itself does not
//! suffer.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use reactor::{Core, Guard, Mode, Opening};

use crate::channel::{Channel, Done, Io, Kind, QUEUE_DEPTH, Status};
use crate::error::{Error, ErrorKind};
use crate::layers::marks::Marks;
use loomable::{AtomicU64, Ordering};

const PAGE: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"MRdirty\n");
const VERSION: u64 = 1;
/// Room for growth: so many times the first size, and at least [`ROOM_MIN`].
const ROOM: u64 = 2;
const ROOM_MIN: u64 = 64 << 30;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Numbers of the header, each eight bytes.
mod at {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    pub const GRANULE: usize = 2;
    pub const WORDS: usize = 3;
    pub const BOOT: usize = 4;
    pub const COUNT: usize = 6;
}

/// A bitmap of what was written to a device; see the module text.
pub struct DirtyMap {
    /// It goes before the pages.
    guard: Guard,
    pages: Pages,
    file: OwnedFd,
    granule: u64,
    /// Of 64 bits, in each row.
    words: u64,
}

/// Marks of up to 64 granules that were taken: bit `n` stands for the granule `first + n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// A multiple of 64.
    pub first: u64,
    /// Not 0.
    pub bits: u64,
}

/// What the system mapped.
struct Pages {
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to the process and goes when this does; all that touches it are
// atomics.
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
        // SAFETY: a new mapping at a place of the kernel's choice.
        let base = unsafe { libc::mmap(any, len, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Pages { base: base.cast(), len })
    }

    /// Numbers from a page on; none if there are not so many.
    fn numbers(&self, offset: u64, count: u64) -> Option<&[AtomicU64]> {
        let end = count.checked_mul(8)?.checked_add(offset)?;
        if end > self.len as u64 || !offset.is_multiple_of(8) {
            return None;
        }
        let at = self.base.wrapping_add(offset as usize).cast();
        // SAFETY: the numbers lie in the mapping, as was just checked, and are aligned. Atomics may
        // be shared with other processes, and become zeroes at any time.
        Some(unsafe { std::slice::from_raw_parts(at, count as usize) })
    }
}

/// Bytes of a row, in whole pages.
fn row(words: u64) -> Option<u64> {
    words.checked_mul(8)?.checked_next_multiple_of(PAGE)
}

/// Bytes of a file with rows of so many words.
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
    /// Opens the bitmap of a device: the one at a path, which is made if it is not there, or one
    /// without a name.
    pub(crate) async fn open(
        core: &Core,
        path: Option<&Path>,
        granule: u64,
        size_bytes: u64,
    ) -> Result<DirtyMap, Error> {
        let name = path.map_or("a bitmap".into(), |path| path.display().to_string());
        let failed = |error| Error::io(format!("dirty: cannot open {name}"), error);
        // A simulated world has no files to be mapped.
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
        let map = DirtyMap::take_over(file, granule, size_bytes)?;
        // Where the system does not tell, a bitmap that is there already may be from before it was
        // started.
        if !made && (map.boot() != boot || boot == [0; 2]) {
            map.mark_range(0, size_bytes);
            map.set_boot(boot);
        }
        Ok(map)
    }

    /// The bitmap of a device that another process has had.
    pub(crate) fn take_over(
        file: OwnedFd,
        granule: u64,
        size_bytes: u64,
    ) -> Result<DirtyMap, Error> {
        let map = DirtyMap::map(file)?;
        let wrong = |what| Error::new(ErrorKind::Unsupported, format!("dirty: the bitmap {what}"));
        if map.granule != granule {
            return Err(wrong(format!("has a granule of {}, not {granule}", map.granule)));
        }
        if !map.covers(size_bytes) {
            return Err(wrong(format!("has no room for {size_bytes} bytes")));
        }
        Ok(map)
    }

    /// Makes a new file. What counts is written last.
    fn make(file: &OwnedFd, granule: u64, words: u64, boot: [u64; 2]) -> io::Result<()> {
        let len = file_len(words).ok_or_else(|| io::Error::from_raw_os_error(libc::EFBIG))?;
        // All of it, so that no mark ever meets a full file system, which would be a signal.
        // SAFETY: takes no pointers.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len as libc::off_t) } {
            0 => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
        let pages = Pages::map(file.as_fd(), PAGE)?;
        let Some(header) = pages.numbers(0, at::COUNT as u64) else { return Ok(()) };
        let values = [(at::GRANULE, granule), (at::WORDS, words), (at::VERSION, VERSION)];
        let boots = [(at::BOOT, boot[0]), (at::BOOT + 1, boot[1])];
        for (at, value) in values.into_iter().chain(boots).chain([(at::MAGIC, MAGIC)]) {
            header[at].store(value.to_le(), Ordering::Release);
        }
        Ok(())
    }

    /// The bitmap in an open file: for whoever copies, in another process.
    ///
    /// # Errors
    /// When it is none, or one of another version.
    pub fn map(file: OwnedFd) -> Result<DirtyMap, Error> {
        let wrong = |what: &str| Error::new(ErrorKind::Unsupported, format!("dirty: {what}"));
        let failed = |error| Error::io("dirty: mapping the bitmap", error);
        let len = len_of(file.as_fd()).map_err(failed)?;
        if len < PAGE {
            return Err(wrong("the file is no bitmap"));
        }
        let pages = Pages::map(file.as_fd(), len).map_err(failed)?;
        // SAFETY: all of the mapping, in whole pages, which goes after the guard. What refers to it
        // are atomics, which may become zeroes.
        let guard = unsafe { Guard::new(pages.base, len.next_multiple_of(PAGE) as usize) };
        let mut map = DirtyMap { guard, pages, file, granule: 0, words: 0 };
        let header = |at: usize| map.number(at);
        if header(at::MAGIC) != MAGIC {
            return Err(wrong("the file is no bitmap, or was never finished: remove it"));
        }
        if header(at::VERSION) != VERSION {
            return Err(wrong("a bitmap of another version"));
        }
        let (granule, words) = (header(at::GRANULE), header(at::WORDS));
        let whole = file_len(words).is_some_and(|needed| needed <= len);
        if !granule.is_power_of_two() || words == 0 || !whole || map.is_lost() {
            return Err(wrong("the bitmap is damaged: remove it"));
        }
        (map.granule, map.words) = (granule, words);
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

    #[inline]
    fn marks(&self) -> Marks<'_> {
        let row = |nth| {
            let offset = PAGE + nth * row(self.words).unwrap_or(0);
            self.pages.numbers(offset, self.words).unwrap_or(&[])
        };
        Marks { dirty: row(0), taken: row(1) }
    }

    #[inline]
    fn granules(&self, offset: u64, len: u64) -> (u64, u64) {
        let shift = self.granule.trailing_zeros();
        (offset >> shift, offset.saturating_add(len.saturating_sub(1)) >> shift)
    }

    /// Marks a range that is not empty.
    pub(crate) fn mark_range(&self, offset: u64, len: u64) {
        let (first, last) = self.granules(offset, len);
        self.marks().end(first, last);
    }

    /// Whether there is a bit for each byte of a device of this size.
    pub(crate) fn covers(&self, size_bytes: u64) -> bool {
        size_bytes.div_ceil(self.granule) <= self.words.saturating_mul(64)
    }

    /// What another process maps it by.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Bytes that one bit stands for.
    pub fn granule(&self) -> u64 {
        self.granule
    }

    /// Whether the file was cut off, so that what was marked is not known any more.
    pub fn is_lost(&self) -> bool {
        self.guard.is_lost()
    }

    /// Takes marks: those of the next 64 granules from `from` on that have any. What is read of the
    /// device from now on is at least as new as they are. One at a time may take.
    pub fn take(&self, from: u64) -> Option<Taken> {
        let marks = self.marks();
        self.find(from, |word| marks.take(word))
    }

    /// What was taken is copied.
    pub fn finish(&self, taken: Taken) {
        let word = (taken.first / 64) as usize;
        if (word as u64) < self.words {
            self.marks().finish(word, taken.bits);
        }
    }

    /// What somebody has taken from `from` on and not finished: to begin with, after one who copied
    /// has died.
    pub fn unfinished(&self, from: u64) -> Option<Taken> {
        let marks = self.marks();
        self.find(from, |word| marks.unfinished(word))
    }

    fn find(&self, from: u64, look: impl Fn(usize) -> u64) -> Option<Taken> {
        (from / 64..self.words).find_map(|word| {
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

async fn open_or_make(core: &Core, path: &Path) -> io::Result<OwnedFd> {
    let open = |opening| core.open_for_writing(path, opening, Mode::Buffered);
    let file = match open(Opening::Existing).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => open(Opening::New).await,
        file => file,
    }?;
    let fd = file.host_fd().ok_or(io::ErrorKind::Unsupported)?;
    fd.try_clone_to_owned()
}

/// What the system was started as; zeroes where that is not known.
async fn boot_id(core: &Core) -> [u64; 2] {
    if core.is_simulated() {
        return [1; 2];
    }
    let text = core.read_small(Path::new(BOOT_ID), 64).await.unwrap_or_default();
    let mut digits = text.iter().filter_map(|&byte| char::from(byte).to_digit(16));
    let mut half = || digits.by_ref().take(16).fold(0, |half, digit| half << 4 | u64::from(digit));
    [half(), half()]
}

/// One core's way through the layer.
pub(crate) struct DirtyChannel {
    pub over: Channel,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Empty between calls.
    batch: Vec<Done>,
}

#[derive(Clone, Copy)]
struct Slot {
    tag: u64,
    /// Granules that are being written, first and last.
    writes: Option<(u64, u64)>,
}

impl DirtyChannel {
    pub fn new(over: Channel) -> DirtyChannel {
        DirtyChannel {
            over,
            slots: vec![Slot { tag: 0, writes: None }; QUEUE_DEPTH],
            free: (0..QUEUE_DEPTH as u32).rev().collect(),
            batch: Vec::with_capacity(QUEUE_DEPTH),
        }
    }

    /// # Safety
    /// As [`Channel::submit`].
    #[inline]
    pub unsafe fn submit(&mut self, map: &DirtyMap, io: &Io<'_>, done: &mut Vec<Done>) {
        let full = Done { tag: io.tag, status: Status::IoError };
        // Both cannot be: there are as many of them as the channel above takes.
        let Some(slot) = self.free.pop() else { return done.push(full) };
        let writes = match io.kind {
            Kind::Read | Kind::Flush => None,
            Kind::Write | Kind::Discard | Kind::WriteZeroes { .. } => {
                Some(map.granules(io.offset, io.len))
            }
        };
        if let Some((first, last)) = writes {
            map.marks().begin(first, last);
        }
        self.slots[slot as usize] = Slot { tag: io.tag, writes };
        // SAFETY: by this function's contract.
        if unsafe { self.over.submit(&Io { tag: slot.into(), ..*io }) }.is_err() {
            self.free.push(slot);
            done.push(full);
        }
    }

    #[inline]
    pub fn poll(&mut self, map: &DirtyMap, done: &mut Vec<Done>) {
        self.over.poll(&mut self.batch);
        for Done { tag, status } in self.batch.drain(..) {
            let Slot { tag: own, writes } = self.slots[tag as usize];
            if let Some((first, last)) = writes {
                map.marks().end(first, last);
            }
            self.free.push(tag as u32);
            done.push(Done { tag: own, status });
        }
    }
}

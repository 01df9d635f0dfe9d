//! A device in memory, shared by all cores, which another process can take over.
//!
//! Its memory is an unnamed file (a memfd), mapped as a whole, which allocates a page when it is
//! first written (`pages.rs`: pages never written, or discarded, are read as zeroes without being
//! touched). The file is as long as the device can ever become, so a resize moves nothing and no
//! request ever meets unmapped memory. A range that was cut off is emptied when the device grows
//! over it again. The file is sealed, so nobody who has it open can make it shorter. Overlapping
//! requests of several cores may mix their bytes, as on a disk.
//!
//! Once all pages of a huge page have been written, a helper thread puts them into one, whatever
//! the system does by itself ([`MemChannel`]): then a request misses the processor's tables of
//! pages less often, and a process that takes the disk over has fewer pages to map. This is a hint:
//! pages that were filled before a process took the disk over stay as they are.
//!
//! The process that takes the file over finds everything it needs in the file:
//!
//! ```text
//!   0             the device's bytes, as many as it can ever have
//!   reserved      a bit for each of these pages that has been written, in whole pages
//!   last page     {magic, size in bytes, reserved}, each a u64 in the machine's byte order
//! ```

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use reactor::{Class, Core, Extent, drop_in_background};

use crate::devices::pages::Pages;
use crate::error::{Error, ErrorKind};
use crate::geometry::{Geometry, SEGMENTS};
use crate::io::{Io, Kind, Status};

/// Room for growth, as a multiple of the first size; at least [`ROOM_MIN`].
const ROOM: u64 = 4;
const ROOM_MIN: u64 = 64 << 30;
const PAGE: u64 = 4096;
/// Bytes of a huge page.
const HUGE: u64 = 2 << 20;
/// Most huge pages that wait to be collapsed, of a channel; further ones stay as they are.
const COLLAPSES_MAX: usize = 1 << 16;
/// Most huge pages that are collapsed at once.
const COLLAPSE_MAX: u64 = 32;
/// The pause after that, in nanoseconds.
const COLLAPSE_PAUSE_NS: u64 = 10_000_000;
/// Longest discard of one request: emptying a resident page takes the core some 50 ns.
const DISCARD_MAX: u64 = 16 << 20;
/// How many bytes ahead of what it copies a read fetches memory.
const AHEAD: usize = 4096;
/// From this length on, copying without that is faster: the processor sees what comes.
const COPY_MIN: usize = 64 << 10;
/// A line of the processor's cache, in bytes.
const LINE: usize = 64;
/// "MRmem", a line feed, and the version.
const MAGIC: u64 = u64::from_le_bytes(*b"MRmem\n\0\x02");
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// A device in memory.
pub(crate) struct MemDevice {
    base: *mut u8,
    /// The largest size in bytes that the device can have; a multiple of the page.
    reserved: usize,
    /// `Some` until it is dropped.
    file: Option<OwnedFd>,
}

/// What a device has used: its mapping's address and length, and its file. If nobody else has the
/// file open, closing it frees all of its pages.
struct Used(*mut u8, usize, #[expect(dead_code, reason = "it is closed last")] Option<OwnedFd>);

// SAFETY: a mapping belongs to the process, and no other owner has this one's address.
unsafe impl Send for Used {}

impl Drop for Used {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`; no channel is left, because each holds the device.
        unsafe { reactor::unmap(self.0, self.1) };
    }
}

/// A channel's part of a device in memory: the huge pages that it has filled, and that wait to be
/// collapsed. A task of the core has a helper thread collapse one after another.
pub(crate) struct MemChannel {
    core: Core,
    collapses: Rc<CollapseQueue>,
    /// Offset and length of the read that follows the next request.
    next_read: Cell<(u64, u64)>,
}

/// Where a read fetches memory while it copies.
struct Ahead {
    /// Where its own range ends, or what is fetched before it.
    end: usize,
    /// From there to the next read's range, modulo 2^64.
    next: usize,
    /// Where that range would end if it followed.
    limit: usize,
}

impl Ahead {
    /// What to fetch while the byte at `at` is copied.
    #[inline]
    fn of(&self, at: usize) -> usize {
        match at + AHEAD {
            own if own < self.end => own,
            next if next < self.limit => next.wrapping_add(self.next),
            // Nothing follows.
            _ => at,
        }
    }
}

#[derive(Default)]
struct CollapseQueue {
    waiting: RefCell<BTreeSet<u64>>,
    /// There is a task.
    busy: Cell<bool>,
}

impl MemChannel {
    pub fn new(core: &Core) -> MemChannel {
        MemChannel { core: core.clone(), collapses: Rc::default(), next_read: Cell::default() }
    }

    /// Announces the read that follows the next request. If the next request is a read, too, it
    /// fetches the other one's memory while it copies its own, line by line: a core that only
    /// copies waits for memory most of the time, and one that asks for many lines at once waits
    /// until they have come.
    #[inline]
    pub fn announce(&self, offset: u64, len: u64) {
        self.next_read.set((offset, len));
    }

    /// Performs a request immediately.
    ///
    /// # Safety
    /// As for [`MemDevice::perform`].
    #[inline]
    pub unsafe fn perform(&self, device: &Arc<MemDevice>, io: &Io<'_>) -> Status {
        // SAFETY: by this function's contract.
        let (status, wrote_pages) = unsafe { device.perform(io, self.next_read.take()) };
        if wrote_pages {
            self.note_full(device, io.offset, io.len);
        }
        status
    }

    /// Notes the huge pages of a range all of whose pages have been written.
    #[cold]
    fn note_full(&self, device: &Arc<MemDevice>, offset: u64, len: u64) {
        let mut waiting = self.collapses.waiting.borrow_mut();
        for nth in offset / HUGE..=(offset + len - 1) / HUGE {
            if device.is_full(nth) && waiting.len() < COLLAPSES_MAX {
                waiting.insert(nth);
            }
        }
        if waiting.is_empty() || self.collapses.busy.replace(true) {
            return;
        }
        let (core, collapses) = (self.core.clone(), self.collapses.clone());
        // The device may be closed meanwhile.
        let device = Arc::downgrade(device);
        self.core.spawn(Class::Bulk, async move {
            while device.strong_count() > 0
                && let Some((first, count)) = collapses.next()
            {
                let device = device.clone();
                let collapse = move || {
                    if let Some(device) = device.upgrade() {
                        device.collapse_full(first, count);
                    }
                    Vec::new()
                };
                core.compute(collapse).await;
                // A guest that discards and writes the same pages again and again cannot make the
                // helper do nothing else.
                core.sleep_ns(COLLAPSE_PAUSE_NS).await;
            }
        });
    }
}

impl CollapseQueue {
    /// The next neighbouring huge pages for the task, as the first and their number; with `None`
    /// the task ends.
    fn next(&self) -> Option<(u64, u64)> {
        let mut waiting = self.waiting.borrow_mut();
        let first = waiting.pop_first();
        self.busy.set(first.is_some());
        let (first, mut count) = (first?, 1);
        while count < COLLAPSE_MAX && waiting.remove(&(first + count)) {
            count += 1;
        }
        Some((first, count))
    }
}

/// Size in bytes of the bitmap for `reserved` bytes.
const fn bitmap_bytes(reserved: u64) -> u64 {
    (reserved / PAGE).div_ceil(8).next_multiple_of(PAGE)
}

/// Size in bytes of the file for `reserved` bytes.
const fn file_bytes(reserved: u64) -> u64 {
    reserved + bitmap_bytes(reserved) + PAGE
}

// SAFETY: the mapping belongs to the device until it is dropped. Its bytes are only copied in and
// out through raw pointers, never referred to, so concurrent threads can only mix bytes.
unsafe impl Send for MemDevice {}
// SAFETY: as above.
unsafe impl Sync for MemDevice {}

impl MemDevice {
    /// An empty device.
    pub fn new(size: u64) -> Result<MemDevice, Error> {
        let text = || format!("mem: no address space for {size} bytes");
        let reserved = size
            .checked_mul(ROOM)
            .and_then(|size| usize::try_from(size.max(ROOM_MIN).next_multiple_of(HUGE)).ok())
            .filter(|reserved| *reserved < isize::MAX as usize / 2)
            .ok_or_else(|| Error::new(ErrorKind::Unsupported, text()))?;
        // SAFETY: the name is a C string; the calls on the descriptor take no pointers.
        let file = unsafe {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
            let file = libc::memfd_create(c"millrace-mem".as_ptr(), flags);
            if file < 0 {
                return Err(Error::io(text(), io::Error::last_os_error()));
            }
            let file = OwnedFd::from_raw_fd(file);
            let len = file_bytes(reserved as u64) as libc::off_t;
            if libc::ftruncate(file.as_raw_fd(), len) != 0
                || libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) != 0
            {
                return Err(Error::io(text(), io::Error::last_os_error()));
            }
            file
        };
        let device = MemDevice::map(file, reserved)?;
        device.header(0).store(MAGIC, Ordering::Relaxed);
        device.header(2).store(reserved as u64, Ordering::Relaxed);
        device.set_size(size);
        Ok(device)
    }

    /// The device in a file of another process, and its size.
    pub fn take(file: OwnedFd) -> Result<(MemDevice, u64), Error> {
        let wrong = |what| Error::new(ErrorKind::Unsupported, format!("mem: {what}"));
        // SAFETY: an all-zero `stat` is a valid value; the calls get a live one and no other
        // pointer.
        let (sealed, len) = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            let known = libc::fstat(file.as_raw_fd(), &raw mut stat) == 0;
            let seals = libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS);
            (known && seals >= 0 && seals & SEALS == SEALS, stat.st_size as u64)
        };
        let header = len.checked_sub(PAGE).filter(|at| at.is_multiple_of(PAGE) && *at > 0);
        let header = header.filter(|_| sealed).ok_or_else(|| wrong("not a memory disk's file"))?;
        // Read before the mapping is made, because it gives the lengths of the parts.
        let mut bytes = [0; 24];
        let file = std::fs::File::from(file);
        file.read_exact_at(&mut bytes, header)
            .map_err(|error| Error::io("mem: cannot read the header", error))?;
        let field =
            |nth: usize| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[8 * nth + byte]));
        let (magic, size, reserved) = (field(0), field(1), field(2));
        let fits = reserved.is_multiple_of(PAGE)
            && reserved < len
            && file_bytes(reserved) == len
            && (1..=reserved).contains(&size);
        if magic != MAGIC || !fits {
            return Err(wrong("a memory disk's file of another version"));
        }
        let device = MemDevice::map(file.into(), reserved as usize)?;
        Ok((device, size))
    }

    fn map(file: OwnedFd, reserved: usize) -> Result<MemDevice, Error> {
        let (any, access) = (std::ptr::null_mut(), libc::PROT_READ | libc::PROT_WRITE);
        let len = file_bytes(reserved as u64) as usize;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let room = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let huge = HUGE as usize;
        // A huge page needs an address that is a multiple of its length. SAFETY: a new mapping at
        // an address that the kernel chooses, of which the file's mapping replaces a part. What is
        // around that is unmapped, and nobody else knows of it.
        let base = unsafe {
            let around = libc::mmap(any, len + huge, libc::PROT_NONE, room, -1, 0);
            let before = around.align_offset(huge);
            let at = around.wrapping_byte_add(before);
            if around == libc::MAP_FAILED
                || libc::mmap(at, len, access, flags, file.as_raw_fd(), 0) == libc::MAP_FAILED
            {
                // A second mapping that failed may have left a hole that is somebody else's now, so
                // the rest of the first one stays. It is only address space.
                let error = io::Error::last_os_error();
                return Err(Error::io(format!("mem: no address space for {len} bytes"), error));
            }
            if before > 0 {
                libc::munmap(around, before);
            }
            libc::munmap(at.wrapping_byte_add(len), huge - before);
            at
        };
        // Ask for huge pages where the system has them for shared memory, and no core dump of a
        // disk. Both are optional. SAFETY: the range was just mapped, and the advice changes no
        // content.
        unsafe {
            libc::madvise(base, reserved, libc::MADV_HUGEPAGE);
            libc::madvise(base, len, libc::MADV_DONTDUMP);
        }
        Ok(MemDevice { base: base.cast(), reserved, file: Some(file) })
    }

    /// A field of the last page.
    fn header(&self, nth: usize) -> &AtomicU64 {
        let page = self.reserved + bitmap_bytes(self.reserved as u64) as usize;
        let at = self.base.wrapping_add(page + 8 * nth).cast();
        // SAFETY: the header is the last page of the mapping and is aligned; all accesses to it are
        // atomic.
        unsafe { AtomicU64::from_ptr(at) }
    }

    /// The bitmap of written pages.
    #[inline]
    fn pages(&self) -> Pages<'_> {
        let words = bitmap_bytes(self.reserved as u64) as usize / 8;
        let first = self.base.wrapping_add(self.reserved).cast::<AtomicU64>();
        // SAFETY: the bits lie in the mapping, between the device's bytes and the header, aligned
        // to a page; the mapping lives as long as `self`, and all accesses to them are atomic.
        Pages(unsafe { std::slice::from_raw_parts(first, words) })
    }

    fn set_size(&self, size: u64) {
        self.header(1).store(size, Ordering::Relaxed);
    }

    /// The file from which another process takes the device over.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_ref().expect("it is taken by drop only").as_fd()
    }

    pub fn geometry(&self, size_bytes: u64, block_size: u32) -> Geometry {
        Geometry {
            size_bytes,
            block_size,
            physical_block_size: block_size.max(PAGE as u32),
            min_io: PAGE as u32,
            opt_io: 0,
            read_only: false,
            // Nothing can be more durable here.
            volatile_cache: false,
            discard: true,
            write_zeroes: true,
            zeroes_after_discard: true,
            max_segments: SEGMENTS,
            discard_alignment: PAGE as u32,
            discard_max: DISCARD_MAX,
            write_zeroes_max: DISCARD_MAX,
        }
    }

    /// No new request accesses the range beyond the smaller of the two sizes meanwhile, but earlier
    /// requests may still be in flight on other cores.
    pub fn resize(&self, old: u64, new: u64) -> Result<(), Error> {
        if new > self.reserved as u64 {
            let text = format!("mem: can grow to {} bytes", self.reserved);
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if new > old {
            self.zero(old, new - old).map_err(|error| Error::io("mem: cannot grow", error))?;
        }
        self.set_size(new);
        Ok(())
    }

    /// Performs a request immediately; `next` is the offset and the length of a read that follows,
    /// or any other two numbers. Also returns whether it was the first write to a page.
    ///
    /// # Safety
    /// The range lies in the device. The segments of a read or a write are valid, and together as
    /// long as the range.
    #[inline]
    pub unsafe fn perform(&self, io: &Io<'_>, next: (u64, u64)) -> (Status, bool) {
        let mut wrote_pages = false;
        let mut at = io.offset as usize;
        match io.kind {
            Kind::Read => {
                let ahead = self.ahead_of(io, next);
                for segment in io.segments {
                    // SAFETY: `at` and the segment's length stay in the device; the segment is
                    // valid.
                    unsafe { self.read(at, segment.iov_base.cast(), segment.iov_len, &ahead) };
                    at += segment.iov_len;
                }
            }
            Kind::Write => {
                for segment in io.segments {
                    // SAFETY: `at` and the segment's length stay in the device, which is mapped as
                    // a whole; the segment is valid. No reference to either exists.
                    unsafe {
                        let to = self.base.add(at);
                        std::ptr::copy(segment.iov_base.cast(), to, segment.iov_len);
                    }
                    at += segment.iov_len;
                }
                wrote_pages = self.mark(io.offset, io.len);
            }
            Kind::Flush => {}
            Kind::Discard | Kind::WriteZeroes { .. } => {
                if let Err(error) = self.zero(io.offset, io.len) {
                    return (Status::of(error.raw_os_error().unwrap_or(libc::EIO)), false);
                }
            }
        }
        (Status::Ok, wrote_pages)
    }

    /// Copies bytes out; pages never written read as zeroes.
    ///
    /// # Safety
    /// The range lies in the device, and `to` is valid for writes of `len` bytes.
    #[inline]
    unsafe fn read(&self, from: usize, to: *mut u8, len: usize, ahead: &Ahead) {
        let (pages, end) = (self.pages(), from + len);
        let mut at = from;
        while at < end {
            let (written, last) = pages.run(at as u64 / PAGE, (end as u64 - 1) / PAGE);
            let n = (((last + 1) * PAGE) as usize).min(end) - at;
            // SAFETY: `n` bytes from `at` lie in the callers' range, which is mapped, and `n` bytes
            // from `at - from` lie in `to`. No reference to either exists.
            unsafe {
                let to = to.add(at - from);
                match written {
                    true => self.copy_out(at, to, n, ahead),
                    false => to.write_bytes(0, n),
                }
            }
            at += n;
        }
    }

    /// Copies written bytes out, and fetches as many that are read later.
    ///
    /// # Safety
    /// As for [`MemDevice::read`].
    #[inline]
    unsafe fn copy_out(&self, from: usize, to: *mut u8, len: usize, ahead: &Ahead) {
        let mut done = 0;
        while len < COPY_MIN && done + LINE <= len {
            self.prefetch(ahead.of(from + done));
            // SAFETY: by this function's contract.
            unsafe { std::ptr::copy(self.base.add(from + done), to.add(done), LINE) };
            done += LINE;
        }
        // SAFETY: as above.
        unsafe { std::ptr::copy(self.base.add(from + done), to.add(done), len - done) };
    }

    /// What a read fetches while it copies: what follows in its own range, then the next read.
    fn ahead_of(&self, io: &Io<'_>, next: (u64, u64)) -> Ahead {
        // The memory of a short read was fetched before it began.
        let end = io.offset as usize + (io.len as usize).max(AHEAD);
        let next_len = (next.1 as usize).min(AHEAD);
        Ahead { end, next: (next.0 as usize).wrapping_sub(end), limit: end + next_len }
    }

    /// The pages of a range that were never written, or discarded, as holes.
    pub fn extents(&self, offset: u64, len: u64, max: usize) -> Vec<Extent> {
        let (pages, end) = (self.pages(), offset + len);
        let (mut extents, mut at) = (Vec::new(), offset);
        while at < end && extents.len() < max {
            let (written, last) = pages.run(at / PAGE, (end - 1) / PAGE);
            let to = ((last + 1) * PAGE).min(end);
            extents.push(Extent { len: to - at, is_hole: !written });
            at = to;
        }
        extents
    }

    /// Marks a range, which may be empty, as written. Returns whether a page of it was not.
    #[inline]
    fn mark(&self, offset: u64, len: u64) -> bool {
        len > 0 && self.pages().mark(offset / PAGE, (offset + len - 1) / PAGE)
    }

    /// Whether all pages of a huge page have been written.
    fn is_full(&self, nth: u64) -> bool {
        let (first, last) = (nth * HUGE / PAGE, (nth + 1) * HUGE / PAGE - 1);
        nth < self.reserved as u64 / HUGE && self.pages().run(first, last) == (true, last)
    }

    /// [`MemDevice::collapse`] for those that are still full: what was discarded meanwhile stays
    /// without memory.
    fn collapse_full(&self, first: u64, count: u64) {
        let (mut from, end) = (first, first + count);
        while from < end {
            let full = (from..end).take_while(|nth| self.is_full(*nth)).count() as u64;
            if full > 0 {
                self.collapse(from, full);
            }
            from += full + 1;
        }
    }

    /// Puts the pages of huge pages into one each, if the system can. Takes about a millisecond for
    /// each, and for the call as long as each processor takes to do a little work of the system.
    fn collapse(&self, first: u64, count: u64) {
        /// `MADV_COLLAPSE`, of Linux 6.1.
        const COLLAPSE: i32 = 25;
        assert!(first + count <= self.reserved as u64 / HUGE, "huge pages of the device");
        // SAFETY: the range lies in the mapping, and the advice changes no content. A system that
        // does not know it or has no memory refuses, and nothing has changed.
        unsafe {
            let at = self.base.add((first * HUGE) as usize);
            libc::madvise(at.cast(), (count * HUGE) as usize, COLLAPSE);
        }
    }

    /// Begins to fetch a line into the processor's cache.
    #[inline]
    fn prefetch(&self, at: usize) {
        let at = self.base.wrapping_add(at);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch of any address is allowed: it has no effect that the program can
        // observe.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    /// Gives whole pages back to the system, which then read as zeroes; overwrites partial pages.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        let (end, first) = (offset + len, offset.next_multiple_of(PAGE));
        let last = end / PAGE * PAGE;
        if first >= last {
            // SAFETY: the callers' range lies in the device.
            unsafe { self.base.add(offset as usize).write_bytes(0, len as usize) };
            self.mark(offset, len);
            return Ok(());
        }
        self.pages().clear(first / PAGE, last / PAGE - 1);
        // SAFETY: all three parts lie in the callers' range, which lies in the device. The pages
        // given back stay mapped.
        let done = unsafe {
            self.base.add(offset as usize).write_bytes(0, (first - offset) as usize);
            self.base.add(last as usize).write_bytes(0, (end - last) as usize);
            let whole = self.base.add(first as usize).cast();
            libc::madvise(whole, (last - first) as usize, libc::MADV_REMOVE)
        };
        let error = io::Error::last_os_error();
        self.mark(offset, first - offset);
        self.mark(last, end - last);
        if done == 0 {
            return Ok(());
        }
        // The pages that could not be given back still have their content.
        self.mark(first, last - first);
        Err(error)
    }
}

impl Drop for MemDevice {
    fn drop(&mut self) {
        let len = file_bytes(self.reserved as u64) as usize;
        drop_in_background(Used(self.base, len, self.file.take()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: Kind, offset: u64, memory: &mut [u8], device: &MemDevice) {
        let len = memory.len();
        let segments = [libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: len }];
        let segments = &segments[..usize::from(matches!(kind, Kind::Read | Kind::Write))];
        let io = Io { kind, offset, len: len as u64, segments, tag: 0, fua: false };
        // SAFETY: the segment is `memory`, and the callers' ranges lie in the device.
        assert_eq!(unsafe { device.perform(&io, (0, 0)) }.0, Status::Ok);
    }

    /// Bytes of memory that the file occupies.
    fn resident(device: &MemDevice) -> u64 {
        // SAFETY: an all-zero `stat` is a valid value, and the call gets a live one.
        unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            assert_eq!(libc::fstat(device.descriptor().as_raw_fd(), &raw mut stat), 0);
            stat.st_blocks as u64 * 512
        }
    }

    #[test]
    fn reading_pages_never_written_takes_no_memory() {
        let size = 64 << 20;
        let device = MemDevice::new(size).unwrap();
        let mut memory = vec![7; 16 << 20];
        request(Kind::Read, 1 << 20, &mut memory, &device);
        assert!(memory.iter().all(|byte| *byte == 0));
        // The header, and a page of bits.
        assert!(resident(&device) <= 2 * PAGE, "{}", resident(&device));
        // A block in the middle of a page: the rest of the page reads as zeroes, and so do its
        // neighbours.
        request(Kind::Write, (5 << 20) + 512, &mut [1; 512], &device);
        let written = resident(&device);
        request(Kind::Read, 1 << 20, &mut memory, &device);
        let at = (4 << 20) + 512;
        assert!(
            memory
                .iter()
                .enumerate()
                .all(|(i, byte)| *byte == u8::from((at..at + 512).contains(&i)))
        );
        assert_eq!(resident(&device), written);
        // The process that takes the file over sees the same.
        let (next, known) =
            MemDevice::take(device.descriptor().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(known, size);
        request(Kind::Read, 1 << 20, &mut memory, &next);
        assert_eq!((memory[at - 1], memory[at], resident(&next)), (0, 1, written));
        // A discarded range is as if it had never been written.
        request(Kind::Discard, 5 << 20, &mut memory[..1 << 20], &device);
        request(Kind::Read, 1 << 20, &mut memory, &device);
        assert!(memory.iter().all(|byte| *byte == 0));
        assert!(resident(&device) <= 2 * PAGE);
    }

    #[test]
    fn only_huge_pages_that_were_filled_are_collapsed_and_keep_their_bytes() {
        let device = MemDevice::new(8 << 20).unwrap();
        let bytes = |byte: u8| vec![byte; HUGE as usize];
        request(Kind::Write, 0, &mut bytes(7), &device);
        request(Kind::Write, HUGE + 4096, &mut bytes(9), &device);
        assert!(device.is_full(0) && !device.is_full(1) && !device.is_full(2));
        // A system without huge pages, or without memory, leaves all as it is.
        device.collapse_full(0, 2);
        let mut read = vec![1; 2 * HUGE as usize];
        request(Kind::Read, 0, &mut read, &device);
        assert!(read[..HUGE as usize].iter().all(|byte| *byte == 7));
        assert!(read[HUGE as usize + 4096..].iter().all(|byte| *byte == 9));
        request(Kind::Discard, 4096, &mut bytes(0)[..4096], &device);
        assert!(!device.is_full(0));
        request(Kind::Read, 0, &mut read, &device);
        assert!(read[4096..8192].iter().all(|byte| *byte == 0));
        assert_eq!((read[4095], read[8192]), (7, 7));
        // A page beyond the device is none of its own.
        assert!(!device.is_full(device.reserved as u64 / HUGE));
    }

    #[test]
    fn neighbours_are_collapsed_together() {
        let queue = CollapseQueue::default();
        queue.waiting.borrow_mut().extend([7, 3, 4, 5]);
        queue.waiting.borrow_mut().extend(100..100 + COLLAPSE_MAX + 1);
        assert_eq!((queue.next(), queue.next()), (Some((3, 3)), Some((7, 1))));
        assert_eq!(queue.next(), Some((100, COLLAPSE_MAX)));
        assert_eq!(queue.next(), Some((100 + COLLAPSE_MAX, 1)));
        assert_eq!((queue.next(), queue.busy.get()), (None, false));
    }
}

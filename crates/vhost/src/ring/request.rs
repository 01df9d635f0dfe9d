//! A virtio-blk request, parsed from a descriptor chain (virtio 1.2, section 5.2.6).
//!
//! A chain is two streams of bytes: first those that the device may read, then those that it may
//! write. The first 16 readable bytes are the header, the last writable byte is the status, and the
//! bytes between are data. The boundaries of descriptors have no meaning. [`parse`] checks a chain
//! that was copied into private memory against the disk as the guest knows it, and decides whether
//! the device executes it or it is answered immediately.
//!
//! All answers to malformed requests are here. Faults that break the ring are found earlier, while
//! the chain is read. Nothing here allocates once a slot's list of segments has grown to the size
//! that the guest uses.

use bdev::Kind;
use libc::iovec;

use crate::memory::dirty::DirtyLog;
use crate::memory::{GuestMemory, Lookup};
use crate::ring::setup::Fault;

/// Most descriptors of a chain, in the ring or in an indirect table, and most segments of a
/// request.
pub const SEGMENTS_MAX: usize = 1024;
/// Most bytes of data in a request. The kernel accepts almost twice as much in one call.
pub const DATA_MAX: u64 = 1 << 30;
/// Most bytes of a chain.
const CHAIN_BYTES_MAX: u64 = 1 << 32;
const SECTOR_SHIFT: u32 = 9;
const HEADER_LEN: u64 = 16;
/// Bytes of the answer to a request for the disk's serial number.
pub const SERIAL_LEN: usize = 20;

const TYPE_IN: u32 = 0;
const TYPE_OUT: u32 = 1;
const TYPE_FLUSH: u32 = 4;
const TYPE_GET_ID: u32 = 8;
const TYPE_DISCARD: u32 = 11;
const TYPE_WRITE_ZEROES: u32 = 13;
const FLAG_UNMAP: u32 = 1;

/// A request for the device.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The operation.
    pub kind: Kind,
    /// Offset on the disk in bytes: within the disk and a multiple of its block size.
    pub offset: u64,
    /// Length in bytes: a multiple of the block size, and 0 only for a flush.
    pub len: u64,
    /// Guest memory of a read or a write. The lengths add up to `len`. The addresses are host
    /// addresses in the mappings of the [`GuestMemory`] that the request was popped with.
    pub segments: &'a [iovec],
    /// Names the request for [`crate::Ring::complete`].
    pub tag: u16,
}

/// A request's status as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// The request failed, or its numbers are invalid.
    IoError = 1,
    /// The disk does not support this request.
    Unsupported = 2,
}

/// A request that the device has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The request's tag.
    pub tag: u16,
    /// Its result.
    pub status: Status,
}

/// The disk as the guest knows it, for checking requests.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Size in sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// Smallest unit of a request in bytes: a power of two, at least 512.
    pub block_size: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether discards were offered and accepted.
    pub discard: bool,
    /// Whether write-zeroes requests were offered and accepted.
    pub write_zeroes: bool,
    /// Whether the guest was told that write-zeroes may free space.
    pub write_zeroes_may_unmap: bool,
    /// Most sectors of one discard.
    pub max_discard_sectors: u32,
    /// Most sectors of one write-zeroes request.
    pub max_write_zeroes_sectors: u32,
    /// Most descriptors for the data of a read or a write.
    pub segments_max: u32,
    /// Longest of these descriptors, bytes.
    pub segment_bytes_max: u32,
    /// The disk's serial number, padded with zeros.
    pub serial: [u8; SERIAL_LEN],
}

impl Disk {
    /// The range in bytes, if it is not empty, is within the disk, and consists of whole blocks.
    #[inline]
    fn range(&self, sector: u64, sectors: u64) -> Option<(u64, u64)> {
        // A range whose end is not a `u64` is outside every disk.
        let capacity = self.capacity_sectors.min(u64::MAX >> SECTOR_SHIFT);
        let in_disk = sector <= capacity && sectors <= capacity - sector;
        let in_block = u64::from((self.block_size >> SECTOR_SHIFT).saturating_sub(1));
        let blocks = (sector | sectors) & in_block == 0;
        (in_disk && blocks && sectors > 0)
            .then_some((sector << SECTOR_SHIFT, sectors << SECTOR_SHIFT))
    }
}

/// The memory of one descriptor.
#[derive(Clone, Copy, Debug)]
struct Piece {
    addr: u64,
    len: u32,
}

/// A chain in private memory: its readable pieces, then its writable ones.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    pieces: Vec<Piece>,
    readable: usize,
    readable_bytes: u64,
    writable_bytes: u64,
}

impl Chain {
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
        self.readable = 0;
        self.readable_bytes = 0;
        self.writable_bytes = 0;
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Adds a descriptor's memory. The sums cannot overflow: a chain has less than 2^32
    /// descriptors.
    #[inline(always)]
    pub(crate) fn push(&mut self, addr: u64, len: u32, writable: bool) -> Result<(), Fault> {
        if writable {
            self.writable_bytes += u64::from(len);
        } else {
            if self.readable != self.pieces.len() {
                return Err(Fault::ReadableAfterWritable);
            }
            self.readable += 1;
            self.readable_bytes += u64::from(len);
        }
        self.pieces.push(Piece { addr, len });
        Ok(())
    }

    /// Checks the complete chain.
    #[inline]
    pub(crate) fn finish(&self) -> Result<(), Fault> {
        if self.readable_bytes + self.writable_bytes > CHAIN_BYTES_MAX {
            return Err(Fault::ChainTooLarge);
        }
        Ok(())
    }

    #[inline]
    fn header(&self, lookup: &mut Lookup<'_>) -> Option<[u64; 2]> {
        let first = self.pieces.first()?;
        if u64::from(first.len) >= HEADER_LEN {
            return lookup.read_pair(first.addr);
        }
        let mut bytes = [0; HEADER_LEN as usize];
        self.copy_readable(0, &mut bytes, lookup)?;
        Some(pair(&bytes))
    }

    /// Copies readable bytes out, starting at `skip`.
    fn copy_readable(&self, mut skip: u64, into: &mut [u8], lookup: &mut Lookup<'_>) -> Option<()> {
        let mut done = 0;
        for piece in &self.pieces[..self.readable] {
            let len = u64::from(piece.len);
            if skip >= len {
                skip -= len;
                continue;
            }
            let n = (len - skip).min((into.len() - done) as u64) as usize;
            lookup.read(piece.addr.checked_add(skip)?, &mut into[done..done + n])?;
            done += n;
            skip = 0;
        }
        (done == into.len()).then_some(())
    }
}

/// Appends the segments of the `take` bytes (not 0) of a stream that start at `skip`. Fails if one
/// of them is longer than `most`.
#[inline]
fn gather(
    pieces: &[Piece],
    mut skip: u64,
    mut take: u64,
    most: u64,
    lookup: &mut Lookup<'_>,
    out: &mut Vec<iovec>,
) -> Option<()> {
    for piece in pieces {
        let len = u64::from(piece.len);
        if len <= skip {
            skip -= len;
            continue;
        }
        let n = (len - skip).min(take);
        if n > most {
            return None;
        }
        lookup.segments(piece.addr.checked_add(skip)?, n, SEGMENTS_MAX, out)?;
        skip = 0;
        take -= n;
        if take == 0 {
            return Some(());
        }
    }
    None
}

fn pair(bytes: &[u8; 16]) -> [u64; 2] {
    let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    [half(0), half(8)]
}

/// A request in flight. A ring has one slot for each tag. Fills one cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Slot {
    offset: u64,
    len: u64,
    /// Guest-physical; [`NO_STATUS`] if the guest left no room for a status.
    status_addr: u64,
    segments: Vec<iovec>,
    /// Bytes written on success, including the status.
    used_len: u32,
    kind: Kind,
    pub(crate) busy: bool,
    /// Whether the device (or this code) may have written to the segments.
    writes_memory: bool,
    /// Packed ring: the in-flight region's entry of the chain's first descriptor.
    pub(crate) entry: u16,
    /// Packed ring: the in-flight region's entry of its last descriptor.
    pub(crate) last: u16,
    /// Packed ring: how many of the ring's descriptors the chain has.
    pub(crate) count: u16,
}

/// No byte has this address: regions end below it.
const NO_STATUS: u64 = u64::MAX;
const _: () = assert!(size_of::<Slot>() == 64);

impl Slot {
    pub(crate) fn new() -> Slot {
        Slot {
            offset: 0,
            len: 0,
            status_addr: NO_STATUS,
            segments: Vec::new(),
            used_len: 0,
            kind: Kind::Flush,
            busy: false,
            writes_memory: false,
            entry: 0,
            last: 0,
            count: 0,
        }
    }

    pub(crate) fn request(&self, tag: u16) -> Request<'_> {
        Request {
            kind: self.kind,
            offset: self.offset,
            len: self.len,
            segments: &self.segments,
            tag,
        }
    }

    /// Prefetches what the next request with this tag is likely to need: guests use the same memory
    /// for the same tag again, with header and status side by side. If several requests are
    /// prefetched together, the transfers between two processors overlap.
    #[inline(always)]
    pub(crate) fn prefetch(&self, lookup: &Lookup<'_>) {
        lookup.prefetch(self.status_addr);
    }

    /// Whether the guest left room for the status.
    pub(crate) fn has_status(&self) -> bool {
        self.status_addr != NO_STATUS
    }

    /// Writes the status, marks in the log everything that was written for this request, and
    /// returns the length for the used ring.
    #[inline]
    pub(crate) fn answer(
        &mut self,
        status: Status,
        lookup: &mut Lookup<'_>,
        log: Option<&DirtyLog>,
    ) -> u32 {
        if let Some(log) = log {
            self.log_data(lookup.memory(), log);
        }
        // Memory that was unplugged meanwhile needs no status.
        if self.status_addr == NO_STATUS
            || lookup.write_u8(self.status_addr, status as u8).is_none()
        {
            return 0;
        }
        if let Some(log) = log {
            log.mark(self.status_addr, 1);
        }
        if status == Status::Ok { self.used_len } else { 1 }
    }

    #[cold]
    fn log_data(&self, memory: &GuestMemory, log: &DirtyLog) {
        if self.writes_memory {
            memory.log_segments(&self.segments, log);
        }
    }
}

/// What a chain asks the device for, except for the segments.
struct Asked {
    kind: Kind,
    offset: u64,
    len: u64,
}

/// Parses a chain into the slot. Returns a status if the request is answered without the device.
#[inline]
pub(crate) fn parse(
    slot: &mut Slot,
    chain: &Chain,
    lookup: &mut Lookup<'_>,
    disk: &Disk,
) -> Option<Status> {
    slot.segments.clear();
    slot.status_addr = NO_STATUS;
    slot.used_len = 1;
    slot.writes_memory = false;
    match judge(slot, chain, lookup, disk) {
        Ok(Asked { kind, offset, len }) => {
            (slot.kind, slot.offset, slot.len) = (kind, offset, len);
            None
        }
        Err(status) => Some(status),
    }
}

#[inline]
fn judge(
    slot: &mut Slot,
    chain: &Chain,
    lookup: &mut Lookup<'_>,
    disk: &Disk,
) -> Result<Asked, Status> {
    let (readable, writable) =
        chain.pieces.split_at_checked(chain.readable).ok_or(Status::IoError)?;
    // Find the status byte first: then the guest hears of every other error.
    let last = writable.last().filter(|last| last.len > 0).ok_or(Status::IoError)?;
    let status_addr = last.addr.checked_add(u64::from(last.len - 1)).ok_or(Status::IoError)?;
    if !lookup.has(status_addr) {
        return Err(Status::IoError);
    }
    slot.status_addr = status_addr;
    if chain.readable_bytes < HEADER_LEN {
        return Err(Status::IoError);
    }
    let [word, sector] = chain.header(lookup).ok_or(Status::IoError)?;
    let kind = word as u32;
    if kind != TYPE_IN && kind != TYPE_OUT {
        return judge_other(kind, slot, chain, lookup, disk);
    }
    let read = kind == TYPE_IN;
    let (pieces, skip, bytes) = if read {
        (writable, 0, chain.writable_bytes - 1)
    } else {
        (readable, HEADER_LEN, chain.readable_bytes - HEADER_LEN)
    };
    let whole = bytes & ((1 << SECTOR_SHIFT) - 1) == 0;
    if !whole || bytes > DATA_MAX || (disk.read_only && !read) {
        return Err(Status::IoError);
    }
    let (offset, len) = disk.range(sector, bytes >> SECTOR_SHIFT).ok_or(Status::IoError)?;
    // Header and status may have descriptors of their own.
    if chain.len() > (disk.segments_max as usize).saturating_add(2) {
        return Err(Status::IoError);
    }
    let most = disk.segment_bytes_max.into();
    gather(pieces, skip, len, most, lookup, &mut slot.segments).ok_or(Status::IoError)?;
    if read {
        slot.writes_memory = true;
        slot.used_len = len as u32 + 1;
    }
    Ok(Asked { kind: if read { Kind::Read } else { Kind::Write }, offset, len })
}

/// Checks any request that is not a read or a write.
#[inline(never)]
fn judge_other(
    kind: u32,
    slot: &mut Slot,
    chain: &Chain,
    lookup: &mut Lookup<'_>,
    disk: &Disk,
) -> Result<Asked, Status> {
    match kind {
        TYPE_FLUSH => Ok(Asked { kind: Kind::Flush, offset: 0, len: 0 }),
        TYPE_GET_ID => {
            let len = (chain.writable_bytes - 1).min(SERIAL_LEN as u64);
            if len > 0 {
                let writable = &chain.pieces[chain.readable..];
                gather(writable, 0, len, u64::MAX, lookup, &mut slot.segments)
                    .ok_or(Status::IoError)?;
            }
            slot.writes_memory = true;
            let mut serial = &disk.serial[..];
            for segment in &slot.segments {
                let (now, rest) =
                    serial.split_at_checked(segment.iov_len).ok_or(Status::IoError)?;
                let addr = lookup.memory().host_to_guest(segment.iov_base);
                addr.and_then(|addr| lookup.write(addr, now)).ok_or(Status::IoError)?;
                serial = rest;
            }
            slot.used_len = len as u32 + 1;
            Err(Status::Ok)
        }
        TYPE_DISCARD | TYPE_WRITE_ZEROES => judge_range(kind, chain, lookup, disk),
        _ => Err(Status::Unsupported),
    }
}

/// Checks the range of a discard or write-zeroes request: {u64 sector, u32 sectors, u32 flags}. The
/// disk offers one range per request, so that a request is one operation of the device.
fn judge_range(
    kind: u32,
    chain: &Chain,
    lookup: &mut Lookup<'_>,
    disk: &Disk,
) -> Result<Asked, Status> {
    let discard = kind == TYPE_DISCARD;
    if !(if discard { disk.discard } else { disk.write_zeroes }) {
        return Err(Status::Unsupported);
    }
    let mut bytes = [0; 16];
    if disk.read_only || chain.readable_bytes != HEADER_LEN + bytes.len() as u64 {
        return Err(Status::IoError);
    }
    chain.copy_readable(HEADER_LEN, &mut bytes, lookup).ok_or(Status::IoError)?;
    let [sector, word] = pair(&bytes);
    let (sectors, flags) = (word as u32, (word >> 32) as u32);
    let (known, max) = if discard {
        (0, disk.max_discard_sectors)
    } else {
        (FLAG_UNMAP, disk.max_write_zeroes_sectors)
    };
    if flags & !known != 0 {
        return Err(Status::Unsupported);
    }
    if sectors > max {
        return Err(Status::IoError);
    }
    let (offset, len) = disk.range(sector, u64::from(sectors)).ok_or(Status::IoError)?;
    let unmap = flags & FLAG_UNMAP != 0 && disk.write_zeroes_may_unmap;
    let kind = if discard { Kind::Discard } else { Kind::WriteZeroes { unmap } };
    Ok(Asked { kind, offset, len })
}

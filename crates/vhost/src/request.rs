//! A virtio-blk request out of a descriptor chain (virtio 1.2, section 5.2.6).
//!
//! A chain is two streams of bytes: what the device may read, then what it may write. The first 16 readable bytes are
//! the header, the last writable byte is the status, and what is between is data; where the descriptors are cut means
//! nothing. [`parse`] judges a chain that has been copied into private memory, against the disk as the guest knows it,
//! and says what is to be done: ask the device, or answer at once.
//!
//! Every answer to a malformed request is here; what breaks the ring instead is found before, while the chain is read.
//! Nothing here allocates once a slot's list of segments has grown to what the guest uses.

use libc::iovec;

use crate::memory::{GuestMemory, Hint};
use crate::ring::Fault;

/// Most descriptors of a chain, whether in the ring or in an indirect table, and most segments of a request.
pub const SEGMENTS_MAX: usize = 1024;
/// Most bytes of data of a request; what the kernel takes in one call is a little less than twice as much.
pub const DATA_MAX: u64 = 1 << 30;
/// Most bytes of a chain.
const CHAIN_BYTES_MAX: u64 = 1 << 32;
const SECTOR_SHIFT: u32 = 9;
const HEADER_LEN: u64 = 16;
/// Bytes of the answer to a request for the disk's name.
pub const SERIAL_LEN: usize = 20;

const TYPE_IN: u32 = 0;
const TYPE_OUT: u32 = 1;
const TYPE_FLUSH: u32 = 4;
const TYPE_GET_ID: u32 = 8;
const TYPE_DISCARD: u32 = 11;
const TYPE_WRITE_ZEROES: u32 = 13;
const FLAG_UNMAP: u32 = 1;

/// What a device is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Fill the segments from the disk.
    Read,
    /// Write the segments to the disk.
    Write,
    /// Make all completed writes durable.
    Flush,
    /// Forget the content of a range.
    Discard,
    /// Fill a range with zeros.
    WriteZeroes {
        /// Whether the range's space may be given back.
        unmap: bool,
    },
}

/// A request for the device.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// What to do.
    pub kind: Kind,
    /// Where on the disk, in bytes; within the disk and a multiple of its block size.
    pub offset: u64,
    /// How much, in bytes; a multiple of the block size, and 0 only for a flush.
    pub len: u64,
    /// Guest memory of a read or a write; the lengths sum to `len`. They are host addresses in the mappings of the
    /// [`GuestMemory`] that the request was popped with.
    pub segments: &'a [iovec],
    /// Gives the request back to [`crate::Ring::complete`].
    pub tag: u16,
}

/// The answer to a request, as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Failed, or not possible with these numbers.
    IoError = 1,
    /// Not a request of this disk.
    Unsupported = 2,
}

/// A request that the device is done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The request's tag.
    pub tag: u16,
    /// How it went.
    pub status: Status,
}

/// The disk as the guest knows it: what requests are checked against.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Size in sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// Smallest unit of a request in bytes; a power of two from 512 on.
    pub block_size: u32,
    /// Whether writing is refused.
    pub read_only: bool,
    /// Whether discards were offered and accepted.
    pub discard: bool,
    /// Whether writes of zeros were offered and accepted.
    pub write_zeroes: bool,
    /// Whether the guest was told that a write of zeros may give space back.
    pub write_zeroes_may_unmap: bool,
    /// Most sectors of one discard.
    pub max_discard_sectors: u32,
    /// Most sectors of one write of zeros.
    pub max_write_zeroes_sectors: u32,
    /// The disk's name, filled up with zeros.
    pub serial: [u8; SERIAL_LEN],
}

impl Disk {
    /// The range in bytes, if it is not empty, within the disk, and made of whole blocks.
    #[inline]
    fn range(&self, sector: u64, sectors: u64) -> Option<(u64, u64)> {
        let in_disk = sector <= self.capacity_sectors && sectors <= self.capacity_sectors - sector;
        let in_block = u64::from((self.block_size >> SECTOR_SHIFT).saturating_sub(1));
        let blocks = (sector | sectors) & in_block == 0;
        // A disk is shorter than 2^64 bytes, but its number of sectors is only a number here.
        let offset = sector.checked_mul(1 << SECTOR_SHIFT)?;
        let len = sectors.checked_mul(1 << SECTOR_SHIFT)?;
        (in_disk && blocks && sectors > 0).then_some((offset, len))
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

    pub(crate) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Adds a descriptor's memory.
    #[inline]
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
        if self.readable_bytes + self.writable_bytes > CHAIN_BYTES_MAX {
            return Err(Fault::ChainTooLarge);
        }
        self.pieces.push(Piece { addr, len });
        Ok(())
    }

    #[inline]
    fn header(&self, memory: &GuestMemory, hint: &mut Hint) -> Option<[u64; 2]> {
        let first = self.pieces.first()?;
        if u64::from(first.len) >= HEADER_LEN {
            return memory.read_pair(hint, first.addr);
        }
        let mut bytes = [0; HEADER_LEN as usize];
        self.copy_readable(0, &mut bytes, memory, hint)?;
        Some(pair(&bytes))
    }

    /// Copies readable bytes out, from `skip` on.
    fn copy_readable(
        &self,
        mut skip: u64,
        into: &mut [u8],
        memory: &GuestMemory,
        hint: &mut Hint,
    ) -> Option<()> {
        let mut done = 0;
        for piece in &self.pieces[..self.readable] {
            let len = u64::from(piece.len);
            if skip >= len {
                skip -= len;
                continue;
            }
            let n = (len - skip).min((into.len() - done) as u64) as usize;
            memory.read(hint, piece.addr.checked_add(skip)?, &mut into[done..done + n])?;
            done += n;
            skip = 0;
        }
        (done == into.len()).then_some(())
    }
}

/// Appends the segments of `take` bytes of a stream from `skip` on.
#[inline]
fn gather(
    pieces: &[Piece],
    mut skip: u64,
    mut take: u64,
    memory: &GuestMemory,
    hint: &mut Hint,
    out: &mut Vec<iovec>,
) -> Option<()> {
    for piece in pieces {
        let len = u64::from(piece.len);
        if skip >= len {
            skip -= len;
            continue;
        }
        let n = (len - skip).min(take);
        memory.segments(hint, piece.addr.checked_add(skip)?, n, SEGMENTS_MAX, out)?;
        take -= n;
        skip = 0;
    }
    Some(())
}

fn pair(bytes: &[u8; 16]) -> [u64; 2] {
    let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    [half(0), half(8)]
}

/// A request under way; a ring has one for each tag.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) busy: bool,
    kind: Kind,
    /// Whether the device (or we) may have written to the segments.
    writes_memory: bool,
    /// Guest-physical; none if the guest left no place for a status.
    status_addr: Option<u64>,
    /// Bytes written if all goes well, with the status.
    used_len: u32,
    offset: u64,
    len: u64,
    segments: Vec<iovec>,
    /// Packed ring: where the in-flight region has the chain's first descriptor.
    pub(crate) entry: u16,
    /// Packed ring: where the in-flight region has its last.
    pub(crate) last: u16,
    /// Packed ring: how many descriptors of the ring the chain has.
    pub(crate) count: u16,
}

impl Slot {
    pub(crate) fn new() -> Slot {
        Slot {
            busy: false,
            kind: Kind::Flush,
            writes_memory: false,
            status_addr: None,
            used_len: 0,
            offset: 0,
            len: 0,
            segments: Vec::new(),
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

    /// Whether the guest left a place for the status.
    pub(crate) fn has_status(&self) -> bool {
        self.status_addr.is_some()
    }

    /// Writes the status, marks in the log all that was written for this request, and gives the length for the used
    /// ring.
    #[inline]
    pub(crate) fn answer(
        &mut self,
        status: Status,
        memory: &GuestMemory,
        hint: &mut Hint,
        log: Option<&crate::DirtyLog>,
    ) -> u32 {
        if let Some(log) = log
            && self.writes_memory
        {
            for segment in &self.segments {
                if let Some(addr) = memory.host_to_guest(segment.iov_base) {
                    log.mark(addr, segment.iov_len as u64);
                }
            }
        }
        let Some(addr) = self.status_addr else { return 0 };
        // Memory that has been unplugged since needs no status.
        if memory.write_u8(hint, addr, status as u8).is_none() {
            return 0;
        }
        if let Some(log) = log {
            log.mark(addr, 1);
        }
        if status == Status::Ok { self.used_len } else { 1 }
    }
}

/// Makes a request of a chain: fills the slot, and says how to answer if the device is not to be asked.
#[inline]
pub(crate) fn parse(
    slot: &mut Slot,
    chain: &Chain,
    memory: &GuestMemory,
    hint: &mut Hint,
    disk: &Disk,
) -> Option<Status> {
    slot.segments.clear();
    slot.writes_memory = false;
    slot.status_addr = None;
    slot.used_len = 1;
    slot.offset = 0;
    slot.len = 0;
    slot.kind = Kind::Flush;

    let (readable, writable) = chain.pieces.split_at(chain.readable);
    let status_addr = writable
        .last()
        .filter(|last| last.len > 0)
        .and_then(|last| last.addr.checked_add(u64::from(last.len - 1)));
    if chain.readable_bytes < HEADER_LEN {
        return Some(Status::IoError);
    }
    let Some(status_addr) = status_addr.filter(|&addr| memory.has(hint, addr)) else {
        return Some(Status::IoError);
    };
    slot.status_addr = Some(status_addr);
    let Some([word, sector]) = chain.header(memory, hint) else { return Some(Status::IoError) };

    match word as u32 {
        kind @ (TYPE_IN | TYPE_OUT) => {
            let read = kind == TYPE_IN;
            let (pieces, skip, len) = if read {
                (writable, 0, chain.writable_bytes - 1)
            } else {
                (readable, HEADER_LEN, chain.readable_bytes - HEADER_LEN)
            };
            if len & ((1 << SECTOR_SHIFT) - 1) != 0 || len > DATA_MAX || (disk.read_only && !read) {
                return Some(Status::IoError);
            }
            let Some((offset, len)) = disk.range(sector, len >> SECTOR_SHIFT) else {
                return Some(Status::IoError);
            };
            if gather(pieces, skip, len, memory, hint, &mut slot.segments).is_none() {
                slot.segments.clear();
                return Some(Status::IoError);
            }
            slot.kind = if read { Kind::Read } else { Kind::Write };
            slot.offset = offset;
            slot.len = len;
            if read {
                slot.writes_memory = true;
                slot.used_len = len as u32 + 1;
            }
            None
        }
        TYPE_FLUSH => None,
        TYPE_GET_ID => {
            let len = (chain.writable_bytes - 1).min(SERIAL_LEN as u64);
            let found = gather(writable, 0, len, memory, hint, &mut slot.segments);
            slot.writes_memory = true;
            let mut serial = &disk.serial[..len as usize];
            let written = found.and_then(|()| {
                for segment in &slot.segments {
                    let (now, rest) = serial.split_at_checked(segment.iov_len)?;
                    memory.write(hint, memory.host_to_guest(segment.iov_base)?, now)?;
                    serial = rest;
                }
                Some(())
            });
            slot.used_len = len as u32 + 1;
            Some(if written.is_some() { Status::Ok } else { Status::IoError })
        }
        kind @ (TYPE_DISCARD | TYPE_WRITE_ZEROES) => {
            Some(match parse_range(kind, chain, memory, hint, disk) {
                Ok((kind, offset, len)) => {
                    slot.kind = kind;
                    slot.offset = offset;
                    slot.len = len;
                    return None;
                }
                Err(status) => status,
            })
        }
        _ => Some(Status::Unsupported),
    }
}

/// The one range of a discard or of a write of zeros: {u64 sector, u32 sectors, u32 flags}. We tell the guest that a
/// request has one range, so that it is one operation of the device.
fn parse_range(
    kind: u32,
    chain: &Chain,
    memory: &GuestMemory,
    hint: &mut Hint,
    disk: &Disk,
) -> Result<(Kind, u64, u64), Status> {
    let discard = kind == TYPE_DISCARD;
    if !(if discard { disk.discard } else { disk.write_zeroes }) {
        return Err(Status::Unsupported);
    }
    let mut bytes = [0; 16];
    if disk.read_only || chain.readable_bytes != HEADER_LEN + bytes.len() as u64 {
        return Err(Status::IoError);
    }
    chain.copy_readable(HEADER_LEN, &mut bytes, memory, hint).ok_or(Status::IoError)?;
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
    Ok((if discard { Kind::Discard } else { Kind::WriteZeroes { unmap } }, offset, len))
}

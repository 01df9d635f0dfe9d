//! A packed ring's bytes (virtio 1.2, section 2.8), as the driver sees them.
//!
//! Every field can be set to anything and in any order: an honest driver is [`crate::Queue`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};

use crate::Memory;
use crate::message::desc;
use crate::split::passed;

/// A descriptor, or what the target made of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedDesc {
    /// Guest-physical address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// What the target gives back when the chain is used.
    pub id: u16,
    /// See [`crate::message::desc`].
    pub flags: u16,
}

impl PackedDesc {
    /// As it lies in memory.
    pub fn encode(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.id.to_le_bytes());
        bytes[14..].copy_from_slice(&self.flags.to_le_bytes());
        bytes
    }
}

/// The flags of an available descriptor in a turn around the ring.
#[inline]
pub(crate) fn available(wrap: bool) -> u16 {
    if wrap { desc::AVAIL } else { desc::USED }
}

/// A packed ring in a guest's memory.
#[derive(Clone, Debug)]
pub struct PackedRing {
    memory: Arc<Memory>,
    size: u16,
    addr: u64,
    at: *mut u8,
}

// SAFETY: the pointer leads into memory that `memory` keeps mapped, and what it leads to is written
// by atomic stores of whichever thread owns the ring.
unsafe impl Send for PackedRing {}

impl PackedRing {
    /// Where the driver's event structure begins; the target's has a cache line of its own behind.
    fn driver_offset(size: u16) -> usize {
        (16 * usize::from(size)).next_multiple_of(64)
    }

    /// Bytes that a ring takes from where it begins.
    pub fn bytes(size: u16) -> u64 {
        PackedRing::driver_offset(size) as u64 + 64 + 4
    }

    /// A ring of `size` at a guest's address, a multiple of 64. Its memory is not touched.
    pub fn new(memory: &Arc<Memory>, addr: u64, size: u16) -> PackedRing {
        assert!(size > 0 && addr.is_multiple_of(64));
        let at = memory.pointer(addr, PackedRing::bytes(size) as usize);
        PackedRing { memory: memory.clone(), size, addr, at }
    }

    /// Descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The guest's addresses of descriptors, the driver's and the target's event structure.
    pub fn addresses(&self) -> [u64; 3] {
        let driver = self.addr + PackedRing::driver_offset(self.size) as u64;
        [self.addr, driver, driver + 64]
    }

    /// The memory it lies in.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Makes everything zero.
    pub fn clear(&self) {
        self.memory.write(self.addr, &vec![0; PackedRing::bytes(self.size) as usize]);
    }

    #[inline]
    fn u64_at(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the callers below stay within `bytes(size)` and at multiples of 8; the ring is
        // mapped while `memory` lives.
        unsafe { &*self.at.add(offset).cast_const().cast() }
    }

    #[inline]
    fn u16_at(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: as in `u64_at`, at even offsets.
        unsafe { &*self.at.add(offset).cast_const().cast() }
    }

    /// Writes a descriptor, its flags last: the target may take it from then on.
    #[inline]
    pub fn set_desc(&self, index: u16, desc: PackedDesc) {
        self.set_body(index, desc);
        self.set_flags(index, desc.flags);
    }

    /// Writes a descriptor but for its flags.
    #[inline]
    pub fn set_body(&self, index: u16, desc: PackedDesc) {
        assert!(index < self.size);
        let at = usize::from(index) * 16;
        self.u64_at(at).store(desc.addr, Ordering::Relaxed);
        // Length and id: six bytes, which no target reads before the flags say so.
        self.u16_at(at + 8).store(desc.len as u16, Ordering::Relaxed);
        self.u16_at(at + 10).store((desc.len >> 16) as u16, Ordering::Relaxed);
        self.u16_at(at + 12).store(desc.id, Ordering::Relaxed);
    }

    /// Writes a descriptor's flags, after everything that was written before.
    #[inline]
    pub fn set_flags(&self, index: u16, flags: u16) {
        assert!(index < self.size);
        self.u16_at(usize::from(index) * 16 + 14).store(flags, Ordering::Release);
    }

    /// A descriptor's flags, before everything that is read afterwards.
    #[inline]
    pub fn flags(&self, index: u16) -> u16 {
        assert!(index < self.size);
        self.u16_at(usize::from(index) * 16 + 14).load(Ordering::Acquire)
    }

    /// A descriptor as it is.
    #[inline]
    pub fn desc(&self, index: u16) -> PackedDesc {
        let flags = self.flags(index);
        let at = usize::from(index) * 16;
        let rest = self.u64_at(at + 8).load(Ordering::Relaxed);
        let addr = self.u64_at(at).load(Ordering::Relaxed);
        PackedDesc { addr, len: rest as u32, id: (rest >> 32) as u16, flags }
    }

    /// Whether the target has used the descriptor in a turn around the ring.
    #[inline]
    pub fn is_used(&self, index: u16, wrap: bool) -> bool {
        let flags = self.flags(index);
        let (avail, used) = (flags & desc::AVAIL != 0, flags & desc::USED != 0);
        avail == used && used == wrap
    }

    /// The driver's event structure: 0 asks for calls, 1 for none, 2 for one when the target has
    /// used the descriptor `index` of the turn `wrap`.
    #[inline]
    pub fn set_driver_event(&self, index: u16, wrap: bool, flags: u16) {
        let at = PackedRing::driver_offset(self.size);
        self.u16_at(at).store(index | u16::from(wrap) << 15, Ordering::Relaxed);
        self.u16_at(at + 2).store(flags, Ordering::Release);
    }

    /// The target's event structure: index with turn, flags.
    #[inline]
    pub fn device_event(&self) -> (u16, u16) {
        let at = PackedRing::driver_offset(self.size) + 64;
        let flags = self.u16_at(at + 2).load(Ordering::Acquire);
        (self.u16_at(at).load(Ordering::Relaxed), flags)
    }

    /// Whether the target wants to be kicked after `added` descriptors became available and the
    /// next one is `next` of the turn `wrap`. A full fence comes first.
    #[inline]
    pub fn wants_kick(&self, next: u16, wrap: bool, added: u16) -> bool {
        fence(Ordering::SeqCst);
        match self.device_event() {
            (_, 0) => true,
            (event, 2) => {
                let same_turn = (event >> 15 == 1) == wrap;
                let at = event & 0x7fff;
                let at = if same_turn { at } else { at.wrapping_sub(self.size) };
                passed(at, next.wrapping_sub(added), next)
            }
            _ => false,
        }
    }
}

//! The bytes of a packed ring (virtio 1.2, section 2.8), from the driver's side.
//!
//! Every field can be set to any value in any order. [`crate::Queue`] is a correct driver.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};

use crate::Memory;
use crate::message::desc;
use crate::split::passed;

/// A descriptor, available or used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedDesc {
    /// Guest-physical address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// The buffer id, which the target returns when the chain is used.
    pub id: u16,
    /// See [`crate::message::desc`].
    pub flags: u16,
}

impl PackedDesc {
    /// The bytes in memory.
    pub fn encode(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.id.to_le_bytes());
        bytes[14..].copy_from_slice(&self.flags.to_le_bytes());
        bytes
    }
}

/// The flags of an available descriptor in a lap with this wrap counter.
#[inline]
pub(crate) fn available(wrap: bool) -> u16 {
    if wrap { desc::AVAIL } else { desc::USED }
}

/// A packed ring in guest memory.
#[derive(Clone, Debug)]
pub struct PackedRing {
    memory: Arc<Memory>,
    size: u16,
    addr: u64,
    at: *mut u8,
}

// SAFETY: the pointer leads into memory that `memory` keeps mapped, and only the thread that owns
// the ring writes there, with atomic stores.
unsafe impl Send for PackedRing {}

impl PackedRing {
    /// Offset of the driver's event structure. The target's follows on a cache line of its own.
    fn driver_offset(size: u16) -> usize {
        (16 * usize::from(size)).next_multiple_of(64)
    }

    /// Bytes of a ring.
    pub fn bytes(size: u16) -> u64 {
        PackedRing::driver_offset(size) as u64 + 64 + 4
    }

    /// A ring of `size` descriptors at a guest address, which must be a multiple of 64. Does not
    /// access the memory.
    pub fn new(memory: &Arc<Memory>, addr: u64, size: u16) -> PackedRing {
        assert!(size > 0 && addr.is_multiple_of(64));
        let at = memory.pointer(addr, PackedRing::bytes(size) as usize);
        PackedRing { memory: memory.clone(), size, addr, at }
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The guest addresses of the descriptors and of the driver's and the target's event structure.
    pub fn addresses(&self) -> [u64; 3] {
        let driver = self.addr + PackedRing::driver_offset(self.size) as u64;
        [self.addr, driver, driver + 64]
    }

    /// The guest memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Zeroes the whole ring.
    pub fn clear(&self) {
        self.memory.write(self.addr, &vec![0; PackedRing::bytes(self.size) as usize]);
    }

    #[inline]
    fn u64_at(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the callers below stay within `bytes(size)` and use multiples of 8; the ring is
        // mapped while `memory` lives.
        unsafe { &*self.at.add(offset).cast_const().cast() }
    }

    #[inline]
    fn u16_at(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: as in `u64_at`, with even offsets.
        unsafe { &*self.at.add(offset).cast_const().cast() }
    }

    /// Writes a descriptor, its flags last: from then on the target may take it.
    #[inline]
    pub fn set_desc(&self, index: u16, desc: PackedDesc) {
        self.set_body(index, desc);
        self.set_flags(index, desc.flags);
    }

    /// Writes a descriptor except for its flags.
    #[inline]
    pub fn set_body(&self, index: u16, desc: PackedDesc) {
        assert!(index < self.size);
        let at = usize::from(index) * 16;
        self.u64_at(at).store(desc.addr, Ordering::Relaxed);
        // Length and id: six bytes, which no target reads before the flags are set.
        self.u16_at(at + 8).store(desc.len as u16, Ordering::Relaxed);
        self.u16_at(at + 10).store((desc.len >> 16) as u16, Ordering::Relaxed);
        self.u16_at(at + 12).store(desc.id, Ordering::Relaxed);
    }

    /// Writes a descriptor's flags, after all earlier stores.
    #[inline]
    pub fn set_flags(&self, index: u16, flags: u16) {
        assert!(index < self.size);
        self.u16_at(usize::from(index) * 16 + 14).store(flags, Ordering::Release);
    }

    /// Reads a descriptor's flags, before all later loads.
    #[inline]
    pub fn flags(&self, index: u16) -> u16 {
        assert!(index < self.size);
        self.u16_at(usize::from(index) * 16 + 14).load(Ordering::Acquire)
    }

    /// Reads a descriptor.
    #[inline]
    pub fn desc(&self, index: u16) -> PackedDesc {
        let flags = self.flags(index);
        let at = usize::from(index) * 16;
        let rest = self.u64_at(at + 8).load(Ordering::Relaxed);
        let addr = self.u64_at(at).load(Ordering::Relaxed);
        PackedDesc { addr, len: rest as u32, id: (rest >> 32) as u16, flags }
    }

    /// Whether the target has used the descriptor in the lap with this wrap counter.
    #[inline]
    pub fn is_used(&self, index: u16, wrap: bool) -> bool {
        let flags = self.flags(index);
        let (avail, used) = (flags & desc::AVAIL != 0, flags & desc::USED != 0);
        avail == used && used == wrap
    }

    /// Writes the driver's event structure. `flags`: 0 requests calls, 1 requests none, 2 requests
    /// a call when the target has used the descriptor `index` in the lap with the wrap counter
    /// `wrap`.
    #[inline]
    pub fn set_driver_event(&self, index: u16, wrap: bool, flags: u16) {
        let at = PackedRing::driver_offset(self.size);
        self.u16_at(at).store(index | u16::from(wrap) << 15, Ordering::Relaxed);
        self.u16_at(at + 2).store(flags, Ordering::Release);
    }

    /// Reads the target's event structure: index with wrap counter, flags.
    #[inline]
    pub fn device_event(&self) -> (u16, u16) {
        let at = PackedRing::driver_offset(self.size) + 64;
        let flags = self.u16_at(at + 2).load(Ordering::Acquire);
        (self.u16_at(at).load(Ordering::Relaxed), flags)
    }

    /// Whether the target wants a kick after `added` descriptors became available. `next` and
    /// `wrap` are the position after them. A full fence comes first.
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

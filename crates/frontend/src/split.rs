//! The bytes of a split ring (virtio 1.2, section 2.7), from the driver's side.
//!
//! Every field can be set to any value in any order. [`crate::Queue`] is a correct driver.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use crate::Memory;

/// A descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Desc {
    /// Guest-physical address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// See [`crate::message::desc`].
    pub flags: u16,
    /// The next descriptor of the chain, if the flags say that there is one.
    pub next: u16,
}

impl Desc {
    /// Bytes of a descriptor.
    pub const BYTES: usize = 16;

    /// The bytes in memory.
    pub fn encode(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// A split ring in guest memory.
#[derive(Clone, Debug)]
pub struct SplitRing {
    memory: Arc<Memory>,
    size: u16,
    desc_addr: u64,
    avail_addr: u64,
    used_addr: u64,
    pointers: Pointers,
}

/// Pointers to the parts, so that requests need no lookup of regions.
#[derive(Clone, Copy, Debug)]
struct Pointers {
    desc: *mut Desc,
    avail: *const AtomicU16,
    used: *const AtomicU16,
}

// SAFETY: the pointers lead into memory that `SplitRing::memory` keeps mapped, and only the thread
// that owns the ring writes there, with atomic or volatile stores.
unsafe impl Send for SplitRing {}

impl SplitRing {
    /// Bytes of a ring.
    pub fn bytes(size: u16) -> u64 {
        let (_, used) = SplitRing::offsets(size);
        used + 6 + 8 * u64::from(size) + 2
    }

    /// Offsets of avail and used ring. The used ring has cache lines of its own.
    fn offsets(size: u16) -> (u64, u64) {
        let avail = 16 * u64::from(size);
        (avail, (avail + 6 + 2 * u64::from(size)).next_multiple_of(64))
    }

    /// A ring of `size` (a power of two) at a guest address, which must be a multiple of 64. Does
    /// not access the memory.
    pub fn new(memory: &Arc<Memory>, addr: u64, size: u16) -> SplitRing {
        assert!(size.is_power_of_two() && addr.is_multiple_of(64));
        let (avail, used) = SplitRing::offsets(size);
        let at = memory.pointer(addr, SplitRing::bytes(size) as usize);
        let place = |offset: u64| at.wrapping_add(offset as usize);
        SplitRing {
            memory: memory.clone(),
            size,
            desc_addr: addr,
            avail_addr: addr + avail,
            used_addr: addr + used,
            pointers: Pointers {
                desc: at.cast(),
                avail: place(avail).cast_const().cast(),
                used: place(used).cast_const().cast(),
            },
        }
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The guest addresses of descriptors, avail and used ring.
    pub fn addresses(&self) -> [u64; 3] {
        [self.desc_addr, self.avail_addr, self.used_addr]
    }

    /// The guest memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Zeroes the whole ring.
    pub fn clear(&self) {
        let bytes = vec![0; SplitRing::bytes(self.size) as usize];
        self.memory.write(self.desc_addr, &bytes);
    }

    /// A 16-bit word of the avail ring: flags, index, the entries, used event.
    #[inline]
    fn avail(&self, word: usize) -> &AtomicU16 {
        debug_assert!(word <= 2 + usize::from(self.size));
        // SAFETY: the avail ring has `size` + 3 words, it is mapped while `memory` lives, and
        // `word` comes from this module, which stays below that.
        unsafe { &*self.pointers.avail.add(word) }
    }

    /// A 16-bit word of the used ring: flags, index, four words for each entry, avail event.
    #[inline]
    fn used_word(&self, word: usize) -> &AtomicU16 {
        debug_assert!(word <= 2 + 4 * usize::from(self.size));
        // SAFETY: the used ring has 3 + 4 * `size` words; otherwise as in `avail`.
        unsafe { &*self.pointers.used.add(word) }
    }

    #[inline]
    fn mask(&self) -> u16 {
        self.size - 1
    }

    /// Writes a descriptor.
    #[inline]
    pub fn set_desc(&self, index: u16, desc: Desc) {
        assert!(index < self.size);
        // SAFETY: the table has `size` descriptors, it is mapped while `memory` lives, and `new`
        // checked its alignment.
        unsafe { self.pointers.desc.add(index.into()).write_volatile(desc) }
    }

    /// Reads a descriptor.
    pub fn desc(&self, index: u16) -> Desc {
        assert!(index < self.size);
        // SAFETY: as in `set_desc`.
        unsafe { self.pointers.desc.add(index.into()).read_volatile() }
    }

    /// Writes a head into the entry of avail index `index`.
    #[inline]
    pub fn set_avail(&self, index: u16, head: u16) {
        self.avail(2 + usize::from(index & self.mask())).store(head, Ordering::Relaxed);
    }

    /// Publishes all entries below an avail index.
    #[inline]
    pub fn publish(&self, index: u16) {
        self.avail(1).store(index, Ordering::Release);
    }

    /// The published avail index.
    pub fn avail_index(&self) -> u16 {
        self.avail(1).load(Ordering::Relaxed)
    }

    /// Without event index: 1 requests no calls.
    #[inline]
    pub fn set_avail_flags(&self, flags: u16) {
        self.avail(0).store(flags, Ordering::Relaxed);
    }

    /// With event index: requests a call when the used index passes this.
    #[inline]
    pub fn set_used_event(&self, index: u16) {
        self.avail(2 + usize::from(self.size)).store(index, Ordering::Relaxed);
    }

    /// The target's used index.
    #[inline]
    pub fn used_index(&self) -> u16 {
        self.used_word(1).load(Ordering::Acquire)
    }

    /// Writes the used index, as only a target should.
    pub fn set_used_index(&self, index: u16) {
        self.used_word(1).store(index, Ordering::Release);
    }

    /// The id and the length in the entry of a used index.
    #[inline]
    pub fn used(&self, index: u16) -> (u32, u32) {
        let word = 2 + 4 * usize::from(index & self.mask());
        let half = |nth: usize| u32::from(self.used_word(word + nth).load(Ordering::Relaxed));
        (half(0) | half(1) << 16, half(2) | half(3) << 16)
    }

    /// Without event index: 1 if the target wants no kicks.
    #[inline]
    pub fn used_flags(&self) -> u16 {
        self.used_word(0).load(Ordering::Relaxed)
    }

    /// With event index: the target wants a kick when the avail index passes this.
    #[inline]
    pub fn avail_event(&self) -> u16 {
        self.used_word(2 + 4 * usize::from(self.size)).load(Ordering::Relaxed)
    }

    /// Whether the target wants a kick after the avail index went from `old` to `new`. A full fence
    /// comes first, so that the target either sees the index or is kicked.
    #[inline]
    pub fn wants_kick(&self, old: u16, new: u16, event_index: bool) -> bool {
        fence(Ordering::SeqCst);
        if event_index { passed(self.avail_event(), old, new) } else { self.used_flags() & 1 == 0 }
    }

    /// Writes a table of indirect descriptors at a guest address.
    pub fn set_indirect(&self, addr: u64, table: &[Desc]) {
        for (nth, desc) in table.iter().enumerate() {
            self.memory.write(addr + (nth * Desc::BYTES) as u64, &desc.encode());
        }
    }
}

/// Whether an index that went from `old` to `new` passed the event (virtio 1.2, 2.7.10).
#[inline]
pub(crate) fn passed(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pages;

    #[test]
    fn the_parts_are_at_the_specified_offsets() {
        let memory = Arc::new(Memory::new(1 << 20, Pages::Small).unwrap());
        let ring = SplitRing::new(&memory, 4096, 8);
        assert_eq!(ring.addresses(), [4096, 4096 + 128, 4096 + 192]);
        ring.set_desc(1, Desc { addr: 5, len: 6, flags: 7, next: 8 });
        ring.set_avail(9, 3);
        ring.publish(10);
        ring.set_used_event(11);
        let [desc, avail, used] = ring.addresses();
        let mut bytes = [0; 16];
        memory.read(desc + 16, &mut bytes);
        assert_eq!(bytes, Desc { addr: 5, len: 6, flags: 7, next: 8 }.encode());
        let word = |at: u64| memory.u16_at(at).load(Ordering::Relaxed);
        assert_eq!((word(avail + 2), word(avail + 4 + 2), word(avail + 4 + 16)), (10, 3, 11));
        memory.write(used + 4 + 8 * 3, &[1, 0, 2, 0, 0xff, 0, 0, 1]);
        memory.u16_at(used + 4 + 64).store(12, Ordering::Relaxed);
        assert_eq!(ring.used(3 + 8), (0x20001, 0x10000ff));
        assert_eq!(ring.avail_event(), 12);
    }

    #[test]
    fn an_event_is_passed_across_the_wrap_of_the_index() {
        assert!(passed(0, 0, 1));
        assert!(!passed(1, 0, 1));
        assert!(passed(0xffff, 0xfffe, 1));
        assert!(!passed(1, 0xfffe, 1));
        assert!(!passed(5, 5, 5));
    }
}

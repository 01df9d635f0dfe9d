//! A node: one entry, with its links before it and its bytes after it.
//!
//! ```text
//! link[h-1] … link[0] | prefix u64 | key len u32 | value len u32 | user key | packed u64 | value
//!                     ^ the address of the node
//! ```
//!
//! Because the links come first, all other offsets are independent of the node's height, and the
//! height need not be stored. The most used link, level 0, shares a cache line with the fields that
//! are compared first. User key and packed number together form the internal key of tables, so
//! merge and flush use it unchanged.
//!
//! The prefix is the first eight bytes of the user key as a number that sorts like the key: nearly
//! every comparison ends there. An entry with 16 bytes of key and 1000 of value takes 24 more bytes
//! for header and packed number, and 10.7 on average for links.
//!
//! Invariant: after [`NodePtr::write`] only the links of a node change. They are atomic, and only
//! the writer stores into them. The holder of a [`NodeRef`] may read the whole node: `write`
//! happened before the `NodeRef` was made.

use std::marker::PhantomData;
use std::ptr::NonNull;

use rocksfmt::{Comparator, KEY_TRAILER_BYTES};

use loomable::{AtomicPtr, Ordering, UnsafeCell, weaken};

/// The highest level count of a node: with one node in four going a level up, enough for 4^12
/// entries. Loom needs one level above level 0.
pub(crate) const HEIGHT_MAX: usize = if cfg!(loom) { 2 } else { 12 };

/// The alignment of nodes.
pub(crate) const ALIGN: usize = 8;

type Link = AtomicPtr<Node>;

#[derive(Clone, Copy)]
struct Header {
    prefix: u64,
    key_bytes: u32,
    value_bytes: u32,
}

/// The target of a [`NodePtr`]; links come before it and bytes after it.
#[repr(C)]
pub(crate) struct Node {
    /// A cell, so that loom detects a read of a node that was not written before. It also stands
    /// for the bytes after it: they are written together, and nothing finds them without reading
    /// this.
    header: UnsafeCell<Header>,
}

const _: () = {
    assert!(align_of::<Node>() <= ALIGN && align_of::<Link>() <= ALIGN);
    assert!(size_of::<Node>().is_multiple_of(align_of::<Link>()));
    assert!(size_of::<Link>().is_multiple_of(ALIGN));
    assert!(cfg!(loom) || size_of::<Node>() == 16);
};

/// The bytes that a node takes in the arena, a multiple of [`ALIGN`]; `payload` is user key and
/// value. `None` if `payload` exceeds 32 bits.
pub(crate) fn node_bytes(height: usize, payload: usize) -> Option<usize> {
    u32::try_from(payload).ok()?;
    let fixed = height * size_of::<Link>() + size_of::<Node>() + KEY_TRAILER_BYTES;
    fixed.checked_add(payload)?.checked_next_multiple_of(ALIGN)
}

/// The first eight bytes of a user key as a number. Keys with different prefixes sort as their
/// prefixes do.
#[inline(always)]
pub(crate) fn prefix_of(comparator: Comparator, user_key: &[u8]) -> u64 {
    let prefix = match user_key.first_chunk::<8>() {
        Some(eight) => u64::from_be_bytes(*eight),
        None => {
            let mut padded = [0; 8];
            padded[..user_key.len()].copy_from_slice(user_key);
            u64::from_be_bytes(padded)
        }
    };
    match comparator {
        Comparator::Bytewise => prefix,
        Comparator::ReverseBytewise => !prefix,
    }
}

/// The address of a node, for keeping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodePtr(NonNull<Node>);

// SAFETY: an address, which gives access only through the unsafe `NodePtr::get`, whose caller shows
// that the node is alive and was written before. Everything reached from it may be reached from any
// thread: atomics, and bytes that do not change.
unsafe impl Send for NodePtr {}
// SAFETY: as above.
unsafe impl Sync for NodePtr {}

impl NodePtr {
    /// Writes a node with empty links into `memory`.
    ///
    /// # Safety
    ///
    /// `memory` is aligned to [`ALIGN`], valid for writes of [`node_bytes`] of this height and of
    /// both lengths, and exclusively the caller's.
    pub unsafe fn write(
        memory: NonNull<u8>,
        height: usize,
        prefix: u64,
        user_key: &[u8],
        packed: u64,
        value: &[u8],
    ) -> NodePtr {
        let header = Header {
            prefix,
            key_bytes: u32::try_from(user_key.len()).expect("node_bytes refuses longer keys"),
            value_bytes: u32::try_from(value.len()).expect("node_bytes refuses longer values"),
        };
        let links = memory.cast::<Link>();
        // SAFETY: every write is within the `node_bytes` that the caller grants: `height` links
        // from the beginning, then the header, then key, packed number and value. The alignments of
        // both types divide ALIGN, and so does the size of a link, so links and header are aligned.
        // The slices do not overlap `memory`, which is exclusively the caller's.
        unsafe {
            for level in 0..height {
                links.add(level).write(Link::new(std::ptr::null_mut()));
            }
            let node = links.add(height).cast::<Node>();
            node.write(Node { header: UnsafeCell::new(header) });
            let key = node.add(1).cast::<u8>();
            key.copy_from_nonoverlapping(NonNull::from_ref(user_key).cast(), user_key.len());
            let trailer = key.add(user_key.len());
            trailer.cast::<[u8; KEY_TRAILER_BYTES]>().write(packed.to_le_bytes());
            let bytes = trailer.add(KEY_TRAILER_BYTES);
            bytes.copy_from_nonoverlapping(NonNull::from_ref(value).cast(), value.len());
            NodePtr(node)
        }
    }

    /// The node at this address.
    ///
    /// # Safety
    ///
    /// The call of [`write`](Self::write) that returned this address happened before, and the
    /// memory stays valid for `'a`.
    #[inline(always)]
    pub unsafe fn get<'a>(self) -> NodeRef<'a> {
        NodeRef(self.0, PhantomData)
    }
}

/// A node that was written before and that stays valid for `'a`. Only [`NodePtr::get`] makes one of
/// an address.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeRef<'a>(NonNull<Node>, PhantomData<&'a Node>);

impl<'a> NodeRef<'a> {
    #[inline(always)]
    pub fn ptr(self) -> NodePtr {
        NodePtr(self.0)
    }

    #[inline(always)]
    fn header(self) -> Header {
        // SAFETY: the node stays valid for 'a, was written before, and nobody writes the header
        // again, by the invariant of `NodeRef`.
        unsafe { self.0.as_ref().header.with(|header| *header) }
    }

    #[inline(always)]
    pub fn prefix(self) -> u64 {
        self.header().prefix
    }

    /// The bytes from `start` bytes after the header.
    ///
    /// # Safety
    ///
    /// `start + len` does not exceed the length of key, packed number and value according to the
    /// header.
    #[inline(always)]
    unsafe fn bytes(self, start: usize, len: usize) -> &'a [u8] {
        // SAFETY: `write` initialized these bytes before, as the caller shows; they are in the
        // allocation of the node, which stays valid for 'a, and nobody writes them again. The
        // address was derived from the allocation's, not from a reference to the header, so it may
        // be used for bytes after the header.
        unsafe { std::slice::from_raw_parts(self.0.add(1).cast::<u8>().add(start).as_ptr(), len) }
    }

    #[inline(always)]
    pub fn user_key(self) -> &'a [u8] {
        // SAFETY: the key comes first after the header.
        unsafe { self.bytes(0, self.header().key_bytes as usize) }
    }

    /// User key and packed number.
    #[inline(always)]
    pub fn internal_key(self) -> &'a [u8] {
        // SAFETY: the key comes first after the header and the packed number second.
        unsafe { self.bytes(0, self.header().key_bytes as usize + KEY_TRAILER_BYTES) }
    }

    #[inline(always)]
    pub fn packed(self) -> u64 {
        let (_, trailer) = self
            .internal_key()
            .split_last_chunk::<KEY_TRAILER_BYTES>()
            .expect("an internal key ends with the packed number");
        u64::from_le_bytes(*trailer)
    }

    #[inline(always)]
    pub fn value(self) -> &'a [u8] {
        let header = self.header();
        // SAFETY: the value, of that length, comes after key and packed number.
        unsafe {
            self.bytes(header.key_bytes as usize + KEY_TRAILER_BYTES, header.value_bytes as usize)
        }
    }

    /// # Safety
    ///
    /// The node was written with a height above `level`.
    #[inline(always)]
    unsafe fn link(self, level: usize) -> &'a Link {
        // SAFETY: `write` put `height` links before the header, with level 0 nearest, so this one,
        // as the caller shows, is in the node's allocation and was initialized before. It stays
        // valid for 'a and is atomic: a shared reference to it is sound although the writer stores
        // into it.
        unsafe { self.0.cast::<Link>().sub(level + 1).as_ref() }
    }

    /// The next node at that level.
    ///
    /// # Safety
    ///
    /// The node was written with a height above `level`.
    #[inline(always)]
    pub unsafe fn next(self, level: usize) -> Option<NodeRef<'a>> {
        // SAFETY: the caller's promise is the condition of `link`.
        let link = unsafe { self.link(level) };
        let next = link.load(weaken(Ordering::Acquire, "memtable.load_relaxed"));
        // SAFETY: `insert_after` stored the pointer; its caller shows that the target lives as
        // long as this node. The target's `write` came before the Release store that this Acquire
        // load has read from.
        NonNull::new(next).map(|next| unsafe { NodePtr(next).get() })
    }

    /// Prefetches the next node at that level.
    ///
    /// # Safety
    ///
    /// The node was written with a height above `level`.
    #[inline(always)]
    pub unsafe fn prefetch_next(self, level: usize) {
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: the caller's promise is the condition of `link`. A prefetch accepts any
            // address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.link(level).load(Ordering::Relaxed).cast()) }
        }
        #[cfg(not(all(target_arch = "x86_64", not(loom))))]
        let _ = level;
    }

    /// The next node in the order of the list.
    #[inline(always)]
    pub fn following(self) -> Option<NodeRef<'a>> {
        // SAFETY: every node has level 0: heights begin at 1.
        unsafe { self.next(0) }
    }

    /// Links `next` in after this node at that level, before the present next node.
    ///
    /// # Safety
    ///
    /// Both nodes were written with a height above `level`, and live equally long. The caller is
    /// the only writer of the list, and `next` is not in it at this level.
    pub unsafe fn insert_after(self, level: usize, next: NodeRef<'_>) {
        // SAFETY: the caller's promise is the condition of `link`, for both.
        let (before, between) = unsafe { (self.link(level), next.link(level)) };
        // Relaxed: only this thread stores into links.
        let after = before.load(Ordering::Relaxed);
        // Nobody follows this link before the next store, which is a Release.
        let late = loomable::mutant("memtable.link_before_next");
        if !late {
            between.store(after, Ordering::Relaxed);
        }
        let publish = match level {
            0 => weaken(Ordering::Release, "memtable.publish_relaxed"),
            _ => weaken(Ordering::Release, "memtable.publish_upper_relaxed"),
        };
        before.store(next.0.as_ptr(), publish);
        if late {
            between.store(after, Ordering::Relaxed);
        }
    }
}

//! A node: one entry, its links in front of it and its bytes behind it.
//!
//! ```text
//! link[h-1] … link[1] link[0] | prefix u64 | key bytes u32 | value bytes u32 | user key | packed u64 | value
//!                             ^ the address of the node                                   (fixed64)
//! ```
//!
//! With the links in front, everything else is at a place that does not depend on the node's
//! height, and the height need not be stored; the link that is followed most, level 0, shares a
//! cache line with what is compared first. User key and packed number stand together as the
//! internal key that tables have, so that a merge or a flush takes it as it is.
//!
//! The prefix is the first eight bytes of the user key as a number that sorts like the key: nearly
//! every comparison ends there. 16 bytes of key and 1000 of value take 24 bytes of header and
//! packed number and on average 10.7 of links.
//!
//! What always holds: after [`NodePtr::write`] nothing of a node changes but its links. Those are
//! atomic, and only the writer stores into them. Whoever has a [`NodeRef`] may read all of it:
//! `write` happened before he got it.

use std::marker::PhantomData;
use std::ptr::NonNull;

use rocksfmt::{Comparator, KEY_TRAILER_BYTES};

use loomable::{AtomicPtr, Ordering, UnsafeCell, weaken};

/// The most levels a node can be part of: with one node in four going a level up, enough for 4^12
/// entries. Loom needs a level above level 0 and no more.
pub(crate) const HEIGHT_MAX: usize = if cfg!(loom) { 2 } else { 12 };

/// What nodes are aligned to.
pub(crate) const ALIGN: usize = 8;

type Link = AtomicPtr<Node>;

#[derive(Clone, Copy)]
struct Header {
    prefix: u64,
    key_bytes: u32,
    value_bytes: u32,
}

/// What a [`NodePtr`] points to; links and bytes are before and behind it.
#[repr(C)]
pub(crate) struct Node {
    /// A cell for loom, which sees by it when a node is read that was not written before. It
    /// stands for the bytes behind it too: they are written together, and nobody finds them
    /// without reading this.
    header: UnsafeCell<Header>,
}

const _: () = {
    assert!(align_of::<Node>() <= ALIGN && align_of::<Link>() <= ALIGN);
    assert!(size_of::<Node>().is_multiple_of(align_of::<Link>()));
    assert!(size_of::<Link>().is_multiple_of(ALIGN));
    assert!(cfg!(loom) || size_of::<Node>() == 16);
};

/// The bytes that a node takes in the arena, a multiple of [`ALIGN`]; `payload` is user key and
/// value. `None` if that is over 32 bits.
pub(crate) fn node_bytes(height: usize, payload: usize) -> Option<usize> {
    u32::try_from(payload).ok()?;
    let fixed = height * size_of::<Link>() + size_of::<Node>() + KEY_TRAILER_BYTES;
    fixed.checked_add(payload)?.checked_next_multiple_of(ALIGN)
}

/// The first eight bytes of a user key as a number: keys with different prefixes are ordered as
/// their prefixes are.
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

// SAFETY: it is an address and gives access only by the unsafe `NodePtr::get`, whose caller shows
// that the node is alive and was written before. What is then reached may be reached from any
// thread: atomics, and bytes that do not change.
unsafe impl Send for NodePtr {}
// SAFETY: as above.
unsafe impl Sync for NodePtr {}

impl NodePtr {
    /// Writes a node with empty links into `memory`.
    ///
    /// # Safety
    ///
    /// `memory` is aligned to [`ALIGN`], valid for writing [`node_bytes`] of this height and of
    /// both lengths, and nobody else's.
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
        // SAFETY: all of it is within the `node_bytes` that the caller grants: `height` links from
        // the beginning, behind them the header, behind that key, packed number and value.
        // Both types' alignments divide ALIGN, and so does the size of a link, so links and
        // header are aligned. The slices are borrowed from elsewhere: the memory is nobody
        // else's.
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
    /// The call of [`write`](Self::write) that gave this address happened before, and the memory
    /// stays for `'a`.
    #[inline(always)]
    pub unsafe fn get<'a>(self) -> NodeRef<'a> {
        NodeRef(self.0, PhantomData)
    }
}

/// A node that was written before and that stays for `'a`; only [`NodePtr::get`] says so of an
/// address.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeRef<'a>(NonNull<Node>, PhantomData<&'a Node>);

impl<'a> NodeRef<'a> {
    #[inline(always)]
    pub fn ptr(self) -> NodePtr {
        NodePtr(self.0)
    }

    #[inline(always)]
    fn header(self) -> Header {
        // SAFETY: the node stays for 'a, was written before, and nobody writes the header again:
        // what `NodeRef` says.
        unsafe { self.0.as_ref().header.with(|header| *header) }
    }

    #[inline(always)]
    pub fn prefix(self) -> u64 {
        self.header().prefix
    }

    /// The bytes from `start` bytes behind the header.
    ///
    /// # Safety
    ///
    /// `start + len` is no more than key, packed number and value take, according to the header.
    #[inline(always)]
    unsafe fn bytes(self, start: usize, len: usize) -> &'a [u8] {
        // SAFETY: these bytes were initialized by `write`, before, as the caller shows; they are in
        // the allocation of the node, which stays for 'a, and nobody writes them again. The
        // address was derived from the allocation's, not from a reference to the header, so
        // it may be used for what is behind the header.
        unsafe { std::slice::from_raw_parts(self.0.add(1).cast::<u8>().add(start).as_ptr(), len) }
    }

    #[inline(always)]
    pub fn user_key(self) -> &'a [u8] {
        // SAFETY: the key is the first behind the header.
        unsafe { self.bytes(0, self.header().key_bytes as usize) }
    }

    /// User key and packed number.
    #[inline(always)]
    pub fn internal_key(self) -> &'a [u8] {
        // SAFETY: the key is the first behind the header and the packed number the second.
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
        // SAFETY: behind key and packed number is the value, of that length.
        unsafe {
            self.bytes(header.key_bytes as usize + KEY_TRAILER_BYTES, header.value_bytes as usize)
        }
    }

    /// # Safety
    ///
    /// The node was written with a height above `level`.
    #[inline(always)]
    unsafe fn link(self, level: usize) -> &'a Link {
        // SAFETY: `write` put `height` links in front of the header, level 0 the nearest, so this
        // one, as the caller shows, is in the node's allocation and was initialized before.
        // It stays for 'a and is atomic: a shared reference to it is right although the
        // writer stores into it.
        unsafe { self.0.cast::<Link>().sub(level + 1).as_ref() }
    }

    /// The node behind this one at that level.
    ///
    /// # Safety
    ///
    /// The node was written with a height above `level`.
    #[inline(always)]
    pub unsafe fn next(self, level: usize) -> Option<NodeRef<'a>> {
        // SAFETY: the caller's promise is what `link` asks for.
        let link = unsafe { self.link(level) };
        let next = link.load(weaken(Ordering::Acquire, "memtable.load_relaxed"));
        // SAFETY: what is in a link was put there by `set_next`, whose caller shows that it lives
        // as long as this node; its `write` was before the Release store that this Acquire
        // load has read from.
        NonNull::new(next).map(|next| unsafe { NodePtr(next).get() })
    }

    /// Asks the processor for the node behind this one at that level, for later.
    ///
    /// # Safety
    ///
    /// The node was written with a height above `level`.
    #[inline(always)]
    pub unsafe fn prefetch_next(self, level: usize) {
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: the caller's promise is what `link` asks for. A prefetch may be given any
            // address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.link(level).load(Ordering::Relaxed).cast()) }
        }
        #[cfg(not(all(target_arch = "x86_64", not(loom))))]
        let _ = level;
    }

    /// The node behind this one in the order of the list.
    #[inline(always)]
    pub fn following(self) -> Option<NodeRef<'a>> {
        // SAFETY: every node has level 0: heights begin at 1.
        unsafe { self.next(0) }
    }

    /// Links `next` in behind this node at that level, in front of what was there.
    ///
    /// # Safety
    ///
    /// Both nodes were written with a height above `level`, and live equally long. The caller is
    /// the one writer of the list, and `next` is not in it at this level.
    pub unsafe fn insert_behind(self, level: usize, next: NodeRef<'_>) {
        // SAFETY: the caller's promise is what `link` asks for, of both.
        let (before, between) = unsafe { (self.link(level), next.link(level)) };
        // Relaxed: nobody else stores into links.
        let behind = before.load(Ordering::Relaxed);
        // Nobody follows this link before the next store, which is a Release.
        let late = loomable::mutant("memtable.link_before_next");
        if !late {
            between.store(behind, Ordering::Relaxed);
        }
        let publish = match level {
            0 => weaken(Ordering::Release, "memtable.publish_relaxed"),
            _ => weaken(Ordering::Release, "memtable.publish_upper_relaxed"),
        };
        before.store(next.0.as_ptr(), publish);
        if late {
            between.store(behind, Ordering::Relaxed);
        }
    }
}

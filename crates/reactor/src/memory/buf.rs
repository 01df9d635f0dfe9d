//! Owned, aligned buffers and the per-core pool that provides them.
//!
//! 1. A task asks its core for a [`Buf`] of some length; the pool rounds up to one of its size
//!    classes and hands out a recycled buffer, or a fresh one while the core's budget lasts.
//! 2. The buffer goes into an operation by value. The operation owns it until its completion has
//!    been reaped, whatever happens to its future.
//! 3. Filled, it can become a [`SharedBuf`]: immutable and counted without atomics, so one block
//!    can be in a cache, in use by a cursor and in a send to a socket without a copy.
//! 4. The last holder returns it to the pool's free list.
//!
//! An owner of buffers that it can release (a cache) registers as a [`Spare`]. It is asked for them
//! before any task waits, so memory that is only kept for later never delays work that needs it
//! now.
//!
//! Tasks that hold buffers while they wait for more could deadlock. Work that needs several buffers
//! asks for a [`Promise`] first, while it holds none: all promises together fit under the limit, or
//! there is only one.
//!
//! Memory that an owner takes from the allocator itself, because other threads read it, counts as
//! used too: see [`Held`].
//!
//! One core owns a pool; nothing here is `Send`. Invariants: `used + free <= limit` in bytes (the
//! limit includes recycled buffers), and a buffer's memory never moves while it lives. The size
//! classes are those of the program's allocator (jemalloc: four per doubling), so a buffer occupies
//! exactly the bytes it is counted for. Share counts are kept apart from the buffers: a count after
//! the data would push a buffer of 4 or 256 KiB into the next class. The pool zeroes fresh buffers,
//! but not recycled ones.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::{Cell, RefCell};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::rc::{Rc, Weak};

use crate::memory::region::{REGION_BYTES, Region, UNIT};
use crate::wait::Event;

/// Alignment of every buffer in bytes: the smallest logical block of disks.
pub const BUF_ALIGN: usize = 512;
/// Largest buffer of the pool in bytes; a longer request is refused.
pub const BUF_MAX: usize = 1 << 30;
/// Bytes reclaimed beyond the need.
const RECLAIM_BYTES: usize = 1 << 20;
/// One part in this many of the limit is never promised: it serves work that returns one buffer and
/// takes another.
const UNPROMISED: usize = 16;
/// Classes up to 4 KiB in steps of 512 bytes, then four per doubling up to `BUF_MAX`.
const CLASSES: usize = 8 + 4 * 18;

/// The class that holds `len` bytes.
fn class_of(len: usize) -> usize {
    if len <= 4096 {
        return len.max(1).div_ceil(512) - 1;
    }
    let pow = (len - 1).ilog2(); // 12 for 4097..=8192
    let step = 1usize << (pow - 2);
    let steps = (len - (1 << pow)).div_ceil(step); // 1..=4
    8 + (pow as usize - 12) * 4 + steps - 1
}

/// Capacity in bytes of a class, also of those of registered buffers.
fn class_size(class: usize) -> usize {
    if class >= CLASSES {
        return (class - CLASSES + 1) * UNIT;
    }
    if class < 8 {
        return (class + 1) * 512;
    }
    let pow = 12 + (class - 8) / 4;
    let step = 1usize << (pow - 2);
    (1 << pow) + step * ((class - 8) % 4 + 1)
}

fn layout(class: usize) -> Layout {
    Layout::from_size_align(class_size(class), BUF_ALIGN)
        .expect("class sizes are far below isize::MAX and the alignment is a power of two")
}

/// An owner of buffers that it can release.
pub trait Spare {
    /// Releases buffers of about `bytes`, or all it has, immediately. Returns the number of bytes
    /// released; 0 when it has none. Must not allocate from the pool.
    fn give_up(&self, bytes: usize) -> usize;
}

/// A buffer's memory and the index of its share count.
#[derive(Clone, Copy)]
struct Memory {
    ptr: NonNull<u8>,
    count: u32,
}

/// The share counts of all buffers.
#[derive(Default)]
struct Counts {
    counts: Vec<u32>,
    /// Indices of buffers that were returned to the allocator.
    free: Vec<u32>,
}

impl Counts {
    fn place(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.counts.push(0);
            // Each belongs to a buffer of at least 512 bytes.
            u32::try_from(self.counts.len() - 1).expect("fewer than 2^32 buffers in a pool")
        })
    }
}

struct PoolState {
    limit: Cell<usize>,
    /// Bytes in buffers that are handed out.
    used: Cell<usize>,
    /// Bytes in buffers on the free lists.
    free_bytes: Cell<usize>,
    /// Sum of all [`Promise`]s in bytes.
    promised: Cell<usize>,
    free: RefCell<Vec<Vec<Memory>>>,
    counts: RefCell<Counts>,
    /// A buffer or a promise was returned.
    freed: Event,
    spares: RefCell<Vec<Weak<dyn Spare>>>,
    /// Memory that is registered with the core's ring. The limit does not include it.
    region: Option<Rc<Region>>,
}

impl PoolState {
    /// Reclaims about `bytes` from spares; false when they have none.
    fn reclaim(&self, bytes: usize) -> bool {
        let mut given = 0;
        for at in 0.. {
            // Not borrowed meanwhile: the call returns buffers, and may register other spares.
            let Some(spare) = self.spares.borrow().get(at).cloned() else { break };
            if let Some(spare) = spare.upgrade() {
                given += spare.give_up(bytes - given);
            }
            if given >= bytes {
                break;
            }
        }
        given > 0
    }

    fn put(&self, memory: Memory, class: usize) {
        if class >= CLASSES {
            self.put_registered(memory, class - CLASSES + 1);
        } else {
            let size = class_size(class);
            self.used.set(self.used.get() - size);
            self.free_bytes.set(self.free_bytes.get() + size);
            self.free.borrow_mut()[class].push(memory);
        }
        self.freed.notify_all();
    }

    fn put_registered(&self, memory: Memory, units: usize) {
        if let Some(region) = &self.region {
            region.give(memory.ptr, units);
        }
        self.counts.borrow_mut().free.push(memory.count);
    }

    /// Frees recycled buffers until `need` bytes fit under the limit.
    fn trim(&self, need: usize) {
        let mut free = self.free.borrow_mut();
        for class in (0..CLASSES).rev() {
            while self.used.get() + self.free_bytes.get() + need > self.limit.get() {
                let Some(Memory { ptr, count }) = free[class].pop() else { break };
                self.free_bytes.set(self.free_bytes.get() - class_size(class));
                self.counts.borrow_mut().free.push(count);
                // SAFETY: `ptr` came from `alloc_zeroed` with `layout(class)`: free lists are
                // indexed by the class the buffer was made for, and it left the list just now.
                unsafe { dealloc(ptr.as_ptr(), layout(class)) };
            }
        }
    }
}

impl Drop for PoolState {
    fn drop(&mut self) {
        for (class, list) in self.free.get_mut().iter_mut().enumerate() {
            for Memory { ptr, .. } in list.drain(..) {
                // SAFETY: as in `trim`; handed-out buffers keep the pool alive, so none is in use.
                unsafe { dealloc(ptr.as_ptr(), layout(class)) };
            }
        }
    }
}

/// A core's pool of buffers, with a budget in bytes. Clones share it.
#[derive(Clone)]
pub struct Pool(Rc<PoolState>);

impl Pool {
    /// An empty pool that will never hold more than `limit` bytes of buffers.
    pub fn new(limit: usize) -> Pool {
        Pool::with_region(limit, None)
    }

    /// The same; `limit` includes the bytes of a region, which is registered with the core's ring.
    pub(crate) fn with_region(limit: usize, region: Option<Rc<Region>>) -> Pool {
        let limit = limit - region.as_ref().map_or(0, |_| REGION_BYTES);
        Pool(Rc::new(PoolState {
            limit: Cell::new(limit),
            used: Cell::new(0),
            free_bytes: Cell::new(0),
            promised: Cell::new(0),
            free: RefCell::new((0..CLASSES).map(|_| Vec::new()).collect()),
            counts: RefCell::default(),
            freed: Event::new(),
            spares: RefCell::default(),
            region,
        }))
    }

    /// A buffer of `len` bytes that is registered with the core's ring, if one is free.
    pub(crate) fn alloc_registered(&self, len: usize) -> Option<Buf> {
        let (ptr, units) = self.0.region.as_ref()?.take(len)?;
        let memory = Memory { ptr, count: self.0.counts.borrow_mut().place() };
        Some(Buf { memory, class: (CLASSES + units - 1) as u32, len, pool: self.clone() })
    }

    /// Bytes registered with the core's ring, beside the limit.
    pub fn registered(&self) -> usize {
        self.0.region.as_ref().map_or(0, |_| REGION_BYTES)
    }

    /// A buffer of `len` bytes, or `None` when the budget is used up or `len > BUF_MAX`.
    pub fn alloc(&self, len: usize) -> Option<Buf> {
        if len > BUF_MAX {
            return None;
        }
        let class = class_of(len);
        let size = class_size(class);
        let inner = &*self.0;
        let recycled = inner.free.borrow_mut()[class].pop();
        let memory = match recycled {
            Some(memory) => {
                inner.free_bytes.set(inner.free_bytes.get() - size);
                memory
            }
            None => {
                if inner.used.get() + inner.free_bytes.get() + size > inner.limit.get() {
                    inner.trim(size);
                    if inner.used.get() + inner.free_bytes.get() + size > inner.limit.get() {
                        return None;
                    }
                }
                // SAFETY: `layout` has a non-zero size.
                let ptr = unsafe { alloc_zeroed(layout(class)) };
                let ptr = NonNull::new(ptr).unwrap_or_else(|| handle_alloc_error(layout(class)));
                Memory { ptr, count: inner.counts.borrow_mut().place() }
            }
        };
        inner.used.set(inner.used.get() + size);
        Some(Buf { memory, class: class as u32, len, pool: self.clone() })
    }

    /// The same, but spares release their buffers if needed.
    pub fn alloc_reclaiming(&self, len: usize) -> Option<Buf> {
        loop {
            if let Some(buf) = self.alloc(len) {
                return Some(buf);
            }
            // Reclaim more than the need, for the next requests. Released buffers may be shared and
            // still in use, so repeat until there is room or nothing left.
            if !self.could_hold(len) || !self.0.reclaim(2 * len + RECLAIM_BYTES) {
                return None;
            }
        }
    }

    /// Room for `bytes` in buffers, beside all other promises; `None` when there is none now. The
    /// only promise is always granted.
    pub(crate) fn promise(&self, bytes: usize) -> Option<Promise> {
        let inner = &*self.0;
        let promised = inner.promised.get();
        let limit = inner.limit.get() - inner.limit.get() / UNPROMISED;
        let excess = || {
            let wanted = inner.used.get().saturating_add(promised).saturating_add(bytes);
            wanted.saturating_sub(limit)
        };
        while promised > 0 && excess() > 0 {
            if !inner.reclaim(excess()) {
                return None;
            }
        }
        inner.promised.set(promised.saturating_add(bytes));
        Some(Promise { pool: self.clone(), bytes })
    }

    /// Counts memory that is not in buffers; nothing at first.
    pub fn hold(&self) -> Held {
        Held { pool: self.clone(), bytes: Cell::new(0) }
    }

    /// Registers `spare`: its buffers are reclaimed when memory is short, as long as it lives.
    pub fn add_spare(&self, spare: Weak<dyn Spare>) {
        let mut spares = self.0.spares.borrow_mut();
        spares.retain(|spare| spare.strong_count() > 0);
        spares.push(spare);
    }

    /// Notified after each return of a buffer or a promise.
    pub(crate) fn freed(&self) -> &Event {
        &self.0.freed
    }

    /// Bytes in buffers in use, without registered ones.
    pub fn used(&self) -> usize {
        self.0.used.get()
    }

    /// The budget in bytes, without registered memory.
    pub fn limit(&self) -> usize {
        self.0.limit.get()
    }

    /// Whether a buffer of `len` bytes could ever be handed out.
    pub fn could_hold(&self, len: usize) -> bool {
        len <= BUF_MAX && class_size(class_of(len)) <= self.0.limit.get()
    }
}

/// Room in a pool for buffers about to be taken; see the module text. Buffers that its holder has
/// already taken count twice until it is dropped.
pub struct Promise {
    pool: Pool,
    bytes: usize,
}

impl Drop for Promise {
    fn drop(&mut self) {
        let promised = &self.pool.0.promised;
        promised.set(promised.get() - self.bytes);
        self.pool.0.freed.notify_all();
    }
}

/// Memory outside the pool's buffers that counts against its budget until this is dropped.
pub struct Held {
    pool: Pool,
    bytes: Cell<usize>,
}

impl Held {
    /// Counts `bytes` instead of what was counted before. Returns false, and changes nothing, if
    /// they do not fit under the limit. Fewer bytes always fit.
    pub fn set(&self, bytes: usize) -> bool {
        let (state, before) = (&*self.pool.0, self.bytes.get());
        if let Some(more) = bytes.checked_sub(before).filter(|&more| more > 0) {
            let fits = || {
                let taken = state.used.get() + state.free_bytes.get();
                taken.saturating_add(more) <= state.limit.get()
            };
            if !fits() {
                state.trim(more);
            }
            if !fits() {
                return false;
            }
        }
        state.used.set(state.used.get() - before + bytes);
        self.bytes.set(bytes);
        if bytes < before {
            state.freed.notify_all();
        }
        true
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// An owned, aligned, initialised buffer of one core. It returns to its pool when dropped.
pub struct Buf {
    memory: Memory,
    class: u32,
    len: usize,
    pool: Pool,
}

impl Buf {
    /// Capacity in bytes.
    pub fn capacity(&self) -> usize {
        class_size(self.class as usize)
    }

    /// Sets the length, at most the capacity. All bytes up to the capacity are initialised.
    ///
    /// # Panics
    /// When `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "buffer length beyond its capacity");
        self.len = len;
    }

    /// Makes the buffer immutable and shareable within its core, without a copy.
    pub fn share(self) -> SharedBuf {
        let this = std::mem::ManuallyDrop::new(self);
        let shared = SharedBuf {
            memory: this.memory,
            class: this.class,
            len: this.len,
            // SAFETY: `this` is never dropped, so its pool handle is moved out exactly once.
            pool: unsafe { std::ptr::read(&this.pool) },
        };
        shared.pool.0.counts.borrow_mut().counts[shared.memory.count as usize] = 1;
        shared
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `ptr` points to `capacity()` initialised bytes (zeroed when made, only ever
        // overwritten with bytes) owned by `self`, and `len <= capacity()` by `set_len`/`alloc`.
        unsafe { std::slice::from_raw_parts(self.memory.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` is the only handle, a `Buf` is never shared.
        unsafe { std::slice::from_raw_parts_mut(self.memory.ptr.as_ptr(), self.len) }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        self.pool.0.put(self.memory, self.class as usize);
    }
}

/// An immutable buffer with several holders on one core. Cloning counts and does not copy.
pub struct SharedBuf {
    memory: Memory,
    class: u32,
    len: usize,
    pool: Pool,
}

impl SharedBuf {
    /// Bytes of memory that the buffer occupies.
    pub fn footprint(&self) -> usize {
        class_size(self.class as usize)
    }
}

impl Clone for SharedBuf {
    fn clone(&self) -> SharedBuf {
        let count = &mut self.pool.0.counts.borrow_mut().counts[self.memory.count as usize];
        *count = count.checked_add(1).expect("fewer than 2^32 holders of one buffer");
        SharedBuf { memory: self.memory, class: self.class, len: self.len, pool: self.pool.clone() }
    }
}

impl Drop for SharedBuf {
    fn drop(&mut self) {
        let left = {
            let count = &mut self.pool.0.counts.borrow_mut().counts[self.memory.count as usize];
            *count -= 1;
            *count
        };
        if left == 0 {
            self.pool.0.put(self.memory, self.class as usize);
        }
    }
}

impl Deref for SharedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: as in `Buf::deref`. There are no writers: `share` consumed the only `Buf`, and a
        // buffer is recycled only when its count has reached zero.
        unsafe { std::slice::from_raw_parts(self.memory.ptr.as_ptr(), self.len) }
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf({} of {})", self.len, self.capacity())
    }
}

impl std::fmt::Debug for SharedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedBuf({} of {})", self.len, self.footprint())
    }
}

/// A part of a [`SharedBuf`], such as a value or a message, without a copy.
#[derive(Clone, Debug)]
pub struct Slice {
    buf: SharedBuf,
    start: u32,
    len: u32,
}

impl Slice {
    /// The bytes `range` of `buf`.
    ///
    /// # Panics
    /// When the range lies outside the buffer.
    pub fn new(buf: SharedBuf, range: Range<usize>) -> Slice {
        assert!(range.start <= range.end && range.end <= buf.len(), "slice outside its buffer");
        Slice { start: range.start as u32, len: (range.end - range.start) as u32, buf }
    }

    /// A part of this slice.
    ///
    /// # Panics
    /// When the range lies outside the slice.
    pub fn slice(&self, range: Range<usize>) -> Slice {
        assert!(range.start <= range.end && range.end <= self.len as usize, "slice outside slice");
        Slice {
            buf: self.buf.clone(),
            start: self.start + range.start as u32,
            len: (range.end - range.start) as u32,
        }
    }

    /// Bytes of memory that the underlying buffer occupies.
    pub fn footprint(&self) -> usize {
        self.buf.footprint()
    }
}

impl Deref for Slice {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buf[self.start as usize..(self.start + self.len) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_beside_the_buffers_counts_until_it_is_released() {
        let pool = Pool::new(16 << 10);
        drop(pool.alloc(8 << 10));
        let held = pool.hold();
        // The recycled buffer makes room, one in use does not.
        assert!(held.set(12 << 10) && pool.alloc(8 << 10).is_none());
        let buf = pool.alloc(4 << 10).unwrap();
        assert!(!held.set(13 << 10), "a larger amount does not fit");
        assert_eq!(pool.used(), 16 << 10);
        assert!(held.set(8 << 10) && pool.alloc(4 << 10).is_some());
        drop((held, buf));
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn promises_fit_together_or_there_is_only_one() {
        let pool = Pool::new(16 << 10);
        let first = pool.promise(1 << 20).unwrap();
        assert!(pool.promise(512).is_none());
        drop(first);
        let small = pool.promise(4 << 10).unwrap();
        let held = pool.alloc(4 << 10).unwrap();
        assert!(pool.promise(8 << 10).is_none(), "a sixteenth is never promised");
        let other = pool.promise(7 << 10).unwrap();
        drop((small, held));
        assert!(pool.promise(8 << 10).is_some());
        drop(other);
        assert_eq!(pool.0.promised.get(), 0);
    }

    #[test]
    fn every_length_fits_its_class_and_wastes_at_most_a_quarter_beyond_4k() {
        for len in (1..200_000).chain([1 << 20, (1 << 20) + 1, BUF_MAX - 1, BUF_MAX]) {
            let class = class_of(len);
            assert!(class < CLASSES, "{len}");
            assert!(class_size(class) >= len);
            assert!(class == 0 || class_size(class - 1) < len, "{len} has a smaller class");
            assert_eq!(class_size(class) % 512, 0);
            if len > 4096 {
                assert!(class_size(class) <= len + len / 4 + 1);
            }
        }
    }

    #[test]
    fn the_budget_holds_and_free_buffers_of_other_classes_make_room() {
        let pool = Pool::new(16 << 10);
        let a = pool.alloc(8192).unwrap();
        let b = pool.alloc(8192).unwrap();
        assert!(pool.alloc(1).is_none());
        drop(a);
        let small: Vec<Buf> = (0..16).map(|_| pool.alloc(512).unwrap()).collect();
        assert!(pool.alloc(512).is_none());
        assert_eq!(pool.used(), 16 << 10);
        drop((b, small));
        assert_eq!(pool.used(), 0);
        assert!(pool.alloc(16 << 10).is_some());
    }

    /// A spare with buffers.
    struct Keeper(RefCell<Vec<SharedBuf>>);

    impl Spare for Keeper {
        fn give_up(&self, bytes: usize) -> usize {
            let mut given = 0;
            while given < bytes
                && let Some(buf) = { self.0.borrow_mut().pop() }
            {
                given += buf.footprint();
            }
            given
        }
    }

    #[test]
    fn spares_release_buffers_that_are_needed_now() {
        let pool = Pool::new(8 << 20);
        let keep = |count: usize| -> Rc<Keeper> {
            let bufs = (0..count).map(|_| pool.alloc(1 << 20).unwrap().share()).collect();
            let keeper = Rc::new(Keeper(RefCell::new(bufs)));
            let weak: Weak<Keeper> = Rc::downgrade(&keeper);
            pool.add_spare(weak);
            keeper
        };
        let (first, second) = (keep(4), keep(3));
        let in_use = second.0.borrow().last().cloned();
        let own = pool.alloc(1 << 20).unwrap();
        assert!(pool.alloc(1).is_none(), "spares are not asked");
        assert!(pool.alloc_reclaiming(1).is_some());
        assert!(pool.alloc_reclaiming(8 << 20).is_none(), "more than the spares have");
        assert!(first.0.borrow().is_empty() && second.0.borrow().is_empty());
        drop(own);
        assert!(pool.alloc_reclaiming(7 << 20).is_some() && in_use.is_some());
        assert!(pool.alloc_reclaiming((8 << 20) + 1).is_none());
        drop((first, second));
        assert!(pool.alloc_reclaiming(8 << 20).is_none(), "one is in use");
    }

    #[test]
    fn common_sizes_are_classes() {
        for len in [512, 4096, 8192, 64 << 10, 256 << 10, 1 << 20] {
            assert_eq!(class_size(class_of(len)), len);
        }
    }

    #[test]
    fn registered_buffers_are_beside_the_limit_and_return_with_their_last_holder() {
        let region = Region::for_pool(256 << 20).map(Rc::new);
        let pool = Pool::with_region(256 << 20, region);
        assert_eq!(pool.limit() + pool.registered(), 256 << 20);
        for _ in 0..2 {
            let mut all: Vec<SharedBuf> = Vec::new();
            while let Some(mut buf) = pool.alloc_registered(5000) {
                assert_eq!((buf.len(), buf.capacity()), (5000, 8192));
                buf.fill(all.len() as u8);
                all.push(buf.share());
            }
            assert_eq!(all.len() * 8192, pool.registered());
            assert_eq!(pool.used(), 0);
            let last = Slice::new(all.last().unwrap().clone(), 10..20);
            let of_its_own = |(n, buf): (usize, &SharedBuf)| buf.iter().all(|&b| b == n as u8);
            assert!(all.iter().enumerate().all(of_its_own));
            drop(all);
            assert_eq!(&last[..], [255; 10]);
            let free = std::iter::from_fn(|| pool.alloc_registered(5000)).collect::<Vec<_>>();
            assert_eq!(free.len(), 255);
        }
        let counts = pool.0.counts.borrow();
        assert_eq!(counts.counts.len(), counts.free.len(), "each count is used again");
        assert!(Pool::new(1 << 20).alloc_registered(1).is_none());
    }

    #[test]
    fn a_shared_buffer_returns_with_its_last_holder() {
        let pool = Pool::new(1 << 20);
        let mut buf = pool.alloc(5000).unwrap();
        buf[..3].copy_from_slice(b"abc");
        let shared = buf.share();
        let slice = Slice::new(shared.clone(), 1..3);
        drop(shared);
        assert_eq!(&slice[..], b"bc");
        assert_eq!(&slice.slice(1..2)[..], b"c");
        assert!(pool.used() > 0);
        drop(slice);
        assert_eq!(pool.used(), 0);
    }
}

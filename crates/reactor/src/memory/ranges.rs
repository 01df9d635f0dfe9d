//! A table of address ranges that a signal handler may read at any instant: nothing is locked, and
//! no entry is ever freed.
//!
//! The table is a list to which slots are only added. A free slot is reused, so the list is as long
//! as the largest number of ranges at one time. Because of the reuse a reader could see the start
//! of one range and the end of another. So each slot counts its changes (odd during a change), and
//! a reader uses the values only if the count stayed the same. A reader need not retry: it looks
//! for an address in a range that its thread is using, and that range does not change.

use loomable::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, UnsafeCell, mutant, weaken};

/// Room for one range.
pub(crate) struct RangeSlot {
    taken: AtomicBool,
    changes: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
    /// Written before the slot is in the list, and never again.
    next: UnsafeCell<*mut RangeSlot>,
}

/// The table.
pub(crate) struct RangeTable {
    first: AtomicPtr<RangeSlot>,
}

impl RangeTable {
    #[cfg(not(loom))]
    pub const fn new() -> RangeTable {
        RangeTable { first: AtomicPtr::new(std::ptr::null_mut()) }
    }

    #[cfg(loom)]
    pub fn new() -> RangeTable {
        RangeTable { first: AtomicPtr::new(std::ptr::null_mut()) }
    }

    fn each(&self) -> impl Iterator<Item = &'static RangeSlot> {
        // Acquire: a slot is seen with its first contents.
        let mut at = self.first.load(weaken(Ordering::Acquire, "ranges.first_relaxed"));
        std::iter::from_fn(move || {
            // SAFETY: slots are made by `add`, complete before they are in the list, and never
            // freed.
            let place = unsafe { at.as_ref() }?;
            // SAFETY: it is not written after it was published.
            at = place.next.with(|next| unsafe { *next });
            Some(place)
        })
    }

    /// Adds a range, which stays until [`RangeSlot::give_back`].
    pub fn add(&self, start: usize, end: usize) -> &'static RangeSlot {
        let free = self.each().find(|place| {
            let taken = place.taken.compare_exchange(
                false,
                true,
                weaken(Ordering::Acquire, "ranges.take_relaxed"),
                Ordering::Relaxed,
            );
            taken.is_ok()
        });
        if let Some(place) = free {
            place.lost.store(false, Ordering::Relaxed);
            place.set(start, end);
            return place;
        }
        let place = Box::into_raw(Box::new(RangeSlot {
            taken: AtomicBool::new(true),
            changes: AtomicUsize::new(0),
            start: AtomicUsize::new(start),
            end: AtomicUsize::new(end),
            lost: AtomicBool::new(false),
            next: UnsafeCell::new(std::ptr::null_mut()),
        }));
        let mut first = self.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: the slot is in no list yet, so no other thread knows it.
            unsafe { (*place).next.with_mut(|next| *next = first) };
            // Release: a reader finds the slot complete. Acquire: and the slots after it.
            let order = weaken(Ordering::AcqRel, "ranges.add_relaxed");
            match self.first.compare_exchange(first, place, order, Ordering::Acquire) {
                // SAFETY: just made, and never freed.
                Ok(_) => return unsafe { &*place },
                Err(other) => first = other,
            }
        }
    }

    /// The range that an address lies in.
    pub fn find(&self, address: usize) -> Option<(&'static RangeSlot, std::ops::Range<usize>)> {
        self.each().find_map(|place| {
            let range = place.range()?;
            range.contains(&address).then_some((place, range))
        })
    }
}

impl RangeSlot {
    fn set(&self, start: usize, end: usize) {
        let changes = self.changes.load(Ordering::Relaxed);
        assert!(changes.is_multiple_of(2), "a place is changed by one at a time");
        self.changes.store(changes + 1, Ordering::Relaxed);
        // Release: a reader of one of these numbers sees the odd count, or a later one, at its
        // second check.
        self.start.store(start, weaken(Ordering::Release, "ranges.start_relaxed"));
        self.end.store(end, weaken(Ordering::Release, "ranges.end_relaxed"));
        // Not a mutation site, and neither is its counterpart: loom shows no older number after
        // this count even when it is relaxed.
        self.changes.store(changes + 2, Ordering::Release);
    }

    /// The range here, if it is not being changed and not empty.
    fn range(&self) -> Option<std::ops::Range<usize>> {
        let before = self.changes.load(Ordering::Acquire);
        let start = self.start.load(weaken(Ordering::Acquire, "ranges.read_start_relaxed"));
        let end = self.end.load(weaken(Ordering::Acquire, "ranges.read_end_relaxed"));
        let same = self.changes.load(Ordering::Relaxed) == before;
        let whole = (same || mutant("ranges.unchecked")) && before.is_multiple_of(2);
        (whole && start < end).then_some(start..end)
    }

    /// Frees the slot: no thread looks for an address in the range.
    pub fn give_back(&self) {
        self.set(0, 0);
        self.taken.store(false, weaken(Ordering::Release, "ranges.give_back_relaxed"));
    }

    /// Marks the range as lost.
    pub fn lose(&self) {
        self.lost.store(true, Ordering::Release);
    }

    /// Whether the range is lost.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }
}

// SAFETY: `next` is written before the place is published and never after; the rest are atomics.
unsafe impl Send for RangeSlot {}
// SAFETY: as above.
unsafe impl Sync for RangeSlot {}

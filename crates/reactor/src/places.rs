//! Ranges of addresses in a table that a signal handler may look in at any instant: nothing is
//! locked, and nothing that was in the table is ever freed.
//!
//! The table is a list to which places are only added. A place that is not needed any more is used
//! again, so the list is as long as there ever were ranges at one time. Because of that reuse a
//! reader could meet the start of one range and the end of another, so each place counts its
//! changes (odd while it changes), and a reader believes what it read only if the count stayed the
//! same. It need not try again: whoever looks for an address holds the range that it lies
//! in, and that one does not change.

use loomable::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, UnsafeCell, mutant, weaken};

/// Room for one range.
pub(crate) struct Place {
    taken: AtomicBool,
    changes: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
    /// Written before the place is in the list, and never again.
    next: UnsafeCell<*mut Place>,
}

/// See the module text.
pub(crate) struct Places {
    first: AtomicPtr<Place>,
}

impl Places {
    #[cfg(not(loom))]
    pub const fn new() -> Places {
        Places { first: AtomicPtr::new(std::ptr::null_mut()) }
    }

    #[cfg(loom)]
    pub fn new() -> Places {
        Places { first: AtomicPtr::new(std::ptr::null_mut()) }
    }

    fn each(&self) -> impl Iterator<Item = &'static Place> {
        // What the place held when it was added is seen with it.
        let mut at = self.first.load(weaken(Ordering::Acquire, "places.first_relaxed"));
        std::iter::from_fn(move || {
            // SAFETY: places are made by `add`, whole before they are in the list, and never freed.
            let place = unsafe { at.as_ref() }?;
            // SAFETY: nobody writes it any more.
            at = place.next.with(|next| unsafe { *next });
            Some(place)
        })
    }

    /// Adds a range, which stays until [`Place::give_back`].
    pub fn add(&self, start: usize, end: usize) -> &'static Place {
        let free = self.each().find(|place| {
            let taken = place.taken.compare_exchange(
                false,
                true,
                weaken(Ordering::Acquire, "places.take_relaxed"),
                Ordering::Relaxed,
            );
            taken.is_ok()
        });
        if let Some(place) = free {
            place.lost.store(false, Ordering::Relaxed);
            place.set(start, end);
            return place;
        }
        let place = Box::into_raw(Box::new(Place {
            taken: AtomicBool::new(true),
            changes: AtomicUsize::new(0),
            start: AtomicUsize::new(start),
            end: AtomicUsize::new(end),
            lost: AtomicBool::new(false),
            next: UnsafeCell::new(std::ptr::null_mut()),
        }));
        let mut first = self.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: the place is in no list yet, so nobody else knows it.
            unsafe { (*place).next.with_mut(|next| *next = first) };
            // Release: whoever finds the place finds it whole. Acquire: and those behind it.
            let order = weaken(Ordering::AcqRel, "places.add_relaxed");
            match self.first.compare_exchange(first, place, order, Ordering::Acquire) {
                // SAFETY: just made, and never freed.
                Ok(_) => return unsafe { &*place },
                Err(other) => first = other,
            }
        }
    }

    /// The range that an address lies in.
    pub fn find(&self, address: usize) -> Option<(&'static Place, std::ops::Range<usize>)> {
        self.each().find_map(|place| {
            let range = place.range()?;
            range.contains(&address).then_some((place, range))
        })
    }
}

impl Place {
    fn set(&self, start: usize, end: usize) {
        let changes = self.changes.load(Ordering::Relaxed);
        assert!(changes.is_multiple_of(2), "a place is changed by one at a time");
        self.changes.store(changes + 1, Ordering::Relaxed);
        // Release: whoever reads one of these numbers sees the odd count, or a later one, when it
        // looks again.
        self.start.store(start, weaken(Ordering::Release, "places.start_relaxed"));
        self.end.store(end, weaken(Ordering::Release, "places.end_relaxed"));
        // No mutation site, as is its other half: loom shows no older number behind this count even
        // when it is relaxed.
        self.changes.store(changes + 2, Ordering::Release);
    }

    /// What is here, if nobody is changing it and it is not empty.
    fn range(&self) -> Option<std::ops::Range<usize>> {
        let before = self.changes.load(Ordering::Acquire);
        let start = self.start.load(weaken(Ordering::Acquire, "places.read_start_relaxed"));
        let end = self.end.load(weaken(Ordering::Acquire, "places.read_end_relaxed"));
        let same = self.changes.load(Ordering::Relaxed) == before;
        let whole = (same || mutant("places.unchecked")) && before.is_multiple_of(2);
        (whole && start < end).then_some(start..end)
    }

    /// The range is not needed any more: nobody looks for an address in it.
    pub fn give_back(&self) {
        self.set(0, 0);
        self.taken.store(false, weaken(Ordering::Release, "places.give_back_relaxed"));
    }

    /// Notes that something of the range is lost.
    pub fn lose(&self) {
        self.lost.store(true, Ordering::Release);
    }

    /// Whether something of it is.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }
}

// SAFETY: `next` is written before the place is published and never after; the rest are atomics.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

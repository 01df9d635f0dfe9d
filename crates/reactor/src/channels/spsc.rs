//! A bounded ring from one producer to one consumer: the channel between two cores.
//!
//! 1. [`Producer::push`] writes the value into the slot at the producer's private tail. The
//!    consumer does not see it yet.
//! 2. [`Producer::publish`], once per turn of the loop, stores the private tail into the shared one
//!    (Release). A batch costs one transfer of that cache line, which more than doubles the message
//!    rate compared with publishing each item.
//! 3. [`Consumer::pop`] compares its private head with the tail it loaded last, and loads the
//!    shared tail (Acquire) only when the two are equal. It moves the value out, then stores the
//!    shared head (Release), which frees the slot.
//! 4. The producer, likewise, loads the shared head (Acquire) only when the ring looks full by the
//!    head it loaded last.
//!
//! Ownership: the slots in `head .. shared tail` belong to the consumer, all others to the
//! producer. A side hands slots over only by its Release store and obtains them only by its Acquire
//! load. The two handles are unique (no `Clone`, `&mut self` to move an index), so each index has
//! one writer.
//!
//! Invariant: `0 <= tail - head <= capacity` in wrapping arithmetic. Indices count up and wrap at
//! `usize::MAX`; the number of slots is a power of two, so `index & mask` continues seamlessly
//! there.
//!
//! The ring does not wake a sleeping consumer: call
//! [`SleepFlag::must_wake`](crate::sleep::SleepFlag::must_wake) after `publish`. It does not tell
//! that the other side is gone: items sent to a dropped consumer are freed with the ring.

use std::mem::MaybeUninit;

use loomable::{Arc, AtomicUsize, CachePadded, Ordering, UnsafeCell, mutant, weaken};

/// The state that both ends share.
struct Ring<T> {
    /// Next slot to read; written by the consumer only.
    head: CachePadded<AtomicUsize>,
    /// One past the last published slot; written by the producer only.
    tail: CachePadded<AtomicUsize>,
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
    /// `slots.len() - 1`; the length is a power of two.
    mask: usize,
    /// Most slots in use: the requested size, which `slots.len()` rounds up.
    capacity: usize,
}

// SAFETY: through a shared `Ring` a thread moves a `T` in (producer) or out (consumer), never both
// at one slot at a time: the module's ownership rule, kept by the index protocol and proved in
// `tests/loom.rs`. No `&T` is ever handed out to two threads, so `T: Send` suffices.
unsafe impl<T: Send> Sync for Ring<T> {}

impl<T> Ring<T> {
    #[inline(always)]
    fn slot(&self, index: usize) -> &UnsafeCell<MaybeUninit<T>> {
        &self.slots[index & self.mask]
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        // Both handles are gone, and the Arc orders all their actions before this. The producer's
        // drop published all pushed items. Relaxed loads see the final indices.
        let mut head = self.head.load(Ordering::Relaxed);
        let tail = self.tail.load(Ordering::Relaxed);
        while head != tail {
            self.slot(head).with_mut(|slot| {
                // SAFETY: `head .. tail` are the slots that were written and published and not yet
                // moved out (the consumer stores `head` only after moving out), so the value is
                // initialized and dropped once. We have `&mut Ring`, so this access is exclusive.
                unsafe { (*slot).assume_init_drop() }
            });
            head = head.wrapping_add(1);
        }
    }
}

/// Makes a ring that holds up to `capacity` items.
///
/// # Panics
///
/// If `capacity` is 0 or more than half the address space: a mistake in the caller's constants.
pub fn ring<T>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    ring_from(capacity, 0)
}

/// [`ring`] with indices that begin at `start`, so that tests can cross the wrap-around.
pub(crate) fn ring_from<T>(capacity: usize, start: usize) -> (Producer<T>, Consumer<T>) {
    assert!(capacity > 0, "a ring needs at least one slot");
    let len = capacity
        .checked_next_power_of_two()
        .expect("the capacity of a ring fits the address space");
    let ring = Arc::new(Ring {
        head: CachePadded(AtomicUsize::new(start)),
        tail: CachePadded(AtomicUsize::new(start)),
        slots: (0..len).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
        mask: len - 1,
        capacity,
    });
    (
        Producer { ring: ring.clone(), tail: start, tail_published: start, head_seen: start },
        Consumer { ring, head: start, tail_seen: start },
    )
}

/// The sending end; see the module text.
pub struct Producer<T> {
    ring: Arc<Ring<T>>,
    /// One past the last pushed slot.
    tail: usize,
    /// The value of the shared tail.
    tail_published: usize,
    /// The shared head as last loaded: never ahead of the real one.
    head_seen: usize,
}

impl<T> Producer<T> {
    /// Puts `value` into the ring, invisible to the consumer until [`publish`](Self::publish); a
    /// full ring returns it.
    #[inline]
    pub fn push(&mut self, value: T) -> Result<(), T> {
        let limit = self.ring.capacity + usize::from(mutant("spsc.one_too_many"));
        if self.tail.wrapping_sub(self.head_seen) >= limit {
            self.head_seen =
                self.ring.head.load(weaken(Ordering::Acquire, "spsc.head_load_relaxed"));
            if self.tail.wrapping_sub(self.head_seen) >= limit {
                return Err(value);
            }
        }
        self.ring.slot(self.tail).with_mut(|slot| {
            // SAFETY: the slot is ours: `tail` is not below the shared tail, so the consumer does
            // not read it, and `tail - head_seen < capacity <= slots.len()` says that the item one
            // lap earlier lies below a head that we loaded with Acquire, that is, the consumer has
            // finished moving it out. `write` does not drop the old content, and there is none.
            unsafe { (*slot).write(value) };
        });
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// Makes all pushed items visible. True if there were new ones; the consumer may then need a
    /// wake-up.
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.tail == self.tail_published {
            return false;
        }
        self.ring.tail.store(self.tail, weaken(Ordering::Release, "spsc.tail_store_relaxed"));
        self.tail_published = self.tail;
        true
    }

    /// [`push`](Self::push) and [`publish`](Self::publish) in one, for a single message.
    #[inline]
    pub fn push_published(&mut self, value: T) -> Result<(), T> {
        self.push(value)?;
        self.publish();
        Ok(())
    }

    /// Number of items pushed and not yet published.
    #[inline]
    pub fn staged(&self) -> usize {
        self.tail.wrapping_sub(self.tail_published)
    }

    /// Whether `n` more items fit. Loads the other end's index only when the ring looks too full.
    #[inline]
    pub fn fits(&mut self, n: usize) -> bool {
        let fits = |tail: usize, seen| tail.wrapping_sub(seen) + n <= self.ring.capacity;
        fits(self.tail, self.head_seen) || {
            // Acquire: `push` relies on the value loaded here.
            self.head_seen = self.ring.head.load(Ordering::Acquire);
            fits(self.tail, self.head_seen)
        }
    }

    /// Number of items that fit now; the consumer can only increase it.
    #[inline]
    pub fn room(&mut self) -> usize {
        self.head_seen = self.ring.head.load(Ordering::Acquire);
        self.ring.capacity - self.tail.wrapping_sub(self.head_seen)
    }

    /// Number of items that a full ring holds.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.ring.capacity
    }
}

impl<T> Drop for Producer<T> {
    /// Publishes all pushed items, which are then delivered.
    fn drop(&mut self) {
        if !mutant("spsc.drop_unpublished") {
            self.publish();
        }
    }
}

impl<T> std::fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Producer")
            .field("tail", &self.tail)
            .field("staged", &self.staged())
            .finish_non_exhaustive()
    }
}

/// The receiving end; see the module text.
pub struct Consumer<T> {
    ring: Arc<Ring<T>>,
    /// Next slot to read.
    head: usize,
    /// The shared tail as last loaded: never ahead of the real one.
    tail_seen: usize,
}

impl<T> Consumer<T> {
    /// Takes the oldest published item.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        if self.head == self.tail_seen {
            self.tail_seen =
                self.ring.tail.load(weaken(Ordering::Acquire, "spsc.tail_load_relaxed"));
            if self.head == self.tail_seen {
                return None;
            }
        }
        let early = mutant("spsc.free_before_read");
        if early {
            self.ring.head.store(self.head.wrapping_add(1), Ordering::Release);
        }
        let value = self.ring.slot(self.head).with(|slot| {
            // SAFETY: `head` lies below a tail that we loaded with Acquire, so the producer's write
            // of this slot happened before and it writes there again only after our
            // Release store below. The index moves on, so the value is moved out once.
            unsafe { (*slot).assume_init_read() }
        });
        self.head = self.head.wrapping_add(1);
        if !early {
            self.ring.head.store(self.head, weaken(Ordering::Release, "spsc.head_store_relaxed"));
        }
        Some(value)
    }

    /// Whether [`pop`](Self::pop) would return an item: one load, no side effect. For the check
    /// before sleep, which the caller's fence precedes.
    #[inline]
    pub fn pure_check(&self) -> bool {
        // Relaxed: only the answer is used, no slot; `pop` loads again with Acquire. And the tail
        // never goes back.
        self.head != self.tail_seen || self.ring.tail.load(Ordering::Relaxed) != self.head
    }

    /// Number of items that a full ring holds.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.ring.capacity
    }
}

impl<T> std::fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Consumer").field("head", &self.head).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
#[expect(clippy::disallowed_methods, reason = "the stress test needs real threads")]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn pushed_items_are_invisible_until_published() {
        let (mut tx, mut rx) = ring(4);
        tx.push(1).unwrap();
        tx.push(2).unwrap();
        assert!(!rx.pure_check());
        assert_eq!((rx.pop(), tx.staged()), (None, 2));
        assert!(tx.publish());
        assert!(!tx.publish(), "nothing new");
        assert!(rx.pure_check());
        assert_eq!((rx.pop(), rx.pop(), rx.pop()), (Some(1), Some(2), None));
        assert!(!rx.pure_check());
    }

    #[test]
    fn a_full_ring_gives_the_item_back() {
        // 3 is not a power of two: the bound is the requested capacity, not the rounded-up slot
        // count.
        let (mut tx, mut rx) = ring(3);
        for i in 0..3 {
            tx.push_published(i).unwrap();
        }
        assert_eq!((tx.push(3), tx.room(), tx.capacity(), rx.capacity()), (Err(3), 0, 3, 3));
        assert_eq!(rx.pop(), Some(0));
        assert_eq!(tx.room(), 1);
        tx.push_published(3).unwrap();
        assert_eq!(tx.push(4), Err(4));
        assert_eq!([rx.pop(), rx.pop(), rx.pop(), rx.pop()], [Some(1), Some(2), Some(3), None]);
    }

    #[test]
    fn indices_wrap_around_without_a_seam() {
        for capacity in 1..=9 {
            for back in 0..20 {
                let (mut tx, mut rx) = ring_from(capacity, usize::MAX - back);
                let (mut sent, mut got) = (0, 0);
                for round in 0..40 {
                    // Fill by a changing amount, so that the wrap is met at every fill level.
                    for _ in 0..=(round % capacity) {
                        if tx.push(sent).is_ok() {
                            sent += 1;
                        }
                    }
                    assert!(sent - got <= capacity);
                    tx.publish();
                    while rx.pure_check() && got + round % 2 < sent {
                        assert_eq!(rx.pop(), Some(got));
                        got += 1;
                    }
                }
                assert!(sent > 20);
            }
        }
    }

    #[test]
    fn dropping_the_ring_frees_what_is_left_once() {
        let item = Rc::new(());
        let (mut tx, mut rx) = ring_from(4, usize::MAX - 1);
        for _ in 0..4 {
            tx.push(item.clone()).unwrap();
        }
        tx.publish();
        drop(rx.pop());
        tx.push(item.clone()).unwrap(); // stays unpublished: the producer's drop sends it
        assert_eq!(Rc::strong_count(&item), 5);
        drop(tx);
        assert_eq!(Rc::strong_count(&item), 5, "the consumer may still read");
        drop(rx.pop());
        drop(rx);
        assert_eq!(Rc::strong_count(&item), 1);
    }

    #[test]
    fn values_of_any_alignment_and_size_pass() {
        #[derive(Debug, PartialEq)]
        #[repr(align(64))]
        struct Wide([u64; 16]);
        let (mut tx, mut rx) = ring(2);
        tx.push_published(Wide([7; 16])).unwrap();
        assert_eq!(rx.pop(), Some(Wide([7; 16])));
        let (mut tx, mut rx) = ring(2);
        tx.push_published(()).unwrap();
        assert_eq!((rx.pop(), rx.pop()), (Some(()), None));
    }

    #[test]
    fn a_million_items_cross_threads_in_order() {
        let count = if cfg!(miri) { 1_000_u64 } else { 1_000_000 };
        let (mut tx, mut rx) = ring_from::<Box<u64>>(8, usize::MAX - 1000);
        let sender = std::thread::spawn(move || {
            for i in 0..count {
                let mut item = Box::new(i);
                while let Err(back) = tx.push(item) {
                    tx.publish();
                    item = back;
                    std::thread::yield_now();
                }
                if i % 3 == 0 {
                    tx.publish();
                }
            }
        });
        for i in 0..count {
            let got = loop {
                match rx.pop() {
                    Some(item) => break *item,
                    None => std::thread::yield_now(),
                }
            };
            assert_eq!(got, i);
        }
        sender.join().unwrap();
        assert_eq!(rx.pop(), None);
    }
}

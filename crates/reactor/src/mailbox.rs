//! An ordered, bounded queue from any thread to one owner, which stands in its owner's run queue at most once.
//!
//! A shard's writes and commands come through one of these. There is no lock and no thread that belongs to a mailbox:
//! a counter decides who has to schedule it.
//!
//! 1. [`Mailbox::post`] reserves a place (or gives the item back: full), pushes a node on a stack by compare-exchange,
//!    and *then* counts it by `fetch_add`. Whoever raised the count from 0 is told [`Scheduled::Yes`] and puts the
//!    owner into its core's run queue; everybody else is done.
//! 2. In its turn the owner calls [`Owner::take`] with a limit m: `n = min(m, count)`. It takes the whole stack by one
//!    swap when its private list is empty, turns it round (oldest first), runs n items, and subtracts n.
//! 3. If the count was larger than n, more has come: [`Scheduled::Yes`], the owner stays in the run queue. If it was
//!    equal, the mailbox is at rest, and the next to post schedules it again.
//!
//! So the count is a baton: from "raised from 0" until "back to 0" exactly one turn is scheduled or running. In
//! particular the last thing a turn does is the subtraction; it touches nothing afterwards.
//!
//! **Why the owner must not run more than the count says**, although the nodes are there: a node is on the stack
//! before its producer has counted it. Run early, its `fetch_add` would later meet a 0, report [`Scheduled::Yes`] for
//! an item already gone, and before that the subtraction would have carried the count below zero. What the stack holds
//! beyond the count therefore waits in the private list.
//!
//! Order: items are run in the order of the pushes, hence in order for each poster.
//!
//! Bound: count and reservations share one word, so the owner's one subtraction returns both. `reserved <= capacity`
//! always; a place is free again when the turn that ran its item ends.
//!
//! Closing: when the owner is dropped, posting fails, and what was under way is freed without waiting for the last
//! handle, as somebody may be waiting for the answer that such an item carries.
//!
//! Costs: a post allocates its node and makes two read-modify-writes on the word and one on the stack; a turn costs the
//! owner two, whatever n is.

use std::{fmt, mem, ptr};

use crate::sync::{Arc, AtomicPtr, AtomicU64, CachePadded, Ordering, UnsafeCell, mutant, weaken};

/// In `Shared::word`: one counted item.
const COUNTED: u64 = 1;
/// In `Shared::word`: one reserved place.
const RESERVED: u64 = 1 << 32;
/// In `Shared::word`: the owner is gone.
const CLOSED: u64 = 1 << 63;
/// The largest capacity: far below both fields' width, so that neither can run into its neighbour.
const CAPACITY_MAX: u32 = 1 << 30;

const fn counted(word: u64) -> u64 {
    word & (RESERVED - 1)
}

const fn reserved(word: u64) -> u64 {
    (word & !CLOSED) / RESERVED
}

struct Node<T> {
    value: T,
    /// Towards older nodes while on the stack; towards newer ones in the owner's list.
    next: UnsafeCell<*mut Node<T>>,
}

struct Shared<T> {
    /// Bits 0..32 counted items, bits 32..63 reserved places, bit 63 closed.
    word: CachePadded<AtomicU64>,
    /// The newest node that the owner has not yet fetched.
    newest: CachePadded<AtomicPtr<Node<T>>>,
    capacity: u64,
}

// SAFETY: `Shared` is atomics and a number; a `T` enters through `post(&self)` on one thread and leaves on the
// owner's, or is dropped on whichever thread lets go last: moves, for which `T: Send` suffices. No `&T` is shared.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Takes all nodes off the stack, oldest first.
    fn fetch(&self) -> List<T> {
        let mut node =
            self.newest.swap(ptr::null_mut(), weaken(Ordering::Acquire, "mailbox.fetch_relaxed"));
        let mut list = List { oldest: ptr::null_mut() };
        while !node.is_null() {
            // SAFETY: every pointer reachable from `newest` came from `Box::into_raw` in `post`; its poster's Release
            // exchange happened before our Acquire swap (later pushes continue the release sequence, being
            // read-modify-writes), so `next` is written; and the swap gave this chain to us alone.
            let next = unsafe { &(*node).next };
            let older = next.with_mut(|next| {
                // SAFETY: as above: initialized, and nobody else has access.
                unsafe { mem::replace(&mut *next, list.oldest) }
            });
            list.oldest = node;
            node = older;
        }
        list
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // The last handle: whatever it is, nobody else has access. Normally the owner's drop has emptied it.
        drop(self.fetch());
    }
}

/// Nodes that one thread has to itself, oldest first.
struct List<T> {
    /// Null, or a pointer from `Box::into_raw` that this list owns, with the same for its `next`.
    oldest: *mut Node<T>,
}

// SAFETY: the list owns its nodes as a `Vec<T>` owns its items: moving it moves the `T`s and nothing is shared.
unsafe impl<T: Send> Send for List<T> {}
// SAFETY: no method gives access through `&List`.
unsafe impl<T: Send> Sync for List<T> {}

impl<T> List<T> {
    fn pop(&mut self) -> Option<T> {
        if self.oldest.is_null() {
            return None;
        }
        // SAFETY: by the field's invariant the pointer came from `Box::into_raw` and is owned by this list; moving
        // `oldest` on in the next line gives that ownership up, so the box is made once.
        let node = unsafe { Box::from_raw(self.oldest) };
        // SAFETY: we own the node.
        self.oldest = node.next.with(|next| unsafe { *next });
        Some(node.value)
    }
}

impl<T> Drop for List<T> {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

/// Makes a mailbox for up to `capacity` items, posted or being run.
///
/// # Panics
///
/// If `capacity` is 0 or above 2^30: a mistake in the caller's constants.
pub fn mailbox<T>(capacity: usize) -> (Mailbox<T>, Owner<T>) {
    let capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
    assert!((1..=CAPACITY_MAX).contains(&capacity), "the capacity of a mailbox is from 1 to 2^30");
    let shared = Arc::new(Shared {
        word: CachePadded(AtomicU64::new(0)),
        newest: CachePadded(AtomicPtr::new(ptr::null_mut())),
        capacity: capacity.into(),
    });
    (
        Mailbox { shared: shared.clone() },
        Owner { shared, list: List { oldest: ptr::null_mut() }, run: 0 },
    )
}

/// Whether the caller has to put the mailbox's owner into its core's run queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a mailbox that nobody schedules is never emptied"]
pub enum Scheduled {
    /// The caller has to: the owner is not queued and there is work.
    Yes,
    /// Nothing to do: the owner is queued already, or there is no work.
    No,
}

/// Why an item was not accepted; it comes back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PostError<T> {
    /// The mailbox is full: try again when the owner has had a turn.
    Full(T),
    /// The owner is gone for good.
    Closed(T),
}

impl<T> PostError<T> {
    /// The item that was not accepted.
    pub fn into_inner(self) -> T {
        match self {
            Self::Full(value) | Self::Closed(value) => value,
        }
    }
}

impl<T> fmt::Debug for PostError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full(_) => "Full(..)",
            Self::Closed(_) => "Closed(..)",
        })
    }
}

impl<T> fmt::Display for PostError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full(_) => "the mailbox is full",
            Self::Closed(_) => "the owner of the mailbox is gone",
        })
    }
}

impl<T> std::error::Error for PostError<T> {}

/// The posting end: cheap to clone, usable from any thread.
pub struct Mailbox<T> {
    shared: Arc<Shared<T>>,
}

impl<T> Clone for Mailbox<T> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<T> Mailbox<T> {
    /// Appends `value`. On [`Scheduled::Yes`] the caller must see to it that the owner gets a turn.
    pub fn post(&self, value: T) -> Result<Scheduled, PostError<T>> {
        let shared = &*self.shared;
        let mut word = shared.word.load(Ordering::Relaxed);
        loop {
            if word & CLOSED != 0 {
                return Err(PostError::Closed(value));
            }
            if reserved(word) >= shared.capacity {
                return Err(PostError::Full(value));
            }
            if mutant("mailbox.reserve_unchecked") {
                shared.word.fetch_add(RESERVED, Ordering::Relaxed);
                break;
            }
            // Relaxed: the reservation guards a number, no memory.
            match shared.word.compare_exchange_weak(
                word,
                word + RESERVED,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => break,
                Err(now) => word = now,
            }
        }
        if mutant("mailbox.count_before_push") {
            let before = shared.word.fetch_add(COUNTED, Ordering::AcqRel);
            self.push(value);
            return Ok(if counted(before) == 0 { Scheduled::Yes } else { Scheduled::No });
        }
        self.push(value);
        // Release: the owner that reads this count finds the node on the stack. Acquire: who raises it from 0 comes
        // after all that the last turn did, and may start the next.
        let before =
            shared.word.fetch_add(COUNTED, weaken(Ordering::AcqRel, "mailbox.count_relaxed"));
        if before & CLOSED != 0 && !mutant("mailbox.close_without_sweep") {
            // The owner left between our reservation and now and may have missed the node. If it did, it is still
            // on the stack, perhaps with others in the same position: free them. This one counts as posted before.
            drop(shared.fetch());
            return Ok(Scheduled::No);
        }
        Ok(if counted(before) == 0 { Scheduled::Yes } else { Scheduled::No })
    }

    fn push(&self, value: T) {
        let newest = &self.shared.newest;
        let node = Box::into_raw(Box::new(Node { value, next: UnsafeCell::new(ptr::null_mut()) }));
        let mut older = newest.load(Ordering::Relaxed);
        loop {
            // SAFETY: `node` came from `Box::into_raw` above and is ours alone until the exchange succeeds.
            let next = unsafe { &(*node).next };
            // SAFETY: as above. `older` is only stored, not followed, so it does not matter if its node is gone: then
            // the exchange fails, or a new node has the same address, is now the newest, and is what we mean.
            next.with_mut(|next| unsafe { *next = older });
            let order = weaken(Ordering::Release, "mailbox.push_relaxed");
            match newest.compare_exchange_weak(older, node, order, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => older = now,
            }
        }
    }

    /// How many items the mailbox holds when full.
    pub fn capacity(&self) -> usize {
        self.shared.capacity as usize
    }

    /// How many places are taken now: a figure for metrics.
    pub fn len(&self) -> usize {
        reserved(self.shared.word.load(Ordering::Relaxed)) as usize
    }

    /// Whether no place is taken now.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the owner is gone.
    pub fn is_closed(&self) -> bool {
        self.shared.word.load(Ordering::Relaxed) & CLOSED != 0
    }
}

impl<T> fmt::Debug for Mailbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox")
            .field("len", &self.len())
            .field("capacity", &self.capacity())
            .finish()
    }
}

/// The receiving end; see the module.
pub struct Owner<T> {
    shared: Arc<Shared<T>>,
    /// Fetched and not yet run.
    list: List<T>,
    /// Items handed out and not yet subtracted from the count: 0 between turns, unless one was cut short by a panic.
    run: u64,
}

impl<T> Owner<T> {
    /// One turn: hands up to `max` items to `run`, oldest first. On [`Scheduled::Yes`] more has come and the owner
    /// must get another turn; the others' posts will not say so again.
    ///
    /// If `run` panics, its item is gone and the mailbox counts as still scheduled: call `take` again.
    pub fn take(&mut self, max: usize, run: &mut impl FnMut(T)) -> Scheduled {
        // Acquire: the swap in `fetch` must come after the pushes that this count speaks of. (Loom cannot show what
        // Relaxed would break, as its read-modify-writes always meet the newest value; so this is no mutation site.)
        let ready = counted(self.shared.word.load(Ordering::Acquire)) - self.run;
        let mut left = (max as u64).min(ready);
        if mutant("mailbox.drain_until_empty") {
            left = max as u64;
        }
        while left > 0 {
            if self.list.oldest.is_null() {
                self.list = self.shared.fetch();
            }
            let Some(value) = self.list.pop() else {
                if mutant("mailbox.drain_until_empty") {
                    break;
                }
                unreachable!("a counted item is neither on the stack nor in the list");
            };
            left -= 1;
            self.run += 1;
            run(value);
        }
        let n = mem::take(&mut self.run);
        // Release: all this turn did happens before whoever raises the count from 0 again. Nothing of the mailbox
        // may be touched after this line.
        let order = weaken(Ordering::AcqRel, "mailbox.subtract_relaxed");
        let before = self.shared.word.fetch_sub(n * (COUNTED + RESERVED), order);
        assert!(
            counted(before) >= n,
            "mailbox ran {n} items with only {} counted",
            counted(before)
        );
        if counted(before) > n { Scheduled::Yes } else { Scheduled::No }
    }

    /// Whether [`take`](Self::take) would find an item: one look at memory, no side effect.
    pub fn pure_check(&self) -> bool {
        counted(self.shared.word.load(Ordering::Relaxed)) > self.run
    }

    /// A posting end for this mailbox.
    pub fn mailbox(&self) -> Mailbox<T> {
        Mailbox { shared: self.shared.clone() }
    }
}

impl<T> Drop for Owner<T> {
    fn drop(&mut self) {
        // Release, Acquire: who counts after this sees CLOSED and frees its own; who counted before is on the stack.
        self.shared.word.fetch_or(CLOSED, Ordering::AcqRel);
        drop(self.shared.fetch());
    }
}

impl<T> fmt::Debug for Owner<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owner").field("mailbox", &self.mailbox()).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::sync::AtomicBool;

    fn turn<T>(owner: &mut Owner<T>, max: usize) -> (Vec<T>, Scheduled) {
        let mut got = Vec::new();
        let more = owner.take(max, &mut |item| got.push(item));
        (got, more)
    }

    #[test]
    fn only_the_first_post_schedules() {
        let (mailbox, mut owner) = mailbox(8);
        assert!(!owner.pure_check());
        assert_eq!(mailbox.post(1).unwrap(), Scheduled::Yes);
        assert_eq!(mailbox.post(2).unwrap(), Scheduled::No);
        assert!(owner.pure_check());
        assert_eq!(turn(&mut owner, 8), (vec![1, 2], Scheduled::No));
        assert!(!owner.pure_check());
        assert_eq!(mailbox.post(3).unwrap(), Scheduled::Yes);
    }

    #[test]
    fn a_turn_is_limited_and_says_that_there_is_more() {
        let (mailbox, mut owner) = mailbox(8);
        for i in 0..5 {
            _ = mailbox.post(i).unwrap();
        }
        assert_eq!(turn(&mut owner, 2), (vec![0, 1], Scheduled::Yes));
        // Arrives while older ones wait in the private list: must not overtake them, must not schedule again.
        assert_eq!(mailbox.post(5).unwrap(), Scheduled::No);
        assert_eq!(turn(&mut owner, 2), (vec![2, 3], Scheduled::Yes));
        assert_eq!(turn(&mut owner, 0), (vec![], Scheduled::Yes));
        assert_eq!(turn(&mut owner, 2), (vec![4, 5], Scheduled::No));
        assert_eq!(turn(&mut owner, 2), (vec![], Scheduled::No));
    }

    #[test]
    fn what_is_posted_during_a_turn_waits_for_the_next() {
        let (mailbox, mut owner) = mailbox(8);
        _ = mailbox.post(1).unwrap();
        let more = owner.take(8, &mut |item| {
            assert_eq!((item, mailbox.post(item + 1).unwrap()), (1, Scheduled::No))
        });
        assert_eq!(more, Scheduled::Yes);
        assert_eq!(turn(&mut owner, 8), (vec![2], Scheduled::No));
    }

    #[test]
    fn a_full_mailbox_gives_the_item_back_until_a_turn_made_room() {
        let (mailbox, mut owner) = mailbox(2);
        _ = mailbox.post(1).unwrap();
        _ = mailbox.post(2).unwrap();
        assert_eq!(mailbox.post(3), Err(PostError::Full(3)));
        assert_eq!((mailbox.len(), mailbox.capacity()), (2, 2));
        let more = owner.take(1, &mut |_| {
            assert_eq!(mailbox.post(3), Err(PostError::Full(3)), "still being run")
        });
        assert_eq!(more, Scheduled::Yes);
        assert_eq!(mailbox.post(3).unwrap(), Scheduled::No);
        assert_eq!(turn(&mut owner, 9), (vec![2, 3], Scheduled::No));
        assert!(mailbox.is_empty());
    }

    #[test]
    fn dropping_the_owner_closes_and_frees_everything() {
        let item = Rc::new(());
        let (mailbox, mut owner) = mailbox(8);
        for _ in 0..4 {
            _ = mailbox.post(item.clone()).unwrap();
        }
        assert_eq!(owner.take(1, &mut drop), Scheduled::Yes); // three are left in the private list
        _ = mailbox.post(item.clone()).unwrap(); // and one on the stack
        assert_eq!(Rc::strong_count(&item), 5);
        drop(owner);
        assert_eq!(Rc::strong_count(&item), 1);
        assert!(mailbox.is_closed());
        assert!(matches!(mailbox.post(item.clone()), Err(PostError::Closed(_))));
        assert_eq!(Rc::strong_count(&item), 1);
    }

    #[test]
    fn dropping_a_long_queue_does_not_recurse() {
        let (mailbox, mut owner) = mailbox(1_000_000);
        for i in 0..1_000_000 {
            _ = mailbox.post(i).unwrap();
        }
        assert_eq!(owner.take(1, &mut |_| ()), Scheduled::Yes);
    }

    #[test]
    fn a_panicking_item_leaves_the_mailbox_scheduled() {
        let (mailbox, mut owner) = mailbox(3);
        for i in 0..3 {
            _ = mailbox.post(i).unwrap();
        }
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            owner.take(3, &mut |item| assert_ne!(item, 1, "on purpose"))
        }));
        assert!(caught.is_err());
        assert!(owner.pure_check());
        assert_eq!(mailbox.post(9), Err(PostError::Full(9)), "not yet settled");
        assert_eq!(turn(&mut owner, 3), (vec![2], Scheduled::No));
        assert_eq!(mailbox.post(3).unwrap(), Scheduled::Yes);
        assert_eq!(turn(&mut owner, 3), (vec![3], Scheduled::No));
    }

    /// Threads post; whoever is told to schedule the owner sets the one place in the run queue, which must be free.
    #[test]
    fn many_threads_post_in_order_and_the_owner_is_queued_once() {
        const POSTERS: usize = 4;
        let count = if cfg!(miri) { 50 } else { 50_000_usize };
        let (mailbox, mut owner) = mailbox(64);
        let queued = AtomicBool::new(false);
        let (mut next, mut total, mut max) = ([0; POSTERS], 0, 1);
        std::thread::scope(|scope| {
            for poster in 0..POSTERS {
                let (mailbox, queued) = (mailbox.clone(), &queued);
                scope.spawn(move || {
                    for i in 0..count {
                        let mut item = (poster, i);
                        let scheduled = loop {
                            match mailbox.post(item) {
                                Ok(scheduled) => break scheduled,
                                Err(back) => item = back.into_inner(),
                            }
                            std::thread::yield_now();
                        };
                        if scheduled == Scheduled::Yes {
                            let was = queued.swap(true, Ordering::AcqRel);
                            assert!(!was, "the owner is queued twice");
                        }
                    }
                });
            }
            while total < POSTERS * count {
                if !queued.swap(false, Ordering::AcqRel) {
                    std::thread::yield_now();
                    continue;
                }
                max = max % 7 + 1;
                while owner.take(max, &mut |(poster, i)| {
                    assert_eq!(i, next[poster], "order of poster {poster}");
                    next[poster] += 1;
                    total += 1;
                }) == Scheduled::Yes
                {}
            }
        });
        assert!(mailbox.is_empty() && !queued.into_inner());
    }
}

//! A queue from any thread to one owner, which polls it: how threads that are not cores reach a
//! core.
//!
//! 1. [`Sender::send`] counts its item (or returns it: full) and pushes a node on a stack by
//!    compare-exchange.
//! 2. [`Inbox::pop`] takes the whole stack by one swap when its private list is empty, and reverses
//!    it: oldest first.
//!
//! Order: items are taken in the order of the pushes. So each sender's items keep their order, and
//! so do two senders' items when one send happened before the other.
//!
//! Closing: the owner's drop replaces the stack with a mark, by the swap that takes the last items.
//! A push either comes before that and is freed with them, or finds the mark and fails; nothing
//! waits for the last handle.
//!
//! It does not wake the owner: see [`SleepFlag::must_wake`](crate::sleep::SleepFlag::must_wake). A
//! send allocates and makes two read-modify-writes on cache lines that all senders share; a thread
//! that sends often should have a lane of a [`mailbox`](crate::mailbox).

use std::{fmt, mem, ptr};

use loomable::{Arc, AtomicPtr, AtomicUsize, CachePadded, Ordering, UnsafeCell, mutant, weaken};

struct Node<T> {
    value: T,
    /// The next older node on the stack; the next newer one in the owner's list.
    next: UnsafeCell<*mut Node<T>>,
}

/// The mark of a closed stack: never the address of a node, as those are aligned and not null.
fn closed<T>() -> *mut Node<T> {
    ptr::without_provenance_mut(1)
}

struct Stack<T> {
    /// The newest node that the owner has not yet fetched, or null, or [`closed`].
    newest: CachePadded<AtomicPtr<Node<T>>>,
    /// Items sent or being sent, and not yet taken.
    len: CachePadded<AtomicUsize>,
    capacity: usize,
}

// SAFETY: `Stack` is atomics and a number; a `T` enters through `send(&self)` on one thread and
// leaves on the owner's: a move, for which `T: Send` suffices. No `&T` is shared.
unsafe impl<T: Send> Send for Stack<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Stack<T> {}

/// Nodes that one thread owns, oldest first.
struct List<T> {
    /// Null, or a pointer from `Box::into_raw` that this list owns, with the same for its `next`.
    oldest: *mut Node<T>,
}

// SAFETY: the list owns its nodes as a `Vec<T>` owns its items: moving it moves the `T`s and
// nothing is shared.
unsafe impl<T: Send> Send for List<T> {}
// SAFETY: no method gives access through `&List`.
unsafe impl<T: Send> Sync for List<T> {}

impl<T> List<T> {
    const EMPTY: Self = Self { oldest: ptr::null_mut() };

    fn pop(&mut self) -> Option<T> {
        if self.oldest.is_null() {
            return None;
        }
        // SAFETY: by the field's invariant the pointer came from `Box::into_raw` and is owned by
        // this list. The next line moves `oldest` on and so ends that ownership: the box is made
        // once.
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

/// Makes an inbox for up to `capacity` items.
///
/// # Panics
///
/// If `capacity` is 0: a mistake in the caller's constants.
pub fn inbox<T>(capacity: usize) -> (Sender<T>, Inbox<T>) {
    assert!(capacity > 0, "an inbox needs room for one item");
    let shared = Arc::new(Stack {
        newest: CachePadded(AtomicPtr::new(ptr::null_mut())),
        len: CachePadded(AtomicUsize::new(0)),
        capacity,
    });
    (Sender { shared: shared.clone() }, Inbox { shared, list: List::EMPTY })
}

/// The reason why an item was not accepted, with the item.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SendError<T> {
    /// The inbox is full: retry after the owner has taken items.
    Full(T),
    /// The owner was dropped.
    Closed(T),
}

impl<T> SendError<T> {
    /// The same reason with another item.
    pub(crate) fn with<U>(self, value: U) -> SendError<U> {
        match self {
            Self::Full(_) => SendError::Full(value),
            Self::Closed(_) => SendError::Closed(value),
        }
    }

    /// The item that was not accepted.
    pub fn into_inner(self) -> T {
        match self {
            Self::Full(value) | Self::Closed(value) => value,
        }
    }
}

impl<T> fmt::Debug for SendError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full(_) => "Full(..)",
            Self::Closed(_) => "Closed(..)",
        })
    }
}

/// The sending end: cheap to clone, usable from any thread.
pub struct Sender<T> {
    shared: Arc<Stack<T>>,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<T> Sender<T> {
    /// Appends `value`.
    pub fn send(&self, value: T) -> Result<(), SendError<T>> {
        let Stack { newest, len, capacity } = &*self.shared;
        // Relaxed: the count guards a number, no memory.
        if len.fetch_add(1, Ordering::Relaxed) >= *capacity && !mutant("inbox.unbounded") {
            len.fetch_sub(1, Ordering::Relaxed);
            // Relaxed: a sender that waits for room has a fence before its last attempt.
            return Err(match newest.load(Ordering::Relaxed) == closed() {
                true => SendError::Closed(value),
                false => SendError::Full(value),
            });
        }
        let node = Box::into_raw(Box::new(Node { value, next: UnsafeCell::new(ptr::null_mut()) }));
        let mut older = newest.load(Ordering::Relaxed);
        loop {
            if older == closed() {
                len.fetch_sub(1, Ordering::Relaxed);
                // SAFETY: `node` came from `Box::into_raw` above, and no exchange has succeeded, so
                // only this thread has it.
                return Err(SendError::Closed(unsafe { Box::from_raw(node) }.value));
            }
            // SAFETY: as above.
            let next = unsafe { &(*node).next };
            // SAFETY: as above. `older` is only stored, not followed. If its node was freed, the
            // exchange fails, or a new node with the same address is now the newest, and then the
            // value is correct.
            next.with_mut(|next| unsafe { *next = older });
            let order = weaken(Ordering::Release, "inbox.push_relaxed");
            match newest.compare_exchange_weak(older, node, order, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => older = now,
            }
        }
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("len", &self.shared.len.load(Ordering::Relaxed)).finish()
    }
}

/// The owner's end; see the module text.
pub struct Inbox<T> {
    shared: Arc<Stack<T>>,
    /// Items fetched and not yet taken.
    list: List<T>,
}

impl<T> Inbox<T> {
    /// Takes the oldest item.
    pub fn pop(&mut self) -> Option<T> {
        if self.list.oldest.is_null() {
            if self.shared.newest.load(Ordering::Relaxed).is_null() {
                return None;
            }
            self.list = self.fetch(ptr::null_mut());
        }
        let value = self.list.pop()?;
        self.shared.len.fetch_sub(1, Ordering::Relaxed);
        Some(value)
    }

    /// Whether [`pop`](Self::pop) would return an item: one load, no side effect. For the check
    /// before sleep, which the caller's fence precedes.
    pub fn pure_check(&self) -> bool {
        !self.list.oldest.is_null() || !self.shared.newest.load(Ordering::Relaxed).is_null()
    }

    /// Takes all nodes off the stack, oldest first, and puts `instead` in their place.
    fn fetch(&self, instead: *mut Node<T>) -> List<T> {
        let order = weaken(Ordering::Acquire, "inbox.fetch_relaxed");
        let mut node = self.shared.newest.swap(instead, order);
        let mut list = List::EMPTY;
        while !node.is_null() {
            // SAFETY: every pointer reachable from `newest` came from `Box::into_raw` in `send`
            // (the mark is stored by the drop of the one owner, which fetches nothing afterwards);
            // its sender's Release exchange happened before our Acquire swap (later pushes continue
            // the release sequence, because they are read-modify-writes), so `next` is written; and
            // the swap gave this chain to us alone.
            let next = unsafe { &(*node).next };
            let older = next.with_mut(|next| {
                // SAFETY: as above: initialized, and the access is exclusive.
                unsafe { mem::replace(&mut *next, list.oldest) }
            });
            list.oldest = node;
            node = older;
        }
        list
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        let left = if mutant("inbox.close_unmarked") { ptr::null_mut() } else { closed() };
        drop(self.fetch(left));
    }
}

impl<T> fmt::Debug for Inbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("len", &self.shared.len.load(Ordering::Relaxed)).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn items_come_out_in_the_order_they_went_in() {
        let (sender, mut inbox) = inbox(8);
        assert!(!inbox.pure_check());
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        assert!(inbox.pure_check());
        assert_eq!(inbox.pop(), Some(1));
        // It arrives while an older one is in the private list, and must not overtake it.
        sender.send(3).unwrap();
        assert_eq!([inbox.pop(), inbox.pop(), inbox.pop()], [Some(2), Some(3), None]);
        assert!(!inbox.pure_check());
    }

    #[test]
    fn a_full_inbox_gives_the_item_back_until_one_is_taken() {
        let (sender, mut inbox) = inbox(2);
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        assert_eq!(sender.send(3), Err(SendError::Full(3)));
        assert_eq!(inbox.pop(), Some(1));
        sender.send(3).unwrap();
        assert_eq!([inbox.pop(), inbox.pop(), inbox.pop()], [Some(2), Some(3), None]);
    }

    #[test]
    fn dropping_the_owner_closes_and_frees_everything() {
        let item = Rc::new(());
        let (sender, mut inbox) = inbox(8);
        for _ in 0..3 {
            sender.send(item.clone()).unwrap();
        }
        drop(inbox.pop()); // two are left in the private list
        sender.send(item.clone()).unwrap(); // and one on the stack
        assert_eq!(Rc::strong_count(&item), 4);
        drop(inbox);
        assert_eq!(Rc::strong_count(&item), 1);
        assert!(matches!(sender.send(item.clone()), Err(SendError::Closed(_))));
        assert_eq!(Rc::strong_count(&item), 1);
    }

    /// Else a sender that waits for room waits for ever.
    #[test]
    fn a_closed_inbox_is_closed_and_never_full() {
        let (sender, owner) = inbox(2);
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        drop(owner);
        assert_eq!(sender.send(3), Err(SendError::Closed(3)));
        let (sender, owner) = inbox(2);
        drop(owner);
        for n in 0..5 {
            assert_eq!(sender.send(n), Err(SendError::Closed(n)));
        }
    }

    #[test]
    fn dropping_a_long_queue_does_not_recurse() {
        let (sender, mut inbox) = inbox(1_000_000);
        for i in 0..1_000_000 {
            sender.send(i).unwrap();
        }
        assert_eq!(inbox.pop(), Some(0));
    }

    #[test]
    fn many_threads_send_in_order() {
        const SENDERS: usize = 4;
        let count = if cfg!(miri) { 50 } else { 50_000_usize };
        let (sender, mut inbox) = inbox(64);
        let (mut next, mut total) = ([0; SENDERS], 0);
        std::thread::scope(|scope| {
            for nth in 0..SENDERS {
                let sender = sender.clone();
                scope.spawn(move || {
                    for i in 0..count {
                        let mut item = (nth, i);
                        while let Err(back) = sender.send(item) {
                            item = back.into_inner();
                            std::thread::yield_now();
                        }
                    }
                });
            }
            while total < SENDERS * count {
                match inbox.pop() {
                    Some((nth, i)) => {
                        assert_eq!(i, next[nth], "order of sender {nth}");
                        next[nth] += 1;
                        total += 1;
                    }
                    None => std::thread::yield_now(),
                }
            }
        });
        assert!(!inbox.pure_check());
    }
}

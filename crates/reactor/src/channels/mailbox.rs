//! An ordered, bounded queue from many posters to one owner, which is in its core's run queue at
//! most once.
//!
//! A shard's writes and commands come through a mailbox. It has no lock and no thread, and posters
//! write to no shared memory except the baton.
//!
//! 1. Each [`Poster`] has a lane of its own to the owner, a ring (`spsc`). [`Poster::post`] puts
//!    its item there. Then it checks the baton, the one word that all share. If the baton is
//!    *rest*, the poster changes it to *scheduled*, gets [`Scheduled::Yes`], and puts the owner
//!    into its core's run queue. All other posters are done. While the owner is scheduled the baton
//!    does not change and stays in every poster's cache.
//! 2. In its turn the owner calls [`Owner::take`] with a limit m: it empties one lane after the
//!    other, up to m items in all. A turn that reached its limit ends with [`Scheduled::Yes`]; the
//!    next turn begins with the next lane.
//! 3. When all lanes are empty the owner stays scheduled for `PATIENCE` more turns: the next post
//!    often comes soon, and waking the owner is the largest cost of a post. Then it sets the baton
//!    to *rest* and checks all lanes once more. If one is not empty, it takes the baton back,
//!    unless the lane's poster already has.
//!
//! **Why no item is forgotten**: the poster publishes its item, then checks the baton; the owner
//! sets the baton to *rest*, then checks the lanes. Each has a `SeqCst` fence between its two
//! steps. One of the fences comes first: if it is the poster's, the owner's second check sees the
//! item; if it is the owner's, the poster sees *rest*. This is the protocol of
//! [`sleep`](crate::sleep).
//!
//! **Why the owner is scheduled once**: the baton leaves *rest* by compare-exchange, so one of the
//! posters and the owner gets it. The owner sets *rest* by Release and a poster takes it by
//! Acquire, so the turn that the poster schedules comes after all actions of the owner's last turn.
//!
//! Order: each poster's items are run in the order of its posts. **Across posters there is none**,
//! not even when one post caused the other: the owner may have checked the lane of the first before
//! both posts, and the lane of the second after both. A poster that needs such an order waits for
//! the answer to the first: an answered item was run. All users follow that rule: kv's parcels and
//! errands are answered, dependent work waits for the answer, and each answer belongs to one
//! question.
//!
//! Bound: each lane has room for the mailbox's capacity. It begins small. A poster that finds its
//! ring full makes one of twice the size, sends its other end through the old ring's last slot,
//! which is kept free for that, and continues there. The old ring may still be full then, so a lane
//! holds less than twice the capacity.
//!
//! Closing: after the owner was dropped, posting fails. Items in the lanes are freed without
//! waiting for the last handle, because a task may wait for the answer that an item carries. The
//! owner sets the baton to *closed*, passes its fence, empties the lanes and drops its ends of
//! their rings. By the same protocol the poster of an item that this misses sees *closed* after its
//! fence, because *closed* is final. It drops its end too, and a ring without ends is freed with
//! its items: also a ring in the last slot of another, or one that did not reach the owner (a
//! closed inbox refuses or frees it).
//!
//! Cost: a post writes to its own lane and makes one fence. A turn costs the owner one check of
//! each lane.

use std::fmt;

use crate::inbox::{Inbox, Sender, inbox};
use crate::spsc::{Consumer, Producer, ring};
use loomable::{Arc, AtomicUsize, CachePadded, Ordering, fence_seq_cst, mutant, weaken};

pub use crate::inbox::SendError as PostError;

/// Turns without an item after which the owner rests.
const PATIENCE: u32 = if cfg!(loom) { 0 } else { 16 };
/// Slots of a lane's first ring.
const FIRST: usize = if cfg!(loom) { 2 } else { 64 };
/// Most new lanes that wait for the owner's next turn.
const LANES_MAX: usize = 1 << 20;

// Values of the baton.
/// The owner is not scheduled: the next poster schedules it.
const REST: usize = 0;
/// A turn of the owner is pending or running.
const SCHEDULED: usize = 1;
/// The owner was dropped.
const CLOSED: usize = 2;

type Baton = CachePadded<AtomicUsize>;

/// An entry of a lane.
enum Entry<T> {
    Item(T),
    /// The lane continues in this ring; this is the last entry of the old one.
    Next(Box<Consumer<Entry<T>>>),
    /// The poster was dropped.
    End,
}

/// Makes a mailbox with room for `capacity` items of each poster.
///
/// # Panics
///
/// If `capacity` is 0 or as large as the address space: a mistake in the caller's constants.
pub fn mailbox<T>(capacity: usize) -> (Mailbox<T>, Owner<T>) {
    assert!((1..usize::MAX / 4).contains(&capacity), "a mailbox needs room for one item");
    let baton = Arc::new(CachePadded(AtomicUsize::new(REST)));
    let (lanes, new) = inbox(LANES_MAX);
    (
        Mailbox { baton: baton.clone(), lanes, capacity },
        Owner { baton, new, lanes: Vec::new(), next: 0, patience: 0 },
    )
}

/// Whether the caller has to put the mailbox's owner into its core's run queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a mailbox that is not scheduled is never emptied"]
pub enum Scheduled {
    /// The caller must schedule the owner: it is not queued, and there is work or may soon be.
    Yes,
    /// The owner is queued already, or there is no work.
    No,
}

/// A mailbox's address, with which any thread makes a [`Poster`].
pub struct Mailbox<T> {
    baton: Arc<Baton>,
    /// New lanes for the owner.
    lanes: Sender<Consumer<Entry<T>>>,
    capacity: usize,
}

impl<T> Clone for Mailbox<T> {
    fn clone(&self) -> Self {
        Self { baton: self.baton.clone(), lanes: self.lanes.clone(), capacity: self.capacity }
    }
}

impl<T> Mailbox<T> {
    /// Makes a posting end. It costs nothing until it posts.
    pub fn poster(&self) -> Poster<T> {
        Poster { mailbox: self.clone(), lane: None }
    }
}

impl<T> fmt::Debug for Mailbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

/// One posting end; see the module text.
pub struct Poster<T> {
    mailbox: Mailbox<T>,
    /// This end of the lane, once there is one. One slot always stays free.
    lane: Option<Producer<Entry<T>>>,
}

impl<T> Poster<T> {
    /// Appends `value`. On [`Scheduled::Yes`] the caller must give the owner a turn.
    ///
    /// # Errors
    /// When the lane is full or the owner was dropped.
    #[inline]
    pub fn post(&mut self, value: T) -> Result<Scheduled, PostError<T>> {
        if self.mailbox.baton.load(Ordering::Relaxed) == CLOSED {
            self.lane = None;
            return Err(PostError::Closed(value));
        }
        if !self.lane.as_mut().is_some_and(|lane| lane.fits(2))
            && let Err(error) = self.extend()
        {
            return Err(error.with(value));
        }
        let Some(lane) = &mut self.lane else { return Err(PostError::Closed(value)) };
        let _fits = lane.push_published(Entry::Item(value));
        fence_seq_cst("mailbox.no_poster_fence");
        // Relaxed: the fence is what orders it.
        match self.mailbox.baton.load(Ordering::Relaxed) {
            SCHEDULED => Ok(Scheduled::No),
            _ => Ok(self.schedule()),
        }
    }

    /// Makes room for one item and the last slot: makes the first ring or a larger one, or fails.
    #[cold]
    fn extend(&mut self) -> Result<(), PostError<()>> {
        let Mailbox { lanes, capacity, .. } = &self.mailbox;
        let slots = match &self.lane {
            None => FIRST,
            Some(lane) if lane.capacity() > *capacity => return Err(PostError::Full(())),
            Some(lane) => 2 * lane.capacity(),
        };
        let (producer, consumer) = ring(slots.min(capacity + 1));
        match &mut self.lane {
            None => lanes.send(consumer).map_err(|error| error.with(()))?,
            Some(lane) => {
                let _fits = lane.push_published(Entry::Next(Box::new(consumer)));
            }
        }
        self.lane = Some(producer);
        Ok(())
    }

    /// Schedules the owner, which did not look scheduled.
    #[cold]
    fn schedule(&mut self) -> Scheduled {
        let baton = &self.mailbox.baton;
        if mutant("mailbox.take_untaken") {
            baton.store(SCHEDULED, Ordering::Relaxed);
            return Scheduled::Yes;
        }
        let order = weaken(Ordering::Acquire, "mailbox.schedule_relaxed");
        match baton.compare_exchange(REST, SCHEDULED, order, Ordering::Relaxed) {
            Ok(_) => Scheduled::Yes,
            Err(CLOSED) => {
                // The owner may have missed the item. It is freed with the ring when both ends are
                // dropped.
                if !mutant("mailbox.keep_closed") {
                    self.lane = None;
                }
                Scheduled::No
            }
            Err(_) => Scheduled::No,
        }
    }
}

impl<T> Drop for Poster<T> {
    fn drop(&mut self) {
        if let Some(lane) = &mut self.lane {
            // This schedules no turn: the owner removes the lane in its next turn.
            let _fits = lane.push_published(Entry::End);
        }
    }
}

impl<T> fmt::Debug for Poster<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poster").field("lane", &self.lane).finish_non_exhaustive()
    }
}

/// The receiving end; see the module text.
pub struct Owner<T> {
    baton: Arc<Baton>,
    new: Inbox<Consumer<Entry<T>>>,
    lanes: Vec<Consumer<Entry<T>>>,
    /// The lane with which the next turn begins.
    next: usize,
    /// Turns without an item since the last one.
    patience: u32,
}

impl<T> Owner<T> {
    /// One turn: hands up to `max` items to `run`. On [`Scheduled::Yes`] the owner must get another
    /// turn; posts will not schedule one.
    ///
    /// If `run` panics, its item is gone and the mailbox counts as still scheduled: call `take`
    /// again.
    pub fn take(&mut self, max: usize, run: &mut impl FnMut(T)) -> Scheduled {
        self.welcome();
        let mut left = max;
        for _ in 0..self.lanes.len() {
            if left == 0 {
                break;
            }
            self.next = if self.next + 1 < self.lanes.len() { self.next + 1 } else { 0 };
            self.empty_lane(self.next, &mut left, run);
        }
        if left < max {
            self.patience = 0;
        }
        if left == 0 {
            return Scheduled::Yes;
        }
        if self.patience < PATIENCE {
            self.patience += 1;
            return Scheduled::Yes;
        }
        self.rest()
    }

    /// Takes the new lanes.
    fn welcome(&mut self) {
        while let Some(lane) = self.new.pop() {
            self.lanes.push(lane);
        }
    }

    /// Takes up to `left` items from a lane.
    fn empty_lane(&mut self, at: usize, left: &mut usize, run: &mut impl FnMut(T)) {
        let Some(lane) = self.lanes.get_mut(at) else { return };
        while *left > 0 {
            match lane.pop() {
                Some(Entry::Item(value)) => {
                    *left -= 1;
                    run(value);
                }
                Some(Entry::Next(next)) => *lane = *next,
                Some(Entry::End) => {
                    self.lanes.swap_remove(at);
                    return;
                }
                None => return,
            }
        }
    }

    /// Sets the baton to *rest*, unless an item has come.
    fn rest(&mut self) -> Scheduled {
        let has_work = |owner: &Self| {
            owner.lanes.iter().any(Consumer::pure_check)
                || (owner.new.pure_check() && !mutant("mailbox.overlook_new_lanes"))
        };
        let missed = mutant("mailbox.look_before_rest") && has_work(self);
        // Not a store, as in `sleep`: a read-modify-write follows the value it replaces, also for
        // loom. Release: this turn comes before all actions of the poster that takes the baton, and
        // so before the next turn.
        self.baton.swap(REST, weaken(Ordering::Release, "mailbox.rest_relaxed"));
        fence_seq_cst("mailbox.no_owner_fence");
        if mutant("mailbox.look_before_rest") {
            return if missed { Scheduled::Yes } else { Scheduled::No };
        }
        if !has_work(self) {
            return Scheduled::No;
        }
        if mutant("mailbox.retake_untaken") {
            return Scheduled::Yes;
        }
        match self.baton.compare_exchange(REST, SCHEDULED, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Scheduled::Yes,
            // A poster has scheduled us.
            Err(_) => Scheduled::No,
        }
    }
}

impl<T> Drop for Owner<T> {
    fn drop(&mut self) {
        self.baton.swap(CLOSED, Ordering::Relaxed);
        fence_seq_cst("mailbox.no_closing_fence");
        self.welcome();
        if mutant("mailbox.close_without_sweep") {
            return;
        }
        let mut all = usize::MAX;
        for at in (0..self.lanes.len()).rev() {
            self.empty_lane(at, &mut all, &mut drop);
        }
    }
}

impl<T> fmt::Debug for Owner<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owner").field("lanes", &self.lanes.len()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::rc::Rc;

    use super::*;
    use loomable::AtomicBool;

    fn turn<T>(owner: &mut Owner<T>, max: usize) -> (Vec<T>, Scheduled) {
        let mut got = Vec::new();
        let more = owner.take(max, &mut |item| got.push(item));
        (got, more)
    }

    /// All items that are run until the owner rests, without posts meanwhile.
    fn until_rest<T>(owner: &mut Owner<T>, max: usize) -> Vec<T> {
        let mut all = Vec::new();
        loop {
            let (got, more) = turn(owner, max);
            all.extend(got);
            if more == Scheduled::No {
                return all;
            }
        }
    }

    #[test]
    fn only_a_post_to_an_owner_at_rest_schedules() {
        let (mailbox, mut owner) = mailbox(8);
        let (mut a, mut b) = (mailbox.poster(), mailbox.poster());
        assert_eq!(a.post(1).unwrap(), Scheduled::Yes);
        assert_eq!([a.post(2).unwrap(), b.post(3).unwrap()], [Scheduled::No; 2]);
        let mut got = until_rest(&mut owner, 8);
        got.sort_unstable();
        assert_eq!(got, [1, 2, 3]);
        assert_eq!([b.post(4).unwrap(), a.post(5).unwrap()], [Scheduled::Yes, Scheduled::No]);
    }

    #[test]
    fn an_owner_rests_after_so_many_turns_without_an_item() {
        let (mailbox, mut owner) = mailbox(8);
        let mut poster = mailbox.poster();
        for _ in 0..2 {
            assert_eq!(poster.post(1).unwrap(), Scheduled::Yes);
            assert_eq!(turn(&mut owner, 2), (vec![1], Scheduled::Yes));
            for _ in 1..PATIENCE {
                assert_eq!(turn(&mut owner, 2), (vec![], Scheduled::Yes));
            }
            assert_eq!(poster.post(2).unwrap(), Scheduled::No);
            assert_eq!(turn(&mut owner, 2), (vec![2], Scheduled::Yes));
            for _ in 1..PATIENCE {
                assert_eq!(turn(&mut owner, 2), (vec![], Scheduled::Yes));
            }
            assert_eq!(turn(&mut owner, 2), (vec![], Scheduled::No));
        }
    }

    #[test]
    fn a_turn_is_limited_and_the_next_continues_with_the_next_lane() {
        let (mailbox, mut owner) = mailbox(8);
        let mut posters = [mailbox.poster(), mailbox.poster(), mailbox.poster()];
        for (nth, poster) in posters.iter_mut().enumerate() {
            for i in 0..3 {
                let _ = poster.post(nth * 10 + i).unwrap();
            }
        }
        let mut firsts: Vec<usize> = (0..3)
            .map(|_| {
                let (got, more) = turn(&mut owner, 2);
                assert_eq!((got.len(), got[1], more), (2, got[0] + 1, Scheduled::Yes));
                got[0]
            })
            .collect();
        firsts.sort_unstable();
        assert_eq!(firsts, [0, 10, 20], "each lane has had its turn");
        assert_eq!(turn(&mut owner, 0), (vec![], Scheduled::Yes));
        let mut got = until_rest(&mut owner, 2);
        got.sort_unstable();
        assert_eq!(got, [2, 12, 22]);
    }

    #[test]
    fn a_full_lane_gives_the_item_back_until_the_owner_took_one() {
        for capacity in [1, 2, 63, 64, 65, 1000] {
            let (mailbox, mut owner) = mailbox(capacity);
            let (mut poster, mut other) = (mailbox.poster(), mailbox.poster());
            let fits = (0..2 * capacity).take_while(|&i| poster.post(i).is_ok()).count();
            assert!((capacity..2 * capacity.max(1)).contains(&fits), "{fits} of {capacity}");
            assert_eq!(poster.post(fits), Err(PostError::Full(fits)));
            let _ = other.post(usize::MAX).unwrap();
            let mut got = until_rest(&mut owner, 7);
            got.retain(|&item| item != usize::MAX);
            assert_eq!(got, (0..fits).collect::<Vec<_>>());
            // Now it has its full size and is empty.
            for i in 0..capacity {
                let _ = poster.post(i).unwrap();
            }
            assert_eq!(poster.post(0), Err(PostError::Full(0)));
            assert_eq!(until_rest(&mut owner, 7), (0..capacity).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_lane_of_a_dropped_poster_is_read_to_its_end_and_taken_away() {
        let (mailbox, mut owner) = mailbox(1000);
        let item = Rc::new(());
        for _ in 0..3 {
            let mut poster = mailbox.poster();
            for _ in 0..1000 {
                let _ = poster.post(item.clone()).unwrap();
            }
        }
        drop(mailbox.poster());
        assert_eq!(until_rest(&mut owner, 64).len(), 3000);
        assert_eq!((owner.lanes.len(), Rc::strong_count(&item)), (0, 1));
    }

    #[test]
    fn dropping_the_owner_closes_and_frees_everything() {
        let item = Rc::new(());
        let (mailbox, mut owner) = mailbox(1000);
        let (mut poster, mut late) = (mailbox.poster(), mailbox.poster());
        for _ in 0..500 {
            let _ = poster.post(item.clone()).unwrap();
        }
        assert_eq!(owner.take(1, &mut drop), Scheduled::Yes);
        let _ = late.post(item.clone()).unwrap(); // in a lane that the owner has not seen yet
        assert_eq!(Rc::strong_count(&item), 501);
        drop(owner);
        assert_eq!(Rc::strong_count(&item), 1);
        for poster in [&mut poster, &mut late, &mut mailbox.poster()] {
            assert!(matches!(poster.post(item.clone()), Err(PostError::Closed(_))));
        }
        assert_eq!(Rc::strong_count(&item), 1);
    }

    #[test]
    fn a_panicking_item_leaves_the_mailbox_scheduled() {
        let (mailbox, mut owner) = mailbox(3);
        let mut poster = mailbox.poster();
        for i in 0..3 {
            let _ = poster.post(i).unwrap();
        }
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            owner.take(3, &mut |item| assert_ne!(item, 1, "on purpose"))
        }));
        assert!(caught.is_err());
        assert_eq!(poster.post(3).unwrap(), Scheduled::No);
        assert_eq!(until_rest(&mut owner, 3), [2, 3]);
        assert_eq!(poster.post(4).unwrap(), Scheduled::Yes);
        assert_eq!(until_rest(&mut owner, 3), [4]);
    }

    /// Threads post. A thread that is told to schedule the owner takes the one place in the run
    /// queue, which must be free.
    #[test]
    fn many_threads_post_in_order_and_the_owner_is_queued_once() {
        const POSTERS: usize = 4;
        let count = if cfg!(miri) { 200 } else { 50_000_usize };
        let (mailbox, mut owner) = mailbox(100);
        let queued = AtomicBool::new(false);
        let schedule = |scheduled| {
            if scheduled == Scheduled::Yes {
                assert!(!queued.swap(true, Ordering::AcqRel), "the owner is queued twice");
            }
        };
        let (mut next, mut total, mut max) = ([0; POSTERS], 0, 1);
        std::thread::scope(|scope| {
            for nth in 0..POSTERS {
                let mut poster = mailbox.poster();
                let schedule = &schedule;
                scope.spawn(move || {
                    for i in 0..count {
                        let mut item = (nth, i);
                        schedule(loop {
                            match poster.post(item) {
                                Ok(scheduled) => break scheduled,
                                Err(back) => item = back.into_inner(),
                            }
                            std::thread::yield_now();
                        });
                    }
                });
            }
            while total < POSTERS * count {
                if !queued.swap(false, Ordering::AcqRel) {
                    std::thread::yield_now();
                    continue;
                }
                max = max % 7 + 1;
                // So that it rests often.
                owner.patience = PATIENCE;
                schedule(owner.take(max, &mut |(nth, i)| {
                    assert_eq!(i, next[nth], "order of poster {nth}");
                    next[nth] += 1;
                    total += 1;
                }));
            }
        });
    }
}

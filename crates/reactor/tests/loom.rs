//! The proofs of the lock-free parts: loom runs every interleaving, and every stale value that the
//! memory model permits, of the small scenarios below.
//!
//! Run by `scripts/loom.sh`; empty in a normal build. The modules are included by path, so that
//! nothing else of the reactor (io_uring, libc) is compiled under loom.
//!
//! [`MUTANTS`] lists for each mutation site the scenario that must find it (see `loomable`).
#![cfg(loom)]
// Stress tests of the modules are compiled out under loom, and not every function has a scenario.
#![allow(dead_code, reason = "the modules are included whole")]

use std::sync::atomic::{
    AtomicUsize as Plain,
    Ordering::{AcqRel, Acquire, Relaxed},
};
use std::task::Poll;

use loom::{
    cell::UnsafeCell,
    sync::{Arc, Notify, atomic::AtomicBool},
    thread,
};

use loomable::proof::{find_every_mutant, list_is_complete, prove};

#[path = "../src/memory/gate.rs"]
mod gate;
#[path = "../src/channels/inbox.rs"]
mod inbox;
#[path = "../src/log/lane.rs"]
mod lane;
#[path = "../src/channels/mailbox.rs"]
mod mailbox;
#[path = "../src/memory/ranges.rs"]
mod ranges;
#[path = "../src/channels/reply.rs"]
mod reply;
#[path = "../src/channels/sleep.rs"]
mod sleep;
#[path = "../src/channels/spsc.rs"]
mod spsc;
#[path = "../src/channels/waiters.rs"]
mod waiters;

use lane::Tickets;
use mailbox::{Mailbox, Owner, PostError, Scheduled};
use sleep::SleepFlag;

/// Each mutation site, and the scenario that finds it.
const MUTANTS: &[(&str, &str)] = &[
    ("spsc.tail_store_relaxed", "spsc_items_arrive_once_and_in_order_across_the_wrap"),
    ("spsc.tail_load_relaxed", "spsc_items_arrive_once_and_in_order_across_the_wrap"),
    ("spsc.head_store_relaxed", "spsc_a_slot_is_reused_only_after_it_was_read"),
    ("spsc.head_load_relaxed", "spsc_a_slot_is_reused_only_after_it_was_read"),
    ("spsc.one_too_many", "spsc_a_slot_is_reused_only_after_it_was_read"),
    ("spsc.free_before_read", "spsc_a_slot_is_reused_only_after_it_was_read"),
    ("spsc.drop_unpublished", "spsc_dropping_both_ends_frees_what_is_left"),
    ("sleep.no_sender_fence", "sleep_one_message_is_not_slept_through"),
    ("sleep.no_sleeper_fence", "sleep_one_message_is_not_slept_through"),
    ("sleep.look_before_flag", "sleep_one_message_is_not_slept_through"),
    ("sleep.plain_store", "sleep_two_messages_and_two_sleeps"),
    ("sleep.no_take", "sleep_two_senders_signal_once_per_announcement"),
    ("sleep.stay_flagged", "sleep_two_senders_signal_once_per_announcement"),
    ("inbox.push_relaxed", "inbox_two_senders"),
    ("inbox.fetch_relaxed", "inbox_two_senders"),
    ("inbox.unbounded", "inbox_holds_no_more_than_its_capacity"),
    ("inbox.close_unmarked", "inbox_closing_frees_what_is_being_sent"),
    ("reply.done_relaxed", "reply_is_whole_and_wakes"),
    ("reply.look_relaxed", "reply_is_whole_and_wakes"),
    ("reply.wait_relaxed", "reply_is_whole_and_wakes"),
    ("reply.miss_done", "reply_is_whole_and_wakes"),
    ("reply.change_announced", "reply_to_a_waker_that_changes"),
    ("waiters.no_notifier_fence", "waiters_a_change_is_not_missed"),
    ("waiters.no_waiter_fence", "waiters_a_change_is_not_missed"),
    ("mailbox.no_poster_fence", "mailbox_one_poster_and_a_lane_that_grows"),
    ("mailbox.no_owner_fence", "mailbox_one_poster_and_a_lane_that_grows"),
    ("mailbox.look_before_rest", "mailbox_one_poster_and_a_lane_that_grows"),
    ("mailbox.overlook_new_lanes", "mailbox_two_posters"),
    ("mailbox.rest_relaxed", "mailbox_one_poster_and_a_lane_that_grows"),
    ("mailbox.schedule_relaxed", "mailbox_one_poster_and_a_lane_that_grows"),
    ("mailbox.take_untaken", "mailbox_two_posters"),
    ("mailbox.retake_untaken", "mailbox_two_posters"),
    ("mailbox.no_closing_fence", "mailbox_closing_frees_what_is_being_posted"),
    ("mailbox.keep_closed", "mailbox_closing_frees_what_is_being_posted"),
    ("mailbox.close_without_sweep", "mailbox_closing_frees_what_is_being_posted"),
    ("ranges.start_relaxed", "places_a_range_is_found_whole_or_not_at_all"),
    ("ranges.end_relaxed", "places_a_range_is_found_whole_or_not_at_all"),
    ("ranges.read_start_relaxed", "places_a_range_is_found_whole_or_not_at_all"),
    ("ranges.read_end_relaxed", "places_a_range_is_found_whole_or_not_at_all"),
    ("ranges.unchecked", "places_a_range_is_found_whole_or_not_at_all"),
    ("ranges.take_relaxed", "places_are_used_again_by_one_at_a_time"),
    ("ranges.give_back_relaxed", "places_are_used_again_by_one_at_a_time"),
    ("ranges.first_relaxed", "places_that_are_added_are_found_whole"),
    ("ranges.add_relaxed", "places_that_are_added_are_found_whole"),
    ("gate.no_access_fence", "gate_nobody_is_inside_during_a_resize"),
    ("gate.no_resize_fence", "gate_nobody_is_inside_during_a_resize"),
    ("gate.look_relaxed", "gate_nobody_is_inside_during_a_resize"),
    ("gate.ignore_flag", "gate_nobody_is_inside_during_a_resize"),
    ("gate.ignore_count", "gate_nobody_is_inside_during_a_resize"),
    ("gate.count_relaxed", "gate_nobody_is_inside_during_a_resize"),
    ("gate.leave_relaxed", "gate_nobody_is_inside_during_a_resize"),
    ("gate.open_relaxed", "gate_nobody_is_inside_during_a_resize"),
    ("gate.two_resizes", "gate_one_resize_at_a_time"),
    ("log.no_claim", "log_two_threads_in_one_lane_lose_nothing_uncounted"),
    ("log.claim_relaxed", "log_two_threads_in_one_lane_lose_nothing_uncounted"),
    ("log.unclaim_relaxed", "log_two_threads_in_one_lane_lose_nothing_uncounted"),
    ("log.end_store_relaxed", "log_an_ended_lane_is_read_to_its_end"),
    ("log.end_load_relaxed", "log_an_ended_lane_is_read_to_its_end"),
    ("log.take_relaxed", "log_a_called_ticket_means_written"),
    ("log.newest_relaxed", "log_a_called_ticket_means_written"),
];

/// A message with contents that loom watches: reading it without a happens-before edge from its
/// creation is an error. Live messages are counted.
struct Message {
    content: UnsafeCell<usize>,
    alive: std::sync::Arc<Plain>,
}

impl Message {
    fn new(content: usize, alive: &std::sync::Arc<Plain>) -> Self {
        alive.fetch_add(1, Relaxed);
        Self { content: UnsafeCell::new(content), alive: alive.clone() }
    }

    fn read(&self) -> usize {
        // SAFETY: loom fails the execution if another thread may be writing.
        self.content.with(|content| unsafe { *content })
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // As an owner would: exclusive access, checked by loom. SAFETY: loom fails the execution if
        // another thread may be reading or writing.
        self.content.with_mut(|content| unsafe { *content = usize::MAX });
        self.alive.fetch_sub(1, Relaxed);
    }
}

// The counter `alive` is a plain atomic that loom does not see, so it adds no ordering that could
// hide a fault.
fn counter() -> std::sync::Arc<Plain> {
    std::sync::Arc::new(Plain::new(0))
}

fn pop_waiting<T>(rx: &mut spsc::Consumer<T>) -> T {
    loop {
        match rx.pop() {
            Some(item) => return item,
            None => thread::yield_now(),
        }
    }
}

// ---- spsc ----

/// Three items through two slots, with indices that pass `usize::MAX`: the producer finds the ring
/// full, the consumer finds it empty.
#[test]
fn spsc_items_arrive_once_and_in_order_across_the_wrap() {
    prove("spsc_items_arrive_once_and_in_order_across_the_wrap", None, || {
        let alive = counter();
        let (mut tx, mut rx) = spsc::ring_from(2, usize::MAX);
        let sender = thread::spawn({
            let alive = alive.clone();
            move || {
                for i in 0..3 {
                    let mut item = Message::new(i, &alive);
                    while let Err(back) = tx.push_published(item) {
                        item = back;
                        thread::yield_now();
                    }
                }
            }
        });
        for i in 0..3 {
            assert_eq!(pop_waiting(&mut rx).read(), i);
        }
        assert!(rx.pop().is_none());
        sender.join().unwrap();
        assert_eq!(alive.load(Relaxed), 0);
    });
}

/// One slot, used twice: the second write must come after the first read.
#[test]
fn spsc_a_slot_is_reused_only_after_it_was_read() {
    prove("spsc_a_slot_is_reused_only_after_it_was_read", None, || {
        let alive = counter();
        let (mut tx, mut rx) = spsc::ring_from::<Message>(1, usize::MAX);
        let receiver = thread::spawn(move || {
            for i in 0..2 {
                assert_eq!(pop_waiting(&mut rx).read(), i);
            }
        });
        tx.push_published(Message::new(0, &alive)).ok().unwrap();
        let mut item = Message::new(1, &alive);
        while let Err(back) = tx.push_published(item) {
            item = back;
            thread::yield_now();
        }
        receiver.join().unwrap();
        assert_eq!(alive.load(Relaxed), 0);
    });
}

/// Two pushes, one publish: a consumer that sees the first item sees the second, and a successful
/// check is right.
#[test]
fn spsc_a_batch_becomes_visible_as_a_whole() {
    prove("spsc_a_batch_becomes_visible_as_a_whole", None, || {
        let (mut tx, mut rx) = spsc::ring(2);
        let sender = thread::spawn(move || {
            tx.push(1).unwrap();
            tx.push(2).unwrap();
            assert!(tx.publish());
        });
        while !rx.pure_check() {
            thread::yield_now();
        }
        assert_eq!((rx.pop(), rx.pop(), rx.pop()), (Some(1), Some(2), None));
        sender.join().unwrap();
    });
}

/// Both ends are dropped concurrently, with one item read, one published, and one only pushed.
#[test]
fn spsc_dropping_both_ends_frees_what_is_left() {
    prove("spsc_dropping_both_ends_frees_what_is_left", None, || {
        let alive = counter();
        let (mut tx, mut rx) = spsc::ring_from(4, usize::MAX - 1);
        let sender = thread::spawn({
            let alive = alive.clone();
            move || {
                tx.push(Message::new(0, &alive)).ok().unwrap();
                tx.push_published(Message::new(1, &alive)).ok().unwrap();
                tx.push(Message::new(2, &alive)).ok().unwrap();
            }
        });
        if let Some(first) = rx.pop() {
            assert_eq!(first.read(), 0);
        }
        drop(rx);
        sender.join().unwrap();
        assert_eq!(alive.load(Relaxed), 0);
    });
}

// ---- sleep ----

/// The receiving core: pops until it has `count` items, and sleeps when there are none. A lost
/// wake-up is a deadlock, which loom reports. `Notify` is the eventfd: it remembers one signal, and
/// may wake spuriously.
fn receive(
    rings: &mut [spsc::Consumer<usize>],
    flag: &SleepFlag,
    eventfd: &Notify,
    count: usize,
) -> Vec<usize> {
    let mut got = Vec::new();
    while got.len() < count {
        let before = got.len();
        for ring in rings.iter_mut() {
            got.extend(ring.pop());
        }
        if got.len() == before && flag.prepare(|| rings.iter().any(spsc::Consumer::pure_check)) {
            eventfd.wait();
            flag.awake();
        }
    }
    got
}

fn send(
    ring: &mut spsc::Producer<usize>,
    item: usize,
    flag: &SleepFlag,
    eventfd: &Notify,
) -> usize {
    ring.push_published(item).unwrap();
    let signal = flag.must_wake();
    if signal {
        eventfd.notify();
    }
    signal.into()
}

#[test]
fn sleep_one_message_is_not_slept_through() {
    prove("sleep_one_message_is_not_slept_through", None, || {
        let (flag, eventfd) = (Arc::new(SleepFlag::new()), Arc::new(Notify::new()));
        let (mut tx, rx) = spsc::ring(1);
        let receiver = thread::spawn({
            let (flag, eventfd) = (flag.clone(), eventfd.clone());
            move || assert_eq!(receive(&mut [rx], &flag, &eventfd, 1), [7])
        });
        send(&mut tx, 7, &flag, &eventfd);
        receiver.join().unwrap();
    });
}

/// The sleeper may go to sleep again before the first signal arrives.
#[test]
fn sleep_two_messages_and_two_sleeps() {
    prove("sleep_two_messages_and_two_sleeps", Some(3), || {
        let (flag, eventfd) = (Arc::new(SleepFlag::new()), Arc::new(Notify::new()));
        let (mut tx, rx) = spsc::ring(2);
        let receiver = thread::spawn({
            let (flag, eventfd) = (flag.clone(), eventfd.clone());
            move || assert_eq!(receive(&mut [rx], &flag, &eventfd, 2), [7, 8])
        });
        send(&mut tx, 7, &flag, &eventfd);
        send(&mut tx, 8, &flag, &eventfd);
        receiver.join().unwrap();
    });
}

/// Two sending cores and one announcement of sleep: exactly one of them makes the system call.
#[test]
fn sleep_two_senders_signal_once_per_announcement() {
    prove("sleep_two_senders_signal_once_per_announcement", Some(3), || {
        let flag = Arc::new(SleepFlag::new());
        let announced = flag.prepare(|| false);
        assert!(announced);
        let senders = [0, 1].map(|_| {
            let flag = flag.clone();
            thread::spawn(move || usize::from(flag.must_wake()))
        });
        // The sleeper wakes by a timer: later senders must not signal.
        flag.awake();
        let late = flag.must_wake();
        let signals: usize = senders.into_iter().map(|sender| sender.join().unwrap()).sum();
        assert!(signals <= 1, "{signals} signals for one announcement");
        assert!(!late, "signalled an owner that is awake");
    });
}

/// Both senders' messages are received although only one of them signals.
#[test]
fn sleep_two_senders_into_one_sleeper() {
    prove("sleep_two_senders_into_one_sleeper", Some(2), || {
        let (flag, eventfd) = (Arc::new(SleepFlag::new()), Arc::new(Notify::new()));
        let (mut tx, rx) = spsc::ring(1);
        let (mut tx_2, rx_2) = spsc::ring(1);
        let other = thread::spawn({
            let (flag, eventfd) = (flag.clone(), eventfd.clone());
            move || send(&mut tx_2, 8, &flag, &eventfd)
        });
        let receiver = thread::spawn({
            let (flag, eventfd) = (flag.clone(), eventfd.clone());
            move || receive(&mut [rx, rx_2], &flag, &eventfd, 2)
        });
        send(&mut tx, 7, &flag, &eventfd);
        other.join().unwrap();
        let mut got = receiver.join().unwrap();
        got.sort_unstable();
        assert_eq!(got, [7, 8]);
    });
}

// ---- inbox ----

fn pop_inbox<T>(inbox: &mut inbox::Inbox<T>) -> T {
    loop {
        match inbox.pop() {
            Some(item) => return item,
            None => thread::yield_now(),
        }
    }
}

/// Two threads send two items each: each thread's arrive once and in order.
#[test]
fn inbox_two_senders() {
    prove("inbox_two_senders", Some(2), || {
        let alive = counter();
        let (sender, mut inbox) = inbox::inbox(4);
        let send = |nth: usize| {
            let (sender, alive) = (sender.clone(), alive.clone());
            move || {
                for i in 0..2 {
                    sender.send(Message::new(nth * 10 + i, &alive)).unwrap();
                }
            }
        };
        let senders = [thread::spawn(send(0)), thread::spawn(send(1))];
        let got: Vec<usize> = (0..4).map(|_| pop_inbox(&mut inbox).read()).collect();
        for sender in senders {
            sender.join().unwrap();
        }
        for nth in 0..2 {
            let of: Vec<usize> = got.iter().copied().filter(|item| item / 10 == nth).collect();
            assert_eq!(of, [nth * 10, nth * 10 + 1], "all, once, in order: {got:?}");
        }
        assert!(inbox.pop().is_none());
        assert_eq!(alive.load(Relaxed), 0);
    });
}

/// Two senders, one slot.
#[test]
fn inbox_holds_no_more_than_its_capacity() {
    prove("inbox_holds_no_more_than_its_capacity", None, || {
        let (sender, mut inbox) = inbox::inbox(1);
        let other = thread::spawn({
            let sender = sender.clone();
            move || usize::from(sender.send(1).is_ok())
        });
        let mine = usize::from(sender.send(0).is_ok());
        assert_eq!(mine + other.join().unwrap(), 1, "one is accepted, one is refused");
        assert!(inbox.pop().is_some() && inbox.pop().is_none());
        assert_eq!(sender.send(2), Ok(()), "there is room again");
    });
}

/// The owner is dropped during a send: the item is refused or freed, not kept until the last handle
/// is dropped.
#[test]
fn inbox_closing_frees_what_is_being_sent() {
    prove("inbox_closing_frees_what_is_being_sent", None, || {
        let alive = counter();
        let (sender, inbox) = inbox::inbox(4);
        let sending = thread::spawn({
            let (sender, alive) = (sender.clone(), alive.clone());
            move || {
                for i in 0..2 {
                    let sent = sender.send(Message::new(i, &alive));
                    assert!(!matches!(sent, Err(inbox::SendError::Full(_))));
                }
            }
        });
        drop(inbox);
        sending.join().unwrap();
        assert_eq!(alive.load(Relaxed), 0, "freed although a handle is left");
        let late = sender.send(Message::new(2, &alive));
        assert!(matches!(late, Err(inbox::SendError::Closed(_))));
    });
}

// ---- reply ----

/// What a waker wakes.
struct Signal(Notify);

impl std::task::Wake for Signal {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.notify();
    }
}

fn poll_reply<T>(
    reply: &mut reply::Reply<T>,
    signal: &std::sync::Arc<Signal>,
) -> Poll<Result<T, reply::Unanswered>> {
    let waker = std::task::Waker::from(signal.clone());
    std::pin::pin!(reply).poll(&mut std::task::Context::from_waker(&waker))
}

/// Polls until the answer is there, and sleeps in between. A wake-up that is missed is a deadlock,
/// which loom reports.
fn await_reply<T>(reply: &mut reply::Reply<T>) -> Result<T, reply::Unanswered> {
    let signal = std::sync::Arc::new(Signal(Notify::new()));
    loop {
        match poll_reply(reply, &signal) {
            Poll::Ready(answer) => return answer,
            Poll::Pending => signal.0.wait(),
        }
    }
}

#[test]
fn reply_is_whole_and_wakes() {
    prove("reply_is_whole_and_wakes", None, || {
        let alive = counter();
        let (sender, mut reply) = reply::reply();
        let answering = thread::spawn({
            let alive = alive.clone();
            move || sender.send(Message::new(7, &alive))
        });
        assert_eq!(await_reply(&mut reply).unwrap().read(), 7);
        answering.join().unwrap();
        assert_eq!(alive.load(Relaxed), 0);
    });
}

/// The future moves to another task while it is answered: the last waker is woken, if any.
#[test]
fn reply_to_a_waker_that_changes() {
    prove("reply_to_a_waker_that_changes", None, || {
        let (sender, mut reply) = reply::reply();
        let answering = thread::spawn(move || sender.send(7));
        let first = std::sync::Arc::new(Signal(Notify::new()));
        let answer = match poll_reply(&mut reply, &first) {
            Poll::Ready(answer) => answer,
            Poll::Pending => await_reply(&mut reply),
        };
        assert_eq!(answer, Ok(7));
        answering.join().unwrap();
    });
}

/// A sender that is dropped ends the wait.
#[test]
fn reply_that_never_comes_ends_the_wait() {
    prove("reply_that_never_comes_ends_the_wait", None, || {
        let (sender, mut reply) = reply::reply::<usize>();
        let dropping = thread::spawn(move || drop(sender));
        assert_eq!(await_reply(&mut reply), Err(reply::Unanswered));
        dropping.join().unwrap();
    });
}

/// The future is dropped while it is answered, after it has waited or not.
#[test]
fn reply_that_nobody_takes_is_freed() {
    prove("reply_that_nobody_takes_is_freed", None, || {
        let alive = counter();
        let (sender, mut reply) = reply::reply();
        let answering = thread::spawn({
            let alive = alive.clone();
            move || sender.send(Message::new(7, &alive))
        });
        let signal = std::sync::Arc::new(Signal(Notify::new()));
        drop(poll_reply(&mut reply, &signal));
        drop(reply);
        answering.join().unwrap();
        assert_eq!(alive.load(Relaxed), 0);
    });
}

// ---- waiters ----

/// A thread waits for room in a full inbox, whose owner takes an item and notifies. A missed change
/// is a deadlock.
#[test]
fn waiters_a_change_is_not_missed() {
    prove("waiters_a_change_is_not_missed", None, || {
        let (sender, mut inbox) = inbox::inbox(1);
        sender.send(0).unwrap();
        let waiters = Arc::new(waiters::Waiters::new());
        let waiting = thread::spawn({
            let waiters = waiters.clone();
            move || {
                let signal = std::sync::Arc::new(Signal(Notify::new()));
                let waker = std::task::Waker::from(signal.clone());
                let mut cx = std::task::Context::from_waker(&waker);
                let mut sent = std::pin::pin!(waiters.wait_for(|| sender.send(1).ok()));
                while sent.as_mut().poll(&mut cx).is_pending() {
                    signal.0.wait();
                }
            }
        });
        assert_eq!(inbox.pop(), Some(0));
        waiters.notify_all();
        waiting.join().unwrap();
        assert_eq!(inbox.pop(), Some(1));
    });
}

// ---- mailbox ----

/// A core's run queue with one place for the mailbox's owner.
struct Queue {
    queued: AtomicBool,
    /// Written by the owner in its turn, and by the thread that schedules it: one after the other,
    /// which loom checks.
    turns: UnsafeCell<usize>,
}

impl Queue {
    fn new() -> Arc<Self> {
        Arc::new(Self { queued: AtomicBool::new(false), turns: UnsafeCell::new(0) })
    }

    fn touch(&self) {
        // SAFETY: loom fails the execution if another thread may be reading or writing.
        self.turns.with_mut(|turns| unsafe { *turns += 1 });
    }

    fn schedule(&self, scheduled: Scheduled) {
        if scheduled == Scheduled::Yes {
            self.touch();
            assert!(!self.queued.swap(true, AcqRel), "the owner is queued twice");
        }
    }

    /// Gives the owner turns as long as it is queued. It does not wait for more: an item that was
    /// posted without scheduling the owner is missing at the end, when the posters are done.
    fn turns(&self, owner: &mut Owner<Message>, max: usize, ran: &mut Vec<usize>) {
        while self.queued.load(Acquire) {
            self.queued.store(false, Relaxed);
            self.touch();
            let more = owner.take(max, &mut |message| ran.push(message.read()));
            self.schedule(more);
        }
    }
}

/// Posts `count` messages and ends.
fn post(
    mailbox: &Mailbox<Message>,
    queue: &Arc<Queue>,
    alive: &std::sync::Arc<Plain>,
    messages: std::ops::Range<usize>,
) -> impl FnOnce() + use<> {
    let (mut poster, queue, alive) = (mailbox.poster(), queue.clone(), alive.clone());
    move || {
        for number in messages {
            queue.schedule(poster.post(Message::new(number, &alive)).unwrap());
        }
    }
}

/// Three posts through rings of 1 and 3 items, while the owner rests and is scheduled again: all
/// are run, once and in order.
#[test]
fn mailbox_one_poster_and_a_lane_that_grows() {
    prove("mailbox_one_poster_and_a_lane_that_grows", Some(3), || {
        let (alive, queue) = (counter(), Queue::new());
        let (mailbox, mut owner) = mailbox::mailbox(3);
        let mut ran = Vec::new();
        let poster = thread::spawn(post(&mailbox, &queue, &alive, 0..3));
        queue.turns(&mut owner, 2, &mut ran);
        queue.turns(&mut owner, 2, &mut ran);
        poster.join().unwrap();
        queue.turns(&mut owner, 2, &mut ran);
        assert_eq!((ran, alive.load(Relaxed)), (vec![0, 1, 2], 0));
    });
}

/// Two posters and an owner that is about to rest: a scheduled owner is not scheduled again, and
/// all items are run.
#[test]
fn mailbox_two_posters() {
    prove("mailbox_two_posters", Some(2), || {
        let (alive, queue) = (counter(), Queue::new());
        let (mailbox, mut owner) = mailbox::mailbox(1);
        let mut ran = Vec::new();
        let posters = [0, 1].map(|n| thread::spawn(post(&mailbox, &queue, &alive, n..n + 1)));
        queue.turns(&mut owner, 2, &mut ran);
        for poster in posters {
            poster.join().unwrap();
            queue.turns(&mut owner, 2, &mut ran);
        }
        ran.sort_unstable();
        assert_eq!((ran, alive.load(Relaxed)), (vec![0, 1], 0));
    });
}

/// The owner is dropped during a post, with a known or a new lane: the item is refused, or freed by
/// one of the two, not kept until the last handle is dropped.
#[test]
fn mailbox_closing_frees_what_is_being_posted() {
    prove("mailbox_closing_frees_what_is_being_posted", None, || {
        let alive = counter();
        let (mailbox, mut owner) = mailbox::mailbox(3);
        let mut poster = mailbox.poster();
        let poster = thread::spawn({
            let alive = alive.clone();
            move || {
                for i in 0..2 {
                    match poster.post(Message::new(i, &alive)) {
                        Ok(_) => {}
                        Err(PostError::Closed(item)) => drop(item),
                        Err(PostError::Full(_)) => panic!("not full"),
                    }
                }
                poster
            }
        });
        let _ = owner.take(1, &mut drop);
        drop(owner);
        let mut poster = poster.join().unwrap();
        assert_eq!(alive.load(Relaxed), 0, "freed although a handle is left");
        let late = poster.post(Message::new(2, &alive));
        assert!(matches!(late, Err(PostError::Closed(_))));
    });
}

/// The complete path of a message from a foreign thread: post, queue the owner, check whether its
/// core sleeps, signal. Only the post that schedules makes the later steps. The core starts with a
/// message of its own, so the other's comes before its turn, in it, when it rests, or when it
/// sleeps. A lost wake-up is a deadlock, which loom reports.
#[test]
fn mailbox_a_sleeping_owner_is_woken() {
    prove("mailbox_a_sleeping_owner_is_woken", Some(3), || {
        let (mailbox, mut owner) = mailbox::mailbox(1);
        let (sender, mut inbox) = inbox::inbox(1);
        let (flag, eventfd) = (Arc::new(SleepFlag::new()), Arc::new(Notify::new()));
        let mut queued = mailbox.poster().post(1) == Ok(Scheduled::Yes);
        let poster = thread::spawn({
            let (mut poster, flag, eventfd) = (mailbox.poster(), flag.clone(), eventfd.clone());
            move || {
                if poster.post(2) == Ok(Scheduled::Yes) {
                    sender.send(()).unwrap();
                    if flag.must_wake() {
                        eventfd.notify();
                    }
                }
            }
        });
        let mut sum = 0;
        while sum < 3 {
            queued |= inbox.pop().is_some();
            if queued {
                queued = owner.take(2, &mut |item| sum += item) == Scheduled::Yes;
            } else if flag.prepare(|| inbox.pure_check()) {
                eventfd.wait();
                flag.awake();
            }
        }
        poster.join().unwrap();
    });
}

// ---- the log ----

/// A dispatcher cloned to another thread is a second pusher of a lane. The claim excludes one of
/// them; each line arrives once or is counted.
#[test]
fn log_two_threads_in_one_lane_lose_nothing_uncounted() {
    prove("log_two_threads_in_one_lane_lose_nothing_uncounted", None, || {
        let alive = counter();
        let (lane, mut tap) = lane::lane(2);
        let lane = Arc::new(lane);
        let stray = thread::spawn({
            let (lane, alive) = (lane.clone(), alive.clone());
            move || usize::from(lane.push(Message::new(1, &alive)))
        });
        let mut pushed = usize::from(lane.push(Message::new(2, &alive)));
        pushed += usize::from(lane.push(Message::new(3, &alive)));
        pushed += stray.join().unwrap();
        drop(lane);
        let mut got = Vec::new();
        assert!(!tap.drain(9, &mut |line| got.push(line.read())));
        assert_eq!(got.len(), pushed);
        assert_eq!(got.len() as u64 + tap.state().dropped(), 3);
        // The lines of one thread are in order.
        let place = |what| got.iter().position(|line| *line == what);
        assert!(place(3).is_none() || place(2).is_none() || place(2) < place(3));
        assert_eq!(alive.load(Relaxed), 0);
    });
}

/// The writer drops a lane when it has ended and is empty, not before its last line.
#[test]
fn log_an_ended_lane_is_read_to_its_end() {
    prove("log_an_ended_lane_is_read_to_its_end", None, || {
        let alive = counter();
        let (lane, mut tap) = lane::lane(1);
        let logging = thread::spawn({
            let alive = alive.clone();
            move || (0..2).filter(|&i| lane.push(Message::new(i, &alive))).count()
        });
        let mut got = 0;
        let mut ended = false;
        for _ in 0..2 {
            ended = ended || !tap.drain(1, &mut |line| got += usize::from(line.read() < 2));
        }
        if ended {
            // A lane that the writer would drop now must be empty.
            assert_eq!(got, logging.join().unwrap());
        }
    });
}

/// A thread whose ticket is called finds its line written: the writer reads the tickets before it
/// takes lines.
#[test]
fn log_a_called_ticket_means_written() {
    prove("log_a_called_ticket_means_written", None, || {
        let (lane, mut tap) = lane::lane(2);
        let tickets = Arc::new(Tickets::new());
        let written = counter();
        let writer = thread::spawn({
            let (tickets, written) = (tickets.clone(), written.clone());
            move || {
                for _ in 0..2 {
                    let newest = tickets.newest();
                    let _ = tap.drain(9, &mut |_: usize| {
                        written.fetch_add(1, Relaxed);
                    });
                    tickets.call(newest);
                }
            }
        });
        assert!(lane.push(7));
        let ticket = tickets.take();
        if tickets.is_called(ticket) {
            assert_eq!(written.load(Relaxed), 1);
        }
        writer.join().unwrap();
    });
}

// ---- ranges ----

/// While one slot changes from one range to another, an address in a second slot's range is looked
/// up. It must not be found in the first slot, by the start of one of its ranges and the end of the
/// other.
fn places_move(name: &str, from: usize, to: usize, empty: bool) {
    prove(name, Some(3), move || {
        let ranges = Arc::new(ranges::RangeTable::new());
        let stays = ranges.add(30, 40);
        let moves = ranges.add(from, from + 10);
        if empty {
            moves.give_back();
        }
        let mover = {
            let ranges = ranges.clone();
            thread::spawn(move || {
                if !empty {
                    moves.give_back();
                }
                assert!(std::ptr::eq(ranges.add(to, to + 10), moves), "it is used again");
            })
        };
        let (found, range) = ranges.find(35).expect("it is there all the time");
        assert_eq!(range, 30..40);
        assert!(std::ptr::eq(found, stays));
        mover.join().unwrap();
        assert_eq!(ranges.find(to).map(|(_, range)| range), Some(to..to + 10));
        assert!(ranges.find(from).is_none());
    });
}

#[test]
fn places_a_range_is_found_whole_or_not_at_all() {
    let name = "places_a_range_is_found_whole_or_not_at_all";
    places_move(name, 10, 50, true);
    places_move(name, 10, 50, false);
    places_move(name, 50, 10, false);
}

#[test]
fn places_are_used_again_by_one_at_a_time() {
    prove("places_are_used_again_by_one_at_a_time", Some(3), || {
        let ranges = Arc::new(ranges::RangeTable::new());
        let place = ranges.add(10, 20);
        let takers: Vec<_> = [30, 50]
            .map(|start| {
                let ranges = ranges.clone();
                thread::spawn(move || ranges.add(start, start + 10).give_back())
            })
            .into();
        place.give_back();
        takers.into_iter().for_each(|taker| taker.join().unwrap());
        assert!([15, 35, 55].into_iter().all(|address| ranges.find(address).is_none()));
    });
}

#[test]
fn places_that_are_added_are_found_whole() {
    prove("places_that_are_added_are_found_whole", None, || {
        let ranges = Arc::new(ranges::RangeTable::new());
        let adders: Vec<_> = [10, 30]
            .map(|start| {
                let ranges = ranges.clone();
                thread::spawn(move || _ = ranges.add(start, start + 10))
            })
            .into();
        for address in [15, 35] {
            if let Some((_, range)) = ranges.find(address) {
                assert_eq!(range, address - 5..address + 5);
            }
        }
        adders.into_iter().for_each(|adder| adder.join().unwrap());
        assert!(ranges.find(15).is_some() && ranges.find(35).is_some());
    });
}

// ---- gate ----

/// A mapping, reduced to contents that loom watches.
struct Mapped {
    gate: gate::Gate,
    area: UnsafeCell<usize>,
}

// SAFETY: the area is accessed inside the gate only, and changed by a resize that is alone; loom
// fails the execution if that is not so.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(cores: usize) -> Arc<Mapped> {
        Arc::new(Mapped { gate: gate::Gate::new(cores), area: UnsafeCell::new(1) })
    }

    /// What an access of a core reads; `None` if it met a resize.
    fn read(&self, core: usize) -> Option<usize> {
        let _inside = self.gate.enter(core)?;
        // SAFETY: as for `Sync`.
        Some(self.area.with(|area| unsafe { *area }))
    }

    /// Resizes once. False if it met another resize, or accesses that were not over.
    fn resize(&self) -> bool {
        let Some(closing) = self.gate.close() else { return false };
        if !closing.is_alone() {
            return false;
        }
        // SAFETY: as for `Sync`.
        self.area.with_mut(|area| unsafe { *area += 1 });
        true
    }
}

#[test]
fn gate_nobody_is_inside_during_a_resize() {
    prove("gate_nobody_is_inside_during_a_resize", Some(3), || {
        let mapped = Mapped::new(2);
        let readers: Vec<_> = [0, 1]
            .map(|core| {
                let mapped = mapped.clone();
                thread::spawn(move || mapped.read(core))
            })
            .into();
        let resized = mapped.resize();
        let most = 1 + usize::from(resized);
        for reader in readers {
            let seen = reader.join().unwrap();
            assert!(seen.is_none_or(|seen| (1..=most).contains(&seen)), "{seen:?}");
        }
        assert_eq!(mapped.read(0), Some(most), "the gate is open again");
        assert!(mapped.resize(), "nobody stayed inside");
    });
}

#[test]
fn gate_one_resize_at_a_time() {
    prove("gate_one_resize_at_a_time", Some(3), || {
        let mapped = Mapped::new(1);
        let other = {
            let mapped = mapped.clone();
            thread::spawn(move || mapped.resize())
        };
        let (mine, others) = (mapped.resize(), other.join().unwrap());
        assert!(mine || others, "one of them closes first");
        assert_eq!(mapped.read(0), Some(1 + usize::from(mine) + usize::from(others)));
    });
}

// ---- mutants ----

#[test]
fn every_mutant_is_found() {
    find_every_mutant(MUTANTS);
}

#[test]
fn the_list_of_mutants_is_complete() {
    let sources = [
        include_str!("../src/channels/spsc.rs"),
        include_str!("../src/channels/sleep.rs"),
        include_str!("../src/channels/inbox.rs"),
        include_str!("../src/channels/reply.rs"),
        include_str!("../src/channels/waiters.rs"),
        include_str!("../src/channels/mailbox.rs"),
        include_str!("../src/memory/gate.rs"),
        include_str!("../src/memory/ranges.rs"),
        include_str!("../src/log/lane.rs"),
    ];
    list_is_complete(MUTANTS, &sources);
}

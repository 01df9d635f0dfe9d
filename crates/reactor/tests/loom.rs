//! The proofs of the lock-free parts: loom plays every interleaving, and every stale value the memory model permits,
//! of the small scenarios below.
//!
//! Run by `scripts/loom.sh`; empty in a normal build. The modules are included by path, so that nothing else of the
//! reactor (io_uring, libc) is compiled under loom.
//!
//! A scenario is one test; it prints how many executions loom went through. [`MUTANTS`] lists for each mutation site
//! (see `sync.rs`) the scenario that must find it; `every_mutant_is_found` starts this program anew for each, as a
//! failed loom execution cannot always be unwound.
//!
//! A preemption bound limits how often a thread is interrupted where it would not have to be. Where a scenario has
//! one, it is written there; without one the search is complete.
#![cfg(loom)]
// Stress tests of the modules are compiled out under loom, and not each of their functions has a scenario.
#![allow(dead_code, reason = "the modules are included whole")]

use std::sync::atomic::{AtomicUsize as Plain, Ordering::Relaxed};

use loom::{
    cell::UnsafeCell,
    sync::{Arc, Notify},
    thread,
};

#[path = "../src/log/lane.rs"]
mod lane;
#[path = "../src/mailbox.rs"]
mod mailbox;
#[path = "../src/sleep.rs"]
mod sleep;
#[path = "../src/spsc.rs"]
mod spsc;
#[path = "../src/sync.rs"]
mod sync;

use lane::Tickets;
use mailbox::{Owner, PostError, Scheduled};
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
    ("mailbox.drain_until_empty", "mailbox_two_posters_turns_of_two"),
    ("mailbox.count_before_push", "mailbox_two_posters_turns_of_two"),
    ("mailbox.count_relaxed", "mailbox_two_posters_turns_of_one"),
    ("mailbox.subtract_relaxed", "mailbox_two_posters_turns_of_one"),
    ("mailbox.push_relaxed", "mailbox_two_posters_turns_of_two"),
    ("mailbox.fetch_relaxed", "mailbox_two_posters_turns_of_two"),
    ("mailbox.reserve_unchecked", "mailbox_holds_no_more_than_its_capacity"),
    ("mailbox.close_without_sweep", "mailbox_closing_frees_what_is_being_posted"),
    ("log.no_claim", "log_two_threads_in_one_lane_lose_nothing_uncounted"),
    ("log.claim_relaxed", "log_two_threads_in_one_lane_lose_nothing_uncounted"),
    ("log.unclaim_relaxed", "log_two_threads_in_one_lane_lose_nothing_uncounted"),
    ("log.end_store_relaxed", "log_an_ended_lane_is_read_to_its_end"),
    ("log.end_load_relaxed", "log_an_ended_lane_is_read_to_its_end"),
    ("log.take_relaxed", "log_a_called_ticket_means_written"),
    ("log.newest_relaxed", "log_a_called_ticket_means_written"),
];

/// Plays `scenario` through and says how many executions that took.
fn prove(name: &str, preemption_bound: Option<usize>, scenario: impl Fn() + Sync + Send + 'static) {
    let executions = std::sync::Arc::new(Plain::new(0));
    let mut loom = loom::model::Builder::new();
    // A long run looks one preemption deeper.
    let deeper = usize::from(std::env::var_os("MILLRACE_LONG").is_some());
    let preemption_bound = preemption_bound.map(|bound| bound + deeper);
    loom.preemption_bound = preemption_bound;
    loom.max_branches = 10_000;
    let count = executions.clone();
    loom.check(move || {
        count.fetch_add(1, Relaxed);
        scenario();
    });
    let bound = preemption_bound.map_or("complete".to_owned(), |n| format!("preemption bound {n}"));
    println!("proved {name}: {} executions, {bound}", executions.load(Relaxed));
}

/// A message whose content loom watches: reading it without a happens-before edge from its making is an error. It is
/// counted while it lives.
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
        // SAFETY: loom fails the execution if anybody may be writing.
        self.content.with(|content| unsafe { *content })
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // As an owner would: exclusive access, checked by loom.
        // SAFETY: loom fails the execution if anybody may be reading or writing.
        self.content.with_mut(|content| unsafe { *content = usize::MAX });
        self.alive.fetch_sub(1, Relaxed);
    }
}

// The counter `alive` is a plain atomic that loom does not see: it adds no ordering that could hide a fault.
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

/// Three items through two slots, the indices passing `usize::MAX`: the producer meets "full", the consumer "empty".
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

/// Two pushes, one publish: who sees the first sees the second, and a look that says "there is one" is right.
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

/// Both ends are dropped at the same time, with one item read, one published, one only pushed.
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

/// The receiving core: pops until it has `count` items, sleeping when there is nothing. A lost wake-up is a deadlock,
/// which loom reports. `Notify` is the eventfd: it remembers one signal, and it may wake for no reason.
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

/// The sleeper may go to sleep again while the first signal is still on its way.
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

/// Two sending cores and one announcement of sleep: one of them, not both, makes the system call.
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
        // Wakes for a reason of its own, a timer: whoever comes later must not signal.
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

// ---- mailbox ----

/// An owner without a core: whoever is told to schedule it runs it at once, on his own thread. Nothing but the
/// mailbox's count keeps two of them apart, and loom watches the cell.
struct Shard {
    owner: UnsafeCell<Owner<Message>>,
    /// What has been run, as `poster * 10 + i`.
    log: UnsafeCell<Vec<usize>>,
}

// SAFETY: not proved here but by loom, which watches both cells: that is the test.
unsafe impl Sync for Shard {}
// SAFETY: as above.
unsafe impl Send for Shard {}

impl Shard {
    fn run(&self, max: usize) {
        loop {
            // SAFETY: loom fails the execution if two threads are here without an order.
            let more = self.owner.with_mut(|owner| unsafe {
                (*owner)
                    .take(max, &mut |message| self.log.with_mut(|log| (*log).push(message.read())))
            });
            if more == Scheduled::No {
                return;
            }
        }
    }
}

fn two_posters(name: &'static str, max: usize) {
    prove(name, Some(3), move || {
        let alive = counter();
        let (mailbox, owner) = mailbox::mailbox(4);
        let shard =
            Arc::new(Shard { owner: UnsafeCell::new(owner), log: UnsafeCell::new(Vec::new()) });
        let post = |poster: usize| {
            let (mailbox, shard, alive) = (mailbox.clone(), shard.clone(), alive.clone());
            move || {
                for i in 0..2 {
                    if mailbox.post(Message::new(poster * 10 + i, &alive)).unwrap()
                        == Scheduled::Yes
                    {
                        shard.run(max);
                    }
                }
            }
        };
        let other = thread::spawn(post(1));
        post(0)();
        other.join().unwrap();
        // Everybody is done, so everything was run, without anybody asking again.
        // SAFETY: the other thread has ended; loom checks that.
        let log = shard.log.with(|log| unsafe { (*log).clone() });
        for poster in 0..2 {
            let ran: Vec<usize> = log.iter().copied().filter(|item| item / 10 == poster).collect();
            assert_eq!(ran, [poster * 10, poster * 10 + 1], "all, once, in order: {log:?}");
        }
        assert_eq!((log.len(), alive.load(Relaxed), mailbox.len()), (4, 0, 0));
    });
}

#[test]
fn mailbox_two_posters_turns_of_one() {
    two_posters("mailbox_two_posters_turns_of_one", 1);
}

/// Turns of two are what finds a turn that runs more than was counted; with turns of one that fault stays hidden.
#[test]
fn mailbox_two_posters_turns_of_two() {
    two_posters("mailbox_two_posters_turns_of_two", 2);
}

/// Two posters, one place.
#[test]
fn mailbox_holds_no_more_than_its_capacity() {
    prove("mailbox_holds_no_more_than_its_capacity", Some(3), || {
        let (mailbox, mut owner) = mailbox::mailbox(1);
        let other = thread::spawn({
            let mailbox = mailbox.clone();
            move || usize::from(mailbox.post(1).is_ok())
        });
        let mine = usize::from(mailbox.post(0).is_ok());
        let posted = mine + other.join().unwrap();
        assert_eq!(posted, 1, "one is accepted, one is refused");
        let mut ran = 0;
        assert_eq!(owner.take(4, &mut |_| ran += 1), Scheduled::No);
        assert_eq!(ran, 1);
        assert_eq!(mailbox.post(2), Ok(Scheduled::Yes), "there is room again");
    });
}

/// The owner goes while a poster is half-way: the item is refused, or freed by one of the two, not kept until the
/// last handle goes.
#[test]
fn mailbox_closing_frees_what_is_being_posted() {
    prove("mailbox_closing_frees_what_is_being_posted", None, || {
        let alive = counter();
        let (mailbox, owner) = mailbox::mailbox(4);
        let poster = thread::spawn({
            let (mailbox, alive) = (mailbox.clone(), alive.clone());
            move || {
                for i in 0..2 {
                    match mailbox.post(Message::new(i, &alive)) {
                        Ok(_) => {}
                        Err(PostError::Closed(item)) => drop(item),
                        Err(PostError::Full(_)) => panic!("not full"),
                    }
                }
            }
        });
        drop(owner);
        poster.join().unwrap();
        assert_eq!(alive.load(Relaxed), 0, "freed although a handle is left");
        assert!(mailbox.is_closed());
    });
}

/// The whole way of a message from a foreign thread: post, look whether the owner's core sleeps, signal. Only the post
/// that schedules does the latter.
#[test]
fn mailbox_a_sleeping_owner_is_woken() {
    prove("mailbox_a_sleeping_owner_is_woken", Some(2), || {
        let (mailbox, mut owner) = mailbox::mailbox(2);
        let (flag, eventfd) = (Arc::new(SleepFlag::new()), Arc::new(Notify::new()));
        let post = |item| {
            let (mailbox, flag, eventfd) = (mailbox.clone(), flag.clone(), eventfd.clone());
            move || {
                if mailbox.post(item) == Ok(Scheduled::Yes) && flag.must_wake() {
                    eventfd.notify();
                }
            }
        };
        let posters = [thread::spawn(post(1)), thread::spawn(post(2))];
        let mut sum = 0;
        while sum < 3 {
            if owner.take(2, &mut |item| sum += item) == Scheduled::Yes {
                continue;
            }
            if sum < 3 && flag.prepare(|| owner.pure_check()) {
                eventfd.wait();
                flag.awake();
            }
        }
        for poster in posters {
            poster.join().unwrap();
        }
    });
}

// ---- the log ----

/// A dispatcher that was cloned to another thread brings a second pusher into a lane. The claim keeps them apart; each
/// line arrives once or is counted.
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

/// The writer lets go of a lane when it has ended and is empty: not before its last line.
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
            // What the writer would forget now must be empty.
            assert_eq!(got, logging.join().unwrap());
        }
    });
}

/// Who finds its ticket called finds its line written: the writer looks at the tickets before it looks for lines.
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

// ---- mutants ----

/// Each proof must be able to fail: with one site made wrong, the scenario named for it must report it.
#[test]
fn every_mutant_is_found() {
    let program = std::env::current_exe().unwrap();
    let mut missed = Vec::new();
    for &(mutant, scenario) in MUTANTS {
        let output = std::process::Command::new(&program)
            .args(["--exact", scenario, "--nocapture"])
            .env("MILLRACE_MUTANT", mutant)
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        // The scenario must have been there, and must have failed by a finding.
        let found = !output.status.success()
            && text.contains("running 1 test")
            && text.contains("panicked at");
        println!(
            "mutant {mutant}: {} by {scenario}: {}",
            if found { "found" } else { "MISSED" },
            finding(&text)
        );
        if !found {
            missed.push(mutant);
        }
    }
    println!("mutants: {} of {} found", MUTANTS.len() - missed.len(), MUTANTS.len());
    assert!(missed.is_empty(), "mutants survive: {missed:?}");
}

/// The first line of what the first panic said.
fn finding(text: &str) -> &str {
    let mut lines = text.lines().skip_while(|line| !line.contains("panicked at"));
    lines.next();
    lines.map(str::trim).find(|line| !line.is_empty()).unwrap_or("")
}

/// No site is without a mutant in the list, and the list names no site that is gone.
#[test]
fn the_list_of_mutants_is_complete() {
    let mut sites = std::collections::BTreeSet::new();
    for source in [
        include_str!("../src/spsc.rs"),
        include_str!("../src/sleep.rs"),
        include_str!("../src/mailbox.rs"),
        include_str!("../src/log/lane.rs"),
    ] {
        for call in ["mutant(\"", "fence_seq_cst(\"", "weaken("] {
            for (at, _) in source.match_indices(call) {
                let line = source[at..].lines().next().unwrap();
                sites.extend(line.split('"').nth(1));
            }
        }
    }
    let listed: std::collections::BTreeSet<&str> =
        MUTANTS.iter().map(|(mutant, _)| *mutant).collect();
    assert_eq!(sites, listed);
}

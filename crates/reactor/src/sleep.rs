//! The flag that says "I sleep, wake me": how a core goes to sleep without missing a message.
//!
//! A wake-up is a system call that costs its sender some 12 µs here, so it is made only when
//! needed, at most once per destination and turn; and a message must never lie unseen while its
//! receiver sleeps. Two sides, one flag:
//!
//! | sleeper | sender |
//! |---|---|
//! | 1. set the flag, by a read-modify-write | 1. publish the message |
//! | 2. `SeqCst` fence | 2. `SeqCst` fence |
//! | 3. look once more for messages: if there are any, take the flag back and go on | 3. test the flag; if set, take it (swap) |
//! | 4. wait for the signal; clear the flag | 4. whoever took it signals |
//!
//! Of the two fences one comes first. If the sleeper's, the sender sees the flag and signals; if
//! the sender's, the sleeper's second look sees the message. Without either fence both may look
//! away, and the message waits for the next one: that is the mutant `sleep.no_sender_fence` of the
//! loom proof.
//!
//! What always holds: for each time the flag was set, at most one sender is told to signal. A
//! signal may arrive after the sleeper took the flag back (it went on at step 3, or woke for
//! another reason): the next sleep then ends at once, which is harmless. So a signal means "look",
//! never "there is a message".
//!
//! The flag knows nothing of eventfd or the ring; the driver does. The flag guards whatever the
//! second look covers: rings from other cores, the core's inbox, a guest's ring.

use loomable::{AtomicBool, CachePadded, Ordering, fence_seq_cst, mutant};

/// One per sleeper, shared with everybody who sends to it; see the module.
#[derive(Debug)]
pub struct SleepFlag {
    asleep: CachePadded<AtomicBool>,
}

impl SleepFlag {
    /// A flag whose owner is awake.
    pub fn new() -> Self {
        Self { asleep: CachePadded(AtomicBool::new(false)) }
    }

    /// Sleeper: announces sleep and looks once more. True: wait for the signal now, then call
    /// [`awake`](Self::awake). False: `has_work` found something, the announcement is
    /// withdrawn.
    ///
    /// `has_work` must look at every source whose senders use this flag.
    #[must_use]
    pub fn prepare(&self, has_work: impl FnOnce() -> bool) -> bool {
        if mutant("sleep.look_before_flag") {
            let work = has_work();
            self.asleep.swap(true, Ordering::AcqRel);
            return !work;
        }
        // Not a store: each of the sleeper's writes to the flag sits directly behind the value it
        // replaced, so that a sender's swap can never be overtaken by an older "awake". A
        // plain store is probably right on every machine there is, but loom cannot prove
        // it, and this path ends in a system call anyway.
        self.set(true);
        fence_seq_cst("sleep.no_sleeper_fence");
        if has_work() {
            self.awake();
            return false;
        }
        true
    }

    /// Sleeper: takes the announcement back after waking, whatever the reason for waking was.
    pub fn awake(&self) {
        if !mutant("sleep.stay_flagged") {
            self.set(false);
        }
    }

    fn set(&self, asleep: bool) {
        if mutant("sleep.plain_store") {
            self.asleep.store(asleep, Ordering::Relaxed);
        } else {
            self.asleep.swap(asleep, Ordering::AcqRel);
        }
    }

    /// Sender, after publishing, from any thread: whether the caller has to signal the sleeper.
    #[must_use]
    #[inline]
    pub fn must_wake(&self) -> bool {
        fence_seq_cst("sleep.no_sender_fence");
        if mutant("sleep.no_take") {
            return self.asleep.load(Ordering::Relaxed);
        }
        // The load keeps the line shared while the receiver is awake, which is the common case.
        self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel)
    }

    /// Whether the owner has announced sleep: for statistics only, it may change at any moment.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }
}

impl Default for SleepFlag {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
#[expect(clippy::disallowed_methods, reason = "the stress test needs real threads")]
mod tests {
    use std::sync::{Arc, atomic::AtomicU64};

    use super::*;
    use crate::spsc;

    #[test]
    fn an_awake_owner_is_not_signalled() {
        let flag = SleepFlag::new();
        assert!(!flag.must_wake());
        assert!(!flag.is_asleep());
    }

    #[test]
    fn a_sleeping_owner_is_signalled_once() {
        let flag = SleepFlag::new();
        assert!(flag.prepare(|| false));
        assert!(flag.is_asleep());
        assert_eq!([flag.must_wake(), flag.must_wake()], [true, false]);
        flag.awake();
        assert!(!flag.must_wake());
    }

    #[test]
    fn work_found_at_the_second_look_withdraws_the_announcement() {
        let flag = SleepFlag::new();
        assert!(!flag.prepare(|| true));
        assert!(!flag.must_wake());
    }

    /// A lost wake-up shows as a test that never ends; `park` and `unpark` stand for the eventfd.
    #[test]
    fn no_message_is_slept_through() {
        let count = if cfg!(miri) { 100 } else { 100_000 };
        let flag = Arc::new(SleepFlag::new());
        let signals = Arc::new(AtomicU64::new(0));
        let (mut tx, mut rx) = spsc::ring::<u32>(4);
        let receiver = std::thread::spawn({
            let flag = flag.clone();
            move || {
                let mut sleeps = 0;
                for expected in 0..count {
                    let got = loop {
                        if let Some(item) = rx.pop() {
                            break item;
                        }
                        if flag.prepare(|| rx.pure_check()) {
                            std::thread::park();
                            flag.awake();
                            sleeps += 1;
                        }
                    };
                    assert_eq!(got, expected);
                }
                sleeps
            }
        });
        for i in 0..count {
            while tx.push_published(i).is_err() {
                std::thread::yield_now();
            }
            if flag.must_wake() {
                signals.fetch_add(1, Ordering::Relaxed);
                receiver.thread().unpark();
            }
        }
        let sleeps: u64 = receiver.join().unwrap();
        // Each sleep ends by a signal or spuriously; a signal belongs to an announcement, and so
        // there cannot be many more signals than messages.
        assert!(signals.load(Ordering::Relaxed) <= u64::from(count));
        assert!(sleeps <= u64::from(count) * 4, "{sleeps} sleeps for {count} messages");
    }
}

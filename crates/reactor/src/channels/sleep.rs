//! The flag with which a core announces sleep, so that it misses no message.
//!
//! A wake-up is a system call that costs its sender about 12 µs on the reference machine, so it is
//! made only when needed, at most once per destination and turn. A message must never stay unseen
//! while its receiver sleeps. Two sides share one flag:
//!
//! | sleeper | sender |
//! |---|---|
//! | 1. set the flag, by a read-modify-write | 1. publish the message |
//! | 2. `SeqCst` fence | 2. `SeqCst` fence |
//! | 3. check once more for messages: if there are any, clear the flag and continue | 3. test the flag; if set, take it (swap) |
//! | 4. wait for the signal; clear the flag | 4. the sender that took it signals |
//!
//! One of the two fences comes first. If it is the sleeper's, the sender sees the flag and signals.
//! If it is the sender's, the sleeper's second check sees the message. Without either fence both
//! may miss the other's write, and the message waits for the next one: mutant
//! `sleep.no_sender_fence` of the loom proof.
//!
//! Invariant: each time the flag is set, at most one sender is told to signal. A signal may arrive
//! after the sleeper cleared the flag (it found work in step 3, or woke for another reason): the
//! next sleep then ends immediately, which is harmless. So a signal means "check for work", not
//! "there is a message".
//!
//! The driver, not the flag, knows the eventfd and the ring. The flag covers every source that the
//! second check covers: rings from other cores, the core's inbox, a guest's ring.

use loomable::{AtomicBool, CachePadded, Ordering, fence_seq_cst, mutant};

/// One per sleeper, shared with all its senders; see the module text.
#[derive(Debug)]
pub struct SleepFlag {
    asleep: CachePadded<AtomicBool>,
}

impl SleepFlag {
    /// A flag whose owner is awake.
    pub fn new() -> Self {
        Self { asleep: CachePadded(AtomicBool::new(false)) }
    }

    /// Sleeper: announces sleep and checks once more. True: wait for the signal, then call
    /// [`awake`](Self::awake). False: `has_work` found something, and the flag is cleared.
    ///
    /// `has_work` must check every source whose senders use this flag.
    #[must_use]
    pub fn prepare(&self, has_work: impl FnOnce() -> bool) -> bool {
        if mutant("sleep.look_before_flag") {
            let work = has_work();
            self.asleep.swap(true, Ordering::AcqRel);
            return !work;
        }
        // Not a store: a read-modify-write follows the value it replaces directly, so an older
        // "awake" can never overtake a sender's swap. A plain store is probably right on every
        // existing machine, but loom cannot prove it, and this path ends in a system call anyway.
        self.set(true);
        fence_seq_cst("sleep.no_sleeper_fence");
        if has_work() {
            self.awake();
            return false;
        }
        true
    }

    /// Sleeper: clears the flag after waking, whatever the reason.
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

    /// Whether the owner has announced sleep. For statistics only: it may change at any time.
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

    /// A lost wake-up shows as a test that never ends; `park` and `unpark` take the eventfd's part.
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
        // Each sleep ends by a signal or spuriously. Each signal belongs to one announcement, so
        // there cannot be many more signals than messages.
        assert!(signals.load(Ordering::Relaxed) <= u64::from(count));
        assert!(sleeps <= u64::from(count) * 4, "{sleeps} sleeps for {count} messages");
    }
}

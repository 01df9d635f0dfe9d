//! A target that sleeps whenever it may and a guest that kicks only when asked to, on two threads: whoever goes to
//! sleep is woken. Without the fence in `arm_kick` both miss the other within a few thousand rounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use super::guest::*;
use crate::*;

const ROUNDS: u64 = 10_000;

/// What each side tells the other, besides the ring.
#[derive(Default)]
struct Shared {
    kicks: AtomicU64,
    /// The request, counted from 1, that the guest has made and will not kick for.
    waits_for: AtomicU64,
    over: AtomicBool,
}

fn nobody_waits_for_ever(form: Form, features: u64) {
    let start = if form == Form::Split { 0 } else { 0x8000 };
    let mut guest = Guest::new(form, 8, start, features | F_INDIRECT_DESC);
    let memory = guest.memory.clone();
    let mut ring = guest.start(None);
    let shared = Arc::new(Shared::default());
    let theirs = shared.clone();
    #[expect(clippy::disallowed_methods, reason = "the guest is a thread of its own")]
    let driver = std::thread::spawn(move || {
        let mut dice = Dice(1);
        for seq in 0..ROUNDS {
            // At all distances from the target's going to sleep.
            for _ in 0..dice.roll(60) {
                std::hint::spin_loop();
            }
            assert!(guest.add(seq % 1024, true));
            if guest.must_kick(1) {
                theirs.kicks.fetch_add(1, SeqCst);
            } else {
                theirs.waits_for.store(seq + 1, SeqCst);
            }
            while guest.collect().is_empty() {
                if theirs.over.load(SeqCst) {
                    return;
                }
                std::thread::yield_now();
            }
        }
        theirs.over.store(true, SeqCst);
        theirs.kicks.fetch_add(1, SeqCst);
    });
    let (mut tags, mut finished, mut seen, mut done) = (Vec::new(), Vec::new(), 0, 0);
    while !shared.over.load(SeqCst) {
        while ring.pop(&memory, &disk(), 8, &mut tags).unwrap() > 0 {
            finished.extend(tags.drain(..).map(|tag| Finished { tag, status: Status::Ok }));
            done += ring.complete(&memory, None, &finished) as u64;
            finished.clear();
        }
        if !ring.arm_kick(None) {
            ring.disarm_kick(None);
            continue;
        }
        loop {
            let kicks = shared.kicks.load(SeqCst);
            if kicks != seen {
                seen = kicks;
                break;
            }
            if shared.waits_for.load(SeqCst) > done && shared.kicks.load(SeqCst) == seen {
                shared.over.store(true, SeqCst);
                driver.join().unwrap();
                panic!("{form:?}: the target sleeps and the guest does not kick");
            }
            std::thread::yield_now();
        }
        ring.disarm_kick(None);
    }
    driver.join().unwrap();
}

#[test]
fn a_sleeping_target_is_kicked() {
    for form in [Form::Split, Form::Packed] {
        for features in [0, F_EVENT_IDX] {
            nobody_waits_for_ever(form, features);
        }
    }
}

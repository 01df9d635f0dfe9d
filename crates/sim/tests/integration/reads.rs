//! Reads over a failing disk, seed by seed.

use std::cell::RefCell;
use std::rc::Rc;

use reactor::sim::{Fault, FaultKind, SimConfig, World};
use reactor::{Class, Core};
use sim::database::database;
use sim::reads::{DIR, Report, reads, reads_checking};
use sim::seeds;

#[test]
fn every_answer_is_right_or_an_error_and_all_keys_are_readable_after_healing() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<Report>> = RefCell::default();
    seeds::each("one_seed", |seed| all.borrow_mut().push(reads(seed)));
    let all = all.into_inner();
    // A simulation without faults proves nothing.
    let sum = |of: fn(&Report) -> u64| all.iter().map(of).sum::<u64>();
    println!(
        "{} worlds: {} right answers, {} errors, {} dropped requests, {} failed openings",
        all.len(),
        sum(|r| r.right),
        sum(|r| r.errors),
        sum(|r| r.dropped),
        sum(|r| r.failed_openings),
    );
    if all.len() >= 20 {
        assert!(sum(|r| r.right) > 10_000);
        assert!(sum(|r| r.errors) > 100);
        assert!(sum(|r| r.dropped) > 500);
        assert!(sum(|r| r.failed_openings) > 0);
        assert!(sum(|r| r.faults.rotten) > 100 && sum(|r| r.faults.flips) > 50);
        assert!(sum(|r| r.faults.stalls) > 10 && sum(|r| r.faults.stuck) > 0);
        assert!(sum(|r| r.faults.shorts) > 50 && sum(|r| r.faults.errors) > 100);
    }
}

/// Replays one seed: `MILLRACE_SEED=… cargo test -p millrace-sim one_seed -- --nocapture`.
#[test]
fn one_seed() {
    println!("{:#?}", reads(seeds::one().unwrap_or(1)));
}

#[test]
fn the_same_seed_twice_is_the_same_run() {
    for seed in [3, 1_000_003] {
        assert_eq!(reads(seed), reads(seed), "seed {seed}");
    }
}

/// A test that cannot fail proves nothing: a reader that trusts the disk must be caught.
#[test]
fn a_reader_that_does_not_check_blocks_is_caught() {
    let caught = (0..20).any(|seed| {
        let run = std::panic::catch_unwind(|| reads_checking(seed, false));
        run.is_err()
    });
    assert!(caught, "flipped bits went unnoticed");
}

/// Latencies of gets in simulated nanoseconds, sorted; perhaps one read takes a second longer.
fn latencies(stall: bool) -> Vec<u64> {
    let made = Rc::new(database(8));
    let world = World::new(5, 1, SimConfig::default());
    made.install(&world, DIR);
    let inside = world.clone();
    let mut all = world
        .run(move |core: Core| {
            let (world, made) = (inside.clone(), made.clone());
            async move {
                let db = lsm::Db::open(&core, DIR.as_ref(), lsm::OpenOptions::default()).await;
                let reader = db.unwrap().attach(&core);
                let all: Rc<RefCell<Vec<u64>>> = Rc::default();
                let mut tasks = Vec::new();
                if stall {
                    world.add_fault(
                        Fault::new(FaultKind::Stall(1_000_000_000..1_000_000_001)).times(1),
                    );
                }
                let key = made.model.first_key_value().unwrap().0.clone();
                let (c, r) = (core.clone(), reader.clone());
                let first = core.spawn(Class::Foreground, async move {
                    let begin = c.now_ns();
                    r.get(0, &key, None).await.unwrap().unwrap();
                    c.now_ns() - begin
                });
                // The first read stalls at the device before the others begin; they read other
                // blocks.
                core.sleep_ns(10_000).await;
                let keys: Vec<Vec<u8>> =
                    made.model.keys().skip(made.model.len() / 3).cloned().collect();
                for _ in 0..64 {
                    let (c, r, keys, all) =
                        (core.clone(), reader.clone(), keys.clone(), all.clone());
                    tasks.push(core.spawn(Class::Foreground, async move {
                        for _ in 0..100 {
                            let key = &keys[c.random_u64() as usize % keys.len()];
                            let begin = c.now_ns();
                            r.get(0, key, None).await.unwrap().unwrap();
                            all.borrow_mut().push(c.now_ns() - begin);
                        }
                    }));
                }
                for task in tasks {
                    task.await;
                }
                assert_eq!(first.try_take().is_none(), stall, "still in flight");
                if stall {
                    assert!(first.await >= 1_000_000_000);
                }
                all.take()
            }
        })
        .unwrap()
        .remove(0);
    all.sort_unstable();
    all
}

#[test]
fn a_read_that_stalls_for_a_second_does_not_delay_others() {
    let (well, stalled) = (latencies(false), latencies(true));
    let percent = |all: &[u64], n: usize| all[all.len() * n / 100];
    for n in [50, 90, 99] {
        let (before, after) = (percent(&well, n), percent(&stalled, n));
        assert!(
            after.abs_diff(before) <= before / 10,
            "p{n} was {before} ns and is {after} ns with one stalled read"
        );
    }
    assert!(stalled.last().unwrap() < &10_000_000, "none waited for the stalled one");
}

//! A guest whose disk goes from process to process, with trouble at any step, seed by seed.

mod handover;

use std::cell::RefCell;

use handover::{GO, HELLO, Report, handover};
use sim::seeds;

#[test]
fn a_disk_is_handed_over_or_not_whatever_happens_on_the_way() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<Report>> = RefCell::default();
    seeds::many("one_hand_over", 5, |seed| all.borrow_mut().push(handover(seed)));
    let all = all.into_inner();
    let sum = |of: fn(&Report) -> u64| all.iter().map(of).sum::<u64>();
    let each = |of: fn(&Report) -> &[u64]| {
        let of_all = all.iter().map(of);
        of_all.fold(Vec::new(), |mut sum: Vec<u64>, one| {
            sum.resize(one.len(), 0);
            sum.iter_mut().zip(one).for_each(|(sum, one)| *sum += one);
            sum
        })
    };
    let gave_up = each(|r| &r.gave_up);
    let tampered = each(|r| &r.tampered);
    println!(
        "{} worlds, {} with two guests: {} nodes started, {} killed, {} times without power; {} upgrades, {} switched, gave up while \
         starting, opening, taking: {gave_up:?}, {} with a disk that followed, {} because late, {} because gone, {} because of a version; \
         messages tampered with by kind: {tampered:?}; killed on the way: {}, {} and {} old ones before, in and after the \
         switch, {} and {} new ones; {} requests, {} done again, {} sectors checked, {} connections",
        all.len(),
        sum(|r| r.two),
        sum(|r| r.started),
        sum(|r| r.killed),
        sum(|r| r.guest.power_cuts),
        sum(|r| r.upgrades),
        sum(|r| r.switched),
        sum(|r| r.followed),
        sum(|r| r.late),
        sum(|r| r.gone),
        sum(|r| r.version),
        sum(|r| r.old_killed_before),
        sum(|r| r.old_killed_between),
        sum(|r| r.old_killed_after),
        sum(|r| r.new_killed_before),
        sum(|r| r.new_killed_after),
        sum(|r| r.guest.requests),
        sum(|r| r.guest.resubmitted),
        sum(|r| r.guest.checked_sectors),
        sum(|r| r.reconnected),
    );
    // A simulation in which nothing goes wrong proves nothing.
    if all.len() >= 100 {
        assert!(all.iter().any(|r| r.guest.packed) && !all.iter().all(|r| r.guest.packed));
        assert!(sum(|r| r.killed) > 20 && sum(|r| r.guest.power_cuts) > 10);
        assert!(sum(|r| r.upgrades) > 200 && sum(|r| r.switched) > 100);
        assert!(gave_up.iter().all(|&count| count > 2), "{gave_up:?}");
        assert!(sum(|r| r.two) > 20 && sum(|r| r.followed) > 5);
        assert!(sum(|r| r.late) > 5 && sum(|r| r.gone) > 5 && sum(|r| r.version) > 0);
        let tampered = &tampered[HELLO as usize..GO as usize];
        assert!(tampered.iter().all(|&count| count > 0), "{tampered:?}");
        assert!(sum(|r| r.old_killed_before) > 10 && sum(|r| r.old_killed_after) > 0);
        assert!(sum(|r| r.old_killed_between) > 0);
        assert!(sum(|r| r.new_killed_before) > 10 && sum(|r| r.new_killed_after) > 10);
        assert!(sum(|r| r.guest.resubmitted) > 500);
    }
}

/// Replays one seed: `MILLRACE_SEED=… cargo test -p millrace-node one_hand_over -- --nocapture`.
#[test]
fn one_hand_over() {
    node::start_tool_log().unwrap();
    println!("{:#?}", handover(seeds::one().unwrap_or(1)));
}

#[test]
fn the_same_seed_twice_is_the_same_hand_over() {
    for seed in 0..5 {
        assert_eq!(handover(seed), handover(seed), "seed {seed}");
    }
}

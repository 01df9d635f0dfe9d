//! A guest whose disk moves from process to process, with faults at every step, seed by seed.

use std::cell::RefCell;

use crate::handover::kept;
use crate::handover::moves;
use crate::handover::sends;
use crate::handover::{GO, HELLO, Meanwhile, Report, declined, detached, handover, unanswered};
use reactor::sim::Access;
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
        "{} worlds, {} with two guests: {} nodes started, {} killed, {} power cuts; {} upgrades, {} switched, gave up while \
         starting, opening, taking: {gave_up:?}, {} with a disk that followed, {} with requests in flight, {} old and {} new nodes killed then, {} too late, {} successors gone, {} of another version; \
         messages tampered with by kind: {tampered:?}; killed on the way: {}, {} and {} old nodes before, in and after the \
         switch, {} and {} new ones; {} requests, {} resubmitted, {} sectors checked, {} connections",
        all.len(),
        sum(|r| r.two),
        sum(|r| r.started),
        sum(|r| r.killed),
        sum(|r| r.guest.power_cuts),
        sum(|r| r.upgrades),
        sum(|r| r.switched),
        sum(|r| r.followed),
        sum(|r| r.held),
        sum(|r| r.killed_under_way[0]),
        sum(|r| r.killed_under_way[1]),
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
    // A simulation without faults proves nothing.
    if all.len() >= 100 {
        assert!(all.iter().any(|r| r.guest.packed) && !all.iter().all(|r| r.guest.packed));
        assert!(sum(|r| r.killed) > 20 && sum(|r| r.guest.power_cuts) > 10);
        assert!(sum(|r| r.upgrades) > 200 && sum(|r| r.switched) > 100);
        assert!(gave_up.iter().all(|&count| count > 2), "{gave_up:?}");
        assert!(sum(|r| r.two) > 20 && sum(|r| r.followed) > 5);
        let killed = each(|r| &r.killed_under_way);
        assert!(sum(|r| r.held) > 5 && killed.iter().all(|&count| count > 0), "{killed:?}");
        assert!(sum(|r| r.late) > 5 && sum(|r| r.gone) > 5 && sum(|r| r.version) > 0);
        let tampered = &tampered[HELLO as usize..GO as usize];
        assert!(tampered.iter().all(|&count| count > 0), "{tampered:?}");
        assert!(sum(|r| r.old_killed_before) > 10 && sum(|r| r.old_killed_after) > 0);
        assert!(sum(|r| r.old_killed_between) > 0);
        assert!(sum(|r| r.new_killed_before) > 10 && sum(|r| r.new_killed_after) > 10);
        assert!(sum(|r| r.guest.resubmitted) > 500);
    }
}

/// Reads, writes and flushes that a device does not answer delay neither their own disk nor its
/// neighbour for longer than documented, and come back when they are answered, each once. A late
/// answer changes nothing that the guest reads.
#[test]
fn a_disk_whose_device_does_not_answer_is_handed_over_with_its_requests_in_flight() {
    for seed in 0..6 {
        for access in [Access::Read, Access::Write, Access::Sync] {
            let told = unanswered(seed, access);
            println!("{access:?}: {told:?}");
            assert!((2_000_000_000..2_500_000_000).contains(&told.over_ns), "{told:?}");
            // Flushes wait for one that is not answered, and finally occupy the whole queue.
            let least = if access == Access::Sync { 20 } else { 1000 };
            assert!(told.done > least, "{told:?}");
            assert!(told.neighbour_ns < 500_000_000, "{told:?}");
            assert!(told.resubmitted >= 3, "{told:?}");
        }
    }
}

/// A disk that the successor cannot take as it is is handed over without its connection, with its
/// counters, wherever it is in the order; its neighbour notices nothing. The same holds for a disk
/// that it cannot take at all.
#[test]
fn a_declined_disk_stops_no_upgrade_and_harms_no_other_disk() {
    let cases: [(&[usize], [u64; 2]); 6] = [
        (&[0], [2, 1]),
        (&[1], [1, 2]),
        (&[0, 1], [2, 2]),
        // The third state is that of the first declined disk.
        (&[0, 2], [2, 1]),
        (&[1, 2], [1, 2]),
        (&[0, 1, 2, 3], [2, 2]),
    ];
    for (states, connects) in cases {
        for seed in 0..4 {
            let told = declined(seed, states);
            let what = format!("{states:?}, seed {seed}: {told:?}");
            // The state of a disk that is declined twice was not read. Its socket closes once more,
            // perhaps with the front end waiting.
            let twice = states.iter().any(|&nth| nth > 1);
            for ((count, [before, after]), least) in told.into_iter().zip(connects) {
                assert!(count == least || twice && least == 2 && count == 3, "{what}");
                assert!(0 < before && (twice || before < after), "{what}");
            }
        }
    }
}

/// A disk whose device does not answer is detached in time, and delays neither its neighbour, nor
/// an upgrade, nor the end of the node. It is gone when nothing is in flight.
#[test]
fn a_detached_disk_whose_device_does_not_answer_delays_nothing_else() {
    for meanwhile in [Meanwhile::Nothing, Meanwhile::Upgrade, Meanwhile::End] {
        for seed in 0..4 {
            detached(seed, meanwhile);
        }
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

#[test]
fn a_moved_disk_loses_nothing_whatever_happens_on_the_way() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<moves::Report>> = RefCell::default();
    seeds::many("one_move", 5, |seed| all.borrow_mut().push(moves::moves(seed)));
    let all = all.into_inner();
    let sum = |of: fn(&moves::Report) -> u64| all.iter().map(of).sum::<u64>();
    println!(
        "{} worlds: {} moves begun, {} disks moved, {} moves aborted, {} nodes killed during one, {} of them after the \
         switch, {} power cuts, {} upgrades, {} sectors checked",
        all.len(),
        sum(|r| r.begun),
        sum(|r| r.moved),
        sum(|r| r.aborted),
        sum(|r| r.killed),
        sum(|r| r.killed_after),
        sum(|r| r.power_cuts),
        sum(|r| r.upgrades),
        sum(|r| r.checked_sectors),
    );
    if all.len() >= 100 {
        assert!(sum(|r| r.moved) > 50 && sum(|r| r.aborted) > 5 && sum(|r| r.killed) > 20);
        assert!(sum(|r| r.power_cuts) > 10 && sum(|r| r.upgrades) > 10);
    }
}

#[test]
fn a_disk_that_goes_to_another_node_is_served_by_one_of_both() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<sends::Report>> = RefCell::default();
    seeds::many("one_send", 5, |seed| all.borrow_mut().push(sends::sends(seed)));
    let all = all.into_inner();
    let sum = |of: fn(&sends::Report) -> u64| all.iter().map(of).sum::<u64>();
    println!(
        "{} worlds: {} moves begun, {} disks sent, {} migrations failed, {} of them when the disk was given, {} nodes \
         killed, {} upgraded, {} not while they sent, {} times all connections lost, {} guests that went back and got nothing, {} sectors checked",
        all.len(),
        sum(|r| r.begun),
        sum(|r| r.sent),
        sum(|r| r.failed),
        sum(|r| r.given),
        sum(|r| r.killed),
        sum(|r| r.upgraded),
        sum(|r| r.refused),
        sum(|r| r.resets),
        sum(|r| r.nothing),
        sum(|r| r.checked_sectors),
    );
    if all.len() >= 100 {
        assert!(sum(|r| r.sent) > 50 && sum(|r| r.failed) > 20 && sum(|r| r.given) > 5);
        assert!(sum(|r| r.killed) > 20 && sum(|r| r.nothing) > 10 && sum(|r| r.upgraded) > 10);
        assert!(sum(|r| r.refused) > 0);
    }
}

#[test]
fn one_send() {
    node::start_tool_log().unwrap();
    if let Some(seed) = seeds::one() {
        println!("{:?}", sends::sends(seed));
    }
}

#[test]
fn one_move() {
    if let Some(seed) = seeds::one() {
        println!("{:?}", moves::moves(seed));
    }
}

#[test]
fn a_launcher_keeps_a_connection_whenever_its_node_dies() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<kept::Report>> = RefCell::default();
    seeds::many("one_kept_connection", 5, |seed| all.borrow_mut().push(kept::kept(seed)));
    let all = all.into_inner();
    let sum = |of: fn(&kept::Report) -> u64| all.iter().map(of).sum::<u64>();
    let mut killed = [0; 8];
    for report in &all {
        killed.iter_mut().zip(report.killed).for_each(|(sum, one)| *sum += one);
    }
    println!(
        "{} worlds: nodes killed at their beginning, during the set-up, in a message, before a reply, with a ring \
         stopped, paused, with requests in flight, at other times: {killed:?}; {} nodes started after them, {} times \
         another launcher, {} upgrades, {} switched, with {} nodes killed, {} power cuts; {} messages answered, {} rings stopped, {} paused; {} requests, {} \
         resubmitted, {} sectors checked",
        all.len(),
        sum(|r| r.started),
        sum(|r| r.renewed),
        sum(|r| r.upgrades),
        sum(|r| r.switched),
        sum(|r| r.killed_upgrading),
        sum(|r| r.power_cuts),
        sum(|r| r.answered),
        sum(|r| r.stopped),
        sum(|r| r.paused),
        sum(|r| r.requests),
        sum(|r| r.resubmitted),
        sum(|r| r.checked_sectors),
    );
    if all.len() >= 100 {
        assert!(all.iter().any(|r| r.packed) && !all.iter().all(|r| r.packed));
        assert!(killed.iter().all(|&count| count > 20), "{killed:?}");
        assert!(sum(|r| r.power_cuts) > 10 && sum(|r| r.renewed) > 50);
        assert!(sum(|r| r.switched) > 20 && sum(|r| r.killed_upgrading) > 20);
        assert!(sum(|r| r.stopped) > 100 && sum(|r| r.paused) > 100);
        assert!(sum(|r| r.resubmitted) > 500);
    }
}

/// Replays one seed, as [`one_hand_over`] does.
#[test]
fn one_kept_connection() {
    node::start_tool_log().unwrap();
    println!("{:#?}", kept::kept(seeds::one().unwrap_or(1)));
}

#[test]
fn the_same_seed_twice_is_the_same_kept_connection() {
    for seed in 0..5 {
        assert_eq!(kept::kept(seed), kept::kept(seed), "seed {seed}");
    }
}

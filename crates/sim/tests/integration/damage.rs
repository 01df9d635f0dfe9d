//! Rotten blocks and merges, seed by seed.

use std::cell::RefCell;

use sim::damage::{Report, damage};
use sim::engine::Flaw;
use sim::seeds;

#[test]
fn writing_continues_around_damage_and_nothing_else_is_lost() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<Report>> = RefCell::default();
    seeds::many("one_damage", 3, |seed| all.borrow_mut().push(damage(seed, Flaw::None)));
    let all = all.into_inner();
    let sum = |of: fn(&Report) -> u64| all.iter().map(of).sum::<u64>();
    println!(
        "{} worlds: {} bytes rotted, {} keys could not be read, {} tables left alone, {} merges",
        all.len(),
        sum(|r| r.rotten),
        sum(|r| r.unreadable),
        sum(|r| r.left_alone),
        sum(|r| r.merges),
    );
    if all.len() >= 60 {
        assert!(sum(|r| r.rotten) > 200 && sum(|r| r.unreadable) > 200);
        assert!(sum(|r| r.left_alone) > 50 && sum(|r| r.merges) > 200);
    }
}

/// Replays one seed: `MILLRACE_SEED=… cargo test -p millrace-sim one_damage -- --nocapture`.
#[test]
fn one_damage() {
    println!("{:#?}", damage(seeds::one().unwrap_or(1), Flaw::None));
}

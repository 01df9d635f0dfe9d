//! Histories of single keys, seed by seed.

use std::cell::Cell;

use sim::engine::Flaw;
use sim::history::history;
use sim::linear::violation;
use sim::seeds;

#[test]
fn each_key_of_the_engine_behaves_like_one_register() {
    if seeds::one().is_some() {
        return;
    }
    let (worlds, operations, lost) = (Cell::new(0), Cell::new(0), Cell::new(0));
    seeds::many("one_history", 8, |seed| {
        let history = history(seed, Flaw::None);
        worlds.set(worlds.get() + 1);
        operations.set(operations.get() + history.len());
        lost.set(lost.get() + history.iter().filter(|one| one.answer.is_none()).count());
        assert_eq!(violation(&history), None);
    });
    let (worlds, operations, lost) = (worlds.get(), operations.get(), lost.get());
    println!("{worlds} worlds: {operations} operations, {lost} of them without an answer");
    if worlds >= 100 {
        assert!(operations > 10_000 && lost > 300);
    }
}

/// Replays one seed: `MILLRACE_SEED=… cargo test -p millrace-sim one_history -- --nocapture`.
#[test]
fn one_history() {
    let history = history(seeds::one().unwrap_or(1), Flaw::None);
    if let Some(history) = violation(&history) {
        panic!("{history:#?}");
    }
}

#[test]
fn the_same_seed_twice_is_the_same_history() {
    assert_eq!(history(5, Flaw::None), history(5, Flaw::None));
}

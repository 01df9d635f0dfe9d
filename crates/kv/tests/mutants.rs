//! A test that cannot fail proves nothing: the scenario of transactions must catch each fault of
//! the shard. A program of its own, because a mutant is set for the whole process.

#[allow(dead_code, reason = "the other tests use all of it")]
#[path = "integration/stage/mod.rs"]
mod stage;

use stage::expiry::expiry;
use stage::transactions::transactions;

#[test]
fn each_fault_is_caught() {
    transactions_are_judged();
    for mutant in ["deadlines_come_later", "sequences_are_not_compared"] {
        lsm::set_mutant(mutant);
        let caught = (0..400).any(|seed| expiry(seed).0.is_some());
        assert!(caught, "the mutant {mutant} was not caught");
    }
}

// In one test: a mutant is set for the whole process.
fn transactions_are_judged() {
    for mutant in
        ["watch_is_answered_at_once", "watches_are_checked_early", "transactions_are_divided"]
    {
        lsm::set_mutant(mutant);
        let caught = (0..200).any(|seed| transactions(seed).0.is_some());
        assert!(caught, "the mutant {mutant} was not caught");
    }
}

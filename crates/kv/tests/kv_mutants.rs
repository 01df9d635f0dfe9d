//! A test that cannot fail proves nothing: the scenarios of transactions, of tracking and of expiry
//! must catch each fault. A program of its own, because a mutant is set for the whole process.

#[allow(dead_code, reason = "the other tests use all of it")]
#[path = "integration/stage/mod.rs"]
mod stage;

use client::Mutant;
use stage::expiry::{expiry, short_expiry};
use stage::index::index;
use stage::tracking::tracking;
use stage::transactions::transactions;

#[test]
fn each_fault_is_caught() {
    transactions_are_judged();
    tracking_is_judged();
    expiry_is_judged();
    the_index_of_clients_is_judged();
}

fn the_index_of_clients_is_judged() {
    for mutant in [
        Mutant::TracksAfterTheFirstPage,
        Mutant::TheIndexOutlivesTheLink,
        Mutant::WritesDuringALoadAreNotAdded,
        Mutant::PagesOfEarlierLoadsCount,
        Mutant::AnswersBeforeItIsWhole,
        Mutant::TheIndexHasNoLease,
    ] {
        client::set_mutant(mutant);
        let caught = (0..200).any(|seed| index(seed).violation.is_some());
        assert!(caught, "the mutant {mutant:?} was not caught");
    }
    client::set_mutant(Mutant::None);
}

fn expiry_is_judged() {
    for mutant in ["deadlines_come_later", "sequences_are_not_compared"] {
        lsm::set_mutant(mutant);
        let caught = (0..400).any(|seed| expiry(seed).0.is_some());
        assert!(caught, "the mutant {mutant} was not caught");
    }
    lsm::set_mutant("runs_are_not_noted");
    let caught = (0..400).any(|seed| short_expiry(seed).0.is_some());
    assert!(caught, "the mutant runs_are_not_noted was not caught");
}

fn tracking_is_judged() {
    for mutant in [
        "writes_are_announced_early",
        "writes_are_answered_before_they_are_heard_of",
        "other_cores_hear_of_no_writes",
        "evicted_keys_are_not_invalidated",
        "invalidations_are_lost_in_a_full_queue",
        "invalidations_overtake_replies",
        "keys_of_stretches_are_entered_late",
        "stretches_are_not_compared_with_the_index",
        "stretches_without_room_are_not_invalidated",
    ] {
        lsm::set_mutant(mutant);
        // The rarest show in one world of a hundred.
        let caught = (0..1500).any(|seed| tracking(seed).violation.is_some());
        assert!(caught, "the mutant {mutant} was not caught");
    }
}

fn transactions_are_judged() {
    for mutant in
        ["watch_is_answered_at_once", "watches_are_checked_early", "transactions_are_divided"]
    {
        lsm::set_mutant(mutant);
        let caught = (0..200).any(|seed| transactions(seed).0.is_some());
        assert!(caught, "the mutant {mutant} was not caught");
    }
}

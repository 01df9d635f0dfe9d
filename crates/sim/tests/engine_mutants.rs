//! A test that cannot fail proves nothing: each way in which the engine can be wrong must be caught.
//! A program of its own, because a mutant is one for a whole process.

use sim::engine::{DIR, Flaw, engine};
use sim::history::history;
use sim::linear::violation;

/// Syncs that it may forget, and mutants that are built into it.
const FLAWS: [Flaw; 12] = [
    Flaw::NoSync(".log"),
    Flaw::NoSync(".sst"),
    Flaw::NoSync("CURRENT.dbtmp"),
    Flaw::NoSync(DIR),
    Flaw::Mutant("manifest_is_not_synced"),
    Flaw::Mutant("acknowledge_first"),
    Flaw::Mutant("logs_go_first"),
    Flaw::Mutant("log_number_is_newer"),
    Flaw::Mutant("inputs_go_first"),
    Flaw::Mutant("recovered_is_durable"),
    Flaw::Mutant("groups_are_not_marked"),
    Flaw::Mutant("spares_are_shared"),
];

#[test]
fn an_engine_that_is_wrong_about_durability_is_caught() {
    for flaw in FLAWS {
        let seeds = 0..1000;
        let caught =
            seeds.clone().find(|&seed| std::panic::catch_unwind(|| engine(seed, flaw)).is_err());
        println!("{flaw:?} is caught by seed {caught:?}");
        assert!(caught.is_some(), "{flaw:?} went unnoticed by {} seeds", seeds.end);
    }
    // A history shows what is lost, too.
    let caught = (0..100).find(|&seed| {
        let flaw = Flaw::Mutant("acknowledge_first");
        violation(&history(seed, flaw)).is_some()
    });
    assert!(caught.is_some(), "no history shows a lost write");
}

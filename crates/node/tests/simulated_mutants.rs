//! A test that cannot fail proves nothing: an upgrade that is wrong about which process serves must
//! be detected. A separate program, because a mutant applies to a whole process.

mod handover;

use handover::kept::kept;
use handover::moves::moves;
use handover::sends::sends;
use handover::{handover, unanswered};
use node::Mutant;
use reactor::sim::Access;

#[test]
fn an_upgrade_that_is_wrong_about_which_process_serves_is_detected() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let mut found = Vec::new();
    for mutant in [
        Mutant::OldGoesOn,
        Mutant::OldStaysAtRest,
        Mutant::StartsEarly,
        Mutant::ServesWithoutGo,
        Mutant::GoesOnUntilGo,
        Mutant::TakesBack,
        Mutant::ReleasesEarly,
        Mutant::SwitchesBeforeTheLastBlock,
        Mutant::ServesWithoutAsking,
        Mutant::BeginsEarly,
        Mutant::BeginsWithoutStoring,
        Mutant::PassesOnOnce,
        Mutant::ForgetsTheSession,
    ] {
        node::set_mutant(mutant);
        let play = |seed| match mutant {
            // Late answers are rare in the other play.
            Mutant::ReleasesEarly => {
                unanswered(seed, Access::Write);
            }
            Mutant::SwitchesBeforeTheLastBlock => {
                moves(seed);
            }
            Mutant::ServesWithoutAsking | Mutant::BeginsEarly | Mutant::BeginsWithoutStoring => {
                sends(seed);
            }
            Mutant::PassesOnOnce | Mutant::ForgetsTheSession => {
                kept(seed);
            }
            _ => {
                handover(seed);
            }
        };
        let caught = (0..600).find(|&seed| std::panic::catch_unwind(|| play(seed)).is_err());
        println!("{mutant:?} is detected by seed {caught:?}");
        found.push((mutant, caught));
    }
    std::panic::set_hook(hook);
    assert!(found.iter().all(|(_, caught)| caught.is_some()), "{found:?}");
}

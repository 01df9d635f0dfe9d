//! A test that cannot fail proves nothing: an upgrade that is wrong about who serves must be caught.
//! A program of its own, because a mutant is one for a whole process.

mod handover;

use handover::handover;
use node::Mutant;

#[test]
fn an_upgrade_that_is_wrong_about_who_serves_is_caught() {
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
    ] {
        node::set_mutant(mutant);
        let caught = (0..600).find(|&seed| std::panic::catch_unwind(|| handover(seed)).is_err());
        println!("{mutant:?} is caught by seed {caught:?}");
        found.push((mutant, caught));
    }
    std::panic::set_hook(hook);
    assert!(found.iter().all(|(_, caught)| caught.is_some()), "{found:?}");
}

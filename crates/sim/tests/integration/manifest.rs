//! Power cuts at every moment of a MANIFEST that is replaced all the time.

use sim::engine::Flaw;
use sim::manifest::manifest_cut_everywhere;
use sim::seeds;

#[test]
fn a_manifest_is_complete_after_a_power_cut_anywhere() {
    if seeds::one().is_some() {
        return;
    }
    // Every completion of some world; with `MILLRACE_LONG`, of every world.
    const WORLDS: u64 = 8;
    let step = if std::env::var_os("MILLRACE_LONG").is_some() { 1 } else { WORLDS };
    for seed in 0..WORLDS {
        let cuts = manifest_cut_everywhere(seed, 1 + seed % step, step as usize, Flaw::None);
        assert!(cuts > 100, "only {cuts} completions");
    }
}

/// Replays one seed: `MILLRACE_SEED=… cargo test -p millrace-sim one_manifest -- --nocapture`.
#[test]
fn one_manifest() {
    let seed = seeds::one().unwrap_or(1);
    println!("{} cuts", manifest_cut_everywhere(seed, 1, 7, Flaw::None));
}

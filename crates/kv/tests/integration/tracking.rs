//! Client-side caching in a simulated world.

use crate::stage::seeds;
use crate::stage::tracking::{Outcome, tracking};

#[test]
fn caches_hold_nothing_older_than_acknowledged_writes() {
    let mut sum = Outcome::default();
    for seed in seeds(40) {
        let Outcome { violation, hits, ahead, invalidated, flushed, lost } = tracking(seed);
        assert_eq!(violation, None, "seed {seed}");
        sum.hits += hits;
        sum.ahead += ahead;
        sum.invalidated += invalidated;
        sum.flushed += flushed;
        sum.lost += lost;
    }
    let all =
        sum.hits > 0 && sum.ahead > 0 && sum.invalidated > 0 && sum.flushed > 0 && sum.lost > 0;
    assert!(all || seeds(40).count() < 40, "{sum:?}");
}

#[test]
fn the_same_seed_gives_the_same_outcome() {
    assert_eq!(tracking(5), tracking(5));
}

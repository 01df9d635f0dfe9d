//! Client-side caching in a simulated world.

use crate::stage::index::{IndexOutcome, index};
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
fn an_index_knows_no_key_as_absent_that_was_made_by_an_acknowledged_write() {
    let mut sum = IndexOutcome::default();
    for seed in seeds(40) {
        let one = index(seed);
        assert_eq!(one.violation, None, "seed {seed}");
        sum.answers += one.answers;
        sum.present += one.present;
        sum.loads += one.loads;
        sum.lost += one.lost;
        sum.killed += one.killed;
    }
    let all = [sum.answers, sum.present, sum.loads, sum.lost, sum.killed];
    assert!(!all.contains(&0) || seeds(40).count() < 40, "{sum:?}");
}

#[test]
fn the_same_seed_gives_the_same_outcome() {
    assert_eq!(tracking(5), tracking(5));
    assert_eq!(index(5).trace, index(5).trace);
}

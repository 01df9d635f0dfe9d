//! Deadlines in a simulated world, with kills and power cuts.

use crate::stage::expiry::{expiry, short_expiry};
use crate::stage::seeds;

#[test]
fn a_key_ends_at_its_deadline_whatever_crashes() {
    let mut looks = [0, 0];
    for seed in seeds(24) {
        let (violation, seen) = expiry(seed);
        assert_eq!(violation, None, "seed {seed}");
        looks = [looks[0] + seen[0], looks[1] + seen[1]];
    }
    assert!(looks[0] > 0 && looks[1] > 0, "{looks:?}");
}

#[test]
fn a_deadline_stays_with_its_value_whatever_crashes_soon() {
    let mut looks = [0, 0];
    for seed in seeds(24) {
        let (violation, seen) = short_expiry(seed);
        assert_eq!(violation, None, "seed {seed}");
        looks = [looks[0] + seen[0], looks[1] + seen[1]];
    }
    assert!(looks[0] > 0 && looks[1] > 0, "{looks:?}");
}

#[test]
fn the_same_seed_ends_the_same_keys() {
    assert_eq!(expiry(5), expiry(5));
}

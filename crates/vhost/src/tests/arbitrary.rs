//! Arbitrary bytes in rings, tables, requests and in-flight regions: see [`crate::fuzz`].

use proptest::collection::vec;
use proptest::prelude::*;

use crate::fuzz;

/// Words that are valid more often than random ones: small numbers, flags, addresses, sizes.
fn words() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![
        3 => (0_u64..0x8000, 0_u64..1024).prop_map(|(a, b)| a | b << 32),
        3 => (0_u64..600, 0_u64..8, 0_u64..40).prop_map(|(len, flags, next)| len | flags << 32 | next << 48),
        2 => (0_u64..600, 0_u64..32, 0_u64..8, 0_u64..4)
            .prop_map(|(len, id, flags, own)| {
                len | id << 32 | (flags | (own & 1) << 7 | (own >> 1) << 15) << 48
            }),
        1 => 0_u64..16,
        1 => any::<u64>(),
    ];
    vec(word, 0..700).prop_map(|words| words.into_iter().flat_map(u64::to_le_bytes).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_ring_is_survived(choice in any::<[u8; 4]>(), bytes in words()) {
        fuzz::ring(&[&choice[..], &bytes].concat());
    }

    #[test]
    fn any_inflight_region_is_survived(choice in any::<[u8; 4]>(), bytes in words()) {
        fuzz::inflight(&[&choice[..], &bytes].concat());
    }
}

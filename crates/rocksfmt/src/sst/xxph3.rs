//! The 64-bit key hash of RocksDB's filters: the *preview* version of XXH3 (xxHash 0.7.2), seed 0.
//!
//! It is not the XXH3 of xxHash 0.8, which block checksums use; a reader that confuses the two
//! misses keys. `n` is the length; up to 16 bytes are one or two loads and a mix, up to 240 bytes
//! overlapping 16-byte mixes, longer keys run eight lanes over 64-byte stripes.

const P1: u64 = 0x9E37_79B1_85EB_CA87;
const P2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const P3: u64 = 0x1656_67B1_9E37_79F9;
const P4: u64 = 0x85EB_CA77_C2B2_AE63;
const P5: u64 = 0x27D4_EB2F_1656_67C5;
const Q1: u64 = 0x9E37_79B1;
const Q2: u64 = 0x85EB_CA77;
const Q3: u64 = 0xC2B2_AE3D;

#[rustfmt::skip]
const SECRET: [u8; 192] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];

/// Bytes of one stripe of a long key, and of a block of stripes between two scrambles.
const STRIPE: usize = 64;
const BLOCK: usize = 1024;

#[inline(always)]
fn read32(data: &[u8], at: usize) -> u64 {
    let mut b = [0; 4];
    b.copy_from_slice(&data[at..at + 4]);
    u64::from(u32::from_le_bytes(b))
}

#[inline(always)]
fn read64(data: &[u8], at: usize) -> u64 {
    let mut b = [0; 8];
    b.copy_from_slice(&data[at..at + 8]);
    u64::from_le_bytes(b)
}

#[inline(always)]
fn secret(at: usize) -> u64 {
    read64(&SECRET, at)
}

#[inline(always)]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

#[inline(always)]
fn avalanche(mut h: u64) -> u64 {
    h ^= h >> 37;
    h = h.wrapping_mul(P3);
    h ^ (h >> 32)
}

#[inline(always)]
fn mix16(data: &[u8], at: usize, secret_at: usize) -> u64 {
    fold(read64(data, at) ^ secret(secret_at), read64(data, at + 8) ^ secret(secret_at + 8))
}

/// The 64-bit hash of a key.
#[inline]
pub fn xxph3(key: &[u8]) -> u64 {
    let n = key.len();
    match n {
        0 => fold(secret(0), P2),
        1..=3 => {
            let c = u64::from(key[0])
                | u64::from(key[n >> 1]) << 8
                | u64::from(key[n - 1]) << 16
                | (n as u64) << 24;
            avalanche((c ^ read32(&SECRET, 0)).wrapping_mul(P1))
        }
        4..=8 => {
            let k = (read32(key, 0) | read32(key, n - 4) << 32) ^ secret(0);
            let m = (n as u64).wrapping_add((k ^ (k >> 51)).wrapping_mul(Q1));
            avalanche((m ^ (m >> 47)).wrapping_mul(P2))
        }
        9..=16 => {
            let low = read64(key, 0) ^ secret(0);
            let high = read64(key, n - 8) ^ secret(8);
            avalanche((n as u64).wrapping_add(low).wrapping_add(high).wrapping_add(fold(low, high)))
        }
        17..=128 => medium(key),
        129..=240 => long_medium(key),
        _ => long(key),
    }
}

#[inline]
fn medium(key: &[u8]) -> u64 {
    let n = key.len();
    let mut a = (n as u64).wrapping_mul(P1);
    for (i, more_than) in [(3, 96), (2, 64), (1, 32), (0, 0)] {
        if n > more_than {
            a = a.wrapping_add(mix16(key, 16 * i, 32 * i)).wrapping_add(mix16(
                key,
                n - 16 * (i + 1),
                32 * i + 16,
            ));
        }
    }
    avalanche(a)
}

#[inline(never)]
fn long_medium(key: &[u8]) -> u64 {
    let n = key.len();
    let mut a = (n as u64).wrapping_mul(P1);
    for i in 0..8 {
        a = a.wrapping_add(mix16(key, 16 * i, 16 * i));
    }
    a = avalanche(a);
    for i in 8..n / 16 {
        a = a.wrapping_add(mix16(key, 16 * i, 16 * (i - 8) + 3));
    }
    avalanche(a.wrapping_add(mix16(key, n - 16, 119)))
}

#[inline(never)]
fn long(key: &[u8]) -> u64 {
    let n = key.len();
    let mut acc = [Q3, P1, P2, P3, P4, Q2, P5, Q1];
    let blocks = n / BLOCK;
    for block in 0..blocks {
        for t in 0..BLOCK / STRIPE {
            stripe(&mut acc, key, block * BLOCK + t * STRIPE, 8 * t);
        }
        for (i, lane) in acc.iter_mut().enumerate() {
            *lane = ((*lane ^ (*lane >> 47)) ^ secret(128 + 8 * i)).wrapping_mul(Q1);
        }
    }
    for t in 0..n % BLOCK / STRIPE {
        stripe(&mut acc, key, blocks * BLOCK + t * STRIPE, 8 * t);
    }
    if !n.is_multiple_of(STRIPE) {
        stripe(&mut acc, key, n - STRIPE, 121);
    }
    let mut r = (n as u64).wrapping_mul(P1);
    for i in 0..4 {
        r = r.wrapping_add(fold(
            acc[2 * i] ^ secret(11 + 16 * i),
            acc[2 * i + 1] ^ secret(19 + 16 * i),
        ));
    }
    avalanche(r)
}

#[inline(always)]
fn stripe(acc: &mut [u64; 8], key: &[u8], at: usize, secret_at: usize) {
    for (i, lane) in acc.iter_mut().enumerate() {
        let v = read64(key, at + 8 * i);
        let k = v ^ secret(secret_at + 8 * i);
        *lane = lane.wrapping_add(v).wrapping_add((k & 0xFFFF_FFFF).wrapping_mul(k >> 32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_class_matches_rocksdb() {
        let count = |n: usize| (0..n).map(|i| i as u8).collect::<Vec<u8>>();
        for (key, want) in [
            (b"".to_vec(), 0x5342_C301_0FE1_DD04u64),
            (b"a".to_vec(), 0x88D8_68BF_6076_81C7),
            (b"abc".to_vec(), 0xD39E_EB71_BB53_42E8),
            (b"abcd".to_vec(), 0x97A5_BA1D_02E8_378C),
            (b"hello world".to_vec(), 0xE5F7_B821_56A0_7A14),
            (count(17), 0x6DFF_1AC9_6EEF_2848),
            (count(100), 0xB625_9F52_AC0F_6DDC),
            (count(200), 0xD860_7562_8129_A666),
            (count(512), 0xE11F_A58F_D0D0_B0A5),
        ] {
            assert_eq!(xxph3(&key), want, "{} bytes", key.len());
        }
    }

    #[test]
    fn no_length_panics() {
        let key = vec![7; 4200];
        let mut seen = std::collections::BTreeSet::new();
        for n in 0..key.len() {
            seen.insert(xxph3(&key[..n]));
        }
        assert_eq!(seen.len(), key.len());
    }
}

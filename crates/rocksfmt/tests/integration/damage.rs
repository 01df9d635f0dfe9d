//! Damaged files: any answer is acceptable, a panic or a hang is not. Checksums catch most damage,
//! so the tests correct the checksums of most damaged blocks: the damage then reaches the parsers.

#![expect(clippy::disallowed_methods, reason = "tests read files themselves")]

use std::path::PathBuf;

use crate::support::{Table, fresh_dir, generate, sst_files};
use rocksfmt::*;

/// A small generator, so that a number identifies a failing case.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % below
    }
}

fn samples() -> Vec<PathBuf> {
    let root = fresh_dir("damage");
    generate(&root);
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(&root)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_dir())
        .collect();
    dirs.sort();
    dirs.iter().flat_map(|d| sst_files(d)).collect()
}

/// All blocks that a reader visits.
fn handles(table: &Table) -> Vec<BlockHandle> {
    let m = &table.meta;
    let mut all = table.all_handles().unwrap();
    all.push(table.footer.metaindex);
    all.extend(
        [table.footer.index, m.index, m.properties, m.compression_dict, m.range_deletions]
            .into_iter()
            .flatten(),
    );
    if let Some(FilterHandle::Full(h) | FilterHandle::Partitioned(h)) = m.filter {
        all.push(h);
    }
    all
}

/// Corrects the checksums of damaged blocks, so that the damage reaches the parsers.
fn sign(bytes: &mut [u8], handles: &[BlockHandle], check: BlockCheck) {
    for h in handles {
        let (start, end) = (h.offset as usize, (h.offset + h.size) as usize + 1);
        let sum = check.compute(&bytes[start..end], h.offset);
        bytes[end..end + 4].copy_from_slice(&sum.to_le_bytes());
    }
}

#[test]
fn flipped_bytes_and_cuts_never_panic() {
    let mut random = Random(1);
    let (mut survived, mut refused) = (0, 0);
    for path in samples() {
        let good = std::fs::read(&path).unwrap();
        let table = Table::open(good.clone()).unwrap();
        let handles = handles(&table);
        for round in 0..24 {
            let mut bad = good.clone();
            for _ in 0..1 + random.next(3) {
                // Two thirds of the damage is in the tail, where the meta blocks are.
                let from = if random.next(3) == 0 { 0 } else { bad.len().saturating_sub(6000) };
                let at = from + random.next(bad.len() - from);
                bad[at] = match random.next(3) {
                    0 => bad[at] ^ (1 << random.next(8)),
                    1 => 0xFF,
                    _ => random.next(256) as u8,
                };
            }
            if round % 6 != 0 {
                sign(&mut bad, &handles, table.footer.check);
            }
            match Table::exercise(bad) {
                Ok(_) => survived += 1,
                Err(_) => refused += 1,
            }
        }
        for _ in 0..4 {
            let len = random.next(good.len());
            assert!(Table::exercise(good[..len].to_vec()).is_err(), "{path:?} cut to {len}");
        }
    }
    println!("{survived} damaged files read to the end, {refused} refused");
    assert!(survived > 50 && refused > 50, "{survived} read to the end, {refused} refused");
}

#[test]
fn every_flip_in_a_data_block_is_detected() {
    let root = fresh_dir("damage_noticed");
    generate(&root);
    let path = sst_files(&root.join("plain")).pop().unwrap();
    let good = std::fs::read(path).unwrap();
    let table = Table::open(good.clone()).unwrap();
    let data_end = table.properties.data_size as usize;
    let mut random = Random(2);
    for _ in 0..40 {
        let mut bad = good.clone();
        bad[random.next(data_end)] ^= 1 << random.next(8);
        let e = Table::open(bad).unwrap().walk().unwrap_err();
        assert_eq!(e.kind(), Kind::Corruption);
        assert!(e.to_string().contains("checksum"), "{e}");
    }
}

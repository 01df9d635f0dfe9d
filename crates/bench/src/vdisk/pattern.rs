//! Data that identifies its block, its write and its run.
//!
//! Each sector of a block begins with {block, sequence, sector, run}, and the words derived from
//! them fill the rest. So a misplaced, stale or torn sector differs from the right one.

/// Bytes of a sector.
const SECTOR: usize = 512;

/// The identity of one write's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The block.
    pub block: u64,
    /// The number of the write to the block.
    pub sequence: u64,
    /// A random number for the run.
    pub run: u64,
}

impl Stamp {
    /// Fills a block with this write's data.
    pub fn fill(&self, bytes: &mut [u8]) {
        for (nth, sector) in (0u64..).zip(bytes.chunks_mut(SECTOR)) {
            let head = [self.block, self.sequence, nth, self.run];
            let mut word = head.iter().fold(0, |sum, part| mix(sum ^ part));
            for (at, to) in sector.chunks_exact_mut(8).enumerate() {
                let value = *head.get(at).unwrap_or(&word);
                to.copy_from_slice(&value.to_le_bytes());
                word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
            }
        }
    }

    /// Checks that a block has this write's data.
    ///
    /// # Errors
    /// The first sector that differs, and the identity that it carries.
    pub fn check(&self, bytes: &[u8], scratch: &mut [u8]) -> Result<(), String> {
        let right = &mut scratch[..bytes.len()];
        self.fill(right);
        if bytes == right {
            return Ok(());
        }
        let (nth, sector) = (0..)
            .zip(bytes.chunks(SECTOR))
            .find(|(nth, sector)| **sector != right[nth * SECTOR..][..sector.len()])
            .expect("one of them differs");
        let word = |at: usize| u64::from_le_bytes(sector[at..at + 8].try_into().expect("8 bytes"));
        Err(format!(
            "block {}, sector {nth}: expected write {} of run {:x}, found block {}, write {}, \
             sector {}, run {:x}",
            self.block,
            self.sequence,
            self.run,
            word(0),
            word(8),
            word(16),
            word(24)
        ))
    }
}

fn mix(mut word: u64) -> u64 {
    word ^= word >> 31;
    word = word.wrapping_mul(0x7fb5_d329_728e_a185);
    word ^ word >> 27
}

/// The expected data of every block, and which blocks have a request in flight.
#[derive(Debug)]
pub struct Ledger {
    run: u64,
    /// The number of the last write to each block, and [`BUSY`] while a request is in flight.
    blocks: Vec<u32>,
}

const BUSY: u32 = 1 << 31;

impl Ledger {
    /// A ledger of `blocks` blocks of unknown contents.
    pub fn new(run: u64, blocks: usize) -> Ledger {
        Ledger { run, blocks: vec![0; blocks] }
    }

    /// Claims the first block from `from` on that has no request in flight.
    pub fn claim(&mut self, from: u64) -> u64 {
        let count = self.blocks.len();
        let mut at = from as usize % count;
        // There are more blocks than requests in flight.
        while self.blocks[at] & BUSY != 0 {
            at = (at + 1) % count;
        }
        self.blocks[at] |= BUSY;
        at as u64
    }

    /// The data of the next write to a claimed block.
    pub fn next(&self, block: u64) -> Stamp {
        let stamp = self.stamp(block);
        Stamp { sequence: stamp.sequence + 1, ..stamp }
    }

    /// The data of a block; sequence 0 if it is unknown.
    pub fn stamp(&self, block: u64) -> Stamp {
        let sequence = (self.blocks[block as usize] & !BUSY).into();
        Stamp { block, sequence, run: self.run }
    }

    /// Releases a block whose request has completed. `sequence` is the write that it has now, 0 if
    /// that is unknown.
    pub fn release(&mut self, block: u64, sequence: u64) {
        self.blocks[block as usize] = sequence as u32 & !BUSY;
    }

    /// The data of all blocks whose contents are known.
    pub fn written(&self) -> impl Iterator<Item = Stamp> {
        (0..self.blocks.len() as u64)
            .map(|block| self.stamp(block))
            .filter(|stamp| stamp.sequence > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: Stamp = Stamp { block: 7, sequence: 3, run: 0xabc };

    #[test]
    fn a_stale_or_torn_block_is_found() {
        let (mut bytes, mut scratch) = ([0; 4096], [0; 4096]);
        STAMP.fill(&mut bytes);
        assert_eq!(STAMP.check(&bytes, &mut scratch), Ok(()));
        let older = Stamp { sequence: 2, ..STAMP };
        let error = older.check(&bytes, &mut scratch).unwrap_err();
        assert!(
            error.contains("sector 0: expected write 2") && error.contains("write 3"),
            "{error}"
        );
        older.fill(&mut bytes[3584..]);
        assert!(STAMP.check(&bytes, &mut scratch).unwrap_err().contains("sector 7"));
    }

    #[test]
    fn a_block_is_claimed_by_one_request_at_a_time() {
        let mut ledger = Ledger::new(1, 4);
        assert_eq!((ledger.claim(3), ledger.claim(3), ledger.claim(1)), (3, 0, 1));
        assert_eq!(ledger.next(0).sequence, 1);
        ledger.release(0, 1);
        ledger.release(3, 0);
        assert_eq!(ledger.written().map(|stamp| stamp.block).collect::<Vec<_>>(), [0]);
        assert_eq!(ledger.claim(0), 0);
        assert_eq!(ledger.next(0).sequence, 2);
    }
}

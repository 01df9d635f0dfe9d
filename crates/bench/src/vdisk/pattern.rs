//! Data that tells which block it is, which write put it there, and in which run.
//!
//! Each sector of a block carries {block, sequence, sector, run}, and words that follow from them
//! up to its end, so a sector that is elsewhere, older or torn is told from the right one.

/// Bytes of a sector.
const SECTOR: usize = 512;

/// One write's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Which block.
    pub block: u64,
    /// Which write of it.
    pub sequence: u64,
    /// A number drawn for the run.
    pub run: u64,
}

impl Stamp {
    /// Fills a block.
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

    /// Says what is wrong with a block that should carry this.
    ///
    /// # Errors
    /// The first sector that is not right, and what it claims to be.
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

/// What every block of a disk should carry, and which blocks are in use.
#[derive(Debug)]
pub struct Ledger {
    run: u64,
    /// The number of writes of each block, and [`BUSY`] while a request for it is in flight.
    blocks: Vec<u32>,
}

const BUSY: u32 = 1 << 31;

impl Ledger {
    /// So many blocks that nothing is known of.
    pub fn new(run: u64, blocks: usize) -> Ledger {
        Ledger { run, blocks: vec![0; blocks] }
    }

    /// The first block from `from` on that no request is in flight for; it is in use from now on.
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

    /// What the next write of a claimed block is to carry.
    pub fn next(&self, block: u64) -> Stamp {
        let stamp = self.stamp(block);
        Stamp { sequence: stamp.sequence + 1, ..stamp }
    }

    /// What a block carries; sequence 0 if it is not known.
    pub fn stamp(&self, block: u64) -> Stamp {
        let sequence = (self.blocks[block as usize] & !BUSY).into();
        Stamp { block, sequence, run: self.run }
    }

    /// The request for a block has come back; the block carries that write now, 0 if that is not
    /// known.
    pub fn release(&mut self, block: u64, sequence: u64) {
        self.blocks[block as usize] = sequence as u32 & !BUSY;
    }

    /// Blocks that carry something known.
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
    fn a_block_that_is_another_or_torn_is_found() {
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

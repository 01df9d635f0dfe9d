//! The requests: their blocks, and the check of their data.

use frontend::{Completion, Request, Slot, Status};
use node::{Error, Kind};

use super::front::{Flight, Lane};
use super::pattern::{Ledger, Stamp};
use super::plan::{Mix, VdiskPlan};
use crate::keys::below;

/// The source of the requests.
pub struct Source {
    rw: Mix,
    block_size: u32,
    /// Blocks of the disk that are used.
    pub blocks: u64,
    random: u64,
    /// The expected data, if it is verified.
    pub ledger: Option<Ledger>,
    /// A block's data, and the expected data.
    pub buffers: [Vec<u8>; 2],
}

impl Source {
    /// Requests for the first `blocks` blocks.
    pub fn new(plan: &VdiskPlan, blocks: u64) -> Source {
        let drawn = seed();
        let buffer = || vec![0; plan.block_size as usize];
        Source {
            rw: plan.rw,
            block_size: plan.block_size,
            blocks,
            random: drawn | 1,
            ledger: plan.verify.then(|| Ledger::new(drawn, blocks as usize)),
            buffers: [buffer(), buffer()],
        }
    }

    fn draw(&mut self) -> u64 {
        // xorshift64*, which costs two nanoseconds.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Gives a slot what it writes unless data is verified: zeroes would become holes where a disk
    /// is copied.
    pub fn prepare(&mut self, lane: &mut Lane, slot: Slot) {
        if !self.rw.writes() {
            return;
        }
        let mut bytes = std::mem::take(&mut self.buffers[0]);
        bytes.fill_with(|| self.draw() as u8);
        lane.queue.write_data(slot, 0, &bytes);
        self.buffers[0] = bytes;
    }

    /// Stages the next request in a slot.
    #[inline]
    pub fn submit(&mut self, lane: &mut Lane, slot: Slot, now_ns: u64) {
        let drawn = self.draw();
        let (write, mut block) = match self.rw {
            Mix::RandRead => (false, below(drawn, self.blocks)),
            Mix::RandWrite => (true, below(drawn, self.blocks)),
            Mix::RandRw => (self.random & 1 == 1, below(drawn, self.blocks)),
            Mix::Read | Mix::Write => {
                let at = lane.at;
                lane.at = if at + 1 == self.blocks { 0 } else { at + 1 };
                (self.rw == Mix::Write, at)
            }
        };
        if let Some(ledger) = &mut self.ledger {
            block = ledger.claim(block);
            if write {
                ledger.next(block).fill(&mut self.buffers[0]);
                lane.queue.write_data(slot, 0, &self.buffers[0]);
            }
        }
        lane.flights[slot.index()] = Flight { from_ns: now_ns, block, write, flushing: false };
        let (offset, len) = (block * u64::from(self.block_size), self.block_size);
        let request =
            if write { Request::Write { offset, len } } else { Request::Read { offset, len } };
        lane.queue.submit(slot, request);
    }

    /// Verifies the data of a completed request.
    #[inline]
    pub fn check(&mut self, lane: &Lane, completion: Completion) -> Result<(), Error> {
        let Some(ledger) = &mut self.ledger else { return Ok(()) };
        let Flight { block, write, flushing: _, from_ns: _ } =
            lane.flights[completion.slot.index()];
        let known = ledger.stamp(block);
        let sequence = match (write, completion.status) {
            (true, Status::Ok) => known.sequence + 1,
            (true, _) => 0,
            (false, _) => known.sequence,
        };
        ledger.release(block, sequence);
        if write || completion.status != Status::Ok || known.sequence == 0 {
            return Ok(());
        }
        let [bytes, scratch] = &mut self.buffers;
        lane.queue.read_data(completion.slot, 0, bytes);
        verify(known, bytes, scratch)
    }
}

/// Verifies that a block has a write's data.
pub fn verify(stamp: Stamp, bytes: &[u8], scratch: &mut [u8]) -> Result<(), Error> {
    stamp.check(bytes, scratch).map_err(|what| Error::new(Kind::Damaged, what))
}

/// A number that differs from run to run.
fn seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let ns = since.unwrap_or_default().as_nanos() as u64;
    ns.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(std::process::id())
}

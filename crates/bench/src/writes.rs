//! The cases that write, as loops of one task each, on the core that owns the database.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use lsm::{BatchWriter, Compression, Durability, WriteOptions, Writer};
use reactor::Core;

use crate::keys::{below, key};
use crate::measure::Meter;
use crate::stalls::StallMeter;
use crate::values::Values;

/// Entries loaded between two looks at the clock.
const LOAD_RUN: u64 = 256;

/// How to write, in the cases that do.
#[derive(Clone, Debug)]
pub struct WritePlan {
    /// What an acknowledged write survives.
    pub durability: Durability,
    /// Tasks that write, each one entry at a time.
    pub writers: u32,
    /// Bytes of a value.
    pub value_size: usize,
    /// End after so many writes, instead of by the clock.
    pub num: Option<u64>,
    /// Writes per second that are begun, whether or not earlier ones are done; as many as possible
    /// otherwise.
    pub rate: Option<f64>,
    /// Bytes of memtables at which they are written to tables.
    pub memtable_bytes: usize,
    /// For the data blocks of tables.
    pub compression: Compression,
    /// After the writes, wait until nothing is left to flush or to merge.
    pub drain: bool,
}

impl Default for WritePlan {
    fn default() -> WritePlan {
        let options = WriteOptions::default();
        WritePlan {
            durability: options.durability,
            writers: 1,
            value_size: 1000,
            num: None,
            rate: None,
            memtable_bytes: options.memtable_bytes,
            compression: options.compression,
            drain: false,
        }
    }
}

/// What the writing tasks of a core work on.
pub struct WriteWorker {
    /// The owner core.
    pub core: Core,
    /// The database.
    pub writer: Writer,
    /// Counts writes.
    pub meter: Rc<Meter>,
    /// Sees stalls.
    pub stalls: Rc<StallMeter>,
    /// The stock of values, one for all tasks.
    pub values: RefCell<Values>,
    /// Keys to draw from.
    pub keys: u64,
    /// When the window begins.
    pub from_ns: u64,
    /// Nanoseconds from one write's beginning to the next one's, over all tasks.
    pub interval_ns: Option<f64>,
    /// Writes begun.
    pub begun: Cell<u64>,
    /// How many there may be.
    pub num: u64,
}

impl WriteWorker {
    /// Writes random keys until the meter ends it or all are written. A write's latency begins when
    /// its turn comes: where there is a rate, by the rate, late though the task may be.
    ///
    /// # Errors
    /// The engine's, as text.
    pub async fn run(self: Rc<Self>) -> Result<(), String> {
        let mut from_ns = self.core.now_exact_ns();
        loop {
            let nth = self.begun.get();
            if nth >= self.num {
                return Ok(());
            }
            self.begun.set(nth + 1);
            if let Some(interval_ns) = self.interval_ns {
                from_ns = self.from_ns + (nth as f64 * interval_ns) as u64;
                if from_ns > self.core.now_exact_ns() {
                    self.core.sleep_ns(from_ns.saturating_sub(self.core.now_ns())).await;
                }
            }
            let mut batch = BatchWriter::new();
            let number = below(self.core.random_u64(), self.keys);
            batch.put(0, &key(number), self.values.borrow_mut().next());
            self.stalls.begin(from_ns);
            self.writer.write(batch).await.map_err(|error| error.to_string())?;
            let now_ns = self.core.now_exact_ns();
            self.stalls.end(now_ns);
            if !self.meter.count(1, 0, 1, from_ns, now_ns) {
                return Ok(());
            }
            from_ns = now_ns;
        }
    }

    /// Loads the keys in their order, all that are to be drawn from or `num`, whichever is less.
    ///
    /// # Errors
    /// The engine's, as text.
    pub async fn load(self: Rc<Self>) -> Result<(), String> {
        let (mut next, all) = (0, self.keys.min(self.num));
        let mut from_ns = self.core.now_exact_ns();
        let entries = async |to_key: &mut Vec<u8>, to_value: &mut Vec<u8>| {
            // One look at the clock for a run of entries, which take less than that.
            if next % LOAD_RUN == 0 || next == all {
                let (run, now_ns) = (next - self.begun.get(), self.core.now_exact_ns());
                if run > 0 {
                    self.meter.count(run, 0, run, from_ns, now_ns);
                }
                self.begun.set(next);
                from_ns = now_ns;
            }
            if next == all {
                return Ok(false);
            }
            to_key.extend_from_slice(&key(next));
            to_value.extend_from_slice(self.values.borrow_mut().next());
            next += 1;
            Ok(true)
        };
        self.writer.bulk_load(0, entries).await.map_err(|error| error.to_string())?;
        self.meter.end(self.core.now_exact_ns());
        Ok(())
    }
}

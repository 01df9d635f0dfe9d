//! The cases that write, each a loop run by one task on the core that owns the database.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use lsm::{BatchWriter, Compression, Durability, WriteOptions, Writer};
use reactor::Core;

use crate::keys::{below, key};
use crate::measure::Meter;
use crate::stalls::StallMeter;
use crate::values::Values;

/// Entries loaded between two readings of the clock.
const LOAD_RUN: u64 = 256;

/// How a case writes.
#[derive(Clone, Debug)]
pub struct WritePlan {
    /// What acknowledged writes survive.
    pub durability: Durability,
    /// Tasks that write, one entry at a time each.
    pub writers: u32,
    /// Bytes of a value.
    pub value_size: usize,
    /// End after this number of writes instead of by the clock.
    pub num: Option<u64>,
    /// Writes started per second, whether or not earlier ones are done; without it, as many as
    /// possible.
    pub rate: Option<f64>,
    /// Bytes at which a memtable is flushed.
    pub memtable_bytes: usize,
    /// Compression of the tables' data blocks.
    pub compression: Compression,
    /// Values of at least this many bytes go to blob files.
    pub blob_min: Option<usize>,
    /// The limit of the space of blob files, as a multiple of their live values.
    pub blob_space_max_ratio: Option<f64>,
    /// Wait for all flushes and compactions after the writes.
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
            blob_min: options.blob_min,
            blob_space_max_ratio: options.blob_space_max_ratio,
            drain: false,
        }
    }
}

/// The state that the writing tasks share.
pub struct WriteWorker {
    /// The owner core.
    pub core: Core,
    /// The database.
    pub writer: Writer,
    /// Counts the writes.
    pub meter: Rc<Meter>,
    /// Measures their stalls.
    pub stalls: Rc<StallMeter>,
    /// The stock of values.
    pub values: RefCell<Values>,
    /// The number of keys to draw from.
    pub keys: u64,
    /// The start of the window.
    pub from_ns: u64,
    /// Nanoseconds from the start of one write to that of the next, over all tasks.
    pub interval_ns: Option<f64>,
    /// Writes started.
    pub begun: Cell<u64>,
    /// The most writes.
    pub num: u64,
}

impl WriteWorker {
    /// Writes random keys until the meter ends the run or all are written. With a rate, a write's
    /// latency counts from its scheduled start, even if the task is late.
    ///
    /// # Errors
    /// The engine's error, as text.
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

    /// Bulk-loads the keys in order: all of them or `num`, whichever is less.
    ///
    /// # Errors
    /// The engine's error, as text.
    pub async fn load(self: Rc<Self>) -> Result<(), String> {
        let (mut next, all) = (0, self.keys.min(self.num));
        let mut from_ns = self.core.now_exact_ns();
        let entries = async |to_key: &mut Vec<u8>, to_value: &mut Vec<u8>| {
            // An entry takes less time than a reading of the clock.
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

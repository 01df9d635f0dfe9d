//! The settings of a simulated world.

use std::ops::Range;

use super::net::NetConfig;
use crate::idle::PollMode;

/// The duration of an operation: a base, a part for its length, and a random part whose mean is
/// `spread_ns` and which is occasionally several times the mean.
#[derive(Clone, Debug)]
pub struct Latency {
    /// Smallest duration in nanoseconds.
    pub base_ns: u64,
    /// Mean of the random part.
    pub spread_ns: u64,
    /// Added for every KiB.
    pub per_kib_ns: u64,
}

/// The settings of a simulated world.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Buffer memory of each core in bytes.
    pub memory: usize,
    /// Most disk operations in flight per core; more wait in the core.
    pub disk_depth: usize,
    /// Most unfinished operations per core in the driver; more wait in the core.
    pub capacity: usize,
    /// How cores wait. Spinning costs turns of the simulator and tests little.
    pub poll: PollMode,
    /// Block of direct I/O in bytes: the alignment of offsets and lengths.
    pub block: u32,
    /// Duration of reads of files.
    pub read: Latency,
    /// Duration of writes of files.
    pub write: Latency,
    /// Duration of syncs of files.
    pub sync: Latency,
    /// Duration of operations on names.
    pub names: Latency,
    /// The network.
    pub net: NetConfig,
    /// Advance of the clock at each reading: the speed of the simulated processors.
    pub tick_ns: Range<u64>,
    /// Time from a wake-up to the next turn of a sleeping core.
    pub wake_ns: Range<u64>,
    /// Most turns of all cores in a run; beyond it the run fails.
    pub turns_max: u64,
    /// Most simulated time of a run in nanoseconds; beyond it the run fails.
    pub time_max_ns: u64,
}

impl Default for SimConfig {
    fn default() -> SimConfig {
        SimConfig {
            memory: 64 << 20,
            disk_depth: 64,
            capacity: 1024,
            poll: PollMode::Never,
            block: 512,
            read: Latency { base_ns: 40_000, spread_ns: 30_000, per_kib_ns: 500 },
            write: Latency { base_ns: 20_000, spread_ns: 20_000, per_kib_ns: 500 },
            sync: Latency { base_ns: 100_000, spread_ns: 200_000, per_kib_ns: 0 },
            names: Latency { base_ns: 20_000, spread_ns: 100_000, per_kib_ns: 1_000 },
            net: NetConfig::default(),
            tick_ns: 20..200,
            wake_ns: 5_000..40_000,
            turns_max: 50_000_000,
            time_max_ns: 3_600_000_000_000,
        }
    }
}

//! What a simulated world is like.

use std::ops::Range;

use super::net::NetConfig;
use crate::idle::PollMode;

/// How long an operation takes: a base, something for its length, and a random part whose mean is
/// `spread_ns` and that is, now and then, several times that.
#[derive(Clone, Debug)]
pub struct Latency {
    /// At least this many nanoseconds.
    pub base_ns: u64,
    /// Mean of the random part.
    pub spread_ns: u64,
    /// Added for every KiB.
    pub per_kib_ns: u64,
}

/// See the fields.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Buffer memory of each core in bytes.
    pub memory: usize,
    /// Disk operations in flight per core; more wait in the core.
    pub disk_depth: usize,
    /// Unfinished operations per core that the driver takes; more wait in the core.
    pub capacity: usize,
    /// How cores wait. Spinning costs turns of the simulator and shows little.
    pub poll: PollMode,
    /// Block of direct I/O in bytes: what offsets and lengths must be multiples of.
    pub block: u32,
    /// How long reads of files take.
    pub read: Latency,
    /// How long writes of files take.
    pub write: Latency,
    /// How long syncs of files take.
    pub sync: Latency,
    /// How long operations on names take.
    pub names: Latency,
    /// What the network is like.
    pub net: NetConfig,
    /// How far the clock moves each time it is looked at: the pace of the simulated processors.
    pub tick_ns: Range<u64>,
    /// How long a sleeping core takes from a wake-up to its next turn.
    pub wake_ns: Range<u64>,
    /// A run ends with an error after so many turns of all cores.
    pub turns_max: u64,
    /// A run ends with an error after so many nanoseconds of simulated time.
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

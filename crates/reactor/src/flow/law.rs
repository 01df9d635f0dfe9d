//! The law of flow control: how many operations of background work may be in flight, so that
//! requests of users take hardly longer than without them. A pure function of latencies.
//!
//! 1. Latencies of small foreground reads, and those of small foreground writes, are gathered in
//!    windows of [`WINDOW`] samples. A window's median counts.
//! 2. The *floor* is the median while background work had a depth of 1: what requests take without
//!    it, however many they are.
//! 3. A median above the *target* (a sixth above the floor, and at least [`SLACK_NS`]) lowers the
//!    depth in proportion, at most to half. A median within it raises the depth by one, if
//!    background work has used all of it.
//! 4. Every [`FLOOR_WINDOWS`] windows the floor is measured again: the depth is 1 for two windows,
//!    of which the first lets older operations end. The same happens when [`FUTILE_WINDOWS`]
//!    windows in a row are above the target at depth 1: then background work is not the cause.
//! 5. Without samples for [`IDLE_NS`] there are no requests.

/// Samples in a window.
const WINDOW: usize = 64;
/// Fewest samples of a window that ends because of its age.
const WINDOW_MIN: usize = 8;
/// The age at which a window ends, in nanoseconds.
const WINDOW_NS: u64 = 50_000_000;
/// Windows between two measurements of the floor.
const FLOOR_WINDOWS: u32 = 128;
/// Windows above the target at depth 1 after which the floor is measured again.
const FUTILE_WINDOWS: u32 = 8;
/// What a median may always be above the floor, in nanoseconds: a turn of the core takes as long.
const SLACK_NS: u32 = 100_000;
/// Time without samples after which there are no requests, in nanoseconds.
pub(crate) const IDLE_NS: u64 = 100_000_000;

/// The latencies that are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
}

/// The law, for one device of one core.
#[derive(Clone, Debug)]
pub(crate) struct Law {
    /// The core's share.
    most: u32,
    depth: u32,
    /// By [`Kind`].
    gauges: [Gauge; 2],
}

impl Law {
    /// A law under which background work has a depth of `most`, until requests are slower with it.
    pub fn new(most: u32) -> Law {
        Law { most: most.max(1), depth: most.max(1), gauges: Default::default() }
    }

    /// Takes the latency of a request that ended at `now_ns`. Background work last had to wait at
    /// `held_ns`, on any core.
    pub fn sample(&mut self, kind: Kind, latency_ns: u64, now_ns: u64, held_ns: u64) {
        let gauge = &mut self.gauges[kind as usize];
        let Some(end) = gauge.sample(u32::try_from(latency_ns).unwrap_or(u32::MAX), now_ns) else {
            return;
        };
        match end {
            End::Within if held_ns >= gauge.began_ns => {
                self.depth = (self.depth + 1).min(self.most)
            }
            End::Within | End::Measured => {}
            End::Above { target, median } => {
                gauge.note_above(self.depth == 1);
                let part = (f64::from(target) / f64::from(median)).max(0.5);
                let depth = (f64::from(self.depth) * part) as u32;
                self.depth = depth.min(self.depth - 1).max(1);
            }
        }
    }

    /// The depth of background work at `now_ns`; `None` if there are no requests.
    pub fn depth(&self, now_ns: u64) -> Option<u32> {
        let active = |gauge: &&Gauge| now_ns.saturating_sub(gauge.last_ns) < IDLE_NS;
        let mut gauges = self.gauges.iter().filter(active).peekable();
        gauges.peek()?;
        Some(if gauges.any(|gauge| gauge.measuring > 0) { 1 } else { self.depth })
    }

    /// The last depth, whether or not there are requests.
    pub fn last_depth(&self) -> u32 {
        self.depth
    }

    /// Whether it has taken any latency.
    pub fn is_used(&self) -> bool {
        self.gauges.iter().any(|gauge| gauge.last_ns > 0)
    }

    /// The floor of a kind in nanoseconds; 0 if it is not known.
    pub fn floor_ns(&self, kind: Kind) -> u32 {
        self.gauges[kind as usize].floor.unwrap_or(0)
    }

    /// The last median of a kind in nanoseconds; 0 if there is none.
    pub fn median_ns(&self, kind: Kind) -> u32 {
        self.gauges[kind as usize].median
    }
}

/// The latencies of one kind.
#[derive(Clone, Debug)]
struct Gauge {
    samples: [u32; WINDOW],
    len: usize,
    began_ns: u64,
    last_ns: u64,
    floor: Option<u32>,
    median: u32,
    /// Windows until the floor is measured: 2 and 1 while the depth is 1 for it, else 0.
    measuring: u32,
    /// Windows since it was measured.
    windows: u32,
    /// Windows above the target at depth 1, in a row.
    futile: u32,
}

/// How a window ended.
enum End {
    /// It was part of a measurement of the floor.
    Measured,
    Within,
    Above {
        target: u32,
        median: u32,
    },
}

impl Default for Gauge {
    fn default() -> Gauge {
        Gauge {
            samples: [0; WINDOW],
            len: 0,
            began_ns: 0,
            last_ns: 0,
            floor: None,
            median: 0,
            measuring: 0,
            windows: 0,
            futile: 0,
        }
    }
}

impl Gauge {
    fn sample(&mut self, latency_ns: u32, now_ns: u64) -> Option<End> {
        if now_ns.saturating_sub(self.last_ns) >= IDLE_NS {
            self.len = 0;
        }
        if self.len == 0 {
            self.began_ns = now_ns;
        }
        self.last_ns = now_ns;
        self.samples[self.len] = latency_ns;
        self.len += 1;
        let old = self.len >= WINDOW_MIN && now_ns.saturating_sub(self.began_ns) >= WINDOW_NS;
        if self.len < WINDOW && !old {
            return None;
        }
        let samples = &mut self.samples[..std::mem::take(&mut self.len)];
        let middle = samples.len() / 2;
        let median = *samples.select_nth_unstable(middle).1;
        Some(self.end(median))
    }

    /// Ends a window.
    fn end(&mut self, median: u32) -> End {
        self.median = median;
        if self.measuring > 0 {
            self.measuring -= 1;
            if self.measuring == 0 {
                (self.floor, self.windows, self.futile) = (Some(median), 0, 0);
            }
            return End::Measured;
        }
        let Some(floor) = self.floor else {
            self.measuring = 2;
            return End::Measured;
        };
        self.windows += 1;
        if self.windows >= FLOOR_WINDOWS {
            self.measuring = 2;
        }
        let target = target_of(floor);
        if median > target {
            return End::Above { target, median };
        }
        self.futile = 0;
        // Fewer requests, or a faster device. Medians within the target are noise.
        if target_of(median) < floor {
            self.floor = Some(median);
        }
        End::Within
    }

    fn note_above(&mut self, at_least_depth: bool) {
        self.futile = if at_least_depth { self.futile + 1 } else { 0 };
        if self.futile >= FUTILE_WINDOWS {
            self.measuring = 1;
        }
    }
}

/// The median up to which the depth is not lowered.
fn target_of(floor: u32) -> u32 {
    floor.saturating_add((floor / 6).max(SLACK_NS))
}

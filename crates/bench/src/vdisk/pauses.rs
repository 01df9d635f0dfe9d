//! How long a guest waits when its disk's target is replaced: by a successor that is handed the
//! disk (`SIGUSR2`), or by a new process after `kill -9`.
//!
//! The front end keeps its load up the whole time. It looks at its clock in short slices, and keeps
//! of each slice the longest time without a completion and when that ended. Another thread replaces
//! the target again and again, and notes when. Before each replacement it leaves a while alone:
//! what the machine itself stands still shows there. Both are put together in the end.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use node::{Error, Kind};

use super::outcome::{Pauses, PausesOutcome};
use super::target::Target;
use super::{Front, VdiskPlan, explain};

/// Length of a slice.
const SLICE_NS: u64 = 5_000_000;
/// How long the target is left alone, and watched after it was replaced.
const WINDOW: Duration = Duration::from_millis(300);
/// How long it may take until there is a new one.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_micros(200);

/// How the target is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// By a successor that is handed the disk.
    Upgrade,
    /// By a new process, after the old one was killed.
    Restart,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct PausesPlan {
    /// The load, on a disk of our own target. Its length is not looked at.
    pub load: VdiskPlan,
    /// How the target is replaced.
    pub how: Replacement,
    /// How often.
    pub times: u32,
}

/// A slice of the front end's time.
struct Slice {
    /// The longest time without a completion that ended in it.
    gap_ns: u64,
    /// When that ended.
    end: Instant,
    /// When the connection was made that the front end has.
    connected: Option<Instant>,
}

impl Slice {
    /// How much of that time lies between two others.
    fn within(&self, from: Instant, to: Instant) -> Duration {
        let begun = self.end - Duration::from_nanos(self.gap_ns);
        self.end.min(to).saturating_duration_since(begun.max(from))
    }
}

/// One replacement.
struct Cycle {
    alone: Instant,
    begun: Instant,
    /// When the new process was started, if it was by us.
    started: Option<Instant>,
    over: Instant,
}

/// What both threads look at.
#[derive(Default)]
struct Shared {
    runs: AtomicBool,
    over: AtomicBool,
    reconnects: AtomicU32,
}

/// Measures.
///
/// # Errors
/// As [`super::run_vdisk`]; and when the target cannot be replaced.
pub fn run_pauses(plan: &PausesPlan) -> Result<PausesOutcome, Error> {
    let load = &plan.load;
    let disk = load.disk.as_ref();
    let disk = disk.ok_or_else(|| Error::new(Kind::Usage, "there is no disk to serve"))?;
    let mut target = Target::start(std::slice::from_ref(disk), load.queues, load.target_processor)?;
    let socket = target.sockets()[0].clone();
    let shared = Shared::default();
    let (cycles, front) = std::thread::scope(|scope| {
        let front = scope.spawn(|| {
            frontend::pin(load.front_processor).map_err(explain)?;
            watch(load, &socket, &shared)
        });
        let cycles = replace(plan, &mut target, &shared, || front.is_finished());
        shared.over.store(true, Ordering::Release);
        let front = front
            .join()
            .unwrap_or_else(|_| Err(Error::new(Kind::System, "the front end panicked")));
        (cycles, front)
    });
    // Where the front end ended early, it knows why.
    let watched = front?;
    let cycles = cycles?;
    let mut pauses = Vec::new();
    let (mut alone, mut ready, mut first) = (Vec::new(), Vec::new(), Vec::new());
    let ms = |duration: Duration| duration.as_secs_f64() * 1000.0;
    for cycle in &cycles {
        let longest = |from: Instant, to: Instant| {
            watched.slices.iter().map(|slice| slice.within(from, to)).max().unwrap_or_default()
        };
        alone.push(ms(longest(cycle.alone, cycle.begun)));
        pauses.push(ms(longest(cycle.begun, cycle.over)));
        let Some(started) = cycle.started else { continue };
        let answered = watched.slices.iter().find_map(|slice| {
            let connected = slice.connected.filter(|connected| *connected >= started)?;
            Some((connected, slice.end))
        });
        if let Some((connected, end)) = answered {
            ready.push(ms(connected.saturating_duration_since(started)));
            first.push(ms(end.saturating_duration_since(connected)));
        }
    }
    Ok(PausesOutcome {
        name: match plan.how {
            Replacement::Upgrade => "vdisk upgrades",
            Replacement::Restart => "vdisk restarts",
        },
        disk: disk.clone(),
        rw: load.rw.name(),
        times: plan.times,
        pause_ms: Pauses::of(pauses),
        alone_ms: Pauses::of(alone),
        told_ms: Pauses::of(target.told_pauses_ms()),
        ready_ms: Pauses::of(ready),
        first_ms: Pauses::of(first),
        errors: watched.errors,
        reconnects: watched.reconnects,
        verified: watched.verified,
        queues: load.queues,
        depth: load.depth,
        block_size: load.block_size,
        packed: load.packed,
        millrace: env!("CARGO_PKG_VERSION"),
    })
}

struct Watched {
    slices: Vec<Slice>,
    errors: u64,
    reconnects: u64,
    verified: Option<u64>,
}

/// The front end's thread.
fn watch(load: &VdiskPlan, socket: &std::path::Path, shared: &Shared) -> Result<Watched, Error> {
    let disk = frontend::Disk::connect(socket, load.options()).map_err(explain)?;
    let mut front = Front::new(load, socket, disk)?;
    front.begin();
    front.run(super::WARM_UP_NS)?;
    front.counts = super::Counts::default();
    shared.runs.store(true, Ordering::Release);
    let mut slices = Vec::new();
    let mut over = false;
    while !over {
        over = shared.over.load(Ordering::Acquire);
        if over {
            front.end()?
        } else {
            front.run(SLICE_NS)?
        }
        let counts = &mut front.counts;
        if counts.pause_ns > 0 {
            let end = front.began + Duration::from_nanos(counts.pause_end_ns);
            slices.push(Slice { gap_ns: counts.pause_ns, end, connected: front.connected });
            counts.pause_ns = 0;
        }
        shared.reconnects.store(counts.reconnects as u32, Ordering::Release);
    }
    let (errors, reconnects) = (front.counts.errors, front.counts.reconnects);
    let verified = if load.verify { Some(front.sweep()?) } else { None };
    Ok(Watched { slices, errors, reconnects, verified })
}

/// The other thread: replaces the target, until the front end has ended.
fn replace(
    plan: &PausesPlan,
    target: &mut Target,
    shared: &Shared,
    ended: impl Fn() -> bool,
) -> Result<Vec<Cycle>, Error> {
    let wait_for = |what: &str, condition: &dyn Fn() -> bool| {
        let since = Instant::now();
        while !condition() && !ended() {
            if since.elapsed() > PATIENCE {
                return Err(Error::new(Kind::System, format!("{what}: it takes too long")));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    };
    wait_for("the first request", &|| shared.runs.load(Ordering::Acquire))?;
    let mut cycles = Vec::new();
    while cycles.len() < plan.times as usize && !ended() {
        let alone = Instant::now();
        std::thread::sleep(WINDOW);
        let begun = Instant::now();
        let started = match plan.how {
            Replacement::Upgrade => {
                target.upgrade(PATIENCE)?;
                None
            }
            Replacement::Restart => {
                let before = shared.reconnects.load(Ordering::Acquire);
                let started = target.restart()?;
                wait_for("a new connection", &|| {
                    shared.reconnects.load(Ordering::Acquire) > before
                })?;
                Some(started)
            }
        };
        std::thread::sleep(WINDOW);
        cycles.push(Cycle { alone, begun, started, over: Instant::now() });
    }
    Ok(cycles)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_wait_only_that_part_counts_that_lies_in_the_window() {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let slice = Slice { gap_ns: 20_000_000, end: at(50), connected: None };
        let within = |from, to| slice.within(at(from), at(to)).as_millis();
        assert_eq!(within(0, 100), 20);
        assert_eq!((within(0, 40), within(40, 100), within(35, 45)), (10, 10, 10));
        assert_eq!((within(0, 30), within(50, 100), within(60, 70)), (0, 0, 0));
    }
}

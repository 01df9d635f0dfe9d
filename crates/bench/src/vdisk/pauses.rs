//! How long a guest waits when its disk's target is replaced: by a successor that takes over the
//! disk (`SIGUSR2`), or by the next process of its launcher after `kill -9`.
//!
//! A front end for each disk keeps up its load the whole time. Its time is divided into short
//! slices; of each it keeps the longest time without a completion, and when that ended. Another
//! thread replaces the target repeatedly and records the times. Before each replacement it waits
//! for a window without one, which shows the machine's own pauses. Both records are combined at the
//! end.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use node::{Error, Kind};

use super::explain;
use super::front::{Counts, Front};
use super::outcome::{Pauses, PausesOutcome};
use super::plan::VdiskPlan;
use super::target::Target;

/// Length of a slice.
const SLICE_NS: u64 = 5_000_000;
/// The window without a replacement, and the window after one.
const WINDOW: Duration = Duration::from_millis(300);
/// How long a replacement may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// The pause between two polls.
const POLL: Duration = Duration::from_micros(200);

/// How the target is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// By a successor that takes over the disk.
    Upgrade,
    /// By the next process of its launcher, after it was killed.
    Restart,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct PausesPlan {
    /// The load, on each disk of our own target. Its length is ignored.
    pub load: VdiskPlan,
    /// The number of disks. In the URI `{n}` stands for a disk's number, from 0 on.
    pub disks: u16,
    /// How the target is replaced.
    pub how: Replacement,
    /// How many times.
    pub times: u32,
}

/// A slice of a front end's time.
struct Slice {
    /// The index of its disk.
    disk: usize,
    /// The longest time without a completion that ended in it.
    gap_ns: u64,
    /// When that time ended.
    end: Instant,
}

impl Slice {
    /// The part of that time between two others.
    fn within(&self, from: Instant, to: Instant) -> Duration {
        let begun = self.end - Duration::from_nanos(self.gap_ns);
        self.end.min(to).saturating_duration_since(begun.max(from))
    }
}

/// One replacement.
struct Cycle {
    alone: Instant,
    begun: Instant,
    over: Instant,
}

/// The progress of both threads.
#[derive(Default)]
struct Progress {
    runs: AtomicBool,
    over: AtomicBool,
}

/// Measures.
///
/// # Errors
/// As [`super::run_vdisk`]; or the target cannot be replaced.
pub fn run_pauses(plan: &PausesPlan) -> Result<PausesOutcome, Error> {
    let load = &plan.load;
    let disk = load.disk.as_ref();
    let disk = disk.ok_or_else(|| Error::new(Kind::Usage, "there is no disk to serve"))?;
    let uris: Vec<_> = (0..plan.disks).map(|nth| disk.replace("{n}", &nth.to_string())).collect();
    let mut target = Target::start(&uris, load.queues, load.target_processor)?;
    let sockets = target.sockets().to_vec();
    let progress = Progress::default();
    let (cycles, front) = std::thread::scope(|scope| {
        let front = scope.spawn(|| {
            frontend::pin(load.front_processor).map_err(explain)?;
            watch(load, &sockets, &progress)
        });
        let cycles = replace(plan, &mut target, &progress, || front.is_finished());
        progress.over.store(true, Ordering::Release);
        let front = front
            .join()
            .unwrap_or_else(|_| Err(Error::new(Kind::System, "the front end panicked")));
        (cycles, front)
    });
    // A front end that ended early has the reason.
    let watched = front?;
    let waits = Waits::new(&cycles?, usize::from(plan.disks), &watched.slices);
    Ok(PausesOutcome {
        name: match plan.how {
            Replacement::Upgrade => "vdisk upgrades",
            Replacement::Restart => "vdisk restarts",
        },
        disk: disk.clone(),
        disks: plan.disks,
        rw: load.rw.name(),
        times: plan.times,
        pause_ms: Pauses::of(waits.replaced.each),
        alone_ms: Pauses::of(waits.alone.each),
        longest_pause_ms: Pauses::of(waits.replaced.longest),
        longest_alone_ms: Pauses::of(waits.alone.longest),
        told_ms: Pauses::of(target.reported_pauses_ms()),
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

/// The waits of all guests in windows of the same kind, in milliseconds.
#[derive(Default)]
struct InWindows {
    /// Each guest's longest time without a completion in each window.
    each: Vec<f64>,
    /// The longest of them in each window.
    longest: Vec<f64>,
}

impl InWindows {
    fn add(&mut self, disks: usize, slices: &[Slice], from: Instant, to: Instant) {
        let mut each = vec![0.0_f64; disks];
        for slice in slices {
            let ms = slice.within(from, to).as_secs_f64() * 1000.0;
            each[slice.disk] = each[slice.disk].max(ms);
        }
        self.longest.push(each.iter().copied().fold(0.0, f64::max));
        self.each.extend(each);
    }
}

/// The waits of all cycles.
#[derive(Default)]
struct Waits {
    /// Around each replacement.
    replaced: InWindows,
    /// In the windows without one.
    alone: InWindows,
}

impl Waits {
    /// Combines both threads' records.
    fn new(cycles: &[Cycle], disks: usize, slices: &[Slice]) -> Waits {
        let mut waits = Waits::default();
        for cycle in cycles {
            waits.alone.add(disks, slices, cycle.alone, cycle.begun);
            waits.replaced.add(disks, slices, cycle.begun, cycle.over);
        }
        waits
    }
}

/// The front end's results.
struct Watched {
    slices: Vec<Slice>,
    errors: u64,
    reconnects: u64,
    verified: Option<u64>,
}

/// The front ends' thread: drives the disks until the other thread is done.
fn watch(load: &VdiskPlan, sockets: &[PathBuf], progress: &Progress) -> Result<Watched, Error> {
    let mut fronts = Vec::new();
    for socket in sockets {
        let disk = frontend::Disk::connect(socket, load.options()).map_err(explain)?;
        fronts.push(Front::new(load, socket, disk)?);
    }
    for front in &mut fronts {
        front.begin();
    }
    drive(&mut fronts, super::WARM_UP_NS)?;
    for front in &mut fronts {
        front.counts = Counts::default();
    }
    progress.runs.store(true, Ordering::Release);
    let mut slices = Vec::new();
    let mut over = false;
    while !over {
        over = progress.over.load(Ordering::Acquire);
        if over {
            fronts.iter_mut().try_for_each(Front::end)?;
        } else {
            drive(&mut fronts, SLICE_NS)?;
        }
        for (disk, front) in fronts.iter_mut().enumerate() {
            let counts = &mut front.counts;
            if counts.pause_ns > 0 {
                let end = front.began + Duration::from_nanos(counts.pause_end_ns);
                slices.push(Slice { disk, gap_ns: counts.pause_ns, end });
                counts.pause_ns = 0;
            }
        }
    }
    let errors = fronts.iter().map(|front| front.counts.errors).sum();
    let reconnects = fronts.iter().map(|front| front.counts.reconnects).sum();
    let swept = fronts.iter_mut().map(Front::sweep).sum::<Result<u64, _>>()?;
    Ok(Watched { slices, errors, reconnects, verified: load.verify.then_some(swept) })
}

/// Keeps the queues of all disks full for a time.
fn drive(fronts: &mut [Front<'_>], length_ns: u64) -> Result<(), Error> {
    if let [front] = fronts {
        return front.run(length_ns);
    }
    let since = Instant::now();
    while since.elapsed().as_nanos() < u128::from(length_ns) {
        for front in &mut *fronts {
            front.turn(true)?;
        }
    }
    Ok(())
}

/// The other thread: replaces the target, or ends early with the front end.
fn replace(
    plan: &PausesPlan,
    target: &mut Target,
    progress: &Progress,
    ended: impl Fn() -> bool,
) -> Result<Vec<Cycle>, Error> {
    let since = Instant::now();
    while !progress.runs.load(Ordering::Acquire) && !ended() {
        if since.elapsed() > PATIENCE {
            return Err(Error::new(Kind::System, "the first request takes too long"));
        }
        std::thread::sleep(POLL);
    }
    let mut cycles = Vec::new();
    while cycles.len() < plan.times as usize && !ended() {
        if plan.how == Replacement::Restart {
            target.until_spare(cycles.len() + 1, PATIENCE)?;
        }
        let alone = Instant::now();
        std::thread::sleep(WINDOW);
        let begun = Instant::now();
        match plan.how {
            Replacement::Upgrade => target.upgrade(PATIENCE)?,
            Replacement::Restart => target.kill_node(PATIENCE)?,
        }
        std::thread::sleep(WINDOW);
        cycles.push(Cycle { alone, begun, over: Instant::now() });
    }
    Ok(cycles)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_part_of_a_wait_inside_the_window_counts() {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let slice = Slice { disk: 0, gap_ns: 20_000_000, end: at(50) };
        let within = |from, to| slice.within(at(from), at(to)).as_millis();
        assert_eq!(within(0, 100), 20);
        assert_eq!((within(0, 40), within(40, 100), within(35, 45)), (10, 10, 10));
        assert_eq!((within(0, 30), within(50, 100), within(60, 70)), (0, 0, 0));
    }

    #[test]
    fn each_guest_has_its_own_longest_wait() {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let of = |disk, ms: u64, end| Slice { disk, gap_ns: ms * 1_000_000, end: at(end) };
        let slices = [of(0, 3, 10), of(1, 7, 12), of(0, 5, 20), of(1, 50, 200)];
        let mut windows = InWindows::default();
        windows.add(2, &slices, zero, at(100));
        assert_eq!((windows.each, windows.longest), (vec![5.0, 7.0], vec![7.0]));
    }
}

//! Driving a virtual machine's disk as its guest would, without a virtual machine.
//!
//! 1. [`target`] serves the disk, unless another target's socket is named.
//! 2. Crate `frontend` connects to it. One thread, on a processor of its own, drives all queues and
//!    keeps `depth` requests in flight on each: it polls a queue, submits a new request for each
//!    completion, and publishes once per poll. All completions of a poll share one reading of the
//!    clock ([`front`]).
//! 3. The window begins after a short warm-up. At its end the requests in flight complete; with
//!    `verify` everything written is then read again.
//!
//! A guest that thinks (`think_us`) leaves each slot idle for a time before it uses it again. With
//! `sync` each write is followed by a flush in the same slot, and both count as one request: that
//! is a guest with a write cache that wants every write durable.
//!
//! A target that goes away in the window is waited for and connected to again with the same memory
//! and in-flight region, as QEMU does, but sooner; the result has the longest time without a
//! completion.
//!
//! With `verify` each block carries its own number and that of its write ([`pattern`]), and every
//! read of a written block is checked. Then a block has at most one request in flight.

#![expect(clippy::disallowed_methods, reason = "plays the guest: a thread beside the cores")]

mod front;
mod idle;
mod outcome;
mod pattern;
mod pauses;
mod plan;
mod source;
mod target;

use std::path::Path;

use frontend::Disk;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use node::{Error, Kind};

use self::front::{Counts, Front};
pub use self::idle::{IdlePlan, run_idle};
pub use self::outcome::{IdleOutcome, PausesOutcome, VdiskOutcome};
pub use self::pauses::{PausesPlan, Replacement, run_pauses};
pub use self::plan::{Mix, VdiskPlan};
use self::target::Target;
pub(crate) use self::target::quoted;

/// The length of the warm-up.
const WARM_UP_NS: u64 = 200_000_000;
/// How often a signal is looked for.
const LOOK_NS: u64 = 50_000_000;

/// Measures.
///
/// # Errors
/// There is no target, it breaks the protocol or stays away, or data differs from what was written.
pub fn run_vdisk(plan: &VdiskPlan) -> Result<VdiskOutcome, Error> {
    if plan.verify && !plan.rw.writes() {
        let what = "--verify checks only data that is written";
        return Err(Error::new(Kind::Usage, what).hint("use it with --rw randrw"));
    }
    let own = match (&plan.socket, &plan.disk) {
        (Some(_), _) => None,
        (None, Some(disk)) => {
            Some(Target::start(std::slice::from_ref(disk), plan.queues, plan.target_processor)?)
        }
        (None, None) => {
            let what = "there is no disk to drive";
            return Err(Error::new(Kind::Usage, what).hint("name one with --disk or --socket"));
        }
    };
    // An operator ends the measurement of a disk that goes on without us. Our own target would end,
    // too: a terminal's signal goes to both.
    let interrupts =
        if own.is_none() { Some(interrupts().map_err(explain_signals)?) } else { None };
    let own_socket = own.as_ref().and_then(|target| target.sockets().first());
    let socket = own_socket.or(plan.socket.as_ref());
    let socket = socket.expect("one or the other is named");
    // The front end gets its own thread: the caller keeps its processors.
    std::thread::scope(|scope| {
        let front = scope.spawn(|| {
            frontend::pin(plan.front_processor).map_err(explain)?;
            drive(plan, socket, interrupts)
        });
        front.join().unwrap_or_else(|_| Err(Error::new(Kind::System, "the front end panicked")))
    })
}

/// The signals that end a measurement early. They are blocked in this thread, and those that it
/// starts, from now on.
fn interrupts() -> nix::Result<SignalFd> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGTERM);
    signals.thread_block()?;
    SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
}

fn explain_signals(error: nix::Error) -> Error {
    Error::new(Kind::System, format!("signals cannot be received: {error}"))
}

fn explain(error: frontend::Error) -> Error {
    let kind = match error.kind() {
        frontend::Kind::Ring | frontend::Kind::Protocol => Kind::Damaged,
        frontend::Kind::Refused => Kind::Unsupported,
        _ => Kind::System,
    };
    Error::new(kind, format!("the disk's target: {error}"))
}

fn drive(
    plan: &VdiskPlan,
    socket: &Path,
    interrupts: Option<SignalFd>,
) -> Result<VdiskOutcome, Error> {
    let disk = Disk::connect(socket, plan.options()).map_err(explain)?;
    let pid = disk.session().connection().peer_pid();
    let pid = pid.filter(|pid| *pid as u32 != std::process::id());
    let size_bytes = disk.size_bytes();
    let mut front = Front::new(plan, socket, disk)?;
    front.fill()?;
    front.begin();
    front.run(WARM_UP_NS)?;
    front.counts = Counts::default();
    let cpu_before = pid.and_then(cpu_ns);
    let from_ns = front.now_ns();
    let end_ns = from_ns.saturating_add((plan.seconds * 1e9) as u64);
    let is_interrupted =
        || interrupts.as_ref().is_some_and(|fd| matches!(fd.read_signal(), Ok(Some(_))));
    while front.now_ns() < end_ns && !is_interrupted() {
        front.run(LOOK_NS.min(end_ns.saturating_sub(front.now_ns())))?;
    }
    let seconds = (front.now_ns() - from_ns) as f64 / 1e9;
    let cpu_after = pid.and_then(cpu_ns);
    let counts = std::mem::take(&mut front.counts);
    front.end()?;
    let verified = if plan.verify { Some(front.sweep()?) } else { None };

    let us = |ns: f64| ns / 1000.0;
    let quantile = |quantile| us(counts.latency.value_at_quantile(quantile) as f64);
    let ops_per_second = counts.operations as f64 / seconds;
    let cpu_ns = cpu_before.zip(cpu_after).map(|(before, after)| after.saturating_sub(before));
    Ok(VdiskOutcome {
        name: "vdisk",
        disk: plan.disk.clone().filter(|_| plan.socket.is_none()),
        rw: plan.rw.name(),
        ops_per_second,
        operations: counts.operations,
        errors: counts.errors,
        bytes_per_second: ops_per_second * f64::from(plan.block_size),
        mean_us: us(counts.latency.mean()),
        p50_us: quantile(0.5),
        p99_us: quantile(0.99),
        p999_us: quantile(0.999),
        max_us: us(counts.latency.max() as f64),
        max_pause_ms: us(counts.pause_ns as f64) / 1000.0,
        cpu_us_per_op: cpu_ns.map(|ns| us(ns as f64) / counts.operations.max(1) as f64),
        reconnects: counts.reconnects,
        verified,
        seconds,
        queues: plan.queues,
        depth: plan.depth,
        block_size: plan.block_size,
        packed: plan.packed,
        sync: plan.sync,
        think_us: plan.think_us,
        size_bytes,
        millrace: env!("CARGO_PKG_VERSION"),
    })
}

/// Processor time of all threads of a process and of its children: a confined node listens in one
/// process and serves in another.
fn cpu_ns(pid: i32) -> Option<u64> {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let task = task.ok()?.path();
        // The thread may have ended.
        let Ok(text) = std::fs::read_to_string(task.join("schedstat")) else { continue };
        sum += text.split(' ').next()?.parse::<u64>().ok()?;
        let children = std::fs::read_to_string(task.join("children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        sum += children.filter_map(cpu_ns).sum::<u64>();
    }
    Some(sum)
}

//! The cost of idle disks: each is connected, has read a block once, and gets no requests.

use std::time::{Duration, Instant};

use frontend::{Disk, DiskOptions, Status};
use node::{Error, Kind};

use super::outcome::IdleOutcome;
use super::target::Target;
use super::{cpu_ns, explain};

/// The pause before the window: the target stops polling only after a moment.
const SETTLE: Duration = Duration::from_millis(300);

/// What to measure.
#[derive(Clone, Debug)]
pub struct IdlePlan {
    /// The URI, served once for each disk.
    pub disk: String,
    /// The number of disks.
    pub disks: u16,
    /// Queues of each.
    pub queues: u16,
    /// Packed rings.
    pub packed: bool,
    /// Length of the window.
    pub seconds: f64,
    /// Processor of the target.
    pub target_processor: usize,
}

/// Measures.
///
/// # Errors
/// A disk cannot be served, connected to or read.
pub fn run_idle(plan: &IdlePlan) -> Result<IdleOutcome, Error> {
    let uris = vec![plan.disk.clone(); plan.disks.into()];
    let target = Target::start(&uris, plan.queues, plan.target_processor)?;
    let options =
        DiskOptions { queues: plan.queues, packed: plan.packed, ..DiskOptions::default() };
    let mut disks = Vec::new();
    let mut block = vec![0; 4096];
    for socket in target.sockets() {
        let mut disk = Disk::connect(socket, options.clone()).map_err(explain)?;
        let mut queues = Vec::new();
        for nth in 0..plan.queues {
            let mut queue = disk.take_queue(nth);
            let status = queue.read(0, &mut block).map_err(explain)?;
            if status != Status::Ok {
                return Err(Error::new(Kind::System, format!("cannot read a block: {status:?}")));
            }
            queues.push(queue);
        }
        disks.push((disk, queues));
    }
    let pid = disks.first().and_then(|(disk, _)| disk.session().connection().peer_pid());
    let cpu = || {
        pid.and_then(cpu_ns)
            .ok_or_else(|| Error::new(Kind::System, "cannot read the target's processor time"))
    };
    std::thread::sleep(SETTLE);
    let (from, before) = (Instant::now(), cpu()?);
    std::thread::sleep(Duration::from_secs_f64(plan.seconds));
    let (used_ns, seconds) = (cpu()? - before, from.elapsed().as_secs_f64());
    Ok(IdleOutcome {
        name: "vdisk idle",
        disk: plan.disk.clone(),
        disks: plan.disks,
        queues: plan.queues,
        seconds,
        cpu_percent: used_ns as f64 / 1e7 / seconds,
        millrace: env!("CARGO_PKG_VERSION"),
    })
}

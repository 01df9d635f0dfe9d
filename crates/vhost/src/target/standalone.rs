//! A ring without a connection, for simulations that test nothing else. The path from the ring to
//! the device is the production code.

use std::sync::Arc;

use bdev::Bdev;
use reactor::{Class, Core, JoinHandle};

use crate::memory::GuestMemory;
use crate::ring::Setup;
use crate::ring::inflight::InflightArea;
use crate::ring::request::Disk;
use crate::target::queue::{self, Command, RingEnd, RingHandle, Start};
use crate::target::share::DiskActivity;
use crate::target::stats::QueueStats;

/// The arguments of a ring; see `queue::Start`.
#[expect(missing_docs, reason = "they are what `queue::Start` has")]
pub struct RingStart {
    pub index: u16,
    pub setup: Setup,
    pub memory: Arc<GuestMemory>,
    pub disk: Disk,
    pub inflight: Option<InflightArea>,
    pub device: Bdev,
    pub stats: Arc<QueueStats>,
}

/// A ring on this core. It has no kick: it is polled in the turns that the core takes for other
/// reasons.
pub struct StandaloneRing {
    handle: RingHandle,
    ended: JoinHandle<RingEnd>,
}

impl StandaloneRing {
    /// Starts the ring.
    pub fn new(core: &Core, start: RingStart) -> StandaloneRing {
        let (handle, commands) = queue::command_queue();
        let RingStart { index, setup, memory, disk, inflight, device, stats } = start;
        let start = Start {
            work: 0,
            disk_name: "alone".into(),
            home: core.id(),
            index,
            setup,
            memory,
            disk,
            inflight,
            log: None,
            kick: None,
            call: None,
            err: None,
            polled: false,
            fua: false,
            enabled: true,
            broken: false,
            hold: None,
            waits_for_lock: false,
            device,
            activity: DiskActivity::register(&core.local()),
            stats,
            limits: Arc::default(),
            log_limits: Arc::default(),
            trouble: Arc::default(),
        };
        let ended = core.spawn(Class::Foreground, queue::run(core.clone(), start, commands));
        StandaloneRing { handle, ended }
    }

    /// Quiesces the ring: pops nothing more and completes the requests in flight. Returns the
    /// position at which it continues, and whether it was broken.
    pub async fn stop(mut self) -> (u32, bool) {
        self.handle.send(Command::Stop);
        let ended = self.ended.await;
        (ended.base, ended.broken)
    }
}

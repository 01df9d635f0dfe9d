//! Flow control: how many operations of background work (flush, compaction, checks, copies) a core
//! has in flight on each device, beside the requests of users.
//!
//! 1. A foreground read or write is staged at once. Now and then one of them is a *probe*: the
//!    clock is read when it is submitted and when it is reaped, and the law of its device takes the
//!    latency ([`Law`]). No other operation costs a look at the clock.
//! 2. Each core posts on the [`Board`] the depth that its law allows. The lowest depth of all cores
//!    that have requests counts on every core, so the core that runs a merge gives way to requests
//!    of others.
//! 3. A background operation is staged if fewer than that are in flight; else it waits in the
//!    core's backlog.
//!
//! Without requests background work has its whole share: [`NODE_DEPTH`] for the node, divided among
//! its cores, and a core's among the devices that it has background work on. It always has one
//! operation in flight on each device, and with debt a part of its share that grows with the debt
//! ([`Flow::urge`]).
//!
//! Only the core itself touches its [`Flow`]. The board has relaxed atomics: each says one number.

mod law;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use loomable::CachePadded;

use self::law::{IDLE_NS, Kind, Law};
use crate::driver::IoOp;

/// Devices that are told apart; the last of these stands for all further ones.
pub(crate) const DEVICES: usize = 8;
/// The depth of background work of all cores on all devices.
const NODE_DEPTH: usize = 128;
/// The most of it that one core has.
const CORE_DEPTH: usize = 32;
/// Longest foreground operation that is a probe, in bytes.
const PROBE_BYTES: u32 = 64 << 10;
/// Time from the end of a probe to the next one on the same device, in nanoseconds.
const PROBE_GAP_NS: u64 = 50_000;
/// How long the urgency of background work is known, in nanoseconds.
const URGENCY_NS: u64 = 100_000_000;

/// What the cores of a node tell each other.
pub(crate) struct Board {
    /// The devices, by their numbers plus 1; 0 is a free place.
    devices: [AtomicU64; DEVICES],
    /// By core and device: the time in milliseconds in the upper bits, the depth in the lower 16.
    depths: Vec<CachePadded<[AtomicU64; DEVICES]>>,
    /// When background work last had to wait for a device, in nanoseconds.
    held: CachePadded<[AtomicU64; DEVICES]>,
}

impl Board {
    pub fn new(cores: usize) -> Board {
        let depths = (0..cores).map(|_| CachePadded(Default::default())).collect();
        Board { devices: Default::default(), depths, held: CachePadded(Default::default()) }
    }

    /// The place of a device.
    fn place(&self, device: u64) -> usize {
        let name = device.wrapping_add(1).max(1);
        let takes = |place: &AtomicU64| {
            let taken = place.compare_exchange(0, name, Ordering::Relaxed, Ordering::Relaxed);
            taken.is_ok() || taken == Err(name)
        };
        self.devices.iter().position(takes).unwrap_or(DEVICES - 1)
    }

    fn post(&self, core: usize, place: usize, depth: u32, now_ns: u64) {
        let posted = (now_ns / 1_000_000) << 16 | u64::from(depth);
        self.depths[core][place].store(posted, Ordering::Relaxed);
    }

    /// The lowest depth of the cores that have requests on the device.
    fn lowest(&self, place: usize, now_ns: u64) -> Option<u32> {
        let recent = (now_ns.saturating_sub(IDLE_NS) / 1_000_000).max(1);
        let posted = self.depths.iter().map(|core| core[place].load(Ordering::Relaxed));
        posted.filter(|posted| posted >> 16 >= recent).map(|posted| posted as u32 & 0xFFFF).min()
    }
}

/// What an operation in flight means to flow control.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Nothing.
    #[default]
    None,
    /// A background operation on the device at this place.
    Background(u8),
    /// The probe of this device.
    Probe(u8),
}

/// The flow control of one core.
pub(crate) struct Flow {
    board: Arc<Board>,
    core: usize,
    /// The depth of background work on all devices.
    most: u32,
    channels: RefCell<[Channel; DEVICES]>,
    /// The least part of the share, and until when it is known.
    urgency: Cell<(f64, u64)>,
    /// A probe has been staged and not submitted.
    staged_probe: Cell<bool>,
}

/// The path to one device.
struct Channel {
    law: Law,
    probe: Option<Probe>,
    next_probe_ns: u64,
    /// Background operations in flight.
    in_flight: u32,
    /// There has been background work.
    has_background: bool,
    held_back: u64,
}

#[derive(Clone, Copy)]
struct Probe {
    kind: Kind,
    /// Once it is submitted.
    from_ns: Option<u64>,
}

/// The state of flow control on one device of one core.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowReport {
    /// The device's number, as `st_dev` has it; 0 in a simulated world.
    pub device: u64,
    /// Background operations that may be in flight.
    pub depth: u32,
    /// Those in flight.
    pub in_flight: u32,
    /// Background operations that had to wait, so far.
    pub held_back: u64,
    /// What a foreground read takes without background work, in nanoseconds; 0 if not known.
    pub read_floor_ns: u32,
    /// What it took lately.
    pub read_ns: u32,
    /// The same of writes.
    pub write_floor_ns: u32,
    /// The same of writes.
    pub write_ns: u32,
}

type Figure = fn(&FlowReport) -> f64;

impl FlowReport {
    /// Name, help and value of what a monitoring system reads; times are in seconds. Names that end
    /// in `_total` are counters.
    pub const METRICS: &[(&'static str, &'static str, Figure)] = &[
        ("flow_background_depth", "Background operations that may be in flight", |report| {
            f64::from(report.depth)
        }),
        ("flow_background_in_flight", "Background operations in flight", |report| {
            f64::from(report.in_flight)
        }),
        ("flow_background_held_back_total", "Background operations that had to wait", |report| {
            report.held_back as f64
        }),
        ("flow_read_floor_seconds", "A request's read without background work", |report| {
            f64::from(report.read_floor_ns) / 1e9
        }),
        ("flow_read_seconds", "A request's read lately, the median", |report| {
            f64::from(report.read_ns) / 1e9
        }),
        ("flow_write_floor_seconds", "A request's write without background work", |report| {
            f64::from(report.write_floor_ns) / 1e9
        }),
        ("flow_write_seconds", "A request's write lately, the median", |report| {
            f64::from(report.write_ns) / 1e9
        }),
    ];

    /// The device as `lsblk` names it: `major:minor`.
    pub fn device_name(&self) -> String {
        format!("{}:{}", libc::major(self.device), libc::minor(self.device))
    }
}

impl Flow {
    /// The flow control of core `core` of those that share the board.
    pub fn new(board: Arc<Board>, core: usize) -> Flow {
        let most = (NODE_DEPTH / board.depths.len().max(1)).clamp(1, CORE_DEPTH) as u32;
        let channel = || Channel {
            law: Law::new(most),
            probe: None,
            next_probe_ns: 0,
            in_flight: 0,
            has_background: false,
            held_back: 0,
        };
        Flow {
            board,
            core,
            most,
            channels: RefCell::new(std::array::from_fn(|_| channel())),
            urgency: Cell::new((0.0, 0)),
            staged_probe: Cell::new(false),
        }
    }

    /// The place of a device, for [`Lane`]s.
    pub fn place(&self, device: u64) -> u8 {
        self.board.place(device) as u8
    }

    /// Notes how urgent background work is: the least part of its share, from 0 to 1.
    /// The highest of the last 100 ms counts: several jobs may run on a core.
    pub fn urge(&self, urgency: f64, now_ns: u64) {
        let (before, until_ns) = self.urgency.get();
        if urgency >= before || now_ns > until_ns {
            self.urgency.set((urgency.clamp(0.0, 1.0), now_ns + URGENCY_NS));
        }
    }

    /// Makes a foreground operation that is about to be staged a probe, if it is time for one.
    /// `direct` means that it goes to the device, not to the page cache.
    pub fn stage(&self, place: u8, op: &IoOp, direct: bool, now_ns: u64) -> Lane {
        let (kind, len) = match *op {
            IoOp::Read { len, .. } => (Kind::Read, len),
            IoOp::Write { len, durable: false, .. } => (Kind::Write, len),
            _ => return Lane::None,
        };
        if !direct || len > PROBE_BYTES {
            return Lane::None;
        }
        let channel = &mut self.channels.borrow_mut()[usize::from(place)];
        if channel.probe.is_some() || now_ns < channel.next_probe_ns {
            return Lane::None;
        }
        channel.probe = Some(Probe { kind, from_ns: None });
        self.staged_probe.set(true);
        Lane::Probe(place)
    }

    /// Notes that everything staged is being submitted.
    pub fn submit(&self, now_ns: impl FnOnce() -> u64) {
        if self.staged_probe.replace(false) {
            let now_ns = now_ns();
            for probe in self.channels.borrow_mut().iter_mut().filter_map(|c| c.probe.as_mut()) {
                probe.from_ns.get_or_insert(now_ns);
            }
        }
    }

    /// Notes that a probe has been reaped, at some time between `seen_ns`, when it had not ended,
    /// and `now_ns`.
    #[cold]
    pub fn reaped_probe(&self, place: u8, succeeded: bool, seen_ns: u64, now_ns: u64) {
        let channel = &mut self.channels.borrow_mut()[usize::from(place)];
        let Some(Probe { kind, from_ns: Some(from_ns) }) = channel.probe.take() else { return };
        channel.next_probe_ns = now_ns + PROBE_GAP_NS;
        if succeeded {
            let ended_ns = seen_ns.clamp(from_ns, now_ns).midpoint(now_ns);
            let held_ns = self.board.held[usize::from(place)].load(Ordering::Relaxed);
            channel.law.sample(kind, ended_ns.saturating_sub(from_ns), now_ns, held_ns);
            if let Some(depth) = channel.law.depth(now_ns) {
                self.board.post(self.core, usize::from(place), depth, now_ns);
            }
        }
    }

    /// Whether one more background operation may be in flight on a device.
    pub fn may_begin(&self, place: u8, now_ns: u64) -> bool {
        let at = usize::from(place);
        self.channels.borrow_mut()[at].has_background = true;
        if self.channels.borrow()[at].in_flight < self.depth(at, now_ns) {
            return true;
        }
        self.board.held[at].store(now_ns, Ordering::Relaxed);
        false
    }

    /// The depth of background work on a device.
    fn depth(&self, at: usize, now_ns: u64) -> u32 {
        let channels = self.channels.borrow();
        let devices = channels.iter().filter(|channel| channel.has_background).count() as u32;
        let share = (self.most / devices.max(1)).max(1);
        let (urgency, until_ns) = self.urgency.get();
        let urgency = if now_ns <= until_ns { urgency } else { 0.0 };
        let least = (f64::from(share) * urgency).ceil() as u32;
        // While the device stalls, there is a request but no latency.
        let Channel { probe, law, .. } = &channels[at];
        let stalled = probe.map(|_| law.last_depth());
        self.board.lowest(at, now_ns).or(stalled).unwrap_or(share).max(least).clamp(1, share)
    }

    /// Notes that a background operation is staged.
    pub fn begin(&self, place: u8) -> Lane {
        self.channels.borrow_mut()[usize::from(place)].in_flight += 1;
        Lane::Background(place)
    }

    /// Notes that a background operation has to wait.
    pub fn hold_back(&self, place: u8) {
        self.channels.borrow_mut()[usize::from(place)].held_back += 1;
    }

    /// Whether background work has nothing in flight on a device.
    pub fn is_idle(&self, place: u8) -> bool {
        self.channels.borrow()[usize::from(place)].in_flight == 0
    }

    /// Notes that a background operation has been reaped.
    pub fn end(&self, place: u8) {
        self.channels.borrow_mut()[usize::from(place)].in_flight -= 1;
    }

    /// The state of the devices that this core has used.
    pub fn report(&self, now_ns: u64) -> Vec<FlowReport> {
        let channels = self.channels.borrow();
        let used = |channel: &Channel| channel.has_background || channel.law.is_used();
        let devices = channels.iter().enumerate().filter(|(_, channel)| used(channel));
        let report = |(at, channel): (usize, &Channel)| {
            let law = &channel.law;
            FlowReport {
                device: self.board.devices[at].load(Ordering::Relaxed).saturating_sub(1),
                depth: self.depth(at, now_ns),
                in_flight: channel.in_flight,
                held_back: channel.held_back,
                read_floor_ns: law.floor_ns(Kind::Read),
                read_ns: law.median_ns(Kind::Read),
                write_floor_ns: law.floor_ns(Kind::Write),
                write_ns: law.median_ns(Kind::Write),
            }
        };
        devices.map(report).collect()
    }
}

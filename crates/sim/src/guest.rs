//! A guest and its disk in a simulated world: the real rings, in-flight region, requests and
//! devices over a simulated disk that completes out of order, and a guest with memory of its own.
//!
//! One seed is one history:
//!
//! 1. The guest has two queues, split or packed, and a model of every sector: its last write, the
//!    possible writes since, and the durable value. No sector has two requests at a time, so the
//!    result of a read is known.
//! 2. The process that serves it is killed in place of any completion, and another one starts with
//!    the same memory and in-flight region. Or it quiesces the rings and continues, or hands them
//!    over quiesced: the next process starts from the base that it was given, or dies before it has
//!    done anything.
//! 3. Or power is cut: then the guest is gone too, and the next one, with new memory, checks the
//!    promised data on the disk.
//! 4. At the end there are no more disturbances, and all requests must complete.
//!
//! The messages of a disk's handover are tested in crate `node`'s `tests/integration/simulated.rs`,
//! with the same guest.
//!
//! [`frontend::Queue`] detects duplicate answers and answers without a request; missing answers are
//! detected at the end.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use bdev::Bdev;
use frontend::message::{feature, protocol, request};
use frontend::{
    Connection, DiskOptions, Event, Memory, Pages, Queue, Region, Request, Session, Slot, Status,
};
use reactor::Core;
use reactor::sim::{Access, Crash, FailureKind, Fault, FaultKind, Rng, SimConfig, World};
use vhost::standalone::{RingStart, StandaloneRing};
use vhost::{
    Disk, F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, Form, GuestMemory, InflightRegion,
    QueueStats, RegionInfo, SERIAL_LEN, Setup,
};

/// The path of the disk's image.
pub const IMAGE: &str = "/disks/a.img";
/// Bytes of a sector.
pub const SECTOR: u64 = 512;
/// The disk's size in sectors.
pub const SECTORS: u64 = 512;
/// Queues of the guest.
pub const QUEUES: u64 = 2;
/// Longest request.
const SECTORS_MAX: u64 = 16;
/// How long a process may take to finish without disturbances.
pub const END_NS: u64 = 10_000_000_000;

/// A deliberate fault of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// None.
    None,
    /// The next process is not given the in-flight region.
    NoRegion,
    /// The device reports a flush without flushing.
    NoFlush,
}

/// The counts of a world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Report {
    pub packed: bool,
    pub processes: u64,
    pub kills: u64,
    pub power_cuts: u64,
    pub rests: u64,
    pub handed_over: u64,
    pub resubmitted: u64,
    pub requests: u64,
    pub checked_sectors: u64,
    pub flushes: u64,
    pub trace: (u64, u64),
}

/// The guest's model of a sector.
#[derive(Clone, Default)]
struct Sector {
    /// The value that a read returns.
    now: u64,
    /// The oldest value that the disk may have.
    durable: u64,
    /// Values whose writes were started since, and the number of earlier ones.
    newer: VecDeque<u64>,
    older: u64,
    /// Whether a request is in flight.
    busy: bool,
}

impl Sector {
    /// Number of completed writes.
    fn completed(&self, writing: bool) -> u64 {
        self.older + self.newer.len() as u64 - u64::from(writing)
    }

    fn flushed(&mut self, completed: u64) {
        while self.older < completed {
            let Some(value) = self.newer.pop_front() else { return };
            (self.durable, self.older) = (value, self.older + 1);
        }
    }
}

/// A request in flight.
#[derive(Clone)]
enum Asked {
    Read { first: u64, count: u64 },
    Change { first: u64, count: u64, value: u64 },
    Flush { completed: Vec<u64> },
}

/// The guest: its memory, its drivers, and its model of the disk.
pub struct Guest {
    rng: Rng,
    options: DiskOptions,
    memory: Arc<Memory>,
    queues: Vec<Queue>,
    addresses: Vec<[u64; 3]>,
    inflight: (InflightRegion, OwnedFd),
    /// The position from which each ring starts or continues.
    bases: Vec<u32>,
    asked: Vec<Vec<Option<Asked>>>,
    /// Number of requests of each queue that have come back.
    done: Vec<u64>,
    sectors: Vec<Sector>,
    writing: Vec<bool>,
    next_value: u64,
    /// Whether it submits no more requests.
    pub ends: bool,
    /// The counts so far.
    pub report: Report,
}

impl Guest {
    /// A guest with new memory.
    pub fn new(mut rng: Rng, packed: bool) -> Guest {
        let indirect = rng.coin();
        let options = DiskOptions {
            queue_size: 64,
            depth: 8,
            slot_bytes: (SECTORS_MAX * SECTOR) as u32,
            segments: if rng.coin() { 1 } else { 4 },
            packed,
            indirect,
            event_index: rng.coin(),
            ..DiskOptions::default()
        };
        let mut guest = Guest {
            rng,
            memory: Arc::new(Memory::with_regions(Vec::new())),
            queues: Vec::new(),
            addresses: Vec::new(),
            inflight: region(&options),
            bases: Vec::new(),
            asked: Vec::new(),
            done: vec![0; QUEUES as usize],
            sectors: vec![Sector::default(); SECTORS as usize],
            writing: vec![false; SECTORS as usize],
            next_value: 1,
            ends: false,
            report: Report { packed, ..Report::default() },
            options,
        };
        guest.boot();
        guest
    }

    /// Starts again with new memory and empty rings.
    fn boot(&mut self) {
        let each = self.options.queue_bytes();
        let memory = Region::new(0, QUEUES * each, Pages::Small).expect("memory");
        self.memory = Arc::new(Memory::with_regions(vec![memory]));
        let queues =
            (0..QUEUES).map(|nth| self.options.queue(&self.memory, nth * each).expect("a queue"));
        (self.queues, self.addresses) = queues.unzip();
        self.inflight = region(&self.options);
        self.bases = vec![if self.options.packed { 0x8000_8000 } else { 0 }; QUEUES as usize];
        self.asked = vec![vec![None; self.options.depth.into()]; QUEUES as usize];
        self.sectors.iter_mut().for_each(|sector| sector.busy = false);
        self.writing.fill(false);
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.queues.iter().map(Queue::in_flight).sum()
    }

    /// Takes completions and submits more requests.
    ///
    /// # Panics
    /// When a completion has no request, or is wrong.
    pub fn step(&mut self) {
        for nth in 0..self.queues.len() {
            let mut done = Vec::new();
            self.queues[nth].poll(&mut done).expect("a ring that makes sense");
            for completion in done {
                assert_eq!(completion.status, Status::Ok);
                self.completed(nth, completion.slot);
            }
            if self.ends {
                continue;
            }
            for _ in 0..self.rng.below(4) {
                self.ask(nth);
            }
            self.queues[nth].publish();
        }
    }

    fn ask(&mut self, nth: usize) {
        let (first, count) =
            (self.rng.below(SECTORS - SECTORS_MAX), 1 + self.rng.below(SECTORS_MAX));
        let kind = self.rng.below(10);
        let range = first as usize..(first + count) as usize;
        if kind > 0 && self.sectors[range.clone()].iter().any(|sector| sector.busy) {
            return;
        }
        let Some(slot) = self.queues[nth].take() else { return };
        let (offset, len) = (first * SECTOR, (count * SECTOR) as u32);
        let (request, asked) = match kind {
            0 => {
                let sectors = self.sectors.iter().zip(&self.writing);
                let completed = sectors.map(|(sector, &w)| sector.completed(w)).collect();
                (Request::Flush, Asked::Flush { completed })
            }
            1..4 => (Request::Read { offset, len }, Asked::Read { first, count }),
            kind => {
                let value = if kind < 8 { self.next_value } else { 0 };
                self.next_value += 1;
                let request = match kind {
                    8 => Request::Discard { offset, len },
                    9 => Request::WriteZeroes { offset, len, unmap: value % 2 == 0 },
                    _ => Request::Write { offset, len },
                };
                if kind < 8 {
                    let bytes = value.to_le_bytes().repeat(len as usize / 8);
                    self.queues[nth].write_data(slot, 0, &bytes);
                }
                for at in range.clone() {
                    self.sectors[at].newer.push_back(value);
                    self.writing[at] = true;
                }
                (request, Asked::Change { first, count, value })
            }
        };
        if kind > 0 {
            self.sectors[range].iter_mut().for_each(|sector| sector.busy = true);
        }
        self.queues[nth].submit(slot, request);
        self.asked[nth][slot.index()] = Some(asked);
        self.report.requests += 1;
    }

    fn completed(&mut self, nth: usize, slot: Slot) {
        match self.asked[nth][slot.index()].take().expect("the request was submitted") {
            Asked::Flush { completed } => {
                let sectors = self.sectors.iter_mut().zip(completed);
                sectors.for_each(|(sector, completed)| sector.flushed(completed));
                self.report.flushes += 1;
            }
            Asked::Read { first, count } => {
                let mut bytes = vec![0; (count * SECTOR) as usize];
                self.queues[nth].read_data(slot, 0, &mut bytes);
                for (at, bytes) in (first as usize..).zip(bytes.chunks(SECTOR as usize)) {
                    let sector = &mut self.sectors[at];
                    let expected = sector.now.to_le_bytes().repeat(SECTOR as usize / 8);
                    assert!(bytes == expected, "sector {at} was {:#x}", sector.now);
                    sector.busy = false;
                    self.report.checked_sectors += 1;
                }
            }
            Asked::Change { first, count, value } => {
                for at in first as usize..(first + count) as usize {
                    self.sectors[at].now = value;
                    self.sectors[at].busy = false;
                    self.writing[at] = false;
                }
            }
        }
        self.queues[nth].give_back(slot);
        self.done[nth] += 1;
    }

    /// Checks the disk after a power cut: promised data must be there. The values found are the new
    /// model.
    ///
    /// # Panics
    /// When it is not.
    pub fn wakes_up(&mut self, disk: &[u8]) {
        for (at, (sector, bytes)) in
            self.sectors.iter_mut().zip(disk.chunks(SECTOR as usize)).enumerate()
        {
            let value = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
            assert!(bytes == value.to_le_bytes().repeat(SECTOR as usize / 8), "a sector is torn");
            assert!(
                value == sector.durable || sector.newer.contains(&value),
                "sector {at}: {value:#x}, but {:#x} was promised",
                sector.durable
            );
            *sector = Sector { now: value, durable: value, ..Sector::default() };
            self.report.checked_sectors += 1;
        }
        self.boot();
    }

    /// Sends a target the set-up messages of this guest, as QEMU does, without waiting for answers.
    ///
    /// # Errors
    /// When the connection is closed.
    pub fn connects(&self, connection: Connection) -> frontend::Result<Session> {
        let options = &self.options;
        let when = |yes: bool, bit: u64| if yes { bit } else { 0 };
        let features = feature::VERSION_1
            | feature::PROTOCOL_FEATURES
            | feature::MQ
            | feature::FLUSH
            | feature::DISCARD
            | feature::WRITE_ZEROES
            | feature::CONFIG_WCE
            | when(options.packed, F_RING_PACKED)
            | when(options.indirect, F_INDIRECT_DESC)
            | when(options.event_index, F_EVENT_IDX);
        let mut session = Session::new(connection);
        session.set_features(features)?;
        session
            .set_protocol_features(protocol::MQ | protocol::CONFIG | protocol::INFLIGHT_SHMFD)?;
        session.set_owner()?;
        session.set_mem_table(&self.memory)?;
        let (region, fd) = &self.inflight;
        let info = region.info();
        let mut body = [info.mmap_size.to_le_bytes(), info.mmap_offset.to_le_bytes()].concat();
        body.extend([info.queues.to_le_bytes(), info.queue_size.to_le_bytes()].concat());
        session.tell(request::SET_INFLIGHT_FD, &body, &[fd.as_fd()])?;
        for nth in 0..QUEUES as u16 {
            self.starts_ring(&session, nth)?;
        }
        Ok(session)
    }

    /// Sends the messages that start a ring.
    ///
    /// # Errors
    /// When the connection is closed.
    pub fn starts_ring(&self, session: &Session, ring: u16) -> frontend::Result<()> {
        let at = usize::from(ring);
        let queue = &self.queues[at];
        // For packed rings the last known position, which is where they start.
        let base = if self.options.packed { self.bases[at] } else { queue.base() };
        session.set_vring_num(ring, self.options.queue_size)?;
        session.set_vring_base(ring, base)?;
        session.set_vring_addr(ring, &self.memory, self.addresses[at], false)?;
        session.set_vring_kick(ring, Some(queue.kick()))?;
        session.set_vring_call(ring, Some(&Event::new()?))?;
        session.set_vring_enable(ring, true)
    }

    /// A ring was stopped at this position, with nothing in flight at the device. It may have
    /// requests that were not taken.
    ///
    /// # Panics
    /// When it cannot be the position.
    pub fn ring_stopped(&mut self, ring: u16, base: u32) {
        let at = usize::from(ring);
        self.bases[at] = base;
        // A packed ring's has two halves: what was taken, and what was used.
        let is_idle = match self.options.packed {
            true => base & 0xffff == base >> 16,
            false => base == self.queues[at].base(),
        };
        assert!(is_idle, "ring {ring} was stopped at {base:#x} with requests in flight");
    }

    /// Number of requests of a queue that are in flight, and that have come back.
    pub fn counts(&self, ring: u16) -> (u64, u64) {
        let at = usize::from(ring);
        (self.queues[at].in_flight() as u64, self.done[at])
    }

    /// Its rings were stopped at these positions, with nothing in flight at the device: they start
    /// there, at another device, with a region of their own.
    pub fn moves(&mut self, bases: &[u32]) {
        self.bases.copy_from_slice(bases);
        self.inflight = region(&self.options);
    }

    fn starts(&self, flaw: Flaw, device: &Bdev) -> Vec<(RingStart, Arc<QueueStats>)> {
        let memory = &self.memory.regions()[0];
        let info = RegionInfo {
            guest_addr: 0,
            size: memory.size(),
            user_addr: memory.user_addr(),
            mmap_offset: 0,
        };
        let table = GuestMemory::new().replace(&[(info, memory.as_fd())]).expect("its memory");
        let table = Arc::new(table);
        let options = &self.options;
        let when = |yes: bool, bit: u64| if yes { bit } else { 0 };
        let features = when(options.packed, F_RING_PACKED)
            | when(options.indirect, F_INDIRECT_DESC)
            | when(options.event_index, F_EVENT_IDX);
        let start = |(index, &[desc, avail, used]): (usize, &[u64; 3])| {
            let at = |addr: u64| memory.user_addr() + addr;
            let setup = Setup {
                num: options.queue_size,
                desc: at(desc),
                avail: at(avail),
                used: at(used),
                log: None,
                base: self.bases[index],
                features,
            };
            let stats: Arc<QueueStats> = Arc::default();
            let inflight = self.inflight.0.queue(index as u16).filter(|_| flaw != Flaw::NoRegion);
            let start = RingStart {
                index: index as u16,
                setup,
                memory: table.clone(),
                disk: disk(device),
                inflight,
                device: device.clone(),
                stats: stats.clone(),
            };
            (start, stats)
        };
        self.addresses.iter().enumerate().map(start).collect()
    }
}

fn region(options: &DiskOptions) -> (InflightRegion, OwnedFd) {
    let form = if options.packed { Form::Packed } else { Form::Split };
    InflightRegion::create(QUEUES as u16, options.queue_size, form).expect("a region")
}

fn disk(device: &Bdev) -> Disk {
    let geometry = device.geometry();
    Disk {
        capacity_sectors: geometry.size_bytes / SECTOR,
        block_size: geometry.block_size,
        read_only: false,
        discard: true,
        write_zeroes: true,
        write_zeroes_may_unmap: true,
        max_discard_sectors: 1 << 16,
        max_write_zeroes_sectors: 1 << 16,
        segments_max: u32::MAX,
        segment_bytes_max: u32::MAX,
        serial: [0; SERIAL_LEN],
    }
}

/// The planned end of a process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// In place of a completion.
    Crash(Crash),
    /// Quiesced: another process continues.
    HandOver,
    /// After all requests have completed.
    Done,
}

/// A process that serves the disk, with the guest.
async fn process(core: Core, guest: Rc<RefCell<Guest>>, uri: String, ending: Ending, flaw: Flaw) {
    let device = Bdev::open(&core, &uri).await.expect("the disk");
    let mut turns = guest.borrow_mut().rng.below(400);
    loop {
        let starts = guest.borrow().starts(flaw, &device);
        let mut rings = Vec::new();
        for (start, stats) in starts {
            rings.push((StandaloneRing::new(&core, start), stats));
        }
        let end_ns = core.now_ns() + END_NS;
        while turns > 0 || matches!(ending, Ending::Crash(_) | Ending::Done) {
            turns = turns.saturating_sub(1);
            let ns = guest.borrow_mut().rng.below(60_000);
            core.sleep_ns(ns).await;
            let mut guest = guest.borrow_mut();
            guest.step();
            if ending == Ending::Done {
                guest.ends = true;
                if guest.in_flight() == 0 {
                    break;
                }
                assert!(core.now_ns() < end_ns, "{} requests are lost", guest.in_flight());
            } else if turns == 0 && guest.rng.coin() {
                break;
            }
        }
        for (nth, (ring, stats)) in rings.into_iter().enumerate() {
            let (base, broken) = ring.stop().await;
            assert!(!broken, "a ring is broken");
            let mut guest = guest.borrow_mut();
            guest.bases[nth] = base;
            guest.report.resubmitted += stats.resubmitted.get();
        }
        let mut guest = guest.borrow_mut();
        guest.report.rests += 1;
        // The disk was not taken over, so the rings continue here.
        if ending != Ending::Done && guest.rng.below(3) == 0 {
            turns = 1 + guest.rng.below(100);
            continue;
        }
        return;
    }
}

/// A random guest, and the URI of a random device for it, with its image in the world.
pub fn with_disk(world: &World, rng: &mut Rng) -> (Rc<RefCell<Guest>>, String) {
    with_disk_at(world, rng, IMAGE)
}

/// The same with an image of another name.
pub fn with_disk_at(world: &World, rng: &mut Rng, image: &str) -> (Rc<RefCell<Guest>>, String) {
    world.add_file(image, vec![0; (SECTORS * SECTOR) as usize]);
    let guest = Rc::new(RefCell::new(Guest::new(world.rng(), rng.coin())));
    let direct = if rng.coin() { "" } else { "?direct=off" };
    let over = match rng.below(3) {
        0 => "delay:all=0us..500us|",
        1 => "dirty:granule=4K|",
        _ => "",
    };
    (guest, format!("{over}file:{image}{direct}"))
}

/// Runs the history of a seed.
///
/// # Panics
/// When data was lost, a request was done twice, or a promise was broken.
pub fn guest(seed: u64, flaw: Flaw) -> Report {
    let world = World::new(seed, 1, SimConfig::default());
    let mut rng = world.rng();
    let (guest, uri) = with_disk(&world, &mut rng);
    if flaw == Flaw::NoFlush {
        world.add_fault(Fault::new(FaultKind::Skip).of(Access::Sync));
    }
    let lives = 4 + rng.below(8);
    for life in 0..=lives {
        let ending = match rng.below(8) {
            _ if life == lives => Ending::Done,
            0..4 => Ending::Crash(Crash::Kill),
            4 | 5 => Ending::Crash(Crash::PowerCut),
            _ => Ending::HandOver,
        };
        if let Ending::Crash(crash) = ending {
            world.crash_at(crash, 1..150);
        }
        let run = world.run(|core| process(core, guest.clone(), uri.clone(), ending, flaw));
        let mut guest = guest.borrow_mut();
        guest.report.processes += 1;
        match run.map_err(|failure| failure.kind) {
            Ok(_) => guest.report.handed_over += u64::from(ending == Ending::HandOver),
            Err(FailureKind::Crash(Crash::Kill)) => guest.report.kills += 1,
            Err(FailureKind::Crash(Crash::PowerCut)) => {
                guest.report.power_cuts += 1;
                let bytes = world.bytes(IMAGE).expect("the image");
                guest.wakes_up(&bytes);
            }
            Err(other) => panic!("{other:?}\n{}", world.newest_events()),
        }
    }
    let mut report = guest.borrow().report.clone();
    assert_eq!(guest.borrow().in_flight(), 0);
    report.trace = world.trace();
    report
}

//! The state of one world, which all its simulated drivers share: clock, devices, operations in
//! flight.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use super::config::{Latency, SimConfig};
use super::crash::Crash;
use super::disk::{Disk, Plan};
use super::fault::Access;
use super::files::{Name, OpenImage};
use super::inode::InodeRef;
use super::net::{Addresses, Listening, Stream};
use super::rng::Rng;
use super::sockets::{Arrival, Performed};
use super::trace::{Event, Trace, What};
use crate::driver::{Fd, IoOp, SimFd, Token};
use crate::inbox::{Inbox, Sender, inbox};

/// The time of an event, and a number that orders events of the same time.
pub(crate) type When = (u64, u64);

/// The object of a simulated descriptor.
pub(crate) enum Descriptor {
    File(OpenFile),
    Lock {
        path: PathBuf,
        exclusive: bool,
    },
    Listening(Listening),
    Stream(Stream),
    /// A watched descriptor of the host, which stays open as long as this.
    Host(RawFd),
}

/// An open file.
#[derive(Clone)]
pub(crate) struct OpenFile {
    pub(super) inode: InodeRef,
    pub(super) block: u32,
    pub(super) writable: bool,
}

/// The time of an operation that waits for another party, or is stuck.
pub(super) const WAITING: u64 = u64::MAX;

/// An operation between its submission and its reaping.
pub(crate) struct Running {
    pub token: Token,
    pub op: IoOp,
    pub plan: Plan,
    /// The result, if it is already decided and does not need the operation's memory.
    pub result: Option<i32>,
    /// A write's bytes. Their memory does not change while the write is in flight, so they are
    /// copied once, when the operation is staged.
    pub data: Vec<u8>,
    /// Number of bytes that a read requests.
    len: u64,
    /// Number of changes of its file when a sync was started.
    changes: u64,
    /// The flush that is a part of a durable write.
    flush: Option<Plan>,
}

impl Running {
    pub fn new(token: Token, op: IoOp, plan: Plan) -> Running {
        let (result, data, flush) = (None, Vec::new(), None);
        Running { token, op, plan, result, data, len: 0, changes: 0, flush }
    }
}

/// The memory of an operation on a file.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpMemory {
    /// The addresses, and with several pieces their lengths, or-ed together.
    pub address: usize,
    pub len: u64,
}

/// The operations of one core.
#[derive(Default)]
pub(crate) struct Port {
    pub staged: VecDeque<(Token, IoOp, OpMemory, Vec<u8>)>,
    pub running: BTreeMap<When, Running>,
    pub by_token: BTreeMap<Token, When>,
}

impl Port {
    /// The time of the `n`-th completion (from 1).
    pub fn due(&self, n: usize) -> Option<u64> {
        self.running.keys().nth(n.max(1) - 1).map(|when| when.0).filter(|&at| at != WAITING)
    }

    pub fn take(&mut self, token: Token) -> Option<(When, Running)> {
        let when = self.by_token.remove(&token)?;
        self.running.remove(&when).map(|running| (when, running))
    }

    pub fn put(&mut self, when: When, running: Running) {
        self.by_token.insert(running.token, when);
        self.running.insert(when, running);
    }
}

/// A completed operation: its result, and the bytes to write into its memory.
pub(crate) struct Outcome {
    pub token: Token,
    pub op: IoOp,
    pub result: i32,
    pub bytes: Vec<u8>,
}

/// The state of a world.
pub(crate) struct State {
    pub config: SimConfig,
    pub now: u64,
    pub schedule: Rng,
    pub(super) device: Rng,
    ticks: Rng,
    /// The crash's random numbers.
    pub(super) crashes: Rng,
    pub disk: Disk,
    pub trace: Trace,
    pub(super) ports: Vec<Port>,
    pub(super) names: BTreeMap<When, Name>,
    order: u64,
    pub(super) descriptors: Vec<Option<Descriptor>>,
    pub(super) addresses: Addresses,
    pub(super) arrivals: BTreeMap<When, Arrival>,
    /// Socket operations that wait, by descriptor.
    pub(super) waiting: BTreeMap<i32, Vec<(usize, Token)>>,
    pub(super) closing: Sender<i32>,
    closed: Inbox<i32>,
    pub(super) images: Vec<OpenImage>,
    /// Computations made besides the cores.
    pub(super) computations: u64,
    /// A scheduled crash, and the number of completions before it.
    pub(super) armed: Option<(u64, Crash)>,
    /// Whether the running process has crashed.
    pub(super) crashed: Option<Crash>,
}

/// Whether the kernel accepts this for a file with blocks of this size.
fn aligned(block: u32, address: usize, offset: u64, len: u64) -> bool {
    let block_mask = u64::from(block) - 1;
    // Direct I/O also needs memory aligned to the disk's logical block.
    let memory_mask = if block > 1 { 511 } else { 0 };
    (offset | len) & block_mask == 0 && address & memory_mask == 0 && offset <= i64::MAX as u64
}

/// The longest file; its bytes are in memory.
pub(super) const LEN_MAX: u64 = 1 << 32;
/// Most open descriptors.
const DESCRIPTORS: usize = 1 << 20;
/// Start of a world in milliseconds since 1970.
const EPOCH_MS: u64 = 1_700_000_000_000;

impl State {
    pub fn new(seed: u64, cores: usize, config: SimConfig) -> State {
        let mut rng = Rng::new(seed);
        let (closing, closed) = inbox(DESCRIPTORS);
        State {
            config,
            now: 1,
            schedule: rng.fork(),
            device: rng.fork(),
            ticks: rng.fork(),
            crashes: rng.fork(),
            disk: Disk::default(),
            trace: Trace::new(),
            ports: (0..cores).map(|_| Port::default()).collect(),
            names: BTreeMap::new(),
            order: 0,
            descriptors: Vec::new(),
            computations: 0,
            addresses: Addresses::default(),
            arrivals: BTreeMap::new(),
            waiting: BTreeMap::new(),
            closing,
            closed,
            images: Vec::new(),
            armed: None,
            crashed: None,
        }
    }

    pub fn note(&mut self, core: usize, token: Token, what: What) {
        self.trace.note(Event { at: self.now, core: core as u32, token, what });
    }

    pub fn tick(&mut self) -> u64 {
        self.now += self.ticks.within(self.config.tick_ns.clone()).max(1);
        self.now
    }

    pub fn unix_time_ms(&self) -> u64 {
        EPOCH_MS + self.now / 1_000_000
    }

    pub(super) fn after(&mut self, ns: u64) -> When {
        self.order += 1;
        (self.now.saturating_add(ns).min(u64::MAX - 1), self.order)
    }

    pub(super) fn latency(&mut self, of: fn(&SimConfig) -> &Latency, len: u64) -> u64 {
        let of = of(&self.config);
        // Each doubling has half the chance: a long, thin tail.
        let times = u64::from(self.device.next_u64().trailing_zeros());
        let random = of.spread_ns * times + self.device.below(of.spread_ns);
        of.base_ns + random / 2 + len * of.per_kib_ns / 1024
    }

    // Descriptors.

    /// The number of the next descriptor. Numbers are not reused, so that a use after the close is
    /// detected.
    pub(super) fn next_descriptor(&self) -> i32 {
        self.descriptors.len() as i32
    }

    pub(super) fn insert(&mut self, descriptor: Descriptor) -> i32 {
        let number = self.next_descriptor();
        self.descriptors.push(Some(descriptor));
        number
    }

    pub(super) fn open(&mut self, descriptor: Descriptor) -> Fd {
        let number = self.insert(descriptor);
        Fd::Sim(SimFd::new(number, self.closing.clone()))
    }

    /// Watches a descriptor of the host.
    pub fn watch(&mut self, host: RawFd) -> SimFd {
        let number = self.insert(Descriptor::Host(host));
        SimFd::new(number, self.closing.clone())
    }

    /// How many of `len` bytes go through a socket of the host at once.
    pub fn at_once(&mut self, len: usize) -> usize {
        match self.device.below(3) {
            0 => 1 + self.device.below(len as u64) as usize,
            _ => len,
        }
    }

    /// The channel on which dropped descriptors announce themselves.
    pub fn closing(&self) -> Sender<i32> {
        self.closing.clone()
    }

    pub(super) fn descriptor(&mut self, fd: i32) -> Option<&mut Descriptor> {
        self.descriptors.get_mut(usize::try_from(fd).ok()?)?.as_mut()
    }

    pub(super) fn descriptor_at(&self, fd: i32) -> Option<&Descriptor> {
        self.descriptors.get(usize::try_from(fd).ok()?)?.as_ref()
    }

    pub(super) fn remove(&mut self, fd: i32) -> Option<Descriptor> {
        self.descriptors.get_mut(usize::try_from(fd).ok()?)?.take()
    }

    /// All open descriptors with their numbers.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = (i32, &Descriptor)> {
        let numbered = self.descriptors.iter().enumerate();
        numbered.filter_map(|(fd, d)| d.as_ref().map(|d| (fd as i32, d)))
    }

    /// Handles the descriptors closed since the last call.
    pub fn close_dropped(&mut self) {
        let mut closed = Vec::new();
        closed.extend(std::iter::from_fn(|| self.closed.pop()));
        for number in closed {
            if let Some(descriptor) = self.remove(number) {
                self.closed_socket(number, descriptor);
            }
        }
    }

    pub fn open_sockets(&mut self) -> usize {
        self.close_dropped();
        self.descriptors()
            .filter(|(_, d)| matches!(d, Descriptor::Stream(_) | Descriptor::Listening(_)))
            .count()
    }

    pub fn open_files(&mut self) -> usize {
        self.close_dropped();
        self.descriptors.iter().flatten().filter(|d| matches!(d, Descriptor::File(_))).count()
    }

    pub fn locks_held(&mut self, path: &Path) -> usize {
        self.close_dropped();
        self.descriptors
            .iter()
            .flatten()
            .filter(|d| matches!(d, Descriptor::Lock { path: held, .. } if held == path))
            .count()
            + self.images_locked(path).count()
    }

    pub(super) fn file(&self, fd: i32) -> Option<OpenFile> {
        match self.descriptors.get(usize::try_from(fd).ok()?)?.as_ref()? {
            Descriptor::File(file) => Some(file.clone()),
            _ => None,
        }
    }

    // Operations on descriptors.

    /// Stages an operation; `data` is the bytes that it writes to a file.
    pub fn stage(&mut self, core: usize, token: Token, op: IoOp, memory: OpMemory, data: Vec<u8>) {
        self.ports[core].staged.push_back((token, op, memory, data));
    }

    pub fn staged(&self, core: usize) -> usize {
        self.ports[core].staged.len()
    }

    /// Submits all staged operations to the devices.
    pub fn submit(&mut self, core: usize) {
        self.close_dropped();
        if self.crashed.is_some() {
            self.ports[core].staged.clear();
        }
        while let Some((token, op, memory, data)) = self.ports[core].staged.pop_front() {
            let (when, running) = match op {
                IoOp::Read { fd, offset, .. } | IoOp::ReadV { fd, offset, .. } => {
                    self.submit_read(core, token, op, fd, memory, offset)
                }
                IoOp::Write { fd, offset, .. } | IoOp::WriteV { fd, offset, .. } => {
                    self.submit_write(core, token, op, fd, memory.address, offset, data)
                }
                IoOp::Fallocate { fd, offset, len, .. } => {
                    self.submit_zeroes(core, token, op, fd, offset..offset.saturating_add(len))
                }
                IoOp::SyncData { fd } => self.submit_sync(core, token, op, fd),
                _ => self.submit_socket(core, token, op),
            };
            self.ports[core].put(when, running);
        }
    }

    pub(super) fn refuse(&mut self, token: Token, op: IoOp, errno: i32) -> (When, Running) {
        let when = self.after(0);
        (when, Running { result: Some(-errno), ..Running::new(token, op, Plan::default()) })
    }

    fn submit_read(
        &mut self,
        core: usize,
        token: Token,
        op: IoOp,
        fd: i32,
        OpMemory { address, len }: OpMemory,
        offset: u64,
    ) -> (When, Running) {
        let Some(OpenFile { inode, block, .. }) = self.file(fd) else {
            return self.refuse(token, op, libc::EBADF);
        };
        let number = inode.borrow().number;
        self.note(core, token, What::Read { file: number, offset, len: len as u32 });
        if !aligned(block, address, offset, len) {
            return self.refuse(token, op, libc::EINVAL);
        }
        let path = inode.borrow().path.clone();
        let range = offset..offset.saturating_add(len);
        let plan = self.plan(core, token, Access::Read, &path, &range, block.max(512));
        let ns = self.latency(|config| &config.read, len);
        self.at_the_device(ns, Running { len, ..Running::new(token, op, plan) })
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one write")]
    fn submit_write(
        &mut self,
        core: usize,
        token: Token,
        op: IoOp,
        fd: i32,
        address: usize,
        offset: u64,
        data: Vec<u8>,
    ) -> (When, Running) {
        let Some(OpenFile { inode, block, .. }) = self.file(fd).filter(|file| file.writable) else {
            return self.refuse(token, op, libc::EBADF);
        };
        let (number, len) = (inode.borrow().number, data.len() as u64);
        self.note(core, token, What::Write { file: number, offset, len: len as u32 });
        if !aligned(block, address, offset, len) || offset.saturating_add(len) > LEN_MAX {
            return self.refuse(token, op, libc::EINVAL);
        }
        let path = inode.borrow().path.clone();
        let range = offset..offset + len;
        let plan = self.plan(core, token, Access::Write, &path, &range, block.max(512));
        let mut ns = self.latency(|config| &config.write, len);
        let mut running = Running { data, ..Running::new(token, op, plan) };
        if let IoOp::Write { durable: true, .. } = op {
            let (flush, flush_ns) = self.plan_sync(core, token, &inode);
            ns += flush_ns + flush.extra_ns;
            running.plan.stuck |= flush.stuck;
            running.flush = Some(flush);
        }
        self.at_the_device(ns, running)
    }

    /// Punches a hole or zeroes a range: a write of zeroes up to the end of the file, which the
    /// device takes completely or not at all.
    fn submit_zeroes(
        &mut self,
        core: usize,
        token: Token,
        op: IoOp,
        fd: i32,
        range: std::ops::Range<u64>,
    ) -> (When, Running) {
        let Some(OpenFile { inode, .. }) = self.file(fd).filter(|file| file.writable) else {
            return self.refuse(token, op, libc::EBADF);
        };
        let (number, size) = (inode.borrow().number, inode.borrow().len());
        let range = range.start.min(size)..range.end.min(size);
        let len = range.end - range.start;
        self.note(core, token, What::Write { file: number, offset: range.start, len: len as u32 });
        let path = inode.borrow().path.clone();
        let plan = self.plan(core, token, Access::Write, &path, &range, 512);
        let plan = Plan { short: None, ..plan };
        let ns = self.latency(|config| &config.write, 4096);
        let data = vec![0; len as usize];
        self.at_the_device(ns, Running { data, ..Running::new(token, op, plan) })
    }

    fn submit_sync(&mut self, core: usize, token: Token, op: IoOp, fd: i32) -> (When, Running) {
        let Some(OpenFile { inode, .. }) = self.file(fd) else {
            return self.refuse(token, op, libc::EBADF);
        };
        let changes = inode.borrow().changes();
        let (plan, ns) = self.plan_sync(core, token, &inode);
        self.at_the_device(ns, Running { changes, ..Running::new(token, op, plan) })
    }

    /// Decides the fate of a flush of a file, and the time that it takes without a fault.
    fn plan_sync(&mut self, core: usize, token: Token, inode: &InodeRef) -> (Plan, u64) {
        let (number, path) = (inode.borrow().number, inode.borrow().path.clone());
        self.note(core, token, What::Sync { file: number });
        let plan = self.plan(core, token, Access::Sync, &path, &(0..u64::MAX), 512);
        (plan, self.latency(|config| &config.sync, 0))
    }

    /// The completion time of an operation with this plan, which takes `ns` without it.
    pub(super) fn at_the_device(&mut self, ns: u64, running: Running) -> (When, Running) {
        let mut when = self.after(ns + running.plan.extra_ns);
        if running.plan.stuck {
            when.0 = WAITING;
        }
        (when, running)
    }

    pub(super) fn plan(
        &mut self,
        core: usize,
        token: Token,
        access: Access,
        path: &Path,
        range: &std::ops::Range<u64>,
        block: u32,
    ) -> Plan {
        let (trace, now) = (&mut self.trace, self.now);
        self.disk.plan(&mut self.device, access, path, range, block, |kind| {
            let what = What::Fault { kind: kind.number() };
            trace.note(Event { at: now, core: core as u32, token, what });
        })
    }

    pub fn cancel(&mut self, core: usize, token: Token) {
        self.note(core, token, What::Cancel);
        let port = &mut self.ports[core];
        if let Some(at) = port.staged.iter().position(|(t, ..)| *t == token) {
            let Some((token, op, ..)) = port.staged.remove(at) else { return };
            let (when, running) = self.refuse(token, op, libc::ECANCELED);
            self.ports[core].put(when, running);
            return;
        }
        // An operation that waits for another party is cancelled. A device may have begun already,
        // and then the operation ends normally. A stuck operation stays stuck, in contrast to a
        // slow one.
        let Some((when, mut running)) = port.take(token) else { return };
        let hears = when.0 == WAITING || self.device.coin();
        if running.plan.stuck || !hears {
            self.ports[core].put(when, running);
        } else {
            running.result = Some(-libc::ECANCELED);
            let latest = when.0.saturating_sub(self.now);
            let ns = self.device.below(1_000).min(latest);
            let when = self.after(ns);
            self.ports[core].put(when, running);
        }
    }

    /// Continues all stuck operations.
    pub fn release_stuck(&mut self) {
        for core in 0..self.ports.len() {
            let stuck: Vec<Token> = self.ports[core]
                .running
                .iter()
                .filter(|(when, running)| when.0 == WAITING && running.plan.stuck)
                .map(|(_, running)| running.token)
                .collect();
            for token in stuck {
                let ns = self.latency(|config| &config.read, 4096);
                let when = self.after(ns);
                if let Some((_, mut running)) = self.ports[core].take(token) {
                    running.plan.stuck = false;
                    self.ports[core].put(when, running);
                }
            }
        }
    }

    /// Takes the next completion that is due. `fetch` reads the bytes that an operation sends.
    pub fn reap(
        &mut self,
        core: usize,
        send_len: impl Fn(&IoOp) -> usize,
        mut fetch: impl FnMut(&IoOp, usize) -> Vec<u8>,
    ) -> Option<Outcome> {
        loop {
            let entry = self.ports[core].running.first_key_value()?;
            if entry.0.0 > self.now || !self.completes() {
                return None;
            }
            let (_, running) = self.ports[core].running.pop_first()?;
            let (token, op) = (running.token, running.op);
            self.ports[core].by_token.remove(&token);
            let outcome = match (running.result, op) {
                (Some(result), _) => Outcome::plain(token, op, result),
                (None, IoOp::Read { fd, offset, .. } | IoOp::ReadV { fd, offset, .. }) => {
                    let inode = self.file_in_use(fd, token);
                    let len = running.len as usize;
                    match self.disk.read(&inode, offset, len, &running.plan) {
                        Ok(bytes) => Outcome { token, op, result: bytes.len() as i32, bytes },
                        Err(errno) => Outcome::plain(token, op, -errno),
                    }
                }
                (
                    None,
                    IoOp::Write { fd, offset, .. }
                    | IoOp::WriteV { fd, offset, .. }
                    | IoOp::Fallocate { fd, offset, .. },
                ) => {
                    let inode = self.file_in_use(fd, token);
                    let Running { data, plan, flush, .. } = &running;
                    let end = offset + data.len() as u64;
                    let full = plan.errno.is_none() && self.room_for(&inode, end).is_err();
                    let done = if full {
                        self.disk.counts.full += 1;
                        Err(inode.borrow_mut().write_within(&mut self.device, offset, data))
                    } else {
                        self.disk.write(&mut self.device, &inode, offset, data, plan)
                    };
                    let done = done.and_then(|n| match flush {
                        Some(flush) if n > 0 => {
                            self.disk.flush_last(&mut self.device, &inode, flush).map(|()| n)
                        }
                        _ => Ok(n),
                    });
                    let taken = if let IoOp::Fallocate { .. } = op { 0 } else { i32::MAX };
                    let n = done.map(|n| (n as i32).min(taken));
                    Outcome::plain(token, op, n.unwrap_or_else(|errno| -errno))
                }
                (None, IoOp::SyncData { fd }) => {
                    let inode = self.file_in_use(fd, token);
                    let Running { changes, plan, .. } = &running;
                    let done = self.disk.sync(&mut self.device, &inode, *changes, plan);
                    Outcome::plain(token, op, done.map_or_else(|errno| -errno, |n| n as i32))
                }
                (None, _) => match self.perform_socket(&op, &mut fetch, send_len(&op)) {
                    Performed::Done(result, bytes) => Outcome { token, op, result, bytes },
                    Performed::Wait => {
                        self.wait_again(core, running);
                        continue;
                    }
                },
            };
            self.note(core, token, What::Done { result: outcome.result.into() });
            return Some(outcome);
        }
    }

    /// The file of a completing operation, which has kept it open.
    fn file_in_use(&self, fd: i32, token: Token) -> InodeRef {
        match self.file(fd) {
            Some(file) => file.inode,
            None => panic!("descriptor {fd} was closed while operation {token} used it"),
        }
    }

    pub fn due_now(&self, core: usize, n: usize) -> bool {
        self.ports[core].due(n).is_some_and(|at| at <= self.now)
    }

    pub fn stuck(&self, core: usize) -> usize {
        let port = &self.ports[core];
        let names = self.names.iter().filter(|(_, name)| name.core as usize == core);
        port.running.values().filter(|running| running.plan.stuck).count()
            + names.filter(|(when, _)| when.0 == WAITING).count()
    }

    /// Adds a core of another process of this run.
    pub fn add_core(&mut self) -> usize {
        self.ports.push(Port::default());
        self.ports.len() - 1
    }

    /// Removes a core, perhaps with operations in flight.
    pub fn forget(&mut self, core: usize) {
        if self.crashed.is_none() {
            self.cut_short(core);
        }
        self.ports[core] = Port::default();
    }
}

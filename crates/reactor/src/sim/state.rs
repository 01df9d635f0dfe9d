//! The state of one world, which all its simulated drivers share: clock, devices, operations in
//! flight.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, PipeReader};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use super::config::{Latency, SimConfig};
use super::crash::Crash;
use super::disk::{Disk, Plan};
use super::fault::Access;
use super::inode::InodeRef;
use super::net::{Addresses, Listening, Stream};
use super::rng::Rng;
use super::sockets::{Arrival, Performed};
use super::trace::{Event, Trace, What};
use crate::driver::{IoOp, MetaOp, MetaOut, Token};
use crate::file::{Fd, Mode, Opening, SharedFile, SimFd};
use crate::image::{Image, ImageInfo, ImageOpening};
use crate::inbox::{Inbox, Sender, inbox};
use crate::remote::{Remote, Shared};
use crate::unix::are_readable;

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

/// An open image. Its descriptors are the writing end of a pipe, which tells when the last of them
/// is closed.
struct OpenImage {
    pipe: PipeReader,
    file: OpenFile,
    path: PathBuf,
    /// Whether its lock is exclusive; `None` without a lock.
    locked: Option<bool>,
}

impl OpenImage {
    fn is_open(&self) -> bool {
        !are_readable(&[self.pipe.as_raw_fd()])[0]
    }
}

/// An open file.
#[derive(Clone)]
pub(crate) struct OpenFile {
    pub inode: InodeRef,
    block: u32,
    writable: bool,
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
}

impl Running {
    pub fn new(token: Token, op: IoOp, plan: Plan) -> Running {
        Running { token, op, plan, result: None, data: Vec::new(), len: 0, changes: 0 }
    }
}

/// The memory of an operation on a file.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    /// The addresses, and with several pieces their lengths, or-ed together.
    pub address: usize,
    pub len: u64,
}

/// The operations of one core.
#[derive(Default)]
pub(crate) struct Port {
    pub staged: VecDeque<(Token, IoOp, Place, Vec<u8>)>,
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

/// An operation on names in flight.
pub(super) struct Name {
    core: u32,
    token: Token,
    op: MetaOp,
    shared: Arc<Shared>,
    plan: Plan,
    pub name_error: Option<i32>,
    /// Number of changes of names when it was started.
    changes: u64,
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
    names: BTreeMap<When, Name>,
    order: u64,
    descriptors: Vec<Option<Descriptor>>,
    pub(super) addresses: Addresses,
    pub(super) arrivals: BTreeMap<When, Arrival>,
    /// Socket operations that wait, by descriptor.
    pub(super) waiting: BTreeMap<i32, Vec<(usize, Token)>>,
    closing: Sender<i32>,
    closed: Inbox<i32>,
    images: Vec<OpenImage>,
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
const LEN_MAX: u64 = 1 << 32;
/// Bytes that a file occupies beside its contents.
const FILE_ROOM: u64 = 512;
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

    fn latency(&mut self, of: fn(&SimConfig) -> &Latency, len: u64) -> u64 {
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
    pub fn stage(&mut self, core: usize, token: Token, op: IoOp, place: Place, data: Vec<u8>) {
        self.ports[core].staged.push_back((token, op, place, data));
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
        while let Some((token, op, place, data)) = self.ports[core].staged.pop_front() {
            let (when, running) = match op {
                IoOp::Read { fd, offset, .. } | IoOp::ReadV { fd, offset, .. } => {
                    self.submit_read(core, token, op, fd, place, offset)
                }
                IoOp::Write { fd, offset, .. } | IoOp::WriteV { fd, offset, .. } => {
                    self.submit_write(core, token, op, fd, place.address, offset, data)
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
        Place { address, len }: Place,
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
        let ns = self.latency(|config| &config.write, len);
        self.at_the_device(ns, Running { data, ..Running::new(token, op, plan) })
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
        let (number, changes) = (inode.borrow().number, inode.borrow().changes());
        self.note(core, token, What::Sync { file: number });
        let path = inode.borrow().path.clone();
        let plan = self.plan(core, token, Access::Sync, &path, &(0..u64::MAX), 512);
        let ns = self.latency(|config| &config.sync, 0);
        self.at_the_device(ns, Running { changes, ..Running::new(token, op, plan) })
    }

    /// The completion time of an operation with this plan, which takes `ns` without it.
    fn at_the_device(&mut self, ns: u64, running: Running) -> (When, Running) {
        let mut when = self.after(ns + running.plan.extra_ns);
        if running.plan.stuck {
            when.0 = WAITING;
        }
        (when, running)
    }

    fn plan(
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
                    let Running { data, plan, .. } = &running;
                    let end = offset + data.len() as u64;
                    let full = plan.errno.is_none() && self.room_for(&inode, end).is_err();
                    let done = if full {
                        self.disk.counts.full += 1;
                        Err(inode.borrow_mut().write_within(&mut self.device, offset, data))
                    } else {
                        self.disk.write(&mut self.device, &inode, offset, data, plan)
                    };
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

    // Operations on names.

    pub fn meta(&mut self, core: usize, token: Token, op: MetaOp, shared: &Arc<Shared>) {
        if self.crashed.is_some() {
            return;
        }
        let changed;
        let (kind, path) = match &op {
            MetaOp::Open { path, .. } => (0, path),
            MetaOp::List { path } => (1, path),
            MetaOp::ReadSmall { path, .. } => (2, path),
            MetaOp::LockShared { path } => (3, path),
            MetaOp::OpenForWriting { path, .. } => (4, path),
            MetaOp::Rename { to, .. } => (5, to),
            MetaOp::Remove { path } => (6, path),
            MetaOp::SyncDir { path } => (7, path),
            MetaOp::SetLen { file, .. }
            | MetaOp::Allocate { file, .. }
            | MetaOp::Measure { file } => {
                // By its newest name, if it is an open file of this world.
                let own = self.file(file.fd().number());
                changed = own.map_or_else(Default::default, |own| own.inode.borrow().path.clone());
                let kind = match op {
                    MetaOp::SetLen { .. } => 8,
                    MetaOp::Allocate { .. } => 9,
                    _ => 13,
                };
                (kind, &changed)
            }
            MetaOp::LockExclusive { path } => (10, path),
            MetaOp::CreateDir { path } => (11, path),
            MetaOp::OpenImage { path, .. } => (12, path),
            MetaOp::StartProcess(program) => (13, &program.path),
        };
        let path = path.clone();
        self.note(core, token, What::Name { kind });
        let (trace, now) = (&mut self.trace, self.now);
        let name_error = self.disk.plan_name(&mut self.device, &path, |kind| {
            let what = What::Fault { kind: kind.number() };
            trace.note(Event { at: now, core: core as u32, token, what });
        });
        let (plan, len) = match &op {
            MetaOp::ReadSmall { max, .. } => {
                let size = self.disk.find(&path).map_or(0, |i| i.borrow().len());
                let len = size.min(*max as u64);
                (self.plan(core, token, Access::Read, &path, &(0..len), 512), len)
            }
            MetaOp::SyncDir { .. } => {
                let skip = self.disk.plan_skip(&mut self.device, &path);
                (Plan { skip, ..Plan::default() }, 0)
            }
            _ => (Plan::default(), 0),
        };
        let ns = self.latency(|config| &config.names, len) + plan.extra_ns;
        let mut when = self.after(ns);
        if plan.stuck {
            when.0 = WAITING;
        }
        let (shared, changes) = (shared.clone(), self.disk.names.changes());
        let core = core as u32;
        self.names.insert(when, Name { core, token, op, shared, plan, name_error, changes });
    }

    /// Answers the name operations that are due.
    pub fn answer_names(&mut self) {
        while let Some((when, _)) = self.names.first_key_value()
            && when.0 <= self.now
            && self.completes()
            && let Some((_, name)) = self.names.pop_first()
        {
            let (core, token, shared) = (name.core as usize, name.token, name.shared.clone());
            let answer = self.perform(name);
            let result = match &answer {
                Ok(_) => 0,
                Err(e) => -i64::from(e.raw_os_error().unwrap_or(i32::MAX)),
            };
            self.note(core, token, What::Done { result });
            shared.post(Remote::Meta(token, answer));
        }
    }

    pub fn next_name(&self) -> Option<u64> {
        self.names.keys().next().map(|when| when.0).filter(|&at| at != WAITING)
    }

    pub(super) fn perform(&mut self, name: Name) -> io::Result<MetaOut> {
        if let Some(errno) = name.name_error {
            return Err(io::Error::from_raw_os_error(errno));
        }
        match name.op {
            MetaOp::Open { path, buffered } => {
                let inode = self.disk.find(&path)?;
                let block = if buffered { 1 } else { self.config.block };
                Ok(self.open_file(path, OpenFile { inode, block, writable: false }))
            }
            MetaOp::List { path } => self.disk.list(&path).map(MetaOut::List),
            MetaOp::ReadSmall { path, max } => {
                let inode = self.disk.find(&path)?;
                let size = inode.borrow().bytes().len();
                // The helper continues after a short transfer.
                let whole = Plan { short: None, ..name.plan };
                let bytes = self
                    .disk
                    .read(&inode, 0, size.min(max), &whole)
                    .map_err(io::Error::from_raw_os_error)?;
                if size > max {
                    let text = format!("longer than {max} bytes");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
                Ok(MetaOut::Bytes(bytes))
            }
            MetaOp::LockShared { path } => {
                if self.disk.find(&path).is_err() {
                    return Ok(MetaOut::Lock(None));
                }
                self.lock(path, false)
            }
            MetaOp::OpenForWriting { path, opening, mode } => {
                self.room_for_name(&path, opening)?;
                let inode = self.disk.open_for_writing(&path, opening)?;
                if opening == Opening::Unshared && self.is_open(&inode) {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                let block = if mode == Mode::Buffered { 1 } else { self.config.block };
                Ok(self.open_file(path, OpenFile { inode, block, writable: true }))
            }
            MetaOp::Rename { from, to } => self.disk.rename(&from, &to).map(|()| MetaOut::Done),
            MetaOp::CreateDir { path } => self.disk.create_dir(&path).map(|()| MetaOut::Done),
            MetaOp::Remove { path } => self.disk.unlink(&path).map(|()| MetaOut::Done),
            MetaOp::SyncDir { path } => {
                if !self.disk.is_dir(&path) {
                    return Err(io::Error::from_raw_os_error(libc::ENOENT));
                }
                if !name.plan.skip {
                    self.disk.names.flush(&path, name.changes);
                }
                Ok(MetaOut::Done)
            }
            MetaOp::SetLen { file, len } => {
                let inode = self.writable(&file, len)?;
                self.room_for(&inode, len)?;
                inode.borrow_mut().cut(len);
                file.set_size(len);
                Ok(MetaOut::Done)
            }
            MetaOp::Allocate { file, len, keeps_len } => {
                let inode = self.writable(&file, len)?;
                self.room_for(&inode, len)?;
                inode.borrow_mut().reserve(len);
                if !keeps_len {
                    if inode.borrow().len() < len {
                        inode.borrow_mut().set_len(len);
                    }
                    file.grow_size(len);
                }
                Ok(MetaOut::Done)
            }
            MetaOp::OpenImage { path, how, open: None, .. } => {
                self.open_image(path, how).map(MetaOut::Image)
            }
            MetaOp::OpenImage { path, how, open: Some(open), .. } => {
                self.take_image(path, how, open.try_clone()?).map(MetaOut::Image)
            }
            // Only tests start processes here.
            MetaOp::StartProcess(_) => Err(io::ErrorKind::Unsupported.into()),
            MetaOp::Measure { file } => {
                let own = self.file(file.fd().number());
                let own = own.ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
                file.set_size(own.inode.borrow().len());
                Ok(MetaOut::Done)
            }
            MetaOp::LockExclusive { path } => {
                if self.disk.find(&path).is_err() {
                    self.room_for_name(&path, Opening::New)?;
                    self.disk.open_for_writing(&path, Opening::New)?;
                }
                self.lock(path, true)
            }
        }
    }

    /// Whether a file is open.
    fn is_open(&mut self, inode: &InodeRef) -> bool {
        self.close_dropped();
        self.descriptors.iter().flatten().any(
            |descriptor| matches!(descriptor, Descriptor::File(file) if Rc::ptr_eq(&file.inode, inode)),
        )
    }

    fn open_file(&mut self, path: PathBuf, file: OpenFile) -> MetaOut {
        let (size, block) = (file.inode.borrow().len(), file.block);
        let fd = self.open(Descriptor::File(file));
        MetaOut::File(Arc::new(SharedFile::new(fd, path, size, block)))
    }

    /// Bytes that files occupy: those with a name and those that are open.
    pub fn used(&self) -> u64 {
        let open = self.descriptors.iter().flatten().filter_map(|descriptor| match descriptor {
            Descriptor::File(file) => Some(&file.inode),
            _ => None,
        });
        let all: BTreeMap<u32, u64> = open
            .chain(self.disk.names.now().values())
            .map(|inode| (inode.borrow().number, inode.borrow().room()))
            .collect();
        all.values().map(|room| room + FILE_ROOM).sum()
    }

    /// Whether there is space for a file's first `len` bytes.
    fn room_for(&self, inode: &InodeRef, len: u64) -> io::Result<()> {
        let more = len.saturating_sub(inode.borrow().room());
        match self.disk.capacity {
            Some(capacity) if more > 0 && self.used() + more > capacity => {
                Err(io::Error::from_raw_os_error(libc::ENOSPC))
            }
            _ => Ok(()),
        }
    }

    /// Whether there is space for a file that may have to be made.
    fn room_for_name(&self, path: &Path, opening: Opening) -> io::Result<()> {
        let may_make = matches!(opening, Opening::New | Opening::NewOrEmptied);
        let makes = may_make && self.disk.find(path).is_err();
        match self.disk.capacity {
            Some(capacity) if makes && self.used() + FILE_ROOM > capacity => {
                Err(io::Error::from_raw_os_error(libc::ENOSPC))
            }
            _ => Ok(()),
        }
    }

    fn open_image(&mut self, path: PathBuf, how: ImageOpening) -> io::Result<Image> {
        let inode = self.disk.find(&path)?;
        let locked = how.lock.then_some(!how.read_only);
        if let Some(exclusive) = locked
            && self.is_locked(&path, exclusive)
        {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let block = if how.mode == Mode::Buffered { 1 } else { self.config.block };
        let file = OpenFile { inode, block, writable: !how.read_only };
        let (pipe, end) = io::pipe()?;
        self.images.retain(OpenImage::is_open);
        let open = OpenImage { pipe, file: file.clone(), path: path.clone(), locked };
        self.images.push(open);
        Ok(self.image(path, how, file, end.into()))
    }

    /// Takes an open image from another process of this world.
    fn take_image(
        &mut self,
        path: PathBuf,
        how: ImageOpening,
        descriptor: OwnedFd,
    ) -> io::Result<Image> {
        let number = |fd: OwnedFd| io::Result::Ok(std::fs::File::from(fd).metadata()?.ino());
        let wanted = number(descriptor.try_clone()?)?;
        for image in &self.images {
            if number(image.pipe.as_fd().try_clone_to_owned()?)? == wanted {
                let file = image.file.clone();
                return Ok(self.image(path, how, file, descriptor));
            }
        }
        Err(io::ErrorKind::InvalidInput.into())
    }

    fn image(
        &mut self,
        path: PathBuf,
        how: ImageOpening,
        file: OpenFile,
        descriptor: OwnedFd,
    ) -> Image {
        let (size, block) = (file.inode.borrow().len(), file.block);
        let info = ImageInfo {
            block_device: false,
            block_size: block.max(512),
            physical_block_size: 4096,
            optimal_io: 0,
            punch_hole: !how.read_only,
            zero_range: !how.read_only,
        };
        let number = self.insert(Descriptor::File(file));
        let fd = Fd::Sim(SimFd::new(number, self.closing.clone()).with_host(descriptor));
        let file = Arc::new(SharedFile::new(fd, path, size, block));
        // The lock is the open file's.
        Image { file, info, _lock: None }
    }

    /// The locks held on an image; true for exclusive ones.
    fn images_locked(&self, path: &Path) -> impl Iterator<Item = bool> {
        let here = self.images.iter().filter(move |image| image.path == path && image.is_open());
        here.filter_map(|image| image.locked)
    }

    /// The file of a handle, to change its length.
    fn writable(&self, file: &SharedFile, len: u64) -> io::Result<InodeRef> {
        let own = self.file(file.fd().number()).filter(|file| file.writable);
        match own {
            Some(own) if len <= LEN_MAX => Ok(own.inode),
            Some(_) => Err(io::Error::from_raw_os_error(libc::EFBIG)),
            None => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }

    /// Whether an existing lock conflicts with a new one.
    fn is_locked(&mut self, path: &Path, exclusive: bool) -> bool {
        self.close_dropped();
        let held = self.descriptors.iter().flatten().filter_map(|descriptor| match descriptor {
            Descriptor::Lock { path: held, exclusive } if held == path => Some(*exclusive),
            _ => None,
        });
        let taken = held.chain(self.images_locked(path)).any(|other| exclusive || other);
        taken || self.disk.locked.contains(path)
    }

    fn lock(&mut self, path: PathBuf, exclusive: bool) -> io::Result<MetaOut> {
        if self.is_locked(&path, exclusive) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(MetaOut::Lock(Some(self.open(Descriptor::Lock { path, exclusive }))))
    }

    /// Drops all images of ended processes.
    pub(super) fn forget_images(&mut self) {
        self.images.clear();
    }

    /// Takes a core's operations on names in flight.
    pub(super) fn names_of(&mut self, core: usize) -> Vec<Name> {
        let mut own = Vec::new();
        for (when, name) in std::mem::take(&mut self.names) {
            if name.core as usize == core {
                own.push(name);
            } else {
                self.names.insert(when, name);
            }
        }
        own
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

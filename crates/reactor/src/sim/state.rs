//! The state behind all simulated drivers of one world: clock, devices, operations under way.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::config::{Latency, SimConfig};
use super::disk::{Disk, InodeRef, Plan};
use super::net::{Addresses, Listening, Stream};
use super::rng::Rng;
use super::sockets::{Arrival, Performed};
use super::trace::{Event, Trace, What};
use crate::driver::{IoOp, MetaOp, MetaOut, Token};
use crate::file::{Fd, SharedFile, SimFd};
use crate::mailbox::{Mailbox, Owner, mailbox};
use crate::remote::{Remote, Shared};

/// When something happens, and a number that keeps what happens at once in order.
pub(crate) type When = (u64, u64);

/// What a simulated descriptor stands for.
pub(crate) enum Descriptor {
    File { inode: InodeRef, block: u32 },
    Lock { path: std::path::PathBuf },
    Listening(Listening),
    Stream(Stream),
}

/// The time of what waits for another party, or is stuck.
pub(super) const WAITING: u64 = u64::MAX;

/// An operation between being handed over and being reaped.
pub(crate) struct Running {
    pub token: Token,
    pub op: IoOp,
    pub plan: Plan,
    /// The result, if it is decided already and needs no memory of the operation's.
    pub result: Option<i32>,
}

/// What one core has handed over.
#[derive(Default)]
pub(crate) struct Port {
    pub staged: VecDeque<(Token, IoOp)>,
    pub running: BTreeMap<When, Running>,
    pub by_token: BTreeMap<Token, When>,
}

impl Port {
    /// When the `n`-th completion (from 1) is there.
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

struct Name {
    core: u32,
    token: Token,
    op: MetaOp,
    shared: Arc<Shared>,
    plan: Plan,
    name_error: Option<i32>,
}

/// What a completed operation brings: its result and what is to be written into its memory.
pub(crate) struct Outcome {
    pub token: Token,
    pub op: IoOp,
    pub result: i32,
    pub bytes: Vec<u8>,
}

/// See the module text.
pub(crate) struct State {
    pub config: SimConfig,
    pub now: u64,
    pub schedule: Rng,
    pub(super) device: Rng,
    ticks: Rng,
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
    closing: Mailbox<i32>,
    closed: Owner<i32>,
}

/// Descriptors that may be open at once.
const DESCRIPTORS: usize = 1 << 20;
/// Milliseconds since 1970 when a world begins.
const EPOCH_MS: u64 = 1_700_000_000_000;

impl State {
    pub fn new(seed: u64, cores: usize, config: SimConfig) -> State {
        let mut rng = Rng::new(seed);
        let (closing, closed) = mailbox(DESCRIPTORS);
        State {
            config,
            now: 1,
            schedule: rng.fork(),
            device: rng.fork(),
            ticks: rng.fork(),
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

    fn latency(&mut self, names: bool, len: u64) -> u64 {
        let of: &Latency = if names { &self.config.names } else { &self.config.read };
        // Doublings come half as often each: a long, thin tail.
        let times = u64::from(self.device.next_u64().trailing_zeros());
        let random = of.spread_ns * times + self.device.below(of.spread_ns);
        of.base_ns + random / 2 + len * of.per_kib_ns / 1024
    }

    // Descriptors.

    /// The number that the next descriptor will get. Numbers are not used again, so that a use
    /// after the close shows.
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

    /// Where dropped descriptors announce themselves.
    pub fn closing(&self) -> Mailbox<i32> {
        self.closing.clone()
    }

    pub(super) fn descriptor(&mut self, fd: i32) -> Option<&mut Descriptor> {
        self.descriptors.get_mut(usize::try_from(fd).ok()?)?.as_mut()
    }

    pub(super) fn remove(&mut self, fd: i32) -> Option<Descriptor> {
        self.descriptors.get_mut(usize::try_from(fd).ok()?)?.take()
    }

    /// All open descriptors with their numbers.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = (i32, &Descriptor)> {
        let numbered = self.descriptors.iter().enumerate();
        numbered.filter_map(|(fd, d)| d.as_ref().map(|d| (fd as i32, d)))
    }

    /// Notes what was closed since.
    pub fn close_dropped(&mut self) {
        let mut closed = Vec::new();
        while self.closed.pure_check() {
            let _ = self.closed.take(64, &mut |number: i32| closed.push(number));
        }
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
        self.descriptors.iter().flatten().filter(|d| matches!(d, Descriptor::File { .. })).count()
    }

    pub fn locks_held(&mut self, path: &Path) -> usize {
        self.close_dropped();
        self.descriptors
            .iter()
            .flatten()
            .filter(|d| matches!(d, Descriptor::Lock { path: held } if held == path))
            .count()
    }

    fn file(&self, fd: i32) -> Option<(InodeRef, u32)> {
        match self.descriptors.get(usize::try_from(fd).ok()?)?.as_ref()? {
            Descriptor::File { inode, block } => Some((inode.clone(), *block)),
            _ => None,
        }
    }

    // Operations on descriptors.

    pub fn stage(&mut self, core: usize, token: Token, op: IoOp) {
        self.ports[core].staged.push_back((token, op));
    }

    pub fn staged(&self, core: usize) -> usize {
        self.ports[core].staged.len()
    }

    /// Hands everything staged to the devices.
    pub fn submit(&mut self, core: usize) {
        self.close_dropped();
        while let Some((token, op)) = self.ports[core].staged.pop_front() {
            let (when, running) = match op {
                IoOp::Read { fd, ptr, len, offset } => {
                    self.submit_read(core, token, op, fd, ptr.addr(), len, offset)
                }
                IoOp::Write { .. } | IoOp::SyncData { .. } => self.refuse(token, op, libc::EROFS),
                _ => self.submit_socket(core, token, op),
            };
            self.ports[core].put(when, running);
        }
    }

    pub(super) fn refuse(&mut self, token: Token, op: IoOp, errno: i32) -> (When, Running) {
        let when = self.after(0);
        (when, Running { token, op, plan: Plan::default(), result: Some(-errno) })
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one read")]
    fn submit_read(
        &mut self,
        core: usize,
        token: Token,
        op: IoOp,
        fd: i32,
        address: usize,
        len: u32,
        offset: u64,
    ) -> (When, Running) {
        let Some((inode, block)) = self.file(fd) else {
            return self.refuse(token, op, libc::EBADF);
        };
        let number = inode.borrow().number;
        self.note(core, token, What::Read { file: number, offset, len });
        let block_mask = u64::from(block) - 1;
        // A direct read asks the memory, too, to be aligned to the disk's logical block.
        let memory_mask = if block > 1 { 511 } else { 0 };
        if offset & block_mask != 0
            || u64::from(len) & block_mask != 0
            || address & memory_mask != 0
            || offset > i64::MAX as u64
        {
            return self.refuse(token, op, libc::EINVAL);
        }
        let path = inode.borrow().path.clone();
        let range = offset..offset.saturating_add(u64::from(len));
        let plan = self.plan_read(core, token, &path, &range, block.max(512));
        let ns = self.latency(false, u64::from(len)) + plan.extra_ns;
        let mut when = self.after(ns);
        if plan.stuck {
            when.0 = WAITING;
        }
        (when, Running { token, op, plan, result: None })
    }

    fn plan_read(
        &mut self,
        core: usize,
        token: Token,
        path: &Path,
        range: &std::ops::Range<u64>,
        block: u32,
    ) -> Plan {
        let (trace, now) = (&mut self.trace, self.now);
        self.disk.plan_read(&mut self.device, path, range, block, |kind| {
            let what = What::Fault { kind: kind.number() };
            trace.note(Event { at: now, core: core as u32, token, what });
        })
    }

    pub fn cancel(&mut self, core: usize, token: Token) {
        self.note(core, token, What::Cancel);
        let port = &mut self.ports[core];
        if let Some(at) = port.staged.iter().position(|(t, _)| *t == token) {
            let Some((token, op)) = port.staged.remove(at) else { return };
            let (when, running) = self.refuse(token, op, libc::ECANCELED);
            self.ports[core].put(when, running);
            return;
        }
        // What waits for another party hears a cancel. A device may have begun already, and then
        // it ends as it would have. What is stuck stays stuck: that is what makes it different
        // from slow.
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

    /// Lets everything go on that was stuck.
    pub fn release_stuck(&mut self) {
        for core in 0..self.ports.len() {
            let stuck: Vec<Token> = self.ports[core]
                .running
                .iter()
                .filter(|(when, running)| when.0 == WAITING && running.plan.stuck)
                .map(|(_, running)| running.token)
                .collect();
            for token in stuck {
                let ns = self.latency(false, 4096);
                let when = self.after(ns);
                if let Some((_, mut running)) = self.ports[core].take(token) {
                    running.plan.stuck = false;
                    self.ports[core].put(when, running);
                }
            }
        }
    }

    /// Takes the next completion that is due. `fetch` reads from what an operation sends.
    pub fn reap(
        &mut self,
        core: usize,
        send_len: impl Fn(&IoOp) -> usize,
        mut fetch: impl FnMut(&IoOp, usize) -> Vec<u8>,
    ) -> Option<Outcome> {
        loop {
            let entry = self.ports[core].running.first_entry()?;
            if entry.key().0 > self.now {
                return None;
            }
            let running = entry.remove();
            let (token, op) = (running.token, running.op);
            self.ports[core].by_token.remove(&token);
            let outcome = match (running.result, op) {
                (Some(result), _) => Outcome::plain(token, op, result),
                (None, IoOp::Read { fd, len, offset, .. }) => {
                    let Some((inode, _)) = self.file(fd) else {
                        panic!("descriptor {fd} was closed while operation {token} read from it")
                    };
                    match self.disk.read(&inode, offset, len as usize, &running.plan) {
                        Ok(bytes) => Outcome { token, op, result: bytes.len() as i32, bytes },
                        Err(errno) => Outcome::plain(token, op, -errno),
                    }
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
        let (kind, path) = match &op {
            MetaOp::Open { path, .. } => (0, path),
            MetaOp::List { path } => (1, path),
            MetaOp::ReadSmall { path, .. } => (2, path),
            MetaOp::LockShared { path } => (3, path),
            MetaOp::OpenForWriting { path, .. } => (4, path),
            MetaOp::Rename { to, .. } => (5, to),
            MetaOp::Remove { path } => (6, path),
            MetaOp::SyncDir { path } => (7, path),
            MetaOp::SetLen { .. } | MetaOp::Allocate { .. } => (8, &Default::default()),
            MetaOp::LockExclusive { path } => (10, path),
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
                let size = self.disk.find(&path).map_or(0, |i| i.borrow().bytes.len() as u64);
                let len = size.min(*max as u64);
                (self.plan_read(core, token, &path, &(0..len), 512), len)
            }
            _ => (Plan::default(), 0),
        };
        let ns = self.latency(true, len) + plan.extra_ns;
        let mut when = self.after(ns);
        if plan.stuck {
            when.0 = WAITING;
        }
        let shared = shared.clone();
        self.names.insert(when, Name { core: core as u32, token, op, shared, plan, name_error });
    }

    /// Answers the name operations that are due.
    pub fn answer_names(&mut self) {
        while let Some(entry) = self.names.first_entry()
            && entry.key().0 <= self.now
        {
            let name = entry.remove();
            let answer = match name.name_error {
                Some(errno) => Err(io::Error::from_raw_os_error(errno)),
                None => self.perform(name.op, &name.plan),
            };
            let result = match &answer {
                Ok(_) => 0,
                Err(e) => -i64::from(e.raw_os_error().unwrap_or(i32::MAX)),
            };
            self.note(name.core as usize, name.token, What::Done { result });
            name.shared.post(Remote::Meta(name.token, answer));
        }
    }

    pub fn next_name(&self) -> Option<u64> {
        self.names.keys().next().map(|when| when.0).filter(|&at| at != WAITING)
    }

    fn perform(&mut self, op: MetaOp, plan: &Plan) -> io::Result<MetaOut> {
        match op {
            MetaOp::Open { path, buffered } => {
                let inode = self.disk.find(&path)?;
                let size = inode.borrow().bytes.len() as u64;
                let block = if buffered { 1 } else { self.config.block };
                let fd = self.open(Descriptor::File { inode, block });
                Ok(MetaOut::File(Arc::new(SharedFile::new(fd, path, size, block))))
            }
            MetaOp::List { path } => self.disk.list(&path).map(MetaOut::List),
            MetaOp::ReadSmall { path, max } => {
                let inode = self.disk.find(&path)?;
                let size = inode.borrow().bytes.len();
                // The helper reads on after a short transfer.
                let whole = Plan { short: None, ..plan.clone() };
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
                if self.disk.locked.contains(&path) {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                Ok(MetaOut::Lock(Some(self.open(Descriptor::Lock { path }))))
            }
            _ => Err(io::Error::from_raw_os_error(libc::EROFS)),
        }
    }

    /// Forgets what a core has under way: it is gone.
    pub fn forget(&mut self, core: usize) {
        self.ports[core] = Port::default();
        self.names.retain(|_, name| name.core as usize != core);
    }
}

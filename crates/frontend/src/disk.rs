//! A disk as QEMU and a correct guest use it: handshake, start, stop, reconnection, migration.
//!
//! The messages are sent in the order of QEMU 7.2. Memory, rings and in-flight region belong to the
//! disk and survive its target: after [`Disk::reconnect`] the next target finds the state that the
//! last one left, and the [`Queue`]s, which may be on other threads, continue.

use std::path::Path;
use std::sync::Arc;

use crate::message::{feature, protocol};
use crate::queue::Shape;
use crate::{
    Connection, DirtyLog, Error, Event, Inflight, Kind, Memory, PackedRing, Pages, Queue, Region,
    Result, Session, SplitRing,
};

/// Bytes of the configuration space that QEMU reads.
const CONFIG_BYTES: u32 = 57;
/// Granularity of guest memory.
const MEMORY_STEP: u64 = 2 << 20;

/// The options of a disk.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Number of queues.
    pub queues: u16,
    /// Descriptors of each queue, a power of two.
    pub queue_size: u16,
    /// Most requests in flight on each queue.
    pub depth: u16,
    /// Most bytes of data in a request.
    pub slot_bytes: u32,
    /// Descriptors that a full slot is divided into.
    pub segments: u16,
    /// Packed rings instead of split ones.
    pub packed: bool,
    /// Indirect descriptors: each request uses one of the ring's descriptors.
    pub indirect: bool,
    /// Event index for kicks and calls.
    pub event_index: bool,
    /// Use an in-flight region if the target offers one.
    pub inflight: bool,
    /// Page size of guest memory.
    pub pages: Pages,
    /// Additional guest memory for the caller, at address 0.
    pub spare_bytes: u64,
    /// Features not to negotiate even if both sides have them.
    pub without: u64,
}

impl Default for DiskOptions {
    fn default() -> DiskOptions {
        DiskOptions {
            queues: 1,
            queue_size: 256,
            depth: 32,
            slot_bytes: 4096,
            segments: 1,
            packed: false,
            indirect: true,
            event_index: true,
            inflight: true,
            pages: Pages::Small,
            spare_bytes: 0,
            without: 0,
        }
    }
}

impl DiskOptions {
    fn shape(&self) -> Shape {
        Shape {
            size: self.queue_size,
            depth: self.depth,
            packed: self.packed,
            indirect: self.indirect,
            event_index: self.event_index,
            slot_bytes: self.slot_bytes,
            segments: self.segments,
        }
    }

    /// Creates a driver of one queue at a guest address, a multiple of 4096, for a target without a
    /// socket. Also returns the guest addresses of the ring's parts.
    ///
    /// # Errors
    /// If the options of the queue are invalid.
    ///
    /// # Panics
    /// If the memory is too small.
    pub fn queue(&self, memory: &Arc<Memory>, addr: u64) -> Result<(Queue, [u64; 3])> {
        let shape = self.shape();
        shape.check()?;
        let (kick, call) = (Arc::new(Event::new()?), Arc::new(Event::new()?));
        let addresses = if self.packed {
            PackedRing::new(memory, addr, self.queue_size).addresses()
        } else {
            SplitRing::new(memory, addr, self.queue_size).addresses()
        };
        Ok((Queue::new(memory, addr, shape, kick, call), addresses))
    }

    /// Bytes of memory that a queue needs.
    pub fn queue_bytes(&self) -> u64 {
        self.shape().bytes().next_multiple_of(4096)
    }

    /// The features that the driver can use.
    fn wanted(&self) -> u64 {
        use feature::*;
        let mut wanted = PROTOCOL_FEATURES | SEG_MAX | SIZE_MAX | RO | BLK_SIZE | TOPOLOGY;
        wanted |= FLUSH | CONFIG_WCE | MQ | DISCARD | WRITE_ZEROES;
        (wanted | self.needed()) & !self.without
    }

    /// The features that the driver requires.
    fn needed(&self) -> u64 {
        let when = |yes: bool, bit: u64| if yes { bit } else { 0 };
        feature::VERSION_1
            | when(self.packed, feature::RING_PACKED)
            | when(self.indirect, feature::INDIRECT_DESC)
            | when(self.event_index, feature::EVENT_IDX)
    }

    /// The first position of an empty ring. For packed rings both wrap counters are 1.
    fn first_base(&self) -> u32 {
        if self.packed { 0x8000_8000 } else { 0 }
    }

    fn wanted_protocol(&self) -> u64 {
        use protocol::*;
        let all = MQ | LOG_SHMFD | REPLY_ACK | BACKEND_REQ | CONFIG | CONFIGURE_MEM_SLOTS;
        all | if self.inflight { INFLIGHT_SHMFD } else { 0 }
    }
}

/// The configuration space of a virtio-blk device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the specification's names; sectors are 512 bytes")]
pub struct Config {
    pub capacity_sectors: u64,
    pub size_max: u32,
    pub seg_max: u32,
    pub blk_size: u32,
    pub physical_block_exp: u8,
    pub alignment_offset: u8,
    pub min_io_size: u16,
    pub opt_io_size: u32,
    pub wce: u8,
    pub num_queues: u16,
    pub max_discard_sectors: u32,
    pub max_discard_seg: u32,
    pub discard_sector_alignment: u32,
    pub max_write_zeroes_sectors: u32,
    pub max_write_zeroes_seg: u32,
    pub write_zeroes_may_unmap: u8,
}

impl Config {
    fn parse(bytes: &[u8]) -> Config {
        let u16_at = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two"));
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four"));
        Config {
            capacity_sectors: u64::from(u32_at(0)) | u64::from(u32_at(4)) << 32,
            size_max: u32_at(8),
            seg_max: u32_at(12),
            blk_size: u32_at(20),
            physical_block_exp: bytes[24],
            alignment_offset: bytes[25],
            min_io_size: u16_at(26),
            opt_io_size: u32_at(28),
            wce: bytes[32],
            num_queues: u16_at(34),
            max_discard_sectors: u32_at(36),
            max_discard_seg: u32_at(40),
            discard_sector_alignment: u32_at(44),
            max_write_zeroes_sectors: u32_at(48),
            max_write_zeroes_seg: u32_at(52),
            write_zeroes_may_unmap: bytes[56],
        }
    }
}

/// The disk's part of a queue.
#[derive(Debug)]
struct QueueParts {
    addr: u64,
    kick: Arc<Event>,
    call: Arc<Event>,
    err: Event,
    /// The position at which the ring was stopped.
    base: u32,
    queue: Option<Queue>,
}

/// A disk served by a target.
#[derive(Debug)]
pub struct Disk {
    options: DiskOptions,
    memory: Arc<Memory>,
    queues: Vec<QueueParts>,
    session: Session,
    channel: Option<Connection>,
    features: u64,
    protocol: u64,
    config: Config,
    inflight: Option<Inflight>,
    log: Option<DirtyLog>,
}

impl Disk {
    /// Connects to a target and starts all queues.
    ///
    /// # Errors
    /// If no target listens there, or it refuses a message or lacks a required feature.
    pub fn connect(path: &Path, options: DiskOptions) -> Result<Disk> {
        let shape = options.shape();
        shape.check()?;
        let each = shape.bytes().next_multiple_of(4096);
        let spare = options.spare_bytes.next_multiple_of(4096);
        let size = (spare + each * u64::from(options.queues)).next_multiple_of(MEMORY_STEP);
        let memory = Arc::new(Memory::with_regions(vec![Region::new(0, size, options.pages)?]));
        let first_base = options.first_base();
        let parts = |nth: u16| {
            let addr = spare + each * u64::from(nth);
            let (kick, call) = (Arc::new(Event::new()?), Arc::new(Event::new()?));
            let queue = Queue::new(&memory, addr, shape, kick.clone(), call.clone());
            let queue = Some(queue);
            Ok(QueueParts { addr, kick, call, err: Event::new()?, base: first_base, queue })
        };
        let queues = (0..options.queues).map(parts).collect::<Result<Vec<_>>>()?;
        let mut disk = Disk {
            memory,
            queues,
            session: Session::connect(path)?,
            channel: None,
            features: 0,
            protocol: 0,
            config: Config::default(),
            inflight: None,
            log: None,
            options,
        };
        disk.handshake()?;
        disk.read_config()?;
        disk.start_device(true)?;
        Ok(disk)
    }

    /// QEMU's messages before the guest runs.
    fn handshake(&mut self) -> Result<()> {
        let session = &mut self.session;
        let offered = session.get_features()?;
        let needed = self.options.needed() | feature::PROTOCOL_FEATURES;
        if offered & needed != needed {
            let text = format!("the target lacks required features {:#x}", needed & !offered);
            return Err(Error::new(Kind::Refused, text));
        }
        self.features = offered & self.options.wanted();
        self.protocol = session.get_protocol_features()? & self.options.wanted_protocol();
        session.set_protocol_features(self.protocol)?;
        let most = if self.protocol & protocol::MQ != 0 { session.get_queue_num()? } else { 1 };
        if most < u64::from(self.options.queues) {
            return Err(Error::new(Kind::Refused, format!("the target has only {most} queues")));
        }
        if self.protocol & protocol::CONFIGURE_MEM_SLOTS != 0 {
            session.get_max_mem_slots()?;
        }
        self.channel = match self.protocol & protocol::BACKEND_REQ {
            0 => None,
            _ => Some(session.set_backend_channel()?),
        };
        session.set_owner()?;
        session.get_features()?;
        for (nth, parts) in (0..).zip(&self.queues) {
            session.set_vring_call(nth, Some(&parts.call))?;
            session.set_vring_err(nth, Some(&parts.err))?;
        }
        Ok(())
    }

    /// Reads the configuration again, as after a message that it has changed.
    ///
    /// # Errors
    /// As for [`Session::ask`].
    pub fn read_config(&mut self) -> Result<Config> {
        if self.protocol & protocol::CONFIG != 0 {
            self.config = Config::parse(&self.session.get_config(0, CONFIG_BYTES)?);
        }
        Ok(self.config)
    }

    /// QEMU's messages when the guest's driver starts the device. Memory is sent once per
    /// connection.
    fn start_device(&mut self, send_memory: bool) -> Result<()> {
        let (session, options) = (&self.session, &self.options);
        let log = if self.log.is_some() { feature::LOG_ALL } else { 0 };
        session.set_features(self.features | log)?;
        if self.protocol & protocol::INFLIGHT_SHMFD != 0 {
            let inflight = match self.inflight.take() {
                Some(inflight) => inflight,
                None => session.get_inflight_fd(options.queues, options.queue_size)?,
            };
            session.set_inflight_fd(&inflight)?;
            self.inflight = Some(inflight);
        }
        for (nth, parts) in (0..).zip(&self.queues) {
            session.set_vring_call(nth, Some(&parts.call))?;
        }
        session.set_features(self.features | log)?;
        if send_memory && self.protocol & protocol::CONFIGURE_MEM_SLOTS != 0 {
            for region in self.memory.regions() {
                session.add_mem_reg(region)?;
            }
        } else if send_memory {
            session.set_mem_table(&self.memory)?;
        }
        for (nth, parts) in (0..).zip(&self.queues) {
            session.set_vring_num(nth, options.queue_size)?;
            session.set_vring_base(nth, parts.base)?;
            let log = self.log.is_some();
            session.set_vring_addr(nth, &self.memory, self.ring_addresses(parts), log)?;
            session.set_vring_kick(nth, Some(&parts.kick))?;
        }
        for nth in 0..options.queues {
            session.set_vring_enable(nth, true)?;
        }
        Ok(())
    }

    fn ring_addresses(&self, parts: &QueueParts) -> [u64; 3] {
        let size = self.options.queue_size;
        if self.options.packed {
            PackedRing::new(&self.memory, parts.addr, size).addresses()
        } else {
            SplitRing::new(&self.memory, parts.addr, size).addresses()
        }
    }

    /// Stops all queues, as QEMU does for `stop` and at the end of a migration. Requests in flight
    /// complete first.
    ///
    /// # Errors
    /// As for [`Session::tell`].
    pub fn stop(&mut self) -> Result<()> {
        for nth in 0..self.options.queues {
            self.session.set_vring_enable(nth, false)?;
        }
        for (nth, parts) in (0..).zip(&mut self.queues) {
            parts.base = self.session.get_vring_base(nth)?;
        }
        Ok(())
    }

    /// Starts all queues at the positions where they were stopped.
    ///
    /// # Errors
    /// As for [`Session::tell`].
    pub fn start(&mut self) -> Result<()> {
        self.start_device(false)
    }

    /// Stops the device and starts it with empty rings and a new in-flight region, as after a reset
    /// of the guest. The caller must return all drivers that it has taken, and can take new ones.
    ///
    /// # Errors
    /// As for [`Session::tell`].
    ///
    /// # Panics
    /// If a driver is missing.
    pub fn reset(&mut self, queues: Vec<Queue>) -> Result<()> {
        let kept = self.queues.iter().filter(|parts| parts.queue.is_some()).count();
        assert_eq!(queues.len() + kept, self.queues.len(), "a driver is missing");
        drop(queues);
        self.stop()?;
        self.inflight = None;
        let (shape, base) = (self.options.shape(), self.options.first_base());
        for parts in &mut self.queues {
            let (kick, call) = (parts.kick.clone(), parts.call.clone());
            parts.queue = Some(Queue::new(&self.memory, parts.addr, shape, kick, call));
            parts.base = base;
        }
        self.start_device(false)
    }

    /// Connects to a new target after the old one has ended, with the same memory and in-flight
    /// region. Sends the used index of split rings, as QEMU does, and the last known base of packed
    /// ones.
    ///
    /// # Errors
    /// As for [`Disk::connect`].
    pub fn reconnect(&mut self, path: &Path) -> Result<()> {
        self.session = Session::connect(path)?;
        self.handshake()?;
        if !self.options.packed {
            let size = self.options.queue_size;
            for parts in &mut self.queues {
                let ring = SplitRing::new(&self.memory, parts.addr, size);
                parts.base = ring.used_index().into();
            }
        }
        self.start_device(true)?;
        self.kick_all();
        Ok(())
    }

    /// Connects to another target after [`Disk::stop`], like the destination of a migration: with a
    /// new in-flight region.
    ///
    /// # Errors
    /// As for [`Disk::connect`].
    pub fn migrate(&mut self, path: &Path) -> Result<()> {
        self.session = Session::connect(path)?;
        (self.inflight, self.log) = (None, None);
        self.handshake()?;
        self.read_config()?;
        self.start_device(true)?;
        self.kick_all();
        Ok(())
    }

    fn kick_all(&self) {
        self.queues.iter().for_each(|parts| parts.kick.signal());
    }

    /// Makes the target log its writes, as the source of a migration does.
    ///
    /// # Errors
    /// As for [`Session::tell`].
    pub fn start_log(&mut self) -> Result<()> {
        let end = self.memory.regions().iter().map(|r| r.guest_addr() + r.size()).max();
        let log = DirtyLog::new(end.unwrap_or(0))?;
        self.session.set_log_base(&log)?;
        self.log = Some(log);
        self.send_log_state()
    }

    /// Stops logging. Entries that were not taken are lost.
    ///
    /// # Errors
    /// As for [`Session::tell`].
    pub fn stop_log(&mut self) -> Result<()> {
        self.log = None;
        self.send_log_state()
    }

    fn send_log_state(&self) -> Result<()> {
        let on = self.log.is_some();
        let bit = if on { feature::LOG_ALL } else { 0 };
        self.session.set_features(self.features | bit)?;
        for (nth, parts) in (0..).zip(&self.queues) {
            self.session.set_vring_addr(nth, &self.memory, self.ring_addresses(parts), on)?;
        }
        Ok(())
    }

    /// Takes a queue's driver.
    ///
    /// # Panics
    /// If it is already taken.
    pub fn take_queue(&mut self, nth: u16) -> Queue {
        self.queues[usize::from(nth)].queue.take().expect("the queue is already taken")
    }

    /// Whether the target has reported a broken queue since the last call.
    pub fn take_queue_error(&self, nth: u16) -> bool {
        self.queues[usize::from(nth)].err.take() > 0
    }

    /// The session, for any other message.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The backend channel, if there is one.
    pub fn channel(&self) -> Option<&Connection> {
        self.channel.as_ref()
    }

    /// The negotiated features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The negotiated protocol features.
    pub fn protocol(&self) -> u64 {
        self.protocol
    }

    /// The configuration as it was last read.
    pub fn config(&self) -> Config {
        self.config
    }

    /// Size of the disk in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.config.capacity_sectors.saturating_mul(512)
    }

    /// The guest's memory. The part below `spare_bytes` belongs to the caller.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The in-flight region, if there is one.
    pub fn inflight(&self) -> Option<&Inflight> {
        self.inflight.as_ref()
    }

    /// The dirty log, while logging is on.
    pub fn log(&self) -> Option<&DirtyLog> {
        self.log.as_ref()
    }
}

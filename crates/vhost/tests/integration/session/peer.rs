//! A front end that builds QEMU's messages byte by byte.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use vhost::config::{Config, RangeLimits};
use vhost::message::{Framer, InflightInfo, RegionInfo, Violation};
use vhost::ring_state::RingState;
use vhost::session::{Action, Offer, Reply, Session};

pub(super) const FEATURES: u64 = 0x5_7400_7e46;
pub(super) const PROTOCOL_FEATURES: u64 = 0xb22b;
/// The features that SeaBIOS acknowledges: VERSION_1, PROTOCOL_FEATURES, BLK_SIZE, SEG_MAX.
pub(super) const BIOS: u64 = 0x1_4000_0044;
pub(super) const LINUX: u64 = 0x1_7000_7e44;
pub(super) const LOG_ALL: u64 = 1 << 26;

pub(super) fn config() -> Config {
    Config {
        capacity_sectors: 2048,
        segments_max: 126,
        segment_bytes_max: 4 << 20,
        block_size: 512,
        physical_block_size: 4096,
        min_io_bytes: 4096,
        opt_io_bytes: 0,
        write_cache: true,
        read_only: false,
        queues: 2,
        discard: Some(RangeLimits { sectors_max: 0x8000, segments_max: 1 }),
        discard_alignment_sectors: 8,
        write_zeroes: Some(RangeLimits { sectors_max: 0x8000, segments_max: 1 }),
        write_zeroes_may_unmap: true,
    }
}

/// A front end, its session, and the descriptors that it has sent: `fd1`, `fd2`, and so on.
pub(super) struct Peer {
    pub(super) session: Session,
    pub(super) framer: Framer,
    pub(super) names: BTreeMap<RawFd, String>,
    /// The other ends of the sent descriptors; each reads the end of the stream when its
    /// descriptor is closed.
    pub(super) watches: Vec<UnixStream>,
    /// What a target would hold.
    pub(super) held: Vec<OwnedFd>,
    pub(super) need_reply: bool,
}

impl Peer {
    pub(super) fn new() -> Self {
        Self::with(Offer::new(config()))
    }

    pub(super) fn with(offer: Offer) -> Self {
        Self {
            session: Session::new(offer),
            framer: Framer::new(),
            names: BTreeMap::new(),
            watches: Vec::new(),
            held: Vec::new(),
            need_reply: false,
        }
    }

    pub(super) fn descriptor(&mut self) -> OwnedFd {
        let (sent, watch) = UnixStream::pair().unwrap();
        watch.set_nonblocking(true).unwrap();
        self.watches.push(watch);
        let name = format!("fd{}", self.watches.len());
        self.names.insert(sent.as_raw_fd(), name);
        sent.into()
    }

    /// How many of the sent descriptors are still open.
    pub(super) fn open(&mut self) -> usize {
        let is_open = |mut watch: &UnixStream| match watch.read(&mut [0]) {
            Ok(0) => false,
            Err(e) if e.kind() == ErrorKind::WouldBlock => true,
            other => panic!("{other:?}"),
        };
        self.watches.iter().filter(|watch| is_open(watch)).count()
    }

    /// Makes the next message request an acknowledgement.
    pub(super) fn ack(&mut self) -> &mut Self {
        self.need_reply = true;
        self
    }

    pub(super) fn try_send(
        &mut self,
        request: u32,
        payload: &[u8],
        fds: usize,
    ) -> Result<Vec<String>, Violation> {
        let flags: u32 = if std::mem::take(&mut self.need_reply) { 9 } else { 1 };
        let header = [request, flags, payload.len() as u32];
        let bytes = [&header.map(u32::to_le_bytes).concat(), payload].concat();
        let mut descriptors: Vec<OwnedFd> = (0..fds).map(|_| self.descriptor()).collect();
        // As a target receives it: first the header, with the descriptors.
        let mut bytes = &bytes[..];
        let (message, descriptors) = loop {
            let piece = &bytes[..self.framer.wanted().min(bytes.len())];
            bytes = &bytes[piece.len()..];
            if let Some(whole) = self.framer.push(piece, std::mem::take(&mut descriptors))? {
                break whole;
            }
        };
        assert!(bytes.is_empty());
        let actions = self.session.handle(&message, descriptors)?;
        Ok(self.show(actions))
    }

    pub(super) fn send(&mut self, request: u32, payload: &[u8], fds: usize) -> Vec<String> {
        self.try_send(request, payload, fds).unwrap()
    }

    /// Sends a message that must cause nothing.
    pub(super) fn quiet(&mut self, request: u32, payload: &[u8], fds: usize) {
        assert_eq!(self.send(request, payload, fds), [""; 0], "request {request}");
    }

    pub(super) fn name(&mut self, fd: Option<OwnedFd>) -> String {
        let Some(fd) = fd else {
            return "none".into();
        };
        let name = self.names[&fd.as_raw_fd()].clone();
        self.held.push(fd);
        name
    }

    pub(super) fn show(&mut self, actions: Vec<Action>) -> Vec<String> {
        actions.into_iter().map(|action| self.show_one(action)).collect()
    }

    pub(super) fn show_one(&mut self, action: Action) -> String {
        match action {
            Action::Reply(Reply { bytes, fd, .. }) => {
                let with = if fd.is_some() { format!(" {}", self.name(fd)) } else { String::new() };
                format!("reply {bytes:?}{with}")
            }
            Action::FeaturesChanged => format!("features {:#x}", self.session.features()),
            Action::WriteCache(on) => format!("write cache {on}"),
            Action::ReplaceMemory(regions) => {
                let regions: Vec<String> = regions
                    .into_iter()
                    .map(|(region, fd)| format!("{:#x}={}", region.guest_addr, self.name(Some(fd))))
                    .collect();
                format!("memory {}", regions.join(" "))
            }
            Action::AddRegion(region, fd) => {
                format!("add {:#x}={}", region.guest_addr, self.name(Some(fd)))
            }
            Action::RemoveRegion(region) => format!("remove {:#x}", region.guest_addr),
            Action::Inflight(area, fd) => {
                format!("inflight {}+{} {}", area.mmap_offset, area.mmap_size, self.name(Some(fd)))
            }
            Action::DropInflight => "drop inflight".into(),
            Action::CreateInflight { queues, queue_size } => {
                format!("create inflight {queues}x{queue_size}")
            }
            Action::Log(area, fd) => {
                format!("log {}+{} {}", area.mmap_offset, area.mmap_size, self.name(Some(fd)))
            }
            Action::LogSignal(fd) => format!("log signal {}", self.name(Some(fd))),
            Action::BackendChannel(fd) => format!("backend channel {}", self.name(Some(fd))),
            Action::Kick(ring, fd) => format!("kick {ring} {}", self.name(fd)),
            Action::Call(ring, fd) => format!("call {ring} {}", self.name(fd)),
            Action::Err(ring, fd) => format!("err {ring} {}", self.name(fd)),
            Action::StartRing(ring) => format!("start {ring}"),
            Action::EnableRing(ring, on) => format!("enable {ring} {on}"),
            Action::RingLog(ring) => format!("ring log {ring} {:?}", self.session.ring(ring).log),
            Action::StopRing(ring) => format!("stop {ring}"),
        }
    }

    // QEMU's messages, in its order.

    /// Section 1.1, before the guest runs. `config` is not read after a reconnection.
    pub(super) fn realize(&mut self, config: bool) {
        assert_eq!(self.send(GET_FEATURES, &[], 0), [reply(1, &u64s(&[FEATURES]))]);
        assert_eq!(
            self.send(GET_PROTOCOL_FEATURES, &[], 0),
            [reply(15, &u64s(&[PROTOCOL_FEATURES]))]
        );
        self.quiet(SET_PROTOCOL_FEATURES, &u64s(&[PROTOCOL_FEATURES]), 0);
        assert_eq!(self.send(GET_QUEUE_NUM, &[], 0), [reply(17, &u64s(&[2]))]);
        assert_eq!(self.send(GET_MAX_MEM_SLOTS, &[], 0), [reply(36, &u64s(&[509]))]);
        let channel = self.next_name();
        assert_eq!(
            self.ack().send(SET_BACKEND_REQ_FD, &[], 1),
            [format!("backend channel {channel}"), reply(21, &u64s(&[0]))]
        );
        self.quiet(SET_OWNER, &[], 0);
        assert_eq!(self.send(GET_FEATURES, &[], 0), [reply(1, &u64s(&[FEATURES]))]);
        for ring in 0..2 {
            self.call(ring);
            let fd = self.next_name();
            assert_eq!(
                self.send(SET_VRING_ERR, &u64s(&[ring.into()]), 1),
                [format!("err {ring} {fd}")]
            );
        }
        if config {
            let asked = [&u32s(&[0, 57, 0])[..], &[0; 57]].concat();
            let space = Config::space(&self::config(), true);
            let answer = [&u32s(&[0, 57, 0])[..], &space[..57]].concat();
            assert_eq!(self.send(GET_CONFIG, &asked, 0), [reply(24, &answer)]);
        }
    }

    pub(super) fn next_name(&self) -> String {
        format!("fd{}", self.watches.len() + 1)
    }

    pub(super) fn call(&mut self, ring: u32) {
        let fd = self.next_name();
        assert_eq!(
            self.send(SET_VRING_CALL, &u64s(&[ring.into()]), 1),
            [format!("call {ring} {fd}")]
        );
    }

    pub(super) fn get_inflight(&mut self, queue_size: u16) {
        let asked = inflight(0, 0, 2, queue_size);
        assert_eq!(
            self.send(GET_INFLIGHT_FD, &asked, 0),
            [format!("create inflight 2x{queue_size}")]
        );
        assert!(self.session.is_waiting());
        let area = InflightInfo { mmap_size: 4224, mmap_offset: 0, queues: 2, queue_size };
        let fd = self.descriptor();
        let actions = self.session.inflight_created(&area, fd);
        let name = format!("fd{}", self.watches.len());
        assert_eq!(
            self.show(actions),
            [format!("{} {name}", reply(31, &inflight(4224, 0, 2, queue_size)))]
        );
        assert!(!self.session.is_waiting());
    }

    pub(super) fn set_inflight(&mut self, queue_size: u16) {
        let fd = self.next_name();
        assert_eq!(
            self.send(SET_INFLIGHT_FD, &inflight(4224, 0, 2, queue_size), 1),
            [format!("inflight 0+4224 {fd}")]
        );
    }

    pub(super) fn add_memory(&mut self) {
        for region in MEMORY {
            let fd = self.next_name();
            let payload =
                u64s(&[0, region.guest_addr, region.size, region.user_addr, region.mmap_offset]);
            assert_eq!(
                self.ack().send(ADD_MEM_REG, &payload, 1),
                [format!("add {:#x}={fd}", region.guest_addr), reply(37, &u64s(&[0]))]
            );
        }
    }

    /// Section 1.2's setup of the rings up to the kick; nothing runs before it is enabled.
    pub(super) fn set_up_ring(&mut self, ring: u32, size: u32, base: u32) {
        self.quiet(SET_VRING_NUM, &u32s(&[ring, size]), 0);
        self.quiet(SET_VRING_BASE, &u32s(&[ring, base]), 0);
        self.quiet(SET_VRING_ADDR, &address(ring, 0), 0);
        let fd = self.next_name();
        assert_eq!(
            self.send(SET_VRING_KICK, &u64s(&[ring.into()]), 1),
            [format!("kick {ring} {fd}")]
        );
    }

    /// The beginning of a start: features, and the in-flight region if QEMU has none.
    pub(super) fn begin_start(&mut self, features: u64, known_region: bool, changes: &[&str]) {
        assert_eq!(self.send(SET_FEATURES, &u64s(&[features]), 0), changes);
        if !known_region {
            self.get_inflight(128);
        }
        self.set_inflight(128);
        self.call(0);
        self.call(1);
        self.quiet(SET_FEATURES, &u64s(&[features]), 0);
    }

    /// A start of both rings by Linux, on a connection whose memory is known.
    pub(super) fn start_both(&mut self, bases: [u32; 2]) {
        for (ring, base) in (0..2).zip(bases) {
            self.set_up_ring(ring, 128, base);
        }
        assert_eq!(self.enable(0, 1), ["start 0"]);
        assert_eq!(self.enable(1, 1), ["start 1"]);
        for (ring, base) in (0..2).zip(bases) {
            assert_eq!(self.session.ring(ring).base, base);
            assert_eq!(self.session.ring(ring).state, RingState::Running);
        }
    }

    pub(super) fn enable(&mut self, ring: u32, on: u32) -> Vec<String> {
        self.send(SET_VRING_ENABLE, &u32s(&[ring, on]), 0)
    }

    /// GET_VRING_BASE of an active ring, which stops at `base`.
    pub(super) fn stop_ring(&mut self, ring: u16, base: u32) {
        assert_eq!(
            self.send(GET_VRING_BASE, &u32s(&[ring.into(), 0]), 0),
            [format!("stop {ring}")]
        );
        assert!(self.session.is_waiting());
        let actions = self.session.ring_stopped(ring, base);
        assert_eq!(
            self.show(actions),
            [
                format!("kick {ring} none"),
                format!("call {ring} none"),
                reply(11, &u32s(&[ring.into(), base]))
            ]
        );
        assert!(!self.session.is_waiting());
    }

    /// Section 1.3's stop of both rings.
    pub(super) fn stop_both(&mut self, bases: [u32; 2]) {
        assert_eq!(self.enable(0, 0), ["enable 0 false"]);
        assert_eq!(self.enable(1, 0), ["enable 1 false"]);
        for (ring, base) in (0..2).zip(bases) {
            self.stop_ring(ring, base);
        }
    }
}

pub(super) const GET_FEATURES: u32 = 1;
pub(super) const SET_FEATURES: u32 = 2;
pub(super) const SET_OWNER: u32 = 3;
pub(super) const RESET_OWNER: u32 = 4;
pub(super) const SET_MEM_TABLE: u32 = 5;
pub(super) const SET_LOG_BASE: u32 = 6;
pub(super) const SET_LOG_FD: u32 = 7;
pub(super) const SET_VRING_NUM: u32 = 8;
pub(super) const SET_VRING_ADDR: u32 = 9;
pub(super) const SET_VRING_BASE: u32 = 10;
pub(super) const GET_VRING_BASE: u32 = 11;
pub(super) const SET_VRING_KICK: u32 = 12;
pub(super) const SET_VRING_CALL: u32 = 13;
pub(super) const SET_VRING_ERR: u32 = 14;
pub(super) const GET_PROTOCOL_FEATURES: u32 = 15;
pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
pub(super) const GET_QUEUE_NUM: u32 = 17;
pub(super) const SET_VRING_ENABLE: u32 = 18;
pub(super) const SET_BACKEND_REQ_FD: u32 = 21;
pub(super) const GET_CONFIG: u32 = 24;
pub(super) const SET_CONFIG: u32 = 25;
pub(super) const GET_INFLIGHT_FD: u32 = 31;
pub(super) const SET_INFLIGHT_FD: u32 = 32;
pub(super) const RESET_DEVICE: u32 = 34;
pub(super) const GET_MAX_MEM_SLOTS: u32 = 36;
pub(super) const ADD_MEM_REG: u32 = 37;
pub(super) const REM_MEM_REG: u32 = 38;
pub(super) const SET_STATUS: u32 = 39;
pub(super) const GET_STATUS: u32 = 40;

/// 256 MiB as QEMU sends them: below and above the BIOS's hole.
pub(super) const MEMORY: [RegionInfo; 2] = [
    RegionInfo { guest_addr: 0, size: 0xa_0000, user_addr: 0x7f00_0000_0000, mmap_offset: 0 },
    RegionInfo {
        guest_addr: 0xc_0000,
        size: 0xff4_0000,
        user_addr: 0x7f00_000c_0000,
        mmap_offset: 0xc_0000,
    },
];

pub(super) fn u32s(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(super) fn u64s(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(super) fn inflight(size: u64, offset: u64, queues: u16, queue_size: u16) -> Vec<u8> {
    let mut bytes = u64s(&[size, offset]);
    bytes.extend_from_slice(&queues.to_le_bytes());
    bytes.extend_from_slice(&queue_size.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]); // the end of QEMU's structure
    bytes
}

pub(super) fn address(ring: u32, flags: u32) -> Vec<u8> {
    let at = 0x7f00_0010_0000 + u64::from(ring) * 0x1_0000;
    let mut bytes = u32s(&[ring, flags]);
    bytes.extend(u64s(&[at, at + 0x2000, at + 0x1000, 0x10_2000]));
    bytes
}

pub(super) fn table(regions: &[RegionInfo]) -> Vec<u8> {
    let mut bytes = u32s(&[regions.len() as u32, 0]);
    for region in regions {
        bytes.extend(u64s(&[region.guest_addr, region.size, region.user_addr, region.mmap_offset]));
    }
    bytes
}

pub(super) fn reply(request: u32, payload: &[u8]) -> String {
    let mut bytes = u32s(&[request, 5, payload.len() as u32]);
    bytes.extend_from_slice(payload);
    format!("reply {bytes:?}")
}

/// A booted guest: SeaBIOS used the disk first, then Linux with both rings.
pub(super) fn running() -> Peer {
    let mut peer = Peer::new();
    peer.realize(true);
    peer.begin_start(BIOS, false, &[&format!("features {BIOS:#x}")]);
    peer.add_memory();
    peer.set_up_ring(0, 128, 0);
    assert_eq!(peer.enable(0, 1), ["start 0"]);
    // The second ring is enabled without ever being set up.
    peer.quiet(SET_VRING_ENABLE, &u32s(&[1, 1]), 0);

    // SeaBIOS ends: the ring without a size is skipped.
    assert_eq!(peer.enable(0, 0), ["enable 0 false"]);
    peer.quiet(SET_VRING_ENABLE, &u32s(&[1, 0]), 0);
    peer.stop_ring(0, 37);

    // Linux: other features, a new region, the same memory.
    peer.begin_start(LINUX, false, &[&format!("features {LINUX:#x}"), "write cache true"]);
    peer.start_both([0, 0]);
    peer
}

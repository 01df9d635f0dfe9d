//! What each request of the front end changes.

use std::os::fd::OwnedFd;

use super::{Action, Reply, Session, Waiting, protocol_feature};
use crate::protocol::config::{WRITE_CACHE_OFFSET, feature};
use crate::protocol::message::{
    self, InflightInfo, LogInfo, Message, RING_SIZE_MAX, RegionInfo, Request, RingAddresses,
    Violation, id,
};
use crate::protocol::ring_state::{Kick, RingState};

/// Features that the ring code depends on: they cannot change while a ring is not idle.
const RING_FEATURES: u64 =
    feature::INDIRECT_DESC | feature::EVENT_IDX | feature::VERSION_1 | feature::RING_PACKED;

/// How a request is answered.
pub(super) enum Answer {
    /// By a reply of its own, now or later, or not at all.
    Own,
    /// By an acknowledgement, if one was requested.
    Acknowledge,
    /// By a failing acknowledgement, if one was requested.
    Refuse,
}

/// Handles one request: either obeys it, or changes nothing and returns the reason.
pub(super) struct Handler<'a> {
    pub session: &'a mut Session,
    pub message: &'a Message,
    pub fds: Vec<OwnedFd>,
    pub actions: &'a mut Vec<Action>,
}

type Handled = Result<Answer, Violation>;

impl Handler<'_> {
    pub fn apply(mut self, request: Request) -> Handled {
        if self.session.is_waiting() {
            return self.refuse("sent before the previous request was answered");
        }
        let offer = self.session.offer;
        match request {
            Request::GetFeatures => self.reply_u64(offer.features),
            Request::GetProtocolFeatures => self.reply_u64(offer.protocol_features),
            Request::GetQueueNum => self.reply_u64(self.session.rings().into()),
            Request::GetMaxMemSlots => self.reply_u64(offer.memory_regions_max.into()),
            Request::GetConfig { offset, size, flags } => self.get_config(offset, size, flags),
            Request::SetConfig { offset, flags, bytes } => self.set_config(offset, flags, &bytes),

            Request::SetFeatures(bits) => self.set_features(bits),
            Request::SetProtocolFeatures(bits) => self.set_protocol_features(bits),
            Request::SetOwner => {
                self.session.owned = true;
                Ok(Answer::Acknowledge)
            }
            // Deprecated by the specification: some front ends sent it at unexpected times.
            Request::ResetOwner => Ok(Answer::Acknowledge),
            Request::SetBackendReqFd => {
                self.session.backend_channel = true;
                self.pass_descriptor(Action::BackendChannel)
            }
            Request::ResetDevice => self.reset_device(),

            Request::SetMemTable(regions) => self.set_memory(&regions),
            Request::AddMemReg(region) => self.add_region(region),
            Request::RemMemReg(region) => self.remove_region(region),
            Request::SetLogBase(area) => self.set_log(area),
            Request::SetLogFd => {
                self.session.log_signal = true;
                self.pass_descriptor(Action::LogSignal)
            }
            Request::GetInflightFd(area) => self.get_inflight(area),
            Request::SetInflightFd(area) => self.set_inflight(area),

            Request::GetVringBase { ring } => self.get_base(ring),
            Request::SetVringNum { ring, size } => self.set_size(ring, size),
            Request::SetVringBase { ring, base } => self.set_base(ring, base),
            Request::SetVringAddr { ring, addresses, log } => {
                self.set_addresses(ring, addresses, log)
            }
            Request::SetVringKick { ring } => self.set_kick(ring),
            Request::SetVringCall { ring } => self.set_call(ring),
            Request::SetVringErr { ring } => self.set_err(ring),
            Request::SetVringEnable { ring, enable } => self.enable(ring, enable),

            Request::Unknown => self.unknown(),
        }
    }

    fn refuse(&self, reason: &'static str) -> Handled {
        Err(Violation::Refused { request: self.message.request, reason })
    }

    fn reply(&mut self, bytes: Vec<u8>) -> Handled {
        self.actions.push(Action::Reply(Reply::new(bytes)));
        Ok(Answer::Own)
    }

    fn reply_u64(&mut self, value: u64) -> Handled {
        self.reply(message::reply_u64(self.message.request, value))
    }

    /// Passes the message's descriptor to the target.
    fn pass_descriptor(&mut self, action: impl FnOnce(OwnedFd) -> Action) -> Handled {
        self.actions.extend(self.fds.pop().map(action));
        Ok(Answer::Acknowledge)
    }

    fn known_ring(&self, ring: u32) -> Result<u16, Violation> {
        match u16::try_from(ring) {
            Ok(known) if known < self.session.rings() => Ok(known),
            _ => Err(Violation::NoSuchRing { request: self.message.request, ring }),
        }
    }

    fn get_config(&mut self, offset: u32, size: u32, flags: u32) -> Handled {
        let bytes = self.session.offer.config.read(self.session.write_cache, offset, size);
        self.reply(message::reply_config(offset, flags, &bytes.unwrap_or_default()))
    }

    fn set_config(&mut self, offset: u32, flags: u32, bytes: &[u8]) -> Handled {
        let ([value @ (0 | 1)], WRITE_CACHE_OFFSET, 0) = (bytes, offset, flags) else {
            return self.refuse("only the write cache can be configured");
        };
        if self.session.offer.features & feature::CONFIG_WCE == 0 {
            return self.refuse("the write cache cannot be configured");
        }
        let before = self.session.write_cache();
        self.session.write_cache = *value == 1;
        if self.session.write_cache() != before {
            self.actions.push(Action::WriteCache(!before));
        }
        Ok(Answer::Acknowledge)
    }

    /// Checks that only offered bits are acknowledged.
    fn check_offered(&self, bits: u64, offered: u64) -> Result<(), Violation> {
        match bits & !offered {
            0 => Ok(()),
            bits => Err(Violation::NotOffered { request: self.message.request, bits }),
        }
    }

    fn set_features(&mut self, bits: u64) -> Handled {
        self.check_offered(bits, self.session.offer.features)?;
        let changed = bits ^ self.session.features();
        if changed & RING_FEATURES != 0 && self.session.has_active_ring() {
            return self.refuse("ring features changed while a ring is active");
        }
        self.session.set_features(Some(bits), self.actions);
        for ring in 0..self.session.rings() {
            self.session.update_ring(ring, self.actions);
        }
        Ok(Answer::Acknowledge)
    }

    fn set_protocol_features(&mut self, bits: u64) -> Handled {
        self.check_offered(bits, self.session.offer.protocol_features)?;
        self.session.protocol_features = bits;
        Ok(Answer::Acknowledge)
    }

    fn reset_device(&mut self) -> Handled {
        let mut stopping = 0;
        for (i, ring) in (0u16..).zip(&mut self.session.rings) {
            ring.enabled = false;
            if ring.state != RingState::Idle {
                ring.state = RingState::Stopping;
                self.actions.push(Action::StopRing(i));
                stopping += 1;
            }
        }
        if stopping == 0 {
            self.session.reset(self.actions);
            return Ok(Answer::Acknowledge);
        }
        let acknowledge = self.message.needs_reply()
            && self.session.protocol_features & protocol_feature::REPLY_ACK != 0;
        self.session.waiting = Some(Waiting::Reset { rings: stopping, acknowledge });
        Ok(Answer::Own)
    }

    fn set_memory(&mut self, regions: &[RegionInfo]) -> Handled {
        if regions.len() > usize::from(self.session.offer.memory_regions_max) {
            return self.refuse("too many memory regions");
        }
        for (i, region) in regions.iter().enumerate() {
            if let Err(reason) = region.check(&regions[..i]) {
                return self.refuse(reason);
            }
        }
        self.session.regions = regions.to_vec();
        let table = regions.iter().copied().zip(self.fds.drain(..)).collect();
        self.actions.push(Action::ReplaceMemory(table));
        Ok(Answer::Acknowledge)
    }

    fn add_region(&mut self, region: RegionInfo) -> Handled {
        let known = &mut self.session.regions;
        if known.len() >= usize::from(self.session.offer.memory_regions_max) {
            return self.refuse("too many memory regions");
        }
        if let Err(reason) = region.check(known) {
            return self.refuse(reason);
        }
        known.push(region);
        self.pass_descriptor(|fd| Action::AddRegion(region, fd))
    }

    fn remove_region(&mut self, region: RegionInfo) -> Handled {
        let same = |known: &RegionInfo| {
            RegionInfo { mmap_offset: 0, ..*known } == RegionInfo { mmap_offset: 0, ..region }
        };
        let Some(at) = self.session.regions.iter().position(same) else {
            return self.refuse("no such memory region");
        };
        self.actions.push(Action::RemoveRegion(self.session.regions.remove(at)));
        Ok(Answer::Acknowledge)
    }

    fn set_log(&mut self, area: Option<LogInfo>) -> Handled {
        let Some(area) = area else { return self.refuse("dirty log without shared memory") };
        if self.session.protocol_features & protocol_feature::LOG_SHMFD == 0 {
            return self.refuse("dirty log in shared memory was not negotiated");
        }
        if !area.is_possible() {
            return self.refuse("impossible dirty log size");
        }
        self.session.log = Some(area);
        self.actions.extend(self.fds.pop().map(|fd| Action::Log(area, fd)));
        self.reply_u64(0)
    }

    fn get_inflight(&mut self, area: InflightInfo) -> Handled {
        let InflightInfo { queues, queue_size, .. } = area;
        if !(1..=self.session.rings()).contains(&queues)
            || !(1..=RING_SIZE_MAX).contains(&queue_size)
        {
            return self.refuse("an in-flight region for an impossible number or size of rings");
        }
        let payload_bytes = self.message.payload.len();
        self.session.waiting = Some(Waiting::Inflight { payload_bytes });
        self.actions.push(Action::CreateInflight { queues, queue_size });
        Ok(Answer::Own)
    }

    fn set_inflight(&mut self, area: InflightInfo) -> Handled {
        if self.session.has_active_ring() {
            return self.refuse("in-flight region changed while a ring is active");
        }
        if !area.is_possible() {
            return self.refuse("impossible in-flight region size");
        }
        self.session.inflight = Some(area);
        self.pass_descriptor(|fd| Action::Inflight(area, fd))
    }

    fn get_base(&mut self, ring: u32) -> Handled {
        let ring = self.known_ring(ring)?;
        let state = &mut self.session.rings[usize::from(ring)].state;
        if *state == RingState::Idle {
            self.session.answer_base(ring, self.actions);
        } else {
            *state = RingState::Stopping;
            self.session.waiting = Some(Waiting::Base(ring));
            self.actions.push(Action::StopRing(ring));
        }
        Ok(Answer::Own)
    }

    fn set_size(&mut self, ring: u32, size: u32) -> Handled {
        let ring = self.known_ring(ring)?;
        let Some(size) = u16::try_from(size).ok().filter(|n| (1..=RING_SIZE_MAX).contains(n))
        else {
            return self.refuse("impossible ring size");
        };
        let known = &mut self.session.rings[usize::from(ring)];
        if known.state != RingState::Idle && known.size != size {
            return self.refuse("size of an active ring changed");
        }
        known.size = size;
        self.session.update_ring(ring, self.actions);
        Ok(Answer::Acknowledge)
    }

    fn set_base(&mut self, ring: u32, base: u32) -> Handled {
        let ring = self.known_ring(ring)?;
        if !self.session.packed() && base > u16::MAX.into() {
            return self.refuse("base is not an index");
        }
        let known = &mut self.session.rings[usize::from(ring)];
        if known.state != RingState::Idle {
            return self.refuse("base of an active ring changed");
        }
        known.base = base;
        Ok(Answer::Acknowledge)
    }

    fn set_addresses(&mut self, ring: u32, addresses: RingAddresses, log: Option<u64>) -> Handled {
        let ring = self.known_ring(ring)?;
        let known = &mut self.session.rings[usize::from(ring)];
        if known.state != RingState::Idle {
            if known.addresses != Some(addresses) {
                return self.refuse("addresses of an active ring changed");
            }
            if known.log != log {
                self.actions.push(Action::RingLog(ring));
            }
        }
        known.addresses = Some(addresses);
        known.log = log;
        self.session.update_ring(ring, self.actions);
        Ok(Answer::Acknowledge)
    }

    fn set_kick(&mut self, ring: u32) -> Handled {
        let ring = self.known_ring(ring)?;
        let fd = self.fds.pop();
        self.session.rings[usize::from(ring)].kick =
            if fd.is_some() { Kick::Descriptor } else { Kick::Polling };
        self.actions.push(Action::Kick(ring, fd));
        self.session.update_ring(ring, self.actions);
        Ok(Answer::Acknowledge)
    }

    fn set_call(&mut self, ring: u32) -> Handled {
        let ring = self.known_ring(ring)?;
        let fd = self.fds.pop();
        self.session.rings[usize::from(ring)].call = fd.is_some();
        self.actions.push(Action::Call(ring, fd));
        Ok(Answer::Acknowledge)
    }

    fn set_err(&mut self, ring: u32) -> Handled {
        let ring = self.known_ring(ring)?;
        let fd = self.fds.pop();
        self.session.rings[usize::from(ring)].err = fd.is_some();
        self.actions.push(Action::Err(ring, fd));
        Ok(Answer::Acknowledge)
    }

    fn enable(&mut self, ring: u32, enable: bool) -> Handled {
        let ring = self.known_ring(ring)?;
        self.session.rings[usize::from(ring)].enabled = enable;
        self.session.update_ring(ring, self.actions);
        Ok(Answer::Acknowledge)
    }

    fn unknown(&mut self) -> Handled {
        if has_own_reply(self.message.request) {
            return Err(Violation::Unanswerable { request: self.message.request });
        }
        self.session.counters.unknown += 1;
        Ok(Answer::Refuse)
    }
}

/// Whether the request has a reply other than an acknowledgement.
pub(super) fn has_own_reply(request: u32) -> bool {
    matches!(
        request,
        id::GET_FEATURES
            | id::SET_LOG_BASE
            | id::GET_VRING_BASE
            | id::GET_PROTOCOL_FEATURES
            | id::GET_QUEUE_NUM
            | id::GET_CONFIG
            | id::CREATE_CRYPTO_SESSION
            | id::POSTCOPY_ADVISE
            | id::POSTCOPY_END
            | id::GET_INFLIGHT_FD
            | id::GET_MAX_MEM_SLOTS
            | id::GET_STATUS
            | id::GET_SHARED_OBJECT
            | id::SET_DEVICE_STATE_FD
            | id::CHECK_DEVICE_STATE
            | id::GET_SHMEM_CONFIG
    )
}

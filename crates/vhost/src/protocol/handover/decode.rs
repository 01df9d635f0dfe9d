//! The reader of the document, and the rules that a state obeys beyond its encoding.

use super::format::{
    DOCUMENT_BYTES_MAX, MAGIC, NUMBERS_MAX, PREFIX_BYTES, SUFFIX_BYTES, VERSION, ring_flag,
    session_flag, tag,
};
use super::{
    ConnectionState, DiskState, HandoverError, InFlight, KeptState, MirrorState, Role, SessionState,
};
use crate::bytes::Reader;
use crate::protocol::message::{
    DESCRIPTORS_MAX, HEADER_BYTES, InflightInfo, LogInfo, MEMORY_REGIONS_MAX, PAYLOAD_BYTES_MAX,
    RING_SIZE_MAX, RINGS_MAX, RegionInfo, RingAddresses,
};
use crate::protocol::ring_state::{Kick, Ring, RingProgress, RingState};

impl DiskState {
    /// Decodes the bytes that [`DiskState::encode`] wrote.
    ///
    /// # Errors
    /// If the bytes differ in any detail from what [`DiskState::encode`] writes.
    pub fn decode(bytes: &[u8]) -> Result<Self, HandoverError> {
        let mut document = Reader::new(bytes);
        if document.take(MAGIC.len()) != Some(&MAGIC) {
            return Err(HandoverError::Magic);
        }
        let length_error = HandoverError::Length { found: bytes.len() };
        let version = document.u32().ok_or(length_error)?;
        if version != VERSION {
            return Err(HandoverError::Version(version));
        }
        let length = document.u32().ok_or(length_error)? as usize;
        if bytes.len() > DOCUMENT_BYTES_MAX || bytes.len() - PREFIX_BYTES != length + SUFFIX_BYTES {
            return Err(length_error);
        }
        let mut fields = Reader::new(document.take(length).ok_or(length_error)?);
        if document.u32() != Some(crc32c::crc32c(&bytes[..PREFIX_BYTES + length])) {
            return Err(HandoverError::Checksum);
        }
        let state = Self::decode_fields(&mut fields)?;
        if state.encode() != bytes {
            return Err(HandoverError::NotCanonical);
        }
        Ok(state)
    }

    fn decode_fields(fields: &mut Reader<'_>) -> Result<Self, HandoverError> {
        let mut state = Self::default();
        let mut seen = 0u32;
        let mut listed: &[u8] = &[];
        while !fields.is_empty() {
            let cut = HandoverError::Field { field: 0, reason: "cut short" };
            let field = fields.u16().ok_or(cut)?;
            let length = fields.u32().ok_or(cut)? as usize;
            let mut contents = Reader::new(fields.take(length).ok_or(cut)?);
            let error = |reason| HandoverError::Field { field, reason };
            if !(tag::DISK..=tag::WITHHELD).contains(&field) {
                return Err(HandoverError::UnknownField(field));
            }
            if seen & 1 << field != 0 {
                return Err(error("repeated"));
            }
            seen |= 1 << field;
            if field == tag::SESSION {
                state.connection = Some(ConnectionState::default());
            }
            let parsed = match (field, &mut state.connection) {
                (tag::DESCRIPTORS, _) => {
                    listed = contents.rest();
                    Some(())
                }
                (..=tag::MIRROR | tag::FLUSH_FAILED | tag::IN_FLIGHT | tag::WITHHELD, _) => {
                    state.decode_own(field, &mut contents)
                }
                (_, Some(connection)) => connection.decode(field, &mut contents),
                (_, None) => return Err(HandoverError::MissingField(tag::SESSION)),
            };
            if parsed.is_none() || !contents.is_empty() {
                return Err(error("malformed"));
            }
        }
        for field in [tag::DISK, tag::DESCRIPTORS] {
            if seen & 1 << field == 0 {
                return Err(HandoverError::MissingField(field));
            }
        }
        let numbers = state.roles().into_iter().flat_map(Role::numbers);
        if !numbers.flat_map(u16::to_le_bytes).eq(listed.iter().copied()) {
            let reason = "not the descriptors that belong to the state";
            return Err(HandoverError::Field { field: tag::DESCRIPTORS, reason });
        }
        if state.connection.is_some() && seen & 1 << tag::RINGS == 0 {
            return Err(HandoverError::MissingField(tag::RINGS));
        }
        state.check()?;
        Ok(state)
    }

    fn decode_own(&mut self, field: u16, contents: &mut Reader<'_>) -> Option<()> {
        match field {
            tag::DISK => {
                self.name = decode_name(contents)?;
                self.capacity_sectors = contents.u64()?;
                self.resize_epoch = contents.u64()?;
                self.listening = contents.bool()?;
            }
            tag::STATISTICS => self.statistics = decode_numbers(contents)?,
            tag::LIMITS => self.limits = decode_numbers(contents)?,
            tag::FLUSH_FAILED => self.flush_failed = true,
            tag::WITHHELD => self.withheld = true,
            tag::IN_FLIGHT => self.in_flight = Some(InFlight { flushes: contents.bool()? }),
            _ => {
                let (granule_bytes, bits) = (contents.u64()?, contents.u64()?);
                self.mirror = Some(MirrorState { granule_bytes, bits });
            }
        }
        Some(())
    }

    /// Checks the rules that the encoding does not enforce.
    fn check(&self) -> Result<(), HandoverError> {
        let error = |field, reason| Err(HandoverError::Field { field, reason });
        if self.mirror.is_some_and(|mirror| !mirror.granule_bytes.is_power_of_two()) {
            return error(tag::MIRROR, "granule size is not a power of two");
        }
        let session = self.connection.as_ref().map(|connection| &connection.session);
        if self.in_flight.is_some() && session.is_none_or(|session| session.inflight.is_none()) {
            return error(tag::IN_FLIGHT, "no in-flight region records it");
        }
        let Some(connection) = &self.connection else { return Ok(()) };
        let ConnectionState { session, partial, partial_descriptors, kept, .. } = connection;
        if let Some(kept) = kept
            && (kept.numbers.len() != session.roles().len()
                || !partial.is_empty()
                || !connection.unsent.is_empty())
        {
            return error(tag::KEPT, "not the numbers of the session's descriptors");
        }
        if partial.len() >= HEADER_BYTES + PAYLOAD_BYTES_MAX
            || usize::from(*partial_descriptors) > DESCRIPTORS_MAX
            || (partial.is_empty() && *partial_descriptors != 0)
        {
            return error(tag::PARTIAL, "not a part of a message");
        }
        if connection.unsent.len() > HEADER_BYTES + PAYLOAD_BYTES_MAX {
            return error(tag::UNSENT, "more than a reply");
        }
        if session.regions.len() > usize::from(MEMORY_REGIONS_MAX) {
            return error(tag::MEMORY, "too many regions");
        }
        for (i, region) in session.regions.iter().enumerate() {
            if let Err(reason) = region.check(&session.regions[..i]) {
                return error(tag::MEMORY, reason);
            }
        }
        if session.inflight.is_some_and(|area| !area.is_possible()) {
            return error(tag::INFLIGHT, "impossible size");
        }
        if session.log.is_some_and(|area| !area.is_possible()) {
            return error(tag::LOG, "impossible size");
        }
        if !(1..=usize::from(RINGS_MAX)).contains(&session.rings.len()) {
            return error(tag::RINGS, "not 1 to 256");
        }
        for (ring, progress) in &session.rings {
            if let Err(reason) = check_ring(session, ring, progress.as_ref()) {
                return error(tag::RINGS, reason);
            }
        }
        Ok(())
    }
}

impl ConnectionState {
    fn decode(&mut self, field: u16, contents: &mut Reader<'_>) -> Option<()> {
        let session = &mut self.session;
        match field {
            tag::SESSION => {
                use session_flag::*;
                let (features, protocol_features) = (contents.u64()?, contents.u64()?);
                let flags = contents.u8()?;
                session.features = (flags & FEATURES != 0).then_some(features);
                session.protocol_features = protocol_features;
                session.owned = flags & OWNED != 0;
                session.write_cache = flags & WRITE_CACHE != 0;
                session.log_signal = flags & LOG_SIGNAL != 0;
                session.backend_channel = flags & BACKEND_CHANNEL != 0;
            }
            tag::MEMORY => {
                while !contents.is_empty() {
                    session.regions.push(RegionInfo::decode(contents)?);
                }
            }
            tag::INFLIGHT => {
                session.inflight = Some(InflightInfo::decode(contents)?);
            }
            tag::LOG => {
                let (mmap_size, mmap_offset) = (contents.u64()?, contents.u64()?);
                session.log = Some(LogInfo { mmap_size, mmap_offset });
            }
            tag::RINGS => {
                while !contents.is_empty() {
                    session.rings.push(decode_ring(contents)?);
                }
            }
            tag::UNSENT => {
                self.unsent_descriptor = contents.bool()?;
                self.unsent = contents.rest().to_vec();
            }
            tag::KEPT => {
                let mut kept = KeptState { pid: contents.u32()?, numbers: Vec::new() };
                while !contents.is_empty() {
                    kept.numbers.push(contents.u32()?);
                }
                self.kept = Some(kept);
            }
            _ => {
                self.partial_descriptors = contents.u16()?;
                self.partial = contents.rest().to_vec();
            }
        }
        Some(())
    }
}

/// Checks whether a session can have brought the ring into this state.
fn check_ring(
    session: &SessionState,
    ring: &Ring,
    progress: Option<&RingProgress>,
) -> Result<(), &'static str> {
    if ring.size > RING_SIZE_MAX {
        return Err("impossible ring size");
    }
    if ring.log.is_some() && ring.addresses.is_none() {
        return Err("a log for a ring without addresses");
    }
    let possible = match session.features {
        Some(features) => ring.possible_states(features),
        None => &[RingState::Idle],
    };
    if !possible.contains(&ring.state) {
        return Err("ring state contradicts its size, addresses, kick and features");
    }
    if progress.is_some() != (ring.state != RingState::Idle) {
        return Err("progress of an idle ring, or no progress of an active one");
    }
    let Some(progress) = progress else {
        return Ok(());
    };
    let wraps = progress.avail_wrap || progress.used_wrap;
    if !session.packed() && wraps {
        return Err("wrap counters of a split ring");
    }
    if session.packed() && progress.next_avail.max(progress.next_used) >= RING_SIZE_MAX {
        return Err("a position beyond the end of a packed ring");
    }
    Ok(())
}

/// Reads a length byte and that many bytes of text.
fn decode_name(fields: &mut Reader<'_>) -> Option<String> {
    let length = fields.u8()?;
    Some(fields.str(length.into())?.to_owned())
}

/// Reads names with their numbers to the end, at most [`NUMBERS_MAX`].
fn decode_numbers(fields: &mut Reader<'_>) -> Option<Vec<(String, u64)>> {
    let mut numbers = Vec::new();
    while !fields.is_empty() && numbers.len() < NUMBERS_MAX {
        numbers.push((decode_name(fields)?, fields.u64()?));
    }
    Some(numbers)
}

fn decode_ring(fields: &mut Reader<'_>) -> Option<(Ring, Option<RingProgress>)> {
    use ring_flag::*;
    let (size, flags, base) = (fields.u16()?, fields.u16()?, fields.u32()?);
    let (desc, used, avail) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let log = fields.u64()?;
    let set = |flag: u16| flags & flag != 0;
    let ring = Ring {
        size,
        base,
        addresses: set(ADDRESSES).then_some(RingAddresses { desc, used, avail }),
        log: set(LOG).then_some(log),
        enabled: set(ENABLED),
        kick: match (set(POLLING), set(KICK)) {
            (_, true) => Kick::Descriptor,
            (true, false) => Kick::Polling,
            (false, false) => Kick::Unset,
        },
        call: set(CALL),
        err: set(ERR),
        state: match (set(RUNNING), set(PAUSED)) {
            (true, _) => RingState::Running,
            (false, true) => RingState::Paused,
            (false, false) => RingState::Idle,
        },
    };
    let progress = RingProgress {
        next_avail: fields.u16()?,
        avail_wrap: set(AVAIL_WRAP),
        next_used: fields.u16()?,
        used_wrap: set(USED_WRAP),
        signalled_used: fields.u16()?,
        broken: set(BROKEN),
    };
    Some((ring, (ring.state != RingState::Idle).then_some(progress)))
}

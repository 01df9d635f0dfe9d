//! The typed form of requests.

use super::{
    CONFIG_BYTES_MAX, InflightInfo, LogInfo, Message, RegionInfo, RingAddresses, TABLE_REGIONS_MAX,
    Violation, id,
};
use crate::bytes::Reader;

/// Ring index in a kick, call or err message.
const VRING_INDEX_MASK: u64 = 0xff;
/// Set in a kick, call or err message without a descriptor.
const VRING_NO_DESCRIPTOR: u64 = 0x100;
/// Flag of SET_VRING_ADDR: writes to the used ring are logged.
const VRING_FLAG_LOG: u32 = 0x1;

/// A request whose payload size and number of descriptors are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the specification's")]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<RegionInfo>),
    /// `None`: the old form, an address in the front end's memory without a descriptor.
    SetLogBase(Option<LogInfo>),
    SetLogFd,
    SetVringNum {
        ring: u32,
        size: u32,
    },
    SetVringAddr {
        ring: u32,
        addresses: RingAddresses,
        /// The guest physical address of the used ring, if writes to it are logged.
        log: Option<u64>,
    },
    SetVringBase {
        ring: u32,
        base: u32,
    },
    GetVringBase {
        ring: u32,
    },
    /// Without a descriptor the ring is polled.
    SetVringKick {
        ring: u32,
    },
    SetVringCall {
        ring: u32,
    },
    SetVringErr {
        ring: u32,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable {
        ring: u32,
        enable: bool,
    },
    SetBackendReqFd,
    GetConfig {
        offset: u32,
        size: u32,
        flags: u32,
    },
    SetConfig {
        offset: u32,
        flags: u32,
        bytes: Vec<u8>,
    },
    GetInflightFd(InflightInfo),
    SetInflightFd(InflightInfo),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(RegionInfo),
    RemMemReg(RegionInfo),
    Unknown,
}

impl Request {
    /// Returns the typed form of `message`, which came with `descriptors` descriptors.
    ///
    /// # Errors
    /// [`Violation::PayloadSize`], [`Violation::Descriptors`], and [`Violation::Refused`] for an
    /// undefined flag.
    pub fn decode(message: &Message, descriptors: usize) -> Result<Self, Violation> {
        let request = message.request;
        let size_error = Violation::PayloadSize { request, found: message.payload.len() };
        let decoded = Self::from_payload(request, &message.payload).ok_or(size_error)?;
        let fits = match &decoded {
            Self::SetMemTable(regions) => descriptors == regions.len(),
            Self::SetLogBase(area) => descriptors == usize::from(area.is_some()),
            Self::SetLogFd
            | Self::SetBackendReqFd
            | Self::SetInflightFd(_)
            | Self::AddMemReg(_) => descriptors == 1,
            Self::SetVringKick { .. } | Self::SetVringCall { .. } | Self::SetVringErr { .. } => {
                let none = Reader::new(&message.payload)
                    .u64()
                    .is_some_and(|v| v & VRING_NO_DESCRIPTOR != 0);
                descriptors == usize::from(!none)
            }
            // Older front ends send the region's descriptor with its removal.
            Self::RemMemReg(_) => descriptors <= 1,
            Self::Unknown => true,
            _ => descriptors == 0,
        };
        if !fits {
            return Err(Violation::Descriptors { request, found: descriptors });
        }
        if let Self::SetVringEnable { .. } = decoded
            && message.payload[4..] != [0; 4]
            && message.payload[4..] != [1, 0, 0, 0]
        {
            return Err(Violation::Refused { request, reason: "a ring is enabled with 0 or 1" });
        }
        Ok(decoded)
    }

    /// Returns `None` if the payload size does not match the request.
    fn from_payload(request: u32, payload: &[u8]) -> Option<Self> {
        let mut fields = Reader::new(payload);
        let decoded = match request {
            id::GET_FEATURES => Self::GetFeatures,
            id::SET_FEATURES => Self::SetFeatures(fields.u64()?),
            id::SET_OWNER => Self::SetOwner,
            id::RESET_OWNER => Self::ResetOwner,
            id::SET_MEM_TABLE => {
                let count = fields.u32()? as usize;
                fields.u32()?;
                if count > TABLE_REGIONS_MAX {
                    return None;
                }
                Self::SetMemTable(
                    (0..count).map(|_| RegionInfo::decode(&mut fields)).collect::<Option<_>>()?,
                )
            }
            id::SET_LOG_BASE if payload.len() == 8 => {
                fields.u64()?;
                Self::SetLogBase(None)
            }
            id::SET_LOG_BASE => Self::SetLogBase(Some(LogInfo {
                mmap_size: fields.u64()?,
                mmap_offset: fields.u64()?,
            })),
            id::SET_LOG_FD => Self::SetLogFd,
            id::SET_VRING_NUM => Self::SetVringNum { ring: fields.u32()?, size: fields.u32()? },
            id::SET_VRING_ADDR => {
                let (ring, flags) = (fields.u32()?, fields.u32()?);
                let (desc, used, avail) = (fields.u64()?, fields.u64()?, fields.u64()?);
                let log = fields.u64()?;
                let log = (flags & VRING_FLAG_LOG != 0).then_some(log);
                Self::SetVringAddr { ring, addresses: RingAddresses { desc, used, avail }, log }
            }
            id::SET_VRING_BASE => Self::SetVringBase { ring: fields.u32()?, base: fields.u32()? },
            id::GET_VRING_BASE => {
                let ring = fields.u32()?;
                fields.u32()?;
                Self::GetVringBase { ring }
            }
            id::SET_VRING_KICK => Self::SetVringKick { ring: vring(&mut fields)? },
            id::SET_VRING_CALL => Self::SetVringCall { ring: vring(&mut fields)? },
            id::SET_VRING_ERR => Self::SetVringErr { ring: vring(&mut fields)? },
            id::GET_PROTOCOL_FEATURES => Self::GetProtocolFeatures,
            id::SET_PROTOCOL_FEATURES => Self::SetProtocolFeatures(fields.u64()?),
            id::GET_QUEUE_NUM => Self::GetQueueNum,
            id::SET_VRING_ENABLE => {
                Self::SetVringEnable { ring: fields.u32()?, enable: fields.u32()? != 0 }
            }
            id::SET_BACKEND_REQ_FD => Self::SetBackendReqFd,
            id::GET_CONFIG => {
                let (offset, size, flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
                // The request includes space for the answer, of any length. Some front ends omit
                // it.
                fields.take(fields.len().min(CONFIG_BYTES_MAX))?;
                Self::GetConfig { offset, size, flags }
            }
            id::SET_CONFIG => {
                let (offset, size, flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
                Self::SetConfig { offset, flags, bytes: fields.take(size as usize)?.to_vec() }
            }
            id::GET_INFLIGHT_FD => Self::GetInflightFd(InflightInfo::decode_message(&mut fields)?),
            id::SET_INFLIGHT_FD => Self::SetInflightFd(InflightInfo::decode_message(&mut fields)?),
            id::RESET_DEVICE => Self::ResetDevice,
            id::GET_MAX_MEM_SLOTS => Self::GetMaxMemSlots,
            id::ADD_MEM_REG => {
                fields.u64()?;
                Self::AddMemReg(RegionInfo::decode(&mut fields)?)
            }
            id::REM_MEM_REG => {
                fields.u64()?;
                Self::RemMemReg(RegionInfo::decode(&mut fields)?)
            }
            _ => return Some(Self::Unknown),
        };
        fields.is_empty().then_some(decoded)
    }
}

/// The ring's number in a kick, call or err message.
fn vring(fields: &mut Reader<'_>) -> Option<u32> {
    Some((fields.u64()? & VRING_INDEX_MASK) as u32)
}

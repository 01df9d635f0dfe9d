//! The writer of the document.

use super::format::{MAGIC, NAME_BYTES_MAX, VERSION, ring_flag, session_flag, tag};
use super::{ConnectionState, DiskState, InFlight, Role};
use crate::protocol::ring_state::{Kick, Ring, RingProgress, RingState};

impl DiskState {
    /// Encodes the state.
    ///
    /// # Panics
    /// If a name is longer than [`NAME_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        let mut fields = Writer(Vec::new());
        fields.field(tag::DISK, |w| {
            w.name(&self.name);
            w.u64(self.capacity_sectors);
            w.u64(self.resize_epoch);
            w.u8(u8::from(self.listening));
        });
        for (tag, numbers) in [(tag::STATISTICS, &self.statistics), (tag::LIMITS, &self.limits)] {
            if !numbers.is_empty() {
                fields.field(tag, |w| {
                    for (name, number) in numbers {
                        w.name(name);
                        w.u64(*number);
                    }
                });
            }
        }
        if let Some(mirror) = &self.mirror {
            fields.field(tag::MIRROR, |w| {
                w.u64(mirror.granule_bytes);
                w.u64(mirror.bits);
            });
        }
        if let Some(connection) = &self.connection {
            connection.encode(&mut fields);
        }
        fields.field(tag::DESCRIPTORS, |w| {
            for number in self.roles().into_iter().flat_map(Role::numbers) {
                w.u16(number);
            }
        });
        if self.flush_failed {
            fields.field(tag::FLUSH_FAILED, |_| {});
        }
        if let Some(connection) = &self.connection {
            connection.encode_unsent(&mut fields);
        }
        if let Some(InFlight { flushes }) = self.in_flight {
            fields.field(tag::IN_FLIGHT, |w| w.u8(u8::from(flushes)));
        }
        if let Some(kept) = self.connection.as_ref().and_then(|known| known.kept.as_ref()) {
            fields.field(tag::KEPT, |w| {
                w.u32(kept.pid);
                kept.numbers.iter().for_each(|number| w.u32(*number));
            });
        }
        if self.withheld {
            fields.field(tag::WITHHELD, |_| {});
        }
        document(&fields.0)
    }
}

/// A document with these fields.
pub(crate) fn document(fields: &[u8]) -> Vec<u8> {
    let length = u32::try_from(fields.len()).expect("a document is far below 4 GiB");
    let mut document = Writer(MAGIC.to_vec());
    document.u32(VERSION);
    document.u32(length);
    document.0.extend_from_slice(fields);
    document.u32(crc32c::crc32c(&document.0));
    document.0
}

impl ConnectionState {
    fn encode(&self, fields: &mut Writer) {
        let session = &self.session;
        fields.field(tag::SESSION, |w| {
            use session_flag::*;
            w.u64(session.features.unwrap_or(0));
            w.u64(session.protocol_features);
            let flags = [
                (FEATURES, session.features.is_some()),
                (OWNED, session.owned),
                (WRITE_CACHE, session.write_cache),
                (LOG_SIGNAL, session.log_signal),
                (BACKEND_CHANNEL, session.backend_channel),
            ];
            w.u8(flags.iter().map(|(flag, set)| flag * u8::from(*set)).sum());
        });
        if !session.regions.is_empty() {
            fields.field(tag::MEMORY, |w| {
                for region in &session.regions {
                    region.encode(&mut w.0);
                }
            });
        }
        if let Some(area) = &session.inflight {
            fields.field(tag::INFLIGHT, |w| area.encode(&mut w.0));
        }
        if let Some(area) = &session.log {
            fields.field(tag::LOG, |w| {
                w.u64(area.mmap_size);
                w.u64(area.mmap_offset);
            });
        }
        fields.field(tag::RINGS, |w| {
            for (ring, progress) in &session.rings {
                w.ring(ring, &progress.unwrap_or_default());
            }
        });
        if !self.partial.is_empty() {
            fields.field(tag::PARTIAL, |w| {
                w.u16(self.partial_descriptors);
                w.0.extend_from_slice(&self.partial);
            });
        }
    }

    fn encode_unsent(&self, fields: &mut Writer) {
        if !self.unsent.is_empty() {
            fields.field(tag::UNSENT, |w| {
                w.u8(u8::from(self.unsent_descriptor));
                w.0.extend_from_slice(&self.unsent);
            });
        }
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn name(&mut self, name: &str) {
        assert!(name.len() <= NAME_BYTES_MAX, "a name of {} bytes", name.len());
        self.u8(name.len() as u8);
        self.0.extend_from_slice(name.as_bytes());
    }

    fn field(&mut self, tag: u16, contents: impl FnOnce(&mut Self)) {
        self.u16(tag);
        let at = self.0.len();
        self.u32(0);
        contents(self);
        let length = u32::try_from(self.0.len() - at - 4).expect("a field is far below 4 GiB");
        self.0[at..at + 4].copy_from_slice(&length.to_le_bytes());
    }

    fn ring(&mut self, ring: &Ring, progress: &RingProgress) {
        use ring_flag::*;
        let flags = [
            (ENABLED, ring.enabled),
            (POLLING, ring.kick == Kick::Polling),
            (KICK, ring.kick == Kick::Descriptor),
            (CALL, ring.call),
            (ERR, ring.err),
            (ADDRESSES, ring.addresses.is_some()),
            (LOG, ring.log.is_some()),
            (RUNNING, ring.state == RingState::Running),
            (PAUSED, ring.state == RingState::Paused),
            (AVAIL_WRAP, progress.avail_wrap),
            (USED_WRAP, progress.used_wrap),
            (BROKEN, progress.broken),
        ];
        let addresses = ring.addresses.unwrap_or_default();
        self.u16(ring.size);
        self.u16(flags.iter().map(|(flag, set)| flag * u16::from(*set)).sum());
        self.u32(ring.base);
        self.u64(addresses.desc);
        self.u64(addresses.used);
        self.u64(addresses.avail);
        self.u64(ring.log.unwrap_or(0));
        self.u16(progress.next_avail);
        self.u16(progress.next_used);
        self.u16(progress.signalled_used);
    }
}

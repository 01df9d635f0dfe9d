//! A [`Channel`]: one core's access to a device.
//!
//! This is on the path of every request: no allocation (but see `devices/nbd`), no task, no lock,
//! and a `match` over the devices instead of a call through a table.

use std::any::Any;
use std::rc::Rc;

use reactor::Core;

use crate::device::{Bdev, Device};
use crate::devices::file::FileChannel;
use crate::devices::mem::MemChannel;
use crate::devices::nbd::NbdChannel;
use crate::error::Error;
use crate::io::{Done, Full, Io, Kind, QUEUE_DEPTH, Status};
use crate::layers::delay::DelayChannel;
use crate::layers::dirty::DirtyChannel;
use crate::layers::failing::FailingChannel;
use crate::layers::limit::LimitChannel;

/// One core's access to a device; see the crate's text.
pub struct Channel {
    device: Bdev,
    block_mask: u64,
    read_only: bool,
    /// Requests submitted and not yet returned.
    in_flight: usize,
    /// Completions that wait to be returned.
    done: Vec<Done>,
    backend: Backend,
}

/// The part of a channel that depends on the device.
enum Backend {
    Null,
    Mem(MemChannel),
    File(Box<FileChannel>),
    Nbd(Box<NbdChannel>),
    Failing(Box<FailingChannel>),
    Delay(Box<DelayChannel>),
    Limit(Box<LimitChannel>),
    Dirty(Box<DirtyChannel>),
}

impl Channel {
    pub(crate) fn new(device: &Bdev, core: &Core) -> Result<Channel, Error> {
        let geometry = device.geometry();
        let backend = match device.device() {
            Device::Null(_) => Backend::Null,
            Device::Mem(_) => Backend::Mem(MemChannel::new(core)),
            Device::File(file) => Backend::File(Box::new(FileChannel::new(file, core)?)),
            Device::Nbd(nbd) => Backend::Nbd(Box::new(NbdChannel::new(nbd, core))),
            Device::Failing { over, failures } => {
                let over = Channel::new(over, core)?;
                Backend::Failing(Box::new(FailingChannel::new(over, failures, core)))
            }
            Device::Delay { over, ns } => {
                Backend::Delay(Box::new(DelayChannel::new(Channel::new(over, core)?, *ns, core)))
            }
            Device::Limit { over, .. } => {
                Backend::Limit(Box::new(LimitChannel::new(Channel::new(over, core)?, core)))
            }
            Device::Dirty { over, map, .. } => {
                Backend::Dirty(Box::new(DirtyChannel::new(Channel::new(over, core)?, map, core)?))
            }
        };
        Ok(Channel {
            device: device.clone(),
            block_mask: u64::from(geometry.block_size) - 1,
            read_only: geometry.read_only,
            in_flight: 0,
            done: Vec::with_capacity(QUEUE_DEPTH),
            backend,
        })
    }

    /// Submits a request. Its tag comes back from [`Channel::poll`] exactly once. A range outside
    /// the device or not in whole blocks, segments that do not add up to the range, and a write to
    /// a read-only device come back as [`Status::IoError`].
    ///
    /// # Errors
    /// When [`QUEUE_DEPTH`] requests are in flight.
    ///
    /// # Safety
    /// The memory of the segments stays mapped, and writable for a read, until the tag has come
    /// back or, if the channel is dropped before that, as long as the value given to
    /// [`Channel::hold`] lives. Others may change the memory meanwhile; no Rust reference to it may
    /// exist.
    #[inline]
    pub unsafe fn submit(&mut self, io: &Io<'_>) -> Result<(), Full> {
        if self.in_flight >= QUEUE_DEPTH {
            return Err(Full);
        }
        self.in_flight += 1;
        if let Some(status) = self.answer(io) {
            self.done.push(Done { tag: io.tag, status });
            return Ok(());
        }
        // SAFETY: `answer` has checked the request, and the segments are valid by this function's
        // contract.
        if let Some(status) = unsafe { self.perform(io) } {
            self.done.push(Done { tag: io.tag, status });
            return Ok(());
        }
        match (&mut self.backend, self.device.device()) {
            // SAFETY: as above.
            (Backend::File(file), Device::File(device)) => unsafe {
                file.submit(device, io, &mut self.done);
            },
            // SAFETY: as above.
            (Backend::Nbd(nbd), _) => unsafe { nbd.submit(io, &mut self.done) },
            // SAFETY: as above.
            (Backend::Failing(failing), _) => unsafe { failing.submit(io, &mut self.done) },
            // SAFETY: as above.
            (Backend::Delay(delay), _) => unsafe { delay.submit(io, &mut self.done) },
            (Backend::Limit(limited), Device::Limit { limit, .. }) => {
                // SAFETY: as above.
                unsafe { limited.submit(limit, io, &mut self.done) };
            }
            // SAFETY: as above.
            (Backend::Dirty(dirty), Device::Dirty { map, .. }) => unsafe {
                dirty.submit(map, io, &mut self.done);
            },
            (
                Backend::Null
                | Backend::Mem(_)
                | Backend::File(_)
                | Backend::Limit(_)
                | Backend::Dirty(_),
                _,
            ) => unreachable!("`new` made the backend for this device"),
        }
        Ok(())
    }

    /// Performs a request if the device completes all of them at once: the null device and memory.
    /// It is not in flight then.
    ///
    /// # Safety
    /// As for [`Channel::submit`], and a channel of the same size, this or one above it, has found
    /// nothing wrong with the request ([`Channel::answer`]).
    #[inline(always)]
    pub(crate) unsafe fn perform(&mut self, io: &Io<'_>) -> Option<Status> {
        match (&mut self.backend, self.device.device()) {
            // It discards writes and leaves the memory of a read as it is.
            (Backend::Null, _) => Some(Status::Ok),
            // SAFETY: the range lies in the device and the segments are as long, and valid, by
            // this function's contract.
            (Backend::Mem(channel), Device::Mem(mem)) => Some(unsafe { channel.perform(mem, io) }),
            _ => None,
        }
    }

    /// Whether [`Channel::announce`] does anything.
    #[inline]
    pub fn heeds_announcements(&self) -> bool {
        matches!(self.backend, Backend::Mem(_))
    }

    /// Announces the read that will be submitted after the next request: a device in memory fetches
    /// its data into the processor's cache meanwhile.
    #[inline]
    pub fn announce(&self, offset: u64, len: u64) {
        if let Backend::Mem(mem) = &self.backend {
            mem.announce(offset, len);
        }
    }

    /// The answer to a request that needs no device.
    #[inline]
    fn answer(&self, io: &Io<'_>) -> Option<Status> {
        if io.kind == Kind::Flush {
            return None;
        }
        if self.read_only && io.kind != Kind::Read {
            return Some(Status::IoError);
        }
        let end = io.offset.checked_add(io.len);
        let inside = end.is_some_and(|end| end <= self.device.size_bytes());
        if !inside || (io.offset | io.len) & self.block_mask != 0 {
            return Some(Status::IoError);
        }
        if let Kind::Read | Kind::Write = io.kind {
            let mut sum = 0_u64;
            for segment in io.segments {
                sum = sum.saturating_add(segment.iov_len as u64);
            }
            if sum != io.len {
                return Some(Status::IoError);
            }
        }
        (io.len == 0).then_some(Status::Ok)
    }

    /// Appends completions to `done` and returns their number. Costs a read of memory if there are
    /// none. Must be called in every turn of the core.
    #[inline]
    pub fn poll(&mut self, done: &mut Vec<Done>) -> usize {
        let before = done.len();
        match &mut self.backend {
            Backend::File(file) => file.poll(done),
            Backend::Nbd(nbd) => nbd.poll(done),
            Backend::Failing(failing) => drop(failing.over.poll(done)),
            Backend::Delay(delay) => delay.poll(done),
            Backend::Limit(limited) => limited.poll(done),
            Backend::Dirty(dirty) => {
                if let Device::Dirty { map, .. } = self.device.device() {
                    dirty.poll(map, done);
                }
            }
            Backend::Null | Backend::Mem(_) => {}
        }
        done.append(&mut self.done);
        let n = done.len() - before;
        self.in_flight -= n;
        n
    }

    /// Whether [`Channel::poll`] would return something: for a poller that decides whether its core
    /// may sleep. Reads memory only.
    #[inline]
    pub fn ready(&self) -> bool {
        !self.done.is_empty()
            || match &self.backend {
                Backend::File(file) => file.ready(),
                Backend::Nbd(nbd) => nbd.ready(),
                Backend::Failing(failing) => failing.over.ready(),
                Backend::Delay(delay) => delay.ready(),
                Backend::Limit(limited) => limited.ready(),
                Backend::Dirty(dirty) => dirty.over.ready(),
                Backend::Null | Backend::Mem(_) => false,
            }
    }

    /// Requests submitted and not yet returned.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Sets the owner of the memory that requests submitted from now on point into. Every request
    /// in flight holds it, also when the channel is dropped.
    pub fn hold(&mut self, keep: Rc<dyn Any>) {
        match &mut self.backend {
            Backend::File(file) => file.hold(keep),
            Backend::Nbd(nbd) => nbd.hold(keep),
            Backend::Failing(failing) => failing.over.hold(keep),
            Backend::Delay(delay) => delay.over.hold(keep),
            Backend::Limit(limited) => limited.hold(keep),
            Backend::Dirty(dirty) => dirty.hold(keep),
            // Requests that complete immediately hold nothing.
            Backend::Null | Backend::Mem(_) => {}
        }
    }

    /// Requests that went through a buffer of the core's pool because the guest's memory was not
    /// aligned for direct I/O.
    pub fn bounced(&self) -> u64 {
        match &self.backend {
            Backend::File(file) => file.bounced(),
            Backend::Failing(failing) => failing.over.bounced(),
            Backend::Delay(delay) => delay.over.bounced(),
            Backend::Limit(limited) => limited.over.bounced(),
            Backend::Dirty(dirty) => dirty.over.bounced(),
            Backend::Null | Backend::Mem(_) | Backend::Nbd(_) => 0,
        }
    }

    /// The device of the channel.
    pub fn device(&self) -> &Bdev {
        &self.device
    }
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Channel({} requests in flight)", self.in_flight)
    }
}

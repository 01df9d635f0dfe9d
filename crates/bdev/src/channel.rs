//! A [`Channel`]: one core's way to a device.
//!
//! This is on the path of every request: no allocation, no task, no lock, and a `match` over the
//! devices instead of a call through a table.

use std::any::Any;
use std::rc::Rc;

use reactor::Core;

use crate::device::{Bdev, Device};
use crate::devices::file::FileChannel;
use crate::error::Error;
use crate::layers::delay::DelayChannel;
use crate::layers::dirty::DirtyChannel;
use crate::layers::failing::FailingChannel;
use crate::layers::limit::LimitChannel;

/// Requests that one channel may have under way.
pub const QUEUE_DEPTH: usize = 1024;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Read into the segments.
    Read,
    /// Write what the segments hold.
    Write,
    /// Make durable what was written by requests that had completed when this was submitted.
    Flush,
    /// The range is no longer needed. What it reads as afterwards says
    /// [`Geometry::zeroes_after_discard`](crate::Geometry::zeroes_after_discard).
    Discard,
    /// Make the range read as zeroes.
    WriteZeroes {
        /// Its room may be given back.
        unmap: bool,
    },
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Io<'a> {
    /// What to do.
    pub kind: Kind,
    /// Where, in bytes. Not looked at for a flush.
    pub offset: u64,
    /// How much, in bytes. Not looked at for a flush.
    pub len: u64,
    /// The memory of a read or a write; together as long as `len`.
    pub segments: &'a [libc::iovec],
    /// Comes back with the completion.
    pub tag: u64,
    /// It must be durable when it completes, whatever the device's own setting: for a guest that
    /// has switched the write cache off.
    pub through: bool,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It is done.
    Ok,
    /// It is not, and of a write any part may be; or it made no sense.
    IoError,
    /// The device cannot do such a thing.
    Unsupported,
    /// There is no room for it.
    NoSpace,
}

impl Status {
    pub(crate) fn of(errno: i32) -> Status {
        match errno {
            0 => Status::Ok,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Status::NoSpace,
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => Status::Unsupported,
            _ => Status::IoError,
        }
    }
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The request's.
    pub tag: u64,
    /// How it ended.
    pub status: Status,
}

/// The channel has [`QUEUE_DEPTH`] requests under way; nothing was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// One core's way to a device; see the crate's text.
pub struct Channel {
    device: Bdev,
    block_mask: u64,
    read_only: bool,
    /// Submitted, and not handed back.
    in_flight: usize,
    /// Completed at once, to be handed back.
    done: Vec<Done>,
    way: Way,
}

/// The device's own part of a channel.
enum Way {
    Null,
    Mem,
    File(Box<FileChannel>),
    Failing(Box<FailingChannel>),
    Delay(Box<DelayChannel>),
    Limit(Box<LimitChannel>),
    Dirty(Box<DirtyChannel>),
}

impl Channel {
    pub(crate) fn new(device: &Bdev, core: &Core) -> Result<Channel, Error> {
        let geometry = device.geometry();
        let way = match device.device() {
            Device::Null(_) => Way::Null,
            Device::Mem(_) => Way::Mem,
            Device::File(file) => Way::File(Box::new(FileChannel::new(file, core)?)),
            Device::Failing { over, failures } => {
                let over = Channel::new(over, core)?;
                Way::Failing(Box::new(FailingChannel::new(over, failures, core)))
            }
            Device::Delay { over, ns } => {
                Way::Delay(Box::new(DelayChannel::new(Channel::new(over, core)?, *ns, core)))
            }
            Device::Limit { over, .. } => {
                Way::Limit(Box::new(LimitChannel::new(Channel::new(over, core)?, core)))
            }
            Device::Dirty { over, .. } => {
                Way::Dirty(Box::new(DirtyChannel::new(Channel::new(over, core)?)))
            }
        };
        Ok(Channel {
            device: device.clone(),
            block_mask: u64::from(geometry.block_size) - 1,
            read_only: geometry.read_only,
            in_flight: 0,
            done: Vec::with_capacity(QUEUE_DEPTH),
            way,
        })
    }

    /// Submits a request. Its tag comes back from [`Channel::poll`] exactly once. A range outside
    /// the device, one that is not made of whole blocks, segments that are not as long as the
    /// range, and a write to a read-only device come back as [`Status::IoError`].
    ///
    /// # Errors
    /// When [`QUEUE_DEPTH`] requests are under way.
    ///
    /// # Safety
    /// The memory of the segments stays mapped, writable for a read, until the tag has come back
    /// or, if the channel is dropped before that, as long as what [`Channel::hold`] was given
    /// lives. Others may change it meanwhile; nobody may have a Rust reference to it.
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
        match (&mut self.way, self.device.device()) {
            (Way::Mem, Device::Mem(mem)) => {
                // SAFETY: the range lies in the device and the segments are as long: `answer`. The
                // segments are valid by this function's contract.
                let status = unsafe { mem.perform(io) };
                self.done.push(Done { tag: io.tag, status });
            }
            // SAFETY: as above.
            (Way::File(file), Device::File(device)) => unsafe {
                file.submit(device, io, &mut self.done);
            },
            // SAFETY: as above.
            (Way::Failing(failing), _) => unsafe { failing.submit(io, &mut self.done) },
            // SAFETY: as above.
            (Way::Delay(delay), _) => unsafe { delay.submit(io, &mut self.done) },
            (Way::Limit(limited), Device::Limit { limit, .. }) => {
                // SAFETY: as above.
                unsafe { limited.submit(limit, io, &mut self.done) };
            }
            // SAFETY: as above.
            (Way::Dirty(dirty), Device::Dirty { map, .. }) => unsafe {
                dirty.submit(map, io, &mut self.done);
            },
            // What is written goes nowhere, and memory that is read into stays as it is.
            _ => self.done.push(Done { tag: io.tag, status: Status::Ok }),
        }
        Ok(())
    }

    /// The answer to what needs no device.
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

    /// Appends what has completed to `done`, and says how much that was. Costs a look at memory
    /// when nothing has. To be called in every turn of the core.
    #[inline]
    pub fn poll(&mut self, done: &mut Vec<Done>) -> usize {
        let before = done.len();
        match &mut self.way {
            Way::File(file) => file.poll(done),
            Way::Failing(failing) => drop(failing.over.poll(done)),
            Way::Delay(delay) => delay.poll(done),
            Way::Limit(limited) => limited.poll(done),
            Way::Dirty(dirty) => {
                if let Device::Dirty { map, .. } = self.device.device() {
                    dirty.poll(map, done);
                }
            }
            Way::Null | Way::Mem => {}
        }
        done.append(&mut self.done);
        let n = done.len() - before;
        self.in_flight -= n;
        n
    }

    /// Whether [`Channel::poll`] would find something: for a poller that decides whether its core
    /// may sleep. Memory reads only.
    #[inline]
    pub fn ready(&self) -> bool {
        !self.done.is_empty()
            || match &self.way {
                Way::File(file) => file.ready(),
                Way::Failing(failing) => failing.over.ready(),
                Way::Delay(delay) => delay.ready(),
                Way::Limit(limited) => limited.ready(),
                Way::Dirty(dirty) => dirty.over.ready(),
                Way::Null | Way::Mem => false,
            }
    }

    /// Requests submitted and not handed back.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The owner of the memory that requests submitted from now on point into. Every request under
    /// way holds it, also when the channel is dropped.
    pub fn hold(&mut self, keep: Rc<dyn Any>) {
        match &mut self.way {
            Way::File(file) => file.hold(keep),
            Way::Failing(failing) => failing.over.hold(keep),
            Way::Delay(delay) => delay.over.hold(keep),
            Way::Limit(limited) => limited.hold(keep),
            Way::Dirty(dirty) => dirty.over.hold(keep),
            // What completes at once holds nothing.
            Way::Null | Way::Mem => {}
        }
    }

    /// Requests that went through a buffer of the core's pool, because the guest's memory was not
    /// aligned as direct I/O wants it.
    pub fn bounced(&self) -> u64 {
        match &self.way {
            Way::File(file) => file.bounced(),
            Way::Failing(failing) => failing.over.bounced(),
            Way::Delay(delay) => delay.over.bounced(),
            Way::Limit(limited) => limited.over.bounced(),
            Way::Dirty(dirty) => dirty.over.bounced(),
            Way::Null | Way::Mem => 0,
        }
    }

    /// The device it leads to.
    pub fn device(&self) -> &Bdev {
        &self.device
    }
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Channel({} requests under way)", self.in_flight)
    }
}

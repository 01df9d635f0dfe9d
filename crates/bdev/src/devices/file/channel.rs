//! One core's queue to a file. A request that is one operation is done here; the others become
//! jobs (`job.rs`).

use std::any::Any;
use std::collections::VecDeque;
use std::rc::Rc;

use reactor::{Core, FileDone, FileIo, FileQueue, MappedFile, SEGMENTS_MAX};

use super::FileDevice;
use super::job::Job;
use crate::devices::aio::{Again, Aio, Ended};
use crate::error::Error;
use crate::io::{Done, Io, Kind, QUEUE_DEPTH, Status};
use crate::mutant::{self, Mutant};
use crate::uri::Engine;

/// One core's queue to a file.
pub(crate) struct FileChannel {
    pub(super) core: Core,
    pub(super) queue: FileQueue,
    /// For reads and writes with `engine=aio`.
    aio: Option<Aio>,
    /// For reads with `engine=mmap`.
    mapped: Option<MappedFile>,
    fua: bool,
    pub(super) punch_hole: bool,
    pub(super) zero_range: bool,
    /// Bits that must be clear in a segment's address, and in its length.
    place_mask: usize,
    length_mask: usize,
    pub(super) keep: Option<Rc<dyn Any>>,
    pub(super) jobs: Vec<Job>,
    pub(super) free: Vec<u32>,
    /// Jobs that wait for a buffer, oldest first.
    pub(super) waiting: VecDeque<u32>,
    pub(super) buffers: usize,
    pub(super) bounced: u64,
    /// Slots of short Linux AIO transfers. Empty between calls.
    again: Vec<u32>,
    /// Tags of requests that are done and need a flush to become durable.
    pub(super) undurable: Vec<u64>,
    /// Tags of requests that the flush in flight covers; empty if there is none.
    covered: Vec<u64>,
}

/// Contexts of operations. The context of a job is its number plus one; this is a request that is
/// one operation.
const WHOLE: u32 = 0;
/// A write that is one operation and must be durable when it completes.
const FUA: u32 = u32::MAX;
/// The flush that makes such writes durable.
const GROUP: u32 = u32::MAX - 1;

impl FileChannel {
    pub fn new(device: &FileDevice, core: &Core) -> Result<FileChannel, Error> {
        let file = core.attach(&device.image.file);
        let on_threads = device.engine == Engine::Sync;
        let aio = match device.engine {
            Engine::Aio => {
                Some(Aio::new(core, &device.image.file, QUEUE_DEPTH).map_err(|error| {
                    let name = device.image.file.path().display();
                    Error::io(format!("{name}: cannot set up Linux AIO"), error)
                })?)
            }
            _ => None,
        };
        Ok(FileChannel {
            core: core.clone(),
            queue: file.queue(QUEUE_DEPTH, on_threads),
            aio,
            mapped: device
                .mapping
                .as_ref()
                .map(|mapping| MappedFile::new(file.clone(), Some(mapping.clone()))),
            fua: device.fua,
            punch_hole: device.image.info.punch_hole,
            zero_range: device.image.info.zero_range,
            place_mask: device.image.file.memory_alignment() - 1,
            length_mask: file.alignment() - 1,
            keep: None,
            jobs: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            buffers: 0,
            bounced: 0,
            again: Vec::new(),
            undurable: Vec::with_capacity(QUEUE_DEPTH),
            covered: Vec::with_capacity(QUEUE_DEPTH),
        })
    }

    pub fn hold(&mut self, keep: Rc<dyn Any>) {
        self.queue.hold(Some(keep.clone()));
        self.keep = Some(keep);
    }

    pub fn bounced(&self) -> u64 {
        self.bounced
    }

    #[inline]
    pub fn ready(&self) -> bool {
        self.queue.ready() > 0 || self.aio.as_ref().is_some_and(Aio::ready)
    }

    /// # Safety
    /// As for [`crate::Channel::submit`]; the range lies in the device.
    #[inline]
    pub unsafe fn submit(&mut self, device: &FileDevice, io: &Io<'_>, done: &mut Vec<Done>) {
        let fua = self.fua || io.fua;
        let offset = io.offset;
        let whole = match io.kind {
            Kind::Read if self.aligned(io.segments) => FileIo::Read { offset },
            Kind::Write if self.aligned(io.segments) => FileIo::Write { offset },
            // Every completed write is durable, so there is nothing to flush.
            Kind::Flush if self.fua => {
                done.push(Done { tag: io.tag, status: Status::Ok });
                return;
            }
            Kind::Flush => FileIo::SyncData,
            _ => return self.start(io, fua, done),
        };
        if let Some(mapped) = &self.mapped
            && io.kind == Kind::Read
            // SAFETY: the segments are valid by this function's contract, and as long as the range.
            && unsafe { mapped.read_segments_now(offset, io.len, io.segments) }
        {
            done.push(Done { tag: io.tag, status: Status::Ok });
            return;
        }
        let context = match whole {
            FileIo::Write { .. } if fua => FUA,
            _ => WHOLE,
        };
        // SAFETY: the segments are valid by this function's contract.
        if self.aio.is_some() && unsafe { self.stage_aio(device, whole, io, context, done) } {
            return;
        }
        // SAFETY: as above.
        let submitted = unsafe { self.queue.submit(whole, io.segments, io.tag, context) };
        if submitted.is_err() {
            // Unreachable: the queue has as many slots as the channel, and each request has one
            // operation.
            done.push(Done { tag: io.tag, status: Status::IoError });
        }
    }

    /// Hands a read or a write to Linux AIO. False if the reactor has to do it.
    ///
    /// # Safety
    /// As for `submit`.
    unsafe fn stage_aio(
        &mut self,
        device: &FileDevice,
        whole: FileIo,
        io: &Io<'_>,
        context: u32,
        done: &mut Vec<Done>,
    ) -> bool {
        let Some(aio) = &mut self.aio else { return false };
        // The reactor refuses writes to a poisoned file.
        if io.kind == Kind::Write && device.image.file.flush_failed() {
            return false;
        }
        // SAFETY: by this function's contract.
        let staged = unsafe { aio.stage(whole, io.segments, io.tag, context, self.keep.as_ref()) };
        if staged && aio.is_batch() {
            let undurable = &mut self.undurable;
            aio.submit(|ended| end(ended, undurable, done));
        }
        staged
    }

    /// Takes the completions of Linux AIO, and submits the gathered operations.
    fn poll_aio(&mut self, done: &mut Vec<Done>) {
        let Some(aio) = &mut self.aio else { return };
        let mut short = None;
        let (again, undurable) = (&mut self.again, &mut self.undurable);
        aio.take(|ended| match ended {
            Ended::With(ended) => end(ended, undurable, done),
            Ended::Short { slot } => again.push(slot),
        });
        while let Some(slot) = again.pop() {
            let Again { io, segments, tag, context } = aio.again(slot);
            self.queue.hold(aio.keep(slot));
            // SAFETY: the request's tag has not come back, so its segments are valid. The operation
            // holds the same owner as the first attempt.
            if unsafe { self.queue.submit(io, segments, tag, context) }.is_err() {
                short = Some(tag);
            }
            self.queue.hold(self.keep.clone());
            aio.release(slot);
        }
        // Unreachable: see `submit`.
        done.extend(short.map(|tag| Done { tag, status: Status::IoError }));
        aio.submit(|ended| end(ended, undurable, done));
    }

    #[inline]
    fn aligned(&self, segments: &[libc::iovec]) -> bool {
        let (place, length) = segments.iter().fold((0, 0), |(place, length), segment| {
            (place | segment.iov_base.addr(), length | segment.iov_len)
        });
        place & self.place_mask == 0
            && length & self.length_mask == 0
            && segments.len() <= SEGMENTS_MAX
    }

    #[inline]
    pub fn poll(&mut self, done: &mut Vec<Done>) {
        if self.aio.is_some() {
            self.poll_aio(done);
        }
        if self.queue.ready() > 0 {
            self.reap(done);
        }
        if !self.waiting.is_empty() {
            self.start_waiting(done);
        }
        if !self.undurable.is_empty() && self.covered.is_empty() {
            self.flush_group(done);
        }
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let mut jobs = false;
        let (all, undurable, covered) = (&mut self.jobs, &mut self.undurable, &mut self.covered);
        self.queue.take(|ended| match ended.context {
            WHOLE | FUA => end(ended, undurable, done),
            GROUP => {
                let status = Status::of(ended.errno);
                if mutant::is(Mutant::FlushCoversLater) {
                    covered.append(undurable);
                }
                done.extend(covered.drain(..).map(|tag| Done { tag, status }));
            }
            job => {
                jobs = true;
                all[job as usize - 1].ended = Some(ended.errno);
            }
        });
        if jobs {
            self.step_jobs(done);
        }
    }

    /// Flushes for all requests that are done and not durable.
    fn flush_group(&mut self, done: &mut Vec<Done>) {
        std::mem::swap(&mut self.undurable, &mut self.covered);
        // SAFETY: a flush has no memory.
        let submitted = unsafe { self.queue.submit(FileIo::SyncData, &[], 0, GROUP) };
        if submitted.is_err() {
            // Unreachable: the requests that it covers have returned their places in the queue.
            let status = Status::IoError;
            done.extend(self.covered.drain(..).map(|tag| Done { tag, status }));
        }
    }
}

/// Ends a request that is one operation, apart from the flush that it may need.
fn end(ended: FileDone, undurable: &mut Vec<u64>, done: &mut Vec<Done>) {
    let FileDone { tag, context, errno } = ended;
    match Status::of(errno) {
        Status::Ok if context == FUA && !mutant::is(Mutant::AcknowledgesEarly) => {
            undurable.push(tag)
        }
        status => done.push(Done { tag, status }),
    }
}

impl Drop for FileChannel {
    fn drop(&mut self) {
        if let Some(aio) = self.aio.take() {
            aio.leave();
        }
    }
}

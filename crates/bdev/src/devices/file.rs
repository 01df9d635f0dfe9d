//! Files and block devices of the host.
//!
//! Most requests are one operation of the reactor on the guest's own memory. The others become a
//! *job* of several steps:
//!
//! - A request whose memory is not aligned for direct I/O goes through a buffer of the core's pool,
//!   in pieces ([`PIECE`]). If the core's pool is used up, the request waits;
//! - For zeroes, the file deallocates the range, or zeroes it by one call, or zeroes are written:
//!   the first of these that the file supports.
//!
//! A request that must be durable when it completes (`write=through`, or a guest without a write
//! cache) is done and then flushed. One flush is in flight at a time. It covers all requests that
//! were done before it was submitted, and they get its outcome. Requests that are done meanwhile
//! wait for the next flush. One call with `RWF_DSYNC` for each write was slower at nearly every
//! depth: see docs/BENCHMARKS.md.
//!
//! A failed flush poisons the file: every later write and flush fails, on all cores, until the
//! device is opened again, because the kernel may have dropped any of the data.
//!
//! If the length of a file is not a multiple of the block, the device ends with the last whole
//! block.

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;

use reactor::{Core, FileDone, FileIo, FileQueue, Image, ImageOpening, Mode, SEGMENTS_MAX};

use crate::channel::{Done, Io, Kind, QUEUE_DEPTH, Status};
use crate::device::{Geometry, SEGMENTS};
use crate::devices::aio::{Again, Aio, Ended};
use crate::devices::mapped::Mapping;
use crate::error::{Error, ErrorKind};
use crate::mutant::{self, Mutant};
use crate::uri::{Base, Engine};

/// Size of a buffer, and of one write of zeroes, in bytes.
const PIECE: usize = 256 << 10;
/// Maximum number of buffers that one channel uses.
const BUFFERS_MAX: usize = 64;
/// How long a job waits before it tries again to get a buffer.
const RETRY_NS: u64 = 1_000_000;
/// Longest discard.
const DISCARD_MAX: u64 = 256 << 20;
const ZEROES_MAX: u64 = 64 << 20;

/// The source of zeroes where the file cannot zero a range.
#[repr(align(4096))]
struct Zeroes([u8; 64 << 10]);
static ZEROES: Zeroes = Zeroes([0; 64 << 10]);

/// An open file, shared by all cores.
pub(crate) struct FileDevice {
    image: Image,
    /// `Uring` in a simulated world, whatever was requested.
    engine: Engine,
    through: bool,
    mapping: Option<Mapping>,
}

/// Opens the image of a file, or takes an open one. For an open one the caller may know whether it
/// supports punching holes.
pub(crate) async fn open_image(
    core: &Core,
    base: &Base,
    open: Option<(OwnedFd, Option<bool>)>,
) -> Result<Image, Error> {
    let Base::File { path, engine, read_only, direct, lock, .. } = base else {
        unreachable!("only files have images")
    };
    let mode = match direct {
        Some(false) => Mode::Buffered,
        _ if *engine == Engine::Mmap => Mode::Buffered,
        _ => Mode::Direct,
    };
    let how = ImageOpening { read_only: *read_only, mode, lock: *lock };
    let image = match open {
        None => core.open_image(path, how).await,
        Some((open, holes)) => core.take_image(path, how, open, holes).await,
    };
    image.map_err(|error| Error::io(format!("cannot open {}", path.display()), error))
}

impl FileDevice {
    /// Opens the file, or takes the open file that came from another process.
    pub async fn open(
        core: &Core,
        base: &Base,
        open: Option<(OwnedFd, Option<bool>)>,
    ) -> Result<(FileDevice, Geometry), Error> {
        let Base::File { path, engine, through, read_only, direct, block, .. } = base else {
            unreachable!("only files are opened here")
        };
        let name = path.display();
        let image = open_image(core, base, open).await?;
        let must_be_direct = *direct == Some(true) || *engine == Engine::Aio;
        if must_be_direct && image.file.alignment() == 1 {
            let text = format!("{name}: its file system does not support direct I/O");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let least = image.info.block_size;
        let block_size = block.unwrap_or(least);
        if block_size < least {
            let text =
                format!("{name}: block={block_size} is smaller than its block of {least} bytes");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let size_bytes = image.file.size() / u64::from(block_size) * u64::from(block_size);
        let info = image.info;
        let physical_block_size = info.physical_block_size.max(block_size);
        let geometry = Geometry {
            size_bytes,
            block_size,
            physical_block_size,
            min_io: physical_block_size,
            opt_io: info.optimal_io,
            read_only: *read_only,
            volatile_cache: !through,
            discard: info.punch_hole,
            write_zeroes: !read_only,
            zeroes_after_discard: info.punch_hole,
            max_segments: SEGMENTS,
            discard_alignment: physical_block_size,
            discard_max: DISCARD_MAX,
            write_zeroes_max: ZEROES_MAX,
        };
        let engine = if core.is_simulated() { Engine::Uring } else { *engine };
        let mapping = match engine {
            Engine::Mmap => image.file.host_fd().and_then(|fd| Mapping::new(fd, size_bytes)),
            _ => None,
        };
        Ok((FileDevice { image, engine, through: *through, mapping }, geometry))
    }

    /// The open file, which holds the lock.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.image.file.descriptor()
    }

    /// Whether a flush has failed, so that nothing more is written.
    pub fn flush_failed(&self) -> bool {
        self.image.file.flush_failed()
    }

    pub fn set_flush_failed(&self) {
        self.image.file.set_flush_failed();
    }

    pub async fn resize(&self, core: &Core, size: u64) -> Result<(), Error> {
        let file = core.attach(&self.image.file);
        let text = || format!("cannot give {} {size} bytes", self.image.file.path().display());
        if self.image.info.block_device {
            let there = core.measure(&self.image.file).await;
            let there = there.map_err(|error| Error::io(text(), error))?;
            if there < size {
                let text = format!("{}: it has {there}", text());
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            return Ok(());
        }
        file.set_len(size).await.map_err(|error| Error::io(text(), error))?;
        file.sync_data().await.map_err(|error| Error::io(text(), error))
    }
}

/// One core's queue to a file.
pub(crate) struct FileChannel {
    core: Core,
    queue: FileQueue,
    /// For reads and writes with `engine=aio`.
    aio: Option<Aio>,
    through: bool,
    punch_hole: bool,
    zero_range: bool,
    /// Bits that must be clear in a segment's address, and in its length.
    place_mask: usize,
    length_mask: usize,
    keep: Option<Rc<dyn Any>>,
    jobs: Vec<Job>,
    free: Vec<u32>,
    /// Jobs that wait for a buffer, oldest first.
    waiting: VecDeque<u32>,
    buffers: usize,
    bounced: u64,
    /// Slots of short Linux AIO transfers. Empty between calls.
    again: Vec<u32>,
    /// Tags of requests that are done and need a flush to become durable.
    undurable: Vec<u64>,
    /// Tags of requests that the flush in flight covers; empty if there is none.
    covered: Vec<u64>,
}

/// A request of several steps.
#[derive(Default)]
struct Job {
    tag: u64,
    step: Step,
    offset: u64,
    len: u64,
    /// Bytes done of a request that is processed in pieces.
    at: u64,
    through: bool,
    segments: Vec<libc::iovec>,
    /// The owner of the segments, if the job has segments.
    keep: Option<Rc<dyn Any>>,
    buffer: Option<Bounce>,
    /// The errno of the step that has ended.
    ended: Option<i32>,
}

/// The current step of a job.
#[derive(Clone, Copy, Default)]
enum Step {
    #[default]
    Free,
    /// Reading a piece into the buffer.
    Read,
    /// Writing a piece from the buffer.
    Write,
    /// Deallocating the range, for a discard.
    Discard,
    /// Deallocating the range, which must then read as zeroes.
    Punch,
    /// Zeroing the range by one call.
    Zero,
    /// Writing a piece of zeroes.
    WriteZeroes,
}

/// A buffer that the operation in flight holds as well, with the owner of the request's memory.
/// Only the kernel and `copy` touch its bytes.
#[derive(Clone)]
struct Bounce {
    ptr: *mut u8,
    buf: Rc<dyn Any>,
}

/// Contexts of operations. The context of a job is its number plus one; this is a request that is
/// one operation.
const WHOLE: u32 = 0;
/// A write that is one operation and must be durable when it completes.
const THROUGH: u32 = u32::MAX;
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
            through: device.through,
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
        let through = self.through || io.through;
        let offset = io.offset;
        let whole = match io.kind {
            Kind::Read if self.aligned(io.segments) => FileIo::Read { offset },
            Kind::Write if self.aligned(io.segments) => FileIo::Write { offset },
            // Every completed write is durable, so there is nothing to flush.
            Kind::Flush if self.through => {
                done.push(Done { tag: io.tag, status: Status::Ok });
                return;
            }
            Kind::Flush => FileIo::SyncData,
            _ => return self.start(io, through, done),
        };
        if let Some(mapping) = &device.mapping
            && io.kind == Kind::Read
            // SAFETY: the segments are valid by this function's contract, and as long as the range.
            && unsafe { mapping.read(offset, io.len, io.segments) }
        {
            done.push(Done { tag: io.tag, status: Status::Ok });
            return;
        }
        let context = match whole {
            FileIo::Write { .. } if through => THROUGH,
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

    /// Starts a request of several steps.
    #[cold]
    fn start(&mut self, io: &Io<'_>, through: bool, done: &mut Vec<Done>) {
        let (step, bounces) = match io.kind {
            Kind::Flush => unreachable!("a flush is one operation"),
            Kind::Read => (Step::Read, true),
            Kind::Write => (Step::Write, true),
            Kind::Discard if !self.punch_hole => {
                done.push(Done { tag: io.tag, status: Status::Unsupported });
                return;
            }
            Kind::Discard => (Step::Discard, false),
            Kind::WriteZeroes { unmap: true } if self.punch_hole => (Step::Punch, false),
            Kind::WriteZeroes { .. } if self.zero_range => (Step::Zero, false),
            Kind::WriteZeroes { .. } => (Step::WriteZeroes, false),
        };
        let number = self.free.pop().unwrap_or_else(|| {
            self.jobs.push(Job::default());
            (self.jobs.len() - 1) as u32
        });
        let job = &mut self.jobs[number as usize];
        (job.tag, job.step) = (io.tag, step);
        job.through = through && io.kind != Kind::Read;
        (job.offset, job.len, job.at) = (io.offset, io.len, 0);
        job.segments.clear();
        job.segments.extend_from_slice(io.segments);
        if bounces {
            job.keep.clone_from(&self.keep);
            self.bounced += 1;
            self.waiting.push_back(number);
            self.find_buffers(done);
        } else {
            self.go_on(number, done);
        }
    }

    /// Continues jobs that wait for a buffer.
    fn find_buffers(&mut self, done: &mut Vec<Done>) {
        while let Some(&number) = self.waiting.front() {
            let job = &mut self.jobs[number as usize];
            let len = (job.len as usize).min(PIECE);
            if !self.core.pool().could_hold(len) {
                self.waiting.pop_front();
                self.finish(number, Status::IoError, done);
                continue;
            }
            if self.buffers >= BUFFERS_MAX {
                // The completion of another job calls this function again.
                return;
            }
            let Some(mut buf) = self.core.pool().alloc_reclaiming(len) else {
                self.core.turn_at(self.core.now_ns() + RETRY_NS);
                return;
            };
            let ptr = buf.as_mut_ptr();
            job.buffer = Some(Bounce { ptr, buf: Rc::new((buf, job.keep.clone())) });
            self.buffers += 1;
            self.waiting.pop_front();
            self.go_on(number, done);
        }
    }

    /// Submits the next step of a job.
    fn go_on(&mut self, number: u32, done: &mut Vec<Done>) {
        let job = &self.jobs[number as usize];
        let (offset, len) = (job.offset + job.at, (job.len - job.at).min(PIECE as u64) as usize);
        let mut pieces = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 4];
        let (io, segments) = match job.step {
            Step::Read | Step::Write => {
                let Some(bounce) = &job.buffer else {
                    unreachable!("a job that reads or writes has a buffer")
                };
                self.queue.hold(Some(bounce.buf.clone()));
                if let Step::Write = job.step {
                    // SAFETY: the request is a write whose tag has not come back, so its segments
                    // are valid for reads. The buffer holds a piece and nothing else uses it now.
                    unsafe { copy(&job.segments, job.at, bounce.ptr, len, false) };
                }
                pieces[0] = libc::iovec { iov_base: bounce.ptr.cast(), iov_len: len };
                let io = match job.step {
                    Step::Read => FileIo::Read { offset },
                    _ => FileIo::Write { offset },
                };
                (io, 1)
            }
            Step::WriteZeroes => {
                let mut left = len;
                let mut n = 0;
                for piece in &mut pieces {
                    let take = left.min(ZEROES.0.len());
                    let zeroes = ZEROES.0.as_ptr().cast_mut().cast();
                    *piece = libc::iovec { iov_base: zeroes, iov_len: take };
                    n += usize::from(take > 0);
                    left -= take;
                }
                (FileIo::Write { offset }, n)
            }
            Step::Discard | Step::Punch => {
                (FileIo::PunchHole { offset: job.offset, len: job.len }, 0)
            }
            Step::Zero => (FileIo::ZeroRange { offset: job.offset, len: job.len }, 0),
            Step::Free => unreachable!("a job that goes on has a step"),
        };
        // SAFETY: the memory is the job's buffer, which the operation holds, or it is static and
        // only read. The queue returns this job's earlier operation before it takes this one.
        let submitted = unsafe { self.queue.submit(io, &pieces[..segments], 0, number + 1) };
        self.queue.hold(self.keep.clone());
        if submitted.is_err() {
            // Unreachable: see `submit`.
            self.finish(number, Status::IoError, done);
        }
    }

    /// Handles the end of a job's step.
    #[cold]
    fn stepped(&mut self, number: u32, errno: i32, done: &mut Vec<Done>) {
        let job = &mut self.jobs[number as usize];
        let status = Status::of(errno);
        let next = match (job.step, status) {
            (Step::Read, Status::Ok) => {
                let len = (job.len - job.at).min(PIECE as u64) as usize;
                if let Some(bounce) = &job.buffer {
                    // SAFETY: the request is a read whose tag has not come back, so its segments
                    // are valid for writes. The read into the buffer is done.
                    unsafe { copy(&job.segments, job.at, bounce.ptr, len, true) };
                }
                job.at += len as u64;
                (job.at < job.len).then_some(Step::Read)
            }
            (Step::Write | Step::WriteZeroes, Status::Ok) => {
                job.at += (job.len - job.at).min(PIECE as u64);
                (job.at < job.len).then_some(job.step)
            }
            (Step::Punch, Status::Unsupported) if self.zero_range => Some(Step::Zero),
            (Step::Punch | Step::Zero, Status::Unsupported) => Some(Step::WriteZeroes),
            _ => None,
        };
        match next {
            Some(step) => {
                job.step = step;
                self.go_on(number, done);
            }
            None => self.finish(number, status, done),
        }
    }

    fn finish(&mut self, number: u32, status: Status, done: &mut Vec<Done>) {
        let job = &mut self.jobs[number as usize];
        let tag = job.tag;
        match status {
            Status::Ok if job.through && !mutant::is(Mutant::AcknowledgesEarly) => {
                self.undurable.push(tag)
            }
            status => done.push(Done { tag, status }),
        }
        job.step = Step::Free;
        job.keep = None;
        self.buffers -= usize::from(job.buffer.take().is_some());
        self.free.push(number);
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
            self.find_buffers(done);
        }
        if !self.undurable.is_empty() && self.covered.is_empty() {
            self.flush_group(done);
        }
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let mut jobs = false;
        let (all, undurable, covered) = (&mut self.jobs, &mut self.undurable, &mut self.covered);
        self.queue.take(|ended| match ended.context {
            WHOLE | THROUGH => end(ended, undurable, done),
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

    #[cold]
    fn step_jobs(&mut self, done: &mut Vec<Done>) {
        for number in 0..self.jobs.len() {
            if let Some(errno) = self.jobs[number].ended.take() {
                self.stepped(number as u32, errno, done);
            }
        }
    }
}

/// Ends a request that is one operation, apart from the flush that it may need.
fn end(ended: FileDone, undurable: &mut Vec<u64>, done: &mut Vec<Done>) {
    let FileDone { tag, context, errno } = ended;
    match Status::of(errno) {
        Status::Ok if context == THROUGH && !mutant::is(Mutant::AcknowledgesEarly) => {
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

/// Copies `len` bytes between a buffer and the segments, from `skip` bytes into the segments on.
///
/// # Safety
/// The buffer is valid for `len` bytes, the segments as the direction requires; they do not
/// overlap.
unsafe fn copy(segments: &[libc::iovec], skip: u64, buffer: *mut u8, len: usize, out: bool) {
    let (mut skip, mut done) = (skip as usize, 0);
    for segment in segments {
        let from = skip.min(segment.iov_len);
        let n = (segment.iov_len - from).min(len - done);
        skip -= from;
        // SAFETY: `from + n` is at most the segment's length and `done + n` at most `len`.
        unsafe {
            let memory = segment.iov_base.cast::<u8>().add(from);
            let piece = buffer.add(done);
            let (source, target) = if out { (piece, memory) } else { (memory, piece) };
            std::ptr::copy_nonoverlapping(source, target, n);
        }
        done += n;
    }
}

//! Requests of several steps: unaligned memory, which goes through a buffer, and zeroes.

use std::any::Any;
use std::rc::Rc;

use reactor::FileIo;

use super::channel::FileChannel;
use crate::io::{Done, Io, Kind, Status};
use crate::mutant::{self, Mutant};

/// Size of a buffer, and of one write of zeroes, in bytes.
const PIECE: usize = 256 << 10;
/// Maximum number of buffers that one channel uses.
const BUFFERS_MAX: usize = 64;
/// How long a job waits before it tries again to get a buffer.
const RETRY_NS: u64 = 1_000_000;

/// The source of zeroes where the file cannot zero a range.
#[repr(align(4096))]
struct Zeroes([u8; 64 << 10]);
static ZEROES: Zeroes = Zeroes([0; 64 << 10]);

/// A request of several steps.
#[derive(Default)]
pub(super) struct Job {
    tag: u64,
    step: Step,
    offset: u64,
    len: u64,
    /// Bytes done of a request that is processed in pieces.
    at: u64,
    fua: bool,
    segments: Vec<libc::iovec>,
    /// The owner of the segments, if the job has segments.
    keep: Option<Rc<dyn Any>>,
    buffer: Option<Bounce>,
    /// The errno of the step that has ended.
    pub(super) ended: Option<i32>,
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
/// Only the kernel and `copy_segments` touch its bytes.
#[derive(Clone)]
struct Bounce {
    ptr: *mut u8,
    buf: Rc<dyn Any>,
}

impl FileChannel {
    /// Starts a request of several steps.
    #[cold]
    pub(super) fn start(&mut self, io: &Io<'_>, fua: bool, done: &mut Vec<Done>) {
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
        job.fua = fua && io.kind != Kind::Read;
        (job.offset, job.len, job.at) = (io.offset, io.len, 0);
        job.segments.clear();
        job.segments.extend_from_slice(io.segments);
        if bounces {
            job.keep.clone_from(&self.keep);
            self.bounced += 1;
            self.waiting.push_back(number);
            self.start_waiting(done);
        } else {
            self.submit_step(number, done);
        }
    }

    /// Continues jobs that wait for a buffer.
    pub(super) fn start_waiting(&mut self, done: &mut Vec<Done>) {
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
            self.submit_step(number, done);
        }
    }

    /// Submits the next step of a job.
    fn submit_step(&mut self, number: u32, done: &mut Vec<Done>) {
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
                    unsafe { copy_segments(&job.segments, job.at, bounce.ptr, len, false) };
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
            Step::Free => unreachable!("a job in progress has a step"),
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
    fn end_step(&mut self, number: u32, errno: i32, done: &mut Vec<Done>) {
        let job = &mut self.jobs[number as usize];
        let status = Status::of(errno);
        let next = match (job.step, status) {
            (Step::Read, Status::Ok) => {
                let len = (job.len - job.at).min(PIECE as u64) as usize;
                if let Some(bounce) = &job.buffer {
                    // SAFETY: the request is a read whose tag has not come back, so its segments
                    // are valid for writes. The read into the buffer is done.
                    unsafe { copy_segments(&job.segments, job.at, bounce.ptr, len, true) };
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
                self.submit_step(number, done);
            }
            None => self.finish(number, status, done),
        }
    }

    fn finish(&mut self, number: u32, status: Status, done: &mut Vec<Done>) {
        let job = &mut self.jobs[number as usize];
        let tag = job.tag;
        match status {
            Status::Ok if job.fua && !mutant::is(Mutant::AcknowledgesEarly) => {
                self.undurable.push(tag)
            }
            status => done.push(Done { tag, status }),
        }
        job.step = Step::Free;
        job.keep = None;
        self.buffers -= usize::from(job.buffer.take().is_some());
        self.free.push(number);
    }

    #[cold]
    pub(super) fn step_jobs(&mut self, done: &mut Vec<Done>) {
        for number in 0..self.jobs.len() {
            if let Some(errno) = self.jobs[number].ended.take() {
                self.end_step(number as u32, errno, done);
            }
        }
    }
}

/// Copies `len` bytes between a buffer and the segments, from `skip` bytes into the segments on.
///
/// # Safety
/// The buffer is valid for `len` bytes, the segments as the direction requires; they do not
/// overlap.
pub(crate) unsafe fn copy_segments(
    segments: &[libc::iovec],
    skip: u64,
    buffer: *mut u8,
    len: usize,
    out: bool,
) {
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

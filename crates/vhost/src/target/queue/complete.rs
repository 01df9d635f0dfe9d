//! From the device back to the ring.

use bdev::Kind;

use super::Queue;
use super::submit::{Cut, IS_PIECE};
use crate::ring::request::{Finished, Request, Status};
use crate::target::observer::{self, DiskEvent};
use crate::target::trouble::OnError;

/// Whether the device has failed a request.
fn is_failure(status: bdev::Status) -> bool {
    matches!(status, bdev::Status::IoError | bdev::Status::NoSpace)
}

impl Queue {
    /// Completes what the device has finished and what was answered without it.
    #[inline]
    pub(super) fn complete(&mut self) {
        self.check_memory();
        let now = match self.done.is_empty() {
            true => 0,
            false => self.core.now_exact_ns(),
        };
        let mut failed = None;
        let on_error = self.trouble.on_error();
        let waits = {
            // A broken ring has dropped its requests, and submits none again.
            let keeps = self.ring.broken().is_none() && (!self.stopping || self.leaves_failed());
            move |status| on_error == OnError::Pause && keeps && is_failure(status)
        };
        for mut done in self.done.drain(..) {
            self.share.release(done.tag, now);
            // `submit_now` made the tag from a `u16`.
            let tag = done.tag as u16;
            let Request { kind, len, .. } = self.ring.request(tag);
            if done.tag & IS_PIECE != 0 {
                let cut = &mut self.cuts[usize::from(tag)];
                cut.in_flight -= 1;
                if cut.status == bdev::Status::Ok {
                    cut.status = done.status;
                }
                if cut.in_flight > 0 || (cut.at < len && !waits(cut.status)) {
                    continue;
                }
                done.status = cut.status;
            }
            // Every device reads, writes and flushes: one that says that it cannot has failed.
            if done.status == bdev::Status::Unsupported
                && matches!(kind, Kind::Read | Kind::Write | Kind::Flush)
            {
                done.status = bdev::Status::IoError;
            }
            if waits(done.status) {
                // The rest of a long request begins again with its beginning.
                if std::mem::replace(&mut self.cuts[usize::from(tag)], Cut::NEW).at < len {
                    self.deferred.retain(|deferred| *deferred != tag);
                    self.limits.begun();
                }
                self.stats.failed(kind, done.status == bdev::Status::NoSpace);
                failed = Some((tag, done.status));
                self.failed.push(tag);
                continue;
            }
            let begun = self.begun_ns[usize::from(tag)];
            self.stats.of(kind).latency.add(now.saturating_sub(begun));
            let status = match done.status {
                bdev::Status::Ok => Status::Ok,
                bdev::Status::Unsupported => Status::Unsupported,
                bdev::Status::IoError | bdev::Status::NoSpace => {
                    self.stats.failed(kind, done.status == bdev::Status::NoSpace);
                    failed = Some((tag, done.status));
                    match on_error {
                        OnError::Ignore => Status::Ok,
                        OnError::Report | OnError::Pause => Status::IoError,
                    }
                }
            };
            self.finished.push(Finished { tag, status });
        }
        if let Some((tag, status)) = failed {
            if !self.told_flush_failed && self.device.flush_failed() {
                self.told_flush_failed = true;
                observer::flush_failed(&self.core, self.home);
            }
            self.report_failure(tag, status);
            self.pause(status);
        }
        if self.popped_before > 0 {
            for nth in 0..self.finished.len() {
                self.forget_memory_of(self.finished[nth].tag);
            }
        }
        let given = self.ring.complete(&self.memory, self.log.as_deref(), &self.finished);
        self.finished.clear();
        self.stats.completed(given as u64);
        self.call_guest();
    }

    /// Interrupts the guest, if it wants that.
    pub(super) fn call_guest(&mut self) {
        if self.ring.should_signal()
            && let Some(call) = &self.call
        {
            self.stats.signals.add(1);
            call.signal();
        }
    }

    /// Releases the old memory of a request that is completed or dropped, if it has any. Marks what
    /// it wrote there in the dirty log: only the old table can translate the addresses.
    #[cold]
    pub(super) fn forget_memory_of(&mut self, tag: u16) {
        let Some(guard) = self.popped_with[usize::from(tag)].take() else { return };
        self.popped_before -= 1;
        let request = self.ring.request(tag);
        if let (Some(log), Kind::Read) = (&self.log, request.kind) {
            guard.memory.log_segments(request.segments, log);
        }
    }

    /// Pauses the disk if requests wait because the device has failed them.
    #[cold]
    fn pause(&mut self, status: bdev::Status) {
        if !self.failed.is_empty() && !self.stopping && self.trouble.pause() {
            let no_space = status == bdev::Status::NoSpace;
            let disk = &*self.disk_name;
            tracing::error!(disk, "the disk has paused: its requests wait for `disk resume`");
            self.tell(DiskEvent::Paused { no_space });
        }
    }

    /// Logs a failure of the device; of several in one batch, the last one.
    #[cold]
    pub(super) fn report_failure(&self, tag: u16, status: bdev::Status) {
        let full = status == bdev::Status::NoSpace;
        let limit = if full { &self.log_limits.full } else { &self.log_limits.failed };
        let Some(permit) = limit.permit(self.core.now_ns()) else { return };
        let Request { kind, offset, len, .. } = self.ring.request(tag);
        let why = if full { "no space left" } else { "an I/O error" };
        let (disk, ring, left_out) = (&*self.disk_name, self.index, permit.left_out);
        tracing::error!(
            disk,
            ring,
            offset,
            len,
            left_out,
            "the device failed a request ({kind:?}): {why}"
        );
        self.tell(DiskEvent::DeviceError { ring, kind, offset, len, no_space: full });
    }
}

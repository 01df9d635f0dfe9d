//! `error:` makes requests to a device fail: by kind, range, count and chance.
//!
//! It may also panic, as a bug would, to test what happens then.
//!
//! A failing request never reaches the device, so a failed write writes nothing. Each channel
//! counts for itself.

use reactor::Core;

use crate::channel::Channel;
use crate::io::{Done, Io, Kind, Status};
use crate::uri::{Failures, Outcome};

pub(crate) struct FailingChannel {
    pub over: Channel,
    core: Core,
    failures: Failures,
    /// Requests of the chosen kinds that touch the range.
    seen: u64,
    failed: u64,
}

impl FailingChannel {
    pub fn new(over: Channel, failures: &Failures, core: &Core) -> FailingChannel {
        let failures = failures.clone();
        FailingChannel { over, core: core.clone(), failures, seen: 0, failed: 0 }
    }

    /// # Safety
    /// As for [`Channel::submit`].
    #[inline]
    pub unsafe fn submit(&mut self, io: &Io<'_>, done: &mut Vec<Done>) {
        if self.fails(io) {
            let status = match self.failures.outcome {
                Outcome::Fails(status) => status,
                Outcome::Panics => panic!("a request of an error: device with status=panic"),
            };
            done.push(Done { tag: io.tag, status });
            return;
        }
        // SAFETY: by this function's contract.
        if unsafe { self.over.submit(io) }.is_err() {
            // Unreachable: the lower channel takes as many requests as the one above it.
            done.push(Done { tag: io.tag, status: Status::IoError });
        }
    }

    fn fails(&mut self, io: &Io<'_>) -> bool {
        let of = &self.failures;
        let touches = io.kind == Kind::Flush
            || (io.offset < of.range.end && of.range.start < io.offset.saturating_add(io.len));
        if !of.kinds[io.kind.index()] || !touches || self.failed >= of.count {
            return false;
        }
        self.seen += 1;
        let fails = self.seen.is_multiple_of(of.every)
            && self.core.random_u64() % 1_000_000 < u64::from(of.per_million);
        self.failed += u64::from(fails);
        fails
    }
}

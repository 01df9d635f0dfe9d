//! From the ring to the device: whole requests, and long ones in pieces.

use bdev::{Io, Kind, QUEUE_DEPTH};
use reactor::Core;

use super::Queue;
use crate::target::limits::{Piece, RingLimits};
use crate::target::share::{PIECE_MIN, TICKET_SHIFT, Throttled, cost};

/// The progress of a request that is submitted in pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// Bytes submitted.
    pub(super) at: u64,
    /// Pieces at the device.
    pub(super) in_flight: u32,
    /// The first failure of the completed pieces.
    pub(super) status: bdev::Status,
}

impl Cut {
    pub(super) const NEW: Cut = Cut { at: 0, in_flight: 0, status: bdev::Status::Ok };
}

/// In the device's tag: this is a piece. The bits below are the request's tag, those above the
/// share's ticket.
pub(super) const IS_PIECE: u64 = 1 << 16;
const _: () = assert!(IS_PIECE < 1 << TICKET_SHIFT);

impl Queue {
    /// Submits a request, or as much of it as possible now.
    ///
    /// # Errors
    /// If a part of the request is not submitted yet.
    #[inline]
    pub(super) fn submit(&mut self, tag: u16) -> Result<(), Throttled> {
        if self.popped_before > 0 {
            return self.submit_held(tag);
        }
        self.submit_now(tag)
    }

    /// Like [`Queue::submit`], while some requests use old memory.
    #[cold]
    pub(super) fn submit_held(&mut self, tag: u16) -> Result<(), Throttled> {
        let Some(guard) = self.popped_with[usize::from(tag)].clone() else {
            return self.submit_now(tag);
        };
        self.channel.hold(guard);
        let submitted = self.submit_now(tag);
        self.channel.hold(self.memory_guard.clone());
        submitted
    }

    /// Like [`Queue::submit`], when the channel holds the request's memory.
    #[inline]
    pub(super) fn submit_now(&mut self, tag: u16) -> Result<(), Throttled> {
        let request = self.ring.request(tag);
        let kind = request.kind;
        let now = self.core.now_ns();
        if request.len > PIECE_MIN
            && matches!(kind, Kind::Read | Kind::Write)
            && (self.cuts[usize::from(tag)].at > 0 || request.len > self.share.piece(now))
        {
            return self.submit_pieces(tag, kind);
        }
        if self.channel.in_flight() >= QUEUE_DEPTH {
            return Err(Throttled);
        }
        let piece = Piece { kind, len: request.len, is_first: true };
        self.limits.admit_on(&self.core, piece, now, self.stopping)?;
        let ticket = self.share.acquire(cost(&request), now)?;
        self.limits.begun();
        let io = Io {
            kind,
            offset: request.offset,
            len: request.len,
            segments: request.segments,
            tag: u64::from(tag) | ticket,
            fua: self.fua,
        };
        // SAFETY: the segments lie in the mappings of the memory table that the request was popped
        // with. That table is `self.memory` or, after `take_memory` has replaced it, the one in
        // `popped_with`; so it is mapped now. The channel was told to hold this table (`start`,
        // `take_memory`, `submit_held`), and its operations hold it until they have completed, even
        // after this queue is dropped. There are no Rust references to guest memory.
        unsafe { self.channel.submit(&io) }.expect("it has room");
        self.stats.submitted(request.kind, request.len);
        Ok(())
    }

    #[cold]
    pub(super) fn submit_pieces(&mut self, tag: u16, kind: Kind) -> Result<(), Throttled> {
        let request = self.ring.request(tag);
        let cut = &mut self.cuts[usize::from(tag)];
        while cut.at < request.len {
            let now = self.core.now_ns();
            let len = (request.len - cut.at).min(self.share.piece(now));
            if self.channel.in_flight() >= QUEUE_DEPTH {
                return Err(Throttled);
            }
            let piece = Piece { kind, len, is_first: cut.at == 0 };
            let len = self.limits.admit_on(&self.core, piece, now, self.stopping)?;
            let ticket = self.share.acquire(len, now)?;
            self.limits.begun();
            if cut.at == 0 {
                self.stats.submitted(request.kind, request.len);
            }
            self.piece.clear();
            slice(request.segments, cut.at, len, &mut self.piece);
            let io = Io {
                kind,
                offset: request.offset + cut.at,
                len,
                segments: &self.piece,
                tag: u64::from(tag) | IS_PIECE | ticket,
                fua: self.fua,
            };
            // SAFETY: parts of the request's segments; as in `submit_now`.
            unsafe { self.channel.submit(&io) }.expect("it has room");
            cut.at += len;
            cut.in_flight += 1;
        }
        Ok(())
    }

    /// Whether a deferred request could be submitted, in this round or the next.
    #[inline]
    pub(super) fn can_submit_deferred(&self) -> bool {
        if self.is_paused() {
            return false;
        }
        if !self.stopping && self.limits.waits_until(self.core.now_ns()).is_some() {
            return false;
        }
        let next = |&tag: &u16| {
            let (request, now) = (self.ring.request(tag), self.core.now_ns());
            let cost = match request.kind {
                Kind::Read | Kind::Write => cost(&request).min(self.share.piece(now)),
                _ => cost(&request),
            };
            self.channel.in_flight() < QUEUE_DEPTH && self.share.has_room(cost, now)
        };
        self.deferred.front().is_some_and(next)
    }
}

impl RingLimits {
    /// Like [`RingLimits::admit`]; asks for a turn when the piece has to wait. A ring that stops
    /// does not wait, and pays all the same.
    #[inline]
    fn admit_on(
        &mut self,
        core: &Core,
        piece: Piece,
        now_ns: u64,
        stopping: bool,
    ) -> Result<u64, Throttled> {
        match self.admit(piece, now_ns) {
            Ok(len) => Ok(len),
            Err(_) if stopping => {
                self.pay_the_rest(piece, now_ns);
                Ok(piece.len)
            }
            Err(ask_at_ns) => {
                core.turn_at(ask_at_ns);
                Err(Throttled)
            }
        }
    }
}

/// Appends the segments of the `len` bytes that start at `skip`.
fn slice(segments: &[libc::iovec], skip: u64, len: u64, out: &mut Vec<libc::iovec>) {
    let (mut skip, mut left) = (skip as usize, len as usize);
    for segment in segments {
        let from = skip.min(segment.iov_len);
        let n = (segment.iov_len - from).min(left);
        skip -= from;
        left -= n;
        if n > 0 {
            let iov_base = segment.iov_base.wrapping_byte_add(from);
            out.push(libc::iovec { iov_base, iov_len: n });
        }
        if left == 0 {
            return;
        }
    }
}

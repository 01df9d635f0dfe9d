//! The simulated driver: one core's interface to a [`sim`](crate::sim) world.
//!
//! It never waits. The world runs every core's turn in two halves (see `Core::work`) and runs the
//! second half of a waiting core when an event is due, so `enter` only reaps.
//!
//! The memory of an operation is written once, in `enter`, directly before its completion is handed
//! out; all writing is in this file. A core that is dropped with operations in flight drops this
//! driver, too. No other code follows the world's pointers: only `enter` does, for operations of
//! its own core.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use super::{Completion, Driver, Fd, IoOp, MetaOp, SimFd, Token, Wait};
use crate::driver::remote::CoreAddress;
use crate::inbox::Sender;
use crate::sim::{OpMemory, Outcome, State};

/// The simulated driver of one core.
pub(crate) struct SimDriver {
    state: Rc<RefCell<State>>,
    core: usize,
    shared: Arc<CoreAddress>,
}

impl SimDriver {
    pub fn new(state: &Rc<RefCell<State>>, core: usize, shared: &Arc<CoreAddress>) -> SimDriver {
        SimDriver { state: state.clone(), core, shared: shared.clone() }
    }
}

/// Fills the part of a buffer that a failed or short transfer leaves undefined.
const GARBAGE: u8 = 0xDB;

/// Writes an operation's received bytes into its memory.
fn deliver(outcome: &Outcome) {
    if let IoOp::ReadV { iov, n, .. } = outcome.op {
        return scatter(&outcome.bytes, vector(iov, n));
    }
    let (ptr, len, whole) = match outcome.op {
        IoOp::Read { ptr, len, .. } => (ptr, len as usize, true),
        IoOp::Recv { ptr, len, .. } => (ptr, len as usize, false),
        _ => return,
    };
    let n = outcome.bytes.len();
    assert!(n <= len, "the simulated device returned more than was requested");
    // SAFETY: the operation was staged by the core's loop with `ptr` valid for writes of `len`
    // bytes (a `Buf`, or the spare capacity of a vector, which only its operation slot owns),
    // and the slot keeps it until the completion that `enter` is about to hand out has been
    // reaped; `n <= len` by the assertion. The source is a vector of our own.
    unsafe {
        std::ptr::copy_nonoverlapping(outcome.bytes.as_ptr(), ptr, n);
        if whole {
            std::ptr::write_bytes(ptr.add(n), GARBAGE, len - n);
        }
    }
}

/// Writes a read's received bytes into its pieces.
fn scatter(mut bytes: &[u8], pieces: &[libc::iovec]) {
    for piece in pieces {
        let n = bytes.len().min(piece.iov_len);
        // SAFETY: each piece is valid for writes until the completion that `enter` is about to hand
        // out, by the contract of `FileQueue::submit`; `n` is at most its length. The source is
        // memory of our own.
        unsafe {
            let to = piece.iov_base.cast::<u8>();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, n);
            std::ptr::write_bytes(to.add(n), GARBAGE, piece.iov_len - n);
        }
        bytes = &bytes[n..];
    }
    assert!(bytes.is_empty(), "the simulated device returned more than was requested");
}

/// The bytes that a just staged operation writes to a file.
fn written(op: &IoOp) -> Vec<u8> {
    let mut bytes = Vec::new();
    match *op {
        IoOp::Write { ptr, len, .. } => {
            // SAFETY: the core's loop stages a write with `ptr` valid for reads of `len`
            // initialised bytes of a `Buf`, which the operation's slot owns until the completion;
            // they do not change meanwhile.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(ptr, len as usize) });
        }
        IoOp::WriteV { iov, n, .. } => {
            for piece in vector(iov, n) {
                let at = bytes.len();
                bytes.resize(at + piece.iov_len, 0);
                // SAFETY: each piece is valid for reads until the completion, by the contract of
                // `FileQueue::submit`; the destination has just been given that length.
                unsafe {
                    let to = bytes.as_mut_ptr().add(at);
                    std::ptr::copy_nonoverlapping(piece.iov_base.cast(), to, piece.iov_len);
                }
            }
        }
        _ => {}
    }
    bytes
}

/// The pieces of an operation of a queue.
fn vector<'a>(iov: *const libc::iovec, n: u16) -> &'a [libc::iovec] {
    // SAFETY: `iov` points to `n` pieces in the slot of a queue, which keeps them unchanged until
    // the completion has been reaped. Callers drop the result before that.
    unsafe { std::slice::from_raw_parts(iov, n.into()) }
}

/// The addresses and lengths of a file operation's pieces, or-ed together, and its number of bytes.
fn memory(op: &IoOp) -> OpMemory {
    match *op {
        IoOp::Read { ptr, len, .. } => OpMemory { address: ptr.addr(), len: len.into() },
        IoOp::Write { ptr, len, .. } => OpMemory { address: ptr.addr(), len: len.into() },
        IoOp::ReadV { iov, n, .. } | IoOp::WriteV { iov, n, .. } => {
            vector(iov, n).iter().fold(OpMemory::default(), |all, piece| OpMemory {
                address: all.address | piece.iov_base.addr() | piece.iov_len,
                len: all.len + piece.iov_len as u64,
            })
        }
        _ => OpMemory::default(),
    }
}

/// Number of bytes that an operation sends.
fn send_len(op: &IoOp) -> usize {
    match *op {
        IoOp::Send { len, .. } => len as usize,
        IoOp::SendMsg { msg, .. } => pieces(msg).iter().map(|piece| piece.iov_len).sum(),
        _ => 0,
    }
}

/// The pieces of a vectored send that has not completed.
fn pieces<'a>(msg: *const libc::msghdr) -> &'a [libc::iovec] {
    // SAFETY: `msg` points into the `Message` that the operation's slot owns until the completion
    // is reaped, and this is only called from `enter` before it hands that out; the header's vector
    // is the message's own `iov`, of the length given. Neither changes meanwhile. The result is
    // dropped before `enter` returns.
    unsafe {
        let header = &*msg;
        std::slice::from_raw_parts(header.msg_iov, header.msg_iovlen)
    }
}

/// The first `n` bytes that an operation sends.
fn fetch(op: &IoOp, n: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(n);
    let mut take = |ptr: *const u8, len: usize| {
        let len = len.min(n - bytes.len());
        // SAFETY: `ptr` is valid for reads of `len` initialised bytes: the operation's slot owns
        // them until the completion is reaped, and `enter` has not handed that out yet. They do not
        // change meanwhile.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(ptr, len) });
    };
    match *op {
        IoOp::Send { ptr, len, .. } => take(ptr, len as usize),
        IoOp::SendMsg { msg, .. } => {
            for piece in pieces(msg) {
                take(piece.iov_base.cast(), piece.iov_len);
            }
        }
        _ => {}
    }
    bytes
}

impl SimDriver {
    pub fn listen(&mut self, addr: SocketAddr, alone: bool) -> io::Result<Fd> {
        self.state.borrow_mut().listen(addr, alone)
    }

    pub fn connect(&mut self, addr: SocketAddr) -> io::Result<Fd> {
        self.state.borrow_mut().connect(addr)
    }

    pub fn address(&mut self, fd: i32, remote: bool) -> io::Result<SocketAddr> {
        self.state.borrow_mut().address(fd, remote)
    }

    pub fn shut_down(&mut self, fd: i32, reset: bool) {
        self.state.borrow_mut().shut_down(fd, reset);
    }

    /// A number for waiting on a descriptor of the host, valid while that is open.
    pub fn watch(&mut self, fd: &OwnedFd) -> SimFd {
        self.state.borrow_mut().watch(fd.as_raw_fd())
    }

    /// How many of `len` bytes go through a socket at once.
    pub fn at_once(&mut self, len: usize) -> usize {
        self.state.borrow_mut().at_once(len)
    }

    /// The channel on which dropped descriptors announce themselves.
    pub fn closing(&self) -> Sender<i32> {
        self.state.borrow().closing()
    }
}

impl Driver for SimDriver {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn sim(&mut self) -> Option<&mut SimDriver> {
        Some(self)
    }

    fn stage(&mut self, token: Token, op: IoOp) {
        let (memory, data) = (memory(&op), written(&op));
        self.state.borrow_mut().stage(self.core, token, op, memory, data);
    }

    fn meta(&mut self, token: Token, op: MetaOp, shared: &Arc<CoreAddress>) {
        self.state.borrow_mut().meta(self.core, token, op, shared);
    }

    fn cancel(&mut self, token: Token) {
        self.state.borrow_mut().cancel(self.core, token);
    }

    fn staged(&self) -> usize {
        self.state.borrow().staged(self.core)
    }

    fn capacity(&self) -> usize {
        self.state.borrow().config.capacity
    }

    fn enter(&mut self, _: Wait, _: usize, done: &mut Vec<Completion>) -> io::Result<()> {
        let mut state = self.state.borrow_mut();
        state.submit(self.core);
        self.shared.clear_event();
        while let Some(outcome) = state.reap(self.core, send_len, fetch) {
            deliver(&outcome);
            done.push(Completion { token: outcome.token, result: outcome.result });
        }
        Ok(())
    }

    fn ready(&mut self) -> bool {
        self.state.borrow().due_now(self.core, 1)
    }

    fn now_ns(&mut self) -> u64 {
        self.state.borrow_mut().tick()
    }

    fn unix_time_ms(&mut self) -> u64 {
        self.state.borrow().unix_time_ms()
    }
}

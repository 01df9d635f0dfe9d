//! The simulated driver: one core's door into a [`sim`](crate::sim) world.
//!
//! It never waits. The world runs every core's turn in two halves (see `Core::work`) and gives a
//! waiting core its second half when something is due, so `enter` only reaps.
//!
//! The memory of an operation is written once, in `enter`, directly before its completion is
//! handed out, and never after; all writing is in this file. A core that is dropped with
//! operations under way takes this driver along, and the world keeps no pointer that anybody
//! would follow: only `enter` does, for operations of its own core.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use super::{Completion, Driver, IoOp, MetaOp, Token, Wait};
use crate::remote::Shared;
use crate::sim::{Outcome, State};

/// See the module text.
pub(crate) struct SimDriver {
    state: Rc<RefCell<State>>,
    core: usize,
    shared: Arc<Shared>,
}

impl SimDriver {
    pub fn new(state: &Rc<RefCell<State>>, core: usize, shared: &Arc<Shared>) -> SimDriver {
        SimDriver { state: state.clone(), core, shared: shared.clone() }
    }
}

/// What fills the part of a buffer that an unsuccessful or short transfer leaves undefined.
const GARBAGE: u8 = 0xDB;

/// Brings what an operation received into its memory.
fn deliver(outcome: &Outcome) {
    if let IoOp::Read { ptr, len, .. } = outcome.op {
        let n = outcome.bytes.len();
        assert!(n <= len as usize, "the simulated disk brought more than was asked for");
        // SAFETY: the operation was staged by the core's loop with `ptr` valid for writes of
        // `len` bytes (a `Buf`, whose bytes are initialised and which only its operation slot
        // owns), and the slot keeps it until the completion that `enter` is about to hand out
        // has been reaped; `n <= len` by the assertion. The source is a vector of our own.
        unsafe {
            std::ptr::copy_nonoverlapping(outcome.bytes.as_ptr(), ptr, n);
            std::ptr::write_bytes(ptr.add(n), GARBAGE, len as usize - n);
        }
    }
}

impl Driver for SimDriver {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn stage(&mut self, token: Token, op: IoOp) {
        self.state.borrow_mut().stage(self.core, token, op);
    }

    fn meta(&mut self, token: Token, op: MetaOp, shared: &Arc<Shared>) {
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
        while let Some(outcome) = state.reap(self.core) {
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

//! Computations that take longer than a core may be held, and that cannot be divided: a thread
//! besides the cores makes them, one after the other.

use std::sync::Arc;

use super::Core;
use crate::driver::{MetaOp, MetaOut, Work};

impl Core {
    /// Has a thread besides the cores compute something, and waits for the result. `work` must be a
    /// pure function of what it holds, and end by itself in bounded time: a core that stops waits
    /// for it.
    ///
    /// For a piece of work that a library makes in one call of many milliseconds. Work that can be
    /// divided belongs on a core, with [`Core::checkpoint`] between its pieces.
    pub async fn compute(&self, work: impl Fn() -> Vec<u8> + Send + Sync + 'static) -> Vec<u8> {
        match self.meta(MetaOp::Compute(Work(Arc::new(work)))).await {
            Ok(MetaOut::Bytes(result)) => result,
            other => unreachable!("a computation answered {other:?}"),
        }
    }
}

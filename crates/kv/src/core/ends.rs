//! Tells the tracked connections of a core which keys have ended, on a node that only reads.
//!
//! A node that writes removes what has ended, and announces that like any write
//! (`shard/reclaim.rs`). Here nothing is removed: each core lists the deadlines that have passed
//! since it looked last, and invalidates their keys. A connection enters a key before it reads it,
//! so a read that has still found it comes before the next look.

use std::rc::Rc;

use crate::core::state::CoreState;
use crate::shard::announce::Written;

/// Between two looks.
const PAUSE_NS: u64 = 100_000_000;
/// Keys that are listed at a time.
const KEYS: usize = 1000;
/// Nobody's writes.
const NOBODY: u64 = 0;

/// Invalidates until cancelled.
pub(crate) async fn tell_ends(state: Rc<CoreState>) {
    let mut told_ms = state.core.unix_time_ms();
    loop {
        state.core.sleep_ns(PAUSE_NS).await;
        let now_ms = state.core.unix_time_ms();
        // What is read by a connection that is tracked later ends later.
        if state.node.tracks(state.core.id()) && tell(&state, told_ms, now_ms).await.is_err() {
            // The list is damaged: any key may have ended.
            state.clone().hear(vec![Written::All(NOBODY)], 0).await;
        }
        told_ms = now_ms;
    }
}

/// Invalidates the keys whose deadlines have passed from one time to before another one.
async fn tell(state: &Rc<CoreState>, from_ms: u64, now_ms: u64) -> lsm::Result<()> {
    let mut last = None;
    loop {
        let ended = state.reader.ended(state.family, from_ms, last.as_ref(), KEYS, now_ms).await?;
        let is_all = ended.len() < KEYS;
        last = ended.last().cloned();
        let written = ended.into_iter().map(|(_, key)| Written::Key(key.into(), NOBODY)).collect();
        state.clone().hear(written, 0).await;
        if is_all {
            return Ok(());
        }
    }
}

//! A hint in the log for guests whose memory is not shared.

use std::sync::Arc;

use reactor::{Class, Core};

use crate::target::stats::QueueStats;

/// Interval of the checks for unheard kicks, in nanoseconds.
const UNHEARD_NS: u64 = 1_000_000_000;
/// Number of checks for each connection.
const UNHEARD_CHECKS: u32 = 60;

/// Logs a hint if a guest kicks and no ring ever has a request: then its memory is not the memory
/// that the front end has shared with us, for example because QEMU's memory backend is not shared.
pub(super) fn hint_at_unshared_memory(
    core: &Core,
    name: Arc<str>,
    stats: &[Arc<QueueStats>],
) -> reactor::OwnedTask<()> {
    let stats = stats.to_vec();
    let sum = move |of: fn(&QueueStats) -> u64| stats.iter().map(|ring| of(ring)).sum::<u64>();
    let requests = |ring: &QueueStats| {
        ring.completions.get() + ring.reads.requests.get() + ring.writes.requests.get()
    };
    let (kicks_before, requests_before) = (sum(|ring| ring.kicks.get()), sum(requests));
    let own_core = core.clone();
    let checks = async move {
        let mut kicked = false;
        for _ in 0..UNHEARD_CHECKS {
            own_core.sleep_ns(UNHEARD_NS).await;
            if sum(requests) > requests_before {
                return;
            }
            if kicked {
                return tracing::warn!(
                    disk = &*name,
                    "the guest kicks its rings and there is never a request in them: is its memory \
                     shared (share=on of QEMU's memory-backend)?"
                );
            }
            kicked = sum(|ring| ring.kicks.get()) > kicks_before;
        }
    };
    core.spawn(Class::Control, checks).owned()
}

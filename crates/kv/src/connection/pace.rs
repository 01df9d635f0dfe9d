//! The pace of large commands: a client that holds room for which others wait must send quickly.

use std::task::Context;

use reactor::{Core, Sleep};

use crate::client::large::Large;
use crate::connection::fired;

/// The rate at which a client must send a large command for which others wait, averaged over its
/// patience (see [`Large::patience_ns`]).
pub(super) const LARGE_BYTES_PER_S: u64 = 64 * 1024;

/// How long at most the bytes sent before count: a round trip, because others may be waiting for
/// it.
const LARGE_CREDIT_NS: u64 = 100_000_000;

/// The interval of the checks.
const LARGE_CHECK_NS: u64 = 100_000_000;

/// Checks from time to time, while its connection holds room, whether the client is too slow.
#[derive(Default)]
pub(super) struct Pace {
    /// Bytes received so far.
    received: u64,
    timer: Option<Sleep>,
    last: Option<Check>,
    too_slow: bool,
}

/// The last check.
struct Check {
    received: u64,
    accepted: u64,
    /// Since when the client has sent too little.
    since_ns: u64,
}

impl Pace {
    pub fn add_received(&mut self, bytes: usize) {
        self.received += bytes as u64;
    }

    /// Starts or stops the timer. `accepted` is the number of bytes that the socket has accepted.
    pub fn set_timer(&mut self, core: &Core, large: &Large, accepted: u64) {
        if !large.has_room() {
            (self.timer, self.last) = (None, None);
        } else if self.timer.is_none() {
            let received = self.received;
            self.last.get_or_insert_with(|| Check { received, accepted, since_ns: core.now_ns() });
            let check_ns = large.patience_ns().map_or(LARGE_CHECK_NS, |ns| ns.min(LARGE_CHECK_NS));
            self.timer = Some(core.sleep_ns(check_ns));
        }
    }

    /// Checks when the timer fires; true when it has. `waits_for_client` says whether only the
    /// client holds the connection up.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        core: &Core,
        large: &Large,
        accepted: u64,
        waits_for_client: bool,
    ) -> bool {
        if !fired(&mut self.timer, cx) {
            return false;
        }
        let now_ns = core.now_ns();
        let last = self.last.take().unwrap_or(Check {
            received: self.received,
            accepted,
            since_ns: now_ns,
        });
        let sent_ns = (self.received - last.received) * 1_000_000_000 / LARGE_BYTES_PER_S;
        let since_ns = match large.patience_ns().filter(|_| waits_for_client) {
            Some(patience_ns) if accepted == last.accepted => {
                let since_ns = (last.since_ns + sent_ns).min(now_ns + LARGE_CREDIT_NS);
                self.too_slow = now_ns.saturating_sub(since_ns) >= patience_ns;
                since_ns
            }
            _ => now_ns,
        };
        self.last = Some(Check { received: self.received, accepted, since_ns });
        true
    }

    /// Whether the last check found the client too slow.
    pub fn take_too_slow(&mut self) -> bool {
        std::mem::take(&mut self.too_slow)
    }
}

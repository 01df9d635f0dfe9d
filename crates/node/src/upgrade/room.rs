//! Room for another process that starts on this node's own processors: its successor, or its
//! launcher's next program.
//!
//! A core that polls its guests' rings always has work. A program that starts beside it takes turns
//! of the scheduler's milliseconds with it, and the guests wait in each. With room the core looks
//! at the rings every [`POLL_NS`], for which it preempts the other program, and leaves the
//! processor to it in between.

use reactor::{Core, set_time_slice};

/// How often guests are looked at.
const POLL_NS: u64 = 200_000;
/// The turns that a core asks for, so that it preempts another program when it wakes.
const SLICE_NS: u64 = 500_000;
/// How long there may be room while another program starts.
pub(crate) const STARTS_NS: u64 = 5_000_000_000;
/// How long while another process ends.
pub(crate) const ENDS_NS: u64 = 100_000_000;

/// Makes room on all cores for so many nanoseconds at most; 0 ends that.
pub(crate) async fn make(core: &Core, most_ns: u64) {
    if core.is_simulated() {
        // Each of its processes has processors of its own.
        return;
    }
    let slice_ns = if most_ns > 0 { SLICE_NS } else { 0 };
    for at in 0..core.cores() {
        let made = core.call(at, move |core| {
            core.poll_seldom(POLL_NS, core.now_ns() + most_ns);
            set_time_slice(slice_ns)
        });
        if let Err(error) = made.await {
            tracing::debug!(core = at, "cannot set the time slice: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use reactor::{Poller, RuntimeConfig};

    use super::*;

    /// Always has work.
    struct Busy(Rc<Cell<u64>>);

    impl Poller for Busy {
        fn poll(&mut self) -> bool {
            self.0.set(self.0.get() + 1);
            true
        }
        fn pure_check(&mut self) -> bool {
            true
        }
        fn arm(&mut self) -> bool {
            false
        }
        fn disarm(&mut self) {}
    }

    #[test]
    fn there_is_room_until_it_ends() {
        let config =
            RuntimeConfig { processors: vec![0], memory: 16 << 20, ..RuntimeConfig::default() };
        reactor::run(&config, |core| async move {
            let polls = Rc::<Cell<u64>>::default();
            let slot = core.add_poller(Busy(polls.clone()));
            let counted = async || {
                let (began, before_ns) = (polls.get(), core.now_exact_ns());
                core.sleep_ns(10_000_000).await;
                let most = (core.now_exact_ns() - before_ns) / POLL_NS + 2;
                (polls.get() - began, most)
            };
            make(&core, STARTS_NS).await;
            let (counts, most) = counted().await;
            assert!(counts <= most, "{counts} of {most}");
            make(&core, 0).await;
            let (counts, most) = counted().await;
            assert!(counts > most, "{counts} of {most}");
            drop(slot);
        })
        .unwrap();
    }
}

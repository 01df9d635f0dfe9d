//! Pauses between attempts to connect.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);

/// The pause after attempts that failed: doubled with each, and shortened by up to a half at
/// random, so that clients that lost the same server do not return together.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    /// When the next attempt may begin; `None` is now.
    pub fn until(&self) -> Option<Instant> {
        self.until
    }

    pub fn succeeded(&mut self) {
        *self = Backoff::default();
    }

    pub fn failed(&mut self, now: Instant) {
        let pause = FIRST.saturating_mul(1 << self.failures.min(6)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        let random = RandomState::new().hash_one(self.failures) % 512;
        self.until = Some(now + pause - pause * random as u32 / 1024);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_second_and_end_with_success() {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        for nth in 0..40 {
            backoff.failed(now);
            let pause = backoff.until().unwrap() - now;
            let whole = Duration::from_millis((20 << nth.min(6)).min(1000));
            assert!(pause <= whole && pause >= whole / 2, "{nth}: {pause:?}");
        }
        backoff.succeeded();
        assert!(backoff.until().is_none());
    }
}

//! What this process has used so far, as the kernel counts it.

use std::path::Path;
use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;

use crate::machine::pseudo_file;

/// Processor time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// Spent in the process itself.
    pub user: Duration,
    /// Spent in the kernel for it.
    pub system: Duration,
}

impl CpuTime {
    /// Of this process, all its threads together.
    pub fn now() -> CpuTime {
        CpuTime::of(UsageWho::RUSAGE_SELF)
    }

    /// Of the thread that asks.
    pub fn of_this_thread() -> CpuTime {
        CpuTime::of(UsageWho::RUSAGE_THREAD)
    }

    fn of(who: UsageWho) -> CpuTime {
        let Ok(usage) = getrusage(who) else { return CpuTime::default() };
        let time = |t: TimeVal| {
            Duration::new(t.tv_sec().unsigned_abs(), t.tv_usec().unsigned_abs() as u32 * 1000)
        };
        CpuTime { user: time(usage.user_time()), system: time(usage.system_time()) }
    }

    /// Both together.
    pub fn total(self) -> Duration {
        self.user + self.system
    }
}

/// Bytes of memory that the process occupies.
pub fn resident_bytes() -> u64 {
    pseudo_file(Path::new("/proc/self/status")).and_then(|text| parse(&text)).unwrap_or(0)
}

fn parse(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_grows_with_work() {
        let before = CpuTime::now();
        let mut x = 1_u64;
        while CpuTime::now() == before {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        assert!(CpuTime::now().total() > before.total());
    }

    #[test]
    fn memory_is_found_in_the_kernels_text() {
        assert_eq!(parse("Name:\tx\nVmRSS:\t    2048 kB\nThreads: 1\n"), Some(2 << 20));
        assert_eq!(parse("VmRSS: much"), None);
        assert!(resident_bytes() > 100_000);
    }
}

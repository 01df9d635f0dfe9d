//! The resources that this process has used, as the kernel counts them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use kv::MemoryUse;
use nix::sys::prctl::set_thp_disable;
use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};
use nix::sys::time::TimeVal;

/// Says whether the allocator's request for pages of 2 MiB is granted. Clearing one of them for
/// each thread is most of what a process does until it serves, on processors that other processes
/// are using; so a node enables them when it serves. Child processes inherit the setting.
pub(crate) fn use_huge_pages(wanted: bool) {
    // A kernel without huge pages ignores this.
    let _ = set_thp_disable(!wanted);
}

/// Raises the process's descriptor limit as far as allowed. Child processes inherit it. Returns the
/// old and the new limit.
pub(crate) fn raise_descriptors() -> (u64, u64) {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return (0, 0) };
    match soft < hard && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() {
        true => (soft, hard),
        false => (soft, soft),
    }
}

/// The process's descriptor limit.
pub(crate) fn descriptors_max() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft)
}

/// Processor time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// Spent in user mode.
    pub user: Duration,
    /// Spent in the kernel.
    pub system: Duration,
}

impl CpuTime {
    /// Of this process, all threads together.
    pub fn now() -> CpuTime {
        CpuTime::of(UsageWho::RUSAGE_SELF)
    }

    /// Of the calling thread.
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

    /// User and system time.
    pub fn total(self) -> Duration {
        self.user + self.system
    }
}

/// Upper bound of the length of `/proc/self/status`.
const STATUS_BYTES: usize = 8 << 10;

/// Returns the allocator's bytes in use.
static ALLOCATED: OnceLock<fn() -> u64> = OnceLock::new();

/// Sets the function that returns the allocator's bytes in use. Only the first call has an effect.
pub fn count_memory_with(allocated: fn() -> u64) {
    let _ = ALLOCATED.set(allocated);
}

/// The memory that the process uses. The first call must precede the process's confinement.
pub fn memory_use() -> MemoryUse {
    let status = status();
    let field = |name| parse(&status, name).unwrap_or(0);
    let resident_bytes = field("VmRSS:");
    let allocated_bytes = ALLOCATED.get().map_or(0, |allocated| allocated());
    MemoryUse {
        resident_bytes,
        resident_peak_bytes: field("VmHWM:").max(resident_bytes),
        allocated_bytes: if allocated_bytes == 0 { resident_bytes } else { allocated_bytes },
    }
}

/// Resident memory of the process in bytes. The first call must precede the process's confinement.
pub fn resident_bytes() -> u64 {
    parse(&status(), "VmRSS:").unwrap_or(0)
}

/// The text of `/proc/self/status`.
fn status() -> String {
    #[expect(clippy::disallowed_methods, reason = "a kernel file, opened at the start")]
    fn open() -> Option<File> {
        File::open("/proc/self/status").ok()
    }
    static STATUS: OnceLock<Option<File>> = OnceLock::new();
    let mut text = [0; STATUS_BYTES];
    // Each read from the beginning makes the kernel write the text again.
    let read = STATUS.get_or_init(open).as_ref().map(|file| file.read_at(&mut text, 0));
    let text = &text[..read.and_then(Result::ok).unwrap_or(0)];
    String::from_utf8_lossy(text).into_owned()
}

/// The file of this program; empty if unknown. The first call must precede the process's
/// confinement.
pub(crate) fn executable() -> &'static Path {
    static EXECUTABLE: OnceLock<PathBuf> = OnceLock::new();
    EXECUTABLE.get_or_init(|| std::env::current_exe().unwrap_or_default())
}

/// The directory in which this process was started; empty if unknown. The first call must precede
/// the process's confinement.
pub(crate) fn working_directory() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| std::env::current_dir().unwrap_or_default())
}

/// A field of `/proc/self/status`, in bytes.
fn parse(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
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
        let text = "Name:\tx\nVmHWM:\t 4096 kB\nVmRSS:\t    2048 kB\nThreads: 1\n";
        assert_eq!(parse(text, "VmRSS:"), Some(2 << 20));
        assert_eq!(parse(text, "VmHWM:"), Some(4 << 20));
        assert_eq!(parse("VmRSS: much", "VmRSS:"), None);
        let used = memory_use();
        assert!(resident_bytes() > 100_000 && used.resident_peak_bytes >= used.resident_bytes);
    }
}

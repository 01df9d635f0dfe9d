//! The program's memory allocator: jemalloc, on huge pages.
//!
//! A get touches a line of a filter, part of an index and a block, each in a different place of a
//! memory far larger than the reach of the processor's TLB with small pages. Pages of 2 MiB remove
//! these misses, and a page fault for each 4 KiB by which a cache grows. The kernel provides such
//! pages on request; the C library's allocator does not request them.

use tikv_jemalloc_ctl::{arenas, epoch, raw, stats};
use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// jemalloc's options, read when it starts.
#[expect(
    unsafe_code,
    reason = "the symbol is jemalloc's own, and its type a pointer to a C string"
)]
// SAFETY: jemalloc declares `const char *malloc_conf` under this prefixed name for the program to
// define; a reference to a byte array has that layout, and the text ends in NUL.
#[unsafe(export_name = "_rjem_malloc_conf")]
static OPTIONS: Option<&'static [u8; 11]> = Some(b"thp:always\0");

/// Bytes in live allocations; 0 if the allocator does not report them.
pub fn allocated_bytes() -> u64 {
    // The statistics are those of the last epoch.
    let told = epoch::advance().and_then(|_| stats::allocated::read());
    told.map_or(0, |bytes| bytes as u64)
}

/// Milliseconds after which freed memory returns to the system on a node with little memory.
/// jemalloc's default of 10 s would keep memory that a merge or a large value needed once.
const DECAY_MS: isize = 200;

/// Freed memory of this many bytes or more returns at once on a node with little memory. A few
/// values of megabytes, each freed a moment ago, would otherwise be a large part of it.
const AT_ONCE: usize = 1 << 20;

/// Most arenas that are made in advance: one for each thread of a node with little memory.
const ARENAS: u32 = 16;

/// Makes freed memory return to the system soon. Call it before threads are started: the arenas of
/// existing threads keep their settings.
pub fn return_memory_soon() {
    for name in ["arenas.dirty_decay_ms", "arena.0.dirty_decay_ms"] {
        set(name, DECAY_MS);
    }
    // The threshold is a setting of each arena, and an arena exists from its first thread on. The
    // last one made is this thread's.
    for arena in (0..arenas::narenas::read().unwrap_or(1).min(ARENAS)).rev() {
        set("thread.arena", arena);
        set(&format!("arena.{arena}.oversize_threshold"), AT_ONCE);
    }
}

/// Changes a setting. If the allocator rejects it, the old one stays.
#[expect(unsafe_code, reason = "these settings of jemalloc have no safe wrapper")]
fn set<T: Setting>(name: &str, value: T) {
    let name = [name.as_bytes(), b"\0"].concat();
    // SAFETY: the name ends in NUL, and jemalloc compares the value's size with that of the
    // setting's type. The types that are `Setting` are plain integers, for which each bit pattern
    // is valid.
    let _ = unsafe { raw::write(&name, value) };
}

/// The types of jemalloc's settings.
trait Setting: Copy {}
/// `ssize_t`
impl Setting for isize {}
/// `size_t`
impl Setting for usize {}
/// `unsigned`
impl Setting for u32 {}

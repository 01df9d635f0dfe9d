//! The program's memory allocator: jemalloc, on huge pages.
//!
//! A get touches a line of a filter, part of an index and a block, each in a different place of a
//! memory far larger than the reach of the processor's TLB with small pages. Pages of 2 MiB remove
//! these misses, and a page fault for each 4 KiB by which a cache grows. The kernel provides such
//! pages on request; the C library's allocator does not request them.

use tikv_jemalloc_ctl::{epoch, raw, stats};
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

/// Makes freed memory return to the system soon. Call it before threads are started: the arenas of
/// existing threads keep their settings.
#[expect(unsafe_code, reason = "jemalloc's setting has no safe wrapper")]
pub fn return_memory_soon() {
    for name in [&b"arenas.dirty_decay_ms\0"[..], b"arena.0.dirty_decay_ms\0"] {
        // SAFETY: the name ends in NUL, and both settings are a `ssize_t`, which `isize` is.
        // If the allocator rejects the setting, it keeps its default.
        let _ = unsafe { raw::write(name, DECAY_MS) };
    }
}

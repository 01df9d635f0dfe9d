//! The program's memory allocator: jemalloc, on huge pages.
//!
//! A get touches a line of a filter, some of an index and a block, each in another place of a
//! memory far larger than the processor's table of small pages; on pages of 2 MiB these misses
//! go away, and so does a page fault for each 4 KiB that a cache grows by. The kernel gives such
//! pages where they are asked for, which the C library's allocator does not.

use tikv_jemalloc_ctl::{epoch, raw, stats};
use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// Where jemalloc looks for its options when it starts.
#[expect(
    unsafe_code,
    reason = "the symbol is jemalloc's own, and its type a pointer to a C string"
)]
// SAFETY: jemalloc declares `const char *malloc_conf` under this prefixed name for the program to
// define; a reference to a byte array has that layout, and the text ends in NUL.
#[unsafe(export_name = "_rjem_malloc_conf")]
static OPTIONS: Option<&'static [u8; 11]> = Some(b"thp:always\0");

/// Bytes in allocations that are in use now; 0 where the allocator does not tell.
pub fn allocated_bytes() -> u64 {
    // The figures are those of the last epoch.
    let told = epoch::advance().and_then(|_| stats::allocated::read());
    told.map_or(0, |bytes| bytes as u64)
}

/// Milliseconds after which freed memory goes back to the system where there is little of it;
/// jemalloc's own 10 s keep what a merge or a large value needed once.
const DECAY_MS: isize = 200;

/// Gives freed memory back to the system soon. Call it before threads are started: those that are
/// there keep their ways.
#[expect(unsafe_code, reason = "jemalloc's setting has no safe wrapper")]
pub fn return_memory_soon() {
    for name in [&b"arenas.dirty_decay_ms\0"[..], b"arena.0.dirty_decay_ms\0"] {
        // SAFETY: the name ends in NUL, and both settings are a `ssize_t`, which `isize` is.
        // An allocator that does not take it goes on as before.
        let _ = unsafe { raw::write(name, DECAY_MS) };
    }
}

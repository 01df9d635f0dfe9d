//! The program's memory allocator: jemalloc, on huge pages.
//!
//! A get touches a line of a filter, some of an index and a block, each in another place of a
//! memory far larger than the processor's table of small pages; on pages of 2 MiB these misses
//! go away, and so does a page fault for each 4 KiB that a cache grows by. The kernel gives such
//! pages where they are asked for, which the C library's allocator does not.

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

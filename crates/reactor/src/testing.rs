//! Helpers for the tests of this crate and of the crates above it. No node uses them.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::future::Future;

use crate::core::Core;
use crate::process::processors::processors;
use crate::runtime::{RuntimeConfig, run};

/// Runs `main` on one core with `memory` bytes for its buffers, and returns its result.
///
/// # Panics
/// When the runtime cannot be started, or `main` panics.
pub fn on_one_core<T: Send + 'static, F>(
    memory: usize,
    main: impl Fn(Core) -> F + Clone + Send + 'static,
) -> T
where
    F: Future<Output = T> + 'static,
{
    let processors = processors()[..1].to_vec();
    let config = RuntimeConfig { processors, memory, ..RuntimeConfig::default() };
    run(&config, main).expect("the runtime starts").remove(0)
}

/// Runs `check` in a forked child, which has a copy of this process without its other threads, and
/// returns whether it returned true. What `check` waits for must not need those threads.
///
/// # Panics
/// When the system has no room for a process.
pub fn in_forked_child(check: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `check` and ends without returning. The allocator works in a child,
    // and a test that holds other locks meanwhile would hang, which shows.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check));
        // SAFETY: ends the process at once: no destructor runs twice.
        unsafe { libc::_exit(i32::from(!matches!(checked, Ok(true)))) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above, and writes to a live number.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    waited == child && status == 0
}

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Allocations of this thread so far, in a program whose global allocator is [`CountingAllocator`].
pub fn allocations() -> u64 {
    ALLOCATIONS.get()
}

/// The system's allocator, which counts the allocations of each thread.
pub struct CountingAllocator;

// SAFETY: every call goes to the system's allocator unchanged; counting touches a
// const-initialised thread-local that needs no allocation and no destructor.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

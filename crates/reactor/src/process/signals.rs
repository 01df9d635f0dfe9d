//! Signal handlers in front of those that are installed already.

use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A handler: async-signal-safe, which means atomics and system calls only.
pub(crate) type Handle = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

/// A handler's place in front of another one.
pub(crate) struct Place {
    once: Once,
    /// The previous action; null until ours is installed.
    before: AtomicPtr<libc::sigaction>,
}

impl Place {
    pub const fn new() -> Place {
        Place { once: Once::new(), before: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Installs a handler, once for the process.
    pub fn install(&self, signal: i32, handle: Handle) {
        self.once.call_once(|| {
            // SAFETY: plain C structs for which all zeroes are valid values. The handler only does
            // what a handler may. The previous action is kept for ever.
            unsafe {
                let before: &'static mut libc::sigaction = Box::leak(Box::new(std::mem::zeroed()));
                let before = &raw mut *before;
                libc::sigaction(signal, std::ptr::null(), before);
                self.before.store(before, Ordering::Release);
                let mut ours: libc::sigaction = std::mem::zeroed();
                ours.sa_sigaction = handle as *const () as usize;
                ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigemptyset(&raw mut ours.sa_mask);
                libc::sigaction(signal, &raw const ours, std::ptr::null_mut());
            }
        });
    }

    /// Passes a signal on to the previous handler, from ours.
    ///
    /// # Safety
    /// The arguments are those of our handler, which [`Place::install`] has installed here.
    pub unsafe fn pass_on(
        &self,
        signal: i32,
        info: *mut libc::siginfo_t,
        context: *mut libc::c_void,
    ) {
        // SAFETY: stored before our handler was installed, and never changed.
        let before = unsafe { &*self.before.load(Ordering::Acquire) };
        match before.sa_sigaction {
            libc::SIG_DFL | libc::SIG_IGN => {
                // SAFETY: `before` is live. The instruction that has faulted is done again, and its
                // fault is handled as before. What a process has sent does not come again, nor does
                // a trap: the next instruction follows. The kernel passes a live `info`.
                unsafe {
                    libc::sigaction(signal, before, std::ptr::null_mut());
                    if is_sent(info) || signal == libc::SIGTRAP {
                        libc::raise(signal);
                    }
                }
            }
            handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
                // SAFETY: with this flag the field holds such a function.
                let handler: Handle = unsafe { std::mem::transmute(handler) };
                handler(signal, info, context);
            }
            handler => {
                // SAFETY: without the flag the field holds such a function.
                let handler: extern "C" fn(i32) = unsafe { std::mem::transmute(handler) };
                handler(signal);
            }
        }
    }
}

/// Whether a process has sent the signal: the kernel has not raised it.
///
/// # Safety
/// `info` is live.
pub(crate) unsafe fn is_sent(info: *const libc::siginfo_t) -> bool {
    // SAFETY: live by the contract.
    unsafe { (*info).si_code <= 0 }
}

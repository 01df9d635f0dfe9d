//! Child processes: starting one and waiting for its end, without blocking a core.
//!
//! A helper thread starts the program, because that blocks until it runs. The end of a child is
//! awaited through a pidfd. Where the kernel refuses one (before Linux 5.3, or a filter of system
//! calls), the child is polled. Any other process is an [`OtherProcess`].

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::process::Child;

use super::Core;
use crate::driver::{MetaOp, MetaOut, Program};
use crate::io::foreign::on_own_thread;
use crate::io::unix::outcome;
use crate::io::watch::Watch;

/// Time between two checks of a child for which there is no pidfd.
const POLL_NS: u64 = 1_000_000;

impl Core {
    /// Starts a program and waits until it runs. The caller must reap the [`Child`] after its end,
    /// for example with [`Core::reap`].
    ///
    /// # Errors
    /// When it cannot be started, as the system gives them.
    pub async fn start_process(&self, program: Program) -> io::Result<Child> {
        match self.meta(MetaOp::StartProcess(program)).await? {
            MetaOut::Process(child) => Ok(child),
            other => unreachable!("the start of a process answered {other:?}"),
        }
    }

    /// Waits until the child process `pid` has ended. It does not reap the child: the caller asks
    /// for its exit status afterwards, which then does not block. `pid` must be a child of this
    /// process that is not reaped during the wait.
    ///
    /// # Errors
    /// `ECHILD` when `pid` is not a child of this process; others as the system gives them.
    pub async fn process_end(&self, pid: u32) -> io::Result<()> {
        let watch = pidfd(pid).map(|fd| Watch::new(self, fd));
        while !has_ended(pid)? {
            match &watch {
                Ok(watch) => watch.readable().await?,
                Err(_) => self.sleep_ns(POLL_NS).await,
            }
        }
        Ok(())
    }

    /// Reaps a child that has ended, so that its number is free. A thread does it: the kernel takes
    /// the child's `/proc` apart meanwhile, which took half a minute where others had read it.
    ///
    /// # Errors
    /// When no thread can be started: it stays in the process table.
    pub async fn reap(&self, pid: u32) -> io::Result<()> {
        let wait = move || {
            let nothing = std::ptr::null_mut::<libc::siginfo_t>();
            // SAFETY: a null pointer says that the status is not wanted.
            unsafe { libc::waitid(libc::P_PID, pid, nothing, libc::WEXITED | libc::WNOHANG) };
        };
        on_own_thread(self, "millrace-reap", wait).await
    }
}

/// A process that this one has not started. Its number may be given to another one when it has
/// ended, so a descriptor stands for it.
#[derive(Debug)]
pub struct OtherProcess(OwnedFd);

impl OtherProcess {
    /// The process that has this number now.
    ///
    /// # Errors
    /// When there is none; others as the system gives them.
    pub fn open(pid: u32) -> io::Result<OtherProcess> {
        pidfd(pid).map(OtherProcess)
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn end(&self, core: &Core) -> io::Result<()> {
        Watch::new(core, self.0.try_clone()?).readable().await
    }

    /// Kills it, if it has not ended yet.
    pub fn kill(&self) {
        let fd = self.0.as_raw_fd();
        let nothing = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: without a pointer the kernel makes the signal's information itself.
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, libc::SIGKILL, nothing, 0) };
    }
}

impl From<OwnedFd> for OtherProcess {
    /// From the descriptor of another [`OtherProcess`].
    fn from(fd: OwnedFd) -> OtherProcess {
        OtherProcess(fd)
    }
}

impl AsFd for OtherProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A descriptor that becomes readable when the process ends.
fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = outcome(fd as isize)?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Whether a child has ended; leaves its exit status for the caller.
fn has_ended(pid: u32) -> io::Result<bool> {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is live until the call returns.
    let done = unsafe { libc::waitid(libc::P_PID, pid, &raw mut info, options) };
    outcome(done as isize)?;
    // SAFETY: `waitid` filled the fields for a child, or left them zero.
    Ok(unsafe { info.si_pid() } != 0)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::process::processors::processors;
    use crate::runtime::{DriverKind, RuntimeConfig, run};
    use crate::wait::{Elapsed, timeout};

    #[test]
    fn the_end_of_a_child_is_awaited_and_its_status_is_left_to_the_caller() {
        let config = RuntimeConfig {
            processors: processors()[..1].to_vec(),
            driver: DriverKind::Epoll,
            ..RuntimeConfig::default()
        };
        let done = run(&config, |core| async move {
            let (input, keep) = io::pipe().unwrap();
            let program = Program {
                path: "/bin/sh".into(),
                arguments: vec!["-c".into(), "read line; exit 3".into()],
                variables: Vec::new(),
                input: Arc::new(input.into()),
            };
            let mut child = core.start_process(program).await.unwrap();
            let pid = child.id();
            let early = timeout(&core, 20_000_000, core.process_end(pid)).await;
            assert!(matches!(early, Err(Elapsed)));
            assert!(child.try_wait().unwrap().is_none());
            drop(keep);
            core.process_end(pid).await.unwrap();
            core.process_end(pid).await.unwrap();
            assert_eq!(child.try_wait().unwrap().unwrap().code(), Some(3));
            let gone = core.process_end(pid).await.unwrap_err();
            assert_eq!(gone.raw_os_error(), Some(libc::ECHILD));
        });
        done.unwrap();
    }
}

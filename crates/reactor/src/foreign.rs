//! Descriptors that another process sent, before anything is done with them.
//!
//! A descriptor can be of a file that its sender serves itself (FUSE), of a file on a machine that
//! is gone, or of a socket that lingers. Then `fstat`, a page of a mapping, and even `close` wait
//! for as long as the sender likes. So a descriptor is only used, or closed, by a core when it is
//! of a kind of which none of this waits: a counter, shared memory (memfd, `/dev/shm`, huge pages),
//! a Unix socket, or a regular file of a local file system. Whatever else comes is closed by a
//! thread of its own, for which nobody waits but the one who asked.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc;

use crate::core::Core;
use crate::eventfd::{EventFd, is_counter};
use crate::unix::socket_option;

/// Local file systems whose files have no device of their own to show it by (linux/magic.h):
/// btrfs, overlayfs, ZFS, bcachefs.
const LOCAL: [u64; 4] = [0x9123_683E, 0x794C_7630, 0x2FC1_2FC1, 0xCA45_1A4E];

/// Whether it is of a known kind. Waits for nothing, whatever it is. `None`: a regular file of
/// which only a call that may wait can tell.
fn is_known(fd: BorrowedFd<'_>) -> io::Result<Option<bool>> {
    // SAFETY: takes no pointers. Only memory has seals.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals >= 0
        || socket_option(fd, libc::SO_DOMAIN).is_ok_and(|domain| domain == libc::AF_UNIX)
        || is_counter(fd)?
    {
        return Ok(Some(true));
    }
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: an empty C string and a live struct to write. With this flag no server is asked.
    let done = unsafe {
        libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_TYPE, &raw mut stat)
    };
    if done != 0 || u32::from(stat.stx_mode) & libc::S_IFMT != libc::S_IFREG {
        return Ok(Some(false));
    }
    // A file system on a block device of this machine.
    Ok((stat.stx_dev_major != 0).then_some(true))
}

/// May wait.
fn is_local(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut stat: libc::statfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: a live struct to write.
    let done = unsafe { libc::fstatfs64(fd.as_raw_fd(), &raw mut stat) };
    done == 0 && LOCAL.contains(&(stat.f_type as u64 & u64::from(u32::MAX)))
}

/// Lets descriptors of another process in, if all of them are of a kind that can make nobody wait.
/// Else none: they are closed, and this suspends until they are, which may be never.
///
/// # Errors
/// `InvalidInput` when one is of another kind; others when the system has no room to find out.
pub async fn admit(core: &Core, fds: Vec<OwnedFd>) -> io::Result<Vec<OwnedFd>> {
    let mut ask = false;
    let mut known = Ok(true);
    for fd in &fds {
        match is_known(fd.as_fd()) {
            Ok(Some(is)) => known = known.map(|known| known && is),
            Ok(None) => ask = true,
            Err(error) => known = Err(error),
        }
    }
    match known {
        Ok(true) if !ask => Ok(fds),
        Ok(known) => match elsewhere(core, fds, known).await? {
            Some(fds) => Ok(fds),
            None => {
                let what = "a descriptor that is no eventfd, no shared memory, no Unix socket and \
                            no local file";
                Err(io::Error::new(io::ErrorKind::InvalidInput, what))
            }
        },
        Err(error) => {
            elsewhere(core, fds, false).await?;
            Err(error)
        }
    }
}

/// Has a thread find out what a core must not ask, or, if they are not wanted, close them.
#[expect(clippy::disallowed_methods, reason = "these calls have nobody else to wait in")]
async fn elsewhere(
    core: &Core,
    fds: Vec<OwnedFd>,
    wanted: bool,
) -> io::Result<Option<Vec<OwnedFd>>> {
    // Should there be no thread, they stay open: a close may wait as well.
    let fds = ManuallyDrop::new(fds);
    let over = EventFd::new()?;
    let (watch, (tell, told)) = (over.watch(core)?, mpsc::channel());
    let body = move || {
        let fds = ManuallyDrop::into_inner(fds);
        let local =
            |fd: &OwnedFd| matches!(is_known(fd.as_fd()), Ok(Some(true))) || is_local(fd.as_fd());
        let admitted = Some(fds).filter(|fds| wanted && fds.iter().all(local));
        // Nobody listens when the connection is gone.
        let _ = tell.send(admitted);
        over.signal();
    };
    std::thread::Builder::new().name("millrace-foreign".to_owned()).spawn(body)?;
    watch.raised().await?;
    Ok(told.try_recv().unwrap_or_default())
}

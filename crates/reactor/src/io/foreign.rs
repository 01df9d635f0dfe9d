//! Checks of descriptors that another process sent, before their first use.
//!
//! A descriptor can be of a file that its sender serves itself (FUSE), of a file on a machine that
//! is gone, or of a socket that lingers. Then `fstat`, a page of a mapping, and even `close` block
//! for as long as the sender likes. So a core only uses, or closes, a descriptor of a kind that
//! never blocks: an eventfd, shared memory (memfd, `/dev/shm`, huge pages), a Unix socket, or a
//! regular file of a local file system. A thread of its own closes any other descriptor; only the
//! caller waits for it.
//!
//! Descriptors that wait in a Unix socket are closed with it, so one is admitted if nothing waits
//! there, and then it takes nothing any more: it is only good for sending.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc;

use crate::core::Core;
use crate::io::eventfd::{EventFd, is_counter};
use crate::io::unix::socket_option;

/// Local file systems whose files do not show a block device (linux/magic.h): btrfs, overlayfs,
/// ZFS, bcachefs.
const LOCAL: [u64; 4] = [0x9123_683E, 0x794C_7630, 0x2FC1_2FC1, 0xCA45_1A4E];

/// Whether it is of a known kind. Never blocks. `None`: a regular file for which only a call that
/// may block can tell.
fn is_known(fd: BorrowedFd<'_>) -> io::Result<Option<bool>> {
    // SAFETY: takes no pointers. Only memory has seals.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals >= 0 || is_counter(fd)? {
        return Ok(Some(true));
    }
    if let Ok(domain) = socket_option(fd, libc::SO_DOMAIN) {
        return Ok(Some(domain == libc::AF_UNIX && takes_nothing(fd)?));
    }
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: an empty C string and a live struct to write. With this flag the kernel asks no
    // server.
    let done = unsafe {
        libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_TYPE, &raw mut stat)
    };
    if done != 0 || u32::from(stat.stx_mode) & libc::S_IFMT != libc::S_IFREG {
        return Ok(Some(false));
    }
    // A file system on a block device of this machine.
    Ok((stat.stx_dev_major != 0).then_some(true))
}

/// Lets a Unix socket take nothing any more. Returns false if something waits there already; also
/// if it is not a stream, because a packet may be empty but for descriptors, and if it listens,
/// because what waits in connections that wait is not known.
fn takes_nothing(fd: BorrowedFd<'_>) -> io::Result<bool> {
    if socket_option(fd, libc::SO_TYPE)? != libc::SOCK_STREAM
        || socket_option(fd, libc::SO_ACCEPTCONN)? != 0
    {
        return Ok(false);
    }
    // SAFETY: takes no pointers. One that is not connected takes nothing anyway.
    unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_RD) };
    let (mut byte, how) = (0_u8, libc::MSG_PEEK | libc::MSG_DONTWAIT);
    // SAFETY: a live variable of one byte to write.
    let waits = unsafe { libc::recv(fd.as_raw_fd(), (&raw mut byte).cast(), 1, how) };
    Ok(waits <= 0)
}

/// May block.
fn is_local(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut stat: libc::statfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: a live struct to write.
    let done = unsafe { libc::fstatfs64(fd.as_raw_fd(), &raw mut stat) };
    done == 0 && LOCAL.contains(&(stat.f_type as u64 & u64::from(u32::MAX)))
}

/// Admits descriptors of another process if all of them are of a kind that never blocks. Else all
/// are closed, and this waits until they are, which may be for ever.
///
/// # Errors
/// `InvalidInput` when one is of another kind; others when the system cannot tell.
pub async fn admit(core: &Core, fds: Vec<OwnedFd>) -> io::Result<Vec<OwnedFd>> {
    let admitted = may_admit(core, &fds).await;
    if let Ok(true) = admitted {
        return Ok(fds);
    }
    close_foreign(core, fds).await?;
    let what = "a descriptor must be an eventfd, shared memory, a Unix socket or a local file";
    admitted.and(Err(io::Error::new(io::ErrorKind::InvalidInput, what)))
}

/// Whether all descriptors of another process are of a kind that never blocks. Suspends if only a
/// call can tell that may block, perhaps for ever.
///
/// # Errors
/// As the system gives them.
pub async fn may_admit(core: &Core, fds: &[OwnedFd]) -> io::Result<bool> {
    let mut ask = Vec::new();
    for fd in fds {
        match is_known(fd.as_fd())? {
            Some(true) => {}
            Some(false) => return Ok(false),
            None => ask.push(fd),
        }
    }
    // To close a copy may block, too.
    let mut copies = Vec::new();
    let copied = ask.iter().try_for_each(|fd| fd.try_clone().map(|copy| copies.push(copy)));
    let admitted = match copies.is_empty() {
        true => true,
        false => elsewhere(core, copies).await?,
    };
    copied.map(|()| admitted)
}

/// Closes a connection to another process, of which this is the last clone, or the place where such
/// connections wait. Descriptors may wait in it, which are closed with it: then this suspends until
/// they are, perhaps for ever.
///
/// # Errors
/// As the system gives them; then it was closed all the same.
pub async fn close_door(core: &Core, door: impl AsFd) -> io::Result<()> {
    let fd = door.as_fd();
    if core.is_simulated() || socket_option(fd, libc::SO_ACCEPTCONN)? == 0 && takes_nothing(fd)? {
        return Ok(());
    }
    let copy = fd.try_clone_to_owned()?;
    drop(door);
    close_foreign(core, vec![copy]).await
}

/// Closes descriptors that were not admitted. Suspends until they are closed, perhaps for ever.
///
/// # Errors
/// When no thread can be started: they stay open.
pub async fn close_foreign(core: &Core, fds: Vec<OwnedFd>) -> io::Result<()> {
    elsewhere(core, fds).await.map(drop)
}

/// Lets a thread make the calls that may block a core: it finds out whether all of them are of
/// files of local file systems, or of a kind that is known, and closes them.
async fn elsewhere(core: &Core, fds: Vec<OwnedFd>) -> io::Result<bool> {
    // If no thread can be started, they stay open: a close may block as well.
    let fds = ManuallyDrop::new(fds);
    let body = move || {
        let fds = ManuallyDrop::into_inner(fds);
        let local =
            |fd: &OwnedFd| matches!(is_known(fd.as_fd()), Ok(Some(true))) || is_local(fd.as_fd());
        let are_local = fds.iter().all(local);
        drop(fds);
        are_local
    };
    on_own_thread(core, "millrace-foreign", body).await
}

/// Makes a call that may block on a thread of its own. Suspends until it returns.
///
/// # Errors
/// When no thread can be started: `call` is dropped.
#[expect(clippy::disallowed_methods, reason = "a call that may block needs a thread of its own")]
pub(crate) async fn on_own_thread<T: Default + Send + 'static>(
    core: &Core,
    name: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let over = EventFd::new()?;
    let (watch, (tell, told)) = (over.watch(core)?, mpsc::channel());
    let body = move || {
        // The receiver is gone when nobody waits any more.
        let _ = tell.send(call());
        over.signal();
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(body)?;
    watch.raised().await?;
    Ok(told.try_recv().unwrap_or_default())
}

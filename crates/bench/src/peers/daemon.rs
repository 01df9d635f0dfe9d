//! qemu-storage-daemon, which serves a disk over vhost-user-blk as our node does.

use std::path::Path;
use std::time::Duration;

use super::Setup;
use super::search::Knob;
use super::tool::{Background, Tool};

/// The daemon's main loop, or an I/O thread that polls for this number of nanoseconds before it
/// sleeps.
pub const IOTHREAD: Knob = &[
    &[],
    &["--object", "iothread,id=thread"],
    &["--object", "iothread,id=thread,poll-max-ns=100000"],
    &["--object", "iothread,id=thread,poll-max-ns=1000000"],
];

/// Attempts to get the lock of the file, and the pause between two of them.
const LOCK_TRIES: u32 = 50;
const LOCK_WAIT: Duration = Duration::from_millis(100);

/// Starts the daemon with a block device at a socket. A target of ours that was just killed may
/// hold its lock of the file a moment longer than its launcher lives, so a daemon that fails to
/// get the lock is started again.
#[expect(clippy::disallowed_methods, reason = "waits for another program, on no core")]
pub fn start(
    setup: &Setup,
    node: &str,
    socket: &Path,
    flags: &[&str],
) -> Result<Background, String> {
    let mut tries = 0;
    loop {
        match start_once(setup, node, socket, flags) {
            Err(error) if error.contains("lock") && tries < LOCK_TRIES => {
                tries += 1;
                std::thread::sleep(LOCK_WAIT);
            }
            result => return result,
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "waits for another program, on no core")]
fn start_once(
    setup: &Setup,
    node: &str,
    socket: &Path,
    flags: &[&str],
) -> Result<Background, String> {
    let _ = std::fs::remove_file(socket);
    let thread = if flags.is_empty() { "" } else { ",iothread=thread" };
    let export = format!(
        "type=vhost-user-blk,id=export,node-name=disk,writable=on,addr.type=unix,addr.path={}{thread}",
        socket.display()
    );
    let mut daemon = Tool::pinned(setup.processor, "qemu-storage-daemon")
        .args(flags.iter().copied())
        .args(["--blockdev".to_owned(), format!("{node},node-name=disk")])
        .args(["--export".to_owned(), export])
        .start()?;
    for _ in 0..1000 {
        if socket.exists() {
            return Ok(daemon);
        }
        daemon.check()?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Err("qemu-storage-daemon does not listen".to_owned())
}

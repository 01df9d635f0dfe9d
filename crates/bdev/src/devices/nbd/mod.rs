//! Exports of NBD servers, here or on other machines.
//!
//! **One connection.** A device has one connection to its server, whatever the number of cores: the
//! core that has opened the device keeps it (`hub`), and the channels of all cores send their
//! requests there and get the answers back, through inboxes. A second connection would be of use to
//! few: it is right only with servers that promise one view to all connections
//! (`NBD_FLAG_CAN_MULTI_CONN`), many servers take only one, and the network is slower than the hop.
//!
//! 1. A channel copies the data of a write out of the guest's memory, and sends it in pieces of at
//!    most 1 MiB to the hub. All its pieces together hold a bounded number of bytes; others wait.
//! 2. The hub gives each a cookie, and sends it. It keeps the data until the answer has come.
//! 3. The answer returns to the channel, which copies what was read into the guest's memory.
//!
//! So neither the kernel nor another core touches the guest's memory. Each request allocates,
//! unlike those of other devices.
//!
//! **A lost connection.** The hub connects again, and repeats the requests that were not answered,
//! once the server has shown the same export or a larger one. A repeated request does no harm by
//! itself, because its range is its own until it is answered. What the old connection has left in
//! the server may still be done later; servers do that at once or drop it, and nothing in the
//! protocol tells. After `reconnect-delay` the requests fail, and so do later ones, until there is
//! a connection.
//!
//! **The server may lie.** What it sends is checked by `nbdproto`. A server that violates the
//! protocol is treated as one whose connection is lost, and a request that has been sent on several
//! connections without an answer fails.
//!
//! A flush that the *server* has failed poisons the device, as that of a file does.

mod channel;
mod dial;
mod hub;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nbdproto::Export;
use reactor::inbox::Sender;
use reactor::reply::reply;
use reactor::{Bell, Core, Extent, UnixPackets};

pub(crate) use self::channel::NbdChannel;
use self::dial::Dial;
pub use self::dial::serve_line;
use self::hub::{Hub, Request, Ticket, What};
use crate::error::{Error, ErrorKind};
use crate::geometry::{DISCARD_MAX, Geometry, SEGMENTS, ZEROES_MAX};
use crate::uri::NbdExport;

/// The smallest block of a device, in bytes.
const BLOCK_BYTES_MIN: u32 = 512;
/// The longest piece of a read or a write.
const PIECE_BYTES: u64 = 1 << 20;
/// The longest piece of a discard or of zeroes, and the longest range that is asked for holes.
const RANGE_BYTES_MAX: u64 = 1 << 30;
/// Attempts to open a device. A name may have several addresses.
const ATTEMPTS: u32 = 3;

/// An export of a server.
pub(crate) struct NbdDevice {
    shared: Arc<Shared>,
    /// The size that the server has told, in whole blocks.
    size_bytes: u64,
    /// The line to the process that connects.
    line: Option<OwnedFd>,
    allocation: bool,
}

/// What channels use.
struct Shared {
    requests: Sender<Request>,
    /// Of the core that has the hub.
    bell: Bell,
    /// The device has gone: no more requests come.
    is_gone: AtomicBool,
    flush_failed: AtomicBool,
    fua: bool,
    trims: bool,
    writes_zeroes: bool,
    /// At most [`PIECE_BYTES`].
    piece_bytes: u64,
}

impl Shared {
    fn send(&self, request: Request) {
        // If the hub has gone, the request is dropped, and so answered with an error. It has room
        // for more requests than all channels together may have.
        drop(self.requests.send(request));
        self.bell.ring();
    }
}

impl NbdDevice {
    /// Connects to the server, or has the process at the end of a line connect.
    pub async fn open(
        core: &Core,
        export: &NbdExport,
        line: Option<OwnedFd>,
    ) -> Result<(NbdDevice, Geometry), Error> {
        let failed = |error: io::Error| Error::io(format!("cannot open {export}"), error);
        let dial = match &line {
            None => Dial::Here(export.server.clone()),
            Some(line) => {
                let line = line.try_clone().and_then(|line| UnixPackets::from_fd(core, line));
                Dial::There(line.map_err(failed)?)
            }
        };
        let mut nth = 0;
        let (socket, agreed, input) = loop {
            match hub::connect(core, &dial, &export.export, nth).await {
                Ok(connection) => break connection,
                Err(error) if nth + 1 < ATTEMPTS && error.kind() != io::ErrorKind::TimedOut => {
                    nth += 1;
                }
                Err(error) => return Err(failed(error)),
            }
        };
        let unsupported =
            |why: &str| Error::new(ErrorKind::Unsupported, format!("{export}: {why}"));
        let least = agreed.block_bytes.max(BLOCK_BYTES_MIN);
        let block = export.block.unwrap_or(least);
        if block < least {
            let why = format!("block={block} is smaller than its block of {least} bytes");
            return Err(unsupported(&why));
        }
        let whole = |bytes: u64| bytes / u64::from(block) * u64::from(block);
        let piece_bytes = whole(PIECE_BYTES.min(agreed.payload_bytes_max.into()));
        if piece_bytes == 0 {
            return Err(unsupported("its requests are shorter than a block"));
        }
        let size_bytes = whole(agreed.size_bytes);
        if size_bytes == 0 {
            return Err(unsupported("it has no whole block"));
        }
        let geometry = geometry(&agreed, export, block, size_bytes);
        let (requests, inbox) = reactor::inbox::inbox(hub::REQUESTS_MAX);
        let shared = Arc::new(Shared {
            requests,
            bell: core.bell(),
            is_gone: AtomicBool::new(false),
            flush_failed: AtomicBool::new(false),
            fua: export.fua,
            trims: agreed.trims(),
            writes_zeroes: agreed.writes_zeroes(),
            piece_bytes,
        });
        let allocation = agreed.allocation.is_some();
        Hub::start(core, export, dial, shared.clone(), inbox, (socket, agreed, input));
        Ok((NbdDevice { shared, size_bytes, line, allocation }, geometry))
    }

    /// The line to the process that connects, if this one does not.
    pub fn line(&self) -> Option<BorrowedFd<'_>> {
        self.line.as_ref().map(AsFd::as_fd)
    }

    /// Only checks that the export is large enough.
    pub fn resize(&self, size_bytes: u64) -> Result<(), Error> {
        if size_bytes <= self.size_bytes {
            return Ok(());
        }
        let text = format!("nbd: the export has {} bytes, not {size_bytes}", self.size_bytes);
        Err(Error::new(ErrorKind::Unsupported, text))
    }

    /// Whether the server has failed a flush.
    pub fn flush_failed(&self) -> bool {
        self.shared.flush_failed.load(Ordering::Relaxed)
    }

    pub fn set_flush_failed(&self) {
        self.shared.flush_failed.store(true, Ordering::Relaxed);
    }

    /// What the server tells of a range; nothing if it does not.
    pub async fn extents(&self, offset: u64, len: u64, max: usize) -> Vec<Extent> {
        if !self.allocation {
            return Vec::new();
        }
        let (sender, found) = reply();
        let what = What::Extents { one: max == 1 };
        let len = len.min(RANGE_BYTES_MAX) as u32;
        let ticket = Ticket::of_task(sender);
        self.shared.send(Request { what, offset, len, fua: false, data: Vec::new(), ticket });
        let mut found = found.await.unwrap_or_default();
        found.truncate(max);
        found
    }
}

impl Drop for NbdDevice {
    fn drop(&mut self) {
        self.shared.is_gone.store(true, Ordering::Relaxed);
        self.shared.bell.ring();
    }
}

fn geometry(agreed: &Export, export: &NbdExport, block: u32, size_bytes: u64) -> Geometry {
    let physical = agreed.preferred_bytes.min(64 << 10).max(block);
    let read_only = export.read_only || agreed.is_read_only();
    Geometry {
        size_bytes,
        block_size: block,
        physical_block_size: physical,
        min_io: physical,
        opt_io: 0,
        read_only,
        volatile_cache: !export.fua && agreed.flushes(),
        discard: agreed.trims() && !read_only,
        // Zeroes are written if the server has no request for them.
        write_zeroes: !read_only,
        zeroes_after_discard: false,
        max_segments: SEGMENTS,
        discard_alignment: physical,
        discard_max: DISCARD_MAX,
        write_zeroes_max: ZEROES_MAX,
    }
}

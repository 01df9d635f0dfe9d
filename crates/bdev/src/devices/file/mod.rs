//! Files and block devices of the host.
//!
//! Most requests are one operation of the reactor on the guest's own memory. The others become a
//! *job* of several steps:
//!
//! - A request whose memory is not aligned for direct I/O goes through a buffer of the core's pool,
//!   in pieces (`job.rs`). If the core's pool is used up, the request waits;
//! - For zeroes, the file deallocates the range, or zeroes it by one call, or zeroes are written:
//!   the first of these that the file supports.
//!
//! A request that must be durable when it completes (`write=through`, or a guest without a write
//! cache) is done and then flushed. One flush is in flight at a time. It covers all requests that
//! were done before it was submitted, and they get its outcome. Requests that are done meanwhile
//! wait for the next flush. One call with `RWF_DSYNC` for each write was slower at nearly every
//! depth: see docs/BENCHMARKS.md.
//!
//! A failed flush poisons the file: every later write and flush fails, on all cores, until the
//! device is opened again, because the kernel may have dropped any of the data.
//!
//! If the length of a file is not a multiple of the block, the device ends with the last whole
//! block.

mod channel;
mod job;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use reactor::{Core, Extent, Image, ImageLock, ImageOpening, MappedFile, Mapping, Mode, Space};

use crate::error::{Error, ErrorKind};
use crate::geometry::{DISCARD_MAX, Geometry, SEGMENTS, ZEROES_MAX};
use crate::uri::{Base, Engine, Lock};
pub(crate) use channel::FileChannel;
pub(crate) use job::copy_segments;

/// An open file, shared by all cores.
pub(crate) struct FileDevice {
    image: Image,
    /// `Uring` in a simulated world, whatever was requested.
    engine: Engine,
    fua: bool,
    /// The lock that it takes while a virtual machine uses it, if it does.
    lock: Option<ImageLock>,
    /// With `engine=mmap`: only for reading, see `docs/DISKS.md`.
    mapping: Option<Arc<Mapping>>,
}

/// The lock that an image has while a virtual machine uses it, if it has one only then.
fn lock_for_use(lock: Lock, read_only: bool) -> Option<ImageLock> {
    let wanted = if read_only { ImageLock::Shared } else { ImageLock::Exclusive };
    (lock == Lock::Ring).then_some(wanted)
}

/// Opens the image of a file, or takes an open one. For an open one the caller may know whether it
/// supports punching holes.
pub(crate) async fn open_image(
    core: &Core,
    base: &Base,
    open: Option<(OwnedFd, Option<bool>)>,
) -> Result<Image, Error> {
    let Base::File { path, engine, read_only, direct, lock, .. } = base else {
        unreachable!("only files have images")
    };
    let mode = match direct {
        Some(false) => Mode::Buffered,
        _ if *engine == Engine::Mmap => Mode::Buffered,
        _ => Mode::Direct,
    };
    let how = ImageOpening { read_only: *read_only, mode, lock: *lock == Lock::Open };
    let is_new = open.is_none();
    let image = match open {
        None => core.open_image(path, how).await,
        Some((open, holes)) => core.take_image(path, how, open, holes).await,
    };
    let name = path.display();
    let image = image.map_err(|error| Error::io(format!("cannot open {name}"), error))?;
    if let Some(wanted) = lock_for_use(*lock, *read_only).filter(|_| is_new) {
        // A file system without locks is found out before a guest waits for one.
        let tried = match core.lock_image(&image.file, wanted).await {
            Ok(()) => core.lock_image(&image.file, ImageLock::None).await,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        };
        let refused = |error| Error::io(format!("lock=ring: cannot lock {name}"), error);
        tried.map_err(refused)?;
    }
    Ok(image)
}

impl FileDevice {
    /// Opens the file, or takes the open file that came from another process.
    pub async fn open(
        core: &Core,
        base: &Base,
        open: Option<(OwnedFd, Option<bool>)>,
    ) -> Result<(FileDevice, Geometry), Error> {
        let Base::File { path, engine, fua, read_only, direct, lock, block } = base else {
            unreachable!("only files are opened here")
        };
        let name = path.display();
        let image = open_image(core, base, open).await?;
        let must_be_direct = *direct == Some(true) || *engine == Engine::Aio;
        if must_be_direct && image.file.alignment() == 1 {
            let text = format!("{name}: its file system does not support direct I/O");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let least = image.info.block_size;
        let block_size = block.unwrap_or(least);
        if block_size < least {
            let text =
                format!("{name}: block={block_size} is smaller than its block of {least} bytes");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let size_bytes = image.file.size() / u64::from(block_size) * u64::from(block_size);
        let info = image.info;
        let physical_block_size = info.physical_block_size.max(block_size);
        let geometry = Geometry {
            size_bytes,
            block_size,
            physical_block_size,
            min_io: physical_block_size,
            opt_io: info.optimal_io,
            read_only: *read_only,
            volatile_cache: !fua,
            discard: info.punch_hole,
            write_zeroes: !read_only,
            zeroes_after_discard: info.punch_hole,
            max_segments: SEGMENTS,
            discard_alignment: physical_block_size,
            discard_max: DISCARD_MAX,
            write_zeroes_max: ZEROES_MAX,
        };
        let engine = if core.is_simulated() { Engine::Uring } else { *engine };
        let mapping = match engine {
            Engine::Mmap => Mapping::new(&image.file, size_bytes, false, core.cores()),
            _ => None,
        };
        let lock = lock_for_use(*lock, *read_only);
        Ok((FileDevice { image, engine, fua: *fua, lock, mapping }, geometry))
    }

    /// The open file, which holds the lock.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.image.file.descriptor()
    }

    /// Whether a flush has failed, so that nothing more is written.
    pub fn flush_failed(&self) -> bool {
        self.image.file.flush_failed()
    }

    pub fn set_flush_failed(&self) {
        self.image.file.set_flush_failed();
    }

    /// The holes of the file. A block device does not tell.
    pub async fn extents(&self, core: &Core, offset: u64, len: u64, max: usize) -> Vec<Extent> {
        let range = offset..offset + len;
        core.extents(&self.image.file, range, max).await.unwrap_or_default()
    }

    /// The lock that it takes while a virtual machine uses it, if it does.
    pub fn lock(&self) -> Option<ImageLock> {
        self.lock
    }

    /// Locks or unlocks the image.
    pub async fn set_lock(&self, core: &Core, lock: ImageLock) -> Result<(), Error> {
        let locked = core.lock_image(&self.image.file, lock).await;
        let name = || format!("cannot lock {}", self.image.file.path().display());
        locked.map_err(|error| Error::io(name(), error))
    }

    /// Who has claimed the image last; empty if nobody has, or if it is not for one user alone.
    pub async fn owner(&self, core: &Core) -> Result<Vec<u8>, Error> {
        if self.lock != Some(ImageLock::Exclusive) {
            return Ok(Vec::new());
        }
        let owner = core.image_owner(&self.image.file).await;
        owner.map_err(|error| Error::io(self.cannot("ask for the owner of"), error))
    }

    /// Claims the image, if it is for one user alone.
    pub async fn claim(&self, core: &Core, owner: String) -> Result<(), Error> {
        if self.lock != Some(ImageLock::Exclusive) {
            return Ok(());
        }
        let claimed = core.claim_image(&self.image.file, owner).await;
        claimed.map_err(|error| Error::io(self.cannot("claim"), error))
    }

    /// The length of the image now.
    pub async fn measure(&self, core: &Core) -> Result<u64, Error> {
        let failed = |error| Error::io(self.cannot("measure"), error);
        let (known, len) =
            (self.image.file.size(), core.measure(&self.image.file).await.map_err(failed)?);
        if len != known && self.mapping.is_some() {
            let file = core.attach(&self.image.file);
            let mapped = MappedFile::new(file, self.mapping.clone());
            mapped.set_len(len).await.map_err(failed)?;
        }
        Ok(len)
    }

    fn cannot(&self, what: &str) -> String {
        format!("cannot {what} {}", self.image.file.path().display())
    }

    /// The space of a regular file.
    pub async fn space(&self, core: &Core) -> Option<Space> {
        core.space(&self.image.file).await.ok().flatten()
    }

    /// The number of its file system, or of the block device.
    pub fn file_system(&self) -> u64 {
        self.image.file.device()
    }

    pub async fn resize(&self, core: &Core, size: u64) -> Result<(), Error> {
        let file = core.attach(&self.image.file);
        let text = || format!("cannot give {} {size} bytes", self.image.file.path().display());
        if self.image.info.block_device {
            let there = core.measure(&self.image.file).await;
            let there = there.map_err(|error| Error::io(text(), error))?;
            if there < size {
                let text = format!("{}: it has {there}", text());
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            return Ok(());
        }
        let mapped = MappedFile::new(file.clone(), self.mapping.clone());
        mapped.set_len(size).await.map_err(|error| Error::io(text(), error))?;
        file.sync_data().await.map_err(|error| Error::io(text(), error))
    }
}

//! Operations on names and on open files as a whole, as the helper threads make them on the host:
//! the part of [`State`] for directories, opening, lengths, locks and images.

use std::collections::BTreeMap;
use std::io::{self, PipeReader};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use super::disk::Plan;
use super::fault::Access;
use super::inode::InodeRef;
use super::state::{Descriptor, LEN_MAX, OpenFile, State, WAITING};
use super::trace::{Event, What};
use crate::driver::remote::{CoreAddress, Remote};
use crate::driver::{
    Extent, Fd, Image, ImageInfo, ImageOpening, MetaOp, MetaOut, Mode, Opening, SharedFile, SimFd,
    Space, Token,
};
use crate::io::unix::are_readable;

/// Bytes that a file occupies beside its contents.
const FILE_ROOM: u64 = 512;
/// The size of a disk without a limit.
const UNLIMITED: u64 = 1 << 50;

/// An open image. Its descriptors are the writing end of a pipe, which tells when the last of them
/// is closed.
pub(super) struct OpenImage {
    pipe: PipeReader,
    file: OpenFile,
    path: PathBuf,
    /// Whether its lock is exclusive; `None` without a lock.
    locked: Option<bool>,
}

impl OpenImage {
    fn is_open(&self) -> bool {
        !are_readable(&[self.pipe.as_raw_fd()])[0]
    }
}

/// An operation on names in flight.
pub(super) struct Name {
    pub core: u32,
    token: Token,
    op: MetaOp,
    shared: Arc<CoreAddress>,
    plan: Plan,
    pub name_error: Option<i32>,
    /// Number of changes of names when it was started.
    changes: u64,
}

impl State {
    pub fn meta(&mut self, core: usize, token: Token, op: MetaOp, shared: &Arc<CoreAddress>) {
        if self.crashed.is_some() {
            return;
        }
        let changed;
        let (kind, path) = match &op {
            MetaOp::Open { path, .. } => (0, path),
            MetaOp::List { path } => (1, path),
            MetaOp::ReadSmall { path, .. } => (2, path),
            MetaOp::LockShared { path } => (3, path),
            MetaOp::OpenForWriting { path, .. } => (4, path),
            MetaOp::Rename { to, .. } => (5, to),
            MetaOp::Remove { path } => (6, path),
            MetaOp::SyncDir { path } => (7, path),
            MetaOp::SetLen { file, .. }
            | MetaOp::Allocate { file, .. }
            | MetaOp::Measure { file }
            | MetaOp::Extents { file, .. }
            | MetaOp::LockImage { file, .. }
            | MetaOp::Owner { file, .. }
            | MetaOp::Space { file } => {
                // By its newest name, if it is an open file of this world.
                let own = self.file(file.fd().number());
                changed = own.map_or_else(Default::default, |own| own.inode.borrow().path.clone());
                let kind = match op {
                    MetaOp::SetLen { .. } => 8,
                    MetaOp::Allocate { .. } => 9,
                    MetaOp::Extents { .. } => 17,
                    MetaOp::Space { .. } => 18,
                    MetaOp::LockImage { .. } => 19,
                    MetaOp::Owner { .. } => 20,
                    _ => 13,
                };
                (kind, &changed)
            }
            MetaOp::LockExclusive { path } => (10, path),
            MetaOp::CreateDir { path } => (11, path),
            MetaOp::OpenImage { path, .. } => (12, path),
            MetaOp::StartProcess(program) => (13, &program.path),
            MetaOp::Link { to, .. } => (14, to),
            MetaOp::RemoveDir { path } => (15, path),
            MetaOp::Compute(_) => {
                changed = PathBuf::new();
                (16, &changed)
            }
        };
        let path = path.clone();
        self.note(core, token, What::Name { kind });
        let (trace, now) = (&mut self.trace, self.now);
        let name_error = match &op {
            // The disk has no part in it.
            MetaOp::Compute(_) => None,
            _ => self.disk.plan_name(&mut self.device, &path, |kind| {
                let what = What::Fault { kind: kind.number() };
                trace.note(Event { at: now, core: core as u32, token, what });
            }),
        };
        let (plan, len) = match &op {
            MetaOp::ReadSmall { max, .. } => {
                let size = self.disk.find(&path).map_or(0, |i| i.borrow().len());
                let len = size.min(*max as u64);
                (self.plan(core, token, Access::Read, &path, &(0..len), 512), len)
            }
            MetaOp::SyncDir { .. } => {
                let skip = self.disk.plan_skip(&mut self.device, &path);
                (Plan { skip, ..Plan::default() }, 0)
            }
            _ => (Plan::default(), 0),
        };
        let ns = self.latency(|config| &config.names, len) + plan.extra_ns;
        let mut when = self.after(ns);
        if plan.stuck {
            when.0 = WAITING;
        }
        let (shared, changes) = (shared.clone(), self.disk.names.changes());
        let core = core as u32;
        self.names.insert(when, Name { core, token, op, shared, plan, name_error, changes });
    }

    /// Answers the name operations that are due.
    pub fn answer_names(&mut self) {
        while let Some((when, _)) = self.names.first_key_value()
            && when.0 <= self.now
            && self.completes()
            && let Some((_, name)) = self.names.pop_first()
        {
            let (core, token, shared) = (name.core as usize, name.token, name.shared.clone());
            let answer = self.perform(name);
            let result = match &answer {
                Ok(_) => 0,
                Err(e) => -i64::from(e.raw_os_error().unwrap_or(i32::MAX)),
            };
            self.note(core, token, What::Done { result });
            shared.post(Remote::Meta(token, answer));
        }
    }

    pub fn next_name(&self) -> Option<u64> {
        self.names.keys().next().map(|when| when.0).filter(|&at| at != WAITING)
    }

    pub(super) fn perform(&mut self, name: Name) -> io::Result<MetaOut> {
        if let Some(errno) = name.name_error {
            return Err(io::Error::from_raw_os_error(errno));
        }
        match name.op {
            MetaOp::Open { path, buffered } => {
                let inode = self.disk.find(&path)?;
                let block = if buffered { 1 } else { self.config.block };
                Ok(self.open_file(path, OpenFile { inode, block, writable: false }))
            }
            MetaOp::List { path } => self.disk.list(&path).map(MetaOut::List),
            MetaOp::ReadSmall { path, max } => {
                let inode = self.disk.find(&path)?;
                let size = inode.borrow().bytes().len();
                // The helper continues after a short transfer.
                let whole = Plan { short: None, ..name.plan };
                let bytes = self
                    .disk
                    .read(&inode, 0, size.min(max), &whole)
                    .map_err(io::Error::from_raw_os_error)?;
                if size > max {
                    let text = format!("longer than {max} bytes");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
                Ok(MetaOut::Bytes(bytes))
            }
            MetaOp::LockShared { path } => {
                if self.disk.find(&path).is_err() {
                    return Ok(MetaOut::Lock(None));
                }
                self.lock(path, false)
            }
            MetaOp::OpenForWriting { path, opening, mode } => {
                self.room_for_name(&path, opening)?;
                let inode = self.disk.open_for_writing(&path, opening)?;
                if opening == Opening::Unshared && self.is_open(&inode) {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                let block = if mode == Mode::Buffered { 1 } else { self.config.block };
                Ok(self.open_file(path, OpenFile { inode, block, writable: true }))
            }
            MetaOp::Rename { from, to } => self.disk.rename(&from, &to).map(|()| MetaOut::Done),
            MetaOp::Link { from, to } => {
                self.room_for_name(&to, Opening::New)?;
                self.disk.link(&from, &to).map(|()| MetaOut::Done)
            }
            MetaOp::CreateDir { path } => self.disk.create_dir(&path).map(|()| MetaOut::Done),
            MetaOp::RemoveDir { path } => self.disk.remove_dir(&path).map(|()| MetaOut::Done),
            MetaOp::Remove { path } => self.disk.unlink(&path).map(|()| MetaOut::Done),
            MetaOp::SyncDir { path } => {
                if !self.disk.is_dir(&path) {
                    return Err(io::Error::from_raw_os_error(libc::ENOENT));
                }
                if !name.plan.skip {
                    self.disk.names.flush(&path, name.changes);
                }
                Ok(MetaOut::Done)
            }
            MetaOp::SetLen { file, len } => {
                let inode = self.writable(&file, len)?;
                self.room_for(&inode, len)?;
                inode.borrow_mut().cut(len);
                file.set_size(len);
                Ok(MetaOut::Done)
            }
            MetaOp::Allocate { file, len, keeps_len } => {
                let inode = self.writable(&file, len)?;
                self.room_for(&inode, len)?;
                inode.borrow_mut().reserve(len);
                if !keeps_len {
                    if inode.borrow().len() < len {
                        inode.borrow_mut().set_len(len);
                    }
                    file.grow_size(len);
                }
                Ok(MetaOut::Done)
            }
            MetaOp::OpenImage { path, how, open: None, .. } => {
                self.open_image(path, how).map(MetaOut::Image)
            }
            MetaOp::OpenImage { path, how, open: Some(open), .. } => {
                self.take_image(path, how, open.try_clone()?).map(MetaOut::Image)
            }
            // Only tests start processes here.
            MetaOp::StartProcess(_) => Err(io::ErrorKind::Unsupported.into()),
            MetaOp::Compute(work) => {
                self.computations += 1;
                Ok(MetaOut::Bytes((work.0)()))
            }
            MetaOp::Measure { file } => {
                let own = self.file(file.fd().number());
                let own = own.ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
                file.set_size(own.inode.borrow().len());
                Ok(MetaOut::Done)
            }
            // A simulated file has no holes.
            MetaOp::Extents { range, max, .. } => {
                let len = range.end.saturating_sub(range.start);
                let one = (len > 0 && max > 0).then_some(Extent { len, is_hole: false });
                Ok(MetaOut::Extents(one.into_iter().collect()))
            }
            MetaOp::LockImage { .. } | MetaOp::Owner { .. } => {
                Err(io::ErrorKind::Unsupported.into())
            }
            MetaOp::Space { file } => {
                let own = self.file(file.fd().number());
                let own = own.ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
                let occupied = own.inode.borrow().room();
                let total = self.disk.capacity.unwrap_or(UNLIMITED);
                let available = total.saturating_sub(self.used());
                Ok(MetaOut::Space(Some(Space { occupied, available, total, file_system: 0 })))
            }
            MetaOp::LockExclusive { path } => {
                if self.disk.find(&path).is_err() {
                    self.room_for_name(&path, Opening::New)?;
                    self.disk.open_for_writing(&path, Opening::New)?;
                }
                self.lock(path, true)
            }
        }
    }

    /// Whether a file is open.
    fn is_open(&mut self, inode: &InodeRef) -> bool {
        self.close_dropped();
        self.descriptors.iter().flatten().any(
            |descriptor| matches!(descriptor, Descriptor::File(file) if Rc::ptr_eq(&file.inode, inode)),
        )
    }

    fn open_file(&mut self, path: PathBuf, file: OpenFile) -> MetaOut {
        let (size, block) = (file.inode.borrow().len(), file.block);
        let fd = self.open(Descriptor::File(file));
        MetaOut::File(Arc::new(SharedFile::new(fd, path, size, block)))
    }

    /// Bytes that files occupy: those with a name and those that are open.
    pub fn used(&self) -> u64 {
        let open = self.descriptors.iter().flatten().filter_map(|descriptor| match descriptor {
            Descriptor::File(file) => Some(&file.inode),
            _ => None,
        });
        let all: BTreeMap<u32, u64> = open
            .chain(self.disk.names.now().values())
            .map(|inode| (inode.borrow().number, inode.borrow().room()))
            .collect();
        all.values().map(|room| room + FILE_ROOM).sum()
    }

    /// Whether there is space for a file's first `len` bytes.
    pub(super) fn room_for(&self, inode: &InodeRef, len: u64) -> io::Result<()> {
        let more = len.saturating_sub(inode.borrow().room());
        match self.disk.capacity {
            Some(capacity) if more > 0 && self.used() + more > capacity => {
                Err(io::Error::from_raw_os_error(libc::ENOSPC))
            }
            _ => Ok(()),
        }
    }

    /// Whether there is space for a file that may have to be made.
    fn room_for_name(&self, path: &Path, opening: Opening) -> io::Result<()> {
        let may_make = matches!(opening, Opening::New | Opening::NewOrEmptied);
        let makes = may_make && self.disk.find(path).is_err();
        match self.disk.capacity {
            Some(capacity) if makes && self.used() + FILE_ROOM > capacity => {
                Err(io::Error::from_raw_os_error(libc::ENOSPC))
            }
            _ => Ok(()),
        }
    }

    fn open_image(&mut self, path: PathBuf, how: ImageOpening) -> io::Result<Image> {
        let inode = self.disk.find(&path)?;
        let locked = how.lock.then_some(!how.read_only);
        if let Some(exclusive) = locked
            && self.is_locked(&path, exclusive)
        {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let block = if how.mode == Mode::Buffered { 1 } else { self.config.block };
        let file = OpenFile { inode, block, writable: !how.read_only };
        let (pipe, end) = io::pipe()?;
        self.images.retain(OpenImage::is_open);
        let open = OpenImage { pipe, file: file.clone(), path: path.clone(), locked };
        self.images.push(open);
        Ok(self.image(path, how, file, end.into()))
    }

    /// Takes an open image from another process of this world.
    fn take_image(
        &mut self,
        path: PathBuf,
        how: ImageOpening,
        descriptor: OwnedFd,
    ) -> io::Result<Image> {
        let number = |fd: OwnedFd| io::Result::Ok(std::fs::File::from(fd).metadata()?.ino());
        let wanted = number(descriptor.try_clone()?)?;
        for image in &self.images {
            if number(image.pipe.as_fd().try_clone_to_owned()?)? == wanted {
                let file = image.file.clone();
                return Ok(self.image(path, how, file, descriptor));
            }
        }
        Err(io::ErrorKind::InvalidInput.into())
    }

    fn image(
        &mut self,
        path: PathBuf,
        how: ImageOpening,
        file: OpenFile,
        descriptor: OwnedFd,
    ) -> Image {
        let (size, block) = (file.inode.borrow().len(), file.block);
        let info = ImageInfo {
            block_device: false,
            block_size: block.max(512),
            physical_block_size: 4096,
            optimal_io: 0,
            punch_hole: !how.read_only,
            zero_range: !how.read_only,
        };
        let number = self.insert(Descriptor::File(file));
        let fd = Fd::Sim(SimFd::new(number, self.closing.clone()).with_host(descriptor));
        let file = Arc::new(SharedFile::new(fd, path, size, block));
        // The lock is the open file's.
        Image { file, info, _lock: None }
    }

    /// The locks held on an image; true for exclusive ones.
    pub(super) fn images_locked(&self, path: &Path) -> impl Iterator<Item = bool> {
        let here = self.images.iter().filter(move |image| image.path == path && image.is_open());
        here.filter_map(|image| image.locked)
    }

    /// The file of a handle, to change its length.
    fn writable(&self, file: &SharedFile, len: u64) -> io::Result<InodeRef> {
        let own = self.file(file.fd().number()).filter(|file| file.writable);
        match own {
            Some(own) if len <= LEN_MAX => Ok(own.inode),
            Some(_) => Err(io::Error::from_raw_os_error(libc::EFBIG)),
            None => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }

    /// Whether an existing lock conflicts with a new one.
    fn is_locked(&mut self, path: &Path, exclusive: bool) -> bool {
        self.close_dropped();
        let held = self.descriptors.iter().flatten().filter_map(|descriptor| match descriptor {
            Descriptor::Lock { path: held, exclusive } if held == path => Some(*exclusive),
            _ => None,
        });
        let taken = held.chain(self.images_locked(path)).any(|other| exclusive || other);
        taken || self.disk.locked.contains(path)
    }

    fn lock(&mut self, path: PathBuf, exclusive: bool) -> io::Result<MetaOut> {
        if self.is_locked(&path, exclusive) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(MetaOut::Lock(Some(self.open(Descriptor::Lock { path, exclusive }))))
    }

    /// Drops all images of ended processes.
    pub(super) fn forget_images(&mut self) {
        self.images.clear();
    }

    /// Takes a core's operations on names in flight.
    pub(super) fn names_of(&mut self, core: usize) -> Vec<Name> {
        let mut own = Vec::new();
        for (when, name) in std::mem::take(&mut self.names) {
            if name.core as usize == core {
                own.push(name);
            } else {
                self.names.insert(when, name);
            }
        }
        own
    }
}

//! The simulated disk: names, files, faults, and the effects of reads and writes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::fault::{Access, Fault, FaultCounts, FaultKind};
use super::inode::{Inode, InodeRef};
use super::names::Names;
use super::rng::Rng;
use crate::driver::DirEntry;
use crate::driver::Opening;

/// What the device will do with one read, write or sync, decided at its submission.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    pub errno: Option<i32>,
    /// Most bytes to transfer.
    pub short: Option<u32>,
    /// The bit of the transfer to flip, modulo its length.
    pub flip: Option<u64>,
    pub extra_ns: u64,
    pub stuck: bool,
    /// A sync covers nothing.
    pub skip: bool,
}

/// Names and bytes of all files, and the faults.
#[derive(Default)]
pub(crate) struct Disk {
    pub names: Names,
    next_inode: u32,
    /// Files with an exclusive lock of another process.
    pub locked: BTreeSet<PathBuf>,
    pub faults: Vec<Fault>,
    /// Capacity for all files together in bytes.
    pub capacity: Option<u64>,
    pub counts: FaultCounts,
}

impl Disk {
    fn inode(&mut self, path: &Path, bytes: Vec<u8>) -> InodeRef {
        let number = self.next_inode;
        self.next_inode += 1;
        Rc::new(Inode::new(number, path.to_owned(), bytes).into())
    }

    /// Adds a durable file.
    pub fn add(&mut self, path: &Path, bytes: Vec<u8>) {
        let inode = self.inode(path, bytes);
        self.names.settle(path, Some(inode));
    }

    /// Removes a file durably.
    pub fn remove(&mut self, path: &Path) -> bool {
        self.names.settle(path, None)
    }

    pub fn find(&self, path: &Path) -> io::Result<InodeRef> {
        if let Some(inode) = self.names.now().get(path) {
            return Ok(inode.clone());
        }
        Err(io::Error::from_raw_os_error(if self.is_dir(path) {
            libc::EISDIR
        } else {
            libc::ENOENT
        }))
    }

    pub fn paths(&self) -> Vec<PathBuf> {
        self.names.now().keys().cloned().collect()
    }

    pub fn is_dir(&self, path: &Path) -> bool {
        self.names.is_dir(path) || self.below(path).next().is_some()
    }

    /// Opens or makes a file for writing.
    pub fn open_for_writing(&mut self, path: &Path, opening: Opening) -> io::Result<InodeRef> {
        match (self.find(path), opening) {
            (Ok(_), Opening::New) => Err(io::Error::from_raw_os_error(libc::EEXIST)),
            (Ok(inode), Opening::NewOrEmptied) => {
                if inode.borrow().room() > 0 {
                    inode.borrow_mut().cut(0);
                }
                Ok(inode)
            }
            (Ok(inode), Opening::Existing) => Ok(inode),
            (Ok(inode), _) if self.names.count(&inode) == 1 => Ok(inode),
            (Ok(_), Opening::OnlyName | Opening::Unshared) => Err(io::ErrorKind::WouldBlock.into()),
            (Err(error), opening) => {
                let missing = error.raw_os_error() == Some(libc::ENOENT);
                let place = path.parent().is_some_and(|dir| self.is_dir(dir));
                let makes = matches!(opening, Opening::New | Opening::NewOrEmptied);
                if !missing || !place || !makes {
                    return Err(error);
                }
                let inode = self.inode(path, Vec::new());
                self.names.link(path, inode.clone());
                Ok(inode)
            }
        }
    }

    /// Gives a file a second name.
    pub fn link(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let inode = self.find(from)?;
        let errno = match to.parent() {
            _ if self.find(to).is_ok() || self.is_dir(to) => libc::EEXIST,
            Some(parent) if self.is_dir(parent) => {
                self.names.link(to, inode);
                return Ok(());
            }
            _ => libc::ENOENT,
        };
        Err(io::Error::from_raw_os_error(errno))
    }

    /// Renames a file or a directory within its directory.
    pub fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        if self.is_dir(from) {
            return self.rename_dir(from, to);
        }
        self.find(from)?;
        let errno = match () {
            () if self.is_dir(to) => libc::EISDIR,
            () if self.names.rename(from, to) => return Ok(()),
            // Renames between directories are not modelled.
            () => libc::EXDEV,
        };
        Err(io::Error::from_raw_os_error(errno))
    }

    fn rename_dir(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let errno = match () {
            () if self.find(to).is_ok() => libc::ENOTDIR,
            () if self.below(to).next().is_some() => libc::ENOTEMPTY,
            () if from.parent() != to.parent() => libc::EXDEV,
            () => {
                self.names.rename_dir(from, to);
                return Ok(());
            }
        };
        Err(io::Error::from_raw_os_error(errno))
    }

    /// Removes an empty directory durably.
    pub fn remove_dir(&mut self, path: &Path) -> io::Result<()> {
        let errno = match () {
            () if self.find(path).is_ok() => libc::ENOTDIR,
            () if !self.is_dir(path) => libc::ENOENT,
            () if self.below(path).next().is_some() || self.names.has_dir_below(path) => {
                libc::ENOTEMPTY
            }
            () => {
                self.names.remove_dir(path);
                return Ok(());
            }
        };
        Err(io::Error::from_raw_os_error(errno))
    }

    /// Makes a directory durably: a power cut loses names of files only.
    pub fn create_dir(&mut self, path: &Path) -> io::Result<()> {
        let errno = match path.parent() {
            _ if self.is_dir(path) || self.find(path).is_ok() => libc::EEXIST,
            Some(parent) if self.is_dir(parent) => {
                self.names.add_dir(path);
                return Ok(());
            }
            _ => libc::ENOENT,
        };
        Err(io::Error::from_raw_os_error(errno))
    }

    /// Removes a file's name.
    pub fn unlink(&mut self, path: &Path) -> io::Result<()> {
        self.find(path)?;
        self.names.unlink(path);
        Ok(())
    }

    /// Decides the fate of all data and names that are not durable.
    pub fn lose_power(&mut self, rng: &mut Rng) {
        for inode in self.names.inodes() {
            inode.borrow_mut().lose_power(rng, &mut self.counts);
        }
        self.names.lose_power(rng, &mut self.counts);
    }

    /// A hash of all names and bytes.
    pub fn hash(&self) -> u64 {
        let mut hash = 0xCBF2_9CE4_8422_2325_u64;
        for (path, inode) in self.names.now() {
            let inode = inode.borrow();
            for part in [path.as_os_str().as_encoded_bytes(), inode.bytes()] {
                for &byte in part {
                    hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
                }
                hash = (hash ^ part.len() as u64).wrapping_mul(0x0000_0100_0000_01B3);
            }
        }
        hash
    }

    fn below<'a>(&'a self, dir: &'a Path) -> impl Iterator<Item = (&'a PathBuf, &'a InodeRef)> {
        self.names
            .now()
            .range(dir.to_path_buf()..)
            .take_while(move |(path, _)| path.starts_with(dir))
            .filter(move |(path, _)| path.as_path() != dir)
    }

    pub fn list(&self, dir: &Path) -> io::Result<Vec<DirEntry>> {
        if self.names.now().contains_key(dir) {
            return Err(io::Error::from_raw_os_error(libc::ENOTDIR));
        }
        let mut entries: BTreeMap<String, DirEntry> = BTreeMap::new();
        for (path, inode) in self.below(dir) {
            let Ok(rest) = path.strip_prefix(dir) else { continue };
            let mut parts = rest.components();
            let Some(first) = parts.next() else { continue };
            let Some(name) = first.as_os_str().to_str() else { continue };
            let is_dir = parts.next().is_some();
            let size = if is_dir { 4096 } else { inode.borrow().len() };
            entries.insert(
                name.to_owned(),
                DirEntry { name: name.to_owned(), size, is_dir, is_link: false },
            );
        }
        if entries.is_empty() && !self.names.is_dir(dir) {
            return Err(io::Error::from_raw_os_error(libc::ENOENT));
        }
        Ok(entries.into_values().collect())
    }

    /// Decides the faults of an access to `range`; calls `note` with each.
    pub fn plan(
        &mut self,
        rng: &mut Rng,
        access: Access,
        path: &Path,
        range: &Range<u64>,
        block: u32,
        mut note: impl FnMut(&FaultKind),
    ) -> Plan {
        let mut plan = Plan::default();
        for fault in &mut self.faults {
            if !fault.strikes(rng, Some(access), path, range) {
                continue;
            }
            let len = (range.end - range.start) as u32;
            match fault.kind() {
                FaultKind::Error(errno) => plan.errno = Some(*errno),
                FaultKind::Short if len > block && access != Access::Sync => {
                    let blocks = len.div_ceil(block);
                    plan.short = Some(block * (1 + rng.below(u64::from(blocks) - 1) as u32));
                }
                // A transfer of one block is complete or fails.
                FaultKind::Short => continue,
                FaultKind::Flip if access != Access::Read => continue,
                FaultKind::Flip => plan.flip = Some(rng.next_u64()),
                FaultKind::Stall(ns) => plan.extra_ns += rng.within(ns.clone()),
                FaultKind::Stuck => plan.stuck = true,
                FaultKind::Skip => plan.skip = true,
                FaultKind::NameError(_) => continue,
            }
            self.counts.add(fault.kind(), access);
            note(fault.kind());
        }
        plan
    }

    /// The error number of a failing name operation, if a fault strikes.
    pub fn plan_name(
        &mut self,
        rng: &mut Rng,
        path: &Path,
        mut note: impl FnMut(&FaultKind),
    ) -> Option<i32> {
        for fault in &mut self.faults {
            if fault.strikes(rng, None, path, &(0..u64::MAX))
                && let FaultKind::NameError(errno) = *fault.kind()
            {
                self.counts.names += 1;
                note(fault.kind());
                return Some(errno);
            }
        }
        None
    }

    /// Whether a sync of a directory is to be skipped.
    pub fn plan_skip(&mut self, rng: &mut Rng, dir: &Path) -> bool {
        let whole = 0..u64::MAX;
        let skips = |fault: &mut Fault| {
            *fault.kind() == FaultKind::Skip && fault.strikes(rng, Some(Access::Sync), dir, &whole)
        };
        let skip = self.faults.iter_mut().any(skips);
        self.counts.skipped += u64::from(skip);
        skip
    }

    /// The result of a read: the bytes with their faults, or an error number.
    pub fn read(
        &mut self,
        inode: &InodeRef,
        offset: u64,
        len: usize,
        plan: &Plan,
    ) -> Result<Vec<u8>, i32> {
        if let Some(errno) = plan.errno {
            return Err(errno);
        }
        let inode = inode.borrow();
        let size = inode.len();
        let end = offset.saturating_add(len as u64).min(size);
        let start = offset.min(end);
        let mut bytes = inode.bytes()[start as usize..end as usize].to_vec();
        if let Some(short) = plan.short {
            bytes.truncate(short as usize);
        }
        let covered = start..start + bytes.len() as u64;
        let mut rotten = false;
        for (&at, &mask) in inode.rot.range(covered) {
            bytes[(at - start) as usize] ^= mask;
            rotten = true;
        }
        self.counts.rotten += u64::from(rotten);
        if let Some(flip) = plan.flip
            && !bytes.is_empty()
        {
            let bit = flip % (bytes.len() as u64 * 8);
            bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
        Ok(bytes)
    }

    /// Makes a write as planned: returns the bytes taken, or an error number. A failed write may
    /// have written a part.
    pub fn write(
        &mut self,
        rng: &mut Rng,
        inode: &InodeRef,
        offset: u64,
        bytes: &[u8],
        plan: &Plan,
    ) -> Result<usize, i32> {
        let mut inode = inode.borrow_mut();
        if let Some(errno) = plan.errno {
            inode.write_prefix(rng, offset, bytes);
            return Err(errno);
        }
        let len = plan.short.map_or(bytes.len(), |short| bytes.len().min(short as usize));
        inode.write(offset, &bytes[..len]);
        Ok(len)
    }

    /// Makes the flush of a durable write as planned, right after its bytes were written.
    pub fn flush_last(&mut self, rng: &mut Rng, inode: &InodeRef, plan: &Plan) -> Result<(), i32> {
        let mut inode = inode.borrow_mut();
        match plan.errno {
            Some(errno) => {
                inode.fail_flush_last(rng, &mut self.counts);
                Err(errno)
            }
            None if plan.skip => Ok(()),
            None => {
                inode.flush_last();
                Ok(())
            }
        }
    }

    /// Makes a sync as planned, which was started after `changes` changes of the file.
    pub fn sync(
        &mut self,
        rng: &mut Rng,
        inode: &InodeRef,
        changes: u64,
        plan: &Plan,
    ) -> Result<usize, i32> {
        let mut inode = inode.borrow_mut();
        match plan.errno {
            Some(errno) => {
                inode.fail_flush(rng, changes, &mut self.counts);
                Err(errno)
            }
            None if plan.skip => Ok(0),
            None => {
                inode.flush(changes);
                Ok(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> Disk {
        let mut disk = Disk::default();
        for path in ["/db/000001.sst", "/db/CURRENT", "/db/sub/x", "/dbx"] {
            disk.add(Path::new(path), vec![7u8; 1000]);
        }
        disk
    }

    #[test]
    fn a_directory_lists_its_own_names_once() {
        let disk = disk();
        let names: Vec<_> = disk
            .list(Path::new("/db"))
            .unwrap()
            .into_iter()
            .map(|entry| (entry.name, entry.is_dir))
            .collect();
        let expected = [("000001.sst", false), ("CURRENT", false), ("sub", true)];
        assert_eq!(names, expected.map(|(name, dir)| (name.to_owned(), dir)));
        let missing = disk.list(Path::new("/none")).unwrap_err();
        assert_eq!(missing.raw_os_error(), Some(libc::ENOENT));
        let dir = disk.find(Path::new("/db")).err().unwrap();
        assert_eq!(dir.raw_os_error(), Some(libc::EISDIR));
    }

    #[test]
    fn a_read_ends_at_the_end_of_the_file() {
        let mut disk = disk();
        let inode = disk.find(Path::new("/dbx")).unwrap();
        let plan = Plan::default();
        assert_eq!(disk.read(&inode, 900, 512, &plan).unwrap().len(), 100);
        assert_eq!(disk.read(&inode, 1000, 512, &plan).unwrap().len(), 0);
        assert_eq!(disk.read(&inode, u64::MAX, 512, &plan).unwrap().len(), 0);
    }

    #[test]
    fn rot_stays_where_it_is_and_a_flip_hits_one_read() {
        let mut disk = disk();
        let inode = disk.find(Path::new("/dbx")).unwrap();
        inode.borrow_mut().rot.insert(10, 0x80);
        let plan = Plan::default();
        for _ in 0..2 {
            let bytes = disk.read(&inode, 0, 512, &plan).unwrap();
            assert_eq!(bytes[10], 7 ^ 0x80);
            assert_eq!(bytes.iter().filter(|&&b| b != 7).count(), 1);
        }
        assert_eq!(disk.counts.rotten, 2);
        let flipped = Plan { flip: Some(513 * 8 + 3), ..Plan::default() };
        let bytes = disk.read(&inode, 512, 488, &flipped).unwrap();
        assert_eq!(bytes[513 - 488], 7 ^ 8);
        assert!(disk.read(&inode, 512, 488, &plan).unwrap().iter().all(|&b| b == 7));
    }
}

//! Simulated files: names, bytes, rotten bits, and what a read of them brings.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use super::fault::{Fault, FaultCounts, FaultKind};
use super::rng::Rng;
use crate::driver::DirEntry;

/// A file's bytes. It outlives its name while somebody has it open.
pub(crate) struct Inode {
    pub number: u32,
    pub path: PathBuf,
    pub bytes: Arc<[u8]>,
    /// Bits that are wrong on the medium, by position: found by every read until healed.
    pub rot: BTreeMap<u64, u8>,
}

pub(crate) type InodeRef = Rc<std::cell::RefCell<Inode>>;

/// What the device will do with one read, decided when it is handed over.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    pub errno: Option<i32>,
    /// At most so many bytes.
    pub short: Option<u32>,
    /// Which bit of the transfer to flip, as a number to be reduced to its length.
    pub flip: Option<u64>,
    pub extra_ns: u64,
    pub stuck: bool,
}

/// Names and bytes of all files, and the faults that are set.
#[derive(Default)]
pub(crate) struct Disk {
    names: BTreeMap<PathBuf, InodeRef>,
    next_inode: u32,
    /// Files that some other process holds an exclusive lock on.
    pub locked: BTreeSet<PathBuf>,
    pub faults: Vec<Fault>,
    pub counts: FaultCounts,
}

impl Disk {
    pub fn add(&mut self, path: &Path, bytes: Arc<[u8]>) {
        let number = self.next_inode;
        self.next_inode += 1;
        let inode = Inode { number, path: path.to_owned(), bytes, rot: BTreeMap::new() };
        self.names.insert(path.to_owned(), Rc::new(inode.into()));
    }

    pub fn remove(&mut self, path: &Path) -> bool {
        self.names.remove(path).is_some()
    }

    pub fn find(&self, path: &Path) -> io::Result<InodeRef> {
        if let Some(inode) = self.names.get(path) {
            return Ok(inode.clone());
        }
        let errno = if self.is_dir(path) { libc::EISDIR } else { libc::ENOENT };
        Err(io::Error::from_raw_os_error(errno))
    }

    pub fn paths(&self) -> Vec<PathBuf> {
        self.names.keys().cloned().collect()
    }

    /// A directory is whatever files lie below.
    fn is_dir(&self, path: &Path) -> bool {
        self.below(path).next().is_some()
    }

    fn below<'a>(&'a self, dir: &'a Path) -> impl Iterator<Item = (&'a PathBuf, &'a InodeRef)> {
        self.names
            .range(dir.to_path_buf()..)
            .take_while(move |(path, _)| path.starts_with(dir))
            .filter(move |(path, _)| path.as_path() != dir)
    }

    pub fn list(&self, dir: &Path) -> io::Result<Vec<DirEntry>> {
        if self.names.contains_key(dir) {
            return Err(io::Error::from_raw_os_error(libc::ENOTDIR));
        }
        let mut entries: BTreeMap<String, DirEntry> = BTreeMap::new();
        for (path, inode) in self.below(dir) {
            let Ok(rest) = path.strip_prefix(dir) else { continue };
            let mut parts = rest.components();
            let Some(first) = parts.next() else { continue };
            let Some(name) = first.as_os_str().to_str() else { continue };
            let is_dir = parts.next().is_some();
            let size = if is_dir { 4096 } else { inode.borrow().bytes.len() as u64 };
            entries.insert(name.to_owned(), DirEntry { name: name.to_owned(), size, is_dir });
        }
        if entries.is_empty() {
            return Err(io::Error::from_raw_os_error(libc::ENOENT));
        }
        Ok(entries.into_values().collect())
    }

    /// Decides what goes wrong with a read of `range`; the faults that strike are told to `note`.
    pub fn plan_read(
        &mut self,
        rng: &mut Rng,
        path: &Path,
        range: &Range<u64>,
        block: u32,
        mut note: impl FnMut(&FaultKind),
    ) -> Plan {
        let mut plan = Plan::default();
        for fault in &mut self.faults {
            if !fault.strikes(rng, false, path, range) {
                continue;
            }
            let len = (range.end - range.start) as u32;
            match fault.kind() {
                FaultKind::Error(errno) => plan.errno = Some(*errno),
                FaultKind::Short if len > block => {
                    let blocks = len.div_ceil(block);
                    plan.short = Some(block * (1 + rng.below(u64::from(blocks) - 1) as u32));
                }
                // A transfer of one block is whole or fails.
                FaultKind::Short => continue,
                FaultKind::Flip => plan.flip = Some(rng.next_u64()),
                FaultKind::Stall(ns) => plan.extra_ns += rng.within(ns.clone()),
                FaultKind::Stuck => plan.stuck = true,
                FaultKind::NameError(_) => continue,
            }
            self.counts.add(fault.kind());
            note(fault.kind());
        }
        plan
    }

    /// The error number with which a name operation fails, if one strikes.
    pub fn plan_name(
        &mut self,
        rng: &mut Rng,
        path: &Path,
        mut note: impl FnMut(&FaultKind),
    ) -> Option<i32> {
        for fault in &mut self.faults {
            if fault.strikes(rng, true, path, &(0..u64::MAX))
                && let FaultKind::NameError(errno) = *fault.kind()
            {
                self.counts.add(fault.kind());
                note(fault.kind());
                return Some(errno);
            }
        }
        None
    }

    /// What a read brings: the bytes with all that is wrong with them, or an error number.
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
        let size = inode.bytes.len() as u64;
        let end = offset.saturating_add(len as u64).min(size);
        let start = offset.min(end);
        let mut bytes = inode.bytes[start as usize..end as usize].to_vec();
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> Disk {
        let mut disk = Disk::default();
        for path in ["/db/000001.sst", "/db/CURRENT", "/db/sub/x", "/dbx"] {
            disk.add(Path::new(path), Arc::from(vec![7u8; 1000]));
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

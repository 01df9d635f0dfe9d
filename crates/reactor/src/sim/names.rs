//! The names of simulated files: the visible ones, and those that survive a power cut.
//!
//! As with a file's bytes there are visible names, durable names, and the changes between the two.
//! A sync of a directory makes its own changes durable, and no other directory's. A rename is one
//! change: it is kept or lost as a whole. So is the rename of a directory, with all names in it
//! that are durable then.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::fault::FaultCounts;
use super::inode::{InodeRef, Mood};
use super::rng::Rng;

enum Change {
    Link {
        path: PathBuf,
        inode: InodeRef,
    },
    Unlink {
        path: PathBuf,
    },
    Rename {
        from: PathBuf,
        to: PathBuf,
        inode: InodeRef,
    },
    /// A directory gets another name.
    RenameDir {
        from: PathBuf,
        to: PathBuf,
    },
}

type Map = BTreeMap<PathBuf, InodeRef>;

impl Change {
    fn apply(&self, to: &mut Map) {
        match self {
            Change::Link { path, inode } => drop(to.insert(path.clone(), inode.clone())),
            Change::Unlink { path } => drop(to.remove(path)),
            Change::Rename { from, to: path, inode } => {
                to.remove(from);
                to.insert(path.clone(), inode.clone());
            }
            Change::RenameDir { from, to: path } => {
                let moved: Vec<_> = to.extract_if(.., |name, _| name.starts_with(from)).collect();
                to.extend(
                    moved.into_iter().map(|(name, inode)| (moved_to(&name, from, path), inode)),
                );
            }
        }
    }

    /// The directory that it changes.
    fn dir(&self) -> &Path {
        let (Change::Link { path, .. }
        | Change::Unlink { path }
        | Change::Rename { to: path, .. }
        | Change::RenameDir { to: path, .. }) = self;
        parent(path)
    }

    /// Follows the rename of the directory that it is in.
    fn follow(&mut self, from: &Path, to: &Path) {
        let paths = match self {
            Change::Link { path, .. } | Change::Unlink { path } => vec![path],
            Change::Rename { from, to, .. } | Change::RenameDir { from, to } => vec![from, to],
        };
        for path in paths.into_iter().filter(|path| path.starts_with(from)) {
            *path = moved_to(path, from, to);
        }
    }

    fn concerns(&self, other: &Path) -> bool {
        match self {
            Change::Link { path, .. } | Change::Unlink { path } => path == other,
            Change::Rename { from, to, .. } => from == other || to == other,
            Change::RenameDir { .. } => false,
        }
    }
}

/// The path that a path below `from` has below `to`.
fn moved_to(path: &Path, from: &Path, to: &Path) -> PathBuf {
    path.strip_prefix(from).map_or_else(|_| path.to_owned(), |rest| to.join(rest))
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// All names of a world.
#[derive(Default)]
pub(crate) struct Names {
    now: Map,
    stable: Map,
    /// Changes of `now` that `stable` lacks, with their numbers, oldest first.
    unflushed: Vec<(u64, Change)>,
    /// Number of the next change.
    changes: u64,
    /// Explicit directories; others exist if there are files below them.
    dirs: BTreeSet<PathBuf>,
}

impl Names {
    /// The visible names.
    pub fn now(&self) -> &Map {
        &self.now
    }

    /// Number of names of a file.
    pub fn count(&self, inode: &InodeRef) -> usize {
        self.now.values().filter(|other| Rc::ptr_eq(other, inode)).count()
    }

    pub fn is_dir(&self, path: &Path) -> bool {
        self.dirs.contains(path)
    }

    pub fn add_dir(&mut self, path: &Path) {
        self.dirs.extend(path.ancestors().map(Path::to_owned));
    }

    /// Sets or removes a name durably.
    pub fn settle(&mut self, path: &Path, inode: Option<InodeRef>) -> bool {
        self.unflushed.retain(|(_, change)| !change.concerns(path));
        let was = match inode {
            Some(inode) => {
                self.add_dir(parent(path));
                self.stable.insert(path.to_owned(), inode.clone());
                self.now.insert(path.to_owned(), inode)
            }
            None => {
                self.stable.remove(path);
                self.now.remove(path)
            }
        };
        was.is_some()
    }

    /// Number of changes so far: a sync that starts now covers those below.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.now);
        self.unflushed.push((self.changes, change));
        self.changes += 1;
    }

    pub fn link(&mut self, path: &Path, inode: InodeRef) {
        self.change(Change::Link { path: path.to_owned(), inode });
    }

    /// The name must exist.
    pub fn unlink(&mut self, path: &Path) {
        self.change(Change::Unlink { path: path.to_owned() });
    }

    /// False when there is no such name, or the other is in another directory.
    pub fn rename(&mut self, from: &Path, to: &Path) -> bool {
        let Some(inode) = self.now.get(from).filter(|_| parent(from) == parent(to)).cloned() else {
            return false;
        };
        inode.borrow_mut().path = to.to_owned();
        if from != to {
            self.change(Change::Rename { from: from.to_owned(), to: to.to_owned(), inode });
        }
        true
    }

    /// Renames a directory.
    pub fn rename_dir(&mut self, from: &Path, to: &Path) {
        let moved: Vec<PathBuf> = self.dirs.extract_if(.., |dir| dir.starts_with(from)).collect();
        self.dirs.extend(moved.iter().map(|dir| moved_to(dir, from, to)));
        self.change(Change::RenameDir { from: from.to_owned(), to: to.to_owned() });
        for (path, inode) in self.now.iter().filter(|(path, _)| path.starts_with(to)) {
            inode.borrow_mut().path = path.clone();
        }
    }

    pub fn has_dir_below(&self, path: &Path) -> bool {
        self.dirs.iter().any(|dir| dir != path && dir.starts_with(path))
    }

    /// Removes an empty directory durably.
    pub fn remove_dir(&mut self, path: &Path) {
        self.dirs.remove(path);
    }

    /// Completes a sync of a directory that was started after `changes` changes.
    pub fn flush(&mut self, dir: &Path, changes: u64) {
        let stable = &mut self.stable;
        let mut renamed = Vec::new();
        self.unflushed.retain(|(number, change)| {
            let flushed = *number < changes && change.dir() == dir;
            if flushed {
                change.apply(stable);
                if let Change::RenameDir { from, to } = change {
                    renamed.push((from.clone(), to.clone()));
                }
            }
            !flushed
        });
        for (from, to) in renamed {
            self.unflushed.iter_mut().for_each(|(_, change)| change.follow(&from, &to));
        }
    }

    /// All files that have a name, or may have one after a power cut, in the order of their
    /// creation.
    pub fn inodes(&self) -> Vec<InodeRef> {
        let unflushed = self.unflushed.iter().filter_map(|(_, change)| match change {
            Change::Link { inode, .. } | Change::Rename { inode, .. } => Some(inode),
            Change::Unlink { .. } | Change::RenameDir { .. } => None,
        });
        let all = self.now.values().chain(self.stable.values()).chain(unflushed);
        let by_number: BTreeMap<u32, &InodeRef> =
            all.map(|inode| (inode.borrow().number, inode)).collect();
        by_number.into_values().cloned().collect()
    }

    /// Cuts the power: decides the fate of each change that no sync has covered.
    pub fn lose_power(&mut self, rng: &mut Rng, counts: &mut FaultCounts) {
        let mut dirs: BTreeMap<PathBuf, Vec<Change>> = BTreeMap::new();
        let mut renamed = Vec::new();
        for (_, change) in self.unflushed.drain(..) {
            match change {
                // Last, with the names that are left in the directory.
                Change::RenameDir { from, to } => renamed.push((from, to)),
                change => dirs.entry(change.dir().to_owned()).or_default().push(change),
            }
        }
        for changes in dirs.into_values() {
            let mood = Mood::draw(rng);
            let kept_in_order = rng.index(changes.len() + 1);
            for (n, change) in changes.into_iter().enumerate() {
                let kept = match mood {
                    Mood::LosesAll => false,
                    Mood::KeepsAll => true,
                    Mood::InOrder => n < kept_in_order,
                    Mood::Anything => rng.coin(),
                };
                if kept {
                    change.apply(&mut self.stable);
                }
                *if kept { &mut counts.names_kept } else { &mut counts.names_lost } += 1;
            }
        }
        for (from, to) in renamed {
            let kept = rng.coin();
            *if kept { &mut counts.names_kept } else { &mut counts.names_lost } += 1;
            if kept {
                Change::RenameDir { from, to }.apply(&mut self.stable);
                continue;
            }
            let back: Vec<PathBuf> = self.dirs.extract_if(.., |dir| dir.starts_with(&to)).collect();
            self.dirs.extend(back.iter().map(|dir| moved_to(dir, &to, &from)));
        }
        self.now = self.stable.clone();
        for (path, inode) in &self.now {
            inode.borrow_mut().path = path.clone();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::inode::Inode;
    use super::*;

    fn inode(number: u32) -> InodeRef {
        std::rc::Rc::new(Inode::new(number, PathBuf::new(), Vec::new()).into())
    }

    /// The names after a power cut, each with the number of its file.
    fn left(seed: u64, names: &mut Names) -> Vec<(String, u32)> {
        names.lose_power(&mut Rng::new(seed), &mut FaultCounts::default());
        let text = |path: &PathBuf| path.to_str().unwrap().to_owned();
        names.now().iter().map(|(path, inode)| (text(path), inode.borrow().number)).collect()
    }

    #[test]
    fn a_sync_makes_its_directory_durable_as_it_was_when_the_sync_was_started_and_no_other() {
        let mut others = BTreeSet::new();
        for seed in 0..200 {
            let mut names = Names::default();
            names.settle(Path::new("/a/old"), Some(inode(0)));
            names.link(Path::new("/a/1"), inode(1));
            names.rename(Path::new("/a/1"), Path::new("/a/one"));
            names.unlink(Path::new("/a/old"));
            names.link(Path::new("/b/2"), inode(2));
            let changes = names.changes();
            names.link(Path::new("/a/3"), inode(3));
            names.flush(Path::new("/a"), changes);
            let mut left = left(seed, &mut names);
            left.retain(|name| *name != ("/a/one".to_owned(), 1));
            assert!(left.iter().all(|(name, _)| name == "/b/2" || name == "/a/3"), "{left:?}");
            others.insert(left);
        }
        assert_eq!(others.len(), 4, "each of the two is kept or lost independently");
    }

    #[test]
    fn any_of_the_unsynced_changes_may_be_kept_and_a_rename_is_whole() {
        let mut all = BTreeSet::new();
        for seed in 0..300 {
            let mut names = Names::default();
            names.settle(Path::new("/CURRENT"), Some(inode(0)));
            names.link(Path::new("/draft"), inode(1));
            names.rename(Path::new("/draft"), Path::new("/CURRENT"));
            names.link(Path::new("/x"), inode(2));
            let left = left(seed, &mut names);
            let current = left.iter().find(|(name, _)| name == "/CURRENT").unwrap().1;
            assert!(current < 2, "either the old file or the new one");
            all.insert(left);
        }
        // The draft exists or not; the rename is done or not (and then there is no draft).
        assert_eq!(all.len(), 6, "{all:?}");
    }

    #[test]
    fn a_renamed_directory_keeps_what_was_durable_in_it_and_is_whole_once_both_are_synced() {
        let (mut both, mut empty, mut old) = (0, 0, 0);
        for seed in 0..200 {
            let mut names = Names::default();
            names.add_dir(Path::new("/a.tmp"));
            names.link(Path::new("/a.tmp/1"), inode(1));
            let synced = seed % 2 == 0;
            if synced {
                names.flush(Path::new("/a.tmp"), names.changes());
            }
            names.rename_dir(Path::new("/a.tmp"), Path::new("/a"));
            assert!(names.now().contains_key(Path::new("/a/1")) && names.is_dir(Path::new("/a")));
            assert!(!names.is_dir(Path::new("/a.tmp")));
            if seed % 4 == 0 {
                names.flush(Path::new("/"), names.changes());
            }
            let left = left(seed, &mut names);
            match left.first().map(|(path, _)| path.as_str()) {
                Some("/a/1") => both += 1,
                Some(_) => old += 1,
                None => {
                    assert!(!synced);
                    empty += usize::from(names.is_dir(Path::new("/a")));
                }
            }
            assert!(seed % 4 != 0 || left == [("/a/1".to_owned(), 1)]);
            assert_ne!(names.is_dir(Path::new("/a")), names.is_dir(Path::new("/a.tmp")));
        }
        assert!(both > 60 && empty > 10 && old > 20, "{both} {empty} {old}");
    }
}

//! A simulated file: the bytes that reads see, and those that survive a power cut.
//!
//! A file has three parts: the bytes that reads see, the bytes that are durably on the medium, and
//! the changes between the two that no flush has covered yet, in their order. A flush moves changes
//! to the medium. A power cut decides the fate of each remaining change, and then only the medium
//! is left. See the fault model in `sim`.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use super::fault::FaultCounts;
use super::rng::Rng;

/// The medium's atomic unit of writing, in bytes.
const SECTOR: u64 = 512;

/// A change of a file's bytes.
#[derive(Clone)]
enum Change {
    Write {
        offset: u64,
        bytes: Vec<u8>,
    },
    /// Cut to a length, or extended to it with zeroes.
    Len(u64),
}

impl Change {
    fn apply(&self, to: &mut Vec<u8>) {
        match self {
            Change::Write { offset, bytes } => {
                let (start, end) = (*offset as usize, *offset as usize + bytes.len());
                if to.len() < end {
                    to.resize(end, 0);
                }
                to[start..end].copy_from_slice(bytes);
            }
            Change::Len(len) => to.resize(*len as usize, 0),
        }
    }
}

/// A write's parts by sector, in order: offsets and bytes.
fn sectors(offset: u64, bytes: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let from = offset + at as u64;
        let len = ((SECTOR - from % SECTOR) as usize).min(bytes.len() - at);
        at += len;
        (len > 0).then(|| (from, &bytes[at - len..at]))
    })
}

/// How a power cut treats unflushed changes: one file's writes, or one directory's names. Drawn for
/// each, so that the extremes are as frequent as the mixtures.
#[derive(Clone, Copy)]
pub(super) enum Mood {
    LosesAll,
    KeepsAll,
    /// The oldest changes are kept and the newest lost.
    InOrder,
    Anything,
}

impl Mood {
    pub fn draw(rng: &mut Rng) -> Mood {
        [Mood::LosesAll, Mood::KeepsAll, Mood::InOrder, Mood::Anything, Mood::Anything]
            [rng.index(5)]
    }
}

/// The fate of one change.
enum Fate {
    Kept,
    Lost,
    Torn,
}

/// A file's bytes. It outlives its name while it is open.
pub(crate) struct Inode {
    pub number: u32,
    /// Its newest name.
    pub path: PathBuf,
    /// The bytes that reads see.
    bytes: Arc<Vec<u8>>,
    /// The durable bytes on the medium. The same allocation, until the next write.
    stable: Arc<Vec<u8>>,
    /// Changes of `bytes` that `stable` lacks, with their numbers. A durable one is no longer in
    /// danger, but waits for those before it.
    unflushed: VecDeque<(u64, Change, Durable)>,
    /// Number of the next change.
    changes: u64,
    /// Allocated bytes, perhaps beyond its end.
    reserved: u64,
    /// Wrong bits on the medium, by position: every read sees them until they are healed.
    pub rot: BTreeMap<u64, u8>,
}

/// Whether a change survives a power cut.
type Durable = bool;

pub(crate) type InodeRef = Rc<std::cell::RefCell<Inode>>;

impl Inode {
    /// A file with these durable bytes.
    pub fn new(number: u32, path: PathBuf, bytes: Vec<u8>) -> Inode {
        let bytes = Arc::new(bytes);
        let stable = bytes.clone();
        let (unflushed, rot) = Default::default();
        Inode { number, path, bytes, stable, unflushed, changes: 0, reserved: 0, rot }
    }

    /// The bytes that reads see.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Bytes that it occupies on the disk.
    pub fn room(&self) -> u64 {
        self.len().max(self.reserved)
    }

    /// Makes it occupy at least `len` bytes.
    pub fn reserve(&mut self, len: u64) {
        self.reserved = self.reserved.max(len);
    }

    /// Cuts it to a length, or extends it, without allocation beyond that.
    pub fn cut(&mut self, len: u64) {
        self.reserved = 0;
        self.set_len(len);
    }

    /// Makes a write on a full disk: some of its bytes within the file's allocation are written.
    /// Returns the error number.
    pub fn write_within(&mut self, rng: &mut Rng, offset: u64, bytes: &[u8]) -> i32 {
        let len = self.room().saturating_sub(offset).min(bytes.len() as u64);
        self.write_prefix(rng, offset, &bytes[..len as usize]);
        libc::ENOSPC
    }

    /// Number of changes so far: a flush that starts now covers those below.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    fn change(&mut self, change: Change) {
        change.apply(Arc::make_mut(&mut self.bytes));
        if let Change::Write { offset, bytes } = &change {
            let covered: Vec<u64> =
                self.rot.range(*offset..offset + bytes.len() as u64).map(|(&at, _)| at).collect();
            for at in covered {
                self.rot.remove(&at);
            }
        }
        self.unflushed.push_back((self.changes, change, false));
        self.changes += 1;
    }

    /// Makes a write. Rotten bits there are healed.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.change(Change::Write { offset, bytes: bytes.to_vec() });
        }
    }

    /// Makes an interrupted write: any number of its sectors are written, from the first on. True
    /// when that is neither none nor all.
    pub fn write_prefix(&mut self, rng: &mut Rng, offset: u64, bytes: &[u8]) -> bool {
        let all = sectors(offset, bytes).count();
        let some = rng.index(all + 1);
        let len = sectors(offset, bytes).take(some).map(|(_, part)| part.len()).sum();
        self.write(offset, &bytes[..len]);
        0 < some && some < all
    }

    /// Changes the length.
    pub fn set_len(&mut self, len: u64) {
        self.change(Change::Len(len));
        self.rot.split_off(&len);
    }

    /// Completes a flush that was started after `changes` changes.
    pub fn flush(&mut self, changes: u64) {
        while let Some((number, _, durable)) = self.unflushed.front()
            && (*number < changes || *durable)
            && let Some((_, change, _)) = self.unflushed.pop_front()
        {
            change.apply(Arc::make_mut(&mut self.stable));
        }
    }

    /// Completes the last write as a durable one. It covers no other change.
    pub fn flush_last(&mut self) {
        if let Some((.., durable)) = self.unflushed.back_mut() {
            *durable = true;
        }
        self.flush(0);
    }

    /// Fails the last write as a durable one, of which reads see the bytes: it may be forgotten.
    pub fn fail_flush_last(&mut self, rng: &mut Rng, counts: &mut FaultCounts) {
        if rng.coin() && self.unflushed.pop_back().is_some() {
            counts.dropped += 1;
        }
    }

    /// Fails a flush that was started then: any of the changes that it should cover may be
    /// forgotten. Reads still see them, and no later flush covers them.
    pub fn fail_flush(&mut self, rng: &mut Rng, changes: u64, counts: &mut FaultCounts) {
        let all = rng.coin();
        self.unflushed.retain(|(number, _, durable)| {
            let dropped = *number < changes && !durable && (all || rng.coin());
            counts.dropped += u64::from(dropped);
            !dropped
        });
    }

    /// Cuts the power: decides the fate of each change that no flush has covered.
    pub fn lose_power(&mut self, rng: &mut Rng, counts: &mut FaultCounts) {
        if self.unflushed.is_empty() && Arc::ptr_eq(&self.bytes, &self.stable) {
            return;
        }
        let mood = Mood::draw(rng);
        let kept_in_order = rng.index(self.unflushed.len() + 1);
        let mut left = std::mem::take(&mut self.stable);
        let bytes = Arc::make_mut(&mut left);
        let unflushed = std::mem::take(&mut self.unflushed);
        for (n, (_, change, durable)) in unflushed.into_iter().enumerate() {
            if durable {
                change.apply(bytes);
                continue;
            }
            let fate = match mood {
                Mood::LosesAll => Fate::Lost,
                Mood::KeepsAll => Fate::Kept,
                Mood::InOrder if n < kept_in_order => Fate::Kept,
                Mood::InOrder if n == kept_in_order => Fate::Torn,
                Mood::InOrder => Fate::Lost,
                Mood::Anything => [Fate::Kept, Fate::Lost, Fate::Torn]
                    .into_iter()
                    .nth(rng.index(3))
                    .unwrap_or(Fate::Lost),
            };
            leave(rng, bytes, &change, &fate, counts);
        }
        self.stable = left;
        self.bytes = self.stable.clone();
        let len = self.len();
        // Allocation beyond the end may be lost, too.
        self.reserved = 0;
        self.rot.split_off(&len);
    }
}

/// Applies its fate to a change.
fn leave(
    rng: &mut Rng,
    bytes: &mut Vec<u8>,
    change: &Change,
    fate: &Fate,
    counts: &mut FaultCounts,
) {
    let torn = matches!(fate, Fate::Torn);
    match change {
        Change::Write { offset, bytes: written }
            if torn && sectors(*offset, written).count() > 1 =>
        {
            // Any subset, in any order.
            let (mut kept, mut all) = (0, 0);
            for (at, part) in sectors(*offset, written) {
                all += 1;
                if rng.coin() {
                    kept += 1;
                    Change::Write { offset: at, bytes: part.to_vec() }.apply(bytes);
                }
            }
            // The length is stored elsewhere, and may survive without the bytes.
            let end = *offset as usize + written.len();
            if rng.coin() && bytes.len() < end {
                bytes.resize(end, 0);
            }
            *match kept {
                0 => &mut counts.lost,
                _ if kept == all => &mut counts.kept,
                _ => &mut counts.torn,
            } += 1;
        }
        change => {
            let kept = matches!(fate, Fate::Kept) || (torn && rng.coin());
            if kept {
                change.apply(bytes);
            }
            *if kept { &mut counts.kept } else { &mut counts.lost } += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(seed: u64, make: impl Fn(&mut Inode)) -> (Vec<u8>, FaultCounts) {
        let mut inode = Inode::new(0, PathBuf::new(), vec![1; 4096]);
        make(&mut inode);
        let mut counts = FaultCounts::default();
        inode.lose_power(&mut Rng::new(seed), &mut counts);
        assert_eq!(inode.bytes(), &inode.stable[..]);
        (inode.bytes().to_vec(), counts)
    }

    #[test]
    fn a_sector_is_where_the_file_says_not_where_the_write_begins() {
        let parts: Vec<_> = sectors(500, &[0; 1000]).map(|(at, part)| (at, part.len())).collect();
        assert_eq!(parts, [(500, 12), (512, 512), (1024, 476)]);
        assert_eq!(sectors(0, &[]).count(), 0);
    }

    #[test]
    fn flushed_data_stays_whatever_follows() {
        for seed in 0..500 {
            let (bytes, _) = cut(seed, |inode| {
                inode.write(0, &[2; 2048]);
                inode.set_len(8192);
                let changes = inode.changes();
                inode.write(2048, &[3; 1024]);
                inode.flush(changes);
            });
            assert_eq!(bytes.len(), 8192);
            assert_eq!(bytes[..2048], [2; 2048]);
            assert!(bytes[2048..3072].chunks(512).all(|s| s == [1; 512] || s == [3; 512]));
            assert!(bytes[3072..4096] == [1; 1024] && bytes[4096..] == [0; 4096]);
        }
    }

    #[test]
    fn a_durable_write_stays_and_protects_no_other_write() {
        let (mut lost, mut uncut) = (0, 0);
        for seed in 0..100 {
            let (bytes, counts) = cut(seed, |inode| {
                inode.write(0, &[2; 1024]);
                inode.set_len(2048);
                inode.write(512, &[3; 512]);
                inode.flush_last();
                inode.write(4096, &[4; 512]);
                let changes = inode.changes();
                inode.fail_flush(&mut Rng::new(seed), changes, &mut FaultCounts::default());
            });
            assert_eq!(bytes[512..1024], [3; 512]);
            lost += u32::from(bytes[..512] == [1; 512]);
            uncut += u32::from(bytes[2048..].contains(&1));
            assert!(counts.kept + counts.lost + counts.torn <= 3);
        }
        assert!((20..100).contains(&lost) && (20..100).contains(&uncut), "{lost} {uncut}");
    }

    #[test]
    fn an_unflushed_write_is_kept_lost_or_torn_between_sectors_and_grows_the_file_by_zeroes() {
        let mut seen = FaultCounts::default();
        let (mut reordered, mut zeroes) = (0, 0);
        for seed in 0..500 {
            let (bytes, counts) = cut(seed, |inode| {
                inode.write(4096, &[2; 1536]);
                inode.write(100, &[3; 100]);
            });
            assert!(bytes[..100] == [1; 100] && bytes[200..4096].iter().all(|&b| b == 1));
            let second = bytes[100] == 3;
            assert_eq!(bytes[100..200], if second { [3; 100] } else { [1; 100] });
            let tail = &bytes[4096..];
            assert!(tail.chunks(512).all(|s| s.len() == 512 && (s == [0; 512] || s == [2; 512])));
            reordered += u32::from(second && tail.is_empty());
            zeroes += u32::from(tail.ends_with(&[0]));
            (seen.kept, seen.lost) = (seen.kept + counts.kept, seen.lost + counts.lost);
            seen.torn += counts.torn;
            assert_eq!(counts.kept + counts.lost + counts.torn, 2);
        }
        assert!(seen.kept > 100 && seen.lost > 100 && seen.torn > 20, "{seen:?}");
        assert!(reordered > 10 && zeroes > 10, "{reordered} {zeroes}");
    }

    #[test]
    fn data_that_a_failed_flush_forgot_is_visible_and_never_durable() {
        let mut forgotten = 0;
        for seed in 0..100 {
            let (bytes, _) = cut(seed, |inode| {
                inode.write(0, &[2; 512]);
                let changes = inode.changes();
                inode.write(512, &[3; 512]);
                inode.fail_flush(&mut Rng::new(seed), changes, &mut FaultCounts::default());
                assert_eq!(inode.bytes()[..1024], [[2; 512], [3; 512]].concat());
                inode.flush(inode.changes());
            });
            assert_eq!(bytes[512..1024], [3; 512], "it was written after the flush was started");
            forgotten += u32::from(bytes[0] == 1);
        }
        assert!((20..100).contains(&forgotten), "{forgotten}");
    }

    #[test]
    fn overwritten_sectors_do_not_rot() {
        let mut inode = Inode::new(0, PathBuf::new(), vec![1; 4096]);
        inode.rot = [(10, 1), (600, 1), (4000, 1)].into();
        inode.write(512, &[2; 512]);
        inode.set_len(2048);
        assert_eq!(inode.rot.keys().collect::<Vec<_>>(), [&10]);
    }
}

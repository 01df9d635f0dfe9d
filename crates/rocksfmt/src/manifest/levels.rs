//! Sorts the files of a column family into levels, and refuses states that no correct writer
//! produces.
//!
//! Level 0 is ordered by epoch if every file of the column family has one, else by sequences, as
//! RocksDB did before 7.10. The other levels are ordered by smallest key. RocksDB 7.8 fails to open
//! a database that violates these rules; 9.8 and 11.8 open it with an *empty* column family. Only
//! an error loses nothing.

use std::cmp::Ordering;

use crate::error::{Error, Result};
use crate::key::Comparator;
use crate::manifest::file_meta::FileMeta;

/// Distributes files over levels and sorts each level. Without a comparator (an unknown one) files
/// are only distributed.
pub(crate) fn sort_levels(
    files: impl Iterator<Item = (u32, FileMeta)>,
    comparator: Option<Comparator>,
) -> Result<Vec<Vec<FileMeta>>> {
    let mut levels: Vec<Vec<FileMeta>> = Vec::new();
    let mut epochs = true;
    for (level, file) in files {
        let level = level as usize;
        if levels.len() <= level {
            levels.resize_with(level + 1, Vec::new);
        }
        epochs &= file.epoch != 0;
        levels[level].push(file);
    }
    let Some(comparator) = comparator else {
        return Ok(levels);
    };
    for (level, files) in levels.iter_mut().enumerate() {
        for file in files.iter() {
            let order = comparator.cmp_user(file.smallest_user_key(), file.largest_user_key());
            if order == Ordering::Greater {
                return Err(Error::corruption(format!(
                    "file {} of level {level} has its smallest key above its largest",
                    file.number
                )));
            }
        }
        match level {
            0 if epochs => sort_by_epoch(files, comparator)?,
            0 => sort_by_sequence(files)?,
            _ => sort_by_key(files, comparator, level)?,
        }
    }
    Ok(levels)
}

fn newest_first_by_sequence(a: &FileMeta, b: &FileMeta) -> Ordering {
    let age = |f: &FileMeta| (f.largest_sequence, f.smallest_sequence, f.number);
    age(b).cmp(&age(a))
}

fn sort_by_epoch(files: &mut [FileMeta], comparator: Comparator) -> Result<()> {
    // First by key within an epoch, to find overlaps of neighbours, then by sequence.
    files.sort_by(|a, b| {
        b.epoch.cmp(&a.epoch).then_with(|| comparator.cmp_internal(&a.smallest, &b.smallest))
    });
    for pair in files.windows(2) {
        let [a, b] = pair else { continue };
        if a.epoch == b.epoch && comparator.cmp_internal(&a.largest, &b.smallest) != Ordering::Less
        {
            return Err(Error::corruption(format!(
                "files {} and {} of level 0 overlap and have the same epoch {}",
                a.number, b.number, a.epoch
            )));
        }
    }
    files.sort_by(|a, b| b.epoch.cmp(&a.epoch).then_with(|| newest_first_by_sequence(a, b)));
    Ok(())
}

fn sort_by_sequence(files: &mut [FileMeta]) -> Result<()> {
    files.sort_by(newest_first_by_sequence);
    for pair in files.windows(2) {
        let [newer, older] = pair else { continue };
        let fine = if older.smallest_sequence == older.largest_sequence {
            // An ingested file has one sequence, which may be inside the range of a flushed file.
            older.largest_sequence < newer.largest_sequence || older.largest_sequence == 0
        } else {
            newer.smallest_sequence > older.smallest_sequence
        };
        if !fine {
            return Err(Error::corruption(format!(
                "files {} (sequences {} to {}) and {} (sequences {} to {}) of level 0 have no order",
                newer.number,
                newer.smallest_sequence,
                newer.largest_sequence,
                older.number,
                older.smallest_sequence,
                older.largest_sequence
            )));
        }
    }
    Ok(())
}

fn sort_by_key(files: &mut [FileMeta], comparator: Comparator, level: usize) -> Result<()> {
    files.sort_by(|a, b| comparator.cmp_internal(&a.smallest, &b.smallest));
    for pair in files.windows(2) {
        let [a, b] = pair else { continue };
        if comparator.cmp_internal(&a.largest, &b.smallest) != Ordering::Less {
            return Err(Error::corruption(format!(
                "files {} and {} of level {level} overlap",
                a.number, b.number
            )));
        }
    }
    Ok(())
}

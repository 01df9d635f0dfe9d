//! Anchors of blob files that only logs refer to. Pure.
//!
//! RocksDB keeps a blob file if a table is linked to it or to an older one, and it does not know
//! what the logs refer to: when it opens a directory after a crash, it drops blob files without
//! such a table before it reads the logs. So every change of the MANIFEST leaves a table that is
//! linked to the oldest blob file that logs may refer to, or to an older one: its anchor. If none
//! is, a table is added again with a link that it does not need. A link to an older blob file than
//! necessary only keeps files longer. Both 7.8 and 9.8 accept this.

use std::collections::{BTreeMap, BTreeSet};

use rocksfmt::{FileMeta, ManifestReplay, VersionEdit};

use crate::error::{Error, Kind, Result};
use crate::mutant::mutant;
use crate::write::blob_garbage::Links;

/// Completes a change of a column family, so that its blob files `in_logs` are anchored after it.
/// `state` is the MANIFEST's state before it.
///
/// # Errors
/// [`Kind::Memory`], so that it is tried again, if the change leaves no table.
pub(crate) fn keep(state: &ManifestReplay, edit: &mut VersionEdit, in_logs: &[u64]) -> Result<()> {
    if in_logs.is_empty() || mutant("blob_file_has_no_anchor") {
        return Ok(());
    }
    let family = edit.column_family;
    let mut alive: BTreeMap<u64, u64> = BTreeMap::new();
    for blob in state.blob_files(family).chain(&edit.new_blob_files) {
        alive.insert(blob.number, blob.total_count.saturating_sub(blob.garbage_count));
    }
    for garbage in &edit.blob_garbage {
        let left = alive.entry(garbage.number).or_default();
        *left = left.saturating_sub(garbage.count);
    }
    alive.retain(|_, left| *left > 0);
    let Some(&needed) = in_logs.iter().filter(|number| alive.contains_key(number)).min() else {
        return Ok(());
    };
    let gone: BTreeSet<u64> = edit.deleted_files.iter().map(|&(_, gone)| gone).collect();
    let stays = |file: &FileMeta| !gone.contains(&file.number);
    let mut older = alive.range(..=needed).map(|(&number, _)| number);
    let mut new = edit.new_files.iter().map(|(_, file)| file.oldest_blob_file);
    if older.any(|number| state.linked_files(family, number).any(|(_, file)| stays(file)))
        || new.any(|number| number <= needed && alive.contains_key(&number))
    {
        return Ok(());
    }
    if let Some((_, file)) = edit.new_files.first_mut() {
        file.oldest_blob_file = needed;
        return Ok(());
    }
    let Some((level, file)) = state.files(family).find(|(_, file)| stays(file)) else {
        let text = format!("{needed:06}.blob is in use, and no table would be left to link to it");
        return Err(Error::new(Kind::Memory, text));
    };
    let (number, linked) = (file.number, FileMeta { oldest_blob_file: needed, ..file.clone() });
    edit.deleted_files.push((level, number));
    edit.new_files.push((level, linked));
    Ok(())
}

/// Makes the links to a blob file true again, if a table refers to it: then the file needs no
/// anchor. `own` tells the own link of a table in a level; those of `state` may be an anchor's.
/// Returns whether all links to the file are true then. Looks only at tables that are linked to it.
pub(crate) fn release(
    state: &ManifestReplay,
    own: impl Fn(u32, &FileMeta) -> Option<u64>,
    number: u64,
    edit: &mut VersionEdit,
) -> Links {
    let linked = state.linked_files(edit.column_family, number);
    let linked = linked.map(|(level, file)| (level, file, own(level, file)));
    let (true_ones, anchors): (Vec<_>, Vec<_>) =
        linked.partition(|&(_, _, own)| own == Some(number));
    if anchors.is_empty() {
        return Links::True;
    }
    if true_ones.is_empty() {
        return Links::MayBeFalse;
    }
    for (level, file, own) in anchors {
        let Some(own) = own else { return Links::MayBeFalse };
        edit.deleted_files.push((level, file.number));
        edit.new_files.push((level, FileMeta { oldest_blob_file: own, ..file.clone() }));
    }
    Links::True
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocksfmt::testing::{EditBuilder, file_meta};
    use rocksfmt::{BlobFileMeta, BlobGarbage};

    /// Table 7 without a link, table 8 linked to blob file 9, and blob file 10.
    fn state() -> ManifestReplay {
        let mut replay = ManifestReplay::new();
        let mut linked = file_meta(8, b"d", b"f", (3, 4));
        linked.oldest_blob_file = 9;
        let edit = EditBuilder::new()
            .required(4, 50, 100)
            .numbers(400, &[9, 10, 1000, 0, 0, 0])
            .numbers(400, &[10, 10, 1000, 0, 0, 0])
            .add_file(0, &file_meta(7, b"a", b"c", (1, 2)))
            .add_file(0, &linked);
        replay.record(&edit.finish()).unwrap();
        replay
    }

    /// The live blob files after a change.
    fn live(mut replay: ManifestReplay, edit: VersionEdit) -> Vec<u64> {
        replay.edit(edit).unwrap();
        replay.live_blob_files(0).iter().map(|blob| blob.number).collect()
    }

    #[test]
    fn a_change_that_leaves_an_older_link_stays_as_it_is() {
        let mut edit = VersionEdit {
            new_blob_files: vec![BlobFileMeta::reserved(11, 4096)],
            ..VersionEdit::default()
        };
        let before = edit.clone();
        keep(&state(), &mut edit, &[10, 11]).unwrap();
        assert_eq!(edit, before);
        keep(&state(), &mut edit, &[]).unwrap();
        assert_eq!(edit, before);
    }

    #[test]
    fn a_table_takes_over_when_the_last_link_goes() {
        let gone = VersionEdit { deleted_files: vec![(0, 8)], ..VersionEdit::default() };
        let mut edit = gone.clone();
        keep(&state(), &mut edit, &[10]).unwrap();
        assert_eq!(edit.deleted_files, [(0, 8), (0, 7)]);
        assert_eq!(live(state(), edit), [10]);
        assert!(live(state(), gone.clone()).is_empty());
        // Its output, if it has one.
        let mut edit =
            VersionEdit { new_files: vec![(1, file_meta(20, b"a", b"f", (1, 4)))], ..gone };
        keep(&state(), &mut edit, &[10]).unwrap();
        assert_eq!(edit.deleted_files, [(0, 8)]);
        assert_eq!(live(state(), edit), [10]);
    }

    #[test]
    fn dead_files_need_no_anchor_and_make_none() {
        let all = |number| BlobGarbage { number, count: 10, bytes: 1000 };
        let edit = VersionEdit { deleted_files: vec![(0, 8)], ..VersionEdit::default() };
        let mut dead = VersionEdit { blob_garbage: vec![all(9), all(10)], ..edit.clone() };
        keep(&state(), &mut dead, &[9, 10]).unwrap();
        assert_eq!(dead.deleted_files, [(0, 8)]);
        let mut one = VersionEdit { blob_garbage: vec![all(9)], ..edit };
        keep(&state(), &mut one, &[9, 10]).unwrap();
        assert_eq!(live(state(), one), [10]);
    }

    #[test]
    fn anchors_are_released_when_a_table_refers_to_the_file() {
        // Table 8 is linked to file 9 in the MANIFEST; so is table 7 in the second state.
        let mut both = state();
        let mut seven = file_meta(7, b"a", b"c", (1, 2));
        seven.oldest_blob_file = 9;
        let (deleted_files, new_files) = (vec![(0, 7)], vec![(0, seven)]);
        both.edit(VersionEdit { deleted_files, new_files, ..VersionEdit::default() }).unwrap();
        let release = |state: &ManifestReplay, own: [u64; 2], number| {
            let mut edit = VersionEdit::default();
            let own = BTreeMap::from([(7, own[0]), (8, own[1])]);
            let own = |_, file: &FileMeta| own.get(&file.number).copied();
            let links = release(state, own, number, &mut edit);
            let new = edit.new_files.iter().map(|(_, file)| (file.number, file.oldest_blob_file));
            (links, edit.deleted_files, new.collect::<Vec<_>>())
        };
        assert_eq!(release(&state(), [0, 9], 9), (Links::True, vec![], vec![]));
        assert_eq!(release(&state(), [0, 0], 10), (Links::True, vec![], vec![]));
        assert_eq!(release(&state(), [0, 0], 9), (Links::MayBeFalse, vec![], vec![]));
        assert_eq!(release(&both, [0, 0], 9), (Links::MayBeFalse, vec![], vec![]));
        assert_eq!(release(&both, [10, 9], 9), (Links::True, vec![(0, 7)], vec![(7, 10)]));
    }

    #[test]
    fn a_change_that_leaves_no_table_is_refused() {
        let deleted_files = vec![(0, 7), (0, 8)];
        let mut edit = VersionEdit { deleted_files, ..VersionEdit::default() };
        assert_eq!(keep(&state(), &mut edit, &[10]).unwrap_err().kind(), Kind::Memory);
        keep(&state(), &mut edit, &[12]).unwrap();
    }
}

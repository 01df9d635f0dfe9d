//! Finds the MANIFEST of a damaged directory.

use fs::{Dir, DirEntry};
use reactor::Core;
use rocksfmt::{FileName, ManifestState};

use crate::error::{Kind, Result};
use crate::open::recover;

/// What describes the database.
pub(super) enum Found {
    /// A MANIFEST; `why` if it is not the one that CURRENT names.
    Manifest { number: u64, state: Box<ManifestState>, why: Option<String> },
    /// No MANIFEST can be used.
    Nothing { why: String },
}

/// The current MANIFEST. If there is none, the one that names the most tables, if all of them are
/// there: a newer one may be cut off, and tables of an older one were removed.
pub(super) async fn manifest(core: &Core, dir: &Dir, entries: &[DirEntry]) -> Result<Found> {
    let named = async |number| {
        let name = FileName::Manifest(number).to_string();
        recover::manifest(core, dir, &name).await
    };
    let why = match recover::current(dir).await {
        Ok(number) => match named(number).await {
            Ok(state) => {
                return Ok(Found::Manifest { number, state: Box::new(state), why: None });
            }
            Err(error) if error.kind() == Kind::Corruption => error.to_string(),
            Err(error) => return Err(error),
        },
        Err(error) if matches!(error.kind(), Kind::NoDatabase | Kind::Corruption) => {
            error.to_string()
        }
        Err(error) => return Err(error),
    };
    let mut best: Option<(usize, u64, ManifestState)> = None;
    for entry in entries {
        let Some(FileName::Manifest(number)) = FileName::parse(&entry.name) else { continue };
        let Ok(state) = named(number).await else { continue };
        let files = state.column_families.values().flat_map(|family| family.files());
        let metas: Vec<(u64, u64)> = files.map(|(_, m)| (m.number, m.size_bytes)).collect();
        let is_there = |&(number, size): &(u64, u64)| {
            entries.iter().any(|e| super::is_table(&e.name, number) && e.size == size)
        };
        let better = best.as_ref().is_none_or(|best| (best.0, best.1) < (metas.len(), number));
        if better && !metas.is_empty() && metas.iter().all(is_there) {
            best = Some((metas.len(), number, state));
        }
    }
    Ok(match best {
        Some((_, number, state)) => {
            let why = format!("{why}; {} has the state instead", FileName::Manifest(number));
            Found::Manifest { number, state: Box::new(state), why: Some(why) }
        }
        None => Found::Nothing { why },
    })
}

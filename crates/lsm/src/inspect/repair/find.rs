//! Finds the MANIFEST of a damaged directory.

use fs::{Dir, DirEntry};
use reactor::Core;
use rocksfmt::{FileName, ManifestState};

use crate::error::{Kind, Result};
use crate::open::{recover, unnamed};

/// What describes the database.
pub(super) enum Found {
    /// A MANIFEST; `why` if it is not the one that CURRENT names.
    Manifest { number: u64, state: Box<ManifestState>, why: Option<String> },
    /// No MANIFEST can be used. One that lost its end has described column families.
    Nothing { why: String, known: Option<Box<ManifestState>> },
}

/// The current MANIFEST. If there is none, the one that names the most tables, if all of them are
/// there: a newer one may be cut off, and tables of an older one were removed. If tables are
/// missing for each, the newest one that names some that are there. A MANIFEST that lost its end
/// is not used.
pub(super) async fn manifest(core: &Core, dir: &Dir, entries: &[DirEntry]) -> Result<Found> {
    let named = async |number| {
        let name = FileName::Manifest(number).to_string();
        let state = recover::manifest(core, dir, &name).await?;
        let lost_end = unnamed::lost_end(core, dir, &name, &state, entries).await?;
        Ok::<_, crate::error::Error>((Box::new(state), lost_end))
    };
    let mut known = None;
    let why = match recover::current(dir).await {
        Ok(number) => match named(number).await {
            Ok((state, None)) => return Ok(Found::Manifest { number, state, why: None }),
            Ok((state, Some(why))) => {
                known = Some(state);
                why
            }
            Err(error) if error.kind() == Kind::Corruption => error.to_string(),
            Err(error) => return Err(error),
        },
        Err(error) if matches!(error.kind(), Kind::NoDatabase | Kind::Corruption) => {
            error.to_string()
        }
        Err(error) => return Err(error),
    };
    // Whether all of its tables are there, how many are, and its number.
    let mut best: Option<((bool, usize, u64), Box<ManifestState>)> = None;
    for entry in entries {
        let Some(FileName::Manifest(number)) = FileName::parse(&entry.name) else { continue };
        let state = match named(number).await {
            Ok((state, None)) => state,
            Err(error) if matches!(error.kind(), Kind::Io | Kind::Memory) => return Err(error),
            Ok(_) | Err(_) => continue,
        };
        let files = state.column_families.values().flat_map(|family| family.files());
        let metas: Vec<(u64, u64)> = files.map(|(_, m)| (m.number, m.size_bytes)).collect();
        let is_there = |&&(number, size): &&(u64, u64)| {
            entries.iter().any(|e| super::is_table(&e.name, number) && e.size == size)
        };
        let there = metas.iter().filter(is_there).count();
        let rank = match there == metas.len() {
            true => (true, there, number),
            false => (false, 0, number),
        };
        if there > 0 && best.as_ref().is_none_or(|(of_best, _)| *of_best < rank) {
            best = Some((rank, state));
        }
    }
    Ok(match best {
        Some(((_, _, number), state)) => {
            let why = format!("{why}; {} has the state instead", FileName::Manifest(number));
            Found::Manifest { number, state, why: Some(why) }
        }
        None => Found::Nothing { why, known },
    })
}

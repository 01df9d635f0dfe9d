//! Ingestion of files that a program at the admin socket puts into the database's directory: with
//! its own rights, because a node with a sandbox sees no other directory.

use std::cell::RefCell;
use std::collections::BTreeSet;

use kv::Shard;
use lsm::IngestFiles;
use serde_json::{Value, json};

use super::open::explain;
use crate::error::{Error, Kind};
use crate::process::working_directory;

/// Most files that may be reserved and not ingested.
const RESERVED_MAX: usize = 100_000;

/// The files that were reserved.
pub(crate) struct Ingestions {
    /// `None` if the node writes to no database.
    shard: Option<Shard>,
    reserved: RefCell<BTreeSet<u64>>,
}

impl Ingestions {
    pub fn new(shard: Option<Shard>) -> Ingestions {
        Ingestions { shard, reserved: RefCell::default() }
    }

    fn shard(&self) -> Result<&Shard, Error> {
        let none = || Error::new(Kind::Usage, "this node writes to no database");
        self.shard.as_ref().ok_or_else(none)
    }

    /// Reserves numbers for files.
    pub fn begin(&self, files: usize) -> Result<Value, Error> {
        let shard = self.shard()?;
        let mut reserved = self.reserved.borrow_mut();
        if reserved.len().saturating_add(files) > RESERVED_MAX {
            let what = format!("{RESERVED_MAX} files at most may wait to be ingested");
            return Err(Error::new(Kind::Usage, what));
        }
        let numbers = shard.reserve_files(files);
        reserved.extend(&numbers);
        Ok(json!({
            "directory": working_directory().join(shard.path()),
            "numbers": numbers,
        }))
    }

    /// Ingests files into a column family.
    pub async fn finish(&self, family: &str, numbers: Vec<u64>) -> Result<Value, Error> {
        let shard = self.shard()?;
        {
            // Another process must not ingest a number of this one, nor a number twice.
            let mut reserved = self.reserved.borrow_mut();
            if !numbers.iter().all(|number| reserved.contains(number)) {
                return Err(Error::new(Kind::System, "the node does not expect these files")
                    .hint("it was restarted meanwhile: try again"));
            }
            reserved.retain(|number| !numbers.contains(number));
        }
        let families = shard.column_families();
        let Some(found) = families.iter().find(|known| known.name == family) else {
            return Err(Error::new(Kind::Usage, format!("no column family is named '{family}'")));
        };
        let files = vec![IngestFiles { family: found.id, numbers }];
        // The program has verified them.
        let done = shard.ingest(files, false).await;
        let done = done.map_err(|error| explain(shard.path(), &error))?;
        Ok(json!({
            "entries": done.entries,
            "bytes": done.bytes,
            "sequence": done.sequence,
            "levels": done.levels,
        }))
    }
}

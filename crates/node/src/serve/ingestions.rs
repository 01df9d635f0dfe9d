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

/// The files that were reserved. The admin socket releases them when the connection ends that has
/// reserved them.
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

    /// Whether all of these numbers are still reserved.
    pub fn renew(&self, numbers: &[u64]) -> Result<Value, Error> {
        let reserved = self.reserved.borrow();
        match numbers.iter().all(|number| reserved.contains(number)) {
            true => Ok(json!({})),
            false => Err(not_expected()),
        }
    }

    /// Releases those of these numbers that are still reserved, and removes their files.
    pub async fn release(&self, numbers: &[u64]) -> Result<Value, Error> {
        let shard = self.shard()?;
        let mut left = numbers.to_vec();
        left.retain(|number| self.reserved.borrow_mut().remove(number));
        shard.discard_files(&left).await;
        Ok(json!({"released": left.len()}))
    }

    /// Ingests files into a column family.
    pub async fn finish(&self, family: &str, numbers: Vec<u64>) -> Result<Value, Error> {
        let shard = self.shard()?;
        {
            // Another process must not ingest a number of this one, nor a number twice.
            let mut reserved = self.reserved.borrow_mut();
            if !numbers.iter().all(|number| reserved.contains(number)) {
                return Err(not_expected());
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

fn not_expected() -> Error {
    Error::new(Kind::System, "the node does not expect these files")
        .hint("it was restarted, or lost the connection, meanwhile: try again")
}

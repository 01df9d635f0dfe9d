//! Inspection of a database: `kv check` and `kv stat`. Uses `open`, the state that all cores
//! share, and the shape of levels (`write::compaction_status`). Only `repair` writes, and it also
//! uses the jobs of `write`.

pub(crate) mod check;
pub(crate) mod repair;
pub(crate) mod stat;

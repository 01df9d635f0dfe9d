//! Inspection of a database: `kv check` and `kv stat`. Uses `open` and the state that all cores
//! share, and writes nothing.

pub(crate) mod check;
pub(crate) mod stat;

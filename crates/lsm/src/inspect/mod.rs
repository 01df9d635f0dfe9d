//! Looking at a database from outside: `kv check` and `kv stat`.

pub(crate) mod check;
pub(crate) mod stat;

//! Counters of a database.

/// Counters since the opening; see [`Db::stats`](crate::Db::stats).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Keys that the calling thread looked up itself, because everything was in memory: by gets
    /// and multi-gets of the newest state. All others were handed to a thread of the database.
    pub gets_by_caller: u64,
}

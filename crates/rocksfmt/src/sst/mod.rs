//! SST and blob files: everything around and between their blocks. Uses `block`, and `manifest` for
//! the description of a finished file.

pub(crate) mod blob;
pub(crate) mod builder;
pub(crate) mod filter;
pub(crate) mod footer;
pub(crate) mod identity;
pub(crate) mod index;
pub(crate) mod index_search;
pub(crate) mod metaindex;
pub(crate) mod properties;
pub(crate) mod range_del_aggregator;
pub(crate) mod rangedel;
pub(crate) mod step_sort;
pub(crate) mod xxph3;

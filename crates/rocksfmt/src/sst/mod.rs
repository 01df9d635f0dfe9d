//! SST and blob files: what is around and between their blocks.

pub(crate) mod blob;
pub(crate) mod builder;
pub(crate) mod filter;
pub(crate) mod footer;
pub(crate) mod index;
pub(crate) mod index_search;
pub(crate) mod metaindex;
pub(crate) mod properties;
pub(crate) mod rangedel;
pub(crate) mod xxph3;

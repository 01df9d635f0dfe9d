//! This process as the system knows it: its processors, its signals, its descriptors, and what it
//! leaves to others when it ends.

pub(crate) mod fork;
pub(crate) mod passed;
pub(crate) mod processors;
pub(crate) mod signals;
pub(crate) mod survivor;
pub(crate) mod work;

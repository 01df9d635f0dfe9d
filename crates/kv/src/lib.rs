//! The key-value door: Redis's protocol in front of the engine.
#![forbid(unsafe_code)]

mod args;
mod command;
mod describe;
mod glob;
mod help;
mod range;
mod refusal;
mod scan_table;
mod spec;
mod table;

pub use args::Args;
pub use command::{Command, parse, part};
pub use describe::describe;
pub use scan_table::ScanTable;

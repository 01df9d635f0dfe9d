//! The flags of `millrace kv column-families`.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand, ValueHint};
use reactor::DriverKind;

use super::values::driver;

/// `millrace kv column-families`.
#[derive(Debug, Subcommand)]
pub enum FamiliesCommand {
    /// List the column families of a database
    #[command(after_help = "Example:\n  millrace kv column-families list --data DIR")]
    List {
        /// The directory.
        #[command(flatten)]
        place: FamiliesPlace,
        /// Read the directory while another process has it open for writing
        #[arg(long)]
        secondary: bool,
    },
    /// Make an empty column family
    #[command(after_help = "Example:\n  \
        millrace kv column-families create users --data DIR\n\n\
        Its options are those of the default family.")]
    Create {
        /// The new name
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Order the keys from the last to the first byte value (ReverseBytewiseComparator)
        #[arg(long)]
        descending: bool,
        /// The directory.
        #[command(flatten)]
        place: FamiliesPlace,
    },
    /// Drop a column family with everything in it
    #[command(after_help = "Example:\n  \
        millrace kv column-families drop users --data DIR\n\n\
        The default family cannot be dropped.")]
    Drop {
        /// Its name
        name: String,
        /// The directory.
        #[command(flatten)]
        place: FamiliesPlace,
    },
}

/// A database whose column families are listed or changed.
#[derive(Clone, Debug, Args)]
pub struct FamiliesPlace {
    /// A RocksDB directory that no other process is writing to
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub data: PathBuf,
    /// Print JSON; its shape is described in docs/CLI.md
    #[arg(long)]
    pub json: bool,
    /// How to access the disk
    #[arg(long, value_name = "DRIVER", value_parser = driver(), default_value = "auto")]
    #[arg(hide_short_help = true)]
    pub io: DriverKind,
}

//! The flags of `millrace kv compact` and `millrace kv compaction`.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use node::Size;
use reactor::DriverKind;

use super::NodeArgs;
use super::values::{cores, driver};

/// `millrace kv compact`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:\n  \
    millrace kv compact                                    the running node\n  \
    millrace kv compact --from user: --to 'user;'          a range of its keys\n  \
    millrace kv compact --data /data/db                    a directory\n\n\
    Merges the range into the deepest level that has any of its keys, which frees the space of \
    overwritten and deleted ones. A running node serves meanwhile; what is written meanwhile may \
    stay in other levels. Ctrl-C cancels the compaction, and what is merged stays merged. If this \
    command is killed, the node cancels it within 20 s.")]
pub struct CompactArgs {
    /// The lowest key of the range (inclusive)
    #[arg(long, value_name = "KEY")]
    pub from: Option<OsString>,
    /// The key to stop before (exclusive)
    #[arg(long, value_name = "KEY")]
    pub to: Option<OsString>,
    /// --from and --to are hexadecimal
    #[arg(long)]
    pub hex: bool,
    /// The column family
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub column_family: String,
    /// The database's directory, which no process is writing to [default: that of a running node]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    #[arg(conflicts_with = "admin")]
    pub data: Option<PathBuf>,
    /// A running node.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Write to a database last written by a RocksDB older than 7.8; afterwards only 7.8 and newer
    /// read it
    #[arg(long, requires = "data")]
    pub adopt: bool,
    /// How many processors to use [default: all]
    #[arg(long, value_name = "N", requires = "data")]
    pub cores: Option<NonZeroUsize>,
    /// How to access the disk
    #[arg(long, value_name = "DRIVER", value_parser = driver(), default_value = "auto")]
    #[arg(requires = "data", hide_short_help = true)]
    pub io: DriverKind,
}

/// `millrace kv compaction`.
#[derive(Debug, Subcommand)]
pub enum CompactionCommand {
    /// Show the merges under way, the levels, and what merges have done to each
    #[command(after_help = "Examples:\n  \
        millrace kv compaction status\n  \
        millrace kv compaction status --json\n\n\
        SCORE is 1 when a merge is due: the files of level 0 divided by its trigger, for other \
        levels their bytes divided by their target. W-AMP is the bytes written to a level for each \
        byte that came into it, S-AMP its bytes for each live byte of all levels. Counters \
        begin with the node's start.")]
    Status {
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Stop all merges until resume, or until the node ends
    #[command(after_help = "Merges under way stand still, and keep their space and their files. \
        Writes go on, slow down when level 0 fills, and stop when it has \
        level0_stop_writes_trigger files.")]
    Pause {
        /// Which node to pause.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Let merges go on
    Resume {
        /// Which node to resume.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Limit the merges' share of the processors and of the disk, until the node ends
    #[command(after_help = "Examples:\n  \
        millrace kv compaction limit --cores 0.5 --rate 50M\n  \
        millrace kv compaction limit --rate none\n\n\
        A limit that is not given stays. Writes are slowed to what the merges can keep up with.")]
    Limit {
        /// Processor time of all merges together, in cores, such as 0.5; none: no limit
        #[arg(long, value_name = "N", value_parser = cores)]
        #[arg(required_unless_present = "rate")]
        cores: Option<u32>,
        /// Bytes of keys and values that all merges together go through in a second; none: no
        /// limit
        #[arg(long, value_name = "SIZE", value_parser = rate)]
        rate: Option<u64>,
        /// Which node to limit.
        #[command(flatten)]
        node: NodeArgs,
    },
}

/// A rate in bytes per second; 0 for none.
fn rate(text: &str) -> Result<u64, String> {
    match text {
        "none" => Ok(0),
        text => match text.parse::<Size>()?.0 {
            0 => Err("it must be above 0; none removes the limit".to_owned()),
            bytes => Ok(bytes),
        },
    }
}

//! The flags of the commands that copy whole databases: `millrace kv checkpoint`, `backup` and
//! `restore`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use node::Size;
use reactor::DriverKind;

use super::NodeArgs;
use super::values::{driver, rate};

/// A database as a whole: the one that is copied, or ingests files.
#[derive(Clone, Debug, Args)]
pub struct Original {
    /// The database's directory, which no process is writing to [default: that of a running node]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    #[arg(conflicts_with = "admin")]
    pub data: Option<PathBuf>,
    /// A running node.
    #[command(flatten)]
    pub node: NodeArgs,
    /// How to copy.
    #[command(flatten)]
    pub copying: Copying,
}

/// How files are copied.
#[derive(Clone, Debug, Args)]
pub struct Copying {
    /// Read at most this many bytes per second
    #[arg(long, value_name = "SIZE", value_parser = rate)]
    pub rate_limit: Option<Size>,
    /// How to access the disk
    #[arg(long, value_name = "DRIVER", value_parser = driver(), default_value = "auto")]
    #[arg(hide_short_help = true)]
    pub io: DriverKind,
}

/// A directory of backups.
#[derive(Clone, Debug, Args)]
pub struct Backups {
    /// The directory of the backups.
    #[arg(value_name = "BACKUPS", value_hint = ValueHint::DirPath)]
    pub backups: PathBuf,
    /// Print JSON; its shape is described in docs/CLI.md
    #[arg(long)]
    pub json: bool,
}

/// `millrace kv checkpoint`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    millrace kv checkpoint /data/copy                   of the running node\n  \
    millrace kv checkpoint /data/copy --data /data/db   of a directory\n\n\
    The new directory is a database of its own, as it was at one moment. In the same file system \
    its tables are hard links, which take no space and no time; elsewhere they are copied. It \
    appears under its name when it is complete.")]
pub struct CheckpointArgs {
    /// The new directory; it must be missing or empty.
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub directory: PathBuf,
    /// What to copy.
    #[command(flatten)]
    pub original: Original,
}

/// `millrace kv backup`.
#[derive(Debug, Subcommand)]
pub enum BackupCommand {
    /// Add a backup: only files that no earlier backup has are copied
    #[command(after_help = "Examples:\n  \
        millrace kv backup create /backups                   of the running node\n  \
        millrace kv backup create /backups --data /data/db   of a directory\n\n\
        The directory has the layout of RocksDB's BackupEngine: `ldb backup` continues it and \
        `ldb restore` restores it. A backup that is interrupted is not there; the next one takes \
        over the files that were copied.")]
    Create {
        /// The directory of the backups; it is created in an existing one.
        #[arg(value_name = "BACKUPS", value_hint = ValueHint::DirPath)]
        backups: PathBuf,
        /// Also add a backup of another database than that of the newest backup
        #[arg(long)]
        any_database: bool,
        /// What to copy.
        #[command(flatten)]
        original: Original,
    },
    /// List the backups
    List {
        /// Where they are.
        #[command(flatten)]
        backups: Backups,
    },
    /// Read every file of a backup and compare its checksum
    #[command(after_help = "Exits with 1 if anything is damaged.")]
    Verify {
        /// Where they are.
        #[command(flatten)]
        backups: Backups,
        /// The backup's number [default: the newest]
        #[arg(long, value_name = "N")]
        id: Option<u32>,
        /// How to read.
        #[command(flatten)]
        copying: Copying,
    },
    /// Delete backups, and the files that no other backup has
    Delete {
        /// Where they are.
        #[command(flatten)]
        backups: Backups,
        /// The number of a backup; may be repeated
        #[arg(long, value_name = "N", required = true)]
        id: Vec<u32>,
    },
    /// Keep the newest backups and delete the others
    #[command(after_help = "Example:\n  \
        millrace kv backup purge /backups --keep 7\n\n\
        Also removes what interrupted backups have left.")]
    Purge {
        /// Where they are.
        #[command(flatten)]
        backups: Backups,
        /// How many backups stay
        #[arg(long, value_name = "N")]
        keep: usize,
    },
}

/// `millrace kv ingest`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    millrace kv ingest part1.sst part2.sst                   into the running node\n  \
    millrace kv ingest --move *.sst --data /data/db          into a directory\n\n\
    FILES are tables that RocksDB's SstFileWriter made. Their entries become visible together, and \
    are newer than all that was there. Files of one call must not overlap each other. Every byte \
    is verified first.")]
pub struct IngestArgs {
    /// The files.
    #[arg(required = true, value_name = "FILES", value_hint = ValueHint::FilePath)]
    pub files: Vec<PathBuf>,
    /// The column family
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub column_family: String,
    /// Move the files instead of copying them: in the same file system that takes no time
    #[arg(long = "move")]
    pub moves: bool,
    /// Do not read the files before they are ingested
    #[arg(long)]
    pub no_verify: bool,
    /// The database, and how to copy.
    #[command(flatten)]
    pub into: Original,
}

/// `millrace kv restore`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    millrace kv restore /backups --data /data/db\n  \
    millrace kv restore /backups --data /data/old --id 3\n\n\
    Every byte is compared with its checksum. The directory appears under its name when it is \
    complete. A restore that is interrupted is continued by the same command.")]
pub struct RestoreArgs {
    /// The directory of the backups, and how to print.
    #[command(flatten)]
    pub backups: Backups,
    /// The database's new directory; it must be missing or empty
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub data: PathBuf,
    /// The backup's number [default: the newest]
    #[arg(long, value_name = "N")]
    pub id: Option<u32>,
    /// How to copy.
    #[command(flatten)]
    pub copying: Copying,
}

//! The flags of `millrace kv`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueHint};
use reactor::DriverKind;

use super::compaction::{CompactArgs, CompactionCommand};
use super::copies::{BackupCommand, CheckpointArgs, IngestArgs, RestoreArgs};
use super::families::FamiliesCommand;
use super::values::driver;
use crate::style::Style;

/// `millrace kv`.
#[derive(Debug, Subcommand)]
pub enum KvCommand {
    /// Print the value of a key
    #[command(after_help = "Examples:\n  \
        millrace kv get user:42 --data DIR\n  \
        millrace kv get 00000000000013883030303030303030 --hex --data DIR\n  \
        millrace kv get user:42 --connect 127.0.0.1:6379 --json\n\n\
        On a terminal, non-text bytes are shown as \\x1f; into a pipe or file the value goes \
        unchanged. Exits with 1 if the key does not exist.")]
    Get {
        /// The key (in hexadecimal with --hex).
        key: OsString,
        /// Where to read.
        #[command(flatten)]
        source: Source,
        /// Which entries.
        #[command(flatten)]
        entries: Entries,
    },
    /// List keys and values in order
    #[command(after_help = "Examples:\n  \
        millrace kv scan --data DIR --limit 10\n  \
        millrace kv scan --data DIR --from user: --to 'user;' --reverse\n  \
        millrace kv scan --data DIR --hex > dump.txt\n\n\
        A line is KEY, a tab, VALUE; non-text bytes, tabs and backslashes are escaped \
        (\\x1f, \\t, \\\\). With --hex it is KEYHEX, a space, VALUEHEX; with --json an object.")]
    Scan {
        /// List from the last key to the first
        #[arg(long)]
        reverse: bool,
        /// The lowest key to list (inclusive)
        #[arg(long, value_name = "KEY")]
        from: Option<OsString>,
        /// The key to stop before (exclusive)
        #[arg(long, value_name = "KEY")]
        to: Option<OsString>,
        /// The largest number of keys to list
        #[arg(long, value_name = "N")]
        limit: Option<u64>,
        /// Where to read.
        #[command(flatten)]
        source: Source,
        /// Which entries.
        #[command(flatten)]
        entries: Entries,
    },
    /// Set a key
    #[command(after_help = "Examples:\n  \
        millrace kv put user:42 'Ada' --data DIR\n  \
        millrace kv put picture - --connect :6379 < picture.jpg")]
    Put {
        /// The key (in hexadecimal with --hex).
        key: OsString,
        /// The value; - reads it from standard input.
        value: OsString,
        /// Key and value are hexadecimal
        #[arg(long)]
        hex: bool,
        /// Where to write.
        #[command(flatten)]
        target: Target,
    },
    /// Remove keys
    #[command(
        alias = "delete",
        after_help = "Examples:\n  \
        millrace kv del user:42 user:43 --data DIR\n\n\
        Exits with 1 if none of the keys existed."
    )]
    Del {
        /// The keys (in hexadecimal with --hex).
        #[arg(required = true)]
        keys: Vec<OsString>,
        /// Keys are hexadecimal
        #[arg(long)]
        hex: bool,
        /// Where to write.
        #[command(flatten)]
        target: Target,
    },
    /// Set keys from a file or standard input
    #[command(after_help = "Examples:\n  \
        millrace kv import dump.txt --data DIR\n  \
        millrace kv export --data OLD --format resp | millrace kv import --format resp --connect :6379\n\n\
        FORMAT is what kv export writes; resp also takes MSET, DEL and UNLINK, and inline \
        commands. With --data everything is durable when the command ends, and sorted entries beyond \
        the database's last key become tables directly. A mistake in the input ends the import; \
        earlier entries stay imported.")]
    Import {
        /// The file to read; standard input if left out, or -.
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
        /// The format of the entries: text, hex, json or resp
        #[arg(long, value_name = "FORMAT", value_parser = style(), default_value = "text")]
        format: Style,
        /// Continue an interrupted import of sorted entries: skip those up to the database's last
        /// key
        #[arg(long, conflicts_with = "connect")]
        resume: bool,
        /// Where to write.
        #[command(flatten)]
        target: Target,
    },
    /// Write all keys and values to a file or to standard output
    #[command(after_help = "Examples:\n  \
        millrace kv export --data DIR --out dump.txt\n  \
        millrace kv export --data DIR --format json | gzip > dump.json.gz\n  \
        millrace kv export --connect :6379 --format resp | redis-cli -p 7000 --pipe\n\n\
        FORMAT is text (KEY, a tab, VALUE, escaped as kv scan prints them), hex (KEYHEX VALUEHEX), \
        json (an object per line) or resp (SET commands of Redis's protocol). kv import reads all \
        of them.")]
    Export {
        /// The format of the entries: text, hex, json or resp
        #[arg(long, value_name = "FORMAT", value_parser = style(), default_value = "text")]
        format: Style,
        /// The file to write [default: standard output]
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        out: Option<PathBuf>,
        /// The lowest key to export (inclusive; in hexadecimal with --format hex)
        #[arg(long, value_name = "KEY")]
        from: Option<OsString>,
        /// The key to stop before (exclusive)
        #[arg(long, value_name = "KEY")]
        to: Option<OsString>,
        /// The column family to export [default: default, or the one that the node serves]
        #[arg(long, value_name = "NAME")]
        column_family: Option<String>,
        /// Where to read.
        #[command(flatten)]
        source: Source,
    },
    /// Copy a database, running or not, as it is at one moment, into a new directory
    Checkpoint(CheckpointArgs),
    /// Keep states of a database, running or not, in a directory of backups
    #[command(subcommand_required = true, arg_required_else_help = true)]
    Backup {
        /// What to do with the backups.
        #[command(subcommand)]
        command: BackupCommand,
    },
    /// Add tables that RocksDB's SstFileWriter made, all at once
    Ingest(IngestArgs),
    /// Restore a backup into a new directory
    Restore(RestoreArgs),
    /// List, make and drop the column families of a database
    #[command(subcommand_required = true, arg_required_else_help = true)]
    ColumnFamilies {
        /// What to do with them.
        #[command(subcommand)]
        command: FamiliesCommand,
    },
    /// Compact a range of keys, or all, of a database, running or not
    Compact(CompactArgs),
    /// Watch, pause and limit the merges of a running node
    #[command(subcommand_required = true, arg_required_else_help = true)]
    Compaction {
        /// What to do.
        #[command(subcommand)]
        command: CompactionCommand,
    },
    /// Describe a database: levels, files, sizes, column families, options
    #[command(after_help = "Examples:\n  \
        millrace kv stat --data DIR\n  \
        millrace kv stat --connect 127.0.0.1:6379")]
    Stat {
        /// Where to read.
        #[command(flatten)]
        source: Source,
    },
    /// Read and verify every byte of a database
    #[command(after_help = "Examples:\n  \
        millrace kv check --data DIR\n\n\
        Reads every block of every file, the write-ahead logs and the MANIFEST, and verifies \
        checksums, order and counts. Names the file and offset of each damage; exits with 1 if \
        there is any. Needs the directory; works while a node serves it read-only.\n\n\
        --repair makes a damaged directory a database again. It drops the files that are missing \
        or cannot be opened, rebuilds the MANIFEST if it cannot be read, and lists what is lost. \
        Dropped files stay in the directory 'lost'. Exit codes: 0 repaired, or nothing to repair; \
        1 repaired, but something is lost or stays damaged; 2 not repaired.")]
    Check {
        /// Where to read.
        #[command(flatten)]
        source: Source,
        /// Drop what cannot be read, and rebuild the MANIFEST if needed
        #[arg(long, conflicts_with_all = ["connect", "secondary", "salvage"])]
        repair: bool,
        /// With --repair: only say what would be done
        #[arg(long, requires = "repair")]
        dry_run: bool,
    },
}

/// Where a `kv` command reads, and how it prints.
#[derive(Clone, Debug, Args)]
pub struct Source {
    /// A directory or a node.
    #[command(flatten)]
    pub location: Location,
    /// Print JSON; its shape is described in docs/CLI.md
    #[arg(long)]
    pub json: bool,
    /// Read the directory while another process has it open for writing
    #[arg(long, conflicts_with = "connect")]
    pub secondary: bool,
    /// Read the data before damage in the write-ahead log, instead of refusing
    #[arg(long, conflicts_with = "connect", hide_short_help = true)]
    pub salvage: bool,
    /// How to access the disk
    #[arg(long, value_name = "DRIVER", value_parser = driver(), default_value = "auto")]
    #[arg(conflicts_with = "connect", hide_short_help = true)]
    pub io: DriverKind,
}

/// Where a `kv` command writes.
#[derive(Clone, Debug, Args)]
pub struct Target {
    /// A directory or a node.
    #[command(flatten)]
    pub location: Location,
    /// The column family to write [default: default, or the one that the node serves]
    #[arg(long, value_name = "NAME")]
    pub column_family: Option<String>,
    /// Print JSON; its shape is described in docs/CLI.md
    #[arg(long)]
    pub json: bool,
    /// Write to a database last written by a RocksDB older than 7.8; afterwards only 7.8 and newer
    /// read it
    #[arg(long, conflicts_with = "connect")]
    pub adopt: bool,
    /// How to access the disk
    #[arg(long, value_name = "DRIVER", value_parser = driver(), default_value = "auto")]
    #[arg(conflicts_with = "connect", hide_short_help = true)]
    pub io: DriverKind,
}

/// Which keys and values `get` and `scan` print, and in which form.
#[derive(Clone, Debug, Args)]
pub struct Entries {
    /// The column family to read [default: default, or the one that the node serves]
    #[arg(long, value_name = "NAME")]
    pub column_family: Option<String>,
    /// Keys and values are hexadecimal, in arguments and in the output
    #[arg(long)]
    pub hex: bool,
}

/// Exactly one of a directory or a node.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Location {
    /// A RocksDB directory that no other process is writing to
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub data: Option<PathBuf>,
    /// A running node: HOST, HOST:PORT or :PORT
    #[arg(long, value_name = "ADDR")]
    pub connect: Option<String>,
}

fn style() -> impl TypedValueParser<Value = Style> {
    PossibleValuesParser::new(["text", "hex", "json", "resp"]).try_map(|text| text.parse())
}

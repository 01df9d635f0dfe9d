//! The command line, defined once: the parser, the help, the completions and the man pages are
//! derived from it.

use std::ffi::OsString;
use std::path::PathBuf;

use bench::{Case, Compression, Durability, Mix, Workload};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueHint};
use node::{CoreChoice, DiskSpec, Sandbox, Size};
use reactor::log::{Filter, Format};
use reactor::{DriverKind, PollMode};

use crate::style::Style;

/// Serves and reads RocksDB databases at the disk's speed.
#[derive(Debug, Parser)]
#[command(
    name = "millrace",
    version,
    arg_required_else_help = true,
    after_help = "Start with:\n  \
        millrace serve --data DIR         serve the RocksDB database in DIR to Redis clients\n  \
        millrace kv get KEY --data DIR    read one key\n  \
        millrace kv check --data DIR      verify every byte of it",
    after_long_help = "Start with:\n  \
        millrace serve --data DIR         serve the RocksDB database in DIR to Redis clients\n  \
        millrace kv get KEY --data DIR    read one key\n  \
        millrace kv check --data DIR      verify every byte of it\n\n\
        Exit codes: 0 success; 1 the key does not exist (kv get), damage was \
        found (kv check); 2 wrong usage, or an operation failed.\n\n\
        Sizes are in bytes, or a number with K, M, G or T (powers of 1024)."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a database to Redis clients
    Serve(ServeArgs),
    /// Read, write, list, describe or verify a database
    #[command(subcommand_required = true, arg_required_else_help = true)]
    Kv {
        /// What to do with the database.
        #[command(subcommand)]
        command: KvCommand,
    },
    /// Create disks for virtual machines; attach, resize and watch them on a running node
    #[command(subcommand_required = true, arg_required_else_help = true)]
    Disk {
        /// What to do with disks.
        #[command(subcommand)]
        command: DiskCommand,
    },
    /// Show the activity of a running node, second by second
    Top(TopArgs),
    /// Replace the program of a running node while guests run and clients are connected
    Upgrade(UpgradeArgs),
    /// Measure how fast a database or a disk is read and written
    Bench(BenchArgs),
    /// Print a shell's completion script
    #[command(after_help = "Example:\n  \
        millrace completions bash > /etc/bash_completion.d/millrace")]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or that of a command
    #[command(after_help = "Examples:\n  \
        millrace man | man -l -\n  \
        millrace man kv scan | man -l -")]
    Man {
        /// The command, such as: kv scan
        command: Vec<String>,
    },
}

/// `millrace serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  \
        millrace serve --data ./data\n  \
        millrace serve --data /var/lib/app/rocksdb --read-only\n  \
        millrace serve --data DIR --durability process --memory 4G --listen 127.0.0.1:7000\n\n\
        Then, in another terminal:\n  \
        redis-cli SET some-key 'some value'\n  \
        redis-cli GET some-key\n  \
        redis-cli MR.RANGE - + LIMIT 10",
    after_long_help = "Examples:\n  \
        millrace serve --data ./data\n  \
        millrace serve --data /var/lib/app/rocksdb --read-only\n  \
        millrace serve --data DIR --durability process --memory 4G --listen 127.0.0.1:7000\n  \
        millrace serve --config /etc/millrace.toml\n\n\
        A configuration file is TOML with the flags' names as keys:\n  \
        data = \"/var/lib/app/rocksdb\"\n  \
        durability = \"process\"\n  \
        memory = \"4G\"\n\n\
        Then, in another terminal:\n  \
        redis-cli SET some-key 'some value'\n  \
        redis-cli GET some-key\n  \
        redis-cli MR.RANGE - + LIMIT 10\n  \
        redis-cli INFO\n\n\
        SIGTERM and SIGINT shut the server down cleanly: it answers the requests it has received \
        and exits with 0. A second signal ends it immediately."
)]
pub struct ServeArgs {
    /// The RocksDB directory to serve; a missing one is created
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub data: Option<PathBuf>,
    /// Take no writes and change nothing in the directory
    #[arg(long)]
    pub read_only: bool,
    /// Give a virtual machine a disk: name=NAME uri=URI socket=PATH [queues=N] [serial=TEXT]
    ///
    /// The machine's process connects to the socket (vhost-user-blk). May be given several times,
    /// with or without --data. Write a space in a value as %20, a percent sign as %25. URIs:
    /// file:PATH[?engine=uring|aio|mmap|sync], mem:SIZE, null:SIZE.
    #[arg(long, value_name = "SPEC")]
    pub disk: Vec<DiskSpec>,
    /// Keep attached disks and the admin socket in this directory
    ///
    /// [default: $XDG_STATE_HOME/millrace; /var/lib/millrace for root, ~/.local/state/millrace for
    /// others]. Each node needs its own. With this flag a node also starts with nothing to serve.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    #[arg(env = node::STATE_VARIABLE, hide_env_values = true)]
    pub state: Option<PathBuf>,
    /// Listen for `millrace disk` and `millrace top` here instead of in the state directory
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub admin: Option<PathBuf>,
    /// Confine the process that serves guests: auto, on or off [default: auto]
    ///
    /// A guest that takes over this process can then open no file except the database's, connect
    /// to nothing and start no program. A second process, the one that was started, opens images
    /// and sockets for it. With auto the node does this if it has disks or may get some (--disk,
    /// --state, --admin), as far as the system supports it, and reports what is missing; with on
    /// it then does not start.
    #[arg(long, value_name = "MODE", value_parser = sandbox())]
    pub sandbox: Option<Sandbox>,
    /// What an acknowledged write survives: the end of the process, or a power cut [default:
    /// power]
    ///
    /// power flushes the disk once for all waiting writes before it acknowledges them; process
    /// leaves them to the system's page cache, which is faster and safe from everything except the
    /// end of the machine. SAVE flushes all earlier writes.
    #[arg(long, value_name = "LEVEL", value_parser = durability())]
    pub durability: Option<Durability>,
    /// Write to a database last written by a RocksDB older than 7.8
    ///
    /// Afterwards only RocksDB 7.8 and newer read it.
    #[arg(long)]
    pub adopt: bool,
    /// The address to listen on: IP:PORT [default: 127.0.0.1:6379]
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<String>,
    /// Require the password in the first line of this file (AUTH, HELLO)
    ///
    /// A configuration file may also hold the password: requirepass = "...".
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub password_file: Option<PathBuf>,
    /// Listen on an address that other machines can reach, without a password
    #[arg(long)]
    pub allow_remote: bool,
    /// How many cores to use, or which: 2, or 0,2-3 [default: all available]
    ///
    /// One thread is pinned to each. A single number is a count; 1-1 is processor 1 alone. The
    /// default is the process's affinity mask, limited to the quota of its control group.
    #[arg(long, value_name = "N|LIST")]
    pub cores: Option<CoreChoice>,
    /// The memory budget for cache, indexes, filters and requests [default: a quarter of the RAM]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Size>,
    /// How an idle core waits: always spins, never sleeps, adaptive decides [default: adaptive]
    #[arg(long, value_name = "MODE", value_parser = poll_mode())]
    pub poll: Option<PollMode>,
    /// How to access disk and network [default: auto, which is io_uring if the system allows it]
    #[arg(long, value_name = "DRIVER", value_parser = driver())]
    pub io: Option<DriverKind>,
    /// Serve while another process has the database open for writing
    ///
    /// Serves the state at the start. Files that the other process deletes later stay readable
    /// here while they are open.
    #[arg(long)]
    pub secondary: bool,
    /// Serve the data before damage in the write-ahead log, instead of refusing
    #[arg(long)]
    pub salvage: bool,
    /// Serve metrics in Prometheus's text format at http://ADDR/metrics
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<String>,
    /// The log level: off, error, warn, info, debug or trace [default: info]
    ///
    /// Modules may have their own levels: warn,lsm=debug.
    #[arg(long, value_name = "LEVEL", env = node::LOG_VARIABLE, hide_env_values = true)]
    pub log_level: Option<Filter>,
    /// The format of log lines: text or json [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = log_format())]
    pub log_format: Option<Format>,
    /// Append the log to a file instead of writing it to standard error
    ///
    /// When the file is moved away, as log rotation does, a new one of the same name is created.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub log_file: Option<PathBuf>,
    /// A TOML file with any of these settings; flags take precedence
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
}

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
    #[command(after_help = "Examples:\n  \
        millrace kv del user:42 user:43 --data DIR\n\n\
        Exits with 1 if none of the keys existed.")]
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
        commands. With --data everything is durable when the command ends. A mistake in the input \
        ends the import; earlier entries stay imported.")]
    Import {
        /// The file to read; standard input if left out, or -.
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
        /// The format of the entries: text, hex, json or resp
        #[arg(long, value_name = "FORMAT", value_parser = style(), default_value = "text")]
        format: Style,
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
        /// The column family to export
        #[arg(long, value_name = "NAME", default_value = "default")]
        column_family: String,
        /// Where to read.
        #[command(flatten)]
        source: Source,
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
        there is any. Needs the directory; works while a node serves it read-only.")]
    Check {
        /// Where to read.
        #[command(flatten)]
        source: Source,
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
    /// The column family to read
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub column_family: String,
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

/// `millrace disk`.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Create an image file
    #[command(after_help = "Examples:\n  \
        millrace disk create vm1.img --size 10G\n  \
        millrace disk create vm1.img --size 10G --preallocate\n\n\
        The image is sparse: space on the disk is allocated as it is written. With --preallocate \
        all space is allocated immediately, and no write fails later because the disk is full.")]
    Create {
        /// The file; it must not exist.
        #[arg(value_hint = ValueHint::FilePath)]
        path: PathBuf,
        /// Its size
        #[arg(long, value_name = "SIZE")]
        size: Size,
        /// Allocate all of its space on the disk now
        #[arg(long)]
        preallocate: bool,
    },
    /// List the disks of a running node
    #[command(after_help = "Examples:\n  \
        millrace disk list\n  \
        millrace disk list --json --state /srv/millrace")]
    List {
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Add a disk to a running node: name=NAME uri=URI socket=PATH [queues=N] [serial=TEXT]
    #[command(after_help = "Examples:\n  \
        millrace disk attach 'name=vm1 uri=file:vm1.img socket=vm1.sock queues=2'\n  \
        millrace disk attach 'name=scratch uri=mem:8G socket=/run/scratch.sock'\n\n\
        SPEC is the same as in serve --disk; relative paths start in the current directory. The \
        node attaches the disk again after a restart, until it is detached.")]
    Attach {
        /// The disk.
        spec: DiskSpec,
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Remove a disk from a running node and forget it
    #[command(after_help = "Examples:\n  \
        millrace disk detach vm1\n\n\
        The image and its data stay as they are. Detaching a disk that a virtual machine uses \
        needs --force: the guest's requests then wait until a disk is attached at the same socket.")]
    Detach {
        /// The name of the disk.
        name: String,
        /// Detach even while a virtual machine is connected
        #[arg(long)]
        force: bool,
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Change the size of a disk while its guest runs
    #[command(after_help = "Examples:\n  \
        millrace disk resize vm1 --size 20G\n  \
        millrace disk resize vm1 --size 5G --shrink\n\n\
        The guest is told the new size immediately; its partitions and file systems are the guest's \
        to change. --shrink cuts off the end of the disk, and the data there is lost: make the \
        file system smaller first.")]
    Resize {
        /// The name of the disk.
        name: String,
        /// The new size
        #[arg(long, value_name = "SIZE")]
        size: Size,
        /// Allow a smaller size, which discards the data at the end
        #[arg(long)]
        shrink: bool,
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Show what the disks of a running node have done
    #[command(after_help = "Examples:\n  \
        millrace disk stat\n  \
        millrace disk stat vm1 --json\n\n\
        Counts start with the node. p50 and p99 come from a histogram with a bucket for each power \
        of two.")]
    Stat {
        /// The name of the disk; all disks if left out.
        name: Option<String>,
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
}

/// A running node, and how to print its answer.
#[derive(Clone, Debug, Args)]
pub struct NodeArgs {
    /// The node's state directory, if not the default one
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    #[arg(env = node::STATE_VARIABLE, hide_env_values = true)]
    pub state: Option<PathBuf>,
    /// The node's admin socket, if not in the state directory
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub admin: Option<PathBuf>,
    /// Print JSON; its shape is described in docs/CLI.md
    #[arg(long)]
    pub json: bool,
}

/// `millrace top`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    millrace top\n  \
    millrace top --once\n  \
    millrace top --json | jq .disks\n\n\
    CPU is the share of the time in which the core's thread ran, including spinning for work. Into \
    a pipe or a file the frames follow each other.")]
pub struct TopArgs {
    /// Show one frame and exit
    #[arg(long)]
    pub once: bool,
    /// Seconds between two frames
    #[arg(long, value_name = "S", default_value = "1", value_parser = seconds)]
    pub interval: f64,
    /// Which node to ask.
    #[command(flatten)]
    pub node: NodeArgs,
}

/// `millrace upgrade`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    millrace upgrade\n  \
    millrace upgrade --to /opt/millrace-2/millrace --state /srv/millrace\n\n\
    The new program is started with the same settings and takes over: guests wait for some \
    milliseconds and notice nothing else, clients of the database reconnect. If anything fails, the \
    old program continues, and this command exits with 2 and says why. Disks on mem: keep their \
    contents. SIGUSR2 does the same as this command without --to.")]
pub struct UpgradeArgs {
    /// The new program [default: the file that now has the path of the node's program]
    #[arg(long, value_name = "PROGRAM", value_hint = ValueHint::FilePath)]
    pub to: Option<PathBuf>,
    /// Which node to ask.
    #[command(flatten)]
    pub node: NodeArgs,
}

/// `millrace bench`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  \
        millrace bench readrandom --data DIR --cores 1 --depth 64 --seconds 10\n  \
        millrace bench seekrandom --data DIR --nexts 50 --reverse\n  \
        millrace bench readrandom --data DIR --memory 8G --cached --keys 500000\n  \
        millrace bench fillrandom --data NEW --durability process --seconds 20\n  \
        millrace bench --peers --data DIR --out results",
    after_long_help = "Examples:\n  \
        millrace bench readrandom --data DIR --cores 1 --depth 64 --seconds 10\n  \
        millrace bench multireadrandom --data DIR --batch 64\n  \
        millrace bench seekrandom --data DIR --nexts 50 --reverse\n  \
        millrace bench readrandom --data DIR --memory 8G --cached --keys 500000\n  \
        millrace bench fillseq --data NEW --keys 4000000\n  \
        millrace bench fillrandom --data NEW --durability process --num 4000000\n  \
        millrace bench overwrite --data DIR --writers 16 --rate 20000\n  \
        millrace bench readwhilewriting --data DIR --cores 2 --rate 10000\n  \
        millrace bench readrandomwriterandom --data DIR --write-percent 10 --rate 20000\n  \
        millrace bench ycsb --workload a --data DIR --memory 400M --compression lz4\n  \
        millrace bench locks --seconds 10\n  \
        millrace bench vdisk --disk mem:1G --rw randrw --verify --cores 0,1\n  \
        millrace bench vdisk --socket disk.sock --rw randread --depth 128\n  \
        millrace bench --peers --data DIR --out results\n  \
        millrace bench --peers --data DIR --only '90 % gets' --plot p99.svg\n  \
        millrace bench --peers --from results/2026-11-22T222700Z.json --plot p99.svg\n\n\
        fillseq and fillrandom need an empty directory; overwrite and readwhilewriting change the \
        database.\n\n\
        The database must have db_bench's keys, numbered from 0:\n  \
        db_bench --db=DIR --benchmarks=fillseq,compact --num=4000000 --value_size=1000 \\\n    \
        --block_size=4096 --bloom_bits=10 --compression_type=none\n\n\
        --peers runs fio, Debian's db_bench, the program of bench/peers (RocksDB's newest \
        release) and redis-server in turn with Millrace on the same data, and prints the table \
        of docs/BENCHMARKS.md. Programs that are not installed are left out, with a note."
)]
pub struct BenchArgs {
    /// The case to measure; the names have the same meaning as in db_bench
    #[arg(value_name = "CASE", value_parser = case(), required_unless_present = "peers")]
    pub case: Option<Case>,
    /// The RocksDB directory to read or write
    #[arg(long, value_name = "DIR", required_if_eq_any = with_database())]
    #[arg(value_hint = ValueHint::DirPath)]
    pub data: Option<PathBuf>,
    /// How many cores to use, or which: 2, or 0,2-3
    ///
    /// With --peers, a list of two: the processor for everything that runs on one, and the second
    /// one for rows with two. With vdisk, the target's and the front end's.
    #[arg(long, value_name = "N|LIST", default_value = "1")]
    pub cores: CoreChoice,
    /// Calls in flight on each core [default: 64 for readrandom, 32 for vdisk, 1 for the others]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub depth: Option<u32>,
    /// How long to measure
    #[arg(long, value_name = "S", default_value = "10", value_parser = seconds)]
    pub seconds: f64,
    /// The memory budget, mostly block cache; without this there is no block cache
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Size>,
    /// Read every key once before measuring, to cache what fits into --memory
    #[arg(long, requires = "memory")]
    pub cached: bool,
    /// Keys in each call of multireadrandom
    #[arg(long, value_name = "N", default_value = "64")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub batch: u32,
    /// Steps after each seek of seekrandom
    #[arg(long, value_name = "N", default_value = "50")]
    pub nexts: u32,
    /// Step backwards in seekrandom
    #[arg(long)]
    pub reverse: bool,
    /// Make readrandom get missing keys, each between two existing ones
    #[arg(long)]
    pub absent: bool,
    /// The YCSB workload that ycsb runs: a to f
    #[arg(long, value_name = "NAME", required_if_eq("case", "ycsb"))]
    #[arg(value_parser = workload())]
    pub workload: Option<Workload>,
    /// How many of a hundred operations of readrandomwriterandom set a key
    #[arg(long, value_name = "N", default_value = "10")]
    #[arg(value_parser = clap::value_parser!(u8).range(0..=100))]
    pub write_percent: u8,
    /// Use only the first N keys [default: all keys of the database]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub keys: Option<u64>,
    /// What an acknowledged write survives: the end of the process, or a power cut
    #[arg(long, value_name = "LEVEL", value_parser = durability(), default_value = "power")]
    pub durability: Durability,
    /// Tasks that each write one entry at a time
    #[arg(long, value_name = "N", default_value = "16")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub writers: u32,
    /// Bytes of each value written; they compress to half
    #[arg(long, value_name = "BYTES", default_value = "1000", value_parser = value_size)]
    pub value_size: usize,
    /// End after N writes instead of after --seconds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub num: Option<u64>,
    /// Start N writes a second, late or not [default: as many as possible]
    ///
    /// In readrandomwriterandom and ycsb, N operations: they start at times fixed beforehand (an
    /// open loop), and latencies are measured from these times.
    #[arg(long, value_name = "N", value_parser = rate)]
    pub rate: Option<f64>,
    /// The size at which a memtable is written to a table
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub memtable: Size,
    /// The compression of the tables written
    #[arg(long, value_name = "NAME", value_parser = compression(), default_value = "none")]
    pub compression: Compression,
    /// After the writes, wait until nothing is left to flush or to merge, and include that time
    #[arg(long)]
    pub drain: bool,
    /// How an idle core waits: always spins, never sleeps, adaptive decides
    #[arg(long, value_name = "MODE", value_parser = poll_mode(), default_value = "adaptive")]
    pub poll: PollMode,
    /// How to access the disk
    #[arg(long, value_name = "DRIVER", value_parser = driver(), default_value = "auto")]
    pub io: DriverKind,
    /// Read while another process has the database open for writing
    #[arg(long)]
    pub secondary: bool,
    /// The disk that vdisk serves and drives
    #[arg(long, value_name = "URI", conflicts_with = "socket")]
    pub disk: Option<String>,
    /// The socket of another vhost-user-blk target that vdisk drives
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub socket: Option<PathBuf>,
    /// The I/O pattern of vdisk, as fio names it
    #[arg(long, value_name = "RW", value_parser = mix(), default_value = "randread")]
    pub rw: Mix,
    /// Bytes of each request of vdisk (a multiple of 512)
    #[arg(long, value_name = "BYTES", default_value = "4096", value_parser = block_size)]
    pub bs: u32,
    /// Number of vdisk's queues, each with --depth requests in flight
    #[arg(long, value_name = "N", default_value = "1")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    pub queues: u16,
    /// Use packed rings for vdisk's queues
    #[arg(long)]
    pub packed: bool,
    /// Check all data that vdisk reads, and at the end all that it wrote
    #[arg(long)]
    pub verify: bool,
    /// Follow each write of vdisk by a flush, and count both as one request
    #[arg(long)]
    pub sync: bool,
    /// Microseconds that vdisk waits after a request before the next one in its place
    #[arg(long, value_name = "US", default_value = "0")]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub think_us: u32,
    /// Serve --disk this many times, use none of the disks, and report what that costs
    #[arg(long, value_name = "DISKS", requires = "disk", conflicts_with = "socket")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub idle: Option<u16>,
    /// Upgrade vdisk's target N times under load, and report how long requests waited
    #[arg(long, value_name = "N", requires = "disk", conflicts_with_all = ["socket", "idle"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub upgrades: Option<u32>,
    /// Kill and restart vdisk's target N times under load, and report the same
    #[arg(long, value_name = "N", requires = "disk", conflicts_with_all = ["socket", "idle", "upgrades"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub restarts: Option<u32>,
    /// Print JSON; its shape is described in docs/CLI.md
    #[arg(long)]
    pub json: bool,
    /// Also measure the peers, in turn with Millrace, and print the table of docs/BENCHMARKS.md
    #[arg(long, conflicts_with_all = ["case", "depth", "cached", "batch", "nexts", "reverse"])]
    pub peers: bool,
    /// Rounds of --peers; the median counts
    #[arg(
        long,
        value_name = "N",
        default_value = "3",
        requires = "peers",
        conflicts_with = "case"
    )]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=99))]
    pub rounds: u32,
    /// The directory for the raw samples of --peers, written as a dated JSON file
    #[arg(long, value_name = "DIR", requires = "peers", conflicts_with = "case", value_hint = ValueHint::DirPath)]
    pub out: Option<PathBuf>,
    /// The program of bench/peers [default: where its build puts it]
    #[arg(long, value_name = "FILE", requires = "peers", conflicts_with = "case", value_hint = ValueHint::FilePath)]
    pub peers_bin: Option<PathBuf>,
    /// Only the rows of --peers whose name contains TEXT; may be given several times
    #[arg(long, value_name = "TEXT", requires = "peers", conflicts_with = "case")]
    pub only: Vec<String>,
    /// Draw p99 against throughput, from the rows of --peers at offered loads, into this SVG file
    #[arg(long, value_name = "FILE", requires = "peers", conflicts_with = "case", value_hint = ValueHint::FilePath)]
    pub plot: Option<PathBuf>,
    /// Measure nothing: draw --plot from the samples that --out saved, and print their table
    #[arg(long, value_name = "FILE", requires = "plot", conflicts_with_all = ["data", "out", "only"])]
    #[arg(value_hint = ValueHint::FilePath)]
    pub from: Option<PathBuf>,
}

/// The cases that need a directory, for `required_if_eq_any`.
fn with_database() -> Vec<(&'static str, &'static str)> {
    let cases = Case::ALL.into_iter().filter(|case| case.has_database());
    cases.map(|case| ("case", case.name())).collect()
}

fn case() -> impl TypedValueParser<Value = Case> {
    let names = Case::ALL.map(|case| PossibleValue::new(case.name()).help(case.describe()));
    PossibleValuesParser::new(names).try_map(|text| text.parse())
}

fn workload() -> impl TypedValueParser<Value = Workload> {
    PossibleValuesParser::new(Workload::YCSB.map(|mix| mix.name)).try_map(|text| text.parse())
}

fn mix() -> impl TypedValueParser<Value = Mix> {
    PossibleValuesParser::new(Mix::ALL.map(Mix::name)).try_map(|text| text.parse())
}

fn block_size(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(bytes) if bytes > 0 && bytes % 512 == 0 && bytes <= 1 << 20 => Ok(bytes),
        _ => Err("block size must be a multiple of 512, at most 1048576".to_owned()),
    }
}

fn poll_mode() -> impl TypedValueParser<Value = PollMode> {
    PossibleValuesParser::new(["always", "adaptive", "never"]).try_map(|text| text.parse())
}

fn sandbox() -> impl TypedValueParser<Value = Sandbox> {
    PossibleValuesParser::new(["auto", "on", "off"]).try_map(|text| text.parse())
}

fn durability() -> impl TypedValueParser<Value = Durability> {
    PossibleValuesParser::new(["process", "power"]).try_map(|text| text.parse())
}

fn driver() -> impl TypedValueParser<Value = DriverKind> {
    PossibleValuesParser::new(["auto", "io_uring", "epoll"]).try_map(|text| text.parse())
}

fn compression() -> impl TypedValueParser<Value = Compression> {
    PossibleValuesParser::new(["none", "snappy", "lz4", "zstd"]).map(|text| match text.as_str() {
        "snappy" => Compression::Snappy,
        "lz4" => Compression::Lz4,
        "zstd" => Compression::Zstd,
        _ => Compression::None,
    })
}

fn value_size(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(bytes) if bytes <= 64 << 20 => Ok(bytes),
        _ => Err("value size must be at most 67108864 bytes".to_owned()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && rate <= 1e9 => Ok(rate),
        _ => Err("rate must be a number above 0".to_owned()),
    }
}

fn style() -> impl TypedValueParser<Value = Style> {
    PossibleValuesParser::new(["text", "hex", "json", "resp"]).try_map(|text| text.parse())
}

fn log_format() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(["text", "json"]).try_map(|text| text.parse())
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= 86_400.0 => Ok(seconds),
        _ => Err("seconds must be a number above 0, at most 86400".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Cli, String> {
        Cli::try_parse_from(line.split(' ')).map_err(|error| error.to_string())
    }

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_kv_command_needs_exactly_one_place() {
        assert!(parse("millrace kv get k --data d").is_ok());
        assert!(parse("millrace kv get k --connect :6379").is_ok());
        assert!(parse("millrace kv get k").is_err());
        assert!(parse("millrace kv get k --data d --connect :6379").is_err());
        assert!(parse("millrace kv scan --connect :6379 --secondary").is_err());
    }

    #[test]
    fn a_kv_command_rejects_flags_it_would_ignore() {
        for flags in ["--hex", "--column-family one"] {
            for (command, fits) in
                [("get k", true), ("scan", true), ("stat", false), ("check", false)]
            {
                let line = format!("millrace kv {command} --data d {flags}");
                assert_eq!(parse(&line).is_ok(), fits, "{line}");
            }
        }
    }

    #[test]
    fn bench_needs_a_case_or_peers() {
        assert!(parse("millrace bench readrandom --data d --cores 0,1").is_ok());
        assert!(parse("millrace bench --peers").is_ok());
        assert!(parse("millrace bench --data d").is_err());
        assert!(parse("millrace bench readseq").is_err());
        assert!(parse("millrace bench locks").is_ok());
        assert!(parse("millrace bench vdisk --socket s --rw randrw --verify --cores 0,1").is_ok());
        assert!(parse("millrace bench vdisk --disk null:1G --depth 128 --queues 2").is_ok());
        assert!(parse("millrace bench vdisk --socket s --disk null:1G").is_err());
        assert!(parse("millrace bench vdisk --disk null:1G --idle 32 --queues 2").is_ok());
        assert!(parse("millrace bench vdisk --socket s --idle 32").is_err());
        assert!(parse("millrace bench vdisk --disk null:1G --upgrades 3 --depth 1").is_ok());
        assert!(parse("millrace bench vdisk --disk null:1G --upgrades 3 --restarts 3").is_err());
        assert!(parse("millrace bench vdisk --socket s --restarts 3").is_err());
        assert!(parse("millrace bench vdisk --socket s --bs 1000").is_err());
        assert!(parse("millrace bench readseq --data d --cached").is_err());
        assert!(parse("millrace bench ycsb --data d --workload e").is_ok());
        assert!(parse("millrace bench ycsb --data d").is_err());
        assert!(parse("millrace bench ycsb --data d --workload g").is_err());
        assert!(
            parse("millrace bench readrandomwriterandom --data d --write-percent 101").is_err()
        );
        assert!(parse("millrace bench --peers --only a --only b --plot p.svg").is_ok());
        assert!(parse("millrace bench readseq --data d --plot p.svg").is_err());
        assert!(parse("millrace bench --peers --from a.json --plot p.svg").is_ok());
        assert!(parse("millrace bench --peers --from a.json").is_err());
        assert!(parse("millrace bench readseq --data d --seconds 0").is_err());
        assert!(parse("millrace bench --peers --reverse").is_err());
    }

    #[test]
    fn an_upgrade_can_name_its_program_and_its_node() {
        for line in ["millrace upgrade", "millrace upgrade --to new --admin a.sock --json"] {
            assert!(parse(line).is_ok(), "{line}");
        }
        assert!(parse("millrace upgrade new").is_err());
    }

    #[test]
    fn values_are_parsed_where_they_are_given() {
        let line = "millrace serve --data d --memory 1G --cores 0,1 --poll never --io epoll";
        let Command::Serve(serve) = parse(line).unwrap().command else { panic!("not serve") };
        assert_eq!(serve.memory, Some(Size(1 << 30)));
        assert_eq!(serve.cores, Some(CoreChoice::List(vec![0, 1])));
        assert_eq!(serve.poll, Some(PollMode::Never));
        assert_eq!(serve.io, Some(DriverKind::Epoll));
        assert!(parse("millrace serve --memory lots").unwrap_err().contains("not a size"));
        assert!(parse("millrace serve --poll often").is_err());
    }
}

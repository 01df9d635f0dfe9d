//! The flags of `millrace bench`.

use std::path::PathBuf;

use bench::{Case, Compression, Durability, Mix, Workload};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueHint};
use node::{CoreChoice, Size};
use reactor::{DriverKind, PollMode};

use super::values::{driver, durability, poll_mode, seconds, space_ratio};

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
        millrace bench mapped --data DIR --size 1G --depth 32\n  \
        millrace bench beside --data DIR --cores 2 --durability process --rounds 3\n  \
        millrace bench vdisk --disk mem:1G --rw randrw --verify --cores 0,1\n  \
        millrace bench vdisk --socket disk.sock --rw randread --depth 128\n  \
        millrace bench race --data DIR --threads 16 --sets 100000\n  \
        millrace bench race --connect 10.0.0.1:6379 --sets 100000 --cache 256M\n  \
        millrace bench --peers --data DIR --out results\n  \
        millrace bench --peers --data DIR --only '90 % gets' --plot p99.svg\n  \
        millrace bench --peers --from results/2026-11-22T222700Z.json --plot p99.svg\n\n\
        fillseq and fillrandom need an empty directory; overwrite, readwhilewriting and beside change \
        the database.\n\n\
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
    /// The RocksDB directory to read or write; with mapped, the directory for its file
    #[arg(long, value_name = "DIR", required_if_eq_any = with_directory())]
    #[arg(value_hint = ValueHint::DirPath)]
    pub data: Option<PathBuf>,
    /// How many cores to use, or which: 2, or 0,2-3
    ///
    /// With --peers, a list of two: the processor for everything that runs on one, and the second
    /// one for rows with two. With vdisk, the target's and the front end's.
    #[arg(long, value_name = "N|LIST", default_value = "1")]
    pub cores: CoreChoice,
    /// Calls in flight on each core [default: 64 for readrandom, 32 for mapped and vdisk, 1 for
    /// the others]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub depth: Option<u32>,
    /// How long to measure; Ctrl-C ends vdisk with --socket early, with its result
    #[arg(long, value_name = "S", default_value = "10", value_parser = seconds)]
    pub seconds: f64,
    /// Bytes of the file of mapped
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub size: Size,
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
    /// Use only the first N keys [default: all keys of the database, as its tables count them]
    ///
    /// A key that was set again counts more than once until merges meet both values, so a second
    /// overwrite of a database needs this to draw from the same keys.
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
    /// Store values of at least this size in blob files
    #[arg(long, value_name = "SIZE")]
    pub blob_min: Option<Size>,
    /// The limit of the space of blob files, as a multiple of their live values
    #[arg(long, value_name = "RATIO", value_parser = space_ratio)]
    pub blob_space_max_ratio: Option<f64>,
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
    /// Kill vdisk's target N times under load, which starts again by itself, and report the same
    #[arg(long, value_name = "N", requires = "disk", conflicts_with_all = ["socket", "idle", "upgrades"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub restarts: Option<u32>,
    /// Serve and drive this many disks with --upgrades or --restarts; in --disk {n} stands for the
    /// number of each, from 0 on
    #[arg(long, value_name = "N", default_value = "1", requires = "disk")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub disks: u16,
    /// The server of race, HOST:PORT or redis://...; without this, race starts a node of its own
    /// in a new directory under --data
    #[arg(long, value_name = "ADDR", conflicts_with = "data")]
    pub connect: Option<String>,
    /// Threads of race, each with one call at a time
    #[arg(long, value_name = "N", default_value = "16")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: u32,
    /// Sets of each thread of race, with values of 4 KiB
    #[arg(long, value_name = "N", default_value = "100000")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub sets: u64,
    /// Gets of each thread of race at random among all keys, after the other passes
    #[arg(long, value_name = "N", default_value = "0")]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=1_000_000_000))]
    pub random: u64,
    /// The cache of race's client [default: none; with --read-ahead 512M]
    #[arg(long, value_name = "SIZE")]
    pub cache: Option<Size>,
    /// How much race's client reads ahead at once, in the order of the writes; 10M without SIZE
    /// [default: none]
    #[arg(long, value_name = "SIZE", num_args = 0..=1, default_missing_value = "10M")]
    pub read_ahead: Option<Size>,
    /// Also loads an index of the database into a client of race, of at most SIZE, and gets keys
    /// that do not exist; 256M without SIZE [default: none]
    #[arg(long, value_name = "SIZE", num_args = 0..=1, default_missing_value = "256M")]
    pub index: Option<Size>,
    /// Print JSON; its shape is described in docs/CLI.md
    #[arg(long)]
    pub json: bool,
    /// Also measure the peers, in turn with Millrace, and print the table of docs/BENCHMARKS.md
    #[arg(long, conflicts_with_all = ["case", "depth", "cached", "batch", "nexts", "reverse"])]
    pub peers: bool,
    /// Rounds of --peers and of beside; the median counts
    #[arg(long, value_name = "N", default_value = "3")]
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
fn with_directory() -> Vec<(&'static str, &'static str)> {
    let needs = |case: &Case| case.has_database() || *case == Case::Mapped;
    let cases = Case::ALL.into_iter().filter(needs);
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

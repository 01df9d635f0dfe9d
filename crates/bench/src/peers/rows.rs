//! What is measured, and the rows that compare it.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::Setup;
use super::ours::{self, Ours};
use super::sample::Sample;
use super::vdisks::Vdisk;
use super::writes::Write;
use super::{debian, fio, redis, release, vdisks, write_rows};

/// Keys that the cached rows draw from: half a million values, that is 500 MB.
const CACHED_KEYS: u64 = 500_000;
/// RocksDB's block cache in the cached rows.
const CACHED_BYTES: u64 = 2 << 30;
/// Numbers of threads among which RocksDB's best is looked for.
const THREADS: [u32; 4] = [8, 16, 32, 64];

/// One thing to measure.
#[derive(Clone, Debug)]
pub enum Work {
    /// A case of ours.
    Ours(&'static str, Ours),
    /// RocksDB's release, with the flags of bench/peers.
    Release(String, Vec<String>),
    /// Debian's db_bench reading in order.
    DebianSeq,
    /// fio with requests of the size our reads had in this round.
    FioSame,
    /// fio with plain 4 KiB.
    Fio4k,
    /// Our node under redis-benchmark, over many keys or one.
    Node(bool),
    /// redis-server under redis-benchmark, over many keys or one.
    Redis(bool),
    /// Our node under redis-benchmark's sets, over many keys or one.
    NodeSet(bool),
    /// redis-server under the same.
    RedisSet(bool),
    /// What writes.
    Write(Write),
    /// A virtual machine's disk.
    Vdisk(Vdisk),
}

impl Work {
    /// Whether it reads the database.
    pub fn needs_data(&self) -> bool {
        !matches!(self, Work::Vdisk(_))
    }

    /// Its name in rows and results.
    pub fn name(&self) -> &str {
        match self {
            Work::Ours(name, _) => name,
            Work::Release(name, _) => name,
            Work::DebianSeq => "debian readseq",
            Work::FioSame => "fio same size",
            Work::Fio4k => "fio 4k",
            Work::Node(false) => "millrace resp",
            Work::Node(true) => "millrace resp many",
            Work::Redis(false) => "redis resp",
            Work::Redis(true) => "redis resp many",
            Work::NodeSet(false) => "millrace resp set",
            Work::NodeSet(true) => "millrace resp set many",
            Work::RedisSet(false) => "redis resp set",
            Work::RedisSet(true) => "redis resp set many",
            Work::Write(write) => write.name(),
            Work::Vdisk(vdisk) => vdisk.name(),
        }
    }

    /// Measures. What was measured before in this round is at hand.
    pub fn run(&self, setup: &Setup, round: &Round) -> Result<Sample, String> {
        match self {
            Work::Ours(_, ours) => ours::run(setup, ours),
            Work::Release(_, flags) => release::run(setup, &setup.data, flags),
            Work::Write(write) => write.run(setup, round),
            Work::Vdisk(vdisk) => vdisk.run(setup),
            Work::DebianSeq => debian::read_seq(setup),
            Work::FioSame => {
                let own = round.sample(GET).ok_or("our own reads were not measured")?;
                let bytes = own.bytes_per_io.ok_or("we read nothing")?;
                let align = own.report["io_alignment"].as_u64().unwrap_or(512).max(512);
                // A request is a multiple of the alignment; ours are of two such sizes, mostly.
                let block = ((bytes / align as f64).round() as u64).max(1) * align;
                fio::run(setup, block, align)
            }
            Work::Fio4k => fio::run(setup, 4096, 4096),
            Work::Node(many) => redis::ours(setup, *many),
            Work::Redis(many) => redis::theirs(setup, *many),
            Work::NodeSet(many) => redis::ours_set(setup, *many),
            Work::RedisSet(many) => redis::theirs_set(setup, *many),
        }
    }
}

const GET: &str = "millrace readrandom";
const GET_CACHED: &str = "millrace readrandom cached";
const GET_CACHED_1: &str = "millrace readrandom cached depth 1";
const GET_CACHED_2: &str = "millrace readrandom cached two cores";
const MULTI: &str = "millrace multireadrandom";
const SEEK: &str = "millrace seekrandom";
const SEEK_REVERSE: &str = "millrace seekrandom reverse";
const SEQ: &str = "millrace readseq";
const REVERSE: &str = "millrace readreverse";

const SEEK_PEERS: [&str; 2] = ["rocksdb seekrandom", "rocksdb seekrandom read-ahead"];
const SEEK_REVERSE_PEERS: [&str; 2] =
    ["rocksdb seekrandom reverse", "rocksdb seekrandom reverse read-ahead"];

fn ours(name: &'static str) -> Work {
    let flags: &'static [&'static str] = match name {
        GET | GET_CACHED | GET_CACHED_2 => &["readrandom", "--depth", "64"],
        GET_CACHED_1 => &["readrandom", "--depth", "1"],
        MULTI => &["multireadrandom", "--batch", "64"],
        SEEK => &["seekrandom", "--nexts", "50"],
        SEEK_REVERSE => &["seekrandom", "--nexts", "50", "--reverse"],
        SEQ => &["readseq"],
        _ => &["readreverse"],
    };
    let cached = matches!(name, GET_CACHED | GET_CACHED_1 | GET_CACHED_2);
    let two_cores = name == GET_CACHED_2;
    Work::Ours(name, Ours { flags, cached_keys: cached.then_some(CACHED_KEYS), two_cores })
}

fn release(name: &str, keys: u64, flags: &[&str]) -> Work {
    let mut all: Vec<String> = flags.iter().map(ToString::to_string).collect();
    all.extend(["--keys".to_owned(), keys.to_string()]);
    Work::Release(name.to_owned(), all)
}

fn threads_name(threads: u32) -> String {
    format!("rocksdb readrandom {threads} threads")
}

/// What the samples of one round are looked up in.
#[derive(Clone, Debug, Default)]
pub struct Round(BTreeMap<String, Sample>);

impl Round {
    /// Keeps a sample.
    pub fn put(&mut self, name: &str, sample: Sample) {
        self.0.insert(name.to_owned(), sample);
    }

    /// A sample of this round.
    pub fn sample(&self, name: &str) -> Option<&Sample> {
        self.0.get(name)
    }

    /// All samples.
    pub fn samples(&self) -> impl Iterator<Item = &Sample> {
        self.0.values()
    }

    /// Everything as JSON.
    pub fn json(&self) -> Value {
        json!(self.0)
    }

    /// Operations per second of a sample.
    pub fn ops(&self, name: &str) -> Option<f64> {
        self.sample(name).map(|sample| sample.ops_per_second)
    }

    fn cpu(&self, name: &str) -> Option<f64> {
        self.sample(name)?.cpu_us_per_op
    }

    /// The fastest of several.
    pub fn best(&self, names: impl IntoIterator<Item = String>) -> Option<&Sample> {
        names
            .into_iter()
            .filter_map(|name| self.sample(&name))
            .max_by(|a, b| a.ops_per_second.total_cmp(&b.ops_per_second))
    }

    fn best_threads(&self) -> Option<&Sample> {
        self.best(THREADS.map(threads_name))
    }

    fn best_ops(&self, names: [&str; 2]) -> Option<f64> {
        self.best(names.map(str::to_owned)).map(|sample| sample.ops_per_second)
    }

    fn best_cached(&self) -> Option<f64> {
        self.best_ops(["rocksdb readrandom cached lru", "rocksdb readrandom cached hyperclock"])
    }
}

/// How ours and theirs become the figure that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// Ours divided by theirs.
    Ratio,
    /// Ours minus theirs.
    Difference,
    /// Ours alone.
    Alone,
}

/// What is to be reached.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// At least this.
    AtLeast(f64),
    /// At most this.
    AtMost(f64),
    /// Reported beside another row, nothing to reach.
    Told,
}

/// What the numbers of a row are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Operations per second.
    PerSecond,
    /// Microseconds.
    Us,
    /// Seconds.
    Seconds,
    /// Hundredths.
    Percent,
}

type Figure = fn(&Round) -> Option<f64>;

/// A row of the table.
pub struct Row {
    /// What was done.
    pub name: &'static str,
    /// What it is compared with.
    pub against: &'static str,
    /// Our figure.
    pub ours: Figure,
    /// Theirs.
    pub theirs: Figure,
    /// How they are compared.
    pub compare: Compare,
    /// What the figures are.
    pub unit: Unit,
    /// What is to be reached.
    pub goal: Goal,
    /// What has to be measured for it, in this order.
    pub works: fn(&Setup) -> Vec<Work>,
}

impl Row {
    /// The figure that counts, in one round.
    pub fn figure(&self, round: &Round) -> Option<f64> {
        let ours = (self.ours)(round)?;
        match self.compare {
            Compare::Alone => Some(ours),
            Compare::Ratio => (self.theirs)(round).filter(|t| *t > 0.0).map(|t| ours / t),
            Compare::Difference => (self.theirs)(round).map(|theirs| ours - theirs),
        }
    }
}

impl Goal {
    /// Whether a figure reaches it.
    pub fn reached(self, figure: f64) -> Option<bool> {
        match self {
            Goal::AtLeast(least) => Some(figure >= least),
            Goal::AtMost(most) => Some(figure <= most),
            Goal::Told => None,
        }
    }
}

/// Everything to measure for these rows, each once, in the order of the rows.
pub fn works(rows: &[Row], setup: &Setup) -> Vec<Work> {
    let mut all: Vec<Work> = Vec::new();
    for work in rows.iter().flat_map(|row| (row.works)(setup)) {
        if !all.iter().any(|known| known.name() == work.name()) {
            all.push(work);
        }
    }
    all
}

/// The rows, or those whose name contains `only`.
pub fn rows(only: Option<&str>) -> Vec<Row> {
    let mut rows = all_rows();
    rows.extend(write_rows::rows());
    rows.extend(vdisks::rows());
    if let Some(only) = only {
        rows.retain(|row| row.name.contains(only) || row.against.contains(only));
    }
    rows
}

fn one_thread(setup: &Setup) -> Work {
    release("rocksdb readrandom 1 thread", setup.keys, &["readrandom"])
}

fn get_and_threads(setup: &Setup) -> Vec<Work> {
    let mut works = vec![ours(GET)];
    for threads in THREADS {
        let text = threads.to_string();
        works.push(release(
            &threads_name(threads),
            setup.keys,
            &["readrandom", "--threads", &text],
        ));
    }
    works
}

fn cached(setup: &Setup, name: &'static str) -> Vec<Work> {
    let bytes = CACHED_BYTES.to_string();
    let mut works = vec![ours(name)];
    for kind in ["lru", "hyperclock"] {
        works.push(release(
            &format!("rocksdb readrandom cached {kind}"),
            setup.keys.min(CACHED_KEYS),
            &["readrandom", "--cache-bytes", &bytes, "--cache", kind],
        ));
    }
    works
}

/// We tell our iterator how many entries will be read, and which way. RocksDB's has no such option but a size to
/// read ahead, which few set; so it is measured with its default, and beside it with that.
fn seeks(setup: &Setup) -> Vec<Work> {
    let flags = ["seekrandom", "--nexts", "50", "--readahead"];
    let peer = |name: &str, readahead, reverse: &[&str]| {
        release(name, setup.keys, &[&flags[..], &[readahead], reverse].concat())
    };
    vec![
        ours(SEEK),
        peer(SEEK_PEERS[0], "0", &[]),
        peer(SEEK_PEERS[1], "65536", &[]),
        ours(SEEK_REVERSE),
        peer(SEEK_REVERSE_PEERS[0], "0", &["--reverse"]),
        peer(SEEK_REVERSE_PEERS[1], "65536", &["--reverse"]),
    ]
}

fn scans(setup: &Setup) -> Vec<Work> {
    vec![
        ours(SEQ),
        release("rocksdb readseq", setup.keys, &["readseq"]),
        Work::DebianSeq,
        ours(REVERSE),
        release("rocksdb readreverse", setup.keys, &["readreverse"]),
    ]
}

fn all_rows() -> Vec<Row> {
    vec![
        Row {
            name: "readrandom, one core, depth 64",
            against: "fio io_uring, one job, QD64, same request size and alignment",
            ours: |r| r.ops(GET),
            theirs: |r| r.ops("fio same size"),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(0.9),
            works: |_| vec![ours(GET), Work::FioSame],
        },
        Row {
            name: "readrandom, one core, depth 64",
            against: "fio, plain 4 KiB",
            ours: |r| r.ops(GET),
            theirs: |r| r.ops("fio 4k"),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::Told,
            works: |_| vec![ours(GET), Work::Fio4k],
        },
        Row {
            name: "readrandom, one core, depth 64",
            against: "RocksDB release, one thread",
            ours: |r| r.ops(GET),
            theirs: |r| r.ops("rocksdb readrandom 1 thread"),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(8.0),
            works: |setup| vec![ours(GET), one_thread(setup)],
        },
        Row {
            name: "readrandom, one core, depth 64",
            against: "RocksDB release, its best number of threads on all cores",
            ours: |r| r.ops(GET),
            theirs: |r| r.best_threads().map(|sample| sample.ops_per_second),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(1.0),
            works: get_and_threads,
        },
        Row {
            name: "readrandom, processor time per get",
            against: "RocksDB release, its best number of threads",
            ours: |r| r.cpu(GET),
            theirs: |r| r.best_threads()?.cpu_us_per_op,
            compare: Compare::Ratio,
            unit: Unit::Us,
            goal: Goal::AtMost(1.0 / 3.0),
            works: get_and_threads,
        },
        Row {
            name: "readrandom, processor time per get",
            against: "fio's per read, same request size (the difference)",
            ours: |r| r.cpu(GET),
            theirs: |r| r.cpu("fio same size"),
            compare: Compare::Difference,
            unit: Unit::Us,
            goal: Goal::AtMost(2.5),
            works: |_| vec![ours(GET), Work::FioSame],
        },
        Row {
            name: "multireadrandom, 64 keys, one caller",
            against: "RocksDB release, batched MultiGet",
            ours: |r| r.ops(MULTI),
            theirs: |r| r.ops("rocksdb multireadrandom"),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(8.0),
            works: |setup| {
                let flags = ["multireadrandom", "--batch", "64"];
                vec![ours(MULTI), release("rocksdb multireadrandom", setup.keys, &flags)]
            },
        },
        Row {
            name: "seekrandom, 50 nexts, one caller",
            against: "RocksDB release",
            ours: |r| r.ops(SEEK),
            theirs: |r| r.ops(SEEK_PEERS[0]),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(2.0),
            works: seeks,
        },
        Row {
            name: "seekrandom, 50 nexts, one caller",
            against: "RocksDB release, told to read 64 KiB ahead",
            ours: |r| r.ops(SEEK),
            theirs: |r| r.ops(SEEK_PEERS[1]),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::Told,
            works: seeks,
        },
        Row {
            name: "seekrandom, 50 prevs, one caller",
            against: "RocksDB release",
            ours: |r| r.ops(SEEK_REVERSE),
            theirs: |r| r.ops(SEEK_REVERSE_PEERS[0]),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(5.0),
            works: seeks,
        },
        Row {
            name: "seekrandom, 50 prevs, one caller",
            against: "RocksDB release, told to read 64 KiB ahead",
            ours: |r| r.ops(SEEK_REVERSE),
            theirs: |r| r.ops(SEEK_REVERSE_PEERS[1]),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::Told,
            works: seeks,
        },
        Row {
            name: "readseq",
            against: "the better of RocksDB release and Debian's db_bench",
            ours: |r| r.ops(SEQ),
            theirs: |r| r.best_ops(["rocksdb readseq", "debian readseq"]),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(1.2),
            works: scans,
        },
        Row {
            name: "readreverse",
            against: "our own readseq",
            ours: |r| r.ops(REVERSE),
            theirs: |r| r.ops(SEQ),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(0.8),
            works: scans,
        },
        Row {
            name: "readreverse",
            against: "RocksDB release",
            ours: |r| r.ops(REVERSE),
            theirs: |r| r.ops("rocksdb readreverse"),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(8.0),
            works: scans,
        },
        Row {
            name: "everything cached, one core, depth 64",
            against: "RocksDB release, one thread, its better cache",
            ours: |r| r.ops(GET_CACHED),
            theirs: Round::best_cached,
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(1.5),
            works: |setup| cached(setup, GET_CACHED),
        },
        Row {
            name: "everything cached, one core, depth 1",
            against: "RocksDB release, one thread, its better cache",
            ours: |r| r.ops(GET_CACHED_1),
            theirs: Round::best_cached,
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(1.0),
            works: |setup| cached(setup, GET_CACHED_1),
        },
        Row {
            name: "everything cached, two cores",
            against: "our own one core",
            ours: |r| r.ops(GET_CACHED_2),
            theirs: |r| r.ops(GET_CACHED),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(1.8),
            works: |_| vec![ours(GET_CACHED), ours(GET_CACHED_2)],
        },
        Row {
            name: "RESP get, -P 16 -c 50 -d 1000, cached",
            against: "redis-server",
            ours: |r| r.ops("millrace resp"),
            theirs: |r| r.ops("redis resp"),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(0.95),
            works: |_| vec![Work::Node(false), Work::Redis(false)],
        },
        Row {
            name: "RESP get, processor time per request",
            against: "redis-server",
            ours: |r| r.cpu("millrace resp"),
            theirs: |r| r.cpu("redis resp"),
            compare: Compare::Ratio,
            unit: Unit::Us,
            goal: Goal::AtMost(1.0),
            works: |_| vec![Work::Node(false), Work::Redis(false)],
        },
        Row {
            name: "RESP get over 100,000 keys (-r)",
            against: "redis-server",
            ours: |r| r.ops("millrace resp many"),
            theirs: |r| r.ops("redis resp many"),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::Told,
            works: |_| vec![Work::Node(true), Work::Redis(true)],
        },
        Row {
            name: "opening the database",
            against: "-",
            ours: |r| r.sample(GET)?.open_seconds,
            theirs: |_| None,
            compare: Compare::Alone,
            unit: Unit::Seconds,
            goal: Goal::AtMost(0.5),
            works: |_| vec![ours(GET)],
        },
    ]
}

//! Measures gets and sets of other embedded engines from tokio, as
//! `crates/millrace/examples/cost.rs` does with Millrace: the same keys, values, tasks and time.
//!
//! ```text
//! cargo run --release --example tokio -- DIR gets direct      # cached, called by the task itself
//! cargo run --release --example tokio -- DIR cold blocking    # direct reads, by spawn_blocking
//! cargo run --release --example tokio -- DIR rocksdb power    # sets, by spawn_blocking
//! cargo run --release --example tokio -- DIR fjall process    # the same with fjall, or redb
//! ```
//!
//! Gets read a database that `cost` has made; sets make a new one in the empty directory DIR.
#![forbid(unsafe_code)]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fjall::{KeyspaceCreateOptions, PersistMode};
use redb::{Durability, TableDefinition};
use rocksdb::{BlockBasedOptions, Cache, DB, Options, WriteOptions};
use tokio::runtime;

const KEYS: u32 = 1_000_000;
const SECONDS: u64 = 3;
const TABLE: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("values");

type Failure = Box<dyn Error + Send + Sync>;
/// One operation on the key of this number.
type Operation = Arc<dyn Fn(u32) -> Result<(), Failure> + Send + Sync>;

fn main() -> Result<(), Failure> {
    let usage =
        "usage: tokio DIR (gets|cold) (direct|blocking) | DIR (rocksdb|fjall|redb) (power|process)";
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [path, case, how] = words.as_slice() else { return Err(usage.into()) };
    let path = Path::new(path);
    let (operation, tasks, blocking) = match (case.as_str(), how.as_str()) {
        ("gets" | "cold", "direct" | "blocking") => {
            (gets(path, case == "cold")?, vec![1, 16, 64, 256], how == "blocking")
        }
        ("rocksdb", "power" | "process") => (rocksdb_sets(path, how == "power")?, vec![64], true),
        ("fjall", "power" | "process") => (fjall_sets(path, how == "power")?, vec![64], true),
        ("redb", "power" | "process") => (redb_sets(path, how == "power")?, vec![64], true),
        _ => return Err(usage.into()),
    };
    for threads in if blocking { vec![2, 8, 16, 32, 64] } else { vec![2] } {
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(threads)
            .build()?;
        for &tasks in &tasks {
            runtime.block_on(measure(&operation, tasks, blocking, threads))?;
        }
    }
    Ok(())
}

fn gets(path: &Path, cold: bool) -> Result<Operation, Failure> {
    let mut table = BlockBasedOptions::default();
    let cache = if cold { 32 << 20 } else { 1 << 30 };
    table.set_block_cache(&Cache::new_lru_cache(cache));
    table.set_bloom_filter(10.0, false);
    let mut options = Options::default();
    options.set_block_based_table_factory(&table);
    options.set_use_direct_reads(true);
    let db = DB::open_for_read_only(&options, path, false)?;
    if !cold {
        for n in 0..KEYS {
            db.get_pinned(key(n))?;
        }
    }
    Ok(Arc::new(move |n| match db.get(key(n))? {
        Some(_) => Ok(()),
        None => Err(format!("no value of key {n}").into()),
    }))
}

fn rocksdb_sets(path: &Path, sync: bool) -> Result<Operation, Failure> {
    let mut options = Options::default();
    options.create_if_missing(true);
    let db = DB::open(&options, path)?;
    let mut write = WriteOptions::default();
    write.set_sync(sync);
    Ok(Arc::new(move |n| Ok(db.put_opt(key(n), [b'x'; 100], &write)?)))
}

fn fjall_sets(path: &Path, sync: bool) -> Result<Operation, Failure> {
    let db = fjall::Database::builder(path).open()?;
    let values = db.keyspace("values", KeyspaceCreateOptions::default)?;
    let mode = if sync { PersistMode::SyncData } else { PersistMode::Buffer };
    Ok(Arc::new(move |n| {
        values.insert(key(n), [b'x'; 100])?;
        Ok(db.persist(mode)?)
    }))
}

fn redb_sets(path: &Path, sync: bool) -> Result<Operation, Failure> {
    std::fs::create_dir_all(path)?;
    let db = redb::Database::create(path.join("redb"))?;
    let durability = if sync { Durability::Immediate } else { Durability::None };
    Ok(Arc::new(move |n| {
        let mut write = db.begin_write()?;
        write.set_durability(durability)?;
        write.open_table(TABLE)?.insert(key(n).as_slice(), [b'x'; 100].as_slice())?;
        Ok(write.commit()?)
    }))
}

/// Runs `tasks` tasks for [`SECONDS`].
async fn measure(
    operation: &Operation,
    tasks: u32,
    blocking: bool,
    threads: usize,
) -> Result<(), Failure> {
    let (began, cpu_before) = (Instant::now(), cpu_ns());
    let running: Vec<_> = (0..tasks)
        .map(|task| tokio::spawn(run(operation.clone(), task, blocking, began)))
        .collect();
    let mut done = 0;
    for task in running {
        done += task.await??;
    }
    let (ns, cpu_ns) = (began.elapsed().as_nanos() as f64, (cpu_ns() - cpu_before) as f64);
    let each = |ns: f64| ns / done as f64;
    println!(
        "{tasks:>4} tasks, {threads:>2} threads: {:>9.0} a second, {:>7.0} ns each, {:>7.0} ns of processor time",
        done as f64 * 1e9 / ns,
        each(ns),
        each(cpu_ns)
    );
    Ok(())
}

async fn run(
    operation: Operation,
    task: u32,
    blocking: bool,
    began: Instant,
) -> Result<u64, Failure> {
    let mut done = 0;
    while began.elapsed() < Duration::from_secs(SECONDS) {
        let n = random((task << 20).wrapping_add(done as u32));
        if blocking {
            let operation = operation.clone();
            tokio::task::spawn_blocking(move || operation(n)).await??;
        } else {
            operation(n)?;
        }
        done += 1;
    }
    Ok(done)
}

/// The processor time of this process so far; the kernel counts it in hundredths of a second.
fn cpu_ns() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<u64> = stat
        .rsplit(") ")
        .next()
        .map(|rest| rest.split(' ').skip(11).take(2).flat_map(str::parse).collect())
        .unwrap_or_default();
    fields.iter().sum::<u64>() * 10_000_000
}

fn key(n: u32) -> [u8; 8] {
    u64::from(n).to_be_bytes()
}

/// Scatters numbers over the keys.
fn random(n: u32) -> u32 {
    ((u64::from(n.wrapping_mul(0x9E37_79B9)) * u64::from(KEYS)) >> 32) as u32
}

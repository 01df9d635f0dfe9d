//! Measures gets and sets from tokio: how many a second, and what each costs.
//!
//! ```text
//! cargo run --release -p millrace --example cost -- /tmp/cost          # cached gets
//! cargo run --release -p millrace --example cost -- /tmp/cost cold     # gets with a small cache
//! cargo run --release -p millrace --example cost -- /tmp/cost power    # durable sets
//! cargo run --release -p millrace --example cost -- /tmp/cost process  # the process may die
//! ```
//!
//! The database gets a million values of 100 bytes if it has none. `bench/peers/examples/tokio.rs`
//! does the same with RocksDB, fjall and redb.

#![expect(clippy::disallowed_methods, reason = "a program that measures has a clock")]

use std::error::Error;
use std::time::{Duration, Instant};

use millrace::{Db, Durability, Options, WriteBatch, blocking};

const KEYS: u32 = 1_000_000;
const SECONDS: u64 = 3;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: cost DIRECTORY [cold|power|process]";
    let path = arguments.next().ok_or(usage)?;
    let case = arguments.next().unwrap_or_default();
    let (memory, durability) = match case.as_str() {
        "" | "process" => (1 << 30, Durability::Process),
        "cold" => (32 << 20, Durability::Process),
        "power" => (1 << 30, Durability::Power),
        _ => return Err(usage.into()),
    };
    let db = Options::new().memory(memory).durability(durability).open(path).await?;
    if db.range(..).next().await.is_none() {
        fill(&db).await?;
    }
    if matches!(case.as_str(), "power" | "process") {
        return measure(&db, 64, set).await;
    }
    if case.is_empty() {
        let mut all = db.range(..);
        while all.next().await.is_some() {}
        for n in 0..KEYS / 1000 {
            db.multi_get((0..1000).map(|m| key(n * 1000 + m))).await?;
        }
    }
    for tasks in [1, 16, 64, 256] {
        measure(&db, tasks, get).await?;
    }
    let threads: blocking::Db = db.into();
    tokio::task::spawn_blocking(move || {
        let began = Window::begin();
        let mut gets = 0;
        while !began.is_over() {
            for _ in 0..100 {
                threads.get(key(random(gets as u32)))?;
                gets += 1;
            }
        }
        began.report("a thread", gets);
        Ok::<_, millrace::Error>(())
    })
    .await??;
    Ok(())
}

/// Runs `tasks` tasks, each of which returns what it has done.
async fn measure<F>(
    db: &Db,
    tasks: u32,
    task: fn(Db, u32, Window) -> F,
) -> Result<(), Box<dyn Error + Send + Sync>>
where
    F: Future<Output = millrace::Result<u64>> + Send + 'static,
{
    let began = Window::begin();
    let running: Vec<_> = (0..tasks).map(|n| tokio::spawn(task(db.clone(), n, began))).collect();
    let mut done = 0;
    for task in running {
        done += task.await??;
    }
    began.report(&format!("{tasks} tasks"), done);
    Ok(())
}

/// The time that is measured.
#[derive(Clone, Copy)]
struct Window {
    began: Instant,
    cpu_ns: u64,
}

impl Window {
    fn begin() -> Window {
        Window { began: Instant::now(), cpu_ns: cpu_ns() }
    }

    fn is_over(&self) -> bool {
        self.began.elapsed() >= Duration::from_secs(SECONDS)
    }

    fn report(&self, who: &str, done: u64) {
        let ns = self.began.elapsed().as_nanos() as f64;
        let each = |ns: f64| ns / done as f64;
        let cpu_ns = (cpu_ns() - self.cpu_ns) as f64;
        println!(
            "{who:>10}: {:>9.0} a second, {:>7.0} ns each, {:>7.0} ns of processor time",
            done as f64 * 1e9 / ns,
            each(ns),
            each(cpu_ns)
        );
    }
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

async fn fill(db: &Db) -> millrace::Result<()> {
    for part in 0..KEYS / 1000 {
        let mut batch = WriteBatch::new();
        for n in part * 1000..(part + 1) * 1000 {
            batch.put(key(n), format!("{n:0>100}"));
        }
        db.write(batch).await?;
    }
    db.flush().await?;
    db.compact_range(..).await
}

fn key(n: u32) -> [u8; 8] {
    u64::from(n).to_be_bytes()
}

/// Scatters numbers over the keys.
fn random(n: u32) -> u32 {
    ((u64::from(n.wrapping_mul(0x9E37_79B9)) * u64::from(KEYS)) >> 32) as u32
}

async fn get(db: Db, task: u32, began: Window) -> millrace::Result<u64> {
    let mut gets = 0;
    while !began.is_over() {
        for _ in 0..100 {
            let n = random((task << 20).wrapping_add(gets as u32));
            assert!(db.get(key(n)).await?.is_some());
            gets += 1;
        }
    }
    Ok(gets)
}

async fn set(db: Db, task: u32, began: Window) -> millrace::Result<u64> {
    let mut sets = 0;
    while !began.is_over() {
        let n = random((task << 20).wrapping_add(sets as u32));
        db.put(key(n), [b'x'; 100]).await?;
        sets += 1;
    }
    Ok(sets)
}

//! Measures gets from tokio: how many a second, and what each costs.
//!
//! ```text
//! cargo run --release -p millrace --example cost -- /tmp/cost          # cached
//! cargo run --release -p millrace --example cost -- /tmp/cost cold    # with a small cache
//! ```
//!
//! The database gets a million values of 100 bytes if it has none.

#![expect(clippy::disallowed_methods, reason = "a program that measures has a clock")]

use std::error::Error;
use std::time::{Duration, Instant};

use millrace::{Db, Durability, Options, WriteBatch, blocking};

const KEYS: u32 = 1_000_000;
const SECONDS: u64 = 3;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: cost DIRECTORY [cold]")?;
    let cold = arguments.next().is_some_and(|word| word == "cold");
    let memory = if cold { 32 << 20 } else { 1 << 30 };
    let db = Options::new().memory(memory).durability(Durability::Process).open(path).await?;
    if db.range(..).next().await.is_none() {
        fill(&db).await?;
    }
    if !cold {
        let mut all = db.range(..);
        while all.next().await.is_some() {}
        for n in 0..KEYS / 1000 {
            db.multi_get((0..1000).map(|m| key(n * 1000 + m))).await?;
        }
    }
    for tasks in [1, 16, 64, 256] {
        let began = Instant::now();
        let running: Vec<_> =
            (0..tasks).map(|task| tokio::spawn(get(db.clone(), task, began))).collect();
        let mut gets = 0;
        for task in running {
            gets += task.await??;
        }
        report(&format!("{tasks} tasks"), gets, began.elapsed());
    }
    let threads: blocking::Db = db.into();
    tokio::task::spawn_blocking(move || {
        let began = Instant::now();
        let mut gets = 0;
        while began.elapsed() < Duration::from_secs(SECONDS) {
            for _ in 0..100 {
                threads.get(key(random(gets as u32)))?;
                gets += 1;
            }
        }
        report("a thread", gets, began.elapsed());
        Ok::<_, millrace::Error>(())
    })
    .await??;
    Ok(())
}

fn report(who: &str, gets: u64, time: Duration) {
    let seconds = time.as_secs_f64();
    println!(
        "{who:>10}: {:>9.0} gets/s, {:>7.0} ns each",
        gets as f64 / seconds,
        1e9 * seconds / gets as f64
    );
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

async fn get(db: Db, task: u32, began: Instant) -> millrace::Result<u64> {
    let mut gets = 0;
    while began.elapsed() < Duration::from_secs(SECONDS) {
        for _ in 0..100 {
            let n = random((task << 20).wrapping_add(gets as u32));
            assert!(db.get(key(n)).await?.is_some());
            gets += 1;
        }
    }
    Ok(gets)
}

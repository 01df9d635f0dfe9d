//! The race of a database whose compute and storage are apart: threads of a program without state
//! set and get through blocking clients, over the network, and verify every value.
//!
//! 1. *Write*: each thread sets its own keys, one after the other: 8 bytes, in no order, and values
//!    of 4 KiB.
//! 2. *Sequential*: each thread gets its keys in the order in which it has written them.
//! 3. *Hot*: each thread visits partitions of 10 MB of its writes, the last one first, and gets
//!    keys of it at random: a tenth more gets than there are keys.
//! 4. *Random*, if it is asked for: each thread gets keys at random among those of all threads.
//! 5. *Index*, if it is asked for: another client loads the index of the database, and each thread
//!    gets keys that do not exist, first some without the index and then as many as it has set with
//!    it.
//!
//! The threads begin and end each phase together. The server is a node that is started for the
//! race, in a directory that is removed afterwards, or any other one.

#![expect(clippy::disallowed_methods, reason = "the client's threads, their clock and directory")]

mod outcome;

use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use client::blocking::Client;
use client::{CacheStats, Options};
use lsm::Durability;
use workload::race::{Entries, Share, VALUE_BYTES};

pub use self::outcome::RaceOutcome;
use crate::peers::tool::{Background, Tool, free_port, make_dir};

/// How long a node may take to start.
const START: Duration = Duration::from_secs(60);
/// How long the index may take to load.
const LOAD: Duration = Duration::from_secs(120);
/// The number of the first key that does not exist.
const MISSING: u64 = 1 << 48;
/// Gets of each thread of keys that do not exist, without the index.
const MISSED_PLAINLY: u64 = 10_000;
/// The smallest cache of the client with the index.
const INDEX_CACHE_BYTES: usize = 1 << 20;
/// The longest time for one call.
const TIMEOUT: Duration = Duration::from_secs(30);

/// How to race.
#[derive(Clone, Debug)]
pub struct RacePlan {
    /// The server's address; without it, a node is started.
    pub connect: Option<String>,
    /// The directory in which that node gets one of its own.
    pub data: Option<PathBuf>,
    /// The node's flags besides its directory and address.
    pub flags: Vec<String>,
    /// What the node's acknowledged writes survive.
    pub durability: Durability,
    /// Threads of the client.
    pub threads: u32,
    /// Sets of each thread.
    pub sets: u64,
    /// Gets of each thread at random among all keys; 0 is none.
    pub random: u64,
    /// Bytes of the client's cache; 0 is none.
    pub cache_bytes: usize,
    /// Bytes that it reads ahead at once; 0 is none.
    pub read_ahead: usize,
    /// Bytes of an index of the database; 0 is none.
    pub index_bytes: usize,
}

/// Races.
///
/// # Errors
/// The server cannot be started or reached, a call fails, or a value is not what was written; as
/// one line.
pub fn run_race(plan: &RacePlan, say: &mut dyn FnMut(&str)) -> Result<RaceOutcome, String> {
    let node = match &plan.connect {
        Some(_) => None,
        None => Some(Node::start(plan)?),
    };
    let address = match (&plan.connect, &node) {
        (Some(address), _) => address.clone(),
        (None, Some(node)) => format!("127.0.0.1:{}", node.port),
        (None, None) => return Err("there is no server".to_owned()),
    };
    let client = Options::new()
        .cache(plan.cache_bytes)
        .read_ahead(plan.read_ahead)
        .timeout(TIMEOUT)
        .connect_blocking(&address)
        .map_err(|error| error.to_string())?;
    let entries = Entries::new();
    let mut phase = |name: &str, work: Work| {
        say(&format!("{name}: {} threads", plan.threads));
        let done = run_phase(plan, &client, &entries, work);
        if let Ok(done) = &done {
            say(&format!("{name}: {} calls in {:.2} s", done.calls, done.seconds));
        }
        done.map_err(|error| format!("{name}: {error}"))
    };
    let write = phase("write", Work::Write)?;
    let trips = || client.cache_stats().round_trips;
    let before = trips();
    let sequential = phase("sequential", Work::Sequential)?;
    let between = trips();
    let hot = phase("hot", Work::Hot)?;
    let after = trips();
    let stats = client.cache_stats();
    let random = match plan.random {
        0 => Phase::default(),
        _ => phase("random", Work::Random)?,
    };
    let last = trips();
    let (mut missed, mut missing, mut index) =
        (Phase::default(), Phase::default(), CacheStats::default());
    if plan.index_bytes > 0 {
        let options = Options::new().timeout(TIMEOUT);
        let plain = options.clone().connect_blocking(&address).map_err(|e| e.to_string())?;
        let plainly = Work::Missing(plan.sets.min(MISSED_PLAINLY));
        missed = run_phase(plan, &plain, &entries, plainly)?;
        let options = options.cache(INDEX_CACHE_BYTES).index(plan.index_bytes);
        let client = options.connect_blocking(&address).map_err(|e| e.to_string())?;
        index = wait_for_index(&client)?;
        missing = run_phase(plan, &client, &entries, Work::Missing(plan.sets))?;
        index.index_answers = client.cache_stats().index_answers;
    }
    // Without a cache, each get is a round trip.
    let per_trip = |calls: u64, trips: u64| match plan.cache_bytes {
        0 => 1.0,
        _ => calls as f64 / trips.max(1) as f64,
    };
    Ok(RaceOutcome {
        name: "race",
        write_s: write.seconds,
        sequential_s: sequential.seconds,
        hot_s: hot.seconds,
        total_s: write.seconds + sequential.seconds + hot.seconds,
        writes: write.calls,
        sequential_verified: sequential.calls,
        hot_verified: hot.calls,
        threads: plan.threads,
        sets: plan.sets,
        value_size: VALUE_BYTES,
        connect: plan.connect.clone(),
        durability: node.is_some().then(|| plan.durability.to_string()),
        cache_bytes: plan.cache_bytes,
        cache_hits: stats.hits,
        read_ahead: plan.read_ahead,
        stretches: stats.stretches,
        sequential_gets_per_round_trip: per_trip(sequential.calls, between - before),
        hot_gets_per_round_trip: per_trip(hot.calls, after - between),
        random_s: random.seconds,
        random_verified: random.calls,
        random_gets_per_round_trip: per_trip(random.calls, last - after),
        missing_plain_s: missed.seconds,
        missing_plain: missed.calls,
        index_bytes: index.index_bytes,
        index_keys: index.index_keys,
        index_load_s: index.index_load_time.as_secs_f64(),
        index_answers: index.index_answers,
        missing_s: missing.seconds,
        missing: missing.calls,
        cache_entries: stats.entries,
        cache_overhead_bytes: stats.bytes_used - stats.bytes_cached,
        millrace: env!("CARGO_PKG_VERSION"),
    })
}

/// Waits until a client has loaded its index.
fn wait_for_index(client: &Client) -> Result<CacheStats, String> {
    let began = Instant::now();
    loop {
        let stats = client.cache_stats();
        if stats.index_is_whole {
            return Ok(stats);
        }
        if began.elapsed() > LOAD {
            return Err(format!(
                "the index is not there after {LOAD:?}: the server gives none, or its keys do not fit"
            ));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[derive(Clone, Copy)]
enum Work {
    Write,
    Sequential,
    Hot,
    Random,
    /// So many gets of keys that do not exist.
    Missing(u64),
}

#[derive(Default)]
struct Phase {
    seconds: f64,
    calls: u64,
}

/// Runs a phase in all threads. The first error ends it in all of them.
fn run_phase(
    plan: &RacePlan,
    client: &Client,
    entries: &Entries,
    work: Work,
) -> Result<Phase, String> {
    let threads = plan.threads as usize;
    let (start, calls, failed) = (Barrier::new(threads + 1), AtomicU64::new(0), AtomicU64::new(0));
    let (start, calls, failed) = (&start, &calls, &failed);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..u64::from(plan.threads))
            .map(|thread| {
                scope.spawn(move || {
                    start.wait();
                    let mut runner = Runner { client, entries, calls: 0, failed };
                    let done = runner.run(thread, plan, work);
                    calls.fetch_add(runner.calls, Ordering::Relaxed);
                    if done.is_err() {
                        failed.store(1, Ordering::Relaxed);
                    }
                    done
                })
            })
            .collect();
        start.wait();
        let began = Instant::now();
        let mut outcome = Ok(());
        for worker in workers {
            let done = worker.join().unwrap_or_else(|_| Err("a thread panicked".to_owned()));
            outcome = outcome.and(done);
        }
        let seconds = began.elapsed().as_secs_f64();
        outcome.map(|()| Phase { seconds, calls: calls.load(Ordering::Relaxed) })
    })
}

/// One thread's part of a phase.
struct Runner<'a> {
    client: &'a Client,
    entries: &'a Entries,
    calls: u64,
    failed: &'a AtomicU64,
}

impl Runner<'_> {
    fn run(&mut self, thread: u64, plan: &RacePlan, work: Work) -> Result<(), String> {
        let share = Share { thread, threads: plan.threads.into(), sets: plan.sets };
        match work {
            Work::Write => {
                let mut value = vec![0; VALUE_BYTES];
                for number in share.written() {
                    let key = self.entries.fill(number, &mut value);
                    self.client.set(key, &value).map_err(|error| error.to_string())?;
                    if self.counts() {
                        return Ok(());
                    }
                }
                Ok(())
            }
            Work::Sequential => self.get_all(share.written()),
            Work::Hot => self.get_all(share.hot()),
            Work::Random => self.get_all(share.random(plan.random)),
            Work::Missing(gets) => {
                for number in 0..gets {
                    let key = self.entries.key(MISSING + thread * plan.sets + number);
                    if self.client.get(key).map_err(|error| error.to_string())?.is_some() {
                        return Err(format!("key {} was never set", key.escape_ascii()));
                    }
                    if self.counts() {
                        return Ok(());
                    }
                }
                Ok(())
            }
        }
    }

    fn get_all(&mut self, numbers: impl Iterator<Item = u64>) -> Result<(), String> {
        for number in numbers {
            self.get(number)?;
            if self.counts() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Counts a call. Whether another thread has failed.
    fn counts(&mut self) -> bool {
        self.calls += 1;
        self.calls.is_multiple_of(1024) && self.failed.load(Ordering::Relaxed) != 0
    }

    fn get(&mut self, number: u64) -> Result<(), String> {
        let key = self.entries.key(number);
        match self.client.get(key).map_err(|error| error.to_string())? {
            Some(value) if self.entries.is_value(number, &value) => Ok(()),
            Some(value) => Err(format!(
                "key {} (number {number}) has a value of {} bytes that was not written",
                key.escape_ascii(),
                value.len()
            )),
            None => Err(format!("key {} (number {number}) is lost", key.escape_ascii())),
        }
    }
}

/// A node for the race; it ends, and its directory is removed, on drop.
struct Node {
    program: Option<Background>,
    port: u16,
    dir: PathBuf,
}

impl Node {
    fn start(plan: &RacePlan) -> Result<Node, String> {
        let data = plan.data.as_deref().ok_or("race needs --data or --connect")?;
        let dir = data.join(format!("millrace-race-{}", std::process::id()));
        make_dir(&dir)?;
        let mut node = Node { program: None, port: free_port()?, dir };
        let program = std::env::current_exe()
            .map_err(|error| format!("cannot find this program: {error}"))?;
        let tool = Tool::new(program)
            .arg("serve")
            .arg("--data")
            .arg(node.dir.join("db"))
            .args(["--listen".to_owned(), format!("127.0.0.1:{}", node.port)])
            .args(["--durability".to_owned(), plan.durability.to_string()])
            .args(plan.flags.iter().cloned());
        let program = node.program.insert(tool.start()?);
        let began = Instant::now();
        loop {
            program.check()?;
            match Client::connect(&format!("127.0.0.1:{}", node.port)) {
                Ok(_) => return Ok(node),
                Err(error) if began.elapsed() > START => return Err(error.to_string()),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.program = None;
        remove(&self.dir);
    }
}

/// Removes a directory of this bench.
fn remove(dir: &Path) {
    // What cannot be removed stays for the user to see.
    let _ = std::fs::remove_dir_all(dir);
}

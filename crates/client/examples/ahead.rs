//! Readers with a cache that read ahead, while others write: `ahead ADDRESS [cut]`. No reader may
//! see a value that is older than what it has seen or written itself, or than what was acknowledged
//! before it waited. The server is an empty node that keeps values of 1 KiB in blob files. With
//! `cut`, connections are cut again and again.

mod readers;

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use client::{CacheStats, Client, ErrorKind, Options, Result, blocking};

const KEYS: usize = 3000;
const TIME: Duration = Duration::from_secs(4);
/// Every so many-th round of a reader begins with `wait_coherent`.
const WAITS: u64 = 3;

fn key(number: usize) -> String {
    format!("ahead:{number:05}")
}

/// A value that tells its number, and is long enough for a blob file.
fn value(number: u64) -> Vec<u8> {
    format!("{number:<2000}").into_bytes()
}

fn number(value: Option<Vec<u8>>) -> u64 {
    let text = value.map(|value| String::from_utf8(value).expect("a number"));
    text.map_or(0, |text| text.trim_end().parse().expect("a number"))
}

fn options() -> Options {
    Options::new().cache(64 << 20).read_ahead(1 << 20)
}

enum Subject {
    Threads(blocking::Client),
    Tasks(Client, tokio::runtime::Runtime),
}

impl Subject {
    fn new(address: &str, tasks: bool) -> Result<Subject> {
        if !tasks {
            return options().connect_blocking(address).map(Subject::Threads);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let client = runtime.block_on(options().connect(address))?;
        Ok(Subject::Tasks(client, runtime))
    }

    fn get(&self, key: &str) -> Result<u64> {
        match self {
            Subject::Threads(client) => client.get(key),
            Subject::Tasks(client, runtime) => runtime.block_on(client.get(key)),
        }
        .map(number)
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        match self {
            Subject::Threads(client) => client.set(key, value),
            Subject::Tasks(client, runtime) => runtime.block_on(client.set(key, value)),
        }
    }

    fn wait_coherent(&self) {
        match self {
            Subject::Threads(client) => client.wait_coherent(),
            Subject::Tasks(client, runtime) => runtime.block_on(client.wait_coherent()),
        }
    }

    fn stats(&self) -> CacheStats {
        match self {
            Subject::Threads(client) => client.cache_stats(),
            Subject::Tasks(client, _) => client.cache_stats(),
        }
    }
}

struct World<'a> {
    address: &'a str,
    /// The last acknowledged number of each key. Each key has one writer.
    acknowledged: Vec<AtomicU64>,
    over: AtomicBool,
}

impl World<'_> {
    fn write(&self, subject: &Subject, at: usize, number: u64) {
        match subject.set(&key(at), &value(number)) {
            Ok(()) => {
                self.acknowledged[at].fetch_max(number, Ordering::SeqCst);
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}"),
        }
    }

    /// Overwrites keys here and there, and reads them.
    fn writer(&self, mut random: u64) {
        let subject = Subject::new(self.address, false).expect("it connects");
        let mut written = 0;
        while !self.over.load(Ordering::Relaxed) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // The first quarter is the readers'.
            let at = KEYS / 4 + (random >> 33) as usize % (KEYS - KEYS / 4);
            written += 1;
            self.write(&subject, at, written);
            std::thread::sleep(Duration::from_micros(300));
        }
    }

    /// Reads all keys in the order in which they were written at first, and writes some of its own.
    fn reader(&self, tasks: bool, own: usize) -> CacheStats {
        let subject = Subject::new(self.address, tasks).expect("it connects");
        let mut seen = vec![0; KEYS];
        let mut recent: VecDeque<usize> = VecDeque::new();
        let mut round = 0;
        while !self.over.load(Ordering::Relaxed) {
            round += 1;
            let mut floor = vec![0; KEYS];
            if round % WAITS == 0 {
                let all = self.acknowledged.iter().map(|one| one.load(Ordering::SeqCst));
                floor = all.collect();
                subject.wait_coherent();
            }
            for at in 0..KEYS {
                let found = subject.get(&key(at)).expect("it reads");
                let least = seen[at].max(floor[at]);
                assert!(found >= least, "tasks: {tasks}: {found} of {at} after {least}");
                seen[at] = found;
                // One key of its own in a hundred, ahead of where it reads.
                if at % 100 == own {
                    let mine = (at + 200) % (KEYS / 4) / 100 * 100 + own;
                    self.write(&subject, mine, round * 1000);
                    if self.acknowledged[mine].load(Ordering::SeqCst) == round * 1000 {
                        recent.push_back(mine);
                        seen[mine] = round * 1000;
                    }
                }
                if recent.len() > 3
                    && let Some(mine) = recent.pop_front()
                {
                    let found = subject.get(&key(mine)).expect("it reads");
                    assert!(found >= seen[mine], "tasks: {tasks}: {found} of its own {mine}");
                }
            }
        }
        subject.stats()
    }
}

fn run(address: &str, cuts: bool) {
    let filler = Subject::new(address, false).expect("it connects");
    for at in 0..KEYS {
        filler.set(&key(at), &value(0)).expect("it writes");
    }
    let acknowledged = (0..KEYS).map(|_| AtomicU64::new(0)).collect();
    let world = &World { address, acknowledged, over: AtomicBool::new(false) };
    std::thread::scope(|scope| {
        scope.spawn(|| world.writer(7));
        let threads: Vec<_> =
            (0..4).map(|own| scope.spawn(move || world.reader(own % 2 == 1, own))).collect();
        readers::let_run(address, TIME, Duration::from_millis(70), cuts);
        world.over.store(true, Ordering::Relaxed);
        for reader in threads {
            let stats = reader.join().expect("the reader has seen nothing old");
            println!("{stats:?}");
            assert!(stats.stretches > 0 && stats.values_ahead_used > 0, "it has not read ahead");
            assert!(stats.invalidations > 0, "it was told nothing");
        }
    });
}

fn main() -> ExitCode {
    readers::start("ahead", run)
}

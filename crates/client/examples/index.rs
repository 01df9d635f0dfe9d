//! Readers with an index of the database, while others write and remove keys: `index ADDRESS
//! [cut]`. No reader may find a key missing, or there, that was not so at a moment of its call, or
//! after what it has seen, written or waited for. The server is an empty node. With `cut`,
//! connections are cut again and again.

mod readers;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use client::{CacheStats, Client, ErrorKind, Options, Result, WriteBatch, blocking};

const KEYS: usize = 600;
/// Keys that nobody writes meanwhile, so that the index has several pages.
const OTHERS: usize = 40_000;
const TIME: Duration = Duration::from_secs(4);
/// It goes on as long as this until each reader has used an index: a slow machine needs more time.
const TIME_MAX: Duration = Duration::from_secs(60);
const READERS: usize = 4;

fn key(number: usize) -> String {
    format!("index:{number:05}")
}

enum Subject {
    Threads(blocking::Client),
    Tasks(Client, tokio::runtime::Runtime),
}

impl Subject {
    fn new(address: &str, tasks: bool) -> Result<Subject> {
        // A small cache: what it has of a key, the index is not asked.
        let options = Options::new().cache(64 << 10).index(8 << 20);
        if !tasks {
            return options.connect_blocking(address).map(Subject::Threads);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let client = runtime.block_on(options.connect(address))?;
        Ok(Subject::Tasks(client, runtime))
    }

    fn get(&self, key: &str) -> Result<Option<u64>> {
        let value = match self {
            Subject::Threads(client) => client.get(key),
            Subject::Tasks(client, runtime) => runtime.block_on(client.get(key)),
        };
        let number = |value| String::from_utf8(value).expect("a number").parse().expect("a number");
        Ok(value?.map(number))
    }

    fn set(&self, key: &str, value: u64) -> Result<()> {
        let value = value.to_string();
        match self {
            Subject::Threads(client) => client.set(key, value),
            Subject::Tasks(client, runtime) => runtime.block_on(client.set(key, value)),
        }
    }

    fn delete(&self, key: &str) -> Result<bool> {
        match self {
            Subject::Threads(client) => client.delete(key),
            Subject::Tasks(client, runtime) => runtime.block_on(client.delete(key)),
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

/// The versions of a key, which has one writer: with an odd one it has this value, with an even
/// one there is no such key.
#[derive(Default)]
struct History {
    begun: AtomicU64,
    acknowledged: AtomicU64,
}

struct World<'a> {
    address: &'a str,
    keys: Vec<History>,
    over: AtomicBool,
    /// Readers that have used an index.
    served: AtomicUsize,
}

/// Whether a client has loaded an index again, and it has told that keys are absent.
fn has_used_an_index(stats: &CacheStats) -> bool {
    stats.index_answers > 100 && stats.index_loads > 1
}

impl World<'_> {
    /// Makes the next version of a key. Whether it was acknowledged.
    fn write(&self, at: usize, write: impl FnOnce(u64) -> Result<()>) -> bool {
        let history = &self.keys[at];
        let version = history.begun.fetch_add(1, Ordering::SeqCst) + 1;
        match write(version) {
            Ok(()) => {
                history.acknowledged.fetch_max(version, Ordering::SeqCst);
                true
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
                false
            }
        }
    }

    /// Writes and removes keys here and there, and removes ranges.
    fn writer(&self, mut random: u64) {
        let client = blocking::Client::connect(self.address).expect("it connects");
        let mut dropped = Instant::now();
        while !self.over.load(Ordering::Relaxed) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // The first ones are the readers'.
            let at = READERS + (random >> 33) as usize % (KEYS - READERS);
            self.write(at, |version| match version % 2 {
                0 => client.delete(key(at)).map(|_| ()),
                _ => client.set(key(at), version.to_string()),
            });
            if dropped.elapsed() > Duration::from_secs(1) {
                dropped = Instant::now();
                // All clients drop their index.
                let done = client
                    .set("range:a1", "x")
                    .and_then(|()| client.delete_range("range:a".."range:b"));
                if let Err(error) = done {
                    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
                }
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn reader(&self, tasks: bool, own: usize) -> CacheStats {
        let subject = Subject::new(self.address, tasks).expect("it connects");
        let mut seen = vec![0; KEYS];
        let (mut round, mut is_served) = (0, false);
        while !self.over.load(Ordering::Relaxed) {
            round += 1;
            if !is_served && has_used_an_index(&subject.stats()) {
                is_served = true;
                self.served.fetch_add(1, Ordering::Relaxed);
            }
            let mut floor = vec![0; KEYS];
            if round % 3 == 0 {
                let acknowledged = |one: &History| one.acknowledged.load(Ordering::SeqCst);
                floor = self.keys.iter().map(acknowledged).collect();
                subject.wait_coherent();
            }
            for at in READERS..KEYS {
                let found = subject.get(&key(at)).expect("it reads");
                let (least, most) =
                    (seen[at].max(floor[at]), self.keys[at].begun.load(Ordering::SeqCst));
                let text = || format!("tasks: {tasks}: {found:?} of {at} from {least} to {most}");
                seen[at] = match found {
                    Some(version) => version,
                    // The first version without the key.
                    None => least + least % 2,
                };
                assert!((least..=most).contains(&seen[at]), "{}", text());
                let never = subject.get(&format!("never:{at}:{round}")).expect("it reads");
                assert_eq!(never, None);
                if at % 50 == 0 {
                    let mut written = 0;
                    let done = self.write(own, |version| {
                        written = version;
                        match version % 2 {
                            0 => subject.delete(&key(own)).map(|_| ()),
                            _ => subject.set(&key(own), version),
                        }
                    });
                    let found = subject.get(&key(own)).expect("it reads");
                    let expected = (written % 2 == 1).then_some(written);
                    assert!(!done || found == expected, "{found:?}, it has written {written}");
                }
            }
        }
        subject.stats()
    }
}

fn run(address: &str, cuts: bool) {
    let filler = blocking::Client::connect(address).expect("it connects");
    for from in (0..OTHERS).step_by(1000) {
        let mut batch = WriteBatch::new();
        for number in from..from + 1000 {
            batch.set(format!("other:{number:06}"), "x");
        }
        filler.write(batch).expect("it writes");
    }
    let keys = (0..KEYS).map(|_| History::default()).collect();
    let (over, served) = (AtomicBool::new(false), AtomicUsize::new(0));
    let world = &World { address, keys, over, served };
    std::thread::scope(|scope| {
        scope.spawn(|| world.writer(7));
        let threads: Vec<_> =
            (0..READERS).map(|own| scope.spawn(move || world.reader(own % 2 == 1, own))).collect();
        let (began, every) = (Instant::now(), Duration::from_millis(700));
        readers::let_run(address, TIME, every, cuts);
        while world.served.load(Ordering::Relaxed) < READERS && began.elapsed() < TIME_MAX {
            readers::let_run(address, every, every, cuts);
        }
        world.over.store(true, Ordering::Relaxed);
        for reader in threads {
            let stats = reader.join().expect("the reader has seen nothing old");
            println!("{stats:?}");
            assert!(has_used_an_index(&stats), "it has no index");
            assert!(stats.invalidations > 0, "it was told nothing");
        }
    });
}

fn main() -> ExitCode {
    readers::start("index", run)
}

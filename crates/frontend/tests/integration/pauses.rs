//! Measures how long guests wait in an upgrade of a node with 64 disks, all under load. Runs only
//! on request:
//!
//! ```text
//! MILLRACE=target/release/millrace cargo test --release -p millrace-frontend \
//!     --test integration pauses -- --ignored --nocapture
//! ```
//!
//! One thread plays all front ends. Each keeps two requests in flight, alternating reads and
//! writes. The result for each guest is its longest time without a completion, both while the node
//! is idle and while it is upgraded.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::Scratch;
use frontend::{Completion, Disk, DiskOptions, Queue, Request, Slot, Status};

const DISKS: usize = 64;
const BYTES: u64 = 16 << 20;
const UPGRADES: usize = 10;
/// How long to measure without an upgrade, and after one.
const WINDOW: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(30);

/// The node's launcher; the node ends with it.
struct Node {
    launcher: Child,
    log: PathBuf,
}

impl Node {
    fn start(dir: &Scratch, uri: impl Fn(usize) -> String) -> Node {
        let program = std::env::var_os("MILLRACE").expect("MILLRACE names the program");
        let log = dir.path("log");
        let mut command = Command::new(program);
        command.args(["serve", "--memory", "256M", "--cores", "1"]);
        for nth in 0..DISKS {
            let socket = socket(dir, nth);
            let spec = format!("name=d{nth} queues=1 uri={} socket={}", uri(nth), socket.display());
            command.arg("--disk").arg(spec);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(std::fs::File::create(&log).unwrap());
        Node { launcher: command.spawn().unwrap(), log }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn upgrade(&self) {
        // SAFETY: the call takes no pointers.
        let told = unsafe { libc::kill(self.launcher.id().cast_signed(), libc::SIGUSR2) };
        assert_eq!(told, 0);
    }

    fn upgrades(&self) -> usize {
        self.said().matches("successor=").count()
    }

    /// The pauses that the node logged for all upgrades, in microseconds.
    fn told(&self, key: &str) -> Vec<u64> {
        let said = self.said();
        let number = |text: &str| text.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok();
        said.split(key).skip(1).filter_map(number).collect()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // SAFETY: the call takes no pointers.
        unsafe { libc::kill(self.launcher.id().cast_signed(), libc::SIGTERM) };
        let _ = self.launcher.wait();
    }
}

fn socket(dir: &Scratch, nth: usize) -> PathBuf {
    dir.path(&format!("{nth}.sock"))
}

struct Guest {
    _disk: Disk,
    queue: Queue,
    random: u64,
    last: Instant,
    longest: Duration,
}

impl Guest {
    fn connect(path: &Path, nth: usize) -> Guest {
        let until = Instant::now() + PATIENCE;
        let options = DiskOptions { depth: 2, ..DiskOptions::default() };
        let mut disk = loop {
            match Disk::connect(path, options.clone()) {
                Ok(disk) => break disk,
                Err(error) => assert!(Instant::now() < until, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let queue = disk.take_queue(0);
        let random = 0x9e37_79b9_7f4a_7c15 ^ nth as u64;
        Guest { _disk: disk, queue, random, last: Instant::now(), longest: Duration::ZERO }
    }

    fn submit(&mut self, slot: Slot) {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let offset = self.random % (BYTES / 4096) * 4096;
        let request = match self.random >> 63 {
            0 => Request::Read { offset, len: 4096 },
            _ => Request::Write { offset, len: 4096 },
        };
        self.queue.submit(slot, request);
    }

    fn turn(&mut self, done: &mut Vec<Completion>) {
        while let Some(slot) = self.queue.take() {
            self.submit(slot);
        }
        self.queue.poll(done).unwrap();
        let now = Instant::now();
        self.longest = self.longest.max(now - self.last);
        if !done.is_empty() {
            self.last = now;
        }
        for Completion { slot, status, .. } in done.drain(..) {
            assert_eq!(status, Status::Ok);
            self.submit(slot);
        }
        self.queue.publish();
    }
}

/// Keeps up the load until a condition holds. Returns each guest's wait in microseconds, sorted.
fn watch(guests: &mut [Guest], mut over: impl FnMut() -> bool) -> Vec<u64> {
    let (mut done, mut looked) = (Vec::new(), Instant::now());
    for guest in guests.iter_mut() {
        (guest.last, guest.longest) = (looked, Duration::ZERO);
    }
    loop {
        guests.iter_mut().for_each(|guest| guest.turn(&mut done));
        if looked.elapsed() > Duration::from_millis(20) {
            looked = Instant::now();
            if over() {
                break;
            }
        }
    }
    let mut all: Vec<_> = guests.iter().map(|guest| guest.longest.as_micros() as u64).collect();
    all.sort_unstable();
    all
}

fn median(mut all: Vec<u64>) -> u64 {
    all.sort_unstable();
    all[all.len() / 2]
}

fn measure(what: &str, dir: &Scratch, uri: impl Fn(usize) -> String) {
    let node = Node::start(dir, uri);
    let mut guests: Vec<_> = (0..DISKS).map(|nth| Guest::connect(&socket(dir, nth), nth)).collect();
    let (mut alone, mut upgraded, mut worst) = (Vec::new(), Vec::new(), Vec::new());
    for nth in 0..UPGRADES {
        let end = Instant::now() + WINDOW;
        let waited = watch(&mut guests, || Instant::now() > end);
        alone.push(waited[DISKS / 2]);
        let until = Instant::now() + PATIENCE;
        node.upgrade();
        let mut end = None;
        let waited = watch(&mut guests, || {
            assert!(Instant::now() < until, "{}", node.said());
            if end.is_none() && node.upgrades() > nth {
                end = Some(Instant::now() + WINDOW);
            }
            end.is_some_and(|end| Instant::now() > end)
        });
        upgraded.push(waited[DISKS / 2]);
        worst.push(waited[DISKS - 1]);
    }
    println!(
        "{what}, {DISKS} disks, {UPGRADES} upgrades, medians in us: half of the guests wait no longer than {} (without an \
         upgrade {}), none longer than {}; the node says {} and {}",
        median(upgraded),
        median(alone),
        median(worst),
        median(node.told("median_us=")),
        median(node.told("pause_us=")),
    );
}

#[test]
#[ignore = "it measures"]
fn pauses_of_64_guests_under_load() {
    let dir = Scratch::new("pauses-mem");
    measure("mem:", &dir, |_| format!("mem:{BYTES}"));
    let dir = Scratch::new("pauses-file");
    measure("file:", &dir, |nth| {
        let path = dir.path(&format!("{nth}.img"));
        std::fs::File::create(&path).unwrap().set_len(BYTES).unwrap();
        format!("file:{}", path.display())
    });
}

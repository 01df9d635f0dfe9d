//! A small node: disks at sockets, served by cores of this process.
#![allow(dead_code, reason = "each suite uses its part")]
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bdev::Bdev;
use reactor::{Class, Core, DriverKind, RuntimeConfig, UnixListener, processors};
use vhost::{OnError, QueueStats, Target, TargetOptions};

/// Timeout of everything that is not measured.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A directory that is removed with its value.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        let dir = std::env::temp_dir().join(format!("vhost-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Scratch(dir)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The URI of a new file of this many bytes.
    pub fn file(&self, name: &str, bytes: u64) -> String {
        let path = self.path(name);
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        format!("file:{}", path.display())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What the cores report to the test.
struct Told {
    stats: Vec<Vec<Arc<QueueStats>>>,
}

/// Resources of a core, as of the last millisecond.
#[derive(Debug, Default)]
pub struct Counts {
    pub tasks: AtomicUsize,
    pub operations: AtomicUsize,
    /// Number of updates.
    pub looks: AtomicUsize,
    /// See [`Node::hold`].
    hold: AtomicBool,
}

impl Counts {
    fn look(&self, core: &Core) {
        self.tasks.store(core.live_tasks(), Ordering::Release);
        self.operations.store(core.operations_in_flight(), Ordering::Release);
        self.looks.fetch_add(1, Ordering::Release);
        while self.hold.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Disks at sockets, served until this is dropped.
pub struct Node {
    pub counts: Arc<[Counts; 2]>,
    pub dir: Scratch,
    pub stats: Vec<Vec<Arc<QueueStats>>>,
    stop: Arc<AtomicBool>,
    cores: Option<JoinHandle<()>>,
}

impl Node {
    /// Serves these devices with four rings each, on two cores if there are two.
    pub fn start(dir: Scratch, uris: &[&str]) -> Node {
        Node::on(DriverKind::Auto, dir, uris)
    }

    /// Like [`Node::start`], with this driver.
    pub fn on(driver: DriverKind, dir: Scratch, uris: &[&str]) -> Node {
        let config = RuntimeConfig {
            processors: processors().into_iter().cycle().take(2).collect(),
            memory: 64 << 20,
            driver,
            ..RuntimeConfig::default()
        };
        let stop = Arc::new(AtomicBool::new(false));
        let disks: Vec<_> = uris
            .iter()
            .enumerate()
            .map(|(nth, uri)| ((*uri).to_owned(), dir.path(&format!("{nth}.sock"))))
            .collect();
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        let ends = stop.clone();
        let counts: Arc<[Counts; 2]> = Arc::default();
        let counting = counts.clone();
        let main = move |core: Core| {
            let (disks, tell, ends) = (disks.clone(), tell.clone(), ends.clone());
            let counts = counting.clone();
            async move {
                let counts = &counts[core.id()];
                if core.id() == 0 {
                    let told = |stats| tell.send(Told { stats }).unwrap();
                    serve(&core, &disks, told, &ends, counts).await;
                }
                while !ends.load(Ordering::Acquire) {
                    core.sleep_ns(1_000_000).await;
                    counts.look(&core);
                }
            }
        };
        let cores = std::thread::spawn(move || _ = reactor::run(&config, main).unwrap());
        let told: Told = told.recv().expect("the disks are there");
        Node { counts, dir, stats: told.stats, stop, cores: Some(cores) }
    }

    /// Tasks and operations of all cores, updated after this call.
    pub fn holdings(&self) -> (usize, usize) {
        for counts in self.counts.iter() {
            let before = counts.looks.load(Ordering::Acquire);
            until("a core is awake", || counts.looks.load(Ordering::Acquire) > before + 1);
        }
        let sum = |of: fn(&Counts) -> &AtomicUsize| {
            self.counts.iter().map(|counts| of(counts).load(Ordering::Acquire)).sum()
        };
        (sum(|counts| &counts.tasks), sum(|counts| &counts.operations))
    }

    /// Blocks a core until the value is dropped. The core is already blocked when this returns.
    pub fn hold(&self, core: usize) -> impl Drop + use<> {
        struct Held(Arc<[Counts; 2]>, usize);
        impl Drop for Held {
            fn drop(&mut self) {
                self.0[self.1].hold.store(false, Ordering::Release);
            }
        }
        let counts = &self.counts[core];
        counts.hold.store(true, Ordering::Release);
        let before = counts.looks.load(Ordering::Acquire);
        until("the core holds", || counts.looks.load(Ordering::Acquire) > before);
        Held(self.counts.clone(), core)
    }

    pub fn socket(&self, disk: usize) -> PathBuf {
        self.dir.path(&format!("{disk}.sock"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let ended = self.cores.take().expect("it runs").join();
        assert!(ended.is_ok() || std::thread::panicking(), "a core has panicked");
    }
}

async fn serve(
    core: &Core,
    disks: &[(String, PathBuf)],
    told: impl FnOnce(Vec<Vec<Arc<QueueStats>>>),
    ends: &AtomicBool,
    counts: &Counts,
) {
    let mut serving = Vec::new();
    for (nth, (uri, socket)) in disks.iter().enumerate() {
        let device = Bdev::open(core, uri).await.unwrap_or_else(|error| panic!("{uri}: {error}"));
        let listener = UnixListener::bind(core, socket).unwrap();
        let (name, serial) = (format!("disk{nth}"), format!("serial{nth}"));
        let options =
            TargetOptions { name, serial, queues: 4, first_core: nth, on_error: OnError::Report };
        let target = Target::new(core, device, options);
        let task = {
            let target: Rc<Target> = target.clone();
            core.spawn(Class::Control, async move { target.serve(listener).await })
        };
        serving.push((target, task));
    }
    told(serving.iter().map(|(target, _)| target.stats().to_vec()).collect());
    while !ends.load(Ordering::Acquire) {
        core.sleep_ns(1_000_000).await;
        counts.look(core);
    }
    for (target, task) in serving {
        target.stop();
        task.await;
    }
}

/// Waits until a condition holds.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes of a recognizable pattern.
pub fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..bytes).map(|_| next()).collect()
}

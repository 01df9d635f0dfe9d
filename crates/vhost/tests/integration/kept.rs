//! A launcher keeps a front end's connection while the target behind it dies, at every message: see
//! `vhost::kept`.
//!
//! A target dies here by `stop_now`: its rings pop, complete and record nothing more from one
//! moment to the next, and the launcher hears nothing of it any more.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crate::common::{PATIENCE, Scratch, pattern, until};
use bdev::{Bdev, ErrorKind};
use frontend::{Disk, DiskOptions, Queue, Request, Status};
use reactor::{
    Class, Core, JoinHandle, RuntimeConfig, UnixListener, UnixPackets, UnixSocket, processors,
};
use vhost::handover::DiskState;
use vhost::kept::{FromNode, Keeper, PACKET_BYTES_MAX};
use vhost::{Door, OnError, Target, TargetOptions};

/// A target delays its requests, so that some are in flight at any time.
const DEVICE: &str = "delay:all=0us..1ms|mem:4M";

/// When the target dies, relative to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    /// A part of the message has arrived.
    Part,
    /// It has not seen the message.
    Before,
    /// It has done what the message says, and has not committed.
    Done,
    /// It has committed, and the reply is not sent.
    Committed,
    /// The reply is sent.
    Replied,
}

const POINTS: [Point; 5] =
    [Point::Part, Point::Before, Point::Done, Point::Committed, Point::Replied];

/// When targets die in a run.
#[derive(Clone, Copy)]
struct Plan {
    point: Point,
    /// At this message,
    fatal: usize,
    /// and then at every so many.
    every: usize,
    /// The guest of the next target has come from another node, where it has switched the write
    /// cache off.
    came: bool,
}

/// What a run counts.
#[derive(Default)]
struct Counts {
    serves: AtomicUsize,
    messages: AtomicUsize,
    deaths: AtomicUsize,
    again: AtomicU64,
    /// Calls of the last target.
    calls: AtomicU64,
    /// Whether the last target knows that a flush has failed.
    flush_failed: AtomicBool,
    /// Whether the write cache is on in the session of the last message.
    write_cache: AtomicBool,
}

/// A target with one connection.
struct Life {
    target: Rc<Target>,
    serving: JoinHandle<()>,
    packets: UnixPackets,
    _door: OwnedFd,
}

impl Life {
    fn begin(core: &Core, device: &Bdev, keeper: &Keeper, came: bool) -> Life {
        let options = TargetOptions {
            name: "a".into(),
            serial: "a".into(),
            queues: 2,
            first_core: 0,
            on_error: OnError::Report,
        };
        let target = Target::new(core, device.clone(), options);
        if came {
            target.admit(true);
        }
        let (door, theirs) = UnixPackets::pair().unwrap();
        let (ours, connection) = UnixPackets::pair().unwrap();
        let packets = UnixPackets::from_fd(core, ours).unwrap();
        for (bytes, descriptors) in keeper.opening() {
            packets.try_send(&bytes, &descriptors).unwrap();
        }
        let door = UnixPackets::from_fd(core, door).unwrap();
        door.try_send(&[0], &[connection.as_fd()]).unwrap();
        let serves = target.clone();
        let theirs = Door::from_fd(core, theirs).unwrap();
        let serving = core.spawn(Class::Control, async move { serves.serve(theirs).await });
        let door = door.as_fd().try_clone_to_owned().unwrap();
        Life { target, serving, packets, _door: door }
    }

    /// Returns how many requests it had begun that an earlier one had begun, too.
    async fn die(self) -> u64 {
        let Life { target, serving, packets, .. } = self;
        drop(packets);
        target.stop_now();
        serving.await;
        target.settled().await;
        target.stats().iter().map(|ring| ring.resubmitted.get()).sum()
    }

    /// The commit of the open message, before it is taken.
    async fn commit(&self, keeper: &mut Keeper) -> (Vec<u8>, Vec<OwnedFd>) {
        loop {
            let (bytes, descriptors) = self.packets.recv(PACKET_BYTES_MAX).await.unwrap();
            match FromNode::decode(&bytes) {
                Some(FromNode::Commit { .. }) => return (bytes, descriptors),
                Some(FromNode::State(_)) => drop(keeper.take(&bytes, descriptors).unwrap()),
                other => panic!("the target sends {other:?}"),
            }
        }
    }
}

/// Opens an image whose last owner may still be closing it.
async fn open_again(core: &Core, uri: &str) -> Bdev {
    let until_ns = core.now_ns() + PATIENCE.as_nanos() as u64;
    loop {
        match Bdev::open(core, uri).await {
            Err(error) if error.kind() == ErrorKind::Busy && core.now_ns() < until_ns => {
                core.sleep_ns(1_000_000).await;
            }
            opened => return opened.unwrap(),
        }
    }
}

/// Plays the launcher.
async fn keep(core: Core, socket: PathBuf, plan: Plan, uri: String, counts: Arc<Counts>) {
    let Plan { point, fatal, every, came } = plan;
    let mut device = Bdev::open(&core, &uri).await.unwrap();
    let listener = UnixListener::bind(&core, &socket).unwrap();
    counts.serves.store(1, Ordering::Release);
    let socket: UnixSocket = listener.accept().await.unwrap();
    let mut keeper = Keeper::new(7);
    let mut life = Life::begin(&core, &device, &keeper, false);
    let mut nth = 0;
    let mut bytes = Vec::new();
    macro_rules! dies {
        ($at:expr) => {
            if point == $at && nth >= fatal && (nth - fatal).is_multiple_of(every) {
                counts.again.fetch_add(life.die().await, Ordering::AcqRel);
                // Another program of the launcher, too.
                let (state, own) = keeper.export();
                let own = own.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
                keeper = Keeper::import(state, own).unwrap();
                if uri.starts_with("file:") {
                    drop(device);
                    device = open_again(&core, &uri).await;
                }
                life = Life::begin(&core, &device, &keeper, came);
                counts.deaths.fetch_add(1, Ordering::AcqRel);
            }
        };
    }
    loop {
        let mut pieces = 0;
        while let Some(wanted) = keeper.wanted() {
            bytes.clear();
            let (count, descriptors) = socket.recv(&mut bytes, wanted.min(5)).await.unwrap();
            if count == 0 {
                life.packets.end();
                let (bytes, _) = life.packets.recv(PACKET_BYTES_MAX).await.unwrap();
                if matches!(FromNode::decode(&bytes), Some(FromNode::State(_))) {
                    let (bytes, _) = life.packets.recv(PACKET_BYTES_MAX).await.unwrap();
                    assert_eq!(FromNode::decode(&bytes), Some(FromNode::Close));
                }
                let calls = life.target.stats().iter().map(|ring| ring.signals.get()).sum();
                counts.calls.store(calls, Ordering::Release);
                counts.flush_failed.store(device.flush_failed(), Ordering::Release);
                counts.again.fetch_add(life.die().await, Ordering::AcqRel);
                counts.messages.store(nth, Ordering::Release);
                return;
            }
            keeper.push(&bytes, descriptors).unwrap();
            pieces += 1;
            if pieces == 1 {
                dies!(Point::Part);
            }
        }
        dies!(Point::Before);
        let (message, descriptors) = keeper.message().unwrap();
        life.packets.try_send(&message, &descriptors).unwrap();
        drop(descriptors);
        if uri.starts_with("file:") && nth == fatal {
            // As if the device had failed one.
            device.set_flush_failed();
        }
        let mut commit = life.commit(&mut keeper).await;
        if point == Point::Done && nth >= fatal && (nth - fatal).is_multiple_of(every) {
            dies!(Point::Done);
            let (message, descriptors) = keeper.message().unwrap();
            life.packets.try_send(&message, &descriptors).unwrap();
            drop(descriptors);
            commit = life.commit(&mut keeper).await;
        }
        if let Some(FromNode::Commit { snapshot, .. }) = FromNode::decode(&commit.0) {
            let connection = DiskState::decode(&snapshot.document).unwrap().connection.unwrap();
            counts.write_cache.store(connection.session.write_cache, Ordering::Release);
        }
        keeper.take(&commit.0, commit.1).unwrap();
        dies!(Point::Committed);
        while let Some((bytes, descriptor)) = keeper.reply() {
            let sent = socket.try_send(bytes, descriptor.as_slice()).unwrap();
            keeper.sent(sent);
        }
        dies!(Point::Replied);
        nth += 1;
    }
}

/// Writes in flight while the rings are stopped and started.
fn begin(queue: &mut Queue, round: u64) {
    while let Some(slot) = queue.take() {
        let offset = slot.index() as u64 * 4096;
        queue.write_data(slot, 0, &pattern(offset + round, 4096));
        queue.submit(slot, Request::Write { offset, len: 4096 });
    }
    queue.publish();
}

/// Waits for them: each is answered once.
fn finish(queue: &mut Queue, first: u64, round: u64) {
    let (mut done, mut slots) = (Vec::new(), 0);
    while queue.in_flight() > 0 {
        assert!(queue.wait(PATIENCE), "a request is lost");
        done.clear();
        queue.poll(&mut done).unwrap();
        for completion in &done {
            assert_eq!(completion.status, Status::Ok);
            queue.give_back(completion.slot);
            slots += 1;
        }
    }
    assert_eq!(slots, queue.depth());
    for block in 0..slots as u64 {
        let mut bytes = vec![0; 4096];
        assert_eq!(queue.read(first + block * 4096, &mut bytes).unwrap(), Status::Ok);
        assert!(bytes == pattern(block * 4096 + round, 4096), "block {block}");
    }
}

/// A front end's life: it connects, works, is paused, continues, is reset, works.
fn live(options: DiskOptions, socket: &std::path::Path) {
    let mut disk = Disk::connect(socket, options).unwrap();
    for reset in 0..2 {
        let mut queue = disk.take_queue(0);
        for round in 0..2 {
            begin(&mut queue, round + 2 * reset);
            disk.stop().unwrap();
            let in_flight = queue.in_flight();
            disk.start().unwrap();
            assert!(in_flight <= queue.depth());
            finish(&mut queue, 0, round + 2 * reset);
        }
        if reset == 0 {
            disk.reset(vec![queue]).unwrap();
        }
    }
}

fn run(point: Point, options: &DiskOptions, fatal: usize, every: usize) -> Arc<Counts> {
    let options = options.clone();
    let device = DEVICE.to_owned();
    let plan = Plan { point, fatal, every, came: false };
    run_with(plan, device, move |socket| live(options, socket))
}

/// The same with a front end that does something else.
fn run_with(plan: Plan, device: String, live: impl FnOnce(&std::path::Path)) -> Arc<Counts> {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let dir = Scratch::new(&format!("kept-{}", RUNS.fetch_add(1, Ordering::Relaxed)));
    let socket = dir.path("a.sock");
    let config = RuntimeConfig {
        processors: processors().into_iter().take(1).collect(),
        memory: 64 << 20,
        ..RuntimeConfig::default()
    };
    let counts = Arc::<Counts>::default();
    let (there, counted) = (socket.clone(), counts.clone());
    let core = std::thread::spawn(move || {
        let main =
            move |core: Core| keep(core, there.clone(), plan, device.clone(), counted.clone());
        reactor::run(&config, main).unwrap();
    });
    until("it serves", || counts.serves.load(Ordering::Acquire) == 1);
    live(&socket);
    core.join().expect("the core has panicked");
    counts
}

fn options(packed: bool) -> DiskOptions {
    DiskOptions { queues: 2, depth: 24, packed, ..DiskOptions::default() }
}

#[test]
fn a_target_may_die_at_any_message() {
    for packed in [false, true] {
        let messages =
            run(Point::Before, &options(packed), usize::MAX, 1).messages.load(Ordering::Acquire);
        assert!(messages > 50, "{messages} messages");
        let mut again = 0;
        for (nth, point) in POINTS.into_iter().enumerate() {
            // A third of them; `MILLRACE_ALL_KILLS=1` asks for all.
            let all = std::env::var_os("MILLRACE_ALL_KILLS").is_some();
            for fatal in (nth % 3..messages).step_by(if all { 1 } else { 3 }) {
                let counts = run(point, &options(packed), fatal, usize::MAX);
                assert_eq!(counts.deaths.load(Ordering::Acquire), 1, "{point:?} {fatal}");
                again += counts.again.load(Ordering::Acquire);
            }
        }
        // The sanitizer's messages take longer than its requests.
        let enough = again > 10 || cfg!(tsan);
        assert!(enough, "packed={packed}: {again} requests were in flight at all deaths");
    }
}

#[test]
fn a_target_may_die_at_every_message() {
    for packed in [false, true] {
        for point in POINTS {
            let counts = run(point, &options(packed), 0, 1);
            let messages = counts.messages.load(Ordering::Acquire);
            assert!(counts.deaths.load(Ordering::Acquire) >= messages, "{point:?}");
        }
    }
}

/// The one that has died may have completed requests and called nobody.
#[test]
fn the_next_target_calls_the_guest_although_nothing_is_left_to_do() {
    for packed in [false, true] {
        let connects = |socket: &std::path::Path| {
            drop(Disk::connect(socket, options(packed)).unwrap());
        };
        let plan = |fatal| Plan { point: Point::Replied, fatal, every: 1, came: false };
        let alive = run_with(plan(usize::MAX), DEVICE.to_owned(), connects);
        let last = alive.messages.load(Ordering::Acquire) - 1;
        let counts = run_with(plan(last), DEVICE.to_owned(), connects);
        assert_eq!(counts.deaths.load(Ordering::Acquire), 1);
        assert_eq!(counts.calls.load(Ordering::Acquire), 2, "one of each ring");
    }
}

/// The URI of a new image.
fn image(dir: &Scratch) -> String {
    let image = dir.path("a.img");
    std::fs::File::create(&image).unwrap().set_len(4 << 20).unwrap();
    format!("file:{}", image.display())
}

/// It opens the file anew, and the system reports a failed flush only once.
#[test]
fn the_next_target_knows_that_a_flush_has_failed() {
    let dir = Scratch::new("kept-flush");
    let device = image(&dir);
    let connects = |socket: &std::path::Path| {
        drop(Disk::connect(socket, options(false)).unwrap());
    };
    for fatal in [3, usize::MAX] {
        let plan = Plan { point: Point::Replied, fatal, every: usize::MAX, came: false };
        let counts = run_with(plan, device.clone(), connects);
        assert_eq!(counts.flush_failed.load(Ordering::Acquire), fatal == 3);
    }
}

/// The one that has died knew it, and had not told its session.
#[test]
fn the_next_target_knows_that_a_guest_that_came_has_no_write_cache() {
    let dir = Scratch::new("kept-came");
    let device = image(&dir);
    for came in [false, true] {
        let connects = |socket: &std::path::Path| {
            drop(Disk::connect(socket, options(false)).unwrap());
        };
        let plan = Plan { point: Point::Replied, fatal: 3, every: usize::MAX, came };
        let counts = run_with(plan, device.clone(), connects);
        assert_eq!(counts.deaths.load(Ordering::Acquire), 1);
        assert_eq!(counts.write_cache.load(Ordering::Acquire), !came);
    }
}

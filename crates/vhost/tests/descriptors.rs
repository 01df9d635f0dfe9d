//! What a front end can cause with its descriptors: nothing, except to itself. A failed start
//! leaves nothing behind; counters that are full or never empty stop no core; a descriptor that is
//! not a counter is refused. With `MILLRACE_LONG` the start fails fifty times as often.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

mod common;

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use common::{Node, Scratch, until};
use frontend::message::request;
use frontend::{Disk, DiskOptions, Event, Queue, Request, Session, SplitRing, Status};
use reactor::DriverKind;

const SPARE: u64 = 0x1_0000;
const SIZE: u16 = 16;

fn options() -> DiskOptions {
    DiskOptions { queues: 2, inflight: false, spare_bytes: SPARE, ..DiskOptions::default() }
}

/// Runs the test on each driver, without those that the machine lacks.
fn on_both_drivers(name: &str, play: impl Fn(&Node)) {
    for driver in [DriverKind::Auto, DriverKind::Epoll] {
        let node =
            Node::on(driver, Scratch::new(&format!("{name}-{driver:?}")), &["mem:16M", "mem:16M"]);
        play(&node);
    }
}

fn exercise(queue: &mut Queue) {
    let mut bytes = [0; 4096];
    assert_eq!(queue.write(8192, &[5; 4096]).unwrap(), Status::Ok);
    assert_eq!(queue.read(8192, &mut bytes).unwrap(), Status::Ok);
    assert_eq!(bytes, [5; 4096]);
}

/// The second ring of a disk, set up by hand.
struct ByHand {
    disk: Disk,
    ring: SplitRing,
    kick: Event,
    call: Event,
}

impl ByHand {
    fn new(node: &Node) -> ByHand {
        let disk = Disk::connect(&node.socket(0), options()).unwrap();
        disk.session().get_vring_base(1).unwrap();
        let ring = SplitRing::new(disk.memory(), 0, SIZE);
        ByHand { disk, ring, kick: Event::new().unwrap(), call: Event::new().unwrap() }
    }

    fn session(&self) -> &Session {
        self.disk.session()
    }

    /// Starts the ring, with its used part misplaced by this many bytes.
    fn start(&self, off: u64) {
        let session = self.session();
        let mut addresses = self.ring.addresses();
        addresses[2] += off;
        session.set_vring_num(1, SIZE).unwrap();
        session.set_vring_base(1, 0).unwrap();
        session.set_vring_addr(1, self.disk.memory(), addresses, false).unwrap();
        session.set_vring_call(1, Some(&self.call)).unwrap();
        session.set_vring_kick(1, Some(&self.kick)).unwrap();
        session.set_vring_enable(1, true).unwrap();
    }
}

/// Earlier, 2,000 failed starts left as many tasks and operations on the core, and twice as many
/// descriptors.
#[test]
fn a_start_that_fails_leaves_nothing_behind() {
    let times = if std::env::var_os("MILLRACE_LONG").is_some() { 100_000 } else { 2_000 };
    on_both_drivers("starts", |node| {
        let mut other = Disk::connect(&node.socket(1), options()).unwrap();
        let mut neighbour = other.take_queue(0);
        let hostile = ByHand::new(node);
        let fail = || {
            hostile.start(1);
            hostile.session().get_vring_base(1).unwrap();
        };
        (0..100).for_each(|_| fail());
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = (descriptors(), node.holdings());
        for nth in 0..times {
            fail();
            if nth % 1000 == 0 {
                exercise(&mut neighbour);
            }
        }
        exercise(&mut neighbour);
        until("everything is given back", || {
            let now = (descriptors(), node.holdings());
            eprintln!("before {before:?}, after {times} failed starts {now:?}");
            now.0 <= before.0 && now.1.0 <= before.1.0 && now.1.1 <= before.1.1
        });
        // A valid start still works.
        hostile.start(0);
        hostile.session().get_vring_base(1).unwrap();
    });
}

fn counter(flags: i32, count: u64) -> OwnedFd {
    // SAFETY: the call takes no pointers and returns a new descriptor that nothing else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, flags)) };
    // SAFETY: a pointer to eight live bytes, and their number.
    unsafe { libc::write(fd.as_raw_fd(), (&raw const count).cast(), 8) };
    fd
}

fn give(session: &Session, what: u32, ring: u64, fd: &OwnedFd) -> frontend::Result<()> {
    session.tell(what, &ring.to_ne_bytes(), &[fd.as_fd()])
}

/// Earlier, the core blocked in the write of the interrupt, and with it every disk.
#[test]
fn a_full_blocking_counter_stops_no_core() {
    on_both_drivers("full", |node| {
        let mut other = Disk::connect(&node.socket(1), options()).unwrap();
        let mut neighbours = [0, 1].map(|nth| other.take_queue(nth));
        let mut disk = Disk::connect(&node.socket(0), options()).unwrap();
        for nth in 0..2 {
            let mut queue = disk.take_queue(nth);
            let full = counter(0, u64::MAX - 1);
            give(disk.session(), request::SET_VRING_CALL, nth.into(), &full).unwrap();
            give(disk.session(), request::SET_VRING_ERR, nth.into(), &full).unwrap();
            disk.session().get_features().unwrap();
            // The front end owns the flag: clear it after the target has set it.
            // SAFETY: the call takes no pointers.
            assert_eq!(unsafe { libc::fcntl(full.as_raw_fd(), libc::F_SETFL, 0) }, 0);
            let mut done = Vec::new();
            for _ in 0..10 {
                let slot = queue.take().unwrap();
                queue.submit(slot, Request::Read { offset: 0, len: 4096 });
                queue.publish();
                until("the request is done", || queue.poll(&mut done).unwrap() > 0);
                done.drain(..).for_each(|done| queue.give_back(done.slot));
            }
        }
        neighbours.iter_mut().for_each(exercise);
        node.holdings();
    });
}

#[test]
fn a_permanent_kick_breaks_its_ring_and_occupies_no_core() {
    on_both_drivers("storm", |node| {
        let hostile = ByHand::new(node);
        hostile.start(0);
        let storm = counter(libc::EFD_SEMAPHORE, u64::MAX - 1);
        give(hostile.session(), request::SET_VRING_KICK, 1, &storm).unwrap();
        let stats = &node.stats[0][1];
        until("the ring is broken", || stats.broken.get() == 1);
        let kicks = stats.kicks.get();
        node.holdings();
        assert_eq!(stats.kicks.get(), kicks, "the kicks are still heard");
        hostile.session().get_vring_base(1).unwrap();
        hostile.start(0);
        hostile.session().get_vring_base(1).unwrap();
        let mut other = Disk::connect(&node.socket(1), options()).unwrap();
        exercise(&mut other.take_queue(0));
    });
}

/// Descriptors of kinds that a core must not access: some block forever when they are read,
/// inspected or closed.
fn others() -> Vec<OwnedFd> {
    let mut pipe = [0; 2];
    // SAFETY: room for two descriptors, which nothing else owns.
    let pipe = unsafe {
        assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
        pipe.map(|fd: i32| OwnedFd::from_raw_fd(fd))
    };
    let file = std::fs::File::open("/dev/null").unwrap().into();
    let proc = std::fs::File::open("/proc/self/maps").unwrap().into();
    pipe.into_iter().chain([file, proc]).collect()
}

#[test]
fn only_counters_are_kicks_and_calls() {
    on_both_drivers("kinds", |node| {
        let mut other = Disk::connect(&node.socket(1), options()).unwrap();
        let mut neighbour = other.take_queue(0);
        let memory = Disk::connect(&node.socket(0), options()).unwrap();
        let region = memory.memory().regions()[0].as_fd().try_clone_to_owned().unwrap();
        drop(memory);
        let before = node.holdings();
        for fd in others().into_iter().chain([region]) {
            for what in [request::SET_VRING_KICK, request::SET_VRING_CALL, request::SET_VRING_ERR] {
                let disk = Disk::connect(&node.socket(0), options()).unwrap();
                let refused =
                    give(disk.session(), what, 1, &fd).and_then(|()| disk.session().get_features());
                assert!(refused.is_err(), "{what} with {fd:?}");
                exercise(&mut neighbour);
            }
        }
        // The disk continues with the next front end.
        let mut disk = Disk::connect(&node.socket(0), options()).unwrap();
        exercise(&mut disk.take_queue(0));
        drop(disk);
        until("nothing is left", || {
            let now = node.holdings();
            now.0 <= before.0 && now.1 <= before.1
        });
    });
}

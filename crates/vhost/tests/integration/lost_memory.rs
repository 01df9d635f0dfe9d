//! A front end that withdraws its memory: it truncates the file while the node has it mapped. The
//! resulting signal would end the process, and with it every other guest's disk.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use crate::common::{Node, PATIENCE, Scratch, pattern, until};
use frontend::message::{feature, request};
use frontend::{
    Disk, DiskOptions, Event, Memory, Pages, Region, Request, Session, SplitRing, Status,
};
use reactor::DriverKind;

const MIB: u64 = 1 << 20;

fn cut(file: BorrowedFd<'_>, len: u64) {
    // SAFETY: the call takes no pointers.
    assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), len as i64) }, 0);
}

fn options(packed: bool) -> DiskOptions {
    DiskOptions { queues: 2, packed, ..DiskOptions::default() }
}

/// A guest on disk 1 that reads what it writes.
fn neighbour_continues(node: &Node) {
    let mut disk = Disk::connect(&node.socket(1), options(false)).unwrap();
    let (mut queue, bytes) = (disk.take_queue(1), pattern(7, 16384));
    assert_eq!(queue.write(MIB, &bytes).unwrap(), Status::Ok);
    let mut read = vec![0; bytes.len()];
    assert_eq!(queue.read(MIB, &mut read).unwrap(), Status::Ok);
    assert!(read == bytes);
}

/// Both rings of a disk have reported that they are broken. They can still be stopped, and the next
/// guest gets its disk.
fn has_ended_well(node: &Node, disk: Disk, packed: bool, rings: std::ops::Range<u16>) {
    for ring in rings {
        until("the ring says that it is broken", || disk.take_queue_error(ring));
    }
    for ring in 0..2 {
        disk.session().get_vring_base(ring).unwrap();
    }
    neighbour_continues(node);
    drop(disk);
    let mut disk = Disk::connect(&node.socket(0), options(packed)).unwrap();
    let (mut queue, mut bytes) = (disk.take_queue(0), vec![0; 4096]);
    assert_eq!(queue.write(0, &pattern(1, 4096)).unwrap(), Status::Ok);
    assert_eq!(queue.read(0, &mut bytes).unwrap(), Status::Ok);
    assert!(bytes == pattern(1, 4096));
}

#[test]
#[cfg_attr(tsan, ignore = "the fault comes inside the sanitizer, under a lock of its own")]
fn memory_lost_while_rings_are_idle_breaks_only_these_rings() {
    let node = Node::start(Scratch::new("rest"), &["mem:16M", "mem:16M"]);
    for packed in [false, true] {
        for left in [0, 4096] {
            let mut disk = Disk::connect(&node.socket(0), options(packed)).unwrap();
            let queue = disk.take_queue(0);
            // From here on any access to this guest's memory in the test's own mapping would end
            // the test.
            cut(disk.memory().regions()[0].as_fd(), left);
            queue.kick().signal();
            // The first ring may lie in the remaining memory and look idle; the core wakes for
            // both.
            has_ended_well(&node, disk, packed, 0..u16::from(left == 0));
        }
    }
}

#[test]
#[cfg_attr(tsan, ignore = "the fault comes inside the sanitizer, under a lock of its own")]
fn memory_lost_under_load_breaks_only_these_rings() {
    for (name, driver) in [("uring", DriverKind::Auto), ("epoll", DriverKind::Epoll)] {
        for (nth, device) in [
            "mem:16M",
            "delay:all=1ms..5ms|mem:16M",
            "FILE",
            "FILE?engine=aio",
            "FILE?engine=mmap",
            "FILE?engine=sync",
            "delay:all=1ms..5ms|FILE",
        ]
        .into_iter()
        .enumerate()
        {
            let dir = Scratch::new(&format!("load-{name}-{nth}"));
            let file = dir.file("a.img", 16 * MIB);
            let node = Node::on(driver, dir, &[&device.replace("FILE", &file), "mem:16M"]);
            for (round, packed) in [false, true, false, true].into_iter().enumerate() {
                let mut disk = Disk::connect(&node.socket(0), options(packed)).unwrap();
                let mut queue = disk.take_queue(0);
                let mut nth = 0;
                while let Some(slot) = queue.take() {
                    nth += 1;
                    let offset = nth * 4096;
                    let read = Request::Read { offset, len: 4096 };
                    let write = Request::Write { offset, len: 4096 };
                    queue.submit(slot, if nth % 2 == 0 { read } else { write });
                }
                queue.publish();
                if round >= 2 {
                    std::thread::yield_now();
                }
                cut(disk.memory().regions()[0].as_fd(), 0);
                queue.kick().signal();
                has_ended_well(&node, disk, packed, 0..1);
            }
        }
    }
}

/// A guest whose ring and data are in separate files.
struct TwoFiles {
    session: Session,
    memory: Arc<Memory>,
    ring: SplitRing,
    kick: Event,
    err: Event,
}

impl TwoFiles {
    fn connect(node: &Node) -> TwoFiles {
        let mut session = Session::connect(&node.socket(0)).unwrap();
        let region = |at| Region::new(at, MIB, Pages::Small).unwrap();
        let memory = Arc::new(Memory::with_regions(vec![region(0), region(MIB)]));
        let ring = SplitRing::new(&memory, 0, 16);
        let (kick, err) = (Event::new().unwrap(), Event::new().unwrap());
        let offered = session.get_features().unwrap();
        let wanted =
            feature::VERSION_1 | feature::PROTOCOL_FEATURES | feature::FLUSH | feature::LOG_ALL;
        let protocol = session.get_protocol_features().unwrap();
        session.set_protocol_features(protocol).unwrap();
        session.set_owner().unwrap();
        session.set_features(offered & wanted & !feature::LOG_ALL).unwrap();
        session.set_mem_table(&memory).unwrap();
        TwoFiles { session, memory, ring, kick, err }
    }

    fn start(&self) {
        self.session.set_vring_num(0, 16).unwrap();
        self.session.set_vring_base(0, 0).unwrap();
        self.session.set_vring_addr(0, &self.memory, self.ring.addresses(), false).unwrap();
        self.session.set_vring_err(0, Some(&self.err)).unwrap();
        self.session.set_vring_kick(0, Some(&self.kick)).unwrap();
        self.session.set_vring_enable(0, true).unwrap();
    }

    /// Offers a request with its data in the second file.
    fn offer(&self, kind: u64) {
        use frontend::Desc;
        use frontend::message::desc::{NEXT, WRITE};
        let data = if kind == 0 { WRITE } else { 0 };
        let part = |addr, len, flags, next| Desc { addr, len, flags, next };
        self.memory.write(0x8000, &[kind.to_le_bytes(), [0; 8]].concat());
        self.memory.write(0x8100, &[0xee]);
        self.ring.set_desc(0, part(0x8000, 16, NEXT, 1));
        self.ring.set_desc(1, part(MIB + 0x8000, 4096, data | NEXT, 2));
        self.ring.set_desc(2, part(0x8100, 1, WRITE, 0));
        let index = self.ring.avail_index();
        self.ring.set_avail(index, 0);
        self.ring.publish(index.wrapping_add(1));
        self.kick.signal();
    }

    fn status(&self) -> u8 {
        let mut status = [0];
        self.memory.read(0x8100, &mut status);
        status[0]
    }
}

/// If the kernel moves the data, it reports an error and the ring continues. If the core copies it,
/// nothing that was read can be trusted.
#[test]
#[cfg_attr(tsan, ignore = "the fault comes inside the sanitizer, under a lock of its own")]
fn lost_data_fails_its_requests_or_breaks_the_ring() {
    for (name, device, broken) in [("mem", "mem:16M", true), ("file", "FILE?direct=off", false)] {
        for kind in [0, 1] {
            let dir = Scratch::new(&format!("data-{name}-{kind}"));
            let file = dir.file("a.img", 16 * MIB);
            let node = Node::start(dir, &[&device.replace("FILE", &file), "mem:16M"]);
            let guest = TwoFiles::connect(&node);
            guest.start();
            cut(guest.memory.regions()[1].as_fd(), 0);
            guest.offer(kind);
            if broken {
                assert!(guest.err.wait(PATIENCE) > 0);
                assert_eq!((guest.ring.used_index(), guest.status()), (0, 0xee));
                // Only new memory repairs the ring.
                guest.session.get_vring_base(0).unwrap();
                guest.start();
                assert!(guest.err.wait(PATIENCE) > 0, "the same memory is as lost as before");
                guest.session.get_vring_base(0).unwrap();
                cut(guest.memory.regions()[1].as_fd(), MIB);
                guest.ring.clear();
                guest.session.set_mem_table(&guest.memory).unwrap();
                guest.start();
                guest.offer(kind);
            } else {
                until("an answer", || guest.ring.used_index() == 1);
                assert_eq!(guest.status(), 1, "an I/O error");
                cut(guest.memory.regions()[1].as_fd(), MIB);
                guest.offer(kind);
            }
            let used = if broken { 1 } else { 2 };
            until("an answer", || guest.ring.used_index() == used);
            assert_eq!(guest.status(), 0);
            assert_eq!(guest.err.take(), 0);
            neighbour_continues(&node);
        }
    }
}

/// A file of the front end, without seals.
fn memfd(len: u64) -> OwnedFd {
    // SAFETY: the name is a C string; the descriptor is new and nothing else owns it.
    let file =
        unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"own".as_ptr(), libc::MFD_CLOEXEC)) };
    cut(file.as_fd(), len);
    file
}

#[test]
#[cfg_attr(tsan, ignore = "the fault comes inside the sanitizer, under a lock of its own")]
fn a_lost_in_flight_region_or_dirty_log_breaks_the_ring() {
    let node = Node::start(Scratch::new("regions"), &["mem:16M", "mem:16M"]);
    for log in [false, true] {
        let guest = TwoFiles::connect(&node);
        let file = memfd(8192);
        if log {
            let body = [8192_u64.to_le_bytes(), [0; 8]].concat();
            guest.session.ask(request::SET_LOG_BASE, &body, &[file.as_fd()]).unwrap();
            let offered = guest.session.get_features().unwrap();
            let wanted = feature::VERSION_1 | feature::PROTOCOL_FEATURES | feature::FLUSH;
            guest.session.set_features(offered & (wanted | feature::LOG_ALL)).unwrap();
        } else {
            let mut body = [8192_u64.to_le_bytes(), [0; 8]].concat();
            body.extend([1_u16.to_le_bytes(), 16_u16.to_le_bytes()].concat());
            guest.session.tell(request::SET_INFLIGHT_FD, &body, &[file.as_fd()]).unwrap();
        }
        guest.start();
        guest.offer(0);
        until("an answer", || guest.ring.used_index() == 1);
        assert_eq!(guest.status(), 0);
        cut(file.as_fd(), 0);
        guest.offer(0);
        assert!(guest.err.wait(PATIENCE) > 0, "log: {log}");
        guest.session.get_vring_base(0).unwrap();
        neighbour_continues(&node);
    }
}

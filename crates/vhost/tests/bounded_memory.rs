//! A sparse file costs a front end nothing, but its mapping takes addresses of the node, and each
//! region takes a descriptor.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

mod common;

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use common::{Node, PATIENCE, Scratch, pattern, until};
use frontend::message::request;
use frontend::{Disk, DiskOptions, Request, Session, Status};

const TIB: u64 = 1 << 40;

fn sparse(len: u64) -> OwnedFd {
    // SAFETY: the name is a C string; the descriptor is new and nothing else owns it.
    let file =
        unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"own".as_ptr(), libc::MFD_CLOEXEC)) };
    // SAFETY: the call takes no pointers.
    assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), len as i64) }, 0);
    file
}

/// A front end that adds regions of a sparse file, each `step` bytes after the last.
struct Greedy {
    session: Session,
    file: OwnedFd,
    next: u64,
}

impl Greedy {
    fn connect(node: &Node, disk: usize) -> Greedy {
        let mut session = Session::connect(&node.socket(disk)).unwrap();
        let protocol = session.get_protocol_features().unwrap();
        session.set_protocol_features(protocol).unwrap();
        session.set_owner().unwrap();
        Greedy { session, file: sparse(120 * TIB), next: 0 }
    }

    fn message(at: u64, len: u64) -> Vec<u8> {
        [at, len, at, at].iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    /// Returns false if it was refused; the connection stays open.
    fn add(&mut self, len: u64) -> bool {
        let body = [vec![0; 8], Greedy::message(self.next, len)].concat();
        let added = self.session.tell(request::ADD_MEM_REG, &body, &[self.file.as_fd()]).is_ok();
        self.next += if added { len } else { 0 };
        self.session.get_features().unwrap();
        added
    }

    /// Adds as much as it can, in steps that are halved down to a GiB. Returns TiB.
    fn fill(&mut self) -> u64 {
        let mut step = 32 * TIB;
        while step >= 1 << 30 {
            if !self.add(step) {
                step /= 2;
            }
        }
        self.next / TIB
    }
}

fn honest(node: &Node, nth: usize) {
    let mut disk = Disk::connect(&node.socket(nth), DiskOptions::default()).unwrap();
    let (mut queue, bytes) = (disk.take_queue(0), pattern(7, 16384));
    assert_eq!(queue.write(0, &bytes).unwrap(), Status::Ok);
    let mut read = vec![0; bytes.len()];
    assert_eq!(queue.read(0, &mut read).unwrap(), Status::Ok);
    assert!(read == bytes);
}

/// One test, because the limits belong to the process.
#[test]
#[cfg_attr(tsan, ignore = "the sanitizer takes most of the addresses")]
fn front_ends_get_a_share_of_the_addresses() {
    let uris = ["null:1G", "null:1G", "null:1G", "delay:all=1s|mem:64M", "mem:64M"];
    let node = Node::start(Scratch::new("bounded"), &uris);
    let mut greedy: Vec<_> = (0..3).map(|nth| Greedy::connect(&node, nth)).collect();
    let taken: Vec<_> = greedy.iter_mut().map(Greedy::fill).collect();
    // A quarter of what the others leave of 64 TiB.
    assert_eq!(taken, [16, 12, 9]);
    honest(&node, 4);

    // A refused table leaves the old one in force.
    let first = Greedy::message(0, 30 * TIB);
    let body = [vec![1, 0, 0, 0, 0, 0, 0, 0], first].concat();
    let Greedy { session, file, .. } = &greedy[2];
    assert!(session.tell(request::SET_MEM_TABLE, &body, &[file.as_fd()]).is_err());
    let body = [vec![0; 8], Greedy::message(0, 8 * TIB)].concat();
    session.tell(request::REM_MEM_REG, &body, &[]).unwrap();
    session.get_features().unwrap();
    greedy[2].next = 60 * TIB;
    until("what was removed can be given again", || greedy[2].add(4 * TIB));
    drop(greedy);
    let mut next = Greedy::connect(&node, 0);
    until("what is given back is there for others", || next.add(16 * TIB));
    drop(next);

    // Memory that only a request in flight keeps counts, and further memory waits for it.
    let mut disk = Disk::connect(&node.socket(3), DiskOptions::default()).unwrap();
    let mut queue = disk.take_queue(0);
    let file = sparse(120 * TIB);
    let region = |nth: u64| {
        let info = [(100 + 20 * nth) * TIB, 6 * TIB, (100 + 20 * nth) * TIB, nth * TIB];
        let info: Vec<u8> = info.iter().flat_map(|number| number.to_le_bytes()).collect();
        [vec![0; 8], info].concat()
    };
    let mut done = Vec::new();
    for nth in 0..4 {
        disk.session().tell(request::ADD_MEM_REG, &region(nth), &[file.as_fd()]).unwrap();
        let slot = queue.take().unwrap();
        queue.submit(slot, Request::Read { offset: 0, len: 4096 });
        queue.publish();
        let asked = || node.stats[3][0].reads.requests.get() == nth + 1;
        until("the read has begun", asked);
        disk.session().tell(request::REM_MEM_REG, &region(nth), &[]).unwrap();
    }
    while done.len() < 4 {
        assert!(queue.wait(PATIENCE), "nothing comes back");
        queue.poll(&mut done).unwrap();
    }
    assert!(done.iter().all(|completion| completion.status == Status::Ok));
}

//! A process with few descriptors. It is a suite of its own because the limit belongs to the
//! process.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

mod common;

use common::{Node, Scratch, pattern};
use frontend::{Disk, DiskOptions, Pages, Region, Session, Status};

/// Front ends that add as many regions as they may leave descriptors for others.
#[test]
fn regions_leave_descriptors_for_others() {
    let limit = libc::rlimit { rlim_cur: 1024, rlim_max: 1024 };
    // SAFETY: the call reads `limit`, which is live.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let node = Node::start(Scratch::new("few"), &["null:1G", "null:1G", "mem:64M"]);
    let region = |nth: u64| Region::new(nth << 30, 4096, Pages::Small).unwrap();
    let mut greedy = Vec::new();
    for (disk, most) in [(0, 128), (1, 96)] {
        let mut session = Session::connect(&node.socket(disk)).unwrap();
        let protocol = session.get_protocol_features().unwrap();
        session.set_protocol_features(protocol).unwrap();
        session.set_owner().unwrap();
        assert_eq!(session.get_max_mem_slots().unwrap(), 128);
        let regions: Vec<_> = (0..most + 1).map(region).collect();
        let added = regions.iter().take_while(|region| session.add_mem_reg(region).is_ok());
        assert_eq!(added.count() as u64, most);
        greedy.push(session);
    }
    // They continue with what they have.
    greedy.iter().for_each(|session| assert!(session.get_features().is_ok()));
    let mut disk = Disk::connect(&node.socket(2), DiskOptions::default()).unwrap();
    let (mut queue, bytes) = (disk.take_queue(0), pattern(7, 4096));
    assert_eq!(queue.write(0, &bytes).unwrap(), Status::Ok);
}

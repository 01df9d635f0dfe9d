//! A reply tells that a request is in force, also on the core of a ring that executes it late.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use std::sync::mpsc;
use std::time::Duration;

use crate::common::{Node, Scratch, until};
use frontend::message::feature::LOG_ALL;
use frontend::{DirtyLog, Disk, DiskOptions, Request, Status};

/// How long a core is blocked. A reply that does not wait for it comes much sooner.
const HELD: Duration = Duration::from_millis(200);

/// Requests of a front end while a ring is active.
type Ask = fn(&Disk, &DirtyLog);

const ASKS: [(&str, Ask); 3] = [
    ("another log", |disk, log| disk.session().set_log_base(log).unwrap()),
    ("no log", |disk, _| disk.session().set_features(disk.features()).unwrap()),
    ("a paused ring", |disk, _| disk.session().set_vring_enable(1, false).unwrap()),
];

/// Ring 1 is on core 1, which is blocked during the request.
#[test]
fn an_acknowledged_request_is_in_force_on_every_rings_core() {
    let node = Node::start(Scratch::new("in-force"), &["mem:16M"]);
    for packed in [false, true] {
        for (what, ask) in ASKS {
            let options = DiskOptions { queues: 2, packed, ..DiskOptions::default() };
            let mut disk = Disk::connect(&node.socket(0), options).unwrap();
            let mut queue = disk.take_queue(1);
            assert_eq!(queue.write(0, &[7; 4096]).unwrap(), Status::Ok);
            disk.session().set_features(disk.features() | LOG_ALL).unwrap();
            let log = DirtyLog::new(1 << 30).unwrap();
            let held = node.hold(1);
            let (tell, told) = mpsc::channel();
            std::thread::scope(|scope| {
                let watching = scope.spawn(move || {
                    let early = told.recv_timeout(HELD).is_ok();
                    drop(held);
                    early
                });
                ask(&disk, &log);
                let _ = tell.send(());
                assert!(
                    !watching.join().unwrap(),
                    "{what} was acknowledged before ring 1 knew of it"
                );
            });
        }
    }
}

/// Requests that complete while the rings are being stopped, for a migration's last copy, are
/// logged like all others.
#[test]
fn completions_while_a_ring_stops_are_in_the_log() {
    let node = Node::start(Scratch::new("last"), &["delay:all=20ms..60ms|mem:16M"]);
    for packed in [false, true] {
        let options = DiskOptions { queues: 2, packed, ..DiskOptions::default() };
        let mut disk = Disk::connect(&node.socket(0), options).unwrap();
        let mut queues = [disk.take_queue(0), disk.take_queue(1)];
        disk.start_log().unwrap();
        let taken = || node.stats[0].iter().map(|ring| ring.reads.requests.get()).sum::<u64>();
        let (before, mut pages) = (taken(), Vec::new());
        for queue in &mut queues {
            while let Some(slot) = queue.take() {
                pages.push(queue.data_addr(slot) & !0xfff);
                queue.submit(slot, Request::Read { offset: 0, len: 4096 });
            }
            queue.publish();
        }
        until("all of it is at the device", || taken() == before + pages.len() as u64);
        disk.stop().unwrap();
        let log = disk.log().unwrap().take();
        let missing = pages.iter().filter(|page| !log.contains(page)).count();
        assert_eq!(missing, 0, "of {} pages; packed: {packed}", pages.len());
    }
}

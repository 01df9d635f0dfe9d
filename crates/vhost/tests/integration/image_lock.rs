//! Disks on one image that is locked only while a machine uses it (`lock=ring`).
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{Node, Scratch, pattern, until};
use bdev::{Bdev, Error};
use frontend::{Disk, DiskOptions, Queue, Request, Status};
use reactor::{Class, Core, RuntimeConfig, UnixListener, processors};
use vhost::{OnError, Target, TargetOptions};

const MIB: u64 = 1 << 20;

/// Long enough for everything that does not wait.
const WHILE: Duration = Duration::from_millis(300);

/// Two disks on one image.
fn two(name: &str) -> Node {
    let dir = Scratch::new(name);
    let uri = format!("{}?lock=ring", dir.file("a.img", 8 * MIB));
    Node::start(dir, &[&uri, &uri])
}

fn begin_write(queue: &mut Queue, offset: u64, bytes: &[u8]) {
    let slot = queue.take().unwrap();
    queue.write_data(slot, 0, bytes);
    queue.submit(slot, Request::Write { offset, len: bytes.len() as u32 });
    queue.publish();
}

#[test]
fn a_machine_that_waited_for_an_image_gets_its_new_size() {
    let node = two("lock-size");
    let mut first = Disk::connect(&node.socket(0), DiskOptions::default()).unwrap();
    assert_eq!(first.take_queue(0).write(0, &pattern(1, 4096)).unwrap(), Status::Ok);
    let mut second = Disk::connect(&node.socket(1), DiskOptions::default()).unwrap();
    let image = std::fs::OpenOptions::new().write(true).open(node.dir.path("a.img")).unwrap();
    image.set_len(16 * MIB).unwrap();
    first.stop().unwrap();
    let mut queue = second.take_queue(0);
    assert_eq!(queue.write(12 * MIB, &pattern(2, 4096)).unwrap(), Status::Ok);
    assert_eq!(second.read_config().unwrap().capacity_sectors, 16 * MIB / 512);
}

#[test]
fn a_machine_does_not_go_on_with_an_image_that_another_one_has_used() {
    for packed in [false, true] {
        let options = DiskOptions { packed, ..DiskOptions::default() };
        let node = two("lock-lost");
        let mut first = Disk::connect(&node.socket(0), options.clone()).unwrap();
        let mut queue = first.take_queue(0);
        for nth in 0..3 {
            assert_eq!(queue.write(nth * 4096, &pattern(1, 4096)).unwrap(), Status::Ok);
        }
        // It lets go of it and nobody else comes: it goes on.
        first.stop().unwrap();
        first.start().unwrap();
        assert_eq!(queue.write(0, &pattern(1, 4096)).unwrap(), Status::Ok);
        first.stop().unwrap();
        let mut second = Disk::connect(&node.socket(1), options).unwrap();
        let mut other = second.take_queue(0);
        for _ in 0..2 {
            assert_eq!(other.write(0, &pattern(2, 4096)).unwrap(), Status::Ok);
        }
        second.stop().unwrap();
        first.start().unwrap();
        begin_write(&mut queue, 0, &pattern(3, 4096));
        assert!(!queue.wait(WHILE), "it writes to the image of another machine");
        // It stops without it, and the other one goes on.
        first.stop().unwrap();
        second.start().unwrap();
        let mut bytes = vec![0; 4096];
        assert_eq!(other.read(0, &mut bytes).unwrap(), Status::Ok);
        assert_eq!(bytes, pattern(2, 4096));
    }
}

#[test]
fn a_disk_that_is_handed_over_without_its_machine_is_not_locked() {
    let dir = Scratch::new("lock-declined");
    let uri = format!("{}?lock=ring", dir.file("a.img", 8 * MIB));
    let socket = dir.path("a.sock");
    let flags = Arc::<[AtomicBool; 2]>::default();
    let (there, told) = (socket.clone(), flags.clone());
    let main = move |core: Core| {
        let (uri, socket, flags) = (uri.clone(), there.clone(), told.clone());
        async move {
            let [serves, begun] = &*flags;
            let options = TargetOptions {
                name: "a".into(),
                serial: "a".into(),
                queues: 1,
                first_core: 0,
                on_error: OnError::Report,
            };
            let target = Target::new(&core, Bdev::open(&core, &uri).await.unwrap(), options);
            let listener = UnixListener::bind(&core, &socket).unwrap();
            let serving = target.clone();
            let serving = core.spawn(Class::Control, async move { serving.serve(listener).await });
            serves.store(true, Ordering::Release);
            while !begun.load(Ordering::Acquire) {
                core.sleep_ns(1_000_000).await;
            }
            let other = Bdev::open(&core, &uri).await.unwrap();
            let is_locked = async || other.lock(&core).await.is_err();
            assert!(is_locked().await);
            target.quiesce().await.unwrap();
            assert!(is_locked().await, "the successor gets the lock");
            target.quiesce_disconnected().await.unwrap();
            let locked: Result<(), Error> = other.lock(&core).await;
            locked.expect("no machine uses it");
            target.stop();
            serving.await;
        }
    };
    let config = RuntimeConfig {
        processors: processors().into_iter().take(1).collect(),
        memory: 64 << 20,
        ..RuntimeConfig::default()
    };
    let core = std::thread::spawn(move || _ = reactor::run(&config, main).unwrap());
    let [serves, begun] = &*flags;
    until("it serves", || serves.load(Ordering::Acquire));
    let mut disk = Disk::connect(&socket, DiskOptions::default()).unwrap();
    assert_eq!(disk.take_queue(0).write(0, &pattern(1, 4096)).unwrap(), Status::Ok);
    begun.store(true, Ordering::Release);
    core.join().expect("the core has panicked");
}

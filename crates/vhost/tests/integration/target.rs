//! The target at its socket over real devices, tested with the independent front end.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use crate::common;
use crate::common::{Node, Scratch, pattern};
use frontend::{Disk, DiskOptions, Queue, Request, Slot, Status};

const MIB: u64 = 1 << 20;

/// Every shape of ring that a driver may choose: packed, indirect, event index, descriptors of
/// data.
const SHAPES: [(bool, bool, bool, u16); 8] = [
    (false, true, true, 1),
    (false, true, false, 4),
    (false, false, true, 4),
    (false, false, false, 1),
    (true, true, true, 1),
    (true, true, false, 4),
    (true, false, true, 4),
    (true, false, false, 1),
];

fn shaped((packed, indirect, event_index, segments): (bool, bool, bool, u16)) -> DiskOptions {
    let slot_bytes = 16384;
    DiskOptions {
        queues: 2,
        slot_bytes,
        packed,
        indirect,
        event_index,
        segments,
        ..DiskOptions::default()
    }
}

/// Everything that a disk does, one after the other.
fn exercise(queue: &mut Queue, at: u64) {
    let (one, two) = (pattern(at, 16384), pattern(at + 1, 4096));
    assert_eq!(queue.write(at, &one).unwrap(), Status::Ok);
    assert_eq!(queue.write(at + 4096, &two).unwrap(), Status::Ok);
    assert_eq!(queue.flush().unwrap(), Status::Ok);
    let mut expected = one;
    expected[4096..8192].copy_from_slice(&two);
    let mut bytes = vec![0; expected.len()];
    assert_eq!(queue.read(at, &mut bytes).unwrap(), Status::Ok);
    assert_eq!(bytes, expected);
    assert_eq!(queue.discard(at, 4096).unwrap(), Status::Ok);
    assert_eq!(queue.write_zeroes(at + 8192, 4096, true).unwrap(), Status::Ok);
    assert_eq!(queue.read(at, &mut bytes).unwrap(), Status::Ok);
    expected[..4096].fill(0);
    expected[8192..12288].fill(0);
    assert_eq!(bytes, expected);
}

/// Writes and reads blocks with a full ring until this many requests are done.
fn work(queue: &mut Queue, first_block: u64, blocks: u64, requests: u64) {
    let depth = queue.depth();
    let mut at = vec![0_u64; depth];
    let mut writing = vec![false; depth];
    let (mut done, mut completed, mut next) = (Vec::new(), 0, 0);
    // Each slot has its own blocks.
    let begin = |queue: &mut Queue, slot: Slot, nth: u64| {
        let block = nth * depth as u64 % (blocks / depth as u64 * depth as u64);
        let offset = (first_block + block + slot.index() as u64) * 4096;
        queue.write_data(slot, 0, &(offset ^ nth << 48).to_le_bytes());
        queue.submit(slot, Request::Write { offset, len: 4096 });
        offset ^ nth << 48
    };
    while let Some(slot) = queue.take() {
        at[slot.index()] = begin(queue, slot, next);
        writing[slot.index()] = true;
    }
    queue.publish();
    while queue.in_flight() > 0 {
        assert!(queue.wait(common::PATIENCE), "nothing comes back");
        done.clear();
        queue.poll(&mut done).unwrap();
        for completion in &done {
            assert_eq!(completion.status, Status::Ok);
            let (slot, nth) = (completion.slot, completion.slot.index());
            completed += 1;
            if writing[nth] {
                assert_eq!(completion.written, 1);
                queue.write_data(slot, 0, &[0xee; 8]);
                let offset = at[nth] << 16 >> 16;
                queue.submit(slot, Request::Read { offset, len: 4096 });
                writing[nth] = false;
                continue;
            }
            assert_eq!(completion.written, 4097);
            let mut bytes = [0; 8];
            queue.read_data(slot, 0, &mut bytes);
            assert_eq!(u64::from_le_bytes(bytes), at[nth]);
            if completed >= requests {
                queue.give_back(slot);
                continue;
            }
            next += 1;
            at[nth] = begin(queue, slot, next);
            writing[nth] = true;
        }
        queue.publish();
    }
}

#[test]
fn every_shape_of_ring_does_everything_on_every_kind_of_device() {
    let dir = Scratch::new("shapes");
    let file = dir.file("a.img", 64 * MIB);
    let node = Node::start(dir, &["mem:64M", &file]);
    for disk in 0..2 {
        for shape in SHAPES {
            let mut disk = Disk::connect(&node.socket(disk), shaped(shape)).unwrap();
            assert_eq!(disk.size_bytes(), 64 * MIB);
            let mut queue = disk.take_queue(0);
            exercise(&mut disk.take_queue(1), 3 * MIB);
            exercise(&mut queue, 5 * MIB);
            work(&mut queue, 2048, 1024, 3000);
            disk.stop().unwrap();
            disk.start().unwrap();
            work(&mut queue, 2048, 1024, 300);
        }
    }
}

#[test]
fn failures_of_the_device_are_counted_by_kind_and_reason() {
    let uris = ["error:kind=write&status=nospace|mem:16M", "error:kind=read&count=2|mem:16M"];
    let node = Node::start(Scratch::new("failures"), &uris);
    let failed = node.stats.iter().enumerate().map(|(nth, stats)| {
        let mut disk = Disk::connect(&node.socket(nth), DiskOptions::default()).unwrap();
        let mut queue = disk.take_queue(0);
        for block in 0..3 {
            let _ = queue.write(block * 4096, &[1; 4096]).unwrap();
            let _ = queue.read(block * 4096, &mut [0; 4096]).unwrap();
        }
        let ring = &stats[0];
        [&ring.reads, &ring.writes].map(|of| (of.errors.get(), of.no_space.get()))
    });
    assert_eq!(failed.collect::<Vec<_>>(), [[(0, 0), (3, 3)], [(2, 0), (0, 0)]]);
}

/// The index of a split ring and both wrap counters of a packed one wrap many times.
#[test]
fn many_requests_complete_once_each() {
    let node = Node::start(Scratch::new("many"), &["delay:all=0us..200us|mem:64M"]);
    for packed in [false, true] {
        let options = DiskOptions { depth: 64, queue_size: 64, packed, ..DiskOptions::default() };
        let mut disk = Disk::connect(&node.socket(0), options).unwrap();
        work(&mut disk.take_queue(0), 0, 4096, 70_000);
    }
}

#[test]
fn a_reset_disk_starts_in_another_form() {
    let node = Node::start(Scratch::new("reset"), &["mem:16M"]);
    for packed in [false, true, false] {
        let options = DiskOptions { queues: 2, packed, ..DiskOptions::default() };
        let mut disk = Disk::connect(&node.socket(0), options).unwrap();
        for _ in 0..3 {
            let mut queue = disk.take_queue(1);
            work(&mut queue, 0, 1024, 300);
            disk.reset(vec![queue]).unwrap();
        }
        work(&mut disk.take_queue(0), 0, 1024, 300);
    }
}

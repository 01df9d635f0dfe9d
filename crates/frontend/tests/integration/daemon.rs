//! The front end with an independent target, which QEMU's own front end also uses.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use std::time::Duration;

use crate::common::{Daemon, Scratch};
use frontend::{
    Desc, Disk, DiskOptions, Error, Kind, Queue, Request, Slot, SplitRing, Status, message,
};

const MIB: u64 = 1 << 20;
const WRITABLE: &str = ",writable=on,num-queues=2";

fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..bytes).map(|_| next()).collect()
}

fn connect(daemon: &Daemon, options: DiskOptions) -> Result<Disk, Error> {
    Disk::connect(&daemon.socket, options)
}

/// Everything that a disk does, one call after the other.
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
    expected[8192..12288].fill(0);
    assert_eq!(bytes[4096..], expected[4096..]);
}

#[test]
fn a_disk_reads_what_was_written() {
    let dir = Scratch::new("basic");
    let daemon = Daemon::file(&dir, 64 * MIB, WRITABLE);
    let mut disk = connect(&daemon, DiskOptions::default()).unwrap();
    assert_eq!(disk.size_bytes(), 64 * MIB);
    assert_eq!(disk.session().connection().peer_pid(), Some(daemon.pid()));
    let mut queue = disk.take_queue(0);
    exercise(&mut queue, MIB);
    let (status, id) = queue.get_id().unwrap();
    assert_eq!(status, Status::Ok);
    assert!(id.starts_with(b"vhost_user_blk"), "{id:?}");
    assert_eq!(queue.read(64 * MIB, &mut [0; 512]).unwrap(), Status::IoError);
}

#[test]
fn every_shape_of_ring_does_the_same() {
    let dir = Scratch::new("shapes");
    let daemon = Daemon::file(&dir, 64 * MIB, WRITABLE);
    for (indirect, event_index, segments) in
        [(true, true, 1), (true, false, 4), (false, true, 4), (false, false, 1)]
    {
        let options = DiskOptions {
            queues: 2,
            depth: 16,
            slot_bytes: 16384,
            indirect,
            event_index,
            segments,
            ..DiskOptions::default()
        };
        let mut disk = connect(&daemon, options).unwrap();
        exercise(&mut disk.take_queue(1), 3 * MIB);
        exercise(&mut disk.take_queue(0), 5 * MIB);
    }
}

#[test]
fn many_requests_in_flight_come_back_once_each() {
    let dir = Scratch::new("deep");
    let daemon = Daemon::file(&dir, 64 * MIB, WRITABLE);
    for (indirect, event_index) in [(true, true), (false, false)] {
        let options = DiskOptions { depth: 64, indirect, event_index, ..DiskOptions::default() };
        let mut disk = connect(&daemon, options).unwrap();
        let mut queue = disk.take_queue(0);
        // Write and read back, each slot with its own blocks, beyond the ring's 65536th request.
        let mut at = [0u64; 64];
        let mut writing = [false; 64];
        let mut done = Vec::new();
        let mut completed = 0u64;
        let next = |queue: &mut Queue, slot: Slot, nth: u64| {
            let offset = (nth * 64 + slot.index() as u64) % (64 * MIB / 4096) * 4096;
            queue.write_data(slot, 0, &offset.to_le_bytes());
            queue.submit(slot, Request::Write { offset, len: 4096 });
            offset
        };
        while let Some(slot) = queue.take() {
            at[slot.index()] = next(&mut queue, slot, 0);
            writing[slot.index()] = true;
        }
        queue.publish();
        while queue.in_flight() > 0 {
            assert!(queue.wait(Duration::from_secs(30)));
            done.clear();
            queue.poll(&mut done).unwrap();
            for completion in &done {
                assert_eq!(completion.status, Status::Ok);
                let slot = completion.slot;
                completed += 1;
                if writing[slot.index()] {
                    assert_eq!(completion.written, 1);
                    queue.write_data(slot, 0, &[0xee; 8]);
                    queue.submit(slot, Request::Read { offset: at[slot.index()], len: 4096 });
                } else {
                    assert_eq!(completion.written, 4097);
                    let mut bytes = [0; 8];
                    queue.read_data(slot, 0, &mut bytes);
                    assert_eq!(u64::from_le_bytes(bytes), at[slot.index()]);
                    if completed > 70_000 {
                        queue.give_back(slot);
                        continue;
                    }
                    at[slot.index()] = next(&mut queue, slot, completed);
                }
                writing[slot.index()] ^= true;
            }
            queue.publish();
        }
        assert!(completed > 70_000);
    }
}

#[test]
fn a_stopped_disk_continues_at_its_position() {
    let dir = Scratch::new("stop");
    let daemon = Daemon::file(&dir, 64 * MIB, WRITABLE);
    let mut disk = connect(&daemon, DiskOptions::default()).unwrap();
    let mut queue = disk.take_queue(0);
    for _ in 0..3 {
        exercise(&mut queue, MIB);
        disk.stop().unwrap();
        disk.start().unwrap();
    }
    exercise(&mut queue, MIB);
}

#[test]
fn a_reset_disk_starts_with_empty_rings() {
    let dir = Scratch::new("reset");
    let daemon = Daemon::file(&dir, 64 * MIB, WRITABLE);
    let options = DiskOptions { queues: 2, ..DiskOptions::default() };
    let mut disk = connect(&daemon, options).unwrap();
    for _ in 0..3 {
        let mut queue = disk.take_queue(1);
        exercise(&mut queue, MIB);
        disk.reset(vec![queue]).unwrap();
    }
    exercise(&mut disk.take_queue(0), MIB);
}

#[test]
fn a_disk_continues_at_the_next_target() {
    let dir = Scratch::new("next");
    let daemon = Daemon::file(&dir, 64 * MIB, WRITABLE);
    let mut disk = connect(&daemon, DiskOptions::default()).unwrap();
    let mut queue = disk.take_queue(0);
    exercise(&mut queue, MIB);
    drop(daemon);
    assert!(disk.session().connection().is_readable(), "the connection is closed");
    let daemon = Daemon::file(&dir, 64 * MIB, WRITABLE);
    disk.reconnect(&daemon.socket).unwrap();
    exercise(&mut queue, 2 * MIB);
}

#[test]
fn writes_of_the_target_are_in_the_log() {
    let dir = Scratch::new("log");
    let daemon = Daemon::file(&dir, 64 * MIB, WRITABLE);
    let mut disk = connect(&daemon, DiskOptions::default()).unwrap();
    let mut queue = disk.take_queue(0);
    exercise(&mut queue, MIB);
    disk.start_log().unwrap();
    let slot = queue.take().unwrap();
    let page = queue.data_addr(slot) / 4096 * 4096;
    assert!(!disk.log().unwrap().take().contains(&page));
    let read = queue.run(slot, Request::Read { offset: MIB, len: 4096 }).unwrap();
    assert_eq!(read.status, Status::Ok);
    assert!(disk.log().unwrap().take().contains(&page));
    disk.stop_log().unwrap();
    let other = dir.path("other.sock");
    disk.stop().unwrap();
    drop(daemon);
    let image = dir.path("disk.img");
    let blockdev = format!("driver=file,filename={},node-name=d", image.display());
    let _daemon = Daemon::start(&other, &blockdev, WRITABLE);
    disk.migrate(&other).unwrap();
    queue.give_back(slot);
    exercise_reading(&mut queue);
}

fn exercise_reading(queue: &mut Queue) {
    let mut bytes = [0; 4096];
    assert_eq!(queue.read(MIB + 4096, &mut bytes).unwrap(), Status::Ok);
    assert_eq!(bytes[..], pattern(MIB + 1, 4096));
}

#[test]
fn a_read_only_disk_refuses_writes() {
    let dir = Scratch::new("read-only");
    let daemon = Daemon::file(&dir, 64 * MIB, "");
    let mut disk = connect(&daemon, DiskOptions::default()).unwrap();
    assert_ne!(disk.features() & message::feature::RO, 0);
    assert_eq!(disk.take_queue(0).write(0, &[1; 512]).unwrap(), Status::IoError);
}

#[test]
fn a_missing_feature_is_named() {
    let dir = Scratch::new("lacks");
    let daemon = Daemon::file(&dir, 64 * MIB, WRITABLE);
    let packed = DiskOptions { packed: true, ..DiskOptions::default() };
    let error = connect(&daemon, packed).unwrap_err();
    assert_eq!(error.kind(), Kind::Refused, "{error}");
    let daemon = Daemon::file(&dir, 64 * MIB, WRITABLE);
    let queues = DiskOptions { queues: 3, ..DiskOptions::default() };
    assert_eq!(connect(&daemon, queues).unwrap_err().kind(), Kind::Refused);
}

/// The lower layer: a ring built by hand in the spare memory, on a session of its own.
#[test]
fn a_chain_can_be_built_by_hand() {
    let dir = Scratch::new("raw");
    let daemon = Daemon::file(&dir, 64 * MIB, WRITABLE);
    let options = DiskOptions { queues: 2, spare_bytes: MIB, ..DiskOptions::default() };
    let mut disk = connect(&daemon, options).unwrap();
    let kick = frontend::Event::new().unwrap();
    let call = frontend::Event::new().unwrap();
    disk.stop().unwrap();
    let memory = disk.memory().clone();
    let ring = SplitRing::new(&memory, 0, 16);
    let session = disk.session();
    session.set_vring_num(1, 16).unwrap();
    session.set_vring_base(1, 0xfffe).unwrap();
    ring.set_used_index(0xfffe);
    session.set_vring_addr(1, &memory, ring.addresses(), false).unwrap();
    session.set_vring_call(1, Some(&call)).unwrap();
    session.set_vring_kick(1, Some(&kick)).unwrap();
    session.set_vring_enable(1, true).unwrap();
    // A read with data and status in one descriptor, twice, across the wrap of the indexes.
    let read = |flags: u16, next: u16, addr: u64, len: u32| Desc { addr, len, flags, next };
    memory.write(0x8000, &[0; 16]);
    ring.set_desc(5, read(message::desc::NEXT, 9, 0x8000, 16));
    ring.set_desc(9, read(message::desc::WRITE, 0, 0x9000, 513));
    ring.set_used_event(0xfffe);
    for nth in 0..4u16 {
        memory.u8_at(0x9000 + 512).store(0xff, std::sync::atomic::Ordering::Relaxed);
        let index = 0xfffeu16.wrapping_add(nth);
        ring.set_avail(index, 5);
        ring.set_used_event(index);
        ring.publish(index.wrapping_add(1));
        kick.signal();
        // A call may be spurious; after the last one the index has moved.
        while ring.used_index() == index {
            assert!(call.wait(Duration::from_secs(30)) > 0);
        }
        assert_eq!(ring.used_index(), index.wrapping_add(1));
        assert_eq!(ring.used(index), (5, 513));
        let status = memory.u8_at(0x9000 + 512).load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(status, 0);
    }
    assert_eq!(session.get_vring_base(1).unwrap(), 2);
}

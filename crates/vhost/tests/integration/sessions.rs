//! Front ends that send invalid or excessive messages, beside others that do not.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Node, PATIENCE, Scratch, until};
use frontend::message::{feature, protocol};
use frontend::{Disk, DiskOptions, Memory, Pages, Region, Session, Status};

/// GET_FEATURES: header, no payload.
const GET_FEATURES: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
/// Header and 64 bits.
const REPLY_BYTES: usize = 20;
/// Time limit for a node's end with a misbehaving front end: less than the ten seconds after which
/// a front end that reads nothing is dropped, and much more than it takes.
const END: Duration = Duration::from_secs(6);

/// A front end that sends requests until nothing more fits anywhere. Returns how many it has sent
/// in full.
fn asks_and_never_reads(node: &Node, disk: usize) -> (UnixStream, usize) {
    let mut stream = UnixStream::connect(node.socket(disk)).unwrap();
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut sent = 0;
    loop {
        match stream.write(&GET_FEATURES[sent % GET_FEATURES.len()..]) {
            Ok(n) => sent += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    (stream, sent / GET_FEATURES.len())
}

fn works(node: &Node, disk: usize) {
    let mut disk = Disk::connect(&node.socket(disk), DiskOptions::default()).unwrap();
    assert_eq!(disk.take_queue(0).write(0, &[7; 4096]).unwrap(), Status::Ok);
}

/// The second disk keeps working, and the node ends in time, whatever happens at the first.
fn has_its_turn_and_ends(node: Node) {
    let began = Instant::now();
    for _ in 0..20 {
        works(&node, 1);
    }
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    let began = Instant::now();
    drop(node);
    assert!(began.elapsed() < END, "{:?}", began.elapsed());
}

#[test]
fn a_front_end_that_reads_no_replies_delays_neither_others_nor_the_end() {
    let node = Node::start(Scratch::new("unread"), &["mem:16M", "mem:16M"]);
    let (_stream, asked) = asks_and_never_reads(&node, 0);
    assert!(asked > 100, "{asked}");
    works(&node, 1);
    let began = Instant::now();
    drop(node);
    assert!(began.elapsed() < END, "{:?}", began.elapsed());
}

#[test]
fn a_front_end_that_reads_late_gets_every_reply() {
    let node = Node::start(Scratch::new("late"), &["mem:16M"]);
    let (mut stream, asked) = asks_and_never_reads(&node, 0);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut replies = vec![0; asked * REPLY_BYTES];
    stream.read_exact(&mut replies).unwrap();
    let mut all = replies.chunks(REPLY_BYTES);
    let first = all.next().unwrap();
    assert_eq!(first[..8], [1, 0, 0, 0, 5, 0, 0, 0]);
    assert!(all.all(|reply| reply == first), "each is the same");
}

#[test]
fn half_a_message_delays_neither_others_nor_the_end() {
    let node = Node::start(Scratch::new("half"), &["mem:16M", "mem:16M"]);
    for bytes in [1, 11, GET_FEATURES.len()] {
        let mut stream = UnixStream::connect(node.socket(0)).unwrap();
        let mut message = GET_FEATURES;
        // Its payload never comes.
        message[8] = 8;
        stream.write_all(&message[..bytes]).unwrap();
        works(&node, 1);
    }
    let mut stream = UnixStream::connect(node.socket(0)).unwrap();
    stream.write_all(&GET_FEATURES[..5]).unwrap();
    let began = Instant::now();
    drop(node);
    assert!(began.elapsed() < END, "{:?}", began.elapsed());
}

#[test]
fn a_front_end_that_never_stops_asking_leaves_others_their_turn() {
    let node = Node::start(Scratch::new("flood"), &["mem:16M", "mem:16M"]);
    let mut stream = UnixStream::connect(node.socket(0)).unwrap();
    let mut replies = stream.try_clone().unwrap();
    let ends = Arc::new(AtomicBool::new(false));
    let ended = ends.clone();
    let reads = std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while replies.read(&mut buffer).is_ok_and(|n| n > 0) {}
    });
    let asks = std::thread::spawn(move || {
        let many = GET_FEATURES.repeat(1000);
        while !ended.load(Ordering::Acquire) && stream.write_all(&many).is_ok() {}
        let _ = stream.shutdown(std::net::Shutdown::Both);
    });
    has_its_turn_and_ends(node);
    ends.store(true, Ordering::Release);
    asks.join().unwrap();
    reads.join().unwrap();
}

/// A front end that has sent everything that comes before its memory.
fn session(node: &Node, disk: usize) -> Session {
    let mut session = Session::connect(&node.socket(disk)).unwrap();
    session.set_features(feature::VERSION_1 | feature::PROTOCOL_FEATURES).unwrap();
    session.set_protocol_features(protocol::REPLY_ACK).unwrap();
    session.set_owner().unwrap();
    session
}

fn memory(regions: u64, bytes: u64) -> Memory {
    let region = |nth| Region::new(nth * bytes, bytes, Pages::Small).unwrap();
    Memory::with_regions((0..regions).map(region).collect())
}

/// The processor time of all threads with this name, in ticks.
fn ticks(name: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let of = |dir: std::path::PathBuf| {
        let own = std::fs::read_to_string(dir.join("comm")).ok()?;
        let stat = std::fs::read_to_string(dir.join("stat")).ok()?;
        let mut fields = stat.rsplit(')').next()?.split_whitespace().skip(11);
        let user: u64 = fields.next()?.parse().ok()?;
        let system: u64 = fields.next()?.parse().ok()?;
        (own.trim() == name).then_some(user + system)
    };
    tasks.filter_map(|task| of(task.ok()?.path())).sum()
}

/// The process that releases the memory last frees its pages, which takes a tenth of a second or
/// more.
#[test]
fn no_core_releases_the_memory_of_an_ended_machine() {
    let node = Node::start(Scratch::new("ended"), &["mem:16M"]);
    let memory = memory(1, 512 << 20);
    let page = vec![1; 1 << 20];
    (0..512).for_each(|nth| memory.write(nth << 20, &page));
    let session = session(&node, 0);
    session.set_mem_table(&memory).unwrap();
    session.get_features().unwrap();
    let before = ticks("millrace-unmap");
    drop(memory);
    drop(session);
    until("a thread has freed it", || ticks("millrace-unmap") > before);
}

#[test]
fn a_front_end_that_maps_memory_again_and_again_leaves_others_their_turn() {
    let node = Node::start(Scratch::new("maps"), &["mem:16M", "mem:16M"]);
    let tables = [memory(8, 16 << 20), memory(7, 32 << 20)];
    let session = session(&node, 0);
    let ends = Arc::new(AtomicBool::new(false));
    let ended = ends.clone();
    let maps = std::thread::spawn(move || {
        let mut times = 0;
        while !ended.load(Ordering::Acquire) && session.set_mem_table(&tables[times % 2]).is_ok() {
            times += 1;
        }
        times
    });
    has_its_turn_and_ends(node);
    ends.store(true, Ordering::Release);
    assert!(maps.join().unwrap() > 20);
}

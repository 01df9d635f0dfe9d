//! Front ends that misbehave in what they say, beside others that do not.
#![allow(clippy::disallowed_methods, reason = "tests are no part of a node")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Node, PATIENCE, Scratch};
use frontend::{Disk, DiskOptions, Status};

/// GET_FEATURES: header, no payload.
const GET_FEATURES: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
/// Header and 64 bits.
const REPLY_BYTES: usize = 20;
/// How long a node may take to end because of a front end: less than the ten seconds after which
/// one that reads nothing is given up, and far more than it takes.
const END: Duration = Duration::from_secs(6);

/// A front end that asks until nothing more fits anywhere. Gives how often it has asked in full.
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
    let began = Instant::now();
    for _ in 0..20 {
        works(&node, 1);
    }
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    let began = Instant::now();
    drop(node);
    assert!(began.elapsed() < END, "{:?}", began.elapsed());
    ends.store(true, Ordering::Release);
    asks.join().unwrap();
    reads.join().unwrap();
}

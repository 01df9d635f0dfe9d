//! Nothing leaks: after very many connections and requests the process has the descriptors,
//! mappings and memory that it had before. With `MILLRACE_LONG` there are many times more of both.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

mod common;

use common::{Node, PATIENCE, Scratch, until};
use frontend::{Disk, DiskOptions, Queue, Request, Slot, Status};

/// Resources of the process.
#[derive(Clone, Copy, Debug)]
struct Holdings {
    descriptors: usize,
    mappings: usize,
    resident_kib: u64,
}

impl Holdings {
    fn now() -> Holdings {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let resident_kib = line.trim().trim_end_matches(" kB").parse().unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        Holdings { descriptors, mappings: maps.lines().count(), resident_kib }
    }

    /// No more than before, except for what an allocator keeps.
    fn is_like(&self, before: &Holdings) -> bool {
        // A sanitizer keeps freed memory on purpose.
        let keeps =
            ["ASAN_OPTIONS", "TSAN_OPTIONS"].map(std::env::var_os).iter().any(Option::is_some);
        if keeps {
            return self.descriptors <= before.descriptors;
        }
        self.descriptors <= before.descriptors
            && self.mappings <= before.mappings + 4
            && self.resident_kib <= before.resident_kib + 4096
    }
}

fn times(short: u64, long: u64) -> u64 {
    if std::env::var_os("MILLRACE_LONG").is_some() { long } else { short }
}

/// Checks that `times` repetitions leave nothing behind.
fn leaves_nothing(what: &str, times: u64, mut step: impl FnMut(u64)) {
    let begin = std::time::Instant::now();
    // Permanent resources exist after some repetitions.
    (0..times / 10 + 20).for_each(&mut step);
    std::thread::sleep(std::time::Duration::from_millis(50));
    let before = Holdings::now();
    (0..times).for_each(&mut step);
    // The target closes its descriptors a little later.
    until("everything is given back", || {
        let now = Holdings::now();
        now.is_like(&before) || {
            eprintln!("{what}: {before:?}, now {now:?}");
            false
        }
    });
    eprintln!("{times} {what}: {before:?}, then {:?}, {:?}", Holdings::now(), begin.elapsed());
}

fn exercise(queue: &mut Queue) {
    let mut bytes = [0; 4096];
    assert_eq!(queue.write(4096, &[9; 4096]).unwrap(), Status::Ok);
    assert_eq!(queue.read(4096, &mut bytes).unwrap(), Status::Ok);
    assert_eq!(bytes, [9; 4096]);
}

/// Keeps a queue full until this many requests are done.
fn requests(queue: &mut Queue, count: u64) {
    let (mut done, mut submitted, mut completed) = (Vec::with_capacity(queue.depth()), 0, 0);
    let mut submit = |queue: &mut Queue, slot: Slot| {
        submitted += 1;
        let offset = submitted * 4096 % (1 << 30);
        let read = Request::Read { offset, len: 4096 };
        queue.submit(
            slot,
            if submitted % 3 == 0 { Request::Write { offset, len: 4096 } } else { read },
        );
    };
    while let Some(slot) = queue.take() {
        submit(queue, slot);
    }
    queue.publish();
    while completed < count {
        if queue.poll(&mut done).unwrap() == 0 {
            assert!(queue.wait(PATIENCE), "nothing comes back");
        }
        for completion in done.drain(..) {
            assert_eq!(completion.status, Status::Ok);
            completed += 1;
            submit(queue, completion.slot);
        }
        queue.publish();
    }
    while queue.in_flight() > 0 {
        assert!(queue.wait(PATIENCE), "nothing comes back");
        queue.poll(&mut done).unwrap();
        done.drain(..).for_each(|completion| queue.give_back(completion.slot));
    }
}

/// One test, so that nothing else runs in the process.
#[test]
fn many_connections_and_requests_leave_nothing() {
    let dir = Scratch::new("leaks");
    let file = dir.file("a.img", 1 << 24);
    let node = Node::start(dir, &["mem:16M", &file, "null:1G"]);
    leaves_nothing("connections", times(300, 10_000), |nth| {
        let options = DiskOptions {
            queues: 1 + nth as u16 % 3,
            packed: nth % 2 == 1,
            inflight: nth % 5 != 4,
            depth: 4,
            ..DiskOptions::default()
        };
        let mut disk = Disk::connect(&node.socket(nth as usize % 2), options).unwrap();
        let mut queue = disk.take_queue(0);
        exercise(&mut queue);
        match nth % 3 {
            0 => disk.stop().unwrap(),
            1 => disk.reset(vec![queue]).unwrap(),
            // Requests are in flight when the connection ends.
            _ => {
                let slot = queue.take().unwrap();
                queue.submit(slot, Request::Read { offset: 0, len: 4096 });
                queue.publish();
            }
        }
    });
    let count = times(1_000_000, 100_000_000);
    for packed in [false, true] {
        let options = DiskOptions { depth: 128, packed, ..DiskOptions::default() };
        let mut disk = Disk::connect(&node.socket(2), options).unwrap();
        let mut queue = disk.take_queue(0);
        let name = if packed { "x 10000 requests, packed" } else { "x 10000 requests, split" };
        leaves_nothing(name, count / 2 / 10_000, |_| requests(&mut queue, 10_000));
    }
}

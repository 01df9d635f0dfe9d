//! The target with an independent driver (libblkio's): several queues, each always full, everything
//! checked. The driver has no in-flight region, no reconnection and no dirty log, so it tests the
//! protocol and the rings.
//!
//! Split rings only. Version 0.6.1 cannot use packed ones over vhost-user: its SET_VRING_BASE says
//! 0, which is position 0 with wrap counter 0, but it correctly starts with wrap counter 1.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use std::os::fd::{AsFd, AsRawFd};

use crate::common::{Node, PATIENCE, Scratch, pattern};
use frontend::{Memory, Pages, Region};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport,
    VirtioFeatureFlags,
};

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;
const QUEUES: usize = 3;
/// Requests in flight on each queue.
const DEPTH: usize = 32;

/// A queue, with memory of its own that is shared with the target.
struct Driver<'a> {
    queue: VirtioBlkQueue<'a, usize>,
    notifier: Box<dyn QueueNotifier>,
    called: std::sync::Arc<EventFd>,
    memory: &'a Memory,
    /// The start of this queue's buffers.
    at: u64,
}

impl Driver<'_> {
    /// The address of a slot's buffer in the driver's form.
    fn buffer(&self, slot: usize) -> *mut u8 {
        let addr = self.at + (slot * BLOCK) as u64;
        std::ptr::with_exposed_provenance_mut(self.memory.user_addr(addr) as usize)
    }

    fn write(&mut self, slot: usize, offset: u64, bytes: &[u8]) {
        self.memory.write(self.at + (slot * BLOCK) as u64, bytes);
        let buffer = self.buffer(slot);
        // SAFETY: the slot's buffer is mapped while `memory` lives, and nothing holds a reference
        // to it.
        unsafe { self.queue.write_raw(offset, buffer, bytes.len(), slot) }.unwrap();
    }

    fn read(&mut self, slot: usize, offset: u64) {
        self.memory.write(self.at + (slot * BLOCK) as u64, &[0xee; BLOCK]);
        let buffer = self.buffer(slot);
        // SAFETY: as above.
        unsafe { self.queue.read_raw(offset, buffer, BLOCK, slot) }.unwrap();
    }

    fn bytes(&self, slot: usize) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK];
        self.memory.read(self.at + (slot * BLOCK) as u64, &mut bytes);
        bytes
    }

    fn kick(&mut self) {
        if self.queue.avail_notif_needed() {
            self.notifier.notify().unwrap();
        }
    }

    /// Waits for completions, using the target's call. Returns slot and result of each.
    fn completed(&mut self) -> Vec<(usize, i32)> {
        self.queue.set_used_notif_enabled(true);
        while !self.queue.completions().has_next() {
            let fd = self.called.as_raw_fd();
            let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: the call gets one pollfd, which lives on this stack until the call returns.
            let ready = unsafe { libc::poll(&raw mut poll, 1, PATIENCE.as_millis() as i32) };
            assert_eq!(ready, 1, "the target does not call");
            self.called.read().unwrap();
        }
        self.queue.set_used_notif_enabled(false);
        self.queue.completions().map(|done| (done.context, done.ret)).collect()
    }

    fn alone(&mut self, submit: impl FnOnce(&mut Self)) -> i32 {
        submit(self);
        self.kick();
        let done = self.completed();
        assert_eq!(done.len(), 1);
        done[0].1
    }

    /// Writes and reads blocks, starting at `first`, with a full ring.
    fn work(&mut self, first: u64, rounds: u64) {
        let offset = |round: u64, slot: usize| {
            first + (round % 8 * DEPTH as u64 + slot as u64) * BLOCK as u64
        };
        let content = |round: u64, slot: usize| pattern(first + round * 1000 + slot as u64, BLOCK);
        let (mut round, mut reading) = ([0_u64; DEPTH], [false; DEPTH]);
        let mut left = DEPTH;
        for slot in 0..DEPTH {
            self.write(slot, offset(0, slot), &content(0, slot));
        }
        self.kick();
        while left > 0 {
            for (slot, ret) in self.completed() {
                assert_eq!(ret, 0);
                if !reading[slot] {
                    self.read(slot, offset(round[slot], slot));
                } else {
                    assert!(
                        self.bytes(slot) == content(round[slot], slot),
                        "round {}",
                        round[slot]
                    );
                    round[slot] += 1;
                    if round[slot] == rounds {
                        left -= 1;
                        continue;
                    }
                    self.write(slot, offset(round[slot], slot), &content(round[slot], slot));
                }
                reading[slot] = !reading[slot];
            }
            self.kick();
        }
    }

    /// Everything except plain reads and writes.
    fn exercise(&mut self, at: u64) {
        let bytes = pattern(at, BLOCK);
        assert_eq!(self.alone(|d| d.write(0, at, &bytes)), 0);
        assert_eq!(self.alone(|d| d.write(0, at + 4096, &bytes)), 0);
        assert_eq!(self.alone(|d| d.queue.flush(0).unwrap()), 0);
        assert_eq!(self.alone(|d| d.queue.discard(at, 4096, 0).unwrap()), 0);
        assert_eq!(self.alone(|d| d.read(0, at)), 0);
        assert!(self.bytes(0) == [0; BLOCK], "what was discarded");
        for unmap in [true, false] {
            assert_eq!(self.alone(|d| d.write(0, at, &bytes)), 0);
            assert_eq!(self.alone(|d| d.queue.write_zeroes(at, 2048, unmap, 0).unwrap()), 0);
            assert_eq!(self.alone(|d| d.read(0, at)), 0);
            assert!(self.bytes(0)[..2048] == [0; 2048] && self.bytes(0)[2048..] == bytes[2048..]);
        }
        assert_eq!(self.alone(|d| d.read(0, 64 * MIB)), -libc::EIO, "beyond the end");
    }
}

#[test]
fn an_independent_driver_reads_what_it_wrote() {
    let dir = Scratch::new("virtio-driver");
    let file = dir.file("a.img", 64 * MIB);
    let node = Node::start(dir, &["mem:64M", &format!("{file}?direct=off")]);
    let indirect = VirtioFeatureFlags::RING_INDIRECT_DESC;
    let event_idx = VirtioFeatureFlags::RING_EVENT_IDX;
    for (nth, form) in [VirtioFeatureFlags::empty(), indirect, event_idx, indirect | event_idx]
        .into_iter()
        .enumerate()
    {
        let blk = VirtioBlkFeatureFlags::all();
        let wanted = VirtioFeatureFlags::VERSION_1 | form;
        let socket = node.socket(nth % 2);
        let bits = wanted.bits() | blk.bits();
        let transport = VhostUser::new(socket.to_str().unwrap(), bits).unwrap();
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        assert!(transport.get_features() & wanted.bits() == wanted.bits(), "{form:?}");
        let config = transport.get_config().unwrap();
        assert_eq!(u64::from(config.capacity), 64 * MIB / 512);
        let bytes = (QUEUES * DEPTH * BLOCK) as u64;
        let region = Region::new(0, bytes, Pages::Small).unwrap();
        let (address, fd) = (region.user_addr() as usize, region.as_fd().as_raw_fd());
        transport.map_mem_region(address, bytes as usize, fd, 0).unwrap();
        let memory = Memory::with_regions(vec![region]);
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, QUEUES, 256).unwrap();
        let drivers = queues.into_iter().enumerate().map(|(nth, queue)| Driver {
            queue,
            notifier: transport.get_submission_notifier(nth),
            called: transport.get_completion_fd(nth),
            memory: &memory,
            at: (nth * DEPTH * BLOCK) as u64,
        });
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (nth, mut driver) in drivers.enumerate() {
                let first = nth as u64 * 8 * MIB;
                threads.push(scope.spawn(move || {
                    driver.exercise(first);
                    driver.work(first, 40);
                }));
            }
            // A sanitizer sees the end of a joined thread, but not that of the scope.
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        // The front end removes memory that contains no ring.
        transport.unmap_mem_region(address, bytes as usize).unwrap();
    }
}

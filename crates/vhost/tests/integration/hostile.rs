//! What a hostile guest can do to its neighbours: nothing. Each malformed request gets its answer
//! from the real target over real devices. An inconsistent ring stops alone; the other ring of the
//! same disk and another disk continue under load.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crate::common::{Node, PATIENCE, Scratch, pattern, until};
use frontend::message::desc::{AVAIL, INDIRECT, NEXT, USED, WRITE};
use frontend::{
    Desc, Disk, DiskOptions, Event, Memory, PackedDesc, PackedRing, Queue, Session, SplitRing,
    Status,
};

const MIB: u64 = 1 << 20;
const DISK: u64 = 16 * MIB;
const SECTORS: u64 = DISK / 512;

/// Offsets in the memory that belongs to the test.
const RING: u64 = 0;
const TABLE: u64 = 0x4000;
const HEADER: u64 = 0x8000;
const STATUS: u64 = 0x8100;
const DATA: u64 = 0x9000;
const SPARE: u64 = 0x2_0000;
/// An address with no memory.
const NOWHERE: u64 = 0xdead_0000_0000;
/// Descriptors of the ring.
const SIZE: u16 = 16;

/// Address, length, flags.
type Part = (u64, u32, u16);

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// A status and a used length.
    Answer(u8, u32),
    /// Completed with length 0 and without a status.
    Nothing,
    /// The ring is broken.
    Broken,
}

use Outcome::{Answer, Broken, Nothing};

const IOERR: Outcome = Answer(1, 1);
const UNSUPP: Outcome = Answer(2, 1);

/// A correct user of a ring that checks everything until it is told to stop.
struct Neighbour {
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Neighbour {
    /// Works on the 64 KiB at an offset.
    fn new(mut queue: Queue, at: u64) -> Neighbour {
        let (rounds, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (counts, ends) = (rounds.clone(), stop.clone());
        let work = move || {
            let mut bytes = vec![0; 16384];
            while !ends.load(Ordering::Acquire) {
                let nth = counts.load(Ordering::Relaxed);
                let written = pattern(nth + 1, bytes.len());
                let offset = at + nth % 4 * 16384;
                assert_eq!(queue.write(offset, &written).unwrap(), Status::Ok);
                assert_eq!(queue.read(offset, &mut bytes).unwrap(), Status::Ok);
                assert!(bytes == written, "round {nth}");
                counts.store(nth + 1, Ordering::Release);
            }
        };
        let thread = Some(std::thread::spawn(work));
        Neighbour { rounds, stop, thread }
    }

    /// Waits until it has completed a round that starts now.
    fn goes_on(&self) {
        let before = self.rounds.load(Ordering::Acquire);
        until("a neighbour makes progress", || {
            // The current round may have been almost complete.
            self.rounds.load(Ordering::Acquire) > before + 1
        });
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let ended = self.thread.take().expect("it runs").join();
        assert!(ended.is_ok() || std::thread::panicking(), "a neighbour has failed");
    }
}

/// A ring built by hand.
enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

/// The guest under test: its first ring belongs to a correct neighbour, its second is built by
/// hand.
struct Hostile {
    first: Neighbour,
    other: (Neighbour, Disk),
    disk: Disk,
    memory: Arc<Memory>,
    ring: Ring,
    kick: Event,
    call: Event,
    err: Event,
    /// The next entry of the available ring, or the next position of the packed one with its wrap
    /// counter in bit 15.
    next: u16,
    /// GET_VRING_BASE is due.
    started: bool,
}

/// Without an in-flight region, which can be replaced only while no ring runs.
fn options(packed: bool) -> DiskOptions {
    let inflight = false;
    DiskOptions { queues: 2, packed, inflight, spare_bytes: SPARE, ..DiskOptions::default() }
}

/// A guest that uses disk 1.
fn neighbour(node: &Node, packed: bool) -> (Neighbour, Disk) {
    let mut disk = Disk::connect(&node.socket(1), options(packed)).unwrap();
    (Neighbour::new(disk.take_queue(0), 0), disk)
}

impl Hostile {
    /// On disk 0 of the node. The other neighbour is on disk 1.
    fn new(node: &Node, packed: bool) -> Hostile {
        let other = neighbour(node, !packed);
        let mut disk = Disk::connect(&node.socket(0), options(packed)).unwrap();
        // The ring built by hand uses the beginning and the very end of the disk.
        let first = Neighbour::new(disk.take_queue(0), DISK - 128 * 1024);
        let memory = disk.memory().clone();
        let ring = if packed {
            Ring::Packed(PackedRing::new(&memory, RING, SIZE))
        } else {
            Ring::Split(SplitRing::new(&memory, RING, SIZE))
        };
        let event = || Event::new().unwrap();
        let (kick, call, err) = (event(), event(), event());
        disk.session().get_vring_base(1).unwrap();
        Hostile { first, other, disk, memory, ring, kick, call, err, next: 0, started: false }
    }

    fn session(&self) -> &Session {
        self.disk.session()
    }

    fn addresses(&self) -> [u64; 3] {
        match &self.ring {
            Ring::Split(ring) => ring.addresses(),
            Ring::Packed(ring) => ring.addresses(),
        }
    }

    fn is_packed(&self) -> bool {
        matches!(self.ring, Ring::Packed(_))
    }

    /// Stops the ring, which must be answered, and starts it empty.
    fn fresh(&mut self) {
        self.prepare();
        self.start(SIZE, self.addresses(), self.base());
    }

    fn base(&self) -> u32 {
        if self.is_packed() { 0x8000_8000 } else { 0xfffe }
    }

    fn prepare(&mut self) {
        if std::mem::take(&mut self.started) {
            self.session().get_vring_base(1).unwrap();
        }
        self.next = self.base() as u16;
        match &self.ring {
            Ring::Split(ring) => {
                ring.clear();
                ring.set_used_index(self.next);
                ring.publish(self.next);
            }
            Ring::Packed(ring) => ring.clear(),
        }
        self.kick.take();
        self.call.take();
        self.err.take();
    }

    fn start(&mut self, size: u16, addresses: [u64; 3], base: u32) {
        let session = self.session();
        session.set_vring_num(1, size).unwrap();
        session.set_vring_base(1, base).unwrap();
        session.set_vring_addr(1, &self.memory, addresses, false).unwrap();
        session.set_vring_call(1, Some(&self.call)).unwrap();
        session.set_vring_err(1, Some(&self.err)).unwrap();
        session.set_vring_kick(1, Some(&self.kick)).unwrap();
        session.set_vring_enable(1, true).unwrap();
        self.started = true;
    }

    fn header(&self, kind: u32, sector: u64) {
        self.memory
            .write(HEADER, &[&u64::from(kind).to_le_bytes()[..], &sector.to_le_bytes()].concat());
        self.memory.write(STATUS, &[0xee]);
    }

    fn range(&self, sector: u64, sectors: u32, flags: u32) {
        let words =
            [sector.to_le_bytes(), (u64::from(sectors) | u64::from(flags) << 32).to_le_bytes()];
        self.memory.write(DATA, &words.concat());
    }

    fn split(&self) -> &SplitRing {
        match &self.ring {
            Ring::Split(ring) => ring,
            Ring::Packed(_) => unreachable!("a packed ring"),
        }
    }

    fn packed(&self) -> &PackedRing {
        match &self.ring {
            Ring::Packed(ring) => ring,
            Ring::Split(_) => unreachable!("a split ring"),
        }
    }

    /// Publishes a head to the target; split rings only.
    fn publish(&mut self, head: u16) {
        self.split().set_avail(self.next, head);
        self.next = self.next.wrapping_add(1);
        self.split().publish(self.next);
        self.kick.signal();
    }

    /// The flags that make a descriptor available at this position.
    fn turn(at: u16) -> u16 {
        if at & 0x8000 != 0 { AVAIL } else { USED }
    }

    fn after(at: u16) -> u16 {
        match at & 0x7fff {
            index if index + 1 == SIZE => !at & 0x8000,
            _ => at + 1,
        }
    }

    /// Makes a chain available. The first of the ring's descriptors has id and head 3.
    fn offer(&mut self, parts: &[Part], indirect: bool) {
        let in_ring = if indirect {
            let bytes: Vec<u8> = (0..)
                .zip(parts)
                .flat_map(|(nth, &(addr, len, flags))| {
                    let last = nth + 1 == parts.len();
                    if self.is_packed() {
                        return PackedDesc { addr, len, id: 0, flags }.encode();
                    }
                    let flags = flags | if last { 0 } else { NEXT };
                    Desc { addr, len, flags, next: nth as u16 + 1 }.encode()
                })
                .collect();
            self.memory.write(TABLE, &bytes);
            vec![(TABLE, bytes.len() as u32, INDIRECT)]
        } else {
            parts.to_vec()
        };
        let more = |nth: usize| if nth + 1 < in_ring.len() { NEXT } else { 0 };
        if self.is_packed() {
            let first = self.next;
            let mut places = Vec::new();
            for (nth, &(addr, len, flags)) in in_ring.iter().enumerate() {
                let flags = flags | more(nth) | Hostile::turn(self.next);
                places.push((self.next & 0x7fff, PackedDesc { addr, len, id: 3, flags }));
                self.next = Hostile::after(self.next);
            }
            for &(at, desc) in places.iter().rev() {
                self.packed().set_desc(at, desc);
            }
            assert_eq!(places[0].0, first & 0x7fff);
            self.kick.signal();
            return;
        }
        for (nth, &(addr, len, flags)) in in_ring.iter().enumerate() {
            let next = 3 + nth as u16 + 1;
            self.split()
                .set_desc(3 + nth as u16, Desc { addr, len, flags: flags | more(nth), next });
        }
        self.publish(3);
    }

    /// The position of the next used element.
    fn used_at(&self) -> u16 {
        match &self.ring {
            Ring::Split(ring) => ring.used_index(),
            Ring::Packed(_) => self.next,
        }
    }

    /// Waits for the outcome of a chain that was offered when the used position was `at`.
    fn outcome(&self, at: u16) -> Outcome {
        let mut len = None;
        until("an answer, or the ring's err descriptor", || {
            match &self.ring {
                Ring::Split(ring) if ring.used_index() != at => {
                    let (id, written) = ring.used(at);
                    assert_eq!((ring.used_index(), id), (at.wrapping_add(1), 3));
                    len = Some(written);
                }
                Ring::Packed(ring) if ring.is_used(at & 0x7fff, at & 0x8000 != 0) => {
                    let desc = ring.desc(at & 0x7fff);
                    assert_eq!(desc.id, 3);
                    len = Some(desc.len);
                }
                _ => {}
            }
            len.is_some() || self.err.take() > 0
        });
        let mut status = [0];
        self.memory.read(STATUS, &mut status);
        match len {
            None => Broken,
            Some(0) => {
                assert_eq!(status, [0xee]);
                Nothing
            }
            Some(len) => Answer(status[0], len),
        }
    }

    fn send(&mut self, parts: &[Part], indirect: bool) -> Outcome {
        let at = self.used_at();
        self.offer(parts, indirect);
        self.outcome(at)
    }

    /// The three usual parts of a request.
    fn parts(&self, kind: u32, len: u32) -> [Part; 3] {
        let data = if matches!(kind, 0 | 8) { WRITE } else { 0 };
        [(HEADER, 16, 0), (DATA, len, data), (STATUS, 1, WRITE)]
    }

    /// The ring is broken: it completes nothing more, the neighbours do not notice, and a new start
    /// repairs it.
    fn recovers(&mut self) {
        self.first.goes_on();
        self.other.0.goes_on();
        self.kick.signal();
        self.fresh();
        self.header(0, 0);
        let parts = self.parts(0, 512);
        assert_eq!(self.send(&parts, false), Answer(0, 513), "after a new start");
    }
}

/// Runs on a device with both ring formats.
fn on_both_forms(name: &str, device: &str, play: impl Fn(&mut Hostile)) {
    for packed in [false, true] {
        let dir = Scratch::new(&format!("{name}-{packed}"));
        let file = dir.file("a.img", DISK);
        let device = device.replace("FILE", &file);
        let node = Node::start(dir, &[&device, "mem:16M"]);
        play(&mut Hostile::new(&node, packed));
    }
}

fn requests(h: &mut Hostile) {
    h.fresh();
    for indirect in [false, true] {
        // Sectors and lengths.
        for (sector, len, good) in [
            (SECTORS - 1, 512, true),
            (SECTORS - 1, 1024, false),
            (SECTORS, 512, false),
            (u64::MAX, 512, false),
            (u64::MAX >> 9, 512, false),
            (1 << 55, 512, false),
            (0, 511, false),
            (0, 513, false),
            (0, 0, false),
        ] {
            h.header(0, sector);
            let parts = h.parts(0, len);
            let expected = if good { Answer(0, len + 1) } else { IOERR };
            assert_eq!(h.send(&parts, indirect), expected, "{sector:#x} {len}");
        }
        for kind in [2, 3, 5, 7, 9, 10, 12, 14, 0x8000_0000, u32::MAX] {
            h.header(kind, 0);
            let parts = h.parts(kind, 512);
            assert_eq!(h.send(&parts, indirect), UNSUPP, "kind {kind}");
        }
        // No header or no status.
        let (header, status) = ((HEADER, 16, 0), (STATUS, 1, WRITE));
        for parts in [
            vec![header],
            vec![header, (STATUS, 1, 0)],
            vec![header, (STATUS, 0, WRITE)],
            vec![header, status, (STATUS, 0, WRITE)],
            vec![header, (NOWHERE, 1, WRITE)],
            vec![header, (u64::MAX, 2, WRITE)],
            vec![(HEADER, 0, 0)],
        ] {
            h.header(0, 0);
            assert_eq!(h.send(&parts, indirect), Nothing, "{parts:?}");
        }
        // A short header, with room for a status.
        for parts in [vec![(HEADER, 15, 0), status], vec![status]] {
            h.header(0, 0);
            assert_eq!(h.send(&parts, indirect), IOERR, "{parts:?}");
        }
        // Data in the wrong direction, at invalid addresses, or beyond the memory.
        for (kind, flags) in [(0, 0), (1, WRITE)] {
            h.header(kind, 0);
            assert_eq!(h.send(&[header, (DATA, 512, flags), status], indirect), IOERR);
        }
        for kind in [0, 1] {
            for (addr, len) in [
                (NOWHERE, 512),
                (u64::MAX - 511, 512),
                (u64::MAX - 100, 512),
                (DATA, 0xffff_fe00),
                (1 << 40, 1 << 20),
            ] {
                h.header(kind, 0);
                let data = h.parts(kind, len)[1].2;
                let outcome = h.send(&[header, (addr, len, data), status], indirect);
                assert_eq!(outcome, IOERR, "{addr:#x} {len:#x}");
            }
        }
        h.header(0, 0);
        assert_eq!(h.send(&[(NOWHERE, 16, 0), (DATA, 512, WRITE), status], indirect), IOERR);
        // Ranges of discards and of zeroes.
        for (kind, sector, sectors, flags, bytes, expected) in [
            (11, 8, 8, 0, 16, Answer(0, 1)),
            (11, 8, 8, 1, 16, UNSUPP),
            (11, 8, 8, 2, 16, UNSUPP),
            (11, 8, 0, 0, 16, IOERR),
            (11, SECTORS - 4, 5, 0, 16, IOERR),
            (11, u64::MAX, 2, 0, 16, IOERR),
            (11, 0, u32::MAX, 0, 16, IOERR),
            (11, 8, 8, 0, 15, IOERR),
            (11, 8, 8, 0, 17, IOERR),
            (11, 8, 8, 0, 32, IOERR),
            (11, 8, 8, 0, 0, IOERR),
            (13, 8, 8, 1, 16, Answer(0, 1)),
            (13, 8, 8, 2, 16, UNSUPP),
            (13, 8, 8, 0x8000_0001, 16, UNSUPP),
            (13, SECTORS, 1, 0, 16, IOERR),
        ] {
            h.header(kind, 0);
            h.range(sector, sectors, flags);
            let parts = h.parts(kind, bytes);
            assert_eq!(h.send(&parts, indirect), expected, "{kind} {sector} {sectors} {flags}");
        }
        for (len, used) in [(0, 1), (1, 2), (19, 20), (20, 21), (512, 21)] {
            h.header(8, 0);
            let parts = h.parts(8, len);
            assert_eq!(h.send(&parts, indirect), Answer(0, used));
        }
    }
    h.first.goes_on();
    h.other.0.goes_on();
    assert_eq!(h.err.take(), 0);
}

fn chains(h: &mut Hostile) {
    let (header, status) = ((HEADER, 16, 0), (STATUS, 1, WRITE));
    let (data, huge) = ((DATA, 512, WRITE), (DATA, u32::MAX, WRITE));
    for indirect in [false, true] {
        for parts in [[header, status, (DATA, 512, 0)], [header, huge, huge]] {
            h.fresh();
            h.header(0, 0);
            assert_eq!(h.send(&parts, indirect), Broken, "{parts:?}");
            h.recovers();
        }
    }
    // Impossible tables.
    let table = |addr: u64, len: u32, flags: u16| vec![(addr, len, INDIRECT | flags)];
    let mut tables: Vec<(Vec<Part>, bool)> =
        [0, 15, 17, 47, 1025 * 16, u32::MAX].map(|len| (table(TABLE, len, 0), false)).into();
    tables.push((table(NOWHERE, 48, 0), false));
    tables.push((table(u64::MAX - 20, 48, 0), false));
    tables.push((table(TABLE, 48, NEXT), false));
    tables.push((table(TABLE + 0x100, 48, 0), true));
    for (parts, nested) in tables {
        h.fresh();
        h.header(0, 0);
        assert_eq!(h.send(&parts, nested), Broken, "{parts:?}");
        h.recovers();
    }
    // A broken ring completes nothing that is in flight; here it is in the same pop.
    h.fresh();
    h.header(0, 0);
    let at = h.used_at();
    if h.is_packed() {
        h.kick.take();
        h.offer(&[header, data, status], true);
        h.offer(&[header, data, status], true);
        until("the ring breaks, or both are done", || {
            h.err.take() > 0 || h.packed().is_used(1, true)
        });
        h.recovers();
    } else {
        h.split().set_desc(3, Desc { addr: HEADER, len: 16, flags: NEXT, next: 4 });
        h.split().set_desc(4, Desc { addr: DATA, len: 513, flags: WRITE, next: 0 });
        h.split().set_avail(at, 3);
        h.split().set_avail(at.wrapping_add(1), 3);
        h.next = at.wrapping_add(2);
        h.split().publish(h.next);
        h.kick.signal();
        assert_eq!(h.outcome(at), Broken);
        assert_eq!(h.split().used_index(), at);
        h.recovers();
    }
}

fn rings(h: &mut Hostile) {
    if h.is_packed() {
        // An endless chain, and an id outside the ring.
        h.fresh();
        for at in 0..SIZE {
            h.packed()
                .set_desc(at, PackedDesc { addr: HEADER, len: 16, id: 0, flags: NEXT | AVAIL });
        }
        h.kick.signal();
        assert_eq!(h.outcome(0x8000), Broken);
        h.recovers();
        for id in [SIZE, 0x7fff, u16::MAX] {
            h.fresh();
            h.packed().set_desc(0, PackedDesc { addr: HEADER, len: 16, id, flags: AVAIL });
            h.kick.signal();
            assert_eq!(h.outcome(0x8000), Broken);
            h.recovers();
        }
    } else {
        // A loop, a link out of the table.
        for next in [3, 4, SIZE, u16::MAX] {
            h.fresh();
            h.split().set_desc(3, Desc { addr: HEADER, len: 16, flags: NEXT, next: 4 });
            h.split().set_desc(4, Desc { addr: DATA, len: 16, flags: NEXT, next });
            let at = h.used_at();
            h.publish(3);
            assert_eq!(h.outcome(at), Broken);
            h.recovers();
        }
        for head in [SIZE, SIZE + 1, u16::MAX] {
            h.fresh();
            let at = h.used_at();
            h.publish(head);
            assert_eq!(h.outcome(at), Broken);
            h.recovers();
        }
        for jump in [SIZE + 1, 0x8000, u16::MAX] {
            h.fresh();
            let at = h.used_at();
            h.split().publish(at.wrapping_add(jump));
            h.kick.signal();
            assert_eq!(h.outcome(at), Broken);
            h.recovers();
        }
    }
    // Rings that cannot be started: sizes, addresses, bases.
    let end = h.memory.regions().iter().map(|region| region.size()).sum::<u64>();
    let [desc, avail, used] = h.addresses();
    let mut setups = vec![
        (SIZE, [desc + 8, avail, used], h.base()),
        (SIZE, [desc, avail + 1, used], h.base()),
        (SIZE, [desc, avail, used + 2], h.base()),
        (SIZE, [end - 16, avail, used], h.base()),
        (SIZE, [desc, end - 2, used], h.base()),
        (SIZE, [desc, avail, end - 2], h.base()),
    ];
    if h.is_packed() {
        setups.push((SIZE, [desc, avail, used], 0x8000_8010));
        setups.push((SIZE, [desc, avail, used], 0x8000_0001));
    } else {
        setups.push((17, [desc, avail, used], h.base()));
    }
    for (size, addresses, base) in setups {
        h.prepare();
        h.start(size, addresses, base);
        assert!(h.err.wait(PATIENCE) > 0, "{size} {addresses:x?} {base:#x}");
        h.recovers();
    }
}

#[test]
fn malformed_requests_are_answered_on_memory() {
    on_both_forms("requests-mem", "mem:16M", requests);
}

#[test]
fn malformed_requests_are_answered_on_a_file() {
    on_both_forms("requests-file", "FILE", requests);
}

#[test]
fn an_impossible_chain_breaks_its_ring_and_no_other() {
    on_both_forms("chains", "FILE", chains);
}

#[test]
fn an_impossible_ring_breaks_alone() {
    on_both_forms("rings", "mem:16M", rings);
}

/// A head in flight is made available again while its request is at the device.
#[test]
fn a_head_in_flight_cannot_be_taken_twice() {
    on_both_forms("twice", "delay:read=30ms|mem:16M", |h| {
        h.fresh();
        h.header(0, 0);
        let at = h.used_at();
        let parts = h.parts(0, 512);
        h.offer(&parts, true);
        h.offer(&parts, true);
        assert_eq!(h.outcome(at), Broken);
        h.recovers();
    });
}

/// A guest that has broken its ring permanently: with an in-flight region, which remembers the
/// requests.
#[test]
fn a_reset_repairs_a_broken_ring() {
    for packed in [false, true] {
        let node = Node::start(Scratch::new(&format!("reset-{packed}")), &["mem:16M", "mem:16M"]);
        let other = neighbour(&node, packed);
        let inflight = DiskOptions { inflight: true, ..options(packed) };
        let mut disk = Disk::connect(&node.socket(0), inflight).unwrap();
        for round in 0..3_u64 {
            let mut queue = disk.take_queue(0);
            assert_eq!(queue.write(0, &pattern(round, 4096)).unwrap(), Status::Ok);
            let memory = disk.memory().clone();
            // Fill the whole ring, so that whatever is read next is invalid: a split ring's index
            // jumps, and all descriptors of a packed one are available with an impossible id.
            memory.write(SPARE, &[0x88, 0x08].repeat(4096));
            queue.kick().signal();
            until("the ring breaks", || disk.take_queue_error(0));
            // A new target finds the same invalid ring.
            if round == 1 {
                disk.reconnect(&node.socket(0)).unwrap();
                until("the ring breaks again", || disk.take_queue_error(0));
            }
            disk.reset(vec![queue]).unwrap();
            let (mut queue, mut bytes) = (disk.take_queue(0), vec![0; 4096]);
            assert_eq!(queue.read(0, &mut bytes).unwrap(), Status::Ok);
            assert!(bytes == pattern(round, 4096));
            disk.reset(vec![queue]).unwrap();
            other.0.goes_on();
        }
    }
}

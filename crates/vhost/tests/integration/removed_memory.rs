//! A front end that removes memory while requests on it are in flight. They finish in the memory
//! that they were popped with: another front end may have its own memory at the same addresses by
//! then.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use std::os::fd::AsFd;
use std::sync::Arc;

use crate::common::{Node, Scratch, pattern, until};
use frontend::message::desc::{NEXT, WRITE};
use frontend::message::{feature, request};
use frontend::{Desc, Event, Memory, Pages, Region, Session, SplitRing};

const MIB: u64 = 1 << 20;
const NUM: u16 = 256;
/// Address and length of the data of all requests.
const DATA: u64 = 16 * MIB;
const LEN: u64 = 4 * MIB;

/// A guest whose ring and data are in separate regions.
struct Guest {
    session: Session,
    memory: Arc<Memory>,
    ring: SplitRing,
    kick: Event,
}

impl Guest {
    fn connect(node: &Node, disk: usize) -> Guest {
        let mut session = Session::connect(&node.socket(disk)).unwrap();
        let region = |at, len| Region::new(at, len, Pages::Small).unwrap();
        let memory = Memory::with_regions(vec![region(0, MIB), region(DATA, 2 * LEN)]);
        let memory = Arc::new(memory);
        let ring = SplitRing::new(&memory, 0, NUM);
        let offered = session.get_features().unwrap();
        let protocol = session.get_protocol_features().unwrap();
        session.set_protocol_features(protocol).unwrap();
        session.set_owner().unwrap();
        let wanted = feature::VERSION_1 | feature::PROTOCOL_FEATURES | feature::FLUSH;
        session.set_features(offered & wanted).unwrap();
        session.set_mem_table(&memory).unwrap();
        let kick = Event::new().unwrap();
        session.set_vring_num(0, NUM).unwrap();
        session.set_vring_base(0, 0).unwrap();
        session.set_vring_addr(0, &memory, ring.addresses(), false).unwrap();
        session.set_vring_kick(0, Some(&kick)).unwrap();
        session.set_vring_enable(0, true).unwrap();
        Guest { session, memory, ring, kick }
    }

    /// Offers this many equal requests at once, all with the same data address.
    fn offer(&self, count: u16, write: bool) {
        let part = |addr, len, flags, next| Desc { addr, len, flags, next };
        let index = self.ring.avail_index();
        for nth in 0..count {
            let (at, first) = (0x1_0000 + 64 * u64::from(nth), 3 * nth);
            let head = [u64::from(write).to_le_bytes(), [0; 8]].concat();
            self.memory.write(at, &head);
            self.memory.write(at + 16, &[0xee]);
            let data = if write { 0 } else { WRITE };
            self.ring.set_desc(first, part(at, 16, NEXT, first + 1));
            let data = part(DATA, LEN as u32, data | NEXT, first + 2);
            self.ring.set_desc(first + 1, data);
            self.ring.set_desc(first + 2, part(at + 16, 1, WRITE, 0));
            self.ring.set_avail(index.wrapping_add(nth), first);
        }
        self.ring.publish(index.wrapping_add(count));
        self.kick.signal();
    }

    /// Waits for all of them. Returns how many have failed.
    fn failed(&self, count: u16) -> usize {
        until("all answers", || self.ring.used_index() == count);
        let status = |nth: u16| {
            let mut status = [0];
            self.memory.read(0x1_0010 + 64 * u64::from(nth), &mut status);
            status[0]
        };
        (0..count).filter(|&nth| status(nth) != 0).count()
    }

    fn remove_data(&self, how: How) {
        let data = &self.memory.regions()[1];
        match how {
            How::Region => self.session.rem_mem_reg(data).unwrap(),
            How::Table => {
                let first = &self.memory.regions()[0];
                let body = [&[1, 0, 0, 0, 0, 0, 0, 0][..], &first.encode()].concat();
                self.session.tell(request::SET_MEM_TABLE, &body, &[first.as_fd()]).unwrap();
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Region,
    Table,
}

/// Memory of another front end, of the same length, which nothing has a reason to write.
struct Bystander {
    session: Session,
    regions: Vec<Region>,
}

impl Bystander {
    fn connect(node: &Node, disk: usize) -> Bystander {
        let mut session = Session::connect(&node.socket(disk)).unwrap();
        let protocol = session.get_protocol_features().unwrap();
        session.set_protocol_features(protocol).unwrap();
        session.set_owner().unwrap();
        Bystander { session, regions: Vec::new() }
    }

    fn take_memory(&mut self) {
        for nth in 0..4 {
            let region = Region::new(nth * 4 * LEN, 2 * LEN, Pages::Small).unwrap();
            self.session.add_mem_reg(&region).unwrap();
            self.regions.push(region);
        }
    }

    fn is_untouched(&mut self) -> bool {
        let memory = Memory::with_regions(std::mem::take(&mut self.regions));
        let mut bytes = vec![0; 2 * LEN as usize];
        (0..4).all(|nth| {
            memory.read(nth * 4 * LEN, &mut bytes);
            bytes.iter().all(|&byte| byte == 0)
        })
    }
}

const DEVICES: [&str; 6] = [
    "delay:all=100ms|mem:64M",
    "delay:all=300ms|FILE",
    "delay:all=300ms|FILE?engine=aio",
    "delay:all=300ms|FILE?engine=mmap",
    "delay:all=300ms|FILE?engine=sync",
    "limit:bytes=600M&burst=1ms|FILE",
];

/// The device takes some of the requests at once; the others wait in the ring.
#[test]
fn requests_that_are_not_submitted_keep_their_memory() {
    for (nth, device) in DEVICES.into_iter().enumerate() {
        for how in [How::Table, How::Region] {
            let dir = Scratch::new(&format!("removed-{nth}"));
            let file = dir.file("a.img", 16 * MIB);
            let node = Node::start(dir, &[&device.replace("FILE", &file), "null:1G"]);
            let guest = Guest::connect(&node, 0);
            let mut bystander = Bystander::connect(&node, 1);
            let bytes = pattern(3, LEN as usize);
            guest.memory.write(DATA, &bytes);
            guest.offer(1, true);
            assert_eq!(guest.failed(1), 0);
            guest.memory.write(DATA, &vec![0; bytes.len()]);

            guest.ring.clear();
            guest.session.get_vring_base(0).unwrap();
            guest.session.set_vring_base(0, 0).unwrap();
            guest.session.set_vring_kick(0, Some(&guest.kick)).unwrap();
            guest.offer(40, false);
            until("some have begun", || node.stats[0][0].reads.requests.get() > 1);
            guest.remove_data(how);
            // When this is answered, no ring uses the old table.
            guest.session.get_features().unwrap();
            bystander.take_memory();
            assert!(guest.ring.used_index() < 40, "{device}: that was too fast to be tested");
            assert_eq!(guest.failed(40), 0, "{device}");
            let mut read = vec![0; bytes.len()];
            guest.memory.read(DATA, &mut read);
            assert!(read == bytes, "{device}");
            assert!(bystander.is_untouched(), "{device}");

            // Later requests do not have it.
            guest.ring.clear();
            guest.session.get_vring_base(0).unwrap();
            guest.session.set_vring_base(0, 0).unwrap();
            guest.session.set_vring_kick(0, Some(&guest.kick)).unwrap();
            guest.offer(2, false);
            assert_eq!(guest.failed(2), 2, "{device}");
        }
    }
}

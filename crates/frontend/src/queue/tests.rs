//! A queue with a packed-ring target that is played by the test.

use super::*;
use crate::Pages;

/// A target of packed rings, played by the test: no other target supports them.
struct Target {
    ring: PackedRing,
    next: u16,
    wrap: bool,
    used: u16,
    used_wrap: bool,
}

/// A chain as the target reads it.
struct Chain {
    id: u16,
    taken: u16,
    parts: Vec<(u64, u32, bool)>,
}

impl Target {
    fn step(ring: &PackedRing, at: &mut u16, wrap: &mut bool, by: u16) {
        *at += by;
        if *at >= ring.size() {
            *at -= ring.size();
            *wrap = !*wrap;
        }
    }

    fn pop(&mut self) -> Option<Chain> {
        let flags = self.ring.flags(self.next);
        let (avail, used) = (flags & desc::AVAIL != 0, flags & desc::USED != 0);
        if avail != self.wrap || used == self.wrap {
            return None;
        }
        let mut chain = Chain { id: 0, taken: 0, parts: Vec::new() };
        loop {
            let found = self.ring.desc(self.next);
            let turn = desc::AVAIL | desc::USED;
            assert_eq!(found.flags & turn, available(self.wrap), "all of it is there");
            chain.id = found.id;
            chain.taken += 1;
            Target::step(&self.ring, &mut self.next, &mut self.wrap, 1);
            if found.flags & desc::INDIRECT != 0 {
                for at in (0..u64::from(found.len)).step_by(16) {
                    let mut bytes = [0; 16];
                    self.ring.memory().read(found.addr + at, &mut bytes);
                    let addr = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                    let len = u32::from_le_bytes(bytes[8..12].try_into().unwrap());
                    let flags = u16::from_le_bytes(bytes[14..].try_into().unwrap());
                    assert_eq!(flags & !desc::WRITE, 0);
                    chain.parts.push((addr, len, flags & desc::WRITE != 0));
                }
            } else {
                let write = found.flags & desc::WRITE != 0;
                chain.parts.push((found.addr, found.len, write));
            }
            if found.flags & desc::NEXT == 0 {
                return Some(chain);
            }
        }
    }

    fn push(&mut self, chain: &Chain, len: u32) {
        let flags = if self.used_wrap { desc::AVAIL | desc::USED } else { 0 };
        self.ring.set_desc(self.used, PackedDesc { addr: 0, len, id: chain.id, flags });
        Target::step(&self.ring, &mut self.used, &mut self.used_wrap, chain.taken);
    }
}

fn shape(indirect: bool) -> Shape {
    Shape {
        size: 16,
        depth: 3,
        packed: true,
        indirect,
        event_index: true,
        slot_bytes: 2048,
        segments: 2,
    }
}

fn pair(shape: Shape) -> (Queue, Target, Arc<Memory>) {
    let memory = Arc::new(Memory::new(1 << 20, Pages::Small).unwrap());
    let (kick, call) = (Arc::new(Event::new().unwrap()), Arc::new(Event::new().unwrap()));
    let queue = Queue::new(&memory, 4096, shape, kick, call);
    let ring = PackedRing::new(&memory, 4096, shape.size);
    let target = Target { ring, next: 0, wrap: true, used: 0, used_wrap: true };
    (queue, target, memory)
}

#[test]
fn chains_of_a_packed_ring_come_back_in_any_order() {
    for indirect in [false, true] {
        let (mut queue, mut target, memory) = pair(shape(indirect));
        let mut done = Vec::new();
        // With no data, one segment or two, the ring wraps at every position.
        for round in 0..200u64 {
            let slots: Vec<Slot> = std::iter::from_fn(|| queue.take()).collect();
            assert_eq!(slots.len(), 3);
            queue.submit(slots[0], Request::Read { offset: round * 512, len: 512 });
            queue.submit(slots[1], Request::Write { offset: 0, len: 2048 });
            assert!(target.pop().is_none(), "nothing is seen before it is published");
            if round % 3 == 0 {
                queue.submit(slots[2], Request::Flush);
            } else {
                queue.give_back(slots[2]);
            }
            queue.publish();
            let mut chains: Vec<Chain> = std::iter::from_fn(|| target.pop()).collect();
            assert_eq!(chains.len(), queue.in_flight());
            let lens = |chain: &Chain| chain.parts.iter().map(|p| p.1).collect::<Vec<_>>();
            assert_eq!(lens(&chains[0]), [16, 512, 1]);
            assert_eq!(lens(&chains[1]), [16, 1024, 1024, 1]);
            let mut header = [0; 16];
            memory.read(chains[0].parts[0].0, &mut header);
            assert_eq!(header[8..], round.to_le_bytes());
            if round % 2 == 0 {
                chains.reverse();
            }
            for chain in &chains {
                let (status, _, write) = *chain.parts.last().unwrap();
                assert!(write);
                memory.write(status, &[chain.id as u8 % 3]);
                target.push(chain, 1 + u32::from(chain.id));
            }
            done.clear();
            assert_eq!(queue.poll(&mut done).unwrap(), chains.len());
            for (completion, chain) in done.iter().zip(&chains) {
                assert_eq!(completion.slot.0, chain.id);
                assert_eq!(completion.status, Status::from(chain.id as u8 % 3));
                assert_eq!(completion.written, 1 + u32::from(chain.id));
                queue.give_back(completion.slot);
            }
            let base = u32::from(target.next | u16::from(target.wrap) << 15);
            assert_eq!(queue.base(), base | base << 16, "both sides are at the same place");
        }
    }
}

#[test]
fn a_packed_ring_is_kicked_when_the_target_asks_for_it() {
    let (mut queue, mut target, memory) = pair(shape(true));
    let [.., device] = target.ring.addresses();
    let event = |off_wrap: u16, flags: u16| {
        memory.write(device, &[off_wrap.to_le_bytes(), flags.to_le_bytes()].concat());
    };
    let mut done = Vec::new();
    for nth in 0..40u16 {
        let (next, wrap) = (target.next, u16::from(target.wrap) << 15);
        // An event at the next descriptor; at the one after it; no kicks; always kick.
        let after = if next == 15 { wrap ^ 0x8000 } else { (next + 1) | wrap };
        let wanted = match nth % 4 {
            0 => (next | wrap, 2, true),
            1 => (after, 2, false),
            2 => (0, 1, false),
            _ => (0, 0, true),
        };
        event(wanted.0, wanted.1);
        let slot = queue.take().unwrap();
        queue.submit(slot, Request::Flush);
        assert_eq!(queue.publish(), wanted.2, "{nth}");
        let chain = target.pop().unwrap();
        target.push(&chain, 1);
        queue.poll(&mut done).unwrap();
        queue.give_back(slot);
    }
}

#[test]
fn a_completion_must_be_in_flight() {
    for id in [2, 3, 77] {
        let (mut queue, mut target, _memory) = pair(shape(true));
        let slot = queue.take().unwrap();
        queue.submit(slot, Request::Flush);
        queue.publish();
        let chain = target.pop().unwrap();
        target.push(&Chain { id, ..chain }, 1);
        assert_eq!(queue.poll(&mut Vec::new()).unwrap_err().kind(), Kind::Ring);
    }
    let (mut queue, _, memory) = pair(Shape { packed: false, ..shape(false) });
    let ring = SplitRing::new(&memory, 4096, 16);
    let slot = queue.take().unwrap();
    queue.submit(slot, Request::Flush);
    queue.publish();
    ring.set_used_index(2);
    assert_eq!(queue.poll(&mut Vec::new()).unwrap_err().kind(), Kind::Ring);
    let used = ring.addresses()[2];
    for id in [1u8, 4, 99] {
        memory.write(used + 4, &[id, 0, 0, 0, 1, 0, 0, 0]);
        ring.set_used_index(1);
        assert_eq!(queue.poll(&mut Vec::new()).unwrap_err().kind(), Kind::Ring, "{id}");
    }
    memory.write(used + 4, &[0; 8]);
    assert_eq!(queue.poll(&mut Vec::new()).unwrap(), 1);
}

//! What a guest may do wrong, and the ring's answers.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

use bdev::Kind;

use super::guest::*;
use crate::*;

/// The outcome of a request.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// Passed to the device: kind, offset, bytes, segments; and the used length after success.
    Device(Kind, u64, u64, usize, u32),
    /// Answered without the device: status byte and used length.
    Answer(u8, u32),
    /// Completed without a status: the byte is unchanged, and the used length is 0.
    Nothing,
    Broken(Fault),
}

use Outcome::*;

const IOERR: Outcome = Answer(1, 1);
const UNSUPP: Outcome = Answer(2, 1);
/// An address with no memory.
const NOWHERE: u64 = 0xdead_0000_0000;
const END: u64 = GPA + MEMORY_LEN as u64;

struct Try {
    guest: Guest,
    ring: Ring,
    disk: Disk,
    /// The head whose buffers the request uses.
    buffer: u16,
}

impl Try {
    fn new(form: Form, features: u64) -> Try {
        let start = if form == Form::Split { 7 } else { 0x8003 };
        let guest = Guest::new(form, 16, start, features);
        let ring = guest.start(None);
        Try { guest, ring, disk: disk(), buffer: 0 }
    }

    /// The next request's head, with this header in its buffers, and the three usual descriptors.
    fn prepare(&mut self, kind: u32, sector: u64) -> (u16, [(u64, u32, u16); 3]) {
        let head = self.guest.next_head(true, 1).unwrap();
        self.guest.header(head, kind, sector);
        self.buffer = head;
        (head, Guest::parts(head, kind))
    }

    fn outcome(&mut self) -> Outcome {
        let mut tags = Vec::new();
        match self.ring.pop(&self.guest.memory, &self.disk, 9, &mut tags) {
            Err(fault) => {
                assert!(tags.is_empty());
                assert_eq!(self.ring.broken(), Some(fault));
                // The ring stays broken: it pops and completes nothing more.
                let again = self.ring.pop(&self.guest.memory, &self.disk, 9, &mut tags);
                assert_eq!(again, Err(fault));
                assert_eq!(self.ring.complete(&self.guest.memory, None, &[]), 0);
                assert!(self.guest.collect().is_empty());
                assert!(self.ring.arm_kick(None) && !self.ring.has_work());
                assert_eq!(self.ring.in_flight(), 0);
                return Broken(fault);
            }
            Ok(count) => assert_eq!(count, 1),
        }
        let asked = tags.first().map(|&tag| {
            let request = self.ring.request(tag);
            assert!(request.segments.iter().all(|segment| segment.iov_len > 0));
            let sum: usize = request.segments.iter().map(|segment| segment.iov_len).sum();
            if matches!(request.kind, Kind::Read | Kind::Write) {
                assert_eq!(sum as u64, request.len);
            }
            (request.kind, request.offset, request.len, request.segments.len())
        });
        let finished: Vec<_> =
            tags.iter().map(|&tag| Finished { tag, status: Status::Ok }).collect();
        assert_eq!(self.ring.complete(&self.guest.memory, None, &finished), 1);
        let back = self.guest.collect();
        assert_eq!(back.len(), 1);
        let (status, used) = (self.guest.status(self.buffer), back[0].2);
        match asked {
            Some((kind, offset, len, segments)) => Device(kind, offset, len, segments, used),
            None if used == 0 => {
                assert_eq!(status, 0xee);
                Nothing
            }
            None => Answer(status, used),
        }
    }

    fn send(&mut self, parts: &[(u64, u32, u16)], indirect: bool) -> Outcome {
        assert!(self.guest.offer(0, parts, indirect));
        self.outcome()
    }
}

/// Runs a case with direct and indirect descriptors in both ring formats.
fn everywhere(case: impl Fn(&mut Try, bool)) {
    for form in [Form::Split, Form::Packed] {
        for indirect in [false, true] {
            case(&mut Try::new(form, F_INDIRECT_DESC), indirect);
        }
    }
}

#[test]
fn sectors_and_lengths_are_checked() {
    everywhere(|t, indirect| {
        let sectors = [
            (1023, true),
            (1024, false),
            (1025, false),
            (u64::MAX, false),
            (u64::MAX >> 9, false),
            (1 << 55, false),
            ((1 << 55) + 1, false),
        ];
        for (sector, good) in sectors {
            let (_, parts) = t.prepare(0, sector);
            let expected = if good { Device(Kind::Read, sector * 512, 512, 1, 513) } else { IOERR };
            assert_eq!(t.send(&parts, indirect), expected, "{sector:#x}");
        }
        // A disk with an impossibly large number of sectors.
        t.disk.capacity_sectors = u64::MAX;
        let (_, parts) = t.prepare(0, u64::MAX - 1);
        assert_eq!(t.send(&parts, indirect), IOERR);
        t.disk.capacity_sectors = 1024;
        for (sector, len, good) in [
            (1022, 1024, true),
            (1022, 1536, false),
            (0, 511, false),
            (0, 513, false),
            (0, 0, false),
        ] {
            for kind in [0, 1] {
                let (_, mut parts) = t.prepare(kind, sector);
                parts[1].1 = len;
                let (kind, used) = if kind == 0 { (Kind::Read, len + 1) } else { (Kind::Write, 1) };
                let expected = Device(kind, sector * 512, u64::from(len), 1, used);
                let outcome = t.send(&parts, indirect);
                assert_eq!(outcome, if good { expected } else { IOERR }, "{sector} {len}");
            }
        }
        t.disk.block_size = 4096;
        for (sector, len, good) in [(8, 4096, true), (4, 4096, false), (8, 512, false)] {
            let (_, mut parts) = t.prepare(0, sector);
            parts[1].1 = len;
            let expected = Device(Kind::Read, sector * 512, u64::from(len), 1, len + 1);
            assert_eq!(t.send(&parts, indirect), if good { expected } else { IOERR });
        }
    });
}

#[test]
fn unknown_and_forbidden_kinds_are_answered() {
    everywhere(|t, indirect| {
        for kind in [2, 3, 5, 7, 9, 10, 12, 14, 15, 0x8000_0000, 0x8000_0001, u32::MAX] {
            let (_, parts) = t.prepare(kind, 0);
            assert_eq!(t.send(&parts, indirect), UNSUPP, "{kind}");
        }
        let (_, parts) = t.prepare(4, 0);
        assert_eq!(t.send(&[parts[0], parts[2]], indirect), Device(Kind::Flush, 0, 0, 0, 1));
        t.disk.read_only = true;
        for kind in [1, 11, 13] {
            let (_, parts) = t.prepare(kind, 0);
            assert_eq!(t.send(&parts, indirect), IOERR, "{kind}");
        }
        let (_, parts) = t.prepare(0, 0);
        assert_eq!(t.send(&parts, indirect), Device(Kind::Read, 0, 512, 1, 513));
        t.disk.discard = false;
        t.disk.write_zeroes = false;
        for kind in [11, 13] {
            let (_, parts) = t.prepare(kind, 0);
            assert_eq!(t.send(&parts, indirect), UNSUPP);
        }
    });
}

#[test]
fn ranges_are_checked() {
    let wz = |unmap| Kind::WriteZeroes { unmap };
    everywhere(|t, indirect| {
        let cases = [
            (11, 8, 64, 0, 16, Device(Kind::Discard, 4096, 32768, 0, 1)),
            (11, 8, 65, 0, 16, IOERR),
            (11, 8, 8, 1, 16, UNSUPP),
            (11, 8, 8, 2, 16, UNSUPP),
            (11, 8, 0, 0, 16, IOERR),
            (11, 1020, 5, 0, 16, IOERR),
            (11, u64::MAX, 2, 0, 16, IOERR),
            (11, 8, 8, 0, 15, IOERR),
            (11, 8, 8, 0, 17, IOERR),
            (11, 8, 8, 0, 0, IOERR),
            (11, 8, 8, 0, 32, IOERR),
            (13, 8, 32, 0, 16, Device(wz(false), 4096, 16384, 0, 1)),
            (13, 8, 32, 1, 16, Device(wz(true), 4096, 16384, 0, 1)),
            (13, 8, 33, 0, 16, IOERR),
            (13, 8, 8, 2, 16, UNSUPP),
            (13, 8, 8, 0x8000_0001, 16, UNSUPP),
            (13, 1024, 1, 0, 16, IOERR),
        ];
        for (kind, sector, sectors, flags, bytes, expected) in cases {
            let (_, mut parts) = t.prepare(kind, 0);
            let at = (parts[1].0 - GPA) as usize;
            t.guest.own.store_u64(at, sector, Relaxed);
            t.guest.own.store_u32(at + 8, sectors, Relaxed);
            t.guest.own.store_u32(at + 12, flags, Relaxed);
            parts[1].1 = bytes;
            let what = format!("{kind} {sector} {sectors} {flags} {bytes}");
            assert_eq!(t.send(&parts, indirect), expected, "{what}");
        }
        t.disk.write_zeroes_may_unmap = false;
        let (_, mut parts) = t.prepare(13, 0);
        let at = (parts[1].0 - GPA) as usize;
        t.guest.own.store_u64(at, 0, Relaxed);
        t.guest.own.store_u64(at + 8, 8 | 1 << 32, Relaxed);
        parts[1].1 = 16;
        assert_eq!(t.send(&parts, indirect), Device(wz(false), 0, 4096, 0, 1));
    });
}

#[test]
fn requests_beyond_the_negotiated_limits_are_refused() {
    everywhere(|t, indirect| {
        // Data in pieces of these lengths.
        let mut send = |lengths: &[u32], most: (u32, u32)| {
            (t.disk.segments_max, t.disk.segment_bytes_max) = most;
            let (_, p) = t.prepare(1, 0);
            let pieces = lengths.iter().map(|&len| (p[1].0, len, 0));
            let parts: Vec<_> = [p[0]].into_iter().chain(pieces).chain([p[2]]).collect();
            t.send(&parts, indirect)
        };
        assert!(matches!(send(&[512, 512], (2, 512)), Device(..)));
        assert_eq!(send(&[512, 256, 256], (2, 512)), IOERR);
        assert_eq!(send(&[1024], (2, 512)), IOERR);
        // A guest that accepted no limits has none.
        assert!(matches!(send(&[512, 256, 256], (u32::MAX, 512)), Device(..)));
        assert!(matches!(send(&[1024], (2, u32::MAX)), Device(..)));
    });
}

#[test]
fn without_a_header_or_a_status_nothing_is_written() {
    everywhere(|t, indirect| {
        for kind in [0, 1, 4, 8] {
            let (_, p) = t.prepare(kind, 0);
            let readable_status = (p[2].0, 1, 0);
            let empty_status = (p[2].0, 0, WRITE);
            let outside_status = (NOWHERE, 1, WRITE);
            let over_status = (u64::MAX, 2, WRITE);
            let cases = [
                vec![p[0]],
                vec![p[0], readable_status],
                vec![p[0], empty_status],
                vec![p[0], p[2], empty_status],
                vec![p[0], outside_status],
                vec![p[0], over_status],
                vec![p[0], (END - 1, 2, WRITE)],
                vec![(p[0].0, 0, 0)],
            ];
            for parts in cases {
                let before = t.ring.malformed();
                t.prepare(kind, 0);
                assert_eq!(t.send(&parts, indirect), Nothing, "{kind} {parts:?}");
                assert_eq!(t.ring.malformed(), before + 1);
            }
        }
    });
}

#[test]
fn a_short_header_is_an_error_if_there_is_room_for_a_status() {
    everywhere(|t, indirect| {
        for kind in [0, 1, 4, 8] {
            for len in [Some(15), Some(0), None] {
                let (_, p) = t.prepare(kind, 0);
                let header = len.map(|len| (p[0].0, len, 0));
                let parts: Vec<_> = header.into_iter().chain([p[2]]).collect();
                assert_eq!(t.send(&parts, indirect), IOERR, "{kind} {parts:?}");
            }
        }
    });
}

#[test]
fn data_in_the_wrong_direction_or_outside_memory_is_an_error() {
    everywhere(|t, indirect| {
        // A read with only readable data, and a write with only writable data.
        let (_, mut parts) = t.prepare(0, 0);
        parts[1].2 = 0;
        assert_eq!(t.send(&parts, indirect), IOERR);
        let (_, mut parts) = t.prepare(1, 0);
        parts[1].2 = WRITE;
        assert_eq!(t.send(&parts, indirect), IOERR);
        for kind in [0, 1] {
            for (addr, len) in [
                (NOWHERE, 512),
                (u64::MAX - 511, 512),
                (u64::MAX - 100, 512),
                (END - 511, 512),
                (GPA - 512, 1024),
                (GPA, MEMORY_LEN as u32 + 512),
                (GPA, 0xffff_fe00),
            ] {
                let (_, mut parts) = t.prepare(kind, 0);
                (parts[1].0, parts[1].1) = (addr, len);
                t.disk.capacity_sectors = 1 << 40;
                assert_eq!(t.send(&parts, indirect), IOERR, "{addr:#x} {len:#x}");
            }
        }
        // The header's address is invalid, but the status's is valid.
        let (_, mut parts) = t.prepare(0, 0);
        parts[0].0 = NOWHERE;
        assert_eq!(t.send(&parts, indirect), IOERR);
        let (_, mut parts) = t.prepare(0, 0);
        parts[0].0 = END - 8;
        assert_eq!(t.send(&parts, indirect), IOERR);
    });
}

#[test]
fn boundaries_of_descriptors_have_no_meaning() {
    everywhere(|t, indirect| {
        // The header in three pieces, an empty descriptor between them, data in the descriptor of
        // the header's end, status in that of the data.
        let (_, p) = t.prepare(1, 3);
        let at = p[0].0;
        t.guest.header(t.guest.next_head(true, 1).unwrap(), 1, 3);
        let parts = [(at, 5, 0), (at + 5, 0, 0), (at + 5, 3, 0), (at + 8, 8, 0), p[1], p[2]];
        assert_eq!(t.send(&parts, indirect), Device(Kind::Write, 1536, 512, 1, 1));
        let (_, p) = t.prepare(1, 0);
        // The head's buffer: header, then the status at 16; the data begins in the header's
        // descriptor.
        let parts = [(p[0].0, 16 + 48, 0), (p[1].0, 464, 0), p[2]];
        assert_eq!(t.send(&parts, indirect), Device(Kind::Write, 0, 512, 2, 1));
        let (head, p) = t.prepare(0, 0);
        let parts = [p[0], (p[1].0, 100, WRITE), (p[1].0, 0, WRITE), (p[1].0 + 100, 413, WRITE)];
        assert_eq!(t.send(&parts, indirect), Device(Kind::Read, 0, 512, 2, 513));
        assert_eq!(t.guest.own.load_u8((p[1].0 - GPA) as usize + 512, Relaxed), 0);
        assert_eq!(t.guest.status(head), 0xee, "it is the last writable byte that is written");
        // The readable part of a read's data, and the writable part of a write's, are ignored.
        let (_, p) = t.prepare(0, 0);
        let parts = [p[0], (p[1].0, 77, 0), p[1], p[2]];
        assert_eq!(t.send(&parts, indirect), Device(Kind::Read, 0, 512, 1, 513));
    });
}

#[test]
fn a_buffer_over_two_regions_is_split() {
    for form in [Form::Split, Form::Packed] {
        let mut t = Try::new(form, F_INDIRECT_DESC);
        let half = MEMORY_LEN as u64 / 2;
        let fd = t.guest._fd.as_fd();
        let info = *t.guest.memory.regions().next().unwrap();
        let low = RegionInfo { size: half, ..info };
        let high = RegionInfo {
            guest_addr: info.guest_addr + half,
            size: half,
            user_addr: info.user_addr + (1 << 40),
            mmap_offset: half,
        };
        t.guest.memory = t.guest.memory.replace(&[(high, fd), (low, fd)]).unwrap();
        let (_, mut parts) = t.prepare(0, 0);
        parts[1].0 = GPA + half - 100;
        assert_eq!(t.send(&parts, false), Device(Kind::Read, 0, 512, 2, 513));
        // A header across the boundary.
        let (_, parts) = t.prepare(0, 9);
        for i in 0..2 {
            let word = t.guest.own.load_u64((parts[0].0 - GPA) as usize + i * 8, Relaxed);
            t.guest.own.store_u64(half as usize - 8 + i * 8, word, Relaxed);
        }
        let parts = [(GPA + half - 8, 16, 0), parts[1], parts[2]];
        assert_eq!(t.send(&parts, true), Device(Kind::Read, 9 * 512, 512, 1, 513));
        // A descriptor of an indirect table across the boundary.
        let (_, parts) = t.prepare(0, 7);
        let table = half as usize - 24;
        for (i, &(addr, len, flags)) in parts.iter().enumerate() {
            let next = if i < 2 { NEXT } else { 0 };
            t.guest.desc(table + i * 16, addr, len, flags | next, i as u16 + 1);
        }
        let table = (GPA + table as u64, 48, INDIRECT);
        assert_eq!(t.send(&[table], false), Device(Kind::Read, 7 * 512, 512, 1, 513));
    }
}

#[test]
fn the_serial_number_is_returned_as_far_as_it_fits() {
    everywhere(|t, indirect| {
        for len in [0_u32, 1, 19, 20, 21, 512] {
            let (_, mut parts) = t.prepare(8, 0);
            (parts[1].1, parts[1].2) = (len, WRITE);
            let at = (parts[1].0 - GPA) as usize;
            for i in 0..24 {
                t.guest.own.store_u8(at + i, b'.', Relaxed);
            }
            let given = len.min(20);
            assert_eq!(t.send(&parts, indirect), Answer(0, given + 1));
            let name: Vec<u8> = (0..24).map(|i| t.guest.own.load_u8(at + i, Relaxed)).collect();
            let mut expected = b"........................".to_vec();
            expected[..given as usize].copy_from_slice(&disk().serial[..given as usize]);
            assert_eq!(name, expected);
        }
        assert_eq!(t.ring.malformed(), 0);
        let (_, mut parts) = t.prepare(8, 0);
        parts[1] = (NOWHERE, 20, WRITE);
        assert_eq!(t.send(&parts, indirect), IOERR);
    });
}

#[test]
fn impossible_chains_break_the_ring() {
    everywhere(|t, indirect| {
        let (_, p) = t.prepare(0, 0);
        let parts = [p[0], p[2], p[1], (p[1].0, 1, 0)];
        assert_eq!(t.send(&parts, indirect), Broken(Fault::ReadableAfterWritable));
    });
    everywhere(|t, indirect| {
        let (_, p) = t.prepare(0, 0);
        let huge = (p[1].0, u32::MAX, WRITE);
        assert_eq!(t.send(&[p[0], huge, huge], indirect), Broken(Fault::ChainTooLarge));
    });
    everywhere(|t, indirect| {
        // 4 GiB in all is a valid chain, with more data than a request may have.
        let (_, p) = t.prepare(0, 0);
        t.disk.capacity_sectors = 1 << 40;
        let data = (p[1].0, u32::MAX - 16, WRITE);
        assert_eq!(t.send(&[p[0], data, p[2]], indirect), IOERR);
    });
}

#[test]
fn impossible_indirect_tables_break_the_ring() {
    for form in [Form::Split, Form::Packed] {
        let send = |features, flags, addr: fn(u64) -> u64, len| {
            let mut t = Try::new(form, features);
            let (_, parts) = t.prepare(0, 0);
            let table = parts[1].0;
            for (i, &(addr, len, flags)) in parts.iter().enumerate() {
                let next = if i < 2 { NEXT } else { 0 };
                t.guest.desc((table - GPA) as usize + i * 16, addr, len, flags | next, 1);
            }
            t.send(&[(addr(table), len, INDIRECT | flags)], false)
        };
        let feature = F_INDIRECT_DESC;
        let unexpected = Broken(Fault::IndirectUnexpected);
        assert_eq!(send(0, 0, |at| at, 48), unexpected);
        assert_eq!(send(feature, NEXT, |at| at, 48), unexpected);
        for len in [0, 15, 17, 47, 1025 * 16, u32::MAX, u32::MAX - 15] {
            assert_eq!(send(feature, 0, |at| at, len), Broken(Fault::IndirectLength(len)));
        }
        for (at, addr) in [
            (NOWHERE, (|_| NOWHERE) as fn(u64) -> u64),
            (u64::MAX - 20, |_| u64::MAX - 20),
            (END - 40, |_| END - 40),
        ] {
            let outcome = send(feature, 0, addr, 48);
            let same = outcome == Broken(Fault::IndirectUnmapped(at));
            // The table may reach the end of memory; no chain may reach beyond it.
            assert!(same || at == END - 40, "{outcome:?}");
        }
        // A table in a table.
        let mut t = Try::new(form, feature);
        let (_, parts) = t.prepare(0, 0);
        let nested = [(parts[1].0, 48, INDIRECT)];
        assert_eq!(t.send(&nested, true), unexpected);
        // The write flag of the descriptor of an indirect table is ignored.
        let mut t = Try::new(form, feature);
        let (_, p) = t.prepare(0, 0);
        let table = p[1].0 + 256;
        for (i, &(addr, len, flags)) in p.iter().enumerate() {
            let next = if i < 2 { NEXT } else { 0 };
            t.guest.desc((table - GPA) as usize + i * 16, addr, len, flags | next, i as u16 + 1);
        }
        assert_eq!(
            t.send(&[(table, 48, INDIRECT | WRITE)], false),
            Device(Kind::Read, 0, 512, 1, 513)
        );
    }
    // Split: a table may follow other descriptors; its links must stay inside it and must not loop.
    let mut t = Try::new(Form::Split, F_INDIRECT_DESC);
    let (_, p) = t.prepare(0, 0);
    let table = p[1].0 + 256;
    for (i, &(addr, len, flags)) in p[1..].iter().enumerate() {
        let next = if i == 0 { NEXT } else { 0 };
        t.guest.desc((table - GPA) as usize + i * 16, addr, len, flags | next, i as u16 + 1);
    }
    assert_eq!(t.send(&[p[0], (table, 32, INDIRECT)], false), Device(Kind::Read, 0, 512, 1, 513));
    for (next, fault) in [(2, Fault::NextRange(2)), (0, Fault::ChainTooLong)] {
        let mut t = Try::new(Form::Split, F_INDIRECT_DESC);
        let (_, p) = t.prepare(0, 0);
        t.guest.desc((table - GPA) as usize, p[1].0, 8, WRITE | NEXT, 1);
        t.guest.desc((table - GPA) as usize + 16, p[1].0, 8, WRITE | NEXT, next);
        assert_eq!(t.send(&[(table, 32, INDIRECT)], false), Broken(fault));
    }
}

#[test]
fn impossible_split_rings_break() {
    let fresh = || Try::new(Form::Split, F_INDIRECT_DESC);
    // A loop, and a link out of the table.
    for (next, fault) in [
        (0, Fault::ChainTooLong),
        (1, Fault::ChainTooLong),
        (16, Fault::NextRange(16)),
        (u16::MAX, Fault::NextRange(u16::MAX)),
    ] {
        let mut t = fresh();
        t.guest.desc(0, GPA, 16, NEXT, 1);
        t.guest.desc(16, GPA, 16, NEXT, next);
        t.guest.publish(0);
        assert_eq!(t.outcome(), Broken(fault));
    }
    for head in [16, 17, u16::MAX] {
        let mut t = fresh();
        t.guest.publish(head);
        assert_eq!(t.outcome(), Broken(Fault::HeadRange(head)));
    }
    // The index may be at most a whole ring ahead.
    let mut t = fresh();
    let next = t.ring.base() as u16;
    t.guest.own.store_u16(0x1_0000 + 2, next + 17, Relaxed);
    assert_eq!(t.outcome(), Broken(Fault::AvailableJump { next, available: next + 17 }));
    // The same head twice, in one pop and in two.
    for apart in [false, true] {
        let mut t = fresh();
        assert!(t.guest.add(0, true));
        let head = *t.guest.pending.keys().next().unwrap();
        let mut tags = Vec::new();
        if apart {
            t.ring.pop(&t.guest.memory, &t.disk, 9, &mut tags).unwrap();
            t.guest.publish(head);
        } else {
            t.guest.publish(head);
        }
        let broken = t.ring.pop(&t.guest.memory, &t.disk, 9, &mut tags);
        assert_eq!(broken, Err(Fault::HeadBusy(head)));
        // Earlier requests in flight are not completed.
        assert_eq!(t.ring.in_flight(), tags.len());
        let finished: Vec<_> =
            tags.iter().map(|&tag| Finished { tag, status: Status::Ok }).collect();
        assert_eq!(t.ring.complete(&t.guest.memory, None, &finished), 0);
        assert_eq!(t.ring.in_flight(), 0);
        assert!(t.guest.collect().is_empty());
    }
}

#[test]
fn impossible_packed_rings_break() {
    let fresh = || Try::new(Form::Packed, F_INDIRECT_DESC);
    let avail = 0x80;
    // An endless chain; one with an id outside the ring; the same id twice.
    let mut t = fresh();
    for i in 0..16 {
        t.guest.desc(i * 16, GPA, 16, NEXT | avail, 0);
    }
    assert_eq!(t.outcome(), Broken(Fault::ChainTooLong));
    let mut t = fresh();
    t.guest.desc(3 * 16, GPA, 16, avail, 16);
    assert_eq!(t.outcome(), Broken(Fault::HeadRange(16)));
    let mut t = fresh();
    t.guest.desc(3 * 16, GPA, 16, avail, 5);
    t.guest.desc(4 * 16, GPA, 16, avail, 5);
    assert_eq!(t.outcome(), Broken(Fault::HeadBusy(5)));
    // More descriptors than the ring has: the guest withdraws one that it had made available.
    let mut t = fresh();
    let mut tags = Vec::new();
    while t.guest.offer(0, &Guest::parts(0, 4), false) {}
    assert_eq!(t.ring.pop(&t.guest.memory, &t.disk, 99, &mut tags), Ok(5));
    t.guest.desc(2 * 16, GPA, 16, NEXT | 0x8000, 15);
    t.guest.desc(3 * 16, GPA, 16, 0x8000, 15);
    assert_eq!(t.ring.pop(&t.guest.memory, &t.disk, 99, &mut tags), Err(Fault::ChainTooLong));
}

#[test]
fn impossible_setups_are_refused() {
    for form in [Form::Split, Form::Packed] {
        let guest = Guest::new(form, 16, 0x8000, F_EVENT_IDX);
        let refuse = |change: fn(&mut Setup), fault| {
            let mut setup = guest.setup();
            change(&mut setup);
            assert_eq!(Ring::start(&guest.memory, &setup, None).unwrap_err(), fault);
        };
        refuse(|s| s.num = 0, Fault::Size(0));
        refuse(|s| s.num = 32769, Fault::Size(32769));
        let names = match form {
            Form::Split => ["descriptor table", "available ring", "used ring"],
            Form::Packed => ["descriptor ring", "driver event area", "device event area"],
        };
        refuse(|s| s.desc += 1 << 40, Fault::Unmapped(names[0]));
        refuse(|s| s.desc += 8, Fault::Misaligned(names[0]));
        refuse(|s| s.avail = u64::MAX - 3, Fault::Unmapped(names[1]));
        refuse(|s| s.avail += 1, Fault::Misaligned(names[1]));
        refuse(|s| s.used = 0, Fault::Unmapped(names[2]));
        refuse(|s| s.used += 2, Fault::Misaligned(names[2]));
        match form {
            Form::Split => {
                refuse(|s| s.num = 17, Fault::Size(17));
                refuse(|s| s.base = 1 << 16, Fault::Base(1 << 16));
            }
            Form::Packed => {
                refuse(|s| s.base = 0x8000_8010, Fault::Base(0x8000_8010));
                refuse(|s| s.base = 0x8000_8001 ^ 0x8000, Fault::Base(0x8000_0001));
            }
        }
    }
}

/// A broken ring, and a request with everything wrong, cost a bounded amount of work in each pop.
#[test]
fn a_pop_reads_a_bounded_number_of_descriptors() {
    let mut t = Try::new(Form::Split, F_INDIRECT_DESC);
    let (_, p) = t.prepare(0, 0);
    // 16 requests of 1024 empty descriptors.
    let table = 0x7_0000;
    for i in 0..1024 {
        let flags = if i < 1023 { NEXT } else { 0 };
        t.guest.desc(
            table + i * 16,
            p[1].0,
            0,
            flags | if i > 0 { WRITE } else { 0 },
            i as u16 + 1,
        );
    }
    while t.guest.offer(0, &[(GPA + table as u64, 16384, INDIRECT)], false) {}
    let mut tags = Vec::new();
    let taken: Vec<usize> =
        (0..5).map(|_| t.ring.pop(&t.guest.memory, &t.disk, 99, &mut tags).unwrap()).collect();
    assert_eq!(taken, [4, 4, 4, 4, 0]);
}

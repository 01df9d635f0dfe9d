//! Memory regions, the dirty log, and invalid in-flight regions.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use super::guest::*;
use crate::*;

fn info(guest_addr: u64, size: u64, user_addr: u64, mmap_offset: u64) -> RegionInfo {
    RegionInfo { guest_addr, size, user_addr, mmap_offset }
}

#[test]
fn impossible_regions_are_refused() {
    let fd = memfd(1 << 16);
    let one = info(0x1000, 0x1000, 0x1000, 0);
    let memory = GuestMemory::new().with_region(one, fd.as_fd()).unwrap();
    let refused = |info: RegionInfo| memory.with_region(info, fd.as_fd()).unwrap_err();
    assert!(matches!(refused(info(0x8000, 0, 0x8000, 0)), MemoryError::Range(_)));
    for at in 0..3 {
        let mut numbers = [0x8000, 0x8000, 0];
        numbers[at] = u64::MAX - 0xfff;
        let far = info(numbers[0], 0x1000, numbers[1], numbers[2]);
        assert!(matches!(refused(far), MemoryError::Range(_)), "{far:?}");
    }
    for (guest, user) in [(0x1fff, 0x8000), (0x1, 0x8000), (0x8000, 0x1fff), (0x8000, 0x1)] {
        let meets = info(guest, 0x1000, user, 0);
        assert!(matches!(refused(meets), MemoryError::Overlap(_)), "{meets:?}");
    }
    assert!(matches!(
        refused(info(0x8000, 0x1000, 0x8000, 0xf001)),
        MemoryError::Short { needed: 0x1_0001, size: 0x1_0000 }
    ));
    let socket = OwnedFd::from(std::os::unix::net::UnixStream::pair().unwrap().0);
    let error = memory.with_region(info(0x8000, 1, 0x8000, 0), socket.as_fd()).unwrap_err();
    assert!(matches!(error, MemoryError::NotAFile));
    assert!(matches!(
        memory.without_region(info(0x1000, 1, 0x1000, 0)),
        Err(MemoryError::Unknown(_))
    ));
    assert_eq!(memory.without_region(info(0x1000, 0x1000, 0x1000, 77)).unwrap().regions().len(), 0);

    let mut many = memory;
    for i in 1..REGIONS_MAX as u64 {
        many = many.with_region(info(i << 32, 0x1000, i << 32, 0), fd.as_fd()).unwrap();
    }
    let last = many.with_region(info(1 << 50, 0x1000, 1 << 50, 0), fd.as_fd());
    assert!(matches!(last, Err(MemoryError::TooMany)));
}

/// Regions need not begin at a page of their file, may come in any order, and may leave holes.
#[test]
fn addresses_are_translated() {
    let fd = memfd(1 << 16);
    let own = Area::map(fd.as_fd(), 0, 1 << 16).unwrap();
    let table = [info(0x9000, 0x100, 0x50_0000, 0x1008), info(0x8000, 0x1000, 0x70_0000, 0x2000)]
        .map(|info| (info, fd.as_fd()));
    let memory = GuestMemory::new().replace(&table).unwrap();
    let mut lookup = memory.lookup(0);
    lookup.write(0x8ffe, &[1, 2, 3]).unwrap();
    let bytes = [0x2ffe, 0x2fff, 0x1008].map(|at| own.load_u8(at, Relaxed));
    assert_eq!(bytes, [1, 2, 3]);
    let mut back = [0; 3];
    lookup.read(0x8ffe, &mut back).unwrap();
    assert_eq!(back, [1, 2, 3]);
    assert!(lookup.read(0x90fe, &mut back).is_none());
    assert!(lookup.write_u8(0x7fff, 0).is_none() && lookup.write_u8(0x9100, 0).is_none());
    assert!(lookup.has(0x90ff) && !lookup.has(u64::MAX));
    for addr in [0x8ff0, 0x8ff4, 0x8ff8, 0x8fff, 0x9001] {
        own.store_u64(0x1008, 0x1122_3344_5566_7788, Relaxed);
        let mut bytes = [0; 16];
        lookup.read(addr, &mut bytes).unwrap();
        let pair = lookup.read_pair(addr).unwrap();
        assert_eq!(pair.map(u64::to_le_bytes).concat(), bytes);
    }
    let mut segments = Vec::new();
    assert!(lookup.segments(0x8f00, 0x200, 9, &mut segments).is_some());
    assert_eq!(segments.len(), 2);
    assert_eq!(memory.host_to_guest(segments[0].iov_base), Some(0x8f00));
    assert_eq!(memory.host_to_guest(segments[1].iov_base), Some(0x9000));
    assert!(lookup.segments(0x8f00, 0x200, 3, &mut segments).is_none(), "one too many");
    assert!(lookup.segments(0x8f00, 0x201, 9, &mut Vec::new()).is_none());

    assert_eq!(memory.user_to_guest(0x50_0010, 0xf0), Some(0x9010));
    assert_eq!(memory.user_to_guest(0x50_0010, 0xf1), None);
    let area = memory.user_area(0x70_0ffe, 2).unwrap();
    assert_eq!(area.load_u8(1, Relaxed), 2);
    assert!(memory.user_area(0x70_0ffe, 3).is_none());
    assert!(memory.user_area(u64::MAX, 3).is_none());
}

/// A region keeps its mapping when the table is sent again, and loses it when it is removed.
#[test]
fn the_same_region_keeps_its_mapping() {
    let (fd, other) = (memfd(1 << 16), memfd(1 << 16));
    let (a, b) = (info(0, 0x1000, 0, 0), info(0x1000, 0x1000, 0x1000, 0x1000));
    let memory = GuestMemory::new().with_region(a, fd.as_fd()).unwrap();
    let pointer = |memory: &GuestMemory| {
        let mut segments = Vec::new();
        memory.lookup(0).segments(0, 1, 1, &mut segments).unwrap();
        segments[0].iov_base
    };
    let more = memory.with_region(b, fd.as_fd()).unwrap();
    let again = more.replace(&[(b, fd.as_fd()), (a, fd.as_fd())]).unwrap();
    assert_eq!(pointer(&more), pointer(&memory));
    assert_eq!(pointer(&again), pointer(&memory));
    let changed = again.replace(&[(a, other.as_fd())]).unwrap();
    assert_ne!(pointer(&changed), pointer(&memory));
    assert_eq!(changed.host_to_guest(pointer(&memory)), None);
}

fn log() -> (DirtyLog, Area) {
    let fd = memfd(0x3000);
    // Not at a page boundary of the file, and shorter than the file.
    let log = DirtyLog::map(fd.as_fd(), 0x100, 0x1010).unwrap();
    (log, Area::map(fd.as_fd(), 0, 0x3000).unwrap())
}

/// Returns the pages whose bits are set anywhere in the file, and clears the bits.
fn pages(file: &Area) -> Vec<u64> {
    let mut pages = Vec::new();
    for at in 0..file.len() {
        let byte = file.load_u8(at, Relaxed);
        assert!(byte == 0 || (0x1010..0x1110).contains(&at), "byte {at:#x} is not the log's");
        pages.extend(
            (0..8).filter(|bit| byte >> bit & 1 == 1).map(|bit| (at as u64 - 0x1010) * 8 + bit),
        );
        file.store_u8(at, 0, Relaxed);
    }
    pages
}

#[test]
fn the_log_has_exactly_the_pages_of_a_range() {
    let (log, file) = log();
    let mut dice = Dice(1);
    for _ in 0..2000 {
        let (addr, len) = (dice.roll(0x90_0000) as u64, dice.roll(0x2_4000) as u64);
        log.mark(addr, len);
        let pages_of = if len == 0 { 1..1 } else { addr >> 12..((addr + len - 1) >> 12) + 1 };
        let expected: Vec<u64> = pages_of.filter(|&page| page < 0x800).collect();
        assert_eq!(pages(&file), expected, "{addr:#x} {len:#x}");
    }
    for (addr, len) in [(0x7f_ffff, u64::MAX), (u64::MAX, 1), (0x80_0000, 1), (5, 0)] {
        log.mark(addr, len);
        assert_eq!(pages(&file), if addr == 0x7f_ffff { vec![0x7ff] } else { vec![] });
    }
}

/// With an active log, exactly what a ring writes is in it: data of reads and serial numbers,
/// status bytes, used entries and indexes, and the fields that control kicks.
#[test]
fn a_ring_logs_what_it_writes() {
    for form in [Form::Split, Form::Packed] {
        let page = |offset: usize| offset as u64 >> 12;
        let start = if form == Form::Split { 0 } else { 0x8000 };
        let mut guest = Guest::new(form, 128, start, F_INDIRECT_DESC);
        // The memory begins at page 0, so that a small log covers it.
        let all = info(0, MEMORY_LEN as u64, guest.setup().desc, 0);
        guest.memory = GuestMemory::new().with_region(all, guest._fd.as_fd()).unwrap();
        let used = (guest.setup().used - guest.setup().desc) as usize;
        let mut setup = guest.setup();
        setup.log = Some(used as u64);
        let mut ring = Ring::start(&guest.memory, &setup, None).unwrap().0;
        let (log, file) = log();
        // What completing one request writes: the offsets in the ring, and whether there is an
        // index.
        let ring_page = if form == Form::Split { page(used) } else { 0 };

        ring.log_all(&log);
        let mut expected = vec![page(used)];
        if form == Form::Packed {
            expected.insert(0, 0);
        }
        assert_eq!(pages(&file), expected);
        let _ = ring.arm_kick(Some(&log));
        assert_eq!(pages(&file), [page(used)]);
        ring.disarm_kick(Some(&log));
        assert_eq!(pages(&file), [page(used)]);

        let (header, status, data) = (0x5_0000, 0x5_1000, 0x5_2ff0);
        for (kind, writes) in [(0, true), (1, false), (8, true), (4, false)] {
            guest.own.store_u64(header, kind, Relaxed);
            guest.own.store_u64(header + 8, 0, Relaxed);
            let flags = if kind == 1 { 0 } else { WRITE };
            let parts =
                [(header as u64, 16, 0), (data as u64, 512, flags), (status as u64, 1, WRITE)];
            // Made available by a guest that uses other addresses, which the ring must ignore.
            assert!(guest.offer(kind, &parts, false));
            let mut tags = Vec::new();
            assert_eq!(ring.pop(&guest.memory, &disk(), 9, &mut tags), Ok(1));
            assert_eq!(pages(&file), [], "nothing is logged before it is complete");
            let finished: Vec<_> =
                tags.iter().map(|&tag| Finished { tag, status: Status::IoError }).collect();
            ring.complete(&guest.memory, Some(&log), &finished);
            let mut expected = vec![ring_page, page(status)];
            if writes {
                expected.extend([page(data), page(data) + 1]);
            }
            expected.sort_unstable();
            assert_eq!(pages(&file), expected, "{form:?} {kind}");
            assert_eq!(guest.collect().len(), 1);
        }
    }
}

/// Each kind of damage is refused with its reason, before anything is changed.
#[test]
fn damaged_inflight_regions_are_refused() {
    for form in [Form::Split, Form::Packed] {
        let refused = |num: u16, damage: &dyn Fn(&Area)| {
            let start = if form == Form::Split { 0 } else { 0x8000 };
            let mut guest = Guest::new(form, 8, start, F_INDIRECT_DESC);
            let (region, fd) = InflightRegion::create(2, num, form).unwrap();
            let mut ring = guest.start(region.queue(1));
            for seq in 0..3 {
                assert!(guest.add(seq, true));
            }
            let mut tags = Vec::new();
            ring.pop(&guest.memory, &disk(), 9, &mut tags).unwrap();
            drop(ring);
            let size = region.info().mmap_size - 64;
            let own = Area::map(fd.as_fd(), size / 2, size / 2).unwrap();
            damage(&own);
            let before: Vec<u8> = (0..own.len()).map(|at| own.load_u8(at, Relaxed)).collect();
            let result = Ring::start(&guest.memory, &guest.setup(), region.queue(1));
            let after: Vec<u8> = (0..own.len()).map(|at| own.load_u8(at, Relaxed)).collect();
            match result {
                Ok((_, recovered)) => assert_eq!(recovered.resubmits, 3),
                Err(fault) => {
                    assert!(matches!(fault, Fault::Inflight(_)), "{fault:?}");
                    assert_eq!(before, after);
                }
            }
            result.is_err()
        };
        assert!(!refused(8, &|_| {}));
        assert!(!refused(9, &|_| {}), "more entries than the ring");
        assert!(refused(8, &|own| own.store_u16(8, 2, Relaxed)), "version");
        assert!(refused(8, &|own| own.store_u16(10, 7, Relaxed)), "number");
        match form {
            Form::Split => {
                assert!(refused(8, &|own| own.store_u16(12, 8, Relaxed)), "batch head");
                assert!(
                    refused(8, &|own| own.store_u16(14, 0u16.wrapping_sub(9), Relaxed)),
                    "used"
                );
                // The list leaves the batch: entry 0 is the head of a batch of two.
                assert!(refused(8, &|own| {
                    own.store_u16(14, 0u16.wrapping_sub(2), Relaxed);
                    own.store_u16(16 + 6, 8, Relaxed);
                }));
                assert!(refused(16, &|own| own.store_u8(16 + 8 * 16, 1, Relaxed)), "outside");
            }
            Form::Packed => {
                assert!(refused(8, &|own| own.store_u16(14, 9, Relaxed)), "free list");
                assert!(refused(8, &|own| own.store_u16(16, 8, Relaxed)), "used");
                assert!(refused(8, &|own| own.store_u16(18, 8, Relaxed)), "old used");
                assert!(refused(8, &|own| own.store_u16(32 + 7 * 32 + 2, 3, Relaxed)), "loop");
                assert!(refused(8, &|own| own.store_u16(32 + 6, 0, Relaxed)), "no descriptors");
                assert!(refused(8, &|own| own.store_u16(32 + 6, 7, Relaxed)), "too many");
                assert!(refused(8, &|own| own.store_u16(32 + 6, 2, Relaxed)), "another's");
                assert!(refused(8, &|own| own.store_u16(32 + 4, 1, Relaxed)), "other last");
            }
        }
        // A region of the other format, and one with fewer entries than the ring.
        let other = if form == Form::Split { Form::Packed } else { Form::Split };
        let guest = Guest::new(form, 8, 0x8000, 0);
        for (form, num) in [(other, 8), (form, 7)] {
            let region = InflightRegion::create(1, num, form).unwrap().0;
            assert!(Ring::start(&guest.memory, &guest.setup(), region.queue(0)).is_err());
        }
    }
}

#[test]
fn inflight_regions_are_mapped_with_their_sizes() {
    let (region, fd) = InflightRegion::create(2, 128, Form::Split).unwrap();
    assert_eq!(region.info().mmap_size, 4224 + 64);
    assert!(region.queue(1).is_some() && region.queue(2).is_none());
    let info = region.info();
    let refused = |info, form| InflightRegion::map(fd.as_fd(), info, form).is_err();
    assert!(!refused(info, Form::Split));
    assert!(refused(info, Form::Packed), "too small for the other form");
    assert!(refused(InflightInfo { queues: 3, ..info }, Form::Split));
    assert!(refused(InflightInfo { queue_size: 132, ..info }, Form::Split));
    assert!(refused(InflightInfo { mmap_size: 4289, ..info }, Form::Split), "beyond the file");
    assert!(refused(InflightInfo { mmap_offset: 64, ..info }, Form::Split), "beyond the file");
    assert!(refused(
        InflightInfo { queues: 1, mmap_offset: 4, mmap_size: 2112, ..info },
        Form::Split
    ));
    assert!(refused(InflightInfo { mmap_size: u64::MAX, mmap_offset: 64, ..info }, Form::Split));
    assert!(!refused(
        InflightInfo { queues: 1, mmap_offset: 64, mmap_size: 2112, ..info },
        Form::Split
    ));
    let none = InflightRegion::create(0, 128, Form::Packed).unwrap().0;
    assert!(none.queue(0).is_none());
}

/// A guest that used its ring before the region was created (a migration) loses nothing if the
/// target dies before it has completed anything.
#[test]
fn a_fresh_region_begins_at_the_used_index() {
    let mut guest = Guest::new(Form::Split, 8, 3203, F_INDIRECT_DESC);
    let region = InflightRegion::create(1, 8, Form::Split).unwrap().0;
    let mut ring = guest.start(region.queue(0));
    let mut tags = Vec::new();
    for seq in 0..2 {
        assert!(guest.add(seq, true));
    }
    ring.pop(&guest.memory, &disk(), 9, &mut tags).unwrap();
    drop(ring);
    // The front end falls back to the used index and reports that.
    let (mut ring, recovered) =
        Ring::start(&guest.memory, &guest.setup(), region.queue(0)).unwrap();
    assert_eq!(recovered, Recovered { resubmits: 2, base_differs: false });
    assert_eq!(ring.base(), 3205);
    assert!(ring.has_work() && ring.resubmits() == 2);
    let mut again = Vec::new();
    ring.pop(&guest.memory, &disk(), 1, &mut again).unwrap();
    assert_eq!(ring.resubmits(), 1);
    ring.pop(&guest.memory, &disk(), 9, &mut again).unwrap();
    assert_eq!(again, tags);
    let mut setup = guest.setup();
    setup.base = 17;
    let (_, recovered) = Ring::start(&guest.memory, &setup, region.queue(0)).unwrap();
    assert!(recovered.base_differs);
}

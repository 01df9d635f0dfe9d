//! Rings and in-flight regions with arbitrary bytes, for fuzzers and property tests. Any answer is
//! right; a panic, an endless loop or an access outside guest memory is wrong.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use bdev::Kind;

use crate::*;

const LEN: usize = 1 << 15;
const USER: u64 = 1 << 40;
const AVAIL: usize = 0x200;
const USED: usize = 0x300;
const DISK: Disk = Disk {
    capacity_sectors: 1 << 20,
    block_size: 512,
    read_only: false,
    discard: true,
    write_zeroes: true,
    write_zeroes_may_unmap: true,
    max_discard_sectors: 1 << 10,
    max_write_zeroes_sectors: 1 << 10,
    segments_max: u32::MAX,
    segment_bytes_max: u32::MAX,
    serial: *b"serial-0123456789abc",
};

fn memfd(len: usize) -> OwnedFd {
    // SAFETY: the name is a C string, and the call accesses no other memory.
    let fd = unsafe { libc::memfd_create(c"fuzz".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: a call on an open descriptor, which accesses no memory.
    assert_eq!(unsafe { libc::ftruncate(fd, len as i64) }, 0);
    // SAFETY: the system has just returned this descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A guest with a ring of up to 32 descriptors. Its memory, two regions followed by a hole, begins
/// with `bytes`. If `tame`, the ring's addresses and lengths are made small, so that they are often
/// valid.
struct Guest {
    memory: GuestMemory,
    own: Area,
    setup: Setup,
    form: Form,
}

impl Guest {
    fn new(choice: [u8; 4], bytes: &[u8]) -> Guest {
        let fd = memfd(LEN);
        let half = LEN as u64 / 2;
        let region = |at: u64| RegionInfo {
            guest_addr: at,
            size: half,
            user_addr: USER + at,
            mmap_offset: at,
        };
        let memory = GuestMemory::new()
            .replace(&[(region(0), fd.as_fd()), (region(half), fd.as_fd())])
            .expect("two regions");
        let own = Area::map(fd.as_fd(), 0, LEN as u64).expect("the guest's own mapping");
        for (at, &byte) in bytes.iter().take(LEN).enumerate() {
            own.store_u8(at, byte, Relaxed);
        }
        let [form, num, features, base] = choice;
        let packed = form & 1 == 1;
        let num = 1 << (num % 6);
        if form & 2 != 0 {
            for at in 0..LEN / 16 {
                let addr = own.load_u64(at * 16, Relaxed) & (LEN as u64 - 1);
                let len = own.load_u32(at * 16 + 8, Relaxed) & 0x7ff;
                if at < num || at >= 64 {
                    own.store_u64(at * 16, addr, Relaxed);
                    own.store_u32(at * 16 + 8, len, Relaxed);
                }
            }
            if !packed {
                own.store_u16(AVAIL + 2, u16::from(base) + num as u16, Relaxed);
                own.store_u16(USED + 2, u16::from(base), Relaxed);
                for i in 0..num {
                    own.store_u16(AVAIL + 4 + 2 * i, i as u16, Relaxed);
                }
            }
        }
        let features = u64::from(features & 3) << 28 | if packed { F_RING_PACKED } else { 0 };
        let setup = Setup {
            num: num as u16,
            desc: USER,
            avail: USER + AVAIL as u64,
            used: USER + USED as u64,
            log: Some(USED as u64),
            base: if packed {
                ((u32::from(base) % num as u32) | 0x8000) * 0x1_0001
            } else {
                u32::from(base)
            },
            features,
        };
        let form = if packed { Form::Packed } else { Form::Split };
        Guest { memory, own, setup, form }
    }

    /// Runs the ring until it has nothing more, breaks, or has taken more requests than the guest
    /// can have made.
    fn run(&self, ring: &mut Ring) {
        let log = DirtyLog::map(memfd(4096).as_fd(), 4096, 0).expect("a log");
        let mut tags = Vec::new();
        for _ in 0..64 {
            let _ = ring.arm_kick(Some(&log));
            let Ok(taken) = ring.pop(&self.memory, &DISK, 8, &mut tags) else { break };
            assert!(taken <= 8 && tags.len() <= 8);
            ring.disarm_kick(Some(&log));
            let mut finished = Vec::new();
            for tag in tags.drain(..) {
                let request = ring.request(tag);
                assert!(request.segments.len() <= SEGMENTS_MAX);
                let mut sum = 0;
                for segment in request.segments {
                    let end = segment.iov_base.wrapping_byte_add(segment.iov_len - 1);
                    let first = self.memory.host_to_guest(segment.iov_base).expect("in memory");
                    let last = self.memory.host_to_guest(end).expect("in memory");
                    assert_eq!(last - first, segment.iov_len as u64 - 1);
                    sum += segment.iov_len as u64;
                }
                match request.kind {
                    Kind::Read | Kind::Write => assert_eq!(sum, request.len),
                    _ => assert_eq!(sum, 0),
                }
                let capacity = DISK.capacity_sectors << 9;
                assert!(request.offset <= capacity && request.len <= capacity - request.offset);
                assert_eq!((request.offset | request.len) % 512, 0);
                finished.push(Finished { tag, status: Status::Ok });
            }
            assert_eq!(ring.complete(&self.memory, Some(&log), &finished), taken);
            ring.should_signal();
            if taken == 0 {
                break;
            }
        }
        assert_eq!(ring.in_flight(), 0);
    }
}

/// A guest with arbitrary memory. The first four bytes choose the ring.
pub fn ring(data: &[u8]) {
    let Some((choice, bytes)) = data.split_first_chunk::<4>() else { return };
    let guest = Guest::new(*choice, bytes);
    if let Ok((mut ring, _)) = Ring::start(&guest.memory, &guest.setup, None) {
        guest.run(&mut ring);
    }
}

/// A front end that returns an arbitrary in-flight region. The first four bytes choose the ring,
/// the next 2048 are the region, the rest is the guest's memory.
pub fn inflight(data: &[u8]) {
    let Some((choice, bytes)) = data.split_first_chunk::<4>() else { return };
    let (region_bytes, bytes) = bytes.split_at(bytes.len().min(2048));
    let guest = Guest::new(*choice, bytes);
    let (region, fd) = InflightRegion::create(1, 32, guest.form).expect("a region");
    let own = Area::map(fd.as_fd(), 0, region.info().mmap_size).expect("the region");
    for (at, &byte) in region_bytes.iter().take(own.len()).enumerate() {
        own.store_u8(at, byte, Relaxed);
    }
    if choice[0] & 4 != 0 {
        // Write a header that is often accepted.
        own.store_u16(8, 1, Relaxed);
        own.store_u16(10, 32, Relaxed);
        if guest.form == Form::Split {
            let used = guest.own.load_u16(USED + 2, Relaxed);
            own.store_u16(12, own.load_u16(12, Relaxed) % 32, Relaxed);
            own.store_u16(14, used.wrapping_sub(u16::from(choice[3]) % 4), Relaxed);
        }
        let (len, marks) = if guest.form == Form::Split { (16, 16) } else { (32, 32) };
        for entry in 0..32 {
            let at = marks + entry * len;
            own.store_u8(at, own.load_u8(at, Relaxed) & 1, Relaxed);
            for at in if guest.form == Form::Split { at + 6..at + 7 } else { at + 2..at + 7 } {
                if at % 2 == 0 {
                    own.store_u16(at, own.load_u16(at, Relaxed) % 33, Relaxed);
                }
            }
        }
    }
    let start = || Ring::start(&guest.memory, &guest.setup, region.queue(0));
    let Ok((mut ring, recovered)) = start() else { return };
    assert!(recovered.resubmits <= usize::from(guest.setup.num));
    guest.run(&mut ring);
    // Finished requests are not found again.
    if ring.broken().is_none() && ring.resubmits() == 0 {
        let (_, recovered) = start().expect("the region was written by the ring");
        assert_eq!(recovered.resubmits, 0);
    }
}

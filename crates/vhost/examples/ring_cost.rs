//! Measures the ring code: nanoseconds for a request of three descriptors, from the available ring
//! to the used ring, with a null device. `cargo run --release -p millrace-vhost --example ring_cost
//! [SECONDS]`
//!
//! The guest's side is rewound instead of simulated: moving the index makes the same chains
//! available again, so almost all of the time is the target's.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use vhost::*;

const GPA: u64 = 0x1_0000_0000;
const USER: u64 = 0x7f00_0000_0000;
const LEN: usize = 8 << 20;
const NUM: u16 = 256;
const AVAIL: usize = 0x1_0000;
const USED: usize = 0x2_0000;
const BUFFERS: usize = 0x10_0000;

fn memfd() -> OwnedFd {
    // SAFETY: the name is a C string, and the call accesses no other memory.
    let fd = unsafe { libc::memfd_create(c"guest".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: a call on an open descriptor, which accesses no memory.
    assert_eq!(unsafe { libc::ftruncate(fd, LEN as i64) }, 0);
    // SAFETY: the system has just returned this descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// The guest's own mapping.
struct Guest(*mut u8);

impl Guest {
    fn put<T>(&self, at: usize, value: T) {
        assert!(at + size_of::<T>() <= LEN);
        // SAFETY: within the mapping, which is never unmapped.
        unsafe { self.0.add(at).cast::<T>().write_volatile(value) }
    }

    fn desc(&self, at: usize, addr: u64, len: u32, flags: u16, last: u16) {
        self.put(at, addr);
        self.put(at + 8, len);
        self.put(at + 12, flags);
        self.put(at + 14, last);
    }
}

fn main() {
    let seconds = std::env::args().nth(1).and_then(|arg| arg.parse().ok()).unwrap_or(0.3);
    println!("{:28} {:>6} {:>10}", "ring", "batch", "ns/request");
    for regions in [1, 8] {
        for inflight in [false, true] {
            for indirect in [false, true] {
                for batch in [1, 4, 16, 64] {
                    let ns = split(regions, inflight, indirect, batch, seconds);
                    let name = format!(
                        "split {}{}{}",
                        if indirect { "indirect" } else { "direct" },
                        if inflight { " inflight" } else { "" },
                        if regions > 1 { " 8 regions" } else { "" }
                    );
                    println!("{name:28} {batch:>6} {ns:>10.1}");
                }
            }
        }
    }
    for inflight in [false, true] {
        for batch in [1, 4, 16, 64] {
            let ns = packed(inflight, batch, seconds);
            let name = format!("packed direct{}", if inflight { " inflight" } else { "" });
            println!("{name:28} {batch:>6} {ns:>10.1}");
        }
    }
}

fn world(regions: usize, form: Form, inflight: bool) -> (Guest, GuestMemory, Option<InflightArea>) {
    let fd = memfd();
    // SAFETY: a new mapping at an address of the kernel's choice.
    let map = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            LEN,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            std::os::fd::AsRawFd::as_raw_fd(&fd),
            0,
        )
    };
    assert!(map != libc::MAP_FAILED);
    let mut memory = GuestMemory::new();
    let size = LEN / regions;
    for i in 0..regions {
        let at = (i * size) as u64;
        let info = RegionInfo {
            guest_addr: GPA + at,
            size: size as u64,
            user_addr: USER + at,
            mmap_offset: at,
        };
        memory = memory.with_region(info, fd.as_fd()).expect("memory");
    }
    let region = inflight
        .then(|| InflightRegion::create(1, NUM, form).expect("region").0.queue(0).expect("queue"));
    (Guest(map.cast()), memory, region)
}

fn setup(features: u64, base: u32) -> Setup {
    Setup {
        num: NUM,
        desc: USER,
        avail: USER + AVAIL as u64,
        used: USER + USED as u64,
        log: None,
        base,
        features,
    }
}

fn disk() -> Disk {
    Disk {
        capacity_sectors: 1 << 30,
        block_size: 512,
        read_only: false,
        discard: false,
        write_zeroes: false,
        write_zeroes_may_unmap: false,
        max_discard_sectors: 0,
        max_write_zeroes_sectors: 0,
        segments_max: u32::MAX,
        segment_bytes_max: u32::MAX,
        serial: [0; SERIAL_LEN],
    }
}

/// Header, data of 4 KiB and status of a read.
fn parts(guest: &Guest, i: usize) -> [(u64, u32, u16); 3] {
    // Spread over the sets of the processor's cache.
    let at = BUFFERS + i * (8192 + 64);
    guest.put(at, 0_u32);
    guest.put(at + 8, (i * 8) as u64);
    let gpa = GPA + at as u64;
    [(gpa, 16, 0), (gpa + 4096, 4096, 2), (gpa + 16, 1, 2)]
}

/// Runs turns of a poller until the time is over. `again` makes a batch available. Returns
/// nanoseconds per request.
fn turns(
    ring: &mut Ring,
    memory: &GuestMemory,
    batch: usize,
    seconds: f64,
    mut again: impl FnMut(u64),
) -> f64 {
    let disk = disk();
    let (mut tags, mut finished) = (Vec::with_capacity(256), Vec::with_capacity(256));
    let mut sum = 0;
    let mut done = 0_u64;
    #[expect(clippy::disallowed_methods, reason = "it measures")]
    let start = Instant::now();
    loop {
        for _ in 0..256 {
            again(done);
            ring.pop(memory, &disk, batch, &mut tags).expect("ring");
            for &tag in &tags {
                let request = ring.request(tag);
                sum += request.offset + request.segments.len() as u64;
                finished.push(Finished { tag, status: Status::Ok });
            }
            assert_eq!(ring.complete(memory, None, &finished), batch);
            std::hint::black_box(ring.should_signal());
            done += batch as u64;
            tags.clear();
            finished.clear();
        }
        let elapsed = start.elapsed();
        if elapsed > Duration::from_secs_f64(seconds) {
            std::hint::black_box(sum);
            return elapsed.as_nanos() as f64 / done as f64;
        }
    }
}

fn split(regions: usize, inflight: bool, indirect: bool, batch: usize, seconds: f64) -> f64 {
    let (guest, memory, region) = world(regions, Form::Split, inflight);
    for i in 0..usize::from(NUM) {
        let head = if indirect { i } else { i / 3 * 3 };
        guest.put(AVAIL + 4 + 2 * i, if indirect { i } else { i % 85 * 3 } as u16);
        if indirect {
            let table = BUFFERS + i * (8192 + 64) + 2048;
            for (at, (addr, len, flags)) in parts(&guest, i).into_iter().enumerate() {
                let next = if at < 2 { 1 } else { 0 };
                guest.desc(table + at * 16, addr, len, flags | next, at as u16 + 1);
            }
            guest.desc(i * 16, GPA + table as u64, 48, 4, 0);
        } else if i == head && i + 2 < usize::from(NUM) {
            for (at, (addr, len, flags)) in parts(&guest, i).into_iter().enumerate() {
                let next = if at < 2 { 1 } else { 0 };
                guest.desc((i + at) * 16, addr, len, flags | next, (i + at) as u16 + 1);
            }
        }
    }
    let features = F_EVENT_IDX | F_INDIRECT_DESC;
    let (mut ring, _) = Ring::start(&memory, &setup(features, 0), region).expect("ring");
    turns(&mut ring, &memory, batch, seconds, |done| {
        guest.put(AVAIL + 2, (done + batch as u64) as u16);
    })
}

fn packed(inflight: bool, batch: usize, seconds: f64) -> f64 {
    let (guest, memory, region) = world(1, Form::Packed, inflight);
    let chains: Vec<_> = (0..usize::from(NUM)).map(|i| parts(&guest, i)).collect();
    let features = F_EVENT_IDX | F_INDIRECT_DESC | F_RING_PACKED;
    let setup = setup(features, 0x8000_8000);
    let (mut ring, _) = Ring::start(&memory, &setup, region).expect("ring");
    let (mut at, mut wrap) = (0, true);
    turns(&mut ring, &memory, batch, seconds, |done| {
        for i in 0..batch {
            let id = (done as usize + i) % 85;
            for (part, &(addr, len, flags)) in chains[id].iter().enumerate() {
                let flags = flags | if part < 2 { 1 } else { 0 } | if wrap { 0x80 } else { 0x8000 };
                guest.desc(at * 16, addr, len, id as u16, flags);
                at += 1;
                if at == usize::from(NUM) {
                    (at, wrap) = (0, !wrap);
                }
            }
        }
    })
}

//! Requests that own their buffers: they come back with the completion, and live as long as their
//! operation if the channel is dropped before.

use bdev::{Bdev, BufChannel, BufDone, BufIo, Kind, QUEUE_DEPTH, Status};
use reactor::{Buf, Core, Poller, PollerSlot};

use crate::common::PLACES;

/// Keeps the core awake, as the poller of a user does.
struct Busy;

impl Poller for Busy {
    fn poll(&mut self) -> bool {
        true
    }
    fn pure_check(&mut self) -> bool {
        true
    }
    fn arm(&mut self) -> bool {
        false
    }
    fn disarm(&mut self) {}
}

async fn one(core: &Core, channel: &mut BufChannel, io: BufIo, buf: Option<Buf>) -> BufDone {
    let mut done = Vec::new();
    channel.submit(io, buf).unwrap();
    while channel.poll(&mut done) == 0 {
        core.yield_now().await;
    }
    let done = done.pop().unwrap();
    assert_eq!((done.tag, channel.in_flight()), (io.tag, 0));
    done
}

fn io(kind: Kind, offset: u64, len: u64, at: usize) -> BufIo {
    BufIo { kind, offset, len, at, fua: false, tag: 7 + offset }
}

#[test]
fn buffers_come_back_with_their_completions() {
    for place in PLACES.into_iter().filter(|place| place.available()) {
        place.run("buffers", 1 << 20, move |core, path| async move {
            let _busy: PollerSlot = core.add_poller(Busy);
            let file = format!("file:{}?lock=off", path.display());
            for uri in ["mem:1M", &file, &format!("delay:all=10us..100us|{file}")] {
                let device = Bdev::open(&core, uri).await.unwrap();
                let mut channel = BufChannel::new(&device, &core).unwrap();
                let mut buf = core.alloc(8192).unwrap();
                buf.fill(5);
                let write = io(Kind::Write, 4096, 4096, 4096);
                let done = one(&core, &mut channel, write, Some(buf)).await;
                assert_eq!(done.status, Status::Ok, "{uri}");
                let mut buf = done.buf.unwrap();
                buf.fill(9);
                let read = io(Kind::Read, 4096, 4096, 0);
                let done = one(&core, &mut channel, read, Some(buf)).await;
                let buf = done.buf.unwrap();
                assert!(buf[..4096].iter().all(|byte| *byte == 5), "{uri}");
                assert!(buf[4096..].iter().all(|byte| *byte == 9), "{uri}");
                // Bytes beyond the end of the buffer, and no buffer at all.
                for buf in [Some(buf), None] {
                    let had = buf.is_some();
                    let wrong = io(Kind::Read, 0, 8192, 512);
                    let done = one(&core, &mut channel, wrong, buf).await;
                    assert_eq!((done.status, done.buf.is_some()), (Status::IoError, had));
                }
                let flush = one(&core, &mut channel, io(Kind::Flush, 0, 0, 0), None).await;
                assert_eq!(flush.status, Status::Ok);
                drop((channel, device));
                assert_eq!(core.pool().used(), 0, "{uri}");
            }
        });
    }
}

#[test]
fn a_full_channel_gives_the_buffer_back_and_a_dropped_one_keeps_it_until_the_end() {
    for place in PLACES.into_iter().filter(|place| place.available()) {
        place.run("dropped", 1 << 20, move |core, path| async move {
            let uri = format!("file:{}", path.display());
            let device = Bdev::open(&core, &uri).await.unwrap();
            let mut channel = BufChannel::new(&device, &core).unwrap();
            for n in 0..QUEUE_DEPTH as u64 {
                let mut buf = core.alloc(512).unwrap();
                buf.fill(3);
                channel.submit(io(Kind::Write, n * 512, 512, 0), Some(buf)).unwrap();
            }
            let buf = core.alloc(512).unwrap();
            let (_, back) = channel.submit(io(Kind::Read, 0, 512, 0), Some(buf)).unwrap_err();
            assert_eq!(back.map(|buf| buf.len()), Some(512));
            drop(channel);
            // The writes in flight still need their buffers.
            assert!(core.pool().used() >= 512);
            while core.pool().used() > 0 {
                core.sleep_ns(100_000).await;
            }
            let mut channel = BufChannel::new(&device, &core).unwrap();
            let _busy: PollerSlot = core.add_poller(Busy);
            let buf = core.alloc(512).unwrap();
            let read = io(Kind::Read, 1023 * 512, 512, 0);
            let done = one(&core, &mut channel, read, Some(buf)).await;
            assert!(done.buf.unwrap().iter().all(|byte| *byte == 3));
        });
    }
}

#[test]
fn a_null_device_discloses_nothing() {
    PLACES[2].run("null", 512, |core, _| async move {
        let device = Bdev::open(&core, "delay:read=1us|null:1M").await.unwrap();
        let mut channel = BufChannel::new(&device, &core).unwrap();
        let mut buf = core.alloc(1024).unwrap();
        buf.fill(7);
        let _busy: PollerSlot = core.add_poller(Busy);
        let done = one(&core, &mut channel, io(Kind::Read, 0, 512, 512), Some(buf)).await;
        let buf = done.buf.unwrap();
        assert!(buf[..512].iter().all(|byte| *byte == 7) && buf[512..] == [0; 512]);
    });
}

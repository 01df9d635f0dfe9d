//! Requests in the steady state allocate nothing on the heap, as a counting allocator shows.
#![cfg(not(loom))]

mod common;

use std::any::Any;
use std::rc::Rc;

use bdev::{Bdev, Channel, Done, Io, Kind, Status};
use common::{Guest, PLACES, Place, quoted};
use reactor::Core;
use reactor::testing::{CountingAllocator, allocations};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Keeps 64 requests in flight until `count` are done: reads, writes and some flushes, in one and
/// in several pieces.
async fn requests(
    core: &Core,
    channel: &mut Channel,
    guest: &Guest,
    done: &mut Vec<Done>,
    count: u64,
) {
    let (mut submitted, mut completed) = (0, 0);
    // A bit for each tag whose memory is free: requests complete in any order.
    let mut free = u64::MAX;
    while completed < count {
        while submitted < count && free != 0 {
            let n = u64::from(free.trailing_zeros());
            free &= free - 1;
            let at = n as usize * 8192;
            let pieces = [guest.at(at, 2048), guest.at(at + 4096, 2048)];
            let whole = [guest.at(at, 4096)];
            let segments = if n.is_multiple_of(2) { &pieces[..] } else { &whole[..] };
            let kind = match n {
                7 => Kind::Flush,
                n if n % 3 == 0 => Kind::Write,
                _ => Kind::Read,
            };
            let io = Io { kind, offset: n * 4096, len: 4096, segments, tag: n, fua: n == 9 };
            // SAFETY: the segments lie in the guest's memory, which the channel was told to hold.
            unsafe { channel.submit(&io) }.unwrap();
            submitted += 1;
        }
        done.clear();
        completed += channel.poll(done) as u64;
        for done in &*done {
            assert_eq!(done.status, Status::Ok);
            free |= 1 << done.tag;
        }
        core.yield_now().await;
    }
}

#[test]
fn requests_in_the_steady_state_allocate_nothing() {
    let devices = [
        "null:1M",
        "mem:1M",
        "file:FILE",
        "file:FILE?write=through",
        "file:FILE?engine=aio",
        "file:FILE?engine=sync",
        "delay:all=1us..9us|file:FILE",
        "limit:iops=10000000|file:FILE",
    ];
    // The simulator itself allocates; so do the epoll driver's threads and the queue to them.
    for place in PLACES.into_iter().filter(|&p| p == Place::Uring && p.available()) {
        for uri in devices {
            let counted = place.run("allocations", 1 << 20, move |core, path| async move {
                let bdev = Bdev::open(&core, &uri.replace("FILE", &quoted(&path))).await.unwrap();
                let guest = Rc::new(Guest::new(1 << 20));
                let mut channel = bdev.channel(&core).unwrap();
                let keep: Rc<dyn Any> = guest.clone();
                channel.hold(keep);
                let mut done = Vec::with_capacity(2048);
                requests(&core, &mut channel, &guest, &mut done, 3000).await;
                let before = allocations();
                requests(&core, &mut channel, &guest, &mut done, 3000).await;
                allocations() - before
            });
            assert_eq!(counted, 0, "{uri}");
        }
    }
}

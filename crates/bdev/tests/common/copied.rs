//! A device is copied while tasks write, discard and clear it: at the end both are the same.

use std::cell::Cell;
use std::rc::Rc;

use bdev::{Bdev, BufIo, Copy, CopyTarget, DeviceTarget, ErrorKind, Kind, Status, TaskChannel};
use reactor::sim::{SimConfig, World};
use reactor::{Class, Core};

/// Size of the devices, and of a block.
const SIZE: u64 = 2 << 20;
const BLOCK: u64 = 4096;
const WRITERS: u64 = 4;

fn request(kind: Kind, offset: u64, len: u64) -> BufIo {
    BufIo { kind, offset, len, at: 0, fua: false, tag: 0 }
}

fn below(core: &Core, end: u64) -> u64 {
    core.random_u64() % end
}

async fn fill(core: &Core, channel: &TaskChannel, offset: u64, len: u64, byte: u8) {
    let mut buf = core.alloc(len as usize).unwrap();
    buf.fill(byte);
    let (status, _) = channel.run(request(Kind::Write, offset, len), Some(buf)).await;
    assert_eq!(status, Status::Ok);
}

async fn all(core: &Core, device: &Bdev) -> Vec<u8> {
    let channel = TaskChannel::new(device, core).unwrap();
    let buf = core.alloc(SIZE as usize).unwrap();
    let (status, buf) = channel.run(request(Kind::Read, 0, SIZE), Some(buf)).await;
    assert_eq!(status, Status::Ok);
    buf.unwrap().to_vec()
}

/// Changes the device at random places until it is told to stop.
async fn write(core: Core, device: Bdev, stop: Rc<Cell<bool>>) {
    let channel = TaskChannel::new(&device, &core).unwrap();
    while !stop.get() {
        let blocks = 1 + below(&core, 8);
        let offset = below(&core, SIZE / BLOCK - blocks) * BLOCK;
        let len = blocks * BLOCK;
        match below(&core, 10) {
            0 => drop(channel.run(request(Kind::Discard, offset, len), None).await),
            1 => {
                let zeroes = Kind::WriteZeroes { unmap: false };
                drop(channel.run(request(zeroes, offset, len), None).await);
            }
            _ => fill(&core, &channel, offset, len, 1 + below(&core, 255) as u8).await,
        }
        core.sleep_ns(below(&core, 200_000)).await;
    }
}

/// A device as the target of a copy.
pub fn target_of(core: &Core, device: &Bdev) -> Box<dyn CopyTarget> {
    Box::new(DeviceTarget::new(core, device).unwrap())
}

/// Opens a device that the kernel may still be using for a process that has ended. The lock is held
/// until that is done.
pub async fn open_when_free(core: &Core, uri: &str) -> Bdev {
    loop {
        match Bdev::open(core, uri).await {
            Err(error) if error.kind() == ErrorKind::Busy => core.sleep_ns(1_000_000).await,
            bdev => return bdev.unwrap(),
        }
    }
}

/// Copies one device to the other, with mirrored writes or without.
pub async fn copied(core: &Core, source: &str, target: &str, mirrors: bool) {
    let (source, target) = (open_when_free(core, source).await, open_when_free(core, target).await);
    let (from, to) =
        (TaskChannel::new(&source, core).unwrap(), TaskChannel::new(&target, core).unwrap());
    // Data and holes, and a target that has something else in some of both.
    for part in 0..16 {
        let (offset, len) = (part * SIZE / 16, SIZE / 16);
        if part % 3 != 0 {
            fill(core, &from, offset, len, part as u8 + 1).await;
        }
        if part % 2 == 0 {
            fill(core, &to, offset, len, 0xEE).await;
        }
    }
    let tracked = match mirrors {
        true => source.mirrored(core, BLOCK, &target).await.unwrap(),
        false => source.tracked(core, BLOCK).await.unwrap(),
    };
    let copy = Copy::new(core, &tracked, target_of(core, &target)).unwrap();
    let stop = Rc::new(Cell::new(false));
    let writers = (0..WRITERS)
        .map(|_| core.spawn(Class::Foreground, write(core.clone(), tracked.clone(), stop.clone())));
    let writers: Vec<_> = writers.collect();
    copy.begin().await.unwrap();
    assert!(copy.left_bytes() > 0);
    copy.mirror(mirrors);
    for nth in 0..4 {
        copy.be_gentle(nth % 2 == 1);
        let bytes = copy.pass().await.unwrap();
        assert!(bytes > 0 || mirrors);
        core.sleep_ns(below(core, 1_000_000)).await;
    }
    stop.set(true);
    for writer in writers {
        writer.await;
    }
    copy.until_mirrored().await;
    while copy.left_bytes() > 0 {
        copy.pass().await.unwrap();
    }
    copy.flush().await.unwrap();
    drop(copy);
    assert!(all(core, &source).await == all(core, &target).await, "the copy differs");
}

/// The same in a simulated world.
pub fn simulated(seed: u64) {
    let run = World::new(seed, 1, SimConfig::default()).run(|core| async move {
        let uri = "delay:all=5us..400us|mem:2M";
        copied(&core, uri, uri, seed % 2 == 1).await;
    });
    run.unwrap();
}

/// Writes are mirrored to a target that fails each second one of them.
pub async fn with_failures(core: &Core) {
    let source = open_when_free(core, "mem:2M").await;
    let target = open_when_free(core, "error:kind=write&every=2|mem:2M").await;
    let tracked = source.mirrored(core, BLOCK, &target).await.unwrap();
    let channel = TaskChannel::new(&tracked, core).unwrap();
    let copy = Copy::new(core, &tracked, target_of(core, &target)).unwrap();
    copy.mirror(true);
    for block in 0..2 {
        fill(core, &channel, block * BLOCK, BLOCK, 1 + block as u8).await;
        copy.until_mirrored().await;
    }
    // The other one is copied, which is the first write of that channel.
    while copy.left_bytes() > 0 {
        assert_eq!(copy.pass().await.unwrap(), BLOCK);
    }
    assert!(all(core, &source).await == all(core, &target).await, "the copy differs");
}

//! A disk in a simulated world whose file fails, or whose machine loses power: what remains must
//! match what the guest was told.

use crate::common::power::{self, world};
use crate::common::{Disk, Guest};
use bdev::{Bdev, Kind, Status};
use reactor::sim::{Access, Fault, FaultKind};

#[test]
fn acknowledged_durable_data_survives_power_cuts() {
    for (uri, cached) in [
        ("file:/disks/a.img", true),
        ("file:/disks/a.img?write=through", false),
        ("file:/disks/a.img?direct=off&write=through", false),
        ("delay:all=1us..1ms|file:/disks/a.img?direct=off", true),
    ] {
        for seed in 0..60 {
            power::cut(uri, cached, seed);
        }
    }
}

#[test]
fn errors_of_the_disk_reach_the_guest_and_a_failed_flush_ends_all_writing() {
    let world = world(1);
    let faults = world.clone();
    world
        .run(move |core| {
            let world = faults.clone();
            async move {
                let disk = Disk::open(&core, "file:/disks/a.img").await;
                world.add_fault(Fault::new(FaultKind::Error(5)).range(0..4096));
                let full = Fault::new(FaultKind::Error(28)).of(Access::Write).range(8192..12288);
                world.add_fault(full);
                let refused = Fault::new(FaultKind::Error(95)).of(Access::Write).range(4096..8192);
                world.add_fault(refused.times(2));
                assert_eq!(disk.read(0, 4096).await, Err(Status::IoError));
                assert_eq!(disk.write(8192, &[1; 4096]).await, Status::NoSpace);
                assert_eq!(disk.plain(Kind::Discard, 4096, 4096).await, Status::Unsupported);
                // The hole is refused, so the range is zeroed by other means.
                let zeroes = Kind::WriteZeroes { unmap: true };
                assert_eq!(disk.plain(zeroes, 4096, 4096).await, Status::Ok);
                assert_eq!(disk.read(4096, 4096).await.unwrap(), [0; 4096]);
                let tag = disk.submit(zeroes, 8192, &[], 4096, false).unwrap();
                assert_eq!(disk.wait(tag).await, Status::NoSpace);
                world.heal();
                assert_eq!(disk.write(8192, &[1; 4096]).await, Status::Ok);
                world.add_fault(Fault::new(FaultKind::Error(5)).of(Access::Sync).times(1));
                assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::IoError);
                assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::IoError);
                assert_eq!(disk.write(8192, &[2; 4096]).await, Status::IoError);
                // Another channel of the same device fails too; reads continue.
                let other = Disk::with(&core, &disk.bdev, Guest::new(1 << 20));
                assert_eq!(other.plain(Kind::Discard, 0, 4096).await, Status::IoError);
                assert_eq!(other.read(8192, 4096).await.map(|b| b.len()), Ok(4096));
                let uri = "file:/disks/a.img?lock=off";
                let again = Disk::over(&core, &Bdev::open(&core, uri).await.unwrap());
                assert_eq!(again.plain(Kind::Flush, 0, 0).await, Status::Ok, "opened again");
            }
        })
        .unwrap();
}

/// One flush makes several requests durable; if it fails, all of them fail.
#[test]
fn a_failed_flush_fails_all_requests_that_it_covers() {
    let world = world(1);
    let faults = world.clone();
    world
        .run(move |core| {
            let world = faults.clone();
            async move {
                let disk = Disk::open(&core, "file:/disks/a.img?write=through").await;
                let write = |n: u64| {
                    let segments = [disk.guest.at(0, 4096)];
                    disk.submit(Kind::Write, n * 4096, &segments, 4096, false).unwrap()
                };
                // A write needs a flush only if it is alone; each of these needs one.
                let zero = |n: u64| {
                    let zeroes = Kind::WriteZeroes { unmap: false };
                    disk.submit(zeroes, n * 4096, &[], 4096, false).unwrap()
                };
                for tag in (0..8).map(zero).collect::<Vec<_>>() {
                    assert_eq!(disk.wait(tag).await, Status::Ok);
                }
                world.add_fault(Fault::new(FaultKind::Error(5)).of(Access::Sync).times(1));
                for tag in (0..8).map(zero).collect::<Vec<_>>() {
                    assert_eq!(disk.wait(tag).await, Status::IoError);
                }
                // A refused request needs no flush.
                let tag = write(0);
                assert_eq!(disk.wait(tag).await, Status::IoError);
                assert_eq!(disk.read(0, 4096).await.map(|b| b.len()), Ok(4096));
            }
        })
        .unwrap();
}

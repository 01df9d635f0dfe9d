//! A device is handed over to another process, as its descriptors: the data is there, and the size
//! is the last one.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::common::{Disk, Place, quoted};
use bdev::{Bdev, ErrorKind, Kind, Parts, Status};
use reactor::Core;

const SIZE: u64 = 1 << 20;

fn on<Fut: Future<Output = ()> + 'static>(
    name: &str,
    uri: &'static str,
    main: impl Fn(Core, String) -> Fut + Clone + Send + 'static,
) {
    Place::Epoll.run(name, SIZE, move |core, path| main(core, uri.replace("FILE", &quoted(&path))));
}

fn owned(descriptors: Vec<BorrowedFd<'_>>) -> Vec<OwnedFd> {
    descriptors.into_iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect()
}

async fn take(core: &Core, from: &Bdev, uri: &str) -> Result<Bdev, bdev::Error> {
    let descriptors = owned(from.descriptors().unwrap());
    Bdev::take(core, uri, Parts { descriptors, holes: None }).await
}

#[test]
fn written_data_is_there_afterwards() {
    for uri in
        ["mem:1M", "mem:1M?block=4K", "file:FILE", "delay:all=1us|error:count=1&chance=0|mem:1M"]
    {
        on("written", uri, |core, uri| async move {
            let disk = Disk::open(&core, &uri).await;
            assert_eq!(disk.write(4096, &[7; 8192]).await, Status::Ok);
            assert_eq!(disk.plain(Kind::Discard, 8192, 4096).await, Status::Ok);
            disk.bdev.resize(&core, 2 * SIZE).await.unwrap();
            assert_eq!(disk.write(2 * SIZE - 4096, &[9; 4096]).await, Status::Ok);
            let taken = take(&core, &disk.bdev, &uri).await.unwrap();
            drop(disk);
            let disk = Disk::over(&core, &taken);
            assert_eq!(disk.bdev.size_bytes(), 2 * SIZE, "{uri}");
            assert_eq!(disk.read(4096, 4096).await.unwrap(), [7; 4096]);
            assert_eq!(disk.read(8192, 4096).await.unwrap(), [0; 4096]);
            assert_eq!(disk.read(2 * SIZE - 4096, 4096).await.unwrap(), [9; 4096]);
            // And once more, smaller.
            disk.bdev.resize(&core, SIZE / 2).await.unwrap();
            let taken = take(&core, &disk.bdev, &uri).await.unwrap();
            assert_eq!(taken.size_bytes(), SIZE / 2);
            taken.resize(&core, SIZE).await.unwrap();
            let disk = Disk::over(&core, &taken);
            assert_eq!(disk.read(SIZE / 2, 4096).await.unwrap(), [0; 4096], "what was cut off");
            assert_eq!(disk.read(4096, 4096).await.unwrap(), [7; 4096]);
        });
    }
}

#[test]
fn a_device_without_data_is_told_its_size() {
    for uri in ["null:1M?block=4K", "dirty:granule=4K|delay:all=1us|null:1M?block=4K"] {
        on("told", uri, |core, uri| async move {
            let device = Bdev::open(&core, &uri).await.unwrap();
            device.resize(&core, 2 * SIZE).await.unwrap();
            let taken = take(&core, &device, &uri).await.unwrap();
            assert_eq!(taken.size_bytes(), SIZE, "{uri}");
            taken.set_taken_size(device.size_bytes());
            assert_eq!(taken.geometry().size_bytes, 2 * SIZE, "{uri}");
            let disk = Disk::over(&core, &taken);
            assert_eq!(disk.write(2 * SIZE - 4096, &[9; 4096]).await, Status::Ok);
            assert_eq!(disk.write(2 * SIZE, &[9; 4096]).await, Status::IoError);
            for impossible in [0, 512] {
                taken.set_taken_size(impossible);
                assert_eq!(taken.size_bytes(), 2 * SIZE, "{uri}");
            }
            taken.set_taken_size(1 << 60);
            let covered = uri.starts_with("null:");
            assert_eq!(taken.size_bytes() == 1 << 60, covered, "{uri}: no larger than its bitmap");
        });
    }
    on("known", "mem:1M", |core, uri| async move {
        let mem = Bdev::open(&core, &uri).await.unwrap();
        mem.set_taken_size(2 * SIZE);
        assert_eq!(mem.size_bytes(), SIZE, "it knows its own");
    });
}

#[test]
fn a_file_whose_length_was_changed_by_others_keeps_its_size() {
    for uri in ["file:FILE", "file:FILE?engine=mmap", "delay:all=1us|file:FILE"] {
        for len in [SIZE / 2, SIZE + 512, 2 * SIZE, 0] {
            on("outside", uri, move |core, uri| async move {
                let disk = Disk::open(&core, &uri).await;
                assert_eq!(disk.write(0, &[7; 4096]).await, Status::Ok);
                let mut files = owned(disk.bdev.descriptors().unwrap());
                std::fs::File::from(files.remove(0)).set_len(len).unwrap();
                let mut expected = Vec::new();
                for at in [0, SIZE - 4096] {
                    expected.push((disk.read(at, 4096).await, at));
                }
                let taken = take(&core, &disk.bdev, &uri).await.unwrap();
                taken.set_taken_size(SIZE);
                assert_eq!(taken.size_bytes(), SIZE, "{uri}, {len}");
                let disk = Disk::over(&core, &taken);
                for (read, at) in expected {
                    assert_eq!(disk.read(at, 4096).await, read, "{uri}, {len}, {at}");
                }
                assert_eq!(disk.write(SIZE, &[9; 4096]).await, Status::IoError);
            });
        }
    }
}

#[test]
fn descriptors_of_another_device_are_refused() {
    on("refused", "file:FILE", |core, uri| async move {
        let file = Bdev::open(&core, &uri).await.unwrap();
        let mem = Bdev::open(&core, "mem:1M").await.unwrap();
        let null = Bdev::open(&core, "null:1M").await.unwrap();
        for (from, uri) in [(&file, "mem:1M"), (&mem, "null:1M"), (&null, "mem:1M"), (&null, &*uri)]
        {
            let error = take(&core, from, uri).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{uri}: {error}");
        }
        let blocks = take(&core, &mem, "mem:1M?block=4K").await.unwrap();
        blocks.resize(&core, 4096).await.unwrap();
        mem.resize(&core, 512).await.unwrap();
        let error = take(&core, &mem, "mem:1M?block=4K").await.unwrap_err();
        assert!(error.to_string().contains("multiple"), "{error}");
    });
}

#[test]
fn an_image_file_tells_what_it_occupies() {
    on("space", "delay:read=0ms|file:FILE", |core, uri| async move {
        let disk = Disk::open(&core, &uri).await;
        assert_eq!(disk.plain(Kind::Discard, 0, SIZE).await, Status::Ok);
        let empty = disk.bdev.space(&core).await.unwrap();
        assert_eq!(disk.write(65536, &[7; 65536]).await, Status::Ok);
        assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::Ok);
        let some = disk.bdev.space(&core).await.unwrap();
        assert!(some.occupied >= empty.occupied + 65536, "{empty:?} {some:?}");
        assert!(some.available > 0 && some.available <= some.total, "{some:?}");
        assert_eq!(empty.file_system, some.file_system);
    });
    on("space", "mem:1M", |core, uri| async move {
        assert_eq!(Disk::open(&core, &uri).await.bdev.space(&core).await, None);
    });
}

//! The `dirty:` layer: writes are marked in a bitmap that other processes map, also when the writer
//! is killed.
#![allow(clippy::disallowed_methods, reason = "files and processes of the host, for a test")]

use crate::common;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::copied::open_when_free;
use crate::common::{Disk, Guest, Place, config, quoted};
use bdev::{Bdev, Copy, DeviceTarget, DirtyMap, ErrorKind, Kind, Parts, Status, Taken};
use reactor::{Core, DriverKind, run};

const SIZE: u64 = 1 << 20;
const GRANULE: u64 = 16 << 10;

fn on<Fut: Future<Output = ()> + 'static>(
    name: &str,
    main: impl Fn(Core, PathBuf) -> Fut + Clone + Send + 'static,
) {
    Place::Epoll.run(name, SIZE, main);
}

fn map(path: &Path) -> DirtyMap {
    let file = File::options().read(true).write(true).open(path).unwrap();
    DirtyMap::map(file.into()).unwrap()
}

/// Takes all marks and returns their granules.
fn taken(map: &DirtyMap) -> Vec<u64> {
    let mut all = Vec::new();
    while let Some(taken) = map.take(0) {
        all.extend((0..64).filter(|bit| taken.bits >> bit & 1 == 1).map(|bit| taken.first + bit));
        map.finish(taken);
    }
    assert_eq!(map.unfinished(0), None);
    all
}

#[test]
fn changes_of_the_device_are_marked_and_nothing_else() {
    on("marked", |core, path| async move {
        let uri = format!("dirty:granule=16K|file:{}", quoted(&path));
        let disk = Disk::open(&core, &uri).await;
        let map = disk.bdev.dirty_map().unwrap().clone();
        assert_eq!((map.granule(), taken(&map)), (GRANULE, vec![]));
        let block = [7; 4096];
        assert_eq!(disk.read(0, 65536).await.map(drop), Ok(()));
        assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::Ok);
        assert_eq!(taken(&map), [] as [u64; 0], "neither reads nor flushes");
        assert_eq!(disk.write(5 * GRANULE - 4096, &block).await, Status::Ok);
        assert_eq!(taken(&map), [4]);
        assert_eq!(disk.write(2 * GRANULE - 4096, &[block, block].concat()).await, Status::Ok);
        assert_eq!(disk.plain(Kind::Discard, 10 * GRANULE, GRANULE).await, Status::Ok);
        let zeroes = Kind::WriteZeroes { unmap: false };
        assert_eq!(disk.plain(zeroes, 62 * GRANULE, 2 * GRANULE).await, Status::Ok);
        assert_eq!(taken(&map), [1, 2, 10, 62, 63]);
        assert_eq!(disk.plain(Kind::Discard, SIZE, GRANULE).await, Status::IoError);
        assert_eq!(taken(&map), [] as [u64; 0], "a refused request has changed nothing");
        // A range that is added or cut off differs from a copy.
        disk.bdev.resize(&core, SIZE - GRANULE).await.unwrap();
        assert_eq!(taken(&map), [63]);
        disk.bdev.resize(&core, SIZE + 2 * GRANULE).await.unwrap();
        assert_eq!(taken(&map), [63, 64, 65]);
        let error = disk.bdev.resize(&core, 1 << 50).await.unwrap_err();
        assert!(error.to_string().contains("no room"), "{error}");
    });
}

#[test]
fn a_failed_write_is_marked_too() {
    on("failed", |core, _| async move {
        let disk = Disk::open(&core, "dirty:|error:kind=write|mem:1M").await;
        assert_eq!(disk.write(65536, &[1; 4096]).await, Status::IoError);
        assert_eq!(taken(disk.bdev.dirty_map().unwrap()), [1]);
    });
}

#[test]
fn marks_outlive_their_writer_and_their_taker() {
    on("outlive", |core, path| async move {
        let bitmap = path.with_extension("img.dirty");
        let uri = format!("dirty:file={}&granule=16K|file:{}", quoted(&bitmap), quoted(&path));
        let disk = Disk::open(&core, &uri).await;
        assert_eq!(disk.write(0, &[1; 4096]).await, Status::Ok);
        assert_eq!(disk.write(3 * GRANULE, &[1; 4096]).await, Status::Ok);
        // Another process takes them and dies before they are copied.
        let other = map(&bitmap);
        assert_eq!(other.take(0), Some(Taken { first: 0, bits: 0b1001 }));
        drop(other);
        assert_eq!(disk.write(GRANULE, &[1; 4096]).await, Status::Ok);
        // The node hands the disk over to another node.
        let descriptors = disk.bdev.descriptors().unwrap();
        let descriptors = descriptors.into_iter().map(|fd| fd.try_clone_to_owned().unwrap());
        let parts = Parts { descriptors: descriptors.collect(), holes: None };
        let next = Bdev::take(&core, &uri, parts).await.unwrap();
        drop(disk);
        let disk = Disk::over(&core, &next);
        assert_eq!(disk.write(5 * GRANULE, &[1; 4096]).await, Status::Ok);
        let other = map(&bitmap);
        let left = other.unfinished(0).unwrap();
        assert_eq!(left, Taken { first: 0, bits: 0b1001 });
        other.finish(left);
        assert_eq!(taken(&other), [1, 5]);
    });
}

#[test]
#[cfg_attr(tsan, ignore = "the fault comes inside the sanitizer, under a lock of its own")]
fn an_invalid_bitmap_is_refused_and_left_as_it_is() {
    on("refused", |core, path| async move {
        let bitmap = path.with_extension("img.dirty");
        let uri = |granule| format!("dirty:file={}&granule={granule}|mem:1M", quoted(&bitmap));
        for bytes in [vec![0; 100], vec![0; 8192], vec![0xff; 8192], b"MRdirty\n".repeat(1024)] {
            std::fs::write(&bitmap, &bytes).unwrap();
            let error = Bdev::open(&core, &uri("4K")).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert_eq!(std::fs::read(&bitmap).unwrap(), bytes);
        }
        std::fs::remove_file(&bitmap).unwrap();
        drop(Bdev::open(&core, &uri("4K")).await.unwrap());
        let error = Bdev::open(&core, &uri("8K")).await.unwrap_err();
        assert!(error.to_string().contains("granule of 4096, not 8192"), "{error}");
        // A bitmap from before the last boot has no meaning: everything is marked.
        let file = File::options().write(true).open(&bitmap).unwrap();
        file.write_all_at(&[0x77; 16], 32).unwrap();
        drop(Bdev::open(&core, &uri("4K")).await.unwrap());
        assert_eq!(taken(&map(&bitmap)), (0..256).collect::<Vec<_>>());
        drop(Bdev::open(&core, &uri("4K")).await.unwrap());
        assert_eq!(taken(&map(&bitmap)), [] as [u64; 0], "once");
        // A bitmap that is truncated while in use is lost, and the disk continues. A copy does not.
        let disk = Disk::open(&core, &uri("4K")).await;
        let to = Bdev::open(&core, "mem:1M").await.unwrap();
        let target = Box::new(DeviceTarget::new(&core, &to).unwrap());
        let copy = Copy::new(&core, &disk.bdev, target).unwrap();
        copy.flush().await.unwrap();
        file.set_len(0).unwrap();
        assert_eq!(disk.write(0, &[1; 4096]).await, Status::Ok);
        assert!(disk.bdev.dirty_map().unwrap().is_lost());
        assert!(copy.flush().await.unwrap_err().to_string().contains("lost"));
    });
}

const BLOCKS: u64 = SIZE / 4096;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Number of writes in flight.
const DEPTH: usize = 8;

/// The child's work until it is killed: writes random blocks, several at a time, and counts the
/// completed writes.
async fn write_until_killed(core: Core, uri: String, done: File) {
    let bdev = open_when_free(&core, &uri).await;
    let disk = Disk::with(&core, &bdev, Guest::new(1 << 20));
    println!("ready");
    let mut tags = std::collections::VecDeque::new();
    for n in 0_usize.. {
        if tags.len() == DEPTH {
            assert_eq!(disk.wait(tags.pop_front().unwrap()).await, Status::Ok);
            done.write_all_at(&((n - DEPTH + 1) as u64).to_ne_bytes(), 0).unwrap();
        }
        let at = n % 16 * 4096;
        disk.guest.put(at, &core.random_u64().to_le_bytes());
        let offset = core.random_u64() % BLOCKS * 4096;
        let segments = [disk.guest.at(at, 4096)];
        tags.push_back(disk.submit(Kind::Write, offset, &segments, 4096, false).unwrap());
    }
}

struct Writer {
    child: Child,
    /// Contains the number of completed writes.
    done: File,
}

impl Writer {
    fn start(uri: &str, count: &Path) -> Writer {
        std::fs::write(count, [0; 8]).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "dirty::a_copy_misses_nothing_when_the_writer_is_killed",
            "--nocapture",
        ]);
        command.env("DIRTY_WRITES", uri).env("DIRTY_DONE", count).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let said = std::io::BufReader::new(child.stdout.take().unwrap());
        let mut lines = std::io::BufRead::lines(said);
        assert!(lines.any(|line| line.is_ok_and(|line| line.ends_with("ready"))), "it died");
        Writer { child, done: File::open(count).unwrap() }
    }

    fn done(&self) -> u64 {
        let mut count = [0; 8];
        self.done.read_exact_at(&mut count, 0).unwrap();
        u64::from_ne_bytes(count)
    }

    /// Waits until the writes in flight are done, in the order in which they began.
    fn turn_over(&self) {
        let (all, end) = (self.done() + DEPTH as u64 + 1, Instant::now() + PATIENCE);
        while self.done() < all {
            assert!(Instant::now() < end, "it does not write");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Copies marked granules until there are none, or the time is over.
fn copy(map: &DirtyMap, image: &File, replica: &mut [u8], until: Instant) -> u64 {
    let mut copied = 0;
    while let Some(taken) = map.unfinished(0).or_else(|| map.take(0)) {
        for bit in (0..64).filter(|bit| taken.bits >> bit & 1 == 1) {
            let at = ((taken.first + bit) * GRANULE) as usize;
            image.read_exact_at(&mut replica[at..at + GRANULE as usize], at as u64).unwrap();
            copied += 1;
        }
        map.finish(taken);
        if Instant::now() > until {
            break;
        }
    }
    copied
}

/// Nothing is taken right before the kill: `docs/formats/dirty.md` describes marks that are taken
/// while their write is in flight.
#[test]
fn a_copy_misses_nothing_when_the_writer_is_killed() {
    if let Ok(uri) = std::env::var("DIRTY_WRITES") {
        let done = std::env::var("DIRTY_DONE").unwrap();
        let count = move || File::options().write(true).open(&done).unwrap();
        let main = move |core| write_until_killed(core, uri.clone(), count());
        run(&config(DriverKind::Auto), main).unwrap();
    }
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let path = dir.join(format!("killed-{}.img", std::process::id()));
    let (bitmap, count) = (path.with_extension("dirty"), path.with_extension("done"));
    std::fs::write(&path, vec![0; SIZE as usize]).unwrap();
    let uri = |params| {
        format!("dirty:file={}&granule=16K|file:{}{params}", quoted(&bitmap), quoted(&path))
    };
    let image = File::open(&path).unwrap();
    let (mut replica, mut copied) = (vec![0; SIZE as usize], 0);
    for round in 0..6 {
        let writer = Writer::start(&uri(["?direct=off", ""][round % 2]), &count);
        let map = map(&bitmap);
        let end = Instant::now() + Duration::from_millis(60);
        while Instant::now() < end {
            copied += copy(&map, &image, &mut replica, end);
        }
        writer.turn_over();
        drop(writer);
        let file = format!("file:{}", quoted(&path));
        run(&config(DriverKind::Auto), move |core| {
            let file = file.clone();
            async move { drop(open_when_free(&core, &file).await) }
        })
        .unwrap();
        let later = Instant::now() + PATIENCE;
        copied += copy(&map, &image, &mut replica, later);
        let mut all = vec![0; SIZE as usize];
        image.read_exact_at(&mut all, 0).unwrap();
        for block in 0..BLOCKS as usize {
            let range = block * 4096..(block + 1) * 4096;
            assert!(all[range.clone()] == replica[range], "block {block} differs, round {round}");
        }
    }
    assert!(copied > 100, "{copied} granules");
    common::remove(&path);
    common::remove(&bitmap);
    common::remove(&count);
}

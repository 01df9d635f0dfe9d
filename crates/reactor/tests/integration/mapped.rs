//! Mapped files: what may be copied is copied, everything else goes to the file, and both see the
//! same bytes.
#![expect(clippy::disallowed_methods, reason = "the outside of the reactor: files of the host")]

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use reactor::sim::{SimConfig, World};
use reactor::{
    Class, Core, DriverKind, GROWTH, MappedFile, Mapping, Mode, Opening, SharedFile, run,
};

use crate::every_driver::{available, config, on_one_core};

const PAGE: usize = 4096;
const LEN: usize = 1 << 20;

fn path(name: &str, kind: DriverKind) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mapped-{name}-{kind:?}"))
}

/// A file of `LEN` bytes that is in no cache.
async fn cold(core: &Core, path: &Path) -> Arc<SharedFile> {
    std::fs::write(path, vec![7; LEN]).unwrap();
    let file = core.open_for_writing(path, Opening::Existing, Mode::Buffered).await.unwrap();
    std::fs::remove_file(path).unwrap();
    core.attach(&file).sync_data().await.unwrap();
    forget(&file);
    file
}

/// Drops a file's clean pages from the cache.
fn forget(file: &SharedFile) {
    let fd = file.host_fd().unwrap().as_raw_fd();
    // SAFETY: takes no pointers.
    unsafe { libc::posix_fadvise(fd, 0, 0, libc::POSIX_FADV_DONTNEED) };
}

fn mapped(core: &Core, file: &Arc<SharedFile>) -> MappedFile {
    let mapping = Mapping::new(file, file.size(), true, core.cores());
    assert!(mapping.is_some(), "this system maps the file");
    MappedFile::new(core.attach(file), mapping)
}

/// The bytes of a range, as a read of the file sees them.
async fn bytes(mapped: &MappedFile, offset: u64, len: usize) -> Vec<u8> {
    let buf = mapped.file().core().alloc(len).unwrap();
    let (n, buf) = mapped.file().read_at(offset, buf).await;
    assert_eq!(n.unwrap(), len);
    buf.to_vec()
}

/// Waits until a range is copied: what the core was told about its pages is believed for a while.
async fn until_copied(mapped: &MappedFile, offset: u64, to: &mut [u8]) {
    for _ in 0..1000 {
        if mapped.read_now(offset, to) {
            return;
        }
        mapped.file().core().sleep_ns(5_000_000).await;
    }
    panic!("the pages are in memory, and are never copied");
}

on_every_driver! {
    fn pages_in_memory_are_copied_and_others_are_left_to_the_file(kind: DriverKind) {
        on_one_core(&config(kind), move |core| async move {
            let file = cold(&core, &path("hot", kind)).await;
            let mapped = mapped(&core, &file);
            let mut page = [0; 3 * PAGE];
            assert!(!mapped.read_now(5000, &mut page), "nothing is read by a fault");
            assert_eq!((core.stats().mapped_copies.get(), core.stats().mapped_misses.get()), (0, 1));
            let (n, _) = mapped.read(0, core.alloc(LEN).unwrap()).await;
            assert_eq!(n.unwrap(), LEN);
            until_copied(&mapped, 5000, &mut page).await;
            assert!(page.iter().all(|&byte| byte == 7));
            assert!(core.stats().mapped_copies.get() > 0);
            for (offset, len) in
                [(LEN as u64 - 512, 1024), (0, (64 << 10) + 1), (u64::MAX, 512), (0, 0)]
            {
                assert!(!mapped.read_now(offset, &mut vec![0; len]), "{offset} {len}");
            }
            // Both ways of writing are seen by both ways of reading.
            assert!(mapped.write_now(5000, &[8; 100]));
            assert_eq!(bytes(&mapped, 4990, 20).await, [[7; 10], [8; 10]].concat());
            let mut buf = core.alloc(512).unwrap();
            buf.fill(9);
            mapped.file().write_at(6000, buf, 512).await.0.unwrap();
            let mut now = [0; 2];
            until_copied(&mapped, 6511, &mut now).await;
            assert_eq!(now, [9, 7]);
            mapped.file().sync_data().await.unwrap();
        });
    }

    fn a_file_grows_in_large_steps_and_shrinks(kind: DriverKind) {
        on_one_core(&config(kind), move |core| async move {
            let path = path("grow", kind);
            let _ = std::fs::remove_file(&path);
            let file = core.open_for_writing(&path, Opening::New, Mode::Buffered).await.unwrap();
            std::fs::remove_file(&path).unwrap();
            let mapped = mapped(&core, &file);
            assert!(!mapped.read_now(0, &mut [0]), "an empty file has no pages");
            assert_eq!(mapped.grow(1).await.unwrap(), GROWTH);
            assert_eq!(mapped.grow(GROWTH + 1).await.unwrap(), 2 * GROWTH);
            assert_eq!(mapped.grow(1).await.unwrap(), GROWTH, "it was long enough");
            assert_eq!(file.size(), 2 * GROWTH);
            let last = 2 * GROWTH - PAGE as u64;
            let mut buf = core.alloc(PAGE).unwrap();
            buf.fill(1);
            mapped.file().write_at(last, buf, PAGE).await.0.unwrap();
            let mut page = [0; PAGE];
            until_copied(&mapped, last, &mut page).await;
            assert_eq!(page, [1; PAGE]);
            mapped.set_len(PAGE as u64).await.unwrap();
            assert!(!mapped.read_now(last, &mut page), "beyond the mapping");
            assert_eq!(std::fs::metadata(format!(
                "/proc/self/fd/{}",
                file.host_fd().unwrap().as_raw_fd()
            )).unwrap().len(), PAGE as u64);
        });
    }

    fn a_truncated_file_is_read_as_a_file(kind: DriverKind) {
        on_one_core(&config(kind), move |core| async move {
            let file = cold(&core, &path("cut", kind)).await;
            let mapped = mapped(&core, &file);
            bytes(&mapped, 0, LEN).await;
            let mut page = [0; PAGE];
            until_copied(&mapped, LEN as u64 - PAGE as u64, &mut page).await;
            // As another process would; the core still believes that the pages are there.
            let fd = file.host_fd().unwrap().as_raw_fd();
            // SAFETY: takes no pointers.
            assert_eq!(unsafe { libc::ftruncate(fd, PAGE as i64) }, 0);
            if cfg!(not(tsan)) {
                assert!(!mapped.read_now(LEN as u64 - PAGE as u64, &mut page));
                assert!(!mapped.read_now(0, &mut page), "the mapping is lost");
            }
            let (n, _) = mapped.read(0, core.alloc(2 * PAGE).unwrap()).await;
            assert_eq!(n.unwrap(), PAGE, "the file says where it ends");
        });
    }
}

/// Reads the file page by page; returns the number of pages that were copied.
async fn read_all(core: Core, file: Arc<SharedFile>, mapping: Arc<Mapping>) -> u64 {
    let mapped = MappedFile::new(core.attach(&file), Some(mapping));
    let mut n = 0_u64;
    // Some of it is not in memory yet, and while there is nothing the core does not ask.
    while n < 4000 || (core.stats().mapped_copies.get() == 0 && n < 1_000_000) {
        n += 1;
        let offset = n * PAGE as u64 % LEN as u64;
        let (read, buf) = mapped.read(offset, core.alloc(PAGE).unwrap()).await;
        assert_eq!((read.unwrap(), buf[0], buf[PAGE - 1]), (PAGE, 7, 7));
        core.yield_now().await;
    }
    core.stats().mapped_copies.get()
}

/// Cores copy while another one grows the file again and again.
#[test]
fn cores_read_while_another_one_grows_the_file() {
    let mut config = config(DriverKind::Auto);
    let first = config.processors[0];
    config.processors.push(*reactor::processors().get(1).unwrap_or(&first));
    let seen = run(&config, |core| async move {
        if core.id() != 0 {
            return 0;
        }
        let path = path("cores", DriverKind::Auto);
        let file = cold(&core, &path).await;
        let mapping = Mapping::new(&file, LEN as u64, false, core.cores()).unwrap();
        let reader = {
            let (owner, file, mapping) = (core.clone(), file.clone(), mapping.clone());
            core.spawn(Class::Foreground, async move {
                let read = |core: &Core| read_all(core.clone(), file, mapping);
                owner.spawn_on(1, Class::Foreground, read).await
            })
        };
        let mapped = MappedFile::new(core.attach(&file), Some(mapping));
        for step in 1..20 {
            mapped.grow(step * GROWTH / 8).await.unwrap();
        }
        reader.await
    });
    assert!(seen.unwrap()[0] > 0, "nothing was copied");
}

#[test]
fn a_simulated_file_is_never_mapped() {
    let world = World::new(1, 1, SimConfig::default());
    world.add_file("/file", vec![7; LEN]);
    world
        .run(|core| async move {
            let opening = Opening::Existing;
            let file = core.open_for_writing(Path::new("/file"), opening, Mode::Buffered);
            let file = file.await.unwrap();
            let mapping = Mapping::new(&file, LEN as u64, true, core.cores());
            assert!(mapping.is_none());
            let mapped = MappedFile::new(core.attach(&file), mapping);
            assert!(!mapped.read_now(0, &mut [0]) && !mapped.write_now(0, &[0]));
            let (n, buf) = mapped.read(5, core.alloc(10).unwrap()).await;
            assert_eq!((n.unwrap(), &buf[..]), (10, &[7; 10][..]));
            assert_eq!(mapped.grow(1).await.unwrap(), GROWTH);
            assert_eq!(mapped.file().size(), GROWTH);
        })
        .unwrap();
}

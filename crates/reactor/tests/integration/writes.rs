//! Writing to files: one suite for every driver of the host; see `drivers`.
#![expect(clippy::disallowed_methods, reason = "the outside of the reactor: files of the host")]

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::every_driver::{available, config};
use reactor::{Buf, Class, Core, DriverKind, File, Mode, Opening, run};

/// Runs one core with an empty directory of its own.
fn in_a_directory<T, Fut>(
    name: &str,
    kind: DriverKind,
    main: impl Fn(Core, PathBuf) -> Fut + Clone + Send + 'static,
) -> T
where
    T: Send + 'static,
    Fut: Future<Output = T> + 'static,
{
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("writes-{name}-{kind:?}"));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    run(&config(kind), move |core| main(core, dir.clone())).unwrap().pop().unwrap()
}

const MODES: [Mode; 2] = [Mode::Direct, Mode::Buffered];

async fn make(core: &Core, path: &Path, mode: Mode) -> File {
    core.attach(&core.open_for_writing(path, Opening::NewOrEmptied, mode).await.unwrap())
}

/// A buffer in which every 512 bytes have their position.
fn blocks(core: &Core, first: u64, count: usize) -> Buf {
    let mut buf = core.alloc(count * 512).unwrap();
    for (n, block) in buf.chunks_exact_mut(512).enumerate() {
        block.fill((first + n as u64) as u8);
    }
    buf
}

fn errno(error: &io::Error) -> Option<i32> {
    error.raw_os_error()
}

on_every_driver! {
    /// More writers than file threads and the core's own disk depth, in two classes.
    fn written_bytes_are_read_back(kind: DriverKind) {
        in_a_directory("back", kind, |core, dir| async move {
            for mode in MODES {
                let path = dir.join("file");
                let file = make(&core, &path, mode).await;
                let writers: Vec<_> = (0..300)
                    .map(|n| {
                        let (core, file) = (core.clone(), file.clone());
                        let class = if n % 2 == 0 { Class::Foreground } else { Class::Background };
                        core.clone().spawn(class, async move {
                            let buf = blocks(&core, n * 8, 8);
                            let (result, buf) = file.write_at(n * 4096, buf, 4096).await;
                            result.unwrap();
                            assert_eq!((buf.len(), buf[0]), (4096, (n * 8) as u8));
                        })
                    })
                    .collect();
                for writer in writers {
                    writer.await;
                }
                file.sync_data().await.unwrap();
                assert_eq!(file.size(), 300 * 4096);
                for n in 0..300 {
                    let (result, buf) = file.read_at(n * 4096, core.alloc(4096).unwrap()).await;
                    assert_eq!(result.unwrap(), 4096);
                    assert_eq!(buf[..], blocks(&core, n * 8, 8)[..]);
                }
                let bytes = std::fs::read(&path).unwrap();
                assert_eq!(bytes.len(), 300 * 4096);
                assert!(bytes.chunks(512).enumerate().all(|(n, b)| b == [n as u8; 512]));
                assert_eq!((core.operations_in_flight(), core.pool().used()), (0, 0));
            }
        });
    }

    /// A core counts it as a write and as a flush.
    fn a_durable_write_is_read_back(kind: DriverKind) {
        in_a_directory("durable", kind, |core, dir| async move {
            for mode in MODES {
                let path = dir.join("file");
                let file = make(&core, &path, mode).await;
                let counted = |core: &Core| {
                    let stats = core.stats();
                    (stats.disk_writes.get(), stats.disk_syncs.get())
                };
                let (writes, syncs) = counted(&core);
                for (offset, first) in [(0, 1), (4096, 9), (0, 3)] {
                    let write = file.write_durably_at(offset, blocks(&core, first, 8), 4096);
                    write.await.0.unwrap();
                }
                assert_eq!(counted(&core), (writes + 3, syncs + 3));
                let bytes = std::fs::read(&path).unwrap();
                assert_eq!(bytes, [&blocks(&core, 3, 8)[..], &blocks(&core, 9, 8)[..]].concat());
            }
        });
    }

    /// Only the first bytes of the buffer, at any offset, over old bytes.
    fn a_buffered_write_goes_to_any_byte(kind: DriverKind) {
        in_a_directory("any", kind, |core, dir| async move {
            let path = dir.join("file");
            let file = make(&core, &path, Mode::Buffered).await;
            let mut buf = core.alloc(100).unwrap();
            buf.fill(7);
            let (result, mut buf) = file.write_at(3, buf, 50).await;
            result.unwrap();
            buf.fill(8);
            let (result, buf) = file.write_at(10, buf, 1).await;
            result.unwrap();
            file.write_at(20, buf, 0).await.0.expect("nothing to write is no error");
            let mut expected = [vec![0; 3], vec![7; 50]].concat();
            expected[10] = 8;
            assert_eq!(std::fs::read(&path).unwrap(), expected);
            assert_eq!(file.size(), 53);
            // Short at the end of the file.
            let (result, buf) = file.read_at(50, core.alloc(100).unwrap()).await;
            assert_eq!((result.unwrap(), &buf[..3]), (3, &[7; 3][..]));
        });
    }

    fn a_misaligned_direct_write_is_refused_and_writes_nothing(kind: DriverKind) {
        in_a_directory("misaligned", kind, |core, dir| async move {
            let file = make(&core, &dir.join("file"), Mode::Direct).await;
            if file.alignment() == 1 {
                eprintln!("not tested: no direct I/O here");
                return;
            }
            for (offset, len) in [(1, 512), (0, 100), (256, 256), (u64::MAX - 511, 512)] {
                let (result, buf) = file.write_at(offset, blocks(&core, 1, 1), len).await;
                assert_eq!(errno(&result.unwrap_err()), Some(libc::EINVAL), "{offset} {len}");
                assert_eq!(buf.len(), 512, "the buffer comes back");
            }
            assert_eq!((file.size(), core.stats().disk_writes.get()), (0, 0));
        });
    }

    fn a_file_opened_for_reading_is_not_written(kind: DriverKind) {
        in_a_directory("readonly", kind, |core, dir| async move {
            std::fs::write(dir.join("file"), b"as it was").unwrap();
            let file = core.attach(&core.open(&dir.join("file"), true).await.unwrap());
            let (result, _) = file.write_at(0, blocks(&core, 1, 1), 512).await;
            assert_eq!(errno(&result.unwrap_err()), Some(libc::EBADF));
            assert_eq!(std::fs::read(dir.join("file")).unwrap(), b"as it was");
        });
    }

    /// The kernel may still read the buffer of a write after its future was dropped, also while the
    /// core stops, which waits for it.
    fn a_dropped_write_keeps_its_buffer_and_happens(kind: DriverKind) {
        for mode in MODES {
            let path = in_a_directory("dropped", kind, move |core, dir| async move {
                let path = dir.join("file");
                let file = make(&core, &path, mode).await;
                for n in 0..64 {
                    let mut write = file.write_at(n * 4096, blocks(&core, n * 8, 8), 4096);
                    write.start();
                }
                assert_eq!(core.pool().used(), core.operations_in_flight() * 4096);
                file.sync_data().start();
                path
            });
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!(bytes.len(), 64 * 4096);
            assert!(bytes.chunks(512).enumerate().all(|(n, b)| b == [n as u8; 512]));
        }
    }

    fn files_are_made_emptied_or_opened_as_requested(kind: DriverKind) {
        in_a_directory("opening", kind, |core, dir| async move {
            for mode in MODES {
                let path = dir.join(format!("{mode:?}"));
                let open = |opening| core.open_for_writing(&path, opening, mode);
                let missing = open(Opening::Existing).await.unwrap_err();
                assert_eq!(missing.kind(), io::ErrorKind::NotFound);
                let file = core.attach(&open(Opening::New).await.unwrap());
                file.write_at(0, blocks(&core, 9, 1), 512).await.0.unwrap();
                let there = open(Opening::New).await.unwrap_err();
                assert_eq!(there.kind(), io::ErrorKind::AlreadyExists);
                assert_eq!(open(Opening::Existing).await.unwrap().size(), 512);
                assert_eq!(std::fs::metadata(&path).unwrap().len(), 512);
                assert_eq!(open(Opening::NewOrEmptied).await.unwrap().size(), 0);
                assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
            }
            let dir_error = core.open_for_writing(&dir, Opening::Existing, Mode::Buffered).await;
            assert_eq!(errno(&dir_error.unwrap_err()), Some(libc::EISDIR));
        });
    }

    fn names_are_changed_and_synced(kind: DriverKind) {
        in_a_directory("changed", kind, |core, dir| async move {
            let (a, b) = (dir.join("a"), dir.join("b"));
            let file = make(&core, &a, Mode::Buffered).await;
            std::fs::write(&b, b"in the way").unwrap();
            core.rename(&a, &b).await.unwrap();
            core.sync_dir(&dir).await.unwrap();
            file.write_at(0, blocks(&core, 5, 1), 512).await.0.unwrap();
            assert_eq!(std::fs::read(&b).unwrap(), [5; 512], "the file under its new name");
            assert_eq!(core.rename(&a, &b).await.unwrap_err().kind(), io::ErrorKind::NotFound);
            core.remove(&b).await.unwrap();
            core.sync_dir(&dir).await.unwrap();
            assert_eq!(core.remove(&b).await.unwrap_err().kind(), io::ErrorKind::NotFound);
            assert!(core.list(&dir).await.unwrap().is_empty());
            let (result, buf) = file.read_at(0, core.alloc(512).unwrap()).await;
            assert_eq!((result.unwrap(), buf[0]), (512, 5), "a file outlives its name");
            let deep = dir.join("deep");
            core.create_dir(&deep).await.unwrap();
            core.sync_dir(&dir).await.unwrap();
            assert!(core.list(&deep).await.unwrap().is_empty());
            let taken = core.create_dir(&deep).await.unwrap_err();
            assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
            let nowhere = core.create_dir(&dir.join("none").join("deep")).await.unwrap_err();
            assert_eq!(nowhere.kind(), io::ErrorKind::NotFound);
            let missing = core.sync_dir(&dir.join("none")).await.unwrap_err();
            assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        });
    }

    fn a_file_gets_the_requested_length_and_space(kind: DriverKind) {
        in_a_directory("length", kind, |core, dir| async move {
            use std::os::unix::fs::MetadataExt;
            let path = dir.join("file");
            let len = || std::fs::metadata(&path).unwrap().len();
            let file = make(&core, &path, Mode::Direct).await;
            file.allocate(1 << 20).await.unwrap();
            assert_eq!((len(), file.size()), (1 << 20, 1 << 20));
            if std::fs::metadata(&path).unwrap().blocks() < (1 << 20) / 512 {
                eprintln!("not tested: no room is allocated here");
            }
            file.write_at(4096, blocks(&core, 3, 8), 4096).await.0.unwrap();
            assert_eq!(file.size(), 1 << 20);
            file.allocate(4096).await.unwrap();
            assert_eq!((len(), file.size()), (1 << 20, 1 << 20), "allocating never cuts");
            file.set_len(5000).await.unwrap();
            assert_eq!((len(), file.size()), (5000, 5000));
            file.set_len(9000).await.unwrap();
            file.sync_data().await.unwrap();
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!(bytes.len(), 9000);
            assert_eq!(bytes[4096..5000], blocks(&core, 3, 8)[..904]);
            assert!(bytes[5000..].iter().all(|&b| b == 0), "what was cut off does not come back");
            assert!(file.set_len(u64::MAX).await.is_err());
        });
    }

    /// A lock that belongs to a process would not refuse the second lock in the same process.
    fn an_exclusive_lock_excludes_every_other(kind: DriverKind) {
        in_a_directory("locks", kind, |core, dir| async move {
            let path = dir.join("LOCK");
            let refused = |error: io::Error| error.kind() == io::ErrorKind::WouldBlock;
            let lock = core.lock_exclusive(&path).await.expect("the file is made");
            assert!(refused(core.lock_exclusive(&path).await.unwrap_err()));
            assert!(refused(core.lock_shared(&path).await.unwrap_err()));
            let other_way = dir.join("..").join(dir.file_name().unwrap()).join("LOCK");
            assert!(refused(core.lock_exclusive(&other_way).await.unwrap_err()));
            // Other uses of the file in the process do not end the lock.
            std::fs::read(&path).unwrap();
            assert!(!another_process_gets_it(&path));
            drop(lock);
            assert!(another_process_gets_it(&path));
            let shared = core.lock_shared(&path).await.unwrap();
            assert!(refused(core.lock_exclusive(&path).await.unwrap_err()));
            assert!(!another_process_gets_it(&path));
            drop(shared);
            core.lock_exclusive(&path).await.unwrap();
        });
    }

    /// While another process holds RocksDB's lock, this process gets none.
    fn a_lock_of_another_process_is_respected(kind: DriverKind) {
        in_a_directory("locked", kind, |core, dir| async move {
            use std::io::{BufRead, BufReader};
            let path = dir.join("LOCK");
            std::fs::write(&path, "").unwrap();
            let program = format!("{LOCK_PROGRAM}print('locked', flush=True); sys.stdin.read()");
            let mut child = Command::new("python3")
                .args(["-c", &program, path.to_str().unwrap()])
                .stdin(std::process::Stdio::piped())
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            let mut line = String::new();
            BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
            assert_eq!(line.trim(), "locked");
            for error in [
                core.lock_exclusive(&path).await.unwrap_err(),
                core.lock_shared(&path).await.unwrap_err(),
            ] {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            }
            drop(child.stdin.take());
            assert!(child.wait().unwrap().success());
            core.lock_exclusive(&path).await.unwrap();
        });
    }
}

/// Takes RocksDB's lock (`F_SETLK` with `F_WRLCK` on the whole file).
const LOCK_PROGRAM: &str = "
import fcntl, sys
file = open(sys.argv[1], 'r+')
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(3)
";

/// Whether another process gets that lock, which it releases immediately.
fn another_process_gets_it(path: &Path) -> bool {
    let mut python = Command::new("python3");
    let status = python.args(["-c", LOCK_PROGRAM, path.to_str().unwrap()]).status().unwrap();
    assert!(matches!(status.code(), Some(0 | 3)), "{status}");
    status.success()
}

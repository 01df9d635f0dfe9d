//! Writes files of the host through a directory.
#![expect(clippy::disallowed_methods, reason = "files of the host, to compare with")]

use std::future::Future;
use std::io;
use std::path::PathBuf;

use fs::{Dir, FileWriter, Mode};
use reactor::{Core, RuntimeConfig, processors, run};

/// Runs one core with an empty directory of its own.
fn in_a_directory<Fut: Future<Output = ()> + 'static>(
    name: &str,
    test: impl Fn(Core, Dir) -> Fut + Clone + Send + 'static,
) {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("fs-{name}"));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    let processors = processors()[..1].to_vec();
    let config = RuntimeConfig { processors, memory: 16 << 20, ..RuntimeConfig::default() };
    run(&config, move |core| {
        let dir = Dir::new(&core, &path);
        test(core, dir)
    })
    .unwrap();
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n ^ (n >> 8) ^ (n >> 16)) as u8).collect()
}

#[test]
fn a_directory_makes_renames_and_removes_files() {
    in_a_directory("dir", |core, dir| async move {
        for mode in [Mode::Direct, Mode::Buffered] {
            let file = core.attach(&dir.create("a", mode).await.unwrap());
            assert_eq!(
                dir.create("a", mode).await.unwrap_err().kind(),
                io::ErrorKind::AlreadyExists
            );
            let mut buf = core.alloc(4096).unwrap();
            buf.fill(5);
            file.write_at(0, buf, 4096).await.0.unwrap();
            file.sync_data().await.unwrap();
            dir.rename("a", "b").await.unwrap();
            dir.sync().await.unwrap();
            let again = dir.open_for_writing("b", mode).await.unwrap();
            assert_eq!(again.size(), 4096);
            assert_eq!(dir.create_or_empty("b", mode).await.unwrap().size(), 0);
            let missing = dir.open_for_writing("a", mode).await.unwrap_err();
            assert_eq!(missing.kind(), io::ErrorKind::NotFound);
            dir.remove("b").await.unwrap();
            assert!(dir.list().await.unwrap().is_empty());
        }
        let lock = dir.lock_exclusive("LOCK").await.unwrap();
        assert_eq!(dir.lock_exclusive("LOCK").await.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(lock);
        dir.lock_exclusive("LOCK").await.unwrap();
    });
}

#[test]
fn a_small_file_is_replaced_as_a_whole() {
    in_a_directory("small", |core, dir| async move {
        for text in ["MANIFEST-000001\n", "", "MANIFEST-000002, and longer\n", "short"] {
            dir.write_small_atomically("CURRENT", text.as_bytes()).await.unwrap();
            assert_eq!(dir.read_small("CURRENT", 100).await.unwrap(), text.as_bytes());
            assert_eq!(dir.list().await.unwrap().len(), 1, "no draft is left");
        }
        assert_eq!(core.pool().used(), 0);
        let nowhere = Dir::new(&core, &dir.path().join("none"));
        let missing = nowhere.write_small_atomically("CURRENT", b"x").await.unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    });
}

/// Lengths near the chunk and block sizes, in pieces of many sizes, with syncs in between.
#[test]
fn a_writer_appends_everything_in_order() {
    in_a_directory("writer", |core, dir| async move {
        let chunk = 256 << 10;
        for mode in [Mode::Direct, Mode::Buffered] {
            for len in [0, 1, 511, 512, 5000, chunk - 1, chunk, chunk + 1, 3 * chunk + 700] {
                for (piece, sync_every) in [(len.max(1), 0), (999, 0), (70_001, 2), (333, 100)] {
                    if len / piece > 1000 {
                        continue;
                    }
                    let file = core.attach(&dir.create_or_empty("file", mode).await.unwrap());
                    let mut writer = FileWriter::new(&file).await.unwrap();
                    let all = bytes(len);
                    for (n, part) in all.chunks(piece).enumerate() {
                        writer.append(part).await.unwrap();
                        if sync_every > 0 && n % sync_every == 0 {
                            writer.sync().await.unwrap();
                            let so_far = std::fs::read(dir.path().join("file")).unwrap();
                            let (synced, padding) = so_far.split_at(writer.len() as usize);
                            assert!(*synced == all[..synced.len()], "{mode:?} {len} {piece}");
                            assert!(padding.iter().all(|&b| b == 0));
                            assert!(padding.len() < file.alignment());
                        }
                    }
                    assert_eq!(writer.len(), len as u64);
                    assert_eq!(writer.finish().await.unwrap(), len as u64);
                    assert!(std::fs::read(dir.path().join("file")).unwrap() == all);
                    assert_eq!(file.size(), len as u64);
                }
            }
        }
        assert_eq!(core.pool().used(), 0);
    });
}

#[test]
fn a_writer_is_broken_after_a_failed_or_dropped_call() {
    in_a_directory("broken", |core, dir| async move {
        let file = core.attach(&dir.create("file", Mode::Buffered).await.unwrap());
        let mut writer = FileWriter::new(&file).await.unwrap();
        writer.append(b"begun").await.unwrap();
        {
            let mut sync = Box::pin(writer.sync());
            std::future::poll_fn(|cx| {
                assert!(sync.as_mut().poll(cx).is_pending());
                std::task::Poll::Ready(())
            })
            .await;
        }
        assert!(writer.append(b"more").await.is_err());
        assert!(writer.sync().await.is_err());
        assert!(writer.finish().await.is_err());
        // A file that is open only for reading refuses the write.
        let file = core.attach(&dir.open("file").await.unwrap());
        let mut writer = FileWriter::new(&file).await.unwrap();
        writer.append(&bytes(512)).await.unwrap();
        assert!(writer.sync().await.is_err());
        assert!(writer.append(b"more").await.unwrap_err().to_string().contains("earlier write"));
    });
}

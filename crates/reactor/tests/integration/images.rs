//! An image that does not answer holds up nothing but itself.
#![expect(
    clippy::disallowed_methods,
    reason = "the outside of the reactor: files, and a lease that another program would have"
)]

use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;

use reactor::{Class, ImageOpening, Mode, RuntimeConfig, processors, run, timeout};

/// Sets the signal for a lease's end (linux/fcntl.h); `libc` does not define it.
const F_SETSIG: libc::c_int = 10;

/// Opens a file so that every other open of it waits until this one is closed, or
/// `/proc/sys/fs/lease-break-time` has passed (45 s).
fn with_lease(path: &Path) -> fs::File {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let fd = file.as_raw_fd();
    // The default signal would end the process. SAFETY: takes no pointers.
    assert_eq!(unsafe { libc::fcntl(fd, F_SETSIG, libc::SIGURG) }, 0);
    // SAFETY: takes no pointers.
    let leased = unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) };
    assert_eq!(leased, 0, "{}", std::io::Error::last_os_error());
    file
}

#[test]
fn images_that_do_not_answer_hold_up_no_other_file() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("images");
    fs::create_dir_all(&dir).unwrap();
    for name in ["hangs", "other", "state"] {
        fs::write(dir.join(name), vec![0; 1 << 20]).unwrap();
    }
    let config = RuntimeConfig {
        processors: processors()[..1].to_vec(),
        memory: 8 << 20,
        ..RuntimeConfig::default()
    };
    let done = run(&config, move |core| {
        let dir = dir.clone();
        async move {
            let how = ImageOpening { read_only: false, mode: Mode::Buffered, lock: false };
            let lease = with_lease(&dir.join("hangs"));
            let opening: Vec<_> = (0..9)
                .map(|_| {
                    let (own, path) = (core.clone(), dir.join("hangs"));
                    let open = async move { own.open_image(&path, how).await.map(drop) };
                    core.spawn(Class::Control, open)
                })
                .collect();
            let others = async {
                let image = core.open_image(&dir.join("other"), how).await.unwrap();
                core.measure(&image.file).await.unwrap();
                core.space(&image.file).await.unwrap();
                core.attach(&image.file).set_len(2 << 20).await.unwrap();
                core.rename(&dir.join("state"), &dir.join("disks.json")).await.unwrap();
                core.sync_dir(&dir).await.unwrap();
            };
            timeout(&core, 10_000_000_000, others).await.expect("others do not wait");
            assert!(opening.iter().all(|open| open.try_take().is_none()), "nothing has hung");
            drop(lease);
            for open in opening {
                open.await.unwrap();
            }
        }
    });
    done.unwrap();
}

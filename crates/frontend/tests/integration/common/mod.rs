//! A qemu-storage-daemon for each test, and shared helpers.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]
#![allow(dead_code, reason = "not every test uses all of it")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A directory that is removed with its value.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        let dir = std::env::temp_dir().join(format!("frontend-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Scratch(dir)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A daemon that serves one disk at a socket.
pub struct Daemon {
    child: Child,
    pub socket: PathBuf,
}

impl Daemon {
    /// Serves a file of `bytes` bytes, which is created if it does not exist.
    pub fn file(dir: &Scratch, bytes: u64, export: &str) -> Daemon {
        let image = dir.path("disk.img");
        let file = std::fs::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&image)
            .unwrap();
        if file.metadata().unwrap().len() == 0 {
            file.set_len(bytes).unwrap();
        }
        let image = image.display();
        let blockdev =
            format!("driver=file,filename={image},node-name=d,locking=off,discard=unmap");
        Daemon::start(&dir.path("disk.sock"), &blockdev, export)
    }

    /// Serves the block device that the daemon's options describe.
    pub fn start(socket: &Path, blockdev: &str, export: &str) -> Daemon {
        let _ = std::fs::remove_file(socket);
        let before = listeners(socket);
        let mut child = Command::new("qemu-storage-daemon")
            .arg("--blockdev")
            .arg(blockdev)
            .arg("--export")
            .arg(format!(
                "type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={}{export}",
                socket.display()
            ))
            .stdin(Stdio::null())
            .spawn()
            .expect("qemu-storage-daemon is needed (Debian's qemu-system-common)");
        let end = Instant::now() + Duration::from_secs(20);
        // Its name is there before it listens.
        while listeners(socket) == before {
            assert_eq!(child.try_wait().unwrap(), None, "the daemon ended");
            assert!(Instant::now() < end, "the daemon does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Daemon { child, socket: socket.to_owned() }
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }
}

/// How many sockets listen that have, or had, this name.
fn listeners(socket: &Path) -> usize {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let is_one = |line: &&str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        fields.get(3) == Some(&"00010000") && fields.last().map(Path::new) == Some(socket)
    };
    sockets.lines().filter(is_one).count()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

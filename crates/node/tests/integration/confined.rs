//! What a confined process can still do, tried from within: by this test's program, started again
//! for each mechanism, because confinement cannot be undone.

#![expect(clippy::disallowed_methods, reason = "it tries what a hostile process would try")]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;

use io_uring::{IoUring, opcode, types};
use node::{Beneath, confine_calls, confine_paths};

/// The part to play, and the directory to play it in.
const PART: &str = "MILLRACE_TEST_PART";
const PLACE: &str = "MILLRACE_TEST_PLACE";

/// A directory with a database's directory in it, images, and a listening socket.
struct Place {
    root: PathBuf,
    _listener: UnixListener,
}

impl Place {
    fn new(name: &str) -> Place {
        let root = std::env::temp_dir().join(format!("millrace-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("data")).unwrap();
        fs::write(root.join("data/CURRENT"), "one").unwrap();
        fs::write(root.join("own.img"), [7; 4096]).unwrap();
        fs::write(root.join("other.img"), [8; 4096]).unwrap();
        let listener = UnixListener::bind(root.join("their.sock")).unwrap();
        Place { root, _listener: listener }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// Plays a part in a separate process; returns false in that process.
fn apart(test: &str, part: &str) -> bool {
    if std::env::var(PART).is_ok_and(|now| now == part) {
        return false;
    }
    let place = Place::new(part);
    let played = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("confined::{test}"), "--nocapture", "--test-threads=1"])
        .env(PART, part)
        .env(PLACE, &place.root)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&played.stdout) + String::from_utf8_lossy(&played.stderr);
    assert!(played.status.success() && said.contains("1 passed"), "{said}");
    if let Some(why) = said.lines().find(|line| line.starts_with("skipped")) {
        eprintln!("{why}");
    }
    true
}

fn place() -> PathBuf {
    std::env::var_os(PLACE).unwrap().into()
}

#[track_caller]
fn refused<T>(what: io::Result<T>) {
    let error = what.err().expect("it should have been refused");
    // The error of a move or a link into the directory.
    let kinds = [io::ErrorKind::PermissionDenied, io::ErrorKind::CrossesDevices];
    assert!(kinds.contains(&error.kind()), "{error}");
}

fn append(path: &Path) -> io::Result<()> {
    OpenOptions::new().append(true).open(path)?.write_all(b"x")
}

/// Runs an operation of a ring.
fn of_ring(ring: &mut IoUring, entry: &io_uring::squeue::Entry) -> io::Result<i32> {
    // SAFETY: the objects that the entries of this test point to outlive them.
    unsafe { ring.submission().push(entry) }.unwrap();
    ring.submit_and_wait(1)?;
    match ring.completion().next().unwrap().result() {
        done if done >= 0 => Ok(done),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

#[test]
fn of_all_paths_only_the_databases_directory_stays_accessible() {
    if apart("of_all_paths_only_the_databases_directory_stays_accessible", "paths") {
        return;
    }
    let place = place();
    let data = place.join("data");
    let own = OpenOptions::new().read(true).write(true).open(place.join("own.img")).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let parent = std::os::unix::process::parent_id();
    let beneath = Beneath { directory: &data, writable: true, outside: &[] };
    let confined = confine_paths(Some(beneath));
    if confined != Ok(true) {
        eprintln!("skipped: Landlock is missing or too old: {confined:?}");
        return;
    }
    // A thread that is started later has the same rights as this one.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            refused(File::open("/etc/passwd"));
            refused(fs::read_dir("/"));
            refused(File::open(place.join("other.img")));
            refused(File::open(data.join("../other.img")));
            refused(append(&place.join("other.img")));
            refused(File::create(place.join("new.img")));
            refused(fs::remove_file(place.join("other.img")));
            refused(fs::rename(place.join("other.img"), data.join("taken.img")));
            refused(fs::hard_link(place.join("other.img"), data.join("taken.img")));
            refused(File::open("/proc/self/maps"));
            refused(UnixListener::bind(place.join("own.sock")));
            refused(TcpListener::bind("127.0.0.1:0"));
            refused(TcpStream::connect(port.local_addr().unwrap()));
            refused(Command::new("/bin/true").status());
            // SAFETY: takes no pointers.
            let killed = unsafe { libc::kill(parent as i32, 0) };
            assert_eq!((killed, errno()), (-1, Some(libc::EPERM)));
            let null = std::ptr::null_mut::<libc::c_void>();
            // SAFETY: the request uses no pointers.
            let traced = unsafe { libc::ptrace(libc::PTRACE_ATTACH, parent, null, null) };
            assert_eq!((traced, errno()), (-1, Some(libc::EPERM)));
            // A ring has the same rights.
            if let Ok(mut ring) = IoUring::new(4) {
                let at = types::Fd(libc::AT_FDCWD);
                let open = opcode::OpenAt::new(at, c"/etc/passwd".as_ptr()).build();
                refused(of_ring(&mut ring, &open));
            }
        });
    });
    // What the node needs is allowed.
    assert_eq!(fs::read(data.join("CURRENT")).unwrap(), b"one");
    fs::write(data.join("new"), "two").unwrap();
    fs::rename(data.join("new"), data.join("newer")).unwrap();
    fs::create_dir(data.join("below")).unwrap();
    fs::rename(data.join("newer"), data.join("below/newest")).unwrap();
    fs::remove_file(data.join("below/newest")).unwrap();
    File::open(&data).unwrap().sync_all().unwrap();
    own.write_all_at(&[9; 512], 0).unwrap();
    own.set_len(8192).unwrap();
    let mut bytes = [0; 512];
    own.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [9; 512]);
}

#[test]
fn a_read_only_directory_cannot_be_written() {
    if apart("a_read_only_directory_cannot_be_written", "reading") {
        return;
    }
    let data = place().join("data");
    let outside = [place().join("other.img"), place().join("logs")];
    fs::create_dir_all(outside[1].join("below")).unwrap();
    fs::write(outside[1].join("log"), "log").unwrap();
    let beneath = Beneath { directory: &data, writable: false, outside: &outside };
    let confined = confine_paths(Some(beneath));
    if confined != Ok(true) {
        eprintln!("skipped: Landlock is missing or too old: {confined:?}");
        return;
    }
    assert_eq!(fs::read(data.join("CURRENT")).unwrap(), b"one");
    refused(File::create(data.join("new")));
    refused(append(&data.join("CURRENT")));
    refused(fs::remove_file(data.join("CURRENT")));
    // Targets of links can be read, and the directory of logs can be listed.
    fs::read(&outside[0]).unwrap();
    refused(append(&outside[0]));
    refused(fs::remove_file(&outside[0]));
    assert_eq!(fs::read_dir(&outside[1]).unwrap().count(), 2);
    refused(File::open(outside[1].join("log")));
    refused(File::create(outside[1].join("new")));
}

#[test]
fn only_the_calls_that_a_node_needs_are_allowed() {
    if apart("only_the_calls_that_a_node_needs_are_allowed", "calls") {
        return;
    }
    let place = place();
    let own = OpenOptions::new().read(true).write(true).open(place.join("own.img")).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = port.local_addr().unwrap();
    let mut client = TcpStream::connect(addr).unwrap();
    let parent = std::os::unix::process::parent_id() as i32;
    let (ask, asked) = mpsc::channel::<()>();
    // A thread that already runs is confined, too.
    let before = std::thread::spawn(move || {
        asked.recv().unwrap();
        refused(UdpSocket::bind("127.0.0.1:0"));
        refused(File::open("/etc/passwd"));
    });
    confine_calls(false).unwrap();
    ask.send(()).unwrap();
    before.join().unwrap();
    std::thread::spawn(|| refused(UdpSocket::bind("127.0.0.1:0"))).join().unwrap();

    refused(File::open("/etc/passwd"));
    refused(fs::remove_file(place.join("other.img")));
    refused(UnixStream::connect(place.join("their.sock")));
    refused(UnixListener::bind(place.join("own.sock")));
    refused(TcpStream::connect(addr));
    refused(UdpSocket::bind("127.0.0.1:0"));
    refused(Command::new("/bin/true").status());
    refused(IoUring::new(4).map(drop));
    let number = |call: libc::c_long, arguments: [usize; 5]| {
        let [a, b, c, d, e] = arguments;
        // SAFETY: each of these calls is refused before it uses its arguments.
        let result = unsafe { libc::syscall(call, a, b, c, d, e) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    };
    refused(number(libc::SYS_kill, [parent as usize, 0, 0, 0, 0]));
    refused(number(libc::SYS_tgkill, [parent as usize, parent as usize, 0, 0, 0]));
    refused(number(libc::SYS_ptrace, [libc::PTRACE_ATTACH as usize, parent as usize, 0, 0, 0]));
    refused(number(libc::SYS_process_vm_readv, [parent as usize, 0, 0, 0, 0]));
    refused(number(libc::SYS_pidfd_open, [parent as usize, 0, 0, 0, 0]));
    #[cfg(target_arch = "x86_64")]
    refused(number(libc::SYS_fork, [0; 5]));
    refused(number(libc::SYS_clone, [libc::SIGCHLD as usize, 0, 0, 0, 0]));
    refused(number(libc::SYS_unshare, [libc::CLONE_NEWUSER as usize, 0, 0, 0, 0]));
    refused(number(libc::SYS_mount, [0; 5]));
    refused(number(libc::SYS_bpf, [0; 5]));
    refused(number(libc::SYS_setuid, [0; 5]));
    refused(number(libc::SYS_fcntl, [own.as_raw_fd() as usize, libc::F_SETOWN as usize, 1, 0, 0]));
    refused(number(libc::SYS_ioctl, [0, libc::TIOCSTI as usize, 0, 0, 0]));
    let executable = libc::PROT_READ | libc::PROT_EXEC;
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    refused(number(libc::SYS_mmap, [0, 4096, executable as usize, anonymous as usize, 0]));

    // What the node needs is allowed.
    own.write_all_at(&[9; 512], 0).unwrap();
    own.sync_data().unwrap();
    let (mut served, _) = port.accept().unwrap();
    client.write_all(b"ping").unwrap();
    let mut bytes = [0; 4];
    served.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"ping");
    assert_eq!(std::thread::spawn(|| 1 + 1).join().unwrap(), 2);
    assert!(!vec![1_u8; 64 << 20].is_empty());
    assert!(std::thread::spawn(|| panic!("as expected")).join().is_err());
}

fn errno() -> Option<i32> {
    io::Error::last_os_error().raw_os_error()
}

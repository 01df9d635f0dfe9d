//! A process that is killed, with a survivor.

#![expect(clippy::disallowed_methods, reason = "it kills a process, and looks at what is left")]

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};
use reactor::Survivor;

/// Tells the process that is to be killed where its pipe is.
const PIPE: &str = "MILLRACE_TEST_PIPE";
const PATIENCE: Duration = Duration::from_secs(20);

fn until(what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Locks all of an open file, if nobody else has.
fn lock(file: &File) -> bool {
    // SAFETY: a plain C struct for which all zeroes is a valid value: the whole file.
    let mut all: libc::flock = unsafe { std::mem::zeroed() };
    all.l_type = libc::F_WRLCK as i16;
    // SAFETY: a pointer to a live struct.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const all) == 0 }
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Locks the pipe, and reads from it through a ring, for ever.
fn wait_to_be_killed(path: &Path) {
    let survivor = Survivor::prepare().unwrap();
    let Ok(mut ring) = IoUring::new(4) else {
        println!("skipped: io_uring is not available here");
        return;
    };
    survivor.start().unwrap();
    let (pipe, mut byte) = (open(path), 0_u8);
    assert!(lock(&pipe));
    let read = opcode::Read::new(types::Fd(pipe.as_raw_fd()), &raw mut byte, 1).build();
    // SAFETY: the byte and the pipe outlive the operation, which ends with the process.
    unsafe { ring.submission().push(&read) }.unwrap();
    ring.submit().unwrap();
    println!("ready");
    loop {
        std::thread::park();
    }
}

/// The process that shares its memory with this one.
fn survivor(pid: u32) -> u32 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let children = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children"));
    let mut all = tasks.flatten().filter_map(|task| children(task).ok());
    all.find_map(|children| children.trim().parse().ok()).expect("there is a survivor")
}

/// What `/proc/PID/status` says; nothing when the process has gone.
fn status(pid: u32, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(text.lines().find_map(|line| line.strip_prefix(name))?.trim().to_owned())
}

#[test]
fn what_a_killed_process_was_reading_is_free_and_nothing_is_left_of_it() {
    if let Some(path) = std::env::var_os(PIPE) {
        return wait_to_be_killed(&PathBuf::from(path));
    }
    let path = std::env::temp_dir().join(format!("millrace-survivor-{}", std::process::id()));
    let made = Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    let pipe = open(&path);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "survivor::what_a_killed_process_was_reading_is_free_and_nothing_is_left_of_it",
            "--nocapture",
        ])
        .env(PIPE, &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let said = lines.find(|line| line.ends_with("ready") || line.contains("skipped")).unwrap();
    if said.ends_with("ready") {
        let survivor = survivor(child.id());
        assert_eq!(status(survivor, "Seccomp:").as_deref(), Some("2"));
        assert_eq!(status(survivor, "NoNewPrivs:").as_deref(), Some("1"));
        // SAFETY: takes no pointers.
        unsafe { libc::kill(survivor as i32, libc::SIGTERM) };
        assert!(!lock(&pipe), "the other process has the lock");

        child.kill().unwrap();
        child.wait().unwrap();
        until("the lock is free", || lock(&pipe));
        // A zombie stays if this process's parent is to wait for it and does not.
        let has_gone = || status(survivor, "State:").is_none_or(|state| state.starts_with('Z'));
        until("the survivor has ended", has_gone);
    } else {
        eprintln!("{said}");
        child.wait().unwrap();
    }
    std::fs::remove_file(&path).unwrap();
}

//! A lock ends with its guard, whatever other threads of the process do.
#![expect(
    clippy::disallowed_methods,
    reason = "the outside of the reactor: files, processes, threads"
)]

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use reactor::{RuntimeConfig, processors, run};

/// Starts a process that stays between fork and exec, with a copy of every descriptor, until a byte
/// is written.
fn half_started(mut ready: PipeWriter, mut resume: PipeReader) {
    let mut command = Command::new("true");
    // SAFETY: it only writes to a pipe and reads from one.
    unsafe {
        command.pre_exec(move || {
            ready.write_all(&[1])?;
            resume.read_exact(&mut [0])
        });
    }
    assert!(command.status().unwrap().success());
}

#[test]
fn a_lock_ends_while_another_thread_starts_a_process() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lock");
    let config = RuntimeConfig {
        processors: processors()[..1].to_vec(),
        memory: 8 << 20,
        ..RuntimeConfig::default()
    };
    let done = run(&config, move |core| {
        let path = path.clone();
        async move {
            let guard = core.lock_exclusive(&path).await.unwrap();
            let (mut readied, ready) = std::io::pipe().unwrap();
            let (wait, mut resume) = std::io::pipe().unwrap();
            let starts = std::thread::spawn(move || half_started(ready, wait));
            readied.read_exact(&mut [0]).unwrap();
            drop(guard);
            let again = core.lock_exclusive(&path).await;
            resume.write_all(&[1]).unwrap();
            starts.join().unwrap();
            again.expect("the lock was released");
        }
    });
    done.unwrap();
}

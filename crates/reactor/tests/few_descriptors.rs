//! A process at its limit of open descriptors. It is a program of its own, because the limit is the
//! process's.
#![cfg(not(loom))]
#![expect(clippy::disallowed_methods, reason = "a file of the host, for a test")]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use reactor::{Core, RuntimeConfig, UnixSocket, processors, run};

/// A message whose descriptor cannot be received is not reported as one with too many.
#[test]
fn descriptors_beyond_the_limit_are_reported_as_such() {
    let config = RuntimeConfig {
        processors: processors().into_iter().take(1).collect(),
        memory: 16 << 20,
        ..RuntimeConfig::default()
    };
    run(&config, |core: Core| async move {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ours = UnixSocket::from_fd(&core, ours.into()).unwrap();
        let theirs = UnixSocket::from_fd(&core, theirs.into()).unwrap();
        let file = OwnedFd::from(File::open("/dev/null").unwrap());
        let limit = libc::rlimit { rlim_cur: 200, rlim_max: 200 };
        // SAFETY: the call reads `limit`, which is live.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
        let all: Vec<_> = std::iter::from_fn(|| file.try_clone().ok()).collect();
        theirs.try_send(b"x", &[file.as_fd()]).unwrap();
        let error = ours.recv(&mut Vec::new(), 10).await.unwrap_err();
        assert!(error.to_string().contains("ulimit -n"), "{error}");

        drop(all);
        theirs.try_send(b"y", &[file.as_fd()]).unwrap();
        let mut bytes = Vec::new();
        let (received, descriptors) = ours.recv(&mut bytes, 10).await.unwrap();
        assert_eq!((received, descriptors.len(), &bytes[bytes.len() - 1..]), (1, 1, &b"y"[..]));
    })
    .unwrap();
}

//! Unix sockets that carry descriptors, and eventfds, on every driver.
#![expect(
    clippy::disallowed_methods,
    reason = "the outside of the reactor: files, clients, threads"
)]

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener as StdListener, UnixStream};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::every_driver::{available, config, on_one_core};
use reactor::{Class, DriverKind, EventFd, UnixListener, UnixPackets, UnixSocket};

fn path(name: &str, kind: DriverKind) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{kind:?}.sock"));
    let _ = std::fs::remove_file(&path);
    path
}

fn file_with(text: &str) -> OwnedFd {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("unix-{text}-{:?}", thread::current().id()));
    let mut file = File::options().create(true).truncate(true).read(true).write(true).open(path);
    let file = file.as_mut().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.try_clone().unwrap().into()
}

fn text_of(fd: OwnedFd) -> String {
    let (mut file, mut text) = (File::from(fd), String::new());
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    text
}

on_every_driver! {
    fn packets_arrive_whole_also_when_their_sender_has_gone(kind: DriverKind) {
        on_one_core(&config(kind), move |core| async move {
            let (here, there) = UnixPackets::pair().unwrap();
            assert!(UnixPackets::is_one(here.as_fd()));
            let here = UnixPackets::from_fd(&core, here).unwrap();
            let there = UnixPackets::from_fd(&core, there).unwrap();
            let would_block = std::io::ErrorKind::WouldBlock;
            assert_eq!(here.try_recv(9).unwrap_err().kind(), would_block);
            there.try_send(b"one", &[file_with("one").as_fd()]).unwrap();
            there.try_send(b"two", &[]).unwrap();
            there.try_send(b"too long", &[]).unwrap();
            there.try_send(b"last", &[file_with("last").as_fd()]).unwrap();
            // It leaves a packet unread.
            here.try_send(b"unread", &[]).unwrap();
            drop(there);
            let (bytes, fds) = here.recv(5).await.unwrap();
            assert_eq!((&bytes[..], fds.len()), (&b"one"[..], 1));
            assert_eq!(here.recv(5).await.unwrap().0, b"two");
            assert_eq!(here.recv(5).await.unwrap_err().kind(), std::io::ErrorKind::InvalidData);
            let (bytes, mut fds) = here.recv(5).await.unwrap();
            assert_eq!((&bytes[..], text_of(fds.pop().unwrap())), (&b"last"[..], "last".to_owned()));
            assert_eq!(here.recv(5).await.unwrap().0, b"");
            let stream: OwnedFd = UnixStream::pair().unwrap().0.into();
            assert!(UnixPackets::from_fd(&core, stream).is_err());
        });
    }

    fn descriptors_travel_with_the_bytes_both_ways(kind: DriverKind) {
        let path = path("fds", kind);
        on_one_core(&config(kind), move |core| {
            let path = path.clone();
            async move {
                let listener = UnixListener::bind(&core, &path).unwrap();
                let there = UnixSocket::connect(&core, &path).unwrap();
                let here = listener.accept().await.unwrap();
                assert_eq!(here.peer_pid().unwrap(), std::process::id());
                for (from, to) in [(&here, &there), (&there, &here)] {
                    let (one, two) = (file_with("one"), file_with("two"));
                    from.send(b"hello", &[one.as_fd(), two.as_fd()]).await.unwrap();
                    let mut got = b"> ".to_vec();
                    let (n, fds) = to.recv(&mut got, 100).await.unwrap();
                    assert_eq!((n, &got[..]), (5, &b"> hello"[..]));
                    let texts: Vec<String> = fds.into_iter().map(text_of).collect();
                    assert_eq!(texts, ["one", "two"]);
                }
                drop(there);
                assert_eq!(here.recv(&mut Vec::new(), 100).await.unwrap().0, 0);
            }
        });
    }

    fn a_message_in_pieces_and_more_than_the_socket_holds(kind: DriverKind) {
        let path = path("much", kind);
        on_one_core(&config(kind), move |core| {
            let path = path.clone();
            async move {
                let listener = UnixListener::bind(&core, &path).unwrap();
                let there = UnixSocket::connect(&core, &path).unwrap();
                let here = listener.accept().await.unwrap();
                let sent: Vec<u8> = (0..1_000_000u32).map(|at| at as u8).collect();
                let expected = sent.clone();
                let sending = core.spawn(Class::Foreground, async move {
                    there.send(&sent, &[]).await
                });
                let mut got = Vec::new();
                while got.len() < expected.len() {
                    here.recv(&mut got, 4096).await.unwrap();
                }
                sending.await.unwrap();
                assert!(got == expected);
            }
        });
    }

    fn a_name_in_use_is_refused_and_a_stale_one_is_replaced(kind: DriverKind) {
        let path = path("names", kind);
        on_one_core(&config(kind), move |core| {
            let path = path.clone();
            async move {
                let other = StdListener::bind(&path).unwrap();
                let refused = UnixListener::bind(&core, &path).err().unwrap();
                assert_eq!(refused.kind(), std::io::ErrorKind::AddrInUse);
                drop(other);
                let listener = UnixListener::bind(&core, &path).unwrap();
                let client = path.clone();
                let client = thread::spawn(move || UnixStream::connect(client).map(drop));
                listener.accept().await.unwrap();
                client.join().unwrap().unwrap();
                std::fs::remove_file(&path).unwrap();
                std::fs::write(&path, "no socket").unwrap();
                let refused = UnixListener::bind(&core, &path).err().unwrap();
                assert_eq!(refused.kind(), std::io::ErrorKind::AddrInUse);
                assert_eq!(std::fs::read(&path).unwrap(), b"no socket");
                let long = path.join("x".repeat(200));
                let refused = UnixListener::bind(&core, &long).err().unwrap();
                assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput);
            }
        });
    }

    fn an_eventfd_wakes_a_sleeping_core(kind: DriverKind) {
        on_one_core(&config(kind), |core| async move {
            let event = EventFd::new().unwrap();
            let outside = EventFd::from_fd(event.as_fd().try_clone_to_owned().unwrap()).unwrap();
            let watch = event.watch(&core).unwrap();
            for _ in 0..3 {
                let raised = thread::spawn({
                    let fd = outside.as_fd().try_clone_to_owned().unwrap();
                    move || {
                        thread::sleep(Duration::from_millis(20));
                        EventFd::from_fd(fd).unwrap().signal();
                    }
                });
                watch.raised().await.unwrap();
                watch.clear();
                raised.join().unwrap();
            }
        });
    }
}

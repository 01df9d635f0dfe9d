//! One suite for every driver of the host: the reactor's guarantees for files, sockets, timers and
//! wake-ups must not depend on the driver.
//!
//! Each test runs once per driver, as `io_uring::NAME` and `epoll::NAME`. Where the system forbids
//! io_uring, the tests of that driver print so and pass.
#![expect(clippy::disallowed_methods, reason = "the outside of the reactor: files, clients, clock")]
#![expect(clippy::disallowed_types, reason = "a lock shares a receiver with a computation")]

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::every_driver::{available, config, on_one_core};
use reactor::{
    Class, Core, DriverKind, File, Listener, Part, PollMode, RuntimeConfig, Slice, processors, run,
};

/// Runs a server on one core against a client on a thread of its own, until both are done.
fn serve<Fut, T: Send>(
    config: &RuntimeConfig,
    server: impl Fn(Core, Listener) -> Fut + Clone + Send + 'static,
    client: impl FnOnce(SocketAddr) -> T + Send,
) -> T
where
    Fut: Future<Output = ()> + 'static,
{
    let (announce, announced) = sync_channel(1);
    thread::scope(|scope| {
        let client = scope.spawn(move || client(announced.recv().unwrap()));
        on_one_core(config, move |core| {
            let (announce, server) = (announce.clone(), server.clone());
            async move {
                let listener = core.listen("127.0.0.1:0".parse().unwrap()).unwrap();
                announce.send(listener.local_addr().unwrap()).unwrap();
                server(core, listener).await;
            }
        });
        client.join().unwrap()
    })
}

/// A file in which each 512-byte block has its position, and 100 bytes more.
const BLOCKS: u64 = 8192;

fn data_file(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let bytes: Vec<u8> =
        (0..BLOCKS).flat_map(|block| [block; 64]).flat_map(u64::to_le_bytes).collect();
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&bytes).unwrap();
    file.write_all(&[7; 100]).unwrap();
    path
}

fn assert_blocks(bytes: &[u8], first: u64) {
    for (n, word) in bytes.chunks_exact(8).enumerate() {
        let block = u64::from_le_bytes(word.try_into().unwrap());
        assert_eq!(block, first + n as u64 / 64, "word {n} of a read of block {first}");
    }
}

/// Reads `count` random runs of 8 blocks with `depth` readers at once, and checks each.
async fn read_many(core: &Core, file: &File, depth: usize, count: usize) {
    let left = Rc::new(Cell::new(count));
    let readers: Vec<_> = (0..depth)
        .map(|_| {
            let (core, file, left) = (core.clone(), file.clone(), left.clone());
            core.clone().spawn(Class::Foreground, async move {
                while left.get() > 0 {
                    left.set(left.get() - 1);
                    let first = core.random_u64() % (BLOCKS / 8) * 8;
                    let buf = core.alloc_wait(4096).await.unwrap();
                    let (result, buf) = file.read_at(first * 512, buf).await;
                    assert_eq!(result.unwrap(), 4096);
                    assert_blocks(&buf, first);
                }
            })
        })
        .collect();
    for reader in readers {
        reader.await;
    }
}

/// Has 600 readers read runs of up to 128 blocks, into registered buffers while there are some. A
/// third of the readers holds on to its buffer.
async fn read_registered(core: &Core, file: &File) {
    let readers: Vec<_> = (0..600)
        .map(|n| {
            let (core, file) = (core.clone(), file.clone());
            core.clone().spawn(Class::Foreground, async move {
                for round in 0..4 {
                    let blocks = 1 + core.random_u64() % if round == 0 { 128 } else { 20 };
                    let first = core.random_u64() % (BLOCKS - blocks);
                    let len = blocks as usize * 512;
                    let buf = match core.alloc_registered(len) {
                        Some(buf) => buf,
                        None => core.alloc_wait(len).await.unwrap(),
                    };
                    assert!(buf.len() == len && buf.capacity() >= len);
                    let (result, buf) = file.read_at(first * 512, buf).await;
                    assert_eq!(result.unwrap(), len);
                    assert_blocks(&buf, first);
                    let shared = buf.share();
                    if n % 3 == 0 {
                        core.sleep_ns(100_000).await;
                        assert_blocks(&shared, first);
                    }
                }
            })
        })
        .collect();
    for reader in readers {
        reader.await;
    }
    assert_eq!((core.operations_in_flight(), core.pool().used()), (0, 0));
}

/// Bytes of memory that this process may lock.
fn locked_bytes_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is live.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) }, 0);
    limit.rlim_cur
}

/// Polls a future once, then returns it.
async fn poll_once<F: Future + Unpin>(mut future: F) -> (Option<F::Output>, F) {
    let output = std::future::poll_fn(|cx| {
        Poll::Ready(match Pin::new(&mut future).poll(cx) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        })
    })
    .await;
    (output, future)
}

on_every_driver! {
    /// The computation ends only if a task of the core runs meanwhile.
    fn a_computation_leaves_the_core_to_other_tasks(kind: DriverKind) {
        let computed = on_one_core(&config(kind), |core| async move {
            let (tell, told) = sync_channel(1);
            let told = Mutex::new(told);
            core.spawn(Class::Background, async move { tell.send(7_u8).unwrap() });
            let hears = move || told.lock().unwrap().recv_timeout(Duration::from_secs(60));
            core.compute(move || hears().map_or(Vec::new(), |byte| vec![byte])).await
        });
        assert_eq!(computed, [7]);
    }

    /// More readers than file threads, ring entries, and the core's own disk depth.
    fn reads_return_the_bytes_of_the_file(kind: DriverKind) {
        for (buffered, depth) in [(false, 1), (false, 7), (false, 300), (true, 1), (true, 100)] {
            let path = data_file(&format!("reads-{kind:?}"));
            let config = RuntimeConfig { disk_depth: 128, ..config(kind) };
            on_one_core(&config, move |core| {
                let path = path.clone();
                async move {
                    let file = core.attach(&core.open(&path, buffered).await.unwrap());
                    assert_eq!(file.size(), BLOCKS * 512 + 100);
                    read_many(&core, &file, depth, 2000).await;
                    assert_eq!((core.operations_in_flight(), core.pool().used()), (0, 0));
                }
            });
        }
    }

    /// More readers than registered buffers, which are of all lengths and come back; the others
    /// read into plain buffers. Also on a ring that is restricted to the driver's operations.
    fn reads_into_registered_and_plain_buffers_return_the_bytes_of_the_file(kind: DriverKind) {
        for confined in [false, true] {
            let path = data_file(&format!("registered-{kind:?}-{confined}"));
            let config =
                RuntimeConfig { memory: 256 << 20, disk_depth: 128, confined, ..config(kind) };
            let registered = on_one_core(&config, move |core| {
                let path = path.clone();
                async move {
                    for buffered in [false, true] {
                        let file = core.attach(&core.open(&path, buffered).await.unwrap());
                        read_registered(&core, &file).await;
                    }
                    (core.driver_name().starts_with("io_uring"), core.pool().registered())
                }
            });
            match registered {
                // The limit of locked memory may be lower than that of any usual system.
                (true, bytes) => assert!(bytes > 0 || locked_bytes_max() < 8 << 20),
                (false, bytes) => assert_eq!(bytes, 0),
            }
        }
    }

    /// A dropped read keeps its registered buffer until the device has filled it.
    fn the_registered_buffer_of_a_dropped_read_comes_back_after_its_end(kind: DriverKind) {
        const LEN: usize = 16 << 10;
        let path = data_file(&format!("registered-dropped-{kind:?}"));
        let config = RuntimeConfig { memory: 256 << 20, ..config(kind) };
        on_one_core(&config, move |core| {
            let path = path.clone();
            async move {
                let file = core.attach(&core.open(&path, false).await.unwrap());
                let all = || std::iter::from_fn(|| core.alloc_registered(LEN)).collect::<Vec<_>>();
                let bufs = all();
                let count = bufs.len();
                assert_eq!(count, core.pool().registered() / LEN);
                for (n, buf) in bufs.into_iter().enumerate() {
                    file.read_at(n as u64 % 64 * LEN as u64, buf).start();
                }
                assert_eq!(all().len() + core.operations_in_flight(), count);
                while core.operations_in_flight() > 0 {
                    core.sleep_ns(1_000_000).await;
                }
                assert_eq!(all().len(), count);
            }
        });
    }

    fn a_read_is_short_at_the_end_of_the_file(kind: DriverKind) {
        let path = data_file(&format!("end-{kind:?}"));
        on_one_core(&config(kind), move |core| {
            let path = path.clone();
            async move {
                for buffered in [false, true] {
                    let file = core.attach(&core.open(&path, buffered).await.unwrap());
                    for (at, expected) in [(BLOCKS - 8, 4096), (BLOCKS, 100), (BLOCKS + 8, 0)] {
                        let buf = core.alloc(4096).unwrap();
                        let (result, buf) = file.read_at(at * 512, buf).await;
                        assert_eq!(result.unwrap(), expected, "at block {at}");
                        assert!(at != BLOCKS || buf[..100] == [7; 100]);
                    }
                    let buf = core.alloc(4096).unwrap();
                    let (result, _) = file.read_at(u64::MAX - 4095, buf).await;
                    assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EINVAL));
                }
            }
        });
    }

    /// The page cache has the first page of the range and not the second: a driver that reads the
    /// cache first gets half, and must not mistake that for the end of the file.
    fn a_half_cached_read_is_complete(kind: DriverKind) {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::FileExt;
        let path = data_file(&format!("half-{kind:?}"));
        let outside = Arc::new(std::fs::File::open(&path).unwrap());
        outside.sync_all().unwrap();
        for advice in [libc::POSIX_FADV_DONTNEED, libc::POSIX_FADV_RANDOM] {
            // SAFETY: takes no pointers.
            assert_eq!(unsafe { libc::posix_fadvise(outside.as_raw_fd(), 0, 0, advice) }, 0);
        }
        on_one_core(&config(kind), move |core| {
            let (path, outside) = (path.clone(), outside.clone());
            async move {
                let file = core.attach(&core.open(&path, true).await.unwrap());
                for first in (0..BLOCKS).step_by(512) {
                    outside.read_exact_at(&mut [0; 4096], first * 512).unwrap();
                    let (result, buf) = file.read_at(first * 512, core.alloc(8192).unwrap()).await;
                    assert_eq!(result.unwrap(), 8192);
                    assert_blocks(&buf, first);
                }
            }
        });
    }

    fn a_misaligned_direct_read_is_an_error_not_a_wrong_answer(kind: DriverKind) {
        let path = data_file(&format!("misaligned-{kind:?}"));
        on_one_core(&config(kind), move |core| {
            let path = path.clone();
            async move {
                let file = core.attach(&core.open(&path, false).await.unwrap());
                let (result, buf) = file.read_at(100, core.alloc(4096).unwrap()).await;
                match result {
                    Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EINVAL)),
                    // A file system without direct I/O reads through the page cache.
                    Ok(_) => assert_eq!((file.alignment(), buf[0]), (1, 0)),
                }
            }
        });
    }

    /// The kernel may still write into the buffer of a read after its future was dropped.
    fn a_dropped_read_keeps_its_buffer_until_it_is_done(kind: DriverKind) {
        let path = data_file(&format!("dropped-{kind:?}"));
        on_one_core(&config(kind), move |core| {
            let path = path.clone();
            async move {
                let file = core.attach(&core.open(&path, false).await.unwrap());
                for round in 0..50 {
                    let before = core.operations_in_flight();
                    let reads: Vec<_> = (0..64).map(|n| {
                        let mut read = file.read_at((n * 64) * 512, core.alloc(32 << 10).unwrap());
                        read.start();
                        read
                    }).collect();
                    assert_eq!(core.operations_in_flight(), before + 64);
                    if round % 2 == 0 {
                        core.yield_now().await;
                    }
                    drop(reads);
                    // In use by operations, although the futures are gone.
                    assert_eq!(core.pool().used() / (32 << 10), core.operations_in_flight());
                    read_many(&core, &file, 8, 50).await;
                }
                while core.operations_in_flight() > 0 {
                    core.sleep_ns(100_000).await;
                }
                assert_eq!(core.pool().used(), 0);
            }
        });
    }

    /// The main task ends with operations in flight: reads, an accept, a receive, a timer.
    fn a_core_stops_with_operations_in_flight(kind: DriverKind) {
        let path = data_file(&format!("stop-{kind:?}"));
        let began = Instant::now();
        for _ in 0..5 {
            let path = path.clone();
            let mut connection = serve(
                &config(kind),
                move |core, listener| {
                    let path = path.clone();
                    async move {
                        let file = core.attach(&core.open(&path, false).await.unwrap());
                        let socket = listener.accept().await.unwrap();
                        core.spawn(Class::Foreground, async move {
                            socket.recv(Vec::new(), 100).await.0.unwrap();
                        });
                        core.spawn(Class::Foreground, async move {
                            listener.accept().await.unwrap();
                        });
                        let sleep = core.sleep_ns(u64::MAX);
                        core.spawn(Class::Control, sleep);
                        core.yield_now().await;
                        for n in 0..64 {
                            let buf = core.alloc(256 << 10).unwrap();
                            file.read_at(n * 4096, buf).start();
                        }
                    }
                },
                |addr| TcpStream::connect(addr).unwrap(),
            );
            // The core has closed it.
            assert_eq!(connection.read(&mut [0; 8]).unwrap_or(0), 0);
        }
        assert!(began.elapsed() < Duration::from_secs(4), "waited for what could be cancelled");
    }

    fn names_are_opened_listed_read_and_locked(kind: DriverKind) {
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("names-{kind:?}"));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("small"), b"twelve bytes").unwrap();
        on_one_core(&config(kind), move |core| {
            let dir = dir.clone();
            async move {
                let missing = core.open(&dir.join("missing"), false).await.unwrap_err();
                assert_eq!(missing.kind(), io::ErrorKind::NotFound);
                let entries = core.list(&dir).await.unwrap();
                assert_eq!((entries.len(), &*entries[0].name, entries[0].size), (1, "small", 12));
                assert_eq!(core.read_small(&dir.join("small"), 12).await.unwrap(), b"twelve bytes");
                let long = core.read_small(&dir.join("small"), 11).await.unwrap_err();
                assert_eq!(long.kind(), io::ErrorKind::InvalidData);
                let lock = core.lock_shared(&dir.join("small")).await.unwrap();
                core.lock_shared(&dir.join("small")).await.expect("a shared lock is shared");
                drop(lock);
            }
        });
    }

    /// Larger than all socket buffers together, so that both sides block.
    fn a_stream_passes_more_than_the_buffers_hold(kind: DriverKind) {
        const TOTAL: usize = 32 << 20;
        serve(
            &config(kind),
            |_, listener| async move {
                let socket = listener.accept().await.unwrap();
                let (mut buf, mut total) = (Vec::new(), 0);
                loop {
                    buf.clear();
                    let (result, bytes) = socket.recv(buf, 100_000).await;
                    let n = result.unwrap();
                    if n == 0 {
                        break;
                    }
                    assert!((total..total + n).eq(bytes.iter().scan(total, |at, &byte| {
                        assert_eq!(byte, *at as u8);
                        *at += 1;
                        Some(*at - 1)
                    })));
                    total += n;
                    let (result, back) = socket.send(bytes).await;
                    result.unwrap();
                    buf = back;
                }
                assert_eq!(total, TOTAL);
            },
            |addr| {
                let mut writer = TcpStream::connect(addr).unwrap();
                let mut reader = writer.try_clone().unwrap();
                let sender = thread::spawn(move || {
                    let bytes: Vec<u8> = (0..1 << 20).map(|n| n as u8).collect();
                    for _ in 0..TOTAL >> 20 {
                        writer.write_all(&bytes).unwrap();
                    }
                    writer.shutdown(std::net::Shutdown::Write).unwrap();
                });
                // Lets the socket fill up, so that the server's send must wait.
                thread::sleep(Duration::from_millis(50));
                let mut back = Vec::new();
                reader.read_to_end(&mut back).unwrap();
                sender.join().unwrap();
                assert_eq!(back.len(), TOTAL);
                assert!(back.iter().enumerate().all(|(at, &byte)| byte == at as u8));
            },
        );
    }

    fn a_connection_is_made_or_refused_before_the_first_bytes_are_sent(kind: DriverKind) {
        on_one_core(&config(kind), |core| async move {
            let listener = core.listen("127.0.0.1:0".parse().unwrap()).unwrap();
            let addr = listener.local_addr().unwrap();
            let theirs = core.connect(addr).unwrap();
            theirs.send(b"ping".to_vec()).await.0.unwrap();
            let ours = listener.accept().await.unwrap();
            let (received, bytes) = ours.recv(Vec::new(), 16).await;
            assert_eq!((received.unwrap(), &*bytes), (4, &b"ping"[..]));
            ours.send(b"pong".to_vec()).await.0.unwrap();
            let (received, bytes) = theirs.recv(Vec::new(), 16).await;
            assert_eq!((received.unwrap(), &*bytes), (4, &b"pong"[..]));

            drop(listener);
            drop(ours);
            let error = match core.connect(addr) {
                Ok(socket) => socket.send(b"ping".to_vec()).await.0.unwrap_err(),
                Err(error) => error,
            };
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
        });
    }

    /// The first send after a plain end succeeds.
    fn a_send_fails_after_the_other_side_has_reset_the_connection(kind: DriverKind) {
        on_one_core(&config(kind), |core| async move {
            let listener = core.listen("127.0.0.1:0".parse().unwrap()).unwrap();
            for reset in [false, true] {
                let theirs = core.connect(listener.local_addr().unwrap()).unwrap();
                let ours = listener.accept().await.unwrap();
                theirs.send(b"ping".to_vec()).await.0.unwrap();
                ours.readable().await.unwrap();
                if reset { theirs.reset() } else { theirs.shutdown() }
                drop(theirs);
                let sent = ours.send(b"pong".to_vec()).await.0;
                assert_eq!(sent.is_err(), reset);
            }
        });
    }

    /// The client of many protocols receives first.
    fn a_connection_that_is_being_made_may_receive_first(kind: DriverKind) {
        on_one_core(&config(kind), |core| async move {
            let listener = core.listen("127.0.0.1:0".parse().unwrap()).unwrap();
            let addr = listener.local_addr().unwrap();
            let theirs = core.connect(addr).unwrap();
            theirs.fail_if_silent(10).unwrap();
            let hello = core.spawn(Class::Foreground, async move {
                let ours = listener.accept().await.unwrap();
                ours.send(b"hello".to_vec()).await.0.unwrap();
                (listener, ours)
            });
            let (received, bytes) = theirs.recv(Vec::new(), 16).await;
            assert_eq!((received.unwrap(), &*bytes), (5, &b"hello"[..]));
            drop(hello.await);
            let refused = match core.connect(addr) {
                Ok(socket) => socket.recv(Vec::new(), 16).await.0.unwrap_err(),
                Err(error) => error,
            };
            assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        });
    }

    fn a_unix_socket_is_connected_to_by_name(kind: DriverKind) {
        let name = format!("millrace-connect-unix-{}-{kind:?}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let name = path.clone();
        on_one_core(&config(kind), move |core| {
            let path = name.clone();
            async move {
                let listening = reactor::listen_unix(&path).unwrap();
                let listener = reactor::Listener::from_fd(&core, listening).unwrap();
                let fd = reactor::connect_unix(&path).unwrap();
                let theirs = reactor::Socket::from_fd(&core, fd).unwrap();
                theirs.fail_if_silent(10).unwrap();
                let ours = listener.accept().await.unwrap();
                theirs.send(b"ping".to_vec()).await.0.unwrap();
                let (received, bytes) = ours.recv(Vec::new(), 16).await;
                assert_eq!((received.unwrap(), &*bytes), (4, &b"ping"[..]));
                drop((listener, ours));
                let error = reactor::connect_unix(&path).unwrap_err();
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
            }
        });
        std::fs::remove_file(path).unwrap();
    }

    fn pieces_are_sent_in_order_without_a_copy(kind: DriverKind) {
        let got = serve(
            &config(kind),
            |core, listener| async move {
                let socket = listener.accept().await.unwrap();
                // More pieces than one message takes, some empty, some megabytes.
                let mut parts = Vec::new();
                for n in 0..3000_u32 {
                    parts.push(Part::Bytes(n.to_le_bytes()[..n as usize % 5].to_vec()));
                    if n % 500 == 0 {
                        let mut buf = core.alloc(1 << 20).unwrap();
                        buf.fill(n as u8);
                        let shared = buf.share();
                        parts.push(Part::Slice(Slice::new(shared, 1..(1 << 20))));
                    }
                }
                let (result, back) = socket.send_parts(parts, &Cell::default()).await;
                result.unwrap();
                assert!(back.is_empty());
            },
            |addr| {
                let mut got = Vec::new();
                TcpStream::connect(addr).unwrap().read_to_end(&mut got).unwrap();
                got
            },
        );
        let mut expected = Vec::new();
        for n in 0..3000_u32 {
            expected.extend(&n.to_le_bytes()[..n as usize % 5]);
            if n % 500 == 0 {
                expected.extend(vec![n as u8; (1 << 20) - 1]);
            }
        }
        assert!(got == expected, "{} bytes for {}", got.len(), expected.len());
    }

    /// An idle connection holds no buffer: it waits for "readable" and then receives.
    fn readable_waits_and_does_not_take(kind: DriverKind) {
        serve(
            &config(kind),
            |core, listener| async move {
                let socket = listener.accept().await.unwrap();
                let (early, wait) = poll_once(Box::pin(socket.readable())).await;
                assert!(early.is_none());
                assert_eq!(core.pool().used(), 0);
                wait.await.unwrap();
                socket.readable().await.unwrap();
                let (result, bytes) = socket.recv(Vec::new(), 100).await;
                assert_eq!((result.unwrap(), &*bytes), (5, &b"hello"[..]));
                socket.send(b"bye".to_vec()).await.0.unwrap();
                // The end of the stream is readable too.
                socket.readable().await.unwrap();
                assert_eq!(socket.recv(Vec::new(), 100).await.0.unwrap(), 0);
            },
            |addr| {
                let mut stream = TcpStream::connect(addr).unwrap();
                thread::sleep(Duration::from_millis(20));
                stream.write_all(b"hello").unwrap();
                stream.read_exact(&mut [0; 3]).unwrap();
            },
        );
    }

    /// A buffer of the pool is filled from a place on, and never beyond its end.
    fn a_buffer_is_filled_from_the_socket(kind: DriverKind) {
        const TOTAL: usize = 200_000;
        serve(
            &config(kind),
            |core, listener| async move {
                let socket = listener.accept().await.unwrap();
                let mut buf = core.alloc_wait(TOTAL).await.unwrap();
                let mut at = 100;
                while at < TOTAL {
                    let (received, back) = socket.recv_into(buf, at).await;
                    buf = back;
                    let n = received.unwrap();
                    assert!(n > 0 && n <= 64 << 10);
                    at += n;
                }
                assert!(buf[..100].iter().all(|byte| *byte == 0));
                assert!(buf[100..].iter().enumerate().all(|(at, byte)| *byte == at as u8));
                // What does not fit stays in the socket.
                let (received, _) = socket.recv(Vec::new(), 100).await;
                assert_eq!(received.unwrap(), 3);
                assert_eq!(socket.recv_into(buf, 0).await.0.unwrap(), 0, "the end");
            },
            |addr| {
                let bytes: Vec<u8> = (0..TOTAL - 100 + 3).map(|at| at as u8).collect();
                TcpStream::connect(addr).unwrap().write_all(&bytes).unwrap();
            },
        );
    }

    /// One task reads while another writes, on the same connection, both blocked at times.
    fn a_connection_is_read_and_written_concurrently(kind: DriverKind) {
        const TOTAL: usize = 8 << 20;
        serve(
            &config(kind),
            |core, listener| async move {
                let socket = listener.accept().await.unwrap();
                let writing = socket.clone();
                let writer = core.spawn(Class::Foreground, async move {
                    writing.send(vec![1; TOTAL]).await.0.unwrap();
                });
                let mut got = 0;
                while got < TOTAL {
                    got += socket.recv(Vec::new(), 65536).await.0.unwrap();
                }
                writer.await;
            },
            |addr| {
                let mut writer = TcpStream::connect(addr).unwrap();
                let mut reader = writer.try_clone().unwrap();
                let sender = thread::spawn(move || {
                    for _ in 0..TOTAL >> 16 {
                        writer.write_all(&[2; 1 << 16]).unwrap();
                    }
                });
                let mut got = vec![0; TOTAL];
                reader.read_exact(&mut got).unwrap();
                sender.join().unwrap();
            },
        );
    }

    /// The end of the other direction is permanent: it must not keep waking a waiting send.
    fn a_send_to_a_peer_that_has_finished_sending_waits_quietly(kind: DriverKind) {
        let got = serve(
            &config(kind),
            |core, listener| async move {
                let socket = listener.accept().await.unwrap();
                assert_eq!(socket.recv(Vec::new(), 1).await.0.unwrap(), 0);
                let before = core.stats().enters.get();
                socket.send(vec![5; 16 << 20]).await.0.unwrap();
                let enters = core.stats().enters.get() - before;
                assert!(enters < 5000, "entered {enters} times to send 16 MiB");
            },
            |addr| {
                let mut stream = TcpStream::connect(addr).unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
                thread::sleep(Duration::from_millis(200));
                let mut got = Vec::new();
                stream.read_to_end(&mut got).unwrap();
                got.len()
            },
        );
        assert_eq!(got, 16 << 20);
    }

    fn a_peer_that_resets_is_an_error(kind: DriverKind) {
        serve(
            &config(kind),
            |_, listener| async move {
                let socket = listener.accept().await.unwrap();
                let error = loop {
                    // Not read, so that the peer's close becomes a reset.
                    if let Err(error) = socket.send(vec![0; 1 << 20]).await.0 {
                        break error;
                    }
                };
                let kind = error.kind();
                assert!(
                    kind == io::ErrorKind::ConnectionReset || kind == io::ErrorKind::BrokenPipe,
                    "{error}"
                );
            },
            |addr| {
                let mut stream = TcpStream::connect(addr).unwrap();
                stream.read_exact(&mut [0; 1000]).unwrap();
            },
        );
    }

    /// Descriptor numbers are reused immediately; some waits are dropped before the descriptor is
    /// closed, so that the kernel may still have a part of them.
    fn connections_come_and_go_on_the_same_descriptor_number(kind: DriverKind) {
        serve(
            &config(kind),
            |core, listener| async move {
                let mut numbers = Vec::new();
                for round in 0..300 {
                    let socket = listener.accept().await.unwrap();
                    numbers.push(socket.number());
                    if round % 3 == 0 {
                        let (early, wait) = poll_once(Box::pin(socket.readable())).await;
                        assert!(early.is_none());
                        core.yield_now().await;
                        drop(wait);
                    }
                    socket.send(vec![1]).await.0.unwrap();
                    let (result, bytes) = socket.recv(Vec::new(), 1).await;
                    assert_eq!((result.unwrap(), &*bytes), (1, &[round as u8][..]));
                }
                // Other tests of this process take and free numbers concurrently.
                numbers.sort_unstable();
                numbers.dedup();
                assert!(numbers.len() < 150, "the test meant to reuse numbers: {numbers:?}");
            },
            |addr| {
                for round in 0..300 {
                    let mut stream = TcpStream::connect(addr).unwrap();
                    stream.read_exact(&mut [0]).unwrap();
                    if round % 5 == 0 {
                        thread::sleep(Duration::from_millis(1));
                    }
                    stream.write_all(&[round as u8]).unwrap();
                    // Waits for the server's close, so that its number is free.
                    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
                }
            },
        );
    }

    fn a_dropped_accept_or_receive_ends_and_another_takes_its_place(kind: DriverKind) {
        serve(
            &config(kind),
            |core, listener| async move {
                for _ in 0..10 {
                    let (early, accept) = poll_once(Box::pin(listener.accept())).await;
                    assert!(early.is_none());
                    drop(accept);
                }
                while core.operations_in_flight() > 0 {
                    core.sleep_ns(100_000).await;
                }
                listener.local_addr().unwrap();
                let socket = listener.accept().await.unwrap();
                socket.send(vec![1]).await.0.unwrap();
                let (early, receive) = poll_once(Box::pin(socket.recv(Vec::new(), 9))).await;
                assert!(early.is_none());
                drop(receive);
                while core.operations_in_flight() > 0 {
                    core.sleep_ns(100_000).await;
                }
                socket.send(vec![2]).await.0.unwrap();
                assert_eq!(socket.recv(Vec::new(), 9).await.1, [3]);
            },
            |addr| {
                thread::sleep(Duration::from_millis(30));
                let mut stream = TcpStream::connect(addr).unwrap();
                stream.read_exact(&mut [0; 2]).unwrap();
                stream.write_all(&[3]).unwrap();
                let _ = stream.read(&mut [0]);
            },
        );
    }

    /// In every poll mode, and beside a busy task, sockets and disk are served.
    fn sockets_and_files_are_served_in_every_mode_and_beside_a_busy_task(kind: DriverKind) {
        for poll in [PollMode::Always, PollMode::Adaptive, PollMode::Never] {
            for busy in [false, true] {
                let path = data_file(&format!("modes-{kind:?}"));
                let config = RuntimeConfig { poll, ..config(kind) };
                serve(
                    &config,
                    move |core, listener| {
                        let path = path.clone();
                        async move {
                            let file = core.attach(&core.open(&path, false).await.unwrap());
                            if busy {
                                let spinner = core.clone();
                                core.spawn(Class::Background, async move {
                                    loop {
                                        spinner.yield_now().await;
                                    }
                                });
                            }
                            let socket = listener.accept().await.unwrap();
                            for _ in 0..30 {
                                let (result, bytes) = socket.recv(Vec::new(), 1).await;
                                assert_eq!(result.unwrap(), 1);
                                read_many(&core, &file, 1, 1).await;
                                socket.send(bytes).await.0.unwrap();
                            }
                        }
                    },
                    |addr| {
                        let mut stream = TcpStream::connect(addr).unwrap();
                        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                        for n in 0..30 {
                            stream.write_all(&[n]).unwrap();
                            let mut back = [0];
                            stream.read_exact(&mut back).unwrap();
                            assert_eq!(back, [n]);
                        }
                    },
                );
            }
        }
    }

    fn many_connections_at_once(kind: DriverKind) {
        serve(
            &config(kind),
            |core, listener| async move {
                let tasks: Rc<RefCell<Vec<_>>> = Rc::default();
                for _ in 0..200 {
                    let socket = listener.accept().await.unwrap();
                    tasks.borrow_mut().push(core.spawn(Class::Foreground, async move {
                        loop {
                            socket.readable().await.unwrap();
                            let (result, bytes) = socket.recv(Vec::new(), 100).await;
                            if result.unwrap() == 0 {
                                break;
                            }
                            socket.send(bytes).await.0.unwrap();
                        }
                    }));
                }
                for task in tasks.take() {
                    task.await;
                }
            },
            |addr| {
                let mut streams: Vec<_> =
                    (0..200).map(|_| TcpStream::connect(addr).unwrap()).collect();
                for round in 0..20_u8 {
                    for stream in &mut streams {
                        stream.write_all(&[round; 10]).unwrap();
                    }
                    for stream in &mut streams {
                        let mut back = [0; 10];
                        stream.read_exact(&mut back).unwrap();
                        assert_eq!(back, [round; 10]);
                    }
                }
            },
        );
    }

    /// Also below a millisecond.
    fn a_sleep_is_never_early_and_not_much_late(kind: DriverKind) {
        let late_us = on_one_core(&config(kind), |core| async move {
            let mut best = u64::MAX;
            for ns in [50_000, 300_000, 2_000_000, 10_500_000].repeat(5) {
                let began = core.now_exact_ns();
                let asked_from = core.now_ns();
                core.sleep_ns(ns).await;
                assert!(core.now_exact_ns() >= asked_from + ns, "early");
                best = best.min((core.now_exact_ns() - began).saturating_sub(ns) / 1000);
            }
            best
        });
        // The best of twenty: other programs may hold the processor, the driver must not.
        assert!(late_us < 900, "{late_us} us late at best");
    }

    /// A waker used on another thread, while the core sleeps without any timer.
    fn a_foreign_thread_wakes_a_sleeping_core(kind: DriverKind) {
        let (to_thread, wakers) = sync_channel::<Option<Waker>>(1);
        let waking = thread::spawn(move || {
            let mut woken = 0;
            while let Some(waker) = wakers.recv().unwrap() {
                // The core may or may not be asleep by now.
                if woken % 3 == 0 {
                    thread::sleep(Duration::from_micros(200));
                }
                waker.wake();
                woken += 1;
            }
            woken
        });
        on_one_core(&config(kind), move |_| {
            let to_thread = to_thread.clone();
            async move {
                for _ in 0..500 {
                    let mut asked = false;
                    std::future::poll_fn(|cx: &mut Context<'_>| {
                        if asked {
                            return Poll::Ready(());
                        }
                        asked = true;
                        to_thread.send(Some(cx.waker().clone())).unwrap();
                        Poll::Pending
                    })
                    .await;
                }
                to_thread.send(None).unwrap();
            }
        });
        assert_eq!(waking.join().unwrap(), 500);
    }

    /// Two cores that mostly sleep, on one processor if there is no other.
    fn cores_answer_each_other(kind: DriverKind) {
        let all = processors();
        let config = RuntimeConfig {
            processors: vec![all[0], all[all.len() - 1]],
            poll: PollMode::Never,
            ..config(kind)
        };
        let sums = run(&config, |core| async move {
            let mut sum = 0;
            for n in 0..300_usize {
                sum += core.call(1 - core.id(), move |there| there.id() * 1000 + n).await;
            }
            let asleep = |there: &Core| {
                let there = there.clone();
                async move {
                    there.sleep_ns(2_000_000).await;
                    there.id()
                }
            };
            let other = 1 - core.id();
            assert_eq!(core.spawn_on(other, Class::Background, asleep).await, other);
            sum
        })
        .unwrap();
        assert_eq!(sums, [300 * 1000 + 299 * 150, 299 * 150]);
    }
}

#[test]
fn the_requested_driver_is_used() {
    let name = |kind| on_one_core(&config(kind), |core| async move { core.driver_name() });
    assert_eq!(name(DriverKind::Epoll), "epoll");
    if available() {
        assert!(name(DriverKind::Uring).starts_with("io_uring"));
    }
    // Auto finds a driver on every system.
    name(DriverKind::Auto);
}

/// Forbids io_uring for this thread and the threads it starts, as a container's filter does.
fn forbid_io_uring() {
    const fn step(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
        libc::sock_filter { code: code as u16, jt, jf, k }
    }
    // The number of the system call is the first word of what the filter sees.
    let mut filter = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_io_uring_setup as u32, 0, 1),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: takes numbers only.
    let done = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
    // SAFETY: `program` and the filter it names are live; the kernel copies them.
    let done =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
}

/// Collects the text of warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<std::sync::atomic::AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, about: &tracing::Metadata<'_>) -> bool {
        *about.level() == tracing::Level::WARN
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Text<'a>(&'a Warnings);
        impl tracing::field::Visit for Text<'_> {
            fn record_debug(&mut self, field: &tracing::field::Field, text: &dyn std::fmt::Debug) {
                if field.name() == "message" && format!("{text:?}").contains("io_uring is not") {
                    self.0.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                }
            }
        }
        event.record(&mut Text(self));
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn where_io_uring_is_forbidden_epoll_serves_with_one_warning() {
    let warnings = Warnings::default();
    let path = data_file("forbidden");
    let collector = warnings.clone();
    // On a thread of its own, because the filter is permanent.
    thread::spawn(move || {
        forbid_io_uring();
        let error = run(&config(DriverKind::Uring), |_| async {}).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert!(error.to_string().contains("io_uring"), "{error}");
        tracing::subscriber::with_default(collector, || {
            let all = processors();
            let config = RuntimeConfig {
                processors: vec![all[0], all[all.len() - 1]],
                ..config(DriverKind::Auto)
            };
            let names = run(&config, move |core| {
                let path = path.clone();
                async move {
                    let file = core.attach(&core.open(&path, false).await.unwrap());
                    read_many(&core, &file, 10, 100).await;
                    core.driver_name()
                }
            });
            assert_eq!(names.unwrap(), ["epoll", "epoll"]);
        });
    })
    .join()
    .unwrap();
    assert_eq!(warnings.0.load(std::sync::atomic::Ordering::Relaxed), 1, "said once, not per core");
}

//! Sockets in a simulated world: the code is that of the host, over a network whose behaviour comes
//! from a seed.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use std::task::Poll;

use reactor::sim::{NetConfig, SimConfig, World};
use reactor::{Class, Core, Elapsed, Part, Slice, Socket, timeout};

fn addr(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn world(seed: u64, cores: usize, net: NetConfig) -> World {
    World::new(seed, cores, SimConfig { net, capacity: 100_000, ..SimConfig::default() })
}

/// Receives until `len` bytes have come, or the other side has ended.
async fn receive(socket: &Socket, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let most = len - bytes.len();
        let (n, back) = socket.recv(bytes, most).await;
        bytes = back;
        if n? == 0 {
            break;
        }
    }
    Ok(bytes)
}

/// Sends all received bytes back, sometimes in pieces from a shared buffer.
async fn echo(core: Core, socket: Socket) {
    loop {
        if core.random_u64().is_multiple_of(2) && socket.readable().await.is_err() {
            return;
        }
        let (n, bytes) = socket.recv(Vec::new(), 1 + core.random_u64() as usize % 5000).await;
        let Ok(n) = n else { return };
        if n == 0 {
            return;
        }
        let sent = if core.random_u64().is_multiple_of(2) {
            socket.send(bytes).await.0
        } else {
            let mut buf = core.alloc_wait(n).await.unwrap();
            buf.copy_from_slice(&bytes);
            let (shared, middle) = (buf.share(), n / 2);
            let first = Part::Slice(Slice::new(shared, 0..middle));
            let parts = vec![first, Part::Bytes(bytes[middle..].to_vec())];
            socket.send_parts(parts, &Cell::default()).await.0
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Servers on two cores, clients on a third; every byte must come back in order.
fn echoes(seed: u64) -> (u64, u64) {
    let net = NetConfig { window: 3000, ..NetConfig::default() };
    let world = world(seed, 3, net);
    let inside = world.clone();
    let served: Rc<RefCell<Vec<usize>>> = Rc::default();
    let count = served.clone();
    let finished = Rc::new(Cell::new(false));
    world
        .run(move |core| {
            let (world, count, finished) = (inside.clone(), count.clone(), finished.clone());
            async move {
                if core.id() < 2 {
                    let listener = core.listen(addr(6379)).unwrap();
                    assert_eq!(listener.local_addr().unwrap(), addr(6379));
                    let (c, n) = (core.clone(), count.clone());
                    core.spawn(Class::Foreground, async move {
                        loop {
                            let socket = listener.accept().await.unwrap();
                            n.borrow_mut().push(c.id());
                            c.spawn(Class::Foreground, echo(c.clone(), socket));
                        }
                    });
                    while !finished.get() {
                        core.sleep_ns(1_000_000).await;
                    }
                    return;
                }
                core.sleep_ns(1_000_000).await;
                let clients: Vec<_> = (0..12u8)
                    .map(|n| {
                        let (core, world) = (core.clone(), world.clone());
                        core.clone().spawn(Class::Foreground, async move {
                            let socket = world.connect(&core, addr(6379)).unwrap();
                            assert_eq!(socket.peer_addr().unwrap(), addr(6379));
                            for round in 0..10 {
                                let len = core.random_u64() as usize % 10_000;
                                let bytes: Vec<u8> =
                                    (0..len).map(|at| n ^ round ^ at as u8).collect();
                                // Send and receive concurrently: the window is smaller.
                                let (s, out) = (socket.clone(), bytes.clone());
                                let sending = core.spawn(Class::Foreground, async move {
                                    s.send(out).await.0.unwrap();
                                });
                                assert!(receive(&socket, len).await.unwrap() == bytes);
                                sending.await;
                            }
                        })
                    })
                    .collect();
                for client in clients {
                    client.await;
                }
                finished.set(true);
            }
        })
        .unwrap();
    assert_eq!(world.open_sockets(), 0);
    let served = served.borrow();
    assert_eq!(served.len(), 12);
    assert!(served.contains(&0) && served.contains(&1), "both cores were asked: {served:?}");
    world.trace()
}

#[test]
fn sent_bytes_arrive_completely_and_in_order_and_the_same_seed_is_the_same_run() {
    for seed in 0..8 {
        assert_eq!(echoes(seed), echoes(seed), "seed {seed}");
    }
}

#[test]
fn a_side_that_does_not_read_stops_the_sender() {
    let net = NetConfig { window: 1000, ..NetConfig::default() };
    let world = world(1, 1, net);
    let inside = world.clone();
    world
        .run(move |core| {
            let world = inside.clone();
            async move {
                let listener = core.listen_alone(addr(1)).unwrap();
                let client = world.connect(&core, addr(1)).unwrap();
                let server = listener.accept().await.unwrap();
                let sent = Rc::new(Cell::new(0));
                let count = sent.clone();
                let sending = core.spawn(Class::Foreground, async move {
                    for _ in 0..50 {
                        server.send(vec![7; 100]).await.0.unwrap();
                        count.set(count.get() + 100);
                    }
                });
                core.sleep_ns(1_000_000_000).await;
                assert_eq!(sent.get(), 1000);
                let bytes = receive(&client, 2500).await.unwrap();
                core.sleep_ns(1_000_000_000).await;
                assert_eq!((bytes.len(), sent.get()), (2500, 3500));
                assert_eq!(receive(&client, 10_000).await.unwrap().len(), 2500);
                sending.await;
            }
        })
        .unwrap();
}

#[test]
fn addresses_connections_and_ends_behave_as_on_the_host() {
    let world = world(2, 1, NetConfig::default());
    let inside = world.clone();
    world
        .run(move |core| {
            let world = inside.clone();
            async move {
                let kind = |e: io::Error| e.kind();
                let refused = world.connect(&core, addr(9)).err().map(kind);
                assert_eq!(refused, Some(io::ErrorKind::ConnectionRefused));
                let listener = core.listen(addr(9)).unwrap();
                let in_use = core.listen_alone(addr(9)).err().map(kind);
                assert_eq!(in_use, Some(io::ErrorKind::AddrInUse));
                let any = core.listen(addr(0)).unwrap();
                assert_ne!(any.local_addr().unwrap().port(), 0);

                // Bytes sent before the end are still received.
                let client = world.connect(&core, addr(9)).unwrap();
                let server = listener.accept().await.unwrap();
                assert_eq!(server.peer_addr().unwrap(), client.local_addr().unwrap());
                client.send(b"last words".to_vec()).await.0.unwrap();
                drop(client);
                assert_eq!(receive(&server, 100).await.unwrap(), b"last words");
                core.sleep_ns(1_000_000).await;
                assert!(server.send(b"too late".to_vec()).await.0.is_err());

                // A close with unread bytes is a reset.
                let client = world.connect(&core, addr(9)).unwrap();
                let server = listener.accept().await.unwrap();
                server.send(b"never read".to_vec()).await.0.unwrap();
                core.sleep_ns(1_000_000).await;
                drop(client);
                let reset = receive(&server, 1).await.map_err(kind);
                assert_eq!(reset, Err(io::ErrorKind::ConnectionReset));

                // So is one that was asked for.
                let client = world.connect(&core, addr(9)).unwrap();
                let server = listener.accept().await.unwrap();
                client.reset();
                drop(client);
                core.sleep_ns(1_000_000).await;
                let reset = server.send(b"too late".to_vec()).await.0.map_err(kind);
                assert_eq!(reset, Err(io::ErrorKind::ConnectionReset));

                // A shutdown ends waiting operations on both sides.
                let client = world.connect(&core, addr(9)).unwrap();
                let server = listener.accept().await.unwrap();
                let s = server.clone();
                let waiting = core.spawn(Class::Foreground, async move { receive(&s, 1).await });
                core.sleep_ns(1_000_000).await;
                server.shutdown();
                assert_eq!(waiting.await.unwrap(), b"");
                assert_eq!(receive(&client, 1).await.unwrap(), b"");

                // All connections, as when a cable is pulled.
                let client = world.connect(&core, addr(9)).unwrap();
                let server = listener.accept().await.unwrap();
                assert!(world.reset_connections() >= 2);
                assert!(receive(&client, 1).await.is_err());
                assert!(server.send(vec![1]).await.0.is_err());

                // File reads fail on sockets, and receives fail on files.
                drop((client, server));
                world.add_file("/f", vec![1u8; 512]);
                let file = core.open(Path::new("/f"), false).await.unwrap();
                assert_eq!(world.open_files(), 1);
                drop(file);
            }
        })
        .unwrap();
    assert_eq!(world.open_sockets(), 0);
}

#[test]
fn a_connection_of_a_dropped_accept_is_closed() {
    let mut told = 0;
    for seed in 0..600 {
        let world = world(seed, 1, NetConfig::default());
        let inside = world.clone();
        let outcomes = world
            .run(move |core| {
                let world = inside.clone();
                async move {
                    let listener = core.listen(addr(9)).unwrap();
                    let client = world.connect(&core, addr(9)).unwrap();
                    // Dropped just when the connection arrives, or before, or after.
                    let some_ns = core.random_u64() % 120_000;
                    if core.random_u64().is_multiple_of(2) {
                        // It is not polled before it is dropped.
                        let mut accept = Box::pin(listener.accept());
                        std::future::poll_fn(|cx| {
                            assert!(accept.as_mut().poll(cx).is_pending());
                            Poll::Ready(())
                        })
                        .await;
                        core.sleep_ns(some_ns).await;
                        drop(accept);
                    } else if let Ok(socket) = timeout(&core, some_ns, listener.accept()).await {
                        drop(socket.unwrap());
                        return 0;
                    }
                    // Either the dropped accept took it, and closed it, or the next one gets it.
                    match timeout(&core, 10_000_000, listener.accept()).await {
                        Ok(_) => 1,
                        Err(Elapsed) => {
                            let end = receive(&client, 1).await;
                            assert!(end.is_err() || end.is_ok_and(|bytes| bytes.is_empty()));
                            2
                        }
                    }
                }
            })
            .unwrap();
        told |= 1 << outcomes[0];
        assert_eq!(world.open_sockets(), 0, "seed {seed}");
    }
    assert_eq!(told, 7, "in time, too early, and just when the connection came: {told:b}");
}

#[test]
fn a_core_stops_with_a_thousand_idle_connections_and_closes_them_all() {
    let world = world(5, 2, NetConfig::default());
    let inside = world.clone();
    world
        .run(move |core| {
            let world = inside.clone();
            async move {
                if core.id() == 0 {
                    let listener = core.listen(addr(9)).unwrap();
                    let c = core.clone();
                    core.spawn(Class::Foreground, async move {
                        loop {
                            let socket = listener.accept().await.unwrap();
                            c.spawn(Class::Foreground, echo(c.clone(), socket));
                        }
                    });
                    core.sleep_ns(200_000_000).await;
                    assert!(core.operations_in_flight() >= 1000);
                } else {
                    core.sleep_ns(1_000_000).await;
                    let clients: Vec<_> =
                        (0..1000).map(|_| world.connect(&core, addr(9)).unwrap()).collect();
                    core.sleep_ns(150_000_000).await;
                    // One of a thousand is served at once.
                    clients[500].send(b"hello".to_vec()).await.0.unwrap();
                    assert_eq!(receive(&clients[500], 5).await.unwrap(), b"hello");
                    core.sleep_ns(100_000_000).await;
                }
            }
        })
        .unwrap();
    assert_eq!((world.open_sockets(), world.abandoned()), (0, 0));
}

#[test]
fn resets_at_any_time_end_in_errors_and_never_in_wrong_bytes() {
    let mut broken = 0;
    for seed in 0..20 {
        let net = NetConfig { reset: 20_000, accept_error: 100_000, ..NetConfig::default() };
        let world = world(seed, 2, net);
        let inside = world.clone();
        let results = world
            .run(move |core| {
                let world = inside.clone();
                async move {
                    if core.id() == 0 {
                        let listener = core.listen(addr(9)).unwrap();
                        let c = core.clone();
                        core.spawn(Class::Foreground, async move {
                            loop {
                                match listener.accept().await {
                                    Ok(socket) => {
                                        c.spawn(Class::Foreground, echo(c.clone(), socket));
                                    }
                                    Err(e) => {
                                        assert_eq!(e.raw_os_error(), Some(24), "EMFILE");
                                        c.sleep_ns(100_000).await;
                                    }
                                }
                            }
                        });
                        core.sleep_ns(50_000_000).await;
                        return 0;
                    }
                    core.sleep_ns(1_000_000).await;
                    let mut broken = 0;
                    for n in 0..50u8 {
                        let socket = world.connect(&core, addr(9)).unwrap();
                        let bytes = vec![n; 1 + core.random_u64() as usize % 3000];
                        // A failed send shows in what comes back.
                        let _ = socket.send(bytes.clone()).await;
                        match receive(&socket, bytes.len()).await {
                            Ok(back) if back == bytes => {}
                            // All bytes before the end are right.
                            Ok(back) => {
                                assert!(bytes.starts_with(&back));
                                broken += 1;
                            }
                            Err(_) => broken += 1,
                        }
                    }
                    broken
                }
            })
            .unwrap();
        broken += results[1];
        assert_eq!(world.open_sockets(), 0);
    }
    assert!(broken > 10 && broken < 900, "{broken} of 1000");
}

//! The device `nbd:` over this server, in a simulated world.

mod disks;

use std::cell::Cell;
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;

use bdev::{Bdev, BufIo, Copy, DeviceTarget, Kind, Status, TaskChannel};
use disks::{TestDisk, TestDisks};
use nbd::Server;
use nbdproto::fuzz::Few;
use nbdproto::{Handshake, Progress};
use reactor::sim::{NetConfig, SimConfig, World};
use reactor::{Core, Listener};

const SECOND_NS: u64 = 1_000_000_000;
const MIB: u64 = 1 << 20;

/// A server and what its tests need.
struct Scene {
    core: Core,
    disks: TestDisks,
    server: Option<Rc<Server>>,
}

fn addr() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 10809))
}

impl Scene {
    /// A server of these disks.
    async fn new(core: &Core, disks: &[(&str, &str)]) -> Scene {
        let all = TestDisks::default();
        for (name, uri) in disks {
            let device = Bdev::open(core, uri).await.unwrap();
            let disk = TestDisk::new(device);
            all.0.borrow_mut().insert((*name).to_owned(), Rc::new(disk));
        }
        let server = Some(serve(core, &all).await);
        Scene { core: core.clone(), disks: all, server }
    }

    /// Ends the server, with all its connections.
    async fn stop(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop(SECOND_NS).await;
        }
    }

    /// Starts another one in its place.
    async fn again(&mut self) {
        self.server = Some(serve(&self.core, &self.disks).await);
    }
}

async fn serve(core: &Core, disks: &TestDisks) -> Rc<Server> {
    // The accepting of the one before ends a moment after it.
    let listener = loop {
        match core.listen_alone(addr()) {
            Ok(listener) => break listener,
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse),
        }
        core.sleep_ns(1_000_000).await;
    };
    Server::start(core, listener, Box::new(disks.clone()))
}

/// Runs a test in simulated worlds.
fn in_worlds<F: Future<Output = ()> + 'static>(
    cores: usize,
    test: impl Fn(Core) -> F + Clone + Send + 'static,
) {
    for seed in 0..8 {
        let net = NetConfig::default();
        let world = World::new(seed, cores, SimConfig { net, ..SimConfig::default() });
        world.add_file("/disks/a.img", vec![0xEE; 4 << 20]);
        let test = test.clone();
        let run = world.run(move |core| {
            let test = test.clone();
            async move {
                if core.id() == 0 {
                    test(core.clone()).await;
                }
            }
        });
        run.unwrap_or_else(|why| panic!("seed {seed}: {why:?}"));
    }
}

/// Requests to a device.
struct Client {
    core: Core,
    channel: TaskChannel,
}

impl Client {
    async fn open(core: &Core, uri: &str) -> Client {
        Client::over(core, &Bdev::open(core, uri).await.unwrap())
    }

    fn over(core: &Core, device: &Bdev) -> Client {
        Client { core: core.clone(), channel: TaskChannel::new(device, core).unwrap() }
    }

    async fn write(&self, offset: u64, bytes: &[u8]) -> Status {
        self.write_with(offset, bytes, false).await
    }

    async fn write_with(&self, offset: u64, bytes: &[u8], fua: bool) -> Status {
        let mut buf = self.core.alloc(bytes.len()).unwrap();
        buf[..bytes.len()].copy_from_slice(bytes);
        let io = BufIo { fua, ..request(Kind::Write, offset, bytes.len() as u64) };
        self.channel.run(io, Some(buf)).await.0
    }

    async fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, Status> {
        let buf = self.core.alloc(len as usize).unwrap();
        match self.channel.run(request(Kind::Read, offset, len), Some(buf)).await {
            (Status::Ok, Some(buf)) => Ok(buf[..len as usize].to_vec()),
            (status, _) => Err(status),
        }
    }

    async fn plain(&self, kind: Kind, offset: u64, len: u64) -> Status {
        self.channel.run(request(kind, offset, len), None).await.0
    }
}

fn request(kind: Kind, offset: u64, len: u64) -> BufIo {
    BufIo { kind, offset, len, at: 0, fua: false, tag: 0 }
}

fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len).map(|n| ((n / 512) * 7 + n + seed) as u8).collect()
}

const URI: &str = "nbd://127.0.0.1/a";

#[test]
fn what_is_written_is_read() {
    in_worlds(1, |core| async move {
        let mut scene = Scene::new(&core, &[("a", "mem:8M"), ("f", "file:/disks/a.img")]).await;
        for (name, size) in [("a", 8 * MIB), ("f", 4 * MIB)] {
            let client = Client::open(&core, &format!("nbd://127.0.0.1/{name}")).await;
            let geometry = client.channel.device().geometry();
            assert_eq!((geometry.size_bytes, geometry.block_size), (size, 512));
            assert!(!geometry.read_only && geometry.discard && geometry.volatile_cache);
            // In several pieces.
            let data = pattern(3 * MIB + 512, 1);
            assert_eq!(client.write(512, &data).await, Status::Ok);
            assert!(client.read(512, data.len() as u64).await.unwrap() == data);
            assert_eq!(client.read(1024, 512).await.unwrap(), data[512..1024]);
            assert_eq!(client.write_with(0, &[9; 512], true).await, Status::Ok);
            assert_eq!(client.plain(Kind::Discard, MIB, 4096).await, Status::Ok);
            for unmap in [true, false] {
                let zeroes = Kind::WriteZeroes { unmap };
                assert_eq!(client.plain(zeroes, 2 * MIB, 4096).await, Status::Ok);
            }
            assert_eq!(client.plain(Kind::Flush, 0, 0).await, Status::Ok);
            assert_eq!(client.read(2 * MIB, 4096).await.unwrap(), [0; 4096]);
            assert_eq!(client.read(0, 512).await.unwrap(), [9; 512]);
            assert_eq!(client.read(size, 512).await, Err(Status::IoError));
            assert_eq!(client.plain(Kind::Discard, 0, 1).await, Status::IoError);
        }
        scene.stop().await;
    });
}

#[test]
fn requests_wait_for_a_server_that_comes_back() {
    in_worlds(1, |core| async move {
        let mut scene = Scene::new(&core, &[("a", "delay:all=1ms|mem:8M")]).await;
        let device = Bdev::open(&core, URI).await.unwrap();
        let client = Rc::new(Client::over(&core, &device));
        for round in 0..4 {
            let tasks: Vec<_> = (0..16)
                .map(|nth| {
                    let client = client.clone();
                    core.spawn(reactor::Class::Foreground, async move {
                        let data = pattern(64 << 10, round * 100 + nth);
                        assert_eq!(client.write(nth * 65536, &data).await, Status::Ok);
                        assert!(client.read(nth * 65536, 65536).await.unwrap() == data);
                        assert_eq!(client.plain(Kind::Flush, 0, 0).await, Status::Ok);
                    })
                })
                .collect();
            core.sleep_ns(round * 700_000).await;
            scene.stop().await;
            core.sleep_ns(round * SECOND_NS / 2).await;
            scene.again().await;
            for task in tasks {
                task.await;
            }
        }
        drop((client, device));
        core.sleep_ns(SECOND_NS).await;
        assert_eq!(scene.server.as_ref().unwrap().connections(), 0, "the device has said goodbye");
        scene.stop().await;
    });
}

#[test]
fn requests_fail_when_the_server_stays_away_and_succeed_when_it_is_back() {
    in_worlds(1, |core| async move {
        let mut scene = Scene::new(&core, &[("a", "mem:8M")]).await;
        let client = Client::open(&core, &format!("{URI}?reconnect-delay=3s")).await;
        assert_eq!(client.write(0, &[1; 4096]).await, Status::Ok);
        scene.stop().await;
        let before = core.now_ns();
        assert_eq!(client.write(0, &[2; 4096]).await, Status::IoError);
        let waited_ns = core.now_ns() - before;
        assert!((2 * SECOND_NS..5 * SECOND_NS).contains(&waited_ns), "{waited_ns}");
        // At once now.
        let before = core.now_ns();
        assert_eq!(client.read(0, 4096).await, Err(Status::IoError));
        assert_eq!(client.plain(Kind::Flush, 0, 0).await, Status::IoError);
        assert!(core.now_ns() - before < SECOND_NS / 10);
        let extents = client.channel.device().extents(&core, 0, MIB, 10).await;
        assert_eq!((extents.len(), extents[0].is_hole), (1, false));
        scene.again().await;
        core.sleep_ns(6 * SECOND_NS).await;
        assert_eq!(client.read(0, 4096).await.unwrap(), [1; 4096]);
        assert_eq!(client.write(0, &[3; 4096]).await, Status::Ok);
        scene.stop().await;
    });
}

#[test]
fn another_export_of_the_same_name_is_not_taken_for_the_old_one() {
    in_worlds(1, |core| async move {
        let mut scene = Scene::new(&core, &[("a", "mem:8M")]).await;
        let client = Client::open(&core, &format!("{URI}?reconnect-delay=1s")).await;
        assert_eq!(client.write(0, &[1; 4096]).await, Status::Ok);
        scene.stop().await;
        let old = scene.disks.0.borrow().get("a").cloned().unwrap();
        let device = Bdev::open(&core, "mem:4M").await.unwrap();
        let other = Rc::new(TestDisk::new(device));
        scene.disks.0.borrow_mut().insert("a".to_owned(), other);
        scene.again().await;
        assert_eq!(client.write(0, &[2; 4096]).await, Status::IoError);
        scene.stop().await;
        // The old one, and then as one that takes no writes any more.
        scene.disks.0.borrow_mut().insert("a".to_owned(), old.clone());
        scene.again().await;
        core.sleep_ns(6 * SECOND_NS).await;
        assert_eq!(client.read(0, 4096).await.unwrap(), [1; 4096]);
        old.taken.set(true);
        let read_only = Bdev::open(&core, URI).await.unwrap();
        assert!(read_only.geometry().read_only && !read_only.geometry().discard);
        assert_eq!(Client::over(&core, &read_only).write(0, &[5; 512]).await, Status::IoError);
        scene.stop().await;
    });
}

/// The disk has grown.
#[test]
fn a_larger_export_is_taken_for_the_old_one() {
    in_worlds(1, |core| async move {
        let mut scene = Scene::new(&core, &[("a", "mem:8M")]).await;
        let client = Client::open(&core, &format!("{URI}?reconnect-delay=5s")).await;
        assert_eq!(client.write(0, &[1; 4096]).await, Status::Ok);
        scene.stop().await;
        let device = Bdev::open(&core, "mem:16M").await.unwrap();
        let other = Rc::new(TestDisk::new(device));
        scene.disks.0.borrow_mut().insert("a".to_owned(), other);
        scene.again().await;
        assert_eq!(client.read(0, 4096).await.unwrap(), [0; 4096]);
        assert_eq!(client.channel.device().geometry().size_bytes, 8 * MIB);
        scene.stop().await;
    });
}

#[test]
fn copies_keep_holes_in_both_directions() {
    in_worlds(1, |core| async move {
        let mut scene = Scene::new(&core, &[("a", "mem:8M"), ("b", "mem:8M")]).await;
        let from = Bdev::open(&core, URI).await.unwrap();
        let client = Client::over(&core, &from);
        assert_eq!(client.write(MIB, &pattern(MIB, 3)).await, Status::Ok);
        let extents = from.extents(&core, 0, 8 * MIB, 10).await;
        let found: Vec<_> = extents.iter().map(|one| (one.len, one.is_hole)).collect();
        assert_eq!(found, [(MIB, true), (MIB, false), (6 * MIB, true)]);
        let to = Bdev::open(&core, "nbd://127.0.0.1/b").await.unwrap();
        assert_eq!(Client::over(&core, &to).write(5 * MIB, &[7; 4096]).await, Status::Ok);
        let tracked = from.tracked(&core, 65536).await.unwrap();
        let target = Box::new(DeviceTarget::new(&core, &to).unwrap());
        let copy = Copy::new(&core, &tracked, target).unwrap();
        copy.begin().await.unwrap();
        copy.pass().await.unwrap();
        copy.flush().await.unwrap();
        assert_eq!(copy.copied_bytes(), MIB);
        assert!(Client::over(&core, &to).read(MIB, MIB).await.unwrap() == pattern(MIB, 3));
        let b = scene.disks.0.borrow()["b"].device.clone();
        let extents = b.extents(&core, 0, 8 * MIB, 10).await;
        let found: Vec<_> = extents.iter().map(|one| (one.len, one.is_hole)).collect();
        assert_eq!(found, [(MIB, true), (MIB, false), (6 * MIB, true)]);
        scene.stop().await;
    });
}

#[test]
fn opening_fails_with_a_reason() {
    in_worlds(1, |core| async move {
        let mut scene = Scene::new(&core, &[("a", "mem:8M")]).await;
        for (uri, why) in [
            ("nbd://127.0.0.1/b", "serves no disk \"b\""),
            ("nbd://127.0.0.1/", "there is no default export"),
            ("nbd://127.0.0.1:9/a", "onnection refused"),
            ("nbd://127.0.0.1/a?block=64K", ""),
        ] {
            match Bdev::open(&core, uri).await {
                Err(error) => assert!(error.to_string().contains(why), "{uri}: {error}"),
                Ok(device) => assert!(why.is_empty() && device.geometry().block_size == 65536),
            }
        }
        scene.stop().await;
    });
}

/// A server that ends each connection after its handshake. Counts them.
async fn serve_handshakes(core: Core, listener: Listener, made: Rc<Cell<u32>>) {
    loop {
        let socket = listener.accept().await.unwrap();
        made.set(made.get() + 1);
        let (mut handshake, mut input) = (Handshake::default(), Vec::new());
        let mut out = Handshake::greeting().to_vec();
        loop {
            let (used, progress) = handshake.take(&input, &Few, &mut out).unwrap();
            input.drain(..used);
            socket.send(std::mem::take(&mut out)).await.0.unwrap();
            if matches!(progress, Progress::Serve(_)) {
                break;
            }
            if used == 0 {
                input = socket.recv(input, 4096).await.1;
            }
        }
        core.sleep_ns(1_000_000).await;
    }
}

#[test]
fn a_server_that_ends_every_connection_is_tried_less_and_less_often() {
    in_worlds(1, |core| async move {
        let made = Rc::new(Cell::new(0));
        let listener = core.listen_alone(addr()).unwrap();
        let serving = serve_handshakes(core.clone(), listener, made.clone());
        let serving = core.spawn(reactor::Class::Foreground, serving).owned();
        let client = Client::open(&core, &format!("{URI}?reconnect-delay=1s")).await;
        while core.now_ns() < 60 * SECOND_NS {
            assert_eq!(client.write(0, &[1; 512]).await, Status::IoError);
            core.sleep_ns(SECOND_NS / 10).await;
        }
        assert!((15..40).contains(&made.get()), "{} connections", made.get());
        drop(serving);
        let mut scene = Scene::new(&core, &[("a", "mem:1M")]).await;
        core.sleep_ns(6 * SECOND_NS).await;
        assert_eq!(client.write(0, &[1; 512]).await, Status::Ok);
        scene.stop().await;
    });
}

/// Which of the writes a failed flush has lost is unknown, so no flush beside it is good.
#[test]
fn a_flush_that_ends_after_a_failed_one_fails() {
    in_worlds(1, |core| async move {
        let uri = "error:kind=flush&every=2|delay:all=20ms|mem:8M";
        let mut scene = Scene::new(&core, &[("a", uri)]).await;
        let client = Client::open(&core, URI).await;
        let ends: [std::pin::Pin<Box<dyn Future<Output = Status>>>; 4] = [
            Box::pin(client.plain(Kind::Flush, 0, 0)),
            Box::pin(client.write_with(0, &[1; 512], true)),
            Box::pin(client.write_with(512, &[1; 512], false)),
            Box::pin(client.plain(Kind::Flush, 0, 0)),
        ];
        let ends = reactor::join_all(ends.into()).await;
        // A write without a flush promises nothing.
        assert_eq!(ends, [Status::IoError, Status::IoError, Status::Ok, Status::IoError]);
        assert_eq!(client.write(0, &[2; 512]).await, Status::IoError);
        scene.stop().await;
    });
}

/// One connection serves the channels of all cores.
#[test]
fn every_core_has_a_channel() {
    in_worlds(3, |core| async move {
        let mut scene = Scene::new(&core, &[("a", "mem:8M")]).await;
        let device = Bdev::open(&core, URI).await.unwrap();
        let work = |at: usize, device: Bdev| {
            core.spawn_on(at, reactor::Class::Foreground, move |there| {
                let there = there.clone();
                async move {
                    let client = Client::over(&there, &device);
                    let base = at as u64 * 2 * MIB;
                    for nth in 0..8 {
                        let data = pattern(100 << 10, nth + base);
                        let offset = base + nth * (100 << 10);
                        assert_eq!(client.write_with(offset, &data, nth == 3).await, Status::Ok);
                        assert!(client.read(offset, 100 << 10).await.unwrap() == data);
                    }
                    assert_eq!(client.plain(Kind::Flush, 0, 0).await, Status::Ok);
                    let extents = device.extents(&there, base, MIB, 3).await;
                    assert!(!extents[0].is_hole);
                }
            })
        };
        let all = [0, 1, 2].map(|at| Box::pin(work(at, device.clone())) as _);
        reactor::join_all(all.into()).await;
        assert_eq!(scene.server.as_ref().unwrap().connections(), 1);
        drop(device);
        core.sleep_ns(SECOND_NS).await;
        assert_eq!(scene.server.as_ref().unwrap().connections(), 0);
        scene.stop().await;
    });
}

/// An answer may come after the channel has gone, and must not be written to its memory.
#[test]
fn a_channel_may_go_before_its_answers() {
    in_worlds(1, |core| async move {
        let mut scene = Scene::new(&core, &[("a", "delay:all=20ms|mem:8M")]).await;
        let device = Bdev::open(&core, URI).await.unwrap();
        for nth in 0..10 {
            let client = Client::over(&core, &device);
            let buf = core.alloc(MIB as usize).unwrap();
            let submitted = client.channel.submit(request(Kind::Read, 0, MIB), Some(buf));
            drop(submitted.unwrap());
            core.sleep_ns(nth * 3_000_000).await;
            drop(client);
        }
        core.sleep_ns(SECOND_NS).await;
        assert_eq!(core.pool().used(), 0, "nothing holds a buffer any more");
        drop(device);
        scene.stop().await;
    });
}

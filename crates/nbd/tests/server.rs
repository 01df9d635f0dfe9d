//! A server in a simulated world, whose clients send what they like.

mod disks;

use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;

use bdev::Bdev;
use disks::{TestDisk, TestDisks};
use nbd::{CONNECTIONS_MAX, Server};
use nbdproto::fuzz::{client_flags, go, option_bytes, request_bytes};
use reactor::sim::{NetConfig, SimConfig, World};
use reactor::{Core, Socket, timeout};

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const ZEROES: u16 = 6;
const SECOND_NS: u64 = 1_000_000_000;

/// A server and what its tests need.
#[derive(Clone)]
struct Scene {
    core: Core,
    world: World,
    server: Rc<Server>,
    disks: TestDisks,
}

fn addr() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 10809))
}

/// Runs a test with a server of these disks.
fn with_disks<F: Future<Output = ()> + 'static>(
    disks: &'static [(&'static str, &'static str)],
    test: impl Fn(Scene) -> F + Clone + Send + 'static,
) {
    with_memory(SimConfig::default().memory, disks, test);
}

/// Runs a test with a server of these disks, whose core has so many bytes for buffers.
fn with_memory<F: Future<Output = ()> + 'static>(
    memory: usize,
    disks: &'static [(&'static str, &'static str)],
    test: impl Fn(Scene) -> F + Clone + Send + 'static,
) {
    for seed in 0..8 {
        let config = SimConfig { net: NetConfig::default(), memory, ..SimConfig::default() };
        let world = World::new(seed, 1, config);
        world.add_file("/disks/a.img", vec![0xEE; 4 << 20]);
        let (inside, test) = (world.clone(), test.clone());
        let run = world.run(move |core| {
            let (world, test) = (inside.clone(), test.clone());
            async move {
                let all = TestDisks::default();
                for (name, uri) in disks {
                    let device = Bdev::open(&core, uri).await.unwrap();
                    let disk = TestDisk::new(device);
                    all.0.borrow_mut().insert((*name).to_owned(), Rc::new(disk));
                }
                let listener = core.listen_alone(addr()).unwrap();
                let server = Server::start(&core, listener, Box::new(all.clone()));
                let scene = Scene { core: core.clone(), world, server, disks: all };
                test(scene.clone()).await;
                scene.server.stop(SECOND_NS).await;
                assert_eq!(scene.server.connections(), 0);
                assert_eq!(core.pool().used(), 0, "seed {seed}: a buffer is missing");
            }
        });
        run.unwrap_or_else(|why| panic!("seed {seed}: {why:?}"));
    }
}

/// A client that sends bytes.
struct Client {
    socket: Socket,
    input: Vec<u8>,
}

impl Client {
    fn connect(scene: &Scene) -> Client {
        let socket = scene.world.connect(&scene.core, addr()).unwrap();
        Client { socket, input: Vec::new() }
    }

    /// Connects and chooses an export.
    async fn of(scene: &Scene, name: &str) -> Client {
        let mut client = Client::connect(scene);
        client.send(&[client_flags(3), go(7, name, &[])].concat()).await;
        client.take(18).await.unwrap();
        loop {
            let header = client.take(20).await.unwrap();
            let len = u32::from_be_bytes(header[16..].try_into().unwrap());
            client.take(len as usize).await.unwrap();
            if header[12..16] == [0, 0, 0, 1] {
                return client;
            }
        }
    }

    async fn send(&self, bytes: &[u8]) {
        // The server may have gone.
        let _ = self.socket.send(bytes.to_vec()).await;
    }

    async fn request(&self, command: u16, cookie: u64, offset: u64, len: u32, data: &[u8]) {
        let header = request_bytes(command, 0, cookie, offset, len);
        self.send(&[&header, data].concat()).await;
    }

    /// The next `n` bytes; `None` at the end of the connection.
    async fn take(&mut self, n: usize) -> Option<Vec<u8>> {
        while self.input.len() < n {
            let input = std::mem::take(&mut self.input);
            let (received, input) = self.socket.recv(input, 64 << 10).await;
            self.input = input;
            if !matches!(received, Ok(1..)) {
                return None;
            }
        }
        let rest = self.input.split_off(n);
        Some(std::mem::replace(&mut self.input, rest))
    }

    /// The error and the cookie of the next simple reply.
    async fn reply(&mut self) -> Option<(u32, u64)> {
        let reply = self.take(16).await?;
        assert_eq!(reply[..4], [0x67, 0x44, 0x66, 0x98]);
        let errno = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        Some((errno, u64::from_be_bytes(reply[8..].try_into().unwrap())))
    }

    async fn read(&mut self, offset: u64, len: u32) -> Vec<u8> {
        self.request(READ, 1, offset, len, &[]).await;
        assert_eq!(self.reply().await, Some((0, 1)));
        self.take(len as usize).await.unwrap()
    }

    async fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        self.request(WRITE, 2, offset, data.len() as u32, data).await;
        self.reply().await.unwrap().0
    }
}

#[test]
fn what_is_written_is_read() {
    with_disks(&[("m", "mem:4M"), ("f", "file:/disks/a.img")], async |scene| {
        for name in ["m", "f"] {
            let mut client = Client::of(&scene, name).await;
            let data: Vec<u8> = (0..1 << 20 | 512).map(|n: u32| (n / 7) as u8).collect();
            assert_eq!(client.write(4096, &data).await, 0);
            assert!(client.read(4096, data.len() as u32).await == data, "{name}");
            assert_eq!(client.read(4608, 512).await, data[512..1024]);
            client.request(TRIM, 3, 8192, 4096, &[]).await;
            client.request(ZEROES, 4, 16384, 4096, &[]).await;
            client.request(FLUSH, 5, 0, 0, &[]).await;
            let mut replies = Vec::new();
            for _ in 0..3 {
                replies.push(client.reply().await.unwrap());
            }
            replies.sort();
            assert_eq!(replies, [(0, 3), (0, 4), (0, 5)]);
            assert_eq!(client.read(16384, 4096).await, [0; 4096]);
            // Beyond the end, not in whole blocks, of no length, and unknown.
            for (command, offset, len, errno) in
                [(READ, 4 << 20, 512, 22), (READ, 1, 512, 22), (READ, 0, 0, 0), (5, 0, 512, 22)]
            {
                client.request(command, 9, offset, len, &[]).await;
                assert_eq!(client.reply().await, Some((errno, 9)));
            }
            assert_eq!(client.write((4 << 20) - 512, &[1; 1024]).await, 28);
            assert_eq!(client.write(0, &vec![1; 3 << 20]).await, 22, "too long");
            assert_eq!(client.read((4 << 20) - 512, 512).await.len(), 512);
            client.request(DISC, 0, 0, 0, &[]).await;
            assert_eq!(client.reply().await, None);
        }
        let counters = scene.server.counters();
        assert_eq!((counters.accepted, counters.failed), (2, 10));
    });
}

#[test]
fn requests_in_flight_are_answered_in_any_order() {
    with_disks(&[("a", "delay:all=10us..10ms|mem:4M")], async |scene| {
        let mut client = Client::of(&scene, "a").await;
        for cookie in 0..500_u64 {
            client.request(WRITE, cookie, cookie * 4096, 4096, &[cookie as u8; 4096]).await;
        }
        let mut cookies = Vec::new();
        for _ in 0..500 {
            let (errno, cookie) = client.reply().await.unwrap();
            assert_eq!(errno, 0);
            cookies.push(cookie);
        }
        assert!(!cookies.is_sorted(), "they were executed one after the other");
        cookies.sort_unstable();
        assert_eq!(cookies, (0..500).collect::<Vec<_>>());
        // All replies before the end come.
        for cookie in 0..100 {
            client.request(READ, cookie, cookie * 4096, 4096, &[]).await;
        }
        client.request(DISC, 0, 0, 0, &[]).await;
        for _ in 0..100 {
            let (errno, cookie) = client.reply().await.unwrap();
            assert_eq!(errno, 0);
            assert_eq!(client.take(4096).await.unwrap(), [cookie as u8; 4096]);
        }
        assert_eq!(client.reply().await, None);
    });
}

#[test]
fn structured_replies_carry_the_offset() {
    with_disks(&[("a", "mem:1M")], async |scene| {
        let mut client = Client::connect(&scene);
        client.send(&[client_flags(3), option_bytes(8, &[]), go(7, "a", &[])].concat()).await;
        // Greeting, one reply without data, two with information, and the last.
        client.take(18 + 20 + (20 + 12) + (20 + 14) + 20).await.unwrap();
        client.request(READ, 6, 4096, 512, &[]).await;
        let header = client.take(28).await.unwrap();
        assert_eq!(header[..8], [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1]);
        assert_eq!(header[16..], [0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 16, 0]);
        assert_eq!(client.take(512).await.unwrap(), [0; 512]);
        client.request(READ, 6, 4097, 512, &[]).await;
        let header = client.take(26).await.unwrap();
        assert_eq!((header[6], header[23]), (0x80, 22));
    });
}

#[test]
fn holes_are_told_apart_from_data() {
    with_disks(&[("a", "mem:1M?block=8K"), ("f", "file:/disks/a.img")], async |scene| {
        let context = |name: &str| {
            let queries = b"\0\0\0\x01\0\0\0\x0fbase:allocation";
            [&[0, 0, 0, 1], name.as_bytes(), queries].concat()
        };
        let mut all = Vec::new();
        for (name, flags, len) in [("a", 0, 1 << 20), ("a", 8, 1 << 20), ("f", 0, 4 << 20)] {
            let mut writer = Client::of(&scene, "a").await;
            assert_eq!(writer.write(16384, &[1; 8192]).await, 0);
            let mut client = Client::connect(&scene);
            let options =
                [option_bytes(8, &[]), option_bytes(10, &context(name)), go(7, name, &[])];
            client.send(&[client_flags(3), options.concat()].concat()).await;
            client.take(18 + 20 + (20 + 19) + 20 + (20 + 12) + (20 + 14) + 20).await.unwrap();
            client.send(&request_bytes(7, flags, 5, 0, len)).await;
            let header = client.take(24).await.unwrap();
            assert_eq!((header[7], header[23]), (5, 1), "its type, and the context");
            let extents = client.take((header[19] - 4).into()).await.unwrap();
            all.push(
                extents
                    .chunks(8)
                    .map(|extent| {
                        let len = u32::from_be_bytes(extent[..4].try_into().unwrap());
                        (len, extent[7])
                    })
                    .collect::<Vec<_>>(),
            );
        }
        assert_eq!(all[0], [(16384, 3), (8192, 0), ((1 << 20) - 24576, 3)]);
        assert_eq!(all[1], [(16384, 3)], "only one");
        assert_eq!(all[2], [(4 << 20, 0)], "a simulated file does not tell");
    });
}

/// A reply with extents is as long as that of a short read.
#[test]
fn replies_with_extents_count_as_held() {
    with_memory(2 << 20, &[("m", "mem:8M")], async |scene| {
        let mut writer = Client::of(&scene, "m").await;
        for page in 0..1024 {
            assert_eq!(writer.write(page * 8192, &[1; 4096]).await, 0);
        }
        let mut client = Client::connect(&scene);
        let context = b"\0\0\0\x01m\0\0\0\x01\0\0\0\x0fbase:allocation";
        let options = [option_bytes(8, &[]), option_bytes(10, context), go(7, "m", &[])];
        client.send(&[client_flags(3), options.concat()].concat()).await;
        client.take(18 + 20 + (20 + 19) + 20 + (20 + 12) + (20 + 14) + 20).await.unwrap();
        for cookie in 0..100 {
            client.send(&request_bytes(7, 0, cookie, 0, 8 << 20)).await;
        }
        scene.core.sleep_ns(5 * SECOND_NS).await;
        // A connection may hold 128 KiB, and the network has 64.
        let executed = scene.server.counters().others;
        assert!((10..40).contains(&executed), "{executed}");
        client.take(100 * (24 + 1024 * 8)).await.unwrap();
        assert_eq!(scene.server.counters().others, 100);
    });
}

#[test]
fn a_disk_that_somebody_else_has_is_not_written() {
    with_disks(&[("a", "mem:1M")], async |scene| {
        let mut client = Client::of(&scene, "a").await;
        assert_eq!(client.write(0, &[1; 512]).await, 0);
        // He comes while the data of a write is on its way.
        client.send(&request_bytes(WRITE, 0, 7, 512, 1024)).await;
        client.send(&[2; 512]).await;
        scene.core.sleep_ns(SECOND_NS).await;
        scene.disks.0.borrow()["a"].taken.set(true);
        client.send(&[2; 512]).await;
        assert_eq!(client.reply().await, Some((1, 7)));
        assert_eq!(client.write(0, &[3; 512]).await, 1);
        client.request(ZEROES, 8, 0, 512, &[]).await;
        assert_eq!(client.reply().await, Some((1, 8)));
        assert_eq!(client.read(0, 1024).await, [[1; 512], [0; 512]].concat());
        scene.disks.0.borrow()["a"].taken.set(false);
        assert_eq!(client.write(0, &[3; 512]).await, 0);
    });
}

#[test]
fn garbage_and_silence_end_a_connection_and_no_other() {
    with_disks(&[("a", "mem:1M")], async |scene| {
        let mut good = Client::of(&scene, "a").await;
        let long = option_bytes(7, &vec![0; 20 << 10]);
        let missing = [client_flags(3), option_bytes(1, b"b")].concat();
        let chosen = [client_flags(3), go(7, "a", &[])].concat();
        let requests = [chosen.clone(), vec![7; 100]].concat();
        let huge = [chosen, request_bytes(WRITE, 0, 1, 0, u32::MAX)].concat();
        let flags = client_flags(0xffff_ffff);
        let web = b"GET / HTTP/1.1\r\n\r\n".to_vec();
        for bytes in [web, flags, [client_flags(3), long].concat(), missing, requests, huge] {
            let mut client = Client::connect(&scene);
            client.send(&bytes).await;
            let end = timeout(&scene.core, SECOND_NS, client.take(10_000)).await;
            assert_eq!(end, Ok(None), "{:?}", &bytes[..4]);
        }
        let began_ns = scene.core.now_ns();
        let mut silent = Client::connect(&scene);
        silent.send(&client_flags(3)).await;
        assert_eq!(silent.take(10_000).await, None);
        let ns = scene.core.now_ns() - began_ns;
        assert!((10 * SECOND_NS..11 * SECOND_NS).contains(&ns), "{ns}");
        assert_eq!(good.read(0, 512).await, [0; 512]);
    });
}

#[test]
fn half_of_a_request_ends_a_connection_and_an_idle_client_does_not() {
    with_disks(&[("m", "mem:1M")], async |scene| {
        let mut idle = Client::of(&scene, "m").await;
        let mut half = Client::of(&scene, "m").await;
        half.send(&request_bytes(READ, 0, 1, 0, 512)[..27]).await;
        let began_ns = scene.core.now_ns();
        assert_eq!(half.take(1).await, None);
        let waited_ns = scene.core.now_ns() - began_ns;
        assert!((29..32).contains(&(waited_ns / SECOND_NS)), "{waited_ns}");
        // One byte after the other does not help.
        let mut slow = Client::of(&scene, "m").await;
        let began_ns = scene.core.now_ns();
        for byte in request_bytes(READ, 0, 1, 0, 512) {
            slow.send(&[byte]).await;
            scene.core.sleep_ns(2 * SECOND_NS).await;
        }
        assert_eq!(slow.take(1).await, None);
        assert!(scene.core.now_ns() - began_ns < 60 * SECOND_NS);
        assert_eq!(idle.read(0, 512).await, [0; 512]);
    });
}

#[test]
fn a_client_waits_in_its_handshake_for_a_disk_that_is_hidden_for_a_moment() {
    with_disks(&[("m", "mem:1M"), ("n", "mem:1M")], async |scene| {
        let disk = scene.disks.0.borrow()["m"].clone();
        disk.hidden.set(true);
        let (back, core) = (disk.clone(), scene.core.clone());
        let showing = scene.core.spawn(reactor::Class::Foreground, async move {
            core.sleep_ns(2 * SECOND_NS).await;
            back.hidden.set(false);
        });
        let began_ns = scene.core.now_ns();
        // Others do not wait.
        let mut other = Client::of(&scene, "n").await;
        assert!(scene.core.now_ns() - began_ns < SECOND_NS);
        let mut client = Client::of(&scene, "m").await;
        assert!(scene.core.now_ns() - began_ns >= 2 * SECOND_NS);
        showing.await;
        assert_eq!(client.read(0, 512).await, other.read(0, 512).await);
        // It is refused in the end.
        disk.hidden.set(true);
        let mut refused = Client::connect(&scene);
        refused.send(&[client_flags(3), go(7, "m", &[])].concat()).await;
        let reply = refused.take(18 + 20).await.unwrap();
        assert_eq!(reply[18 + 12..18 + 16], [0x80, 0, 0, 6]);
        assert!(scene.core.now_ns() - began_ns >= 7 * SECOND_NS);
        disk.hidden.set(false);
    });
}

#[test]
fn connections_are_bounded() {
    with_disks(&[("a", "mem:1M"), ("b", "mem:1M")], async |scene| {
        let mut all = Vec::new();
        for _ in 0..CONNECTIONS_MAX / 2 {
            all.push(Client::of(&scene, "b").await);
        }
        // Half of them to one disk.
        let full = Client::of(&scene, "b").await;
        while scene.server.connections() > CONNECTIONS_MAX / 2 {
            scene.core.sleep_ns(1_000_000).await;
        }
        drop(full);
        for _ in 0..CONNECTIONS_MAX / 2 {
            all.push(Client::of(&scene, "a").await);
        }
        assert_eq!(scene.server.connections_of("a"), CONNECTIONS_MAX / 2);
        let mut more = Client::connect(&scene);
        assert_eq!(more.take(18).await, None);
        assert_eq!(scene.server.counters().refused, 1);
        drop(all.pop());
        while scene.server.connections() == CONNECTIONS_MAX {
            scene.core.sleep_ns(1_000_000).await;
        }
        Client::of(&scene, "a").await.read(0, 512).await;
    });
}

#[test]
fn a_client_that_sends_half_a_write_or_takes_no_replies_delays_nobody() {
    with_disks(&[("a", "mem:4M")], async |scene| {
        let half = Client::of(&scene, "a").await;
        half.send(&request_bytes(WRITE, 0, 1, 0, 1 << 20)).await;
        half.send(&[1; 1000]).await;
        let mut deaf: Vec<Client> = Vec::new();
        for _ in 0..2 {
            let client = Client::of(&scene, "a").await;
            let requests: Vec<_> =
                (0..200).flat_map(|n| request_bytes(READ, 0, n, 0, 1 << 20)).collect();
            client.send(&requests).await;
            deaf.push(client);
        }
        scene.core.sleep_ns(SECOND_NS).await;
        let limit = scene.core.pool().limit();
        assert!(scene.core.pool().used() <= limit / 4 + (2 << 20), "{}", scene.core.pool().used());
        let mut good = Client::of(&scene, "a").await;
        let began_ns = scene.core.now_ns();
        assert_eq!(good.write(0, &[5; 1 << 20]).await, 0);
        assert_eq!(good.read(0, 1 << 20).await.len(), 1 << 20);
        assert!(scene.core.now_ns() - began_ns < SECOND_NS);
        while scene.server.connections() > 1 {
            scene.core.sleep_ns(SECOND_NS).await;
        }
        let ns = scene.core.now_ns() - began_ns;
        assert!((25 * SECOND_NS..70 * SECOND_NS).contains(&ns), "{ns}");
        // A write of which half came changes nothing.
        assert_eq!(good.read(0, 512).await, [5; 512]);
        drop((half, deaf));
    });
}

/// A client that has lost a connection repeats its requests on another one, and writes more. What
/// the server has of the first connection must not be executed after that.
#[test]
fn requests_of_a_lost_connection_are_not_executed_late() {
    with_disks(&[("a", "mem:4M")], async |scene| {
        let lost = Client::of(&scene, "a").await;
        // Its replies are not taken, so the write waits for room.
        for cookie in 0..8 {
            lost.request(READ, cookie, 1 << 20, 1 << 20, &[]).await;
        }
        lost.request(WRITE, 8, 0, 512, &[1; 512]).await;
        scene.core.sleep_ns(SECOND_NS).await;
        let mut client = Client::of(&scene, "a").await;
        assert_eq!(client.read(0, 512).await, [0; 512], "the write waits");
        assert_eq!(client.write(0, &[1; 512]).await, 0);
        assert_eq!(client.write(0, &[2; 512]).await, 0);
        drop(lost);
        while scene.server.connections() > 1 {
            scene.core.sleep_ns(1_000_000).await;
        }
        assert_eq!(client.read(0, 512).await, [2; 512]);
    });
}

#[test]
fn clients_of_a_disk_that_goes_are_told_so() {
    with_disks(&[("a", "delay:write=1s|mem:1M"), ("b", "mem:1M")], async |scene| {
        let (mut client, mut other) =
            (Client::of(&scene, "a").await, Client::of(&scene, "b").await);
        client.request(WRITE, 1, 0, 512, &[1; 512]).await;
        scene.core.sleep_ns(SECOND_NS / 2).await;
        let gone = scene.disks.0.borrow_mut().remove("a").unwrap();
        let (server, closing) = (scene.server.clone(), scene.core.clone());
        let closed = closing
            .spawn(reactor::Class::Control, async move { server.close("a", 5 * SECOND_NS).await });
        client.request(READ, 2, 0, 512, &[]).await;
        assert_eq!(client.reply().await, Some((108, 2)));
        // What was in flight is done.
        assert_eq!(client.reply().await, Some((0, 1)));
        assert!(closed.await);
        assert_eq!(Rc::strong_count(&gone), 1, "the server has released the disk");
        assert_eq!(client.reply().await, None);
        assert_eq!(other.read(0, 512).await, [0; 512]);
        assert_eq!(scene.server.connections(), 1);
    });
}

#[test]
fn a_device_that_does_not_answer_is_abandoned() {
    with_disks(&[("a", "delay:write=1000s|mem:1M")], async |scene| {
        let mut client = Client::of(&scene, "a").await;
        client.request(WRITE, 1, 0, 512, &[1; 512]).await;
        scene.core.sleep_ns(SECOND_NS / 2).await;
        // The node goes on if it cannot be handed over.
        let why = scene.server.pause(SECOND_NS).await.unwrap_err();
        assert!(why.ends_with("of these disks: a"), "{why}");
        scene.server.resume();
        let gone = scene.disks.0.borrow_mut().remove("a").unwrap();
        assert!(!scene.server.close("a", SECOND_NS).await);
        assert_eq!(Rc::strong_count(&gone), 1);
        assert_eq!(client.reply().await, Some((108, 1)));
        assert_eq!(client.reply().await, None);
    });
}

/// A disk that has moved has another device, and the connections of before may last longer.
#[test]
fn a_disk_that_was_released_is_opened_again() {
    with_disks(&[("a", "mem:4M"), ("b", "mem:4M")], async |scene| {
        let deaf = Client::of(&scene, "a").await;
        deaf.request(READ, 1, 0, 1 << 20, &[]).await;
        scene.core.sleep_ns(SECOND_NS / 10).await;
        assert!(scene.server.release("a", SECOND_NS / 10).await);
        assert_eq!(scene.server.connections_of("a"), 1, "it takes no replies");
        let other = scene.disks.0.borrow()["b"].clone();
        scene.disks.0.borrow_mut().insert("a".to_owned(), other);
        let mut client = Client::of(&scene, "a").await;
        assert_eq!(client.write(0, &[1; 512]).await, 0);
        assert_eq!(Client::of(&scene, "b").await.read(0, 512).await, [1; 512]);
        drop(deaf);
    });
}

#[test]
fn a_pause_ends_connections_and_clients_come_back_after_it() {
    with_disks(&[("a", "delay:write=10ms|mem:1M")], async |scene| {
        let mut client = Client::of(&scene, "a").await;
        let idle = Client::of(&scene, "a").await;
        let shaking = Client::connect(&scene);
        client.request(WRITE, 1, 0, 512, &[4; 512]).await;
        scene.core.sleep_ns(1_000_000).await;
        scene.server.pause(5 * SECOND_NS).await.unwrap();
        assert_eq!(client.reply().await, Some((0, 1)));
        assert_eq!(client.reply().await, None);
        let mut early = Client::connect(&scene);
        let waits = timeout(&scene.core, SECOND_NS, early.take(18)).await;
        assert!(waits.is_err(), "nobody is served");
        scene.server.resume();
        let mut again = Client::of(&scene, "a").await;
        assert_eq!(again.read(0, 512).await, [4; 512]);
        drop((idle, shaking));
    });
}

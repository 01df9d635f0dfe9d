//! A disk goes from one end to the other in a simulated world, while connections are lost and the
//! destination is started again.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

use bdev::{Bdev, BufIo, Copy, Kind, Status, TaskChannel};
use reactor::sim::{Rng, SimConfig, World};
use reactor::{Class, Core, timeout};
use transfer::{
    Belongings, Boxed, Destination, Destinations, Hello, Refusal, Sender, Server, Shape, Stage,
    VERSION, Welcome,
};

const SIZE: u64 = 4 << 20;
const BLOCK: u64 = 4096;

fn address() -> SocketAddr {
    "10.0.0.2:7070".parse().unwrap()
}

/// A disk that waits for its data.
struct Disk {
    device: Bdev,
    incarnation: Cell<u64>,
    stage: Cell<Stage>,
    begins: Cell<u64>,
}

struct Waiting(Rc<Disk>);

impl Destinations for Waiting {
    fn may_begin(&self, _: &Hello) -> Result<(), Refusal> {
        Ok(())
    }

    fn begin<'a>(&'a self, hello: &'a Hello) -> Boxed<'a, Result<Rc<dyn Destination>, Refusal>> {
        Box::pin(async move {
            match &*hello.disk {
                "a" => {
                    self.0.begins.set(self.0.begins.get() + 1);
                    Ok(Rc::new(Handle(self.0.clone())) as Rc<dyn Destination>)
                }
                "b" => Err(Refusal::Never("there is no disk b".to_owned())),
                _ => Err(Refusal::Later("the node is starting".to_owned())),
            }
        })
    }
}

struct Handle(Rc<Disk>);

impl Destination for Handle {
    fn device(&self) -> Bdev {
        self.0.device.clone()
    }

    fn welcome(&self) -> Welcome {
        let Disk { incarnation, stage, .. } = &*self.0;
        Welcome { version: VERSION, incarnation: incarnation.get(), stage: stage.get() }
    }

    fn own(&self, _: Belongings) -> Boxed<'_, Result<(), String>> {
        self.0.stage.set(Stage::Whole);
        Box::pin(async { Ok(()) })
    }

    fn give_back(&self) -> Boxed<'_, Result<bool, String>> {
        let begun = self.0.stage.get() == Stage::Begun;
        if !begun {
            self.0.stage.set(Stage::Receiving);
        }
        Box::pin(async move { Ok(!begun) })
    }

    fn abandon(&self) -> Boxed<'_, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }
}

fn request(kind: Kind, offset: u64, len: u64) -> BufIo {
    BufIo { kind, offset, len, at: 0, fua: false, tag: 0 }
}

async fn fill(core: &Core, channel: &TaskChannel, offset: u64, len: u64, byte: u8) {
    let mut buf = core.alloc(len as usize).unwrap();
    buf.fill(byte);
    assert_eq!(channel.run(request(Kind::Write, offset, len), Some(buf)).await.0, Status::Ok);
}

async fn all(core: &Core, device: &Bdev) -> Vec<u8> {
    let channel = TaskChannel::new(device, core).unwrap();
    let buf = core.alloc(SIZE as usize).unwrap();
    let (status, buf) = channel.run(request(Kind::Read, 0, SIZE), Some(buf)).await;
    assert_eq!(status, Status::Ok);
    buf.unwrap().to_vec()
}

fn hello(disk: &str, device: &Bdev) -> Hello {
    Hello {
        version: VERSION,
        disk: disk.to_owned(),
        transfer: 7,
        shape: Shape::of(&device.geometry()),
        given: false,
    }
}

fn sender(core: &Core, disk: &str, device: &Bdev) -> Rc<Sender> {
    let dialling = core.clone();
    let dial = move || {
        let core = dialling.clone();
        Box::pin(async move { core.connect(address()).map_err(|error| error.to_string()) }) as _
    };
    Rc::new(Sender::start(core, hello(disk, device), Box::new(dial), None))
}

async fn waiting(core: &Core, uri: &str) -> (Rc<Disk>, Rc<Server>) {
    let disk = Rc::new(Disk {
        device: Bdev::open(core, uri).await.unwrap(),
        incarnation: Cell::new(1),
        stage: Cell::new(Stage::Receiving),
        begins: Cell::new(0),
    });
    let listener = core.listen(address()).unwrap();
    let server = Server::start(core, listener, None, Box::new(Waiting(disk.clone())));
    (disk, server)
}

/// Writes at random places until it is told to stop.
async fn write(core: Core, device: Bdev, mut rng: Rng, stop: Rc<Cell<bool>>) {
    let channel = TaskChannel::new(&device, &core).unwrap();
    while !stop.get() {
        let blocks = 1 + rng.below(8);
        let offset = rng.below(SIZE / BLOCK - blocks) * BLOCK;
        match rng.below(8) {
            0 => {
                let zeroes = Kind::WriteZeroes { unmap: true };
                drop(channel.run(request(zeroes, offset, blocks * BLOCK), None).await);
            }
            _ => fill(&core, &channel, offset, blocks * BLOCK, 1 + rng.below(255) as u8).await,
        }
        core.sleep_ns(rng.below(400_000)).await;
    }
}

/// Moves a disk, of which some is there already. Returns how often connections were lost, and how
/// often the destination was started again.
fn moved(seed: u64) -> (u64, u64) {
    let world = World::new(seed, 1, SimConfig::default());
    let counts = Rc::new(Cell::new((0, 0)));
    let (told, inside) = (counts.clone(), world.clone());
    let run = world.clone().run(move |core| {
        let (told, world, mut rng) = (told.clone(), inside.clone(), inside.rng());
        async move {
            let source = Bdev::open(&core, "delay:all=5us..400us|mem:4M").await.unwrap();
            let (disk, _server) = waiting(&core, "delay:all=5us..400us|mem:4M").await;
            let from = TaskChannel::new(&source, &core).unwrap();
            let to = TaskChannel::new(&disk.device, &core).unwrap();
            for part in 0..16 {
                let (offset, len) = (part * SIZE / 16, SIZE / 16);
                if part % 3 != 0 {
                    fill(&core, &from, offset, len, part as u8 + 1).await;
                }
                if part % 2 == 0 {
                    fill(&core, &to, offset, len, 0xEE).await;
                }
            }
            let sender = sender(&core, "a", &source);
            let welcome = sender.welcome(true).await.unwrap();
            assert_eq!((welcome.incarnation, welcome.stage), (1, Stage::Receiving));
            let tracked = source.tracked(&core, BLOCK).await.unwrap();
            let copy = Copy::new(&core, &tracked, Box::new(sender.clone())).unwrap();
            let stop = Rc::new(Cell::new(false));
            let writing = write(core.clone(), tracked.clone(), rng.fork(), stop.clone());
            let writing = core.spawn(Class::Foreground, writing);
            let disturbing = {
                let (stop, core, disk, mut rng) =
                    (stop.clone(), core.clone(), disk.clone(), rng.fork());
                async move {
                    while !stop.get() {
                        core.sleep_ns(rng.below(40_000_000)).await;
                        let (lost, again) = told.get();
                        let restarts = rng.below(4) == 0;
                        if restarts {
                            disk.incarnation.set(disk.incarnation.get() + 1);
                        }
                        world.reset_connections();
                        told.set((lost + 1, again + u64::from(restarts)));
                    }
                }
            };
            let disturbing = core.clone().spawn(Class::Foreground, disturbing);
            copy.begin().await.unwrap();
            for round in 0..6 {
                if round == 4 {
                    stop.set(true);
                }
                copy.pass().await.unwrap();
                if sender.take_renewed() {
                    sender.compare(true);
                    copy.begin().await.unwrap();
                }
            }
            writing.await;
            disturbing.await;
            loop {
                while copy.left_bytes() > 0 {
                    copy.pass().await.unwrap();
                }
                copy.flush().await.unwrap();
                if !sender.take_renewed() {
                    break;
                }
                sender.compare(true);
                copy.begin().await.unwrap();
            }
            sender.own(&Belongings::default()).await.unwrap();
            assert_eq!(disk.stage.get(), Stage::Whole);
            assert!(all(&core, &source).await == all(&core, &disk.device).await, "they differ");
            // It is the destination's, unless the guest has not begun.
            assert!(copy_fails(&core, &sender).await);
            assert_eq!(sender.take_back().await, Ok(true));
            sender.own(&Belongings::default()).await.unwrap();
            disk.stage.set(Stage::Begun);
            assert_eq!(sender.take_back().await, Ok(false));
        }
    });
    run.unwrap();
    counts.get()
}

/// Whether data is refused.
async fn copy_fails(core: &Core, sender: &Sender) -> bool {
    use bdev::CopyTarget;
    let buf = core.alloc(4096).unwrap();
    sender.write(0, 4096, buf).await.is_err()
}

#[test]
fn a_disk_comes_whole_whatever_happens_to_its_connection() {
    let (mut lost, mut again) = (0, 0);
    for seed in 0..30 {
        let (one, other) = moved(seed);
        (lost, again) = (lost + one, again + other);
    }
    assert!(lost > 60 && again > 10, "{lost} connections lost, {again} starts");
}

#[test]
fn a_destination_says_why_it_takes_no_disk() {
    let run = World::new(1, 1, SimConfig::default()).run(|core| async move {
        let source = Bdev::open(&core, "mem:4M").await.unwrap();
        let nobody = sender(&core, "a", &source).welcome(false).await.unwrap_err();
        assert!(nobody.contains("refused"), "{nobody}");
        let (disk, _server) = waiting(&core, "mem:4M").await;
        let never = sender(&core, "b", &source);
        assert_eq!(never.welcome(true).await.unwrap_err(), "there is no disk b");
        assert_eq!(never.own(&Belongings::default()).await.unwrap_err(), "there is no disk b");
        let later = sender(&core, "c", &source);
        assert_eq!(later.welcome(false).await.unwrap_err(), "the node is starting");
        assert_eq!(disk.begins.get(), 0);
    });
    run.unwrap();
}

#[test]
fn a_hostile_source_gets_errors_or_is_disconnected() {
    let run = World::new(2, 1, SimConfig::default()).run(|core| async move {
        let (disk, server) = waiting(&core, "mem:4M").await;
        let said = Rc::<RefCell<Vec<u8>>>::default();
        for first in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xFF; 64], b"MRDT"] {
            let socket = core.connect(address()).unwrap();
            socket.send(first.to_vec()).await.0.unwrap();
            let began_ns = core.now_ns();
            let (received, bytes) = socket.recv(Vec::new(), 100).await;
            assert!(!received.is_ok_and(|count| count > 0), "{bytes:?}");
            assert!(core.now_ns() - began_ns < 11_000_000_000);
            said.borrow_mut().extend(bytes);
        }
        assert!(said.borrow().is_empty() && disk.begins.get() == 0);
        assert!(server.pause(1_000_000_000).await);
    });
    run.unwrap();
}

/// Strangers that say nothing keep no source out.
#[test]
fn strangers_that_are_silent_keep_no_source_out() {
    let run = World::new(3, 1, SimConfig::default()).run(|core| async move {
        let source = Bdev::open(&core, "mem:4M").await.unwrap();
        let (disk, _server) = waiting(&core, "mem:4M").await;
        let strangers: Vec<_> = (0..200).map(|_| core.connect(address()).unwrap()).collect();
        core.sleep_ns(1_000_000_000).await;
        let began_ns = core.now_ns();
        sender(&core, "a", &source).welcome(true).await.unwrap();
        assert!(core.now_ns() - began_ns < 1_000_000_000);
        assert_eq!(disk.begins.get(), 1);
        drop(strangers);
    });
    run.unwrap();
}

/// Kinds of frames.
const HELLO: u8 = 1;
const WRITE: u8 = 2;
const COMPARE: u8 = 4;
const PING: u8 = 9;

/// A frame as in `docs/formats/transfer.md`.
fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    frame_for(kind, 0, 0, payload)
}

/// A frame for a range of the disk, which is its request's number, too.
fn frame_for(kind: u8, offset: u64, len: u64, payload: &[u8]) -> Vec<u8> {
    let numbers = [offset, offset, len].map(u64::to_le_bytes).concat();
    let mut bytes = [&b"MRDT"[..], &[kind], &[0; 3], &numbers].concat();
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes), payload);
    [&bytes[..], &crc.to_le_bytes(), payload].concat()
}

/// Answers that a source does not take are bounded.
#[test]
fn a_source_that_takes_no_answers_is_not_read() {
    let run = World::new(4, 1, SimConfig::default()).run(|core| async move {
        let source = Bdev::open(&core, "mem:4M").await.unwrap();
        let (_disk, _server) = waiting(&core, "mem:4M").await;
        let socket = core.connect(address()).unwrap();
        let hello = serde_json::to_vec(&hello("a", &source)).unwrap();
        socket.send(frame(HELLO, &hello)).await.0.unwrap();
        let pings = frame(PING, &[]).repeat(1000);
        let mut sent = 0;
        while let Ok((done, _)) = timeout(&core, 5_000_000_000, socket.send(pings.clone())).await {
            done.unwrap();
            sent += 1;
            assert!(sent < 1000, "everything is read");
        }
    });
    run.unwrap();
}

/// What requests hold is bounded, however slow the device is: data that comes, and data that is
/// compared.
#[test]
fn what_requests_hold_is_bounded() {
    const MEMORY: usize = 16 << 20;
    const PIECE: u64 = 1 << 20;
    for kind in [WRITE, COMPARE] {
        let config = SimConfig { memory: MEMORY, ..SimConfig::default() };
        let run = World::new(5, 1, config).run(move |core| async move {
            let source = Bdev::open(&core, "mem:16M").await.unwrap();
            let (_disk, _server) = waiting(&core, "delay:all=200ms..200ms|mem:16M").await;
            let socket = core.connect(address()).unwrap();
            let hello = serde_json::to_vec(&hello("a", &source)).unwrap();
            socket.send(frame(HELLO, &hello)).await.0.unwrap();
            let payload = vec![0; if kind == WRITE { PIECE as usize } else { 16 }];
            let (sending, other) = (Rc::new(socket), core.clone());
            let receiving = sending.clone();
            core.spawn(Class::Foreground, async move {
                for nth in 0..64 {
                    let range = frame_for(kind, nth % 16 * PIECE, PIECE, &payload);
                    sending.send(range).await.0.unwrap();
                }
            });
            let answers = Rc::new(Cell::new(0));
            let told = answers.clone();
            core.spawn(Class::Foreground, async move {
                // The first one is the answer to Hello.
                while let (Ok(count @ 1..), _) = receiving.recv(Vec::new(), 1 << 16).await {
                    told.set(told.get() + count);
                }
            });
            let (mut most, began_ns) = (0, other.now_ns());
            while answers.get() < 65 * 40 && other.now_ns() < began_ns + 60_000_000_000 {
                most = most.max(other.pool().used());
                other.sleep_ns(1_000_000).await;
            }
            assert!(answers.get() >= 65 * 40, "{} bytes of answers", answers.get());
            assert!(most <= MEMORY / 4, "{most} bytes for requests of kind {kind}");
        });
        run.unwrap();
    }
}

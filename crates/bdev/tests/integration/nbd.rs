//! The device `nbd:` over servers that lie, stall, send garbage or close, in simulated worlds. What
//! it does with a proper server is tested with ours (`nbd/tests/device.rs`).

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

use bdev::{Bdev, BufIo, Kind, Parts, Status, TaskChannel};

use crate::common::{PLACES, Place};
use nbdproto::{Action, Chosen, Errno, ExportInfo, Exports, Handshake, Progress, Replies, Request};
use nbdproto::{REQUEST_BYTES, Rules};
use reactor::sim::{NetConfig, SimConfig, World};
use reactor::{Class, Core, Socket};

const SIZE: usize = 1 << 20;
const SECOND_NS: u64 = 1_000_000_000;

/// What a server does with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Good,
    /// Reads come in chunks, the last one first, with holes and without the promise of order.
    Pieces,
    /// Has flushes, and nothing else that a server need not have.
    Plain,
    ClosesAtOnce,
    Garbage,
    /// Says nothing.
    Mute,
    /// The reply to an option is too long.
    LongOption,
    /// Another size than before.
    OtherSize,
    /// Closes when a request comes.
    ClosesFirst,
    /// After some requests: closes, sends nothing more, or what is wrong.
    Closes,
    WrongCookie,
    Twice,
    TooMuchData,
    OtherData,
    GarbageReply,
    ShutsDown,
    /// Half of a reply, and then the end.
    HalfReply,
}

const BAD: [Mood; 13] = [
    Mood::ClosesAtOnce,
    Mood::Garbage,
    Mood::Mute,
    Mood::LongOption,
    Mood::OtherSize,
    Mood::Closes,
    Mood::WrongCookie,
    Mood::Twice,
    Mood::TooMuchData,
    Mood::OtherData,
    Mood::GarbageReply,
    Mood::ShutsDown,
    Mood::HalfReply,
];

struct Server {
    core: Core,
    moods: RefCell<Vec<Mood>>,
    data: RefCell<Vec<u8>>,
    connections: Cell<usize>,
    flushes: Cell<usize>,
    port: u16,
}

struct One(u64);

impl Exports for One {
    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn find(&self, _: &str) -> Option<ExportInfo> {
        Some(ExportInfo {
            size_bytes: self.0,
            trim: true,
            write_zeroes: true,
            block_bytes: 512,
            preferred_bytes: 4096,
            payload_bytes_max: 1 << 16,
            ..ExportInfo::default()
        })
    }
}

impl Server {
    /// A server whose connections have these moods, the first one first; all later ones are good.
    fn start(core: &Core, moods: &[Mood]) -> Rc<Server> {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = core.listen_alone(any).unwrap();
        let server = Rc::new(Server {
            core: core.clone(),
            moods: RefCell::new(moods.iter().rev().copied().collect()),
            data: RefCell::new((0..SIZE).map(|n| (n / 512) as u8).collect()),
            connections: Cell::new(0),
            flushes: Cell::new(0),
            port: listener.local_addr().unwrap().port(),
        });
        let own = server.clone();
        core.spawn(Class::Foreground, async move {
            while let Ok(socket) = listener.accept().await {
                own.connections.set(own.connections.get() + 1);
                let (mood, own) = (own.moods.borrow_mut().pop(), own.clone());
                own.core.clone().spawn(Class::Foreground, async move {
                    let closing = socket.clone();
                    let _ = own.serve(socket, mood.unwrap_or(Mood::Good)).await;
                    closing.shutdown();
                });
            }
        });
        server
    }

    fn uri(&self, params: &str) -> String {
        format!("nbd://127.0.0.1:{}/x{params}", self.port)
    }

    async fn serve(&self, socket: Socket, mood: Mood) -> Option<()> {
        match mood {
            Mood::ClosesAtOnce => return None,
            Mood::Mute => {
                self.core.sleep_ns(100 * SECOND_NS).await;
                return None;
            }
            Mood::Garbage => {
                let _ = socket.send((0..9999).map(|n| (n * 7) as u8).collect()).await;
                return None;
            }
            _ => {}
        }
        let mut input = Input { socket: socket.clone(), bytes: Vec::new() };
        send(&socket, Handshake::greeting().to_vec()).await?;
        let export = One(if mood == Mood::OtherSize { 4096 } else { SIZE as u64 });
        let mut handshake = Handshake::default();
        let Chosen { structured, .. } = loop {
            let mut out = Vec::new();
            let (used, progress) = handshake.take(&input.bytes, &export, &mut out).ok()?;
            input.bytes.drain(..used);
            if mood == Mood::LongOption && out.len() > 20 {
                out[16..20].fill(0xff);
            }
            // The information about the export begins after the greeting of the reply.
            if mood == Mood::Plain && out.len() > 32 && out[12..16] == [0, 0, 0, 3] {
                out[30..32].copy_from_slice(&[0, 5]);
            }
            send(&socket, out).await?;
            match progress {
                Progress::Serve(chosen) => break chosen,
                _ if used == 0 => input.receive().await?,
                _ => {}
            }
        };
        for nth in 0.. {
            input.until(REQUEST_BYTES).await?;
            let request = Request::parse(&input.bytes).ok()??;
            input.bytes.drain(..REQUEST_BYTES);
            let payload = request.payload_len() as usize;
            input.until(payload).await?;
            let payload: Vec<u8> = input.bytes.drain(..payload).collect();
            let rules = Rules {
                size_bytes: SIZE as u64,
                block_bytes: 512,
                payload_bytes_max: 1 << 16,
                read_only: false,
                trim: true,
                write_zeroes: true,
                structured,
                allocation: false,
            };
            let action = request.check(&rules).expect("the device asks for what is allowed");
            if mood == Mood::Plain {
                let plain = [Action::Read, Action::Write { fua: false }, Action::Flush];
                assert!(plain.contains(&action) || action == Action::Disconnect, "{action:?}");
            }
            self.flushes.set(self.flushes.get() + usize::from(action == Action::Flush));
            let angry = nth >= 2;
            self.answer(&socket, request, action, payload, (mood, angry, structured)).await?;
        }
        None
    }

    async fn answer(
        &self,
        socket: &Socket,
        request: Request,
        action: Action,
        payload: Vec<u8>,
        (mood, angry, structured): (Mood, bool, bool),
    ) -> Option<()> {
        let Request { cookie, offset, len, .. } = request;
        let (from, to) = (offset as usize, offset as usize + len as usize);
        let replies = Replies { structured };
        let mut out = Vec::new();
        match action {
            _ if mood == Mood::ClosesFirst => return None,
            _ if !angry => {}
            _ if mood == Mood::Closes => return None,
            _ if mood == Mood::WrongCookie => replies.done(&mut out, cookie + 1000),
            _ if mood == Mood::GarbageReply => out.extend_from_slice(&[0x55; 300]),
            _ if mood == Mood::ShutsDown => replies.error(&mut out, cookie, Errno::Shutdown),
            Action::Read if mood == Mood::TooMuchData => {
                replies.read(&mut out, cookie, offset, len + 512);
                out.resize(out.len() + len as usize + 512, 9);
            }
            Action::Read if mood == Mood::OtherData => {
                replies.read(&mut out, cookie, offset + 512, len);
                out.resize(out.len() + len as usize, 9);
            }
            _ if mood == Mood::HalfReply => {
                replies.done(&mut out, cookie);
                out.truncate(9);
                send(socket, out).await?;
                return None;
            }
            _ => {}
        }
        if !out.is_empty() {
            return send(socket, out).await;
        }
        match action {
            Action::Read if mood == Mood::Pieces && len >= 1024 => {
                let data = self.data.borrow()[from..to].to_vec();
                let half = len / 2 / 512 * 512;
                for (nth, (at, end)) in [(half, len), (0, half)].into_iter().enumerate() {
                    let chunk = out.len();
                    replies.read(&mut out, cookie, offset + u64::from(at), end - at);
                    // Not the last one.
                    out[chunk + 5] = nth as u8;
                    out.extend_from_slice(&data[at as usize..end as usize]);
                }
            }
            Action::Read => {
                replies.read(&mut out, cookie, offset, len);
                out.extend_from_slice(&self.data.borrow()[from..to]);
            }
            Action::Write { .. } => {
                self.data.borrow_mut()[from..to].copy_from_slice(&payload);
                replies.done(&mut out, cookie);
            }
            Action::WriteZeroes { .. } => {
                self.data.borrow_mut()[from..to].fill(0);
                replies.done(&mut out, cookie);
            }
            Action::Disconnect => return None,
            _ => replies.done(&mut out, cookie),
        }
        if mood == Mood::Twice && angry {
            replies.done(&mut out, cookie);
        }
        send(socket, out).await
    }
}

async fn send(socket: &Socket, bytes: Vec<u8>) -> Option<()> {
    socket.send(bytes).await.0.ok()
}

struct Input {
    socket: Socket,
    bytes: Vec<u8>,
}

impl Input {
    async fn receive(&mut self) -> Option<()> {
        let (received, bytes) = self.socket.recv(std::mem::take(&mut self.bytes), 65536).await;
        self.bytes = bytes;
        received.ok().filter(|n| *n > 0).map(drop)
    }

    async fn until(&mut self, n: usize) -> Option<()> {
        while self.bytes.len() < n {
            self.receive().await?;
        }
        Some(())
    }
}

/// Runs a test in some worlds.
fn in_worlds<F: Future<Output = ()> + 'static>(
    seeds: std::ops::Range<u64>,
    test: impl Fn(Core, u64) -> F + Clone + Send + 'static,
) {
    for seed in seeds {
        let net = NetConfig::default();
        let world = World::new(seed, 1, SimConfig { net, ..SimConfig::default() });
        let test = test.clone();
        let run = world.run(move |core| test(core, seed));
        run.unwrap_or_else(|why| panic!("seed {seed}: {why:?}"));
    }
}

fn request(kind: Kind, offset: u64, len: u64) -> BufIo {
    BufIo { kind, offset, len, at: 0, fua: false, tag: 0 }
}

async fn read(
    core: &Core,
    channel: &TaskChannel,
    offset: u64,
    len: u64,
) -> Result<Vec<u8>, Status> {
    let buf = core.alloc(len as usize).unwrap();
    match channel.run(request(Kind::Read, offset, len), Some(buf)).await {
        (Status::Ok, Some(buf)) => Ok(buf[..len as usize].to_vec()),
        (status, _) => Err(status),
    }
}

async fn write(core: &Core, channel: &TaskChannel, offset: u64, byte: u8, len: u64) -> Status {
    let mut buf = core.alloc(len as usize).unwrap();
    buf[..len as usize].fill(byte);
    channel.run(request(Kind::Write, offset, len), Some(buf)).await.0
}

/// Writes, reads and more, on a server whose first connection is good enough to open the device.
async fn use_device(core: &Core, server: &Server, params: &str) {
    let device = Bdev::open(core, &server.uri(params)).await.unwrap();
    let channel = TaskChannel::new(&device, core).unwrap();
    let mut model: Vec<u8> = server.data.borrow().clone();
    for nth in 0..12_u64 {
        let at = nth * 70_000 / 512 * 512;
        let len = 512 * (1 + nth * 13 % 200);
        let range = at as usize..(at + len) as usize;
        assert_eq!(write(core, &channel, at, nth as u8 + 1, len).await, Status::Ok, "{nth}");
        model[range.clone()].fill(nth as u8 + 1);
        assert!(read(core, &channel, at, len).await.unwrap() == model[range], "{nth}");
        if nth % 3 == 0 {
            let zeroes = request(Kind::WriteZeroes { unmap: true }, 0, 1024);
            assert_eq!(channel.run(zeroes, None).await.0, Status::Ok);
            model[..1024].fill(0);
            assert_eq!(channel.run(request(Kind::Flush, 0, 0), None).await.0, Status::Ok);
        }
    }
    assert!(read(core, &channel, 0, SIZE as u64).await.unwrap() == model);
    assert!(*server.data.borrow() == model);
}

#[test]
fn no_mood_of_a_server_changes_what_is_read() {
    in_worlds(0..3, |core, _| async move {
        for mood in BAD.into_iter().chain([Mood::Pieces]) {
            // The device has to be opened on a good one, which then closes.
            let server = Server::start(&core, &[Mood::Closes, mood, mood]);
            use_device(&core, &server, "").await;
            let least = if mood == Mood::Pieces { 2 } else { 4 };
            assert!(server.connections.get() >= least, "{mood:?}");
        }
    });
}

#[test]
fn any_sequence_of_moods_ends_well() {
    in_worlds(0..20, |core, _| async move {
        let moods: Vec<_> = [Mood::Closes]
            .into_iter()
            .chain((0..5).map(|_| BAD[core.random_u64() as usize % BAD.len()]))
            .collect();
        let server = Server::start(&core, &moods);
        use_device(&core, &server, "?reconnect-delay=1000").await;
    });
}

#[test]
fn a_device_is_not_opened_on_a_bad_server() {
    in_worlds(0..3, |core, _| async move {
        for mood in [Mood::ClosesAtOnce, Mood::Garbage, Mood::Mute, Mood::LongOption] {
            let server = Server::start(&core, &[mood; 3]);
            let before = core.now_ns();
            let error = Bdev::open(&core, &server.uri("")).await.unwrap_err();
            let expected = format!("cannot open {}: ", server.uri(""));
            assert!(error.to_string().starts_with(&expected), "{error}");
            assert!(core.now_ns() - before < 11 * SECOND_NS, "{mood:?}");
        }
    });
}

/// A request that makes the server close is not repeated for ever.
#[test]
fn a_request_that_no_server_answers_fails() {
    in_worlds(0..3, |core, _| async move {
        let server = Server::start(&core, &[Mood::ClosesFirst; 16]);
        let device = Bdev::open(&core, &server.uri("?reconnect-delay=3600")).await.unwrap();
        let channel = TaskChannel::new(&device, &core).unwrap();
        assert_eq!(read(&core, &channel, 0, 512).await, Err(Status::IoError));
        assert_eq!(server.connections.get(), 16);
        // The next connection is a good one.
        assert_eq!(read(&core, &channel, 512, 512).await.unwrap(), [1; 512]);
    });
}

#[test]
fn a_plain_server_is_enough() {
    in_worlds(0..3, |core, _| async move {
        let server = Server::start(&core, &[Mood::Plain]);
        let device = Bdev::open(&core, &server.uri("?write=through")).await.unwrap();
        let geometry = device.geometry();
        assert!(!geometry.discard && geometry.write_zeroes && !geometry.volatile_cache);
        let channel = TaskChannel::new(&device, &core).unwrap();
        // Each write is followed by a flush of its own.
        assert_eq!(write(&core, &channel, 0, 7, 40960).await, Status::Ok);
        assert_eq!(server.flushes.get(), 1);
        let zeroes = request(Kind::WriteZeroes { unmap: true }, 4096, 200 << 10);
        assert_eq!(channel.run(zeroes, None).await.0, Status::Ok);
        // In four pieces.
        assert_eq!(server.flushes.get(), 5);
        let bytes = read(&core, &channel, 0, 8192).await.unwrap();
        assert_eq!(bytes[..4096], [7; 4096]);
        assert_eq!(bytes[4096..], [0; 4096]);
        let discard = request(Kind::Discard, 0, 4096);
        assert_eq!(channel.run(discard, None).await.0, Status::Unsupported);
    });
}

/// As a confined process opens a device, and the one that takes over from it.
#[test]
fn another_process_may_connect() {
    for place in PLACES.into_iter().filter(|place| place.available() && *place != Place::Sim) {
        place.run("nbd-line", 0, |core, _| async move {
            let server = Server::start(&core, &[Mood::Good, Mood::Closes, Mood::Closes]);
            // The name may have an address at which nobody listens.
            let uri = format!("nbd://localhost:{}/x?reconnect-delay=5", server.port);
            let (parts, line) = Parts::open(&core, &uri).await.unwrap();
            assert_eq!((parts.descriptors.len(), server.connections.get()), (1, 0));
            bdev::serve_line(&core, &uri, line.unwrap()).unwrap();
            let device = Bdev::take(&core, &uri, parts).await.unwrap();
            let next = device.descriptors().unwrap();
            let next = next.into_iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
            let next = Parts { descriptors: next, holes: None };
            let next = Bdev::take(&core, &uri, next).await.unwrap();
            for device in [device, next] {
                let channel = TaskChannel::new(&device, &core).unwrap();
                for nth in 0..8 {
                    let found = read(&core, &channel, 512 * nth, 512).await.unwrap();
                    assert_eq!(found, [nth as u8; 512]);
                }
            }
            // Without a line it connects itself.
            let own = Bdev::take(&core, &uri, Parts::default()).await.unwrap();
            assert!(own.descriptors().unwrap().is_empty());
            // A bitmap has the size of the device.
            let tracked = format!("dirty:|{uri}");
            let (parts, line) = Parts::open(&core, &tracked).await.unwrap();
            assert_eq!(parts.descriptors.len(), 2);
            bdev::serve_line(&core, &tracked, line.unwrap()).unwrap();
            assert!(Bdev::take(&core, &tracked, parts).await.unwrap().dirty_map().is_some());
            // The reason why there is no connection comes along the line, too.
            let none = "nbd+unix:///x?socket=/none/there";
            let (parts, line) = Parts::open(&core, none).await.unwrap();
            bdev::serve_line(&core, none, line.unwrap()).unwrap();
            let error = Bdev::take(&core, none, parts).await.unwrap_err();
            assert!(error.to_string().contains("No such file"), "{error}");
        });
    }
}

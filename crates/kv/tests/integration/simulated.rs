//! The server in a simulated world: several cores, a network with delays and splits, a disk that is
//! slow or fails, and clients that know the expected replies from a model.
//!
//! A failure names its seed; `MILLRACE_SEEDS=300` runs 300 of them, `MILLRACE_SEED=5` only this
//! one.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use crate::stage::{Client, DIR, Node, address, integer, seeds, text};
use kv::{NodeState, Server, Settings};
use lsm::{Db, OpenOptions};
use reactor::sim::{Fault, FaultKind, NetConfig, Rng, SimConfig, World};
use reactor::{Class, Core};
use resp::{Protocol, Reply, Writer, write_command};
use sim::database::{Database, Model, database};

const CORES: usize = 2;

/// Limits small enough that an ordinary client reaches them.
fn small() -> Settings {
    Settings {
        reads_max: 6,
        unsent_bytes_max: 20_000,
        idle_buffer_bytes_max: 100_000,
        pinned_bytes_max: 60_000,
        reference_bytes_min: 300,
        ..Settings::default()
    }
}

/// A database that is served, and the world around it.
struct Stage {
    world: World,
    made: Database,
    node: Arc<NodeState>,
    seed: u64,
    ended: Cell<usize>,
}

/// A core that starts late misses nothing that a client set for the whole node before.
#[test]
fn a_setting_reaches_the_cores_that_start_later() {
    for seed in 0..20 {
        let world = World::new(seed, CORES, SimConfig::default());
        let made = database(seed);
        made.install(&world, DIR);
        let node = NodeState::new(CORES, Settings::default(), Node);
        let inside = world.clone();
        let ended = Rc::new(Cell::new(0));
        let run = world.run(move |core| {
            let (world, node, ended) = (inside.clone(), node.clone(), ended.clone());
            async move {
                let listener = core.listen(address()).expect("it listens");
                let db = Db::open(&core, DIR.as_ref(), OpenOptions::default()).await.unwrap();
                core.sleep_ns(core.id() as u64 * 50_000_000).await;
                let server = Server::start(&core, db.attach(&core), &node, listener, None);
                if core.id() == 0 {
                    let mut client = Client::connect(&core, &world);
                    let set = client.call(&["CONFIG", "SET", "slowlog-max-len", "7"]).await;
                    assert_eq!(set, Reply::Simple(b"OK".to_vec()), "seed {seed}");
                    for _ in 0..8 {
                        let mut other = Client::connect(&core, &world);
                        let found = other.call(&["CONFIG", "GET", "slowlog-max-len"]).await;
                        let words = [&b"slowlog-max-len"[..], b"7"];
                        let expected = words.map(|word| Reply::Bulk(word.to_vec())).to_vec();
                        assert_eq!(found, Reply::Array(expected), "seed {seed}");
                    }
                }
                ended.set(ended.get() + 1);
                while ended.get() < CORES {
                    core.sleep_ns(1_000_000).await;
                }
                server.stop(1_000_000_000).await;
            }
        });
        run.unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
    }
}

/// Serves on every core while `clients` runs on every core, then stops, and checks that nothing is
/// left.
fn stage<F, Fut>(seed: u64, settings: Settings, cache_bytes: usize, clients: F) -> (u64, u64)
where
    F: Fn(Core, Rc<Stage>) -> Fut + 'static,
    Fut: Future<Output = ()> + 'static,
{
    let net = NetConfig { window: 8 << 10, ..NetConfig::default() };
    stage_over(net, seed, settings, cache_bytes, clients)
}

fn stage_over<F, Fut>(
    net: NetConfig,
    seed: u64,
    settings: Settings,
    cache_bytes: usize,
    clients: F,
) -> (u64, u64)
where
    F: Fn(Core, Rc<Stage>) -> Fut + 'static,
    Fut: Future<Output = ()> + 'static,
{
    let world =
        World::new(seed, CORES, SimConfig { net, capacity: 100_000, ..SimConfig::default() });
    let made = database(seed);
    made.install(&world, DIR);
    let stage = Rc::new(Stage {
        world: world.clone(),
        made,
        node: NodeState::new(CORES, settings, Node),
        seed,
        ended: Cell::new(0),
    });
    let clients = Rc::new(clients);
    let inside = stage.clone();
    let pools = world
        .run(move |core| {
            let (stage, clients) = (inside.clone(), clients.clone());
            async move {
                let options = OpenOptions { cache_bytes, ..OpenOptions::default() };
                let db = Db::open(&core, DIR.as_ref(), options).await.expect("it opens");
                let listener = core.listen(address()).expect("it listens");
                let server = Server::start(&core, db.attach(&core), &stage.node, listener, None);
                core.sleep_ns(10_000_000).await;
                clients(core.clone(), stage.clone()).await;
                stage.ended.set(stage.ended.get() + 1);
                while stage.ended.get() < CORES {
                    core.sleep_ns(1_000_000).await;
                }
                server.stop(1_000_000_000).await;
                core.pool().clone()
            }
        })
        .unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
    for pool in pools {
        assert_eq!(pool.used(), 0, "seed {seed}: a buffer was not released");
    }
    assert_eq!(world.open_sockets(), 0, "seed {seed}: a socket was left open");
    world.trace()
}

/// A value from a section of `INFO`.
async fn info(client: &mut Client, section: &str, name: &str) -> u64 {
    let report = text(&client.call(&["INFO", section]).await);
    let line = report.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
    line.unwrap_or_else(|| panic!("no {name} in {report}")).parse().unwrap()
}

fn value_or_null(writer: &mut Writer<'_>, value: Option<&Vec<u8>>) {
    match value {
        Some(value) => writer.bulk(value),
        None => writer.null(),
    }
}

/// Writes a random request and the model's reply.
fn random_request(
    rng: &mut Rng,
    made: &Database,
    protocol: Protocol,
    request: &mut Vec<u8>,
    expected: &mut Vec<u8>,
) {
    let model = &made.model;
    let mut writer = Writer::new(expected, protocol);
    let key = |rng: &mut Rng| {
        let mut key = made.keys[rng.index(made.keys.len())].clone();
        if rng.chance(50_000) {
            key.push(b'!');
        }
        key
    };
    let one = key(rng);
    let found = model.get(&one);
    match rng.below(16) {
        0..6 => {
            write_command(request, &[b"GET", &one]);
            value_or_null(&mut writer, found);
        }
        6 => {
            write_command(request, &[b"STRLEN", &one]);
            writer.integer(found.map_or(0, Vec::len) as i64);
        }
        7 => {
            write_command(request, &[b"GETRANGE", &one, b"2", b"-3"]);
            let value = found.map_or(&[][..], |value| value);
            writer.bulk(if value.len() >= 5 { &value[2..value.len() - 2] } else { b"" });
        }
        8 => {
            write_command(request, &[b"TYPE", &one]);
            writer.simple(if found.is_some() { "string" } else { "none" });
        }
        9 | 10 => {
            let many = if rng.chance(200_000) { 200 } else { 8 };
            let keys: Vec<Vec<u8>> = (0..1 + rng.below(many)).map(|_| key(rng)).collect();
            let mut words = vec![&b"MGET"[..]];
            words.extend(keys.iter().map(Vec::as_slice));
            write_command(request, &words);
            writer.array(keys.len());
            for key in &keys {
                value_or_null(&mut writer, model.get(key));
            }
        }
        11 => {
            let keys: Vec<Vec<u8>> = (0..1 + rng.below(90)).map(|_| key(rng)).collect();
            let mut words = vec![&b"EXISTS"[..]];
            words.extend(keys.iter().map(Vec::as_slice));
            write_command(request, &words);
            writer.integer(keys.iter().filter(|key| model.contains_key(*key)).count() as i64);
        }
        12 => {
            let (low, high) = (one.clone().min(key(rng)), key(rng));
            let start = [&b"["[..], b"("][rng.index(2)];
            let end = [&b"["[..], b"("][rng.index(2)];
            let (reverse, limit) = (rng.coin(), 1 + rng.below(300));
            let limit_text = limit.to_string();
            let (from, to) = ([start, &low].concat(), [end, &high].concat());
            let mut words = vec![b"MR.RANGE", &from[..], &to, b"LIMIT", limit_text.as_bytes()];
            if reverse {
                words.push(b"REVERSE");
            }
            write_command(request, &words);
            let inside = |key: &[u8]| {
                (key > &low[..] || (start == b"[" && key == low))
                    && (key < &high[..] || (end == b"[" && key == high))
            };
            let mut rows: Vec<_> = model.iter().filter(|(key, _)| inside(key)).collect();
            if reverse {
                rows.reverse();
            }
            rows.truncate(limit as usize);
            writer.array(2 * rows.len());
            for (key, value) in rows {
                writer.bulk(key);
                writer.bulk(value);
            }
        }
        13 => {
            let prefix = format!("user000{}", rng.below(8));
            write_command(request, &[b"KEYS", format!("{prefix}*").as_bytes()]);
            let keys: Vec<_> =
                model.keys().filter(|key| key.starts_with(prefix.as_bytes())).collect();
            writer.array(keys.len());
            keys.iter().for_each(|key| writer.bulk(key));
        }
        14 => {
            write_command(request, &[b"ECHO", &one]);
            writer.bulk(&one);
        }
        _ => {
            request.extend_from_slice(b"ping\r\n");
            writer.simple("PONG");
        }
    }
}

/// Sends a pipeline in pieces while it reads the replies, sometimes fast, sometimes slowly.
async fn pipeline(core: Core, stage: Rc<Stage>, mut rng: Rng) {
    let mut client = Client::connect(&core, &stage.world);
    let protocol = if rng.coin() { Protocol::V3 } else { Protocol::V2 };
    client.call(&["HELLO", if protocol == Protocol::V3 { "3" } else { "2" }]).await;
    let (mut request, mut expected) = (Vec::new(), Vec::new());
    for _ in 0..1 + rng.below(150) {
        random_request(&mut rng, &stage.made, protocol, &mut request, &mut expected);
    }
    let socket = client.socket.clone();
    let mut pieces = rng.fork();
    let pace = core.clone();
    let sending = core.spawn(Class::Foreground, async move {
        let mut rest = &request[..];
        while !rest.is_empty() {
            let most = [1, 30, 500, 20_000][pieces.index(4)];
            let (piece, behind) = rest.split_at(rest.len().min(most));
            rest = behind;
            socket.send(piece.to_vec()).await.0.expect("the connection is open");
            if pieces.chance(300_000) {
                pace.sleep_ns(pieces.below(2_000_000)).await;
            }
        }
    });
    let mut received = Vec::new();
    while received.len() < expected.len() {
        let (n, bytes) = client.socket.recv(received, 1 + rng.index(10_000)).await;
        received = bytes;
        assert_ne!(n.expect("the connection is open"), 0, "seed {}: closed early", stage.seed);
        let same = received[..] == expected[..received.len().min(expected.len())];
        assert!(same, "seed {}: the reply differs from the model's", stage.seed);
        if rng.chance(100_000) {
            core.sleep_ns(rng.below(5_000_000)).await;
        }
    }
    sending.await;
}

/// Clients that misbehave; their replies are not checked.
async fn nuisance(core: Core, stage: Rc<Stage>, mut rng: Rng) {
    let client = Client::connect(&core, &stage.world);
    let (mut request, mut ignored) = (Vec::new(), Vec::new());
    for _ in 0..1 + rng.below(40) {
        random_request(&mut rng, &stage.made, Protocol::V2, &mut request, &mut ignored);
    }
    for _ in 0..rng.below(3) {
        let at = rng.index(request.len());
        request[at] = rng.next_u64() as u8;
    }
    request.extend_from_slice(b"MR.RANGE - +\r\nKEYS *\r\n");
    let socket = client.socket.clone();
    let sending =
        core.spawn(Class::Foreground, async move { socket.send(request).await.0.is_ok() });
    core.sleep_ns(rng.below(20_000_000)).await;
    if rng.coin() {
        let _ = client.socket.recv(Vec::new(), 1 + rng.index(5000)).await;
    }
    client.socket.shutdown();
    sending.await;
}

fn right_replies(seed: u64) -> (u64, u64) {
    right_replies_within(seed, small())
}

fn right_replies_within(seed: u64, settings: Settings) -> (u64, u64) {
    let cache_bytes = [0, 20_000, 8 << 20][seed as usize % 3];
    stage(seed, settings, cache_bytes, |core, stage| async move {
        let mut rng = Rng::new(stage.seed ^ (core.id() as u64) << 32);
        stage.world.add_fault(Fault::new(FaultKind::Stall(0..50_000_000)).chance(20_000));
        let clients: Vec<_> = (0..6)
            .map(|number| {
                let rng = rng.fork();
                let (stage, at) = (stage.clone(), core.clone());
                if number < 4 {
                    core.spawn(Class::Foreground, pipeline(at, stage, rng))
                } else {
                    core.spawn(Class::Foreground, nuisance(at, stage, rng))
                }
            })
            .collect();
        for client in clients {
            client.await;
        }
    })
}

#[test]
fn replies_equal_the_models_under_network_faults_and_bad_neighbours() {
    for seed in seeds(12) {
        right_replies(seed);
    }
}

#[test]
fn replies_equal_the_models_with_room_for_few_replies() {
    for seed in seeds(12) {
        let unsent_total_bytes_max = [1000, 12_000, 60_000][seed as usize / 3 % 3];
        right_replies_within(seed, Settings { unsent_total_bytes_max, ..small() });
    }
}

#[test]
fn clients_that_do_not_read_hold_bounded_memory_and_are_closed_when_others_wait() {
    let settings = Settings { unsent_total_bytes_max: 60_000, ..small() };
    stage(5, settings, 8 << 20, |core, stage| async move {
        let gets: String =
            stage.made.keys.iter().map(|key| format!("GET {}\r\n", key.escape_ascii())).collect();
        let all: Vec<&[u8]> = stage.made.keys.iter().map(Vec::as_slice).collect();
        let mut get_all = Vec::new();
        write_command(&mut get_all, &[&[&b"MGET"[..]], &all[..]].concat());
        let mut greedy = Vec::new();
        for number in 0..40 {
            let client = Client::connect(&core, &stage.world);
            let request = match number % 4 {
                0 => b"MR.RANGE - +\r\n".repeat(3),
                1 => get_all.clone(),
                2 => b"SCAN 0 COUNT 10000\r\n".repeat(50),
                _ => gets.clone().into_bytes(),
            };
            let socket = client.socket.clone();
            core.spawn(Class::Foreground, async move { socket.send(request).await.0 });
            greedy.push(client);
        }
        let mut other = Client::connect(&core, &stage.world);
        for _ in 0..20 {
            core.sleep_ns(50_000_000).await;
            let unsent = info(&mut other, "clients", "clients_unsent_bytes").await;
            // For each core: its limit, the reply of the favoured connection, and for each
            // connection a small reply and one command's more.
            let most = (CORES * (60_000 + 128 * 1024 + 16_000) + 40 * CORES * 8 * 1024) as u64;
            assert!(unsent < most, "{unsent} bytes unsent, at most {most}");
        }
        // They delay a client that reads until they are closed, and no longer.
        other.send(get_all).await.unwrap();
        let Reply::Array(values) = other.reply().await.unwrap() else { panic!("no values") };
        assert_eq!(values.len(), stage.made.keys.len());
        assert!(info(&mut other, "stats", "evicted_clients").await > 0);
        for client in &greedy {
            client.socket.shutdown();
        }
    });
}

/// A read that found no memory is repeated when its turn has come, and the length of its value is
/// not known then. Such a reply was once admitted as one of no bytes.
#[test]
fn values_that_found_no_memory_at_first_are_admitted_by_their_length() {
    let settings = Settings { unsent_total_bytes_max: 20_000, ..small() };
    stage(5, settings, 0, |core, stage| async move {
        let of_key = |key: &&Vec<u8>| stage.made.model.get(*key).map_or(0, Vec::len);
        let longest = stage.made.keys.iter().max_by_key(of_key).unwrap();
        let bytes = of_key(&longest);
        assert!(bytes > 2 * Settings::REPLY_BYTES_SMALL);
        let (mut all, mut size) = (Vec::new(), core.pool().limit());
        while size >= 1024 {
            match core.pool().alloc(size) {
                Some(buffer) => all.push(buffer),
                None => size /= 2,
            }
        }
        let mut clients = Vec::new();
        for _ in 0..40 {
            let client = Client::connect(&core, &stage.world);
            let get = format!("GET {}\r\n", longest.escape_ascii()).into_bytes();
            client.socket.send(get).await.0.expect("the connection is open");
            clients.push(client);
        }
        core.sleep_ns(11_000_000_000).await;
        drop(all);
        let mut other = Client::connect(&core, &stage.world);
        for _ in 0..20 {
            core.sleep_ns(1_000_000).await;
            let unsent = info(&mut other, "clients", "clients_unsent_bytes").await;
            // Each core's limit and one reply more.
            let most = (CORES * (20_000 + bytes + Settings::REPLY_BYTES_SMALL)) as u64;
            assert!(unsent < most, "{unsent} bytes unsent, at most {most}");
        }
        for client in &clients {
            client.socket.shutdown();
        }
    });
}

/// The length of a reply of which two exceed the limit of [`scarce`].
const LONG: usize = 9000;

/// A stage where what a client does not read soon stops the node.
fn scarce<F, Fut>(seed: u64, clients: F)
where
    F: Fn(Core, Rc<Stage>) -> Fut + 'static,
    Fut: Future<Output = ()> + 'static,
{
    let settings = Settings { unsent_total_bytes_max: LONG * 3 / 2, ..small() };
    let net = NetConfig { window: 2 << 10, ..NetConfig::default() };
    stage_over(net, seed, settings, 8 << 20, clients);
}

fn ask_for_long() -> Vec<u8> {
    let mut request = Vec::new();
    write_command(&mut request, &[b"ECHO", &[b'x'; LONG]]);
    request
}

/// Clients that ask `times` times for a long reply, and do not read.
async fn hoarders(core: &Core, stage: &Stage, count: usize, times: usize) -> Vec<Client> {
    let mut clients = Vec::new();
    for _ in 0..count {
        let client = Client::connect(core, &stage.world);
        let (socket, request) = (client.socket.clone(), ask_for_long().repeat(times));
        core.spawn(Class::Foreground, async move { socket.send(request).await.0 });
        clients.push(client);
    }
    core.sleep_ns(50_000_000).await;
    clients
}

/// Gets a long reply, and returns how long that took.
async fn get_long(core: &Core, client: &mut Client) -> u64 {
    let before_ns = core.now_ns();
    client.send(ask_for_long()).await.unwrap();
    let reply = client.reply().await.expect("a client that reads is not closed");
    assert_eq!(reply.as_bytes().map(<[u8]>::len), Some(LONG));
    core.now_ns() - before_ns
}

/// Replies longer than half the limit are admitted one or two at a time. A client that had read all
/// its replies so far once waited until each client before it had been closed.
#[test]
fn a_client_that_reads_does_not_queue_after_many_that_have_not_read_yet() {
    for seed in seeds(6) {
        scarce(seed, |core, stage| async move {
            let mut reads = Client::connect(&core, &stage.world);
            reads.call(&["PING"]).await;
            let greedy = hoarders(&core, &stage, 60, 5).await;
            for round in 0..8 {
                let waited_ns = get_long(&core, &mut reads).await;
                let seed = stage.seed;
                assert!(waited_ns < 3_000_000_000, "seed {seed}, round {round}: {waited_ns} ns");
            }
            // A client that has not shown yet that it reads has its turn, too.
            get_long(&core, &mut Client::connect(&core, &stage.world)).await;
            for client in &greedy {
                client.socket.shutdown();
            }
        });
    }
}

/// The time for which a client has stood still once began when another client began to wait.
#[test]
fn clients_that_have_long_stood_still_are_closed_as_soon_as_another_waits() {
    for seed in seeds(6) {
        scarce(seed, |core, stage| async move {
            let mut greedy = Vec::new();
            for _ in 0..4 {
                // At most two on each core hold replies.
                greedy.extend(hoarders(&core, &stage, 1, 1).await);
            }
            core.sleep_ns(30_000_000_000).await;
            let mut reads = Client::connect(&core, &stage.world);
            let waited_ns = get_long(&core, &mut reads).await;
            assert!(waited_ns < 1_000_000_000, "seed {}: {waited_ns} ns", stage.seed);
        });
    }
}

/// A client that reads a little at a time once kept its memory for as long as it liked.
#[test]
fn clients_that_read_hardly_anything_are_closed_when_others_wait() {
    for seed in seeds(6) {
        scarce(seed, |core, stage| async move {
            let slow: Vec<_> = hoarders(&core, &stage, 6, 5)
                .await
                .into_iter()
                .map(|client| {
                    let core = core.clone();
                    core.clone().spawn(Class::Foreground, async move {
                        // Reads until it is closed.
                        while matches!(client.socket.recv(Vec::new(), 100).await.0, Ok(1..)) {
                            core.sleep_ns(200_000_000).await;
                        }
                    })
                })
                .collect();
            let mut reads = Client::connect(&core, &stage.world);
            let waited_ns = get_long(&core, &mut reads).await;
            assert!(waited_ns < 20_000_000_000, "seed {}: {waited_ns} ns", stage.seed);
            slow.into_iter().for_each(reactor::JoinHandle::cancel);
        });
    }
}

#[test]
fn connections_that_break_anywhere_release_everything() {
    for seed in seeds(12) {
        let net = NetConfig { reset: 20_000, accept_error: 100_000, ..NetConfig::default() };
        stage_over(net, seed, small(), 20_000, |core, stage| async move {
            let mut rng = Rng::new(stage.seed ^ (core.id() as u64) << 32);
            let clients: Vec<_> = (0..12)
                .map(|_| {
                    let client = nuisance(core.clone(), stage.clone(), rng.fork());
                    core.spawn(Class::Foreground, client)
                })
                .collect();
            core.sleep_ns(rng.below(5_000_000)).await;
            stage.world.reset_connections();
            for client in clients {
                client.await;
            }
        });
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    assert_eq!(right_replies(7), right_replies(7));
    assert_ne!(right_replies(7), right_replies(8));
}

#[test]
fn a_client_that_asks_for_everything_and_does_not_read_holds_bounded_memory_and_delays_nobody() {
    stage(3, small(), 8 << 20, |core, stage| async move {
        let mut greedy = Vec::new();
        for number in 0..8 {
            let client = Client::connect(&core, &stage.world);
            let one = ["MR.RANGE - +\r\n", "KEYS *\r\n"][number % 2].to_owned();
            let all: Vec<String> = stage
                .made
                .keys
                .iter()
                .map(|key| format!("GET {}\r\n", key.escape_ascii()))
                .collect();
            let request = if number < 4 { one.repeat(20) } else { all.concat().repeat(3) };
            let socket = client.socket.clone();
            // It ends with the socket: the server stops reading long before it has everything.
            core.spawn(Class::Foreground, async move { socket.send(request.into_bytes()).await.0 });
            greedy.push(client);
        }
        core.sleep_ns(500_000_000).await;
        let mut other = Client::connect(&core, &stage.world);
        let unsent = info(&mut other, "clients", "clients_unsent_bytes").await;
        // For each connection: its limit, and a piece or one or two reads more; the values have at
        // most 15 KB here.
        let most = (8 * CORES * (20_000 + 2 * 128 * 1024)) as u64;
        assert!(unsent > 0 && unsent < most, "{unsent} bytes unsent");
        assert!(info(&mut other, "clients", "clients_slow_readers").await > 0);
        let before = core.now_ns();
        for key in stage.made.keys.iter().take(20) {
            let reply = other.call(&["GET", std::str::from_utf8(key).unwrap()]).await;
            assert_eq!(reply.as_bytes(), stage.made.model.get(key).map(Vec::as_slice));
        }
        let each_ns = (core.now_ns() - before) / 20;
        assert!(each_ns < 5_000_000, "{each_ns} ns for a GET beside greedy clients");
        for client in &greedy {
            client.socket.shutdown();
        }
    });
}

#[test]
fn a_scan_returns_every_key_once_with_each_call_on_another_connection() {
    stage(4, small(), 8 << 20, |core, stage| async move {
        let mut rng = Rng::new(core.id() as u64);
        let mut clients: Vec<Client> =
            (0..6).map(|_| Client::connect(&core, &stage.world)).collect();
        let mut scans = vec![(String::from("0"), Vec::<Vec<u8>>::new()); 10];
        let mut done = 0;
        while done < scans.len() {
            done = 0;
            for (cursor, found) in &mut scans {
                if cursor == "0" && !found.is_empty() {
                    done += 1;
                    continue;
                }
                let client = rng.index(clients.len());
                let count = (1 + rng.below(100)).to_string();
                let mut reply = clients[client].call(&["SCAN", cursor, "COUNT", &count]).await;
                if rng.coin() {
                    // As after a lost reply: the same call again.
                    reply = clients[client].call(&["SCAN", cursor, "COUNT", &count]).await;
                }
                let Reply::Array(parts) = reply else { panic!("{reply:?}") };
                let [next, Reply::Array(keys)] = &parts[..] else { panic!("{parts:?}") };
                *cursor = text(next);
                found.extend(keys.iter().map(|key| key.as_bytes().unwrap().to_vec()));
            }
        }
        for (_, found) in scans {
            assert!(found.iter().eq(stage.made.model.keys()), "each key once, in order");
        }
        for wrong in ["12345", "9223372036854775807", "268435456000"] {
            let reply = clients[0].call(&["SCAN", wrong]).await;
            assert!(
                matches!(&reply, Reply::Error(text) if text.starts_with(b"ERR invalid cursor")),
                "{reply:?}"
            );
        }
    });
}

#[test]
fn connections_of_other_cores_are_listed_and_closed_too() {
    stage(5, small(), 8 << 20, |core, stage| async move {
        if core.id() != 0 {
            return;
        }
        let mut clients: Vec<Client> =
            (0..10).map(|_| Client::connect(&core, &stage.world)).collect();
        let mut ids = Vec::new();
        for client in &mut clients {
            ids.push(integer(&client.call(&["CLIENT", "ID"]).await));
        }
        assert!(ids.iter().any(|id| id % 2 == 0) && ids.iter().any(|id| id % 2 == 1), "{ids:?}");
        let list = text(&clients[0].call(&["CLIENT", "LIST"]).await);
        let listed: Vec<i64> =
            list.lines().map(|line| line[3..line.find(' ').unwrap()].parse().unwrap()).collect();
        let mut sorted = ids.clone();
        sorted.sort_unstable();
        assert_eq!(listed, sorted);
        for victim in 1..10 {
            let id = ids[victim].to_string();
            assert_eq!(integer(&clients[0].call(&["CLIENT", "KILL", "ID", &id]).await), 1);
            assert!(clients[victim].reply().await.is_err(), "it is closed");
        }
        assert_eq!(text(&clients[0].call(&["CLIENT", "LIST"]).await).lines().count(), 1);
        let own = ids[0].to_string();
        assert_eq!(integer(&clients[0].call(&["CLIENT", "KILL", "ID", &own]).await), 0, "spared");
        let reply = clients[0].call(&["CLIENT", "KILL", "ID", &own, "SKIPME", "no"]).await;
        assert_eq!(integer(&reply), 1, "the answer comes first");
        assert!(clients[0].reply().await.is_err(), "then it is closed");
    });
}

#[test]
fn a_pause_holds_commands_back_on_every_core_until_it_ends() {
    stage(6, small(), 8 << 20, |core, stage| async move {
        if core.id() != 0 {
            return;
        }
        let mut clients: Vec<Client> =
            (0..8).map(|_| Client::connect(&core, &stage.world)).collect();
        for client in &mut clients {
            assert_eq!(client.call(&["PING"]).await, Reply::Simple(b"PONG".to_vec()));
        }
        let before = core.now_ns();
        assert_eq!(
            clients[0].call(&["CLIENT", "PAUSE", "500"]).await,
            Reply::Simple(b"OK".to_vec())
        );
        for client in &mut clients {
            assert_eq!(client.call(&["PING"]).await, Reply::Simple(b"PONG".to_vec()));
            assert!(core.now_ns() - before >= 500_000_000);
        }
        assert!(core.now_ns() - before < 600_000_000);
        // What comes behind it in one packet is held back, too.
        let before = core.now_ns();
        clients[0].send(b"PING\r\nCLIENT PAUSE 500\r\nPING\r\n".to_vec()).await.unwrap();
        for word in ["PONG", "OK"] {
            let reply = clients[0].reply().await.unwrap();
            assert_eq!(reply, Reply::Simple(word.as_bytes().to_vec()));
            assert!(core.now_ns() - before < 100_000_000);
        }
        assert_eq!(clients[0].reply().await.unwrap(), Reply::Simple(b"PONG".to_vec()));
        assert!((500_000_000..600_000_000).contains(&(core.now_ns() - before)));
    });
}

#[test]
fn a_damaged_block_is_an_error_reply_and_the_connection_continues() {
    let errors: Rc<RefCell<(u64, u64)>> = Rc::default();
    let seen = errors.clone();
    stage(9, small(), 0, move |core, stage| {
        let seen = seen.clone();
        async move {
            if core.id() != 0 {
                return;
            }
            for (name, bytes) in &stage.made.data_bytes {
                if *bytes > 0 {
                    stage.world.rot(format!("{DIR}/{name}"), bytes / 2, 3).unwrap();
                }
            }
            let model: &Model = &stage.made.model;
            let mut client = Client::connect(&core, &stage.world);
            for key in &stage.made.keys {
                match client.call(&["GET", std::str::from_utf8(key).unwrap()]).await {
                    Reply::Error(error) => {
                        let error = String::from_utf8(error).unwrap();
                        assert!(error.starts_with("ERR ") && error.contains(".sst"), "{error}");
                        seen.borrow_mut().0 += 1;
                    }
                    reply => {
                        assert_eq!(reply.as_bytes(), model.get(key).map(Vec::as_slice));
                        seen.borrow_mut().1 += 1;
                    }
                }
            }
            let reply = client.call(&["KEYS", "*"]).await;
            assert!(matches!(reply, Reply::Error(_)), "not a list with keys missing: {reply:?}");
            stage.world.heal();
            let Reply::Array(keys) = client.call(&["KEYS", "*"]).await else { panic!() };
            assert_eq!(keys.len(), model.len());
        }
    });
    let (damaged, right) = *errors.borrow();
    assert!(damaged > 0 && right > 0, "{damaged} {right}");
}

/// Sends `ECHO` with a message of `bytes` bytes, in pieces; returns the reply.
async fn echo_large(core: &Core, world: &World, bytes: usize) -> Reply {
    let mut client = Client::connect(core, world);
    let mut request = Vec::new();
    write_command(&mut request, &[b"ECHO", &vec![b'x'; bytes]]);
    for piece in request.chunks(50_000) {
        if client.send(piece.to_vec()).await.is_err() {
            break;
        }
    }
    client.reply().await.expect("there is a reply")
}

#[test]
fn large_commands_wait_and_all_are_served_except_a_stalled_one() {
    for seed in seeds(12) {
        let settings = Settings { requests_bytes_max: 500_000, ..Settings::default() };
        stage(seed, settings, 0, |core, stage| async move {
            let world = stage.world.clone();
            // It comes first, announces as much as is allowed, and sends a part of it.
            let stalls = Client::connect(&core, &world);
            let mut part = b"*2\r\n$4\r\nECHO\r\n$400000\r\n".to_vec();
            part.resize(150_000, b'x');
            stalls.send(part).await.unwrap();
            core.sleep_ns(50_000_000).await;
            let large: Vec<_> = (0..8)
                .map(|n| {
                    let (core, world) = (core.clone(), world.clone());
                    core.clone().spawn(Class::Foreground, async move {
                        let bytes = 200_000 + 35_000 * n;
                        let reply = echo_large(&core, &world, bytes).await;
                        assert_eq!(reply.as_bytes().map(<[u8]>::len), Some(bytes));
                    })
                })
                .collect();
            for large in large {
                large.await;
            }
            // They need all the room, so the stalled command has been refused while it was in their
            // way.
            drop(stalls);
            // A command beyond the limit is refused when it is announced, with one error.
            let mut announces = Client::connect(&core, &world);
            announces.send(b"*2\r\n$4\r\nECHO\r\n$600000\r\n".to_vec()).await.unwrap();
            let reply = announces.reply().await.unwrap();
            let Reply::Error(error) = reply else { panic!("not refused: {reply:?}") };
            assert!(error.starts_with(b"ERR Protocol error: request longer than 500000 bytes"));
            assert!(announces.reply().await.is_err(), "one error, and the end");
        });
    }
}

#[test]
fn many_stalled_large_commands_delay_others_no_longer_than_one() {
    for seed in seeds(12) {
        let settings = Settings { requests_bytes_max: 500_000, ..Settings::default() };
        stage(seed, settings, 0, |core, stage| async move {
            let world = stage.world.clone();
            let mut stalling = Vec::new();
            for _ in 0..60 {
                let stalls = Client::connect(&core, &world);
                let mut part = b"*2\r\n$4\r\nECHO\r\n$400000\r\n".to_vec();
                part.resize(70_000, b'x');
                let socket = stalls.socket.clone();
                core.spawn(Class::Foreground, async move { socket.send(part).await.0 });
                stalling.push(stalls);
            }
            core.sleep_ns(50_000_000).await;
            let before = core.now_ns();
            let reply = echo_large(&core, &world, 200_000).await;
            assert_eq!(reply.as_bytes().map(<[u8]>::len), Some(200_000));
            let waited_ns = core.now_ns() - before;
            assert!(waited_ns < 30_000_000_000, "seed {}: {waited_ns} ns", stage.seed);
            for client in &stalling {
                client.socket.shutdown();
            }
        });
    }
}

//! Writes in a simulated world: several cores, connections that pipeline, a network with delays and
//! splits, a disk that is slow or fails. Every client has keys of its own, and knows the expected
//! replies from a model; some keys are shared by all.
//!
//! A failure names its seed; `MILLRACE_SEEDS=300` runs 300 of them, `MILLRACE_SEED=5` only this
//! one.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use crate::stage::{Client, DIR, Node, address, integer, seeds, text};
use kv::{Answer, Change, NodeState, Server, Settings, Shard};
use lsm::{Db, Durability, OpenOptions, WriteOptions};
use reactor::sim::{Access, Fault, FaultKind, NetConfig, Rng, SimConfig, World};
use reactor::{Class, Core};
use resp::{Decoder, DecoderLimits, Protocol, Reply, Writer, write_command};

const CORES: usize = 3;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// Limits small enough that an ordinary client reaches them.
fn small() -> Settings {
    Settings {
        reads_max: 6,
        unsent_bytes_max: 20_000,
        writes_bytes_max: 3_000,
        ..Settings::default()
    }
}

struct Stage {
    world: World,
    node: Arc<NodeState>,
    seed: u64,
    ready: Cell<bool>,
    ended: Cell<usize>,
    /// Memory in which the shard remembers which keys exist.
    known_bytes: usize,
    /// The state that the clients have left, and the sum of their increments of the shared
    /// counter.
    left: RefCell<Model>,
    added: Cell<i64>,
}

/// Serves a new database on every core while `clients` runs on every core; then opens it again and
/// compares it with the state that the clients have left, if they reported one.
fn stage<F, Fut>(seed: u64, durability: Durability, clients: F) -> (u64, u64)
where
    F: Fn(Core, Rc<Stage>) -> Fut + 'static,
    Fut: Future<Output = ()> + 'static,
{
    stage_that_knows(1 << 20, seed, durability, clients)
}

fn stage_that_knows<F, Fut>(
    known_bytes: usize,
    seed: u64,
    durability: Durability,
    clients: F,
) -> (u64, u64)
where
    F: Fn(Core, Rc<Stage>) -> Fut + 'static,
    Fut: Future<Output = ()> + 'static,
{
    let net = NetConfig { window: 8 << 10, ..NetConfig::default() };
    let world =
        World::new(seed, CORES, SimConfig { net, capacity: 100_000, ..SimConfig::default() });
    world.add_dir(DIR);
    let stage = Rc::new(Stage {
        world: world.clone(),
        node: NodeState::new(CORES, small(), Node),
        seed,
        ready: Cell::new(false),
        ended: Cell::new(0),
        known_bytes,
        left: RefCell::default(),
        added: Cell::new(0),
    });
    let clients = Rc::new(clients);
    let inside = stage.clone();
    let pools = world
        .run(move |core| {
            let (stage, clients) = (inside.clone(), clients.clone());
            async move {
                serve(&core, &stage, durability, &*clients).await;
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

thread_local! {
    /// The world runs all cores on this thread, and the database is opened by one of them.
    static OPENED: RefCell<Option<Db>> = const { RefCell::new(None) };
}

async fn serve<F, Fut>(core: &Core, stage: &Rc<Stage>, durability: Durability, clients: &F)
where
    F: Fn(Core, Rc<Stage>) -> Fut,
    Fut: Future<Output = ()>,
{
    let mut shard = None;
    if core.id() == 0 {
        let write = WriteOptions { durability, memtable_bytes: 50_000, ..WriteOptions::default() };
        let options = OpenOptions { cache_bytes: 20_000, ..OpenOptions::default() };
        let (db, writer) =
            Db::open_for_writing(core, DIR.as_ref(), options, write).await.expect("it opens");
        let owned = Shard::with_memory(core, db.attach(core), writer, 0, stage.known_bytes);
        owned.attach(&stage.node).await;
        shard = Some(owned);
        OPENED.set(Some(db));
        stage.ready.set(true);
    }
    while !stage.ready.get() {
        core.sleep_ns(1_000_000).await;
    }
    let db = OPENED.with_borrow(|db| db.clone().expect("core 0 has opened it"));
    let listener = core.listen(address()).expect("it listens");
    let server = Server::start(core, db.attach(core), &stage.node, listener, shard.clone());
    core.sleep_ns(10_000_000).await;
    clients(core.clone(), stage.clone()).await;
    stage.ended.set(stage.ended.get() + 1);
    while stage.ended.get() < CORES {
        core.sleep_ns(1_000_000).await;
    }
    server.stop(1_000_000_000).await;
    stage.ended.set(stage.ended.get() + 1);
    let Some(shard) = shard else { return };
    while stage.ended.get() < 2 * CORES {
        core.sleep_ns(1_000_000).await;
    }
    let closed = shard.close().await;
    let counted = db.keys();
    drop((db, shard));
    OPENED.set(None);
    if closed.is_ok() && !stage.left.borrow().is_empty() {
        compare(core, stage, counted).await;
    }
}

/// Compares the directory with the state that the clients have left.
async fn compare(core: &Core, stage: &Stage, counted: Option<u64>) {
    let seed = stage.seed;
    let db = Db::open(core, DIR.as_ref(), OpenOptions::default()).await.expect("it opens again");
    let reader = db.attach(core);
    let mut iter = reader.iter(0, Default::default()).unwrap();
    iter.seek_to_first().await.unwrap();
    let mut found = Model::new();
    while iter.valid() {
        found.insert(iter.key().to_vec(), iter.value().to_vec());
        iter.next().await.unwrap();
    }
    let total = found.remove(&b"total"[..]);
    let total = total.map_or(0, |total| String::from_utf8(total).unwrap().parse().unwrap());
    assert_eq!(total, stage.added.get(), "seed {seed}: the sum of all increments");
    assert!(found == *stage.left.borrow(), "seed {seed}: keys or values differ from the model's");
    let keys = found.len() as u64 + u64::from(total != 0);
    assert_eq!(counted, Some(keys), "seed {seed}: the count of keys");
}

fn bulk_or_null(writer: &mut Writer<'_>, value: Option<&Vec<u8>>) {
    match value {
        Some(value) => writer.bulk(value),
        None => writer.null(),
    }
}

/// A random command on the keys that begin with a name.
fn random_command(rng: &mut Rng, name: &str) -> Vec<Vec<u8>> {
    let key = |rng: &mut Rng| format!("{name}:{}", rng.below(12)).into_bytes();
    let one = key(rng);
    let long = rng.chance(50_000);
    let value = vec![b'a' + rng.below(26) as u8; rng.index(if long { 9000 } else { 40 })];
    let word = |text: &str| text.as_bytes().to_vec();
    match rng.below(26) {
        20 => vec![word(["RENAME", "RENAMENX"][rng.index(2)]), one, key(rng)],
        21 => vec![word("COPY"), one, key(rng)],
        22 => vec![word("COPY"), one, key(rng), word("REPLACE")],
        23 => vec![word("SETBIT"), one, word(&rng.below(400).to_string()), word("1")],
        24 => {
            let mut words = vec![word("BITOP"), one, word("XOR")];
            words.extend((0..1 + rng.below(4)).map(|_| key(rng)));
            words.swap(1, 2);
            words
        }
        25 => vec![word("BITCOUNT"), one],
        0..5 => vec![word("SET"), one, value],
        5 => vec![word("SET"), one, value, word(["NX", "XX"][rng.index(2)]), word("GET")],
        6 => vec![word("SETNX"), one, value],
        7 => vec![word("APPEND"), one, value],
        8 => vec![word("SETRANGE"), one, word(&rng.below(50).to_string()), value],
        9..12 => vec![word("INCRBY"), one, word("7")],
        12 => {
            let mut words = vec![word("DEL")];
            words.extend((0..1 + rng.below(4)).map(|_| key(rng)));
            words
        }
        13 => vec![word("GETDEL"), one],
        14 => {
            let mut words = vec![word(["MSET", "MSETNX"][rng.index(2)])];
            for _ in 0..1 + rng.below(5) {
                words.extend([key(rng), value.clone()]);
            }
            words
        }
        15 => vec![word("MGET"), one, key(rng)],
        16 => vec![word("EXISTS"), one.clone(), one],
        _ => vec![word("GET"), one],
    }
}

fn write_words(request: &mut Vec<u8>, words: &[Vec<u8>]) {
    let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
    write_command(request, &words);
}

/// The model's answer to such a command, which is applied to it.
fn answer(words: &[Vec<u8>], model: &mut Model, expected: &mut Vec<u8>) {
    let mut writer = Writer::new(expected, Protocol::V2);
    let one = words[1].clone();
    let old = model.get(&one).cloned();
    match &words[0][..] {
        b"SET" => {
            let sets = match words.get(3).map(Vec::as_slice) {
                None => true,
                Some(b"NX") => old.is_none(),
                Some(_) => old.is_some(),
            };
            match words.len() {
                3 => writer.ok(),
                _ => bulk_or_null(&mut writer, old.as_ref()),
            }
            if sets {
                model.insert(one, words[2].clone());
            }
        }
        b"SETNX" => {
            writer.integer(old.is_none().into());
            model.entry(one).or_insert(words[2].clone());
        }
        b"APPEND" => {
            let all = [old.unwrap_or_default(), words[2].clone()].concat();
            writer.integer(all.len() as i64);
            model.insert(one, all);
        }
        b"SETRANGE" => {
            let at: usize = std::str::from_utf8(&words[2]).unwrap().parse().unwrap();
            let (value, mut all) = (&words[3], old.unwrap_or_default());
            if !value.is_empty() {
                all.resize(all.len().max(at + value.len()), 0);
                all[at..at + value.len()].copy_from_slice(value);
                model.insert(one, all.clone());
            }
            writer.integer(all.len() as i64);
        }
        b"INCRBY" => {
            let number = match &old {
                None => Some(0),
                Some(text) => {
                    std::str::from_utf8(text).ok().and_then(|text| text.parse::<i64>().ok())
                }
            };
            match number {
                Some(number) => {
                    writer.integer(number + 7);
                    model.insert(one, (number + 7).to_string().into_bytes());
                }
                None => writer.error("ERR value is not an integer or out of range"),
            }
        }
        b"DEL" => {
            let removed = words[1..].iter().filter(|key| model.remove(*key).is_some()).count();
            writer.integer(removed as i64);
        }
        b"GETDEL" => bulk_or_null(&mut writer, model.remove(&one).as_ref()),
        b"MSET" | b"MSETNX" => {
            let if_none = words[0] == b"MSETNX";
            let pairs = words[1..].chunks(2);
            let sets = !if_none || pairs.clone().all(|pair| !model.contains_key(&pair[0]));
            if sets {
                model.extend(pairs.map(|pair| (pair[0].clone(), pair[1].clone())));
            }
            if if_none { writer.integer(sets.into()) } else { writer.ok() }
        }
        b"RENAME" | b"RENAMENX" => {
            let nx = words[0] == b"RENAMENX";
            match old {
                None => writer.error("ERR no such key"),
                Some(_) if nx && model.contains_key(&words[2]) => writer.integer(0),
                Some(value) => {
                    model.remove(&one);
                    model.insert(words[2].clone(), value);
                    if nx { writer.integer(1) } else { writer.ok() }
                }
            }
        }
        b"COPY" if one == words[2] => {
            writer.error("ERR source and destination objects are the same");
        }
        b"COPY" => match old {
            Some(value) if words.len() == 4 || !model.contains_key(&words[2]) => {
                model.insert(words[2].clone(), value);
                writer.integer(1);
            }
            _ => writer.integer(0),
        },
        b"SETBIT" => {
            let at: usize = std::str::from_utf8(&words[2]).unwrap().parse().unwrap();
            let mut all = old.unwrap_or_default();
            all.resize(all.len().max(at / 8 + 1), 0);
            writer.integer((all[at / 8] >> (7 - at % 8) & 1).into());
            all[at / 8] |= 0x80 >> (at % 8);
            model.insert(one, all);
        }
        b"BITOP" => {
            let mut all = Vec::new();
            for key in &words[3..] {
                let value = model.get(key).map(Vec::as_slice).unwrap_or_default();
                all.resize(all.len().max(value.len()), 0);
                all.iter_mut().zip(value).for_each(|(byte, other)| *byte ^= other);
            }
            writer.integer(all.len() as i64);
            model.remove(&words[2]);
            if !all.is_empty() {
                model.insert(words[2].clone(), all);
            }
        }
        b"BITCOUNT" => {
            let bits: u32 = old.iter().flatten().map(|byte| byte.count_ones()).sum();
            writer.integer(bits.into());
        }
        b"MGET" => {
            writer.array(words.len() - 1);
            words[1..].iter().for_each(|key| bulk_or_null(&mut writer, model.get(key)));
        }
        b"EXISTS" => {
            let there = words[1..].iter().filter(|key| model.contains_key(*key)).count();
            writer.integer(there as i64);
        }
        b"GET" => bulk_or_null(&mut writer, old.as_ref()),
        other => panic!("{}", other.escape_ascii()),
    }
}

/// Pipelines commands on keys of its own, and increments of a key that all share.
async fn pipeline(core: Core, stage: Rc<Stage>, mut rng: Rng, name: String) {
    let mut client = Client::connect(&core, &stage.world);
    let mut model = Model::new();
    for _ in 0..1 + rng.below(4) {
        let (mut request, mut expected) = (Vec::new(), Vec::new());
        for _ in 0..1 + rng.below(80) {
            let words = random_command(&mut rng, &name);
            write_words(&mut request, &words);
            answer(&words, &mut model, &mut expected);
        }
        let socket = client.socket.clone();
        let mut pieces = rng.fork();
        let sending = core.spawn(Class::Foreground, async move {
            let mut rest = &request[..];
            while !rest.is_empty() {
                let most = [1, 30, 500, 20_000][pieces.index(4)];
                let (piece, behind) = rest.split_at(rest.len().min(most));
                rest = behind;
                socket.send(piece.to_vec()).await.0.expect("the connection is open");
            }
        });
        let mut received = Vec::new();
        while received.len() < expected.len() {
            let (n, bytes) = client.socket.recv(received, 1 + rng.index(10_000)).await;
            received = bytes;
            assert_ne!(n.expect("the connection is open"), 0, "seed {}: closed early", stage.seed);
            let same = received[..] == expected[..received.len().min(expected.len())];
            assert!(
                same,
                "seed {} {name}: the reply differs from the model's: {} instead of {}",
                stage.seed,
                received.escape_ascii(),
                expected.escape_ascii()
            );
        }
        sending.await;
        let times = 1 + rng.below(30);
        let request = "INCR total\r\n".repeat(times as usize);
        client.send(request.into_bytes()).await.expect("the connection is open");
        let mut last = 0;
        for _ in 0..times {
            let total = integer(&client.reply().await.expect("there is a reply"));
            assert!(total > last, "seed {}: {total} after {last}", stage.seed);
            last = total;
        }
        stage.added.set(stage.added.get() + times as i64);
    }
    stage.left.borrow_mut().extend(model);
}

/// Sends writes on keys of its own, and disconnects.
async fn deserter(core: Core, stage: Rc<Stage>, mut rng: Rng) {
    let client = Client::connect(&core, &stage.world);
    let key = format!("deserted:{}", rng.next_u64());
    let request = format!("APPEND {key} x\r\nSET {key} y\r\nGET {key}\r\nDEL {key}\r\n").repeat(30);
    let socket = client.socket.clone();
    let sending = core
        .spawn(Class::Foreground, async move { socket.send(request.into_bytes()).await.0.is_ok() });
    core.sleep_ns(rng.below(20_000_000)).await;
    client.socket.shutdown();
    sending.await;
}

fn right_replies(seed: u64) -> (u64, u64) {
    let durability = [Durability::Process, Durability::Power][seed as usize % 2];
    stage(seed, durability, |core, stage| async move {
        let mut rng = Rng::new(stage.seed ^ (core.id() as u64) << 32);
        let stall = FaultKind::Stall(0..20_000_000);
        stage.world.add_fault(Fault::new(stall.clone()).chance(20_000));
        stage.world.add_fault(Fault::new(stall).of(Access::Write).chance(20_000));
        let clients: Vec<_> = (0..5)
            .map(|number| {
                let name = format!("{}:{number}", core.id());
                let client = pipeline(core.clone(), stage.clone(), rng.fork(), name);
                core.spawn(Class::Foreground, client)
            })
            .collect();
        for client in clients {
            client.await;
        }
    })
}

#[test]
fn replies_and_the_final_state_equal_the_models() {
    for seed in seeds(12) {
        right_replies(seed);
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    assert_eq!(right_replies(7), right_replies(7));
}

#[test]
fn connections_that_disconnect_release_everything_and_disturb_nobody() {
    for seed in seeds(12) {
        stage(seed, Durability::Process, |core, stage| async move {
            let mut rng = Rng::new(stage.seed ^ (core.id() as u64) << 32);
            let deserters: Vec<_> = (0..8)
                .map(|_| {
                    core.spawn(Class::Foreground, deserter(core.clone(), stage.clone(), rng.fork()))
                })
                .collect();
            let mut client = Client::connect(&core, &stage.world);
            let key = format!("kept:{}", core.id());
            for round in 0..20 {
                assert_eq!(integer(&client.call(&["INCR", &key]).await), round + 1);
            }
            for deserter in deserters {
                deserter.await;
            }
        });
    }
}

/// A key is read from disk for its first change; later changes must wait for that, also those of
/// other cores.
#[test]
fn changes_of_one_key_by_all_cores_are_made_one_after_another() {
    for seed in seeds(12) {
        stage(seed, Durability::Process, |core, stage| async move {
            let mut client = Client::connect(&core, &stage.world);
            let filler = "x".repeat(2000);
            for number in 0..40 {
                client.call(&["SET", &format!("filler:{}:{number}", core.id()), &filler]).await;
            }
            // All keys are in tables now, and most of them in no cache.
            let mut request = String::new();
            for number in 0..200 {
                request += &format!("APPEND shared:{} {}\r\n", number % 10, core.id());
            }
            client.send(request.into_bytes()).await.expect("the connection is open");
            for _ in 0..200 {
                integer(&client.reply().await.expect("there is a reply"));
            }
            stage.added.set(stage.added.get() + 1);
            while stage.added.get() < CORES as i64 {
                core.sleep_ns(1_000_000).await;
            }
            for number in 0..10 {
                let all = text(&client.call(&["GET", &format!("shared:{number}")]).await);
                for core in 0..CORES {
                    let name = char::from_digit(core as u32, 10).unwrap();
                    assert_eq!(all.matches(name).count(), 20, "seed {}: {all}", stage.seed);
                }
            }
        });
    }
}

#[test]
fn clearing_is_ordered_among_other_changes() {
    for seed in seeds(12) {
        clearing(seed);
    }
}

fn clearing(seed: u64) {
    stage(seed, Durability::Power, |core, stage| async move {
        if core.id() == 0 {
            return;
        }
        let stall = FaultKind::Stall(0..20_000_000);
        stage.world.add_fault(Fault::new(stall).of(Access::Write).chance(20_000));
        let mut client = Client::connect(&core, &stage.world);
        for _ in 0..10 {
            let request = "SET a 1\r\nINCR a\r\nFLUSHDB\r\nSET b 1\r\nINCR a\r\nGET b\r\nSAVE\r\n";
            client.send(request.as_bytes().to_vec()).await.expect("the connection is open");
            let mut replies = Vec::new();
            for _ in 0..7 {
                replies.push(client.reply().await.expect("there is a reply"));
            }
            // Another core does the same at the same time, so `a` may have been set or cleared in
            // between.
            let ok = Reply::Simple(b"OK".to_vec());
            assert_eq!((&replies[0], &replies[2], &replies[3], &replies[6]), (&ok, &ok, &ok, &ok));
        }
        stage.added.set(stage.added.get() + 1);
        while stage.added.get() < CORES as i64 - 1 {
            core.sleep_ns(1_000_000).await;
        }
        if core.id() == 1 {
            client.call(&["FLUSHALL"]).await;
            assert_eq!(integer(&client.call(&["DBSIZE"]).await), 0);
            client.call(&["SET", "c", "1"]).await;
            assert_eq!(integer(&client.call(&["DBSIZE"]).await), 1);
        }
    });
}

#[test]
fn a_range_is_removed_and_counted() {
    stage(3, Durability::Process, |core, stage| async move {
        if core.id() != 1 {
            return;
        }
        let mut client = Client::connect(&core, &stage.world);
        for number in 0..100 {
            client.call(&["SET", &format!("k{number:02}"), "v"]).await;
        }
        // The whole pipeline is in order.
        let request = "SET k30 new\r\nMR.DELRANGE [k20 (k40\r\nSET k25 after\r\nDBSIZE\r\n";
        client.send(request.as_bytes().to_vec()).await.expect("the connection is open");
        let mut replies = Vec::new();
        for _ in 0..4 {
            replies.push(client.reply().await.expect("there is a reply"));
        }
        assert_eq!((integer(&replies[1]), integer(&replies[3])), (20, 81));
        for (start, end, removed) in [
            ("[k20", "(k40", 1),
            ("[k20", "(k40", 0),
            ("(k40", "[k42", 2),
            ("[x", "+", 0),
            ("[b", "(a", 0),
            ("[a", "(a", 0),
            ("-", "(", 0),
            ("+", "-", 0),
            ("-", "[k00", 1),
            ("[k90", "+", 10),
        ] {
            let before = integer(&client.call(&["DBSIZE"]).await);
            let reply = client.call(&["MR.DELRANGE", start, end]).await;
            assert_eq!(integer(&reply), removed, "{start} {end}");
            assert_eq!(integer(&client.call(&["DBSIZE"]).await), before - removed);
        }
        assert_eq!(client.call(&["GET", "k41"]).await, Reply::Null);
        assert_eq!(integer(&client.call(&["SETNX", "k41", "again"]).await), 1);
        assert_eq!(text(&client.call(&["GET", "k41"]).await), "again");
        let left = integer(&client.call(&["DBSIZE"]).await);
        assert_eq!(integer(&client.call(&["MR.DELRANGE", "-", "+"]).await), left);
        assert_eq!(integer(&client.call(&["DBSIZE"]).await), 0);
        assert!(matches!(client.call(&["MR.DELRANGE", "a", "b"]).await, Reply::Error(_)));
    });
}

/// Several cores set, remove and count keys of overlapping ranges. Each key that was made is
/// counted by exactly one removal.
#[test]
fn concurrent_removals_of_ranges_count_each_key_once() {
    for seed in seeds(8) {
        let done = Rc::new(Cell::new(1));
        stage(seed, Durability::Power, move |core, stage| {
            let done = done.clone();
            async move {
                if core.id() == 0 {
                    return;
                }
                let stall = FaultKind::Stall(0..5_000_000);
                stage.world.add_fault(Fault::new(stall).of(Access::Write).chance(20_000));
                let mut client = Client::connect(&core, &stage.world);
                let mut balance = 0;
                for round in 0..60 {
                    let at = core.random_u64() % 40;
                    let key = format!("k{at:02}");
                    match core.random_u64() % 4 {
                        0 => {
                            let (start, end) = (format!("[{key}"), format!("(k{:02}", at + 15));
                            let reply = client.call(&["MR.DELRANGE", &start, &end]).await;
                            balance -= integer(&reply);
                            if round % 2 == 0 {
                                let page = client.call(&["EXISTS", &key, &key]).await;
                                assert!([0, 2].contains(&integer(&page)));
                            }
                        }
                        1 => balance -= integer(&client.call(&["DEL", &key]).await),
                        _ => balance += integer(&client.call(&["SETNX", &key, "v"]).await),
                    }
                }
                stage.added.set(stage.added.get() + balance);
                done.set(done.get() + 1);
                while done.get() < CORES {
                    core.sleep_ns(1_000_000).await;
                }
                let left = stage.added.get();
                assert_eq!(integer(&client.call(&["DBSIZE"]).await), left, "seed {}", stage.seed);
            }
        });
    }
}

#[test]
fn when_the_log_cannot_be_written_writes_fail_until_it_can_and_reads_continue() {
    for durability in [Durability::Process, Durability::Power] {
        stage(5, durability, |core, stage| async move {
            if core.id() != 1 {
                return;
            }
            let mut client = Client::connect(&core, &stage.world);
            assert_eq!(client.call(&["SET", "before", "1"]).await, Reply::Simple(b"OK".to_vec()));
            let full = Fault::new(FaultKind::Error(28)).of(Access::Write).on(".log");
            stage.world.add_fault(full);
            for command in [["SET", "k", "v"], ["SETNX", "k", "v"], ["INCRBY", "before", "1"]] {
                match client.call(&command).await {
                    Reply::Error(error) => {
                        assert!(error.starts_with(b"MISCONF "), "{}", error.escape_ascii());
                    }
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(text(&client.call(&["GET", "before"]).await), "1");
            let report = text(&client.call(&["INFO", "persistence"]).await);
            assert!(report.contains("aof_last_write_status:err\r\n"), "{report}");
            assert!(report.contains("rdb_changes_since_last_save:1\r\n"), "{report}");
            assert!(report.contains("healing:1\r\n"), "{report}");
            // Everything is in tables.
            assert_eq!(client.call(&["SAVE"]).await, Reply::Simple(b"OK".to_vec()));
            stage.world.heal();
            while let Reply::Error(_) = client.call(&["SET", "k", "v"]).await {
                core.sleep_ns(100_000_000).await;
            }
            let report = text(&client.call(&["INFO", "persistence"]).await);
            assert!(report.contains("aof_last_write_status:ok\r\n"), "{report}");
            assert!(report.contains("healing:0\r\n"), "{report}");
            assert_eq!(text(&client.call(&["GET", "before"]).await), "1");
        });
    }
}

/// Every increment that is not refused counts once, also after others that were refused; and
/// clearing frees space.
#[test]
fn a_full_disk_refuses_writes_and_their_dependents_until_there_is_space() {
    for seed in seeds(12) {
        let durability = [Durability::Process, Durability::Power][seed as usize % 2];
        let (counts, refused) = (Rc::new(RefCell::new(Vec::new())), Rc::new(Cell::new(0)));
        let (seen, refusals) = (counts.clone(), refused.clone());
        stage(seed, durability, move |core, stage| {
            let (counts, refused) = (seen.clone(), refusals.clone());
            async move {
                let mut client = Client::connect(&core, &stage.world);
                for round in 0..40 {
                    if core.id() == 0 && round == 5 {
                        // Merges free space: it must not be enough.
                        stage.world.set_capacity(Some(stage.world.used() / 4 * 3));
                    }
                    if core.id() == 0 && round == 25 {
                        stage.world.set_capacity(None);
                    }
                    let mut request = String::new();
                    for number in 0..10 {
                        let filler = "x".repeat(1000 + number * 150);
                        request += &format!(
                            "INCR shared\r\nSET filler:{}:{number} {filler}\r\n",
                            core.id()
                        );
                    }
                    client.send(request.into_bytes()).await.expect("the connection is open");
                    for _ in 0..20 {
                        match client.reply().await.expect("there is a reply") {
                            Reply::Integer(count) => counts.borrow_mut().push(count),
                            Reply::Error(error) => {
                                let text = String::from_utf8_lossy(&error);
                                assert!(text.starts_with("MISCONF "), "{text}");
                                assert!(text.contains("the disk is full"), "{text}");
                                refused.set(refused.get() + 1);
                            }
                            _ => {}
                        }
                    }
                    core.sleep_ns(50_000_000).await;
                }
                stage.added.set(stage.added.get() + 1);
                if core.id() > 0 {
                    return;
                }
                while stage.added.get() < CORES as i64 {
                    core.sleep_ns(1_000_000).await;
                }
                // Writing resumes without further action.
                while let Reply::Error(_) = client.call(&["SET", "filler", "again"]).await {
                    core.sleep_ns(100_000_000).await;
                }
                let mut counts = counts.take();
                counts.sort_unstable();
                assert!(
                    counts.iter().copied().eq(1..=counts.len() as i64),
                    "seed {seed}: {counts:?}"
                );
                let last = text(&client.call(&["GET", "shared"]).await);
                assert_eq!(last, counts.len().to_string(), "seed {seed}");
                assert_eq!(integer(&client.call(&["DBSIZE"]).await), 2 + 10 * CORES as i64);
                let report = text(&client.call(&["INFO", "persistence"]).await);
                assert!(report.contains("write_failure:\r\n"), "{report}");
            }
        });
        assert!(refused.get() > 0, "seed {seed}: nothing was refused");
    }
}

/// A cause of refusals, for a while.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    /// The disk has no space.
    Full,
    /// The log cannot be written for a while.
    LogFails,
    /// Reads of tables fail sometimes.
    TablesFail,
    /// Blocks of tables are damaged.
    Rot,
}

/// Pipelines commands on keys of its own while there is trouble, and compares each reply with the
/// model: it is the model's, or an error that says that the command was not executed. Returns the
/// state left and the number of refused commands.
async fn refused_pipeline(core: &Core, stage: &Stage, mut rng: Rng, name: &str) -> (Model, u64) {
    let seed = stage.seed;
    let mut client = Client::connect(core, &stage.world);
    let (mut model, mut refused) = (Model::new(), 0);
    for _ in 0..8 {
        let mut request = Vec::new();
        let commands: Vec<_> =
            (0..1 + rng.below(100)).map(|_| random_command(&mut rng, name)).collect();
        for (words, number) in commands.iter().zip(0..) {
            write_words(&mut request, words);
            if number % 5 == 0 {
                write_command(&mut request, &[b"ECHO", format!("{number}").as_bytes()]);
            }
        }
        let socket = client.socket.clone();
        let sending =
            core.spawn(Class::Foreground, async move { socket.send(request).await.0.is_ok() });
        for (words, number) in commands.iter().zip(0..) {
            let reply = client.reply().await.expect("there is a reply");
            let (mut after, mut expected) = (model.clone(), Vec::new());
            answer(words, &mut after, &mut expected);
            if reply == decoded(&expected) {
                model = after;
            } else {
                let said = match &reply {
                    Reply::Error(said) => String::from_utf8_lossy(said),
                    other => panic!(
                        "seed {seed} {name}: {other:?} instead of {}",
                        expected.escape_ascii()
                    ),
                };
                let cannot_read = said.starts_with("ERR ") && said.contains(".sst");
                assert!(said.starts_with("MISCONF ") || cannot_read, "seed {seed} {name}: {said}");
                refused += 1;
            }
            if number % 5 == 0 {
                let echo = client.reply().await.expect("there is a reply");
                assert_eq!(text(&echo), number.to_string(), "seed {seed} {name}: out of order");
            }
        }
        assert!(sending.await, "seed {seed} {name}: the connection is open");
        core.sleep_ns(rng.below(40_000_000)).await;
    }
    (model, refused)
}

fn tables(world: &World) -> Vec<PathBuf> {
    let mut paths = world.paths();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "sst"));
    paths
}

fn decoded(bytes: &[u8]) -> Reply {
    let mut decoder = Decoder::new(DecoderLimits::default());
    decoder.feed(bytes);
    decoder.next_reply().unwrap().expect("a whole reply")
}

/// Starts the trouble, and ends it where it can be ended.
async fn trouble(core: &Core, stage: &Stage, kind: Trouble) {
    core.sleep_ns(60_000_000).await;
    match kind {
        Trouble::Full => {
            for _ in 0..4 {
                stage.world.set_capacity(Some(stage.world.used()));
                core.sleep_ns(40_000_000).await;
                stage.world.set_capacity(None);
                core.sleep_ns(20_000_000).await;
            }
        }
        Trouble::LogFails => {
            let fault = Fault::new(FaultKind::Error(5)).of(Access::Write).on(".log").after(5);
            stage.world.add_fault(fault.times(40));
        }
        Trouble::TablesFail => {
            stage.world.add_fault(Fault::new(FaultKind::Error(5)).on(".sst").chance(300_000));
        }
        Trouble::Rot => {
            for _ in 0..10 {
                for path in tables(&stage.world) {
                    // The connection may end before.
                    let _ = stage.world.rot(&path, 1000, 3);
                }
                core.sleep_ns(40_000_000).await;
            }
        }
    }
    core.sleep_ns(100_000_000).await;
}

#[test]
fn every_command_has_its_own_reply_even_if_refused() {
    let mut refused = [0; 4];
    for seed in seeds(12) {
        let kind = [Trouble::Full, Trouble::LogFails, Trouble::TablesFail, Trouble::Rot]
            [seed as usize % 4];
        let durability = [Durability::Process, Durability::Power][seed as usize / 4 % 2];
        let count = Rc::new(Cell::new(0));
        let counted = count.clone();
        stage_that_knows(0, seed, durability, move |core, stage| {
            let counted = counted.clone();
            async move {
                let mut rng = Rng::new(stage.seed ^ (core.id() as u64) << 32);
                let clients: Vec<_> = (0..4)
                    .map(|number| {
                        let (at, stage, rng) = (core.clone(), stage.clone(), rng.fork());
                        let name = format!("{}:{number}", core.id());
                        core.spawn(Class::Foreground, async move {
                            refused_pipeline(&at, &stage, rng, &name).await
                        })
                    })
                    .collect();
                if core.id() == 1 {
                    trouble(&core, &stage, kind).await;
                }
                for client in clients {
                    let (model, refused) = client.await;
                    counted.set(counted.get() + refused);
                    // A merge that found damage may have ended all writing.
                    if matches!(kind, Trouble::Full | Trouble::LogFails) {
                        stage.left.borrow_mut().extend(model);
                    }
                }
                stage.added.set(stage.added.get() + 1);
                if core.id() == 0 {
                    while stage.added.get() < CORES as i64 {
                        core.sleep_ns(1_000_000).await;
                    }
                    stage.world.heal();
                    stage.added.set(0);
                }
            }
        });
        refused[seed as usize % 4] += count.get();
    }
    assert!(seeds(12).count() < 4 || refused.iter().all(|&count| count > 0), "{refused:?}");
}

/// A key whose old value cannot be read refuses the commands that set it, and no others.
#[test]
fn a_damaged_block_refuses_the_commands_that_need_it_and_no_others() {
    stage_that_knows(0, 8, Durability::Process, |core, stage| async move {
        if core.id() != 1 {
            return;
        }
        let mut client = Client::connect(&core, &stage.world);
        let (old, new) = ("old".repeat(700), "new".repeat(10));
        for number in 0..60 {
            client.call(&["SET", &format!("key:{number}"), &old]).await;
        }
        core.sleep_ns(100_000_000).await;
        for path in tables(&stage.world) {
            stage.world.rot(&path, 5000, 3).unwrap();
        }
        let mut request = Vec::new();
        for number in 0..60 {
            let (key, other) = (format!("key:{number}"), format!("new:{number}"));
            if number % 6 == 0 {
                let words = [&b"MSET"[..], other.as_bytes(), b"1", key.as_bytes(), new.as_bytes()];
                write_command(&mut request, &words);
            } else {
                write_command(&mut request, &[b"SET", key.as_bytes(), new.as_bytes()]);
            }
        }
        write_command(&mut request, &[b"ECHO", b"end"]);
        client.send(request).await.unwrap();
        let mut refused = Vec::new();
        for number in 0..60 {
            match client.reply().await.unwrap() {
                Reply::Simple(ok) => assert_eq!(ok, b"OK"),
                Reply::Error(said) => {
                    let said = String::from_utf8_lossy(&said);
                    assert!(said.contains(".sst"), "{said}");
                    refused.push(number);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(text(&client.reply().await.unwrap()), "end");
        assert!(!refused.is_empty() && refused.len() < 30, "{refused:?}");
        stage.world.heal();
        for number in 0..60 {
            let found = text(&client.call(&["GET", &format!("key:{number}")]).await);
            let is_old = refused.contains(&number);
            assert_eq!(found, if is_old { old.as_str() } else { &new }, "{number}");
            if number % 6 == 0 {
                let there = integer(&client.call(&["EXISTS", &format!("new:{number}")]).await);
                assert_eq!(there, i64::from(!is_old), "MSET sets all or nothing: {number}");
            }
        }
    });
}

/// The replies to commands that concern keys which they do not name.
const INSIDE: &str = "Array([Integer(1), Simple([79, 75]), Integer(1), Array([Bulk([102]), Bulk([51]), Bulk([100]), \
                      Bulk([49])]), Array([Bulk([100])]), Integer(1), Simple([79, 75]), Array([Bulk([97])]), \
                      Integer(2), Integer(1)])";

#[test]
fn commands_after_multi_are_queued_until_exec_or_discard() {
    stage(6, Durability::Process, |core, stage| async move {
        if core.id() != 1 {
            return;
        }
        let mut client = Client::connect(&core, &stage.world);
        let count = "ERR wrong number of arguments for";
        let aborted = "EXECABORT Transaction discarded because of previous errors.";
        let pipeline = [
            ("SET a 1", "OK"),
            ("MULTI", "OK"),
            ("SET a 2", "QUEUED"),
            ("INCR n", "QUEUED"),
            ("MULTI", "ERR MULTI calls can not be nested"),
            ("WATCH a", "ERR WATCH inside MULTI is not allowed"),
            ("UNWATCH", "QUEUED"),
            ("CLIENT SETNAME x", "QUEUED"),
            ("SHUTDOWN", "ERR Command not allowed inside a transaction"),
            ("SCAN 0", "ERR SCAN and RANDOMKEY are not executed inside"),
            ("FLUSHALL", "QUEUED"),
            ("SET a", count),
            ("NONSENSE", "ERR unknown command"),
            ("EXEC", aborted),
            ("GET a", "1"),
            ("CLIENT GETNAME", ""),
            ("EXEC", "ERR EXEC without MULTI"),
            ("DISCARD", "ERR DISCARD without MULTI"),
            ("MULTI x", count),
            ("SET a 3", "OK"),
            ("MULTI", "OK"),
            ("SET a 4", "QUEUED"),
            ("DISCARD", "OK"),
            ("GET a", "3"),
            ("MULTI", "OK"),
            ("DEL a", "QUEUED"),
            ("EXEC x", "EXECABORT Transaction discarded because of: wrong number of arguments"),
            ("GET a", "3"),
            ("WATCH a", "OK"),
            ("SET a 5", "OK"),
            ("UNWATCH", "OK"),
            ("MULTI", "OK"),
            ("APPEND a 6", "QUEUED"),
            ("EXEC", "Array([Integer(2)])"),
            ("MULTI", "OK"),
            ("MR.DELRANGE [a [b", "QUEUED"),
            ("MSET d 1 e 2 f 3", "QUEUED"),
            ("DEL e", "QUEUED"),
            ("MR.RANGE - + REVERSE", "QUEUED"),
            ("KEYS [d-e]", "QUEUED"),
            ("MR.DELRANGE (d +", "QUEUED"),
            ("SET a 56", "QUEUED"),
            ("MR.RANGE - + LIMIT 1 NOVALUES", "QUEUED"),
            ("DBSIZE", "QUEUED"),
            ("DEL d", "QUEUED"),
            ("EXEC", INSIDE),
            ("MULTI", "OK"),
            ("DEL a", "QUEUED"),
            ("RESET", "RESET"),
            ("GET a", "56"),
            ("WATCH a b", "OK"),
            ("SET b 1", "OK"),
            ("MULTI", "OK"),
            ("DEL a", "QUEUED"),
            ("EXEC", ""),
        ];
        let silent = "CLIENT REPLY OFF\r\nMULTI\r\nINCR n\r\nEXEC\r\nCLIENT REPLY ON\r\n";
        let skipped = "CLIENT REPLY SKIP\r\nMULTI\r\nDEL a\r\nGET a\r\nQUIT\r\nDEL a\r\n";
        let mut request: String =
            pipeline.iter().map(|(command, _)| format!("{command}\r\n")).collect();
        request += silent;
        request += skipped;
        client.send(request.into_bytes()).await.unwrap();
        let ok = [("silence", "OK"), ("DEL a", "QUEUED"), ("GET a", "QUEUED"), ("QUIT", "OK")];
        for (command, expected) in pipeline.into_iter().chain(ok) {
            let reply = client.reply().await.expect("there is a reply");
            let said = match &reply {
                Reply::Error(said) | Reply::Simple(said) => {
                    String::from_utf8_lossy(said).into_owned()
                }
                Reply::Array(_) => format!("{reply:?}"),
                other => text(other),
            };
            assert!(said.starts_with(expected), "{command}: {said} instead of {expected}");
            assert!(!expected.is_empty() || said.is_empty(), "{command}: {said}");
        }
        assert!(client.reply().await.is_err(), "it is closed");
        let mut other = Client::connect(&core, &stage.world);
        assert_eq!(text(&other.call(&["GET", "a"]).await), "56");
        assert_eq!(text(&other.call(&["GET", "n"]).await), "1");
        assert_eq!(integer(&other.call(&["DBSIZE"]).await), 3);
    });
}

/// Each command is a task while it waits for the disk. A client that wanted no replies could once
/// start any number.
#[test]
fn commands_without_replies_are_bounded_like_others() {
    let most = Rc::new(Cell::new(0));
    let seen = most.clone();
    stage(1, Durability::Process, move |core, stage| {
        let most = most.clone();
        async move {
            let (own, over) = (core.clone(), stage.clone());
            let watching = core.spawn(Class::Foreground, async move {
                while over.added.get() == 0 {
                    most.set(most.get().max(own.live_tasks()));
                    own.sleep_ns(50_000).await;
                }
            });
            if core.id() == 0 {
                let mut client = Client::connect(&core, &stage.world);
                for nth in 0..300 {
                    let key = format!("k{nth:03}");
                    assert_eq!(text(&client.call(&["SET", &key, &"x".repeat(1000)]).await), "OK");
                }
                let stall = FaultKind::Stall(1_000_000..5_000_000);
                stage.world.add_fault(Fault::new(stall).on(".sst"));
                let mut request = b"CLIENT REPLY OFF\r\n".to_vec();
                for nth in 0..2000 {
                    request.extend(format!("EXISTS k{:03}\r\n", nth * 7 % 300).bytes());
                }
                request.extend(b"CLIENT REPLY ON\r\n");
                client.send(request).await.expect("the connection is open");
                assert_eq!(text(&client.reply().await.expect("one reply")), "OK");
                stage.world.heal();
                stage.added.set(1);
            }
            watching.await;
        }
    });
    assert!(seen.get() < 100, "{} tasks at once", seen.get());
}

#[test]
fn a_pause_of_writes_holds_back_only_writes() {
    stage(6, Durability::Process, |core, stage| async move {
        if core.id() != 0 {
            return;
        }
        let mut client = Client::connect(&core, &stage.world);
        client.call(&["CLIENT", "PAUSE", "500", "WRITE"]).await;
        let before = core.now_ns();
        client.call(&["GET", "k"]).await;
        assert!(core.now_ns() - before < 100_000_000);
        client.call(&["SET", "k", "v"]).await;
        assert!(core.now_ns() - before >= 490_000_000);
    });
}

#[test]
fn a_shard_needs_no_node() {
    let world = World::new(1, 1, SimConfig::default());
    world.add_dir(DIR);
    world
        .run(|core| async move {
            let open = || {
                Db::open_for_writing(
                    &core,
                    DIR.as_ref(),
                    OpenOptions::default(),
                    WriteOptions::default(),
                )
            };
            let (db, writer) = open().await.unwrap();
            let shard = Shard::new(&core, db.attach(&core), writer);
            let mut change = Change::put(b"a", b"1");
            change.also_put(b"b", b"2");
            change.also_put(b"a", b"3");
            let unwatched = shard.change(change);
            drop(unwatched);
            assert_eq!(
                shard.change(Change::delete([&b"a"[..], b"x", b"a"])).await,
                Answer::Integer(1)
            );
            assert_eq!(db.keys(), Some(1));
            assert_eq!(shard.change(Change::sync()).await, Answer::Ok);
            shard.close().await.unwrap();
            assert!(matches!(shard.change(Change::put(b"c", b"3")).await, Answer::Failed(_)));
            drop((db, shard));
            let (db, writer) = open().await.unwrap();
            let reader = db.attach(&core);
            assert_eq!(&*reader.get(0, b"b", None).await.unwrap().unwrap(), b"2");
            assert!(reader.get(0, b"a", None).await.unwrap().is_none());
            writer.close().await.unwrap();
        })
        .unwrap();
}

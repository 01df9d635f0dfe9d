//! Crashes in the middle of the pipelines of several connections, in a simulated world: what is
//! left of each is a prefix of its commands, even where keys had to be read before they could be
//! changed.
//!
//! A failure names its seed; `MILLRACE_SEEDS=300` runs 300 of them, `MILLRACE_SEED=5` only this
//! one.

#[allow(dead_code, reason = "the other tests use all of it")]
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::stage::{Client, DIR, Node, address, seeds};
use kv::{Answer, Change, NodeState, Server, Settings, Shard};
use lsm::{Db, Durability, OpenOptions, WriteOptions, Writer};
use reactor::sim::{Crash, FailureKind, Fault, FaultKind, Rng, SimConfig, World};
use reactor::{Class, Core};
use resp::{Reply, write_command};

const CORES: usize = 2;
/// Connections of each core, and keys of each connection that are in tables at first.
const CONNECTIONS: usize = 2;
const KEYS: u64 = 60;

type Model = BTreeMap<String, String>;

/// The commands that a connection sent, and the number of replies.
struct Sent {
    name: String,
    /// The state of its keys after each of its commands; the first entry is the state before any.
    models: Vec<Model>,
    answered: usize,
}

thread_local! {
    /// The world runs all cores on this thread, and the database is opened by one of them.
    static OPENED: RefCell<Option<Db>> = const { RefCell::new(None) };
}

async fn open(core: &Core, durability: Durability) -> (Db, Writer) {
    let write = WriteOptions { durability, memtable_bytes: 100_000, ..WriteOptions::default() };
    let options = OpenOptions { cache_bytes: 0, ..OpenOptions::default() };
    Db::open_for_writing(core, DIR.as_ref(), options, write).await.expect("it opens")
}

fn names() -> impl Iterator<Item = (usize, String)> {
    (0..CORES * CONNECTIONS).map(|at| (at % CORES, format!("c{at}")))
}

/// A command on keys of a connection, which is also applied to the model.
fn command(rng: &mut Rng, name: &str, model: &mut Model) -> Vec<String> {
    let key = |rng: &mut Rng| format!("{name}:{:03}", rng.below(2 * KEYS));
    let (one, other) = (key(rng), key(rng));
    let long = if rng.chance(200_000) { 1500 } else { 20 };
    let value = format!("{:x}", rng.next_u64()).repeat(1 + rng.index(long) / 16);
    let words = |words: &[&String]| words.iter().map(|&word| word.clone()).collect::<Vec<_>>();
    let (command, rest) = match rng.below(10) {
        0..5 => {
            model.insert(one.clone(), value.clone());
            ("SET", words(&[&one, &value]))
        }
        5 => {
            model.remove(&one);
            model.remove(&other);
            ("DEL", words(&[&one, &other]))
        }
        6 => {
            model.entry(one.clone()).or_default().push_str(&value);
            ("APPEND", words(&[&one, &value]))
        }
        7 => {
            model.remove(&one);
            ("GETDEL", words(&[&one]))
        }
        8 => {
            model.entry(one.clone()).or_insert(value.clone());
            ("SETNX", words(&[&one, &value]))
        }
        _ => {
            model.insert(one.clone(), value.clone());
            model.insert(other.clone(), value.clone());
            ("MSET", words(&[&one, &value, &other, &value]))
        }
    };
    [vec![command.to_owned()], rest].concat()
}

/// Pipelines commands until it is cancelled.
async fn pipeline(core: Core, world: World, mut rng: Rng, sent: Rc<RefCell<Sent>>) {
    let mut client = Client::connect(&core, &world);
    loop {
        let mut request = Vec::new();
        let commands = 1 + rng.index(150);
        for _ in 0..commands {
            let sent = &mut *sent.borrow_mut();
            let mut model = sent.models.last().expect("there is a first one").clone();
            let words = command(&mut rng, &sent.name, &mut model);
            sent.models.push(model);
            let words: Vec<&[u8]> = words.iter().map(String::as_bytes).collect();
            write_command(&mut request, &words);
        }
        let socket = client.socket.clone();
        let sending = core.spawn(Class::Foreground, async move { socket.send(request).await.0 });
        for _ in 0..commands {
            let reply = client.reply().await.expect("there is a reply");
            assert!(!matches!(reply, Reply::Error(_)), "{reply:?}");
            sent.borrow_mut().answered += 1;
        }
        sending.await.expect("the connection is open");
    }
}

async fn serve(
    core: &Core,
    world: &World,
    node: &Arc<NodeState>,
    durability: Durability,
    sent: Vec<Rc<RefCell<Sent>>>,
) {
    let mut shard = None;
    if core.id() == 0 {
        let (db, writer) = open(core, durability).await;
        let owned = Shard::with_memory(core, db.attach(core), writer, 0, 0);
        owned.attach(node).await;
        shard = Some(owned);
        OPENED.set(Some(db));
    }
    while !OPENED.with_borrow(Option::is_some) {
        core.sleep_ns(1_000_000).await;
    }
    let db = OPENED.with_borrow(|db| db.clone().expect("core 0 has opened it"));
    let listener = core.listen(address()).expect("it listens");
    let _server = Server::start(core, db.attach(core), node, listener, shard.clone());
    core.sleep_ns(10_000_000).await;
    let mut rng = Rng::new(world.seed() ^ (core.id() as u64) << 32);
    for ((_, sent), rng) in
        names().zip(sent).filter(|((at, _), _)| *at == core.id()).map(|pair| (pair, rng.fork()))
    {
        core.spawn(Class::Foreground, pipeline(core.clone(), world.clone(), rng, sent));
    }
    core.sleep_ns(60_000_000_000).await;
}

/// Runs `main` on the first core.
fn alone<F, Fut, T>(world: &World, main: F) -> Option<T>
where
    F: Fn(Core) -> Fut,
    Fut: Future<Output = T> + 'static,
    T: 'static,
{
    let run = world.run(move |core| {
        let main = (core.id() == 0).then(|| main(core));
        async move {
            match main {
                Some(main) => Some(main.await),
                None => None,
            }
        }
    });
    match run {
        Ok(results) => results.into_iter().next().flatten(),
        Err(failure) if matches!(failure.kind, FailureKind::Crash(_)) => None,
        Err(failure) => panic!("seed {}: {failure}", world.seed()),
    }
}

/// The initial state of the connections' keys, which are in tables.
fn first_models() -> Vec<Model> {
    let keys = |name: &String| {
        (0..KEYS).map(|key| (format!("{name}:{key:03}"), "old".repeat(100))).collect()
    };
    names().map(|(_, name)| keys(&name)).collect()
}

fn fill(world: &World) {
    alone(world, |core| async move {
        let (db, writer) = open(&core, Durability::Power).await;
        let shard = Shard::new(&core, db.attach(&core), writer.clone());
        for model in first_models() {
            for (key, value) in model {
                shard.change(Change::put(key.as_bytes(), value.as_bytes())).await;
            }
        }
        // Flushes, so that the next opening finds the keys in tables.
        shard.change(Change::put(b"filler", &[7; 100_000])).await;
        shard.change(Change::delete([&b"filler"[..]])).await;
        while !writer.is_quiesced() {
            core.sleep_ns(10_000_000).await;
        }
        shard.close().await.unwrap();
    });
}

/// All keys, and the counted number of keys.
fn contents(world: &World) -> (Model, Option<u64>) {
    let found = alone(world, |core| async move {
        let db = Db::open(&core, DIR.as_ref(), OpenOptions::default()).await.expect("it opens");
        let mut iter = db.attach(&core).iter(0, Default::default()).unwrap();
        iter.seek_to_first().await.unwrap();
        let mut found = Model::new();
        while iter.valid() {
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
            found.insert(text(iter.key()), text(iter.value()));
            iter.next().await.unwrap();
        }
        (found, db.keys())
    });
    found.expect("nothing crashes")
}

fn prefixes(seed: u64) -> u64 {
    let durability = [Durability::Process, Durability::Power][seed as usize % 2];
    // At `process` a power cut may leave any subset.
    let crash = match durability {
        Durability::Power if seed % 4 == 1 => Crash::PowerCut,
        _ => Crash::Kill,
    };
    let world = World::new(seed, CORES, SimConfig { capacity: 100_000, ..SimConfig::default() });
    world.add_dir(DIR);
    fill(&world);
    world.add_fault(Fault::new(FaultKind::Stall(0..2_000_000)).on(".sst").chance(200_000));
    let sent: Vec<_> = names()
        .zip(first_models())
        .map(|((_, name), model)| {
            Rc::new(RefCell::new(Sent { name, models: vec![model], answered: 0 }))
        })
        .collect();
    let node = NodeState::new(CORES, Settings::default(), Node);
    let (inside, all) = (world.clone(), sent.clone());
    world.crash_at(crash, 300..4000);
    let run = world.run(move |core| {
        let (world, node, sent) = (inside.clone(), node.clone(), all.clone());
        async move { serve(&core, &world, &node, durability, sent).await }
    });
    match run {
        Err(failure) if matches!(failure.kind, FailureKind::Crash(_)) => {}
        Err(failure) => panic!("seed {seed}: {failure}"),
        Ok(_) => panic!("seed {seed}: no crash"),
    }
    OPENED.set(None);
    world.heal();
    let (mut found, keys) = contents(&world);
    found.remove("filler");
    assert!(keys.is_none_or(|keys| keys == found.len() as u64), "seed {seed}: the count of keys");
    let mut unanswered = 0;
    for sent in sent {
        let Sent { name, models, answered } = &*sent.borrow();
        let own = |model: &Model| -> Model {
            let own = model.iter().filter(|(key, _)| key.starts_with(&format!("{name}:")));
            own.map(|(key, value)| (key.clone(), value.clone())).collect()
        };
        let found = own(&found);
        let at = models[*answered..].iter().position(|model| *model == found);
        let Some(at) = at else {
            panic!(
                "seed {seed} {name}: {crash:?} at {durability:?} left a state that no prefix of {} commands leads to, \
                 {answered} of them answered",
                models.len() - 1
            );
        };
        unanswered += at as u64;
    }
    unanswered
}

#[test]
fn a_crash_leaves_a_prefix_of_the_commands_of_each_connection() {
    let unanswered: u64 = seeds(24).map(prefixes).sum();
    assert!(
        unanswered > 0 || seeds(24).count() < 12,
        "no crash happened between a write and its reply"
    );
}

/// Also changes that have to be read first.
#[test]
fn saving_makes_earlier_changes_durable() {
    for seed in 0..8 {
        let world = World::new(seed, CORES, SimConfig::default());
        world.add_dir(DIR);
        fill(&world);
        let saved = Rc::new(Cell::new(false));
        let (inside, noted) = (world.clone(), saved.clone());
        let run = alone(&world, move |core| {
            let (world, saved) = (inside.clone(), noted.clone());
            async move {
                let (db, writer) = open(&core, Durability::Process).await;
                let shard = Shard::with_memory(&core, db.attach(&core), writer, 0, 0);
                // One change waits for recovered writes.
                shard.change(Change::sync()).await;
                let appended = shard.change(Change::put(b"c0:007", b"new"));
                assert_eq!(shard.change(Change::sync()).await, Answer::Ok);
                saved.set(true);
                world.crash(Crash::PowerCut);
                appended.await;
                core.sleep_ns(1_000_000_000).await;
            }
        });
        assert!(run.is_none() && saved.get(), "seed {seed}");
        let (found, _) = contents(&world);
        assert_eq!(found["c0:007"], "new", "seed {seed}");
    }
}

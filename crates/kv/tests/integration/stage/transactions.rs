//! Transactions of many clients in a simulated world, with kills and power cuts: what was read and
//! written must have a serial order that agrees with what clients know of the order of time.
//!
//! Every transaction writes a number of its own, so whoever reads a key knows which transaction
//! wrote it. A transaction that is answered tells which writer of each of its keys came before it.
//! From that follow edges: writer before reader, and reader before the next writer. Clients add
//! edges from a transaction to their next one, and a crash adds edges from all answered
//! transactions to all later ones. A circle is a violation: half a transaction, a lost update, a
//! forgotten one, or a read of the middle of another one all make one.
//!
//! Transactions that only set keys read nothing. Each client has keys of its own for them, which
//! each of them sets to the same number, one more than the last. They are sent many at a time.
//! Whoever looks must see the last number in all keys; after a crash one of those that were not
//! answered, or the last one that was.
//!
//! A failure names its seed; `MILLRACE_SEEDS=300` runs 300 of them, `MILLRACE_SEED=5` only this
//! one.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::stage::{
    Client, Node, crash_once, open, opened, small_memtables, stalling_world, start, text,
};
use kv::{NodeState, Settings};
use lsm::{Db, Durability};
use reactor::sim::{Crash, FailureKind, Rng, SimConfig, World};
use reactor::{Class, Core};
use resp::{Reply, write_command};

const CORES: usize = 3;
const KEYS: usize = 4;
const CLIENTS: usize = 2;
const RUNS: u64 = 3;

/// A transaction, from its call to its answer, if it had one.
#[derive(Clone, Default)]
pub struct Executed {
    pub run: u64,
    pub client: usize,
    /// Keys read, with the number of the transaction that had written the value; 0 for none.
    pub reads: BTreeMap<usize, u64>,
    pub writes: Vec<usize>,
    pub answered: bool,
}

/// All transactions, by number, from 1 on. What was not executed is not here.
#[derive(Default)]
pub struct History(pub Vec<Option<Executed>>);

impl History {
    fn begin(&mut self, executed: Executed) -> usize {
        self.0.push(Some(executed));
        self.0.len()
    }

    /// A violation, if there is one.
    pub fn violation(&self) -> Option<String> {
        let mut seen = vec![false; self.0.len() + 1];
        for (number, executed) in self.all() {
            for (&key, &writer) in &executed.reads {
                match self.0.get(writer as usize - usize::from(writer > 0)) {
                    _ if writer == 0 => {}
                    Some(Some(from)) if from.writes.contains(&key) => seen[writer as usize] = true,
                    _ => return Some(format!("{number} read key {key} of {writer}")),
                }
            }
        }
        // What was executed: also without an answer, if somebody has seen it. Reads under a watch
        // are known before the answer.
        let executed = || self.all().filter(|(number, e)| e.answered || seen[*number]);
        // The writer after each writer of a key.
        let mut next: BTreeMap<(usize, u64), usize> = BTreeMap::new();
        for (number, executed) in executed() {
            for (&key, &writer) in &executed.reads {
                if executed.writes.contains(&key)
                    && let Some(other) = next.insert((key, writer), number)
                {
                    return Some(format!("{other} and {number} both replaced {writer}'s {key}"));
                }
            }
        }
        let mut edges: Vec<Vec<usize>> = vec![Vec::new(); self.0.len() + 1 + RUNS as usize];
        let barrier = |run: u64| self.0.len() + 1 + run as usize;
        let mut last: BTreeMap<(u64, usize), usize> = BTreeMap::new();
        for (number, executed) in executed() {
            for (&key, &writer) in &executed.reads {
                if writer > 0 {
                    edges[writer as usize].push(number);
                }
                if let Some(&after) = next.get(&(key, writer)).filter(|&&after| after != number) {
                    edges[number].push(after);
                }
            }
            if executed.run > 0 {
                edges[barrier(executed.run - 1)].push(number);
            }
            if executed.answered {
                edges[number].push(barrier(executed.run));
                if let Some(before) = last.insert((executed.run, executed.client), number) {
                    edges[before].push(number);
                }
            }
        }
        (0..RUNS - 1).for_each(|run| edges[barrier(run)].push(barrier(run + 1)));
        circle(&edges).map(|circle| {
            let name = |at: &usize| match self.0.get(at.wrapping_sub(1)) {
                Some(Some(e)) => format!("{at} (reads {:?}, writes {:?})", e.reads, e.writes),
                _ => "crash".to_owned(),
            };
            format!("no serial order: {}", circle.iter().map(name).collect::<Vec<_>>().join(" < "))
        })
    }

    fn all(&self) -> impl Iterator<Item = (usize, &Executed)> {
        self.0.iter().enumerate().filter_map(|(at, e)| Some((at + 1, e.as_ref()?)))
    }
}

/// A circle of a graph, if it has one.
fn circle(edges: &[Vec<usize>]) -> Option<Vec<usize>> {
    // 0: not visited; 1: on the path; 2: no circle begins here.
    let mut state = vec![0; edges.len()];
    for root in 0..edges.len() {
        let mut path = vec![(root, 0)];
        while let Some((at, edge)) = path.last_mut() {
            let (here, number) = (*at, *edge);
            *edge += 1;
            if number == 0 {
                match state[here] {
                    1 if path.iter().filter(|(on, _)| *on == here).count() > 1 => {
                        let begin = path.iter().position(|(on, _)| *on == here)?;
                        return Some(path[begin..].iter().map(|(on, _)| *on).collect());
                    }
                    2 => {
                        path.pop();
                        continue;
                    }
                    _ => state[here] = 1,
                }
            }
            match edges[here].get(number) {
                Some(&next) => path.push((next, 0)),
                None => {
                    state[here] = 2;
                    path.pop();
                }
            }
        }
    }
    None
}

#[derive(Default)]
struct Shared {
    history: RefCell<History>,
    opened: RefCell<Option<Db>>,
    /// The first violation that a client has seen.
    seen: RefCell<Option<String>>,
    /// Transactions that were not executed, because a watched key was written.
    conflicts: Cell<u64>,
    done: Cell<u64>,
    /// The last number that each client has had answered in its own keys, and the last one sent.
    own: RefCell<BTreeMap<usize, (u64, u64)>>,
}

fn key(number: usize) -> Vec<u8> {
    format!("key:{number}").into_bytes()
}

fn request(words: &[&[u8]]) -> Vec<u8> {
    let mut request = Vec::new();
    write_command(&mut request, words);
    request
}

/// The transaction that has written a value.
fn writer_of(reply: &Reply) -> u64 {
    match reply {
        Reply::Null => 0,
        reply => text(reply).parse().unwrap_or_else(|_| panic!("not a number: {reply:?}")),
    }
}

/// Sends requests, all at once or one by one, and returns the replies; `None` after the crash.
async fn exchange(client: &mut Client, requests: &[Vec<u8>], together: bool) -> Option<Vec<Reply>> {
    let mut replies = Vec::new();
    if together {
        client.send(requests.concat()).await.ok()?;
    }
    for request in requests {
        if !together {
            client.send(request.clone()).await.ok()?;
        }
        replies.push(client.reply().await.ok()?);
    }
    Some(replies)
}

fn elements(reply: &Reply) -> &[Reply] {
    match reply {
        Reply::Array(elements) => elements,
        other => panic!("no array: {other:?}"),
    }
}

fn own_key(client: usize, number: usize) -> Vec<u8> {
    format!("own:{client}:{number}").into_bytes()
}

/// The requests of a transaction that looks at a client's own keys.
fn look(client: usize) -> Vec<Vec<u8>> {
    let gets = (0..KEYS).map(|number| request(&[b"GET", &own_key(client, number)]));
    [request(&[b"MULTI"])].into_iter().chain(gets).chain([request(&[b"EXEC"])]).collect()
}

/// The number in all own keys; `Err` if they differ.
fn number_of(found: &Reply) -> Result<u64, String> {
    let numbers: Vec<u64> = elements(found).iter().map(writer_of).collect();
    match numbers.iter().all(|number| *number == numbers[0]) {
        true => Ok(numbers[0]),
        false => Err(format!("a transaction in parts: {numbers:?}")),
    }
}

/// Checks what a crash has left of a client's own keys; `None` after the next crash.
async fn find_own(client: &mut Client, shared: &Shared, number: usize) -> Option<()> {
    let replies = exchange(client, &look(number), true).await?;
    let (answered, sent) = shared.own.borrow().get(&number).copied().unwrap_or_default();
    let violation = match number_of(&replies[KEYS + 1]) {
        Ok(found) if (answered..=sent).contains(&found) => {
            shared.own.borrow_mut().insert(number, (found, sent));
            return Some(());
        }
        Ok(found) => format!("{found} of client {number}, not {answered} to {sent}"),
        Err(text) => text,
    };
    shared.seen.borrow_mut().get_or_insert(violation);
    None
}

/// Sends transactions that only set the client's own keys, and looks at these; `None` after the
/// crash.
async fn set_own(client: &mut Client, shared: &Shared, number: usize, rng: &mut Rng) -> Option<()> {
    let (answered, sent) = shared.own.borrow().get(&number).copied().unwrap_or_default();
    let count = 1 + rng.below(4);
    shared.own.borrow_mut().insert(number, (answered, sent + count));
    let mut requests = Vec::new();
    for value in sent + 1..=sent + count {
        let value = value.to_string().into_bytes();
        requests.push(request(&[b"MULTI"]));
        let sets = (0..KEYS).map(|key| request(&[b"SET", &own_key(number, key), &value]));
        requests.extend(sets);
        requests.push(request(&[b"EXEC"]));
    }
    requests.extend(look(number));
    let replies = exchange(client, &requests, rng.below(4) > 0).await?;
    let ok = Reply::Simple(b"OK".to_vec());
    for replies in replies.chunks(KEYS + 2).take(count as usize) {
        assert!(replies[0] == ok && *elements(&replies[KEYS + 1]) == vec![ok.clone(); KEYS]);
    }
    let found = replies.last().map(number_of);
    if found != Some(Ok(sent + count)) {
        let text = format!("client {number} has set {} and sees {found:?}", sent + count);
        shared.seen.borrow_mut().get_or_insert(text);
    }
    shared.own.borrow_mut().insert(number, (sent + count, sent + count));
    shared.done.set(shared.done.get() + count);
    Some(())
}

/// Sends transactions until the world ends.
async fn client(
    core: Core,
    world: World,
    shared: Rc<Shared>,
    run: u64,
    number: usize,
    mut rng: Rng,
) {
    let mut client = Client::connect(&core, &world);
    if find_own(&mut client, &shared, number).await.is_none() {
        return;
    }
    for _ in 0..40 {
        if rng.below(4) == 0 {
            if set_own(&mut client, &shared, number, &mut rng).await.is_none() {
                return;
            }
            continue;
        }
        let keys: Vec<usize> = (0..KEYS).filter(|_| rng.coin()).collect();
        let writes: Vec<usize> = keys.iter().copied().filter(|_| rng.below(4) > 0).collect();
        let together = rng.coin();
        let watches = rng.coin() && !writes.is_empty();
        let mut executed =
            Executed { run, client: number, writes: writes.clone(), ..Executed::default() };
        if watches {
            // Reads, and writes if nobody has written meanwhile. Some read in the same packet.
            let names: Vec<Vec<u8>> = keys.iter().map(|&number| key(number)).collect();
            let mut watch: Vec<&[u8]> = vec![b"WATCH"];
            watch.extend(names.iter().map(|name| &name[..]));
            let mut ahead = vec![request(&watch)];
            ahead.extend(names.iter().map(|name| request(&[b"GET", name])));
            let Some(replies) = exchange(&mut client, &ahead, together).await else { return };
            assert_eq!(replies[0], Reply::Simple(b"OK".to_vec()));
            let read = keys.iter().copied().zip(replies[1..].iter().map(writer_of));
            executed.reads = read.collect();
            if rng.below(4) == 0 {
                core.sleep_ns(rng.below(2_000_000)).await;
            }
        }
        let at = shared.history.borrow_mut().begin(executed.clone());
        let value = at.to_string().into_bytes();
        let mut requests = vec![request(&[b"MULTI"])];
        for &number in &keys {
            let name = key(number);
            requests.push(match (writes.contains(&number), watches) {
                (true, true) => request(&[b"SET", &name, &value]),
                (true, false) => request(&[b"GETSET", &name, &value]),
                (false, _) => request(&[b"GET", &name]),
            });
        }
        // A command that concerns all keys.
        if rng.below(6) == 0 {
            requests.push(request(&[b"DBSIZE"]));
        }
        requests.push(request(&[b"EXEC"]));
        let replies = exchange(&mut client, &requests, together).await;
        // Without an answer nothing is known of its reads, unless they were made before.
        let Some(replies) = replies else { return };
        let last = replies.last().expect("there is a reply to EXEC");
        let mut history = shared.history.borrow_mut();
        if watches && *last == Reply::Null {
            history.0[at - 1] = None;
            shared.conflicts.set(shared.conflicts.get() + 1);
            continue;
        }
        let found = elements(last);
        for (&number, reply) in keys.iter().zip(found) {
            if !watches || !writes.contains(&number) {
                let writer = writer_of(reply);
                let before = executed.reads.insert(number, writer);
                if before.is_some_and(|before| before != writer) {
                    let text = format!("{at}: key {number} has changed under a watch");
                    shared.seen.borrow_mut().get_or_insert(text);
                }
            }
        }
        executed.answered = true;
        history.0[at - 1] = Some(executed);
        shared.done.set(shared.done.get() + 1);
    }
}

async fn serve(core: Core, world: World, shared: Rc<Shared>, run: u64, durability: Durability) {
    let (id, seed) = (core.id(), world.seed());
    let node = NODE.with_borrow(|node| node.clone().expect("it was made"));
    let mut shard = None;
    if id == 0 {
        let (db, owned) = open(&core, small_memtables(durability)).await;
        owned.attach(&node).await;
        shard = Some(owned);
        shared.opened.replace(Some(db));
    }
    let db = opened(&core, &shared.opened).await;
    let _server = start(&core, &db, &node, shard).await;
    let mut rng = Rng::new(seed ^ run << 20 ^ (id as u64) << 32);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let number = id * CLIENTS + number;
            let client =
                client(core.clone(), world.clone(), shared.clone(), run, number, rng.fork());
            core.spawn(Class::Foreground, client)
        })
        .collect();
    for client in clients {
        client.await;
    }
    // All clients of all cores have ended when the crash has not come before.
    core.sleep_ns(1_000_000_000).await;
    world.crash(Crash::Kill);
    core.sleep_ns(u64::MAX / 4).await;
}

thread_local! {
    /// The world runs all cores on this thread.
    static NODE: RefCell<Option<std::sync::Arc<NodeState>>> = const { RefCell::new(None) };
}

/// Runs a few processes, each until it is killed or loses power. Returns a violation, if there was
/// one, and the numbers of transactions executed and of conflicts.
pub fn transactions(seed: u64) -> (Option<String>, u64, u64) {
    let mut rng = Rng::new(seed ^ 0x7A);
    let world = stalling_world(seed, CORES, SimConfig::default(), 3_000_000, 100_000);
    let shared: Rc<Shared> = Rc::default();
    let durability = [Durability::Process, Durability::Power][seed as usize % 2];
    for run in 0..RUNS {
        crash_once(&world, &mut rng, durability, 200..6000);
        NODE.set(Some(NodeState::new(CORES, Settings::default(), Node)));
        let (inside, all) = (world.clone(), shared.clone());
        let ended =
            world.run(move |core| serve(core, inside.clone(), all.clone(), run, durability));
        match ended {
            Err(failure) if matches!(failure.kind, FailureKind::Crash(_)) => {}
            Err(failure) => panic!("seed {seed}: {failure}"),
            Ok(_) => panic!("seed {seed}: no crash"),
        }
        shared.opened.replace(None);
        NODE.set(None);
    }
    let violation = shared.seen.take().or_else(|| shared.history.borrow().violation());
    (violation, shared.done.get(), shared.conflicts.get())
}

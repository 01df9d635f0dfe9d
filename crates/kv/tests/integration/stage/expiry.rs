//! The scenario of expiry: clients give keys values and deadlines, look at them, and the node is
//! killed or loses power at any completion.
//!
//! Each client has a key of its own and few values, so a value is often written again as it was: a
//! record of an old deadline must not be taken for that of the new value. A client knows in which
//! states its key may be. Whatever it sees must be one of them: a key past its deadline is missing,
//! before its deadline it is there, and so is one without a deadline.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use kv::{NodeState, Settings};
use lsm::{Db, Durability};
use reactor::sim::{Crash, FailureKind, Rng, SimConfig, World};
use reactor::{Class, Core};
use resp::Reply;

use crate::stage::{
    Client, Node, crash_once, integer, open, small_memtables, stalling_world, start,
};

const CLIENTS: usize = 4;
const RUNS: u64 = 5;
const SHORT_RUNS: u64 = 20;

/// A value, and when it ends.
type State = Option<(String, Option<u64>)>;

#[derive(Clone, Debug)]
enum Step {
    Set(String),
    SetUntil(String, u64),
    SetKeeping(String),
    Expire(u64),
    GetUntil(u64),
    Persist,
    Delete,
}

impl Step {
    fn any(rng: &mut Rng, now_ms: u64) -> Self {
        let value = format!("v{}", rng.below(2));
        let until = now_ms + if rng.below(4) == 0 { 100_000 } else { 1 + rng.below(25) };
        match rng.below(12) {
            0..3 => Self::Set(value),
            3..6 => Self::SetUntil(value, until),
            6 => Self::SetKeeping(value),
            7..9 => Self::Expire(until),
            9 => Self::GetUntil(until),
            10 => Self::Persist,
            _ => Self::Delete,
        }
    }

    fn words(&self, key: &str) -> Vec<String> {
        let all = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        match self {
            Self::Set(value) => all(&["SET", key, value]),
            Self::SetUntil(value, until) => all(&["SET", key, value, "PXAT", &until.to_string()]),
            Self::SetKeeping(value) => all(&["SET", key, value, "KEEPTTL"]),
            Self::Expire(until) => all(&["PEXPIREAT", key, &until.to_string()]),
            Self::GetUntil(until) => all(&["GETEX", key, "PXAT", &until.to_string()]),
            Self::Persist => all(&["PERSIST", key]),
            Self::Delete => all(&["DEL", key]),
        }
    }

    /// What it leaves of a key.
    fn apply(&self, state: &State) -> State {
        match self {
            Self::Set(value) => Some((value.clone(), None)),
            Self::SetUntil(value, until) => Some((value.clone(), Some(*until))),
            Self::SetKeeping(value) => {
                Some((value.clone(), state.as_ref().and_then(|(_, end)| *end)))
            }
            Self::Expire(until) | Self::GetUntil(until) => {
                state.as_ref().map(|(value, _)| (value.clone(), Some(*until)))
            }
            Self::Persist => state.as_ref().map(|(value, _)| (value.clone(), None)),
            Self::Delete => None,
        }
    }
}

/// What a state may be between two moments: as it is, missing because it has ended, or either.
fn seen(state: &State, from_ms: u64, to_ms: u64) -> Vec<State> {
    match state {
        Some((_, Some(end))) if *end < from_ms => vec![None],
        Some((_, Some(end))) if *end < to_ms => vec![state.clone(), None],
        state => vec![state.clone()],
    }
}

#[derive(Default)]
struct Shared {
    opened: RefCell<Option<Db>>,
    /// The states in which each key may be.
    states: RefCell<Vec<Vec<State>>>,
    violation: RefCell<Option<String>>,
    looks: RefCell<[u64; 2]>,
}

async fn client(core: Core, world: World, shared: Rc<Shared>, number: usize, mut rng: Rng) {
    let mut client = Client::connect(&core, &world);
    let key = format!("key{number}");
    loop {
        // Look first: after a crash it is not known whether the last step was made.
        let from_ms = core.unix_time_ms();
        let end = integer(&client.call(&["PEXPIRETIME", &key]).await);
        let between_ms = core.unix_time_ms();
        let value = client.call(&["GET", &key]).await;
        let to_ms = core.unix_time_ms();
        let shows = |state: &State| {
            let has_end = |state: &State| match state {
                None => end == -2,
                Some((_, None)) => end == -1,
                Some((_, Some(until))) => end == *until as i64,
            };
            let has_value = |state: &State| match state {
                None => value == Reply::Null,
                Some((text, _)) => value.as_bytes() == Some(text.as_bytes()),
            };
            seen(state, from_ms, between_ms + 1).iter().any(has_end)
                && seen(state, between_ms, to_ms + 1).iter().any(has_value)
        };
        let before = shared.states.borrow()[number].clone();
        let left: Vec<State> = before.iter().filter(|state| shows(state)).cloned().collect();
        if left.is_empty() {
            let text = format!("{key} at {from_ms}..{to_ms}: {end} {value:?}, not {before:?}");
            shared.violation.borrow_mut().get_or_insert(text);
            return;
        }
        shared.looks.borrow_mut()[usize::from(value == Reply::Null)] += 1;
        let from_ms = core.unix_time_ms();
        let step = Step::any(&mut rng, from_ms);
        // How long it takes is not known before it is answered.
        let after = |to_ms: u64| -> Vec<State> {
            let known = left.iter().flat_map(|state| seen(state, from_ms, to_ms));
            known.map(|state| step.apply(&state)).collect()
        };
        let mut either = left.clone();
        either.extend(after(u64::MAX));
        shared.states.borrow_mut()[number] = either;
        let words = step.words(&key);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let reply = client.call(&words).await;
        if matches!(reply, Reply::Error(_)) {
            let text = format!("{key}: {words:?}: {reply:?}");
            shared.violation.borrow_mut().get_or_insert(text);
            return;
        }
        shared.states.borrow_mut()[number] = after(core.unix_time_ms() + 1);
        core.sleep_ns(rng.below(12_000_000)).await;
    }
}

async fn serve(core: Core, world: World, shared: Rc<Shared>, run: u64, durability: Durability) {
    let node: Arc<NodeState> = NodeState::new(1, Settings::default(), Node);
    let write = small_memtables(durability);
    let (db, owned) = open(&core, write).await;
    owned.open_deadlines().await.expect("the deadlines open");
    owned.attach(&node).await;
    let _server = start(&core, &db, &node, Some(owned)).await;
    shared.opened.replace(Some(db));
    let mut rng = Rng::new(world.seed() ^ run << 20);
    for number in 0..CLIENTS {
        let one = client(core.clone(), world.clone(), shared.clone(), number, rng.fork());
        core.spawn(Class::Foreground, one);
    }
    core.sleep_ns(2_000_000_000).await;
    world.crash(Crash::Kill);
    core.sleep_ns(u64::MAX / 4).await;
}

/// Runs a few processes, each until it is killed or loses power. Returns a violation, if there was
/// one, and how often keys were there and missing.
pub fn expiry(seed: u64) -> (Option<String>, [u64; 2]) {
    processes(seed, RUNS, 200..4000)
}

/// The same with many short processes: values live through several crashes, and a process ends
/// between a record and its value, or after its first value.
pub fn short_expiry(seed: u64) -> (Option<String>, [u64; 2]) {
    let last = [300, 700][seed as usize / 2 % 2];
    processes(seed, SHORT_RUNS, 1..last)
}

fn processes(seed: u64, runs: u64, crash_at: Range<u64>) -> (Option<String>, [u64; 2]) {
    let mut rng = Rng::new(seed ^ 0xE0);
    let world = stalling_world(seed, 1, SimConfig::default(), 3_000_000, 100_000);
    let shared: Rc<Shared> = Rc::default();
    shared.states.replace(vec![vec![None]; CLIENTS]);
    let durability = [Durability::Process, Durability::Power][seed as usize % 2];
    for run in 0..runs {
        crash_once(&world, &mut rng, durability, crash_at.clone());
        let (inside, all) = (world.clone(), shared.clone());
        let ended =
            world.run(move |core| serve(core, inside.clone(), all.clone(), run, durability));
        match ended {
            Err(failure) if matches!(failure.kind, FailureKind::Crash(_)) => {}
            Err(failure) => panic!("seed {seed}: {failure}"),
            Ok(_) => panic!("seed {seed}: no crash"),
        }
        shared.opened.replace(None);
        if shared.violation.borrow().is_some() {
            break;
        }
    }
    (shared.violation.take(), *shared.looks.borrow())
}

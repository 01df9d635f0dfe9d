//! The writing side of a database: one core owns it, and puts the changes of all cores in order.
//!
//! 1. A change arrives, from a connection of this core or through the shard's mailbox
//!    (`writes.rs`), with others of the same connection. What it has to know of its keys is looked
//!    for in the overlay (what has been written and readers do not see yet), in what is known of
//!    keys that have been changed lately (`known.rs`), and in what the engine has in memory.
//! 2. Known: the change is made at once: its batch goes to the engine in order, small ones of a
//!    turn together, and the overlay notes what it leaves. So a thousand increments of one key in a
//!    row go out in one group.
//! 3. Not known, or somebody waits for one of the keys, or something of the same connection waits:
//!    the change queues up at all its keys, reads when it is first at each of them, and is made
//!    when nothing of its connection is before it any more (`turns.rs`). So a connection's changes
//!    read at the same time and are made one after the other.
//! 4. The engine says that a batch is durable and visible: its answer is ready. An answer that
//!    needed no write waits for all writes before it, as it may tell of them. When all commands of
//!    a parcel have theirs, they go back.
//!
//! What must hold: changes of one key and those of one connection are made in the order in which
//! they came; what an answer tells is durable; the engine's count of keys is told by how many each
//! batch changes it, where it counts; after a write has failed every change is refused; one that is
//! refused for want of space takes with it all that was built on it; each command has one answer,
//! and where a key of a change cannot be read, only the commands that name it are refused.
//! Everything here belongs to the owner's core.
//!
//! Not here: bounds on what waits. Who hands changes over holds them back (`writes.rs`); the shard
//! only sees to it that changes which build long values from short orders do not do so all at once.

pub(crate) mod change;
pub(crate) mod known;
pub(crate) mod long_double;
pub(crate) mod modify;
pub(crate) mod overlay;
pub(crate) mod turns;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use lsm::{BatchWriter, Reader, Writer, Written};
use reactor::mailbox::{Scheduled, mailbox};
use reactor::{Class, Core, JoinHandle};
use twox_hash::XxHash3_128;

use crate::command::spec::CommandId;
use crate::core::shared::{Posters, Shared};
use crate::core::state::FAMILY;
use crate::core::writes::{Answered, PARCELS_MAX, Parcel, Run, Slot};
use crate::read::small::error_text;
use crate::shard::change::{Answer, Change, Kind, Need, VALUE_BYTES_MAX, entries};
use crate::shard::known::{Fingerprint, Known};
use crate::shard::modify::{Old, Write};
use crate::shard::overlay::{Key, Newest, Overlay, Ticket};
use crate::shard::turns::{Connection, Turns};

/// Keys of one change that are read at once: each takes memory meanwhile.
const READ_TOGETHER: usize = 256;
/// Largest batch of the engine.
const BATCH_BYTES_MAX: usize = 256 << 20;
/// A change of up to so many bytes goes to the engine together with others.
const GATHERED_EACH_BYTES: usize = 1024;
/// Bytes of changes that go to the engine without waiting for more.
const GATHERED_BYTES: usize = 64 * 1024;
/// Longest value that the overlay keeps for the next change of its key.
const KEPT_BYTES_MAX: usize = 1024;
/// Bytes of values built here and not yet written at which the next one waits, at most.
const BUILT_BYTES_MAX: usize = 64 << 20;
/// How long changes are still made after the end has begun, and what the others are answered.
const CLOSE_NS: u64 = 5_000_000_000;
const CLOSED: &str = "ERR the node is shutting down";
/// Bytes for remembering which keys are there, where nobody says how many.
const KNOWN_BYTES: usize = 1 << 20;
/// Bytes of values that have been read for changes whose turn has not come.
const AHEAD_BYTES_MAX: usize = 16 << 20;
/// Changes whose turn comes one after the other that are made in one go.
const MADE_PER_TURN: usize = 256;
/// Whoever calls the shard itself.
const CALLER: Connection = 0;
/// Parcels taken from the mailbox in one go.
const PARCELS_PER_TURN: usize = 256;
/// Changes that are made in tasks of their own at once, because they read something.
const MAKING_MAX: usize = 4096;

/// The writing side of a database, on the core that owns it; see the module text. Clones are the
/// same.
///
/// A node attaches it to its [`Shared`]; without a node, [`Shard::change`] makes single changes
/// with the same rules and the same exact count:
///
/// ```text
/// let (db, writer) = Db::open_for_writing(&core, path, options, write_options).await?;
/// let shard = Shard::new(&core, db.attach(&core), writer);
/// let answer = shard.change(Change::put(b"key", b"value")).await;
/// shard.close().await?;
/// ```
#[derive(Clone)]
pub struct Shard(Rc<Inner>);

struct Inner {
    core: Core,
    reader: Reader,
    writer: Writer,
    overlay: RefCell<Overlay<Job>>,
    known: RefCell<Known>,
    /// Of all hashes of keys, so that clients cannot choose keys of the same.
    seed: u64,
    /// Small changes made in this turn, which go to the engine as one batch at its end.
    gathered: RefCell<Gathered>,
    /// What has been handed to the engine, or waits for what has, in order.
    flights: RefCell<VecDeque<Flight>>,
    /// The last ticket given out, and the last whose write has landed.
    ticket: Cell<Ticket>,
    landed: Cell<Ticket>,
    /// Who waits for something to land.
    watchers: RefCell<Vec<Waker>>,
    /// Wakes the task that waits for the first flight.
    lander: RefCell<Option<Waker>>,
    /// Changes that wait in queues of keys and of connections.
    jobs: Cell<usize>,
    turns: RefCell<Turns<Job>>,
    /// Tasks that read for them and make them, and those whose turn has come at all their keys and
    /// that have no task yet.
    making: Cell<usize>,
    due: RefCell<VecDeque<Rc<Job>>>,
    /// Bytes of values built here and not yet written, or about to be built; beyond the most the
    /// next one waits.
    built_bytes: Cell<usize>,
    built_bytes_max: Cell<usize>,
    /// Longest value that is built.
    value_bytes_max: Cell<usize>,
    ahead_bytes: Cell<usize>,
    /// Answers for other cores, by core, and the way there.
    outbox: RefCell<Vec<Answered>>,
    posters: OnceCell<Posters>,
    /// A change of all keys is being made: those behind it wait here.
    clearing: Cell<bool>,
    held: RefCell<VecDeque<(Change, Place)>>,
    failed: RefCell<Option<Box<str>>>,
    /// Times that something was not written which the overlay had told of.
    refusals: Cell<u64>,
    stats: Cell<ShardStats>,
    /// Writes landed since the last sync, and when that was.
    unsaved: Cell<u64>,
    saved_ms: Cell<u64>,
    /// Whether the last sync, and the last write, failed.
    save_failed: Cell<bool>,
    write_failed: Cell<bool>,
    tasks: RefCell<Vec<JoinHandle<()>>>,
}

/// Counters of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardStats {
    /// Changes made or refused.
    pub changes: u64,
    /// Of these, changes that wrote something.
    pub written: u64,
    /// Changes that had to wait for a read or for another change.
    pub waited: u64,
    /// Of those that wrote something, the ones since everything was last made to survive a power
    /// cut.
    pub unsaved: u64,
    /// Whether the last `SAVE` failed.
    pub save_failed: bool,
    /// Whether the last write was refused by the engine.
    pub write_failed: bool,
}

/// A change that waits at its keys and for those before it of its connection.
struct Job {
    change: RefCell<Option<(Change, Place)>>,
    connection: Connection,
    /// Each once.
    keys: Vec<Box<[u8]>>,
    /// Of the keys, those where another is before it.
    behind: Cell<usize>,
    /// It has looked what is there, and only its connection is in its way.
    is_ready: Cell<bool>,
    ahead: Cell<Option<Ahead>>,
}

/// What was there before a change whose turn has not come.
struct Ahead {
    old: Vec<Old>,
    /// Of its values.
    bytes: usize,
    /// How many there had been: a later one may have taken back what it knows.
    refusals: u64,
}

/// Changes that have been made.
struct Flight {
    /// `None`: nothing was to be written.
    written: Option<(Ticket, Written, Vec<Key>)>,
    built_bytes: usize,
    answers: Vec<(Place, Answer)>,
}

/// Changes that have been made and not yet handed to the engine.
#[derive(Default)]
struct Gathered {
    batch: BatchWriter,
    /// By how many they change the number of keys.
    delta: i64,
    keys: Vec<Key>,
    built_bytes: usize,
    answers: Vec<(Place, Answer)>,
}

/// Where an answer belongs: which commands of a parcel get it.
struct Place {
    answers: Rc<Answers>,
    at: u32,
    commands: u32,
    command: Option<CommandId>,
}

/// The answers to the commands of one parcel.
struct Answers {
    to: Origin,
    connection: Connection,
    /// Commands that have none yet.
    left: Cell<u32>,
    /// As they come; nearly always in the order of the commands.
    runs: RefCell<Vec<Run>>,
}

/// Where a parcel came from.
pub(crate) enum Origin {
    Here(Rc<Slot>),
    Core { core: usize, number: u32 },
}

/// How far the knowledge of a change's keys has come.
enum Knowledge {
    All(Vec<Old>),
    /// These keys have to be read.
    Not(Vec<Old>),
    /// A write must land first.
    After(Ticket),
    Failed(lsm::Error),
}

impl Shard {
    /// Takes over the writing end of a database. The core is the one that opened it.
    pub fn new(core: &Core, reader: Reader, writer: Writer) -> Self {
        Self::with_memory(core, reader, writer, KNOWN_BYTES)
    }

    /// The same, with so many bytes for remembering which keys are there. A change whose key is
    /// remembered reads nothing.
    pub fn with_memory(core: &Core, reader: Reader, writer: Writer, known_bytes: usize) -> Self {
        let is_empty = reader.db().keys() == Some(0);
        let inner = Rc::new(Inner {
            core: core.clone(),
            reader,
            writer,
            overlay: RefCell::default(),
            known: RefCell::new(Known::new(known_bytes, is_empty)),
            seed: core.random_u64(),
            gathered: RefCell::default(),
            flights: RefCell::default(),
            ticket: Cell::new(0),
            landed: Cell::new(0),
            watchers: RefCell::default(),
            lander: RefCell::default(),
            jobs: Cell::new(0),
            turns: RefCell::default(),
            making: Cell::new(0),
            due: RefCell::default(),
            built_bytes: Cell::new(0),
            built_bytes_max: Cell::new(BUILT_BYTES_MAX),
            value_bytes_max: Cell::new(VALUE_BYTES_MAX),
            ahead_bytes: Cell::new(0),
            outbox: RefCell::new((0..core.cores()).map(|_| Vec::new()).collect()),
            posters: OnceCell::new(),
            clearing: Cell::new(false),
            held: RefCell::default(),
            failed: RefCell::default(),
            refusals: Cell::new(0),
            stats: Cell::default(),
            unsaved: Cell::new(0),
            save_failed: Cell::new(false),
            write_failed: Cell::new(false),
            saved_ms: Cell::new(core.unix_time_ms()),
            tasks: RefCell::default(),
        });
        let lander = core.spawn(Class::Foreground, land_all(inner.clone()));
        inner.tasks.borrow_mut().push(lander);
        Self(inner)
    }

    /// Opens the shard to the connections of all cores. Suspends for a turn or two.
    pub async fn attach(&self, shared: &Arc<Shared>) {
        let inner = self.0.clone();
        inner.posters.get_or_init(|| Posters::new(shared));
        let settings = shared.settings();
        inner.value_bytes_max.set(settings.value_bytes_max());
        inner.built_bytes_max.set(settings.writes_bytes_max.min(BUILT_BYTES_MAX));
        let (posting, mut owner) = mailbox(PARCELS_MAX);
        let (door, owner_core) = (shared.clone(), self.0.core.id());
        let task = self.0.core.spawn(Class::Foreground, async move {
            poll_fn(|cx| {
                // The same task has the same waker every time, so the first is good for ever.
                door.open_shard(owner_core, &posting, cx.waker());
                let more = owner.take(PARCELS_PER_TURN, &mut |parcel: Parcel| {
                    let origin = Origin::Core { core: parcel.core, number: parcel.number };
                    inner.accept(parcel.connection, parcel.changes, origin);
                });
                inner.end_turn();
                if more == Scheduled::Yes {
                    cx.waker().wake_by_ref();
                }
                Poll::<()>::Pending
            })
            .await;
        });
        self.0.tasks.borrow_mut().push(task);
        while !shared.is_writable() {
            self.0.core.yield_now().await;
        }
    }

    /// Makes a change: suspends until it is as durable as the database was opened for, and visible.
    /// The change is made also when nobody waits for its answer any more; changes are made in
    /// the order of the calls.
    pub fn change(&self, change: Change) -> impl Future<Output = Answer> + use<> {
        let slot = Rc::new(Slot::default());
        self.accept(CALLER, vec![change], &slot);
        async move {
            let answers = poll_fn(|cx| slot.poll(cx)).await;
            answers.into_iter().next().map_or(Answer::Null, |run| run.answer)
        }
    }

    /// The changes of a connection of this core.
    pub(crate) fn accept(&self, connection: Connection, changes: Vec<Change>, slot: &Rc<Slot>) {
        self.0.accept(connection, changes, Origin::Here(slot.clone()));
        self.0.end_turn();
    }

    /// Why nothing can be written any more, if that is so.
    pub fn failure(&self) -> Option<lsm::Error> {
        self.0.writer.failure()
    }

    /// Counters since the start.
    pub fn stats(&self) -> ShardStats {
        ShardStats {
            unsaved: self.0.unsaved.get(),
            save_failed: self.0.save_failed.get(),
            write_failed: self.0.write_failed.get(),
            ..self.0.stats.get()
        }
    }

    /// When `SAVE` last was done, or the start was, in milliseconds since 1970.
    pub fn saved_unix_ms(&self) -> u64 {
        self.0.saved_ms.get()
    }

    /// Counters of the engine's writer.
    pub fn writer_stats(&self) -> lsm::WriterStats {
        self.0.writer.stats()
    }

    /// Ends: what was handed over is still made and written, for some seconds; what is not made by
    /// then is refused. Suspends for that.
    ///
    /// # Errors
    /// What ended the writing earlier, if something did.
    pub async fn close(&self) -> lsm::Result<()> {
        let inner = &self.0;
        let refusing = inner.clone();
        let late = self.0.core.spawn(Class::Foreground, async move {
            refusing.core.sleep_ns(CLOSE_NS).await;
            refusing.failed.borrow_mut().get_or_insert_with(|| CLOSED.into());
            refusing.tell_watchers();
        });
        inner.until(|| inner.is_at_rest() && !inner.clearing.get()).await;
        late.cancel();
        for task in inner.tasks.take() {
            task.cancel();
        }
        inner.writer.close().await
    }
}

impl Inner {
    fn accept(self: &Rc<Self>, connection: Connection, changes: Vec<Change>, to: Origin) {
        let answers = Rc::new(Answers {
            to,
            connection,
            left: Cell::new(changes.iter().map(Change::commands).sum()),
            runs: RefCell::new(Vec::with_capacity(changes.len())),
        });
        let mut at = 0;
        for change in changes {
            let (commands, command) = (change.commands(), change.command);
            self.begin(change, Place { answers: answers.clone(), at, commands, command });
            at += commands;
        }
    }

    /// Makes a change now, or lets it wait for its turn.
    fn begin(self: &Rc<Self>, mut change: Change, place: Place) {
        if self.clearing.get() {
            self.held.borrow_mut().push_back((change, place));
            return;
        }
        if change.kind == Kind::Clear {
            return self.clear(place);
        }
        let awaited = self.jobs.get() > 0 && {
            let overlay = self.overlay.borrow();
            self.turns.borrow().is_awaited(place.answers.connection)
                || change.entries().any(|(key, _)| overlay.is_awaited(key, self.print(key)))
        };
        if !awaited && self.has_room(&change) {
            match self.look(&mut change) {
                Knowledge::All(old) => return self.make(change, old, place),
                Knowledge::Failed(_) if change.commands() > 1 => {
                    return apart(change, place)
                        .for_each(|(change, place)| self.begin(change, place));
                }
                Knowledge::Failed(error) => {
                    return self.answer_in_turn(place, engine_answer(&error));
                }
                Knowledge::Not(_) | Knowledge::After(_) => {}
            }
        }
        self.queue(change, place);
    }

    /// Nothing waits and nothing is on its way.
    fn is_at_rest(&self) -> bool {
        self.jobs.get() == 0
            && self.flights.borrow().is_empty()
            && self.gathered.borrow().batch.is_empty()
    }

    /// Removes every key: behind all changes before it, before all behind it.
    fn clear(self: &Rc<Self>, place: Place) {
        self.clearing.set(true);
        let inner = self.clone();
        self.core.spawn(Class::Foreground, async move {
            inner.until(|| inner.is_at_rest()).await;
            let cleared = match inner.writer.clear(FAMILY) {
                Ok(written) => written.await,
                Err(error) => Err(error),
            };
            let answer = match cleared {
                Ok(_) => {
                    inner.known.borrow_mut().clear();
                    Answer::Ok
                }
                Err(error) => inner.fail(&error),
            };
            inner.answer(place, answer);
            inner.clearing.set(false);
            for (change, place) in inner.held.take() {
                inner.begin(change, place);
            }
            inner.tell_watchers();
            inner.end_turn();
        });
    }

    /// Makes what was handed over before survive a power cut.
    fn sync(&self, place: Place) {
        self.submit();
        match self.writer.sync() {
            Ok(written) => {
                let written = Some((self.ticket.get(), written, Vec::new()));
                let answers = vec![(place, Answer::Ok)];
                self.fly(Flight { written, built_bytes: 0, answers });
            }
            Err(error) => {
                self.save_failed.set(true);
                let answer = self.fail(&error);
                self.answer_in_turn(place, answer);
            }
        }
    }

    /// Whether one more value may be built.
    fn has_room(&self, change: &Change) -> bool {
        !matches!(change.kind, Kind::Append | Kind::SetRange(_))
            || self.built_bytes.get() <= self.built_bytes_max.get()
    }

    /// Takes room for the value that a change is about to build.
    fn expect_built(&self, change: &Change) -> usize {
        let bytes = modify::built_bytes_min(change.kind, change.len());
        let expected = bytes.min(self.value_bytes_max.get());
        self.built_bytes.set(self.built_bytes.get() + expected);
        expected
    }

    #[inline]
    fn print(&self, key: &[u8]) -> Fingerprint {
        Fingerprint(XxHash3_128::oneshot_with_seed(self.seed, key))
    }

    fn is_counted(&self) -> bool {
        self.reader.db().keys().is_some()
    }

    /// Finds out without waiting what has to be known of a change's keys. `Not` has
    /// [`Old::Unknown`] for those that have to be read.
    fn look(&self, change: &mut Change) -> Knowledge {
        let need = change.need(self.is_counted());
        let overlay = self.overlay.borrow();
        let mut all = Vec::with_capacity(change.batch.count() as usize);
        let mut complete = true;
        let known = self.known.borrow();
        for (key, _) in change.entries() {
            if need == Need::Nothing {
                all.push(Old::Unknown);
                continue;
            }
            let print = self.print(key);
            match (known.get(print), need) {
                (Some(true), Need::Existence) => {
                    all.push(Old::There);
                    continue;
                }
                (Some(false), _) => {
                    all.push(Old::Missing);
                    continue;
                }
                _ => {}
            }
            let old = match (need, overlay.newest(key, print)) {
                (_, Some((_, Newest::Missing))) => Old::Missing,
                (Need::Existence | Need::Nothing, Some(_)) => Old::There,
                (Need::Value, Some((_, Newest::Value(value)))) => Old::Value(value.to_vec()),
                (Need::Value, Some((ticket, Newest::There))) => return Knowledge::After(*ticket),
                (_, None) => match self.reader.get_cached(FAMILY, key) {
                    Some(Ok(found)) => old_state(found, need),
                    Some(Err(error)) => return Knowledge::Failed(error),
                    None => {
                        complete = false;
                        Old::Unknown
                    }
                },
            };
            all.push(old);
        }
        if complete { Knowledge::All(all) } else { Knowledge::Not(all) }
    }

    /// Makes a change whose keys are known.
    fn make(&self, mut change: Change, mut old: Vec<Old>, place: Place) {
        if change.kind == Kind::Sync {
            return self.sync(place);
        }
        if let Some(text) = &*self.failed.borrow() {
            return self.answer_in_turn(place, Answer::Failed(text.clone()));
        }
        let mut built_bytes = 0;
        let (batch, answer) = match change.kind {
            Kind::Put => (Some(change.batch), Answer::Ok),
            Kind::PutIfNone if old.iter().any(Old::exists) => (None, Answer::Integer(0)),
            Kind::PutIfNone => (Some(change.batch), Answer::Integer(1)),
            Kind::Delete => {
                let (batch, count) = existing(&mut change.batch, &mut old);
                ((count > 0).then_some(batch), Answer::Integer(count))
            }
            kind => {
                let Some((key, operand)) = change.entries().next() else {
                    return self.answer_in_turn(place, Answer::Null);
                };
                let before = old[0].exists();
                let (write, answer) = modify::modify(
                    kind,
                    mem::replace(&mut old[0], Old::There),
                    operand.unwrap_or_default(),
                    self.value_bytes_max.get(),
                );
                let batch = match write {
                    Write::Nothing => None,
                    Write::AsItIs => Some(change.batch),
                    Write::Value(value) => {
                        built_bytes = value.len();
                        Some(modify::put(key, &value))
                    }
                };
                if !before {
                    old[0] = Old::Missing;
                }
                (batch, answer)
            }
        };
        match batch {
            Some(batch) if batch.len() > BATCH_BYTES_MAX => {
                let text = format!(
                    "OOM a write of {} bytes: at most {BATCH_BYTES_MAX} fit into one",
                    batch.len()
                );
                self.answer_in_turn(place, Answer::Failed(text.into()));
            }
            Some(batch) => {
                let alone = batch.len() > GATHERED_EACH_BYTES;
                if alone || self.gathered.borrow().batch.len() > GATHERED_BYTES {
                    self.submit();
                }
                self.gather(batch, &old, built_bytes, (place, answer));
                if alone {
                    self.submit();
                }
            }
            None => self.answer_in_turn(place, answer),
        }
    }

    /// Takes a batch that goes to the engine next. `old` says what was there before it, key by key.
    fn gather(
        &self,
        mut batch: BatchWriter,
        old: &[Old],
        built_bytes: usize,
        (place, answer): (Place, Answer),
    ) {
        let ticket = self.ticket.get() + 1;
        let small = matches!(answer, Answer::Integer(_) | Answer::Bulk(_) | Answer::Old(_));
        let gathered = &mut *self.gathered.borrow_mut();
        let mut overlay = self.overlay.borrow_mut();
        let mut known = self.known.borrow_mut();
        for ((key, value), old) in entries(&mut batch).zip(old) {
            let print = self.print(key);
            // A key that the batch names a second time is what the first has left.
            let before = match overlay.newest(key, print) {
                Some((last, newest)) if *last == ticket => *newest != Newest::Missing,
                _ => old.exists(),
            };
            known.set(print, value.is_some());
            gathered.delta += i64::from(value.is_some()) - i64::from(before);
            let newest = match value {
                None => Newest::Missing,
                Some(value) if small && value.len() <= KEPT_BYTES_MAX => {
                    Newest::Value(value.into())
                }
                Some(_) => Newest::There,
            };
            gathered.keys.push(overlay.write(key, print, ticket, newest));
        }
        if gathered.batch.is_empty() {
            gathered.batch = batch;
        } else {
            for (key, value) in entries(&mut batch) {
                match value {
                    Some(value) => gathered.batch.put(FAMILY, key, value),
                    None => gathered.batch.delete(FAMILY, key),
                }
            }
        }
        gathered.built_bytes += built_bytes;
        gathered.answers.push((place, answer));
        self.built_bytes.set(self.built_bytes.get() + built_bytes);
        self.count(|stats| stats.written += 1);
    }

    /// Hands what has gathered to the engine.
    fn submit(&self) {
        let Gathered { batch, delta, keys, built_bytes, answers } = self.gathered.take();
        if batch.is_empty() {
            return;
        }
        let ticket = self.ticket.get() + 1;
        let counted = self.is_counted();
        match self.writer.submit(batch, counted.then_some(delta)) {
            Ok(written) => {
                self.ticket.set(ticket);
                self.fly(Flight { written: Some((ticket, written, keys)), built_bytes, answers });
            }
            Err(error) => {
                let answer = self.fail(&error);
                let mut overlay = self.overlay.borrow_mut();
                keys.iter().for_each(|key| overlay.landed(key, ticket));
                drop(overlay);
                self.built_bytes.set(self.built_bytes.get() - built_bytes);
                for (place, _) in answers {
                    self.answer_in_turn(place, answer.clone());
                }
            }
        }
    }

    /// Gives an answer that needs no write: behind all writes before it.
    fn answer_in_turn(&self, place: Place, answer: Answer) {
        let mut gathered = self.gathered.borrow_mut();
        if gathered.batch.is_empty() {
            drop(gathered);
            self.fly(Flight { written: None, built_bytes: 0, answers: vec![(place, answer)] });
        } else {
            gathered.answers.push((place, answer));
        }
    }

    fn fly(&self, flight: Flight) {
        let mut flights = self.flights.borrow_mut();
        if flight.written.is_none() && flights.is_empty() {
            drop(flights);
            for (place, answer) in flight.answers {
                self.answer(place, answer);
            }
            return;
        }
        flights.push_back(flight);
        if flights.len() == 1
            && let Some(waker) = &*self.lander.borrow()
        {
            waker.wake_by_ref();
        }
    }

    /// Takes what has landed off the front.
    fn land(&self, cx: &mut Context<'_>) {
        let mut any = false;
        let mut failed = None;
        loop {
            let mut flights = self.flights.borrow_mut();
            let Some(front) = flights.front_mut() else { break };
            let result = match &mut front.written {
                None => Ok(0),
                Some((_, written, _)) => match Pin::new(written).poll(cx) {
                    Poll::Pending => break,
                    Poll::Ready(result) => result,
                },
            };
            let Some(flight) = flights.pop_front() else { break };
            drop(flights);
            any = true;
            self.built_bytes.set(self.built_bytes.get() - flight.built_bytes);
            if let Some((ticket, _, keys)) = &flight.written {
                let mut overlay = self.overlay.borrow_mut();
                keys.iter().for_each(|key| overlay.landed(key, *ticket));
                self.landed.set(*ticket);
                // What has no keys is a sync.
                match (keys.is_empty(), result.is_ok()) {
                    (true, true) => self.is_saved(),
                    (true, false) => self.save_failed.set(true),
                    (false, true) => {
                        self.write_failed.set(false);
                        self.unsaved.set(self.unsaved.get() + 1);
                    }
                    (false, false) => {}
                }
            }
            // What has been written is told so, also when something else has ended the writing
            // meanwhile. What needed no write may have been told by one that failed.
            // The engine has refused all writes behind it, too, and takes none before
            // each has landed here.
            failed = match &result {
                Err(error) => Some(self.fail(error)),
                Ok(_) if flight.written.is_some() => None,
                Ok(_) => failed,
            };
            for (place, answer) in flight.answers {
                self.answer(place, failed.clone().unwrap_or(answer));
            }
        }
        if any {
            self.tell_watchers();
            self.end_turn();
        }
    }

    fn tell_watchers(&self) {
        for waker in self.watchers.take() {
            waker.wake();
        }
    }

    async fn until(&self, ready: impl Fn() -> bool) {
        poll_fn(|cx| {
            if ready() {
                return Poll::Ready(());
            }
            self.watchers.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Something was not written, and what was built on it will not be: for want of space, or
    /// because nothing can be written from now on. Gives what a change is answered.
    fn fail(&self, error: &lsm::Error) -> Answer {
        let text = || Box::from(format!("MISCONF Errors writing to the database: {error}"));
        self.known.borrow_mut().forget();
        self.refusals.set(self.refusals.get() + 1);
        self.write_failed.set(true);
        if error.kind() == lsm::Kind::Full {
            return Answer::Failed(text());
        }
        Answer::Failed(self.failed.borrow_mut().get_or_insert_with(text).clone())
    }

    fn answer(&self, place: Place, answer: Answer) {
        self.count(|stats| stats.changes += 1);
        let Place { answers, at, commands, command } = place;
        answers.runs.borrow_mut().push(Run { at, commands, command, answer });
        answers.left.set(answers.left.get() - commands);
        if answers.left.get() > 0 {
            return;
        }
        let mut all = answers.runs.take();
        all.sort_unstable_by_key(|run| run.at);
        match &answers.to {
            Origin::Here(slot) => slot.fulfil(all),
            Origin::Core { core, number } => self.outbox.borrow_mut()[*core].push((*number, all)),
        }
    }

    /// The end of a turn: hands the changes that have gathered to the engine, and sends the answers
    /// that have gathered for other cores, one message for each.
    fn end_turn(&self) {
        self.submit();
        let Some(posters) = self.posters.get() else { return };
        for (core, answers) in self.outbox.borrow_mut().iter_mut().enumerate() {
            if !answers.is_empty() {
                posters.post_answers(core, mem::take(answers));
            }
        }
    }

    /// Everything written so far survives a power cut.
    fn is_saved(&self) {
        self.unsaved.set(0);
        self.save_failed.set(false);
        self.saved_ms.set(self.core.unix_time_ms());
    }

    fn count(&self, change: impl FnOnce(&mut ShardStats)) {
        let mut stats = self.stats.get();
        change(&mut stats);
        self.stats.set(stats);
    }

    /// Lets a change wait for its turn at all its keys and in its connection.
    fn queue(self: &Rc<Self>, mut change: Change, place: Place) {
        let mut keys: Vec<Box<[u8]>> = change.entries().map(|(key, _)| key.into()).collect();
        keys.sort_unstable();
        keys.dedup();
        self.count(|stats| stats.waited += 1);
        self.jobs.set(self.jobs.get() + 1);
        let job = Rc::new(Job {
            connection: place.answers.connection,
            change: RefCell::new(Some((change, place))),
            keys,
            behind: Cell::new(0),
            is_ready: Cell::new(false),
            ahead: Cell::new(None),
        });
        self.turns.borrow_mut().wait(job.connection, &job);
        let mut overlay = self.overlay.borrow_mut();
        overlay.reserve(job.keys.len());
        let behind =
            job.keys.iter().filter(|key| !overlay.wait(key, self.print(key), &job)).count();
        drop(overlay);
        job.behind.set(behind);
        if behind == 0 {
            self.start(job);
        }
    }

    /// Looks what is there before a change whose turn has come at all its keys, so that no other
    /// one can be waited for, and makes it if it is its turn in its connection; when there is a
    /// task for it.
    fn start(self: &Rc<Self>, job: Rc<Job>) {
        if self.making.get() == MAKING_MAX {
            return self.due.borrow_mut().push_back(job);
        }
        self.making.set(self.making.get() + 1);
        let (inner, mut next) = (self.clone(), Some(job));
        self.core.spawn(Class::Foreground, async move {
            while let Some(job) = next {
                run(&inner, job).await;
                inner.core.checkpoint().await;
                next = inner.due.borrow_mut().pop_front();
            }
            inner.making.set(inner.making.get() - 1);
        });
    }

    /// Whether nothing of its connection is before a change.
    fn is_first(&self, job: &Rc<Job>) -> bool {
        self.turns.borrow().is_first(job.connection, job)
    }

    /// Looks what is there before a change that is not made yet. Nobody else changes its keys
    /// meanwhile.
    async fn read_ahead(&self, job: &Job) {
        let Some((mut change, place)) = job.change.take() else { return };
        self.until(|| self.has_room(&change) || self.failed.borrow().is_some()).await;
        if self.failed.borrow().is_some() {
            job.change.replace(Some((change, place)));
            return;
        }
        // What cannot be read is tried again when it is its turn.
        if let Ok(old) = self.read(&mut change).await {
            let bytes = old.iter().map(Old::len).sum();
            if self.ahead_bytes.get() + bytes <= AHEAD_BYTES_MAX {
                self.ahead_bytes.set(self.ahead_bytes.get() + bytes);
                job.ahead.set(Some(Ahead { old, bytes, refusals: self.refusals.get() }));
            }
        }
        job.change.replace(Some((change, place)));
    }

    fn take_ahead(&self, job: &Job) -> Option<Ahead> {
        let ahead = job.ahead.take()?;
        self.ahead_bytes.set(self.ahead_bytes.get() - ahead.bytes);
        Some(ahead)
    }

    /// A change that has waited is made: gives its place at its keys to the next.
    fn done(self: &Rc<Self>, job: &Job) {
        self.jobs.set(self.jobs.get() - 1);
        for key in &job.keys {
            let next = self.overlay.borrow_mut().next(key, self.print(key));
            if let Some(next) = next {
                next.behind.set(next.behind.get() - 1);
                if next.behind.get() == 0 {
                    self.start(next);
                }
            }
        }
    }

    /// The first change of a connection that waited is made: makes those behind it for which
    /// nothing else is waited.
    fn make_next(self: &Rc<Self>, connection: Connection) {
        let mut made = 0;
        loop {
            let next = self.turns.borrow_mut().next(connection);
            let Some(job) = next.filter(|job| job.is_ready.get()) else { return };
            let has_room =
                job.change.borrow().as_ref().is_some_and(|(change, _)| self.has_room(change));
            let ahead = if has_room && made < MADE_PER_TURN { self.take_ahead(&job) } else { None };
            let ahead = ahead.filter(|ahead| ahead.refusals == self.refusals.get());
            let Some((ahead, (change, place))) =
                ahead.and_then(|ahead| Some((ahead, job.change.take()?)))
            else {
                return self.due.borrow_mut().push_front(job);
            };
            self.make(change, ahead.old, place);
            self.done(&job);
            made += 1;
        }
    }

    /// Reads what is not known yet of a change's keys, whose turn it is.
    async fn read(&self, change: &mut Change) -> lsm::Result<Vec<Old>> {
        let need = change.need(self.is_counted());
        loop {
            let refusals = self.refusals.get();
            match self.look(change) {
                Knowledge::All(old) => return Ok(old),
                Knowledge::Failed(error) => return Err(error),
                Knowledge::After(ticket) => self.until(|| self.landed.get() >= ticket).await,
                Knowledge::Not(mut old) => {
                    let (at, keys): (Vec<usize>, Vec<&[u8]>) = change
                        .entries()
                        .map(|(key, _)| key)
                        .enumerate()
                        .filter(|(at, _)| old[*at] == Old::Unknown)
                        .unzip();
                    for (at, keys) in at.chunks(READ_TOGETHER).zip(keys.chunks(READ_TOGETHER)) {
                        match need {
                            Need::Existence => {
                                let found = self.reader.contains(FAMILY, keys).await;
                                for (at, found) in at.iter().zip(found) {
                                    old[*at] = if found? { Old::There } else { Old::Missing };
                                }
                            }
                            _ => {
                                let found = self.reader.multi_get(FAMILY, keys, None).await;
                                for (at, found) in at.iter().zip(found) {
                                    old[*at] = old_state(found?, need);
                                }
                            }
                        }
                    }
                    // Else what was known may have been refused meanwhile.
                    if self.refusals.get() == refusals {
                        return Ok(old);
                    }
                }
            }
        }
    }
}

/// Makes a change whose turn has come at all its keys; or reads what it has to know, if others of
/// its connection are before it.
async fn run(inner: &Rc<Inner>, job: Rc<Job>) {
    if !inner.is_first(&job) && !job.is_ready.get() {
        inner.read_ahead(&job).await;
    }
    if !inner.is_first(&job) {
        return job.is_ready.set(true);
    }
    let mut ahead = inner.take_ahead(&job);
    let mut waiting: VecDeque<_> = job.change.take().into_iter().collect();
    while let Some((mut change, place)) = waiting.pop_front() {
        inner.until(|| inner.has_room(&change) || inner.failed.borrow().is_some()).await;
        if let Some(text) = &*inner.failed.borrow() {
            inner.answer_in_turn(place, Answer::Failed(text.clone()));
            continue;
        }
        // Others that wait for the same room must see what this one takes while it reads.
        let expected = inner.expect_built(&change);
        // Else it may have been refused meanwhile.
        let ahead = ahead.take().filter(|ahead| ahead.refusals == inner.refusals.get());
        let old = match ahead {
            Some(ahead) => Ok(ahead.old),
            None => inner.read(&mut change).await,
        };
        inner.built_bytes.set(inner.built_bytes.get() - expected);
        match old {
            // They did not see how long the old value is.
            Ok(_) if !inner.has_room(&change) => waiting.push_front((change, place)),
            Ok(old) => inner.make(change, old, place),
            // One of its commands, perhaps: the others do not need that key.
            Err(_) if change.commands() > 1 => waiting.extend(apart(change, place)),
            Err(error) => inner.answer_in_turn(place, engine_answer(&error)),
        }
    }
    inner.done(&job);
    inner.make_next(job.connection);
    inner.tell_watchers();
    inner.end_turn();
}

/// Waits for the first flight, again and again.
async fn land_all(inner: Rc<Inner>) {
    poll_fn(|cx| {
        inner.lander.borrow_mut().get_or_insert_with(|| cx.waker().clone());
        inner.land(cx);
        Poll::<()>::Pending
    })
    .await;
}

/// The changes of a change's commands, each with its place.
fn apart(change: Change, place: Place) -> impl Iterator<Item = (Change, Place)> {
    let Place { answers, at, command, .. } = place;
    change.split().into_iter().zip(at..).map(move |(change, at)| {
        (change, Place { answers: answers.clone(), at, commands: 1, command })
    })
}

fn old_state(found: Option<lsm::Value>, need: Need) -> Old {
    match (found, need) {
        (None, _) => Old::Missing,
        (Some(value), Need::Value) => Old::Value(value.to_vec()),
        (Some(_), _) => Old::There,
    }
}

/// Of the removals of a batch, those of keys that are there, each once, and how many they are.
/// `old` becomes what was there before these.
fn existing(batch: &mut BatchWriter, old: &mut Vec<Old>) -> (BatchWriter, i64) {
    let mut kept = BatchWriter::new();
    let mut seen = BTreeSet::new();
    for ((key, _), old) in entries(batch).zip(old.iter()) {
        if old.exists() && seen.insert(key) {
            kept.delete(FAMILY, key);
        }
    }
    let count = i64::from(kept.count());
    *old = vec![Old::There; kept.count() as usize];
    (kept, count)
}

/// What the engine's failure says to a client.
fn engine_answer(error: &lsm::Error) -> Answer {
    Answer::Failed(error_text(error).into())
}

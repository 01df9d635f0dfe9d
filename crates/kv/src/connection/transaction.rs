//! Transactions: `MULTI`, `EXEC`, `DISCARD`, `WATCH` and `UNWATCH`.
//!
//! 1. After `MULTI` commands are parsed, so that errors are found, and queued as they came
//!    ([`Queue`]). Queues are bounded, for all connections of a core together. When they take more
//!    than half of their memory, the longest is dropped and its transaction aborted; and a quarter
//!    is for short queues. So clients with long queues do not refuse the transactions of others.
//! 2. `EXEC` sends the commands that concern keys to the shard, as one change (`shard::execute`),
//!    and waits at the beginning of the input, so no later command is taken. If these only set
//!    keys, that is a change like the one of `MSET` ([`Queue::puts`]): there is nothing to execute.
//!    If there are no other commands either, nothing waits: the replies are known, and are sent
//!    when the change has landed, like those of `SET` outside a transaction. So one group of writes
//!    takes all transactions of a pipeline. A node that only reads executes them here.
//! 3. With the shard's answers the queue is gone through: commands that concern keys are answered
//!    by them, all others are executed now, like commands outside a transaction.
//!
//! The shard refuses a transaction whose replies are longer than was admitted; then memory is taken
//! for them, and the transaction is sent again.
//!
//! A connection that watches keys keeps room for one message to the shard, which ends the watches
//! when the connection ends.

use std::rc::Rc;

use reactor::Class;
use resp::Span;

use crate::client::gauge::{Gauge, Share};
use crate::client::registry::QUEUE_BYTES_SHORT;
use crate::command::args::Args;
use crate::command::commands::{
    Access, Ask, ClientCommand, Command, Debug, SlowLogCommand, Transaction, WriteCommand,
};
use crate::command::fields;
use crate::command::lookup;
use crate::command::operation::Operation;
use crate::command::parse::{Parsed, Permissions, parse};
use crate::command::range::Extent;
use crate::command::refusal::Refusal;
use crate::command::spec::CommandId;
use crate::connection::outgoing::{change_of, put_pairs, range_of};
use crate::connection::replies::write_answer;
use crate::connection::session::{Session, owned};
use crate::read::small;
use crate::settings::Settings;
use crate::shard::alone::execute_reads;
use crate::shard::change::{Answer, Change};
use crate::shard::delete_range::KeyRange;
use crate::shard::execute::{KeyWalk, Step, Steps, discarded};
use crate::shard::parcel::{AnswerRun, AnswerSlot};

const NESTED: Refusal<'static> = Refusal::Text("ERR MULTI calls can not be nested");
const WATCH_INSIDE: Refusal<'static> = Refusal::Text("ERR WATCH inside MULTI is not allowed");
const DISCARD_ALONE: Refusal<'static> = Refusal::Text("ERR DISCARD without MULTI");
const EXEC_ALONE: Refusal<'static> = Refusal::Text("ERR EXEC without MULTI");
const ABORTED: Refusal<'static> =
    Refusal::Text("EXECABORT Transaction discarded because of previous errors.");
const NOT_INSIDE: Refusal<'static> = Refusal::Text("ERR Command not allowed inside a transaction");
const NO_CURSORS: Refusal<'static> = Refusal::Text(
    "ERR SCAN and RANDOMKEY are not executed inside a transaction: use MR.RANGE there, or send them before MULTI",
);
const NOT_A_STEP: Refusal<'static> =
    Refusal::Text("ERR this command is not executed inside a transaction: send it before MULTI");
const LONG_RESTORE: Refusal<'static> = Refusal::Text(
    "ERR RESTORE inside a transaction takes payloads of up to 65536 bytes: send it before MULTI",
);
const WRONG_ORDER: Refusal<'static> = Refusal::Text(
    "ERR FLUSHALL, FLUSHDB, KEYS, MR.DELRANGE and MR.RANGE inside a transaction need a database whose keys are in the \
     order of bytes",
);
const FULL: Refusal<'static> = Refusal::Text(
    "OOM command not queued: the queued commands of all transactions take more memory than this core has for them",
);

const REVOKED: Refusal<'static> = Refusal::Text(
    "OOM command not queued: the queued commands of this transaction took the most memory when that of all transactions \
     ran short, and were dropped",
);
const REVOKED_EXEC: Refusal<'static> = Refusal::Text(
    "EXECABORT Transaction discarded because of: OOM its queued commands took the most memory when that of all \
     transactions ran short",
);

const MANY_REPORTS: Refusal<'static> = Refusal::Text(
    "ERR at most 64 commands that do not concern keys and may have long replies, such as INFO, are executed inside a \
     transaction",
);

/// The commands of a transaction that may have long replies: see [`is_report`].
const REPORTS_MAX: usize = 64;

/// Memory for a reply without its value, and for a value of unknown length.
const REPLY_BYTES: usize = 48;
const VALUE_BYTES: usize = 1024;
/// Most memory that is taken for the replies of a transaction before their length is known.
const REPLIES_BYTES_MAX: usize = 64 * 1024;

/// Longest queue whose commands are sent as one change that sets keys.
const PUTS_BYTES_MAX: usize = 64 * 1024;
/// Memory of a list of a queue up to which it doubles when it grows.
const DOUBLED_BYTES_MAX: usize = 2048;

/// Longest payload of a `RESTORE`, which a transaction unpacks in one go.
const RESTORE_BYTES_MAX: usize = 64 * 1024;

/// The commands of a transaction, as they came.
pub(super) struct Queue {
    bytes: Vec<u8>,
    spans: Vec<Span>,
    /// The end of each command in both.
    ends: Vec<End>,
    /// A command was refused: none will be executed.
    aborted: bool,
    /// They were dropped because memory ran short.
    revoked: bool,
    /// Commands that concern keys, and whether some of them may write.
    steps: usize,
    writes: bool,
    /// Those of them that set keys whatever was there: `SET` without options, and `MSET`.
    puts: usize,
    /// Commands with replies of their own that may be long.
    reports: usize,
    /// Its part of the core's limit.
    room: Share,
}

/// Where a command of a queue ends, and what its parsing has told.
#[derive(Clone, Copy)]
struct End {
    bytes: usize,
    spans: usize,
    id: Option<CommandId>,
    is_put: bool,
}

/// A command of a queue.
pub(super) struct Queued<'a> {
    pub args: Args<'a>,
    pub id: Option<CommandId>,
    /// It is one of [`Queue::puts`].
    is_put: bool,
}

impl<'a> Queued<'a> {
    /// Of a command that sets one key: the key and the value.
    fn put(&self) -> Option<(&'a [u8], &'a [u8])> {
        let is_set = self.is_put && self.id == Some(CommandId::Set);
        is_set.then(|| (self.args.get(1), self.args.get(2)))
    }
}

impl Queue {
    fn new(all: &Gauge) -> Self {
        Self {
            bytes: Vec::new(),
            spans: Vec::new(),
            ends: Vec::new(),
            aborted: false,
            revoked: false,
            steps: 0,
            writes: false,
            puts: 0,
            reports: 0,
            room: all.share(),
        }
    }

    /// Adds a command; false if there is no room for it. All queues together have `bytes_max`, one
    /// at most half of it, and a quarter is for queues of up to [`QUEUE_BYTES_SHORT`].
    fn add(&mut self, queued: Queued<'_>, all: &Gauge, bytes_max: usize) -> bool {
        let Queued { args, id, is_put } = queued;
        let (bytes, spans) = args.parts();
        let wanted = [
            room_for(&self.bytes, bytes.len()),
            room_for(&self.spans, spans.len()),
            room_for(&self.ends, 1),
        ];
        let own = wanted[0] + wanted[1] * size_of::<Span>() + wanted[2] * size_of::<End>();
        let others = all.get() - self.room.part();
        let all_max = if own > QUEUE_BYTES_SHORT { bytes_max / 4 * 3 } else { bytes_max };
        if own > bytes_max / 2 || others + own > all_max {
            return false;
        }
        self.room.set(own);
        self.bytes.reserve_exact(wanted[0] - self.bytes.len());
        self.spans.reserve_exact(wanted[1] - self.spans.len());
        self.ends.reserve_exact(wanted[2] - self.ends.len());
        self.bytes.extend_from_slice(bytes);
        self.spans.extend_from_slice(spans);
        self.ends.push(End { bytes: self.bytes.len(), spans: self.spans.len(), id, is_put });
        true
    }

    /// Drops the commands: none will be executed.
    fn abort(&mut self) {
        self.aborted = true;
        (self.bytes, self.spans, self.ends) = (Vec::new(), Vec::new(), Vec::new());
        self.room.set(0);
    }

    /// The number of commands.
    fn len(&self) -> usize {
        self.ends.len()
    }

    /// The commands in order.
    pub(super) fn commands(&self) -> impl ExactSizeIterator<Item = Queued<'_>> {
        let (mut begin, mut spans_begin) = (0, 0);
        self.ends.iter().map(move |&End { bytes, spans, id, is_put }| {
            let args = Args::new(&self.bytes[begin..bytes], &self.spans[spans_begin..spans]);
            (begin, spans_begin) = (bytes, spans);
            Queued { args, id, is_put }
        })
    }

    /// The change of commands that only set keys, if they are few and short: it leaves what the
    /// commands leave one after the other. It is answered by [`Answer::Oks`] if there are no other
    /// commands, else by [`Answer::Ok`] for all of them.
    fn puts(&self, permissions: Permissions) -> Option<Change> {
        let is_small = self.bytes.len() <= PUTS_BYTES_MAX
            && self.puts * REPLY_BYTES <= Settings::REPLY_BYTES_SMALL;
        if self.puts == 0 || self.puts != self.steps || !is_small {
            return None;
        }
        let mut change = Change::puts();
        change.batch.reserve(self.bytes.len());
        // The others do not concern keys.
        for queued in self.commands().filter(|queued| queued.is_put) {
            if let Some((key, value)) = queued.put() {
                change.also_put(key, value);
            } else if let Ok(Command::Write(WriteCommand::PutAll(pairs))) =
                parse(queued.args, permissions).command
            {
                put_pairs(&mut change, pairs);
            }
        }
        if self.puts == self.len() {
            change.puts_of = u32::try_from(self.puts).ok()?;
        }
        Some(change)
    }
}

/// The capacity that a list has after it has grown by `more`: a quarter more than it needs, or
/// twice that if it is short, so that the memory of a queue is known and it is seldom copied.
fn room_for<T>(list: &Vec<T>, more: usize) -> usize {
    let needed = list.len() + more;
    match needed {
        _ if needed <= list.capacity() => list.capacity(),
        _ if needed * size_of::<T>() <= DOUBLED_BYTES_MAX / 2 => needed * 2,
        _ => needed + needed / 4,
    }
}

/// The state of an `EXEC` at the beginning of the input.
#[derive(Default)]
pub(super) enum Executing {
    #[default]
    No,
    /// The shard has the transaction.
    Sent,
    /// Its replies take this much memory.
    Larger(usize),
    /// The shard's answer.
    Answered(Answer),
    /// Its commands only set keys, with this change, which is not sent yet.
    Puts(Box<Change>),
}

/// The step of a command that concerns keys.
fn step_of(command: Command<'_>) -> Option<Step> {
    Some(match command {
        Command::Write(command) => Step::Change(change_of(command)),
        Command::One(key, ask) => Step::Read(key.to_vec(), ask),
        Command::Bits(key, _) => Step::Read(key.to_vec(), Ask::Value),
        Command::Fields(args) => Step::Read(args.get(1).to_vec(), Ask::Value),
        Command::MGet(keys) => Step::Values(owned(keys)),
        Command::Exists(keys) => Step::Exists(owned(keys)),
        Command::DbSize => Step::Count,
        Command::Keys(pattern) => Step::Walk(KeyWalk {
            range: KeyRange::ALL,
            reverse: false,
            extent: Extent::KEYS,
            pattern: Some(pattern.to_vec()),
        }),
        Command::Range(query) => Step::Walk(KeyWalk {
            range: range_of(query.start, query.end),
            reverse: query.reverse,
            extent: query.extent,
            pattern: None,
        }),
        _ => return None,
    })
}

fn is_step(command: &Command<'_>) -> bool {
    matches!(
        command,
        Command::Write(_)
            | Command::One(..)
            | Command::Bits(..)
            | Command::Fields(_)
            | Command::MGet(_)
            | Command::Exists(_)
            | Command::DbSize
            | Command::Keys(_)
            | Command::Range(_)
    )
}

/// Whether a command sets keys whatever was there, and is answered by `OK`.
fn is_put(command: &Command<'_>) -> bool {
    matches!(command, Command::Write(WriteCommand::Put(..) | WriteCommand::PutAll(_)))
}

/// Whether Redis does not allow a command inside a transaction.
fn is_forbidden(name: &str) -> bool {
    lookup::find_full(name.as_bytes()).is_some_and(|spec| spec.flags.contains(&"no_multi"))
}

/// Whether a command that is not a step may have a reply that is much longer than itself, or has a
/// task of its own. `EXEC` executes all of these at once.
fn is_report(command: &Command<'_>) -> bool {
    let is_brief = matches!(
        command,
        Command::Auth(_)
            | Command::Client(
                ClientCommand::Caching(_)
                    | ClientCommand::GetName
                    | ClientCommand::GetRedir
                    | ClientCommand::Id
                    | ClientCommand::NoEvict
                    | ClientCommand::Reply(_)
                    | ClientCommand::SetLibrary(..)
                    | ClientCommand::SetName(_)
                    | ClientCommand::TrackingInfo
                    | ClientCommand::Unblock
            )
            | Command::Echo(_)
            | Command::Hello(_)
            | Command::Ping(_)
            | Command::Select
            | Command::Subscribe(_)
            | Command::Time
            | Command::Transaction(_)
            | Command::Unsubscribe(_)
    );
    !is_brief && !is_step(command)
}

/// The memory for the reply to a command, as long as its length is unknown.
fn expected_bytes(step: &Step) -> usize {
    REPLY_BYTES
        + match step {
            Step::Read(..) => VALUE_BYTES,
            Step::Values(keys) => keys.len() * VALUE_BYTES,
            Step::Change(change) if change.kind.gives_old() => VALUE_BYTES,
            Step::Walk(_) => REPLIES_BYTES_MAX,
            Step::Change(_) | Step::Exists(_) | Step::Count => 0,
        }
}

impl Session {
    /// Queues a command after `MULTI`, and answers it. Returns a command that is not queued but
    /// executed, or refused.
    pub(super) fn enqueue<'a>(&mut self, args: Args<'a>, parsed: Parsed<'a>) -> Option<Parsed<'a>> {
        let refusal = match &parsed.command {
            Ok(Command::Transaction(Transaction::Unwatch)) => None,
            Ok(Command::Transaction(_) | Command::Quit | Command::Reset) => return Some(parsed),
            Ok(command) => self.refusal_inside(command, parsed.name),
            Err(_) if parsed.rejected => {
                self.abort();
                return Some(parsed);
            }
            // With wrong options, too.
            Err(_) => is_forbidden(parsed.name).then_some(NOT_INSIDE),
        };
        let refusal = refusal.or_else(|| {
            let (all, settings) = (&self.state.queued_bytes, self.state.node.settings());
            let queue = self.queue.as_mut()?;
            if queue.aborted {
                return queue.revoked.then_some(REVOKED);
            }
            let reports = parsed.command.as_ref().map_or(0, |one| usize::from(is_report(one)));
            if queue.reports + reports > REPORTS_MAX {
                return Some(MANY_REPORTS);
            }
            queue.reports += reports;
            let is_put = parsed.command.as_ref().is_ok_and(is_put);
            let added =
                queue.add(Queued { args, id: parsed.id, is_put }, all, settings.queued_bytes_max);
            self.client.queued_bytes.set(queue.room.part());
            if all.get() > settings.queued_bytes_max / 2 {
                self.state.clients.revoke_longest_queue(self.state.core.now_ns());
            }
            if !added {
                return Some(FULL);
            }
            if let Ok(command) = &parsed.command {
                queue.steps += usize::from(is_step(command));
                queue.puts += usize::from(is_put);
                queue.writes |= command.access() == Access::Write;
            }
            self.client.queued.set(queue.len() as i64);
            None
        });
        if let Some(refusal) = refusal {
            self.abort();
            return Some(Parsed { command: Err(refusal), rejected: true, ..parsed });
        }
        self.send_writes();
        self.stop_meter();
        self.skip_this = std::mem::take(&mut self.skip_next);
        self.client.command.set(parsed.name);
        self.replies.command = None;
        self.reply(|writer| writer.simple("QUEUED"));
        None
    }

    /// Why a command cannot be part of a transaction, if so.
    fn refusal_inside(&self, command: &Command<'_>, name: &str) -> Option<Refusal<'static>> {
        match command {
            // The most frequent commands need no look-up in the table.
            Command::One(..) => None,
            _ if is_put(command) => None,
            _ if is_forbidden(name) => Some(NOT_INSIDE),
            Command::Scan(_) | Command::RandomKey => Some(NO_CURSORS),
            // These do not read keys.
            Command::Info(_) | Command::LastSave => None,
            // Its reads would be entered too late.
            Command::Client(ClientCommand::Tracking(_)) => Some(NOT_A_STEP),
            // They are computed in steps, or concern keys outside a transaction.
            Command::Debug(Debug::Object(_) | Debug::Reload)
            | Command::SlowLog(SlowLogCommand::Get(_)) => Some(NOT_A_STEP),
            Command::Write(WriteCommand::Restore { payload, .. })
                if payload.len() > RESTORE_BYTES_MAX =>
            {
                Some(LONG_RESTORE)
            }
            command if command.access() == Access::Read && !is_step(command) => Some(NOT_A_STEP),
            Command::Keys(_)
            | Command::Range(_)
            | Command::Write(WriteCommand::Clear | WriteCommand::DeleteRange(..))
                if self.state.descending =>
            {
                Some(WRONG_ORDER)
            }
            _ => None,
        }
    }

    fn abort(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.abort();
            self.client.queued_bytes.set(0);
        }
    }

    /// Drops the queued commands, if it was told to. Those that are being executed are needed.
    pub(super) fn revoke_queue(&mut self) {
        if self.client.queue_revoked.replace(false)
            && !self.is_executing()
            && let Some(queue) = self.queue.as_mut().filter(|queue| !queue.aborted)
        {
            queue.revoked = true;
            self.abort();
        }
    }

    /// How the `EXEC` at the beginning of the input accesses keys.
    pub(super) fn exec_access(&self) -> Access {
        let Some(queue) = self.queue.as_ref().filter(|queue| !queue.aborted) else {
            return Access::None;
        };
        match self.executing {
            Executing::Sent => Access::None,
            _ if !self.state.node.is_writable() => Access::Read,
            _ if queue.writes => Access::Write,
            _ if queue.steps > 0 || self.watching.is_some() => Access::Order,
            _ => Access::Read,
        }
    }

    /// Has the commands of the transaction that concern keys executed; false as long as their
    /// answers are not there.
    pub(super) fn execute_steps(&mut self) -> bool {
        if matches!(self.executing, Executing::Sent) {
            match self.replies.take_executed() {
                None => return false,
                Some(Answer::Larger(bytes)) => self.executing = Executing::Larger(bytes),
                Some(answer) => {
                    self.executing = Executing::Answered(answer);
                    return true;
                }
            }
        }
        let Some(queue) = self.queue.as_ref().filter(|queue| !queue.aborted) else { return true };
        if queue.steps == 0 && self.watching.is_none() {
            self.executing = Executing::Answered(Answer::Executed(Vec::new()));
            return true;
        }
        let permissions = self.inside();
        // A connection that watches or tracks keys has more to find out.
        let is_plain = self.watching.is_none()
            && !self.client.tracking.is_on()
            && self.state.node.is_writable();
        if is_plain && let Some(change) = queue.puts(permissions) {
            if change.puts_of > 0 {
                self.executing = Executing::Puts(Box::new(change));
                return true;
            }
            let slot = self.send_transaction(change);
            self.replies.execute(slot);
            self.executing = Executing::Sent;
            return false;
        }
        let commands =
            queue.commands().filter_map(|queued| parse(queued.args, permissions).command.ok());
        let list: Vec<Step> = commands.filter_map(step_of).collect();
        let reply_bytes_max = match self.executing {
            // Values may become longer meanwhile.
            Executing::Larger(bytes) => bytes + bytes / 8,
            _ => list.iter().map(expected_bytes).sum::<usize>().min(REPLIES_BYTES_MAX),
        };
        if reply_bytes_max > Settings::REPLY_BYTES_SMALL && !self.replies.reserve(reply_bytes_max) {
            self.waits_for_reply = Some(reply_bytes_max);
            return false;
        }
        let reply_bytes_max = reply_bytes_max.max(Settings::REPLY_BYTES_SMALL);
        let mut uses = std::mem::take(&mut self.uses);
        if let Some(queue) = &self.queue {
            self.enter_keys_of(queue, &mut uses);
        }
        self.uses = uses;
        let watching = self.watching.is_some();
        let slot = self.send_steps(Steps { list, watching, reply_bytes_max });
        self.replies.execute(slot);
        self.executing = Executing::Sent;
        false
    }

    /// Sends the change of a transaction to the shard.
    fn send_transaction(&mut self, change: Change) -> Rc<AnswerSlot> {
        self.send_writes();
        let (state, weight) = (&self.state, change.weight());
        let (core, id) = (state.core.id(), self.client.id);
        state.writes.send(&state.posters, core, id, vec![change], weight)
    }

    fn send_steps(&mut self, steps: Steps) -> Rc<AnswerSlot> {
        if self.state.node.is_writable() {
            let mut change = Change::execute(steps);
            change.tells = self.client.tracking.tells_itself(self.client.id);
            return self.send_transaction(change);
        }
        self.send_writes();
        let state = &self.state;
        let slot = Rc::new(AnswerSlot::default());
        let (state, answered) = (state.clone(), slot.clone());
        self.state.core.spawn(Class::Foreground, async move {
            let value_bytes_max = state.node.settings().value_bytes_max();
            let answer =
                execute_reads(&state.core, &state.reader, state.family, steps, value_bytes_max)
                    .await;
            let wrote = Vec::new();
            answered.fulfil(vec![AnswerRun { at: 0, commands: 1, command: None, answer, wrote }]);
        });
        slot
    }

    /// Whether the answers to a transaction are on their way.
    pub(super) fn is_executing(&self) -> bool {
        !matches!(self.executing, Executing::No)
    }

    /// What queued commands may do: they were checked when they were queued.
    pub(super) fn inside(&self) -> Permissions {
        Permissions { enter: true, ..self.permissions() }
    }

    /// Executes a command of transactions.
    pub(super) fn transaction(&mut self, command: Transaction<'_>) {
        let refusal = match (command, self.queue.is_some()) {
            (Transaction::Exec, true) => return self.exec(),
            (Transaction::Exec, false) => EXEC_ALONE,
            (Transaction::Discard, true) => {
                self.end_transaction();
                return self.reply(|writer| writer.ok());
            }
            (Transaction::Discard, false) => DISCARD_ALONE,
            (Transaction::Multi, true) => NESTED,
            (Transaction::Multi, false) => {
                self.queue = Some(Box::new(Queue::new(&self.state.queued_bytes)));
                self.client.queued.set(0);
                self.client.queue_revoked.set(false);
                return self.reply(|writer| writer.ok());
            }
            (Transaction::Watch(_), true) => WATCH_INSIDE,
            (Transaction::Watch(keys), false) => return self.watch(keys),
            (Transaction::Unwatch, _) if self.watching.take().is_some() => {
                return self.send_change(Change::of(Operation::Unwatch), self.is_silent());
            }
            (Transaction::Unwatch, _) => return self.reply(|writer| writer.ok()),
        };
        self.reply(|writer| refusal.write(writer));
    }

    fn watch(&mut self, keys: Args<'_>) {
        if !self.state.node.is_writable() {
            // Nothing is written.
            return self.reply(|writer| writer.ok());
        }
        let room = &self.state.writes.room;
        self.watching.get_or_insert_with(|| room.reserve(0));
        self.send_change(Change::watch(keys.iter()), self.is_silent());
    }

    /// Ends the transaction and all watches.
    pub(super) fn end_transaction(&mut self) {
        self.queue = None;
        self.executing = Executing::No;
        self.client.queued.set(-1);
        self.client.queued_bytes.set(0);
        if self.watching.take().is_some() {
            self.send_change(Change::of(Operation::Unwatch), true);
        }
    }

    /// Answers `EXEC`, and executes the commands that do not concern keys.
    fn exec(&mut self) {
        let executing = match std::mem::take(&mut self.executing) {
            Executing::Puts(change) => return self.exec_puts(*change),
            executing => executing,
        };
        let uses = std::mem::take(&mut self.uses);
        let wrote = std::mem::take(&mut self.replies.wrote);
        let revoked = self.queue.as_ref().is_some_and(|queue| queue.revoked);
        let queue = self.queue.take().filter(|queue| !queue.aborted);
        let (Some(queue), Executing::Answered(answer)) = (queue, executing) else {
            self.forget_uses(uses);
            self.end_transaction();
            let refusal = if revoked { REVOKED_EXEC } else { ABORTED };
            return self.reply(|writer| refusal.write(writer));
        };
        let answers = match answer {
            Answer::Executed(answers) => answers,
            // All of them only set keys.
            Answer::Ok => vec![Answer::Ok; queue.steps],
            Answer::Conflict => {
                self.watching = None;
                self.forget_uses(uses);
                self.end_transaction();
                self.state.count(|stats| stats.transaction_conflicts += 1);
                return self.reply(|writer| writer.null_array());
            }
            refused => {
                self.forget_uses(uses);
                self.end_transaction();
                return self.reply(|writer| write_answer(&discarded(refused), writer));
            }
        };
        self.watching = None;
        self.end_transaction();
        self.state.count(|stats| stats.transactions += 1);
        let permissions = self.inside();
        let commands = queue.commands();
        self.reply(|writer| writer.array(commands.len()));
        let mut answers = answers.into_iter();
        let mut clears = false;
        for Queued { args, .. } in commands {
            let Parsed { command, id, name, .. } = parse(args, permissions);
            self.client.command.set(name);
            self.replies.command = id;
            self.executed += 1;
            if let Some(id) = id {
                self.meter(id);
            }
            self.note(args, id);
            match command {
                Ok(command) if is_step(&command) => {
                    clears |= matches!(command, Command::Write(WriteCommand::Clear));
                    self.answer_step(command, answers.next().unwrap_or(Answer::Null));
                }
                Ok(command) => self.execute_now(command),
                Err(refusal) => self.reply(|writer| refusal.write(writer)),
            }
            self.end_note();
            // Writes of the connection itself, such as BGSAVE, before later replies.
            self.send_writes();
        }
        self.tell_of_transaction(&uses, &wrote, clears);
        self.replies.command = Some(CommandId::Exec);
    }

    /// Gathers a transaction whose commands only set keys. It is answered when it has landed.
    fn exec_puts(&mut self, change: Change) {
        let Some(queue) = self.queue.take() else { return };
        self.end_transaction();
        self.executed += queue.len() as u64;
        for Queued { args, id, .. } in queue.commands() {
            if let Some(id) = id {
                self.state.commands.count(id, |stats| stats.calls += 1);
            }
            self.note(args, id);
            self.end_note();
        }
        self.write_transaction(change);
    }

    /// Answers a command that the shard has executed.
    fn answer_step(&mut self, command: Command<'_>, answer: Answer) {
        let found = match &answer {
            Answer::Old(value) => [u64::from(value.is_some()), u64::from(value.is_none())],
            Answer::Values(values) if matches!(command, Command::MGet(_)) => {
                let hits = values.iter().flatten().count();
                [hits as u64, (values.len() - hits) as u64]
            }
            _ => [0, 0],
        };
        self.state.count(|stats| {
            stats.hits += found[0];
            stats.misses += found[1];
        });
        self.reply(|writer| match (command, answer) {
            (Command::One(_, ask), Answer::Old(value)) => {
                small::write_answer(value.as_deref(), ask, writer);
            }
            (Command::Bits(_, query), Answer::Old(value)) => {
                small::write_bits(value.as_deref(), query, writer);
            }
            (Command::Fields(args), Answer::Old(value)) => {
                let operations = fields::parse(args).unwrap_or_default();
                small::write_fields(value.as_deref(), &operations, writer);
            }
            (_, answer) => write_answer(&answer, writer),
        });
    }
}

impl Drop for Session {
    /// The core and the shard forget what the connection tracked and watched.
    fn drop(&mut self) {
        self.state.leave_tracking(&self.client);
        if self.watching.take().is_some() {
            let (state, unwatch) = (&self.state, Change::of(Operation::Unwatch));
            let core = state.core.id();
            state.writes.send(&state.posters, core, self.client.id, vec![unwatch], 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::args::tests::with;

    fn queued(args: Args<'_>) -> Queued<'_> {
        Queued { args, id: None, is_put: false }
    }

    #[test]
    fn a_queue_keeps_commands_as_they_came_within_its_limit() {
        let all = Gauge::default();
        let (mut a, mut b) = (Queue::new(&all), Queue::new(&all));
        let lines = ["set 'a b' c", "ping", "mget x y z"];
        for line in lines {
            assert!(with(line, |args| a.add(queued(args), &all, 1000)));
        }
        let words = |args: Args<'_>| args.iter().map(<[u8]>::to_vec).collect::<Vec<_>>();
        let kept: Vec<_> = a.commands().map(|queued| words(queued.args)).collect();
        assert_eq!(kept, lines.map(|line| with(line, words)));
        let held = all.get();
        assert!(held > 0);
        a.abort();
        assert_eq!((a.commands().len(), all.get()), (0, 0));
        assert!(with(lines[0], |args| b.add(queued(args), &all, 1000)));
        drop((a, b));
        assert_eq!(all.get(), 0);
    }

    #[test]
    fn commands_that_only_set_keys_are_one_change() {
        let all = Gauge::default();
        let permissions = Permissions { write: true, enter: true, debug: false };
        let entries_of = |lines: &[&str]| {
            let mut queue = Queue::new(&all);
            for line in lines {
                with(line, |args| {
                    let Parsed { command, id, .. } = parse(args, permissions);
                    let is_put = command.as_ref().is_ok_and(is_put);
                    queue.steps += usize::from(command.as_ref().is_ok_and(is_step));
                    queue.puts += usize::from(is_put);
                    assert!(queue.add(Queued { args, id, is_put }, &all, 1 << 20));
                });
            }
            queue.puts(permissions).map(|mut change| {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let entries =
                    change.entries().map(|(key, value)| text(key) + &text(value.unwrap()));
                entries.collect::<Vec<_>>().join(" ")
            })
        };
        let puts = entries_of(&["set a 1", "mset b 2 a 3", "ping", "set c 4 nonsense", "set a 5"]);
        assert_eq!(puts.as_deref(), Some("a1 b2 a3 a5"));
        for other in
            ["get a", "set a 1 nx", "set a 1 ex 9", "incr a", "dbsize", "flushall", "del a"]
        {
            assert_eq!(entries_of(&["set a 1", other]), None, "{other}");
        }
        assert_eq!(entries_of(&["ping"]), None);
        assert_eq!(entries_of(&["set a 1"; Settings::REPLY_BYTES_SMALL / REPLY_BYTES + 1]), None);
        let long = format!("set a {}", "x".repeat(PUTS_BYTES_MAX / 64));
        assert!(entries_of(&[&long[..]; 60]).is_some());
        assert_eq!(entries_of(&[&long[..]; 64]), None);
    }

    #[test]
    fn a_queue_counts_what_it_has_allocated_and_takes_half_at_most() {
        let all = Gauge::default();
        let mut queues = [Queue::new(&all), Queue::new(&all), Queue::new(&all)];
        for queue in &mut queues {
            while with("set key value", |args| queue.add(queued(args), &all, 100_000)) {}
            let memory = queue.bytes.capacity()
                + queue.spans.capacity() * size_of::<Span>()
                + queue.ends.capacity() * size_of::<End>();
            assert_eq!(queue.room.part(), memory);
        }
        let held = queues.each_ref().map(|queue| queue.room.part());
        assert!(held.iter().all(|&bytes| bytes <= 50_000) && held[0] > 30_000, "{held:?}");
        assert!(all.get() > 55_000, "{held:?}");
        let long = 75_000 + QUEUE_BYTES_SHORT;
        assert!(all.get() <= long, "a quarter is for short queues: {held:?}");
        let mut short = Queue::new(&all);
        assert!(with("set key value", |args| short.add(queued(args), &all, 100_000)));
        drop(short);
        drop(queues);
        assert_eq!(all.get(), 0);
    }
}

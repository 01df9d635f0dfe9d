//! One connection's replies, in the order of its commands, also when they are not made in that
//! order.
//!
//! What needs no disk is written at once. Everything else becomes a task, and takes its place in a
//! queue; replies behind it queue up too. [`Replies::collect`] moves what is ready from the queue's
//! front to the output.
//!
//! What it holds is bounded: no command is taken while the output is full or a reply of unbounded
//! size is being made; reads started ahead of their turn give back what does not fit (see
//! [`Window`]) and are fewer where values are large; while a client is waited for, they give back
//! all that they have found; a task whose reply may be long counts as many reads. What all
//! connections of a core hold is bounded, too: a reply that is not small is admitted first (see
//! `room`). A value that is not admitted is dropped and read again when it is.

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use lsm::Value;
use reactor::{Class, JoinHandle};
use resp::{Protocol, Writer};

use crate::command::parse::Ask;
use crate::command::spec::CommandId;
use crate::connection::output::{Batch, Output, Sending};
use crate::core::client::Client;
use crate::core::state::{CoreState, FAMILY, KvStats, Share};
use crate::core::writes::{Run, Slot};
use crate::read::small;
use crate::read::stream::{KEYS_PER_LOOKUP, LookupStream, Piece, Rest, Stream};
use crate::settings::Settings;
use crate::shard::change::Answer as WriteAnswer;

/// Reads that may be under way at once however large the values are.
const READS_MIN: usize = 4;

/// Tasks with long replies that may be under way at once.
const LONG_REPLIES_MAX: usize = 2;

/// A reply that is not yet in the output.
enum Later {
    /// Ready, behind others that are not.
    Ready(Output),
    /// A question about one key. With a share of the core's unsent bytes the answer has been
    /// admitted.
    One {
        task: JoinHandle<Read>,
        admitted: Option<Share>,
        ask: Ask,
        protocol: Protocol,
        command: Option<CommandId>,
    },
    /// The same, whose answer has so many bytes and is read when its turn has come and there is
    /// memory for it.
    Held { key: Vec<u8>, bytes: usize, ask: Ask, protocol: Protocol, command: Option<CommandId> },
    /// The values of some keys.
    Some {
        task: JoinHandle<ReadSome>,
        admitted: Option<Share>,
        protocol: Protocol,
        keys: usize,
        command: Option<CommandId>,
    },
    /// A reply of bounded size.
    Small {
        task: JoinHandle<SmallReply>,
        admitted: Option<Share>,
        weight: usize,
        command: Option<CommandId>,
        silent: bool,
    },
    /// The next piece of a reply of any size.
    Piece(JoinHandle<Piece>),
    /// Such a reply, waiting for its reader or for memory.
    Parked(Box<Stream>),
    /// What the shard says to a parcel of writes.
    Written { written: Written, admitted: Option<Share> },
}

/// A parcel of writes on its way.
pub(crate) struct Written {
    /// Where its answers arrive.
    pub slot: Rc<Slot>,
    pub protocol: Protocol,
    /// Nobody wants the replies.
    pub silent: bool,
    /// What its changes weigh.
    pub weight: usize,
    /// How many of the answers may be as long as values.
    pub values: usize,
    /// Whether a key may have a value afterwards that is not small.
    pub leaves_long: bool,
}

type Answer = lsm::Result<Option<Value>>;

/// How a read ended that was started ahead of its turn.
enum Read {
    /// With the key, and the place it takes in the window.
    Answer(Vec<u8>, Answer, usize),
    /// What it found, of so many bytes, would not fit beside what the others found; it is read
    /// again when its turn has come.
    Again(Vec<u8>, usize),
}

/// The same for several keys at once.
enum ReadSome {
    Answers(Vec<Vec<u8>>, Vec<Answer>, usize),
    Again(Vec<Vec<u8>>),
}

/// The bytes of values that one connection's reads have found and that wait for their turn. Nobody
/// knows before a read how much it will find, so what does not fit is dropped and read again later.
#[derive(Clone, Default)]
struct Window(Rc<Cell<usize>>);

impl Window {
    /// Keeps a place for these answers; not if they do not fit, or if memory was short for one of
    /// them.
    fn admit(&self, answers: &[Answer], bytes_max: usize) -> Option<usize> {
        let short = answers
            .iter()
            .any(|answer| matches!(answer, Err(error) if error.kind() == lsm::Kind::Memory));
        let size = answers.iter().flatten().flatten().map(|value| value.len()).sum();
        let held = self.0.get();
        let alone = held == 0 && answers.len() == 1;
        if short || (!alone && held + size > bytes_max) {
            return None;
        }
        self.0.set(held + size);
        Some(size)
    }

    /// Gives a place back.
    fn leave(&self, size: usize) {
        self.0.set(self.0.get() - size);
    }
}

/// The reply of a task, written out.
pub(crate) struct SmallReply {
    pub bytes: Vec<u8>,
    /// The connection has ended itself.
    pub close: bool,
}

impl From<Vec<u8>> for SmallReply {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, close: false }
    }
}

/// How long a task's reply may be, which decides how many of them may be under way at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    /// Some bytes.
    Short,
    /// Up to a few hundred kilobytes.
    Long,
}

/// Why no more commands are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// Not at all.
    No,
    /// The replies under way are still to be sent.
    AfterReplies,
    /// At once: what would be sent is not true.
    Now,
}

/// See the module text.
pub(crate) struct Replies {
    state: Rc<CoreState>,
    client: Rc<Client>,
    output: Output,
    later: VecDeque<Later>,
    /// Bytes that are ready in the queue, and bytes of the engine's buffers that these pin.
    later_bytes: usize,
    later_pinned_bytes: usize,
    /// Reads under way.
    reads: usize,
    /// Parcels of writes on their way, what they weigh, and how many of their answers may be as
    /// long as values.
    writes: usize,
    writes_weight: usize,
    writes_values: usize,
    /// Those that may leave a value that is not small.
    writes_long: usize,
    /// The largest value read lately, which decides how many reads may be under way.
    value_bytes: usize,
    window: Window,
    streaming: bool,
    pub closing: Closing,
    /// Which command is being executed.
    pub command: Option<CommandId>,
    sending_bytes: usize,
    sending_pinned_bytes: usize,
    unsent: Share,
    pinned: Share,
    /// Its part of the reads that are under way on the core.
    own_reads: Share,
    slow: bool,
    /// What the next command's reply has been admitted for.
    reserved: Option<Share>,
}

impl Drop for Replies {
    fn drop(&mut self) {
        self.state.room.leave(&self.client);
        for later in self.later.drain(..) {
            match later {
                Later::One { task, .. } => task.cancel(),
                Later::Some { task, .. } => task.cancel(),
                Later::Small { task, .. } => task.cancel(),
                Later::Piece(task) => task.cancel(),
                Later::Ready(_) | Later::Held { .. } | Later::Parked(_) | Later::Written { .. } => {
                }
            }
        }
    }
}

impl Replies {
    pub fn new(state: &Rc<CoreState>, client: &Rc<Client>) -> Self {
        Self {
            state: state.clone(),
            client: client.clone(),
            output: Output::default(),
            later: VecDeque::new(),
            later_bytes: 0,
            later_pinned_bytes: 0,
            reads: 0,
            writes: 0,
            writes_weight: 0,
            writes_values: 0,
            writes_long: 0,
            value_bytes: 0,
            window: Window::default(),
            streaming: false,
            closing: Closing::No,
            command: None,
            sending_bytes: 0,
            sending_pinned_bytes: 0,
            unsent: state.unsent_bytes.share(),
            pinned: state.pinned_bytes.share(),
            own_reads: state.reads.share(),
            slow: false,
            reserved: None,
        }
    }

    /// Bytes that all connections of the core hold, this one as it is now.
    fn total_bytes(&self) -> usize {
        self.state.unsent_bytes.get() - self.unsent.part() + self.unsent_bytes()
    }

    /// Unsent bytes that this connection may have now.
    fn unsent_bytes_max(&self) -> usize {
        self.state.unsent_bytes_max(self.total_bytes())
    }

    /// Whether a reply of so many bytes may be made now. If not, the connection's task is woken
    /// when it may.
    fn admit(&self, bytes: usize) -> bool {
        let total_max = self.state.shared.settings().unsent_total_bytes_max;
        bytes <= Settings::REPLY_BYTES_SMALL
            || self.state.room.admit(&self.client, bytes, self.total_bytes(), total_max)
    }

    /// Takes memory for the reply of the next command, where it is known before how long it may be.
    /// If there is none, the connection's task is woken when there is.
    pub fn reserve(&mut self, bytes: usize) -> bool {
        if !self.admit(bytes) {
            return false;
        }
        self.reserved = Some(self.share_of(bytes));
        true
    }

    fn share_of(&self, bytes: usize) -> Share {
        let mut share = self.state.unsent_bytes.share();
        share.set(bytes);
        share
    }

    /// Whether memory has been taken for the reply of the command that is being executed.
    pub fn is_reserved(&self) -> bool {
        self.reserved.is_some()
    }

    /// The next command has been executed.
    pub fn end_reservation(&mut self) {
        self.reserved = None;
    }

    /// Bytes of replies that are made and not yet sent.
    pub fn unsent_bytes(&self) -> usize {
        self.sendable_bytes() + self.later_bytes
    }

    /// Of these, those that nothing but the client's reading holds up.
    fn sendable_bytes(&self) -> usize {
        self.sending_bytes + self.output.len()
    }

    /// Bytes of memory kept for replies to come.
    pub fn room_bytes(&self) -> usize {
        self.output.room_bytes()
    }

    /// Gives back memory that holds nothing.
    pub fn release(&mut self) {
        self.output.release();
    }

    /// Whether replies are still being made.
    pub fn is_busy(&self) -> bool {
        !self.later.is_empty()
    }

    /// Whether something is being read.
    pub fn is_reading(&self) -> bool {
        self.reads > 0 || self.streaming
    }

    /// Whether something is being written.
    pub fn is_writing(&self) -> bool {
        self.writes > 0
    }

    /// Whether a write on its way may leave a value that is not small.
    pub fn is_writing_long(&self) -> bool {
        self.writes_long > 0
    }

    /// Whether a reply of any size is being made.
    pub fn is_streaming(&self) -> bool {
        self.streaming
    }

    /// Whether another command may be taken.
    pub fn have_room(&mut self) -> bool {
        let slow = self.unsent_bytes() > self.unsent_bytes_max();
        if slow && !self.slow {
            self.state.count(|stats| stats.slow_readers += 1);
        }
        self.slow = slow;
        !slow
            && !self.streaming
            && self.closing == Closing::No
            && self.reads + self.writes_values < self.reads_max()
            && self.writes_weight < Settings::WRITES_BYTES_MAX
    }

    /// Fewer reads at once where values are large, so that what they bring stays about as large as
    /// the output may be.
    fn reads_max(&self) -> usize {
        let settings = self.state.shared.settings();
        let fitting = settings.unsent_bytes_max / self.value_bytes.max(1);
        let most = settings.reads_max.min(fitting.max(READS_MIN));
        // Each read that waits is a task.
        match self.state.reads.get() > settings.reads_total_max {
            true => most.min(READS_MIN),
            false => most,
        }
    }

    /// Tells the core what this connection holds.
    pub fn account(&mut self) {
        self.unsent.set(self.unsent_bytes());
        if self.later.is_empty() && self.unsent_bytes() == 0 {
            self.state.room.sent(&self.client);
        }
        let total_max = self.state.shared.settings().unsent_total_bytes_max;
        self.state.room.changed(self.state.unsent_bytes.get(), total_max);
        self.client.unsent_bytes.set(self.unsent_bytes());
        self.client.sending_bytes.set(self.sending_bytes);
        let waiting = self.output.pinned_bytes() + self.later_pinned_bytes;
        self.pinned.set(waiting + self.sending_pinned_bytes);
        self.own_reads.set(self.reads);
    }

    /// Takes what is ready out to be sent. There is one such batch at a time; [`Replies::sent`]
    /// ends it.
    pub fn take(&mut self) -> Option<Sending> {
        let Batch { sending, bytes, pinned_bytes } = self.output.take()?;
        (self.sending_bytes, self.sending_pinned_bytes) = (bytes, pinned_bytes);
        Some(sending)
    }

    /// A batch has been sent, or not; its buffer may serve again. Returns how many bytes it had.
    pub fn sent(&mut self, batch: Sending) -> usize {
        self.output.reuse(batch);
        self.sending_pinned_bytes = 0;
        // What it is favoured for may still be made.
        if self.output.is_empty() && !self.later.iter().any(is_admitted) {
            self.state.room.sent(&self.client);
        }
        std::mem::take(&mut self.sending_bytes)
    }

    /// Appends a reply that is ready, behind those that are not.
    #[inline]
    pub fn append(&mut self, write: impl FnOnce(&mut Output)) {
        if self.later.is_empty() {
            return write(&mut self.output);
        }
        if !matches!(self.later.back(), Some(Later::Ready(_))) {
            self.later.push_back(Later::Ready(Output::default()));
        }
        if let Some(Later::Ready(output)) = self.later.back_mut() {
            let (bytes, pinned_bytes) = (output.len(), output.pinned_bytes());
            write(output);
            self.later_bytes += output.len() - bytes;
            self.later_pinned_bytes += output.pinned_bytes() - pinned_bytes;
        }
    }

    /// Answers a question about one key: at once from memory, without allocating anything, or by a
    /// task.
    pub fn read_one(&mut self, key: &[u8], ask: Ask, protocol: Protocol) {
        match self.state.reader.get_cached(FAMILY, key) {
            Some(answer) if !self.admit(answer_bytes(&answer, ask)) => {
                let (key, bytes) = (key.to_vec(), answer_bytes(&answer, ask));
                self.reads += 1;
                let command = self.command;
                self.later.push_back(Later::Held { key, bytes, ask, protocol, command });
            }
            Some(answer) => {
                self.state.count(|stats| {
                    stats.reads_cached += 1;
                    hit_or_miss(&answer, stats);
                });
                if answer.is_err() {
                    self.state.commands.failed(self.command, 1);
                }
                let state = self.state.clone();
                self.append(|output| write_one(&state, output, &answer, ask, protocol));
            }
            None => {
                self.state.count(|stats| stats.reads_waited += 1);
                let (state, key) = (self.state.clone(), key.to_vec());
                let window = self.window.clone();
                let task = self.state.core.spawn(Class::Foreground, async move {
                    let answer = small::look_up(&state, &key, ask).await;
                    let bytes_max = state.shared.settings().unsent_bytes_max;
                    match window.admit(std::slice::from_ref(&answer), bytes_max) {
                        Some(held) => Read::Answer(key, answer, held),
                        None => Read::Again(key, answer_bytes(&answer, ask)),
                    }
                });
                self.reads += 1;
                let command = self.command;
                let admitted = None;
                self.later.push_back(Later::One { task, admitted, ask, protocol, command });
            }
        }
    }

    /// Gives the values of several keys: read together if they may fit, piece by piece if not.
    pub fn read_some(&mut self, keys: Vec<Vec<u8>>, protocol: Protocol) {
        let bytes_max = self.state.shared.settings().unsent_bytes_max;
        if keys.len() > KEYS_PER_LOOKUP || keys.len() * self.value_bytes > bytes_max {
            let room = self.reserved.take();
            let stream = LookupStream::new(&self.state, keys, room, protocol);
            return self.stream(Stream::Lookup(stream));
        }
        let (state, window, count) = (self.state.clone(), self.window.clone(), keys.len());
        let task = self.state.core.spawn(Class::Foreground, async move {
            let answers = {
                let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
                state.reader.multi_get(FAMILY, &keys, None).await
            };
            match window.admit(&answers, bytes_max) {
                Some(held) => ReadSome::Answers(keys, answers, held),
                None => ReadSome::Again(keys),
            }
        });
        self.reads += count;
        let (command, admitted) = (self.command, self.reserved.take());
        self.later.push_back(Later::Some { task, admitted, protocol, keys: count, command });
    }

    /// Gives what the shard answers to a parcel of writes.
    pub fn write(&mut self, written: Written) {
        self.writes += 1;
        self.writes_weight += written.weight;
        self.writes_values += written.values;
        self.writes_long += usize::from(written.leaves_long);
        let admitted = self.reserved.take();
        self.later.push_back(Later::Written { written, admitted });
    }

    /// Gives what a task replies, if somebody wants it: it counts in any case, until it has ended.
    pub fn small(&mut self, task: JoinHandle<SmallReply>, length: Length, silent: bool) {
        let weight = match length {
            Length::Short => 1,
            Length::Long => (self.state.shared.settings().reads_max / LONG_REPLIES_MAX).max(1),
        };
        self.reads += weight;
        let (command, admitted) = (self.command, self.reserved.take());
        self.later.push_back(Later::Small { task, admitted, weight, command, silent });
    }

    /// Gives a reply of any size.
    pub fn stream(&mut self, stream: Stream) {
        self.streaming = true;
        self.later.push_back(Later::Parked(Box::new(stream)));
    }

    /// Makes the next piece, which has been admitted.
    fn next_piece(&self, mut stream: Box<Stream>) -> Later {
        stream.take_room(self.share_of(stream.wanted()));
        Later::Piece(self.state.core.spawn(Class::Background, async move { stream.next().await }))
    }

    /// Moves what is ready from the front of the queue to the output; true when anything moved.
    pub fn collect(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        let mut waits_for_client = false;
        while let Some(front) = self.later.front() {
            // What is ready moves; what has just been found waits for room, where it counts as
            // little as it can.
            let ready = matches!(front, Later::Ready(_) | Later::Parked(_));
            if !ready && self.sendable_bytes() > self.unsent_bytes_max() {
                waits_for_client = true;
                break;
            }
            let Some(front) = self.later.front_mut() else { break };
            match front {
                Later::Ready(_) => {
                    if let Some(Later::Ready(output)) = self.later.pop_front() {
                        self.later_bytes -= output.len();
                        self.later_pinned_bytes -= output.pinned_bytes();
                        self.output.append(output);
                    }
                }
                Later::Held { key, bytes, ask, protocol, command } => {
                    let (bytes, ask, protocol, command) = (*bytes, *ask, *protocol, *command);
                    let key = std::mem::take(key);
                    if !self.admit(bytes) {
                        self.later[0] = Later::Held { key, bytes, ask, protocol, command };
                        waits_for_client = true;
                        break;
                    }
                    let reader = self.state.reader.clone();
                    // Now it is its turn: whatever it finds goes out.
                    let task = self.state.core.spawn(Class::Foreground, async move {
                        let answer = reader.get(FAMILY, &key, None).await;
                        Read::Answer(key, answer, 0)
                    });
                    let admitted = Some(self.share_of(bytes));
                    self.later[0] = Later::One { task, admitted, ask, protocol, command };
                }
                Later::One { task, admitted, ask, protocol, command } => {
                    let (ask, protocol, command) = (*ask, *protocol, *command);
                    match Pin::new(&mut *task).poll(cx) {
                        Poll::Pending => break,
                        Poll::Ready(Read::Again(key, bytes)) => {
                            self.later[0] = Later::Held { key, bytes, ask, protocol, command };
                        }
                        Poll::Ready(Read::Answer(key, answer, held)) => {
                            let admitted = admitted.take().is_some();
                            self.window.leave(held);
                            let bytes = answer_bytes(&answer, ask);
                            if !admitted && !self.admit(bytes) {
                                self.later[0] = Later::Held { key, bytes, ask, protocol, command };
                                continue;
                            }
                            self.later.pop_front();
                            if answer.is_err() {
                                self.state.commands.failed(command, 1);
                            }
                            self.reads -= 1;
                            self.state.count(|stats| hit_or_miss(&answer, stats));
                            self.saw(std::slice::from_ref(&answer));
                            write_one(&self.state, &mut self.output, &answer, ask, protocol);
                        }
                    }
                }
                Later::Written { written, .. } => {
                    let Poll::Ready(answers) = written.slot.poll(cx) else { break };
                    let (protocol, silent) = (written.protocol, written.silent);
                    self.writes -= 1;
                    self.writes_weight -= written.weight;
                    self.writes_values -= written.values;
                    self.writes_long -= usize::from(written.leaves_long);
                    self.later.pop_front();
                    self.write_answers(answers, protocol, silent);
                }
                Later::Some { task, admitted, protocol, keys, command } => {
                    let Poll::Ready(found) = Pin::new(task).poll(cx) else { break };
                    let (protocol, keys, command) = (*protocol, *keys, *command);
                    let room = admitted.take();
                    self.later.pop_front();
                    self.reads -= keys;
                    match found {
                        ReadSome::Again(keys) => self.stream_first(keys, room, protocol),
                        ReadSome::Answers(keys, answers, held) => {
                            self.window.leave(held);
                            if !self.admit(held) {
                                self.stream_first(keys, room, protocol);
                                continue;
                            }
                            self.state.count(|stats| {
                                answers.iter().for_each(|answer| hit_or_miss(answer, stats));
                            });
                            self.saw(&answers);
                            if answers.iter().any(Result::is_err) {
                                self.state.commands.failed(command, 1);
                            }
                            let mut writer = Writer::new(self.output.tail(), protocol);
                            small::write_values(&answers, &mut writer);
                        }
                    }
                }
                Later::Small { task, weight, command, silent, .. } => {
                    let Poll::Ready(reply) = Pin::new(task).poll(cx) else { break };
                    self.reads -= *weight;
                    let (command, silent) = (*command, *silent);
                    self.later.pop_front();
                    if reply.bytes.first() == Some(&b'-') {
                        self.state.count(|stats| stats.errors += 1);
                        self.state.commands.failed(command, 1);
                    }
                    if !silent {
                        self.output.tail().extend_from_slice(&reply.bytes);
                    }
                    if reply.close {
                        self.later.clear();
                        (self.later_bytes, self.later_pinned_bytes) = (0, 0);
                        self.closing = Closing::AfterReplies;
                    }
                }
                Later::Piece(task) => {
                    let Poll::Ready(piece) = Pin::new(task).poll(cx) else { break };
                    self.output.tail().extend_from_slice(&piece.bytes);
                    drop(piece.room);
                    match piece.rest {
                        Rest::Done => {
                            self.later.pop_front();
                            self.streaming = self.later.iter().any(is_stream);
                        }
                        Rest::Broken => {
                            self.later.pop_front();
                            self.closing = Closing::Now;
                        }
                        Rest::More(mut stream) => {
                            let may_go_on = self.sendable_bytes() <= self.unsent_bytes_max();
                            if may_go_on && self.admit(stream.wanted()) {
                                let next = self.next_piece(stream);
                                self.later[0] = next;
                            } else {
                                stream.park();
                                self.state.count(|stats| stats.slow_readers += 1);
                                self.later[0] = Later::Parked(stream);
                            }
                        }
                    }
                }
                Later::Parked(_) => {
                    // Half empty before it goes on, so that it does not stop and go with every
                    // piece.
                    if self.sendable_bytes() > self.unsent_bytes_max() / 2 {
                        waits_for_client = true;
                        break;
                    }
                    let wanted = match self.later.front() {
                        Some(Later::Parked(stream)) => stream.wanted(),
                        _ => break,
                    };
                    if !self.admit(wanted) {
                        waits_for_client = true;
                        break;
                    }
                    if let Some(Later::Parked(stream)) = self.later.pop_front() {
                        let next = self.next_piece(stream);
                        self.later.push_front(next);
                    }
                }
            }
            moved = true;
        }
        if waits_for_client {
            self.drop_found(cx);
        }
        moved
    }

    /// Drops what has been found and has to wait for a client, this one or those that hold the
    /// memory for replies: it would keep the engine's blocks and memtables for as long. It is
    /// read again when its turn has come.
    fn drop_found(&mut self, cx: &mut Context<'_>) {
        for later in &mut self.later {
            match later {
                Later::One { task, admitted: None, ask, protocol, command } => {
                    let Poll::Ready(found) = Pin::new(task).poll(cx) else { continue };
                    let (ask, protocol, command) = (*ask, *protocol, *command);
                    let (key, bytes) = match found {
                        Read::Again(key, bytes) => (key, bytes),
                        Read::Answer(key, answer, held) => {
                            self.window.leave(held);
                            (key, answer_bytes(&answer, ask))
                        }
                    };
                    *later = Later::Held { key, bytes, ask, protocol, command };
                }
                Later::Some { task, admitted, protocol, keys, .. } => {
                    let Poll::Ready(found) = Pin::new(task).poll(cx) else { continue };
                    self.reads -= *keys;
                    let keys = match found {
                        ReadSome::Again(keys) => keys,
                        ReadSome::Answers(keys, _, held) => {
                            self.window.leave(held);
                            keys
                        }
                    };
                    let room = admitted.take();
                    let stream = LookupStream::of_large(&self.state, keys, room, *protocol);
                    self.streaming = true;
                    *later = Later::Parked(Box::new(Stream::Lookup(stream)));
                }
                _ => {}
            }
        }
    }

    /// Gives the values at the front of the queue piece by piece. What writes later waits for them.
    fn stream_first(&mut self, keys: Vec<Vec<u8>>, room: Option<Share>, protocol: Protocol) {
        let stream = LookupStream::of_large(&self.state, keys, room, protocol);
        self.streaming = true;
        self.later.push_front(Later::Parked(Box::new(Stream::Lookup(stream))));
    }

    fn write_answers(&mut self, answers: Vec<Run>, protocol: Protocol, silent: bool) {
        for Run { commands, command, answer, .. } in answers {
            if let WriteAnswer::Bulk(value) | WriteAnswer::Old(Some(value)) = &answer {
                self.value_bytes = value.len().max(self.value_bytes - self.value_bytes / 16);
            }
            if let WriteAnswer::Old(old) = &answer {
                self.state.count(|stats| match old {
                    Some(_) => stats.hits += 1,
                    None => stats.misses += 1,
                });
            }
            if matches!(answer, WriteAnswer::Refused(_) | WriteAnswer::Failed(_)) {
                self.state.count(|stats| stats.errors += u64::from(commands));
                self.state.commands.failed(command, commands.into());
            }
            if silent {
                continue;
            }
            let mut writer = Writer::new(self.output.tail(), protocol);
            for _ in 0..commands {
                match &answer {
                    WriteAnswer::Ok => writer.ok(),
                    WriteAnswer::Null | WriteAnswer::Old(None) => writer.null(),
                    WriteAnswer::Integer(value) => writer.integer(*value),
                    WriteAnswer::Bulk(value) | WriteAnswer::Old(Some(value)) => writer.bulk(value),
                    WriteAnswer::Refused(text) => writer.error(text),
                    WriteAnswer::Failed(text) => writer.error(text),
                }
            }
        }
    }

    /// Remembers how large values are; forgets slowly.
    fn saw(&mut self, answers: &[Answer]) {
        for answer in answers {
            if let Ok(Some(value)) = answer {
                self.value_bytes = value.len().max(self.value_bytes - self.value_bytes / 16);
            }
        }
    }
}

/// Whether memory has been taken for it already.
fn is_admitted(later: &Later) -> bool {
    match later {
        Later::One { admitted, .. }
        | Later::Some { admitted, .. }
        | Later::Written { admitted, .. }
        | Later::Small { admitted, .. } => admitted.is_some(),

        Later::Piece(_) => true,
        Later::Parked(stream) => stream.holds_room(),
        _ => false,
    }
}

fn is_stream(later: &Later) -> bool {
    matches!(later, Later::Piece(_) | Later::Parked(_))
}

/// About how long the reply is.
fn answer_bytes(answer: &Answer, ask: Ask) -> usize {
    match (answer, ask) {
        (Ok(Some(value)), Ask::Value | Ask::Part { .. }) => value.len(),
        _ => 0,
    }
}

fn hit_or_miss(answer: &Answer, stats: &mut KvStats) {
    match answer {
        Ok(Some(_)) => stats.hits += 1,
        Ok(None) => stats.misses += 1,
        Err(_) => stats.errors += 1,
    }
}

/// Writes the reply to a question about one key. A long value is sent from where it lies.
#[inline]
fn write_one(
    state: &CoreState,
    output: &mut Output,
    answer: &Answer,
    ask: Ask,
    protocol: Protocol,
) {
    let value = match answer {
        Ok(value) => value.as_ref(),
        Err(error) => {
            return small::write_error(error, &mut Writer::new(output.tail(), protocol));
        }
    };
    if let Some(value) = value
        && ask == Ask::Value
        && value.len() >= state.shared.settings().reference_bytes_min
        && let Some(slice) = value.as_slice()
        && state.pinned_bytes.get() + output.pinned_bytes() + slice.footprint()
            <= state.shared.settings().pinned_bytes_max
    {
        Writer::new(output.tail(), protocol).bulk_header(value.len());
        output.push_slice(slice.clone());
        output.tail().extend_from_slice(b"\r\n");
        return;
    }
    small::write_answer(
        value.map(|value| &**value),
        ask,
        &mut Writer::new(output.tail(), protocol),
    );
}

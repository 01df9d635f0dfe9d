//! The replies of one connection, in the order of its commands, even when they are not made in that
//! order.
//!
//! A reply that needs no disk is written immediately. Every other reply becomes a task and joins a
//! queue ([`pending`]); replies after it queue up too. [`Replies::collect`] moves replies that are
//! ready from the queue's front to the output.
//!
//! Memory is bounded. No command is taken while the output is full or a reply of unbounded size is
//! being made. Reads that were started before their turn drop what does not fit (see
//! [`pending::Window`]), and are fewer where values are large; while the connection waits for a
//! client, they drop everything they have found. A task whose reply may be long counts as many
//! reads. The memory of all connections of a core is bounded, too: a reply that is not small is
//! admitted first (see `client::reply_room`). A value that is not admitted is dropped and read
//! again later.

mod collect;
mod pending;

use std::collections::VecDeque;
use std::rc::Rc;

use reactor::{Class, JoinHandle};
use resp::Protocol;

use crate::client::gauge::Share;
use crate::client::registry::Client;
use crate::command::commands::Ask;
use crate::command::spec::CommandId;
use crate::connection::output::{Batch, Output, Sending};
use crate::connection::replies::pending::{
    Found, FoundMany, PendingReply, Query, Window, answer_bytes, count_hit, write_one,
};
use crate::core::slow_log::Noted;
use crate::core::state::CoreState;
use crate::read::small;
use crate::read::stream::{KEYS_PER_LOOKUP, LookupStream, Stream};
use crate::settings::Settings;
use crate::shard::change::Answer;
use crate::shard::parcel::AnswerSlot;

pub(crate) use crate::connection::replies::collect::write_answer;
pub(crate) use crate::connection::replies::pending::{Length, SmallReply, Written};

/// Concurrent reads that are allowed however large the values are.
const READS_MIN: usize = 4;

/// Concurrent tasks with long replies.
const LONG_REPLIES_MAX: usize = 2;

/// Whether the connection is to be closed, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// Not at all.
    No,
    /// After the replies in progress have been sent.
    AfterReplies,
    /// Immediately: what would be sent is not true.
    Now,
}

/// The replies of one connection.
pub(crate) struct Replies {
    state: Rc<CoreState>,
    client: Rc<Client>,
    output: Output,
    pending: VecDeque<PendingReply>,
    /// Bytes that are ready in the queue, and bytes of the engine's buffers that these pin.
    pending_bytes: usize,
    pending_pinned_bytes: usize,
    /// Reads in progress.
    reads: usize,
    /// Parcels of writes in flight, their weight, and the number of their answers that may be as
    /// long as values.
    writes: usize,
    writes_weight: usize,
    writes_values: usize,
    /// Parcels that may leave a value that is not small.
    writes_long: usize,
    /// The largest value read lately, which limits the number of concurrent reads.
    value_bytes: usize,
    window: Window,
    streaming: bool,
    pub closing: Closing,
    /// The command being executed.
    pub command: Option<CommandId>,
    /// The command whose reply of any size is being made, if it may belong into the slow log.
    pub noted: Option<Noted>,
    sending_bytes: usize,
    sending_pinned_bytes: usize,
    unsent: Share,
    pinned: Share,
    /// Its part of the reads in progress on the core.
    own_reads: Share,
    slow: bool,
    /// Memory taken for the next command's reply.
    reserved: Option<Share>,
    /// The answer to the transaction that was in flight, and the memory taken for its replies.
    executed: Option<(Answer, Option<Share>)>,
    /// The keys that it has written, where the connection wants to know them.
    pub wrote: Vec<Vec<u8>>,
}

impl Drop for Replies {
    fn drop(&mut self) {
        self.state.room.leave(&self.client);
        self.pending.drain(..).for_each(PendingReply::cancel);
    }
}

impl Replies {
    pub fn new(state: &Rc<CoreState>, client: &Rc<Client>) -> Self {
        Self {
            state: state.clone(),
            client: client.clone(),
            output: Output::default(),
            pending: VecDeque::new(),
            pending_bytes: 0,
            pending_pinned_bytes: 0,
            reads: 0,
            writes: 0,
            writes_weight: 0,
            writes_values: 0,
            writes_long: 0,
            value_bytes: 0,
            window: Window::new(state),
            streaming: false,
            closing: Closing::No,
            command: None,
            noted: None,
            sending_bytes: 0,
            sending_pinned_bytes: 0,
            unsent: state.unsent_bytes.share(),
            pinned: state.pinned_bytes.share(),
            own_reads: state.reads.share(),
            slow: false,
            reserved: None,
            executed: None,
            wrote: Vec::new(),
        }
    }

    /// Bytes that all connections of the core hold, with the present value for this one.
    fn total_bytes(&self) -> usize {
        self.state.unsent_bytes.get() - self.unsent.part() + self.unsent_bytes()
    }

    /// Unsent bytes that this connection may have now.
    fn unsent_bytes_max(&self) -> usize {
        self.state.unsent_bytes_max(self.total_bytes())
    }

    /// Whether a reply of `bytes` bytes may be made now. If not, the connection's task is woken
    /// when it may.
    fn admit(&self, bytes: usize) -> bool {
        let total_max = self.state.node.settings().unsent_total_bytes_max;
        bytes <= Settings::REPLY_BYTES_SMALL
            || self.state.room.admit(&self.client, bytes, self.total_bytes(), total_max)
    }

    /// Takes memory for the reply of the next command, where its length is known in advance. If
    /// there is none, the connection's task is woken when there is.
    pub fn reserve(&mut self, bytes: usize) -> bool {
        if !self.admit(bytes) {
            return false;
        }
        self.reserved = Some(self.share_of(bytes));
        true
    }

    /// Whether [`Replies::reserve`] will succeed; it must be tried next.
    pub fn may_reserve(&self, bytes: usize) -> bool {
        let may = self.admit(bytes);
        if may {
            self.state.room.give_back(&self.client, bytes);
        }
        may
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

    /// Ends the reservation after the command has been executed.
    pub fn end_reservation(&mut self) {
        self.reserved = None;
    }

    /// Bytes of replies that are made and not yet sent.
    pub fn unsent_bytes(&self) -> usize {
        self.sendable_bytes() + self.pending_bytes
    }

    /// The part of them that only the client's reading holds up.
    fn sendable_bytes(&self) -> usize {
        self.sending_bytes + self.output.len()
    }

    /// Memory kept for further replies, in bytes.
    pub fn room_bytes(&self) -> usize {
        self.output.room_bytes()
    }

    /// Releases unused memory.
    pub fn release(&mut self) {
        self.output.release();
    }

    /// Whether replies are still being made.
    pub fn is_busy(&self) -> bool {
        !self.pending.is_empty() || self.executed.is_some()
    }

    /// Whether a read is in progress.
    pub fn is_reading(&self) -> bool {
        self.reads > 0 || self.streaming
    }

    /// Whether a write is in flight.
    pub fn is_writing(&self) -> bool {
        self.writes > 0
    }

    /// Whether a write in flight may leave a value that is not small.
    pub fn is_writing_long(&self) -> bool {
        self.writes_long > 0
    }

    /// Whether a reply of any size is being made.
    pub fn is_streaming(&self) -> bool {
        self.streaming
    }

    /// Whether another command may be taken.
    pub fn has_room(&mut self) -> bool {
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

    /// The maximum of concurrent reads: fewer where values are large, so that their values together
    /// stay about as large as the output may be.
    fn reads_max(&self) -> usize {
        let settings = self.state.node.settings();
        let fitting = settings.unsent_bytes_max / self.value_bytes.max(1);
        let most = settings.reads_max.min(fitting.max(READS_MIN));
        // Each waiting read is a task.
        match self.state.reads.get() > settings.reads_total_max {
            true => most.min(READS_MIN),
            false => most,
        }
    }

    /// Updates the core's sums with what this connection holds.
    pub fn account(&mut self) {
        self.unsent.set(self.unsent_bytes());
        if self.pending.is_empty() && self.unsent_bytes() == 0 {
            self.state.room.sent(&self.client);
        }
        let total_max = self.state.node.settings().unsent_total_bytes_max;
        self.state.room.changed(self.state.unsent_bytes.get(), total_max);
        self.client.unsent_bytes.set(self.unsent_bytes());
        self.client.sending_bytes.set(self.sending_bytes);
        let waiting = self.output.pinned_bytes() + self.pending_pinned_bytes;
        self.pinned.set(waiting + self.sending_pinned_bytes);
        self.own_reads.set(self.reads);
    }

    /// Takes the replies that are ready out to be sent. There is one such batch at a time;
    /// [`Replies::sent`] ends it.
    pub fn take(&mut self) -> Option<Batch> {
        let batch = self.output.take()?;
        (self.sending_bytes, self.sending_pinned_bytes) = (batch.bytes, batch.pinned_bytes);
        self.client.moved_ns.set(self.state.core.now_ns());
        if batch.bytes > Settings::REPLY_BYTES_SMALL {
            self.client.reads.set(false);
        }
        Some(batch)
    }

    /// A batch has been sent, or has failed; its buffer may be reused. Returns its length.
    pub fn sent(&mut self, batch: Sending) -> usize {
        self.output.reuse(batch);
        self.sending_pinned_bytes = 0;
        // The reply for which it is favoured may still be in progress.
        if self.output.is_empty() && !self.pending.iter().any(PendingReply::is_admitted) {
            self.state.room.sent(&self.client);
        }
        std::mem::take(&mut self.sending_bytes)
    }

    /// Appends a reply that is ready, after those that are not.
    #[inline]
    pub fn append(&mut self, write: impl FnOnce(&mut Output)) {
        if self.pending.is_empty() {
            return write(&mut self.output);
        }
        if !matches!(self.pending.back(), Some(PendingReply::Ready(_))) {
            self.pending.push_back(PendingReply::Ready(Output::default()));
        }
        if let Some(PendingReply::Ready(output)) = self.pending.back_mut() {
            let (bytes, pinned_bytes) = (output.len(), output.pinned_bytes());
            write(output);
            self.pending_bytes += output.len() - bytes;
            self.pending_pinned_bytes += output.pinned_bytes() - pinned_bytes;
        }
    }

    /// Whether messages that no command asked for may be sent.
    pub fn may_push(&self) -> bool {
        self.unsent_bytes() <= self.unsent_bytes_max()
    }

    /// Appends messages that no command asked for, after the replies that have been begun.
    pub fn push(&mut self, messages: &[u8]) {
        match lsm::mutant("invalidations_overtake_replies") {
            true => self.output.tail().extend_from_slice(messages),
            false => self.append(|output| output.tail().extend_from_slice(messages)),
        }
    }

    /// Answers a read of one key: immediately from memory, without an allocation, or by a task.
    pub fn get(&mut self, key: &[u8], ask: Ask, protocol: Protocol) {
        let query = Query { ask, protocol, command: self.command };
        match self.state.reader.get_cached(self.state.family, key) {
            Some(answer) if !self.admit(answer_bytes(&answer, ask)) => {
                let (key, bytes) = (key.to_vec(), answer_bytes(&answer, ask));
                self.reads += 1;
                self.pending.push_back(PendingReply::Deferred { key, bytes, query });
            }
            Some(answer) => {
                self.state.count(|stats| {
                    stats.reads_cached += 1;
                    count_hit(&answer, stats);
                });
                if answer.is_err() {
                    self.state.commands.failed(self.command, 1);
                }
                let state = self.state.clone();
                self.append(|output| write_one(&state, output, &answer, query));
            }
            None => {
                self.state.count(|stats| stats.reads_waited += 1);
                let (state, key) = (self.state.clone(), key.to_vec());
                let (window, is_next) = (self.window.clone(), self.pending.is_empty());
                let task = self.state.core.spawn(Class::Foreground, async move {
                    let answer = small::look_up(&state, &key, ask).await;
                    match window.admit(&state, std::slice::from_ref(&answer), is_next) {
                        Some(held) => Found::Answer(key, answer, held),
                        None => Found::Again(key, answer_bytes(&answer, ask)),
                    }
                });
                self.reads += 1;
                self.pending.push_back(PendingReply::Get { task, admitted: None, query });
            }
        }
    }

    /// Answers a read of several keys: together if their values may fit, otherwise piece by piece.
    pub fn multi_get(&mut self, keys: Vec<Vec<u8>>, protocol: Protocol) {
        let bytes_max = self.state.node.settings().unsent_bytes_max;
        if keys.len() > KEYS_PER_LOOKUP || keys.len() * self.value_bytes > bytes_max {
            let room = self.reserved.take();
            let stream = LookupStream::new(&self.state, keys, room, protocol);
            return self.stream(Stream::Lookup(stream));
        }
        let (state, window, count) = (self.state.clone(), self.window.clone(), keys.len());
        let is_next = self.pending.is_empty();
        let task = self.state.core.spawn(Class::Foreground, async move {
            let answers = {
                let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
                state.reader.multi_get(state.family, &keys, None).await
            };
            match window.admit(&state, &answers, is_next) {
                Some(held) => FoundMany::Answers(keys, answers, held),
                None => FoundMany::Again(keys),
            }
        });
        self.reads += count;
        let (command, admitted) = (self.command, self.reserved.take());
        self.pending.push_back(PendingReply::MultiGet {
            task,
            admitted,
            protocol,
            keys: count,
            command,
        });
    }

    /// Appends the answers to a parcel of writes.
    pub fn write(&mut self, written: Written) {
        self.writes += 1;
        self.writes_weight += written.weight;
        self.writes_values += written.values;
        self.writes_long += usize::from(written.leaves_long);
        let admitted = self.reserved.take();
        self.pending.push_back(PendingReply::Written { written, admitted });
    }

    /// Waits for the answer to a transaction; see [`Replies::take_executed`].
    pub fn execute(&mut self, slot: Rc<AnswerSlot>) {
        let admitted = self.reserved.take();
        self.pending.push_back(PendingReply::Executing { slot, admitted });
    }

    /// Whether the answer to a transaction has come.
    pub fn has_executed(&self) -> bool {
        self.executed.is_some()
    }

    /// The answer to a transaction, if it has come. The memory for its replies is that of the next
    /// reply.
    pub fn take_executed(&mut self) -> Option<Answer> {
        let (answer, admitted) = self.executed.take()?;
        self.reserved = admitted;
        Some(answer)
    }

    /// Appends the reply of a task, unless the client wants none. The task counts as a read until
    /// it has ended.
    pub fn task(&mut self, task: JoinHandle<SmallReply>, length: Length, silent: bool) {
        let weight = match length {
            Length::Short => 1,
            Length::Long | Length::Bulk => {
                (self.state.node.settings().reads_max / LONG_REPLIES_MAX).max(1)
            }
        };
        self.reads += weight;
        let (command, admitted) = (self.command, self.reserved.take());
        self.pending.push_back(PendingReply::Task { task, admitted, weight, command, silent });
    }

    /// Appends a reply of any size.
    pub fn stream(&mut self, stream: Stream) {
        self.streaming = true;
        self.pending.push_back(PendingReply::Parked(Box::new(stream)));
    }

    /// Starts the next piece, which has been admitted.
    fn next_piece(&self, mut stream: Box<Stream>) -> PendingReply {
        stream.take_room(self.share_of(stream.wanted()));
        PendingReply::Piece(
            self.state.core.spawn(Class::Background, async move { stream.next().await }),
        )
    }
}

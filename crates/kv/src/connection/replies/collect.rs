//! Moves pending replies to the output, in order.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use reactor::{Class, JoinHandle};
use resp::{Protocol, Writer};

use crate::client::gauge::Share;
use crate::client::tracking::{Named, append_own, write_invalidation};
use crate::command::spec::CommandId;
use crate::connection::replies::pending::{
    Answer, Found, FoundMany, PendingReply, answer_bytes, count_hit, write_one,
};
use crate::connection::replies::{Closing, Replies};
use crate::read::small;
use crate::read::stream::{LookupStream, Rest, Stream};
use crate::shard::change::Answer as WriteAnswer;
use crate::shard::execute::discarded;
use crate::shard::parcel::AnswerRun;

/// Writes the reply of an answer of the shard.
pub(crate) fn write_answer(answer: &WriteAnswer, writer: &mut Writer<'_>) {
    match answer {
        WriteAnswer::Ok => writer.ok(),
        WriteAnswer::Null | WriteAnswer::Old(None) => writer.null(),
        WriteAnswer::Integer(value) => writer.integer(*value),
        WriteAnswer::Integers(values) => {
            writer.array(values.len());
            for value in values {
                match value {
                    Some(value) => writer.integer(*value),
                    None => writer.null(),
                }
            }
        }
        WriteAnswer::Bulk(value) | WriteAnswer::Old(Some(value)) => writer.bulk(value),
        WriteAnswer::Values(values) => {
            writer.array(values.len());
            for value in values {
                match value {
                    Some(value) => writer.bulk(value),
                    None => writer.null(),
                }
            }
        }
        WriteAnswer::Oks(count) => {
            writer.array(*count as usize);
            for _ in 0..*count {
                writer.ok();
            }
        }
        WriteAnswer::Refused(text) => writer.error(text),
        WriteAnswer::Failed(text) => writer.error(text),
        // The connection of a transaction has taken these apart.
        WriteAnswer::Executed(_) | WriteAnswer::Conflict | WriteAnswer::Larger(_) => writer.null(),
    }
}

/// The result of one look at the reply at the front of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// It moved to the output, or came closer to it.
    Moved,
    /// It waits in another form, which is to be checked next.
    Replaced,
    /// It is not ready.
    Pending,
    /// It waits until clients read: its own, or those that hold the memory for replies.
    WaitsForClient,
}

/// The result of a task, if it has ended.
fn poll_task<T>(task: &mut JoinHandle<T>, cx: &mut Context<'_>) -> Option<T> {
    match Pin::new(task).poll(cx) {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    }
}

impl Replies {
    /// Moves what is ready from the front of the queue to the output; true when anything moved.
    pub fn collect(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        loop {
            match self.collect_front(cx) {
                Progress::Moved => moved = true,
                Progress::Replaced => {}
                Progress::Pending => break,
                Progress::WaitsForClient => {
                    self.drop_found(cx);
                    break;
                }
            }
        }
        moved
    }

    fn collect_front(&mut self, cx: &mut Context<'_>) -> Progress {
        let Some(front) = self.pending.front() else { return Progress::Pending };
        // Replies that are ready move; those of tasks wait for room where they cost the least.
        let ready = matches!(front, PendingReply::Ready(_) | PendingReply::Parked(_));
        if !ready && self.sendable_bytes() > self.unsent_bytes_max() {
            return Progress::WaitsForClient;
        }
        match front {
            PendingReply::Ready(_) => self.collect_ready(),
            PendingReply::Deferred { .. } => self.start_deferred(),
            PendingReply::Get { .. } => self.collect_get(cx),
            PendingReply::MultiGet { .. } => self.collect_multi_get(cx),
            PendingReply::Task { .. } => self.collect_task(cx),
            PendingReply::Piece(_) => self.collect_piece(cx),
            PendingReply::Parked(_) => self.resume_parked(),
            PendingReply::Written { .. } => self.collect_written(cx),
            PendingReply::Executing { .. } => self.collect_executed(cx),
        }
    }

    fn collect_ready(&mut self) -> Progress {
        if let Some(PendingReply::Ready(output)) = self.pending.pop_front() {
            self.pending_bytes -= output.len();
            self.pending_pinned_bytes -= output.pinned_bytes();
            self.output.append(output);
        }
        Progress::Moved
    }

    /// Reads a value whose turn has come; it is sent however long it is.
    fn start_deferred(&mut self) -> Progress {
        let Some(&mut PendingReply::Deferred { ref mut key, bytes, query }) =
            self.pending.front_mut()
        else {
            return Progress::Pending;
        };
        let key = std::mem::take(key);
        if !self.admit(bytes) {
            self.pending[0] = PendingReply::Deferred { key, bytes, query };
            return Progress::WaitsForClient;
        }
        let (reader, family) = (self.state.reader.clone(), self.state.family);
        let task = self.state.core.spawn(Class::Foreground, async move {
            let answer = reader.get(family, &key).await;
            Found::Answer(key, answer, 0)
        });
        let admitted = Some(self.share_of(bytes));
        self.pending[0] = PendingReply::Get { task, admitted, query };
        Progress::Moved
    }

    fn collect_get(&mut self, cx: &mut Context<'_>) -> Progress {
        let Some(PendingReply::Get { task, admitted, query }) = self.pending.front_mut() else {
            return Progress::Pending;
        };
        let Some(found) = poll_task(task, cx) else { return Progress::Pending };
        let query = *query;
        let (key, answer, held) = match found {
            Found::Answer(key, answer, held) => (key, answer, held),
            Found::Again(key, bytes) => {
                self.pending[0] = PendingReply::Deferred { key, bytes, query };
                return Progress::Moved;
            }
        };
        // The value may be longer than it was when its read was admitted, or its length unknown
        // then.
        let admitted_bytes = admitted.take().map_or(0, |room| room.part());
        self.window.leave(held);
        let bytes = answer_bytes(&answer, query.ask);
        if bytes > admitted_bytes && !self.admit(bytes) {
            self.pending[0] = PendingReply::Deferred { key, bytes, query };
            return Progress::Replaced;
        }
        self.pending.pop_front();
        if answer.is_err() {
            self.state.commands.failed(query.command, 1);
        }
        self.reads -= 1;
        self.state.count(|stats| count_hit(&answer, stats));
        self.saw(std::slice::from_ref(&answer));
        write_one(&self.state, &mut self.output, &answer, query);
        Progress::Moved
    }

    fn collect_multi_get(&mut self, cx: &mut Context<'_>) -> Progress {
        let Some(&mut PendingReply::MultiGet {
            ref mut task,
            ref mut admitted,
            protocol,
            keys,
            command,
        }) = self.pending.front_mut()
        else {
            return Progress::Pending;
        };
        let Some(found) = poll_task(task, cx) else { return Progress::Pending };
        let room = admitted.take();
        self.pending.pop_front();
        self.reads -= keys;
        let (keys, answers, held) = match found {
            FoundMany::Answers(keys, answers, held) => (keys, answers, held),
            FoundMany::Again(keys) => {
                self.stream_first(keys, room, protocol);
                return Progress::Moved;
            }
        };
        self.window.leave(held);
        if !self.admit(held) {
            self.stream_first(keys, room, protocol);
            return Progress::Replaced;
        }
        self.state.count(|stats| answers.iter().for_each(|answer| count_hit(answer, stats)));
        self.saw(&answers);
        if answers.iter().any(Result::is_err) {
            self.state.commands.failed(command, 1);
        }
        small::write_values(&answers, &mut Writer::new(self.output.tail(), protocol));
        Progress::Moved
    }

    fn collect_task(&mut self, cx: &mut Context<'_>) -> Progress {
        let Some(&mut PendingReply::Task { ref mut task, weight, command, silent, .. }) =
            self.pending.front_mut()
        else {
            return Progress::Pending;
        };
        let Some(reply) = poll_task(task, cx) else { return Progress::Pending };
        self.reads -= weight;
        self.pending.pop_front();
        if reply.bytes.first() == Some(&b'-') {
            self.state.count(|stats| stats.errors += 1);
            self.state.commands.failed(command, 1);
        }
        if !silent {
            self.output.append(reply.bytes.into());
        }
        if reply.close {
            self.pending.clear();
            (self.pending_bytes, self.pending_pinned_bytes) = (0, 0);
            self.closing = Closing::AfterReplies;
        }
        Progress::Moved
    }

    fn collect_piece(&mut self, cx: &mut Context<'_>) -> Progress {
        let Some(PendingReply::Piece(task)) = self.pending.front_mut() else {
            return Progress::Pending;
        };
        let Some(piece) = poll_task(task, cx) else { return Progress::Pending };
        self.output.append(piece.bytes.into());
        drop(piece.room);
        match piece.rest {
            Rest::Done => {
                self.pending.pop_front();
                self.streaming = self.pending.iter().any(PendingReply::is_stream);
                if let Some(noted) = self.noted.take() {
                    self.state.note_slow(noted);
                }
            }
            Rest::Broken => {
                self.pending.pop_front();
                self.closing = Closing::Now;
            }
            Rest::More(mut stream) => {
                let may_continue = self.sendable_bytes() <= self.unsent_bytes_max();
                if may_continue && self.admit(stream.wanted()) {
                    self.pending[0] = self.next_piece(stream);
                } else {
                    stream.park();
                    self.state.count(|stats| stats.slow_readers += 1);
                    self.pending[0] = PendingReply::Parked(stream);
                }
            }
        }
        Progress::Moved
    }

    /// Continues a reply that waited for its client or for memory.
    fn resume_parked(&mut self) -> Progress {
        // Hysteresis: resume at half, to avoid stopping at every piece.
        if self.sendable_bytes() > self.unsent_bytes_max() / 2 {
            return Progress::WaitsForClient;
        }
        let Some(PendingReply::Parked(stream)) = self.pending.front() else {
            return Progress::Pending;
        };
        if !self.admit(stream.wanted()) {
            return Progress::WaitsForClient;
        }
        if let Some(PendingReply::Parked(stream)) = self.pending.pop_front() {
            let next = self.next_piece(stream);
            self.pending.push_front(next);
        }
        Progress::Moved
    }

    fn collect_written(&mut self, cx: &mut Context<'_>) -> Progress {
        let Some(PendingReply::Written { written, .. }) = self.pending.front() else {
            return Progress::Pending;
        };
        let Poll::Ready(answers) = written.slot.poll(cx) else { return Progress::Pending };
        let (protocol, silent) = (written.protocol, written.silent);
        self.writes -= 1;
        self.writes_weight -= written.weight;
        self.writes_values -= written.values;
        self.writes_long -= usize::from(written.leaves_long);
        self.pending.pop_front();
        self.write_answers(answers, protocol, silent);
        Progress::Moved
    }

    fn collect_executed(&mut self, cx: &mut Context<'_>) -> Progress {
        let Some(PendingReply::Executing { slot, admitted }) = self.pending.front_mut() else {
            return Progress::Pending;
        };
        let Poll::Ready(answers) = slot.poll(cx) else { return Progress::Pending };
        let run = answers.into_iter().next();
        let (answer, wrote) =
            run.map_or((WriteAnswer::Null, Vec::new()), |run| (run.answer, run.wrote));
        self.wrote = wrote;
        self.executed = Some((answer, admitted.take()));
        self.pending.pop_front();
        Progress::Moved
    }

    /// Drops values that have been found and have to wait for a client: they would keep the
    /// engine's blocks and memtables for as long. They are read again when their turn has come.
    fn drop_found(&mut self, cx: &mut Context<'_>) {
        for reply in &mut self.pending {
            match reply {
                PendingReply::Get { task, admitted: None, query } => {
                    let Some(found) = poll_task(task, cx) else { continue };
                    let query = *query;
                    let (key, bytes) = match found {
                        Found::Again(key, bytes) => (key, bytes),
                        Found::Answer(key, answer, held) => {
                            self.window.leave(held);
                            (key, answer_bytes(&answer, query.ask))
                        }
                    };
                    *reply = PendingReply::Deferred { key, bytes, query };
                }
                PendingReply::MultiGet { task, admitted, protocol, keys, .. } => {
                    let Some(found) = poll_task(task, cx) else { continue };
                    self.reads -= *keys;
                    let keys = match found {
                        FoundMany::Again(keys) => keys,
                        FoundMany::Answers(keys, _, held) => {
                            self.window.leave(held);
                            keys
                        }
                    };
                    let room = admitted.take();
                    let stream = LookupStream::of_large(&self.state, keys, room, *protocol);
                    self.streaming = true;
                    *reply = PendingReply::Parked(Box::new(Stream::Lookup(stream)));
                }
                _ => {}
            }
        }
    }

    /// Puts the values of some keys at the front of the queue, to be written piece by piece. Later
    /// replies wait for them.
    fn stream_first(&mut self, keys: Vec<Vec<u8>>, room: Option<Share>, protocol: Protocol) {
        let stream = LookupStream::of_large(&self.state, keys, room, protocol);
        self.streaming = true;
        self.pending.push_front(PendingReply::Parked(Box::new(Stream::Lookup(stream))));
    }

    fn write_answers(&mut self, answers: Vec<AnswerRun>, protocol: Protocol, silent: bool) {
        for AnswerRun { commands, command, mut answer, wrote, .. } in answers {
            if let WriteAnswer::Oks(_) = answer {
                self.state.count(|stats| stats.transactions += 1);
            } else if command == Some(CommandId::Exec) {
                answer = discarded(answer);
            }
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
            if !silent {
                let mut writer = Writer::new(self.output.tail(), protocol);
                for _ in 0..commands {
                    write_answer(&answer, &mut writer);
                }
            }
            if self.client.tracking.is_on() {
                let clears = matches!(command, Some(CommandId::Flushall | CommandId::Flushdb));
                let all = clears && answer == WriteAnswer::Ok;
                self.tell_of_own(&wrote, all, protocol);
            }
        }
    }

    /// Tells a tracked connection of the keys that it has written itself, right after the reply.
    fn tell_of_own(&mut self, wrote: &[Vec<u8>], all: bool, protocol: Protocol) {
        let (tracking, id) = (&self.client.tracking, self.client.id);
        let Some(tracked) = tracking.tracked().filter(|_| tracking.tells_itself(id)) else {
            return;
        };
        let form = tracking.form(protocol, tracked.redirect != 0);
        if all && let Some(form) = form {
            write_invalidation(self.output.tail(), form, Named::All);
        }
        let mut own = Vec::new();
        for key in wrote.iter().filter(|_| !tracked.broadcast) {
            if self.state.tracking.forget(key, id)
                && !tracked.no_loop
                && let Some(form) = form
            {
                write_invalidation(&mut own, form, Named::Keys(&[key]));
            }
        }
        if let Some(form) = form {
            append_own(self.output.tail(), form, &own);
        }
    }

    /// Remembers the size of values, as a slowly decaying maximum.
    fn saw(&mut self, answers: &[Answer]) {
        for answer in answers {
            if let Ok(Some(value)) = answer {
                self.value_bytes = value.len().max(self.value_bytes - self.value_bytes / 16);
            }
        }
    }
}

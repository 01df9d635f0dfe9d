//! Writes in flight: changes that have been made, on their way through the engine.
//!
//! Small changes of a turn are gathered into one batch. The engine lands batches in order; an
//! answer that needed no write waits in the same queue for the writes before it.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use lsm::{BatchWriter, Written};

use crate::expiry::Deadline;
use crate::expiry::ledger::Noted;
use crate::expiry::record::hash;
use crate::settings::FAMILY;
use crate::shard::answers::AnswerTarget;
use crate::shard::change::{Answer, entries};
use crate::shard::modify::OldValue;
use crate::shard::overlay::{Key, Newest, Ticket};
use crate::shard::turns::Connection;
use crate::shard::{KEPT_BYTES_MAX, ShardState};

/// Changes that have been made, with their answers.
pub(super) struct Flight {
    /// `None` if there was nothing to write.
    pub written: Option<(Ticket, Written, Vec<Key>)>,
    /// The connections that have written the keys, with the number of keys of each.
    pub authors: Vec<(Connection, usize)>,
    pub built_bytes: usize,
    pub answers: Vec<(AnswerTarget, Answer)>,
}

/// Changes that have been made and not yet handed to the engine.
#[derive(Default)]
pub(super) struct Gathered {
    pub batch: BatchWriter,
    /// The amount by which they change the number of keys.
    delta: i64,
    keys: Vec<Key>,
    authors: Vec<(Connection, usize)>,
    built_bytes: usize,
    pub answers: Vec<(AnswerTarget, Answer)>,
    /// The deadlines of its values.
    notes: Vec<Noted>,
}

impl ShardState {
    /// Adds a batch to those that go to the engine next. `old` is what was there before it, key by
    /// key, and `deadlines` when its keys end; those that are missing there never end.
    pub(super) fn gather(
        &self,
        mut batch: BatchWriter,
        (old, deadlines): (&[OldValue], &[Deadline]),
        built_bytes: usize,
        (mut target, answer): (AnswerTarget, Answer),
    ) {
        let ticket = self.ticket.get() + 1;
        let small = matches!(
            answer,
            Answer::Integer(_) | Answer::Bulk(_) | Answer::Old(_) | Answer::Executed(_)
        );
        let gathered = &mut *self.gathered.borrow_mut();
        let mut overlay = self.overlay.borrow_mut();
        let mut known = self.known.borrow_mut();
        let mut watches = self.watches.borrow_mut();
        let keys_before = gathered.keys.len();
        let first = u64::from(gathered.batch.count());
        for (at, ((key, value), old)) in entries(&mut batch).zip(old).enumerate() {
            let deadline = deadlines.get(at).copied().unwrap_or_default();
            if let Some(value) = value.filter(|_| deadline != Deadline::NEVER) {
                self.ledger.begin();
                let at = first + at as u64;
                gathered.notes.push(Noted { at, key: key.to_vec(), hash: hash(value), deadline });
            }
            let print = self.print(key);
            // A key that the batch names twice has the state that the first operation left.
            let before = match overlay.newest(key, print) {
                Some((last, newest)) if *last == ticket => *newest != Newest::Missing,
                _ => old.is_stored(),
            };
            known.set(print, value.is_some());
            match (value, old) {
                (None, OldValue::Expired) => watches.touch_expired(print),
                _ => watches.touch(print),
            }
            if target.tells {
                target.wrote.push(key.to_vec());
            }
            gathered.delta += i64::from(value.is_some()) - i64::from(before);
            let newest = match value {
                None => Newest::Missing,
                Some(value) if small && value.len() <= KEPT_BYTES_MAX => {
                    Newest::Value(value.into(), deadline)
                }
                Some(_) => Newest::There(deadline),
            };
            gathered.keys.push(overlay.write(key, print, ticket, newest));
        }
        let keys = gathered.keys.len() - keys_before;
        if lsm::mutant("writes_are_announced_early") {
            self.announce_keys(&gathered.keys[keys_before..], &[(target.answers.connection, keys)]);
        }
        match gathered.authors.last_mut() {
            Some((last, count)) if *last == target.answers.connection => *count += keys,
            _ => gathered.authors.push((target.answers.connection, keys)),
        }
        if gathered.batch.is_empty() && self.family == FAMILY {
            gathered.batch = batch;
        } else {
            for (key, value) in entries(&mut batch) {
                match value {
                    Some(value) => gathered.batch.put(self.family, key, value),
                    None => gathered.batch.delete(self.family, key),
                }
            }
        }
        gathered.built_bytes += built_bytes;
        gathered.answers.push((target, answer));
        self.built_bytes.set(self.built_bytes.get() + built_bytes);
        self.count(|stats| stats.written += 1);
    }

    /// Hands the gathered changes to the engine.
    pub(super) fn submit(&self) {
        let Gathered { batch, delta, keys, authors, built_bytes, answers, notes } =
            self.gathered.take();
        if batch.is_empty() {
            return;
        }
        let batch =
            if lsm::mutant("transactions_are_divided") { self.divide(batch) } else { batch };
        let ticket = self.ticket.get() + 1;
        match self.submit_noted(batch, self.counted(delta), notes) {
            Ok(written) => {
                self.ticket.set(ticket);
                let written = Some((ticket, written, keys));
                self.fly(Flight { written, authors, built_bytes, answers });
            }
            Err(error) => {
                let answer = self.fail(&error);
                let mut overlay = self.overlay.borrow_mut();
                keys.iter().for_each(|key| overlay.landed(key, ticket));
                drop(overlay);
                self.built_bytes.set(self.built_bytes.get() - built_bytes);
                for (target, _) in answers {
                    self.answer_in_turn(target, answer.clone());
                }
            }
        }
    }

    /// Hands a batch to the engine, with the deadlines of its values.
    pub(super) fn submit_noted(
        &self,
        batch: BatchWriter,
        keys: Option<i64>,
        notes: Vec<Noted>,
    ) -> lsm::Result<Written> {
        match notes.is_empty() && !self.ledger.must_note() {
            true => self.writer.submit(batch, keys),
            false => self.writer.submit_noted(batch, keys, Box::new(notes)),
        }
    }

    /// A mutant: the first key of a batch is written by itself, in a group before the others.
    fn divide(&self, mut batch: BatchWriter) -> BatchWriter {
        let (mut first, mut rest) = (BatchWriter::new(), BatchWriter::new());
        for (key, value) in entries(&mut batch) {
            let part = if first.is_empty() { &mut first } else { &mut rest };
            match value {
                Some(value) => part.put(self.family, key, value),
                None => part.delete(self.family, key),
            }
        }
        if rest.is_empty() {
            return first;
        }
        drop(self.writer.submit(first, self.counted(0)));
        drop(self.writer.sync());
        rest
    }

    /// Makes all earlier changes survive a power cut.
    pub(super) fn sync(&self, target: AnswerTarget) {
        self.submit();
        match self.writer.sync() {
            Ok(written) => {
                let written = Some((self.ticket.get(), written, Vec::new()));
                let answers = vec![(target, Answer::Ok)];
                self.fly(Flight { written, authors: Vec::new(), built_bytes: 0, answers });
            }
            Err(error) => {
                self.save_failed.set(true);
                let answer = self.fail(&error);
                self.answer_in_turn(target, answer);
            }
        }
    }

    /// Appends a flight to the queue; one that has nothing to wait for is answered immediately.
    pub(super) fn fly(&self, flight: Flight) {
        let mut flights = self.flights.borrow_mut();
        if flight.written.is_none() && flights.is_empty() {
            drop(flights);
            return self.settle(flight.answers);
        }
        flights.push_back(flight);
        if flights.len() == 1
            && let Some(waker) = &*self.lander.borrow()
        {
            waker.wake_by_ref();
        }
    }

    /// Takes landed flights off the front of the queue, and answers their changes.
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
                // A flight without keys is a sync.
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
            // A write that landed is reported as written, even if another one has failed meanwhile.
            // An answer that needed no write may depend on one that failed. The engine has refused
            // all writes after the failed one, too, and accepts none before each has landed here.
            failed = match &result {
                Err(error) => Some(self.fail(error)),
                Ok(_) if flight.written.is_some() => None,
                Ok(_) => failed,
            };
            if let (Some((_, _, keys)), Ok(_)) = (&flight.written, &result)
                && !lsm::mutant("writes_are_announced_early")
            {
                self.announce_keys(keys, &flight.authors);
            }
            let answers = flight.answers.into_iter();
            let answers =
                answers.map(|(target, answer)| (target, failed.clone().unwrap_or(answer)));
            self.settle(answers.collect());
        }
        if any {
            self.changed.notify_all();
            self.end_turn();
        }
    }

    /// Notes that everything written so far survives a power cut.
    fn is_saved(&self) {
        self.unsaved.set(0);
        self.save_failed.set(false);
        self.saved_ms.set(self.core.unix_time_ms());
    }

    /// Notes that a write failed: for now, or because nothing can be written from now on.
    /// Changes that build on it will fail, too. Returns the answer for them.
    pub(super) fn fail(&self, error: &lsm::Error) -> Answer {
        let text = || Box::from(format!("MISCONF Errors writing to the database: {error}"));
        self.known.borrow_mut().forget();
        self.ledger.refused();
        self.refusals.set(self.refusals.get() + 1);
        self.write_failed.set(true);
        if self.writer.failure().is_none() {
            return Answer::Failed(text());
        }
        Answer::Failed(self.failed.borrow_mut().get_or_insert_with(text).clone())
    }
}

/// Lands flights, until cancelled.
pub(super) async fn land_all(shard: Rc<ShardState>) {
    poll_fn(|cx| {
        shard.lander.borrow_mut().get_or_insert_with(|| cx.waker().clone());
        shard.land(cx);
        Poll::<()>::Pending
    })
    .await;
}

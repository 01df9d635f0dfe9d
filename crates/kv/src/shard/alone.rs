//! Transactions with commands that concern keys which they do not name (`FLUSHALL`, `MR.DELRANGE`,
//! `DBSIZE`, `KEYS`, `MR.RANGE`): later changes wait until such a transaction is made.
//!
//! 1. All earlier changes are made and have landed, so the engine has the state before it.
//! 2. Its commands are executed one by one. What they must know is read when they need it.
//! 3. What they leave is one batch, in which removed ranges come first. `FLUSHALL` is a range of
//!    all keys here, because the engine's own clearing is not part of a batch.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::rc::Rc;

use lsm::{CfId, IterOptions};
use reactor::{Class, Core};

use crate::command::glob;
use crate::command::operation::Operation;
use crate::expiry::live::LiveReader;
use crate::settings::FAMILY;
use crate::shard::ShardState;
use crate::shard::announce::Written;
use crate::shard::answers::{AnswerTarget, engine_answer};
use crate::shard::change::{Answer, Change, Need};
use crate::shard::delete_range::{Barrier, KEYS_AT_ONCE, KeyRange, WRONG_ORDER};
use crate::shard::execute::{KeyWalk, Keys, Step, Steps, VALUES_MAX};
use crate::shard::make::MadeChange;
use crate::shard::modify::OldValue;
use crate::shard::turns::Connection;

impl ShardState {
    /// Executes a transaction after all earlier changes and before all later ones.
    pub(super) fn execute_alone(self: &Rc<Self>, mut change: Change, mut target: AnswerTarget) {
        self.barrier.replace(Barrier::All);
        let shard = self.clone();
        self.core.spawn(Class::Foreground, async move {
            shard.changed.wait_until(|| shard.is_idle()).await;
            let answer = match change.steps.take() {
                Some(steps) => shard.run_alone(*steps, &mut target).await,
                None => Ok(Answer::Null),
            };
            shard.settle(vec![(target, answer.unwrap_or_else(|refusal| refusal))]);
            shard.set_barrier(Barrier::None, None);
        });
    }

    async fn run_alone(&self, steps: Steps, target: &mut AnswerTarget) -> Result<Answer, Answer> {
        let connection = target.answers.connection;
        if let Some(text) = &*self.failed.borrow() {
            return Err(Answer::Failed(text.clone()));
        }
        let now_ms = self.core.unix_time_ms();
        if steps.watching && self.watches.borrow_mut().take_conflict(connection, now_ms) {
            return Err(Answer::Conflict);
        }
        let mut keys = Keys::new(self.transaction_bytes_max(), steps.reply_bytes_max, now_ms);
        let mut answers = Vec::with_capacity(steps.list.len());
        for step in steps.list {
            answers.push(self.step_alone(step, &mut keys).await?);
            self.core.checkpoint().await;
        }
        keys.check_replies()?;
        self.watches.borrow_mut().end(connection);
        self.write_alone(&keys, target).await?;
        Ok(Answer::Executed(answers))
    }

    async fn step_alone(&self, mut step: Step, keys: &mut Keys) -> Result<Answer, Answer> {
        let engine = |error: lsm::Error| engine_answer(&error);
        match &mut step {
            Step::Count | Step::Walk(_) => {
                return of_all_keys(&self.core, &self.live, self.family, &step, keys).await;
            }
            Step::Change(change) if change.kind.is_of_many_keys() => {
                if !self.is_ascending() {
                    return Err(Answer::Failed(WRONG_ORDER.into()));
                }
                if change.kind == Operation::Clear {
                    let (_, end) =
                        self.count_others(&KeyRange::ALL, keys, false).await.map_err(engine)?;
                    keys.clear(end);
                    return Ok(Answer::Ok);
                }
                let Some(range) = KeyRange::of(change) else { return Ok(Answer::Integer(0)) };
                let (others, end) = self.count_others(&range, keys, true).await.map_err(engine)?;
                return Ok(Answer::Integer(keys.remove(&range, end, others)));
            }
            _ => {}
        }
        learn(&self.live, self.family, &mut step, keys).await?;
        keys.execute(step, &|change, old, now| self.compute(change, old, now))
    }

    /// The number of keys of a range that have no state in the transaction, if they are to be
    /// counted, and the exclusive end of the range. Suspends for blocks, and to let other tasks
    /// run.
    async fn count_others(
        &self,
        range: &KeyRange,
        keys: &Keys,
        count: bool,
    ) -> lsm::Result<(i64, Vec<u8>)> {
        let (lower, upper) = (Some(range.start.clone()), range.end.clone());
        let options = IterOptions { lower, upper, ..IterOptions::default() };
        let mut iter = self.reader.iter(self.family, options)?;
        let end = match &range.end {
            Some(end) => end.clone(),
            None => {
                iter.seek_to_last().await?;
                let mut after = if iter.valid() { iter.key().to_vec() } else { Vec::new() };
                after.push(0);
                after
            }
        };
        let mut others = 0;
        if count {
            iter.seek_to_first().await?;
        }
        let mut steps = 0;
        while count && iter.valid() && self.failed.borrow().is_none() {
            others += i64::from(!keys.has(iter.key()) && !keys.has_removed(iter.key()));
            steps += 1;
            if steps % KEYS_AT_ONCE == 0 {
                self.core.checkpoint().await;
            }
            iter.next().await?;
        }
        Ok((others, end))
    }

    /// Writes what a transaction leaves.
    async fn write_alone(&self, keys: &Keys, target: &mut AnswerTarget) -> Result<(), Answer> {
        let (batch, ..) = keys.batch(self.family);
        if batch.is_empty() {
            return Ok(());
        }
        for (start, end) in keys.removed() {
            let range = KeyRange { start: start.clone(), end: Some(end.clone()) };
            self.touch_existing(Some(&range)).await;
        }
        for key in keys.written() {
            self.watches.borrow_mut().touch(self.print(key));
        }
        let all = self.reader.db().keys().map_or(0, |all| all as i64);
        self.write_removing(batch, keys.delta(all), keys.notes()).await?;
        self.write_failed.set(false);
        if target.tells {
            target.wrote = keys.written().map(<[u8]>::to_vec).collect();
        }
        if self.is_tracked() {
            self.announce(alone_written(keys, target.answers.connection));
        }
        Ok(())
    }
}

/// What a transaction has written.
fn alone_written(keys: &Keys, author: Connection) -> Vec<Written> {
    let mut written = Vec::new();
    if keys.has_cleared() {
        written.push(Written::All(author));
    } else {
        for (start, end) in keys.removed() {
            let range = KeyRange { start: start.clone(), end: Some(end.clone()) };
            written.push(Written::Range(range));
        }
    }
    written.extend(keys.written().map(|key| Written::Key(key.into(), author)));
    written
}

fn is_counted(reader: &LiveReader, family: CfId) -> bool {
    family == FAMILY && reader.db().keys().is_some()
}

/// Answers a command that reads all keys or a range of them. Suspends for blocks.
async fn of_all_keys(
    core: &Core,
    reader: &LiveReader,
    family: CfId,
    step: &Step,
    keys: &mut Keys,
) -> Result<Answer, Answer> {
    let answer = match step {
        Step::Walk(query) => walk(core, reader, family, query, keys).await?,
        _ => count(reader, family, keys)?,
    };
    keys.note_reply(&answer);
    Ok(answer)
}

/// `KEYS` and `MR.RANGE` in a transaction: the engine's keys and those of the transaction, in one
/// order.
async fn walk(
    core: &Core,
    reader: &LiveReader,
    family: CfId,
    query: &KeyWalk,
    keys: &mut Keys,
) -> Result<Answer, Answer> {
    let engine = |error: lsm::Error| engine_answer(&error);
    let KeyWalk { range, reverse, extent, pattern } = query;
    let prefix = pattern.as_deref().map(glob::literal_prefix).filter(|prefix| !prefix.is_empty());
    let options = IterOptions {
        lower: Some(range.start.clone()),
        upper: range.end.clone(),
        prefix,
        fill_cache: false,
        ..IterOptions::default()
    };
    let mut iter = reader.iter_at(family, options, keys.now_ms(), None).map_err(engine)?;
    let mut own = VecDeque::from(keys.of_range(range));
    if *reverse {
        own.make_contiguous().reverse();
        iter.seek_to_last().await.map_err(engine)?;
    } else {
        iter.seek_to_first().await.map_err(engine)?;
    }
    let (mut found, mut count, mut bytes, mut steps) = (Vec::new(), 0, 0, 0);
    while extent.goes_on(count, bytes) && (iter.valid() || !own.is_empty()) {
        let order = match own.front() {
            _ if !iter.valid() => Ordering::Less,
            None => Ordering::Greater,
            Some(own) if *reverse => iter.key().cmp(own),
            Some(own) => own[..].cmp(iter.key()),
        };
        // A key of the transaction has the state that it has left there.
        let of_engine = order == Ordering::Greater;
        let key = match of_engine {
            true => iter.key().to_vec(),
            false => own.pop_front().unwrap_or_default(),
        };
        steps += 1;
        if steps % KEYS_AT_ONCE == 0 {
            core.checkpoint().await;
        }
        let mut value = None;
        let exists = match keys.state(&key) {
            None => !keys.has_removed(&key),
            Some(state) => {
                value = state.bytes().filter(|_| extent.values).map(<[u8]>::to_vec);
                state.exists()
            }
        };
        if exists && pattern.as_deref().is_none_or(|pattern| glob::matches(pattern, &key)) {
            count += 1;
            if extent.values && value.is_none() {
                value = match of_engine {
                    true => Some(iter.value().to_vec()),
                    false => reader.get(family, &key).await.map_err(engine)?.map(|v| v.to_vec()),
                };
            }
            let entry_bytes = key.len() + value.as_ref().map_or(0, Vec::len);
            keys.note_bytes(entry_bytes)?;
            bytes += entry_bytes as u64;
            found.push(Some(key));
            found.extend(extent.values.then_some(value));
        }
        if order != Ordering::Less {
            let moved = if *reverse { iter.prev().await } else { iter.next().await };
            moved.map_err(engine)?;
        }
    }
    Ok(Answer::Values(found))
}

/// `DBSIZE` in a transaction.
fn count(reader: &LiveReader, family: CfId, keys: &Keys) -> Result<Answer, Answer> {
    let count = match reader.db().keys().filter(|_| is_counted(reader, family)) {
        Some(all) => all.saturating_add_signed(keys.delta(all as i64)),
        None => reader.approximate_keys(family).map_err(|error| engine_answer(&error))?,
    };
    Ok(Answer::Integer(i64::try_from(count).unwrap_or(i64::MAX)))
}

/// Reads what a command must know about its keys. Suspends for blocks.
async fn learn(
    reader: &LiveReader,
    family: CfId,
    step: &mut Step,
    keys: &mut Keys,
) -> Result<(), Answer> {
    let counted = is_counted(reader, family);
    let mut unknown = Vec::new();
    step.needs(&mut |key, need| {
        let need = if counted { need.max(Need::Existence) } else { need };
        if !keys.knows(key, need) {
            unknown.push((key.to_vec(), need));
        }
    });
    for (key, need) in unknown {
        let old = match need {
            // The command names it twice.
            _ if keys.knows(&key, need) => continue,
            Need::Nothing => Ok(OldValue::Unknown),
            _ if !keys.has(&key) && keys.has_removed(&key) => Ok(OldValue::Missing),
            _ if reader.has_deadlines() => {
                let found = reader.look_up(family, &key, None).await;
                found.map(|found| match found {
                    Some((value, deadline)) => OldValue::of(value.to_vec(), deadline),
                    None => OldValue::Missing,
                })
            }
            Need::Existence => {
                let found = reader.contains(family, &[&key]).await.pop();
                let exists = found.unwrap_or(Ok(false));
                exists.map(|there| if there { OldValue::There } else { OldValue::Missing })
            }
            Need::Value => {
                let found = reader.get(family, &key).await;
                found.map(|value| match value {
                    Some(value) => OldValue::Value(value.to_vec()),
                    None => OldValue::Missing,
                })
            }
        };
        keys.learn(&key, old.map_err(|error| engine_answer(&error))?)?;
    }
    Ok(())
}

/// Executes a transaction on a node that does not write. Suspends for blocks.
pub(crate) async fn execute_reads(
    core: &Core,
    reader: &LiveReader,
    family: CfId,
    steps: Steps,
    value_bytes_max: usize,
) -> Answer {
    let mut keys = Keys::new(
        value_bytes_max.saturating_mul(VALUES_MAX),
        steps.reply_bytes_max,
        core.unix_time_ms(),
    );
    let mut answers = Vec::with_capacity(steps.list.len());
    for mut step in steps.list {
        let answer = match step {
            Step::Count | Step::Walk(_) => {
                of_all_keys(core, reader, family, &step, &mut keys).await
            }
            _ => match learn(reader, family, &mut step, &mut keys).await {
                // Changes were refused when they were queued.
                Ok(()) => keys.execute(step, &|_, _, _| MadeChange {
                    batch: None,
                    answer: Answer::Null,
                    built_bytes: 0,
                    deadlines: Vec::new(),
                }),
                Err(refusal) => Err(refusal),
            },
        };
        match answer {
            Ok(answer) => answers.push(answer),
            Err(refusal) => return refusal,
        }
    }
    keys.check_replies().map_or_else(|refusal| refusal, |()| Answer::Executed(answers))
}

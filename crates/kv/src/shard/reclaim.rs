//! Removes keys that have expired, in the order of their deadlines.
//!
//! Each is a change of its key, like that of a client: it is made when no other change of the key
//! is before it, on what is known about the key then. So a key that got another value or deadline
//! meanwhile stays. When the removals have landed, what was written about these deadlines is
//! removed.

use std::rc::Rc;

use crate::command::operation::Operation;
use crate::shard::answers::Origin;
use crate::shard::change::{Answer, Change};
use crate::shard::parcel::AnswerSlot;
use crate::shard::{CALLER, ShardState};

/// Between two rounds without work.
const PAUSE_NS: u64 = 100_000_000;
/// Keys removed in a round.
const KEYS: usize = 256;

/// Reclaims until cancelled.
pub(super) async fn reclaim_all(shard: Rc<ShardState>) {
    loop {
        shard.ledger.wait().await;
        let done = round(&shard).await;
        if done < KEYS {
            shard.core.sleep_ns(PAUSE_NS).await;
        }
    }
}

/// Removes some keys; returns how many deadlines are dealt with.
async fn round(shard: &Rc<ShardState>) -> usize {
    let Ok(due) = shard.ledger.due(KEYS, shard.core.unix_time_ms()).await else { return 0 };
    if due.is_empty() {
        return 0;
    }
    let changes = due.iter().map(|(deadline, key)| {
        let mut change = Change::of(Operation::Reclaim);
        change.also_put(key, &deadline.unix_ms().unwrap_or(0).to_be_bytes());
        change
    });
    let slot = Rc::new(AnswerSlot::default());
    shard.accept(CALLER, changes.collect(), Origin::Here(slot.clone()));
    shard.end_turn();
    let answers = std::future::poll_fn(|cx| slot.poll(cx)).await;
    let mut gone = vec![false; due.len()];
    for run in answers {
        for at in run.at..run.at + run.commands {
            if let Some(gone) = gone.get_mut(at as usize) {
                *gone = run.answer == Answer::Integer(1);
            }
        }
    }
    let mut gone = gone.into_iter();
    let done: Vec<_> = due.into_iter().filter(|_| gone.next() == Some(true)).collect();
    // What is not removed now is tried again.
    match shard.ledger.settle(&done).await {
        Ok(()) => done.len(),
        Err(_) => 0,
    }
}

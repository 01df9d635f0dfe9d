//! Removes keys that have expired, in the order of their deadlines.
//!
//! Each is a change of its key, like that of a client: it is made when no other change of the key
//! is before it, on what is known about the key then. So a key that got another value or deadline
//! meanwhile stays. When the removals have landed, what was written about these deadlines is
//! removed.

use std::rc::Rc;

use crate::command::operation::Operation;
use crate::expiry::Due;
use crate::shard::answers::Origin;
use crate::shard::change::{Answer, Change};
use crate::shard::parcel::AnswerSlot;
use crate::shard::{CALLER, ShardState};

/// Between two rounds without work.
const PAUSE_NS: u64 = 100_000_000;
/// Keys removed in a round. Their changes are made in one turn of the core, which requests wait
/// for.
const KEYS: usize = 32;
/// After a round it pauses for as long as the round took, but not longer than this.
const PAUSE_NS_MAX: u64 = 5_000_000;

/// Rounds after which it begins with the oldest deadline again.
const ROUNDS: usize = 1 << 15;

/// Reclaims until cancelled.
///
/// A round goes on after the last deadline of the one before. Those before it leave tombstones,
/// which a round that began with the oldest would pass, until they are merged: of millions of
/// deadlines most of the time would go there.
pub(super) async fn reclaim_all(shard: Rc<ShardState>) {
    let (mut last, mut rounds) = (None, 0);
    loop {
        shard.ledger.wait().await;
        // A pause of writes leaves the data as it is.
        if shard.is_paused() {
            shard.core.sleep_ns(PAUSE_NS).await;
            continue;
        }
        let before_ns = shard.core.now_ns();
        let removed;
        (last, removed) = round(&shard, last.as_ref()).await;
        let took_ns = shard.core.now_ns().saturating_sub(before_ns);
        rounds = if last.is_some() { rounds + 1 } else { 0 };
        if rounds == ROUNDS {
            (last, rounds) = (None, 0);
        } else if last.is_none() || removed == 0 {
            shard.core.sleep_ns(PAUSE_NS).await;
        } else {
            shard.core.sleep_ns(took_ns.min(PAUSE_NS_MAX)).await;
        }
    }
}

/// Removes some keys, whose deadlines come after the `last` one dealt with. Returns the last one
/// now if there may be more after it, and how many keys it has removed.
///
/// What is not removed now is tried again when all others are: neither records nor keys that cannot
/// be read delay the others.
async fn round(shard: &Rc<ShardState>, last: Option<&Due>) -> (Option<Due>, usize) {
    let now_ms = shard.core.unix_time_ms();
    let due = shard.ledger.due(last, KEYS, now_ms).await.unwrap_or_default();
    if due.is_empty() {
        return (None, 0);
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
    let last = due.last().filter(|_| due.len() == KEYS).cloned();
    let mut gone = gone.into_iter();
    let done: Vec<_> = due.into_iter().filter(|_| gone.next() == Some(true)).collect();
    match shard.ledger.settle(&done).await {
        Ok(()) => (last, done.len()),
        Err(_) => (last, 0),
    }
}

//! Tells the cores which keys were written, so that they invalidate them in the caches of tracked
//! connections, and holds the answers to writes back until they have.
//!
//! 1. When writes have landed, and readers see them, what they have written joins the announcements
//!    for each core that has tracked connections.
//! 2. A core has one message at a time; what lands meanwhile is in the next one. So messages need
//!    no bound of their own: what is in them are writes without answers, which are bounded.
//! 3. A core reports when the invalidations are queued at their connections (`core::tracking`).
//!    When all cores have, the writes are answered, in their order.
//!
//! A connection enters a key before it reads it. So a read either sees a write, or the announcement
//! of the write, which follows it, finds the key entered.

use std::collections::VecDeque;
use std::mem;

use crate::shard::ShardState;
use crate::shard::answers::AnswerTarget;
use crate::shard::change::Answer;
use crate::shard::delete_range::KeyRange;
use crate::shard::overlay::Key;
use crate::shard::turns::Connection;

/// What was written, and by which connection.
#[derive(Clone)]
pub(crate) enum Written {
    Key(Box<[u8]>, Connection),
    /// The keys of a range were removed.
    Range(KeyRange),
    /// All keys were removed.
    All(Connection),
}

/// The announcements that are not heard yet, and the answers that wait for them.
#[derive(Default)]
pub(super) struct Announcements {
    /// The number of the last one.
    number: u64,
    cores: Vec<Listener>,
    held: VecDeque<(u64, Vec<(AnswerTarget, Answer)>)>,
    /// The shard is closing: nothing waits any more.
    closed: bool,
}

#[derive(Default)]
struct Listener {
    gathered: Vec<Written>,
    /// The last announcement gathered for it, and the last one that it has heard.
    last: u64,
    heard: u64,
    /// A message is on its way.
    is_sent: bool,
    gone: bool,
}

impl Announcements {
    /// The last announcement that all cores have heard.
    fn heard(&self) -> u64 {
        let waiting = self.cores.iter().filter(|core| core.heard < core.last && !core.gone);
        waiting.map(|core| core.heard).min().unwrap_or(self.number)
    }
}

impl ShardState {
    /// Whether a core has tracked connections.
    pub(super) fn is_tracked(&self) -> bool {
        self.posters.get().is_some_and(|posters| posters.node().is_tracked())
    }

    /// Whether a client has paused writes.
    pub(super) fn is_paused(&self) -> bool {
        self.posters
            .get()
            .is_some_and(|posters| posters.node().writes_paused_until_ns() > self.core.now_ns())
    }

    /// Adds what has been written, and is visible, to the announcements.
    pub(super) fn announce(&self, written: impl IntoIterator<Item = Written>) {
        let Some(posters) = self.posters.get() else { return };
        let announcements = &mut *self.announcements.borrow_mut();
        announcements.number += 1;
        let number = announcements.number;
        let written: Vec<Written> = written.into_iter().collect();
        let cores = posters.node().cores();
        announcements.cores.resize_with(cores, Listener::default);
        let here = self.core.id();
        for (core, listener) in announcements.cores.iter_mut().enumerate() {
            if listener.gone
                || !posters.node().tracks(core)
                || core != here && lsm::mutant("other_cores_hear_of_no_writes")
            {
                continue;
            }
            listener.gathered.extend_from_slice(&written);
            listener.last = number;
        }
    }

    /// Announces the keys of a flight. `authors` are the connections that wrote them, with the
    /// number of keys of each.
    pub(super) fn announce_keys(&self, keys: &[Key], authors: &[(Connection, usize)]) {
        if keys.is_empty() || !self.is_tracked() {
            return;
        }
        let authors = authors.iter().flat_map(|(author, keys)| std::iter::repeat_n(*author, *keys));
        let written = keys.iter().zip(authors);
        self.announce(written.map(|(key, author)| Written::Key(key.bytes().into(), author)));
    }

    /// Gives answers when everything announced before is heard.
    pub(super) fn settle(&self, answers: Vec<(AnswerTarget, Answer)>) {
        let mut announcements = self.announcements.borrow_mut();
        let number = announcements.number;
        let hasty = lsm::mutant("writes_are_answered_before_they_are_heard_of");
        if announcements.closed || hasty || announcements.heard() >= number {
            drop(announcements);
            answers.into_iter().for_each(|(target, answer)| self.answer(target, answer));
        } else {
            announcements.held.push_back((number, answers));
        }
    }

    /// Sends announcements to the cores that have heard the last message.
    pub(super) fn send_announcements(&self) {
        let Some(posters) = self.posters.get() else { return };
        let mut gone = Vec::new();
        for (core, listener) in self.announcements.borrow_mut().cores.iter_mut().enumerate() {
            if listener.is_sent || listener.gathered.is_empty() {
                continue;
            }
            listener.is_sent = true;
            let written = mem::take(&mut listener.gathered);
            if !posters.post_written(core, written, listener.last) {
                gone.push(core);
            }
        }
        gone.into_iter().for_each(|core| self.heard(core, u64::MAX));
    }

    /// A core has queued the invalidations of all announcements up to a number, or has ended if
    /// that is `u64::MAX`.
    pub(super) fn heard(&self, core: usize, number: u64) {
        if let Some(listener) = self.announcements.borrow_mut().cores.get_mut(core) {
            listener.heard = listener.heard.max(number);
            listener.is_sent = false;
            listener.gone |= number == u64::MAX;
        }
        self.release();
    }

    /// Gives the answers that no longer wait.
    fn release(&self) {
        loop {
            let mut announcements = self.announcements.borrow_mut();
            let heard = announcements.heard();
            let is_closed = announcements.closed;
            let first = announcements.held.pop_front_if(|(at, _)| is_closed || *at <= heard);
            drop(announcements);
            let Some((_, answers)) = first else { return };
            answers.into_iter().for_each(|(target, answer)| self.answer(target, answer));
        }
    }

    /// Nothing waits for announcements from now on: the connections end.
    pub(super) fn stop_announcing(&self) {
        self.announcements.borrow_mut().closed = true;
        self.release();
        self.end_turn();
    }
}

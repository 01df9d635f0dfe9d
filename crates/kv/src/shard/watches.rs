//! The keys that connections watch for their next transactions.
//!
//! A watch begins when its change is made, so it comes after all earlier changes of its connection.
//! Its answer waits until all changes made before are visible: what the client reads after it is
//! not older than the beginning of the watch. Every change that is made later and writes a watched
//! key ends the watch and leaves a conflict; the next transaction of the connection finds it when
//! it is made. A key that is watched by many connections has one entry.
//!
//! Bounded: a connection may watch [`CONNECTION_KEYS_MAX`] keys, all together [`KEYS_MAX`] with
//! [`BYTES_MAX`] bytes. One more is refused.

use std::collections::{BTreeMap, BTreeSet};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::expiry::Deadline;
use crate::shard::ShardState;
use crate::shard::answers::AnswerTarget;
use crate::shard::change::{Answer, Change};
use crate::shard::delete_range::KeyRange;
use crate::shard::known::Fingerprint;
use crate::shard::modify::OldValue;
use crate::shard::turns::Connection;

/// Keys that one connection may watch.
const CONNECTION_KEYS_MAX: usize = 4096;
/// Watches of all connections, and bytes of their keys.
const KEYS_MAX: usize = 1 << 16;
const BYTES_MAX: usize = 8 << 20;
/// Keys looked up together.
const TOGETHER: usize = 64;

const TOO_MANY: &str = "ERR too many watched keys: a connection may watch 4096, and all connections 65536 with 8 MiB \
     of keys; EXEC, DISCARD or UNWATCH ends watches";

/// The watches of all connections.
#[derive(Default)]
pub(super) struct Watches {
    keys: HashTable<Watched>,
    connections: BTreeMap<Connection, Watcher>,
    /// Watches, and bytes of their keys.
    count: usize,
    bytes: usize,
}

/// A key and the connections that watch it.
struct Watched {
    print: Fingerprint,
    by: Vec<Connection>,
}

/// The watches of a connection.
#[derive(Default)]
struct Watcher {
    conflict: bool,
    keys: BTreeMap<Vec<u8>, Fingerprint>,
    /// The keys that had expired when their watches began.
    expired: BTreeSet<u128>,
    /// The first deadline of the others.
    ends: Deadline,
}

impl Watches {
    /// Number of watches.
    pub fn keys(&self) -> usize {
        self.count
    }

    /// Number of connections that watch keys, or have watched a key that was written.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Begins the watch of a key; false if there are too many.
    fn begin(
        &mut self,
        connection: Connection,
        key: &[u8],
        print: Fingerprint,
        state: &OldValue,
    ) -> bool {
        let watcher = self.connections.entry(connection).or_default();
        // After a conflict nothing can change any more.
        if watcher.conflict || watcher.keys.contains_key(key) {
            return true;
        }
        if watcher.keys.len() >= CONNECTION_KEYS_MAX
            || self.count >= KEYS_MAX
            || self.bytes + key.len() > BYTES_MAX
        {
            return false;
        }
        watcher.keys.insert(key.to_vec(), print);
        match (state, state.deadline()) {
            (OldValue::Expired, _) => drop(watcher.expired.insert(print.0)),
            (_, Deadline::NEVER) => {}
            (_, deadline) if watcher.ends == Deadline::NEVER => watcher.ends = deadline,
            (_, deadline) => watcher.ends = watcher.ends.min(deadline),
        }
        self.count += 1;
        self.bytes += key.len();
        let same = |watched: &Watched| watched.print == print;
        match self.keys.entry(print.short(), same, |watched| watched.print.short()) {
            Entry::Occupied(mut found) => found.get_mut().by.push(connection),
            Entry::Vacant(vacant) => {
                vacant.insert(Watched { print, by: vec![connection] });
            }
        }
        true
    }

    /// Notes that a key is written.
    #[inline]
    pub fn touch(&mut self, print: Fingerprint) {
        if !self.keys.is_empty() {
            self.conflict(print);
        }
    }

    /// Notes that a key is removed because it has expired: that is no change to those who began to
    /// watch it after its end.
    pub fn touch_expired(&mut self, print: Fingerprint) {
        let same = |watched: &Watched| watched.print == print;
        let Some(watched) = self.keys.find(print.short(), same) else { return };
        let saw_it = |connection: &Connection| {
            let watcher = self.connections.get(connection);
            watcher.is_some_and(|watcher| !watcher.expired.contains(&print.0))
        };
        if watched.by.iter().any(saw_it) {
            self.conflict_of(print, true);
        }
    }

    fn conflict(&mut self, print: Fingerprint) {
        self.conflict_of(print, false);
    }

    /// `expired`: of those only that saw the key before its end.
    fn conflict_of(&mut self, print: Fingerprint, expired: bool) {
        let same = |watched: &Watched| watched.print == print;
        let Ok(found) = self.keys.find_entry(print.short(), same) else { return };
        let (watched, _) = found.remove();
        let (mut spared, mut by) = (Vec::new(), watched.by);
        if expired {
            let connections = &self.connections;
            let saw_it = |connection: &Connection| {
                connections.get(connection).is_some_and(|one| !one.expired.contains(&print.0))
            };
            (by, spared) = by.into_iter().partition(saw_it);
        }
        if !spared.is_empty() {
            let rest = Watched { print, by: spared };
            self.keys.insert_unique(print.short(), rest, |watched| watched.print.short());
        }
        for connection in by {
            self.release(connection);
            if let Some(watcher) = self.connections.get_mut(&connection) {
                watcher.conflict = true;
            }
        }
    }

    /// Notes that any key may have been written.
    pub fn touch_all(&mut self) {
        self.keys.clear();
        (self.count, self.bytes) = (0, 0);
        for watcher in self.connections.values_mut() {
            watcher.conflict |= !watcher.keys.is_empty();
            watcher.keys.clear();
        }
    }

    /// Whether the next transaction of a connection that watches keys must not be executed. If so,
    /// its watches end.
    pub fn take_conflict(&mut self, connection: Connection, now_ms: u64) -> bool {
        // Without a watch the connection has gone.
        let conflict = self
            .connections
            .get(&connection)
            .is_none_or(|watcher| watcher.conflict || watcher.ends.has_passed(now_ms));
        if conflict {
            self.end(connection);
        }
        conflict
    }

    /// Ends the watches of a connection.
    pub fn end(&mut self, connection: Connection) {
        self.release(connection);
        self.connections.remove(&connection);
    }

    /// Forgets the keys of a connection.
    fn release(&mut self, connection: Connection) {
        let Some(watcher) = self.connections.get_mut(&connection) else { return };
        for (key, print) in std::mem::take(&mut watcher.keys) {
            self.count -= 1;
            self.bytes -= key.len();
            let same = |watched: &Watched| watched.print == print;
            if let Ok(mut found) = self.keys.find_entry(print.short(), same) {
                found.get_mut().by.retain(|other| *other != connection);
                if found.get().by.is_empty() {
                    found.remove();
                }
            }
        }
    }

    /// The watched keys of a range, or of all.
    fn list(&self, range: Option<&KeyRange>) -> Vec<(Vec<u8>, Fingerprint)> {
        let watchers = self.connections.values();
        let mut keys: Vec<_> = watchers
            .flat_map(|watcher| watcher.keys.iter())
            .filter(|(key, _)| range.is_none_or(|range| range.has(key)))
            .map(|(key, print)| (key.clone(), *print))
            .collect();
        keys.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        keys.dedup_by(|a, b| a.0 == b.0);
        keys
    }
}

impl ShardState {
    /// Begins the watches of a change. It is answered when all changes made before are visible.
    pub(super) fn watch(&self, mut change: Change, old: &[OldValue], target: AnswerTarget) {
        let connection = target.answers.connection;
        let mut watches = self.watches.borrow_mut();
        let all = change
            .entries()
            .zip(old)
            .all(|((key, _), old)| watches.begin(connection, key, self.print(key), old));
        drop(watches);
        let answer = if all { Answer::Ok } else { Answer::Refused(TOO_MANY) };
        match lsm::mutant("watch_is_answered_at_once") {
            true => self.answer(target, answer),
            false => self.answer_in_turn(target, answer),
        }
    }

    /// Notes that the keys of a range, or all, are removed: a watch of a key that does not exist
    /// goes on. No change of these keys may be made meanwhile. Suspends for blocks.
    pub(super) async fn touch_existing(&self, range: Option<&KeyRange>) {
        let keys = self.watches.borrow().list(range);
        for some in keys.chunks(TOGETHER) {
            let names: Vec<&[u8]> = some.iter().map(|(key, _)| &key[..]).collect();
            let found = self.live.contains(self.family, &names).await;
            for ((_, print), found) in some.iter().zip(found) {
                // A key that cannot be read may exist.
                if found.unwrap_or(true) {
                    self.watches.borrow_mut().touch(*print);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // They share the hash of the table: collisions must be handled.
    const A: Fingerprint = Fingerprint(1 << 100);
    const B: Fingerprint = Fingerprint((1 << 100) | 2);

    fn watching(pairs: &[(Connection, &[u8], Fingerprint)]) -> Watches {
        let mut watches = Watches::default();
        for (connection, key, print) in pairs {
            assert!(watches.begin(*connection, key, *print, &OldValue::Missing));
        }
        watches
    }

    #[test]
    fn a_write_of_a_watched_key_is_a_conflict_of_all_who_watch_it() {
        let mut watches = watching(&[(1, b"a", A), (2, b"a", A), (2, b"b", B), (3, b"b", B)]);
        watches.touch(A);
        assert!(
            watches.take_conflict(1, 0)
                && watches.take_conflict(2, 0)
                && !watches.take_conflict(3, 0)
        );
        assert_eq!((watches.keys(), watches.connections(), watches.bytes), (1, 1, 1));
        watches.end(3);
        assert_eq!((watches.keys(), watches.connections(), watches.bytes), (0, 0, 0));
        assert!(watches.keys.is_empty());
    }

    #[test]
    fn a_watch_that_has_ended_has_no_conflict() {
        let mut watches = watching(&[(1, b"a", A)]);
        watches.end(1);
        watches.touch(A);
        assert!(watches.begin(1, b"b", B, &OldValue::Missing) && !watches.take_conflict(1, 0));
        watches.touch_all();
        assert!(watches.take_conflict(1, 0));
        assert!(
            watches.take_conflict(1, 0),
            "without a watch a transaction that has one must not run"
        );
    }

    #[test]
    fn watches_are_bounded() {
        let mut watches = Watches::default();
        let print = |n: usize| Fingerprint((n as u128) << 70);
        for n in 0..CONNECTION_KEYS_MAX {
            assert!(watches.begin(1, &n.to_le_bytes(), print(n), &OldValue::Missing));
        }
        assert!(
            !watches.begin(1, b"more", A, &OldValue::Missing)
                && watches.begin(1, &7usize.to_le_bytes(), print(7), &OldValue::Missing)
        );
        for connection in 2..=(KEYS_MAX / CONNECTION_KEYS_MAX) as u64 {
            for n in 0..CONNECTION_KEYS_MAX {
                assert!(watches.begin(connection, &n.to_le_bytes(), print(n), &OldValue::Missing));
            }
        }
        assert!(!watches.begin(99, b"more", A, &OldValue::Missing));
        watches.end(1);
        assert!(watches.begin(99, b"more", A, &OldValue::Missing));
        assert!(!watches.begin(99, &vec![0; BYTES_MAX], B, &OldValue::Missing));
    }
}

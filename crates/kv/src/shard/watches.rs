//! The keys that connections watch for their next transactions.
//!
//! A watch begins when its change is made, so it comes after all earlier changes of its connection.
//! Its answer waits until all changes made before are visible: what the client reads after it is
//! not older than the beginning of the watch. Every change that is made later and writes a watched
//! key ends the watch and leaves a conflict; the next transaction of the connection finds it when
//! it is made. A key that is watched by many connections has one entry.
//!
//! Bounded: a connection may watch [`CONNECTION_KEYS_MAX`] keys, all together [`KEYS_MAX`], within
//! the memory of [`Settings::watches_bytes_max`]. One watch more is refused. When memory or watches
//! run out, the connection that has the most of it loses its watches, as if a key of them had been
//! written, unless that is the one that wants more: so a few clients with many watches refuse
//! nobody else.
//!
//! [`Settings::watches_bytes_max`]: crate::Settings::watches_bytes_max

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
/// Watches of all connections.
const KEYS_MAX: usize = 1 << 16;
/// Memory of a watch without the bytes of its key: its parts of the table, of the connection's maps
/// and of the list of connections, with what the allocator adds.
const WATCH_BYTES: usize = 200;
/// Keys looked up together.
const TOGETHER: usize = 64;

const TOO_MANY: &str = "ERR too many watched keys: a connection may watch 4096, and all connections 65536; EXEC, DISCARD \
     or UNWATCH ends watches";
const NO_MEMORY: &str = "OOM too many watched keys: the watches of all connections take more memory than this node has for \
     them; EXEC, DISCARD or UNWATCH ends watches";

/// The watches of all connections.
#[derive(Default)]
pub(super) struct Watches {
    keys: HashTable<Watched>,
    connections: BTreeMap<Connection, Watcher>,
    /// Watches, their memory, and its limit.
    count: usize,
    bytes: usize,
    bytes_max: usize,
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
    bytes: usize,
    keys: BTreeMap<Vec<u8>, Fingerprint>,
    /// The keys that had expired when their watches began.
    expired: BTreeSet<u128>,
    /// The first deadline of the others.
    ends: Deadline,
}

impl Watcher {
    /// Forgets the keys and all that is kept for them; returns the keys.
    fn forget(&mut self) -> BTreeMap<Vec<u8>, Fingerprint> {
        self.bytes = 0;
        self.expired.clear();
        std::mem::take(&mut self.keys)
    }
}

impl Watches {
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes_max, ..Self::default() }
    }

    /// Sets the limit of the memory of all watches.
    pub fn limit(&mut self, bytes_max: usize) {
        self.bytes_max = bytes_max;
    }

    /// Number of watches.
    pub fn keys(&self) -> usize {
        self.count
    }

    /// Number of connections that watch keys, or have watched a key that was written.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Begins the watch of a key, unless there are too many.
    fn begin(
        &mut self,
        connection: Connection,
        key: &[u8],
        print: Fingerprint,
        state: &OldValue,
    ) -> Result<(), &'static str> {
        let watcher = self.connections.entry(connection).or_default();
        let bytes = WATCH_BYTES + key.len();
        // After a conflict nothing can change any more.
        if watcher.conflict || watcher.keys.contains_key(key) {
            return Ok(());
        }
        if watcher.keys.len() >= CONNECTION_KEYS_MAX {
            return Err(TOO_MANY);
        }
        let own = watcher.bytes + bytes;
        while self.count >= KEYS_MAX || self.bytes + bytes > self.bytes_max {
            if !self.revoke_largest(own) {
                return Err(if self.count >= KEYS_MAX { TOO_MANY } else { NO_MEMORY });
            }
        }
        let watcher = self.connections.entry(connection).or_default();
        watcher.bytes = own;
        watcher.keys.insert(key.to_vec(), print);
        match (state, state.deadline()) {
            (OldValue::Expired, _) => drop(watcher.expired.insert(print.0)),
            (_, Deadline::NEVER) => {}
            (_, deadline) if watcher.ends == Deadline::NEVER => watcher.ends = deadline,
            (_, deadline) => watcher.ends = watcher.ends.min(deadline),
        }
        self.count += 1;
        self.bytes += bytes;
        let same = |watched: &Watched| watched.print == print;
        match self.keys.entry(print.short(), same, |watched| watched.print.short()) {
            Entry::Occupied(mut found) => found.get_mut().by.push(connection),
            Entry::Vacant(vacant) => {
                vacant.insert(Watched { print, by: vec![connection] });
            }
        }
        Ok(())
    }

    /// Ends the watches of the connection whose watches take the most memory with a conflict, if
    /// that is more than `bytes`.
    fn revoke_largest(&mut self, bytes: usize) -> bool {
        let largest = self.connections.iter().max_by_key(|(_, watcher)| watcher.bytes);
        let Some((&connection, _)) = largest.filter(|(_, watcher)| watcher.bytes > bytes) else {
            return false;
        };
        self.release(connection);
        if let Some(watcher) = self.connections.get_mut(&connection) {
            watcher.conflict = true;
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
            watcher.forget();
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
        self.bytes -= watcher.bytes;
        for print in watcher.forget().into_values() {
            self.count -= 1;
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
            .try_for_each(|((key, _), old)| watches.begin(connection, key, self.print(key), old));
        drop(watches);
        let answer = all.map_or_else(Answer::Refused, |()| Answer::Ok);
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

    fn begin(
        watches: &mut Watches,
        connection: Connection,
        key: &[u8],
        print: Fingerprint,
    ) -> bool {
        watches.begin(connection, key, print, &OldValue::Missing).is_ok()
    }

    fn empty() -> Watches {
        Watches::new(64 << 20)
    }

    fn watching(pairs: &[(Connection, &[u8], Fingerprint)]) -> Watches {
        let mut watches = empty();
        for (connection, key, print) in pairs {
            assert!(begin(&mut watches, *connection, key, *print));
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
        assert_eq!((watches.keys(), watches.connections(), watches.bytes), (1, 1, WATCH_BYTES + 1));
        watches.end(3);
        assert_eq!((watches.keys(), watches.connections(), watches.bytes), (0, 0, 0));
        assert!(watches.keys.is_empty());
    }

    #[test]
    fn a_watch_that_has_ended_has_no_conflict() {
        let mut watches = watching(&[(1, b"a", A)]);
        watches.end(1);
        watches.touch(A);
        assert!(begin(&mut watches, 1, b"b", B) && !watches.take_conflict(1, 0));
        watches.touch_all();
        assert!(watches.take_conflict(1, 0));
        assert!(
            watches.take_conflict(1, 0),
            "without a watch a transaction that has one must not run"
        );
    }

    fn print(n: usize) -> Fingerprint {
        Fingerprint((n as u128) << 70)
    }

    #[test]
    fn watches_are_bounded() {
        let mut watches = empty();
        for n in 0..CONNECTION_KEYS_MAX {
            assert!(begin(&mut watches, 1, &n.to_le_bytes(), print(n)));
        }
        assert!(!begin(&mut watches, 1, b"more", A));
        assert!(begin(&mut watches, 1, &7usize.to_le_bytes(), print(7)), "it watches it already");
        for connection in 2..=(KEYS_MAX / CONNECTION_KEYS_MAX) as u64 {
            for n in 0..CONNECTION_KEYS_MAX {
                assert!(begin(&mut watches, connection, &n.to_le_bytes(), print(n)));
            }
        }
        assert_eq!(watches.keys(), KEYS_MAX);
        assert!(!begin(&mut watches, 99, &[0; 1 << 20], A), "that is more than any other has");
        assert!(begin(&mut watches, 99, b"more", A));
        assert_eq!(watches.keys(), KEYS_MAX - CONNECTION_KEYS_MAX + 1);
    }

    #[test]
    fn the_connection_with_the_most_watches_loses_them_when_memory_runs_out() {
        let mut watches = empty();
        watches.limit(100 * (WATCH_BYTES + 8));
        let more = |watches: &mut Watches, connection: Connection, some: usize| {
            let begin = |&n: &usize| begin(watches, connection, &n.to_le_bytes(), print(n));
            (0..some).take_while(begin).count()
        };
        assert_eq!(more(&mut watches, 1, 1000), 100);
        let refused = watches.begin(1, b"12345678", A, &OldValue::Missing);
        assert_eq!(refused, Err(NO_MEMORY), "it has the most itself");
        assert_eq!(more(&mut watches, 2, 40), 40);
        assert!(watches.take_conflict(1, 0) && !watches.take_conflict(2, 0));
        // Now two have equal parts, and one with fewer takes from one of them.
        assert_eq!(more(&mut watches, 3, 1000), 60);
        assert_eq!(more(&mut watches, 4, 1), 1);
        assert!(watches.take_conflict(3, 0) && !watches.take_conflict(2, 0));
        assert_eq!(
            watches.begin(5, &[0; 100 * WATCH_BYTES], A, &OldValue::Missing),
            Err(NO_MEMORY)
        );
        for connection in 1..=5 {
            watches.end(connection);
        }
        assert_eq!((watches.keys(), watches.bytes), (0, 0));
        assert!(watches.keys.is_empty());
    }

    #[test]
    fn a_conflict_leaves_nothing_of_keys_that_had_expired() {
        let mut watches = empty();
        for n in 0..1000usize {
            assert!(watches.begin(1, &n.to_le_bytes(), print(n), &OldValue::Expired).is_ok());
        }
        watches.touch(print(7));
        assert!(watches.connections[&1].expired.is_empty(), "they were once kept without a bound");
        assert_eq!((watches.keys(), watches.bytes), (0, 0));
        assert!(watches.begin(1, b"a", A, &OldValue::Expired).is_ok());
        watches.touch_all();
        assert!(watches.take_conflict(1, 0));
    }
}

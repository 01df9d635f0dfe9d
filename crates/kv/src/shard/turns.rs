//! The waiting changes of each connection, in the order in which it sent them.
//!
//! While one change of a connection waits, all later ones wait after it: their writes do not get
//! into the log before earlier ones. Connections do not wait for each other here.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// A connection's number in the node.
pub(crate) type Connection = u64;

/// The queues by connection. `J` is a waiting change.
pub(crate) struct Turns<J>(BTreeMap<Connection, VecDeque<Rc<J>>>);

impl<J> Default for Turns<J> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<J> Turns<J> {
    /// Whether a change of a connection waits.
    pub fn is_awaited(&self, connection: Connection) -> bool {
        self.0.contains_key(&connection)
    }

    /// Appends a change to the queue of its connection.
    pub fn wait(&mut self, connection: Connection, job: &Rc<J>) {
        self.0.entry(connection).or_default().push_back(job.clone());
    }

    /// Whether a waiting change is the first of its connection.
    pub fn is_first(&self, connection: Connection, job: &Rc<J>) -> bool {
        let first = self.0.get(&connection).and_then(VecDeque::front);
        first.is_some_and(|first| Rc::ptr_eq(first, job))
    }

    /// The first waiting change of a connection is done; returns the next.
    pub fn next(&mut self, connection: Connection) -> Option<Rc<J>> {
        let waiting = self.0.get_mut(&connection)?;
        waiting.pop_front();
        let next = waiting.front().cloned();
        if next.is_none() {
            self.0.remove(&connection);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_a_connection_take_turns_and_do_not_delay_others() {
        let mut turns: Turns<u8> = Turns::default();
        let (a, b, c) = (Rc::new(1), Rc::new(2), Rc::new(3));
        turns.wait(7, &a);
        turns.wait(7, &b);
        turns.wait(8, &c);
        assert!(turns.is_first(7, &a) && !turns.is_first(7, &b) && turns.is_first(8, &c));
        assert!(turns.is_awaited(7) && !turns.is_awaited(9));
        assert_eq!(turns.next(7), Some(b));
        assert_eq!((turns.next(7), turns.next(8)), (None, None));
        assert!(turns.0.is_empty());
    }
}

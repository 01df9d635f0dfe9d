//! The changes of each connection that wait, in the order in which it sent them.
//!
//! While one of a connection waits, all that it sends later wait for it: what they write does not
//! get into the log before what it sent earlier. Connections do not wait for each other here.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// A connection, by its number in the node.
pub(crate) type Connection = u64;

/// See the module text. `J` is a change that waits.
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

    /// Puts a change behind those of its connection that wait.
    pub fn wait(&mut self, connection: Connection, job: &Rc<J>) {
        self.0.entry(connection).or_default().push_back(job.clone());
    }

    /// Whether nothing of its connection is before a change that waits.
    pub fn is_first(&self, connection: Connection, job: &Rc<J>) -> bool {
        let first = self.0.get(&connection).and_then(VecDeque::front);
        first.is_some_and(|first| Rc::ptr_eq(first, job))
    }

    /// The first that waited of a connection is done; gives the next.
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
    fn changes_of_a_connection_take_turns_and_others_are_not_in_their_way() {
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

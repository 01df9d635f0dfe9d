//! Whether a history of operations on single keys is linearizable.
//!
//! A history is linearizable if each operation can be assigned a moment between its call and its
//! answer such that a sequential execution in the order of these moments gives the same answers.
//! Keys are independent, so each is checked alone.
//!
//! The search is Wing and Gong's ("Testing and verifying concurrent objects", 1993) with Lowe's
//! memory of dead ends: it repeatedly picks a remaining operation that was called before the first
//! answer of the others, applies it, and backtracks where an answer does not fit.
//!
//! An operation with an answer lost in a crash was done before the crash or not at all.

use std::collections::{BTreeMap, BTreeSet};

/// A value of a key; none, if there is no such key.
pub type Value = Option<u64>;

/// The operation on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Reads the value.
    Get,
    /// Sets the value, or deletes the key.
    Set(Value),
    /// Sets the value and returns the old one.
    Swap(Value),
}

/// An operation with its times and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The key.
    pub key: u64,
    /// The call.
    pub call: Call,
    /// The time of the call; no two events of a history have the same time.
    pub called: u64,
    /// The time of the answer, or of the crash in which it was lost.
    pub ended: u64,
    /// The answer (to a [`Call::Set`], nothing), unless it was lost.
    pub answer: Option<Value>,
}

/// Finds a key whose history is not linearizable, and returns that history. All keys are absent at
/// first.
pub fn violation(history: &[Operation]) -> Option<Vec<Operation>> {
    let mut keys: BTreeMap<u64, Vec<Operation>> = BTreeMap::new();
    for operation in history {
        // A read with a lost answer tells nothing.
        if operation.call != Call::Get || operation.answer.is_some() {
            keys.entry(operation.key).or_default().push(*operation);
        }
    }
    keys.into_values().find_map(|mut operations| {
        operations.sort_by_key(|operation| operation.called);
        (!is_linearizable(&operations)).then_some(operations)
    })
}

/// The possible values of a key after an operation with this answer; none, if the answer is
/// impossible.
fn after(operation: &Operation, before: Value) -> impl Iterator<Item = Value> {
    let (new, answer) = match operation.call {
        Call::Get => (before, before),
        Call::Set(new) => (new, None),
        Call::Swap(new) => (new, before),
    };
    let fits = operation.answer.is_none_or(|given| given == answer);
    let done = fits.then_some(new);
    let not_done = operation.answer.is_none().then_some(before);
    done.into_iter().chain(not_done.filter(|_| new != before))
}

/// The operations of a key that have been applied.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Done {
    /// All before this one.
    first: usize,
    /// These after it.
    more: Vec<usize>,
}

impl Done {
    fn has(&self, at: usize) -> bool {
        at < self.first || self.more.contains(&at)
    }

    fn with(&self, at: usize) -> Done {
        let mut done = self.clone();
        let place = done.more.partition_point(|&other| other < at);
        done.more.insert(place, at);
        while done.more.first() == Some(&done.first) {
            done.more.remove(0);
            done.first += 1;
        }
        done
    }
}

/// The operations of one key, in the order of their calls.
fn is_linearizable(operations: &[Operation]) -> bool {
    let mut left = vec![(Done { first: 0, more: Vec::new() }, None)];
    let mut seen = BTreeSet::new();
    while let Some((done, value)) = left.pop() {
        if done.first == operations.len() {
            return true;
        }
        // The next one was called before the first answer of the remaining ones.
        let mut ended = u64::MAX;
        for (at, operation) in operations.iter().enumerate().skip(done.first) {
            if operation.called > ended {
                break;
            }
            if done.has(at) {
                continue;
            }
            ended = ended.min(operation.ended);
            for new in after(operation, value) {
                let next = (done.with(at), new);
                if seen.insert(next.clone()) {
                    left.push(next);
                }
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn operation(called: u64, ended: u64, call: Call, answer: Option<Value>) -> Operation {
        Operation { key: 7, call, called, ended, answer }
    }

    fn get(called: u64, ended: u64, answer: Value) -> Operation {
        operation(called, ended, Call::Get, Some(answer))
    }

    fn set(called: u64, ended: u64, value: u64) -> Operation {
        operation(called, ended, Call::Set(Some(value)), Some(None))
    }

    fn lost(called: u64, crash: u64, value: u64) -> Operation {
        operation(called, crash, Call::Set(Some(value)), None)
    }

    fn swap(called: u64, ended: u64, value: u64, old: Value) -> Operation {
        operation(called, ended, Call::Swap(Some(value)), Some(old))
    }

    #[test]
    fn histories_that_one_register_can_have_are_accepted() {
        for history in [
            vec![],
            vec![get(0, 1, None)],
            // While a write is in flight both answers are right; after the new one was read, only
            // that.
            vec![set(0, 9, 1), get(1, 2, None), get(3, 4, Some(1)), get(5, 6, Some(1))],
            // The second write may come first.
            vec![set(0, 9, 1), set(1, 8, 2), get(10, 11, Some(1))],
            vec![set(0, 9, 1), set(1, 8, 2), get(10, 11, Some(2))],
            vec![swap(0, 9, 1, Some(2)), swap(1, 8, 2, None), get(10, 11, Some(1))],
            // The crash at 5 lost the answer.
            vec![set(0, 1, 1), lost(2, 5, 2), get(6, 7, Some(1)), get(8, 9, Some(1))],
            vec![set(0, 1, 1), lost(2, 5, 2), get(6, 7, Some(2)), get(8, 9, Some(2))],
            vec![lost(0, 9, 1), get(1, 2, Some(1)), get(10, 11, Some(1))],
        ] {
            assert_eq!(violation(&history), None);
        }
    }

    #[test]
    fn histories_that_no_register_can_have_are_found() {
        for (what, history) in [
            ("a value that was not written", vec![get(0, 1, Some(1))]),
            ("a stale answer", vec![set(0, 1, 1), set(2, 3, 2), get(4, 5, Some(1))]),
            ("a lost write", vec![set(0, 1, 1), get(2, 3, None)]),
            ("a value from the future", vec![get(0, 1, Some(1)), set(2, 3, 1)]),
            ("back in time", vec![set(0, 9, 1), get(1, 2, Some(1)), get(3, 4, None)]),
            (
                "two readers that disagree about the order of two writes",
                vec![
                    set(0, 20, 1),
                    set(1, 19, 2),
                    get(2, 3, Some(1)),
                    get(4, 5, Some(2)),
                    get(6, 7, Some(1)),
                ],
            ),
            (
                "a swap that did not see the one before",
                vec![swap(0, 1, 1, None), swap(2, 3, 2, None)],
            ),
            ("two swaps of the same value", vec![swap(0, 9, 1, None), swap(1, 8, 2, None)]),
            (
                "an acknowledged write lost in a crash",
                vec![set(0, 1, 1), lost(2, 5, 2), get(6, 7, None)],
            ),
            (
                "a write that comes after the crash",
                vec![set(0, 1, 1), lost(2, 5, 2), get(6, 7, Some(1)), get(8, 9, Some(2))],
            ),
            (
                "a write that is seen and goes",
                vec![lost(0, 9, 1), get(1, 2, Some(1)), get(10, 11, None)],
            ),
        ] {
            assert!(violation(&history).is_some(), "{what}");
            // It is also found among operations of other keys.
            let others = (0..20).map(|n| Operation { key: n % 3, ..set(100 + n, 200 + n, n) });
            let all: Vec<Operation> = others.chain(history.iter().copied()).collect();
            assert_eq!(violation(&all).map(|found| found[0].key), Some(7), "{what}");
        }
    }

    /// Tries every order that respects the times, with and without the lost operations.
    fn by_force(left: &[Operation], value: Value) -> bool {
        let ended = left.iter().map(|operation| operation.ended).min().unwrap_or(u64::MAX);
        left.is_empty()
            || (0..left.len()).filter(|&at| left[at].called < ended).any(|at| {
                let mut rest = left.to_vec();
                let operation = rest.remove(at);
                after(&operation, value).any(|new| by_force(&rest, new))
            })
    }

    fn any_history() -> impl Strategy<Value = Vec<Operation>> {
        let value = || prop_oneof![Just(None), (1u64..4).prop_map(Some)];
        let call = prop_oneof![
            3 => Just(Call::Get),
            2 => value().prop_map(Call::Set),
            1 => value().prop_map(Call::Swap),
        ];
        let one = (call, 0u64..20, 1u64..8, value(), 0..8);
        proptest::collection::vec(one, 0..7).prop_map(|all| {
            let event =
                |n: usize, (call, called, takes, answer, fate): (Call, u64, u64, Value, i32)| {
                    let answer = match call {
                        Call::Set(_) => None,
                        _ => answer,
                    };
                    let called = called * 100 + n as u64;
                    let ended = called + takes * 100 + 50;
                    operation(called, ended, call, (fate > 0).then_some(answer))
                };
            all.into_iter().enumerate().map(|(n, one)| event(n, one)).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn the_verdict_is_that_of_trying_everything(history in any_history()) {
            let says: Vec<Operation> = history
                .iter()
                .copied()
                .filter(|one| one.call != Call::Get || one.answer.is_some())
                .collect();
            prop_assert_eq!(violation(&history).is_none(), by_force(&says, None));
        }

        /// A register that makes operations sequentially, each at a moment of its time.
        #[test]
        fn a_history_of_a_register_is_accepted(
            all in proptest::collection::vec((0u64..3, 0u64..3, 0u64..4000, 0u64..4000), 0..150),
        ) {
            let mut values: BTreeMap<u64, Value> = BTreeMap::new();
            let mut history = Vec::new();
            for (n, (key, kind, before, behind)) in all.into_iter().enumerate() {
                let n = n as u64;
                let call = match kind {
                    0 => Call::Get,
                    1 => Call::Set((!n.is_multiple_of(5)).then_some(n)),
                    _ => Call::Swap(Some(n)),
                };
                let value = values.entry(key).or_default();
                let answer = Some(if kind == 1 { None } else { *value });
                if let Call::Set(new) | Call::Swap(new) = call {
                    *value = new;
                }
                let at = 5000 + n * 1000;
                let (called, ended) = ((at - before) * 1000 + n, (at + behind) * 1000 + 500 + n);
                history.push(Operation { key, call, called, ended, answer });
            }
            prop_assert_eq!(violation(&history), None);
        }
    }
}

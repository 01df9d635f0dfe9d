//! Transactions in a simulated world, with kills and power cuts; and their judge.

use crate::stage::seeds;
use crate::stage::transactions::{Executed, History, transactions};

fn executed(client: usize, reads: &[(usize, u64)], writes: &[usize]) -> Option<Executed> {
    let reads = reads.iter().copied().collect();
    Some(Executed { run: 0, client, reads, writes: writes.to_vec(), answered: true })
}

#[test]
fn the_judge_finds_what_is_wrong() {
    let wrong = |all: Vec<Option<Executed>>| History(all).violation().is_some();
    let (a, b) = (0, 1);
    let first = || executed(0, &[(a, 0), (b, 0)], &[a, b]);
    assert!(!wrong(vec![
        first(),
        executed(1, &[(a, 1)], &[a]),
        executed(2, &[(a, 2), (b, 1)], &[])
    ]));
    let half = vec![first(), executed(1, &[(a, 1), (b, 0)], &[])];
    assert!(wrong(half), "half a transaction");
    let lost = vec![first(), executed(1, &[(a, 1)], &[a]), executed(2, &[(a, 1)], &[a])];
    assert!(wrong(lost), "a lost update");
    let skew =
        vec![first(), executed(1, &[(a, 1), (b, 1)], &[a]), executed(2, &[(a, 1), (b, 1)], &[b])];
    assert!(wrong(skew), "write skew");
    let stale = vec![first(), executed(0, &[(a, 0)], &[])];
    assert!(wrong(stale), "a client that does not see its own transaction");
    let mut later = executed(3, &[(a, 0)], &[]);
    later.as_mut().unwrap().run = 1;
    assert!(wrong(vec![first(), later]), "an answered transaction that a crash has lost");
    assert!(wrong(vec![executed(0, &[(a, 7)], &[])]), "an invented value");
}

#[test]
fn transactions_have_a_serial_order_that_survives_crashes() {
    let (mut done, mut conflicts) = (0, 0);
    for seed in seeds(20) {
        let (violation, executed, failed) = transactions(seed);
        assert_eq!(violation, None, "seed {seed}");
        (done, conflicts) = (done + executed, conflicts + failed);
    }
    assert!(done > 0 && (conflicts > 0 || seeds(20).count() < 5), "{done} {conflicts}");
}

#[test]
fn the_same_seed_gives_the_same_history() {
    assert_eq!(transactions(3), transactions(3));
}

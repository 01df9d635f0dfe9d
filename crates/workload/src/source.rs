//! Draws operations.

use std::sync::Arc;

use crate::mix::{Mix, Spread};
use crate::newest::Newest;
use crate::random::Random;
use crate::zipf::{Zipf, scrambled};

/// The largest number of entries of a scan; YCSB's `maxscanlength`.
pub const SCAN_MAX: u8 = 100;

/// One operation. Keys are numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Read this key.
    Read(u64),
    /// Write this existing key.
    Update(u64),
    /// Write this new key, then call [`Newest::done`].
    Insert(u64),
    /// Read this number of entries, starting with this key.
    Scan(u64, u8),
    /// Read this key, then write it.
    ReadModifyWrite(u64),
}

/// The state that all threads or tasks of a program share.
#[derive(Debug)]
pub struct Plan {
    mix: Mix,
    keys: u64,
    zipf: Option<Zipf>,
    /// The existing keys, including inserted ones.
    pub newest: Newest,
}

impl Plan {
    /// A mix over the existing keys `0..keys`.
    pub fn new(mix: Mix, keys: u64) -> Plan {
        let zipf = (mix.spread != Spread::Uniform).then(|| Zipf::new(keys));
        Plan { mix, keys, zipf, newest: Newest::new(keys) }
    }

    /// The number of an existing key. Only [`Spread::Latest`] draws new keys.
    fn number(&self, random: &mut Random) -> u64 {
        match (&self.zipf, self.mix.spread) {
            (Some(zipf), Spread::Latest) => self.newest.there() - 1 - zipf.rank(random),
            (Some(zipf), _) => scrambled(zipf.rank(random), self.keys),
            (None, _) => random.below(self.keys),
        }
    }
}

/// The operations of one thread or task.
///
/// Kinds and lengths of scans come in random order, but each hundred operations have exactly the
/// mix's numbers of each kind, and each hundred scans have each length once: the amount of work
/// does not depend on luck.
#[derive(Debug)]
pub struct Source {
    plan: Arc<Plan>,
    random: Random,
    kinds: Bag,
    lengths: Bag,
}

impl Source {
    /// Starts a sequence; different seeds give unrelated ones.
    pub fn new(plan: Arc<Plan>, seed: u64) -> Source {
        Source {
            plan,
            random: Random::new(seed),
            kinds: Bag::new(100),
            lengths: Bag::new(SCAN_MAX),
        }
    }

    /// The plan from which it draws.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Draws an operation.
    pub fn draw(&mut self) -> Operation {
        let (plan, random) = (&self.plan, &mut self.random);
        let shares = plan.mix.shares;
        let mut slot = self.kinds.draw(random);
        let mut is = |share: u8| {
            let hit = slot < share;
            slot = slot.wrapping_sub(share);
            hit
        };
        if is(shares.reads) {
            Operation::Read(plan.number(random))
        } else if is(shares.updates) {
            Operation::Update(plan.number(random))
        } else if is(shares.inserts) {
            Operation::Insert(plan.newest.begin())
        } else if is(shares.scans) {
            Operation::Scan(plan.number(random), self.lengths.draw(random) + 1)
        } else {
            Operation::ReadModifyWrite(plan.number(random))
        }
    }
}

/// The numbers below a bound in random order, each once; then all of them again.
#[derive(Debug)]
struct Bag {
    numbers: Vec<u8>,
    /// The numbers; those not drawn yet come first.
    left: usize,
}

impl Bag {
    fn new(bound: u8) -> Bag {
        Bag { numbers: (0..bound).collect(), left: 0 }
    }

    fn draw(&mut self, random: &mut Random) -> u8 {
        if self.left == 0 {
            self.left = self.numbers.len();
        }
        let drawn = random.below(self.left as u64) as usize;
        self.left -= 1;
        self.numbers.swap(drawn, self.left);
        self.numbers[self.left]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn draw(mix: &str, keys: u64, count: usize) -> Vec<Operation> {
        let plan = Arc::new(Plan::new(mix.parse().unwrap(), keys));
        let mut source = Source::new(plan, 1);
        let mut draw = || {
            let operation = source.draw();
            if let Operation::Insert(number) = operation {
                source.plan().newest.done(number);
            }
            operation
        };
        (0..count).map(|_| draw()).collect()
    }

    #[test]
    fn each_hundred_operations_have_exactly_the_mix() {
        for hundred in draw("a", 1000, 1000).chunks(100) {
            let reads = hundred.iter().filter(|op| matches!(op, Operation::Read(_))).count();
            let updates = hundred.iter().filter(|op| matches!(op, Operation::Update(_))).count();
            assert_eq!((reads, updates), (50, 50));
        }
        let of_f = draw("f", 1000, 100);
        let both = |op: &&Operation| matches!(op, Operation::ReadModifyWrite(_));
        assert_eq!(of_f.iter().filter(both).count(), 50);
    }

    #[test]
    fn scans_have_each_length_from_1_to_100_equally_often() {
        let mut lengths = BTreeMap::new();
        for operation in draw("e", 1000, 2000) {
            match operation {
                Operation::Scan(number, length) => {
                    assert!(number < 1000);
                    *lengths.entry(length).or_insert(0) += 1;
                }
                other => assert!(matches!(other, Operation::Insert(_)), "{other:?}"),
            }
        }
        assert_eq!(lengths.keys().copied().collect::<Vec<u8>>(), (1..=100).collect::<Vec<_>>());
        assert!(lengths.values().all(|count| *count == 19), "{lengths:?}");
    }

    #[test]
    fn the_latest_keys_are_read_most_including_inserted_ones() {
        let (mut reads, mut newest, mut new_reads) = (0, 1000, 0);
        let mut near = 0;
        for operation in draw("d", 1000, 10_000) {
            match operation {
                Operation::Insert(number) => {
                    assert_eq!(number, newest);
                    newest += 1;
                }
                Operation::Read(number) => {
                    assert!(number < newest, "key {number} is not there yet");
                    reads += 1;
                    near += u32::from(newest - number <= 100);
                    new_reads += u32::from(number >= 1000);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((reads, newest), (9500, 1500));
        assert!(f64::from(near) > 0.6 * f64::from(reads), "{near} of {reads}");
        assert!(new_reads > 1000);
    }

    #[test]
    fn few_keys_of_a_zipfian_mix_are_read_often() {
        let mut seen = BTreeMap::new();
        for operation in draw("c", 10_000, 100_000) {
            let Operation::Read(number) = operation else { panic!("{operation:?}") };
            *seen.entry(number).or_insert(0_u32) += 1;
        }
        let most = *seen.values().max().unwrap();
        assert!((8_000..12_500).contains(&most), "rank 0 has a tenth of all reads: {most}");
        assert_eq!(scrambled(0, 10_000), *seen.iter().max_by_key(|(_, n)| **n).unwrap().0);
    }
}

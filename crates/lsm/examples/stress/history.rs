//! The history of a database: step after step, each a function of the seed and of the steps before.
//!
//! So nobody has to record what was written: a file with two numbers says how far the history went,
//! and whoever knows the seed can say what the database holds after any step.

use std::collections::BTreeMap;

/// The column families, by their places in a [`Model`].
pub const FAMILIES: [&str; 3] = ["default", "sums", "large"];
/// Its values are joined with commas by the merge operator.
const TEXTS: usize = 0;
/// Its values are numbers, which the merge operator adds.
const SUMS: usize = 1;
/// Its values are long, and it has no merge operator.
const LARGE: usize = 2;
/// The key of the default family that every step sets to its number.
pub const LAST: &[u8] = b"last";
/// A key of every family that was there before the first step, with this value.
const FIRST: (&[u8], &[u8]) = (b"first", b"original");
/// Keys of a family.
const KEYS: u64 = 90;
/// Every how many steps tables are ingested.
const INGEST: u64 = 401;

/// The contents of the column families.
pub type Model = [BTreeMap<Vec<u8>, Vec<u8>>; FAMILIES.len()];

/// One change.
pub enum Change {
    Put(usize, Vec<u8>, Vec<u8>),
    Merge(usize, Vec<u8>, Vec<u8>),
    Delete(usize, Vec<u8>),
    SingleDelete(usize, Vec<u8>),
    DeleteRange(usize, Vec<u8>, Vec<u8>),
}

/// Changes that become visible together.
pub struct Step {
    pub changes: Vec<Change>,
    /// They are all puts to the default family in the order of keys, and come in a table.
    pub ingested: bool,
}

/// Numbers that depend on the seed only.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Text without the separator of merged texts; half of it compresses well.
    fn text(&mut self, length: u64) -> Vec<u8> {
        let mut text = format!("{:016x}", self.next()).into_bytes();
        while text.len() < length as usize / 2 {
            text.extend_from_slice(format!("{:016x}", self.next()).as_bytes());
        }
        text.resize(length as usize, b'v');
        text
    }

    fn value(&mut self, family: usize) -> Vec<u8> {
        let length = match (family, self.below(100)) {
            (SUMS, _) => return self.below(1000).to_le_bytes().to_vec(),
            (LARGE, 0..60) => 1000 + self.below(8000),
            (LARGE, 60..98) => 8000 + self.below(40_000),
            (LARGE, _) => 100_000 + self.below(400_000),
            (_, 0..80) => self.below(100),
            _ => 100 + self.below(1500),
        };
        self.text(length)
    }
}

fn key(number: u64) -> Vec<u8> {
    let tail = ["", "-a", "-a-long-tail-that-others-do-not-have", "/", "z"][number as usize % 5];
    format!("key{:04}{tail}", number / 2).into_bytes()
}

/// All keys that may exist, in order.
pub fn all_keys() -> Vec<Vec<u8>> {
    let mut keys: Vec<Vec<u8>> = (0..KEYS + 20).map(key).collect();
    keys.sort();
    keys
}

/// Whether a key is put once between two SingleDeletes, and never changed in another way.
fn is_single(number: u64) -> bool {
    number.is_multiple_of(3)
}

fn merged(family: usize, old: Option<&Vec<u8>>, operand: &[u8]) -> Vec<u8> {
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    match (family, old) {
        (SUMS, old) => {
            let sum = old.map_or(0, |old| number(old)).wrapping_add(number(operand));
            sum.to_le_bytes().to_vec()
        }
        (_, None) => operand.to_vec(),
        (_, Some(old)) => [old, operand].join(&b','),
    }
}

/// The history of one seed, up to a step.
pub struct History {
    seed: u64,
    pub number: u64,
    pub model: Model,
}

impl History {
    /// The history up to step `number`.
    pub fn at(seed: u64, number: u64) -> History {
        let mut history = History { seed, number: 0, model: Model::default() };
        for family in &mut history.model {
            family.insert(FIRST.0.to_vec(), FIRST.1.to_vec());
        }
        while history.number < number {
            history.next();
        }
        history
    }

    /// Makes the next step.
    pub fn next(&mut self) -> Step {
        self.number += 1;
        let mut random = Random(self.seed ^ self.number.wrapping_mul(0xD134_2543_DE82_EF95));
        let ingested = self.number.is_multiple_of(INGEST);
        let mut step = Step { changes: Vec::new(), ingested };
        if ingested {
            let first = random.below(KEYS);
            let numbers = (first..first + 20).filter(|&number| !is_single(number));
            let mut keys: Vec<Vec<u8>> = numbers.map(key).collect();
            keys.sort();
            for key in keys {
                let length = 1 + random.below(200);
                self.make(&mut step, Change::Put(TEXTS, key, random.text(length)));
            }
        } else {
            for _ in 0..if random.below(4) == 0 { random.below(12) } else { 1 } {
                let change = self.change(&mut random);
                self.make(&mut step, change);
            }
        }
        let number = format!("{:020}", self.number).into_bytes();
        self.make(&mut step, Change::Put(TEXTS, LAST.to_vec(), number));
        step
    }

    fn change(&self, random: &mut Random) -> Change {
        let family = [TEXTS, TEXTS, TEXTS, SUMS, SUMS, LARGE][random.below(6) as usize];
        let number = random.below(KEYS);
        let name = key(number);
        let dice = random.below(100);
        match is_single(number) {
            _ if dice < 4 => {
                let other = key(random.below(KEYS));
                Change::DeleteRange(family, name.clone().min(other.clone()), name.max(other))
            }
            true if self.model[family].contains_key(&name) => Change::SingleDelete(family, name),
            true => Change::Put(family, name, random.value(family)),
            false if dice < 20 => Change::Delete(family, name),
            false if dice < 60 || family == LARGE => {
                Change::Put(family, name, random.value(family))
            }
            false => Change::Merge(family, name, random.value(family)),
        }
    }

    fn make(&mut self, step: &mut Step, change: Change) {
        let model = &mut self.model;
        match &change {
            Change::Put(family, key, value) => {
                model[*family].insert(key.clone(), value.clone());
            }
            Change::Merge(family, key, operand) => {
                let new = merged(*family, model[*family].get(key), operand);
                model[*family].insert(key.clone(), new);
            }
            Change::Delete(family, key) | Change::SingleDelete(family, key) => {
                model[*family].remove(key);
            }
            Change::DeleteRange(family, start, end) => {
                model[*family].retain(|key, _| key < start || key >= end);
            }
        }
        step.changes.push(change);
    }
}

//! Mixes: how many of a hundred operations are of which kind.

use std::str::FromStr;

/// The number of operations of each kind in a hundred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// Read a key.
    pub reads: u8,
    /// Write an existing key.
    pub updates: u8,
    /// Write a new key.
    pub inserts: u8,
    /// Read some keys in order.
    pub scans: u8,
    /// Read a key and then write it.
    pub read_modify_writes: u8,
}

/// The distribution of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// All keys are equally frequent.
    Uniform,
    /// A few keys are frequent, scattered among the others.
    Zipfian,
    /// The newest keys are frequent.
    Latest,
}

/// A mixture of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    /// The mix's name.
    pub name: &'static str,
    /// The kinds of operations; they add up to one hundred.
    pub shares: Shares,
    /// The distribution of their keys.
    pub spread: Spread,
}

const NONE: Shares = Shares { reads: 0, updates: 0, inserts: 0, scans: 0, read_modify_writes: 0 };

impl Mix {
    /// YCSB's core workloads.
    pub const YCSB: [Mix; 6] = [
        Mix {
            name: "a",
            shares: Shares { reads: 50, updates: 50, ..NONE },
            spread: Spread::Zipfian,
        },
        Mix {
            name: "b",
            shares: Shares { reads: 95, updates: 5, ..NONE },
            spread: Spread::Zipfian,
        },
        Mix { name: "c", shares: Shares { reads: 100, ..NONE }, spread: Spread::Zipfian },
        Mix { name: "d", shares: Shares { reads: 95, inserts: 5, ..NONE }, spread: Spread::Latest },
        Mix {
            name: "e",
            shares: Shares { scans: 95, inserts: 5, ..NONE },
            spread: Spread::Zipfian,
        },
        Mix {
            name: "f",
            shares: Shares { reads: 50, read_modify_writes: 50, ..NONE },
            spread: Spread::Zipfian,
        },
    ];

    /// Reads and `percent` writes of equally frequent keys.
    pub fn reads_and_writes(percent: u8) -> Mix {
        let updates = percent.min(100);
        let shares = Shares { reads: 100 - updates, updates, ..NONE };
        Mix { name: "reads and writes", shares, spread: Spread::Uniform }
    }
}

impl FromStr for Mix {
    type Err = String;

    /// One of YCSB's workloads, by its letter.
    fn from_str(text: &str) -> Result<Mix, String> {
        let known = Mix::YCSB.into_iter().find(|mix| mix.name.eq_ignore_ascii_case(text));
        known.ok_or_else(|| format!("a workload must be a, b, c, d, e or f, not \"{text}\""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_workload_is_found_by_its_letter_and_has_a_hundred_shares() {
        for mix in Mix::YCSB.into_iter().chain([Mix::reads_and_writes(10)]) {
            let Shares { reads, updates, inserts, scans, read_modify_writes } = mix.shares;
            assert_eq!(reads + updates + inserts + scans + read_modify_writes, 100, "{}", mix.name);
        }
        assert_eq!("D".parse::<Mix>().unwrap().spread, Spread::Latest);
        assert_eq!("f".parse::<Mix>().unwrap().shares.read_modify_writes, 50);
        let error = "g".parse::<Mix>().unwrap_err();
        assert_eq!(error, "a workload must be a, b, c, d, e or f, not \"g\"");
    }
}

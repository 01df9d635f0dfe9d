//! The cases that can be measured, by db_bench's names.

use std::str::FromStr;

/// A case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// Get random keys.
    ReadRandom,
    /// Get batches of random keys.
    MultiReadRandom,
    /// Seek to random keys and step from there.
    SeekRandom,
    /// Read everything forwards.
    ReadSeq,
    /// Read everything backwards.
    ReadReverse,
    /// Load a new database in the order of its keys.
    FillSeq,
    /// Set random keys of a new database.
    FillRandom,
    /// Set random keys of an existing database.
    Overwrite,
    /// Get random keys while other tasks set keys.
    ReadWhileWriting,
    /// Get or set random keys.
    ReadRandomWriteRandom,
    /// One of YCSB's workloads.
    Ycsb,
    /// Hand operations to a shard from many threads; without a database.
    Locks,
    /// Read and write a file by the ring and through a mapping; without a database.
    Mapped,
    /// Reads alone, writes alone, and both at once, in turns.
    Beside,
    /// Drive a virtual machine's disk as its guest would; without a database.
    Vdisk,
    /// Set and get over the network from many threads, and verify everything.
    Race,
}

impl Case {
    /// All cases.
    pub const ALL: [Case; 16] = [
        Case::ReadRandom,
        Case::MultiReadRandom,
        Case::SeekRandom,
        Case::ReadSeq,
        Case::ReadReverse,
        Case::FillSeq,
        Case::FillRandom,
        Case::Overwrite,
        Case::ReadWhileWriting,
        Case::ReadRandomWriteRandom,
        Case::Ycsb,
        Case::Locks,
        Case::Mapped,
        Case::Beside,
        Case::Vdisk,
        Case::Race,
    ];

    /// The name, as in db_bench.
    pub fn name(self) -> &'static str {
        match self {
            Case::ReadRandom => "readrandom",
            Case::MultiReadRandom => "multireadrandom",
            Case::SeekRandom => "seekrandom",
            Case::ReadSeq => "readseq",
            Case::ReadReverse => "readreverse",
            Case::FillSeq => "fillseq",
            Case::FillRandom => "fillrandom",
            Case::Overwrite => "overwrite",
            Case::ReadWhileWriting => "readwhilewriting",
            Case::ReadRandomWriteRandom => "readrandomwriterandom",
            Case::Ycsb => "ycsb",
            Case::Locks => "locks",
            Case::Mapped => "mapped",
            Case::Beside => "beside",
            Case::Vdisk => "vdisk",
            Case::Race => "race",
        }
    }

    /// A line about what it does.
    pub fn describe(self) -> &'static str {
        match self {
            Case::ReadRandom => "get random keys, each an operation",
            Case::MultiReadRandom => "get batches of random keys; operations are keys",
            Case::SeekRandom => "seek to a random key and step; operations are seeks",
            Case::ReadSeq => "read everything forwards; operations are entries",
            Case::ReadReverse => "read everything backwards; operations are entries",
            Case::FillSeq => "load a new database in order, into its bottom level",
            Case::FillRandom => "set random keys of a new database, each an operation",
            Case::Overwrite => "set random keys of a database, each an operation",
            Case::ReadWhileWriting => {
                "get random keys while other tasks set keys; operations are gets"
            }
            Case::ReadRandomWriteRandom => "get or set random keys; an operation is a get or a set",
            Case::Ycsb => "one of YCSB's workloads a to f; operations are the workload's",
            Case::Locks => {
                "hand operations to a shard, by a mailbox and by a lock; without a database"
            }
            Case::Mapped => {
                "read and write a file by the ring and through a mapping; without a database"
            }
            Case::Beside => "get random keys and set random keys, each alone and both at once",
            Case::Vdisk => "read or write a vhost-user-blk disk as a guest; without a database",
            Case::Race => "set and get over the network from many threads, and verify all values",
        }
    }

    /// The default number of calls in flight per core. A node serves point gets of many clients;
    /// batches and scans are parallel by themselves.
    pub fn depth_default(self) -> u32 {
        match self {
            Case::ReadRandom | Case::ReadWhileWriting | Case::Beside => 64,
            Case::ReadRandomWriteRandom | Case::Ycsb => 64,
            Case::Mapped | Case::Vdisk => 32,
            _ => 1,
        }
    }

    /// Whether it needs a database.
    pub fn has_database(self) -> bool {
        !matches!(self, Case::Locks | Case::Mapped | Case::Vdisk | Case::Race)
    }

    /// Whether it reads a database and its operations are reads.
    pub fn reads(self) -> bool {
        self.has_database() && !matches!(self, Case::FillSeq | Case::FillRandom | Case::Overwrite)
    }

    /// Whether it writes.
    pub fn writes(self) -> bool {
        let others = [Case::Overwrite, Case::ReadWhileWriting, Case::Beside];
        self.fills() || self.mixes() || others.contains(&self)
    }

    /// Whether reads and writes are mixed, on all cores.
    pub fn mixes(self) -> bool {
        matches!(self, Case::ReadRandomWriteRandom | Case::Ycsb)
    }

    /// Whether it creates the database.
    pub fn fills(self) -> bool {
        matches!(self, Case::FillSeq | Case::FillRandom)
    }

    /// Whether it steps through entries, so that there is a rate of entries.
    pub fn scans(self) -> bool {
        matches!(self, Case::SeekRandom | Case::ReadSeq | Case::ReadReverse)
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Case, String> {
        Case::ALL.into_iter().find(|case| case.name() == text).ok_or_else(|| {
            let all = Case::ALL.map(Case::name).join(", ");
            format!("case must be one of {all}, not \"{text}\"")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_found_by_its_name() {
        for case in Case::ALL {
            assert_eq!(case.name().parse(), Ok(case));
        }
        assert!("fillbatch".parse::<Case>().is_err());
    }
}

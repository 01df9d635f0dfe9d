//! The cases that can be measured, by the names db_bench made known.

use std::str::FromStr;

/// What is measured.
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
}

impl Case {
    /// All of them.
    pub const ALL: [Case; 5] = [
        Case::ReadRandom,
        Case::MultiReadRandom,
        Case::SeekRandom,
        Case::ReadSeq,
        Case::ReadReverse,
    ];

    /// The name as db_bench has it.
    pub fn name(self) -> &'static str {
        match self {
            Case::ReadRandom => "readrandom",
            Case::MultiReadRandom => "multireadrandom",
            Case::SeekRandom => "seekrandom",
            Case::ReadSeq => "readseq",
            Case::ReadReverse => "readreverse",
        }
    }

    /// What it does, in a line.
    pub fn describe(self) -> &'static str {
        match self {
            Case::ReadRandom => "get random keys, each an operation",
            Case::MultiReadRandom => "get batches of random keys; operations are keys",
            Case::SeekRandom => "seek to a random key and step; operations are seeks",
            Case::ReadSeq => "read everything forwards; operations are entries",
            Case::ReadReverse => "read everything backwards; operations are entries",
        }
    }

    /// Calls in flight per core, where nothing else is said. Point gets of many clients are what
    /// a node sees; batches and scans carry their parallelism inside.
    pub fn depth_default(self) -> u32 {
        if self == Case::ReadRandom { 64 } else { 1 }
    }

    /// Whether it steps through entries, so that entries per second mean something.
    pub fn scans(self) -> bool {
        matches!(self, Case::SeekRandom | Case::ReadSeq | Case::ReadReverse)
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Case, String> {
        Case::ALL
            .into_iter()
            .find(|case| case.name() == text)
            .ok_or_else(|| format!("there is no case '{text}'"))
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
        assert!("fillseq".parse::<Case>().is_err());
    }
}

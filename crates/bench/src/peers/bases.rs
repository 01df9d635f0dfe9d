//! The databases that are read: the one that was named, and others that db_bench makes beside it
//! when a row needs them. They have at most as many bytes, and are kept for the next run.

use std::path::{Path, PathBuf};

use super::Setup;
use super::debian;
use super::tool::make_dir;

/// Name of the directory with the other databases.
const DIRECTORY: &str = "millrace-bench-data";
/// Bytes of a value in the named database.
const SAMPLE_VALUE: usize = 1000;
/// Databases with other values have a fourth of its bytes.
const PART: u64 = 4;
/// Bytes of a key.
pub const KEY: usize = 16;

/// A database that is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Base {
    /// The named database.
    #[default]
    Sample,
    /// Values of this number of bytes.
    Values(usize),
    /// The same keys and sizes as in the named database, with blocks compressed by LZ4.
    Lz4,
}

impl Base {
    /// Those that are made.
    const MADE: [Base; 3] = [Base::Values(100), Base::Values(16 << 10), Base::Lz4];

    /// Bytes of a value.
    pub fn value_size(self) -> usize {
        match self {
            Base::Values(bytes) => bytes,
            Base::Sample | Base::Lz4 => SAMPLE_VALUE,
        }
    }

    /// The number of its keys.
    pub fn keys(self, setup: &Setup) -> u64 {
        match self {
            Base::Sample | Base::Lz4 => setup.keys,
            Base::Values(bytes) => {
                let all = setup.keys * (KEY + SAMPLE_VALUE) as u64;
                (all / PART / (KEY + bytes) as u64).max(1)
            }
        }
    }

    /// Bytes of its keys and values.
    pub fn bytes(self, setup: &Setup) -> u64 {
        self.keys(setup) * (KEY + self.value_size()) as u64
    }

    fn codec(self) -> &'static str {
        if self == Base::Lz4 { "lz4" } else { "none" }
    }

    fn path(self, setup: &Setup) -> PathBuf {
        let beside = setup.data.parent().filter(|dir| !dir.as_os_str().is_empty());
        let name = format!("{}-{}-{}", self.keys(setup), self.value_size(), self.codec());
        beside.unwrap_or(Path::new(".")).join(DIRECTORY).join(name)
    }

    /// Its directory; makes the database if it does not exist.
    pub fn dir(self, setup: &Setup) -> Result<PathBuf, String> {
        if self == Base::Sample {
            return Ok(setup.data.clone());
        }
        let dir = self.path(setup);
        if dir.exists() {
            return Ok(dir);
        }
        // An unfinished database has another name.
        let new = dir.with_extension("new");
        let _ = std::fs::remove_dir_all(&new);
        make_dir(&new)?;
        debian::make_database(&new, self.keys(setup), self.value_size(), self.codec())?;
        rename(&new, &dir).map_err(|error| format!("cannot create {}: {error}", dir.display()))?;
        Ok(dir)
    }

    /// How the existing ones were made.
    pub fn recipes(setup: &Setup) -> Vec<String> {
        let there = Base::MADE.into_iter().filter(|base| base.path(setup).exists());
        there
            .map(|base| {
                format!("`{}`", debian::recipe(base.keys(setup), base.value_size(), base.codec()))
            })
            .collect()
    }
}

#[expect(clippy::disallowed_methods, reason = "names a database for the benchmark, on no core")]
fn rename(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::rename(from, to)
}

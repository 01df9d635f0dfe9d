//! Options, as their names and words in Python.

use millrace::{Compression, Durability, MergeOperator};
use pyo3::prelude::*;

use crate::error::exception;

#[cold]
fn invalid(py: Python<'_>, text: &str) -> PyErr {
    exception(py, "InvalidOption", text)
}

pub fn durability(py: Python<'_>, word: &str) -> PyResult<Durability> {
    match word {
        "power" => Ok(Durability::Power),
        "process" => Ok(Durability::Process),
        _ => Err(invalid(py, &format!("durability must be 'power' or 'process', not '{word}'"))),
    }
}

pub fn compression(py: Python<'_>, word: &str) -> PyResult<Compression> {
    match word {
        "none" => Ok(Compression::None),
        "snappy" => Ok(Compression::Snappy),
        "zlib" => Ok(Compression::Zlib),
        "bzip2" => Ok(Compression::Bzip2),
        "lz4" => Ok(Compression::Lz4),
        "zstd" => Ok(Compression::Zstd),
        _ => Err(invalid(
            py,
            &format!(
                "compression must be 'none', 'snappy', 'zlib', 'bzip2', 'lz4' or 'zstd', not \
                 '{word}'"
            ),
        )),
    }
}

pub fn merge_operator(py: Python<'_>, name: &str) -> PyResult<MergeOperator> {
    name.parse().map_err(|_| {
        invalid(
            py,
            &format!(
                "merge_operator must be 'uint64add', 'stringappend', 'stringappendtest', 'put', \
                 'max' or 'bytesxor', not '{name}'"
            ),
        )
    })
}

/// A time in seconds.
pub fn seconds(py: Python<'_>, name: &str, seconds: f64) -> PyResult<std::time::Duration> {
    std::time::Duration::try_from_secs_f64(seconds)
        .map_err(|_| invalid(py, &format!("{name} must be a time in seconds, not {seconds}")))
}

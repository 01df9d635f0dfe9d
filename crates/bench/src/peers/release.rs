//! RocksDB's newest release: the program of bench/peers, built by hand because the build is long.

use std::path::{Path, PathBuf};

use super::Setup;
use super::ours::report;
use super::sample::Sample;
use super::tool::Tool;

/// How to build it. Without libclang the build fails, but only after minutes.
pub const BUILD: &str = "apt-get install libclang-dev liburing-dev pkg-config; cd bench/peers && \
                         cargo build --release (about 11 minutes on two cores)";

/// The program: as named, or where its build leaves it, in the working directory, in this
/// program's directory or in one above.
pub fn find(named: Option<&Path>) -> Result<Option<PathBuf>, String> {
    if let Some(named) = named {
        return match named.is_file() {
            true => Ok(Some(named.to_owned())),
            false => Err(format!(
                "cannot run {}: there is no such program: build it: {BUILD}",
                named.display()
            )),
        };
    }
    let here = std::env::current_dir().unwrap_or_default();
    let exe = std::env::current_exe().unwrap_or_default();
    Ok(here
        .ancestors()
        .chain(exe.ancestors())
        .map(|dir| dir.join("bench/peers/target/release/millrace-peers"))
        .find(|path| path.is_file()))
}

/// Runs a case on a database, with these flags and the settings that a search chose or tries.
pub fn run(
    setup: &Setup,
    data: &Path,
    flags: &[String],
    settings: &[&str],
) -> Result<Sample, String> {
    let Some(program) = &setup.release else {
        return Err(format!("RocksDB's release is not built: {BUILD}"));
    };
    let sample = report(
        Tool::new(program)
            .args(flags.iter().cloned())
            .args(settings.iter().copied())
            .arg("--data")
            .arg(data)
            .arg("--seconds")
            .arg(setup.seconds.to_string()),
    )?;
    // It is not pinned.
    Ok(Sample { processors: reactor::processors().len(), ..sample })
}

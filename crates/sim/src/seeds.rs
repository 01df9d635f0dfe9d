//! Selects the seeds to run, and prints how to replay a failure.

use std::panic::AssertUnwindSafe;

/// Seeds of a run without `MILLRACE_SEEDS`, and of one with `MILLRACE_LONG`.
const FEW: u64 = 24;
const MANY: u64 = 240;

/// A number from the environment.
///
/// # Panics
/// When the variable is not a number: a typing error must not look like a success.
fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text} is not a number")))
}

/// The seed that `MILLRACE_SEED` selects.
pub fn one() -> Option<u64> {
    number("MILLRACE_SEED")
}

fn usual() -> u64 {
    if std::env::var_os("MILLRACE_LONG").is_some() { MANY } else { FEW }
}

/// Whether more than the usual seeds are wanted.
pub fn thorough() -> bool {
    std::env::var_os("MILLRACE_LONG").is_some() || number("MILLRACE_SEEDS").is_some()
}

/// Runs a scenario with `MILLRACE_SEEDS` seeds, or a few, or more with `MILLRACE_LONG`. A failing
/// seed prints how to replay it: `test` is the name of a test that runs [`one`] seed.
pub fn each(test: &str, run: impl Fn(u64)) {
    many(test, 1, run);
}

/// The same with `times` as many seeds, for scenarios that take little time. `MILLRACE_FIRST` is
/// the seed to begin with. The seeds after a failing one are run, too.
///
/// # Panics
/// When a seed fails.
pub fn many(test: &str, times: u64, run: impl Fn(u64)) {
    let first = number("MILLRACE_FIRST").unwrap_or(0);
    let count = times * number("MILLRACE_SEEDS").unwrap_or_else(usual);
    let mut failed = Vec::new();
    for seed in first..first + count {
        if std::panic::catch_unwind(AssertUnwindSafe(|| run(seed))).is_err() {
            say(seed, test);
            failed.push(seed);
            if failed.len() == FAILURES_MAX {
                break;
            }
        }
    }
    assert!(failed.is_empty(), "of {count} seeds from {first} on, these failed: {failed:?}");
}

/// A run ends with this many failing seeds.
const FAILURES_MAX: usize = 20;

fn say(seed: u64, test: &str) {
    eprintln!("seed {seed} failed; to replay it alone:");
    let package = std::env::var("CARGO_PKG_NAME");
    let package = package.as_deref().unwrap_or("millrace-sim");
    eprintln!("MILLRACE_SEED={seed} cargo test -p {package} {test} -- --nocapture");
}

//! Selects the seeds to run, and prints how to replay a failure.

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

/// The same with `times` as many seeds, for scenarios that take little time.
pub fn many(test: &str, times: u64, run: impl Fn(u64)) {
    for seed in 0..times * number("MILLRACE_SEEDS").unwrap_or_else(usual) {
        let _say = SayOnPanic { seed, test };
        run(seed);
    }
}

struct SayOnPanic<'a> {
    seed: u64,
    test: &'a str,
}

impl Drop for SayOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let SayOnPanic { seed, test } = self;
            eprintln!("seed {seed} failed; to replay it alone:");
            let package = std::env::var("CARGO_PKG_NAME");
            let package = package.as_deref().unwrap_or("millrace-sim");
            eprintln!("MILLRACE_SEED={seed} cargo test -p {package} {test} -- --nocapture");
        }
    }
}

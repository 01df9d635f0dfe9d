//! The cores on which a command of the tool runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use reactor::{Core, DriverKind, RuntimeConfig};

use crate::failure::Failure;

/// Memory of a core; a command needs little cache.
pub const POOL_BYTES: usize = 256 << 20;

/// The time between two looks of the other cores whether the command has ended.
const POLL_NS: u64 = 5_000_000;

/// Runs a command on one core.
pub fn on_core<F, T>(driver: DriverKind, command: F) -> Result<T, Failure>
where
    F: AsyncFnOnce(Core) -> Result<T, Failure> + Clone + Send + 'static,
    T: Send + 'static,
{
    on_cores(driver, 1, command)
}

/// Runs a command on the first of up to `most` cores, one for each processor. The others do what it
/// has them do.
pub fn on_cores<F, T>(driver: DriverKind, most: usize, command: F) -> Result<T, Failure>
where
    F: AsyncFnOnce(Core) -> Result<T, Failure> + Clone + Send + 'static,
    T: Send + 'static,
{
    let processors: Vec<usize> = reactor::processors().into_iter().take(most).collect();
    let config = RuntimeConfig {
        memory: POOL_BYTES * processors.len(),
        processors,
        driver,
        ..RuntimeConfig::default()
    };
    let ended = Arc::new(AtomicBool::new(false));
    let results = reactor::run(&config, move |core| {
        let (command, ended) = (command.clone(), ended.clone());
        async move {
            if core.id() == 0 {
                let result = command(core).await;
                ended.store(true, Ordering::Relaxed);
                return Some(result);
            }
            while !ended.load(Ordering::Relaxed) {
                core.sleep_ns(POLL_NS).await;
            }
            None
        }
    })
    .map_err(|error| Failure::new(format!("cannot start a core: {error}")))?;
    results.into_iter().flatten().next().expect("the first core gives a result")
}

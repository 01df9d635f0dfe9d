//! The core on which a command of the tool runs.

use reactor::{Core, DriverKind, RuntimeConfig};

use crate::failure::Failure;

/// Memory of the core; a command needs little cache.
pub const POOL_BYTES: usize = 256 << 20;

/// Runs a command on one core.
pub fn on_core<F, T>(driver: DriverKind, command: F) -> Result<T, Failure>
where
    F: AsyncFnOnce(Core) -> Result<T, Failure> + Clone + Send + 'static,
    T: Send + 'static,
{
    let config = RuntimeConfig {
        processors: reactor::processors().into_iter().take(1).collect(),
        memory: POOL_BYTES,
        driver,
        ..RuntimeConfig::default()
    };
    reactor::run(&config, move |core| {
        let command = command.clone();
        async move { command(core).await }
    })
    .map_err(|error| Failure::new(format!("cannot start a core: {error}")))?
    .pop()
    .expect("one core gives one result")
}

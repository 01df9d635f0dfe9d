//! The common parts of the suites that run on every driver.

use reactor::{Core, DriverKind, RuntimeConfig, processors, run};

/// Makes each function a test for every driver: `io_uring::NAME` and `epoll::NAME`.
macro_rules! on_every_driver {
    ($($(#[$doc:meta])* fn $name:ident($kind:ident: DriverKind) $body:block)*) => {
        mod io_uring {
            use super::*;
            $($(#[$doc])* #[test] fn $name() {
                if available() {
                    super::$name(DriverKind::Uring);
                }
            })*
        }
        mod epoll {
            use super::*;
            $($(#[$doc])* #[test] fn $name() { super::$name(DriverKind::Epoll); })*
        }
        $(fn $name($kind: DriverKind) $body)*
    };
}

/// Whether there is an io_uring to test.
pub fn available() -> bool {
    match run(&config(DriverKind::Uring), |_| async {}) {
        Ok(_) => true,
        Err(error) => {
            eprintln!("not tested: {error}");
            false
        }
    }
}

/// One core that uses this driver.
pub fn config(driver: DriverKind) -> RuntimeConfig {
    RuntimeConfig {
        processors: processors()[..1].to_vec(),
        memory: 64 << 20,
        driver,
        ..RuntimeConfig::default()
    }
}

/// Runs one core and returns the result of its main task.
pub fn on_one_core<T, Fut>(
    config: &RuntimeConfig,
    main: impl Fn(Core) -> Fut + Clone + Send + 'static,
) -> T
where
    T: Send + 'static,
    Fut: Future<Output = T> + 'static,
{
    run(config, main).unwrap().pop().unwrap()
}

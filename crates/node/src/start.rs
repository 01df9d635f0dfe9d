//! The state directory and the admin socket, which the process that was started opens: the
//! launcher, or a node without one.

use std::path::PathBuf;

use reactor::{Core, UnixListener};

use crate::admin;
use crate::config::Config;
use crate::disks::state::{State, default_state};
use crate::error::{Error, Kind};
use crate::patience::{Exclusive, Patience, patiently};

/// The state directory, if there is a place for it.
pub(crate) fn state_directory(config: &Config) -> Option<PathBuf> {
    config.state.clone().or_else(default_state)
}

/// Opens the state directory. If it was not named, it may be missing or in use: then nothing is
/// kept over a restart.
pub(crate) async fn open_state(
    core: &Core,
    config: &Config,
    before_holds: impl Fn() -> bool,
) -> Result<Option<State>, Error> {
    let Some(path) = state_directory(config) else { return Ok(None) };
    let patience = Patience::with(Exclusive::File(path.join("LOCK")));
    let patient = || before_holds() || patience.lasts(core);
    let locked = |error: &Error| error.kind() == Kind::Locked && patient();
    let opened = patiently(core, locked, async || State::open(core, &path).await).await;
    if config.state.is_some() {
        return opened.map(Some);
    }
    match opened {
        Ok(state) => Ok(Some(state)),
        Err(error) if matches!(error.kind(), Kind::Locked | Kind::System) => {
            let hint = error.advice().unwrap_or_default();
            tracing::info!("no state is kept over a restart: {error}; {hint}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Listens at the admin socket: at the configured path, or in the state directory.
pub(crate) async fn listen_admin(
    core: &Core,
    config: &Config,
    has_state: bool,
    before_holds: impl Fn() -> bool,
) -> Result<Option<(PathBuf, UnixListener)>, Error> {
    let state = state_directory(config).filter(|_| has_state);
    let Some(path) = config.admin.clone().or(state.as_deref().map(admin::socket_in)) else {
        return Ok(None);
    };
    let patience = Patience::with(Exclusive::Socket(path.clone()));
    let in_use =
        |error: &Error| error.kind() == Kind::Locked && (before_holds() || patience.lasts(core));
    let listener = patiently(core, in_use, async || admin::listen(core, &path)).await;
    match listener {
        Ok(listener) => Ok(Some((path, listener))),
        Err(error) if config.admin.is_none() && config.state.is_none() => {
            tracing::info!("this node has no admin socket: {error}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

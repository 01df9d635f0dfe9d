//! What a launcher needs of its configuration, left to the program that replaces it.
//!
//! That program reads the configuration itself, and uses these values only if it cannot: the
//! configuration file, the password file and the certificates may be replaced at any moment, and a
//! launcher that ends takes the node along.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{RENEWED, is_renewed};
use crate::config::{Config, Settings};
use crate::cores::CoreChoice;
use crate::disks::spec::DiskSpec;
use crate::error::Error;
use crate::machine::Machine;
use crate::nbd_address::NbdAddress;
use crate::size::Size;

/// The values. No secret is among them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptConfig {
    data: Option<PathBuf>,
    disks: Vec<DiskSpec>,
    state: Option<PathBuf>,
    admin: Option<PathBuf>,
    listen: SocketAddr,
    metrics: Option<SocketAddr>,
    #[serde(default)]
    nbd: Option<String>,
    #[serde(default)]
    moves: Option<SocketAddr>,
    processors: Vec<usize>,
    memory_bytes: u64,
    log_level: String,
    log_format: String,
    log_file: Option<PathBuf>,
}

impl KeptConfig {
    pub fn of(config: &Config) -> KeptConfig {
        KeptConfig {
            data: config.data.clone(),
            disks: config.disks.clone(),
            state: config.state.clone(),
            admin: config.admin.clone(),
            listen: config.listen,
            metrics: config.metrics,
            nbd: config.nbd.as_ref().map(NbdAddress::to_string),
            moves: config.moves,
            processors: config.processors.clone(),
            memory_bytes: config.memory_bytes,
            log_level: config.log.level.to_string(),
            log_format: config.log.format.to_string(),
            log_file: config.log.file.clone(),
        }
    }

    /// A configuration of these values.
    ///
    /// # Errors
    /// When the machine does not have the processors or the memory any more.
    fn config(self, machine: &Machine) -> Result<Config, Error> {
        let settings = Settings {
            data: self.data,
            disk: self.disks,
            state: self.state,
            admin: self.admin,
            listen: Some(self.listen.to_string()),
            metrics: self.metrics.map(|addr| addr.to_string()),
            nbd: self.nbd,
            moves: self.moves.map(|addr| addr.to_string()),
            allow_remote: Some(true),
            cores: Some(CoreChoice::List(self.processors)),
            memory: Some(Size(self.memory_bytes)),
            log_level: self.log_level.parse().ok(),
            log_format: self.log_format.parse().ok(),
            log_file: self.log_file,
            ..Settings::default()
        };
        Config::new(settings, machine)
    }
}

impl Config {
    /// The configuration of a launcher that has replaced another one and cannot read its own, for
    /// the reason `why`: what the other one has left.
    ///
    /// # Errors
    /// `why`, when this process is not such a launcher.
    pub fn kept_by_launcher(machine: &Machine, why: Error) -> Result<Config, Error> {
        let left = std::env::var(RENEWED).ok().filter(|_| is_renewed());
        let kept = left.and_then(|text| serde_json::from_str::<KeptConfig>(&text).ok());
        match kept.map(|kept| kept.config(machine)) {
            Some(Ok(config)) => Ok(Config { unreadable: Some(why.to_string()), ..config }),
            _ => Err(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_kept_without_its_files() {
        let settings = "data = '/db'\nlisten = '[::]:7000'\nallow-remote = true\nmetrics = '127.0.0.1:7001'\nnbd = 'unix:/n.sock'\n\
             cores = 1\nmemory = '64M'\nlog-level = 'info,lsm=debug'\nlog-format = 'json'\n\
             log-file = '/log'\nstate = '/state'\nadmin = '/admin'\n\
             [[disk]]\nname = 'a'\nuri = 'null:1G'\nsocket = '/a.sock'\n";
        let machine = Machine::look();
        let config = Config::new(Settings::from_toml(settings).unwrap(), &machine).unwrap();
        let kept = KeptConfig::of(&config);
        let text = serde_json::to_string(&kept).unwrap();
        let again: KeptConfig = serde_json::from_str(&text).unwrap();
        assert_eq!(KeptConfig::of(&again.config(&machine).unwrap()), kept);
    }
}

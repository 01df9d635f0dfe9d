//! What a node is told: flags, then the configuration file, then defaults, in this order.
//!
//! The file is TOML and has the flags' names as keys. A key it does not know is an error that
//! names file and line: a setting that is silently ignored is worse than a node that does not
//! start. Nothing below this crate reads a configuration file.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use reactor::{DriverKind, PollMode};
use serde::Deserialize;

use crate::cores::{CoreChoice, place};
use crate::error::{Error, Kind};
use crate::machine::Machine;
use crate::size::Size;

/// Where clients find a node that was told nothing else.
pub const LISTEN_DEFAULT: &str = "127.0.0.1:6379";

/// Settings as given: by flags or by a file. What is `None` was not said.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// The database's directory.
    pub data: Option<PathBuf>,
    /// Serve reads only.
    pub read_only: Option<bool>,
    /// Address and port to listen on.
    pub listen: Option<String>,
    /// Which processors to run on.
    pub cores: Option<CoreChoice>,
    /// Memory budget of the node.
    pub memory: Option<Size>,
    /// How cores wait for work.
    #[serde(default, deserialize_with = "from_text")]
    pub poll: Option<PollMode>,
    /// Which driver reads disk and network.
    #[serde(default, deserialize_with = "from_text")]
    pub io: Option<DriverKind>,
    /// Open although another process has the database open for writing.
    pub secondary: Option<bool>,
    /// Serve what lies before a damaged place in the write-ahead log, instead of refusing.
    pub salvage: Option<bool>,
    /// Listen on an address that other machines can reach.
    pub allow_remote: Option<bool>,
}

fn from_text<'de, T, D>(from: D) -> Result<Option<T>, D::Error>
where
    T: std::str::FromStr<Err = String>,
    D: serde::Deserializer<'de>,
{
    let text = String::deserialize(from)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

impl Settings {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// When it cannot be read, is no TOML, or has a key or a value it should not have.
    #[expect(clippy::disallowed_methods, reason = "start-up code, before any core runs")]
    pub fn from_file(path: &Path) -> Result<Settings, Error> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::new(Kind::Usage, format!("reading configuration {}: {error}", path.display()))
        })?;
        Settings::from_toml(&text)
            .map_err(|what| Error::new(Kind::Usage, format!("{}:{what}", path.display())))
    }

    /// Reads the text of a configuration file. The error begins with the line's number.
    pub(crate) fn from_toml(text: &str) -> Result<Settings, String> {
        toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start).min(text.len());
            let line = text.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count() + 1;
            format!("{line}: {}", error.message().replace('\n', " "))
        })
    }

    /// These settings, and where they say nothing, those of `other`.
    #[must_use]
    pub fn or(self, other: Settings) -> Settings {
        Settings {
            data: self.data.or(other.data),
            read_only: self.read_only.or(other.read_only),
            listen: self.listen.or(other.listen),
            cores: self.cores.or(other.cores),
            memory: self.memory.or(other.memory),
            poll: self.poll.or(other.poll),
            io: self.io.or(other.io),
            secondary: self.secondary.or(other.secondary),
            salvage: self.salvage.or(other.salvage),
            allow_remote: self.allow_remote.or(other.allow_remote),
        }
    }
}

/// A node's configuration: complete, and checked against the machine.
#[derive(Clone, Debug)]
pub struct Config {
    /// The database's directory.
    pub data: PathBuf,
    /// Where to listen.
    pub listen: SocketAddr,
    /// Processors to run on, one core each.
    pub processors: Vec<usize>,
    /// Memory budget of the node in bytes.
    pub memory_bytes: u64,
    /// How cores wait for work.
    pub poll: PollMode,
    /// Which driver.
    pub driver: DriverKind,
    /// Open although another process has the database open for writing.
    pub secondary: bool,
    /// Serve what lies before a damaged place in the write-ahead log.
    pub salvage: bool,
    /// The configuration file, if there was one.
    pub file: Option<PathBuf>,
}

/// Least memory a core can work with: what two of the largest reads take, and some connections.
pub const CORE_MEMORY_MIN: u64 = 16 << 20;

impl Config {
    /// Fills in defaults and refuses what cannot work.
    ///
    /// # Errors
    /// [`Kind::Usage`], with a text that says which setting to change.
    pub fn new(settings: Settings, machine: &Machine) -> Result<Config, Error> {
        let usage = |what: String| Error::new(Kind::Usage, what);
        let data = settings.data.ok_or_else(|| {
            usage("no database is named".into()).hint("add --data DIR, a RocksDB directory")
        })?;
        if settings.read_only != Some(true) {
            return Err(usage("this version of millrace only reads".into()).hint(
                "add --read-only (it takes no write from clients and changes nothing in the \
                 directory)",
            ));
        }
        let listen =
            parse_listen(settings.listen.as_deref().unwrap_or(LISTEN_DEFAULT)).map_err(usage)?;
        if !listen.ip().is_loopback() && settings.allow_remote != Some(true) {
            return Err(usage(format!(
                "{listen} can be reached from other machines, and this version has no passwords"
            ))
            .hint("listen on 127.0.0.1, or add --allow-remote if the network is yours alone"));
        }
        let processors = place(settings.cores.as_ref(), &machine.allowed)
            .map_err(|what| usage(what).hint("leave --cores out to use all that there are"))?;
        let memory_bytes = settings.memory.map_or(machine.memory_bytes / 4, |size| size.0);
        let least = CORE_MEMORY_MIN * processors.len() as u64;
        if memory_bytes < least {
            let cores = match processors.len() {
                1 => "1 core".to_owned(),
                cores => format!("{cores} cores"),
            };
            return Err(usage(format!(
                "{} of memory are too little for {cores}",
                Size(memory_bytes)
            ))
            .hint(format!("use fewer --cores, or at least --memory {}M", least >> 20)));
        }
        if memory_bytes > machine.memory_bytes {
            return Err(usage(format!(
                "{} of memory are more than this process may have: {}",
                Size(memory_bytes),
                Size(machine.memory_bytes)
            ))
            .hint("leave --memory out to use a quarter of it"));
        }
        Ok(Config {
            data,
            listen,
            processors,
            memory_bytes,
            poll: settings.poll.unwrap_or_default(),
            driver: settings.io.unwrap_or_default(),
            secondary: settings.secondary.unwrap_or(false),
            salvage: settings.salvage.unwrap_or(false),
            file: None,
        })
    }
}

/// Reads an address to listen on: `IP:PORT`, `[IPV6]:PORT`, `localhost:PORT` or `:PORT`.
fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    if let Ok(addr) = text.parse() {
        return Ok(addr);
    }
    let local = text.strip_prefix("localhost:").or(text.strip_prefix(':'));
    if let Some(port) = local.and_then(|port| port.parse().ok()) {
        return Ok(SocketAddr::new(IpAddr::from([127, 0, 0, 1]), port));
    }
    Err(format!("'{text}' is no address to listen on: write {LISTEN_DEFAULT} or [::1]:6379"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cores::Allowed;

    fn machine() -> Machine {
        Machine {
            allowed: Allowed { processors: vec![0, 1], quota: None, nodes: Vec::new() },
            memory_bytes: 8 << 30,
            model: String::new(),
            kernel: String::new(),
        }
    }

    fn minimal() -> Settings {
        Settings { data: Some("/db".into()), read_only: Some(true), ..Settings::default() }
    }

    #[test]
    fn a_file_has_the_names_of_the_flags() {
        let settings = Settings::from_toml(
            "data = '/srv/db'\nread-only = true\nlisten = '[::1]:7000'\ncores = '0-1'\n\
             memory = '4G'\npoll = 'never'\nio = 'epoll'\nsecondary = true\nallow-remote = false\n",
        )
        .unwrap();
        let config = Config::new(settings, &machine()).unwrap();
        assert_eq!(config.data, Path::new("/srv/db"));
        assert_eq!(config.listen.port(), 7000);
        assert_eq!(config.processors, [0, 1]);
        assert_eq!(config.memory_bytes, 4 << 30);
        assert_eq!(config.poll, PollMode::Never);
        assert_eq!(config.driver, DriverKind::Epoll);
        assert!(config.secondary);
        assert_eq!(Settings::from_toml("cores = 2").unwrap().cores, Some(CoreChoice::Count(2)));
    }

    #[test]
    fn an_unknown_key_is_an_error_with_its_line() {
        let error = Settings::from_toml("data = '/db'\n\nlisten_on = 'x'\n").unwrap_err();
        assert!(error.starts_with("3: unknown field `listen_on`"), "{error}");
        let error = Settings::from_toml("data = '/db'\nmemory = '4 apples'\n").unwrap_err();
        assert!(error.starts_with("2: '4 apples' is no size"), "{error}");
        let error = Settings::from_toml("poll = 'often'").unwrap_err();
        assert!(error.starts_with("1: 'often' is none of always"), "{error}");
    }

    #[test]
    fn flags_win_over_the_file() {
        let flags = Settings { listen: Some(":1".into()), ..Settings::default() };
        let file = Settings { listen: Some(":2".into()), ..minimal() };
        assert_eq!(Config::new(flags.or(file), &machine()).unwrap().listen.port(), 1);
    }

    #[test]
    fn defaults_are_loopback_all_cores_and_a_quarter_of_the_memory() {
        let config = Config::new(minimal(), &machine()).unwrap();
        assert_eq!(config.listen.to_string(), LISTEN_DEFAULT);
        assert_eq!(config.processors, [0, 1]);
        assert_eq!(config.memory_bytes, 2 << 30);
    }

    #[test]
    fn what_cannot_work_is_refused_with_advice() {
        let refused = |settings: Settings| Config::new(settings, &machine()).unwrap_err();
        let error = refused(Settings { read_only: None, ..minimal() });
        assert!(error.advice().unwrap().starts_with("add --read-only"));
        let remote = Settings { listen: Some("0.0.0.0:6379".into()), ..minimal() };
        assert!(refused(remote.clone()).to_string().contains("no passwords"));
        let forced = Settings { allow_remote: Some(true), ..remote };
        assert!(Config::new(forced, &machine()).is_ok());
        let small = Settings { memory: Some(Size(1 << 20)), ..minimal() };
        assert!(refused(small).to_string().contains("too little"));
        let large = Settings { memory: Some(Size(9 << 30)), ..minimal() };
        assert!(refused(large).to_string().contains("more than this process may have: 8 GiB"));
        let nowhere = Settings { data: None, ..minimal() };
        assert!(refused(nowhere).advice().unwrap().contains("--data"));
        let strange = Settings { listen: Some("somewhere".into()), ..minimal() };
        assert!(refused(strange).to_string().contains("no address"));
    }
}

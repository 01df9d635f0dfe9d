//! The configuration of a node: flags, then the configuration file, then defaults, in this order.
//!
//! The file is TOML and has the flags' names as keys. An unknown key is an error that names file
//! and line: ignoring a setting silently is worse than not starting. Nothing below this crate reads
//! a configuration file.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use kv::{Password, Tls, TlsAuthClients};
use lsm::Durability;
use reactor::log::{Filter, Format};
use reactor::{DriverKind, PollMode};
use serde::Deserialize;
use transfer::Identity;

use crate::cores::{CoreChoice, place};
use crate::disks::spec::{self, DiskSpec};
use crate::error::{Error, Kind};
use crate::log::LogConfig;
use crate::machine::Machine;
use crate::nbd_address::NbdAddress;
use crate::redis_version::RedisVersion;
use crate::size::Size;
use crate::tls::{self, TlsConfig, TlsSettings};

/// The default address for clients.
pub const LISTEN_DEFAULT: &str = "127.0.0.1:6379";

/// The column family that is served if none is named: the one that each database has.
pub const DEFAULT_FAMILY: &str = "default";

/// Least limit of the space of blob files: below, most of the writing would be collection.
const BLOB_SPACE_RATIO_MIN: f64 = 1.1;

/// Settings as given by flags or a file. `None` was not given.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// The database's directory.
    pub data: Option<PathBuf>,
    /// The column family to serve.
    pub column_family: Option<String>,
    /// Serve reads only.
    pub read_only: Option<bool>,
    /// What an acknowledged write survives.
    #[serde(default, deserialize_with = "from_text")]
    pub durability: Option<Durability>,
    /// Store values of this length and longer ones in blob files.
    pub blob_min: Option<Size>,
    /// The limit of the space of blob files, as a multiple of their live values; at least 1.1.
    pub blob_space_max_ratio: Option<f64>,
    /// Take over a database last written by a RocksDB older than 7.8.
    pub adopt: Option<bool>,
    /// Address and port to listen on.
    pub listen: Option<String>,
    /// The certificate for TLS, in PEM.
    pub tls_cert: Option<PathBuf>,
    /// The key of that certificate.
    pub tls_key: Option<PathBuf>,
    /// The authorities of clients' certificates.
    pub tls_ca: Option<PathBuf>,
    /// The certificates that these authorities have revoked.
    pub tls_crl: Option<PathBuf>,
    /// Whether clients must show a certificate.
    #[serde(default, deserialize_with = "from_text")]
    pub tls_auth_clients: Option<TlsAuthClients>,
    /// Address and port for TLS, beside `listen` without TLS.
    pub tls_listen: Option<String>,
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
    /// Serve the writes before a damaged place in the write-ahead log, instead of refusing.
    pub salvage: Option<bool>,
    /// Listen on an address that other machines can reach, without a password.
    pub allow_remote: Option<bool>,
    /// Address and port of the metrics.
    pub metrics: Option<String>,
    /// Where NBD clients connect: address and port, or `unix:` and a path.
    pub nbd: Option<String>,
    /// Address and port at which disks of other nodes come.
    pub moves: Option<String>,
    /// The certificate that this node shows other nodes.
    pub moves_cert: Option<PathBuf>,
    /// The certificate's key.
    pub moves_key: Option<PathBuf>,
    /// The authorities of other nodes' certificates, or these themselves.
    pub moves_ca: Option<PathBuf>,
    /// The log level.
    #[serde(default, deserialize_with = "from_text")]
    pub log_level: Option<Filter>,
    /// The format of the log.
    #[serde(default, deserialize_with = "from_text")]
    pub log_format: Option<Format>,
    /// The log file, instead of standard error.
    pub log_file: Option<PathBuf>,
    /// The password that clients must give.
    pub requirepass: Option<String>,
    /// A file with that password in its first line.
    pub password_file: Option<PathBuf>,
    /// The version of Redis that `HELLO` and `INFO` report.
    pub redis_version: Option<RedisVersion>,
    /// Allow DEBUG, which is for tests.
    pub enable_debug_command: Option<bool>,
    /// Disks for virtual machines.
    #[serde(default)]
    pub disk: Vec<DiskSpec>,
    /// The state directory.
    pub state: Option<PathBuf>,
    /// The admin socket.
    pub admin: Option<PathBuf>,
    /// Whether the process that serves guests is confined.
    #[serde(default, deserialize_with = "from_text")]
    pub sandbox: Option<Sandbox>,
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
    /// When it cannot be read, is not TOML, or has an unknown key or an invalid value.
    #[expect(clippy::disallowed_methods, reason = "start-up code, before any core runs")]
    pub fn from_file(path: &Path) -> Result<Settings, Error> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::new(
                Kind::Usage,
                format!("cannot read configuration {}: {error}", path.display()),
            )
        })?;
        Settings::from_toml(&text)
            .map_err(|what| Error::new(Kind::Usage, format!("{}:{what}", path.display())))
    }

    /// Parses the text of a configuration file. The error begins with the number of the line.
    pub(crate) fn from_toml(text: &str) -> Result<Settings, String> {
        toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start).min(text.len());
            let line = text.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count() + 1;
            format!("{line}: {}", error.message().replace('\n', " "))
        })
    }

    /// These settings, and those of `other` where these are not given.
    #[must_use]
    pub fn or(self, other: Settings) -> Settings {
        Settings {
            data: self.data.or(other.data),
            column_family: self.column_family.or(other.column_family),
            read_only: self.read_only.or(other.read_only),
            durability: self.durability.or(other.durability),
            blob_min: self.blob_min.or(other.blob_min),
            blob_space_max_ratio: self.blob_space_max_ratio.or(other.blob_space_max_ratio),
            adopt: self.adopt.or(other.adopt),
            listen: self.listen.or(other.listen),
            tls_cert: self.tls_cert.or(other.tls_cert),
            tls_key: self.tls_key.or(other.tls_key),
            tls_ca: self.tls_ca.or(other.tls_ca),
            tls_crl: self.tls_crl.or(other.tls_crl),
            tls_auth_clients: self.tls_auth_clients.or(other.tls_auth_clients),
            tls_listen: self.tls_listen.or(other.tls_listen),
            cores: self.cores.or(other.cores),
            memory: self.memory.or(other.memory),
            poll: self.poll.or(other.poll),
            io: self.io.or(other.io),
            secondary: self.secondary.or(other.secondary),
            salvage: self.salvage.or(other.salvage),
            allow_remote: self.allow_remote.or(other.allow_remote),
            metrics: self.metrics.or(other.metrics),
            nbd: self.nbd.or(other.nbd),
            moves: self.moves.or(other.moves),
            moves_cert: self.moves_cert.or(other.moves_cert),
            moves_key: self.moves_key.or(other.moves_key),
            moves_ca: self.moves_ca.or(other.moves_ca),
            log_level: self.log_level.or(other.log_level),
            log_format: self.log_format.or(other.log_format),
            log_file: self.log_file.or(other.log_file),
            requirepass: self.requirepass.or(other.requirepass),
            password_file: self.password_file.or(other.password_file),
            redis_version: self.redis_version.or(other.redis_version),
            enable_debug_command: self.enable_debug_command.or(other.enable_debug_command),
            disk: if self.disk.is_empty() { other.disk } else { self.disk },
            state: self.state.or(other.state),
            admin: self.admin.or(other.admin),
            sandbox: self.sandbox.or(other.sandbox),
        }
    }
}

/// Whether the process that serves guests is confined: see docs/SANDBOX.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Sandbox {
    /// As far as the system can, if there may be disks; the log names what is not possible.
    #[default]
    Auto,
    /// Completely, or the node does not start.
    On,
    /// Not at all.
    Off,
}

impl std::str::FromStr for Sandbox {
    type Err = String;

    fn from_str(text: &str) -> Result<Sandbox, String> {
        match text {
            "auto" => Ok(Sandbox::Auto),
            "on" => Ok(Sandbox::On),
            "off" => Ok(Sandbox::Off),
            _ => Err(format!("sandbox must be auto, on or off, not '{text}'")),
        }
    }
}

/// A node's configuration, complete and checked against the machine.
#[derive(Clone, Debug)]
pub struct Config {
    /// The database's directory, if the node serves a database.
    pub data: Option<PathBuf>,
    /// The column family that is served.
    pub column_family: String,
    /// Disks for virtual machines.
    pub disks: Vec<DiskSpec>,
    /// The state directory, if it was named: see [`crate::default_state`].
    pub state: Option<PathBuf>,
    /// The admin socket, if it was named; otherwise it is in the state directory.
    pub admin: Option<PathBuf>,
    /// Serve reads only: requested, or implied by `secondary` or `salvage`.
    pub read_only: bool,
    /// What an acknowledged write survives.
    pub durability: Durability,
    /// Store values of at least this many bytes in blob files.
    pub blob_min: Option<usize>,
    /// The limit of the space of blob files, as a multiple of their live values.
    pub blob_space_max_ratio: Option<f64>,
    /// Take over a database last written by a RocksDB older than 7.8.
    pub adopt: bool,
    /// Where to listen.
    pub listen: SocketAddr,
    /// TLS for clients, if any.
    pub tls: Option<TlsConfig>,
    /// Processors to run on, one core each.
    pub processors: Vec<usize>,
    /// Memory budget of the node in bytes.
    pub memory_bytes: u64,
    /// How cores wait for work.
    pub poll: PollMode,
    /// The I/O driver.
    pub driver: DriverKind,
    /// Open although another process has the database open for writing.
    pub secondary: bool,
    /// Serve the writes before a damaged place in the write-ahead log.
    pub salvage: bool,
    /// The address of the metrics, if any.
    pub metrics: Option<SocketAddr>,
    /// Where NBD clients connect, if anywhere.
    pub nbd: Option<NbdAddress>,
    /// Where disks of other nodes come, if anywhere.
    pub moves: Option<SocketAddr>,
    /// How this node and others know each other, when disks move between them.
    pub identity: Option<Identity>,
    /// The log.
    pub log: LogConfig,
    /// The password that clients must give before anything else.
    pub password: Option<Password>,
    /// The version of Redis that `HELLO` and `INFO` report.
    pub redis_version: RedisVersion,
    /// Allow `DEBUG`.
    pub debug_commands: bool,
    /// Whether the process that serves guests is confined.
    pub sandbox: Sandbox,
    /// The configuration file, if any.
    pub file: Option<PathBuf>,
    /// Why the configuration could not be read: then this is what an earlier launcher has left,
    /// see [`Config::kept_by_launcher`].
    pub unreadable: Option<String>,
}

/// Minimum memory of a core: two of the largest reads, and some connections.
pub const CORE_MEMORY_MIN: u64 = 16 << 20;

impl Config {
    /// Fills in defaults and refuses what cannot work.
    ///
    /// # Errors
    /// [`Kind::Usage`], with a text that says which setting to change.
    pub fn new(settings: Settings, machine: &Machine) -> Result<Config, Error> {
        let usage = |what: String| Error::new(Kind::Usage, what);
        let attaches = settings.state.is_some() || settings.admin.is_some();
        if settings.data.is_none() && settings.disk.is_empty() && !attaches {
            return Err(usage("neither a database nor a disk is named".into()).hint(
                "add --data DIR, a RocksDB directory or one to be created, or --disk 'name=... \
                 uri=... socket=...', or --state DIR to attach disks later",
            ));
        }
        if settings.column_family.is_some() && settings.data.is_none() {
            let what = "--column-family names a part of a database, and none is served";
            return Err(usage(what.into()).hint("add --data DIR"));
        }
        spec::check_all(&settings.disk).map_err(usage)?;
        // A database that another process writes, or that is damaged, is not written.
        let read_only = [settings.read_only, settings.secondary, settings.salvage];
        let read_only = read_only.contains(&Some(true));
        let of_writes = settings.durability.is_some()
            || settings.blob_min.is_some()
            || settings.blob_space_max_ratio.is_some();
        if read_only && (of_writes || settings.adopt == Some(true)) {
            return Err(usage(
                "a node that only reads takes no --durability, no --blob-min, no \
                 --blob-space-max-ratio and no --adopt"
                    .into(),
            )
            .hint("omit them, or omit --read-only, --secondary and --salvage"));
        }
        if let Some(ratio) = settings.blob_space_max_ratio
            && (!ratio.is_finite() || ratio < BLOB_SPACE_RATIO_MIN)
        {
            let what = format!("blob-space-max-ratio must be at least 1.1, not {ratio}");
            return Err(usage(what).hint("2 is the default; less costs more writes"));
        }
        let listen =
            parse_listen(settings.listen.as_deref().unwrap_or(LISTEN_DEFAULT)).map_err(usage)?;
        let metrics = match settings.metrics.as_deref().map(parse_listen).transpose() {
            Ok(metrics) => metrics,
            Err(what) => return Err(usage(what)),
        };
        let nbd = settings.nbd.as_deref().map(parse_nbd).transpose().map_err(usage)?;
        let moves = settings.moves.as_deref().map(parse_listen).transpose().map_err(usage)?;
        let identity = tls::identity(settings.moves_cert, settings.moves_key, settings.moves_ca)?;
        let tls_listen = settings.tls_listen.as_deref().map(parse_listen).transpose();
        let tls = TlsSettings {
            certificate: settings.tls_cert,
            key: settings.tls_key,
            authority: settings.tls_ca,
            revoked: settings.tls_crl,
            auth_clients: settings.tls_auth_clients,
            listen: tls_listen.map_err(usage)?,
        };
        let tls = tls.read()?;
        let tls_listen = tls.as_ref().and_then(|tls| tls.listen);
        if let Some(addr) = tls_listen.filter(|addr| addr.port() != 0)
            && (addr == listen || metrics == Some(addr))
        {
            return Err(usage(format!("{addr} cannot serve both TLS and something else"))
                .hint("give --tls-listen another port, or omit it to have TLS at --listen"));
        }
        if metrics == Some(listen) && listen.port() != 0 {
            return Err(usage(format!("{listen} cannot serve both clients and metrics"))
                .hint("give --metrics another port"));
        }
        if let Some(NbdAddress::Tcp(addr)) = nbd
            && addr.port() != 0
            && [Some(listen), metrics, tls_listen].contains(&Some(addr))
        {
            return Err(usage(format!("{addr} cannot serve both NBD and something else"))
                .hint("give --nbd another port"));
        }
        if let Some(addr) = moves
            && addr.port() != 0
            && ([Some(listen), metrics, tls_listen].contains(&Some(addr))
                || nbd == Some(NbdAddress::Tcp(addr)))
        {
            return Err(usage(format!("{addr} cannot serve both moves and something else"))
                .hint("give --moves another port"));
        }
        let password = match (&settings.password_file, settings.requirepass) {
            (Some(file), _) => Some(read_password(file).map_err(usage)?),
            (None, word) => word.and_then(Password::new),
        };
        let allow_remote = settings.allow_remote == Some(true);
        if !allow_remote {
            check_reachable(listen, metrics, password.is_some())?;
            check_reachable(tls_listen.unwrap_or(listen), metrics, password.is_some())?;
            check_nbd_reachable(nbd.as_ref())?;
            check_moves_reachable(moves, identity.is_some())?;
        }
        let processors = place(settings.cores.as_ref(), &machine.allowed)
            .map_err(|what| usage(what).hint("omit --cores to use all of them"))?;
        let memory_bytes = memory_bytes(settings.memory, processors.len(), machine)?;
        Ok(Config {
            data: settings.data,
            column_family: settings.column_family.unwrap_or_else(|| DEFAULT_FAMILY.to_owned()),
            disks: settings.disk,
            state: settings.state,
            admin: settings.admin,
            read_only,
            durability: settings.durability.unwrap_or_default(),
            blob_min: settings.blob_min.map(Size::bytes),
            blob_space_max_ratio: settings.blob_space_max_ratio,
            adopt: settings.adopt.unwrap_or(false),
            listen,
            tls,
            processors,
            memory_bytes,
            poll: settings.poll.unwrap_or_default(),
            driver: settings.io.unwrap_or_default(),
            secondary: settings.secondary.unwrap_or(false),
            salvage: settings.salvage.unwrap_or(false),
            metrics,
            nbd,
            moves,
            identity,
            log: LogConfig {
                level: settings.log_level.unwrap_or(LogConfig::default().level),
                format: settings.log_format.unwrap_or_default(),
                file: settings.log_file,
            },
            password,
            redis_version: settings.redis_version.unwrap_or_default(),
            debug_commands: settings.enable_debug_command.unwrap_or(false),
            sandbox: settings.sandbox.unwrap_or_default(),
            file: None,
            unreadable: None,
        })
    }
}

/// Where clients connect.
#[derive(Clone, Debug)]
pub(crate) struct ClientDoor {
    pub addr: SocketAddr,
    /// The user's flag for another address.
    pub flag: &'static str,
    pub tls: Option<Tls>,
}

impl Config {
    /// Where clients connect: at least one door, at most [`DOORS_MAX`].
    pub(crate) fn doors(&self) -> Vec<ClientDoor> {
        let door = |addr, flag, tls| ClientDoor { addr, flag, tls };
        let tls = self.tls.as_ref().map(|config| config.tls.clone());
        match self.tls.as_ref().and_then(|config| config.listen) {
            None => vec![door(self.listen, "--listen", tls)],
            Some(addr) => {
                vec![door(self.listen, "--listen", None), door(addr, "--tls-listen", tls)]
            }
        }
    }
}

/// Maximum number of doors.
pub(crate) const DOORS_MAX: usize = 2;

/// Refuses addresses that other machines can reach without a password.
fn check_reachable(
    listen: SocketAddr,
    metrics: Option<SocketAddr>,
    has_password: bool,
) -> Result<(), Error> {
    if !listen.ip().is_loopback() && !has_password {
        let what = format!("{listen} can be reached from other machines, but no password is set");
        return Err(Error::new(Kind::Usage, what).hint(
            "set one with --password-file FILE, listen on 127.0.0.1, or add --allow-remote if \
             the network is private",
        ));
    }
    if let Some(metrics) = metrics.filter(|metrics| !metrics.ip().is_loopback()) {
        let what =
            format!("metrics on {metrics} can be read from other machines, without a password");
        return Err(Error::new(Kind::Usage, what)
            .hint("listen on 127.0.0.1, or add --allow-remote if the network is private"));
    }
    Ok(())
}

/// Refuses an address for NBD clients that other machines can reach.
fn check_nbd_reachable(nbd: Option<&NbdAddress>) -> Result<(), Error> {
    match nbd {
        Some(NbdAddress::Tcp(addr)) if !addr.ip().is_loopback() => {
            let what = format!(
                "NBD on {addr} would let other machines read and write the disks, without a password"
            );
            Err(Error::new(Kind::Usage, what).hint(
                "listen on 127.0.0.1 or at unix:PATH, or add --allow-remote if the network is \
                 private",
            ))
        }
        _ => Ok(()),
    }
}

/// Refuses an address for moves that other machines can reach without a certificate.
fn check_moves_reachable(moves: Option<SocketAddr>, has_identity: bool) -> Result<(), Error> {
    match moves.filter(|addr| !addr.ip().is_loopback() && !has_identity) {
        Some(addr) => {
            let what = format!(
                "moves at {addr} would let other machines write to disks that wait for their data"
            );
            Err(Error::new(Kind::Usage, what).hint(
                "add --moves-cert, --moves-key and --moves-ca for TLS, or --allow-remote if the \
                 network is private",
            ))
        }
        None => Ok(()),
    }
}

/// The memory budget of a node in bytes: `asked`, or a quarter of the machine's memory.
fn memory_bytes(asked: Option<Size>, cores: usize, machine: &Machine) -> Result<u64, Error> {
    let memory_bytes = asked.map_or(machine.memory_bytes / 4, |size| size.0);
    let least = CORE_MEMORY_MIN * cores as u64;
    if memory_bytes < least {
        let cores = match cores {
            1 => "1 core".to_owned(),
            cores => format!("{cores} cores"),
        };
        let what = format!("{} of memory are too little for {cores}", Size(memory_bytes));
        return Err(Error::new(Kind::Usage, what)
            .hint(format!("use fewer --cores, or at least --memory {}M", least >> 20)));
    }
    if memory_bytes > machine.memory_bytes {
        let (asked, there) = (Size(memory_bytes), Size(machine.memory_bytes));
        let what = format!("{asked} of memory are more than this process may have: {there}");
        return Err(Error::new(Kind::Usage, what).hint("omit --memory to use a quarter of it"));
    }
    Ok(memory_bytes)
}

/// Reads a password: the first line of a file.
#[expect(clippy::disallowed_methods, reason = "start-up code, before any core runs")]
fn read_password(file: &Path) -> Result<Password, String> {
    let text = std::fs::read(file)
        .map_err(|error| format!("cannot read the password file {}: {error}", file.display()))?;
    let line = text.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    Password::new(line)
        .ok_or_else(|| format!("the password in the first line of {} is empty", file.display()))
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
    Err(format!("'{text}' is not an address to listen on: write {LISTEN_DEFAULT} or [::1]:6379"))
}

/// Reads an address for NBD clients.
fn parse_nbd(text: &str) -> Result<NbdAddress, String> {
    match text.strip_prefix("unix:") {
        Some("") => Err("'unix:' names no socket: write unix:PATH".to_owned()),
        Some(path) => Ok(NbdAddress::Unix(path.into())),
        None => parse_listen(text).map(NbdAddress::Tcp).map_err(|_| {
            format!("'{text}' is no address for NBD: write 127.0.0.1:10809 or unix:PATH")
        }),
    }
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
             memory = '4G'\nadopt = false\npoll = 'never'\nio = 'epoll'\nsecondary = true\nallow-remote = false\n\
             metrics = ':9121'\nnbd = 'unix:/run/nbd'\nlog-level = 'warn,lsm=debug'\nlog-format = 'json'\nlog-file = '/var/log/m'\n\
             sandbox = 'on'\n",
        )
        .unwrap();
        let config = Config::new(settings, &machine()).unwrap();
        assert_eq!(config.data.as_deref(), Some(Path::new("/srv/db")));
        assert_eq!(config.listen.port(), 7000);
        assert_eq!(config.processors, [0, 1]);
        assert_eq!(config.memory_bytes, 4 << 30);
        assert_eq!(config.poll, PollMode::Never);
        assert_eq!(config.driver, DriverKind::Epoll);
        assert!(config.secondary);
        assert_eq!(config.sandbox, Sandbox::On);
        assert!(Settings::from_toml("sandbox = 'maybe'").is_err());
        assert_eq!(config.log.level.to_string(), "warn,lsm=debug");
        assert_eq!(config.metrics.unwrap().to_string(), "127.0.0.1:9121");
        assert_eq!(config.nbd, Some(NbdAddress::Unix("/run/nbd".into())));
        assert_eq!(config.log.format, Format::Json);
        assert_eq!(config.log.file.as_deref(), Some(Path::new("/var/log/m")));
        assert_eq!(Settings::from_toml("cores = 2").unwrap().cores, Some(CoreChoice::Count(2)));
    }

    #[test]
    fn a_node_writes_unless_it_is_told_not_to() {
        let settings = || Settings { data: Some("/db".into()), ..Settings::default() };
        let config = Config::new(settings(), &machine()).unwrap();
        assert_eq!((config.read_only, config.durability), (false, Durability::Power));
        let process = Settings::from_toml("durability = 'process'").unwrap().or(settings());
        let config = Config::new(process, &machine()).unwrap();
        assert_eq!(config.durability, Durability::Process);
        for reading in ["read-only = true", "secondary = true", "salvage = true"] {
            let settings = Settings::from_toml(reading).unwrap().or(settings());
            assert!(Config::new(settings, &machine()).unwrap().read_only, "{reading}");
        }
        assert!(Settings::from_toml("durability = 'none'").is_err());
    }

    #[test]
    fn an_unknown_key_is_an_error_with_its_line() {
        let error = Settings::from_toml("data = '/db'\n\nlisten_on = 'x'\n").unwrap_err();
        assert!(error.starts_with("3: unknown field `listen_on`"), "{error}");
        let error = Settings::from_toml("data = '/db'\nmemory = '4 apples'\n").unwrap_err();
        assert!(error.starts_with("2: '4 apples' is not a size"), "{error}");
        let error = Settings::from_toml("poll = 'often'").unwrap_err();
        assert!(error.starts_with("1: ") && error.contains("always"), "{error}");
    }

    #[test]
    fn disks_are_tables_of_the_file_and_need_no_database() {
        let text = "[[disk]]\nname = 'vm1'\nuri = 'null:1G'\nsocket = 'vm1.sock'\nqueues = 2\n\
                    [[disk]]\nname = 'vm2'\nuri = 'file:b c.img'\nsocket = 'vm 2.sock'\n";
        let config = Config::new(Settings::from_toml(text).unwrap(), &machine()).unwrap();
        assert_eq!((config.data, config.disks.len()), (None, 2));
        assert_eq!((config.disks[0].queues, &*config.disks[1].name), (2, "vm2"));
        let twice = Settings::from_toml(&text.replace("vm2", "vm1")).unwrap();
        assert!(Config::new(twice, &machine()).unwrap_err().to_string().contains("the name vm1"));
        assert!(Settings::from_toml(&text.replace("queues", "rings")).is_err());
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
    fn an_impossible_configuration_is_refused_with_advice() {
        let refused = |settings: Settings| Config::new(settings, &machine()).unwrap_err();
        let pointless = Settings { durability: Some(Durability::Process), ..minimal() };
        assert!(refused(pointless).to_string().contains("takes no --durability"));
        let remote = Settings { listen: Some("0.0.0.0:6379".into()), ..minimal() };
        let metrics = Settings { metrics: Some("0.0.0.0:9121".into()), ..minimal() };
        assert!(refused(metrics).to_string().contains("without a password"));
        let nbd = |addr: &str| Settings { nbd: Some(addr.into()), ..minimal() };
        assert!(refused(nbd("[::]:10809")).to_string().contains("read and write the disks"));
        assert!(refused(nbd(LISTEN_DEFAULT)).advice().unwrap().contains("--nbd"));
        assert!(refused(nbd("unix:")).to_string().contains("unix:PATH"));
        assert!(refused(nbd("nbd://x")).to_string().contains("127.0.0.1:10809"));
        let twice = Settings { metrics: Some(LISTEN_DEFAULT.into()), ..minimal() };
        assert!(refused(twice).advice().unwrap().contains("--metrics"));
        assert!(refused(remote.clone()).to_string().contains("no password is set"));
        let secured = Settings { requirepass: Some("secret".into()), ..remote.clone() };
        let config = Config::new(secured, &machine()).unwrap();
        assert!(config.password.unwrap().is(b"secret"));
        let forced = Settings { allow_remote: Some(true), ..remote };
        assert!(Config::new(forced, &machine()).is_ok());
        let small = Settings { memory: Some(Size(1 << 20)), ..minimal() };
        assert!(refused(small).to_string().contains("too little"));
        let large = Settings { memory: Some(Size(9 << 30)), ..minimal() };
        assert!(refused(large).to_string().contains("more than this process may have: 8 GiB"));
        let nothing = Settings { data: None, ..minimal() };
        assert!(refused(nothing).advice().unwrap().contains("--data"));
        let strange = Settings { listen: Some("somewhere".into()), ..minimal() };
        assert!(refused(strange).to_string().contains("not an address"));
    }
}

//! The flags of `millrace serve`.

use std::path::PathBuf;

use bench::Durability;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueHint};
use node::{CoreChoice, DiskSpec, RedisVersion, Sandbox, Size, TlsAuthClients};
use reactor::log::{Filter, Format};
use reactor::{DriverKind, PollMode};

use super::values::{driver, durability, poll_mode, space_ratio};

/// `millrace serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  \
        millrace serve --data ./data\n  \
        millrace serve --data /var/lib/app/rocksdb --read-only\n  \
        millrace serve --data DIR --durability process --memory 4G --listen 127.0.0.1:7000\n\n\
        Then, in another terminal:\n  \
        redis-cli SET some-key 'some value'\n  \
        redis-cli GET some-key\n  \
        redis-cli MR.RANGE - + LIMIT 10",
    after_long_help = "Examples:\n  \
        millrace serve --data ./data\n  \
        millrace serve --data /var/lib/app/rocksdb --read-only\n  \
        millrace serve --data DIR --durability process --memory 4G --listen 127.0.0.1:7000\n  \
        millrace serve --config /etc/millrace.toml\n\n\
        A configuration file is TOML with the flags' names as keys:\n  \
        data = \"/var/lib/app/rocksdb\"\n  \
        durability = \"process\"\n  \
        memory = \"4G\"\n\n\
        Then, in another terminal:\n  \
        redis-cli SET some-key 'some value'\n  \
        redis-cli GET some-key\n  \
        redis-cli MR.RANGE - + LIMIT 10\n  \
        redis-cli INFO\n\n\
        SIGTERM and SIGINT shut the server down cleanly: it answers the requests it has received \
        and exits with 0. A second signal ends it immediately."
)]
pub struct ServeArgs {
    /// The RocksDB directory to serve; a missing one is created
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub data: Option<PathBuf>,
    /// The column family to serve [default: default]
    ///
    /// Only the keys of the default family are counted exactly.
    #[arg(long, value_name = "NAME")]
    pub column_family: Option<String>,
    /// Take no writes and change nothing in the directory
    #[arg(long)]
    pub read_only: bool,
    /// Give a virtual machine a disk: name=NAME uri=URI socket=PATH [queues=N] [serial=TEXT]
    ///
    /// The machine's process connects to the socket (vhost-user-blk). May be given several times,
    /// with or without --data. Write a space in a value as %20, a percent sign as %25. URIs:
    /// file:PATH[?engine=uring|aio|mmap|sync], mem:SIZE, null:SIZE, nbd://HOST/EXPORT.
    #[arg(long, value_name = "SPEC")]
    pub disk: Vec<DiskSpec>,
    /// Keep attached disks and the admin socket in this directory
    ///
    /// [default: $XDG_STATE_HOME/millrace; /var/lib/millrace for root, ~/.local/state/millrace for
    /// others]. Each node needs its own. With this flag a node also starts with nothing to serve.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    #[arg(env = node::STATE_VARIABLE, hide_env_values = true)]
    pub state: Option<PathBuf>,
    /// Listen for `millrace disk` and `millrace top` here instead of in the state directory
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub admin: Option<PathBuf>,
    /// Confine the process that serves guests: auto, on or off [default: auto]
    ///
    /// A guest that takes over this process can then open no file except the database's, connect
    /// to nothing and start no program. A second process, the one that was started, opens images
    /// and sockets for it. With auto the node does this if it has disks or may get some (--disk,
    /// --state, --admin), as far as the system supports it, and reports what is missing; with on
    /// it then does not start.
    #[arg(long, value_name = "MODE", value_parser = sandbox())]
    pub sandbox: Option<Sandbox>,
    /// What an acknowledged write survives: the end of the process, or a power cut [default:
    /// power]
    ///
    /// power flushes the disk once for all waiting writes before it acknowledges them; process
    /// leaves them to the system's page cache, which is faster and safe from everything except the
    /// end of the machine. SAVE flushes all earlier writes.
    #[arg(long, value_name = "LEVEL", value_parser = durability())]
    pub durability: Option<Durability>,
    /// Store values of at least this size in blob files [default: none]
    ///
    /// Such a value is written once; merges move a short reference to it. Garbage in blob files is
    /// collected. Without this option the database's own OPTIONS decide.
    #[arg(long, value_name = "SIZE")]
    pub blob_min: Option<Size>,
    /// The limit of the space of blob files, as a multiple of their live values [default: 2]
    ///
    /// On the way to it garbage is collected; near it, writes are slowed to what collection can
    /// take. At least 1.1. With this option garbage is collected whatever the database's OPTIONS
    /// say.
    #[arg(long, value_name = "RATIO", value_parser = space_ratio)]
    pub blob_space_max_ratio: Option<f64>,
    /// Write to a database last written by a RocksDB older than 7.8
    ///
    /// Afterwards only RocksDB 7.8 and newer read it.
    #[arg(long)]
    pub adopt: bool,
    /// The address to listen on: IP:PORT [default: 127.0.0.1:6379]
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<String>,
    /// Speak TLS with clients: the certificate in this file, and those between it and its
    /// authority
    ///
    /// PEM. Clients connect with TLS at --listen, or at --tls-listen if that is given; then
    /// --listen is without TLS. The files are read at the start and at an upgrade.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub tls_cert: Option<PathBuf>,
    /// The private key of the certificate for TLS, not encrypted
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub tls_key: Option<PathBuf>,
    /// The authorities of clients' certificates
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub tls_ca: Option<PathBuf>,
    /// Refuse clients whose certificates are on these lists of the authorities
    ///
    /// PEM; with --tls-ca. Each authority in the chain of a client's certificate must have a list
    /// in the file, if only an empty one.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub tls_crl: Option<PathBuf>,
    /// Whether TLS clients must show a certificate: yes, no or optional [default: yes with
    /// --tls-ca]
    ///
    /// With optional, a client may show none, but not one of another authority.
    #[arg(long, value_name = "MODE", value_parser = tls_auth_clients())]
    pub tls_auth_clients: Option<TlsAuthClients>,
    /// Listen for TLS here, beside --listen without TLS: IP:PORT
    #[arg(long, value_name = "ADDR")]
    pub tls_listen: Option<String>,
    /// Require the password in the first line of this file (AUTH, HELLO)
    ///
    /// A configuration file may also hold the password: requirepass = "...".
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub password_file: Option<PathBuf>,
    /// The version of Redis that HELLO and INFO report [default: 7.0.15]
    ///
    /// The default is the version whose commands there are. Some clients demand more, although
    /// they need none of the later commands: redis-py 8 and Jedis 5 cache only with 7.4.0 or
    /// later.
    #[arg(long, value_name = "VERSION")]
    pub redis_version: Option<RedisVersion>,
    /// Allow the command DEBUG, which is for tests of clients
    #[arg(long)]
    pub enable_debug_command: bool,
    /// Listen on an address that other machines can reach, without a password
    #[arg(long)]
    pub allow_remote: bool,
    /// How many cores to use, or which: 2, or 0,2-3 [default: all available]
    ///
    /// One thread is pinned to each. A single number is a count; 1-1 is processor 1 alone. The
    /// default is the process's affinity mask, limited to the quota of its control group.
    #[arg(long, value_name = "N|LIST")]
    pub cores: Option<CoreChoice>,
    /// The memory budget for cache, indexes, filters and requests [default: a quarter of the RAM]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Size>,
    /// How an idle core waits: always spins, never sleeps, adaptive decides [default: adaptive]
    #[arg(long, value_name = "MODE", value_parser = poll_mode())]
    pub poll: Option<PollMode>,
    /// How to access disk and network [default: auto, which is io_uring if the system allows it]
    #[arg(long, value_name = "DRIVER", value_parser = driver())]
    pub io: Option<DriverKind>,
    /// Serve while another process has the database open for writing
    ///
    /// Serves the state at the start. Files that the other process deletes later stay readable
    /// here while they are open.
    #[arg(long)]
    pub secondary: bool,
    /// Serve the data before damage in the write-ahead log, instead of refusing
    #[arg(long)]
    pub salvage: bool,
    /// Serve metrics in Prometheus's text format at http://ADDR/metrics
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<String>,
    /// Serve the disks to NBD clients, under their names: HOST:PORT or unix:PATH
    ///
    /// For qemu-img, nbdcopy, nbd-client and others: --nbd 127.0.0.1:10809, and then qemu-img info
    /// nbd://127.0.0.1/NAME. A disk that a virtual machine has is read-only for them. There is no
    /// password: an address that other machines can reach needs --allow-remote.
    #[arg(long, value_name = "ADDR")]
    pub nbd: Option<String>,
    /// Take disks from other nodes, for disks that are attached with --incoming: IP:PORT
    ///
    /// Other nodes send them there: millrace disk move NAME --to HOST:PORT/NAME. An address that
    /// other machines can reach needs --moves-cert, --moves-key and --moves-ca, or --allow-remote.
    #[arg(long, value_name = "ADDR")]
    pub moves: Option<String>,
    /// The certificate that this node shows other nodes when disks move, in PEM
    ///
    /// For both ends of a move; with it nodes speak TLS.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub moves_cert: Option<PathBuf>,
    /// The private key of that certificate, not encrypted
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub moves_key: Option<PathBuf>,
    /// The authorities of other nodes' certificates, or these certificates themselves
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub moves_ca: Option<PathBuf>,
    /// The log level: off, error, warn, info, debug or trace [default: info]
    ///
    /// Modules may have their own levels: warn,lsm=debug.
    #[arg(long, value_name = "LEVEL", env = node::LOG_VARIABLE, hide_env_values = true)]
    pub log_level: Option<Filter>,
    /// The format of log lines: text or json [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = log_format())]
    pub log_format: Option<Format>,
    /// Append the log to a file instead of writing it to standard error
    ///
    /// When the file is moved away, as log rotation does, a new one of the same name is created.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub log_file: Option<PathBuf>,
    /// A TOML file with any of these settings; flags take precedence
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
}

fn tls_auth_clients() -> impl TypedValueParser<Value = TlsAuthClients> {
    PossibleValuesParser::new(["yes", "no", "optional"]).try_map(|text| text.parse())
}

fn sandbox() -> impl TypedValueParser<Value = Sandbox> {
    PossibleValuesParser::new(["auto", "on", "off"]).try_map(|text| text.parse())
}

fn log_format() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(["text", "json"]).try_map(|text| text.parse())
}

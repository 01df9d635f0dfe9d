//! How a client connects and behaves.

use std::fmt;
use std::time::Duration;

use crate::cache::{BYTES_MIN, CHUNK_BYTES, INDEX_BYTES_MIN};
use crate::error::{Error, ErrorKind, Result};
use crate::tls::{Ready, Tls};

/// An eighth of it is one chunk of a stretch.
const AHEAD_CACHE_BYTES_MIN: usize = 8 * CHUNK_BYTES as usize;

/// How a client connects and behaves; a builder.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/example.rs"));
/// # fn main() -> client::Result<()> {
/// # let server = Redis::start(&["--requirepass", "secret"]);
/// # let address = server.address();
/// use std::time::Duration;
/// use millrace::client::Options;
///
/// let client = Options::new()
///     .password("secret")
///     .timeout(Duration::from_secs(2))
///     .cache(256 << 20)
///     .connect_blocking(&address)?; // such as "10.0.0.1:6379"
/// client.set("greeting", "hello")?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct Options {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: u32,
    pub(crate) timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) retry: bool,
    pub(crate) cache_bytes: usize,
    pub(crate) staleness_max: Duration,
    pub(crate) read_ahead: usize,
    pub(crate) index_bytes: usize,
    pub(crate) reply_bytes_max: usize,
    pub(crate) tls: Option<Tls>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            user: None,
            password: None,
            database: 0,
            timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
            retry: true,
            cache_bytes: 0,
            staleness_max: Duration::from_secs(3),
            read_ahead: 0,
            index_bytes: 0,
            reply_bytes_max: 1 << 30,
            tls: None,
        }
    }
}

impl Options {
    /// The defaults.
    pub fn new() -> Options {
        Options::default()
    }

    /// The password; none by default. One in the address takes its place.
    pub fn password(mut self, password: impl Into<String>) -> Options {
        self.password = Some(password.into());
        self
    }

    /// The user whose password it is; `default` by default.
    pub fn user(mut self, user: impl Into<String>) -> Options {
        self.user = Some(user.into());
        self
    }

    /// The number of the database, for Redis servers that have several; 0 by default.
    pub fn database(mut self, number: u32) -> Options {
        self.database = number;
        self
    }

    /// The longest time that a call takes, with all its attempts; 5 s by default.
    pub fn timeout(mut self, timeout: Duration) -> Options {
        self.timeout = timeout;
        self
    }

    /// The longest time for making one connection, with its name look-up and password; 2 s by
    /// default.
    pub fn connect_timeout(mut self, timeout: Duration) -> Options {
        self.connect_timeout = timeout;
        self
    }

    /// Whether calls are made again, within their [timeout](Options::timeout), when the server
    /// cannot be reached or the connection breaks; on by default. It is done only where it is safe:
    /// for reads, and for writes of which nothing was sent.
    pub fn retry(mut self, retry: bool) -> Options {
        self.retry = retry;
        self
    }

    /// Caches what is read, in at most this many bytes of memory; 0, the default, is no cache. The
    /// server must know `HELLO 3` and `CLIENT TRACKING`: Redis does since 6.0.
    ///
    /// See [the crate's page](crate#cache) for how old a cached value can be.
    pub fn cache(mut self, bytes: usize) -> Options {
        self.cache_bytes = bytes;
        self
    }

    /// How long a cached value may be served while the server is not heard of; 3 s by default. It
    /// is asked three times as often.
    pub fn staleness_max(mut self, time: Duration) -> Options {
        self.staleness_max = time;
        self
    }

    /// Fetches into the cache what was written before and after a value that is read, in up to this
    /// many bytes at once, if the program reads in about the order in which it has written:
    /// forward, backward, or one part after the other with no order within. 0, the default, is
    /// no read-ahead; 10 MiB is good for most. It needs a [cache](Options::cache) of at least 2
    /// MiB, of which at most an eighth is fetched at once, a Millrace node, and values that the
    /// node keeps in blob files. With other servers, and for reads at random, there is none.
    pub fn read_ahead(mut self, bytes: usize) -> Options {
        self.read_ahead = bytes;
        self
    }

    /// Keeps an index of all keys of the database in this process, in at most this many bytes, so
    /// that reads of keys that do not exist need no round trip. 0, the default, is none. A key
    /// takes 5 to 8 bytes. It needs a [cache](Options::cache) and a Millrace node; with other
    /// servers there is none, and neither if the keys do not fit.
    ///
    /// It is loaded in the background when the client has connected, and again when it was lost.
    /// The node then tells the client of every write of any key: that is meant for databases that
    /// are mostly read.
    pub fn index(mut self, bytes: usize) -> Options {
        self.index_bytes = bytes;
        self
    }

    /// The longest reply that is accepted, in bytes, with the memory of its elements; 1 GiB by
    /// default. It bounds what a server can make this process hold for one call.
    pub fn reply_bytes_max(mut self, bytes: usize) -> Options {
        self.reply_bytes_max = bytes;
        self
    }

    /// Speaks TLS with the server; off by default. The scheme `rediss` of an address does it too,
    /// with the default [`Tls`] unless this is given. It needs the feature `tls` of the crate.
    pub fn tls(mut self, tls: Tls) -> Options {
        self.tls = Some(tls);
        self
    }

    /// Connects a [`Client`](crate::Client), which needs a tokio runtime with I/O and time.
    ///
    /// The address is `HOST:PORT`, or `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`, or
    /// `rediss://` for [TLS](Options::tls). The host is a name, an IPv4 address, or an IPv6 address
    /// in brackets.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`], [`ErrorKind::Timeout`], [`ErrorKind::Denied`] for a wrong
    /// password, [`ErrorKind::Busy`]; [`ErrorKind::InvalidOption`] for an impossible address;
    /// [`ErrorKind::Unsupported`] if a cache is wanted and the server cannot track keys. A first
    /// connection is not tried again.
    pub async fn connect(self, address: &str) -> Result<crate::Client> {
        crate::Client::start(self.checked(address)?).await
    }

    /// Connects a [`blocking::Client`](crate::blocking::Client), for threads.
    ///
    /// # Errors
    /// As for [`Options::connect`].
    pub fn connect_blocking(self, address: &str) -> Result<crate::blocking::Client> {
        crate::blocking::Client::start(self.checked(address)?)
    }

    pub(crate) fn checked(mut self, address: &str) -> Result<Target> {
        let address = self.parse(address)?;
        for (name, time) in [
            ("timeout", self.timeout),
            ("connect_timeout", self.connect_timeout),
            ("staleness_max", self.staleness_max),
        ] {
            // Far beyond any use, and far below what overflows.
            if time < Duration::from_millis(1) || time > Duration::from_secs(86_400) {
                return Err(invalid(format!("{name} must be from 1 ms to a day, not {time:?}")));
            }
        }
        if self.cache_bytes != 0 && self.cache_bytes < BYTES_MIN {
            return Err(invalid(format!(
                "cache must be 0 or at least {BYTES_MIN} bytes, not {}",
                self.cache_bytes
            )));
        }
        if self.read_ahead != 0 && self.cache_bytes < AHEAD_CACHE_BYTES_MIN {
            return Err(invalid(format!(
                "read_ahead needs a cache of at least {AHEAD_CACHE_BYTES_MIN} bytes, not {}",
                self.cache_bytes
            )));
        }
        if self.read_ahead != 0 && self.read_ahead < CHUNK_BYTES as usize {
            return Err(invalid(format!(
                "read_ahead must be 0 or at least {CHUNK_BYTES} bytes, not {}",
                self.read_ahead
            )));
        }
        if self.index_bytes != 0 && self.cache_bytes == 0 {
            return Err(invalid("index needs a cache"));
        }
        if self.index_bytes != 0 && self.index_bytes < INDEX_BYTES_MIN {
            return Err(invalid(format!(
                "index must be 0 or at least {INDEX_BYTES_MIN} bytes, not {}",
                self.index_bytes
            )));
        }
        if self.user.is_some() && self.password.is_none() {
            return Err(invalid("a user needs a password"));
        }
        let tls = self.tls.as_ref().map(|tls| tls.ready(&address)).transpose()?;
        Ok(Target { options: self, address, tls })
    }

    /// Takes what an address says besides host and port.
    fn parse(&mut self, text: &str) -> Result<Address> {
        let wrong = |what: &str| {
            // Not the whole address: it may hold a password.
            invalid(format!("address must be HOST:PORT or redis://...: {what}"))
        };
        let (rest, is_url) = match text.split_once("://") {
            Some(("redis", rest)) => (rest, true),
            Some(("rediss", rest)) => {
                self.tls.get_or_insert_default();
                (rest, true)
            }
            Some((scheme, _)) => return Err(wrong(&format!("unknown scheme \"{scheme}\""))),
            None => (text, false),
        };
        let mut place = rest;
        if is_url {
            if let Some((login, after)) = rest.rsplit_once('@') {
                place = after;
                let (user, password) = match login.split_once(':') {
                    Some((user, password)) => (user, password),
                    None => ("", login),
                };
                let decode = |part| percent_decode(part).ok_or_else(|| wrong("bad %-escape"));
                if !user.is_empty() {
                    self.user = Some(decode(user)?);
                }
                self.password = Some(decode(password)?);
            }
            if let Some((before, number)) = place.split_once('/') {
                place = before;
                if !number.is_empty() {
                    self.database =
                        number.parse().map_err(|_| wrong("the database must be a number"))?;
                }
            }
        }
        let (host, port) = match place.strip_prefix('[') {
            Some(rest) => {
                let (host, after) = rest.split_once(']').ok_or_else(|| wrong("] is missing"))?;
                (host, after.strip_prefix(':').or(after.is_empty().then_some("")))
            }
            None => match place.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (place, Some("")),
            },
        };
        let port = match port {
            Some("") if is_url => 6379,
            Some(port) => port.parse().map_err(|_| wrong("the port must be a number"))?,
            None => return Err(wrong("there is something after ]")),
        };
        if host.is_empty() || port == 0 {
            return Err(wrong("host or port is missing"));
        }
        Ok(Address { host: host.to_owned(), port })
    }
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOption, what)
}

fn percent_decode(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let mut digit = || char::from(bytes.next()?).to_digit(16);
                (digit()? << 4 | digit()?) as u8
            }
            other => other,
        });
    }
    String::from_utf8(out).ok()
}

/// Shows no password.
impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("user", &self.user)
            .field("password", &self.password.as_ref().map(|_| "..."))
            .field("database", &self.database)
            .field("timeout", &self.timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("retry", &self.retry)
            .field("cache_bytes", &self.cache_bytes)
            .field("staleness_max", &self.staleness_max)
            .field("read_ahead", &self.read_ahead)
            .field("index_bytes", &self.index_bytes)
            .field("reply_bytes_max", &self.reply_bytes_max)
            .field("tls", &self.tls)
            .finish()
    }
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub host: String,
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Valid options, and the server that they are for.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub options: Options,
    pub address: Address,
    /// `None`: no TLS.
    #[cfg_attr(not(feature = "tls"), allow(dead_code, reason = "there is none"))]
    pub tls: Option<Ready>,
}

impl Target {
    /// The error of a connection that could not be made.
    #[cold]
    pub fn cannot_connect(&self, error: &Error) -> Error {
        Error::new(error.kind(), format!("cannot connect to {}: {error}", self.address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Target> {
        Options::new().checked(text)
    }

    #[test]
    fn addresses_are_taken_apart() {
        let address = |text: &str| parsed(text).unwrap().address.to_string();
        assert_eq!(address("localhost:7000"), "localhost:7000");
        assert_eq!(address("[::1]:7000"), "[::1]:7000");
        assert_eq!(address("redis://host"), "host:6379");
        assert_eq!(address("redis://[::1]/3"), "[::1]:6379");
        let full = parsed("redis://ada:p%40ss:w@host:1/2").unwrap();
        assert_eq!(full.address, Address { host: "host".to_owned(), port: 1 });
        assert_eq!(full.options.user.as_deref(), Some("ada"));
        assert_eq!(full.options.password.as_deref(), Some("p@ss:w"));
        assert_eq!(full.options.database, 2);
        assert_eq!(parsed("redis://:pw@h").unwrap().options.user, None);
    }

    #[test]
    fn impossible_addresses_and_options_are_refused_without_showing_a_password() {
        for text in [
            "",
            "host",
            "host:",
            ":1",
            "host:x",
            "host:70000",
            "host:0",
            "http://host:1",
            "[::1:1",
            "[::1]x",
            "redis://host/x",
            "redis://:%zz@host",
        ] {
            assert_eq!(parsed(text).unwrap_err().kind(), ErrorKind::InvalidOption, "{text}");
        }
        let error = parsed("redis://:secret@host:x").unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
        let options = Options::new().password("secret");
        assert!(!format!("{options:?}").contains("secret"));
        for options in [
            Options::new().timeout(Duration::ZERO),
            Options::new().connect_timeout(Duration::MAX),
            Options::new().cache(1),
            Options::new().read_ahead(1),
            Options::new().cache(1 << 20).read_ahead(1),
            Options::new().index(1 << 20),
            Options::new().cache(1 << 20).index(1),
            Options::new().user("ada"),
        ] {
            let error = options.checked("host:1").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption);
        }
    }
}
